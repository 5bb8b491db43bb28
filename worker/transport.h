#ifndef WORKER_TRANSPORT_H
#define WORKER_TRANSPORT_H
/*
 * How a worker's gradients leave it and its weights arrive: the executor knows this table of functions and nothing of
 * what stands behind it (RPC to shards; memory in tests). All functions are called by the compute thread alone.
 *
 * - T1 Weights land in place, in the flat vector that the executor reads, slice by slice. The executor reads a slice of
 *   version v only between wait_slices(.., v) and its last push of step v + 1: a slice's new weights may land from that
 *   push on.
 * - T2 Gradients are summed where the transport wants them: destination() names the memory that a slice's sum for the
 *   node that is being computed has, from the first write until push(). Padding between parameters is never written: it
 *   must be 0 there. Where one row of a parameter spans slices, these slices' destinations follow each other as they do
 *   in the flat vector.
 * - T3 The memory behind push() belongs to the transport until destination() of the same slice returns it.
 * - T4 Functions wait only with a deadline, which names what was waited for, and return TALLY_ECANCELLED soon after the
 *   job ended.
 */
#include <stdint.h>

#include "common/error.h"
#include "kernels/kernels.h"
#include "model/model.h"
#include "model/tree.h"

/* The sum over a node's samples of the gradient of one slice, with what rides in its header. */
struct transport_push {
    uint64_t step; /* from 1 */
    struct tree_node node;
    uint32_t slice;
    struct kernel_loss sums; /* of the node, added in tree order */
    const float *gradient;   /* what destination() gave */
};

struct transport {
    /* Waits until slices [begin, end) hold the weights of exactly this version. */
    tally_status (*wait_slices)(struct transport *transport, uint32_t begin, uint32_t end, uint64_t version,
                                struct tally_error *err);
    tally_status (*destination)(struct transport *transport, uint32_t slice, float **ret_gradient,
                                struct tally_error *err);
    tally_status (*push)(struct transport *transport, const struct transport_push *push, struct tally_error *err);
    /* Waits until everything pushed has left this process. */
    tally_status (*flush)(struct transport *transport, struct tally_error *err);
};

/* "slice 7 (fc1.weight)" or "slice 0 (0.weight .. 2.bias)" into text, at most size bytes. Returns text. */
const char *transport_slice_text(const struct model *model, uint32_t slice, char *text, size_t size);
#endif
