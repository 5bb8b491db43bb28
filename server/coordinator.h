#ifndef SERVER_COORDINATOR_H
#define SERVER_COORDINATOR_H
/*
 * The coordinator: jobs and their store, the cluster's nodes, gangs, events and results. One libuv loop owns all of its
 * state; everything here runs on the loop's thread. Disk and weights are moved by threads of their own (store.h,
 * results.h).
 */
#include <stdint.h>
#include <uv.h>

#include "common/error.h"

struct coordinator;

struct coordinator_options {
    const char *listen;    /* unix:/path or host:port */
    const char *directory; /* of its state: made if it is missing */
    /* 0: as in common/limits.h. */
    int64_t lease_ms;
    int64_t start_timeout_ms, end_timeout_ms, last_reports_timeout_ms, reader_timeout_ms;
};

/*
 * Opens the store, takes up what is in it, and serves. options are copied. On failure err is one sentence for a person,
 * and the loop must still be run until it has no handles.
 */
tally_status coordinator_open(uv_loop_t *loop, const struct coordinator_options *options,
                              struct coordinator **ret_coordinator, struct tally_error *err);

/* The address that it listens on, with the port that was bound. */
const char *coordinator_address(const struct coordinator *coordinator);

/* Ends it within seconds: streams are told, what was decided is on disk. It is freed; on_closed(user) is the last
 * callback. Call once. */
void coordinator_close(struct coordinator *coordinator, void (*on_closed)(void *user), void *user);
#endif
