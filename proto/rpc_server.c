/*
 * A server: its methods, the requests for new calls, and its end.
 *
 * Each method keeps SLOTS requests with gRPC; a slot's tag comes out on the method's queue when a call arrives, is
 * posted again at once, and the call becomes a stream. The server is stopped when gRPC has shut down, every slot has
 * come back and every stream has ended; slots and streams live on several queues, so their numbers are under the lock,
 * and whoever sees them all at zero posts the end to the server's own queue.
 */
#include <grpc/grpc_security.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "common/check.h"
#include "common/clock.h"
#include "common/limits.h"
#include "proto/descriptors.h"
#include "proto/rpc_internal.h"

#define SLOTS 2
#define QUEUES_MAX 16
#define LISTEN_MAX 8
#define STREAM_WINDOW_BYTES (2 << 20)

struct served;

struct slot {
    struct rpc_op op;
    struct served *served;
    grpc_call *call;
    grpc_byte_buffer *payload;
    gpr_timespec deadline;
    grpc_metadata_array metadata;
    grpc_call_details details; /* of the method that stands for all unknown ones */
};

struct served {
    struct served *next;
    struct rpc_server *server;
    struct rpc_queue *queue;
    struct rpc_method method; /* its name is in path */
    void *user;
    const ProtobufCServiceDescriptor *service; /* NULL: unknown methods */
    const ProtobufCMessageDescriptor *input, *output;
    char path[RPC_PATH_MAX];
    void *registered;
    struct slot slots[SLOTS];
};

struct rpc_server {
    struct rpc_queue *queue;
    grpc_server *server;
    grpc_resource_quota *quota;
    bool allow_network;
    bool started;
    struct served *methods; /* newest first */
    struct rpc_queue *queues[QUEUES_MAX];
    size_t queue_count;
    char *unix_paths[LISTEN_MAX];
    size_t listen_count;
    struct rpc_health *health;
    struct rpc_descriptors *descriptors;
    struct rpc_reflection *reflection;

    pthread_mutex_t lock;
    unsigned slots;   /* with gRPC */
    unsigned streams; /* not ended */
    bool stopping;
    bool shut_down; /* gRPC has */
    bool stopped;

    struct rpc_op shutdown_op;
    struct rpc_timer drain;
    struct rpc_task stop_task;
    void (*on_stopped)(void *user);
    void *stopped_user;
};

/* ---- calls ---- */

static void run_stopped(struct rpc_task *task)
{
    struct rpc_server *server = RPC_CONTAINER(task, struct rpc_server, stop_task);
    if (server->on_stopped)
        server->on_stopped(server->stopped_user);
}

/* Under the lock, after a number went down: whether this was the last thing; then post the end after unlocking. */
static bool is_over(struct rpc_server *server)
{
    if (!server->stopping || !server->shut_down || server->stopped || server->slots > 0 || server->streams > 0)
        return false;
    server->stopped = true;
    return true;
}

static void stream_ended(void *context)
{
    struct rpc_server *server = context;
    pthread_mutex_lock(&server->lock);
    server->streams--;
    bool over = is_over(server);
    pthread_mutex_unlock(&server->lock);
    if (over)
        rpc_queue_post(server->queue, &server->stop_task);
}

static void slot_done(struct rpc_op *op, bool ok);

/* Under the lock. */
static void post_slot(struct slot *slot)
{
    struct served *served = slot->served;
    grpc_completion_queue *cq = rpc_queue_cq(served->queue);
    slot->op.done = slot_done;
    slot->call = NULL;
    slot->payload = NULL;
    grpc_call_error e;
    rpc_op_arm(&slot->op, served->queue);
    if (served->registered)
        e = grpc_server_request_registered_call(served->server->server, served->registered, &slot->call,
                                                &slot->deadline, &slot->metadata,
                                                served->method.on_request ? &slot->payload : NULL, cq, cq, &slot->op);
    else
        e = grpc_server_request_call(served->server->server, &slot->call, &slot->details, &slot->metadata, cq, cq,
                                     &slot->op);
    tally_check(e == GRPC_CALL_OK); /* our own misuse: the method would never be served again */
    served->server->slots++;
}

