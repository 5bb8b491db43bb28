/*
 * DESIGN. `tally run`: one loop, one thread. The job file is read and checked, the results' folder made, a private
 * cluster started; then a session goes submit -> watch -> (results) -> done, driven by RPC callbacks. Two things can
 * end it early: Ctrl-C (asks the coordinator to stop the job, a second one gives up) and a process of the cluster that
 * ends. The coordinator is told of a lost node by its connection and says so in the job's reason; the client only
 * decides itself where the coordinator cannot: it is the one that died, or it has said nothing for a while.
 */
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <uv.h>

#include "client/command.h"
#include "client/local_cluster.h"
#include "client/progress.h"
#include "client/result_file.h"
#include "client/run_output.h"
#include "common/clock.h"
#include "common/daemon.h"
#include "common/limits.h"
#include "common/message_copy.h"
#include "model/mesh.h"
#include "model/spec.h"
#include "proto/jobs.pb-c.h"
#include "proto/rpc.h"

#define TICK_MS 100
/* The coordinator only has to put the job on its disk. */
#define SUBMIT_TIMEOUT_MS 15000
/* Events come at least ten times a second while steps run. After a silence the coordinator is asked whether it lives.
 */
#define SILENCE_NS (INT64_C(3) * 1000000000)
#define ALIVE_TIMEOUT_MS 10000
/* A process that ends without the coordinator noticing (it never registered): how long the coordinator has to say
 * something better. */
#define EXIT_GRACE_NS (INT64_C(3) * 1000000000)
/* A coordinator that does not answer: how long its end may take to be known. */
#define UNREACHABLE_GRACE_NS (INT64_C(1) * 1000000000)
/* From the stop to STOPPED: the weights are collected and written. */
#define STOP_TIMEOUT_NS (INT64_C(120) * 1000000000)
/* Processes of this machine join within a second or two; on a slow one, and where they are many, it takes longer. */
#define JOIN_TIMEOUT_NS(processes) (INT64_C(30000000000) + (int64_t)(processes)*INT64_C(250000000))
#define CLUSTER_GRACE_MS 5000
/* Cancelled calls end at once, but for a machine that is very busy. */
#define CALLS_END_NS (INT64_C(2) * 1000000000)
#define WATCH_CREDITS 64

/* Those that stop the job; the last one is that of a terminal that is closed. */
static const int signal_numbers[] = {SIGINT, SIGTERM, SIGHUP};
#define SIGNALS (sizeof signal_numbers / sizeof signal_numbers[0])

/* What is asked of the coordinator, each once at a time. */
enum asked { SUBMIT, WATCH, STOP, ALIVE, RESULT, ASKED };

struct run {
    uv_loop_t *loop;
    uv_timer_t tick;
    uv_signal_t signals[SIGNALS];
    struct rpc_queue *queue;
    struct rpc_channel *channel;
    struct rpc_stream *calls[ASKED]; /* under way */
    struct local_cluster *cluster;
    struct run_output *output;
    struct progress progress;
    const struct job_file *job;

    uint64_t id;              /* 0: not submitted yet */
    uint64_t last_seq;        /* of the events */
    int64_t heard_ns;         /* when the coordinator said something last */
    Tally__V1__Job *last_job; /* the answer to Get, once it has ended */
    bool has_weights;
    bool interrupted;
    int64_t stop_deadline_ns; /* 0: no stop asked for */
    int64_t exit_deadline_ns; /* 0: no process ended */
    int64_t join_deadline_ns; /* by then the job must not wait for its gang any more */
    bool over;                /* the loop is to end: state, reason and failure are what is known */
    Tally__V1__JobState state;
    char reason[TALLY_ERROR_MESSAGE_MAX];
    struct tally_error failure; /* code TALLY_OK: none; the client's own: a metrics file that cannot be written ... */
    struct result_file *file;
    struct tally_error unreachable; /* the coordinator does not answer; judged at the deadline */
    int64_t unreachable_deadline_ns;
};

