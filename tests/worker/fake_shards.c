#include "tests/worker/fake_shards.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/limits.h"
#include "proto/parameters.pb-c.h"
#include "proto/rpc.h"

#define SHARDS_MAX 8
#define STREAMS_MAX 16
#define RANGES_MAX 16

struct fake_stream {
    struct fake_shard *shard;
    struct rpc_stream *stream; /* NULL: ended */
    uint32_t rank;
    bool greeted;
    size_t ranges; /* that it wants; 0: all */
    uint32_t begin[RANGES_MAX], end[RANGES_MAX];
};

struct fake_shard {
    struct fake_shards *all;
    struct rpc_server *server;
    uint32_t index, begin, end;
    struct fake_stream streams[STREAMS_MAX];
    unsigned stream_count;
    bool fault_done, silent;
};

struct fake_shards {
    struct test_rank rank; /* for a plan and a backend of their own */
    const struct plan *plan;
    struct fake_shards_options options;
    struct memory_hub *hub;
    struct transport **clients; /* of the hub, by rank */
    float **weights;            /* of the clients; the first one's are what is sent */
    uint64_t *sent;             /* by slice: version */
    struct rpc_queue *queue;
    pthread_t thread;
    atomic_bool stop;
    atomic_uint hellos;
    unsigned stopped;
    char directory[64];
    char *names[SHARDS_MAX], *addresses[SHARDS_MAX];
    struct fake_shard shards[SHARDS_MAX];
};

static void no_release(void *copy)
{
    free(copy);
}

static bool wants(const struct fake_stream *s, uint32_t slice)
{
    bool wanted = s->ranges == 0;
    for (size_t i = 0; i < s->ranges; i++)
        wanted |= slice >= s->begin[i] && slice < s->end[i];
    return wanted;
}

static void send_slice(struct fake_stream *s, uint32_t slice)
{
    if (!wants(s, slice))
        return;
    struct fake_shards *all = s->shard->all;
    const struct slice *range = &all->plan->model->slices[slice];
    size_t bytes = range->count * sizeof(float);
    float *copy = malloc(bytes);
    memcpy(copy, memory_hub_weights(all->hub) + range->offset, bytes);
    Tally__V1__Update update = TALLY__V1__UPDATE__INIT;
    update.job = all->options.job;
    update.generation = all->options.generation;
    update.version = all->sent[slice];
    update.slice = slice;
    if (s->shard->index + 1 == all->options.shards && !s->shard->fault_done &&
        all->sent[slice] >= all->options.at_step) {
        s->shard->fault_done = true;
        if (all->options.fault == SHARD_SENDS_WRONG_SIZE)
            bytes -= 4;
        else if (all->options.fault == SHARD_SENDS_WRONG_SLICE)
            update.slice = (uint32_t)all->plan->model->slice_count;
        else if (all->options.fault == SHARD_SENDS_WRONG_JOB)
            update.job++;
        else
            s->shard->fault_done = false;
    }
    struct tally_error err;
    tally_status status = rpc_stream_send_payload(s->stream, &update.base, copy, bytes, no_release, copy, &err);
    if (status)
        free(copy);
    if (status && status != TALLY_ECANCELLED && all->options.fault != SHARD_ENDS)
        abort();
}

static void send_to_all(struct fake_shard *shard, uint32_t slice)
{
    for (unsigned i = 0; i < shard->stream_count; i++) {
        struct fake_stream *s = &shard->streams[i];
        if (!s->stream || !s->greeted)
            continue;
        send_slice(s, slice);
        if (shard->all->options.fault == SHARD_REPEATS && s->stream)
            send_slice(s, slice);
    }
}

static void refuse(struct fake_stream *s, const Tally__V1__Push *push)
{
    Tally__V1__Refusal refusal = TALLY__V1__REFUSAL__INIT;
    refusal.code = TALLY__V1__REFUSAL__CODE__WRONG_STEP;
    refusal.reason = "it does not like it";
    refusal.step = push->step;
    refusal.leaf_begin = push->leaf_begin;
    refusal.leaf_end = push->leaf_end;
    refusal.slice = push->slice;
    Tally__V1__Update update = TALLY__V1__UPDATE__INIT;
    update.refusal = &refusal;
    (void)rpc_stream_send(s->stream, &update.base, NULL);
}

