/*
 * One call, of either side: its queue of outgoing messages, its credits, its end. rpc_internal.h tells what the lock
 * protects.
 */
#include <assert.h>
#include <grpc/support/alloc.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/limits.h"
#include "proto/rpc_internal.h"

struct outgoing {
    grpc_byte_buffer *buffer;
    size_t bytes;
};

struct rpc_stream {
    atomic_uint refs;
    struct rpc_queue *queue;
    bool server;
    char path[RPC_PATH_MAX];
    const ProtobufCMessageDescriptor *sends, *receives;

    /* The queue's thread alone. */
    struct rpc_stream_events events;
    void *user;
    void (*ended_hook)(void *context);
    void *ended_context;
    bool accepted;     /* server: has events */
    bool handler_owns; /* server, on_request: a reference is kept until the handler answers */
    struct wire_arena arena;
    grpc_byte_buffer *received;
    grpc_metadata_array initial_metadata;
    grpc_metadata_array trailing_metadata;
    grpc_status_code code; /* client: how it ended */
    grpc_slice details;
    int cancelled;            /* server: it was not we who ended it */
    struct tally_error fault; /* why this side ended the stream, if it did */
    int64_t timeout_ms;

    pthread_mutex_t lock;
    /* Under the lock. */
    grpc_call *call;  /* NULL once it has ended */
    unsigned pending; /* batches outstanding */
    bool terminal;    /* the final batch has been handled */
    bool started;
    bool reading;
    bool read_eof;
    bool sending;
    bool sending_message; /* the batch under way carries ring[head] */
    bool initial_sent;
    bool wait_for_ready;
    bool last_wanted; /* close or finish was asked for */
    bool last_sent;
    bool dropped; /* cancelled: what is queued does not count any more */
    bool want_writable;
    unsigned credits;
    tally_status finish_status;
    char *finish_text; /* NULL: none */
    struct outgoing *ring;
    unsigned ring_size, head, count; /* with the one under way */
    unsigned max_count;
    size_t queued_bytes, max_bytes;

    struct rpc_op send_op, read_op, end_op;
};

/* ---- life ---- */

static void send_done(struct rpc_op *op, bool ok);
static void read_done(struct rpc_op *op, bool ok);
static void end_done(struct rpc_op *op, bool ok);

struct rpc_stream *rpc_stream_create(struct rpc_queue *queue, grpc_call *call, bool server, const char *path,
                                     const ProtobufCMessageDescriptor *sends,
                                     const ProtobufCMessageDescriptor *receives)
{
    struct rpc_stream *s = calloc(1, sizeof *s);
    if (!s)
        return NULL;
    atomic_init(&s->refs, 1);
    s->queue = queue;
    s->call = call;
    s->server = server;
    s->sends = sends;
    s->receives = receives;
    snprintf(s->path, sizeof s->path, "%s", path);
    pthread_mutex_init(&s->lock, NULL);
    grpc_metadata_array_init(&s->initial_metadata);
    grpc_metadata_array_init(&s->trailing_metadata);
    s->details = grpc_empty_slice();
    s->max_count = RPC_QUEUED_MESSAGES;
    s->max_bytes = RPC_QUEUED_BYTES;
    s->send_op.done = send_done;
    s->read_op.done = read_done;
    s->end_op.done = end_done;
    return s;
}

struct rpc_stream *rpc_stream_ref(struct rpc_stream *stream)
{
    atomic_fetch_add_explicit(&stream->refs, 1, memory_order_relaxed);
    return stream;
}

struct rpc_stream *rpc_stream_unref(struct rpc_stream *stream)
{
    if (!stream || atomic_fetch_sub_explicit(&stream->refs, 1, memory_order_acq_rel) != 1)
        return NULL;
    if (stream->call) /* never started */
        grpc_call_unref(stream->call);
    for (unsigned i = 0; i < stream->count; i++)
        grpc_byte_buffer_destroy(stream->ring[(stream->head + i) % stream->ring_size].buffer);
    wire_arena_clear(&stream->arena);
    pthread_mutex_destroy(&stream->lock);
    grpc_metadata_array_destroy(&stream->initial_metadata);
    grpc_metadata_array_destroy(&stream->trailing_metadata);
    grpc_slice_unref(stream->details);
    free(stream->finish_text);
    free(stream->ring);
    free(stream);
    return NULL;
}