/* ---- how it ends ---- */

static void end_run(struct run *run)
{
    run->over = true;
    uv_stop(run->loop);
}

static void end_failed(struct run *run, const char *reason)
{
    run->state = TALLY__V1__JOB_STATE__FAILED;
    snprintf(run->reason, sizeof run->reason, "%s", reason);
    end_run(run);
}

static void end_error(struct run *run, const struct tally_error *err)
{
    if (run->failure.code == TALLY_OK)
        run->failure = *err;
    if (run->state != TALLY__V1__JOB_STATE__SUCCEEDED && run->state != TALLY__V1__JOB_STATE__STOPPED)
        run->state = TALLY__V1__JOB_STATE__FAILED;
    if (!run->reason[0])
        snprintf(run->reason, sizeof run->reason, "%s", err->message);
    end_run(run);
}

/* A request to the coordinator failed. Where it has died, its end is what a person wants to hear of: that may be known
 * only a moment after its connections closed, so the answer is left to on_tick. */
static void end_unreachable(struct run *run, const char *what, const struct tally_error *end)
{
    if (run->unreachable_deadline_ns)
        return;
    run->unreachable = *end;
    tally_error_prefix(&run->unreachable, "%s", what);
    run->unreachable_deadline_ns = tally_now_ns() + UNREACHABLE_GRACE_NS;
}

static void settle_unreachable(struct run *run, int64_t now)
{
    const char *how = local_cluster_first_exit(run->cluster);
    if (how)
        end_failed(run, how);
    else if (now > run->unreachable_deadline_ns)
        end_error(run, &run->unreachable);
}

static bool is_terminal(Tally__V1__JobState state)
{
    return state == TALLY__V1__JOB_STATE__SUCCEEDED || state == TALLY__V1__JOB_STATE__FAILED ||
           state == TALLY__V1__JOB_STATE__STOPPED;
}

/* ---- calls ---- */

static void ask(struct run *run, enum asked what, const char *method, const ProtobufCMessage *request,
                const struct rpc_stream_options *options, rpc_unary_done done)
{
    struct tally_error err = {0};
    if (rpc_unary(run->channel, run->queue, &tally__v1__jobs__descriptor, method, request, options, done, run,
                  &run->calls[what], &err) != TALLY_OK)
        end_error(run, &err);
}

static bool is_asking(const struct run *run)
{
    bool asking = run->file != NULL;
    for (size_t i = 0; i < ASKED; i++)
        asking = asking || run->calls[i];
    return asking;
}

static void cancel_calls(struct run *run)
{
    if (run->file)
        result_file_cancel(run->file);
    for (size_t i = 0; i < ASKED; i++)
        if (run->calls[i])
            rpc_stream_cancel(run->calls[i]);
}

/* ---- results ---- */

static void on_result_file(const struct tally_error *end, void *user)
{
    struct run *run = user;
    run->file = NULL;
    if (run->over)
        return;
    if (end->code == TALLY_OK) {
        run->has_weights = true;
        end_run(run);
    } else {
        end_unreachable(run, "taking the weights", end);
    }
}

static void on_last_job(const struct tally_error *end, const struct rpc_message *reply, void *user)
{
    struct run *run = user;
    struct tally_error err = {0};
    run->calls[RESULT] = NULL;
    if (run->over)
        return;
    if (end->code != TALLY_OK) {
        end_unreachable(run, "asking for the result", end);
        return;
    }
    run->last_job = message_copy(reply->header);
    if (!run->last_job) {
        tally_fail(&err, TALLY_ENOMEM, "no memory for the job's description");
        end_error(run, &err);
    } else if (!run->last_job->weights_sha256[0]) {
        end_run(run); /* it left none */
    } else if (result_file_get(run->channel, run->queue, run->id, "model.safetensors", run_output_weights(run->output),
                               run->last_job->weights_sha256, on_result_file, run, &run->file, &err) != TALLY_OK) {
        end_error(run, &err);
    }
}

