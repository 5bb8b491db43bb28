#include "server/results.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/file.h"
#include "common/limits.h"
#include "common/message_copy.h"
#include "common/safetensors.h"
#include "model/model.h"
#include "proto/parameters.pb-c.h"

/*
 * DESIGN
 * Everything but `cancelled` belongs to the thread from results_start until it posts `task`. The thread polls its own
 * data queue; a cancel sets the flag and wakes the queue.
 */

/* How long shards may take to reach a version in common, and the pauses between questions. */
#define SETTLE_NS INT64_C(10000000000)
#define PAUSE_MIN_MS 10
#define PAUSE_MAX_MS 320
#define HOLDING_TIMEOUT_MS 10000
#define FETCH_CREDITS 8

struct shard {
    struct results *owner;
    char *name, *address;
    struct rpc_channel *channel;
    uint32_t slice_begin, slice_end;
    struct rpc_stream *call; /* Holding, under way */
    bool answered;
    uint64_t version, oldest;
};

struct results {
    uint64_t job, generation, version;
    Tally__V1__JobSpec *spec;
    Tally__V1__DataFacts *facts;
    size_t shard_count;
    struct shard *shards;
    char *path;
    struct rpc_queue *queue, *loop_queue;
    results_done done;
    void *user;
    pthread_t thread;
    atomic_bool cancelled;
    struct rpc_task task;
    struct results_outcome outcome;

    struct model *model;
    struct safetensors_writer *writer;
    struct sha256 *sum;
    size_t param; /* the first that is not wholly written */
    /* the fetch under way */
    struct shard *from;
    struct rpc_stream *stream;
    uint64_t fetched; /* version */
    uint32_t next_slice;
    int64_t heard_ns;
    bool ended;
    struct tally_error failure;
};

static bool is_cancelled(struct results *r)
{
    return atomic_load(&r->cancelled);
}

static tally_status fail_cancelled(struct tally_error *err)
{
    return tally_fail(err, TALLY_ECANCELLED, "the collection of the weights was called off");
}

/* ---- what the shards hold ---- */

static void on_holding(const struct tally_error *end, const struct rpc_message *reply, void *user)
{
    struct shard *shard = user;
    struct results *r = shard->owner;
    shard->call = NULL;
    if (end->code != TALLY_OK) {
        if (r->failure.code == TALLY_OK)
            tally_fail(&r->failure, end->code, "shard %s does not say what it holds: %s", shard->name, end->message);
        return;
    }
    const Tally__V1__HoldingReply *holding = (const Tally__V1__HoldingReply *)reply->header;
    shard->answered = true;
    shard->version = holding->version;
    shard->oldest = holding->oldest_version;
    if (holding->generation != r->generation && r->failure.code == TALLY_OK)
        tally_fail(&r->failure, TALLY_ESTATE, "shard %s holds generation %" PRIu64 " of the job, expected %" PRIu64,
                   shard->name, holding->generation, r->generation);
}

static size_t pending_calls(const struct results *r)
{
    size_t count = 0;
    for (size_t i = 0; i < r->shard_count; i++)
        count += r->shards[i].call != NULL;
    return count;
}

static tally_status ask_holding(struct results *r, struct tally_error *err)
{
    Tally__V1__HoldingRequest request = TALLY__V1__HOLDING_REQUEST__INIT;
    struct rpc_stream_options options = {.timeout_ms = HOLDING_TIMEOUT_MS};
    request.job = r->job;
    tally_status status = TALLY_OK;
    r->failure = (struct tally_error){0};
    for (size_t i = 0; i < r->shard_count && status == TALLY_OK; i++) {
        struct shard *shard = &r->shards[i];
        shard->answered = false;
        if (shard->slice_begin < shard->slice_end)
            status = rpc_unary(shard->channel, r->queue, &tally__v1__parameters__descriptor, "Holding", &request.base,
                               &options, on_holding, shard, &shard->call, err);
    }
    bool told = false;
    while (pending_calls(r) > 0) {
        if (!told && (status != TALLY_OK || is_cancelled(r))) {
            told = true;
            for (size_t i = 0; i < r->shard_count; i++) {
                if (r->shards[i].call)
                    rpc_stream_cancel(r->shards[i].call);
            }
        }
        rpc_queue_poll(r->queue, tally_now_ns() + 1000000000);
    }
    if (status != TALLY_OK)
        return status;
    if (is_cancelled(r))
        return fail_cancelled(err);
    if (r->failure.code != TALLY_OK && err)
        *err = r->failure;
    return r->failure.code;
}

