/*
 * DESIGN. Two threads meet here: the compute thread calls the transport's functions, the data thread runs the streams'
 * callbacks (they are one and the same where on_data_thread is set: then a wait polls the queue, else it sleeps:
 * wait.h).
 *
 * - slices[s].version: stored by the data thread after the slice's weights were copied, loaded by the compute thread
 *   before it reads them.
 * - slices[s].in_flight: set by the compute thread when it gives the slice's gradient to the stream, cleared by the
 *   release callback, on whatever thread that runs.
 *
 * The streams' queues hold every slice of their shard once, and a slice is in flight once: they are never full.
 */
#include "worker/transport_rpc.h"

#include <assert.h>
#include <inttypes.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/limits.h"
#include "proto/parameters.pb-c.h"
#include "worker/wait.h"

#define CREDITS 16          /* weights under way from a shard that may be buffered here: 16 MiB at most */
#define CLOSE_WAIT_MS 10000 /* a cancelled stream ends as soon as the data thread polls */

enum wait_kind { WAIT_NOTHING, WAIT_WEIGHTS, WAIT_RELEASE, WAIT_FLUSH, WAIT_CONNECTED, WAIT_FAILURE, WAIT_ENDED };

struct looking {
    struct transport_rpc *t;
    enum wait_kind kind;
    uint32_t slice;
    uint64_t version;
};

struct shard_link {
    struct transport_rpc *t;
    char *name;
    uint32_t begin, end; /* slices */
    struct rpc_channel *channel;
    struct rpc_stream *stream; /* good until it has ended */
    bool ended;                /* under the wait's mutex */
};

struct slice_state {
    struct transport_rpc *t;
    uint32_t shard;
    atomic_uint_least64_t version; /* one more than that of the weights here; 0: none yet */
    atomic_bool in_flight;
};

struct transport_rpc {
    struct transport transport;
    struct transport_rpc_options options; /* worker is ours; names and addresses are not used after open */
    struct rpc_queue *queue;
    float *gradients; /* what is pushed, as the weights lie */
    struct shard_link *links;
    struct slice_state *slices;
    atomic_uint_least64_t step; /* that is being computed */

    struct wait_point wait;
    atomic_uint pending;   /* gradients given to streams and not released */
    unsigned live_streams; /* under the wait's mutex */
    atomic_bool connected, done, closing;
    bool connecting; /* the task was posted */
    struct rpc_task connect_task;

    /* For people. */
    atomic_int wait_kind;
    atomic_uint wait_slice;
    atomic_uint_least64_t wait_version;
};

static struct transport_rpc *rpc_of(struct transport *transport)
{
    return (struct transport_rpc *)transport; /* its first member */
}

/* Where a slice lies in the weights and gradients; SIZE_MAX: nowhere. */
static size_t slice_offset(const struct transport_rpc_options *o, uint32_t slice)
{
    return o->slice_offsets ? o->slice_offsets[slice] : o->model->slices[slice].offset;
}

/* Has this worker any of these slices? */
static bool has_any(const struct transport_rpc_options *o, uint32_t begin, uint32_t end)
{
    for (uint32_t s = begin; s < end; s++)
        if (slice_offset(o, s) != SIZE_MAX)
            return true;
    return false;
}

/* Floats of all slices that it has. */
static size_t floats_here(const struct transport_rpc_options *o)
{
    size_t floats = 0;
    for (uint32_t s = 0; s < o->model->slice_count; s++)
        floats += slice_offset(o, s) == SIZE_MAX ? 0 : o->model->slices[s].count;
    return floats;
}

/* ---- waiting ---- */

static bool is_met(const void *context)
{
    const struct looking *w = context;
    const struct transport_rpc *t = w->t;
    switch (w->kind) {
    case WAIT_WEIGHTS:
        return atomic_load(&t->slices[w->slice].version) > w->version;
    case WAIT_RELEASE:
        return !atomic_load(&t->slices[w->slice].in_flight);
    case WAIT_FLUSH:
        return atomic_load(&t->pending) == 0;
    case WAIT_CONNECTED:
        return atomic_load(&t->connected);
    default:
        return false;
    }
}

