/* The streams of workers: gradients in, weights out. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/limits.h"
#include "common/log.h"
#include "server/shard_data.h"

/*
 * Pushes under way to this shard, over all streams of a job; a slice is taken as soon as it is there, so that a few
 * keep a stream busy. Beyond HELD_MIN_BYTES and half of the parameters, what waits for its siblings is not added to but
 * by the worker that is furthest behind, whom the others wait for anyway: workers that run ahead would have the shard
 * hold a whole gradient of each.
 */
#define CREDITS 16
#define CREDITS_MIN 1
#define HELD_MIN_BYTES ((size_t)8 << 20)

/* A stream that says nothing is a mistake; one that was told its end and does not take it is cut. */
#define HELLO_NS (INT64_C(10) * 1000000000)
#define FINISH_NS (INT64_C(1) * 1000000000)

#define WORKER_NAME_MAX 64

/* No version: the worker does not want the slice. */
#define UNWANTED UINT64_MAX

struct unsent_refusal {
    struct shard_refusal refusal;
    uint64_t step;
    uint32_t leaf_begin, leaf_end, slice;
};

struct shard_exchange {
    struct shard_exchange *next;
    struct shard_data *data;
    struct shard_job *job; /* NULL: a stranger */
    struct rpc_stream *stream;
    uint64_t generation;
    uint32_t rank;
    char worker[WORKER_NAME_MAX];
    int64_t since_ns;  /* a stranger; or finished */
    bool finished;     /* nothing more is taken or sent */
    bool stalled;      /* something waits for on_writable */
    uint64_t *sent;    /* by slice of the shard: the version sent last, plus 1; UNWANTED */
    unsigned withheld; /* credits */
    uint64_t step;     /* of the last push that was taken, and of that step: */
    double leaf_bytes; /* leaves x bytes taken */
    /* Their credits are withheld until they are sent, so there are never more of them. */
    struct unsent_refusal refusals[CREDITS];
    unsigned refusals_first, refusals_count;
};

static void finish(struct shard_exchange *x, tally_status status, const char *reason)
{
    if (x->finished)
        return;
    x->finished = true;
    x->since_ns = tally_now_ns();
    rpc_stream_finish(x->stream, status, reason);
}

/* ---- sending ---- */

static tally_status send_slice(struct shard_exchange *x, uint32_t slice)
{
    struct shard_store *store = x->job->store;
    uint64_t version = shard_store_slice_version(store, slice);
    size_t count;
    void *lease;
    const float *weights = shard_store_borrow(store, slice, version, &count, &lease);
    Tally__V1__Update update = TALLY__V1__UPDATE__INIT;
    update.job = x->job->id;
    update.generation = x->generation;
    update.version = version;
    update.slice = slice;
    tally_status status = rpc_stream_send_payload(x->stream, &update.base, weights, count * sizeof(float),
                                                  shard_store_release, lease, NULL);
    if (status == TALLY_OK)
        x->sent[slice - x->job->first_slice] = version + 1;
    else
        shard_store_release(lease);
    return status;
}

static tally_status send_refusal(struct shard_exchange *x, const struct unsent_refusal *unsent)
{
    Tally__V1__Update update = TALLY__V1__UPDATE__INIT;
    Tally__V1__Refusal refusal = TALLY__V1__REFUSAL__INIT;
    update.job = x->job->id;
    update.generation = x->generation;
    update.version = shard_store_version(x->job->store);
    update.slice = unsent->slice;
    update.refusal = &refusal;
    refusal.code = unsent->refusal.code;
    refusal.reason = (char *)unsent->refusal.reason; /* only read */
    refusal.step = unsent->step;
    refusal.leaf_begin = unsent->leaf_begin;
    refusal.leaf_end = unsent->leaf_end;
    refusal.slice = unsent->slice;
    return rpc_stream_send(x->stream, &update.base, NULL);
}

