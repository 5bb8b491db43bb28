/* Streams: payloads, order, credits, bounds, ends; on loop and data queues, over UNIX sockets and TCP, with the peer
 * alive or killed. */
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/limits.h"
#include "proto/jobs.pb-c.h"
#include "proto/parameters.pb-c.h"
#include "proto/peers.pb-c.h"
#include "tests/proto/rpc_fixture.h"

static void must(tally_status status, const struct tally_error *err)
{
    if (status)
        fail_msg("%s", err->message);
}

/* ---- the server under test: Parameters.Exchange ---- */

enum mode {
    DO_ECHO,     /* every push comes back as an update with the same payload */
    DO_HOLD,     /* takes no message until told */
    DO_REFUSE,   /* ends the stream at once */
    DO_FORGET,   /* neither accepts nor finishes */
    DO_LISTEN,   /* takes everything, says nothing */
    DO_CANCEL,   /* cancels at the first message */
    DO_STREAMING /* sends without end once the first message came */
};

static struct {
    _Atomic(enum mode) mode;
    atomic_uint messages, half_closes, ends, opens;
    atomic_uint end_code;
    atomic_uint releases;
    atomic_ulong bytes;
    _Atomic(struct rpc_stream *) stream; /* a reference, in DO_HOLD */
    _Atomic(struct rpc_payload *) kept;  /* a reference, where the message's job is 77 */
} host;

static void host_reset(enum mode mode)
{
    atomic_store(&host.mode, mode);
    atomic_store(&host.messages, 0);
    atomic_store(&host.half_closes, 0);
    atomic_store(&host.ends, 0);
    atomic_store(&host.opens, 0);
    atomic_store(&host.releases, 0);
    atomic_store(&host.bytes, 0);
    atomic_store(&host.end_code, 999);
}

static void free_copy(void *user)
{
    free(user);
    atomic_fetch_add(&host.releases, 1);
}

static void echo(struct rpc_stream *stream, const Tally__V1__Push *push, struct rpc_payload *payload)
{
    Tally__V1__Update update = TALLY__V1__UPDATE__INIT;
    struct tally_error err = {0};
    size_t bytes = rpc_payload_bytes(payload);
    void *copy = malloc(bytes + 1);
    rpc_payload_copy(payload, 0, bytes, copy);
    update.job = push->job;
    update.version = push->step;
    update.slice = push->slice;
    must(rpc_stream_send_payload(stream, &update.base, copy, bytes, free_copy, copy, &err), &err);
}

static void send_more(struct rpc_stream *stream)
{
    Tally__V1__Update update = TALLY__V1__UPDATE__INIT;
    for (;;) {
        void *data = calloc(1, TALLY_SLICE_MAX_BYTES);
        if (rpc_stream_send_payload(stream, &update.base, data, TALLY_SLICE_MAX_BYTES, free_copy, data, NULL)) {
            free(data);
            return;
        }
        atomic_fetch_add(&host.messages, 1);
    }
}

static void host_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    (void)user;
    const Tally__V1__Push *push = (const Tally__V1__Push *)message->header;
    assert_int_equal(push->gradient.len, 0);
    atomic_fetch_add(&host.bytes, rpc_payload_bytes(message->payload));
    if (push->job == 77)
        atomic_store(&host.kept, rpc_payload_ref(message->payload));
    switch (atomic_load(&host.mode)) {
    case DO_ECHO:
        echo(stream, push, message->payload);
        break;
    case DO_CANCEL:
        rpc_stream_cancel(stream);
        break;
    case DO_STREAMING:
        send_more(stream);
        return;
    default:
        break;
    }
    atomic_fetch_add(&host.messages, 1);
    rpc_stream_grant(stream, 1);
}

static void host_writable(struct rpc_stream *stream, void *user)
{
    (void)user;
    if (atomic_load(&host.mode) == DO_STREAMING)
        send_more(stream);
}