/* What is waited for, as it stands behind "waits for". */
static void looking_text(const void *context, char *text, size_t size)
{
    const struct looking *w = context;
    const struct transport_rpc *t = w->t;
    char slice[256] = "", *shard = "";
    if (w->kind == WAIT_WEIGHTS || w->kind == WAIT_RELEASE || w->kind == WAIT_ENDED) {
        transport_slice_text(t->options.model, w->slice, slice, sizeof slice);
        shard = t->links[t->slices[w->slice].shard].name;
    }
    switch (w->kind) {
    case WAIT_WEIGHTS:
        snprintf(text, size, "%s of version %" PRIu64 " from %s", slice, w->version, shard);
        break;
    case WAIT_RELEASE:
        snprintf(text, size, "%s to take the last gradient of %s", shard, slice);
        break;
    case WAIT_FLUSH:
        snprintf(text, size, "the shards to take the last gradients");
        break;
    case WAIT_ENDED:
        snprintf(text, size, "the end of the stream to %s", shard);
        break;
    case WAIT_CONNECTED:
        snprintf(text, size, "the data thread to open the streams");
        break;
    default:
        snprintf(text, size, "the end of the job");
    }
}

static tally_status wait_for(const struct looking *w, bool poll, struct tally_error *err)
{
    struct transport_rpc *t = w->t;
    struct wait_for what = {.is_met = is_met,
                            .text = looking_text,
                            .context = w,
                            .who = t->options.worker,
                            .limit_ms = w->kind == WAIT_FAILURE ? 0 : t->options.wait_ms,
                            .outside = w->kind == WAIT_RELEASE || w->kind == WAIT_FLUSH};
    atomic_store(&t->wait_slice, w->slice);
    atomic_store(&t->wait_version, w->version);
    atomic_store(&t->wait_kind, w->kind);
    tally_status status = wait_until(&t->wait, &what, poll, err);
    atomic_store(&t->wait_kind, WAIT_NOTHING);
    return status;
}

/* A wait of the thread that computes. */
static tally_status compute_wait(const struct looking *w, struct tally_error *err)
{
    return wait_for(w, w->t->options.on_data_thread, err);
}

/* ---- weights arrive (data thread) ---- */

static void on_refusal(struct shard_link *link, const Tally__V1__Refusal *refusal)
{
    struct transport_rpc *t = link->t;
    struct tally_error err;
    char slice[256] = "a slice that does not exist";
    if (refusal->slice < t->options.model->slice_count)
        transport_slice_text(t->options.model, refusal->slice, slice, sizeof slice);
    tally_fail(&err, TALLY_ESTATE, "%s refused the gradient of %s for step %" PRIu64 ", micro-batches %u to %u: %s",
               link->name, slice, refusal->step, refusal->leaf_begin, refusal->leaf_end, refusal->reason);
    wait_fail(&t->wait, &err, 0);
}

/* NULL: the update is as it must be. */
static const char *update_fault(const struct shard_link *link, const Tally__V1__Update *update, size_t bytes)
{
    const struct transport_rpc *t = link->t;
    if (update->job != t->options.job || update->generation != t->options.generation)
        return "of another job or generation";
    if (update->slice < link->begin || update->slice >= link->end)
        return "of a slice that is not its own";
    if (slice_offset(&t->options, update->slice) == SIZE_MAX)
        return "of a slice that was not asked for";
    if (bytes != t->options.model->slices[update->slice].count * sizeof(float))
        return "of a wrong size";
    return NULL;
}

static void on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct shard_link *link = user;
    struct transport_rpc *t = link->t;
    const Tally__V1__Update *update = (const Tally__V1__Update *)message->header;
    if (update->refusal) {
        on_refusal(link, update->refusal);
        return;
    }
    size_t bytes = rpc_payload_bytes(message->payload);
    const char *fault = update_fault(link, update, bytes);
    if (fault) {
        struct tally_error err;
        tally_fail(&err, TALLY_EINVAL, "%s sent weights %s (slice %u, version %" PRIu64 ", %zu bytes)", link->name,
                   fault, update->slice, update->version, bytes);
        wait_fail(&t->wait, &err, 0);
        return;
    }
    struct slice_state *slice = &t->slices[update->slice];
    if (update->version + 1 > atomic_load(&slice->version)) { /* else it is here, and may be being read */
        rpc_payload_copy(message->payload, 0, bytes, t->options.weights + slice_offset(&t->options, update->slice));
        atomic_store(&slice->version, update->version + 1);
        wait_notify(&t->wait);
    }
    rpc_stream_grant(stream, 1);
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct shard_link *link = user;
    struct transport_rpc *t = link->t;
    if (!atomic_load(&t->closing) && !atomic_load(&t->done)) {
        struct tally_error err;
        tally_fail(&err, end->code ? end->code : TALLY_EUNAVAIL, "the stream to %s was lost at step %" PRIu64 ": %s",
                   link->name, (uint64_t)atomic_load(&t->step), end->code ? end->message : "the shard ended it");
        wait_fail(&t->wait, &err, 0);
    }
    wait_begin_change(&t->wait);
    link->ended = true;
    t->live_streams--;
    wait_end_change(&t->wait); /* t may be freed from here on */
}

