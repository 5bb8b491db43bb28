#ifndef CLUSTER_NODE_H
#define CLUSTER_NODE_H
/*
 * A node's side of the Cluster service, the same for workers and shards: it registers with the coordinator, beats,
 * watches its lease, hands orders over, and registers again as a new incarnation when the coordinator was lost.
 * Everything here runs on the loop's thread.
 */
#include "common/error.h"
#include "proto/cluster.pb-c.h"
#include "proto/rpc.h"

struct node;

struct node_options {
    Tally__V1__Role role;
    const char *name;        /* "w2" */
    const char *coordinator; /* address to join */
    const char *address;     /* where this node's own service listens */
    const char *backend;     /* workers: "cpu"; NULL otherwise */
    const char *isa;         /* workers: the best that this machine runs; NULL otherwise */
    int64_t join_timeout_ms; /* give up when the coordinator cannot be reached for so long (at the start, or after it
                                was lost); 0: keep trying */
};

struct node_events {
    /* The lease is held. Called again after each new registration. */
    void (*on_registered)(struct node *node, void *user);
    /* open_job, assign, end_job and shutdown; the others are handled inside. */
    void (*on_order)(struct node *node, const Tally__V1__Order *order, void *user);
    /* The stream or the lease was lost: drop every job now, without an answer. Registration is tried again by itself.
     */
    void (*on_lost)(struct node *node, const struct tally_error *why, void *user);
    /* It cannot go on: refused (with the coordinator's reason), or not reached within join_timeout_ms. The last
     * callback. */
    void (*on_failed)(struct node *node, const struct tally_error *why, void *user);
    /* What it is doing now, in words, for the next heartbeat: writes at most size bytes. */
    void (*activity)(struct node *node, char *text, size_t size, void *user);
};

/* queue: a loop queue. options and events are copied. */
tally_status node_open(struct rpc_queue *queue, uv_loop_t *loop, const struct node_options *options,
                       const struct node_events *events, void *user, struct node **ret_node, struct tally_error *err);
/* Sends to the coordinator. Nothing is taken with TALLY_EUNAVAIL (the node is not registered) and TALLY_ENOMEM (so much
 * is queued that the coordinator must be stuck; its lease decides). */
tally_status node_send(struct node *node, const Tally__V1__NodeMessage *message, struct tally_error *err);
/* Leaves the cluster: the stream ends, on_closed(user) is called when nothing of the node runs any more; it is freed
 * then. NULL is not allowed. */
void node_close(struct node *node, void (*on_closed)(void *user), void *user);
#endif
