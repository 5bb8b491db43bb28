#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/file.h"
#include "server/coordinator_internal.h"

/*
 * A result file is read on libuv's threads, a chunk at a time, and sent by reference; the next chunk is read once this
 * one was taken. What waits to be sent is bounded by the stream's queue.
 */

#define RESULT_FILE "model.safetensors"
#define CHUNK_BYTES (1u << 20)
#define QUEUED_BYTES (4u << 20)

struct download {
    struct download *previous, *next;
    struct coordinator *coordinator;
    struct rpc_stream *stream;
    char *path;
    int fd; /* -1: not open yet */
    uint64_t offset, total;
    uv_work_t work;
    bool reading; /* work is under way: the download outlives its stream until it is done */
    bool gone, finished;
    struct reader reader;
    unsigned char *chunk; /* read and not yet sent */
    size_t chunk_bytes;
    struct tally_error err; /* the work's result */
};

char *download_path(const struct coordinator *c, uint64_t job)
{
    char name[64];
    snprintf(name, sizeof name, "results/%" PRIu64 "/" RESULT_FILE, job);
    return path_join(c->directory, name);
}

static void download_free(struct download *d)
{
    struct coordinator *c = d->coordinator;
    if (d->fd >= 0)
        close(d->fd);
    free(d->chunk);
    free(d->path);
    if (d->previous)
        d->previous->next = d->next;
    else
        c->downloads = d->next;
    if (d->next)
        d->next->previous = d->previous;
    c->download_count--;
    free(d);
}

static void finish(struct download *d, const struct tally_error *err)
{
    d->finished = true;
    rpc_stream_finish_error(d->stream, err);
}

/* ---- on libuv's threads ---- */

static tally_status open_file(struct download *d)
{
    struct stat info;
    d->fd = open(d->path, O_RDONLY | O_CLOEXEC);
    if (d->fd < 0 || fstat(d->fd, &info) != 0)
        return tally_fail_errno(&d->err, "%s", d->path);
    d->total = (uint64_t)info.st_size;
    if (d->offset > d->total)
        return tally_fail(&d->err, TALLY_EINVAL,
                          "offset %" PRIu64 " is behind the end of " RESULT_FILE ", which has %" PRIu64 " bytes",
                          d->offset, d->total);
    return TALLY_OK;
}

static void read_work(uv_work_t *work)
{
    struct download *d = work->data;
    if (d->fd < 0 && open_file(d) != TALLY_OK)
        return;
    uint64_t left = d->total - d->offset;
    size_t want = left < CHUNK_BYTES ? (size_t)left : CHUNK_BYTES;
    d->chunk = malloc(want > 0 ? want : 1);
    if (!d->chunk) {
        tally_fail(&d->err, TALLY_ENOMEM, "no memory to read %s", d->path);
        return;
    }
    d->chunk_bytes = 0;
    while (d->chunk_bytes < want) {
        ssize_t got =
            pread(d->fd, d->chunk + d->chunk_bytes, want - d->chunk_bytes, (off_t)(d->offset + d->chunk_bytes));
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0) {
            if (got < 0)
                tally_fail_errno(&d->err, "%s", d->path);
            else
                tally_fail(&d->err, TALLY_EIO, "%s became shorter while it was read", d->path);
            return;
        }
        d->chunk_bytes += (size_t)got;
    }
}

/* ---- on the loop ---- */

static void serve(struct download *d);

static void read_done(uv_work_t *work, int cancelled)
{
    struct download *d = work->data;
    struct coordinator *c = d->coordinator;
    (void)cancelled; /* nobody cancels it */
    d->reading = false;
    if (d->gone)
        download_free(d);
    else if (!d->finished && d->err.code != TALLY_OK)
        finish(d, &d->err);
    else
        serve(d);
    coordinator_less_busy(c);
}

static void send_chunk(struct download *d)
{
    Tally__V1__ResultChunk header = TALLY__V1__RESULT_CHUNK__INIT;
    struct tally_error err;
    header.offset = d->offset;
    header.total = d->total;
    tally_status status =
        rpc_stream_send_payload(d->stream, &header.base, d->chunk, d->chunk_bytes, free, d->chunk, &err);
    if (status == TALLY_OK) {
        d->offset += d->chunk_bytes;
        d->chunk = NULL;
    } else if (status != TALLY_ENOMEM && status != TALLY_ECANCELLED) {
        finish(d, &err);
    }
}

