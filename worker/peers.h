#ifndef WORKER_PEERS_H
#define WORKER_PEERS_H
/*
 * How activations and their gradients go from worker to worker: a table of functions with an implementation over the Peers service and one in memory (tests).
 * A tensor is named by (step, micro_batch, edge, direction) and by who sends it; it is sent once. The edge is the plan's number of what crosses
 * (model/plan.h). Used by the compute thread alone.
 */
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"
#include "kernels/kernels.h"
#include "proto/peers.pb-c.h"

struct peer_tensor {
    uint64_t step; /* training: from 1; evaluation: the version of the weights, with `evaluation` */
    bool evaluation;
    uint32_t micro_batch;
    uint32_t edge;
    Tally__V1__Direction direction;
    size_t rows, columns, stride; /* f32; row r begins at data + r * stride */
    struct kernel_loss sums;      /* BACKWARD: the micro-batch's, from the stage that has the loss; elsewhere 0 */
};

struct peers {
    /* Sends data to a rank of the gang. data must stay unchanged until a later flush of this (rank, slot) returns; nothing is copied if stride == columns. Waits
     * while the receiver gives no room, with a deadline. */
    tally_status (*send)(struct peers *peers, uint32_t rank, const struct peer_tensor *tensor, const float *data, struct tally_error *err);
    /* Waits for the tensor of this name from a rank and writes it to data, rows x columns at tensor->stride; fills tensor->sums. Another shape than expected is
     * an error that names both. The wait has a deadline and names the worker, stage, micro-batch, edge, direction and step that it waits for. */
    tally_status (*receive)(struct peers *peers, uint32_t rank, struct peer_tensor *tensor, float *data, struct tally_error *err);
    /* Waits until all that was sent may be overwritten. */
    tally_status (*flush)(struct peers *peers, struct tally_error *err);
};
#endif
