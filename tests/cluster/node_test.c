/* A node against a coordinator that this test plays, over real RPC on a UNIX socket, all on one loop. */
#include "cluster/node.h"

#include <inttypes.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/limits.h"

#define LEASE_MS 150
#define WAIT_MS 10000

enum answer { ANSWER_ACCEPT, ANSWER_REFUSE, ANSWER_SILENCE };

/* What the coordinator of the test does, and what it has seen. */
struct coordinator {
    uv_loop_t loop;
    struct rpc_queue *queue;
    struct rpc_server *server;
    char directory[64], address[128];
    enum answer answer;
    const char *refusal;
    bool acknowledge;
    struct rpc_stream *stream; /* of the node */
    unsigned open_streams;
    unsigned registers, beats, half_closes, ends;
    uint64_t incarnations[16];
    uint32_t major;
    char name[32], activity[64], isa[16], node_address[64];
    Tally__V1__Role role;
    uint64_t started_job;
    bool stopped;
};

/* What the node told its owner. */
struct owner {
    struct coordinator *c;
    struct node *node;
    unsigned registered, orders, lost, failed;
    uint64_t order_job;
    char why[TALLY_ERROR_MESSAGE_MAX];
    bool closed, close_when_lost, send_when_registered;
};

static void send_order(struct coordinator *c, Tally__V1__Order *order)
{
    struct tally_error err;
    if (rpc_stream_send(c->stream, &order->base, &err))
        fail_msg("%s", err.message);
}

static void c_on_register(struct coordinator *c, struct rpc_stream *stream, const Tally__V1__Register *reg)
{
    assert_true(c->registers < 16);
    c->incarnations[c->registers++] = reg->incarnation;
    c->major = reg->version ? reg->version->major : 0;
    c->role = reg->role;
    snprintf(c->name, sizeof c->name, "%s", reg->name);
    snprintf(c->isa, sizeof c->isa, "%s", reg->isa);
    snprintf(c->node_address, sizeof c->node_address, "%s", reg->address);
    if (c->answer == ANSWER_REFUSE)
        rpc_stream_finish(stream, TALLY_ESTATE, c->refusal);
    if (c->answer != ANSWER_ACCEPT)
        return;
    c->stream = stream;
    Tally__V1__Registered registered = TALLY__V1__REGISTERED__INIT;
    registered.lease_ms = LEASE_MS;
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_REGISTERED;
    order.registered = &registered;
    send_order(c, &order);
}

static void c_on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct coordinator *c = user;
    rpc_stream_grant(stream, 1);
    const Tally__V1__NodeMessage *m = (const Tally__V1__NodeMessage *)message->header;
    if (m->body_case == TALLY__V1__NODE_MESSAGE__BODY_REGISTER) {
        c_on_register(c, stream, m->register_);
    } else if (m->body_case == TALLY__V1__NODE_MESSAGE__BODY_HEARTBEAT) {
        c->beats++;
        snprintf(c->activity, sizeof c->activity, "%s", m->heartbeat->activity);
        if (!c->acknowledge || stream != c->stream)
            return;
        Tally__V1__HeartbeatAck ack = TALLY__V1__HEARTBEAT_ACK__INIT;
        ack.seq = m->heartbeat->seq;
        Tally__V1__Order order = TALLY__V1__ORDER__INIT;
        order.body_case = TALLY__V1__ORDER__BODY_HEARTBEAT_ACK;
        order.heartbeat_ack = &ack;
        send_order(c, &order);
    } else if (m->body_case == TALLY__V1__NODE_MESSAGE__BODY_STARTED) {
        c->started_job = m->started->job;
    }
}

static void c_on_half_close(struct rpc_stream *stream, void *user)
{
    struct coordinator *c = user;
    c->half_closes++;
    rpc_stream_finish(stream, TALLY_OK, NULL);
}

static void c_on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)end;
    struct coordinator *c = user;
    c->ends++;
    c->open_streams--;
    if (stream == c->stream)
        c->stream = NULL;
}

static void c_on_open(struct rpc_stream *stream, void *user)
{
    struct coordinator *c = user;
    static const struct rpc_stream_events events = {
        .on_message = c_on_message, .on_half_close = c_on_half_close, .on_end = c_on_end};
    struct rpc_stream_options options = {.credits = 8};
    rpc_stream_accept(stream, &events, c, &options);
    c->open_streams++;
}

