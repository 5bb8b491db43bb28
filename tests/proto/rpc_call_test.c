/* Unary calls: replies, statuses, deadlines, cancellation, what is refused, and servers that are not there. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/limits.h"
#include "proto/cluster.pb-c.h"
#include "proto/health.pb-c.h"
#include "proto/jobs.pb-c.h"
#include "proto/parameters.pb-c.h"
#include "tests/proto/rpc_fixture.h"

/* ---- the server under test ---- */

static struct rpc_stream *unanswered; /* Submit keeps its call */
static uv_mutex_t unanswered_lock;

static void get(struct rpc_stream *stream, const struct rpc_message *request, void *user)
{
    (void)user;
    const Tally__V1__JobRef *ref = (const Tally__V1__JobRef *)request->header;
    Tally__V1__Job job = TALLY__V1__JOB__INIT;
    assert_null(request->payload); /* a JobRef is no data message */
    job.id = ref->id + 1;
    job.name = "j\xc3\xb6"
               "b";
    rpc_stream_reply(stream, &job.base);
}

static void submit(struct rpc_stream *stream, const struct rpc_message *request, void *user)
{
    (void)request;
    (void)user;
    uv_mutex_lock(&unanswered_lock);
    unanswered = stream;
    uv_mutex_unlock(&unanswered_lock);
}

/* Answers the status that is asked for. */
static void stop(struct rpc_stream *stream, const struct rpc_message *request, void *user)
{
    (void)user;
    const Tally__V1__StopRequest *r = (const Tally__V1__StopRequest *)request->header;
    rpc_stream_finish(stream, (tally_status)r->job, r->reason);
}

static void list_too_much(struct rpc_stream *stream, const struct rpc_message *request, void *user)
{
    (void)request;
    (void)user;
    Tally__V1__ListReply reply = TALLY__V1__LIST_REPLY__INIT;
    Tally__V1__Job job = TALLY__V1__JOB__INIT, *jobs[] = {&job};
    job.reason = malloc(TALLY_MESSAGE_MAX_BYTES + 1);
    memset(job.reason, 'x', TALLY_MESSAGE_MAX_BYTES);
    job.reason[TALLY_MESSAGE_MAX_BYTES] = '\0';
    reply.n_jobs = 1;
    reply.jobs = jobs;
    rpc_stream_reply(stream, &reply.base);
    free(job.reason);
}

static void holding(struct rpc_stream *stream, const struct rpc_message *request, void *user)
{
    (void)user;
    Tally__V1__HoldingReply reply = TALLY__V1__HOLDING_REPLY__INIT;
    reply.version = ((const Tally__V1__HoldingRequest *)request->header)->job * 2;
    rpc_stream_reply(stream, &reply.base);
}

static void add_services(struct fixture *f)
{
    static const struct rpc_method jobs[] = {
        {.name = "Get", .on_request = get},
        {.name = "Submit", .on_request = submit},
        {.name = "Stop", .on_request = stop},
        {.name = "List", .on_request = list_too_much},
    };
    static const struct rpc_method parameters[] = {{.name = "Holding", .on_request = holding}};
    struct rpc_service on_loop = {&tally__v1__jobs__descriptor, f->loop_queue, jobs, 4, f};
    struct rpc_service on_data = {&tally__v1__parameters__descriptor, f->data_queue, parameters, 1, f};
    struct tally_error err = {0};
    assert_int_equal(rpc_server_add(f->server, &on_loop, &err), TALLY_OK);
    assert_int_equal(rpc_server_add(f->server, &on_data, &err), TALLY_OK);
}

static struct fixture fx;

static int setup(void **state)
{
    (void)state;
    uv_mutex_init(&unanswered_lock);
    rpc_global_init();
    fixture_start(&fx, false, false, add_services);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fixture_stop(&fx);
    rpc_global_shutdown();
    uv_mutex_destroy(&unanswered_lock);
    return 0;
}

/* ---- the client ---- */

struct result {
    atomic_bool done;
    struct tally_error end;
    uint64_t value;
    unsigned calls;
};

static void keep(const struct tally_error *end, const struct rpc_message *reply, void *user)
{
    struct result *r = user;
    r->end = *end;
    assert_int_equal(reply != NULL, end->code == TALLY_OK);
    if (reply && reply->header->descriptor == &tally__v1__job__descriptor) {
        r->value = ((const Tally__V1__Job *)reply->header)->id;
        assert_string_equal(((const Tally__V1__Job *)reply->header)->name, "j\xc3\xb6"
                                                                           "b");
    } else if (reply) {
        r->value = ((const Tally__V1__HoldingReply *)reply->header)->version;
    }
    r->calls++;
    atomic_store(&r->done, true);
}