/* ---- streams ---- */

/* The slices that this worker has, as ranges. range and pointers: room for one a slice; NULL: counts alone. */
static size_t list_ranges(const struct transport_rpc_options *o, Tally__V1__SliceRange *range,
                          Tally__V1__SliceRange **pointers)
{
    size_t n = 0;
    for (uint32_t s = 0, end; s < o->model->slice_count; s = end) {
        for (end = s; end < o->model->slice_count && slice_offset(o, end) != SIZE_MAX; end++)
            ;
        if (end == s) {
            end++;
            continue;
        }
        if (range) {
            range[n] = (Tally__V1__SliceRange)TALLY__V1__SLICE_RANGE__INIT;
            range[n].begin = s;
            range[n].end = end;
            pointers[n] = &range[n];
        }
        n++;
    }
    return n;
}

static tally_status say_hello(struct shard_link *link, Tally__V1__SliceRange **slices, size_t count,
                              struct tally_error *err)
{
    const struct transport_rpc_options *o = &link->t->options;
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    version.major = TALLY_PROTOCOL_MAJOR;
    version.minor = TALLY_PROTOCOL_MINOR;
    Tally__V1__Hello hello = TALLY__V1__HELLO__INIT;
    hello.version = &version;
    hello.rank = o->rank;
    hello.worker = (char *)o->worker;
    hello.n_slices = count;
    hello.slices = slices;
    Tally__V1__Push push = TALLY__V1__PUSH__INIT;
    push.job = o->job;
    push.generation = o->generation;
    push.hello = &hello;
    tally_status status = rpc_stream_send(link->stream, &push.base, err);
    return status == TALLY_ECANCELLED ? TALLY_OK : status; /* on_end tells why */
}

static tally_status send_hello(struct shard_link *link, struct tally_error *err)
{
    const struct transport_rpc_options *o = &link->t->options;
    if (!o->slice_offsets)
        return say_hello(link, NULL, 0, err);
    size_t count = list_ranges(o, NULL, NULL);
    Tally__V1__SliceRange *ranges = calloc(count + 1, sizeof *ranges), **pointers = calloc(count + 1, sizeof *pointers);
    tally_status status = ranges && pointers ? TALLY_OK : tally_fail(err, TALLY_ENOMEM, "no memory for a Hello");
    if (!status) {
        list_ranges(o, ranges, pointers);
        status = say_hello(link, pointers, count, err);
    }
    free(ranges);
    free(pointers);
    return status;
}

static tally_status open_stream(struct shard_link *link, struct tally_error *err)
{
    struct transport_rpc *t = link->t;
    size_t bytes = 0;
    for (uint32_t s = link->begin; s < link->end; s++)
        bytes += t->options.model->slices[s].count * sizeof(float);
    static const struct rpc_stream_events events = {.on_message = on_message, .on_end = on_end};
    struct rpc_stream_options options = {
        .credits = CREDITS, .max_queued_messages = link->end - link->begin + 8, .max_queued_bytes = bytes + (1u << 20)};
    tally_status status = rpc_stream_open(link->channel, t->queue, &tally__v1__parameters__descriptor, "Exchange",
                                          &events, link, &options, &link->stream, err);
    if (status)
        return status;
    rpc_stream_ref(link->stream);
    wait_begin_change(&t->wait);
    t->live_streams++;
    wait_end_change(&t->wait);
    return send_hello(link, err);
}

/* On the data thread. */
static void connect_all(struct rpc_task *task)
{
    struct transport_rpc *t = (struct transport_rpc *)((char *)task - offsetof(struct transport_rpc, connect_task));
    struct tally_error err;
    tally_status status = TALLY_OK;
    for (size_t i = 0; i < t->options.shards && !status; i++)
        if (t->links[i].channel)
            status = open_stream(&t->links[i], &err);
    if (status)
        wait_fail(&t->wait, &err, 0);
    wait_begin_change(&t->wait);
    atomic_store(&t->connected, true);
    wait_end_change(&t->wait);
}

tally_status transport_rpc_connect(struct transport_rpc *t, struct tally_error *err)
{
    t->connect_task.run = connect_all;
    t->connecting = true;
    rpc_queue_post(t->queue, &t->connect_task);
    return wait_for(&(struct looking){.t = t, .kind = WAIT_CONNECTED}, false, err);
}

