#ifndef WORKER_TRANSPORT_RPC_H
#define WORKER_TRANSPORT_RPC_H
/* The transport over the Parameters service: one Exchange stream to each shard that owns slices. */
#include <stdatomic.h>

#include "worker/data_thread.h"
#include "worker/transport.h"

struct transport_rpc;

/*
 * How long a step may wait for one thing. A peer that is slow is not a fault, and one that died is the coordinator's to
 * find (by its lease): this only ends what nobody would end.
 */
#define TRANSPORT_WAIT_MS 600000

struct transport_rpc_options {
    uint64_t job, generation;
    const char *worker; /* this one's name */
    uint32_t rank;
    const struct model *model;
    const struct kernels *kernels; /* of backend */
    struct kernel_backend *backend;
    float *weights; /* where new weights are written: slice s at slice_offsets[s] */
    /* Of a stage's worker, by slice (plan->slice_offsets, lent): SIZE_MAX: not its own. NULL: it has all, as they lie
     * in the model. */
    const size_t *slice_offsets;
    size_t shards;
    char *const *shard_names;
    char *const *shard_addresses;
    struct data_thread *thread; /* whose queue the streams are on */
    bool on_data_thread; /* the transport's functions are called on the data thread (inside its work), and poll while
                            they wait */
    int64_t wait_ms;     /* 0: TRANSPORT_WAIT_MS */
};

/* Any thread. Strings are copied; the rest is lent. TALLY_EUNSUPPORTED: the backend's memory is not the host's. */
tally_status transport_rpc_open(const struct transport_rpc_options *options, struct transport_rpc **ret_transport,
                                struct tally_error *err);
/* By the thread that will use it, first: opens the streams and says Hello. What the network says comes out of the
 * waits. */
tally_status transport_rpc_connect(struct transport_rpc *t, struct tally_error *err);
struct transport *transport_rpc_transport(struct transport_rpc *t);

/* Any thread: ends every wait, now and later, with TALLY_ECANCELLED. */
void transport_rpc_interrupt(struct transport_rpc *t);

/* The last step's pushes have left: from now on a stream may end without its being a failure (a refusal still is). */
void transport_rpc_done(struct transport_rpc *t);
/* Not on the data thread: waits for a failure, or the interrupt (TALLY_ECANCELLED). */
tally_status transport_rpc_watch(struct transport_rpc *t, struct tally_error *err);

/* Not on the data thread, when nobody uses it any more: ends the streams and waits until they have. NULL is allowed. */
void transport_rpc_close(struct transport_rpc *t);

/* Any thread: what it waits for now, in words ("waits for slice 7 (fc1.weight) of version 41 from s1"), or "". */
void transport_rpc_activity(struct transport_rpc *t, char *text, size_t size);
#endif