/* As rpc_unary_wait, with a channel, and the error kept. */
static tally_status call_get(const char *address, int64_t timeout_ms, bool wait_for_ready, struct tally_error *err)
{
    struct rpc_channel *channel;
    ProtobufCMessage *reply = NULL;
    Tally__V1__JobRef ref = TALLY__V1__JOB_REF__INIT;
    struct rpc_stream_options options = {.timeout_ms = timeout_ms, .wait_for_ready = wait_for_ready};
    assert_int_equal(rpc_channel_new(address, NULL, &channel, err), TALLY_OK);
    tally_status status =
        rpc_unary_wait(channel, &tally__v1__jobs__descriptor, "Get", &ref.base, &options, &reply, err);
    if (reply)
        protobuf_c_message_free_unpacked(reply, NULL);
    rpc_channel_free(channel);
    return status;
}

#define MANY 200

static void test_many_at_once(void **state)
{
    (void)state;
    static struct result results[MANY];
    struct tally_error err = {0};
    for (unsigned i = 0; i < MANY; i++) {
        Tally__V1__JobRef ref = TALLY__V1__JOB_REF__INIT;
        Tally__V1__HoldingRequest holding_request = TALLY__V1__HOLDING_REQUEST__INIT;
        ref.id = holding_request.job = i;
        bool on_data = i % 2;
        assert_int_equal(rpc_unary(fx.channel, fx.client_queue,
                                   on_data ? &tally__v1__parameters__descriptor : &tally__v1__jobs__descriptor,
                                   on_data ? "Holding" : "Get", on_data ? &holding_request.base : &ref.base, NULL, keep,
                                   &results[i], NULL, &err),
                         TALLY_OK);
    }
    for (unsigned i = 0; i < MANY; i++) {
        wait_for(fx.client_queue, &results[i].done, "a reply");
        assert_int_equal(results[i].end.code, TALLY_OK);
        assert_int_equal(results[i].value, i % 2 ? i * 2 : i + 1);
    }
    rpc_queue_poll(fx.client_queue, 0);
    for (unsigned i = 0; i < MANY; i++)
        assert_int_equal(results[i].calls, 1);
}

static void test_wait(void **state)
{
    (void)state;
    struct tally_error err = {0};
    ProtobufCMessage *reply = NULL;
    Tally__V1__JobRef ref = TALLY__V1__JOB_REF__INIT;
    ref.id = 41;
    assert_int_equal(rpc_unary_wait(fx.channel, &tally__v1__jobs__descriptor, "Get", &ref.base, NULL, &reply, &err),
                     TALLY_OK);
    assert_int_equal(((Tally__V1__Job *)reply)->id, 42);
    protobuf_c_message_free_unpacked(reply, NULL);
}

/* A client whose callbacks run on a loop, over TCP to a server that is elsewhere. */
static void loop_done(const struct tally_error *end, const struct rpc_message *reply, void *user)
{
    keep(end, reply, user);
}

static struct {
    struct rpc_queue *data;
    atomic_bool over;
} poller;

static void poll_data(void *arg)
{
    (void)arg;
    while (!atomic_load(&poller.over))
        rpc_queue_poll(poller.data, tally_now_ns() + 1000000000);
}