static void serve(struct coordinator *c)
{
    static const struct rpc_method methods[] = {{.name = "Join", .on_open = c_on_open}};
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

/* Runs the loop until *condition is true, or for so long. */
static bool run_until(struct coordinator *c, bool (*condition)(const struct owner *o), const struct owner *o,
                      int64_t wait_ms)
{
    uv_timer_t timer;
    uv_timer_init(&c->loop, &timer);
    uv_timer_start(&timer, on_wake, 1, 5); /* so that a run of the loop returns */
    int64_t deadline = tally_now_ns() + wait_ms * 1000000;
    bool met = false;
    while (!(met = condition(o)) && tally_now_ns() < deadline)
        uv_run(&c->loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&timer, NULL);
    uv_run(&c->loop, UV_RUN_NOWAIT);
    return met;
}

static void on_stopped(void *user)
{
    ((struct coordinator *)user)->stopped = true;
}

static bool is_stopped(const struct owner *o)
{
    return o->c->stopped;
}

static void unserve(struct owner *o)
{
    rpc_server_stop(o->c->server, 0, on_stopped, o->c);
    assert_true(run_until(o->c, is_stopped, o, WAIT_MS));
    rpc_server_free(o->c->server);
    o->c->server = NULL;
}

static void on_registered(struct node *node, void *user)
{
    struct owner *o = user;
    o->registered++;
    if (!o->send_when_registered)
        return;
    Tally__V1__Started started = TALLY__V1__STARTED__INIT;
    started.job = 77;
    Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;
    message.body_case = TALLY__V1__NODE_MESSAGE__BODY_STARTED;
    message.started = &started;
    assert_int_equal(node_send(node, &message, NULL), TALLY_OK);
}

static void on_order(struct node *node, const Tally__V1__Order *order, void *user)
{
    (void)node;
    struct owner *o = user;
    o->orders++;
    if (order->body_case == TALLY__V1__ORDER__BODY_END_JOB)
        o->order_job = order->end_job->job;
}

static void on_closed(void *user)
{
    ((struct owner *)user)->closed = true;
}

static void on_lost(struct node *node, const struct tally_error *why, void *user)
{
    struct owner *o = user;
    o->lost++;
    snprintf(o->why, sizeof o->why, "%s", why->message);
    if (o->close_when_lost)
        node_close(node, on_closed, o);
}

static void on_failed(struct node *node, const struct tally_error *why, void *user)
{
    (void)node;
    struct owner *o = user;
    o->failed++;
    snprintf(o->why, sizeof o->why, "%s", why->message);
}

static void activity(struct node *node, char *text, size_t size, void *user)
{
    (void)node;
    (void)user;
    snprintf(text, size, "waits for a job");
}

static struct owner *setup(enum answer answer, bool acknowledge)
{
    struct owner *o = calloc(1, sizeof *o);
    struct coordinator *c = calloc(1, sizeof *c);
    assert_non_null(o);
    assert_non_null(c);
    o->c = c;
    c->answer = answer;
    c->acknowledge = acknowledge;
    assert_int_equal(uv_loop_init(&c->loop), 0);
    struct tally_error err;
    if (rpc_loop_queue_new(&c->loop, 1, &c->queue, &err))
        fail_msg("%s", err.message);
    snprintf(c->directory, sizeof c->directory, "/tmp/tally-node-test-XXXXXX");
    assert_non_null(mkdtemp(c->directory));
    snprintf(c->address, sizeof c->address, "unix:%s/c.sock", c->directory);
    return o;
}

static void open_node(struct owner *o, int64_t join_timeout_ms)
{
    static const struct node_events events = {on_registered, on_order, on_lost, on_failed, activity};
    struct node_options options = {.role = TALLY__V1__ROLE__WORKER,
                                   .name = "w3",
                                   .coordinator = o->c->address,
                                   .address = "unix:/nowhere/w3.sock",
                                   .backend = "cpu",
                                   .isa = "avx2",
                                   .join_timeout_ms = join_timeout_ms};
    struct tally_error err;
    if (node_open(o->c->queue, &o->c->loop, &options, &events, o, &o->node, &err))
        fail_msg("%s", err.message);
}

static bool is_closed(const struct owner *o)
{
    return o->closed;
}

static bool no_streams(const struct owner *o)
{
    return o->c->open_streams == 0;
}

static void teardown(struct owner *o)
{
    struct coordinator *c = o->c;
    if (o->node && !o->close_when_lost)
        node_close(o->node, on_closed, o);
    assert_true(!o->node || run_until(c, is_closed, o, WAIT_MS));
    assert_true(run_until(c, no_streams, o, WAIT_MS));
    if (c->server)
        unserve(o);
    rpc_queue_free(c->queue);
    uv_run(&c->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&c->loop), 0);
    rmdir(c->directory);
    free(c);
    free(o);
}

