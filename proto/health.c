/* grpc.health.v1: https://github.com/grpc/grpc/blob/master/doc/health-checking.md . All of it runs on the server's
 * queue. */
#include <stdlib.h>
#include <string.h>

#include "proto/health.pb-c.h"
#include "proto/rpc_internal.h"

#define NAME_MAX_BYTES 128

typedef Grpc__Health__V1__HealthCheckResponse__ServingStatus serving_status;
#define SERVING GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVING
#define NOT_SERVING GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__NOT_SERVING
#define SERVICE_UNKNOWN GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__SERVING_STATUS__SERVICE_UNKNOWN

struct entry {
    struct entry *next;
    serving_status status;
    char name[NAME_MAX_BYTES];
};

struct watch {
    struct watch *next;
    struct rpc_health *health;
    struct rpc_stream *stream;
    int sent; /* the status that the client has been told; -1: none */
    char name[NAME_MAX_BYTES];
};

struct rpc_health {
    struct entry *entries;
    struct watch *watches;
    bool stopped;
};

static serving_status look_up(const struct rpc_health *health, const char *name)
{
    for (const struct entry *e = health->entries; e; e = e->next)
        if (strcmp(e->name, name) == 0)
            return e->status;
    return SERVICE_UNKNOWN;
}

static const char *asked_name(const struct rpc_message *request)
{
    return ((const Grpc__Health__V1__HealthCheckRequest *)request->header)->service;
}

static void on_check(struct rpc_stream *stream, const struct rpc_message *request, void *user)
{
    Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    response.status = look_up(user, asked_name(request));
    if (response.status == SERVICE_UNKNOWN)
        rpc_stream_finish(stream, TALLY_ENOTFOUND, "no such service");
    else
        rpc_stream_reply(stream, &response.base);
}

/* Only the newest status counts: one that finds no room is sent when there is. */
static void tell(struct watch *watch)
{
    Grpc__Health__V1__HealthCheckResponse response = GRPC__HEALTH__V1__HEALTH_CHECK_RESPONSE__INIT;
    response.status = look_up(watch->health, watch->name);
    if ((int)response.status != watch->sent && rpc_stream_send(watch->stream, &response.base, NULL) == TALLY_OK)
        watch->sent = (int)response.status;
}

static void watch_writable(struct rpc_stream *stream, void *user)
{
    (void)stream;
    tell(user);
}

static void watch_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    (void)end;
    struct watch *watch = user;
    for (struct watch **at = &watch->health->watches; *at; at = &(*at)->next) {
        if (*at == watch) {
            *at = watch->next;
            break;
        }
    }
    free(watch);
}

static void on_watch(struct rpc_stream *stream, const struct rpc_message *request, void *user)
{
    static const struct rpc_stream_events events = {.on_writable = watch_writable, .on_end = watch_end};
    static const struct rpc_stream_options options = {.max_queued_messages = 2};
    struct rpc_health *health = user;
    const char *name = asked_name(request);
    if (strlen(name) >= NAME_MAX_BYTES) {
        rpc_stream_finish(stream, TALLY_EINVAL, "the service's name is too long");
        return;
    }
    struct watch *watch = health->stopped ? NULL : calloc(1, sizeof *watch);
    if (!watch) {
        rpc_stream_finish(stream, TALLY_EUNAVAIL, health->stopped ? "the server is shutting down" : "no memory");
        return;
    }
    watch->health = health;
    watch->stream = stream;
    watch->sent = -1;
    memcpy(watch->name, name, strlen(name) + 1);
    watch->next = health->watches;
    health->watches = watch;
    rpc_stream_accept(stream, &events, watch, &options);
    tell(watch);
}

struct rpc_health *rpc_health_new(void)
{
    struct rpc_health *health = calloc(1, sizeof *health);
    if (health && !rpc_health_set(health, "", true)) {
        free(health);
        health = NULL;
    }
    return health;
}

tally_status rpc_health_add(struct rpc_health *health, struct rpc_server *server, struct rpc_queue *queue,
                            struct tally_error *err)
{
    static const struct rpc_method methods[] = {{.name = "Check", .on_request = on_check},
                                                {.name = "Watch", .on_request = on_watch}};
    struct rpc_service service = {.descriptor = &grpc__health__v1__health__descriptor,
                                  .queue = queue,
                                  .methods = methods,
                                  .method_count = 2,
                                  .user = health};
    return rpc_server_add(server, &service, err);
}

bool rpc_health_set(struct rpc_health *health, const char *service, bool serving)
{
    struct entry *e = health->entries;
    while (e && strcmp(e->name, service) != 0)
        e = e->next;
    if (!e) {
        if (strlen(service) >= NAME_MAX_BYTES)
            return false;
        e = calloc(1, sizeof *e);
        if (!e)
            return false;
        memcpy(e->name, service, strlen(service) + 1);
        e->next = health->entries;
        health->entries = e;
    }
    if (health->stopped)
        serving = false;
    e->status = serving ? SERVING : NOT_SERVING;
    for (struct watch *w = health->watches; w; w = w->next)
        tell(w);
    return true;
}

void rpc_health_stop(struct rpc_health *health)
{
    health->stopped = true;
    for (struct entry *e = health->entries; e; e = e->next)
        e->status = NOT_SERVING;
    for (struct watch *w = health->watches; w; w = w->next) {
        tell(w);
        rpc_stream_finish(w->stream, TALLY_EUNAVAIL, "the server is shutting down");
    }
}

void rpc_health_free(struct rpc_health *health)
{
    if (!health)
        return;
    while (health->entries) {
        struct entry *next = health->entries->next;
        free(health->entries);
        health->entries = next;
    }
    free(health);
}
