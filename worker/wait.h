#ifndef WORKER_WAIT_H
#define WORKER_WAIT_H
/*
 * How the thread that computes waits for what another thread brings about: with a deadline, and until the job is ended
 * or has failed. A wait either sleeps, or polls the data queue (of work that runs on the data thread itself).
 *
 * What a wait looks at is atomic, and is stored before wait_notify; a waiter says that it waits before it looks: one of
 * the two sees the other.
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "common/error.h"
#include "proto/rpc.h"

struct wait_point {
    struct rpc_queue *queue; /* a data queue */
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    atomic_bool waiting; /* somebody sleeps on `changed` */
    atomic_bool polling; /* somebody polls, for what may come about outside of the poll */
    atomic_bool failed, interrupted;
    struct tally_error failure;       /* under the mutex */
    atomic_int_least64_t failed_from; /* monotonic ns: a failure counts from then on only */
};

void wait_init(struct wait_point *w, struct rpc_queue *queue);
void wait_destroy(struct wait_point *w);

/* After something that a wait may look at has changed, inside rpc_queue_poll. */
void wait_notify(struct wait_point *w);
/* Around a change by any thread, that need not be inside rpc_queue_poll, and after which w may be freed: whoever waits
 * for it quietly. Calls nothing of rpc but rpc_queue_wake. */
void wait_begin_change(struct wait_point *w);
void wait_end_change(struct wait_point *w);
/* Ends every wait, now and later, with this reason; the first one counts. After grace_ms only: meanwhile somebody may
 * say why this had to come. */
void wait_fail(struct wait_point *w, const struct tally_error *why, int64_t grace_ms);
/* Ends every wait, now and later, with TALLY_ECANCELLED. */
void wait_interrupt(struct wait_point *w);

struct wait_for {
    bool (*is_met)(const void *context);
    void (*text)(const void *context, char *text, size_t size); /* what is waited for, behind "waited 10 s for" */
    const void *context;
    const char *who;  /* waits */
    int64_t limit_ms; /* 0: for ever, that is until the job is ended */
    bool outside;     /* it may come about outside of rpc_queue_poll: a poll is then woken by wait_end_change */
};

/* TALLY_ETIMEDOUT: "WHO waited 10 s for TEXT". poll: on the data thread. */
tally_status wait_until(struct wait_point *w, const struct wait_for *what, bool poll, struct tally_error *err);

/* Sleeps, until is_met or the time is up, whatever failed. Returns is_met. */
bool wait_quietly(struct wait_point *w, bool (*is_met)(const void *context), const void *context, int64_t limit_ms);
#endif
