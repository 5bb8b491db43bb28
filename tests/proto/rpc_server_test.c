/* Servers: where they may listen, what they may serve, their health, their end; and the queues that all of it runs on.
 */
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "proto/health.pb-c.h"
#include "proto/jobs.pb-c.h"
#include "proto/parameters.pb-c.h"
#include "tests/proto/rpc_fixture.h"

static void must(tally_status status, const struct tally_error *err)
{
    if (status)
        fail_msg("%s", err->message);
}

/* ---- listening: servers that are never started ---- */

static struct rpc_queue *queue; /* a data queue of the test's own */
static char directory[64];

static int setup(void **state)
{
    (void)state;
    struct tally_error err = {0};
    rpc_global_init();
    must(rpc_data_queue_new(&queue, &err), &err);
    snprintf(directory, sizeof directory, "/tmp/rpc_server_test.XXXXXX");
    return mkdtemp(directory) ? 0 : 1;
}

static int teardown(void **state)
{
    (void)state;
    rpc_queue_free(queue);
    rpc_global_shutdown();
    return rmdir(directory);
}

static tally_status try_listen(const char *address, char *ret_address, struct tally_error *err)
{
    struct rpc_server *server;
    must(rpc_server_new(queue, NULL, &server, err), err);
    tally_status status = rpc_server_listen(server, address, ret_address, RPC_ADDRESS_MAX, err);
    rpc_server_free(server);
    return status;
}

static void expect_refusal(const char *address, tally_status code, const char *text)
{
    struct tally_error err = {0};
    char bound[RPC_ADDRESS_MAX] = "untouched";
    assert_int_equal(try_listen(address, bound, &err), code);
    if (!strstr(err.message, text))
        fail_msg("'%s' does not say '%s'", err.message, text);
    assert_string_equal(bound, "untouched");
}

static void test_where_it_may_listen(void **state)
{
    (void)state;
    struct fixture f;
    struct tally_error err = {0};
    char address[400], bound[RPC_ADDRESS_MAX];
    expect_refusal("", TALLY_EINVAL, "no address");
    expect_refusal("localhost", TALLY_EINVAL, "no address");
    expect_refusal("no-such-host.invalid:1", TALLY_EINVAL, "no-such-host.invalid");
    expect_refusal("0.0.0.0:0", TALLY_EDENIED, "loopback");
    expect_refusal("[::]:0", TALLY_EDENIED, "loopback");
    snprintf(address, sizeof address, "unix:%s/none/s", directory);
    expect_refusal(address, TALLY_ENOTFOUND, "No such file or directory");
    snprintf(address, sizeof address, "unix:%s/%0200d", directory, 0);
    expect_refusal(address, TALLY_EINVAL, "at most 107 bytes");
    snprintf(address, sizeof address, "unix:%s/file", directory);
    FILE *file = fopen(address + 5, "w");
    fclose(file);
    expect_refusal(address, TALLY_EEXIST, "no socket");
    assert_int_equal(access(address + 5, F_OK), 0); /* it was not touched */
    unlink(address + 5);
    must(try_listen("localhost:0", bound, &err), &err);
    assert_memory_equal(bound, "localhost:", 10);
    assert_true(strtoul(bound + 10, NULL, 10) > 0);

    fixture_start(&f, true, false, NULL); /* a port that is taken */
    expect_refusal(f.address, TALLY_EEXIST, "listens there already");
    fixture_stop(&f);
}

static void test_names_with_odd_characters(void **state)
{
    (void)state;
    struct rpc_server *server;
    struct tally_error err = {0};
    char address[RPC_ADDRESS_MAX], bound[RPC_ADDRESS_MAX];
    struct stat st;
    snprintf(address, sizeof address, "unix:%s/a b%%20?#\xc3\xa4", directory);
    must(rpc_server_new(queue, NULL, &server, &err), &err);
    must(rpc_server_listen(server, address, bound, sizeof bound, &err), &err);
    assert_string_equal(bound, address);
    assert_int_equal(lstat(address + 5, &st), 0);
    rpc_server_free(server);
    assert_int_not_equal(lstat(address + 5, &st), 0);
}

