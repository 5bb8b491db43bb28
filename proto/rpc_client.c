/* Channels, and calls from the client's side. */
#include <grpc/compression.h>
#include <grpc/grpc_security.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/limits.h"
#include "proto/rpc_internal.h"

/* ---- settings ---- */

grpc_arg rpc_int_arg(const char *key, int value)
{
    grpc_arg arg = {.type = GRPC_ARG_INTEGER, .key = (char *)(uintptr_t)key};
    arg.value.integer = value;
    return arg;
}

size_t rpc_common_args(grpc_arg args[RPC_ARGS_MAX])
{
    size_t n = 0;
    args[n++] = rpc_int_arg(GRPC_ARG_MAX_RECEIVE_MESSAGE_LENGTH, TALLY_MESSAGE_MAX_BYTES);
    args[n++] = rpc_int_arg(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, 10000);
    args[n++] = rpc_int_arg(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
    /* Identity alone: gradients do not compress, and a small message must not unfold into a large one. */
    args[n++] = rpc_int_arg(GRPC_COMPRESSION_CHANNEL_ENABLED_ALGORITHMS_BITSET, 1u << GRPC_COMPRESS_NONE);
    args[n++] = rpc_int_arg(GRPC_ARG_ENABLE_CHANNELZ, 0);
    /* A slice is one frame, not 64: a third less CPU for 1 MiB messages on a UNIX socket. Read sizes and windows made
     * no difference. */
    args[n++] = rpc_int_arg(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, TALLY_SLICE_MAX_BYTES);
    return n;
}

/* ---- channels ---- */

struct rpc_channel {
    grpc_channel *channel;
};

tally_status rpc_channel_new(const char *address, const struct rpc_channel_options *options,
                             struct rpc_channel **ret_channel, struct tally_error *err)
{
    struct rpc_address parsed;
    char target[RPC_TARGET_MAX];
    tally_status status = rpc_address_parse(address, &parsed, err);
    if (status)
        return status;
    if (!parsed.is_unix && parsed.port == 0)
        return tally_fail(err, TALLY_EINVAL, "%s: port 0 is for servers", address);
    if (options && options->credentials)
        return tally_fail(err, TALLY_EUNSUPPORTED, "%s: TLS is not in this build", address);
    struct rpc_channel *channel = calloc(1, sizeof *channel);
    if (!channel)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a channel to %s", address);
    rpc_address_target(&parsed, target);
    grpc_arg args[RPC_ARGS_MAX];
    size_t n = rpc_common_args(args);
    args[n++] =
        rpc_int_arg(GRPC_ARG_ENABLE_RETRIES, 0); /* a retry would hold payloads back, and say twice what is sent once */
    args[n++] = rpc_int_arg(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
    args[n++] = rpc_int_arg(GRPC_ARG_SERVICE_CONFIG_DISABLE_RESOLUTION, 1);
    args[n++] = rpc_int_arg(GRPC_ARG_KEEPALIVE_TIME_MS, 20000);
    args[n++] = rpc_int_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    args[n++] = rpc_int_arg(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
    args[n++] = rpc_int_arg(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 1000);
    args[n++] = rpc_int_arg(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 5000); /* what one attempt to connect may take */
    args[n++] = rpc_int_arg(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, options && options->own_connection);
    if (parsed.is_unix) { /* else :authority would be the path, escaped */
        args[n] = (grpc_arg){.type = GRPC_ARG_STRING, .key = (char *)(uintptr_t)GRPC_ARG_DEFAULT_AUTHORITY};
        args[n++].value.string = (char *)(uintptr_t) "localhost";
    }
    grpc_channel_args all = {.num_args = n, .args = args};
    grpc_channel_credentials *credentials = grpc_insecure_credentials_create();
    channel->channel = grpc_channel_create(target, credentials, &all);
    grpc_channel_credentials_release(credentials);
    *ret_channel = channel;
    return TALLY_OK;
}

void rpc_channel_free(struct rpc_channel *channel)
{
    if (!channel)
        return;
    grpc_channel_destroy(channel->channel);
    free(channel);
}

/* ---- streams ---- */

tally_status rpc_method_path(const ProtobufCServiceDescriptor *service, const char *method, char path[RPC_PATH_MAX],
                             unsigned *ret_index, struct tally_error *err)
{
    const ProtobufCMethodDescriptor *found = protobuf_c_service_descriptor_get_method_by_name(service, method);
    if (!found)
        return tally_fail(err, TALLY_ENOTFOUND, "%s has no method %.100s", service->name, method);
    int n = snprintf(path, RPC_PATH_MAX, "/%s/%s", service->name, method);
    if (n < 0 || n >= RPC_PATH_MAX)
        return tally_fail(err, TALLY_EINVAL, "the name of a method is too long: %s/%.100s", service->name, method);
    *ret_index = (unsigned)(found - service->methods);
    return TALLY_OK;
}

/* A stream whose call is made and whose batches are not started. */
static tally_status create(struct rpc_channel *channel, struct rpc_queue *queue,
                           const ProtobufCServiceDescriptor *service, const char *method, int64_t timeout_ms,
                           struct rpc_stream **ret_stream, struct tally_error *err)
{
    char path[RPC_PATH_MAX];
    unsigned index = 0;
    tally_status status = rpc_method_path(service, method, path, &index, err);
    if (status)
        return status;
    if (timeout_ms < 0)
        return tally_fail(err, TALLY_EINVAL, "%s: a timeout of %lld ms", path, (long long)timeout_ms);
    gpr_timespec deadline = gpr_inf_future(GPR_CLOCK_MONOTONIC);
    if (timeout_ms > 0)
        deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_millis(timeout_ms, GPR_TIMESPAN));
    grpc_slice name = grpc_slice_from_copied_string(path);
    grpc_call *call = grpc_channel_create_call(channel->channel, NULL, GRPC_PROPAGATE_DEFAULTS, rpc_queue_cq(queue),
                                               name, NULL, deadline, NULL);
    grpc_slice_unref(name);
    struct rpc_stream *stream =
        rpc_stream_create(queue, call, false, path, service->methods[index].input, service->methods[index].output);
    if (!stream) {
        grpc_call_unref(call);
        return tally_fail(err, TALLY_ENOMEM, "no memory for %s", path);
    }
    *ret_stream = stream;
    return TALLY_OK;
}

tally_status rpc_stream_open(struct rpc_channel *channel, struct rpc_queue *queue,
                             const ProtobufCServiceDescriptor *service, const char *method,
                             const struct rpc_stream_events *events, void *user,
                             const struct rpc_stream_options *options, struct rpc_stream **ret_stream,
                             struct tally_error *err)
{
    struct rpc_stream *stream = NULL;
    int64_t timeout_ms = options ? options->timeout_ms : 0;
    bool wait = options && options->wait_for_ready;
    if (wait && timeout_ms == 0)
        return tally_fail(err, TALLY_EINVAL, "%s/%s: wait_for_ready without a timeout", service->name, method);
    tally_status status = create(channel, queue, service, method, timeout_ms, &stream, err);
    if (status)
        return status;
    rpc_stream_configure(stream, events, user, options);
    rpc_stream_start_client(stream, NULL, timeout_ms, wait, NULL); /* cannot fail without a message */
    *ret_stream = stream;
    return TALLY_OK;
}

/* ---- unary calls ---- */

/* Lives until done was called. */
struct unary {
    rpc_unary_done done;
    void *user;
    struct rpc_message reply;
    unsigned replies;
};

static void unary_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    (void)stream;
    struct unary *u = user;
    u->reply = *message; /* its header stays in the stream's arena, as no other message is read */
    if (message->payload)
        rpc_payload_ref(message->payload);
    u->replies++;
}

static void unary_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct unary *u = user;
    struct tally_error none;
    if (end->code == TALLY_OK && u->replies == 0) {
        tally_fail(&none, TALLY_EINTERNAL, "the server sent a status and no reply");
        end = &none;
    }
    u->done(end, end->code == TALLY_OK ? &u->reply : NULL, u->user);
    rpc_payload_unref(u->reply.payload);
    free(u);
}