static void job_ended(struct run *run)
{
    Tally__V1__JobRef request = TALLY__V1__JOB_REF__INIT;
    request.id = run->id;
    ask(run, RESULT, "Get", &request.base, NULL, on_last_job);
}

/* ---- events ---- */

static void take_event(struct run *run, const Tally__V1__Event *event)
{
    struct tally_error err = {0};
    run->last_seq = event->seq;
    if (run_output_event(run->output, event, &err) != TALLY_OK) {
        end_error(run, &err);
        return;
    }
    if (event->body_case == TALLY__V1__EVENT__BODY_NOTICE) {
        progress_text(&run->progress, event->notice->text);
    } else if (event->body_case == TALLY__V1__EVENT__BODY_STATE) {
        run->state = event->state->state;
        snprintf(run->reason, sizeof run->reason, "%s", event->state->reason);
        progress_text(&run->progress, event->state->reason);
    }
}

static void on_events(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct run *run = user;
    const Tally__V1__Events *events = (const Tally__V1__Events *)message->header;
    run->heard_ns = tally_now_ns();
    for (size_t i = 0; i < events->n_events && !run->over; i++) {
        if (events->events[i]->seq > run->last_seq)
            take_event(run, events->events[i]);
    }
    rpc_stream_grant(stream, 1);
}

static void on_watch_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    struct run *run = user;
    (void)stream;
    run->calls[WATCH] = NULL;
    if (run->over)
        return;
    if (end->code == TALLY_OK && is_terminal(run->state))
        job_ended(run);
    else
        end_unreachable(run, "watching the job", end);
}

static void watch(struct run *run)
{
    static const struct rpc_stream_events events = {.on_message = on_events, .on_end = on_watch_end};
    struct rpc_stream_options options = {.credits = WATCH_CREDITS};
    struct rpc_stream **stream = &run->calls[WATCH];
    struct tally_error err = {0};
    Tally__V1__WatchRequest request = TALLY__V1__WATCH_REQUEST__INIT;
    request.job = run->id;
    request.after = run->last_seq;
    if (rpc_stream_open(run->channel, run->queue, &tally__v1__jobs__descriptor, "Watch", &events, run, &options, stream,
                        &err) != TALLY_OK ||
        rpc_stream_send(*stream, &request.base, &err) != TALLY_OK) {
        end_error(run, &err);
        return;
    }
    rpc_stream_close(*stream);
}

/* ---- stopping ---- */

static void on_stop_answer(const struct tally_error *end, const struct rpc_message *reply, void *user)
{
    struct run *run = user;
    (void)reply;
    run->calls[STOP] = NULL;
    if (end->code != TALLY_OK && !run->over)
        end_unreachable(run, "stopping the job", end);
}

static void ask_stop(struct run *run)
{
    Tally__V1__StopRequest request = TALLY__V1__STOP_REQUEST__INIT;
    request.job = run->id;
    request.reason = "interrupted";
    run->stop_deadline_ns = tally_now_ns() + STOP_TIMEOUT_NS;
    ask(run, STOP, "Stop", &request.base, NULL, on_stop_answer);
}

static void on_signal(uv_signal_t *handle, int number)
{
    struct run *run = handle->data;
    (void)number;
    if (run->over) { /* only the processes' end is waited for */
        if (run->interrupted)
            local_cluster_kill(run->cluster);
        run->interrupted = true;
        return;
    }
    if (run->id == 0) {
        run->state = TALLY__V1__JOB_STATE__STOPPED;
        snprintf(run->reason, sizeof run->reason, "interrupted before it began");
        end_run(run);
        return;
    }
    if (run->interrupted) {
        run->state = TALLY__V1__JOB_STATE__STOPPED;
        snprintf(run->reason, sizeof run->reason, "interrupted twice: ended at once, without the weights");
        end_run(run);
        return;
    }
    run->interrupted = true;
    progress_message(&run->progress, "stopping the job and keeping its weights (again to end at once)");
    ask_stop(run);
}