/* Sends what waits: refusals, then slices from the first, whose layers the worker needs first. A slice that was updated
 * again in the meantime goes once, as it is now. */
static void pump(struct shard_exchange *x)
{
    x->stalled = false;
    while (x->refusals_count > 0) {
        if (send_refusal(x, &x->refusals[x->refusals_first]) != TALLY_OK) {
            x->stalled = true;
            return;
        }
        x->refusals_first = (x->refusals_first + 1) % CREDITS;
        x->refusals_count--;
        rpc_stream_grant(x->stream, 1);
    }
    const struct shard_job *job = x->job;
    for (uint32_t i = 0; i < job->slice_count; i++) {
        uint32_t slice = job->first_slice + i;
        if (x->sent[i] == UNWANTED || x->sent[i] == shard_store_slice_version(job->store, slice) + 1)
            continue;
        if (send_slice(x, slice) != TALLY_OK) {
            x->stalled = true;
            return;
        }
    }
}

static void on_writable(struct rpc_stream *stream, void *user)
{
    (void)stream;
    struct shard_exchange *x = user;
    if (x->job && !x->finished)
        pump(x);
}

void shard_exchange_send_slice(struct shard_job *job, uint32_t slice)
{
    for (struct shard_exchange *x = job->exchanges; x; x = x->next)
        if (!x->finished && !x->stalled && x->sent[slice - job->first_slice] != UNWANTED &&
            send_slice(x, slice) != TALLY_OK)
            x->stalled = true; /* ended or full: pump looks at all slices */
}

/* ---- credits ---- */

/* How much of its part of the step, which is not empty, a stream has brought, 0 to 1. */
static double progress(const struct shard_exchange *x)
{
    const struct shard_store *store = x->job->store;
    struct tree_node share = tree_share(shard_store_leaves(store), x->rank, x->job->workers);
    if (x->step != shard_store_version(store) + 1)
        return 0;
    return x->leaf_bytes / ((double)(share.end - share.begin) * (double)shard_store_parameter_bytes(store));
}

static void note_progress(struct shard_exchange *x, const Tally__V1__Push *push, size_t bytes)
{
    if (x->step != push->step)
        x->leaf_bytes = 0;
    x->step = push->step;
    x->leaf_bytes += (double)(push->leaf_end - push->leaf_begin) * (double)bytes;
}

static void give(struct shard_exchange *x)
{
    if (x->withheld > 0 && !x->finished)
        rpc_stream_grant(x->stream, x->withheld);
    x->withheld = 0;
}

static bool has_leaves(const struct shard_job *job, uint32_t rank)
{
    struct tree_node share = tree_share(shard_store_leaves(job->store), rank, job->workers);
    return share.begin < share.end;
}

/* The stream that is furthest behind; NULL: a worker that has none yet is. */
static struct shard_exchange *furthest_behind(struct shard_job *job)
{
    struct shard_exchange *last = NULL;
    double least = 0;
    uint32_t missing = 0;
    for (uint32_t rank = 0; rank < job->workers; rank++)
        missing += has_leaves(job, rank);
    for (struct shard_exchange *x = job->exchanges; x; x = x->next) {
        if (x->finished || !has_leaves(job, x->rank))
            continue;
        missing--; /* of a rank only the newest stream is not finished */
        double done = progress(x);
        if (!last || done < least) {
            last = x;
            least = done;
        }
    }
    return missing == 0 ? last : NULL;
}

void shard_exchange_give_credits(struct shard_job *job)
{
    size_t half = shard_store_parameter_bytes(job->store) / 2;
    /* Stages wait for each other's activations and gradients: to hold one back could stop the one that is behind. */
    if (job->stages > 1 || shard_store_held_bytes(job->store) <= (half > HELD_MIN_BYTES ? half : HELD_MIN_BYTES)) {
        for (struct shard_exchange *x = job->exchanges; x; x = x->next)
            give(x);
        return;
    }
    struct shard_exchange *last = furthest_behind(job);
    if (last)
        give(last);
}