void rpc_stream_configure(struct rpc_stream *s, const struct rpc_stream_events *events, void *user,
                          const struct rpc_stream_options *options)
{
    pthread_mutex_lock(&s->lock);
    if (events)
        s->events = *events;
    s->user = user;
    if (options) {
        s->credits = options->credits;
        if (options->max_queued_messages)
            s->max_count = options->max_queued_messages;
        if (options->max_queued_bytes)
            s->max_bytes = options->max_queued_bytes;
    }
    s->accepted = true;
    pthread_mutex_unlock(&s->lock);
}

static void start_batch(struct rpc_stream *s, const grpc_op *ops, size_t count, struct rpc_op *tag)
{
    rpc_op_arm(tag, s->queue);
    grpc_call_error e = grpc_call_start_batch(s->call, ops, count, tag, NULL);
    tally_check(e == GRPC_CALL_OK); /* our own misuse: going on would lose an event and hang */
    s->pending++;
}

/* ---- sending ---- */

/* Under the lock: starts what can be started. One batch is out at a time; the close or status goes with the last
 * message. */
static void pump_send(struct rpc_stream *s)
{
    if (!s->started || s->sending || !s->call || s->terminal || s->last_sent)
        return;
    grpc_op ops[3] = {0};
    size_t n = 0;
    grpc_slice details;
    if (!s->initial_sent) {
        ops[n].op = GRPC_OP_SEND_INITIAL_METADATA;
        if (s->wait_for_ready)
            ops[n].flags = GRPC_INITIAL_METADATA_WAIT_FOR_READY | GRPC_INITIAL_METADATA_WAIT_FOR_READY_EXPLICITLY_SET;
        n++;
        s->initial_sent = true;
    }
    if (s->count > 0) {
        ops[n].op = GRPC_OP_SEND_MESSAGE;
        ops[n].data.send_message.send_message = s->ring[s->head].buffer;
        n++;
        s->sending_message = true;
    }
    bool last = s->last_wanted && s->count <= 1;
    if (last && s->server) {
        details = grpc_slice_from_copied_string(s->finish_text ? s->finish_text : "");
        ops[n].op = GRPC_OP_SEND_STATUS_FROM_SERVER;
        ops[n].data.send_status_from_server.status = (grpc_status_code)rpc_status_to_grpc(s->finish_status);
        ops[n].data.send_status_from_server.status_details = &details;
        n++;
    } else if (last) {
        ops[n++].op = GRPC_OP_SEND_CLOSE_FROM_CLIENT;
    }
    s->last_sent = last;
    if (n == 0)
        return;
    s->sending = true;
    start_batch(s, ops, n, &s->send_op);
    if (last && s->server)
        grpc_slice_unref(details);
}

static bool has_room(const struct rpc_stream *s, size_t bytes)
{
    if (s->count == 0)
        return true;
    return s->count < s->max_count && bytes <= s->max_bytes && s->queued_bytes <= s->max_bytes - bytes;
}

/* Under the lock: room in the ring for one more, growing up to max_count, so that most streams stay small. */
static bool grow_ring(struct rpc_stream *s)
{
    if (s->count < s->ring_size)
        return true;
    unsigned size = s->ring_size ? s->ring_size * 2 : 2;
    struct outgoing *ring = malloc(size * sizeof *ring);
    if (!ring)
        return false;
    for (unsigned i = 0; i < s->count; i++)
        ring[i] = s->ring[(s->head + i) % s->ring_size];
    free(s->ring);
    s->ring = ring;
    s->ring_size = size;
    s->head = 0;
    return true;
}

