/*
 * What a shard costs: steps of a worker that computes nothing, over a UNIX socket, between two processes.
 *
 *   bazel run --config=opt //tests/bench:shard_bench -- [tiny|middle|wide] [steps] [workers]
 *
 * Prints the time of a step from the first push to the last new weight, the CPU of both sides, and the shard's peak
 * memory against its bound of 5 times the parameters and 64 MiB. The shard is this program again (exec, since gRPC does
 * not survive a fork). The workers are streams of one thread; with two, the first one pushes its whole step before the
 * second one begins, so that the shard holds as much as it ever can.
 */
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/limits.h"
#include "common/log.h"
#include "tests/server/shard_rig.h"

#define WORKERS_MAX 8

static struct rig_job job_named(const char *name, uint64_t steps, uint32_t workers)
{
    struct rig_job job = {.id = 1,
                          .generation = 1,
                          .workers = workers,
                          .shards = 1,
                          .samples = workers,
                          .batch = workers,
                          .steps = steps,
                          .lr = 1e-3,
                          .momentum = 0.9};
    if (strcmp(name, "tiny") == 0) {
        job.inputs = 10;
        job.layers = 2;
        job.widths[0] = 20;
        job.widths[1] = 2;
    } else if (strcmp(name, "middle") == 0) {
        job.inputs = 784;
        job.layers = 3;
        job.widths[0] = 512;
        job.widths[1] = 256;
        job.widths[2] = 10;
    } else if (strcmp(name, "wide") == 0) {
        job.inputs = 784;
        job.layers = 3;
        job.widths[0] = job.widths[1] = 4096;
        job.widths[2] = 10;
    } else {
        fprintf(stderr, "shard_bench: no model %s: expected tiny, middle or wide\n", name);
        exit(2);
    }
    return job;
}

/* ---- the shard's process ---- */

static void on_input(uv_poll_t *poll, int status, int events)
{
    (void)status;
    (void)events;
    *(bool *)poll->data = true;
}

static long status_kib(const char *key)
{
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    long value = -1;
    while (file && fgets(line, sizeof line, file))
        if (strncmp(line, key, strlen(key)) == 0)
            value = strtol(line + strlen(key), NULL, 10);
    if (file)
        fclose(file);
    return value;
}

/* Serves until its standard input ends; then says what it took. */
static int serve(const struct rig_job *job)
{
    static struct rig rig;
    bool gone = false;
    long before_kib = status_kib("VmRSS:");
    rig_open(&rig);
    struct model *model = rig_open_job(&rig, job);
    printf("%s\n", rig.address);
    fflush(stdout);
    uv_poll_t poll;
    uv_poll_init(&rig.loop, &poll, STDIN_FILENO);
    poll.data = &gone;
    uv_poll_start(&poll, UV_READABLE | UV_DISCONNECT, on_input);
    while (!gone)
        uv_run(&rig.loop, UV_RUN_ONCE);
    uv_close((uv_handle_t *)&poll, NULL);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    double parameters = (double)model->flat_count * sizeof(float);
    double peak = (double)status_kib("VmHWM:") * 1024;
    printf("shard: %.2f s of CPU (%.2f s of it in the system), %zu steps in %u reports\n",
           (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
               1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec),
           (double)usage.ru_stime.tv_sec + 1e-6 * (double)usage.ru_stime.tv_usec, rig.step_count, rig.reports);
    printf("shard: peak memory %.1f MiB: %.1f MiB of parameters x %.2f, and the %ld MiB of the process before; bound "
           "%.1f MiB\n",
           peak / 1048576, parameters / 1048576, (peak - (double)before_kib * 1024) / parameters, before_kib / 1024,
           (5 * parameters) / 1048576 + 64);
    fflush(stdout);
    model_free(model);
    _exit(0); /* the streams are the parent's: nothing to wait for */
}

/* ---- the workers' process ---- */

struct worker {
    struct rpc_stream *stream;
    uint32_t behind; /* slices that have not come at `wanted` */
    uint64_t wanted;
    bool ended;
};

