#ifndef WORKER_PEERS_H
#define WORKER_PEERS_H
/*
 * How activations and their gradients go from worker to worker: a table of functions with an implementation over the
 * Peers service and one in memory (tests). A tensor is named by (step, evaluation, micro_batch, edge, direction) and by
 * who sends it; it is sent once. The edge is the plan's number of what crosses (plan->edges); plan_peer_room() says how
 * many may be on their way, so that nothing can stop. Used by the compute thread alone.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"
#include "kernels/kernels.h"
#include "proto/peers.pb-c.h"

struct peer_tensor {
    uint64_t step; /* training: from 1; evaluation: the version of the weights */
    bool evaluation;
    uint32_t micro_batch; /* leaf of the step; of the evaluation */
    uint32_t edge;
    Tally__V1__Direction direction;
    size_t rows, columns, stride; /* f32; row r begins at data + r * stride. What lies between is nobody's */
    struct kernel_loss sums;      /* BACKWARD: the micro-batch's, from the stage that has the loss; elsewhere 0 */
};

struct peers {
    /* Sends data to a rank of the gang. data must stay unchanged until flush(*ret_ticket) has returned; nothing is
     * copied if stride == columns. Waits while the receiver gives no room, with a deadline. Tickets count from 1. */
    tally_status (*send)(struct peers *peers, uint32_t rank, const struct peer_tensor *tensor, const float *data,
                         uint64_t *ret_ticket, struct tally_error *err);
    /* Waits for the tensor of this name from a rank and writes it to data, rows x columns at tensor->stride; fills
     * tensor->sums. Another shape than expected is an error that names both. The wait has a deadline and names the
     * worker, stage, micro-batch, edge, direction and step that it waits for. It arrives while others are computed
     * with: only what is not there yet is waited for. */
    tally_status (*receive)(struct peers *peers, uint32_t rank, struct peer_tensor *tensor, float *data,
                            struct tally_error *err);
    /* Waits until what was sent with this ticket or an earlier one may be overwritten; UINT64_MAX: all of it. It must
     * not take the receiver's receive() for that: what was sent within plan_peer_room() gets out of the sender's memory
     * by itself. */
    tally_status (*flush)(struct peers *peers, uint64_t ticket, struct tally_error *err);
};
#endif
