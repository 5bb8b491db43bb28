#ifndef TESTS_KERNELS_REFERENCE_H
#define TESTS_KERNELS_REFERENCE_H
/*
 * Every operation once more, in double and in the plainest loops, to compare the backends with. Tensors are (rows,
 * elements) without strides.
 */
#include "kernels/kernels.h"

/* Elements of a sample. */
size_t reference_x_elements(const struct kernel_op_desc *desc);
size_t reference_y_elements(const struct kernel_op_desc *desc); /* 0: a loss */
size_t reference_weight_elements(const struct kernel_op_desc *desc);
size_t reference_bias_elements(const struct kernel_op_desc *desc);

struct reference {
    double *x[KERNEL_INPUTS_MAX];
    double *weight, *bias;
    const void *targets; /* cross_entropy: int64_t; mse: float */
    double *y;           /* forward writes */
    size_t *winner;      /* of y's elements where there is a max pool: forward writes, backward reads */
    double loss_sum, loss_weight;

    double *dy;
    double *dx[KERNEL_INPUTS_MAX]; /* backward sets all of the following (never accumulates) */
    double *dweight, *dbias;
};

void reference_forward(const struct kernel_op_desc *desc, struct reference *r);
void reference_backward(const struct kernel_op_desc *desc, struct reference *r);
#endif