static tally_status may_send(struct rpc_stream *s, size_t bytes, struct tally_error *err)
{
    if (!s->call || s->terminal || s->dropped)
        return tally_fail(err, TALLY_ECANCELLED, "%s has ended", s->path);
    if (s->last_wanted)
        return tally_fail(err, TALLY_EINVAL, "%s: a message behind the end", s->path);
    if (!has_room(s, bytes)) {
        s->want_writable = true;
        return tally_fail(err, TALLY_ENOMEM, "%s: the queue is full (%u messages, %zu bytes)", s->path, s->count,
                          s->queued_bytes);
    }
    if (!grow_ring(s))
        return tally_fail(err, TALLY_ENOMEM, "%s: no memory for a message", s->path);
    return TALLY_OK;
}

static void push(struct rpc_stream *s, grpc_slice *slices, size_t slice_count, size_t bytes)
{
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(slices, slice_count);
    for (size_t i = 0; i < slice_count; i++)
        grpc_slice_unref(slices[i]); /* the buffer has its own references */
    s->ring[(s->head + s->count) % s->ring_size] = (struct outgoing){.buffer = buffer, .bytes = bytes};
    s->count++;
    s->queued_bytes += bytes;
}

static tally_status check_message(const struct rpc_stream *s, const ProtobufCMessage *message, size_t bytes,
                                  struct tally_error *err)
{
    if (message->descriptor != s->sends)
        return tally_fail(err, TALLY_EINVAL, "%s: sends no %s", s->path, message->descriptor->name);
    if (bytes > TALLY_MESSAGE_MAX_BYTES)
        return tally_fail(err, TALLY_EINVAL, "%s: a %s of %zu bytes is above the limit of %u", s->path,
                          message->descriptor->name, bytes, TALLY_MESSAGE_MAX_BYTES);
    return TALLY_OK;
}

/* last: nothing follows but the close or status, which shall go in the same batch, so the caller starts it. */
static tally_status send_packed(struct rpc_stream *s, const ProtobufCMessage *message, bool last,
                                struct tally_error *err)
{
    size_t bytes = protobuf_c_message_get_packed_size(message);
    tally_status status = check_message(s, message, bytes, err);
    if (status)
        return status;
    pthread_mutex_lock(&s->lock);
    status = may_send(s, bytes, err);
    if (!status) {
        grpc_slice slice = grpc_slice_malloc(bytes);
        protobuf_c_message_pack(message, GRPC_SLICE_START_PTR(slice));
        push(s, &slice, 1, bytes);
        if (!last)
            pump_send(s);
    }
    pthread_mutex_unlock(&s->lock);
    return status;
}

tally_status rpc_stream_send(struct rpc_stream *stream, const ProtobufCMessage *message, struct tally_error *err)
{
    return send_packed(stream, message, false, err);
}

#ifdef __SANITIZE_THREAD__
/* What the sender wrote comes before its release on gRPC's thread; a race detector does not see why, so it is told (as
 * in rpc_op_arm). */
struct traced {
    void (*release)(void *user);
    void *user;
    atomic_bool handed;
};

static void release_traced(void *user)
{
    struct traced *t = user;
    (void)atomic_load_explicit(&t->handed, memory_order_acquire);
    t->release(t->user);
    free(t);
}

static grpc_slice payload_slice(void *payload, size_t bytes, void (*release)(void *user), void *user)
{
    struct traced *t = malloc(sizeof *t);
    *t = (struct traced){.release = release, .user = user};
    atomic_store_explicit(&t->handed, true, memory_order_release);
    return grpc_slice_new_with_user_data(payload, bytes, release_traced, t);
}
#else
static grpc_slice payload_slice(void *payload, size_t bytes, void (*release)(void *user), void *user)
{
    return grpc_slice_new_with_user_data(payload, bytes, release, user);
}
#endif