static void test_stale_and_living_sockets(void **state)
{
    (void)state;
    struct fixture f;
    struct tally_error err = {0};
    char address[RPC_ADDRESS_MAX], bound[RPC_ADDRESS_MAX];
    snprintf(address, sizeof address, "unix:%s/stale", directory);
    struct sockaddr_un sun = {.sun_family = AF_UNIX};
    snprintf(sun.sun_path, sizeof sun.sun_path, "%s", address + 5);
    int fd = socket(AF_UNIX, SOCK_STREAM, 0);
    assert_int_equal(bind(fd, (struct sockaddr *)&sun, sizeof sun), 0);
    assert_int_equal(listen(fd, 1), 0);
    expect_refusal(address, TALLY_EEXIST, "listens there already");
    close(fd); /* as after a crash: the file stays */
    must(try_listen(address, bound, &err), &err);
    assert_string_equal(bound, address);
    assert_int_not_equal(access(address + 5, F_OK), 0);

    fixture_start(&f, false, false, NULL);
    expect_refusal(f.address, TALLY_EEXIST, "listens there already");
    ProtobufCMessage *reply = NULL;
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    must(rpc_unary_wait(f.channel, &grpc__health__v1__health__descriptor, "Check", &request.base, NULL, &reply, &err),
         &err); /* unharmed */
    protobuf_c_message_free_unpacked(reply, NULL);
    fixture_stop(&f);
}

/* ---- serving ---- */

static void on_request(struct rpc_stream *stream, const struct rpc_message *request, void *user)
{
    (void)request;
    (void)user;
    rpc_stream_finish(stream, TALLY_OK, NULL);
}

static void on_open(struct rpc_stream *stream, void *user)
{
    (void)user;
    rpc_stream_finish(stream, TALLY_OK, NULL);
}

static void test_what_it_may_serve(void **state)
{
    (void)state;
    static const struct {
        struct rpc_method methods[2];
        const char *text;
    } bad[] = {
        {{{.name = "Nothing", .on_request = on_request}, {.name = "Get", .on_request = on_request}},
         "no method Nothing"},
        {{{.name = "Get"}, {.name = "List", .on_request = on_request}}, "either on_request or on_open"},
        {{{.name = "Get", .on_open = on_open}, {.name = "List", .on_request = on_request}}, "takes one request"},
        {{{.name = "Get", .on_request = on_request}, {.name = "Get", .on_request = on_request}}, "served twice"},
    };
    struct tally_error err = {0};
    for (size_t i = 0; i < 4; i++) {
        struct rpc_server *server;
        struct rpc_service service = {&tally__v1__jobs__descriptor, queue, bad[i].methods, 2, NULL};
        must(rpc_server_new(queue, NULL, &server, &err), &err);
        assert_int_not_equal(rpc_server_add(server, &service, &err), TALLY_OK);
        assert_non_null(strstr(err.message, bad[i].text));
        rpc_server_free(server);
    }
    struct rpc_server *server;
    static const struct rpc_method exchange = {.name = "Exchange", .on_request = on_request};
    struct rpc_service service = {&tally__v1__parameters__descriptor, queue, &exchange, 1, NULL};
    must(rpc_server_new(queue, NULL, &server, &err), &err);
    assert_int_equal(rpc_server_add(server, &service, &err), TALLY_EINVAL);
    assert_non_null(strstr(err.message, "takes a stream"));
    rpc_server_free(server);
    rpc_server_free(NULL);
}

/* ---- health ---- */

struct watcher {
    atomic_uint count;
    int seen[8];
    atomic_bool ended;
    tally_status code;
};

static void watch_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct watcher *w = user;
    unsigned n = atomic_load(&w->count);
    assert_true(n < 8);
    w->seen[n] = (int)((const Grpc__Health__V1__HealthCheckResponse *)message->header)->status;
    atomic_fetch_add(&w->count, 1);
    rpc_stream_grant(stream, 1);
}

static void watch_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct watcher *w = user;
    w->code = end->code;
    atomic_store(&w->ended, true);
}

struct set_serving {
    struct rpc_task task;
    struct fixture *f;
    const char *name;
    bool serving;
};

static void set_serving(struct rpc_task *task)
{
    struct set_serving *s = (struct set_serving *)task;
    rpc_server_set_serving(s->f->server, s->name, s->serving);
}