/* ---- submitting ---- */

static void on_submitted(const struct tally_error *end, const struct rpc_message *reply, void *user)
{
    struct run *run = user;
    run->calls[SUBMIT] = NULL;
    if (run->over)
        return;
    if (end->code != TALLY_OK) {
        end_unreachable(run, "submitting the job", end);
        return;
    }
    const Tally__V1__Job *job = (const Tally__V1__Job *)reply->header;
    run->id = job->id;
    run->heard_ns = tally_now_ns();
    run_output_set_steps(run->output, job->steps);
    watch(run);
}

static tally_status submit(struct run *run, struct tally_error *err)
{
    char request_id[33];
    unsigned char random[16];
    if (getrandom(random, sizeof random, 0) != (ssize_t)sizeof random)
        return tally_fail_errno(err, "getrandom");
    for (size_t i = 0; i < sizeof random; i++)
        snprintf(request_id + 2 * i, 3, "%02x", random[i]);
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    version.major = TALLY_PROTOCOL_MAJOR;
    version.minor = TALLY_PROTOCOL_MINOR;
    Tally__V1__SubmitRequest request = TALLY__V1__SUBMIT_REQUEST__INIT;
    request.version = &version;
    request.request_id = request_id;
    request.spec = (Tally__V1__JobSpec *)job_file_spec(run->job); /* only read */
    request.facts = (Tally__V1__DataFacts *)job_file_facts(run->job);
    struct rpc_stream_options options = {.timeout_ms = SUBMIT_TIMEOUT_MS, .wait_for_ready = true};
    return rpc_unary(run->channel, run->queue, &tally__v1__jobs__descriptor, "Submit", &request.base, &options,
                     on_submitted, run, &run->calls[SUBMIT], err);
}

/* ---- the clock ---- */

static void on_alive(const struct tally_error *end, const struct rpc_message *reply, void *user)
{
    struct run *run = user;
    (void)reply;
    run->calls[ALIVE] = NULL;
    run->heard_ns = tally_now_ns();
    if (!run->over && end->code != TALLY_OK)
        end_unreachable(run, "the coordinator does not answer", end);
}

static void ask_alive(struct run *run, int64_t now)
{
    if (run->calls[ALIVE] || run->id == 0 || now - run->heard_ns < SILENCE_NS)
        return;
    Tally__V1__JobRef request = TALLY__V1__JOB_REF__INIT;
    request.id = run->id;
    struct rpc_stream_options options = {.timeout_ms = ALIVE_TIMEOUT_MS};
    ask(run, ALIVE, "Get", &request.base, &options, on_alive);
}

static void end_not_joined(struct run *run)
{
    char text[TALLY_ERROR_MESSAGE_MAX];
    char suspect[128] = "";
    bool found = local_cluster_suspect(run->cluster, suspect, sizeof suspect);
    snprintf(text, sizeof text, "the processes did not join in time: %.500s%s%s", run->reason, found ? "; " : "",
             suspect);
    end_failed(run, text);
}

static void on_tick(uv_timer_t *timer)
{
    struct run *run = timer->data;
    struct run_progress p;
    struct tally_error err = {0};
    int64_t now = tally_now_ns();
    run_output_progress(run->output, &p);
    progress_draw(&run->progress, &p);
    if (run_output_flush(run->output, &err) != TALLY_OK)
        end_error(run, &err);
    else if (run->unreachable_deadline_ns)
        settle_unreachable(run, now);
    else if (run->exit_deadline_ns && now > run->exit_deadline_ns && !is_terminal(run->state))
        end_failed(run, local_cluster_first_exit(run->cluster));
    else if (run->state == TALLY__V1__JOB_STATE__QUEUED && now > run->join_deadline_ns)
        end_not_joined(run);
    else if (run->stop_deadline_ns && now > run->stop_deadline_ns)
        end_failed(run, "waited 120 s for the coordinator to stop the job");
    else
        ask_alive(run, now);
}