static void host_half_close(struct rpc_stream *stream, void *user)
{
    (void)user;
    atomic_fetch_add(&host.half_closes, 1);
    rpc_stream_finish(stream, TALLY_OK, NULL);
}

static void host_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    (void)user;
    atomic_store(&host.end_code, (unsigned)end->code);
    atomic_fetch_add(&host.ends, 1);
}

static void host_open(struct rpc_stream *stream, void *user)
{
    static const struct rpc_stream_events events = {host_message, host_half_close, host_writable, host_end};
    static const struct rpc_stream_options options = {
        .credits = 8, .max_queued_messages = 256, .max_queued_bytes = 64u << 20};
    static const struct rpc_stream_options small = {.credits = 1, .max_queued_messages = 4};
    enum mode mode = atomic_load(&host.mode);
    atomic_fetch_add(&host.opens, 1);
    switch (mode) {
    case DO_REFUSE:
        rpc_stream_finish(stream, TALLY_ESTATE, "not now");
        return;
    case DO_FORGET:
        return;
    case DO_HOLD:
        rpc_stream_accept(stream, &events, user, NULL); /* no credits */
        atomic_store(&host.stream, rpc_stream_ref(stream));
        return;
    default:
        rpc_stream_accept(stream, &events, user, mode == DO_STREAMING ? &small : &options);
    }
}

/* Server streaming: as many updates as the version asked for says. */
static void host_fetch(struct rpc_stream *stream, const struct rpc_message *request, void *user)
{
    (void)user;
    const Tally__V1__FetchRequest *fetch = (const Tally__V1__FetchRequest *)request->header;
    for (uint64_t i = 0; i < fetch->version; i++) {
        Tally__V1__Update update = TALLY__V1__UPDATE__INIT;
        struct tally_error err = {0};
        char *data = malloc(100);
        memset(data, (int)i, 100);
        update.slice = (uint32_t)i;
        must(rpc_stream_send_payload(stream, &update.base, data, 100, free_copy, data, &err), &err);
    }
    rpc_stream_finish(stream, fetch->version ? TALLY_OK : TALLY_ESTATE, fetch->version ? NULL : "no such version");
}

static bool serve_on_loop;

static void add_services(struct fixture *f)
{
    static const struct rpc_method methods[] = {{.name = "Exchange", .on_open = host_open},
                                                {.name = "Fetch", .on_request = host_fetch}};
    struct rpc_service service = {&tally__v1__parameters__descriptor, serve_on_loop ? f->loop_queue : f->data_queue,
                                  methods, 2, f};
    struct tally_error err = {0};
    must(rpc_server_add(f->server, &service, &err), &err);
}

/* ---- the client ---- */

struct client {
    struct rpc_stream *stream;
    atomic_uint messages, writables;
    atomic_bool ended;
    struct tally_error end;
    unsigned credits_back; /* granted for each message */
    bool check;            /* payloads are pattern(slice, bytes) in order */
    unsigned ends;
};

static unsigned char pattern(unsigned n, size_t i)
{
    return (unsigned char)(n * 31 + i * 7 + (i >> 8) + (i >> 16));
}

static size_t size_of(unsigned n)
{
    static const size_t sizes[] = {
        0, 1, 3, 4, 100, 16384, 65536 + 5, TALLY_SLICE_MAX_BYTES, 12345, TALLY_MESSAGE_MAX_BYTES - 200};
    return sizes[n % 10];
}

static void client_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct client *c = user;
    const Tally__V1__Update *update = (const Tally__V1__Update *)message->header;
    unsigned n = atomic_load(&c->messages);
    if (c->check) {
        size_t position = 0, bytes, at = 0, want = size_of(n);
        const void *data;
        assert_int_equal(update->slice, n);
        assert_int_equal(update->version, n * 1000);
        assert_int_equal(rpc_payload_bytes(message->payload), want);
        while (rpc_payload_segment(message->payload, &position, &data, &bytes)) {
            assert_true(bytes > 0);
            for (size_t i = 0; i < bytes; i++)
                if (((const unsigned char *)data)[i] != pattern(n, at + i))
                    fail_msg("message %u: byte %zu differs", n, at + i);
            at += bytes;
        }
        assert_int_equal(at, want);
    }
    atomic_fetch_add(&c->messages, 1);
    if (c->credits_back)
        rpc_stream_grant(stream, c->credits_back);
}

