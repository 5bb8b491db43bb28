#ifndef WORKER_PEERS_RPC_H
#define WORKER_PEERS_RPC_H
/* Peers over the Peers service: a stream to each rank that this one sends to, and one from each that sends to it. */
#include "model/plan.h"
#include "worker/data_thread.h"
#include "worker/peers.h"
#include "worker/peers_service.h"

struct peers_rpc;

/*
 * How long this worker may wait for one tensor, or for room. A slow stage is not a fault, and one that died or stands
 * still is the coordinator's to find (by its lease): this only ends what nobody would end.
 */
#define PEERS_WAIT_MS 600000

struct peers_rpc_options {
    uint64_t job, generation;
    const struct plan *plan; /* lent */
    char *const *names;      /* of the gang's workers, by rank; copied */
    char *const *addresses;  /* likewise; used when it is opened */
    struct peers_service *service;
    struct data_thread *thread; /* whose queue the streams and the service are on */
    bool on_data_thread; /* the peers' functions are called on the data thread (inside its work), and poll while they
                            wait */
    int64_t wait_ms;     /* 0: PEERS_WAIT_MS */
};

/* Any thread. All that a step needs is allocated here. */
tally_status peers_rpc_open(const struct peers_rpc_options *options, struct peers_rpc **ret_peers,
                            struct tally_error *err);
/* Not on the data thread: opens the streams, and takes those of others. What the network says comes out of the waits.
 */
tally_status peers_rpc_connect(struct peers_rpc *p, struct tally_error *err);
struct peers *peers_rpc_peers(struct peers_rpc *p);

/* Any thread: ends every wait, now and later, with TALLY_ECANCELLED. */
void peers_rpc_interrupt(struct peers_rpc *p);
/* All has been received and has left: from now on a stream may end without its being a failure. */
void peers_rpc_done(struct peers_rpc *p);
/* Not on the data thread, when nobody uses it any more: ends the streams and waits until they have. NULL is allowed. */
void peers_rpc_close(struct peers_rpc *p);

/* Any thread: what it waits for now, in words ("has waited 2.5 s for activation 3 of step 41 from w1
 * (stage 0) (edge 2, the output of conv1)"), or "". */
void peers_rpc_activity(struct peers_rpc *p, char *text, size_t size);
#endif