static void refuse_unknown(struct rpc_stream *stream, void *user)
{
    char text[RPC_PATH_MAX + 64];
    snprintf(text, sizeof text, "no such method: %s", (const char *)user);
    rpc_stream_finish(stream, TALLY_EUNSUPPORTED, text);
}

static void refuse_stopping(struct rpc_stream *stream, void *user)
{
    (void)user;
    rpc_stream_finish(stream, TALLY_EUNAVAIL, "the server is shutting down");
}

static void serve(struct served *served, grpc_call *call, grpc_byte_buffer *payload, const char *path, bool stopping)
{
    static const struct rpc_method unknown = {.on_open = refuse_unknown};
    static const struct rpc_method late = {.on_open = refuse_stopping};
    struct rpc_stream *stream = rpc_stream_create(served->queue, call, true, path, served->output, served->input);
    if (!stream) { /* no memory: without a call object there is nobody to answer with */
        grpc_call_cancel(call, NULL);
        grpc_call_unref(call);
        stream_ended(served->server);
        if (payload)
            grpc_byte_buffer_destroy(payload);
        return;
    }
    char name[RPC_PATH_MAX]; /* the stream may be gone when a handler reads it */
    snprintf(name, sizeof name, "%s", path);
    rpc_stream_start_server(stream, stream_ended, served->server);
    if (stopping || !served->service) {
        if (payload)
            grpc_byte_buffer_destroy(payload);
        rpc_stream_dispatch(stream, stopping ? &late : &unknown, name, NULL);
    } else {
        rpc_stream_dispatch(stream, &served->method, served->user, payload);
    }
}

static void slot_done(struct rpc_op *op, bool ok)
{
    struct slot *slot = RPC_CONTAINER(op, struct slot, op);
    struct served *served = slot->served;
    struct rpc_server *server = served->server;
    char path[RPC_PATH_MAX];
    pthread_mutex_lock(&server->lock);
    server->slots--;
    grpc_call *call = ok ? slot->call : NULL;
    grpc_byte_buffer *payload = ok ? slot->payload : NULL;
    snprintf(path, sizeof path, "%s", served->path);
    if (ok && !served->service) {
        int n = (int)GRPC_SLICE_LENGTH(slot->details.method);
        snprintf(path, sizeof path, "%.*s", n, (const char *)GRPC_SLICE_START_PTR(slot->details.method));
        grpc_call_details_destroy(&slot->details);
        grpc_call_details_init(&slot->details);
    }
    grpc_metadata_array_destroy(&slot->metadata);
    grpc_metadata_array_init(&slot->metadata);
    bool stopping = server->stopping;
    if (call)
        server->streams++;
    if (ok && !stopping)
        post_slot(slot);
    bool over = is_over(server);
    pthread_mutex_unlock(&server->lock);
    if (call)
        serve(served, call, payload, path, stopping);
    else if (over)
        rpc_queue_post(server->queue, &server->stop_task);
}

/* ---- making one ---- */

static size_t half_of_memory(void)
{
    long pages = sysconf(_SC_PHYS_PAGES), size = sysconf(_SC_PAGESIZE);
    return pages > 0 && size > 0 ? (size_t)pages / 2 * (size_t)size : (size_t)1 << 30;
}