static void client_writable(struct rpc_stream *stream, void *user)
{
    (void)stream;
    atomic_fetch_add(&((struct client *)user)->writables, 1);
}

static void client_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct client *c = user;
    c->end = *end;
    c->ends++;
    atomic_store(&c->ended, true);
}

static void client_open(struct client *c, struct fixture *f, const struct rpc_stream_options *options)
{
    static const struct rpc_stream_events events = {
        .on_message = client_message, .on_writable = client_writable, .on_end = client_end};
    struct tally_error err = {0};
    must(rpc_stream_open(f->channel, f->client_queue, &tally__v1__parameters__descriptor, "Exchange", &events, c,
                         options, &c->stream, &err),
         &err);
}

static atomic_uint released;

static void release(void *user)
{
    free(user);
    atomic_fetch_add(&released, 1);
}

static tally_status send_pattern(struct rpc_stream *stream, unsigned n, size_t bytes)
{
    Tally__V1__Push push = TALLY__V1__PUSH__INIT;
    unsigned char *data = malloc(bytes + 1);
    for (size_t i = 0; i < bytes; i++)
        data[i] = pattern(n, i);
    push.step = n * 1000;
    push.slice = n;
    push.weight = 0.5;
    tally_status status = rpc_stream_send_payload(stream, &push.base, data, bytes, release, data, NULL);
    if (status)
        free(data);
    return status;
}

static void wait_released(unsigned count)
{
    for (int i = 0; i < 4000 && atomic_load(&released) < count; i++)
        usleep(5000);
    assert_int_equal(atomic_load(&released), count);
}

/* ---- tests ---- */

static void echo_over(bool tcp, bool on_loop, bool joined)
{
    struct fixture f;
    struct client c = {.credits_back = 1, .check = true};
    struct rpc_stream_options options = {
        .credits = 4, .max_queued_messages = 8, .max_queued_bytes = 8u << 20, .timeout_ms = 60000};
    unsigned count = 60;
    host_reset(DO_ECHO);
    atomic_store(&released, 0);
    serve_on_loop = on_loop;
    fixture_start(&f, tcp, joined, add_services);
    client_open(&c, &f, &options);
    for (unsigned n = 0; n < count;) {
        tally_status status = send_pattern(c.stream, n, size_of(n));
        if (status == TALLY_OK)
            n++;
        else
            assert_int_equal(status, TALLY_ENOMEM);
        rpc_queue_poll(f.client_queue, tally_now_ns() + (status ? 5000000 : 0));
    }
    rpc_stream_close(c.stream);
    assert_int_equal(send_pattern(c.stream, 0, 4), TALLY_EINVAL); /* behind the end */
    wait_for(f.client_queue, &c.ended, "the end of an echo");
    assert_int_equal(c.end.code, TALLY_OK);
    assert_int_equal(c.ends, 1);
    assert_int_equal(atomic_load(&c.messages), count);
    wait_count(f.client_queue, &host.ends, 1, "the server's end");
    assert_int_equal(atomic_load(&host.half_closes), 1);
    assert_int_equal(atomic_load(&host.end_code), TALLY_OK);
    wait_released(count);
    fixture_stop(&f);
    assert_int_equal(atomic_load(&host.releases), count);
}

static void test_echo_unix_data(void **state)
{
    (void)state;
    echo_over(false, false, false);
}

static void test_echo_unix_joined(void **state)
{
    (void)state;
    echo_over(false, false, true);
}

static void test_echo_tcp_data(void **state)
{
    (void)state;
    echo_over(true, false, false);
}

static void test_echo_unix_loop(void **state)
{
    (void)state;
    echo_over(false, true, false);
}