tally_status rpc_stream_send_payload(struct rpc_stream *stream, const ProtobufCMessage *header, const void *payload,
                                     size_t bytes, void (*release)(void *user), void *release_user,
                                     struct tally_error *err)
{
    const ProtobufCFieldDescriptor *field = wire_payload_field(header->descriptor);
    if (!field)
        return tally_fail(err, TALLY_EINVAL, "%s: a %s carries no payload", stream->path, header->descriptor->name);
    const ProtobufCBinaryData *inside = (const void *)((const char *)header + field->offset);
    if (inside->len > 0)
        return tally_fail(err, TALLY_EINVAL, "%s: two payloads in a %s", stream->path, header->descriptor->name);
    size_t head = protobuf_c_message_get_packed_size(header);
    size_t prefix = bytes ? wire_payload_prefix(field->id, bytes, NULL) : 0; /* proto3 leaves an empty field out */
    tally_status status =
        check_message(stream, header, bytes > TALLY_MESSAGE_MAX_BYTES ? bytes : head + prefix + bytes, err);
    if (status)
        return status;
    pthread_mutex_lock(&stream->lock);
    status = may_send(stream, head + prefix + bytes, err);
    if (!status) {
        grpc_slice slices[2];
        slices[0] = grpc_slice_malloc(head + prefix);
        uint8_t *out = GRPC_SLICE_START_PTR(slices[0]);
        protobuf_c_message_pack(header, out);
        if (bytes > 0)
            wire_payload_prefix(field->id, bytes, out + head);
        /* gRPC only reads it; the cast drops a const that its API lacks. With 0 bytes the slice still calls release. */
        slices[1] = payload_slice((void *)(uintptr_t)payload, bytes, release, release_user);
        push(stream, slices, 2, head + prefix + bytes);
        pump_send(stream);
    }
    pthread_mutex_unlock(&stream->lock);
    return status;
}

static void finish_op(struct rpc_stream *s);

static void send_done(struct rpc_op *op, bool ok)
{
    struct rpc_stream *s = RPC_CONTAINER(op, struct rpc_stream, send_op);
    grpc_byte_buffer *sent = NULL;
    pthread_mutex_lock(&s->lock);
    s->sending = false;
    if (s->sending_message) {
        sent = s->ring[s->head].buffer;
        s->queued_bytes -= s->ring[s->head].bytes;
        s->head = (s->head + 1) % s->ring_size;
        s->count--;
        s->sending_message = false;
    }
    if (ok)
        pump_send(s);
    bool tell = ok && s->want_writable && !s->terminal && !s->dropped && s->count < s->max_count &&
                s->queued_bytes < s->max_bytes;
    if (tell)
        s->want_writable = false;
    pthread_mutex_unlock(&s->lock);
    if (sent)
        grpc_byte_buffer_destroy(sent);
    if (tell && s->events.on_writable)
        s->events.on_writable(s, s->user);
    finish_op(s);
}

size_t rpc_stream_queued_bytes(struct rpc_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    size_t bytes = stream->queued_bytes;
    pthread_mutex_unlock(&stream->lock);
    return bytes;
}

unsigned rpc_stream_queued_messages(struct rpc_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    unsigned count = stream->count;
    pthread_mutex_unlock(&stream->lock);
    return count;
}

/* ---- receiving ---- */

static void pump_read(struct rpc_stream *s)
{
    if (!s->started || s->reading || s->read_eof || !s->call || s->terminal || s->credits == 0)
        return;
    s->credits--;
    s->reading = true;
    s->received = NULL;
    grpc_op op = {.op = GRPC_OP_RECV_MESSAGE};
    op.data.recv_message.recv_message = &s->received;
    start_batch(s, &op, 1, &s->read_op);
}

void rpc_stream_grant(struct rpc_stream *stream, unsigned messages)
{
    pthread_mutex_lock(&stream->lock);
    stream->credits = messages > UINT32_MAX - stream->credits ? UINT32_MAX : stream->credits + messages;
    pump_read(stream);
    pthread_mutex_unlock(&stream->lock);
}