/* The newest version that every shard holds whole. */
static tally_status choose_version(const struct results *r, uint64_t *ret_version, struct tally_error *err)
{
    uint64_t version = r->version;
    for (size_t i = 0; i < r->shard_count; i++) {
        if (r->shards[i].answered && r->shards[i].version < version) {
            if (r->version != RESULTS_ANY_VERSION)
                return tally_fail(err, TALLY_ESTATE,
                                  "shard %s holds version %" PRIu64 " of the weights, expected %" PRIu64,
                                  r->shards[i].name, r->shards[i].version, r->version);
            version = r->shards[i].version;
        }
    }
    if (version == RESULTS_ANY_VERSION)
        version = 0; /* a model without parameters */
    for (size_t i = 0; i < r->shard_count; i++) {
        if (r->shards[i].answered && r->shards[i].oldest > version)
            return tally_fail(err, TALLY_ESTATE,
                              "the shards hold no version in common: %s has dropped version %" PRIu64,
                              r->shards[i].name, version);
    }
    *ret_version = version;
    return TALLY_OK;
}

/* ---- the file ---- */

static tally_status open_file(struct results *r, struct tally_error *err)
{
    const struct model *model = r->model;
    size_t n = model->param_count;
    struct safetensors_entry *entries = calloc(n > 0 ? n : 1, sizeof *entries);
    uint64_t(*shapes)[MODEL_NDIM_MAX] = calloc(n > 0 ? n : 1, sizeof *shapes);
    tally_status status;
    if (!entries || !shapes) {
        status = tally_fail(err, TALLY_ENOMEM, "no memory for the header of %s", r->path);
        goto out;
    }
    for (size_t i = 0; i < n; i++) {
        const struct param *param = &model->params[i];
        for (size_t d = 0; d < param->shape.ndim; d++)
            shapes[i][d] = param->shape.dim[d];
        entries[i] =
            (struct safetensors_entry){.name = param->name, .dims = (uint32_t)param->shape.ndim, .shape = shapes[i]};
    }
    char step[24], seed[24];
    snprintf(step, sizeof step, "%" PRIu64, r->fetched);
    snprintf(seed, sizeof seed, "%" PRIu64, r->spec->seed);
    const struct safetensors_string metadata[] = {
        {"job", r->spec->name ? r->spec->name : ""}, {"step", step}, {"seed", seed}};
    r->param = 0;
    status = sha256_new(&r->sum, err);
    if (status == TALLY_OK)
        status = safetensors_writer_open(r->path, entries, n, metadata, 3, &r->writer, err);
out:
    free(entries);
    free(shapes);
    return status;
}

static void drop_file(struct results *r)
{
    safetensors_writer_free(r->writer);
    sha256_free(r->sum);
    r->writer = NULL;
    r->sum = NULL;
}

/* Bytes of the flat vector from byte `at` on: what belongs to a parameter is written, padding between them is not. */
static tally_status take_bytes(struct results *r, uint64_t at, const unsigned char *data, size_t bytes,
                               struct tally_error *err)
{
    while (bytes > 0 && r->param < r->model->param_count) {
        const struct param *param = &r->model->params[r->param];
        uint64_t begin = (uint64_t)param->offset * sizeof(float),
                 end = begin + (uint64_t)param->shape.elements * sizeof(float);
        if (at >= end) {
            r->param++;
            continue;
        }
        uint64_t until = at < begin ? begin : end;
        size_t take = until - at < bytes ? (size_t)(until - at) : bytes;
        if (at >= begin) {
            tally_status status = sha256_update(r->sum, data, take, err);
            if (status == TALLY_OK)
                status = safetensors_writer_write(r->writer, data, take, err);
            if (status != TALLY_OK)
                return status;
        }
        at += take;
        data += take;
        bytes -= take;
    }
    return TALLY_OK;
}

/* ---- fetching ---- */