static void test_echo_tcp_loop_joined(void **state)
{
    (void)state;
    echo_over(true, true, true);
}

static struct fixture fx; /* for the tests below: UNIX, data queue */

static int setup(void **state)
{
    (void)state;
    serve_on_loop = false;
    fixture_start(&fx, false, false, add_services);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    fixture_stop(&fx);
    return 0;
}

static void test_no_credit_no_read(void **state)
{
    (void)state;
    struct client c = {0};
    struct rpc_stream_options options = {.max_queued_messages = 4, .max_queued_bytes = 16u << 20};
    unsigned accepted = 0;
    host_reset(DO_HOLD);
    atomic_store(&released, 0);
    client_open(&c, &fx, &options);
    wait_count(fx.client_queue, &host.opens, 1, "the stream to open");
    for (int i = 0; i < 100; i++) { /* half a second of trying */
        while (send_pattern(c.stream, accepted, TALLY_SLICE_MAX_BYTES) == TALLY_OK)
            accepted++;
        rpc_queue_poll(fx.client_queue, tally_now_ns() + 5000000);
        assert_true(rpc_stream_queued_messages(c.stream) <= 4);
        assert_true(rpc_stream_queued_bytes(c.stream) <= 16u << 20);
    }
    assert_in_range(accepted, 4, 14); /* the queue, and what the windows of HTTP/2 hold */
    assert_int_equal(atomic_load(&host.messages), 0);
    assert_int_equal(atomic_load(&c.writables), accepted > 4 ? atomic_load(&c.writables) : 0);
    struct rpc_stream *theirs = atomic_load(&host.stream);
    rpc_stream_grant(theirs, 2); /* each message grants one more */
    wait_count(fx.client_queue, &host.messages, accepted, "messages after a grant");
    wait_count(fx.client_queue, &c.writables, 1, "on_writable");
    rpc_stream_unref(theirs);
    rpc_stream_close(c.stream);
    wait_for(fx.client_queue, &c.ended, "the end");
    assert_int_equal(c.end.code, TALLY_OK);
    wait_released(accepted);
    assert_int_equal(atomic_load(&host.bytes), (unsigned long)accepted * TALLY_SLICE_MAX_BYTES);
}

/* The server sends without end to a client that does not read: what it holds stays bounded. */
static void test_slow_reader(void **state)
{
    (void)state;
    struct client c = {0};
    struct tally_error err = {0};
    Tally__V1__Push push = TALLY__V1__PUSH__INIT;
    host_reset(DO_STREAMING);
    client_open(&c, &fx, NULL); /* no credits */
    must(rpc_stream_send(c.stream, &push.base, &err), &err);
    wait_count(fx.client_queue, &host.messages, 4, "the server's queue to fill");
    for (int i = 0; i < 100; i++)
        rpc_queue_poll(fx.client_queue, tally_now_ns() + 5000000);
    unsigned sent = atomic_load(&host.messages);
    assert_in_range(sent, 4, 14);
    assert_int_equal(atomic_load(&c.messages), 0);
    rpc_stream_grant(c.stream, 40);
    wait_count(fx.client_queue, &c.messages, 40, "40 messages for 40 credits");
    for (int i = 0; i < 40; i++)
        rpc_queue_poll(fx.client_queue, tally_now_ns() + 5000000);
    assert_int_equal(atomic_load(&c.messages), 40);
    atomic_store(&host.mode, DO_LISTEN);
    rpc_stream_cancel(c.stream);
    wait_for(fx.client_queue, &c.ended, "the end of a cancelled stream that has no credit");
    assert_int_equal(c.end.code, TALLY_ECANCELLED);
    wait_count(fx.client_queue, &host.ends, 1, "the server's end");
    assert_int_equal(atomic_load(&host.end_code), TALLY_ECANCELLED);
    for (int i = 0; i < 4000 && atomic_load(&host.releases) < atomic_load(&host.messages); i++)
        usleep(5000);
    assert_int_equal(atomic_load(&host.releases), atomic_load(&host.messages));
}