static void on_process_exit(const char *how, void *user)
{
    struct run *run = user;
    (void)how;
    if (run->exit_deadline_ns == 0)
        run->exit_deadline_ns = tally_now_ns() + EXIT_GRACE_NS;
}

/* ---- the whole of it ---- */

/* Has every handle closed and every call ended, whatever state they are in. */
static void close_session(struct run *run)
{
    cancel_calls(run);
    local_cluster_stop(run->cluster, run->over && run->interrupted && !run->has_weights ? 1000 : CLUSTER_GRACE_MS);
    run->cluster = NULL;
    rpc_channel_free(run->channel);
    uv_close((uv_handle_t *)&run->tick, NULL);
    int64_t deadline = tally_now_ns() + CALLS_END_NS;
    while (is_asking(run) && tally_now_ns() < deadline) {
        uv_run(run->loop, UV_RUN_NOWAIT);
        uv_sleep(1);
    }
    rpc_queue_free(run->queue);
    for (size_t i = 0; i < SIGNALS; i++) /* they stay until all is written, but wait for nothing */
        uv_unref((uv_handle_t *)&run->signals[i]);
    uv_run(run->loop, UV_RUN_DEFAULT);
}

/* The job has its end and all of it is written: a signal changes nothing any more. */
static void close_signals(struct run *run)
{
    for (size_t i = 0; i < SIGNALS; i++) {
        uv_close((uv_handle_t *)&run->signals[i], NULL);
        signal(signal_numbers[i], SIG_IGN);
    }
    uv_run(run->loop, UV_RUN_DEFAULT);
    uv_loop_close(run->loop);
}

static tally_status open_session(struct run *run, struct tally_error *err)
{
    const Tally__V1__JobSpec *spec = job_file_spec(run->job);
    uint64_t workers = mesh_workers(mesh_of_spec(spec));
    if (workers > TALLY_NODES_MAX)
        return tally_fail(err, TALLY_EINVAL, "the job needs %" PRIu64 " workers: a cluster has at most %d nodes",
                          workers, TALLY_NODES_MAX);
    struct local_cluster_options options = {
        .workers = (uint32_t)workers,
        .shards = spec->parallel->shards,
        .log_dir = run_output_logs(run->output),
        .cancel = &run->over,
    };
    run->join_deadline_ns = tally_now_ns() + JOIN_TIMEOUT_NS(1 + options.workers + options.shards);
    tally_status status = local_cluster_start(run->loop, &options, on_process_exit, run, &run->cluster, err);
    if (status != TALLY_OK)
        return status;
    rpc_global_init();
    status = rpc_loop_queue_new(run->loop, &run->queue, err);
    if (status == TALLY_OK)
        status = rpc_channel_new(local_cluster_address(run->cluster), NULL, &run->channel, err);
    if (status == TALLY_OK)
        status = submit(run, err);
    return status;
}

/* What a machine or a process of the private cluster did, as opposed to a refusal or a bug. */
static bool fails_the_job(tally_status status)
{
    return status == TALLY_EIO || status == TALLY_ENOMEM || status == TALLY_ETIMEDOUT || status == TALLY_EUNAVAIL;
}