static bool has_registered(const struct owner *o)
{
    return o->registered >= 1;
}

static bool has_registered_again(const struct owner *o)
{
    return o->registered >= 2;
}

static bool has_ten_beats(const struct owner *o)
{
    return o->c->beats >= 10;
}

static bool has_lost(const struct owner *o)
{
    return o->lost >= 1;
}

static bool has_failed(const struct owner *o)
{
    return o->failed >= 1;
}

static bool has_order(const struct owner *o)
{
    return o->orders >= 1;
}

static bool is_started(const struct owner *o)
{
    return o->c->started_job != 0;
}

static void test_registers_and_beats(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    serve(o->c);
    o->send_when_registered = true;
    open_node(o, 5000);
    assert_true(run_until(o->c, has_registered, o, WAIT_MS));
    assert_int_equal(o->c->major, TALLY_PROTOCOL_MAJOR);
    assert_int_equal(o->c->role, TALLY__V1__ROLE__WORKER);
    assert_string_equal(o->c->name, "w3");
    assert_string_equal(o->c->isa, "avx2");
    assert_string_equal(o->c->node_address, "unix:/nowhere/w3.sock");
    int64_t start = tally_now_ns();
    assert_true(run_until(o->c, has_ten_beats, o, WAIT_MS));
    /* 9 pauses of a third of the lease, some of which may have passed already: neither a flood nor too seldom. */
    int64_t took_ms = (tally_now_ns() - start) / 1000000;
    assert_true(took_ms >= 7 * (LEASE_MS / 3));
    assert_string_equal(o->c->activity, "waits for a job");
    assert_true(run_until(o->c, is_started, o, WAIT_MS));
    assert_int_equal(o->c->started_job, 77);
    assert_int_equal(o->registered, 1);
    assert_int_equal(o->lost, 0);
    teardown(o);
}

static void test_hands_orders_over(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    serve(o->c);
    open_node(o, 5000);
    assert_true(run_until(o->c, has_registered, o, WAIT_MS));
    Tally__V1__EndJob end = TALLY__V1__END_JOB__INIT;
    end.job = 12;
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_END_JOB;
    order.end_job = &end;
    send_order(o->c, &order);
    assert_true(run_until(o->c, has_order, o, WAIT_MS));
    assert_int_equal(o->order_job, 12);
    assert_int_equal(o->orders, 1); /* Registered and the acknowledgements stay inside */
    teardown(o);
}

static void test_lost_lease(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, false);
    serve(o->c);
    open_node(o, 5000);
    assert_true(run_until(o->c, has_registered, o, WAIT_MS));
    int64_t start = tally_now_ns();
    assert_true(run_until(o->c, has_lost, o, WAIT_MS));
    int64_t took_ms = (tally_now_ns() - start) / 1000000;
    assert_true(took_ms >= LEASE_MS - 60);
    assert_non_null(strstr(o->why, "acknowledged no heartbeat"));
    assert_non_null(strstr(o->why, o->c->address));
    /* It comes back as a new incarnation. */
    o->c->acknowledge = true;
    assert_true(run_until(o->c, has_registered_again, o, WAIT_MS));
    assert_true(o->c->incarnations[0] != o->c->incarnations[1]);
    teardown(o);
}

static void test_coordinator_restarts(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    serve(o->c);
    open_node(o, 0);
    assert_true(run_until(o->c, has_registered, o, WAIT_MS));
    unserve(o);
    assert_true(run_until(o->c, has_lost, o, WAIT_MS));
    assert_int_equal(o->lost, 1);
    Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;
    struct tally_error err;
    assert_int_equal(node_send(o->node, &message, &err), TALLY_EUNAVAIL);
    serve(o->c);
    assert_true(run_until(o->c, has_registered_again, o, WAIT_MS));
    assert_int_equal(o->lost, 1);
    assert_int_equal(o->failed, 0);
    teardown(o);
}

static void test_waits_for_a_coordinator(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    open_node(o, 20000);
    assert_false(run_until(o->c, has_registered, o, 300));
    serve(o->c);
    assert_true(run_until(o->c, has_registered, o, WAIT_MS));
    assert_int_equal(o->lost, 0);
    teardown(o);
}

static void test_gives_up(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    open_node(o, 400);
    int64_t start = tally_now_ns();
    assert_true(run_until(o->c, has_failed, o, WAIT_MS));
    int64_t took_ms = (tally_now_ns() - start) / 1000000;
    assert_true(took_ms >= 390 && took_ms < 5000);
    assert_non_null(strstr(o->why, "could not be reached within 400 ms"));
    assert_int_equal(o->lost, 0);
    teardown(o);
}