/* ---- the transport's functions (compute thread) ---- */

static tally_status wait_slices(struct transport *transport, uint32_t begin, uint32_t end, uint64_t version,
                                struct tally_error *err)
{
    struct transport_rpc *t = rpc_of(transport);
    atomic_store_explicit(&t->step, version + 1, memory_order_relaxed);
    for (uint32_t s = begin; s < end; s++) {
        struct looking w = {t, WAIT_WEIGHTS, s, version};
        if (!is_met(&w)) {
            tally_status status = compute_wait(&w, err);
            if (status)
                return status;
        }
        uint64_t here = atomic_load(&t->slices[s].version) - 1;
        if (here != version)
            return tally_fail(err, TALLY_EINTERNAL,
                              "slice %u is at version %" PRIu64 " already, while version %" PRIu64 " is needed", s,
                              here, version);
    }
    return TALLY_OK;
}

static tally_status destination(struct transport *transport, uint32_t slice, float **ret_gradient,
                                struct tally_error *err)
{
    struct transport_rpc *t = rpc_of(transport);
    struct looking w = {.t = t, .kind = WAIT_RELEASE, .slice = slice};
    if (!is_met(&w)) {
        tally_status status = compute_wait(&w, err);
        if (status)
            return status;
    }
    *ret_gradient = t->gradients + slice_offset(&t->options, slice);
    return TALLY_OK;
}

/* The gradient's bytes have left. Any thread. */
static void on_release(void *user)
{
    struct slice_state *slice = user;
    bool in_flight = atomic_load(&slice->in_flight); /* first: all that push() wrote before is seen from here on */
    assert(in_flight);
    (void)in_flight;
    struct transport_rpc *t = slice->t;
    wait_begin_change(&t->wait);
    atomic_store(&slice->in_flight, false);
    atomic_fetch_sub(&t->pending, 1);
    wait_end_change(&t->wait); /* t may be freed from here on */
}

static tally_status push(struct transport *transport, const struct transport_push *push, struct tally_error *err)
{
    struct transport_rpc *t = rpc_of(transport);
    struct slice_state *slice = &t->slices[push->slice];
    struct shard_link *link = &t->links[slice->shard];
    assert(!atomic_load(&slice->in_flight));
    Tally__V1__Push header = TALLY__V1__PUSH__INIT;
    header.job = t->options.job;
    header.generation = t->options.generation;
    header.step = push->step;
    header.leaf_begin = push->node.begin;
    header.leaf_end = push->node.end;
    header.slice = push->slice;
    header.weight = push->sums.weight;
    header.loss_sum = push->sums.loss_sum;
    header.correct = push->sums.correct;
    atomic_store(&slice->in_flight, true);
    atomic_fetch_add(&t->pending, 1);
    size_t bytes = t->options.model->slices[push->slice].count * sizeof(float);
    tally_status status =
        rpc_stream_send_payload(link->stream, &header.base, push->gradient, bytes, on_release, slice, err);
    if (status) {
        atomic_store(&slice->in_flight, false);
        atomic_fetch_sub(&t->pending, 1);
        if (status == TALLY_ECANCELLED) /* on_end tells why */
            return compute_wait(&(struct looking){.t = t, .kind = WAIT_ENDED, .slice = push->slice}, err);
        return status;
    }
    /* Nobody else polls: what is queued behind another message would lie there until the next wait. */
    if (t->options.on_data_thread && rpc_stream_queued_messages(link->stream) > 1)
        rpc_queue_poll(t->queue, 0);
    return TALLY_OK;
}

static tally_status flush(struct transport *transport, struct tally_error *err)
{
    return compute_wait(&(struct looking){.t = rpc_of(transport), .kind = WAIT_FLUSH}, err);
}

/* ---- life ---- */

static tally_status open_links(struct transport_rpc *t, struct tally_error *err)
{
    const struct transport_rpc_options *o = &t->options;
    for (size_t i = 0; i < o->shards; i++) {
        struct shard_link *link = &t->links[i];
        link->t = t;
        model_shard_slices(o->model, (uint32_t)o->shards, (uint32_t)i, &link->begin, &link->end);
        link->name = strdup(o->shard_names[i]);
        if (!link->name)
            return tally_fail(err, TALLY_ENOMEM, "no memory for the transport");
        for (uint32_t s = link->begin; s < link->end; s++) {
            t->slices[s].t = t;
            t->slices[s].shard = (uint32_t)i;
        }
        /* A shard's bytes go over a socket of their own. */
        struct rpc_channel_options options = {.own_connection = true};
        tally_status status = has_any(o, link->begin, link->end)
                                  ? rpc_channel_new(o->shard_addresses[i], &options, &link->channel, err)
                                  : TALLY_OK;
        if (status) {
            tally_error_prefix(err, "shard %s", link->name);
            return status;
        }
    }
    return TALLY_OK;
}