static tally_status take_update(struct results *r, const Tally__V1__Update *update, const struct rpc_payload *payload,
                                struct tally_error *err)
{
    if (r->next_slice >= r->from->slice_end)
        return tally_fail(err, TALLY_EINVAL, "it sends more than its slices");
    const struct slice *slice = &r->model->slices[r->next_slice];
    size_t bytes = payload ? rpc_payload_bytes(payload) : 0;
    if (update->slice != r->next_slice || update->version != r->fetched || bytes != slice->count * sizeof(float))
        return tally_fail(err, TALLY_EINVAL,
                          "it sent slice %" PRIu32 " at version %" PRIu64 " with %zu bytes, expected slice %" PRIu32
                          " at version %" PRIu64 " with %zu bytes",
                          update->slice, update->version, bytes, r->next_slice, r->fetched,
                          slice->count * sizeof(float));
    uint64_t at = (uint64_t)slice->offset * sizeof(float);
    size_t position = 0, segment_bytes;
    const void *segment;
    while (payload && rpc_payload_segment(payload, &position, &segment, &segment_bytes)) {
        tally_status status = take_bytes(r, at, segment, segment_bytes, err);
        if (status != TALLY_OK)
            return status;
        at += segment_bytes;
    }
    r->next_slice++;
    return TALLY_OK;
}

static void on_update(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct results *r = user;
    r->heard_ns = tally_now_ns();
    if (r->failure.code != TALLY_OK)
        return;
    if (take_update(r, (const Tally__V1__Update *)message->header, message->payload, &r->failure) == TALLY_OK)
        rpc_stream_grant(stream, 1);
    else
        rpc_stream_cancel(stream);
}

static void on_fetch_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct results *r = user;
    r->ended = true;
    r->stream = NULL;
    if (r->failure.code == TALLY_OK && end->code != TALLY_OK)
        r->failure = *end;
}

static tally_status fetch_shard(struct results *r, struct shard *shard, struct tally_error *err)
{
    static const struct rpc_stream_events events = {.on_message = on_update, .on_end = on_fetch_end};
    struct rpc_stream_options options = {.credits = FETCH_CREDITS};
    Tally__V1__FetchRequest request = TALLY__V1__FETCH_REQUEST__INIT;
    request.job = r->job;
    request.version = r->fetched;
    r->from = shard;
    r->next_slice = shard->slice_begin;
    r->ended = false;
    r->failure = (struct tally_error){0};
    r->heard_ns = tally_now_ns();
    tally_status status = rpc_stream_open(shard->channel, r->queue, &tally__v1__parameters__descriptor, "Fetch",
                                          &events, r, &options, &r->stream, err);
    if (status != TALLY_OK)
        return status;
    if (rpc_stream_send(r->stream, &request.base, &r->failure) != TALLY_OK)
        rpc_stream_cancel(r->stream);
    else
        rpc_stream_close(r->stream);
    while (!r->ended) {
        int64_t deadline = r->heard_ns + (int64_t)TALLY_FETCH_TIMEOUT_MS * 1000000;
        bool late = tally_now_ns() >= deadline;
        if (r->failure.code == TALLY_OK && (is_cancelled(r) || late)) {
            if (late)
                tally_fail(&r->failure, TALLY_ETIMEDOUT, "it has sent nothing for %d s", TALLY_FETCH_TIMEOUT_MS / 1000);
            else
                fail_cancelled(&r->failure);
            rpc_stream_cancel(r->stream);
        }
        rpc_queue_poll(r->queue, r->failure.code == TALLY_OK ? deadline : tally_now_ns() + 1000000000);
    }
    if (r->failure.code == TALLY_OK && r->next_slice < shard->slice_end)
        tally_fail(&r->failure, TALLY_EINVAL, "it ended before slice %" PRIu32, r->next_slice);
    if (r->failure.code == TALLY_OK)
        return TALLY_OK;
    return tally_fail(err, r->failure.code, "the weights of shard %s: %s", shard->name, r->failure.message);
}

static tally_status attempt(struct results *r, struct tally_error *err)
{
    tally_status status = ask_holding(r, err);
    if (status == TALLY_OK)
        status = choose_version(r, &r->fetched, err);
    if (status == TALLY_OK)
        status = open_file(r, err);
    for (size_t i = 0; i < r->shard_count && status == TALLY_OK; i++) {
        if (r->shards[i].slice_begin < r->shards[i].slice_end)
            status = fetch_shard(r, &r->shards[i], err);
    }
    if (status == TALLY_OK)
        status = safetensors_writer_commit(r->writer, err);
    if (status == TALLY_OK)
        status = sha256_final_hex(r->sum, r->outcome.sha256, err);
    if (status == TALLY_OK)
        r->outcome.version = r->fetched;
    drop_file(r);
    return status;
}