/* ---- receiving ---- */

/* true: it has gone out, so its credit may be given back. */
static bool answer_refusal(struct shard_exchange *x, const Tally__V1__Push *push, const struct shard_refusal *refusal)
{
    struct unsent_refusal unsent = {.refusal = *refusal,
                                    .step = push->step,
                                    .leaf_begin = push->leaf_begin,
                                    .leaf_end = push->leaf_end,
                                    .slice = push->slice};
    if (x->refusals_count == 0 && send_refusal(x, &unsent) == TALLY_OK)
        return true;
    x->stalled = true;
    x->refusals[(x->refusals_first + x->refusals_count++) % CREDITS] = unsent;
    return false;
}

static enum shard_taken take(struct shard_exchange *x, const Tally__V1__Push *push, struct rpc_payload *payload,
                             struct shard_update *ret_update, struct shard_refusal *ret_refusal,
                             struct tally_error *err)
{
    if (push->job != x->job->id) {
        ret_refusal->code = TALLY__V1__REFUSAL__CODE__NO_SUCH_JOB;
        snprintf(ret_refusal->reason, sizeof ret_refusal->reason,
                 "a push of job %" PRIu64 " on a stream of job %" PRIu64, push->job, x->job->id);
        return SHARD_REFUSED;
    }
    const struct shard_push taken = {
        .generation = push->generation,
        .step = push->step,
        .leaves = {push->leaf_begin, push->leaf_end},
        .slice = push->slice,
        .weight = push->weight,
        .loss_sum = push->loss_sum,
        .correct = push->correct,
        .gradient = payload,
    };
    return shard_store_push(x->job->store, &taken, ret_update, ret_refusal, err);
}

static void on_push(struct shard_exchange *x, const Tally__V1__Push *push, struct rpc_payload *payload)
{
    struct shard_job *job = x->job;
    struct shard_update update;
    struct shard_refusal refusal;
    struct tally_error err;
    bool grant = true;
    size_t bytes = payload ? rpc_payload_bytes(payload) : 0;
    switch (take(x, push, payload, &update, &refusal, &err)) {
    case SHARD_UPDATED:
        note_progress(x, push, bytes);
        shard_data_updated(x->data, job, &update);
        break;
    case SHARD_WAITS:
        note_progress(x, push, bytes);
        shard_data_waits(x->data, job);
        break;
    case SHARD_REFUSED:
        log_debug("job %" PRIu64 ": refused a push of %s: %s", job->id, x->worker, refusal.reason);
        grant = answer_refusal(x, push, &refusal);
        break;
    case SHARD_FAILED:
        shard_data_fail(x->data, job, err.message);
        break;
    case SHARD_HELD:
        note_progress(x, push, bytes);
        break;
    case SHARD_REPEATED:
        break;
    }
    if (grant)
        x->withheld++;
    shard_exchange_give_credits(job);
}

/* ---- Hello ---- */

static void unlink_from(struct shard_exchange **list, const struct shard_exchange *x)
{
    while (*list != x)
        list = &(*list)->next;
    *list = x->next;
}

static tally_status check_version(const Tally__V1__Hello *hello, struct tally_error *err)
{
    uint32_t major = hello->version ? hello->version->major : 0, minor = hello->version ? hello->version->minor : 0;
    if (major == TALLY_PROTOCOL_MAJOR)
        return TALLY_OK;
    return tally_fail(err, TALLY_ESTATE, "worker %.*s speaks protocol %" PRIu32 ".%" PRIu32 ", this shard speaks %d.%d",
                      WORKER_NAME_MAX, hello->worker, major, minor, TALLY_PROTOCOL_MAJOR, TALLY_PROTOCOL_MINOR);
}