static int finish(struct run *run, enum output_format format)
{
    struct tally_error err = run->failure;
    struct run_progress p;
    run_output_progress(run->output, &p);
    progress_end(&run->progress, &p);
    if (err.code == TALLY_OK)
        run_output_flush(run->output, &err);
    struct tally_error summary_err = {0};
    if (run_output_summary(run->output, run->state, run->reason, run->last_job, run->has_weights, &summary_err) !=
            TALLY_OK &&
        err.code == TALLY_OK)
        err = summary_err;
    if (err.code != TALLY_OK) {
        report_error(&err);
        return fails_the_job(err.code) ? EXIT_FAILED : exit_code_of(err.code);
    }
    /* The results are there, only nobody was told: an internal error of a job that succeeded. */
    tally_status printed = run_output_print(run->output, format, &err);
    switch (run->state) {
    case TALLY__V1__JOB_STATE__SUCCEEDED:
        return printed == TALLY_OK ? EXIT_DONE : report_error(&err);
    case TALLY__V1__JOB_STATE__STOPPED:
        fprintf(stderr, "tally: the job was stopped: %s\n", run->reason);
        return EXIT_STOPPED;
    default:
        fprintf(stderr, "tally: the job failed: %s\n", run->reason);
        return EXIT_FAILED;
    }
}

static int run_job(const struct arguments *arguments, const struct job_file *job)
{
    uv_loop_t loop;
    struct tally_error err = {0};
    struct run run = {.loop = &loop, .job = job, .state = TALLY__V1__JOB_STATE__QUEUED};
    /* From the moment that anything is left behind, an interrupt is an orderly stop. */
    sigset_t held, before;
    sigemptyset(&held);
    for (size_t i = 0; i < SIGNALS; i++)
        sigaddset(&held, signal_numbers[i]);
    pthread_sigmask(SIG_BLOCK, &held, &before);
    if (run_output_open(arguments->out, job_file_spec(job), &run.output, &err) != TALLY_OK) {
        int refused = report_error(&err);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        return refused == EXIT_NOT_FOUND ? EXIT_INTERNAL : refused; /* no job was looked for */
    }
    uv_loop_init(&loop);
    uv_timer_init(&loop, &run.tick);
    run.tick.data = &run;
    progress_init(&run.progress, arguments->quiet);
    progress_text(&run.progress, "starting");
    for (size_t i = 0; i < SIGNALS; i++) {
        uv_signal_init(&loop, &run.signals[i]);
        run.signals[i].data = &run;
        struct sigaction old;
        bool ignored = sigaction(signal_numbers[i], NULL, &old) == 0 && old.sa_handler == SIG_IGN;
        if (signal_numbers[i] != SIGHUP || !ignored) /* nohup's wish */
            uv_signal_start(&run.signals[i], on_signal, signal_numbers[i]);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (open_session(&run, &err) == TALLY_OK) {
        uv_timer_start(&run.tick, on_tick, TICK_MS, TICK_MS);
        while (!run.over)
            uv_run(&loop, UV_RUN_DEFAULT);
    } else if (!run.over) { /* else it was interrupted */
        end_error(&run, &err);
    }
    close_session(&run);
    int code = finish(&run, arguments->format);
    close_signals(&run);
    if (run.queue) {
        daemon_end_within(5, code);
        rpc_global_shutdown();
    }
    if (run.last_job)
        tally__v1__job__free_unpacked(run.last_job, NULL);
    run_output_close(run.output);
    return code;
}

int command_run(const struct arguments *arguments)
{
    struct tally_error err = {0};
    struct job_file *job = NULL;
    struct job_overrides overrides = {
        .set = arguments->set, .set_count = arguments->set_count, .data = arguments->data, .shards = arguments->shards};
    if (job_file_load(arguments->operand, &overrides, &job, &err) != TALLY_OK) {
        fprintf(stderr, "tally: %s\n", err.message);
        return EXIT_USAGE;
    }
    const Tally__V1__Checkpoint *checkpoint = job_file_spec(job)->checkpoint;
    if (checkpoint && checkpoint->has_every_steps && !arguments->quiet)
        fprintf(stderr, "tally: checkpoint.every_steps: this version writes no checkpoints, the job runs without\n");
    int code = run_job(arguments, job);
    job_file_free(job);
    return code;
}
