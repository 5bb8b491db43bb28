#ifndef WORKER_EXECUTOR_LAYOUT_H
#define WORKER_EXECUTOR_LAYOUT_H
/* What the executor computes once from its plan: where everything lies, and which slices each part of backward writes
 * and completes. Private to the executor. */
#include "model/plan.h"

struct slice_range {
    uint32_t begin, end;
};

/* One call of backward_weight. */
struct executor_part {
    size_t row_begin, row_end;
    struct slice_range weight, bias; /* slices that it writes */
    struct slice_range done;         /* indices into done_slices: those that are whole after it */
};

struct executor_op {
    struct slice_range reads; /* slices with the operation's parameters */
    uint64_t version;         /* of the weights that it has waited for last; UINT64_MAX: none */
    bool wants_data;          /* backward_data is asked for */
    size_t part_begin, part_count;
};

/* The activation blocks of a segment. */
struct executor_blocks {
    size_t offset, stride; /* in the arena, bytes */
};

struct executor_layout {
    struct executor_op *ops;
    size_t part_count;
    struct executor_part *parts;
    uint32_t *done_slices;          /* as many as are this rank's */
    struct executor_blocks *blocks; /* by segment; 0 in another rank's */

    /* Offsets in the arena, each aligned to 64 bytes. */
    size_t weights, gradients, edges, workspace, levels; /* edges: two copies; levels 1, 2 ... */
    size_t edge_stride, level_stride;                    /* bytes from one copy or level to the next */
    size_t bytes;
};

tally_status executor_layout_init(struct executor_layout *layout, const struct plan *plan, struct tally_error *err);
void executor_layout_clear(struct executor_layout *layout);

/* The tensor whose memory this one has. */
const struct plan_tensor *executor_tensor(const struct plan *plan, int32_t tensor);
#endif