static struct rpc_stream *watch(struct fixture *f, struct watcher *w, const char *name)
{
    static const struct rpc_stream_events events = {.on_message = watch_message, .on_end = watch_end};
    static const struct rpc_stream_options options = {.credits = 1};
    struct rpc_stream *stream;
    struct tally_error err = {0};
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    request.service = (char *)(uintptr_t)name;
    must(rpc_stream_open(f->channel, f->client_queue, &grpc__health__v1__health__descriptor, "Watch", &events, w,
                         &options, &stream, &err),
         &err);
    must(rpc_stream_send(stream, &request.base, &err), &err);
    rpc_stream_close(stream);
    return stream;
}

static void add_jobs(struct fixture *f)
{
    static const struct rpc_method get = {.name = "Get", .on_request = on_request};
    struct rpc_service service = {&tally__v1__jobs__descriptor, f->loop_queue, &get, 1, NULL};
    struct tally_error err = {0};
    must(rpc_server_add(f->server, &service, &err), &err);
}

static void test_health(void **state)
{
    (void)state;
    struct fixture f;
    struct watcher all = {0}, jobs = {0}, other = {0};
    struct tally_error err = {0};
    fixture_start(&f, false, false, add_jobs);
    watch(&f, &all, "");
    watch(&f, &jobs, "tally.v1.Jobs");
    watch(&f, &other, "other");
    wait_count(f.client_queue, &all.count, 1, "the first status");
    wait_count(f.client_queue, &jobs.count, 1, "the first status");
    wait_count(f.client_queue, &other.count, 1, "the first status");
    struct set_serving down = {{.run = set_serving}, &f, "tally.v1.Jobs", false}, same = down,
                       later = {{.run = set_serving}, &f, "other", true};
    rpc_queue_post(f.loop_queue, &down.task);
    rpc_queue_post(f.loop_queue, &same.task);
    rpc_queue_post(f.loop_queue, &later.task);
    wait_count(f.client_queue, &jobs.count, 2, "the second status");
    wait_count(f.client_queue, &other.count, 2, "the second status");
    Grpc__Health__V1__HealthCheckRequest request = GRPC__HEALTH__V1__HEALTH_CHECK_REQUEST__INIT;
    ProtobufCMessage *reply = NULL;
    request.service = "tally.v1.Jobs";
    must(rpc_unary_wait(f.channel, &grpc__health__v1__health__descriptor, "Check", &request.base, NULL, &reply, &err),
         &err);
    assert_int_equal(((Grpc__Health__V1__HealthCheckResponse *)reply)->status, 2);
    protobuf_c_message_free_unpacked(reply, NULL);
    request.service = "nobody";
    assert_int_equal(
        rpc_unary_wait(f.channel, &grpc__health__v1__health__descriptor, "Check", &request.base, NULL, &reply, &err),
        TALLY_ENOTFOUND);
    int64_t start = tally_now_ns();
    fixture_stop_server(&f, 10000); /* watchers do not hold it up */
    assert_true(tally_now_ns() - start < 5000000000);
    wait_for(f.client_queue, &all.ended, "the end of a watch");
    wait_for(f.client_queue, &jobs.ended, "the end of a watch");
    wait_for(f.client_queue, &other.ended, "the end of a watch");
    assert_int_equal(all.code, TALLY_EUNAVAIL);
    static const int want_all[] = {1, 2}, want_jobs[] = {1, 2}, want_other[] = {3, 1, 2};
    assert_int_equal(atomic_load(&all.count), 2);
    assert_memory_equal(all.seen, want_all, sizeof want_all);
    assert_int_equal(atomic_load(&jobs.count), 2);
    assert_memory_equal(jobs.seen, want_jobs, sizeof want_jobs);
    assert_int_equal(atomic_load(&other.count), 3);
    assert_memory_equal(other.seen, want_other, sizeof want_other);
    fixture_stop(&f);
}

/* ---- queues ---- */

#define POSTS 2000
#define POSTERS 4

struct numbered {
    struct rpc_task task;
    unsigned poster, number;
};

static unsigned expected[POSTERS];
static atomic_uint posted_run;

static void run_numbered(struct rpc_task *task)
{
    struct numbered *n = (struct numbered *)task;
    assert_int_equal(n->number, expected[n->poster]); /* each poster's in order */
    expected[n->poster]++;
    atomic_fetch_add(&posted_run, 1);
}

