#include "client/result_file.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/file.h"
#include "common/safetensors.h"
#include "common/sha256.h"
#include "proto/jobs.pb-c.h"

#define CHUNK_CREDITS 16

struct result_file {
    struct rpc_stream *stream;
    struct file_atomic *out;
    char *path;
    char sha256[SHA256_HEX_BYTES];
    uint64_t received, total;
    struct tally_error failure; /* ours; the stream was cancelled for it */
    result_file_done done;
    void *user;
};

static void result_file_free(struct result_file *f)
{
    file_atomic_free(f->out);
    free(f->path);
    free(f);
}

static void give_up(struct result_file *f, const struct tally_error *err)
{
    f->failure = *err;
    rpc_stream_cancel(f->stream);
}

static void on_chunk(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct result_file *f = user;
    const Tally__V1__ResultChunk *chunk = (const Tally__V1__ResultChunk *)message->header;
    struct tally_error err = {0};
    if (f->failure.code != TALLY_OK)
        return;
    if (chunk->offset != f->received) {
        tally_fail(&err, TALLY_EINTERNAL, "a chunk of the result begins at %llu, expected %llu",
                   (unsigned long long)chunk->offset, (unsigned long long)f->received);
        give_up(f, &err);
        return;
    }
    f->total = chunk->total;
    size_t position = 0;
    const void *data;
    size_t bytes;
    while (message->payload && rpc_payload_segment(message->payload, &position, &data, &bytes)) {
        if (file_atomic_write(f->out, data, bytes, &err) != TALLY_OK) {
            give_up(f, &err);
            return;
        }
        f->received += bytes;
    }
    rpc_stream_grant(stream, 1);
}

/* The data section of a safetensors file is what its header does not cover. */
static tally_status check_sum(const struct result_file *f, struct tally_error *err)
{
    struct file_map map = {0};
    uint64_t header = 0;
    char hex[SHA256_HEX_BYTES];
    tally_status status = file_map_open(f->path, &map, err);
    if (status != TALLY_OK)
        return status;
    if (map.bytes >= 8)
        memcpy(&header, map.data, 8);
    if (map.bytes < 8 || header > map.bytes - 8)
        status = tally_fail(err, TALLY_EINTERNAL, "%s is not a safetensors file", f->path);
    if (status == TALLY_OK)
        status = sha256_hex(map.data + 8 + header, map.bytes - 8 - header, hex, err);
    if (status == TALLY_OK && strcmp(hex, f->sha256) != 0)
        status = tally_fail(err, TALLY_EINTERNAL, "%s: the weights' SHA-256 is %s, the coordinator says %s", f->path,
                            hex, f->sha256);
    file_map_close(&map);
    return status;
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    struct result_file *f = user;
    (void)stream;
    struct tally_error err = f->failure.code != TALLY_OK ? f->failure : *end;
    if (err.code == TALLY_OK && (f->received != f->total || f->total == 0))
        tally_fail(&err, TALLY_EINTERNAL, "the result ended at byte %llu of %llu", (unsigned long long)f->received,
                   (unsigned long long)f->total);
    if (err.code == TALLY_OK)
        file_atomic_commit(f->out, &err);
    if (err.code == TALLY_OK)
        check_sum(f, &err);
    f->done(&err, f->user);
    result_file_free(f);
}

tally_status result_file_get(struct rpc_channel *channel, struct rpc_queue *queue, uint64_t job, const char *name,
                             const char *path, const char *sha256, result_file_done done, void *user,
                             struct result_file **ret_file, struct tally_error *err)
{
    static const struct rpc_stream_events events = {.on_message = on_chunk, .on_end = on_end};
    struct rpc_stream_options options = {.credits = CHUNK_CREDITS};
    struct result_file *f = calloc(1, sizeof *f);
    if (!f)
        return tally_fail(err, TALLY_ENOMEM, "no memory");
    f->done = done;
    f->user = user;
    f->path = strdup(path);
    snprintf(f->sha256, sizeof f->sha256, "%s", sha256);
    tally_status status =
        f->path ? file_atomic_open(path, 0644, &f->out, err) : tally_fail(err, TALLY_ENOMEM, "no memory");
    if (status == TALLY_OK)
        status = rpc_stream_open(channel, queue, &tally__v1__jobs__descriptor, "Results", &events, f, &options,
                                 &f->stream, err);
    if (status != TALLY_OK) {
        result_file_free(f);
        return status;
    }
    Tally__V1__ResultsRequest request = TALLY__V1__RESULTS_REQUEST__INIT;
    request.job = job;
    request.file = (char *)name;
    struct tally_error send_err = {0};
    if (rpc_stream_send(f->stream, &request.base, &send_err) != TALLY_OK)
        give_up(f, &send_err);
    else
        rpc_stream_close(f->stream);
    *ret_file = f;
    return TALLY_OK;
}

void result_file_cancel(struct result_file *f)
{
    rpc_stream_cancel(f->stream);
}
