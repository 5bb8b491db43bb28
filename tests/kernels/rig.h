#ifndef TESTS_KERNELS_RIG_H
#define TESTS_KERNELS_RIG_H
/*
 * One operation on one backend with all its buffers, and the same operation in double (reference.h): random inputs, NaN
 * between the rows, and what stands around every buffer is checked to be left alone.
 */
#include "kernels/kernels.h"
#include "tests/kernels/reference.h"

struct rig {
    const struct kernels *kernels;
    struct kernel_backend *backend;
    struct kernel_stream *stream;
    struct kernel_op *op;
    struct kernel_op_desc desc;
    size_t x_elements, y_elements, weight_elements, bias_elements, weight_rows;
    struct kernel_args args;
    struct kernel_loss loss;
    struct reference ref;
    float *dy_kept; /* args.dy as it was made: a call may overwrite it */
};

/* Numbers from a seed: any *state to begin with. */
uint64_t rig_random(uint64_t *state);
size_t rig_between(uint64_t *state, size_t low, size_t high); /* both included */
float rig_uniform(uint64_t *state);                           /* -1 .. 1 */

/* misalign: floats by which every buffer of floats is moved off its alignment. Fails the running test where prepare
 * fails. */
struct rig *rig_open(const char *isa, const struct kernel_op_desc *desc, uint64_t seed, size_t misalign);
void rig_close(struct rig *rig);

/* Fills in windows' output sizes of a conv2d (and its pool) or pool2d; strides as row_stride gives them for isa. */
void rig_complete(struct kernel_op_desc *desc, bool ceil_mode);

void rig_forward(struct rig *rig);
/* Restores dy, then data and weight (in parts of part_rows weight rows; 0: all at once). */
void rig_backward(struct rig *rig, bool accumulate, size_t part_rows);

/* Runs the reference and fails the test where a value differs by more than tolerance * (1 + |expected|), or a margin
 * was written. */
void rig_check_forward(struct rig *rig, double tolerance);
void rig_check_backward(struct rig *rig, double tolerance, bool accumulate);
void rig_check_margins(struct rig *rig);
/* A digest of everything that the operation wrote: y, dx, dweight, dbias, loss. */
uint64_t rig_digest(const struct rig *rig);

/* The instruction sets that this machine has, best first; NULL ends it. */
const char *const *rig_levels(void);
#endif