/* A client whose answers come on a loop: with a thread of the queue's own, or joined to a queue that somebody polls. */
static void call_from_loop(bool joined)
{
    struct fixture tcp;
    struct tally_error err = {0};
    struct rpc_queue *queue;
    uv_loop_t loop;
    uv_thread_t thread;
    fixture_start(&tcp, true, joined, add_services);
    assert_int_equal(uv_loop_init(&loop), 0);
    if (joined) {
        assert_int_equal(rpc_data_queue_new(&poller.data, &err), TALLY_OK);
        atomic_store(&poller.over, false);
        uv_thread_create(&thread, poll_data, NULL);
    }
    for (int i = 0; i < 50; i++) {
        struct result result = {0};
        assert_int_equal(joined ? rpc_loop_queue_join(&loop, poller.data, &queue, &err)
                                : rpc_loop_queue_new(&loop, &queue, &err),
                         TALLY_OK);
        Tally__V1__JobRef ref = TALLY__V1__JOB_REF__INIT;
        ref.id = 7;
        assert_int_equal(rpc_unary(tcp.channel, queue, &tally__v1__jobs__descriptor, "Get", &ref.base, NULL, loop_done,
                                   &result, NULL, &err),
                         TALLY_OK);
        while (!atomic_load(&result.done))
            uv_run(&loop, UV_RUN_ONCE); /* the call has a deadline */
        assert_int_equal(result.end.code, TALLY_OK);
        assert_int_equal(result.value, 8);
        rpc_queue_free(queue);
        uv_run(&loop, UV_RUN_DEFAULT);
    }
    if (joined) {
        atomic_store(&poller.over, true);
        rpc_queue_wake(poller.data);
        uv_thread_join(&thread);
        rpc_queue_free(poller.data);
    }
    assert_int_equal(uv_loop_close(&loop), 0);
    fixture_stop(&tcp);
}

static void test_loop_client(void **state)
{
    (void)state;
    call_from_loop(false);
}

static void test_joined_client(void **state)
{
    (void)state;
    call_from_loop(true);
}

static void test_statuses(void **state)
{
    (void)state;
    for (int code = TALLY_EINVAL; code <= TALLY_ESTATE; code++) {
        struct tally_error err = {0};
        ProtobufCMessage *reply = NULL;
        Tally__V1__StopRequest request = TALLY__V1__STOP_REQUEST__INIT;
        char text[64];
        snprintf(text, sizeof text, "reason \xc3\xa9 100%% of %d", code);
        request.job = (uint64_t)code;
        request.reason = text;
        assert_int_equal(rpc_status_from_grpc(rpc_status_to_grpc((tally_status)code)), code);
        assert_int_equal(
            rpc_unary_wait(fx.channel, &tally__v1__jobs__descriptor, "Stop", &request.base, NULL, &reply, &err), code);
        assert_int_equal(err.code, code);
        assert_string_equal(err.message, text);
        assert_null(reply);
    }
    assert_int_equal(rpc_status_from_grpc(0), TALLY_OK);
    assert_int_equal(rpc_status_from_grpc(2), TALLY_EINTERNAL);
    assert_int_equal(rpc_status_from_grpc(999), TALLY_EINTERNAL);
}

static void test_long_reason_is_cut(void **state)
{
    (void)state;
    struct tally_error err = {0};
    ProtobufCMessage *reply = NULL;
    Tally__V1__StopRequest request = TALLY__V1__STOP_REQUEST__INIT;
    char text[4000];
    memset(text, 'y', sizeof text);
    text[sizeof text - 1] = '\0';
    request.job = TALLY_ESTATE;
    request.reason = text;
    assert_int_equal(
        rpc_unary_wait(fx.channel, &tally__v1__jobs__descriptor, "Stop", &request.base, NULL, &reply, &err),
        TALLY_ESTATE);
    assert_int_equal(strlen(err.message), TALLY_ERROR_MESSAGE_MAX - 1);
}

/* A service of which one method takes another type than the server thinks. */
static ProtobufCServiceDescriptor lying_jobs(ProtobufCMethodDescriptor *methods,
                                             const ProtobufCMessageDescriptor *input)
{
    ProtobufCServiceDescriptor fake = tally__v1__jobs__descriptor;
    for (unsigned i = 0; i < fake.n_methods; i++) {
        methods[i] = fake.methods[i];
        methods[i].input = input;
    }
    fake.methods = methods;
    return fake;
}

static void test_malformed_request(void **state)
{
    (void)state;
    struct tally_error err = {0};
    ProtobufCMessage *reply = NULL;
    ProtobufCMethodDescriptor methods[16];
    Grpc__Health__V1__HealthCheckRequest text = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    text.service = "a string where a JobRef has a number";
    ProtobufCServiceDescriptor fake = lying_jobs(methods, text.base.descriptor);
    assert_int_equal(rpc_unary_wait(fx.channel, &fake, "Get", &text.base, NULL, &reply, &err), TALLY_EINVAL);
    assert_non_null(strstr(err.message, "tally.v1.JobRef"));
    assert_non_null(strstr(err.message, "/tally.v1.Jobs/Get"));
}