static struct {
    struct model *model;
    struct rpc_queue *queue;
    struct worker workers[WORKERS_MAX];
    float *gradient, *weights;
} client;

static void on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct worker *worker = user;
    const Tally__V1__Update *update = (const void *)message->header;
    if (update->refusal) {
        fprintf(stderr, "shard_bench: refused: %s\n", update->refusal->reason);
        exit(1);
    }
    const struct slice *slice = &client.model->slices[update->slice];
    rpc_payload_copy_floats(message->payload, client.weights + slice->offset, slice->count, NULL);
    if (update->version == worker->wanted)
        worker->behind--;
    rpc_stream_grant(stream, 1);
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct worker *worker = user;
    worker->ended = true;
    if (end->code != TALLY_OK && end->code != TALLY_ECANCELLED) {
        fprintf(stderr, "shard_bench: %s\n", end->message);
        exit(1);
    }
}

static void nothing(void *user)
{
    (void)user;
}

static void wait_for(struct worker *worker)
{
    while (worker->behind > 0)
        rpc_queue_poll(client.queue, tally_now_ns() + INT64_C(1000000000));
}

static void expect(struct worker *worker, uint64_t version)
{
    worker->wanted = version;
    worker->behind = (uint32_t)client.model->slice_count;
}

static void push_step(struct worker *worker, uint64_t step, uint32_t rank, uint32_t ranks)
{
    for (uint32_t i = (uint32_t)client.model->slice_count; i-- > 0;) {
        const struct slice *slice = &client.model->slices[i];
        Tally__V1__Push push = TALLY__V1__PUSH__INIT;
        push.job = push.generation = 1;
        push.step = step;
        push.leaf_begin = ranks == 1 ? 0 : rank;
        push.leaf_end = rank + 1;
        push.slice = i;
        push.weight = 1;
        while (rpc_stream_send_payload(worker->stream, &push.base, client.gradient + slice->offset,
                                       slice->count * sizeof(float), nothing, NULL, NULL) == TALLY_ENOMEM)
            rpc_queue_poll(client.queue, tally_now_ns() + 1000000);
    }
}

static void hello(struct worker *worker, struct rpc_channel *channel, uint32_t rank)
{
    static const struct rpc_stream_events events = {.on_message = on_message, .on_end = on_end};
    const struct rpc_stream_options options = {.credits = 32, .max_queued_bytes = (size_t)1 << 30};
    struct tally_error err;
    if (rpc_stream_open(channel, client.queue, &tally__v1__parameters__descriptor, "Exchange", &events, worker,
                        &options, &worker->stream, &err) != TALLY_OK) {
        fprintf(stderr, "shard_bench: %s\n", err.message);
        exit(1);
    }
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    version.major = TALLY_PROTOCOL_MAJOR;
    Tally__V1__Hello hello = TALLY__V1__HELLO__INIT;
    hello.version = &version;
    hello.rank = rank;
    Tally__V1__Push push = TALLY__V1__PUSH__INIT;
    push.job = push.generation = 1;
    push.hello = &hello;
    expect(worker, 0);
    rpc_stream_send(worker->stream, &push.base, NULL);
    wait_for(worker);
}

