#ifndef PROTO_RPC_H
#define PROTO_RPC_H
/*
 * Calls and streams of protobuf-c messages over gRPC. Nothing outside proto/ includes a gRPC header.
 *
 * R1  A queue is where callbacks run. A loop queue runs them on the thread of a uv_loop; a data queue runs them inside
 * rpc_queue_poll, on the thread that calls it. Every call, stream and served method belongs to one queue, and all of
 * its callbacks run there, one at a time. R2  Every function on a stream (send, grant, finish, cancel, ref, unref) may
 * be called from any thread, also inside callbacks. They never block and never run a callback themselves. Everything
 * else belongs to the queue's thread, unless it says otherwise. R3  A stream ends with exactly one on_end, after which
 * no callback of it runs. The handle is good until on_end returns, or longer for who holds a reference; functions on an
 * ended stream do nothing and return TALLY_ECANCELLED. R4  Nothing is unbounded: what is sent waits in a queue with a
 * bound on messages and on bytes; what is received needs a credit for each message. Without credits nothing is read and
 * HTTP/2 flow control holds the sender back. R5  A message whose last field (highest number) is a singular `bytes`
 * field is a data message: Push.gradient, Update.weights, TensorMessage.data, ResultChunk.data. This field, the
 * payload, is neither packed nor unpacked: it is sent from the caller's memory and received as segments, by reference.
 * On the wire it is the same as if protobuf-c had packed it all.
 */
#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <uv.h>

#include "common/error.h"

/* Once a process, before anything else here and after everything else has been freed. A process may not fork in between
 * without exec. Also tells malloc to keep the pages of buffers that it will be asked for again (mallopt). */
void rpc_global_init(void);
void rpc_global_shutdown(void);

/* ---- queues ---- */

struct rpc_queue;

/*
 * A loop queue: callbacks run on the loop's thread; a thread of its own waits for the network. The queue keeps the loop
 * alive until it is freed. Errors: TALLY_ENOMEM, TALLY_EIO (no thread).
 */
tally_status rpc_loop_queue_new(uv_loop_t *loop, struct rpc_queue **ret_queue, struct tally_error *err);

/*
 * A loop queue without a thread of its own, for a process with a data thread that is inside rpc_queue_poll all but some
 * milliseconds of the time: it is `data`'s poll that waits for the network for both, and hands what belongs to the loop
 * over to the loop's thread. gRPC has one poller for the whole process, whichever thread came first: with two, a
 * message for the data thread may take a detour of 15-30 us. `data` must be polled until all on it has ended, and freed
 * after it. Errors: TALLY_ENOMEM, TALLY_EIO.
 */
tally_status rpc_loop_queue_join(uv_loop_t *loop, struct rpc_queue *data, struct rpc_queue **ret_queue,
                                 struct tally_error *err);

/* A data queue: nothing happens on it unless somebody is inside rpc_queue_poll. */
tally_status rpc_data_queue_new(struct rpc_queue **ret_queue, struct tally_error *err);

/*
 * Data queues: waits until something happens or deadline_ns (tally_now_ns's clock; one that has passed means: do not
 * wait) and runs the callbacks that are due, at most a bounded number before it returns. One thread at a time. Returns
 * how many events were handled, 0 where the deadline passed or rpc_queue_wake was called.
 */
unsigned rpc_queue_poll(struct rpc_queue *queue, int64_t deadline_ns);

/* Data queues, any thread: makes the poll that is waiting now, or else the next one, return. Cheap when called again
 * before that. */
void rpc_queue_wake(struct rpc_queue *queue);

/* A piece of work for the queue's thread. Embed it; it must stay where it is until run was called. */
struct rpc_task {
    void (*run)(struct rpc_task *task);
    struct rpc_task *next; /* the queue's */
};

/* Any thread: has task->run called once on the queue's thread, soon, in the order of posting. Wakes the queue. */
void rpc_queue_post(struct rpc_queue *queue, struct rpc_task *task);

/*
 * Every stream, call and server on it must have ended (servers: been freed). NULL is allowed. Not inside a callback of
 * the queue. Loop queues: on the loop's thread; the loop must run once more to release its handles. Data queues: from
 * the polling thread, or after it has ended.
 */
void rpc_queue_free(struct rpc_queue *queue);

/* ---- messages ---- */

/* A received payload: bytes in segments, by reference. Counted references; reading is for one thread at a time per
 * reader. */
struct rpc_payload;

/* Any thread. A reference keeps the network's buffers alive (bounded by credits: grant again when it is released).
 * unref takes NULL and returns NULL. */
struct rpc_payload *rpc_payload_ref(struct rpc_payload *payload);
struct rpc_payload *rpc_payload_unref(struct rpc_payload *payload);
size_t rpc_payload_bytes(const struct rpc_payload *payload);