static tally_status check_hello(struct shard_data *data, const Tally__V1__Push *push, struct shard_job **ret_job,
                                struct tally_error *err)
{
    if (!push->hello)
        return tally_fail(err, TALLY_EINVAL, "the first message of an Exchange must have a Hello");
    tally_status status = check_version(push->hello, err);
    if (status != TALLY_OK)
        return status;
    struct shard_job *job = shard_data_find(data, push->job);
    if (!job)
        return tally_fail(err, TALLY_ENOTFOUND, "this shard holds no job %" PRIu64, push->job);
    if (job->failed)
        return tally_fail(err, TALLY_ESTATE, "job %" PRIu64 " has failed here", push->job);
    uint64_t generation = shard_store_generation(job->store);
    if (push->generation != generation)
        return tally_fail(err, TALLY_ESTATE,
                          "generation %" PRIu64 " of job %" PRIu64 ": this shard is at generation %" PRIu64,
                          push->generation, push->job, generation);
    if (push->hello->rank >= job->workers)
        return tally_fail(err, TALLY_EINVAL, "rank %" PRIu32 " in a gang of %" PRIu32, push->hello->rank, job->workers);
    for (size_t i = 0; i < push->hello->n_slices; i++) {
        const Tally__V1__SliceRange *range = push->hello->slices[i];
        if (range->begin >= range->end || (i > 0 && range->begin < push->hello->slices[i - 1]->end))
            return tally_fail(err, TALLY_EINVAL,
                              "a Hello with slices [%" PRIu32 ", %" PRIu32 "), empty or out of order", range->begin,
                              range->end);
    }
    *ret_job = job;
    return TALLY_OK;
}

/* What of the shard's slices the worker wants. NULL: no memory. */
static uint64_t *new_sent(const struct shard_job *job, const Tally__V1__Hello *hello)
{
    uint64_t *sent = calloc(job->slice_count + 1u, sizeof *sent);
    if (!sent || hello->n_slices == 0)
        return sent;
    size_t at = 0;
    for (uint32_t i = 0; i < job->slice_count; i++) {
        uint32_t slice = job->first_slice + i;
        while (at < hello->n_slices && hello->slices[at]->end <= slice)
            at++;
        if (at == hello->n_slices || slice < hello->slices[at]->begin)
            sent[i] = UNWANTED;
    }
    return sent;
}

static void on_hello(struct shard_exchange *x, const Tally__V1__Push *push)
{
    struct shard_job *job = NULL;
    struct tally_error err;
    tally_status status = check_hello(x->data, push, &job, &err);
    if (status == TALLY_OK) {
        x->sent = new_sent(job, push->hello);
        if (!x->sent)
            status = tally_fail(&err, TALLY_ENOMEM, "out of memory for a worker's stream");
    }
    if (status != TALLY_OK) {
        log_debug("refused a worker's stream: %s", err.message);
        finish(x, status, err.message);
        return;
    }
    for (struct shard_exchange *other = job->exchanges; other; other = other->next)
        if (other->rank == push->hello->rank)
            finish(other, TALLY_ECANCELLED, "a newer stream of the same rank took this one's place");
    unlink_from(&x->data->strangers, x);
    x->next = job->exchanges;
    job->exchanges = x;
    x->job = job;
    x->generation = push->generation;
    x->rank = push->hello->rank;
    snprintf(x->worker, sizeof x->worker, "%s", push->hello->worker);
    log_debug("job %" PRIu64 ": worker %s opened its stream as rank %" PRIu32, job->id, x->worker, x->rank);
    rpc_stream_grant(x->stream, job->workers < CREDITS / CREDITS_MIN ? CREDITS / job->workers : CREDITS_MIN);
    pump(x);
}

/* ---- events ---- */

static void on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    (void)stream;
    struct shard_exchange *x = user;
    const Tally__V1__Push *push = (const void *)message->header;
    if (x->finished)
        return;
    if (!x->job)
        on_hello(x, push);
    else if (push->hello)
        finish(x, TALLY_EINVAL, "a second Hello on a stream");
    else
        on_push(x, push, message->payload);
}