/* true: the push is dealt with. */
static bool misbehave(struct fake_stream *s, const Tally__V1__Push *push)
{
    struct fake_shard *shard = s->shard;
    const struct fake_shards_options *o = &shard->all->options;
    if (shard->silent)
        return true;
    if (shard->index + 1 != o->shards || push->step != o->at_step || shard->fault_done)
        return false;
    switch (o->fault) {
    case SHARD_REFUSES:
        refuse(s, push);
        break;
    case SHARD_ENDS:
        rpc_stream_finish(s->stream, TALLY_EUNAVAIL, "it is tired");
        break;
    case SHARD_GOES_SILENT:
        shard->silent = true;
        break;
    default:
        return false;
    }
    shard->fault_done = true;
    return true;
}

static void take_push(struct fake_stream *s, const Tally__V1__Push *push, struct rpc_payload *payload)
{
    struct fake_shards *all = s->shard->all;
    const struct model *model = all->plan->model;
    if (push->job != all->options.job || push->generation != all->options.generation || push->slice < s->shard->begin ||
        push->slice >= s->shard->end || rpc_payload_bytes(payload) != model->slices[push->slice].count * sizeof(float))
        abort();
    struct transport *client = all->clients[s->rank];
    struct tally_error err;
    float *gradient;
    if (client->destination(client, push->slice, &gradient, &err) ||
        rpc_payload_copy_floats(payload, gradient, model->slices[push->slice].count, &err))
        abort();
    struct transport_push taken = {.step = push->step,
                                   .node = {push->leaf_begin, push->leaf_end},
                                   .slice = push->slice,
                                   .sums = {push->loss_sum, push->weight, push->correct},
                                   .gradient = gradient};
    if (client->push(client, &taken, &err)) {
        fprintf(stderr, "%s\n", err.message);
        abort();
    }
    /* Does the hub hold the next version now? Then this was the last leaf. */
    if (!client->wait_slices(client, push->slice, push->slice + 1, push->step, NULL)) {
        all->sent[push->slice] = push->step;
        send_to_all(s->shard, push->slice);
    }
}

static void on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct fake_stream *s = user;
    const Tally__V1__Push *push = (const Tally__V1__Push *)message->header;
    rpc_stream_grant(stream, 1);
    if (!s->greeted) {
        if (!push->hello || push->hello->version->major != TALLY_PROTOCOL_MAJOR || rpc_payload_bytes(message->payload))
            abort();
        s->greeted = true;
        s->rank = push->hello->rank;
        s->ranges = push->hello->n_slices;
        if (s->ranges > RANGES_MAX)
            abort();
        for (size_t i = 0; i < s->ranges; i++) {
            s->begin[i] = push->hello->slices[i]->begin;
            s->end[i] = push->hello->slices[i]->end;
        }
        atomic_fetch_add(&s->shard->all->hellos, 1);
        for (uint32_t slice = s->shard->begin; slice < s->shard->end; slice++)
            send_slice(s, slice);
    } else if (!misbehave(s, push)) {
        take_push(s, push, message->payload);
    }
}

static void on_half_close(struct rpc_stream *stream, void *user)
{
    (void)user;
    rpc_stream_finish(stream, TALLY_OK, NULL);
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    (void)end;
    ((struct fake_stream *)user)->stream = NULL;
}

static void on_open(struct rpc_stream *stream, void *user)
{
    struct fake_shard *shard = user;
    if (shard->stream_count == STREAMS_MAX)
        abort();
    struct fake_stream *s = &shard->streams[shard->stream_count++];
    *s = (struct fake_stream){.shard = shard, .stream = stream};
    static const struct rpc_stream_events events = {
        .on_message = on_message, .on_half_close = on_half_close, .on_end = on_end};
    struct rpc_stream_options options = {
        .credits = 8, .max_queued_messages = 4096, .max_queued_bytes = (size_t)1 << 30};
    rpc_stream_accept(stream, &events, s, &options);
}