/* Ends a stream whose peer sent what cannot be taken. */
static void refuse(struct rpc_stream *s, const struct tally_error *why)
{
    s->fault = *why;
    if (s->server) {
        rpc_stream_finish_error(s, why);
        return;
    }
    pthread_mutex_lock(&s->lock);
    if (s->call)
        grpc_call_cancel_with_status(s->call, (grpc_status_code)rpc_status_to_grpc(why->code), why->message, NULL);
    pthread_mutex_unlock(&s->lock);
}

static void deliver(struct rpc_stream *s, grpc_byte_buffer *buffer)
{
    struct rpc_message message;
    struct tally_error err = {0};
    if (rpc_message_decode(buffer, s->receives, &s->arena, &message, &err)) {
        tally_error_prefix(&err, "%s", s->path);
        pthread_mutex_lock(&s->lock);
        s->read_eof = true;
        pthread_mutex_unlock(&s->lock);
        refuse(s, &err);
        return;
    }
    if (s->events.on_message)
        s->events.on_message(s, &message, s->user);
    rpc_payload_unref(message.payload);
}

static void read_done(struct rpc_op *op, bool ok)
{
    struct rpc_stream *s = RPC_CONTAINER(op, struct rpc_stream, read_op);
    pthread_mutex_lock(&s->lock);
    s->reading = false;
    grpc_byte_buffer *buffer = s->received;
    s->received = NULL;
    bool eof = !buffer;
    bool failed = !ok || s->dropped || grpc_call_failed_before_recv_message(s->call);
    s->read_eof = s->read_eof || eof;
    pthread_mutex_unlock(&s->lock);
    if (buffer)
        deliver(s, buffer);
    else if (!failed && s->server && s->events.on_half_close)
        s->events.on_half_close(s, s->user);
    pthread_mutex_lock(&s->lock);
    pump_read(s);
    pthread_mutex_unlock(&s->lock);
    finish_op(s);
}

/* ---- ending ---- */

/* Under the lock: takes what is queued and not under way out of the ring; destroy it after unlocking. Returns how many
 * were moved to out. */
static unsigned take_queued(struct rpc_stream *s, grpc_byte_buffer **out, unsigned out_max)
{
    unsigned taken = 0;
    unsigned keep = s->sending_message ? 1 : 0;
    while (s->count > keep && taken < out_max) {
        struct outgoing *last = &s->ring[(s->head + s->count - 1) % s->ring_size];
        out[taken++] = last->buffer;
        s->queued_bytes -= last->bytes;
        s->count--;
    }
    return taken;
}

static void drop_queued(struct rpc_stream *s)
{
    grpc_byte_buffer *some[32];
    unsigned taken;
    do {
        pthread_mutex_lock(&s->lock);
        taken = take_queued(s, some, 32);
        pthread_mutex_unlock(&s->lock);
        for (unsigned i = 0; i < taken; i++)
            grpc_byte_buffer_destroy(some[i]);
    } while (taken == 32);
}

static void describe_end(struct rpc_stream *s, struct tally_error *end)
{
    *end = (struct tally_error){.code = TALLY_OK};
    if (s->server) {
        if (s->fault.code)
            *end = s->fault;
        else if (s->cancelled)
            tally_fail(end, TALLY_ECANCELLED, "%s: the client cancelled or went away", s->path);
        return;
    }
    if (s->code == GRPC_STATUS_OK)
        return;
    tally_status code = rpc_status_from_grpc((int)s->code);
    size_t n = GRPC_SLICE_LENGTH(s->details);
    const char *text = (const char *)GRPC_SLICE_START_PTR(s->details);
    bool expired =
        code == TALLY_ETIMEDOUT && n == strlen("Deadline Exceeded") && memcmp(text, "Deadline Exceeded", n) == 0;
    if (expired && s->timeout_ms > 0)
        tally_fail(end, code, "no answer to %s within %lld ms", s->path, (long long)s->timeout_ms);
    else if (n > 0)
        tally_fail(end, code, "%.*s", (int)(n < TALLY_ERROR_MESSAGE_MAX ? n : TALLY_ERROR_MESSAGE_MAX), text);
    else
        tally_fail(end, code, "%s: %s", s->path, tally_status_text(code));
}