/* Segments in order: false behind the last. *position is 0 before the first call. Segments are never empty, and have
 * any alignment and length. */
bool rpc_payload_segment(const struct rpc_payload *payload, size_t *position, const void **ret_data, size_t *ret_bytes);

/* Copies bytes [offset, offset + bytes) to out. They must lie within the payload. */
void rpc_payload_copy(const struct rpc_payload *payload, size_t offset, size_t bytes, void *out);

/* Copies the whole payload to out. TALLY_EINVAL, nothing written: it is not `count` little-endian f32. */
tally_status rpc_payload_copy_floats(const struct rpc_payload *payload, float *out, size_t count,
                                     struct tally_error *err);

/*
 * Reads a payload of f32 as runs of aligned floats, without copying but for the floats that straddle two segments and
 * segments off alignment, which go through `bounce`. The payload's length must be a multiple of 4 (check with
 * rpc_payload_bytes); a rest is not returned. Keep the reader where it was initialised until it is done with.
 */
#define RPC_BOUNCE_FLOATS 1024
struct rpc_payload_reader {
    const struct rpc_payload *payload;
    size_t position; /* of the next segment */
    const unsigned char *data;
    size_t bytes; /* left of the current segment */
    _Alignas(64) float bounce[RPC_BOUNCE_FLOATS];
};
void rpc_payload_reader_init(struct rpc_payload_reader *reader, const struct rpc_payload *payload);
/* false: no float is left. The run is good until the next call. */
bool rpc_payload_reader_next(struct rpc_payload_reader *reader, const float **ret_run, size_t *ret_count);

/* A received message, good during the callback that got it. */
struct rpc_message {
    const ProtobufCMessage *header; /* of the method's type; its payload field is empty */
    struct rpc_payload *payload; /* NULL unless it is a data message; may have 0 bytes. Take a reference to keep it. */
};

/* ---- streams and calls, both sides ---- */

struct rpc_stream;

struct rpc_stream_events {
    /* A message came; it has used one credit. Messages come in order. */
    void (*on_message)(struct rpc_stream *stream, const struct rpc_message *message, void *user);
    /* Server: the client will send no more. Seen only while there is a credit, as a message would be. May be NULL. */
    void (*on_half_close)(struct rpc_stream *stream, void *user);
    /* After a send was refused for want of room: there is room again. May be NULL. */
    void (*on_writable)(struct rpc_stream *stream, void *user);
    /*
     * The last callback; what was received before the end is delivered first, and needs credits. Client: how the server
     * ended the stream, or why it was lost (TALLY_OK, or the code and the server's text). Server: TALLY_OK: the status
     * given to rpc_stream_finish has been sent; TALLY_ECANCELLED: the client cancelled, its deadline passed, or the
     * connection was lost. Everything queued has been sent or dropped, and every payload's release will run or has run.
     */
    void (*on_end)(struct rpc_stream *stream, const struct tally_error *end, void *user);
};

/* 0 means the default everywhere. */
struct rpc_stream_options {
    unsigned credits;             /* messages that may come before the first rpc_stream_grant; 0: none */
    unsigned max_queued_messages; /* default RPC_QUEUED_MESSAGES */
    size_t max_queued_bytes;      /* default RPC_QUEUED_BYTES; one message always fits an empty queue */
    int64_t timeout_ms;  /* client: the stream ends with TALLY_ETIMEDOUT after this; 0: never (unary: the default
                            RPC_TIMEOUT_MS) */
    bool wait_for_ready; /* client: wait for a server that is not there yet, until timeout_ms (which must be given),
                            instead of TALLY_EUNAVAIL */
};

#define RPC_QUEUED_MESSAGES 64       /* enough to keep a connection busy while the queue's thread does something else */
#define RPC_QUEUED_BYTES (16u << 20) /* 16 slices */
#define RPC_TIMEOUT_MS 10000         /* a lease: who has not answered by then is lost */

/*
 * Queues a message. It is packed before this returns; of a data message, a payload that stands in its field is copied.
 * TALLY_ENOMEM: the queue is full, nothing was taken, on_writable will tell. TALLY_EINVAL: above
 * TALLY_MESSAGE_MAX_BYTES, or closed by close/finish before. TALLY_ECANCELLED: the stream has ended or is ending;
 * on_end tells why.
 */
tally_status rpc_stream_send(struct rpc_stream *stream, const ProtobufCMessage *message, struct tally_error *err);

