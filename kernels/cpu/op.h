#ifndef KERNELS_CPU_OP_H
#define KERNELS_CPU_OP_H
/* A prepared operation of the cpu backend, and what the files of its kinds share. */
#include "kernels/cpu/level.h"
#include "kernels/kernels.h"

struct kernel_backend {
    const struct cpu_level *level;
};

struct cpu_op_functions {
    /* Checks op->desc and fills in the rest of op; what it allocates goes to op->plan. */
    tally_status (*prepare)(struct kernel_op *op, struct tally_error *err);
    void (*forward)(const struct kernel_op *op, const struct kernel_args *args);
    void (*backward_data)(const struct kernel_op *op, const struct kernel_args *args);
    void (*backward_weight)(const struct kernel_op *op, const struct kernel_args *args, size_t row_begin,
                            size_t row_end); /* NULL: no parameters */
    void (*destroy)(void *plan);             /* NULL: nothing to free */
};

struct kernel_op {
    struct kernel_op_desc desc;
    const struct cpu_level *level;
    const struct cpu_op_functions *functions;
    void *plan; /* the kind's own */
    size_t saved_bytes, workspace_bytes;
    char formulation[160];
};

extern const struct cpu_op_functions cpu_linear, cpu_conv2d, cpu_max_pool2d, cpu_average_pool2d, cpu_elementwise,
    cpu_add, cpu_cross_entropy, cpu_mse;

/* *ret = the product of the factors, or TALLY_EINVAL where it exceeds TALLY_ELEMENTS_MAX or a factor is 0. what: "the
 * input", for the message. */
tally_status cpu_elements(const char *what, const size_t *factors, size_t count, size_t *ret, struct tally_error *err);
#define CPU_ELEMENTS(what, ret, err, ...)                                                                              \
    cpu_elements(what, (const size_t[]){__VA_ARGS__}, sizeof((const size_t[]){__VA_ARGS__}) / sizeof(size_t), ret, err)

/* That the strides hold samples of so many elements, and that rows of them can be addressed. */
tally_status cpu_check_strides(const struct kernel_op_desc *desc, size_t x_elements, size_t y_elements,
                               struct tally_error *err);

/* That a window is usable and what it gives: *ret_out of an input of in (rounding up for ceil). */
tally_status cpu_check_window(const char *what, const struct kernel_window *window, const size_t in[2],
                              const size_t out[2], bool ceil_allowed, struct tally_error *err);

/* Workspace is cut into parts of whole cache lines. */
static inline size_t cpu_line(size_t floats)
{
    return (floats + 15) / 16 * 16;
}
#endif
