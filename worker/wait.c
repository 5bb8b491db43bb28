#include "worker/wait.h"

#include <errno.h>
#include <time.h>

#include "common/clock.h"

#define NAP_MS 1000 /* at most, between two looks at a condition */
#define MS_NS INT64_C(1000000)

void wait_init(struct wait_point *w, struct rpc_queue *queue)
{
    *w = (struct wait_point){.queue = queue};
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&w->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_mutex_init(&w->mutex, NULL);
}

void wait_destroy(struct wait_point *w)
{
    pthread_cond_destroy(&w->changed);
    pthread_mutex_destroy(&w->mutex);
}

void wait_notify(struct wait_point *w)
{
    if (!atomic_load(&w->waiting))
        return;
    pthread_mutex_lock(&w->mutex);
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mutex);
}

void wait_begin_change(struct wait_point *w)
{
    pthread_mutex_lock(&w->mutex);
}

void wait_end_change(struct wait_point *w)
{
    if (atomic_load(&w->waiting))
        pthread_cond_broadcast(&w->changed);
    if (atomic_load(&w->polling))
        rpc_queue_wake(w->queue);
    pthread_mutex_unlock(&w->mutex);
}

void wait_fail(struct wait_point *w, const struct tally_error *why, int64_t grace_ms)
{
    pthread_mutex_lock(&w->mutex);
    if (!atomic_load(&w->failed)) {
        w->failure = *why;
        atomic_store(&w->failed_from, tally_now_ns() + grace_ms * MS_NS);
        atomic_store(&w->failed, true);
    }
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mutex);
}

void wait_interrupt(struct wait_point *w)
{
    pthread_mutex_lock(&w->mutex);
    atomic_store(&w->interrupted, true);
    pthread_cond_broadcast(&w->changed);
    pthread_mutex_unlock(&w->mutex);
    rpc_queue_wake(w->queue);
}

static struct timespec monotonic_at(int64_t ns)
{
    return (struct timespec){.tv_sec = (time_t)(ns / 1000000000), .tv_nsec = (long)(ns % 1000000000)};
}

/* Has it failed, so that it counts? */
static bool has_failed(struct wait_point *w, int64_t now)
{
    return atomic_load(&w->failed) && now >= atomic_load(&w->failed_from);
}

/* Sleeps until something changes, or the time has come. */
static void nap(struct wait_point *w, const struct wait_for *what, int64_t until_ns)
{
    struct timespec until = monotonic_at(until_ns);
    pthread_mutex_lock(&w->mutex);
    atomic_store(&w->waiting, true);
    if (!what->is_met(what->context) && !has_failed(w, tally_now_ns()) && !atomic_load(&w->interrupted))
        pthread_cond_timedwait(&w->changed, &w->mutex, &until);
    atomic_store(&w->waiting, false);
    pthread_mutex_unlock(&w->mutex);
}

static void doze(struct wait_point *w, const struct wait_for *what, bool poll, int64_t until_ns)
{
    if (!poll) {
        nap(w, what, until_ns);
        return;
    }
    atomic_store(&w->polling, what->outside);
    if (!what->is_met(what->context))
        rpc_queue_poll(w->queue, until_ns);
    atomic_store(&w->polling, false);
}

static tally_status fail_late(const struct wait_for *what, struct tally_error *err)
{
    char text[512];
    what->text(what->context, text, sizeof text);
    return tally_fail(err, TALLY_ETIMEDOUT, "%s waited %.3g s for %s", what->who, (double)what->limit_ms / 1000, text);
}

tally_status wait_until(struct wait_point *w, const struct wait_for *what, bool poll, struct tally_error *err)
{
    int64_t start = tally_now_ns(), now = start;
    int64_t limit = what->limit_ms ? start + what->limit_ms * MS_NS : INT64_MAX;
    for (;; now = tally_now_ns()) {
        if (atomic_load(&w->interrupted))
            return tally_fail(err, TALLY_ECANCELLED, "the job was ended");
        if (what->is_met(what->context))
            return TALLY_OK;
        if (has_failed(w, now)) {
            pthread_mutex_lock(&w->mutex);
            struct tally_error failure = w->failure;
            pthread_mutex_unlock(&w->mutex);
            return tally_fail(err, failure.code, "%s", failure.message);
        }
        if (now >= limit)
            return fail_late(what, err);
        int64_t until = now + NAP_MS * MS_NS;
        if (until > limit)
            until = limit;
        if (atomic_load(&w->failed) && until > atomic_load(&w->failed_from))
            until = atomic_load(&w->failed_from);
        doze(w, what, poll, until);
    }
}

bool wait_quietly(struct wait_point *w, bool (*is_met)(const void *context), const void *context, int64_t limit_ms)
{
    struct timespec until = monotonic_at(tally_now_ns() + limit_ms * MS_NS);
    int result = 0;
    pthread_mutex_lock(&w->mutex);
    atomic_store(&w->waiting, true);
    while (!is_met(context) && result != ETIMEDOUT)
        result = pthread_cond_timedwait(&w->changed, &w->mutex, &until);
    bool met = is_met(context);
    atomic_store(&w->waiting, false);
    pthread_mutex_unlock(&w->mutex);
    return met;
}
