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
#include "tests/cluster/fake_coordinator.h"

/* What the node told its owner. */
struct owner {
    struct coordinator *c;
    uint64_t started_job;
    struct node *node;
    unsigned registered, orders, lost, failed;
    uint64_t order_job;
    char why[TALLY_ERROR_MESSAGE_MAX];
    bool closed, close_when_lost, send_when_registered;
};

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

static void on_report(const Tally__V1__NodeMessage *message, void *user)
{
    if (message->body_case == TALLY__V1__NODE_MESSAGE__BODY_STARTED)
        ((struct owner *)user)->started_job = message->started->job;
}

static struct owner *setup(enum answer answer, bool acknowledge)
{
    struct owner *o = calloc(1, sizeof *o);
    assert_non_null(o);
    o->c = coordinator_new(answer, acknowledge);
    o->c->on_report = on_report;
    o->c->user = o;
    return o;
}

static bool run_until(const struct owner *o, bool (*condition)(const void *user), int64_t wait_ms)
{
    return coordinator_run(o->c, condition, o, wait_ms);
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

static bool is_closed(const void *user)
{
    const struct owner *o = user;
    return o->closed;
}

static void teardown(struct owner *o)
{
    if (o->node && !o->close_when_lost)
        node_close(o->node, on_closed, o);
    assert_true(!o->node || run_until(o, is_closed, WAIT_MS));
    coordinator_free(o->c);
    free(o);
}

static bool has_registered(const void *user)
{
    const struct owner *o = user;
    return o->registered >= 1;
}

static bool has_registered_again(const void *user)
{
    const struct owner *o = user;
    return o->registered >= 2;
}

static bool has_ten_beats(const void *user)
{
    const struct owner *o = user;
    return o->c->beats >= 10;
}

static bool has_lost(const void *user)
{
    const struct owner *o = user;
    return o->lost >= 1;
}

static bool has_failed(const void *user)
{
    const struct owner *o = user;
    return o->failed >= 1;
}

static bool has_order(const void *user)
{
    const struct owner *o = user;
    return o->orders >= 1;
}

static bool is_started(const void *user)
{
    const struct owner *o = user;
    return o->started_job != 0;
}

static void test_registers_and_beats(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    coordinator_serve(o->c);
    o->send_when_registered = true;
    open_node(o, 5000);
    assert_true(run_until(o, has_registered, WAIT_MS));
    assert_int_equal(o->c->major, TALLY_PROTOCOL_MAJOR);
    assert_int_equal(o->c->role, TALLY__V1__ROLE__WORKER);
    assert_string_equal(o->c->name, "w3");
    assert_string_equal(o->c->isa, "avx2");
    assert_string_equal(o->c->node_address, "unix:/nowhere/w3.sock");
    int64_t start = tally_now_ns();
    assert_true(run_until(o, has_ten_beats, WAIT_MS));
    /* 9 pauses of a third of the lease, some of which may have passed already: neither a flood nor too seldom. */
    int64_t took_ms = (tally_now_ns() - start) / 1000000;
    assert_true(took_ms >= 7 * (LEASE_MS / 3));
    assert_string_equal(o->c->activity, "waits for a job");
    assert_true(run_until(o, is_started, WAIT_MS));
    assert_int_equal(o->started_job, 77);
    assert_int_equal(o->registered, 1);
    assert_int_equal(o->lost, 0);
    teardown(o);
}

static void test_hands_orders_over(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    coordinator_serve(o->c);
    open_node(o, 5000);
    assert_true(run_until(o, has_registered, WAIT_MS));
    Tally__V1__EndJob end = TALLY__V1__END_JOB__INIT;
    end.job = 12;
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_END_JOB;
    order.end_job = &end;
    coordinator_send(o->c, &order);
    assert_true(run_until(o, has_order, WAIT_MS));
    assert_int_equal(o->order_job, 12);
    assert_int_equal(o->orders, 1); /* Registered and the acknowledgements stay inside */
    teardown(o);
}

static void test_lost_lease(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, false);
    coordinator_serve(o->c);
    open_node(o, 5000);
    assert_true(run_until(o, has_registered, WAIT_MS));
    int64_t start = tally_now_ns();
    assert_true(run_until(o, has_lost, WAIT_MS));
    int64_t took_ms = (tally_now_ns() - start) / 1000000;
    assert_true(took_ms >= LEASE_MS - 60);
    assert_non_null(strstr(o->why, "acknowledged no heartbeat"));
    assert_non_null(strstr(o->why, o->c->address));
    /* It comes back as a new incarnation. */
    o->c->acknowledge = true;
    assert_true(run_until(o, has_registered_again, WAIT_MS));
    assert_true(o->c->incarnations[0] != o->c->incarnations[1]);
    teardown(o);
}