static void test_refused_and_forgotten(void **state)
{
    (void)state;
    struct client c = {0}, d = {0};
    host_reset(DO_REFUSE);
    client_open(&c, &fx, NULL);
    wait_for(fx.client_queue, &c.ended, "a refusal");
    assert_int_equal(c.end.code, TALLY_ESTATE);
    assert_string_equal(c.end.message, "not now");
    host_reset(DO_FORGET);
    client_open(&d, &fx, NULL);
    wait_for(fx.client_queue, &d.ended, "a refusal");
    assert_int_equal(d.end.code, TALLY_EINTERNAL);
}

static void test_server_streaming(void **state)
{
    (void)state;
    static const struct rpc_stream_events events = {.on_message = client_message, .on_end = client_end};
    struct rpc_stream_options options = {.credits = 3, .timeout_ms = 20000};
    struct tally_error err = {0};
    for (unsigned n = 0; n < 60; n += 20) {
        struct client c = {.credits_back = 1};
        Tally__V1__FetchRequest fetch = TALLY__V1__FETCH_REQUEST__INIT;
        fetch.version = n;
        must(rpc_stream_open(fx.channel, fx.client_queue, &tally__v1__parameters__descriptor, "Fetch", &events, &c,
                             &options, &c.stream, &err),
             &err);
        must(rpc_stream_send(c.stream, &fetch.base, &err), &err);
        rpc_stream_close(c.stream);
        wait_for(fx.client_queue, &c.ended, "the end of a fetch");
        assert_int_equal(atomic_load(&c.messages), n);
        assert_int_equal(c.end.code, n ? TALLY_OK : TALLY_ESTATE);
        if (n == 0)
            assert_string_equal(c.end.message, "no such version");
    }
}

static void test_deadline(void **state)
{
    (void)state;
    struct client c = {.credits_back = 1};
    struct rpc_stream_options options = {.credits = 1, .timeout_ms = 200};
    host_reset(DO_LISTEN);
    client_open(&c, &fx, &options);
    wait_for(fx.client_queue, &c.ended, "the deadline");
    assert_int_equal(c.end.code, TALLY_ETIMEDOUT);
    assert_string_equal(c.end.message, "no answer to /tally.v1.Parameters/Exchange within 200 ms");
    wait_count(fx.client_queue, &host.ends, 1, "the server's end");
    assert_int_equal(atomic_load(&host.end_code), TALLY_ECANCELLED);
    assert_int_equal(atomic_load(&host.half_closes), 0);
}

static void cancel_soon(void *arg)
{
    struct rpc_stream *stream = arg;
    usleep(100000);
    rpc_stream_cancel(stream);
    for (int i = 0; i < 100; i++) { /* an ended stream does nothing, and says so */
        tally_status status = send_pattern(stream, 1, 100);
        assert_int_equal(status, TALLY_ECANCELLED);
        rpc_stream_grant(stream, 1);
        rpc_stream_close(stream);
        usleep(100);
    }
    rpc_stream_unref(stream);
}

static void test_cancel_from_another_thread(void **state)
{
    (void)state;
    struct client c = {0};
    struct rpc_stream_options options = {.max_queued_messages = 32, .max_queued_bytes = 64u << 20};
    uv_thread_t thread;
    unsigned accepted = 0;
    host_reset(DO_HOLD);
    atomic_store(&released, 0);
    client_open(&c, &fx, &options);
    wait_count(fx.client_queue, &host.opens, 1, "the stream to open");
    while (accepted < 20 && send_pattern(c.stream, accepted, TALLY_SLICE_MAX_BYTES) == TALLY_OK)
        accepted++;
    assert_int_equal(accepted, 20);
    uv_thread_create(&thread, cancel_soon, rpc_stream_ref(c.stream));
    wait_for(fx.client_queue, &c.ended, "the end of a cancelled stream");
    assert_int_equal(c.end.code, TALLY_ECANCELLED);
    assert_int_equal(c.ends, 1);
    uv_thread_join(&thread);
    wait_count(fx.client_queue, &host.ends, 1, "the server's end");
    assert_int_equal(atomic_load(&host.end_code), TALLY_ECANCELLED);
    rpc_stream_unref(atomic_load(&host.stream));
    wait_released(accepted); /* each payload came back, sent or not */
}

