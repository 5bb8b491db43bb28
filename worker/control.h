#ifndef WORKER_CONTROL_H
#define WORKER_CONTROL_H
/*
 * A worker's control plane: its place in the cluster, and the job that it runs, if any. Everything here runs on the
 * loop's thread, and nothing of it waits for a computation.
 */
#include <uv.h>

#include "common/error.h"

struct control;

struct control_options {
    const char *name;   /* "w0" */
    const char *listen; /* unix:/path or host:port: health, and the peers' service */
    const char *coordinator;
    const char *backend;     /* "cpu" */
    int64_t join_timeout_ms; /* as node_options */
};

/* Listens, and begins to join. TALLY_EUNSUPPORTED: no such backend in this build. Errors say what and why. */
tally_status control_open(uv_loop_t *loop, const struct control_options *options, struct control **ret_control,
                          struct tally_error *err);
/* Drops the job, leaves the cluster and stops listening; the loop runs out then. May be called again. */
void control_leave(struct control *control);
/* After the loop has run out. Returns TALLY_OK, or why it had to leave. */
tally_status control_close(struct control *control, struct tally_error *err);

/* Where it listens, with the port that was bound. */
const char *control_address(const struct control *control);
#endif