static void on_stopped(void *user)
{
    ((struct fake_shards *)user)->stopped++;
}

static void *serve(void *arg)
{
    struct fake_shards *all = arg;
    while (!atomic_load(&all->stop))
        rpc_queue_poll(all->queue, tally_now_ns() + 100000000);
    for (uint32_t i = 0; i < all->options.shards; i++)
        rpc_server_stop(all->shards[i].server, 0, on_stopped, all);
    while (all->stopped < all->options.shards)
        rpc_queue_poll(all->queue, tally_now_ns() + 100000000);
    return NULL;
}

static void start_shard(struct fake_shards *all, uint32_t index)
{
    static const struct rpc_method methods[] = {{.name = "Exchange", .on_open = on_open}};
    struct fake_shard *shard = &all->shards[index];
    struct rpc_service service = {&tally__v1__parameters__descriptor, all->queue, methods, 1, shard};
    struct tally_error err;
    char text[128];
    shard->all = all;
    shard->index = index;
    model_shard_slices(all->plan->model, all->options.shards, index, &shard->begin, &shard->end);
    snprintf(text, sizeof text, "s%u", index);
    all->names[index] = strdup(text);
    snprintf(text, sizeof text, "unix:%s/s%u.sock", all->directory, index);
    all->addresses[index] = strdup(text);
    if (rpc_server_new(all->queue, NULL, &shard->server, &err) || rpc_server_add(shard->server, &service, &err) ||
        rpc_server_listen(shard->server, text, NULL, 0, &err) || rpc_server_start(shard->server, &err))
        fail_msg("%s", err.message);
}

struct fake_shards *fake_shards_start(const struct test_job *job, const struct fake_shards_options *options)
{
    struct fake_shards *all = calloc(1, sizeof *all);
    assert_non_null(all);
    assert_true(options->shards <= SHARDS_MAX);
    test_rank_open(job, 0, options->workers, NULL, &all->rank);
    const struct plan *plan = all->plan = all->rank.plan;
    all->options = *options;
    struct tally_error err;
    struct memory_hub_options hub = {.clients = options->workers, .wait_ms = -1};
    if (memory_hub_open(plan, &hub, &all->hub, &err) || rpc_data_queue_new(&all->queue, &err))
        fail_msg("%s", err.message);
    all->sent = calloc(plan->model->slice_count, sizeof *all->sent);
    all->clients = calloc(options->workers, sizeof *all->clients);
    all->weights = calloc(options->workers, sizeof *all->weights);
    for (uint32_t i = 0; i < options->workers; i++) {
        all->weights[i] = calloc(plan->model->flat_count, sizeof(float));
        all->clients[i] = memory_hub_join(all->hub, i, all->weights[i]);
    }
    snprintf(all->directory, sizeof all->directory, "/tmp/tally-shards-XXXXXX");
    assert_non_null(mkdtemp(all->directory));
    for (uint32_t i = 0; i < options->shards; i++)
        start_shard(all, i);
    assert_int_equal(pthread_create(&all->thread, NULL, serve, all), 0);
    return all;
}

void fake_shards_stop(struct fake_shards *all)
{
    atomic_store(&all->stop, true);
    rpc_queue_wake(all->queue);
    pthread_join(all->thread, NULL);
    for (uint32_t i = 0; i < all->options.shards; i++) {
        rpc_server_free(all->shards[i].server);
        free(all->names[i]);
        free(all->addresses[i]);
    }
    rpc_queue_free(all->queue);
    memory_hub_close(all->hub);
    test_rank_close(&all->rank);
    for (uint32_t i = 0; i < all->options.workers; i++)
        free(all->weights[i]);
    free(all->weights);
    free(all->clients);
    free(all->sent);
    rmdir(all->directory);
    free(all);
}

char *const *fake_shards_names(const struct fake_shards *all)
{
    return all->names;
}

char *const *fake_shards_addresses(const struct fake_shards *all)
{
    return all->addresses;
}

const struct memory_hub *fake_shards_hub(const struct fake_shards *all)
{
    return all->hub;
}

unsigned fake_shards_hellos(const struct fake_shards *all)
{
    return atomic_load(&all->hellos);
}