static int compare(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void run_steps(uint64_t steps, uint32_t workers)
{
    int64_t *times = calloc(steps, sizeof *times);
    int64_t start = tally_now_ns();
    for (uint64_t step = 1; step <= steps; step++) {
        int64_t before = tally_now_ns();
        for (uint32_t r = 0; r < workers; r++)
            expect(&client.workers[r], step);
        for (uint32_t r = 0; r < workers; r++) {
            push_step(&client.workers[r], step, r, workers);
            /* The whole step of this worker arrives before the next one's begins. */
            while (r + 1 < workers && rpc_stream_queued_messages(client.workers[r].stream) > 0)
                rpc_queue_poll(client.queue, tally_now_ns() + 1000000);
        }
        for (uint32_t r = 0; r < workers; r++)
            wait_for(&client.workers[r]);
        times[step - 1] = tally_now_ns() - before;
    }
    double total = (double)(tally_now_ns() - start);
    qsort(times, steps, sizeof *times, compare);
    struct rusage usage;
    getrusage(RUSAGE_SELF, &usage);
    printf("%.1f us a step (median %.1f, least %.1f), %.0f steps/s, workers' CPU %.2f s\n", total / 1e3 / (double)steps,
           (double)times[steps / 2] / 1e3, (double)times[0] / 1e3, 1e9 * (double)steps / total,
           (double)usage.ru_utime.tv_sec + (double)usage.ru_stime.tv_sec +
               1e-6 * (double)(usage.ru_utime.tv_usec + usage.ru_stime.tv_usec));
    free(times);
}

static pid_t start_shard(char **argv, int *ret_to, FILE **ret_from)
{
    int to[2], from[2];
    if (pipe(to) != 0 || pipe(from) != 0) {
        perror("shard_bench: pipe");
        exit(1);
    }
    pid_t child = fork();
    if (child == 0) {
        dup2(to[0], STDIN_FILENO);
        dup2(from[1], STDOUT_FILENO);
        close(to[1]);
        close(from[0]);
        setenv("SHARD_BENCH_SERVES", "1", 1);
        execv("/proc/self/exe", argv);
        perror("shard_bench: exec");
        _exit(1);
    }
    close(to[0]);
    close(from[1]);
    *ret_to = to[1];
    *ret_from = fdopen(from[0], "r");
    return child;
}

static void forward(FILE *from)
{
    char line[512];
    while (fgets(line, sizeof line, from))
        fputs(line, stdout);
}

int main(int argc, char **argv)
{
    const char *name = argc > 1 ? argv[1] : "tiny";
    uint64_t steps = argc > 2 ? strtoull(argv[2], NULL, 10) : strcmp(name, "tiny") == 0 ? 20000 : 20;
    uint32_t workers = argc > 3 ? (uint32_t)strtoul(argv[3], NULL, 10) : 1;
    if (steps == 0 || workers == 0 || workers > WORKERS_MAX) {
        fprintf(stderr, "shard_bench: expected steps of at least 1, and 1 to %d workers\n", WORKERS_MAX);
        return 2;
    }
    struct rig_job job = job_named(name, steps, workers);
    tally_log_init("shard_bench", "", TALLY_LOG_WARN);
    if (getenv("SHARD_BENCH_SERVES")) {
        rpc_global_init();
        return serve(&job);
    }
    int to;
    FILE *from;
    pid_t child = start_shard(argv, &to, &from);
    char address[128];
    if (!fgets(address, sizeof address, from))
        return 1;
    address[strcspn(address, "\n")] = '\0';
    rpc_global_init();
    client.model = rig_model(&job);
    client.gradient = calloc(client.model->flat_count, sizeof(float));
    client.weights = calloc(client.model->flat_count, sizeof(float));
    for (size_t i = 0; i < client.model->flat_count; i++)
        client.gradient[i] = 1e-3f;
    rpc_data_queue_new(&client.queue, NULL);
    struct rpc_channel *channels[WORKERS_MAX];
    const struct rpc_channel_options own = {.own_connection = true};
    for (uint32_t r = 0; r < workers; r++) {
        rpc_channel_new(address, &own, &channels[r], NULL);
        hello(&client.workers[r], channels[r], r);
    }
    printf("%s, %u worker(s), %zu slices, %.1f MiB: ", name, workers, client.model->slice_count,
           (double)client.model->flat_count * 4 / 1048576);
    run_steps(steps, workers);
    fflush(stdout);
    close(to);
    forward(from);
    waitpid(child, NULL, 0);
    unlink(address + strlen("unix:"));
    *strrchr(address, '/') = '\0';
    rmdir(address + strlen("unix:"));
    return 0;
}