static void test_server_cancels(void **state)
{
    (void)state;
    struct client c = {0};
    host_reset(DO_CANCEL);
    client_open(&c, &fx, NULL);
    assert_int_equal(send_pattern(c.stream, 0, 100), TALLY_OK);
    wait_for(fx.client_queue, &c.ended, "the server's cancellation");
    assert_int_equal(c.end.code, TALLY_ECANCELLED);
    wait_count(fx.client_queue, &host.ends, 1, "the server's end");
}

#define THREADS 4
#define EACH 300

static void send_many(void *arg)
{
    struct rpc_stream *stream = arg;
    for (unsigned n = 0; n < EACH;) {
        tally_status status = send_pattern(stream, n, 1000 + n);
        if (status == TALLY_OK)
            n++;
        else if (status == TALLY_ENOMEM)
            usleep(200);
        else
            fail_msg("a send: %d", status);
    }
    rpc_stream_unref(stream);
}

static void test_many_threads_one_stream(void **state)
{
    (void)state;
    struct client c = {0};
    uv_thread_t threads[THREADS];
    host_reset(DO_LISTEN);
    atomic_store(&released, 0);
    client_open(&c, &fx, NULL);
    for (int i = 0; i < THREADS; i++)
        uv_thread_create(&threads[i], send_many, rpc_stream_ref(c.stream));
    wait_count(fx.client_queue, &host.messages, THREADS * EACH, "the messages of all threads");
    for (int i = 0; i < THREADS; i++)
        uv_thread_join(&threads[i]);
    rpc_stream_close(c.stream);
    wait_for(fx.client_queue, &c.ended, "the end");
    assert_int_equal(c.end.code, TALLY_OK);
    wait_released(THREADS * EACH);
}

/* A payload outlives its message, its stream and its connection. */
static void test_kept_payload(void **state)
{
    (void)state;
    struct client c = {0};
    struct tally_error err = {0};
    Tally__V1__Push push = TALLY__V1__PUSH__INIT;
    static float data[100001];
    float *got = malloc(sizeof data);
    for (size_t i = 0; i < 100001; i++)
        data[i] = (float)i;
    host_reset(DO_LISTEN);
    client_open(&c, &fx, NULL);
    push.job = 77;
    push.gradient = (ProtobufCBinaryData){.len = sizeof data, .data = (uint8_t *)data}; /* packed by protobuf-c */
    must(rpc_stream_send(c.stream, &push.base, &err), &err);
    rpc_stream_close(c.stream);
    wait_for(fx.client_queue, &c.ended, "the end");
    wait_count(fx.client_queue, &host.messages, 1, "the message");
    teardown(NULL);
    struct rpc_payload *kept = atomic_load(&host.kept);
    assert_int_equal(rpc_payload_copy_floats(kept, got, 100000, &err), TALLY_EINVAL);
    must(rpc_payload_copy_floats(kept, got, 100001, &err), &err);
    assert_memory_equal(got, data, sizeof data);
    struct rpc_payload_reader reader;
    const float *run;
    size_t count, at = 0;
    rpc_payload_reader_init(&reader, kept);
    while (rpc_payload_reader_next(&reader, &run, &count)) {
        assert_int_equal((uintptr_t)run % 4, 0);
        assert_memory_equal(run, data + at, count * 4);
        at += count;
    }
    assert_int_equal(at, 100001);
    assert_null(rpc_payload_unref(rpc_payload_ref(kept)) ? kept : NULL);
    rpc_payload_unref(kept);
    free(got);
    setup(NULL);
}