tally_status rpc_unary(struct rpc_channel *channel, struct rpc_queue *queue, const ProtobufCServiceDescriptor *service,
                       const char *method, const ProtobufCMessage *request, const struct rpc_stream_options *options,
                       rpc_unary_done done, void *user, struct rpc_stream **ret_stream, struct tally_error *err)
{
    static const struct rpc_stream_events events = {.on_message = unary_message, .on_end = unary_end};
    static const struct rpc_stream_options one = {.credits = 1, .max_queued_messages = 1};
    int64_t timeout_ms = options && options->timeout_ms ? options->timeout_ms : RPC_TIMEOUT_MS;
    struct rpc_stream *stream = NULL;
    tally_status status = create(channel, queue, service, method, timeout_ms, &stream, err);
    if (status)
        return status;
    struct unary *u = calloc(1, sizeof *u);
    if (!u) {
        rpc_stream_unref(stream);
        return tally_fail(err, TALLY_ENOMEM, "no memory for a call");
    }
    u->done = done;
    u->user = user;
    rpc_stream_configure(stream, &events, u, &one);
    status = rpc_stream_start_client(stream, request, timeout_ms, options && options->wait_for_ready, err);
    if (status) { /* the request was too large: nothing was started */
        free(u);
        rpc_stream_unref(stream);
        return status;
    }
    if (ret_stream)
        *ret_stream = stream;
    return TALLY_OK;
}

struct waiting {
    bool done;
    tally_status status;
    struct tally_error *err;
    ProtobufCMessage *reply;
};

static void wait_done(const struct tally_error *end, const struct rpc_message *reply, void *user)
{
    struct waiting *w = user;
    w->done = true;
    w->status = end->code;
    if (end->code) {
        tally_fail(w->err, end->code, "%s", end->message);
        return;
    }
    w->reply = rpc_message_copy(reply);
    if (!w->reply)
        w->status = tally_fail(w->err, TALLY_ENOMEM, "no memory for a reply");
}

tally_status rpc_unary_wait(struct rpc_channel *channel, const ProtobufCServiceDescriptor *service, const char *method,
                            const ProtobufCMessage *request, const struct rpc_stream_options *options,
                            ProtobufCMessage **ret_reply, struct tally_error *err)
{
    struct rpc_queue *queue;
    tally_status status = rpc_data_queue_new(&queue, err);
    if (status)
        return status;
    struct waiting w = {.err = err};
    status = rpc_unary(channel, queue, service, method, request, options, wait_done, &w, NULL, err);
    while (!status && !w.done) /* the call has a deadline of its own */
        rpc_queue_poll(queue, tally_now_ns() + 1000000000);
    rpc_queue_free(queue);
    if (status)
        return status;
    if (w.status == TALLY_OK)
        *ret_reply = w.reply;
    return w.status;
}