/*
 * Queues a data message: header (its payload field empty) and `bytes` bytes at payload, which are not copied. They must
 * stay unchanged until release(release_user) is called, once, from any thread (also before this returns), when the
 * bytes have been copied to the socket or dropped. It is called if and only if TALLY_OK is returned; release must not
 * call into this library except rpc_queue_post and rpc_queue_wake, and must not take a lock that some thread holds
 * while it calls into this library. Errors as rpc_stream_send, and TALLY_EINVAL where
 * header is no data message.
 */
tally_status rpc_stream_send_payload(struct rpc_stream *stream, const ProtobufCMessage *header, const void *payload,
                                     size_t bytes, void (*release)(void *user), void *release_user,
                                     struct tally_error *err);

/* Lets `messages` more messages come. */
void rpc_stream_grant(struct rpc_stream *stream, unsigned messages);

/* Client: no more messages will be sent; goes out behind what is queued. */
void rpc_stream_close(struct rpc_stream *stream);

/*
 * Server, inside on_open or on_request (before it returns) and before finish: takes the stream up. events are copied,
 * options may be NULL. R3 holds from then on.
 */
void rpc_stream_accept(struct rpc_stream *stream, const struct rpc_stream_events *events, void *user,
                       const struct rpc_stream_options *options);

/* Server: ends the stream with a status behind what is queued. text: for a person, NULL for none; cut at
 * TALLY_ERROR_MESSAGE_MAX. The first call counts. */
void rpc_stream_finish(struct rpc_stream *stream, tally_status status, const char *text);
/* The same with the code and message of an error. */
void rpc_stream_finish_error(struct rpc_stream *stream, const struct tally_error *error);
/* Server: sends the one reply of a unary call and ends it with TALLY_OK (or, if it cannot be sent, with the reason). */
void rpc_stream_reply(struct rpc_stream *stream, const ProtobufCMessage *reply);

/* Ends the stream now, dropping what is queued. on_end follows, with TALLY_ECANCELLED unless the end was already on its
 * way. */
void rpc_stream_cancel(struct rpc_stream *stream);

struct rpc_stream *rpc_stream_ref(struct rpc_stream *stream);
struct rpc_stream *rpc_stream_unref(struct rpc_stream *stream); /* NULL is allowed; returns NULL */

/* Bytes and messages given to send and not yet accepted by flow control. */
size_t rpc_stream_queued_bytes(struct rpc_stream *stream);
unsigned rpc_stream_queued_messages(struct rpc_stream *stream);

/* "unix:/run/tally.sock" or "ipv4:127.0.0.1:5000": a hint for people, not an identity. Empty once the stream has ended.
 */
void rpc_stream_peer(struct rpc_stream *stream, char *out, size_t out_bytes);

/* ---- client ---- */

struct rpc_channel;
struct rpc_credentials; /* reserved for TLS */

struct rpc_channel_options {
    bool own_connection;                       /* do not share a socket with other channels to the same address */
    const struct rpc_credentials *credentials; /* NULL: plaintext */
};

/*
 * address: "unix:/path" or "host:port". options may be NULL. Connects when it is first used, and again when it is used
 * after a loss. A call while nobody listens there ends with TALLY_EUNAVAIL at once. Errors: TALLY_EINVAL with what is
 * wrong with the address.
 */
tally_status rpc_channel_new(const char *address, const struct rpc_channel_options *options,
                             struct rpc_channel **ret_channel, struct tally_error *err);
/* Calls that are under way go on. NULL is allowed. Any thread. */
void rpc_channel_free(struct rpc_channel *channel);

/*
 * Opens a stream: method is a name of the service ("Exchange"), e.g. of &tally__v1__parameters__descriptor. events are
 * copied. Also for server streaming (send the one request, then rpc_stream_close) and client streaming. The handle is
 * lent to the caller until on_end returns (R3). Errors here are the caller's (TALLY_EINVAL, TALLY_ENOTFOUND: no such
 * method); what the network says comes with on_end.
 */
tally_status rpc_stream_open(struct rpc_channel *channel, struct rpc_queue *queue,
                             const ProtobufCServiceDescriptor *service, const char *method,
                             const struct rpc_stream_events *events, void *user,
                             const struct rpc_stream_options *options, struct rpc_stream **ret_stream,
                             struct tally_error *err);

/* reply: NULL unless end->code is TALLY_OK; good during the callback. */
typedef void (*rpc_unary_done)(const struct tally_error *end, const struct rpc_message *reply, void *user);

/*
 * One request, one reply; done is called exactly once if TALLY_OK is returned. options may be NULL (timeout_ms and
 * wait_for_ready count). ret_stream may be NULL; the handle is for rpc_stream_cancel and good until done returns, or
 * longer with a reference.
 */
tally_status rpc_unary(struct rpc_channel *channel, struct rpc_queue *queue, const ProtobufCServiceDescriptor *service,
                       const char *method, const ProtobufCMessage *request, const struct rpc_stream_options *options,
                       rpc_unary_done done, void *user, struct rpc_stream **ret_stream, struct tally_error *err);

