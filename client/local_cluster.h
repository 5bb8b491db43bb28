#ifndef CLIENT_LOCAL_CLUSTER_H
#define CLIENT_LOCAL_CLUSTER_H
/*
 * A private cluster: a coordinator, shards and workers as child processes that listen on UNIX sockets in a folder of
 * their own. They are in a session of their own, so that Ctrl-C reaches the client alone, and end when the client does,
 * however it ends.
 */
#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "common/error.h"

struct local_cluster;

struct local_cluster_options {
    uint32_t workers, shards;
    const char *log_dir; /* NAME.log of each process; must exist */
    const bool *cancel;  /* may be NULL; where a callback of the loop sets it, starting ends with TALLY_ECANCELLED */
};

/* A process ended that was not told to. `how` is a sentence: "worker w1 was killed by signal 9 (Killed)". */
typedef void (*local_cluster_exit)(const char *how, void *user);

/* Starts the processes and waits until the coordinator takes connections (at most 10 s). Call before rpc_global_init:
 * children are forked from a process without threads. Errors: a binary that is not beside this one, a process that
 * cannot start or ends at once, with its last words. */
tally_status local_cluster_start(uv_loop_t *loop, const struct local_cluster_options *options,
                                 local_cluster_exit on_exit, void *user, struct local_cluster **ret_cluster,
                                 struct tally_error *err);

/* "unix:/.../coordinator.sock" */
const char *local_cluster_address(const struct local_cluster *cluster);

/* How a process ended unasked, the first one; NULL: all run. */
const char *local_cluster_first_exit(const struct local_cluster *cluster);

/* When processes are waited for: what can be seen of one that is not there yet, "worker w1 was stopped by a signal".
 * false: nothing. */
bool local_cluster_suspect(const struct local_cluster *cluster, char *text, size_t size);

/* Kills every process, as when somebody does not want to wait for local_cluster_stop. Accepts NULL. */
void local_cluster_kill(struct local_cluster *cluster);

/* Asks every process to end (SIGTERM), kills after grace_ms what is left, and runs the loop until all are gone; then
 * removes the folder and frees. Accepts NULL. */
void local_cluster_stop(struct local_cluster *cluster, int64_t grace_ms);
#endif
