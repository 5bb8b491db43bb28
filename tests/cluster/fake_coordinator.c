#include "tests/cluster/fake_coordinator.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"

void coordinator_send(struct coordinator *c, const Tally__V1__Order *order)
{
    struct tally_error err;
    if (rpc_stream_send(c->stream, &order->base, &err))
        fail_msg("%s", err.message);
}

static void on_register(struct coordinator *c, struct rpc_stream *stream, const Tally__V1__Register *reg)
{
    assert_true(c->registers < 16);
    c->incarnations[c->registers++] = reg->incarnation;
    c->major = reg->version ? reg->version->major : 0;
    c->role = reg->role;
    snprintf(c->name, sizeof c->name, "%s", reg->name);
    snprintf(c->isa, sizeof c->isa, "%s", reg->isa);
    snprintf(c->backend, sizeof c->backend, "%s", reg->backend);
    snprintf(c->node_address, sizeof c->node_address, "%s", reg->address);
    if (c->answer == ANSWER_REFUSE)
        rpc_stream_finish(stream, TALLY_ESTATE, c->refusal);
    if (c->answer != ANSWER_ACCEPT)
        return;
    c->stream = stream;
    Tally__V1__Registered registered = TALLY__V1__REGISTERED__INIT;
    registered.lease_ms = c->lease_ms;
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_REGISTERED;
    order.registered = &registered;
    coordinator_send(c, &order);
}

static void on_heartbeat(struct coordinator *c, struct rpc_stream *stream, const Tally__V1__Heartbeat *beat)
{
    c->beats++;
    snprintf(c->activity, sizeof c->activity, "%s", beat->activity);
    if (!c->acknowledge || stream != c->stream)
        return;
    Tally__V1__HeartbeatAck ack = TALLY__V1__HEARTBEAT_ACK__INIT;
    ack.seq = beat->seq;
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_HEARTBEAT_ACK;
    order.heartbeat_ack = &ack;
    coordinator_send(c, &order);
}

static void on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct coordinator *c = user;
    rpc_stream_grant(stream, 1);
    const Tally__V1__NodeMessage *m = (const Tally__V1__NodeMessage *)message->header;
    if (m->body_case == TALLY__V1__NODE_MESSAGE__BODY_REGISTER)
        on_register(c, stream, m->register_);
    else if (m->body_case == TALLY__V1__NODE_MESSAGE__BODY_HEARTBEAT)
        on_heartbeat(c, stream, m->heartbeat);
    else if (c->on_report)
        c->on_report(m, c->user);
}

static void on_half_close(struct rpc_stream *stream, void *user)
{
    struct coordinator *c = user;
    c->half_closes++;
    rpc_stream_finish(stream, TALLY_OK, NULL);
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)end;
    struct coordinator *c = user;
    c->ends++;
    c->open_streams--;
    if (stream == c->stream)
        c->stream = NULL;
}

static void on_open(struct rpc_stream *stream, void *user)
{
    struct coordinator *c = user;
    static const struct rpc_stream_events events = {
        .on_message = on_message, .on_half_close = on_half_close, .on_end = on_end};
    struct rpc_stream_options options = {.credits = 8};
    rpc_stream_accept(stream, &events, c, &options);
    c->open_streams++;
}

void coordinator_serve(struct coordinator *c)
{
    static const struct rpc_method methods[] = {{.name = "Join", .on_open = on_open}};
    struct rpc_service service = {&tally__v1__cluster__descriptor, c->queue, methods, 1, c};
    struct tally_error err = {0};
    c->stopped = false;
    if (rpc_server_new(c->queue, NULL, &c->server, &err) || rpc_server_add(c->server, &service, &err) ||
        rpc_server_listen(c->server, c->address, NULL, 0, &err) || rpc_server_start(c->server, &err))
        fail_msg("%s", err.message);
}

static void on_wake(uv_timer_t *timer)
{
    (void)timer;
}

bool coordinator_run(struct coordinator *c, bool (*condition)(const void *user), const void *user, int64_t wait_ms)
{
    uv_timer_t timer;
    uv_timer_init(&c->loop, &timer);
    uv_timer_start(&timer, on_wake, 1, 5); /* so that a run of the loop returns */
    int64_t deadline = tally_now_ns() + wait_ms * 1000000;
    bool met = false;
    while (!(met = condition(user)) && tally_now_ns() < deadline)
        uv_run(&c->loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&c->loop, UV_RUN_NOWAIT);
    return met;
}

static void on_stopped(void *user)
{
    ((struct coordinator *)user)->stopped = true;
}

static bool is_stopped(const void *user)
{
    return ((const struct coordinator *)user)->stopped;
}

static bool no_streams(const void *user)
{
    return ((const struct coordinator *)user)->open_streams == 0;
}

void coordinator_unserve(struct coordinator *c)
{
    rpc_server_stop(c->server, 0, on_stopped, c);
    assert_true(coordinator_run(c, is_stopped, c, WAIT_MS));
    rpc_server_free(c->server);
    c->server = NULL;
}

struct coordinator *coordinator_new(enum answer answer, bool acknowledge)
{
    struct coordinator *c = calloc(1, sizeof *c);
    assert_non_null(c);
    c->answer = answer;
    c->acknowledge = acknowledge;
    c->lease_ms = LEASE_MS;
    assert_int_equal(uv_loop_init(&c->loop), 0);
    struct tally_error err;
    if (rpc_loop_queue_new(&c->loop, &c->queue, &err))
        fail_msg("%s", err.message);
    snprintf(c->directory, sizeof c->directory, "/tmp/tally-coordinator-XXXXXX");
    assert_non_null(mkdtemp(c->directory));
    snprintf(c->address, sizeof c->address, "unix:%s/c.sock", c->directory);
    return c;
}

void coordinator_free(struct coordinator *c)
{
    assert_true(coordinator_run(c, no_streams, c, WAIT_MS));
    if (c->server)
        coordinator_unserve(c);
    rpc_queue_free(c->queue);
    uv_run(&c->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&c->loop), 0);
    rmdir(c->directory);
    free(c);
}
