#ifndef TESTS_WORKER_MEMORY_HUB_H
#define TESTS_WORKER_MEMORY_HUB_H
/*
 * A parameter server in this process, for tests: transports of several executors meet in it. It sums what they push
 * along the step's tree, applies SGD with the backend's own kernels, and writes new weights into every executor's
 * vector at once. Executors may run on one thread, one after the other, or on a thread each.
 */
#include "model/plan.h"
#include "worker/transport.h"

struct memory_hub;

struct memory_hub_options {
    uint32_t clients;
    bool poison;  /* destinations are handed out full of NaN: whatever backward does not write shows */
    bool scatter; /* every slice's destination in memory of its own, apart from the others' (where no row spans slices)
                   */
    bool discard; /* pushes are dropped, weights stay, versions go on: what the executor alone costs */
    int64_t wait_ms; /* for weights; 0: 20 s; negative: not at all */
};

/* Starts from the model's own initialisation. plan: any rank's; its backend is used here too. Lent: must outlive the
 * hub. */
tally_status memory_hub_open(const struct plan *plan, const struct memory_hub_options *options,
                             struct memory_hub **ret_hub, struct tally_error *err);
void memory_hub_close(struct memory_hub *hub);

/* The transport of a client, 0 to clients - 1, once each. weights: the executor's vector, filled here. */
struct transport *memory_hub_join(struct memory_hub *hub, uint32_t client, float *weights);
/* The same for a rank that has only its stage's slices: where each lies in weights, SIZE_MAX: not there (lent). */
struct transport *memory_hub_join_stage(struct memory_hub *hub, uint32_t client, float *weights,
                                        const size_t *slice_offsets);

const float *memory_hub_weights(const struct memory_hub *hub); /* flat */
/* Sums of a step that was applied. */
struct kernel_loss memory_hub_loss(const struct memory_hub *hub, uint64_t step);
/* The summed gradient of the last step that was applied, not divided. */
const float *memory_hub_gradient(const struct memory_hub *hub);
uint64_t memory_hub_version(const struct memory_hub *hub); /* that all slices have reached */
uint64_t memory_hub_pushes(const struct memory_hub *hub);
#endif
