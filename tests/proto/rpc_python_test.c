/* Serves rpc_python_test.py, a client written with another gRPC library, and ends with its verdict. */
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

#include "proto/jobs.pb-c.h"
#include "proto/parameters.pb-c.h"
#include "tests/proto/rpc_fixture.h"

static void get(struct rpc_stream *stream, const struct rpc_message *request, void *user)
{
    (void)user;
    Tally__V1__Job job = TALLY__V1__JOB__INIT;
    job.id = ((const Tally__V1__JobRef *)request->header)->id + 1;
    job.name = "x";
    if (job.id == 1)
        rpc_stream_finish(stream, TALLY_ESTATE, "na\xc3\xafve 100%");
    else
        rpc_stream_reply(stream, &job.base);
}

static void echo(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    (void)user;
    const Tally__V1__Push *push = (const Tally__V1__Push *)message->header;
    Tally__V1__Update update = TALLY__V1__UPDATE__INIT;
    size_t bytes = rpc_payload_bytes(message->payload);
    void *copy = malloc(bytes + 1);
    rpc_payload_copy(message->payload, 0, bytes, copy);
    update.version = push->step;
    update.slice = push->slice;
    if (rpc_stream_send_payload(stream, &update.base, copy, bytes, free, copy, NULL)) {
        free(copy);
        rpc_stream_finish(stream, TALLY_ENOMEM, "the answers are not read");
        return;
    }
    rpc_stream_grant(stream, 1);
}

static void half_close(struct rpc_stream *stream, void *user)
{
    (void)user;
    rpc_stream_finish(stream, TALLY_OK, NULL);
}

static void open_echo(struct rpc_stream *stream, void *user)
{
    static const struct rpc_stream_events events = {.on_message = echo, .on_half_close = half_close};
    static const struct rpc_stream_options options = {
        .credits = 4, .max_queued_messages = 1000, .max_queued_bytes = 64u << 20};
    rpc_stream_accept(stream, &events, user, &options);
}

static void add_services(struct fixture *f)
{
    static const struct rpc_method jobs = {.name = "Get", .on_request = get};
    static const struct rpc_method parameters = {.name = "Exchange", .on_open = open_echo};
    struct rpc_service on_loop = {&tally__v1__jobs__descriptor, f->loop_queue, &jobs, 1, f};
    struct rpc_service on_data = {&tally__v1__parameters__descriptor, f->data_queue, &parameters, 1, f};
    assert_int_equal(rpc_server_add(f->server, &on_loop, NULL), TALLY_OK);
    assert_int_equal(rpc_server_add(f->server, &on_data, NULL), TALLY_OK);
}

static void serve_python(bool tcp)
{
    struct fixture f;
    int from[2], status = -1;
    char line[64] = "";
    rpc_global_init();
    fixture_start(&f, tcp, false, add_services);
    assert_int_equal(pipe(from), 0);
    pid_t pid = fork();
    if (pid == 0) {
        unsetenv("LD_PRELOAD");
        dup2(from[1], STDOUT_FILENO);
        close(from[0]);
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        execl("/usr/bin/python3", "python3", "-B", "tests/proto/rpc_python_test.py", f.address, (char *)NULL);
        _exit(127);
    }
    close(from[1]);
    FILE *in = fdopen(from[0], "r");
    bool asked = fgets(line, sizeof line, in) && strcmp(line, "stop\n") == 0;
    fixture_stop_server(&f, 5000);
    bool done = fgets(line, sizeof line, in) && strcmp(line, "done\n") == 0;
    fclose(in);
    waitpid(pid, &status, 0);
    fixture_stop(&f);
    rpc_global_shutdown();
    assert_true(asked);
    assert_true(done);
    assert_int_equal(status, 0);
}

static void test_unix(void **state)
{
    (void)state;
    serve_python(false);
}

static void test_tcp(void **state)
{
    (void)state;
    serve_python(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_unix), cmocka_unit_test(test_tcp)};
    return cmocka_run_group_tests_name("rpc from python", tests, NULL, NULL);
}