/* One step: sends what was read, then has more read. */
static void serve(struct download *d)
{
    struct coordinator *c = d->coordinator;
    if (d->gone || d->finished || d->reading)
        return;
    if (d->chunk)
        send_chunk(d);
    if (d->chunk || d->finished)
        return; /* on_writable goes on */
    if (d->fd >= 0 && d->offset == d->total) {
        finish(d, &(struct tally_error){0});
        return;
    }
    d->work.data = d;
    if (uv_queue_work(c->loop, &d->work, read_work, read_done) != 0) {
        tally_fail(&d->err, TALLY_EINTERNAL, "%s cannot be read", d->path);
        finish(d, &d->err);
        return;
    }
    d->reading = true;
    c->busy++;
}

static void on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    (void)stream;
    (void)message;
    (void)user; /* the one request was given to download_request */
}

static void on_writable(struct rpc_stream *stream, void *user)
{
    (void)stream;
    serve(user);
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    (void)end;
    struct download *d = user;
    d->gone = true;
    if (!d->reading)
        download_free(d);
}

static tally_status check(struct coordinator *c, const Tally__V1__ResultsRequest *request, struct tally_error *err)
{
    const struct job *job = coordinator_find_job(c, request->job);
    if (c->closing)
        return tally_fail(err, TALLY_EUNAVAIL, "the coordinator is ending");
    if (!job)
        return tally_fail(err, TALLY_ENOTFOUND, "there is no job %" PRIu64, request->job);
    if (strcmp(request->file, RESULT_FILE) != 0)
        return tally_fail(err, TALLY_ENOTFOUND, "a job has no result of the name \"%.64s\", only " RESULT_FILE,
                          request->file);
    if (!job_phase_is_terminal(job->phase))
        return tally_fail(err, TALLY_ESTATE, "job %" PRIu64 " has not ended yet", request->job);
    if (!job->record->weights_sha256[0])
        return tally_fail(err, TALLY_ESTATE, "job %" PRIu64 " has left no " RESULT_FILE, request->job);
    if (c->download_count >= TALLY_DOWNLOADS_MAX)
        return tally_fail(err, TALLY_ENOMEM, "%zu results are being sent, as many as this coordinator serves at once",
                          c->download_count);
    return TALLY_OK;
}

void download_request(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    static const struct rpc_stream_events events = {
        .on_message = on_message, .on_writable = on_writable, .on_end = on_end};
    static const struct rpc_stream_options options = {.max_queued_bytes = QUEUED_BYTES};
    struct coordinator *c = user;
    const Tally__V1__ResultsRequest *request = (const Tally__V1__ResultsRequest *)message->header;
    struct tally_error err;
    if (check(c, request, &err) != TALLY_OK) {
        rpc_stream_finish_error(stream, &err);
        return;
    }
    struct download *d = calloc(1, sizeof *d);
    char *path = download_path(c, request->job);
    if (!d || !path) {
        free(d);
        free(path);
        rpc_stream_finish(stream, TALLY_ENOMEM, "no memory for another download");
        return;
    }
    d->coordinator = c;
    d->stream = stream;
    d->path = path;
    d->fd = -1;
    d->offset = request->offset;
    d->next = c->downloads;
    if (d->next)
        d->next->previous = d;
    c->downloads = d;
    c->download_count++;
    rpc_stream_accept(stream, &events, d, &options);
    serve(d);
}

void download_tick(struct coordinator *c, int64_t now_ns)
{
    for (struct download *d = c->downloads; d; d = d->next) {
        if (!d->gone && coordinator_reader_is_stuck(c, &d->reader, d->stream, d->offset, now_ns))
            rpc_stream_cancel(d->stream);
    }
}

void download_close(struct coordinator *c)
{
    struct tally_error err;
    tally_fail(&err, TALLY_EUNAVAIL, "the coordinator is ending");
    for (struct download *d = c->downloads; d; d = d->next) {
        if (!d->gone && !d->finished)
            finish(d, &err);
    }
}
