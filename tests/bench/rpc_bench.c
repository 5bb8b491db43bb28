/*
 * What the RPC wrapper costs between two processes: round trips of a small data message on data queues, and payloads of
 * 1 MiB one way and both ways, over a UNIX socket or TCP.
 *
 *   bazel run --config=opt //tests/bench:rpc_bench -- [unix|tcp] [round trips] [MiB]
 *
 * The server is this program again (exec, since gRPC does not survive a fork). It has a loop queue beside its data
 * queue, as a shard has.
 */
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
#include <uv.h>

#include "common/clock.h"
#include "proto/parameters.pb-c.h"
#include "proto/rpc.h"

#define WINDOW 16
#define SLICE_BYTES (1u << 20)
#define SLICE_FLOATS (SLICE_BYTES / sizeof(float))

static void check(tally_status status, const struct tally_error *err)
{
    if (status) {
        fprintf(stderr, "rpc_bench: %s\n", err->message);
        exit(1);
    }
}

static double cpu_seconds(void)
{
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + 1e-6 * (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec);
}

/* ---- the server: sums what comes; answers every push, with weights where slice is 1 ---- */

static struct {
    struct rpc_queue *loop_queue, *data_queue;
    struct rpc_server *server;
    uv_loop_t loop;
    uv_poll_t parent;
    atomic_bool stopped;
    float *sum;
    float *weights;
    double cpu_start;
} host;

static void released(void *user)
{
    (void)user;
}

static void host_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    (void)user;
    const Tally__V1__Push *push = (const Tally__V1__Push *)message->header;
    struct rpc_payload_reader reader;
    const float *run;
    size_t count, at = 0;
    rpc_payload_reader_init(&reader, message->payload);
    while (rpc_payload_reader_next(&reader, &run, &count)) {
        for (size_t i = 0; i < count; i++)
            host.sum[at + i] += run[i];
        at += count;
    }
    Tally__V1__Update update = TALLY__V1__UPDATE__INIT;
    struct tally_error err;
    update.version = push->step;
    size_t back = push->slice == 1 ? rpc_payload_bytes(message->payload) : 0;
    check(rpc_stream_send_payload(stream, &update.base, host.weights, back, released, NULL, &err), &err);
    rpc_stream_grant(stream, 1);
}

static void host_half_close(struct rpc_stream *stream, void *user)
{
    (void)user;
    fprintf(stderr, "  (server: %.2f s of CPU)\n", cpu_seconds() - host.cpu_start);
    rpc_stream_finish(stream, TALLY_OK, NULL);
}

static void host_open(struct rpc_stream *stream, void *user)
{
    static const struct rpc_stream_events events = {.on_message = host_message, .on_half_close = host_half_close};
    static const struct rpc_stream_options options = {.credits = WINDOW, .max_queued_bytes = 64u << 20};
    host.cpu_start = cpu_seconds();
    rpc_stream_accept(stream, &events, user, &options);
}

static void host_stopped(void *user)
{
    (void)user;
    rpc_server_free(host.server);
    atomic_store(&host.stopped, true);
    rpc_queue_wake(host.data_queue);
}

static void parent_gone(uv_poll_t *handle, int status, int events)
{
    (void)status;
    (void)events;
    uv_close((uv_handle_t *)handle, NULL);
    rpc_server_stop(host.server, 1000, host_stopped, NULL);
}

static void data_thread(void *arg)
{
    (void)arg;
    while (!atomic_load(&host.stopped))
        rpc_queue_poll(host.data_queue, tally_now_ns() + 100000000);
}

static int serve(const char *address)
{
    static const struct rpc_method methods[] = {{.name = "Exchange", .on_open = host_open}};
    struct tally_error err;
    char bound[RPC_ADDRESS_MAX];
    uv_thread_t thread;
    rpc_global_init();
    host.sum = calloc(SLICE_FLOATS, sizeof(float));
    host.weights = calloc(SLICE_FLOATS, sizeof(float));
    uv_loop_init(&host.loop);
    check(rpc_data_queue_new(&host.data_queue, &err), &err);
    check(rpc_loop_queue_join(&host.loop, host.data_queue, &host.loop_queue, &err), &err);
    check(rpc_server_new(host.loop_queue, NULL, &host.server, &err), &err);
    struct rpc_service service = {.descriptor = &tally__v1__parameters__descriptor,
                                  .queue = host.data_queue,
                                  .methods = methods,
                                  .method_count = 1};
    check(rpc_server_add(host.server, &service, &err), &err);
    check(rpc_server_listen(host.server, address, bound, sizeof bound, &err), &err);
    check(rpc_server_start(host.server, &err), &err);
    uv_thread_create(&thread, data_thread, NULL);
    printf("%s\n", bound);
    fflush(stdout);
    uv_poll_init(&host.loop, &host.parent, STDIN_FILENO); /* ends with the parent */
    uv_poll_start(&host.parent, UV_READABLE | UV_DISCONNECT, parent_gone);
    while (!atomic_load(&host.stopped))
        uv_run(&host.loop, UV_RUN_ONCE);
    uv_thread_join(&thread);
    rpc_queue_free(host.loop_queue);
    rpc_queue_free(host.data_queue);
    uv_run(&host.loop, UV_RUN_DEFAULT);
    uv_loop_close(&host.loop);
    rpc_global_shutdown();
    free(host.sum);
    free(host.weights);
    return 0;
}

