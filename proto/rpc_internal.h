#ifndef PROTO_RPC_INTERNAL_H
#define PROTO_RPC_INTERNAL_H
/*
 * DESIGN of the wrapper. For proto/rpc*.c, health.c and reflection.c alone.
 *
 * A gRPC tag is always a struct rpc_op, embedded in what it belongs to (stream, request slot, server). Its done() runs
 * on its queue's thread: of a data queue inside rpc_queue_poll; of a loop queue its poll thread (or the data queue that
 * it is joined to) posts the op to the loop.
 *
 * A stream's mutable state is under its lock, which is held around every grpc_call_start_batch (gRPC wants batches of
 * one call serialised) and never around a callback. Each outstanding batch counts in `pending`; the end is reported
 * when the final batch (status, or close on a server) and all others have been handled. Then the call is given back, so
 * gRPC can shut down whatever references a user still holds.
 */
#include <grpc/grpc.h>
#include <pthread.h>
#include <stdatomic.h>

#include "proto/rpc.h"
#include "proto/wire.h"

struct rpc_op {
    void (*done)(struct rpc_op *op, bool ok);
    struct rpc_queue *queue;  /* whose thread runs done */
    struct rpc_task handover; /* to the loop's thread, with ok */
    bool ok;
    atomic_bool armed;
};

/*
 * gRPC orders what was written before a batch was started before what its completion reads, by locks that a race
 * detector does not see inside of. These say it again: arm before every start, taken on every completion.
 */
static inline void rpc_op_arm(struct rpc_op *op, struct rpc_queue *queue)
{
    op->queue = queue;
    atomic_store_explicit(&op->armed, true, memory_order_release);
}
static inline struct rpc_op *rpc_op_taken(void *tag)
{
    struct rpc_op *op = tag;
    (void)atomic_load_explicit(&op->armed, memory_order_acquire);
    return op;
}

#define RPC_CONTAINER(pointer, type, member) ((type *)(void *)((char *)(pointer)-offsetof(type, member)))

/* ---- queue ---- */

grpc_completion_queue *rpc_queue_cq(struct rpc_queue *queue);

/* A timer of a queue; start and stop on the queue's thread. fired runs there, once. */
struct rpc_timer {
    void (*fired)(struct rpc_timer *timer);
    int64_t deadline_ns;
    struct rpc_timer *next;
    bool armed;
};
void rpc_timer_start(struct rpc_queue *queue, struct rpc_timer *timer, int64_t deadline_ns);
void rpc_timer_stop(struct rpc_queue *queue, struct rpc_timer *timer);

/* ---- messages ---- */

/*
 * Unpacks a received message into arena (reset first) and takes over buffer. ret_message->payload is one reference for
 * the caller. TALLY_EINVAL: no such message.
 */
tally_status rpc_message_decode(grpc_byte_buffer *buffer, const ProtobufCMessageDescriptor *type,
                                struct wire_arena *arena, struct rpc_message *ret_message, struct tally_error *err);

/* A message as protobuf-c's own: to be freed with protobuf_c_message_free_unpacked(m, NULL). NULL: out of memory. */
ProtobufCMessage *rpc_message_copy(const struct rpc_message *message);

/* ---- streams ---- */

/* "/package.Service/Method"; NULL: no such method. The index of the method goes to ret_index. */
#define RPC_PATH_MAX 192
tally_status rpc_method_path(const ProtobufCServiceDescriptor *service, const char *method, char path[RPC_PATH_MAX],
                             unsigned *ret_index, struct tally_error *err);

/* A stream of which no batch has been started. path is copied. Takes over call. sends and receives may be NULL:
 * nothing. */
struct rpc_stream *rpc_stream_create(struct rpc_queue *queue, grpc_call *call, bool server, const char *path,
                                     const ProtobufCMessageDescriptor *sends,
                                     const ProtobufCMessageDescriptor *receives);
/* Before the first batch, or in accept. */
void rpc_stream_configure(struct rpc_stream *stream, const struct rpc_stream_events *events, void *user,
                          const struct rpc_stream_options *options);
/* Client: queues a first message and a close before the start, so that all goes in one batch. request may be NULL: a
 * stream. */
tally_status rpc_stream_start_client(struct rpc_stream *stream, const ProtobufCMessage *request, int64_t timeout_ms,
                                     bool wait_for_ready, struct tally_error *err);
/* Server: waits for the end; ended(context) is called behind on_end. */
void rpc_stream_start_server(struct rpc_stream *stream, void (*ended)(void *context), void *context);
/* Server: runs a handler on a stream; buffer is the first message (taken over) of on_request. */
void rpc_stream_dispatch(struct rpc_stream *stream, const struct rpc_method *method, void *user,
                         grpc_byte_buffer *buffer);

/* ---- channels and addresses ---- */

/* What every channel and server is set to. Returns how many were written; quota may be NULL. */
#define RPC_ARGS_MAX 32
size_t rpc_common_args(grpc_arg args[RPC_ARGS_MAX]);
grpc_arg rpc_int_arg(const char *key, int value);

#define RPC_TARGET_MAX 512
struct rpc_address {
    bool is_unix;
    char path[108]; /* UNIX */
    char host[128]; /* else, without brackets */
    unsigned port;
};
tally_status rpc_address_parse(const char *text, struct rpc_address *ret_address, struct tally_error *err);
/* What gRPC understands. */
void rpc_address_target(const struct rpc_address *address, char target[RPC_TARGET_MAX]);
/*
 * Whether a server may listen there: tries bind() for the reason that gRPC does not give, and removes a socket file
 * that nobody listens on. ret_target is what to give to gRPC: a numeric address.
 */
tally_status rpc_address_probe(const struct rpc_address *address, bool allow_network, char ret_target[RPC_TARGET_MAX],
                               struct tally_error *err);

/* ---- built-in services ---- */

struct rpc_health;
struct rpc_health *rpc_health_new(void);
tally_status rpc_health_add(struct rpc_health *health, struct rpc_server *server, struct rpc_queue *queue,
                            struct tally_error *err);
/* false: no memory for another name. */
bool rpc_health_set(struct rpc_health *health, const char *service, bool serving);
/* Tells everybody NOT_SERVING and ends the watches. */
void rpc_health_stop(struct rpc_health *health);
void rpc_health_free(struct rpc_health *health);

struct rpc_descriptors; /* descriptors.h */
struct rpc_reflection;
struct rpc_reflection *rpc_reflection_new(const struct rpc_descriptors *descriptors);
tally_status rpc_reflection_add(struct rpc_reflection *reflection, struct rpc_server *server, struct rpc_queue *queue,
                                struct tally_error *err);
/* Ends what is open. */
void rpc_reflection_stop(struct rpc_reflection *reflection);
void rpc_reflection_free(struct rpc_reflection *reflection);
/* Calls each(name, context) for every service the server has. */
void rpc_server_services(const struct rpc_server *server, void (*each)(const char *name, void *context), void *context);
#endif