tally_status transport_rpc_open(const struct transport_rpc_options *options, struct transport_rpc **ret_transport,
                                struct tally_error *err)
{
    if (!options->kernels->host_memory)
        return tally_fail(err, TALLY_EUNSUPPORTED, "backend %s keeps gradients where RPC cannot read them",
                          options->kernels->name);
    if (options->shards == 0)
        return tally_fail(err, TALLY_EINVAL, "a job needs a shard");
    struct transport_rpc *t = calloc(1, sizeof *t);
    if (!t)
        return tally_fail(err, TALLY_ENOMEM, "no memory for the transport");
    t->transport = (struct transport){wait_slices, destination, push, flush};
    t->options = *options;
    t->options.wait_ms = options->wait_ms ? options->wait_ms : TRANSPORT_WAIT_MS;
    t->options.worker = strdup(options->worker);
    t->queue = data_thread_queue(options->thread);
    wait_init(&t->wait, t->queue);
    t->links = calloc(options->shards, sizeof *t->links);
    t->slices = calloc(options->model->slice_count + 1, sizeof *t->slices);
    void *gradients = NULL;
    tally_status status =
        t->options.worker && t->links && t->slices
            ? options->kernels->alloc(options->backend, (floats_here(options) + 1) * sizeof(float), &gradients, err)
            : tally_fail(err, TALLY_ENOMEM, "no memory for the transport");
    t->gradients = gradients;
    if (!status)
        status = open_links(t, err);
    if (status) {
        transport_rpc_close(t);
        return status;
    }
    *ret_transport = t;
    return TALLY_OK;
}

struct transport *transport_rpc_transport(struct transport_rpc *t)
{
    return &t->transport;
}

void transport_rpc_interrupt(struct transport_rpc *t)
{
    wait_interrupt(&t->wait);
}

void transport_rpc_done(struct transport_rpc *t)
{
    atomic_store(&t->done, true);
}

tally_status transport_rpc_watch(struct transport_rpc *t, struct tally_error *err)
{
    return wait_for(&(struct looking){.t = t, .kind = WAIT_FAILURE}, false, err);
}

static bool is_connected(const void *context)
{
    const struct transport_rpc *t = context;
    return !t->connecting || atomic_load(&t->connected);
}

static bool has_ended(const void *context)
{
    const struct transport_rpc *t = context;
    return !t->live_streams && !atomic_load(&t->pending);
}

/* Cancels what is open, and waits until no callback can come any more. */
static bool end_streams(struct transport_rpc *t)
{
    atomic_store(&t->closing, true);
    if (!wait_quietly(&t->wait, is_connected, t, CLOSE_WAIT_MS))
        return false;
    for (size_t i = 0; i < t->options.shards; i++)
        if (t->links[i].stream)
            rpc_stream_cancel(t->links[i].stream);
    return wait_quietly(&t->wait, has_ended, t, CLOSE_WAIT_MS);
}

void transport_rpc_close(struct transport_rpc *t)
{
    if (!t)
        return;
    /* Else a late callback would write to memory that has gone, the weights' too: better no worker than that. */
    bool ended = !t->links || end_streams(t);
    tally_check(ended);
    for (size_t i = 0; t->links && i < t->options.shards; i++) {
        rpc_stream_unref(t->links[i].stream);
        rpc_channel_free(t->links[i].channel);
        free(t->links[i].name);
    }
    if (t->gradients)
        t->options.kernels->free(t->options.backend, t->gradients);
    wait_destroy(&t->wait);
    free((char *)t->options.worker);
    free(t->links);
    free(t->slices);
    free(t);
}

void transport_rpc_activity(struct transport_rpc *t, char *text, size_t size)
{
    struct looking w = {.t = t,
                        .kind = (enum wait_kind)atomic_load(&t->wait_kind),
                        .slice = atomic_load(&t->wait_slice),
                        .version = atomic_load(&t->wait_version)};
    if (size)
        text[0] = 0;
    if (w.kind == WAIT_NOTHING || w.kind == WAIT_FAILURE || w.slice >= t->options.model->slice_count)
        return;
    char what[512];
    looking_text(&w, what, sizeof what);
    snprintf(text, size, "waits for %s", what);
}