static void on_half_close(struct rpc_stream *stream, void *user)
{
    (void)stream;
    finish(user, TALLY_OK, NULL);
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct shard_exchange *x = user;
    if (x->job)
        log_debug("job %" PRIu64 ": the stream of worker %s ended: %s", x->job->id, x->worker,
                  end->code == TALLY_OK ? "ok" : end->message);
    unlink_from(x->job ? &x->job->exchanges : &x->data->strangers, x);
    if (x->job)
        shard_exchange_give_credits(x->job);
    free(x->sent);
    free(x);
}

void shard_exchange_open(struct rpc_stream *stream, void *user)
{
    static const struct rpc_stream_events events = {
        .on_message = on_message, .on_half_close = on_half_close, .on_writable = on_writable, .on_end = on_end};
    static const struct rpc_stream_options options = {.credits = 1};
    struct shard_data *data = user;
    struct shard_exchange *x = calloc(1, sizeof *x);
    if (!x || data->stop) {
        free(x);
        rpc_stream_finish(stream, x ? TALLY_ECANCELLED : TALLY_ENOMEM,
                          x ? "the shard is stopping" : "out of memory for a stream");
        return;
    }
    x->data = data;
    x->stream = stream;
    x->since_ns = tally_now_ns();
    x->next = data->strangers;
    data->strangers = x;
    rpc_stream_accept(stream, &events, x, &options);
}

/* ---- for the data thread ---- */

void shard_exchange_finish(struct shard_job *job, uint64_t below, tally_status status, const char *reason)
{
    for (struct shard_exchange *x = job->exchanges; x; x = x->next)
        if (x->generation < below)
            finish(x, status, reason);
}

/* Cuts what was finished and did not end, and finishes what said nothing. true: there will be more to look after. */
static bool sweep(struct shard_exchange *list, int64_t now_ns)
{
    bool waiting = false;
    for (struct shard_exchange *x = list; x; x = x->next) {
        if (x->finished && now_ns - x->since_ns > FINISH_NS)
            rpc_stream_cancel(x->stream);
        else if (!x->finished && !x->job && now_ns - x->since_ns > HELLO_NS)
            finish(x, TALLY_ETIMEDOUT, "no Hello came within 10 s");
        waiting = waiting || x->finished || !x->job;
    }
    return waiting;
}

bool shard_exchange_sweep(struct shard_data *data, int64_t now_ns)
{
    bool waiting = sweep(data->strangers, now_ns);
    for (struct shard_job *job = data->jobs; job; job = job->next)
        waiting = sweep(job->exchanges, now_ns) || waiting;
    for (struct shard_job *job = data->closing; job; job = job->next)
        waiting = sweep(job->exchanges, now_ns) || waiting;
    return waiting;
}

void shard_exchange_finish_strangers(struct shard_data *data, const char *reason)
{
    for (struct shard_exchange *x = data->strangers; x; x = x->next)
        finish(x, TALLY_ECANCELLED, reason);
}

void shard_exchange_owner(const struct shard_job *job, const struct shard_missing *missing, char *text, size_t size)
{
    uint32_t replicas = job->workers / job->stages, replica = 0;
    while (replica + 1 < replicas && missing->leaf >= tree_share(missing->leaves, replica, replicas).end)
        replica++;
    uint32_t rank = replica * job->stages + job->slice_stage[missing->slice - job->first_slice];
    for (const struct shard_exchange *x = job->exchanges; x; x = x->next)
        if (x->rank == rank && !x->finished) {
            snprintf(text, size, "worker %s", x->worker);
            return;
        }
    snprintf(text, size, "rank %" PRIu32 ", which has no stream", rank);
}

void shard_exchange_slow(const struct shard_job *job, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (const struct shard_exchange *x = job->exchanges; x && used < size; x = x->next)
        if (rpc_stream_queued_messages(x->stream) > 0)
            used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", x->worker);
}