static void test_refused(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_REFUSE, true);
    o->c->refusal = "a worker named w3 is there already";
    serve(o->c);
    open_node(o, 0);
    assert_true(run_until(o->c, has_failed, o, WAIT_MS));
    assert_non_null(strstr(o->why, "refused w3: "));
    assert_non_null(strstr(o->why, "a worker named w3 is there already"));
    assert_int_equal(o->c->registers, 1);
    teardown(o);
}

static void test_refused_for_its_version(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_REFUSE, true);
    o->c->refusal = "w3 speaks protocol 1.0, this coordinator 2.0";
    serve(o->c);
    open_node(o, 0);
    assert_true(run_until(o->c, has_failed, o, WAIT_MS));
    assert_non_null(strstr(o->why, "w3 speaks protocol 1.0, this coordinator 2.0"));
    teardown(o);
}

/* Its own last incarnation is in the way after a loss: that passes with its lease. */
static void test_refused_after_a_loss(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, false);
    serve(o->c);
    open_node(o, 0);
    assert_true(run_until(o->c, has_registered, o, WAIT_MS));
    o->c->answer = ANSWER_REFUSE;
    o->c->refusal = "w3 is alive";
    assert_true(run_until(o->c, has_lost, o, WAIT_MS));
    assert_false(run_until(o->c, has_failed, o, LEASE_MS));
    o->c->answer = ANSWER_ACCEPT;
    o->c->acknowledge = true;
    assert_true(run_until(o->c, has_registered_again, o, WAIT_MS));
    o->c->acknowledge = false;
    o->c->answer = ANSWER_REFUSE;
    assert_true(run_until(o->c, has_failed, o, WAIT_MS)); /* but not for ever */
    assert_non_null(strstr(o->why, "w3 is alive"));
    teardown(o);
}

static void test_closed_inside_a_callback(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, false);
    o->close_when_lost = true;
    serve(o->c);
    open_node(o, 0);
    assert_true(run_until(o->c, is_closed, o, WAIT_MS));
    assert_int_equal(o->lost, 1);
    teardown(o);
}

static void test_leaves_with_a_half_close(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    serve(o->c);
    open_node(o, 0);
    assert_true(run_until(o->c, has_registered, o, WAIT_MS));
    int64_t start = tally_now_ns();
    node_close(o->node, on_closed, o);
    assert_true(run_until(o->c, is_closed, o, WAIT_MS));
    assert_true(tally_now_ns() - start < 900 * (int64_t)1000000); /* it does not sit the time-out out */
    assert_int_equal(o->c->half_closes, 1);
    o->node = NULL;
    teardown(o);
}

static void test_closes_while_nobody_answers(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_SILENCE, true);
    serve(o->c);
    open_node(o, 0);
    run_until(o->c, has_registered, o, 100);
    assert_int_equal(o->registered, 0);
    teardown(o);
}

static void test_refuses_a_wrong_address(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    static const struct node_events events = {on_registered, on_order, on_lost, on_failed, activity};
    struct node_options options = {
        .role = TALLY__V1__ROLE__SHARD, .name = "s0", .coordinator = "no address", .address = "x:1"};
    struct tally_error err;
    struct node *node = NULL;
    assert_int_equal(node_open(o->c->queue, &o->c->loop, &options, &events, o, &node, &err), TALLY_EINVAL);
    assert_null(node);
    teardown(o);
}

static int global_setup(void **state)
{
    (void)state;
    rpc_global_init();
    return 0;
}

static int global_teardown(void **state)
{
    (void)state;
    rpc_global_shutdown();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_registers_and_beats),
        cmocka_unit_test(test_hands_orders_over),
        cmocka_unit_test(test_lost_lease),
        cmocka_unit_test(test_coordinator_restarts),
        cmocka_unit_test(test_waits_for_a_coordinator),
        cmocka_unit_test(test_gives_up),
        cmocka_unit_test(test_refused),
        cmocka_unit_test(test_refused_for_its_version),
        cmocka_unit_test(test_refused_after_a_loss),
        cmocka_unit_test(test_closed_inside_a_callback),
        cmocka_unit_test(test_leaves_with_a_half_close),
        cmocka_unit_test(test_closes_while_nobody_answers),
        cmocka_unit_test(test_refuses_a_wrong_address),
    };
    return cmocka_run_group_tests(tests, global_setup, global_teardown);
}