static void test_shutdown_with_streams_in_flight(void **state)
{
    (void)state;
    struct client c[3] = {{.credits_back = 1}, {.credits_back = 1}, {.credits_back = 1}};
    struct rpc_stream_options options = {.credits = 4};
    host_reset(DO_ECHO);
    for (int i = 0; i < 3; i++)
        client_open(&c[i], &fx, &options);
    for (unsigned n = 0; n < 10; n++)
        assert_int_equal(send_pattern(c[0].stream, n, 100000), TALLY_OK);
    wait_count(fx.client_queue, &host.opens, 3, "the streams to open");
    int64_t start = tally_now_ns();
    fixture_stop_server(&fx, 200);
    assert_in_range((tally_now_ns() - start) / 1000000, 190, 10000); /* it waited for them, and not longer */
    for (int i = 0; i < 3; i++) {
        wait_for(fx.client_queue, &c[i].ended, "the end by a shutdown");
        assert_true(c[i].end.code == TALLY_EUNAVAIL || c[i].end.code == TALLY_ECANCELLED);
    }
    assert_int_equal(atomic_load(&host.ends), 3);
    teardown(NULL);
    setup(NULL);
}

/* A stream that ends within the time to drain ends well. */
static void test_shutdown_drains(void **state)
{
    (void)state;
    struct client c = {.credits_back = 1, .check = true};
    struct rpc_stream_options options = {.credits = 4};
    host_reset(DO_ECHO);
    client_open(&c, &fx, &options);
    for (unsigned n = 0; n < 5; n++)
        assert_int_equal(send_pattern(c.stream, n, size_of(n)), TALLY_OK);
    rpc_stream_close(c.stream);
    wait_count(fx.client_queue, &host.opens, 1, "the stream to open");
    fx.drain_ms = 10000;
    uv_async_send(&fx.stop_async);
    wait_for(fx.client_queue, &c.ended, "the end by itself");
    assert_int_equal(c.end.code, TALLY_OK);
    assert_int_equal(atomic_load(&c.messages), 5);
    uv_thread_join(&fx.loop_thread);
    uv_thread_join(&fx.data_thread);
    fx.server_running = false;
    teardown(NULL);
    setup(NULL);
}

/* ---- peers that are killed: children are this program again ---- */

static char self[512];

static pid_t spawn(const char *what, const char *address, char *ret_line, size_t line_bytes)
{
    int from[2];
    assert_int_equal(pipe(from), 0);
    pid_t pid = fork();
    if (pid == 0) {
        dup2(from[1], STDOUT_FILENO);
        close(from[0]);
        prctl(PR_SET_PDEATHSIG, SIGKILL); /* also where an assertion ends this test */
        execl(self, self, what, address, (char *)NULL);
        _exit(127);
    }
    close(from[1]);
    FILE *in = fdopen(from[0], "r");
    assert_non_null(fgets(ret_line, (int)line_bytes, in));
    ret_line[strcspn(ret_line, "\n")] = '\0';
    fclose(in);
    return pid;
}

static int child_serve(void)
{
    struct fixture f;
    rpc_global_init();
    host_reset(DO_LISTEN);
    fixture_start(&f, true, false, add_services);
    printf("%s\n", f.address);
    fflush(stdout);
    rmdir(f.directory);
    sleep(60); /* it is killed before */
    return 1;
}

static int child_client(const char *address)
{
    static const struct rpc_stream_events events = {.on_message = client_message, .on_end = client_end};
    struct tally_error err = {0};
    struct rpc_channel *channel;
    struct rpc_queue *queue;
    struct client c = {0};
    rpc_global_init();
    must(rpc_channel_new(address, NULL, &channel, &err), &err);
    must(rpc_data_queue_new(&queue, &err), &err);
    must(rpc_stream_open(channel, queue, &tally__v1__parameters__descriptor, "Exchange", &events, &c, NULL, &c.stream,
                         &err),
         &err);
    for (unsigned n = 0; n < 4; n++)
        must(send_pattern(c.stream, n, 100000), &err);
    for (int i = 0; i < 20; i++)
        rpc_queue_poll(queue, tally_now_ns() + 10000000);
    printf("ready\n");
    fflush(stdout);
    for (int i = 0; i < 600; i++) /* it is killed before */
        rpc_queue_poll(queue, tally_now_ns() + 100000000);
    return 1;
}

