#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>

#include "server/coordinator_internal.h"

/*
 * A watcher has a place in its job's events, nothing more. It is served from the job's tail, or, further back, from
 * pages of the store; whatever of these cannot be sent for want of room is dropped or kept as one page, and looked up
 * again when the reader has caught up. So a slow reader costs a page.
 */

#define PAGE_BYTES (512u << 10)
#define QUEUED_BYTES (1u << 20)
#define QUEUED_MESSAGES 16

struct watcher {
    struct watcher *previous, *next;
    struct coordinator *coordinator;
    struct rpc_stream *stream;
    struct job *job;
    uint64_t after;           /* the last event that was sent */
    struct event_batch *page; /* read from the store and not yet sent */
    uv_work_t work;
    bool reading; /* work is under way: the watcher outlives its stream until it is done */
    bool gone;    /* the stream has ended */
    bool finished, blocked;
    struct reader reader;
    struct event_batch *read_first; /* the work's result */
    struct tally_error read_err;
};

static void drop_list(struct event_batch *first)
{
    while (first) {
        struct event_batch *next = first->next;
        event_batch_unref(first);
        first = next;
    }
}

static void watcher_free(struct watcher *w)
{
    struct coordinator *c = w->coordinator;
    drop_list(w->page);
    if (w->previous)
        w->previous->next = w->next;
    else
        c->watchers = w->next;
    if (w->next)
        w->next->previous = w->previous;
    c->watcher_count--;
    free(w);
}

static void finish(struct watcher *w, tally_status status, const char *text)
{
    w->finished = true;
    rpc_stream_finish(w->stream, status, text);
}

/* ---- pages ---- */

static void serve(struct watcher *w);

static void read_work(uv_work_t *work)
{
    struct watcher *w = work->data;
    store_read_events(w->coordinator->store, w->job->record->id, w->after, PAGE_BYTES, &w->read_first, &w->read_err);
}

static void read_done(uv_work_t *work, int cancelled)
{
    struct watcher *w = work->data;
    struct coordinator *c = w->coordinator;
    (void)cancelled; /* nobody cancels it */
    w->reading = false;
    w->page = w->read_first;
    w->read_first = NULL;
    if (w->gone)
        watcher_free(w);
    else if (w->read_err.code != TALLY_OK)
        finish(w, w->read_err.code, w->read_err.message);
    else if (!w->page)
        finish(w, TALLY_EINTERNAL, "events are missing in the store");
    else
        serve(w);
    coordinator_less_busy(c);
}

static void read_page(struct watcher *w)
{
    struct coordinator *c = w->coordinator;
    w->work.data = w;
    w->read_err = (struct tally_error){0};
    /* read_work reads job->record->id, which never changes, and w->after, which does not while this is under way. */
    if (uv_queue_work(c->loop, &w->work, read_work, read_done) != 0) {
        finish(w, TALLY_EINTERNAL, "the events cannot be read");
        return;
    }
    w->reading = true;
    c->busy++;
}

/* ---- serving ---- */

/* The batch that holds the next event; NULL: the store has it. */
static const struct event_batch *next_batch(struct watcher *w)
{
    while (w->page && w->page->last <= w->after) {
        struct event_batch *done = w->page;
        w->page = done->next;
        event_batch_unref(done);
    }
    if (w->page)
        return w->page;
    const struct event_batch *batch = w->job->tail;
    if (!batch || batch->first > w->after + 1)
        return NULL;
    while (batch && batch->last <= w->after)
        batch = batch->next;
    return batch;
}

/* false: there is no room now. */
static bool send_batch(struct watcher *w, const struct event_batch *batch)
{
    const uint8_t *data = NULL;
    size_t bytes = event_batch_after(batch, w->after, &data);
    if (bytes <= 1) {
        finish(w, TALLY_EINTERNAL, "events are damaged in the store");
        return false;
    }
    Tally__V1__Events message;
    ProtobufCMessageUnknownField field;
    struct tally_error err;
    event_batch_message(data, bytes, &message, &field);
    tally_status status = rpc_stream_send(w->stream, &message.base, &err);
    w->blocked = status == TALLY_ENOMEM;
    if (status == TALLY_OK)
        w->after = batch->last;
    else if (status != TALLY_ENOMEM && status != TALLY_ECANCELLED)
        finish(w, status, err.message);
    return status == TALLY_OK;
}

static void serve(struct watcher *w)
{
    const struct job *job = w->job;
    while (!w->gone && !w->finished && !w->reading && !w->blocked) {
        if (w->after >= job->visible_seq) {
            if (job_phase_is_terminal(job->phase) && job->visible_seq == job->last_seq)
                finish(w, TALLY_OK, NULL);
            return;
        }
        const struct event_batch *batch = next_batch(w);
        if (!batch)
            read_page(w);
        else if (!send_batch(w, batch))
            return;
    }
}

void watch_wake(struct coordinator *c, struct job *job)
{
    for (struct watcher *w = c->watchers, *next; w; w = next) {
        next = w->next;
        if (w->job == job)
            serve(w);
    }
}

/* ---- the stream ---- */

static void on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    (void)stream;
    (void)message;
    (void)user; /* the one request was given to watch_request */
}

static void on_writable(struct rpc_stream *stream, void *user)
{
    (void)stream;
    struct watcher *w = user;
    w->blocked = false;
    serve(w);
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    (void)end;
    struct watcher *w = user;
    w->gone = true;
    if (!w->reading)
        watcher_free(w);
}

void watch_request(struct rpc_stream *stream, const struct rpc_message *request, void *user)
{
    static const struct rpc_stream_events events = {
        .on_message = on_message, .on_writable = on_writable, .on_end = on_end};
    static const struct rpc_stream_options options = {.max_queued_messages = QUEUED_MESSAGES,
                                                      .max_queued_bytes = QUEUED_BYTES};
    struct coordinator *c = user;
    const Tally__V1__WatchRequest *watch = (const Tally__V1__WatchRequest *)request->header;
    struct job *job = coordinator_find_job(c, watch->job);
    struct tally_error err = {0};
    struct watcher *w = NULL;
    if (c->closing)
        tally_fail(&err, TALLY_EUNAVAIL, "the coordinator is ending");
    else if (!job)
        tally_fail(&err, TALLY_ENOTFOUND, "there is no job %" PRIu64, watch->job);
    else if (c->watcher_count >= TALLY_WATCHERS_MAX)
        tally_fail(&err, TALLY_ENOMEM, "%zu clients watch jobs, as many as this coordinator serves", c->watcher_count);
    else if ((w = calloc(1, sizeof *w)) == NULL)
        tally_fail(&err, TALLY_ENOMEM, "no memory for another watcher");
    if (!w) {
        rpc_stream_finish_error(stream, &err);
        return;
    }
    w->coordinator = c;
    w->stream = stream;
    w->job = job;
    w->after = watch->after;
    w->next = c->watchers;
    if (w->next)
        w->next->previous = w;
    c->watchers = w;
    c->watcher_count++;
    rpc_stream_accept(stream, &events, w, &options);
    serve(w);
}

void watch_tick(struct coordinator *c, int64_t now_ns)
{
    for (struct watcher *w = c->watchers; w; w = w->next) {
        if (!w->gone && coordinator_reader_is_stuck(c, &w->reader, w->stream, w->after, now_ns))
            rpc_stream_cancel(w->stream);
    }
}

void watch_close(struct coordinator *c)
{
    for (struct watcher *w = c->watchers; w; w = w->next) {
        if (!w->gone && !w->finished)
            finish(w, TALLY_EUNAVAIL, "the coordinator is ending");
    }
}
