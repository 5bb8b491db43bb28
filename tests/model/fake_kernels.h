#ifndef TESTS_MODEL_FAKE_KERNELS_H
#define TESTS_MODEL_FAKE_KERNELS_H
/* A backend that prepares any operation and computes nothing: strides are padded and the bytes to save differ from one
 * description to the next. */
#include "kernels/kernels.h"

extern const struct kernels fake_kernels;

/* Operations that were prepared and not released. */
extern size_t fake_kernels_live;
/* > 0: the so many-th prepare from now on fails. */
extern size_t fake_kernels_fail_at;

const struct kernel_op_desc *fake_desc(const struct kernel_op *op);
#endif