/* Counts an op off; behind the final one and all others, tells the end. */
static void finish_op(struct rpc_stream *s)
{
    grpc_call *call = NULL;
    pthread_mutex_lock(&s->lock);
    s->pending--;
    if (s->terminal && s->pending == 0) {
        call = s->call;
        s->call = NULL;
    }
    pthread_mutex_unlock(&s->lock);
    if (!call)
        return;
    struct tally_error end;
    describe_end(s, &end);
    drop_queued(s);
    grpc_call_unref(call);
    if (s->accepted && s->events.on_end)
        s->events.on_end(s, &end, s->user);
    if (s->ended_hook)
        s->ended_hook(s->ended_context);
    rpc_stream_unref(s);
}

static void end_done(struct rpc_op *op, bool ok)
{
    (void)ok; /* always succeeds: the status tells */
    struct rpc_stream *s = RPC_CONTAINER(op, struct rpc_stream, end_op);
    pthread_mutex_lock(&s->lock);
    s->terminal = true;
    pthread_mutex_unlock(&s->lock);
    finish_op(s);
}

static void ask_for_last(struct rpc_stream *s, tally_status status, const char *text)
{
    char *copy =
        text && text[0] ? strndup(text, TALLY_ERROR_MESSAGE_MAX - 1) : NULL; /* without memory it goes without text */
    pthread_mutex_lock(&s->lock);
    bool first = !s->last_wanted;
    if (first) {
        s->last_wanted = true;
        s->finish_status = status;
        s->finish_text = copy;
        pump_send(s);
    }
    pthread_mutex_unlock(&s->lock);
    if (!first)
        free(copy);
}

void rpc_stream_close(struct rpc_stream *stream)
{
    if (!stream->server)
        ask_for_last(stream, TALLY_OK, NULL);
}

/* The handler of an unaccepted call has answered: its reference goes. */
static void handler_done(struct rpc_stream *s)
{
    pthread_mutex_lock(&s->lock);
    bool owned = s->handler_owns;
    s->handler_owns = false;
    pthread_mutex_unlock(&s->lock);
    if (owned)
        rpc_stream_unref(s);
}

void rpc_stream_finish(struct rpc_stream *stream, tally_status status, const char *text)
{
    if (!stream->server)
        return;
    ask_for_last(stream, status, text);
    handler_done(stream);
}

void rpc_stream_finish_error(struct rpc_stream *stream, const struct tally_error *error)
{
    rpc_stream_finish(stream, error->code, error->message);
}

void rpc_stream_reply(struct rpc_stream *stream, const ProtobufCMessage *reply)
{
    struct tally_error err = {0};
    if (!stream->server)
        return;
    tally_status status = send_packed(stream, reply, true, &err);
    if (status == TALLY_EINVAL)
        err.code = TALLY_ENOMEM;           /* too large: not the client's mistake */
    rpc_stream_finish_error(stream, &err); /* of an ended stream this does nothing */
}

void rpc_stream_cancel(struct rpc_stream *stream)
{
    pthread_mutex_lock(&stream->lock);
    bool open = stream->call && !stream->terminal;
    if (open) {
        stream->dropped = true;
        grpc_call_cancel(stream->call, NULL);
    }
    pthread_mutex_unlock(&stream->lock);
    if (open)
        drop_queued(stream);
}

/* ---- beginning ---- */

