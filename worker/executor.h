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
#include "worker/transport.h"

struct executor;

/* Lent: they must outlive the executor. */
struct executor_inputs {
    const struct plan *plan;
    const struct dataset *train;
    const struct dataset *test; /* NULL: none */
    struct order *order;
    const atomic_bool *stop; /* set: the next operation is not begun, TALLY_ECANCELLED. NULL: never */
};

tally_status executor_open(const struct executor_inputs *inputs, struct executor **ret_executor,
                           struct tally_error *err);
void executor_close(struct executor *executor);

/* The flat vector of the weights, plan->model->flat_count floats in the backend's memory, 0 at first. The transport
 * fills it (T1). */
float *executor_weights(struct executor *executor);

/* Runs this rank's actions of a step, from 1. Returns when its last gradient was given to the transport; without a leaf
 * in the step, at once. */
tally_status executor_step(struct executor *executor, struct transport *transport, uint64_t step,
                           struct tally_error *err);

/* The same for a list of one's own: actions of `step`, of a tree over batches_step(step).leaves leaves. */
tally_status executor_run(struct executor *executor, struct transport *transport, uint64_t step,
                          const struct action *actions, size_t count, struct tally_error *err);

/* Loss and correct answers of evaluation micro-batch `micro_batch` (of plan->evaluation) with version `version` of the
 * weights. */
tally_status executor_evaluate(struct executor *executor, struct transport *transport, uint64_t version,
                               uint32_t micro_batch, struct kernel_loss *ret_loss, uint32_t *ret_samples,
                               struct tally_error *err);

/* Bytes that were allocated in the backend's memory. */
size_t executor_memory_bytes(const struct executor *executor);
#endif