struct poster {
    struct rpc_queue *to;
    struct numbered tasks[POSTS];
};

static void post_all(void *arg)
{
    struct poster *p = arg;
    for (unsigned i = 0; i < POSTS; i++)
        rpc_queue_post(p->to, &p->tasks[i].task);
}

static void test_posts(void **state)
{
    (void)state;
    struct fixture f;
    fixture_start(&f, false, false, NULL);
    struct poster *posters = calloc(POSTERS, sizeof *posters);
    for (int on_loop = 0; on_loop < 2; on_loop++) {
        uv_thread_t threads[POSTERS];
        memset(expected, 0, sizeof expected);
        atomic_store(&posted_run, 0);
        for (unsigned p = 0; p < POSTERS; p++) {
            posters[p].to = on_loop ? f.loop_queue : f.client_queue;
            for (unsigned i = 0; i < POSTS; i++)
                posters[p].tasks[i] = (struct numbered){{.run = run_numbered}, p, i};
            uv_thread_create(&threads[p], post_all, &posters[p]);
        }
        wait_count(f.client_queue, &posted_run, POSTERS * POSTS, "what was posted");
        for (unsigned p = 0; p < POSTERS; p++)
            uv_thread_join(&threads[p]);
    }
    fixture_stop(&f);
    free(posters);
}

static void wake_soon(void *arg)
{
    usleep(100000);
    rpc_queue_wake(arg);
    rpc_queue_wake(arg);
}

static void test_wake_and_deadline(void **state)
{
    (void)state;
    uv_thread_t thread;
    int64_t start = tally_now_ns();
    assert_int_equal(rpc_queue_poll(queue, start + 50000000), 0);
    assert_in_range((tally_now_ns() - start) / 1000000, 49, 2000);
    start = tally_now_ns();
    assert_int_equal(rpc_queue_poll(queue, 0), 0);
    assert_int_equal(rpc_queue_poll(queue, start - 1), 0);
    assert_true(tally_now_ns() - start < 1000000000);
    uv_thread_create(&thread, wake_soon, queue);
    assert_int_equal(rpc_queue_poll(queue, start + 20000000000), 0);
    assert_in_range((tally_now_ns() - start) / 1000000, 99, 10000);
    uv_thread_join(&thread);
    rpc_queue_wake(queue);
    start = tally_now_ns();
    rpc_queue_poll(queue, start + 20000000000);
    assert_true(tally_now_ns() - start < 10000000000);
}

/* A queue is freed as soon as what was posted has run: the thread that posted it may still be about to wake the queue.
 */
#define HANDOVERS 200

static struct {
    _Atomic(struct rpc_queue *) to;
    struct rpc_task task;
    atomic_bool run;
} handover;

static void run_handover(struct rpc_task *task)
{
    (void)task;
    atomic_store(&handover.run, true);
}

static void post_handovers(void *arg)
{
    (void)arg;
    for (int i = 0; i < HANDOVERS; i++) {
        struct rpc_queue *to;
        while (!(to = atomic_exchange(&handover.to, NULL)))
            sched_yield();
        rpc_queue_post(to, &handover.task);
    }
}

static void test_free_behind_the_last_post(void **state)
{
    (void)state;
    uv_thread_t thread;
    handover.task.run = run_handover;
    uv_thread_create(&thread, post_handovers, NULL);
    for (int i = 0; i < HANDOVERS; i++) {
        struct rpc_queue *one = NULL;
        assert_int_equal(rpc_data_queue_new(&one, NULL), TALLY_OK);
        atomic_store(&handover.run, false);
        atomic_store(&handover.to, one);
        while (!atomic_load(&handover.run))
            rpc_queue_poll(one, 0);
        rpc_queue_free(one);
    }
    uv_thread_join(&thread);
    rpc_queue_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_where_it_may_listen),
        cmocka_unit_test(test_names_with_odd_characters),
        cmocka_unit_test(test_stale_and_living_sockets),
        cmocka_unit_test(test_what_it_may_serve),
        cmocka_unit_test(test_health),
        cmocka_unit_test(test_posts),
        cmocka_unit_test(test_wake_and_deadline),
        cmocka_unit_test(test_free_behind_the_last_post),
    };
    return cmocka_run_group_tests_name("rpc servers and queues", tests, setup, teardown);
}
