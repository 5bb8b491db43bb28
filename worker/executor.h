#ifndef WORKER_EXECUTOR_H
#define WORKER_EXECUTOR_H
/*
 * Runs a plan's actions: forward and backward of micro-batches, with the gradients summed along the step's tree and
 * pushed slice by slice while the rest of backward runs. Everything it needs is allocated when it is opened; a step
 * allocates nothing. One thread uses it at a time.
 */
#include <stdatomic.h>

#include "model/dataset.h"
#include "model/order.h"
#include "model/plan.h"
#include "worker/peers.h"
#include "worker/transport.h"

struct executor;

/* Lent: they must outlive the executor. */
struct executor_inputs {
    const struct plan *plan;
    const struct dataset *train; /* NULL, with order and test, where the plan reads no samples */
    const struct dataset *test;  /* NULL: none */
    struct order *order;
    struct peers *peers;     /* NULL where the plan has no edges */
    const atomic_bool *stop; /* set: the next operation is not begun, TALLY_ECANCELLED. NULL: never */
};

tally_status executor_open(const struct executor_inputs *inputs, struct executor **ret_executor,
                           struct tally_error *err);
void executor_close(struct executor *executor);

/* The weights of this rank's stage, plan->flat_count floats in the backend's memory, 0 at first: slice s lies at
 * plan->slice_offsets[s]. The transport fills them (T1). */
float *executor_weights(struct executor *executor);

/* Runs this rank's actions of a step, from 1. Returns when its last gradient was given to the transport; without a leaf
 * in the step, at once. */
tally_status executor_step(struct executor *executor, struct transport *transport, uint64_t step,
                           struct tally_error *err);

/* The same for a list of one's own: actions of `step`, of a tree over batches_step(step).leaves leaves. */
tally_status executor_run(struct executor *executor, struct transport *transport, uint64_t step,
                          const struct action *actions, size_t count, struct tally_error *err);

/* An evaluation micro-batch was run in the last segment. */
typedef void (*executor_evaluated)(uint32_t micro_batch, const struct kernel_loss *loss, uint32_t samples, void *user);

/* Runs evaluation micro-batches `share` (of plan->evaluation) with version `version` of the weights through this rank's
 * segments. The rank that has the loss tells each result to `done`, in order. */
tally_status executor_evaluate_share(struct executor *executor, struct transport *transport, uint64_t version,
                                     struct tree_node share, executor_evaluated done, void *user,
                                     struct tally_error *err);

/* The same for one of them, on a rank that has all of the model. */
tally_status executor_evaluate(struct executor *executor, struct transport *transport, uint64_t version,
                               uint32_t micro_batch, struct kernel_loss *ret_loss, uint32_t *ret_samples,
                               struct tally_error *err);

/* Bytes that were allocated in the backend's memory. */
size_t executor_memory_bytes(const struct executor *executor);
#endif