static void create_server(struct rpc_server *server, const struct rpc_server_options *options)
{
    grpc_arg args[RPC_ARGS_MAX];
    size_t n = rpc_common_args(args);
    int streams =
        options->max_streams > 0 && options->max_streams < INT32_MAX ? (int)options->max_streams : RPC_SERVER_STREAMS;
    args[n++] = rpc_int_arg(GRPC_ARG_MAX_CONCURRENT_STREAMS, streams);
    args[n++] =
        rpc_int_arg(GRPC_ARG_ALLOW_REUSEPORT, 0); /* two servers on one port would share its clients by chance */
    /* What a client may send ahead of being read is memory of ours: fixed, not as much as the network could carry. */
    args[n++] = rpc_int_arg(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    args[n++] = rpc_int_arg(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, STREAM_WINDOW_BYTES);
    args[n++] = rpc_int_arg(GRPC_ARG_KEEPALIVE_TIME_MS, 20000);
    args[n++] = rpc_int_arg(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
    args[n++] = rpc_int_arg(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS, 10000); /* below the clients' 20 s */
    args[n++] = rpc_int_arg(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, 10000);
    server->quota = grpc_resource_quota_create("tally");
    grpc_resource_quota_resize(server->quota, options->memory_bytes ? options->memory_bytes : half_of_memory());
    args[n] = (grpc_arg){.type = GRPC_ARG_POINTER, .key = (char *)(uintptr_t)GRPC_ARG_RESOURCE_QUOTA};
    args[n].value.pointer.p = server->quota;
    args[n++].value.pointer.vtable = grpc_resource_quota_arg_vtable();
    grpc_channel_args all = {.num_args = n, .args = args};
    server->server = grpc_server_create(&all, NULL);
}

static tally_status use_queue(struct rpc_server *server, struct rpc_queue *queue, struct tally_error *err)
{
    for (size_t i = 0; i < server->queue_count; i++)
        if (server->queues[i] == queue)
            return TALLY_OK;
    if (server->queue_count == QUEUES_MAX)
        return tally_fail(err, TALLY_ENOMEM, "a server has at most %d queues", QUEUES_MAX);
    server->queues[server->queue_count++] = queue;
    grpc_server_register_completion_queue(server->server, rpc_queue_cq(queue), NULL);
    return TALLY_OK;
}

static struct served *new_served(struct rpc_server *server, struct rpc_queue *queue)
{
    struct served *served = calloc(1, sizeof *served);
    if (!served)
        return NULL;
    served->server = server;
    served->queue = queue;
    for (size_t i = 0; i < SLOTS; i++) {
        served->slots[i].served = served;
        grpc_metadata_array_init(&served->slots[i].metadata);
        grpc_call_details_init(&served->slots[i].details);
    }
    served->next = server->methods;
    server->methods = served;
    return served;
}

tally_status rpc_server_new(struct rpc_queue *queue, const struct rpc_server_options *options,
                            struct rpc_server **ret_server, struct tally_error *err)
{
    static const struct rpc_server_options defaults;
    if (!options)
        options = &defaults;
    if (options->credentials)
        return tally_fail(err, TALLY_EUNSUPPORTED, "TLS is not in this build");
    struct rpc_server *server = calloc(1, sizeof *server);
    if (!server)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a server");
    pthread_mutex_init(&server->lock, NULL);
    server->queue = queue;
    server->allow_network = options->allow_plaintext_network;
    server->stop_task.run = run_stopped;
    create_server(server, options);
    tally_status status = use_queue(server, queue, err);
    if (!status)
        status = rpc_descriptors_new(&server->descriptors, err);
    if (status)
        goto fail;
    server->health = rpc_health_new();
    server->reflection = rpc_reflection_new(server->descriptors);
    if (!server->health || !server->reflection || !new_served(server, queue)) {
        status = tally_fail(err, TALLY_ENOMEM, "no memory for a server");
        goto fail;
    }
    status = rpc_health_add(server->health, server, queue, err);
    if (!status)
        status = rpc_reflection_add(server->reflection, server, queue, err);
    if (status)
        goto fail;
    *ret_server = server;
    return TALLY_OK;
fail:
    rpc_server_free(server);
    return status;
}

static tally_status check_method(struct rpc_server *server, const struct rpc_service *service,
                                 const struct rpc_method *method, const char *path, struct tally_error *err)
{
    bool streaming;
    if (!method->on_request == !method->on_open)
        return tally_fail(err, TALLY_EINVAL, "%s needs either on_request or on_open", path);
    if (rpc_descriptors_method(server->descriptors, service->descriptor->name, method->name, &streaming) &&
        streaming != !!method->on_open)
        return tally_fail(err, TALLY_EINVAL, "%s takes %s", path,
                          streaming ? "a stream: on_open" : "one request: on_request");
    for (const struct served *s = server->methods; s; s = s->next)
        if (strcmp(s->path, path) == 0)
            return tally_fail(err, TALLY_EINVAL, "%s is served twice", path);
    return TALLY_OK;
}

static tally_status add_method(struct rpc_server *server, const struct rpc_service *service,
                               const struct rpc_method *method, struct tally_error *err)
{
    char path[RPC_PATH_MAX];
    unsigned index = 0;
    tally_status status = rpc_method_path(service->descriptor, method->name, path, &index, err);
    if (!status)
        status = check_method(server, service, method, path, err);
    if (status)
        return status;
    struct served *served = new_served(server, service->queue);
    if (!served)
        return tally_fail(err, TALLY_ENOMEM, "no memory for %s", path);
    served->method = *method;
    served->method.name = NULL;
    served->user = service->user;
    served->service = service->descriptor;
    served->input = service->descriptor->methods[index].input;
    served->output = service->descriptor->methods[index].output;
    memcpy(served->path, path, sizeof path);
    served->registered = grpc_server_register_method(
        server->server, served->path, NULL,
        method->on_request ? GRPC_SRM_PAYLOAD_READ_INITIAL_BYTE_BUFFER : GRPC_SRM_PAYLOAD_NONE, 0);
    if (!served->registered)
        return tally_fail(err, TALLY_EINTERNAL, "gRPC did not register %s", path);
    return TALLY_OK;
}

tally_status rpc_server_add(struct rpc_server *server, const struct rpc_service *service, struct tally_error *err)
{
    if (server->started)
        return tally_fail(err, TALLY_ESTATE, "%s: the server has been started", service->descriptor->name);
    tally_status status = use_queue(server, service->queue, err);
    for (size_t i = 0; !status && i < service->method_count; i++)
        status = add_method(server, service, &service->methods[i], err);
    if (!status && !rpc_health_set(server->health, service->descriptor->name, true))
        status = tally_fail(err, TALLY_ENOMEM, "no memory for %s", service->descriptor->name);
    return status;
}

tally_status rpc_server_listen(struct rpc_server *server, const char *address, char *ret_address, size_t ret_bytes,
                               struct tally_error *err)
{
    struct rpc_address parsed;
    char target[RPC_TARGET_MAX];
    if (server->started || server->listen_count == LISTEN_MAX)
        return tally_fail(err, TALLY_ESTATE, "cannot listen on %.200s: the server %s", address,
                          server->started ? "has been started" : "has too many addresses");
    tally_status status = rpc_address_parse(address, &parsed, err);
    if (!status)
        status = rpc_address_probe(&parsed, server->allow_network, target, err);
    if (status)
        return status;
    grpc_server_credentials *credentials = grpc_insecure_server_credentials_create();
    int port = grpc_server_add_http2_port(server->server, target, credentials);
    grpc_server_credentials_release(credentials);
    if (port <= 0)
        return tally_fail(err, TALLY_EIO, "cannot listen on %.200s: refused, though it was free just now", address);
    char *path = parsed.is_unix ? strdup(parsed.path) : NULL;
    server->unix_paths[server->listen_count++] = path; /* without memory the file stays behind, as after a crash */
    if (!ret_address)
        return TALLY_OK;
    if (parsed.is_unix)
        snprintf(ret_address, ret_bytes, "unix:%s", parsed.path);
    else
        snprintf(ret_address, ret_bytes, strchr(parsed.host, ':') ? "[%s]:%d" : "%s:%d", parsed.host, port);
    return TALLY_OK;
}

tally_status rpc_server_start(struct rpc_server *server, struct tally_error *err)
{
    if (server->started)
        return tally_fail(err, TALLY_ESTATE, "the server has been started before");
    server->started = true;
    grpc_server_start(server->server);
    pthread_mutex_lock(&server->lock);
    for (struct served *served = server->methods; served; served = served->next)
        for (size_t i = 0; i < SLOTS; i++)
            post_slot(&served->slots[i]);
    pthread_mutex_unlock(&server->lock);
    return TALLY_OK;
}

void rpc_server_set_serving(struct rpc_server *server, const char *service, bool serving)
{
    rpc_health_set(server->health, service, serving);
}

void rpc_server_services(const struct rpc_server *server, void (*each)(const char *name, void *context), void *context)
{
    for (const struct served *s = server->methods; s; s = s->next) {
        bool seen = !s->service;
        for (const struct served *t = s->next; t && !seen; t = t->next)
            seen = t->service && strcmp(t->service->name, s->service->name) == 0;
        if (!seen)
            each(s->service->name, context);
    }
}

/* ---- its end ---- */

static void shutdown_done(struct rpc_op *op, bool ok)
{
    (void)ok;
    struct rpc_server *server = RPC_CONTAINER(op, struct rpc_server, shutdown_op);
    rpc_timer_stop(server->queue, &server->drain);
    pthread_mutex_lock(&server->lock);
    server->shut_down = true;
    bool over = is_over(server);
    pthread_mutex_unlock(&server->lock);
    if (over)
        rpc_queue_post(server->queue, &server->stop_task);
}

static void drain_over(struct rpc_timer *timer)
{
    struct rpc_server *server = RPC_CONTAINER(timer, struct rpc_server, drain);
    grpc_server_cancel_all_calls(server->server);
}

void rpc_server_stop(struct rpc_server *server, int64_t drain_ms, void (*on_stopped)(void *user), void *user)
{
    pthread_mutex_lock(&server->lock);
    bool again = server->stopping;
    server->stopping = true;
    pthread_mutex_unlock(&server->lock);
    if (again || !server->started)
        return;
    server->on_stopped = on_stopped;
    server->stopped_user = user;
    rpc_health_stop(server->health);
    rpc_reflection_stop(server->reflection);
    server->shutdown_op.done = shutdown_done;
    server->drain.fired = drain_over;
    rpc_op_arm(&server->shutdown_op, server->queue);
    rpc_timer_start(server->queue, &server->drain, tally_now_ns() + (drain_ms > 0 ? drain_ms : 0) * 1000000);
    grpc_server_shutdown_and_notify(server->server, rpc_queue_cq(server->queue), &server->shutdown_op);
}

/* gRPC wants a shutdown before the end also where nothing was started. Nothing runs, so this is short. */
static void shut_down_unstarted(struct rpc_server *server)
{
    grpc_completion_queue *cq = grpc_completion_queue_create_for_next(NULL);
    gpr_timespec deadline = gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC), gpr_time_from_seconds(10, GPR_TIMESPAN));
    grpc_server_shutdown_and_notify(server->server, cq, NULL);
    grpc_completion_queue_next(cq, deadline, NULL);
    grpc_completion_queue_shutdown(cq);
    while (grpc_completion_queue_next(cq, deadline, NULL).type == GRPC_OP_COMPLETE)
        ;
    grpc_completion_queue_destroy(cq);
}

void rpc_server_free(struct rpc_server *server)
{
    if (!server)
        return;
    if (!server->started)
        shut_down_unstarted(server);
    grpc_server_destroy(server->server);
    grpc_resource_quota_unref(server->quota);
    for (size_t i = 0; i < server->listen_count; i++) {
        if (server->unix_paths[i])
            unlink(server->unix_paths[i]);
        free(server->unix_paths[i]);
    }
    while (server->methods) {
        struct served *next = server->methods->next;
        for (size_t i = 0; i < SLOTS; i++) {
            grpc_metadata_array_destroy(&server->methods->slots[i].metadata);
            grpc_call_details_destroy(&server->methods->slots[i].details);
        }
        free(server->methods);
        server->methods = next;
    }
    rpc_reflection_free(server->reflection);
    rpc_descriptors_free(server->descriptors);
    rpc_health_free(server->health);
    pthread_mutex_destroy(&server->lock);
    free(server);
}
