#ifndef MODEL_PLAN_BUILD_H
#define MODEL_PLAN_BUILD_H
/* The stages of plan_build, inside model/ alone. */
#include "model/plan.h"

/* Operations and tensors of the model, with strides, readers and who adds to whose gradient. No memory is placed,
 * nothing prepared. */
tally_status plan_lower(struct plan *plan, struct tally_error *err);

/* Segments, what crosses between them, and where this rank has each tensor. */
tally_status plan_cut_segments(struct plan *plan, struct tally_error *err);

/* The orders of this rank's stage, simulated, and the activation blocks that every segment needs. */
tally_status plan_schedule(struct plan *plan, struct tally_error *err);

/* The leaves of this rank in a step of so many. */
struct tree_node plan_share(const struct plan *plan, uint32_t leaves);

/* The parts of each operation's backward_weight, from the slices. */
tally_status plan_cut_parts(struct plan *plan, struct tally_error *err);

/* A place for every buffer. saved_bytes: of each operation and then the loss, for as many rows as any program has. */
tally_status plan_place(struct plan *plan, const size_t *saved_bytes, struct tally_error *err);

/* The buffers of partial sums that plan->rank needs in any step. */
uint32_t plan_levels(const struct plan *plan);

/* The tensor that holds t's memory. */
static inline int32_t plan_root(const struct plan *plan, int32_t t)
{
    return plan->tensors[t].view_of < 0 ? t : plan->tensors[t].view_of;
}
#endif