static void test_coordinator_restarts(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    coordinator_serve(o->c);
    open_node(o, 0);
    assert_true(run_until(o, has_registered, WAIT_MS));
    coordinator_unserve(o->c);
    assert_true(run_until(o, has_lost, WAIT_MS));
    assert_int_equal(o->lost, 1);
    Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;
    struct tally_error err;
    assert_int_equal(node_send(o->node, &message, &err), TALLY_EUNAVAIL);
    coordinator_serve(o->c);
    assert_true(run_until(o, has_registered_again, WAIT_MS));
    assert_int_equal(o->lost, 1);
    assert_int_equal(o->failed, 0);
    teardown(o);
}

static void test_waits_for_a_coordinator(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    open_node(o, 20000);
    assert_false(run_until(o, has_registered, 300));
    coordinator_serve(o->c);
    assert_true(run_until(o, has_registered, WAIT_MS));
    assert_int_equal(o->lost, 0);
    teardown(o);
}

static void test_gives_up(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    open_node(o, 400);
    int64_t start = tally_now_ns();
    assert_true(run_until(o, has_failed, WAIT_MS));
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
    coordinator_serve(o->c);
    open_node(o, 0);
    assert_true(run_until(o, has_failed, WAIT_MS));
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
    coordinator_serve(o->c);
    open_node(o, 0);
    assert_true(run_until(o, has_failed, WAIT_MS));
    assert_non_null(strstr(o->why, "w3 speaks protocol 1.0, this coordinator 2.0"));
    teardown(o);
}

/* Its own last incarnation is in the way after a loss: that passes with its lease. */
static void test_refused_after_a_loss(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, false);
    coordinator_serve(o->c);
    open_node(o, 0);
    assert_true(run_until(o, has_registered, WAIT_MS));
    o->c->answer = ANSWER_REFUSE;
    o->c->refusal = "w3 is alive";
    assert_true(run_until(o, has_lost, WAIT_MS));
    assert_false(run_until(o, has_failed, LEASE_MS));
    o->c->answer = ANSWER_ACCEPT;
    o->c->acknowledge = true;
    assert_true(run_until(o, has_registered_again, WAIT_MS));
    o->c->acknowledge = false;
    o->c->answer = ANSWER_REFUSE;
    assert_true(run_until(o, has_failed, WAIT_MS)); /* but not for ever */
    assert_non_null(strstr(o->why, "w3 is alive"));
    teardown(o);
}

static void test_closed_inside_a_callback(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, false);
    o->close_when_lost = true;
    coordinator_serve(o->c);
    open_node(o, 0);
    assert_true(run_until(o, is_closed, WAIT_MS));
    assert_int_equal(o->lost, 1);
    teardown(o);
}

static void test_leaves_with_a_half_close(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_ACCEPT, true);
    coordinator_serve(o->c);
    open_node(o, 0);
    assert_true(run_until(o, has_registered, WAIT_MS));
    int64_t start = tally_now_ns();
    node_close(o->node, on_closed, o);
    assert_true(run_until(o, is_closed, WAIT_MS));
    assert_true(tally_now_ns() - start < 900 * (int64_t)1000000); /* it does not sit the time-out out */
    assert_int_equal(o->c->half_closes, 1);
    o->node = NULL;
    teardown(o);
}

static void test_closes_while_nobody_answers(void **state)
{
    (void)state;
    struct owner *o = setup(ANSWER_SILENCE, true);
    coordinator_serve(o->c);
    open_node(o, 0);
    run_until(o, has_registered, 100);
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

int main(void)
{
    rpc_global_init();
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
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rpc_global_shutdown();
    return failed;
}