static void test_unknown_methods(void **state)
{
    (void)state;
    struct tally_error err = {0};
    ProtobufCMessage *reply = NULL;
    Tally__V1__FetchRequest fetch = TALLY__V1__FETCH_REQUEST__INIT;
    Tally__V1__JobRef ref = TALLY__V1__JOB_REF__INIT;
    /* A method that the server does not serve, of a service that it does; and a service that it does not know. */
    assert_int_equal(
        rpc_unary_wait(fx.channel, &tally__v1__parameters__descriptor, "Fetch", &fetch.base, NULL, &reply, &err),
        TALLY_EUNSUPPORTED);
    assert_string_equal(err.message, "no such method: /tally.v1.Parameters/Fetch");
    ProtobufCServiceDescriptor other = tally__v1__jobs__descriptor;
    other.name = "other.Service";
    for (int i = 0; i < 10; i++)
        assert_int_equal(rpc_unary_wait(fx.channel, &other, "Get", &ref.base, NULL, &reply, &err), TALLY_EUNSUPPORTED);
    /* One that not even the client knows. */
    assert_int_equal(
        rpc_unary_wait(fx.channel, &tally__v1__jobs__descriptor, "Frobnicate", &ref.base, NULL, &reply, &err),
        TALLY_ENOTFOUND);
    assert_int_equal(rpc_unary_wait(fx.channel, &tally__v1__jobs__descriptor, "Get", &fetch.base, NULL, &reply, &err),
                     TALLY_EINVAL);
}

static void test_too_large(void **state)
{
    (void)state;
    struct tally_error err = {0};
    ProtobufCMessage *reply = NULL;
    Tally__V1__StopRequest request = TALLY__V1__STOP_REQUEST__INIT;
    Tally__V1__ListRequest list = TALLY__V1__LIST_REQUEST__INIT;
    request.reason = malloc(TALLY_MESSAGE_MAX_BYTES + 1);
    memset(request.reason, 'x', TALLY_MESSAGE_MAX_BYTES);
    request.reason[TALLY_MESSAGE_MAX_BYTES] = '\0';
    assert_int_equal(
        rpc_unary_wait(fx.channel, &tally__v1__jobs__descriptor, "Stop", &request.base, NULL, &reply, &err),
        TALLY_EINVAL);
    assert_non_null(strstr(err.message, "above the limit"));
    free(request.reason);
    assert_int_equal(rpc_unary_wait(fx.channel, &tally__v1__jobs__descriptor, "List", &list.base, NULL, &reply, &err),
                     TALLY_ENOMEM);
    assert_non_null(strstr(err.message, "above the limit"));
}

/* The handler answers when the client has given up: harmless. */
static void answer_late(void)
{
    struct rpc_stream *stream = NULL;
    for (int i = 0; i < 2000 && !stream; i++) {
        uv_mutex_lock(&unanswered_lock);
        stream = unanswered;
        unanswered = NULL;
        uv_mutex_unlock(&unanswered_lock);
        if (!stream)
            usleep(5000);
    }
    assert_non_null(stream);
    usleep(50000);
    Tally__V1__Job job = TALLY__V1__JOB__INIT;
    rpc_stream_reply(stream, &job.base);
}

static void test_deadline(void **state)
{
    (void)state;
    struct tally_error err = {0};
    ProtobufCMessage *reply = NULL;
    Tally__V1__SubmitRequest request = TALLY__V1__SUBMIT_REQUEST__INIT;
    struct rpc_stream_options options = {.timeout_ms = 150};
    int64_t start = tally_now_ns();
    assert_int_equal(
        rpc_unary_wait(fx.channel, &tally__v1__jobs__descriptor, "Submit", &request.base, &options, &reply, &err),
        TALLY_ETIMEDOUT);
    assert_string_equal(err.message, "no answer to /tally.v1.Jobs/Submit within 150 ms");
    assert_in_range((tally_now_ns() - start) / 1000000, 140, 5000);
    answer_late();
}

static void cancel_soon(void *arg)
{
    struct rpc_stream *stream = arg;
    usleep(50000);
    rpc_stream_cancel(stream);
    rpc_stream_cancel(stream);
    rpc_stream_unref(stream);
}