static void test_server_killed(void **state)
{
    (void)state;
    char address[RPC_ADDRESS_MAX];
    struct tally_error err = {0};
    struct rpc_channel *channel, *kept = fx.channel;
    struct client c = {.credits_back = 1}, d = {0};
    struct rpc_stream_options options = {.credits = 1, .max_queued_messages = 100, .max_queued_bytes = 64u << 20};
    pid_t pid = spawn("serve", "-", address, sizeof address);
    must(rpc_channel_new(address, NULL, &channel, &err), &err);
    atomic_store(&released, 0);
    fx.channel = channel;
    client_open(&c, &fx, &options);
    client_open(&d, &fx, &options); /* this one reads nothing more once its credit is used */
    fx.channel = kept;
    unsigned accepted = 0;
    for (int i = 0; i < 50; i++) {
        accepted += send_pattern(c.stream, accepted, 300000) == TALLY_OK;
        rpc_queue_poll(fx.client_queue, tally_now_ns() + 1000000);
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    wait_for(fx.client_queue, &c.ended, "the end after the server was killed");
    wait_for(fx.client_queue, &d.ended, "the end after the server was killed");
    assert_int_equal(c.end.code, TALLY_EUNAVAIL);
    assert_int_equal(d.end.code, TALLY_EUNAVAIL);
    assert_true(strlen(c.end.message) > 0);
    rpc_channel_free(channel);
    wait_released(accepted);
}

static void test_client_killed(void **state)
{
    (void)state;
    char line[64];
    host_reset(DO_LISTEN);
    pid_t pid = spawn("client", fx.address, line, sizeof line);
    assert_string_equal(line, "ready");
    wait_count(fx.client_queue, &host.messages, 4, "the child's messages");
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    wait_count(fx.client_queue, &host.ends, 1, "the server's end after the client was killed");
    assert_int_equal(atomic_load(&host.end_code), TALLY_ECANCELLED);
    assert_int_equal(atomic_load(&host.half_closes), 0); /* a lost client has not said that it is done */
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "serve") == 0)
        return child_serve();
    if (argc == 3 && strcmp(argv[1], "client") == 0)
        return child_client(argv[2]);
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    if (n <= 0)
        return 1;
    self[n] = '\0';
    rpc_global_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_echo_unix_data),
        cmocka_unit_test(test_echo_unix_joined),
        cmocka_unit_test(test_echo_tcp_data),
        cmocka_unit_test(test_echo_unix_loop),
        cmocka_unit_test(test_echo_tcp_loop_joined),
        cmocka_unit_test_setup_teardown(test_no_credit_no_read, setup, teardown),
        cmocka_unit_test_setup_teardown(test_slow_reader, setup, teardown),
        cmocka_unit_test_setup_teardown(test_refused_and_forgotten, setup, teardown),
        cmocka_unit_test_setup_teardown(test_server_streaming, setup, teardown),
        cmocka_unit_test_setup_teardown(test_deadline, setup, teardown),
        cmocka_unit_test_setup_teardown(test_cancel_from_another_thread, setup, teardown),
        cmocka_unit_test_setup_teardown(test_server_cancels, setup, teardown),
        cmocka_unit_test_setup_teardown(test_many_threads_one_stream, setup, teardown),
        cmocka_unit_test_setup_teardown(test_kept_payload, setup, teardown),
        cmocka_unit_test_setup_teardown(test_shutdown_with_streams_in_flight, setup, teardown),
        cmocka_unit_test_setup_teardown(test_shutdown_drains, setup, teardown),
        cmocka_unit_test_setup_teardown(test_server_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_client_killed, setup, teardown),
    };
    int failed = cmocka_run_group_tests_name("rpc streams", tests, NULL, NULL);
    rpc_global_shutdown();
    return failed;
}
