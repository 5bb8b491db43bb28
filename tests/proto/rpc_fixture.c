#include "tests/proto/rpc_fixture.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"

static void must(tally_status status, const struct tally_error *err)
{
    if (status)
        fail_msg("%s", err->message);
}

static void server_stopped(void *user)
{
    struct fixture *f = user;
    rpc_server_free(f->server);
    f->server = NULL;
    atomic_store(&f->stopped, true);
    rpc_queue_wake(f->data_queue);
}

static void stop_asked(uv_async_t *async)
{
    struct fixture *f = async->data;
    rpc_server_stop(f->server, f->drain_ms, server_stopped, f);
    uv_close((uv_handle_t *)async, NULL);
}

static void run_loop(void *arg)
{
    struct fixture *f = arg;
    while (!atomic_load(&f->stopped))
        uv_run(&f->loop, UV_RUN_ONCE);
}

static void run_data(void *arg)
{
    struct fixture *f = arg;
    while (!atomic_load(&f->stopped))
        rpc_queue_poll(f->data_queue, tally_now_ns() + 1000000000);
}

void fixture_start(struct fixture *f, bool tcp, bool joined, void (*add)(struct fixture *f))
{
    struct tally_error err = {0};
    char address[RPC_ADDRESS_MAX];
    memset(f, 0, sizeof *f);
    snprintf(f->directory, sizeof f->directory, "/tmp/rpc_test.XXXXXX");
    assert_non_null(mkdtemp(f->directory));
    snprintf(address, sizeof address, "unix:%s/s", f->directory);
    assert_int_equal(uv_loop_init(&f->loop), 0);
    assert_int_equal(uv_async_init(&f->loop, &f->stop_async, stop_asked), 0);
    f->stop_async.data = f;
    must(rpc_data_queue_new(&f->data_queue, &err), &err);
    must(joined ? rpc_loop_queue_join(&f->loop, f->data_queue, &f->loop_queue, &err)
                : rpc_loop_queue_new(&f->loop, &f->loop_queue, &err),
         &err);
    must(rpc_data_queue_new(&f->client_queue, &err), &err);
    must(rpc_server_new(f->loop_queue, NULL, &f->server, &err), &err);
    if (add)
        add(f);
    must(rpc_server_listen(f->server, tcp ? "127.0.0.1:0" : address, f->address, sizeof f->address, &err), &err);
    must(rpc_server_start(f->server, &err), &err);
    must(rpc_channel_new(f->address, NULL, &f->channel, &err), &err);
    f->server_running = true;
    uv_thread_create(&f->loop_thread, run_loop, f);
    uv_thread_create(&f->data_thread, run_data, f);
}

void fixture_stop_server(struct fixture *f, int64_t drain_ms)
{
    if (!f->server_running)
        return;
    f->server_running = false;
    f->drain_ms = drain_ms;
    uv_async_send(&f->stop_async);
    uv_thread_join(&f->loop_thread);
    uv_thread_join(&f->data_thread);
}

void fixture_stop(struct fixture *f)
{
    fixture_stop_server(f, 100);
    rpc_channel_free(f->channel);
    rpc_queue_free(f->client_queue);
    rpc_queue_free(f->loop_queue);
    rpc_queue_free(f->data_queue);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&f->loop), 0);
    assert_int_equal(rmdir(f->directory), 0); /* the socket is gone */
}

void wait_for(struct rpc_queue *queue, const atomic_bool *flag, const char *what)
{
    int64_t end = tally_now_ns() + 20000000000;
    while (!atomic_load(flag)) {
        if (tally_now_ns() > end)
            fail_msg("waited 20 s for %s", what);
        rpc_queue_poll(queue, tally_now_ns() + 5000000);
    }
}

void wait_count(struct rpc_queue *queue, const atomic_uint *count, unsigned target, const char *what)
{
    int64_t end = tally_now_ns() + 20000000000;
    while (atomic_load(count) < target) {
        if (tally_now_ns() > end)
            fail_msg("waited 20 s for %s: %u of %u", what, atomic_load(count), target);
        rpc_queue_poll(queue, tally_now_ns() + 5000000);
    }
}