static void test_cancel_from_another_thread(void **state)
{
    (void)state;
    struct tally_error err = {0};
    struct result result = {0};
    struct rpc_stream *stream;
    Tally__V1__SubmitRequest request = TALLY__V1__SUBMIT_REQUEST__INIT;
    uv_thread_t thread;
    assert_int_equal(rpc_unary(fx.channel, fx.client_queue, &tally__v1__jobs__descriptor, "Submit", &request.base, NULL,
                               keep, &result, &stream, &err),
                     TALLY_OK);
    uv_thread_create(&thread, cancel_soon, rpc_stream_ref(stream));
    wait_for(fx.client_queue, &result.done, "the end of a cancelled call");
    assert_int_equal(result.end.code, TALLY_ECANCELLED);
    uv_thread_join(&thread);
    answer_late();
}

static void test_nobody_there(void **state)
{
    (void)state;
    struct tally_error err = {0};
    char address[RPC_ADDRESS_MAX];
    int64_t start = tally_now_ns();
    snprintf(address, sizeof address, "unix:%s/none", fx.directory);
    assert_int_equal(call_get(address, 8000, false, &err), TALLY_EUNAVAIL);
    assert_non_null(strstr(err.message, "none"));
    assert_int_equal(call_get("127.0.0.1:1", 8000, false, &err), TALLY_EUNAVAIL);
    assert_non_null(strstr(err.message, "refused"));
    assert_true(tally_now_ns() - start < 4000000000);
    start = tally_now_ns();
    assert_int_equal(call_get(address, 300, true, &err), TALLY_ETIMEDOUT);
    assert_true(tally_now_ns() - start >= 290000000);
}

static void start_later(void *arg)
{
    struct fixture *late = arg;
    usleep(300000);
    fixture_start(late, false, false, add_services);
}

static void test_wait_for_ready(void **state)
{
    (void)state;
    struct tally_error err = {0};
    struct fixture late, again;
    fixture_start(&late, true, false, add_services);
    char address[RPC_ADDRESS_MAX];
    memcpy(address, late.address, sizeof address);
    assert_int_equal(call_get(address, 5000, false, &err), TALLY_OK);
    fixture_stop(&late);
    assert_int_equal(call_get(address, 5000, false, &err), TALLY_EUNAVAIL);
    /* The same channel finds a server that comes later. */
    uv_thread_t thread;
    struct rpc_channel *channel;
    struct rpc_stream_options options = {.timeout_ms = 15000, .wait_for_ready = true};
    Tally__V1__JobRef ref = TALLY__V1__JOB_REF__INIT;
    ProtobufCMessage *reply = NULL;
    uv_thread_create(&thread, start_later, &again);
    uv_thread_join(&thread);
    assert_int_equal(rpc_channel_new(again.address, NULL, &channel, &err), TALLY_OK);
    assert_int_equal(rpc_unary_wait(channel, &tally__v1__jobs__descriptor, "Get", &ref.base, &options, &reply, &err),
                     TALLY_OK);
    protobuf_c_message_free_unpacked(reply, NULL);
    rpc_channel_free(channel);
    fixture_stop(&again);
}

static void test_bad_addresses(void **state)
{
    (void)state;
    static const char *const bad[] = {
        "",      "localhost", "localhost:", "localhost:x", "localhost:65536", "localhost:-1",
        ":5000", "unix:",     "::1:5000",   "host:0",      "host:123456789"};
    char path[300];
    struct rpc_channel *channel = NULL;
    struct tally_error err = {0};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        assert_int_equal(rpc_channel_new(bad[i], NULL, &channel, &err), TALLY_EINVAL);
    memset(path, 'p', sizeof path);
    memcpy(path, "unix:/", 6);
    path[sizeof path - 1] = '\0';
    assert_int_equal(rpc_channel_new(path, NULL, &channel, &err), TALLY_EINVAL);
    assert_non_null(strstr(err.message, "107"));
    assert_null(channel);
    rpc_channel_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_many_at_once),
        cmocka_unit_test(test_wait),
        cmocka_unit_test(test_loop_client),
        cmocka_unit_test(test_joined_client),
        cmocka_unit_test(test_statuses),
        cmocka_unit_test(test_long_reason_is_cut),
        cmocka_unit_test(test_malformed_request),
        cmocka_unit_test(test_unknown_methods),
        cmocka_unit_test(test_too_large),
        cmocka_unit_test(test_deadline),
        cmocka_unit_test(test_cancel_from_another_thread),
        cmocka_unit_test(test_nobody_there),
        cmocka_unit_test(test_wait_for_ready),
        cmocka_unit_test(test_bad_addresses),
    };
    return cmocka_run_group_tests_name("rpc calls", tests, setup, teardown);
}