/*
 * The same, blocking, on a queue of its own: for command lines and tests. Any thread that may block. *ret_reply is
 * freed with protobuf_c_message_free_unpacked(reply, NULL); a payload is in its field. Returns what the server said.
 */
tally_status rpc_unary_wait(struct rpc_channel *channel, const ProtobufCServiceDescriptor *service, const char *method,
                            const ProtobufCMessage *request, const struct rpc_stream_options *options,
                            ProtobufCMessage **ret_reply, struct tally_error *err);

/* ---- server ---- */

struct rpc_server;

/*
 * One method of a service. Which callback is set must fit how the .proto declares the request:
 * one request (unary and server streaming) or a stream of them.
 */
struct rpc_method {
    const char *name; /* "Submit" */
    /*
     * One request came. Unary: answer with rpc_stream_reply or rpc_stream_finish, now or later; the handle is good
     * until then (answering a client that has gone is harmless). Server streaming: call rpc_stream_accept to be told of
     * on_writable and on_end (R3 holds from then on), and send.
     */
    void (*on_request)(struct rpc_stream *stream, const struct rpc_message *request, void *user);
    /* A stream of requests was opened: call rpc_stream_accept, or rpc_stream_finish to refuse it, before returning. */
    void (*on_open)(struct rpc_stream *stream, void *user);
};

struct rpc_service {
    const ProtobufCServiceDescriptor *descriptor;
    struct rpc_queue *queue; /* where its callbacks run; several services may name the same descriptor with different
                                methods and queues */
    const struct rpc_method *methods;
    size_t method_count; /* methods of the descriptor that are not here answer UNIMPLEMENTED */
    void *user;
};

struct rpc_server_options {
    unsigned max_streams; /* calls and streams of one connection at a time; default RPC_SERVER_STREAMS */
    size_t memory_bytes;  /* what the network's buffers of this server may take; must hold every payload that is kept.
                             Default: half of the machine's */
    bool allow_plaintext_network; /* without it only UNIX and loopback addresses are listened on, as there is no TLS yet
                                   */
    const struct rpc_credentials *credentials; /* NULL: plaintext */
};
#define RPC_SERVER_STREAMS 256 /* a connection is one node: its streams and its calls under way are far fewer */

/* queue: for health, reflection, unknown methods and the end of the server: a loop queue, or a data queue that is
 * polled. options may be NULL. */
tally_status rpc_server_new(struct rpc_queue *queue, const struct rpc_server_options *options,
                            struct rpc_server **ret_server, struct tally_error *err);

/* Before rpc_server_start. Copies what it needs; user must outlive the server. TALLY_EINVAL: a method that is not in
 * the descriptor, or twice. */
tally_status rpc_server_add(struct rpc_server *server, const struct rpc_service *service, struct tally_error *err);

/*
 * Before rpc_server_start, once for each address: "unix:/path" or "host:port" (port 0: any). ret_address (may be NULL;
 * RPC_ADDRESS_MAX is always enough) gets the address to connect to, with the port that was bound. A stale UNIX socket
 * is replaced if nobody listens on it. Errors say what and why: TALLY_EEXIST: somebody listens there; TALLY_EINVAL:
 * path too long, no such host; TALLY_ENOTFOUND, TALLY_EIO: the directory.
 */
#define RPC_ADDRESS_MAX 256
tally_status rpc_server_listen(struct rpc_server *server, const char *address, char *ret_address, size_t ret_bytes,
                               struct tally_error *err);

tally_status rpc_server_start(struct rpc_server *server, struct tally_error *err);

/* grpc.health.v1: service is a full name ("tally.v1.Jobs"), "" for the whole server. From rpc_server_start on
 * everything is SERVING until told. */
void rpc_server_set_serving(struct rpc_server *server, const char *service, bool serving);

/*
 * Ends the server: health says NOT_SERVING, no new call is taken, those under way have drain_ms to end and are then
 * cancelled. All queues must go on being polled until on_stopped(user) was called, on the server's queue, after the
 * last on_end. Call once, after rpc_server_start.
 */
void rpc_server_stop(struct rpc_server *server, int64_t drain_ms, void (*on_stopped)(void *user), void *user);

/* After on_stopped (also inside it), or of a server that was never started. Removes its UNIX sockets. NULL is allowed.
 */
void rpc_server_free(struct rpc_server *server);

/* ---- status codes ---- */

/* gRPC's numbers (0 OK .. 16 UNAUTHENTICATED). Every tally_status survives the way there and back. */
int rpc_status_to_grpc(tally_status status);
tally_status rpc_status_from_grpc(int code);
#endif