static tally_status prepare(struct results *r, struct tally_error *err)
{
    char *folder = path_dirname(r->path);
    if (!folder)
        return tally_fail(err, TALLY_ENOMEM, "no memory for %s", r->path);
    tally_status status = file_make_dirs(folder, 0755, err);
    free(folder);
    if (status == TALLY_OK)
        status = model_build(r->spec, r->facts, &r->model, err);
    for (size_t i = 0; i < r->shard_count && status == TALLY_OK; i++) {
        struct shard *shard = &r->shards[i];
        model_shard_slices(r->model, (uint32_t)r->shard_count, (uint32_t)i, &shard->slice_begin, &shard->slice_end);
        status = rpc_channel_new(shard->address, NULL, &shard->channel, err);
    }
    return status;
}

static void run_task(struct rpc_task *task);

/* Pushes may still be summed when the last worker has finished, and a worker that was given up may still push and move
 * a version away between the question and the fetch: then ask again. */
static tally_status collect(struct results *r, struct tally_error *err)
{
    int64_t deadline = tally_now_ns() + SETTLE_NS;
    int64_t pause_ms = PAUSE_MIN_MS;
    for (;;) {
        tally_status status = attempt(r, err);
        if (status != TALLY_ESTATE || is_cancelled(r) || tally_now_ns() >= deadline)
            return status;
        int64_t until = tally_now_ns() + pause_ms * 1000000;
        while (!is_cancelled(r) && tally_now_ns() < until)
            rpc_queue_poll(r->queue, until);
        pause_ms = pause_ms < PAUSE_MAX_MS ? 2 * pause_ms : PAUSE_MAX_MS;
    }
}

static void *thread_main(void *user)
{
    struct results *r = user;
    struct tally_error *err = &r->outcome.error;
    tally_status status = prepare(r, err);
    if (status == TALLY_OK)
        status = collect(r, err);
    if (status == TALLY_OK)
        *err = (struct tally_error){0};
    for (size_t i = 0; i < r->shard_count; i++) {
        rpc_channel_free(r->shards[i].channel);
        r->shards[i].channel = NULL;
    }
    r->task.run = run_task;
    rpc_queue_post(r->loop_queue, &r->task);
    return NULL;
}

/* ---- the loop's side ---- */

static void results_free(struct results *r)
{
    for (size_t i = 0; r->shards && i < r->shard_count; i++) {
        free(r->shards[i].name);
        free(r->shards[i].address);
    }
    free(r->shards);
    free(r->path);
    model_free(r->model);
    rpc_queue_free(r->queue);
    protobuf_c_message_free_unpacked(r->spec ? &r->spec->base : NULL, NULL);
    protobuf_c_message_free_unpacked(r->facts ? &r->facts->base : NULL, NULL);
    free(r);
}

static void run_task(struct rpc_task *task)
{
    struct results *r = (struct results *)(void *)((char *)task - offsetof(struct results, task));
    pthread_join(r->thread, NULL);
    r->done(&r->outcome, r->user);
    results_free(r);
}

static bool copy_request(struct results *r, const struct results_request *request)
{
    r->job = request->job;
    r->generation = request->generation;
    r->version = request->version;
    r->spec = message_copy(&request->spec->base);
    r->facts = message_copy(&request->facts->base);
    r->path = strdup(request->path);
    r->shards = calloc(request->shards, sizeof *r->shards);
    if (!r->spec || !r->facts || !r->path || !r->shards)
        return false;
    r->shard_count = request->shards;
    for (size_t i = 0; i < request->shards; i++) {
        r->shards[i].owner = r;
        r->shards[i].name = strdup(request->shard_names[i]);
        r->shards[i].address = strdup(request->shard_addresses[i]);
        if (!r->shards[i].name || !r->shards[i].address)
            return false;
    }
    return true;
}

tally_status results_start(const struct results_request *request, struct rpc_queue *loop_queue, results_done done,
                           void *user, struct results **ret_results, struct tally_error *err)
{
    struct results *r = calloc(1, sizeof *r);
    if (!r || !copy_request(r, request)) {
        if (r)
            results_free(r);
        return tally_fail(err, TALLY_ENOMEM, "no memory to collect the weights of job %" PRIu64, request->job);
    }
    r->loop_queue = loop_queue;
    r->done = done;
    r->user = user;
    tally_status status = rpc_data_queue_new(&r->queue, err);
    if (status == TALLY_OK && pthread_create(&r->thread, NULL, thread_main, r) != 0)
        status =
            tally_fail(err, TALLY_EIO, "cannot start a thread to collect the weights of job %" PRIu64, request->job);
    if (status != TALLY_OK) {
        results_free(r);
        return status;
    }
    *ret_results = r;
    return TALLY_OK;
}

void results_cancel(struct results *r)
{
    atomic_store(&r->cancelled, true);
    rpc_queue_wake(r->queue);
}
