#ifndef SERVER_SHARD_H
#define SERVER_SHARD_H
/*
 * A parameter-server shard: serves Parameters to workers, and takes the coordinator's orders (OpenJob, EndJob), which
 * whoever opened it hands in. Everything here belongs to the loop's thread; the slices, and the workers' streams, to a
 * data thread that nobody else sees.
 */
#include <stddef.h>
#include <uv.h>

#include "common/error.h"
#include "proto/cluster.pb-c.h"
#include "proto/rpc.h"

struct shard;

struct shard_events {
    /*
     * Something for the coordinator: Opened, JobFailed, Ended, Steps. TALLY_ENOMEM: there is no room now, the shard
     * offers it again; with any other error it is dropped. Not called for orders from before shard_lost.
     */
    tally_status (*send)(const Tally__V1__NodeMessage *message, void *user);
    /* After shard_stop, once: nothing of the shard runs any more, shard_free may be called. */
    void (*on_stopped)(void *user);
};

/*
 * Listens on address ("unix:/path" or "host:port"). events are copied. Errors: rpc_server_listen's, TALLY_ENOMEM,
 * TALLY_EIO (no thread). After a failure the loop must run once more to release handles.
 */
tally_status shard_open(uv_loop_t *loop, const char *address, const struct shard_events *events, void *user,
                        struct shard **ret_shard, struct tally_error *err);

/* A queue of the loop, for what else the process calls: the shard's data thread waits for the network for it too. All
 * on it must have ended before shard_stop. */
struct rpc_queue *shard_loop_queue(const struct shard *shard);

/* Where it listens, with the port that was bound. */
const char *shard_address(const struct shard *shard);

/*
 * An order of the coordinator: open_job and end_job, others are ignored. A job is built beside the loop and the other
 * jobs; then Opened, or JobFailed, is sent. An order to open a job that is held, with a later generation, keeps its
 * weights, and ends the streams of the older one. Ended is sent when the job's memory is free.
 */
void shard_order(struct shard *shard, const Tally__V1__Order *order);

/* The coordinator was lost: drops every job, without answers. */
void shard_lost(struct shard *shard, const char *reason);

/* What it does or waits for, in words, as of the last time this was asked. */
void shard_activity(struct shard *shard, char *text, size_t size);

/* Ends every job and stream, and stops listening; on_stopped follows. Once. */
void shard_stop(struct shard *shard, const char *reason);
/* After on_stopped. The loop must run once more to release handles. NULL is allowed. */
void shard_free(struct shard *shard);
#endif
