/* What the coordinator asks of a shard's weights. */
#include <inttypes.h>
#include <stdlib.h>

#include "common/clock.h"
#include "server/shard_data.h"

struct shard_fetch {
    struct shard_fetch *next;
    struct shard_job *job;
    struct rpc_stream *stream;
    uint64_t version;
    uint32_t done; /* slices */
    bool finished;
    int64_t moved_ns; /* when it was given something to send last */
};

static struct shard_job *find(struct shard_data *data, uint64_t id, struct rpc_stream *stream)
{
    struct shard_job *job = shard_data_find(data, id);
    struct tally_error err;
    if (!job) {
        tally_fail(&err, TALLY_ENOTFOUND, "this shard holds no job %" PRIu64, id);
        rpc_stream_finish_error(stream, &err);
    }
    return job;
}

void shard_read_holding(struct rpc_stream *stream, const struct rpc_message *request, void *user)
{
    struct shard_data *data = user;
    struct shard_job *job = find(data, ((const Tally__V1__HoldingRequest *)(const void *)request->header)->job, stream);
    if (!job)
        return;
    shard_data_report(data, job); /* who asks will want to know the steps up to here */
    struct shard_counts counts = shard_store_counts(job->store);
    Tally__V1__HoldingReply reply = TALLY__V1__HOLDING_REPLY__INIT;
    reply.generation = shard_store_generation(job->store);
    reply.version = shard_store_version(job->store);
    reply.oldest_version = shard_store_oldest(job->store);
    reply.parameter_bytes = shard_store_parameter_bytes(job->store);
    reply.pushes_applied = counts.taken;
    reply.pushes_repeated = counts.repeated;
    reply.pushes_refused = counts.refused;
    rpc_stream_reply(stream, &reply.base);
}

static void finish(struct shard_fetch *fetch, tally_status status, const char *reason)
{
    if (fetch->finished)
        return;
    fetch->finished = true;
    rpc_stream_finish(fetch->stream, status, reason);
}

static void finish_gone(struct shard_fetch *fetch)
{
    const struct shard_store *store = fetch->job->store;
    struct tally_error err;
    tally_fail(&err, TALLY_ESTATE,
               "version %" PRIu64 " of job %" PRIu64 " is not held in every slice: versions %" PRIu64 " to %" PRIu64
               " are",
               fetch->version, fetch->job->id, shard_store_oldest(store), shard_store_version(store));
    finish(fetch, err.code, err.message);
}

static void pump(struct shard_fetch *fetch)
{
    struct shard_job *job = fetch->job;
    fetch->moved_ns = tally_now_ns();
    for (; fetch->done < job->slice_count; fetch->done++) {
        size_t count;
        void *lease;
        uint32_t slice = job->first_slice + fetch->done;
        const float *weights = shard_store_borrow(job->store, slice, fetch->version, &count, &lease);
        if (!weights) { /* training went on meanwhile */
            finish_gone(fetch);
            return;
        }
        Tally__V1__Update update = TALLY__V1__UPDATE__INIT;
        update.job = job->id;
        update.generation = shard_store_generation(job->store);
        update.version = fetch->version;
        update.slice = slice;
        if (rpc_stream_send_payload(fetch->stream, &update.base, weights, count * sizeof(float), shard_store_release,
                                    lease, NULL) != TALLY_OK) {
            shard_store_release(lease);
            return; /* on_writable or on_end follows */
        }
    }
    finish(fetch, TALLY_OK, NULL);
}

static void on_writable(struct rpc_stream *stream, void *user)
{
    (void)stream;
    struct shard_fetch *fetch = user;
    if (!fetch->finished)
        pump(fetch);
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    (void)end;
    struct shard_fetch *fetch = user;
    struct shard_fetch **link = &fetch->job->fetches;
    while (*link != fetch)
        link = &(*link)->next;
    *link = fetch->next;
    free(fetch);
}

void shard_read_fetch(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    static const struct rpc_stream_events events = {.on_writable = on_writable, .on_end = on_end};
    const Tally__V1__FetchRequest *request = (const void *)message->header;
    struct shard_job *job = find(user, request->job, stream);
    if (!job)
        return;
    struct shard_fetch *fetch = calloc(1, sizeof *fetch);
    if (!fetch) {
        rpc_stream_finish(stream, TALLY_ENOMEM, "out of memory for a stream");
        return;
    }
    fetch->job = job;
    fetch->stream = stream;
    fetch->version = request->version;
    fetch->moved_ns = tally_now_ns();
    fetch->next = job->fetches;
    job->fetches = fetch;
    rpc_stream_accept(stream, &events, fetch, NULL);
    if (request->version < shard_store_oldest(job->store) || request->version > shard_store_version(job->store))
        finish_gone(fetch);
    else
        pump(fetch);
}

void shard_read_finish(struct shard_job *job, tally_status status, const char *reason)
{
    for (struct shard_fetch *fetch = job->fetches; fetch; fetch = fetch->next)
        finish(fetch, status, reason);
}

void shard_read_cut(struct shard_job *job, int64_t since_ns)
{
    for (struct shard_fetch *fetch = job->fetches; fetch; fetch = fetch->next)
        if (fetch->moved_ns <= since_ns)
            rpc_stream_cancel(fetch->stream);
}