tally_status rpc_stream_start_client(struct rpc_stream *s, const ProtobufCMessage *request, int64_t timeout_ms,
                                     bool wait_for_ready, struct tally_error *err)
{
    s->timeout_ms = timeout_ms;
    if (request) {
        tally_status status = rpc_stream_send(s, request, err);
        if (status)
            return status;
        rpc_stream_close(s);
    }
    grpc_op op[2] = {{.op = GRPC_OP_RECV_INITIAL_METADATA}, {.op = GRPC_OP_RECV_STATUS_ON_CLIENT}};
    op[0].data.recv_initial_metadata.recv_initial_metadata = &s->initial_metadata;
    op[1].data.recv_status_on_client.trailing_metadata = &s->trailing_metadata;
    op[1].data.recv_status_on_client.status = &s->code;
    op[1].data.recv_status_on_client.status_details = &s->details;
    pthread_mutex_lock(&s->lock);
    s->wait_for_ready = wait_for_ready;
    start_batch(s, op, 2, &s->end_op);
    s->started = true;
    pump_send(s);
    pump_read(s);
    pthread_mutex_unlock(&s->lock);
    return TALLY_OK;
}

void rpc_stream_start_server(struct rpc_stream *s, void (*ended)(void *context), void *context)
{
    grpc_op op = {.op = GRPC_OP_RECV_CLOSE_ON_SERVER};
    op.data.recv_close_on_server.cancelled = &s->cancelled;
    s->ended_hook = ended;
    s->ended_context = context;
    pthread_mutex_lock(&s->lock);
    start_batch(s, &op, 1, &s->end_op);
    pthread_mutex_unlock(&s->lock);
}

/* Lets the batches go that were held back while the handler ran. */
static void start(struct rpc_stream *s, bool send_now)
{
    pthread_mutex_lock(&s->lock);
    s->started = true;
    if (send_now || s->count > 0 || s->last_wanted)
        pump_send(s);
    pump_read(s);
    pthread_mutex_unlock(&s->lock);
}

void rpc_stream_accept(struct rpc_stream *stream, const struct rpc_stream_events *events, void *user,
                       const struct rpc_stream_options *options)
{
    if (!stream->server || stream->accepted)
        return;
    rpc_stream_configure(stream, events, user, options);
    handler_done(stream);
}

/* An unreadable request is answered before any handler sees it. */
static void dispatch_request(struct rpc_stream *s, const struct rpc_method *method, void *user,
                             grpc_byte_buffer *buffer)
{
    struct rpc_message message;
    struct tally_error err = {0};
    if (!buffer)
        tally_fail(&err, TALLY_EINVAL, "%s: a call without a request", s->path);
    else if (rpc_message_decode(buffer, s->receives, &s->arena, &message, &err))
        tally_error_prefix(&err, "%s", s->path);
    if (err.code) {
        refuse(s, &err);
        return;
    }
    s->read_eof = true; /* there is one request only */
    s->handler_owns = true;
    rpc_stream_ref(s);
    method->on_request(s, &message, user);
    rpc_payload_unref(message.payload);
}

void rpc_stream_dispatch(struct rpc_stream *stream, const struct rpc_method *method, void *user,
                         grpc_byte_buffer *buffer)
{
    rpc_stream_ref(stream); /* for as long as this function looks at it */
    if (method->on_request) {
        dispatch_request(stream, method, user, buffer);
        start(stream, false);
    } else {
        method->on_open(stream, user);
        if (!stream->accepted)
            rpc_stream_finish(stream, TALLY_EINTERNAL,
                              "the server did not take the stream up"); /* unless it was finished */
        start(stream, true);                                            /* the client learns at once that it is open */
    }
    rpc_stream_unref(stream);
}

void rpc_stream_peer(struct rpc_stream *stream, char *out, size_t out_bytes)
{
    char *peer = NULL;
    pthread_mutex_lock(&stream->lock);
    if (stream->call)
        peer = grpc_call_get_peer(stream->call);
    pthread_mutex_unlock(&stream->lock);
    snprintf(out, out_bytes, "%s", peer ? peer : "");
    gpr_free(peer);
}