/* ---- the client ---- */

struct run {
    struct rpc_stream *stream;
    struct rpc_queue *queue;
    float *data;
    size_t bytes; /* of a payload */
    uint32_t slice;
    size_t total, sent, answered;
    size_t window;
    bool ended;
    int64_t *times; /* round trips: when each was sent, then how long it took, ns */
};

static void fill(struct run *r)
{
    struct tally_error err;
    while (r->sent < r->total && r->sent - r->answered < r->window) {
        Tally__V1__Push push = TALLY__V1__PUSH__INIT;
        push.step = r->sent + 1;
        push.slice = r->slice;
        push.job = 1;
        push.weight = 64;
        if (r->times)
            r->times[r->sent] = tally_now_ns();
        check(rpc_stream_send_payload(r->stream, &push.base, r->data, r->bytes, released, NULL, &err), &err);
        r->sent++;
    }
    if (r->answered == r->total)
        rpc_stream_close(r->stream);
}

static void answer(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    (void)message;
    struct run *r = user;
    if (r->times)
        r->times[r->answered] = tally_now_ns() - r->times[r->answered];
    r->answered++;
    rpc_stream_grant(stream, 1);
    fill(r);
}

static void ended(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    check(end->code, end);
    ((struct run *)user)->ended = true;
}

static double measure(struct rpc_channel *channel, struct run *r)
{
    static const struct rpc_stream_events events = {.on_message = answer, .on_end = ended};
    static const struct rpc_stream_options options = {
        .credits = WINDOW, .max_queued_bytes = 64u << 20, .timeout_ms = 120000};
    struct tally_error err;
    check(rpc_stream_open(channel, r->queue, &tally__v1__parameters__descriptor, "Exchange", &events, r, &options,
                          &r->stream, &err),
          &err);
    int64_t start = tally_now_ns();
    double cpu = cpu_seconds();
    fill(r);
    while (!r->ended)
        rpc_queue_poll(r->queue, tally_now_ns() + 1000000000);
    fprintf(stderr, "  (client: %.2f s of CPU)\n", cpu_seconds() - cpu);
    return 1e-9 * (double)(tally_now_ns() - start);
}

static int by_size(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void bench(const char *address, size_t trips, size_t mebibytes)
{
    struct tally_error err;
    struct rpc_channel *channel;
    struct rpc_queue *queue;
    rpc_global_init();
    check(rpc_data_queue_new(&queue, &err), &err);
    check(rpc_channel_new(address, NULL, &channel, &err), &err);
    float *data = calloc(SLICE_FLOATS, sizeof(float));
    int64_t *times = calloc(trips, sizeof *times);

    struct run trip = {
        .queue = queue, .data = data, .bytes = 1024, .slice = 1, .total = trips, .window = 1, .times = times};
    measure(channel, &trip);
    qsort(times, trips, sizeof *times, by_size);
    printf("round trip of 1 KiB:       median %.1f us, p10 %.1f us, p99 %.1f us\n", 1e-3 * (double)times[trips / 2],
           1e-3 * (double)times[trips / 10], 1e-3 * (double)times[trips * 99 / 100]);

    struct run push = {.queue = queue, .data = data, .bytes = SLICE_BYTES, .total = mebibytes, .window = WINDOW};
    double seconds = measure(channel, &push);
    printf("1 MiB pushes, one way:     %.2f GB/s\n", 1e-9 * (double)mebibytes * SLICE_BYTES / seconds);

    struct run both = {
        .queue = queue, .data = data, .bytes = SLICE_BYTES, .slice = 1, .total = mebibytes, .window = WINDOW};
    seconds = measure(channel, &both);
    printf("1 MiB pushes and answers:  %.2f GB/s each way\n", 1e-9 * (double)mebibytes * SLICE_BYTES / seconds);

    free(times);
    free(data);
    rpc_channel_free(channel);
    rpc_queue_free(queue);
    rpc_global_shutdown();
}

int main(int argc, char **argv)
{
    if (argc == 3 && strcmp(argv[1], "serve") == 0)
        return serve(argv[2]);
    size_t trips = argc > 2 ? strtoul(argv[2], NULL, 10) : 20000;
    size_t mebibytes = argc > 3 ? strtoul(argv[3], NULL, 10) : 2000;
    char directory[] = "/tmp/rpc_bench.XXXXXX", address[RPC_ADDRESS_MAX], path[64];
    int to[2], from[2];
    if (trips == 0 || mebibytes == 0 || !mkdtemp(directory) || pipe(to) || pipe(from))
        return 1;
    snprintf(path, sizeof path, "unix:%s/s", directory);
    pid_t child = fork();
    if (child == 0) {
        dup2(to[0], STDIN_FILENO);
        dup2(from[1], STDOUT_FILENO);
        close(to[1]);
        execl("/proc/self/exe", argv[0], "serve", argc > 1 && strcmp(argv[1], "tcp") == 0 ? "127.0.0.1:0" : path,
              (char *)NULL);
        _exit(127);
    }
    close(to[0]);
    close(from[1]);
    FILE *in = fdopen(from[0], "r");
    int status = 1;
    if (in && fgets(address, sizeof address, in)) {
        address[strcspn(address, "\n")] = '\0';
        printf("%s\n", address);
        bench(address, trips, mebibytes);
        close(to[1]);
    }
    waitpid(child, &status, 0);
    rmdir(directory);
    return status == 0 ? 0 : 1;
}
