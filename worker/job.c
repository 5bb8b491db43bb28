/*
 * DESIGN. Three threads: the loop's (job_start, job_end, callbacks), the job's own (everything that takes time), and
 * the data thread, which also runs the steps of a small job (data_thread.h).
 *
 * Reports travel to the loop as tasks, in order; the last one says that the thread is at its end. `stop`,
 * `transport` and `peers` are what the loop's thread touches of a running job: job_end sets the one and interrupts the
 * others, under the mutex.
 */
#include "worker/job.h"

#include <assert.h>
#include <errno.h>
#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "common/limits.h"
#include "common/message_copy.h"
#include "worker/job_data.h"
#include "worker/peers_rpc.h"
#include "worker/training.h"
#include "worker/transport_rpc.h"

/*
 * A small job runs on the data thread: waking another thread twice a step costs more than there is to gain from sending
 * while computing. It must come back to the network soon, for heartbeats go that way too: 250 MFLOP are some
 * milliseconds (a tenth of a second without vector instructions). Measured over RPC, AVX-512: 10-20-2 75 us a step
 * instead of 97, 784-512-256-10 3.3 ms instead of 3.6, but a CNN of 900 MFLOP 7.2 ms instead of 6.4.
 */
#define SMALL_PARAMETER_BYTES (4u << 20)
#define SMALL_STEP_FLOPS UINT64_C(250000000)

#define EVALS_MAX 256 /* records in a report */

enum phase { PHASE_OPENS, PHASE_WEIGHTS, PHASE_STEP, PHASE_EVALUATION, PHASE_FINISHED, PHASE_ENDS };

enum report_kind { REPORT_STARTED, REPORT_EVALS, REPORT_FINISHED, REPORT_FAILED, REPORT_CLOSED };

struct report {
    struct rpc_task task;
    struct job *job;
    enum report_kind kind;
    uint64_t step;
    char reason[TALLY_ERROR_MESSAGE_MAX];
    size_t count;
    Tally__V1__EvalRecord records[];
};

struct job {
    struct job_environment env;
    Tally__V1__Assign *assign; /* a copy */
    struct job_events events;
    void *user;
    pthread_t thread;
    struct report *closed; /* kept ready: the end is told even without memory */

    atomic_bool stop;
    pthread_mutex_t mutex;
    pthread_cond_t trained;
    struct transport_rpc *transport; /* under the mutex; NULL: none (any more) */
    struct peers_rpc *peers;         /* likewise */
    atomic_int phase;
    atomic_uint_least64_t step;

    /* The job's thread. */
    struct model *model;
    struct job_data data;
    const struct kernels *kernels;
    struct kernel_backend *backend;
    struct plan *plan;
    struct order *order;
    struct executor *executor;
    bool small;
    struct data_work work;
    bool work_done; /* under the mutex */
    tally_status work_status;
    struct tally_error work_error;
    Tally__V1__EvalRecord evals[EVALS_MAX];
    size_t eval_count;
    bool evals_lost; /* there was no memory to report them */
};

/* ---- reports ---- */

static struct report *report_new(struct job *job, enum report_kind kind, size_t records)
{
    struct report *r = calloc(1, sizeof *r + records * sizeof r->records[0]);
    if (!r)
        return NULL;
    r->job = job;
    r->kind = kind;
    r->count = records;
    return r;
}

static void deliver_evals(const struct report *r, Tally__V1__NodeMessage *message)
{
    struct job *job = r->job;
    Tally__V1__EvalRecord *records[EVALS_MAX];
    for (size_t i = 0; i < r->count; i++)
        records[i] = (Tally__V1__EvalRecord *)&r->records[i];
    Tally__V1__Evals evals = TALLY__V1__EVALS__INIT;
    evals.job = job->assign->job;
    evals.generation = job->assign->generation;
    evals.step = r->step;
    evals.n_records = r->count;
    evals.records = records;
    message->body_case = TALLY__V1__NODE_MESSAGE__BODY_EVALS;
    message->evals = &evals;
    job->events.on_report(job, message, job->user);
}

static void deliver_end(const struct report *r, Tally__V1__NodeMessage *message)
{
    struct job *job = r->job;
    Tally__V1__Started started = TALLY__V1__STARTED__INIT;
    Tally__V1__Finished finished = TALLY__V1__FINISHED__INIT;
    Tally__V1__JobFailed failed = TALLY__V1__JOB_FAILED__INIT;
    started.job = finished.job = failed.job = job->assign->job;
    started.generation = finished.generation = failed.generation = job->assign->generation;
    finished.step = r->step;
    failed.reason = (char *)r->reason;
    if (r->kind == REPORT_STARTED) {
        message->body_case = TALLY__V1__NODE_MESSAGE__BODY_STARTED;
        message->started = &started;
    } else if (r->kind == REPORT_FINISHED) {
        message->body_case = TALLY__V1__NODE_MESSAGE__BODY_FINISHED;
        message->finished = &finished;
    } else {
        message->body_case = TALLY__V1__NODE_MESSAGE__BODY_JOB_FAILED;
        message->job_failed = &failed;
    }
    job->events.on_report(job, message, job->user);
}

static void job_free(struct job *job)
{
    if (!job)
        return;
    if (job->assign)
        tally__v1__assign__free_unpacked(job->assign, NULL);
    pthread_cond_destroy(&job->trained);
    pthread_mutex_destroy(&job->mutex);
    free(job->closed);
    free(job);
}

/* On the loop's thread. */
static void deliver(struct rpc_task *task)
{
    struct report *r = (struct report *)((char *)task - offsetof(struct report, task));
    struct job *job = r->job;
    Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;
    if (r->kind == REPORT_CLOSED) {
        pthread_join(job->thread, NULL);
        job->events.on_closed(job, job->user);
        job_free(job);
        free(r);
        return;
    }
    if (r->kind == REPORT_EVALS)
        deliver_evals(r, &message);
    else
        deliver_end(r, &message);
    free(r);
}

static void post(struct job *job, struct report *r)
{
    r->task.run = deliver;
    rpc_queue_post(job->env.queue, &r->task);
}

static tally_status report(struct job *job, enum report_kind kind, uint64_t step, const char *reason,
                           struct tally_error *err)
{
    struct report *r = report_new(job, kind, 0);
    if (!r)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a report");
    r->step = step;
    if (reason)
        snprintf(r->reason, sizeof r->reason, "%s", reason);
    post(job, r);
    return TALLY_OK;
}

/* ---- training ---- */

static void on_progress(uint64_t step, bool evaluating, void *user)
{
    struct job *job = user;
    atomic_store_explicit(&job->step, step, memory_order_relaxed);
    atomic_store_explicit(&job->phase, evaluating ? PHASE_EVALUATION : PHASE_STEP, memory_order_relaxed);
}

static void send_evals(struct job *job, uint64_t version)
{
    struct report *r = report_new(job, REPORT_EVALS, job->eval_count);
    if (!r) {
        job->evals_lost = true;
        job->eval_count = 0;
        atomic_store(&job->stop, true); /* seen at the next operation */
        return;
    }
    r->step = version;
    memcpy(r->records, job->evals, job->eval_count * sizeof job->evals[0]);
    job->eval_count = 0;
    post(job, r);
}

static void on_evaluated(uint64_t version, uint32_t micro_batch, const struct kernel_loss *loss, uint32_t samples,
                         void *user)
{
    struct job *job = user;
    Tally__V1__EvalRecord *record = &job->evals[job->eval_count++];
    *record = (Tally__V1__EvalRecord)TALLY__V1__EVAL_RECORD__INIT;
    record->micro_batch = micro_batch;
    record->loss_sum = loss->loss_sum;
    record->weight = loss->weight;
    record->correct = loss->correct;
    record->samples = samples;
    if (job->eval_count == EVALS_MAX)
        send_evals(job, version);
    /* An evaluation waits for nothing, and may be long: heartbeats and orders need the network in between. */
    if (job->small)
        rpc_queue_poll(data_thread_queue(job->env.thread), 0);
}

static void on_evaluation_end(uint64_t version, void *user)
{
    struct job *job = user;
    if (job->eval_count)
        send_evals(job, version);
}

/* On the thread that uses the transport: the job's, or the data thread. */
static tally_status train(struct job *job, struct tally_error *err)
{
    struct transport *transport = transport_rpc_transport(job->transport);
    uint64_t start = job->assign->start_step;
    atomic_store(&job->phase, PHASE_WEIGHTS);
    tally_status status = TALLY_OK;
    /* Others do not wait for one that has nothing to do in the first step: its weights may be newer by now. */
    for (uint32_t k = 0; k < job->plan->segment_count && !status && training_has_leaves(job->plan, start + 1); k++)
        if (plan_owns(job->plan, k))
            status = transport->wait_slices(transport, job->plan->segments[k].slice_begin,
                                            job->plan->segments[k].slice_end, start, err);
    if (!status)
        status = report(job, REPORT_STARTED, start, NULL, err);
    if (status)
        return status;
    struct training training = {.plan = job->plan,
                                .executor = job->executor,
                                .transport = transport,
                                .peers = job->peers ? peers_rpc_peers(job->peers) : NULL,
                                .events = {on_progress, on_evaluated, on_evaluation_end},
                                .user = job};
    status = training_run(&training, start, err);
    return job->evals_lost ? tally_fail(err, TALLY_ENOMEM, "no memory to report an evaluation") : status;
}

static void train_on_data_thread(struct data_work *work)
{
    struct job *job = (struct job *)((char *)work - offsetof(struct job, work));
    job->work_status = train(job, &job->work_error);
    pthread_mutex_lock(&job->mutex);
    job->work_done = true;
    pthread_cond_signal(&job->trained);
    pthread_mutex_unlock(&job->mutex);
}

/* Small jobs: sleeps while the data thread trains. Its own waits have deadlines. */
static tally_status train_elsewhere(struct job *job, struct tally_error *err)
{
    job->work.run = train_on_data_thread;
    data_thread_run(job->env.thread, &job->work);
    pthread_mutex_lock(&job->mutex);
    while (!job->work_done)
        pthread_cond_wait(&job->trained, &job->mutex);
    pthread_mutex_unlock(&job->mutex);
    if (job->work_status)
        *err = job->work_error;
    return job->work_status;
}

/* ---- opening and closing ---- */

static tally_status check_assign(const Tally__V1__Assign *a, struct tally_error *err)
{
    if (!a->spec || !a->facts || !a->gang)
        return tally_fail(err, TALLY_EINVAL, "an assignment without a spec, facts or gang");
    if (a->gang->n_shards != a->n_shard_addresses || a->gang->n_shards == 0)
        return tally_fail(err, TALLY_EINVAL, "an assignment with %zu shards and %zu addresses of shards",
                          a->gang->n_shards, a->n_shard_addresses);
    const Tally__V1__Gang *gang = a->gang;
    uint64_t replica = (uint64_t)gang->pipeline * gang->tensor; /* 32-bit factors */
    if (!gang->data || !replica || replica > TALLY_NODES_MAX || replica * gang->data != gang->n_workers ||
        (replica > 1 && gang->n_workers != a->n_peer_addresses) || a->rank >= gang->n_workers)
        return tally_fail(err, TALLY_EINVAL,
                          "an assignment as rank %" PRIu32 " of %" PRIu32 " x %" PRIu32 " x %" PRIu32
                          " workers, with %zu names and %zu addresses",
                          a->rank, gang->data, gang->pipeline, gang->tensor, gang->n_workers, a->n_peer_addresses);
    return TALLY_OK;
}

static tally_status open_backend(struct job *job, struct tally_error *err)
{
    job->kernels = kernels_find(job->env.backend);
    if (!job->kernels)
        return tally_fail(err, TALLY_EUNSUPPORTED, "no backend named %s in this build", job->env.backend);
    const char *isa = job->assign->gang->isa;
    return job->kernels->open(isa[0] ? isa : NULL, 0, &job->backend, err);
}

static bool is_small(const struct job *job)
{
    uint64_t flops = 0;
    for (size_t i = 0; i < job->model->layer_count; i++)
        flops += job->model->layers[i].forward_flops;
    uint64_t rows = job->plan->batches.batch > job->plan->rows_max ? job->plan->batches.batch : job->plan->rows_max;
    /* Forward, and twice as much backward. */
    return job->model->flat_count * sizeof(float) <= SMALL_PARAMETER_BYTES && flops <= SMALL_STEP_FLOPS / 3 / rows;
}

static tally_status open_transport(struct job *job, struct tally_error *err)
{
    const Tally__V1__Assign *a = job->assign;
    struct transport_rpc_options options = {.job = a->job,
                                            .generation = a->generation,
                                            .worker = job->env.worker,
                                            .rank = a->rank,
                                            .model = job->model,
                                            .kernels = job->kernels,
                                            .backend = job->backend,
                                            .weights = executor_weights(job->executor),
                                            .slice_offsets = a->gang->pipeline > 1 ? job->plan->slice_offsets : NULL,
                                            .shards = a->n_shard_addresses,
                                            .shard_names = a->gang->shards,
                                            .shard_addresses = a->shard_addresses,
                                            .thread = job->env.thread,
                                            .on_data_thread = job->small};
    struct transport_rpc *transport;
    tally_status status = transport_rpc_open(&options, &transport, err);
    if (status)
        return status;
    pthread_mutex_lock(&job->mutex);
    job->transport = transport;
    if (atomic_load(&job->stop))
        transport_rpc_interrupt(transport);
    pthread_mutex_unlock(&job->mutex);
    return transport_rpc_connect(transport, err);
}

static tally_status open_peers(struct job *job, struct tally_error *err)
{
    const Tally__V1__Assign *a = job->assign;
    struct peers_rpc_options options = {.job = a->job,
                                        .generation = a->generation,
                                        .plan = job->plan,
                                        .names = a->gang->workers,
                                        .addresses = a->peer_addresses,
                                        .service = job->env.peers,
                                        .thread = job->env.thread,
                                        .on_data_thread = job->small};
    struct peers_rpc *peers;
    if (job->plan->edge_count == 0)
        return TALLY_OK;
    tally_status status = peers_rpc_open(&options, &peers, err);
    if (status)
        return status;
    pthread_mutex_lock(&job->mutex);
    job->peers = peers;
    if (atomic_load(&job->stop))
        peers_rpc_interrupt(peers);
    pthread_mutex_unlock(&job->mutex);
    return peers_rpc_connect(peers, err);
}

static tally_status check_stop(const struct job *job, struct tally_error *err)
{
    return atomic_load(&job->stop) ? tally_fail(err, TALLY_ECANCELLED, "the job was ended") : TALLY_OK;
}

/* What the samples are read with, on a stage that reads any. */
static tally_status open_samples(struct job *job, struct tally_error *err)
{
    const Tally__V1__DataFacts *facts = job->assign->facts;
    if (!plan_reads_samples(job->plan))
        return TALLY_OK;
    tally_status status = job_data_open(job->model, facts, &job->data, err);
    return status ? status
                  : order_open(facts->train_samples, job->model->spec->data->shuffle, job->model->spec->seed,
                               job->model->init_draws, &job->order, err);
}

static tally_status open_plan(struct job *job, struct tally_error *err)
{
    const Tally__V1__Assign *a = job->assign;
    tally_status status = check_assign(a, err);
    if (!status)
        status = model_build(a->spec, a->facts, &job->model, err);
    if (!status)
        status = open_backend(job, err);
    if (status)
        return status;
    struct mesh mesh = {a->gang->data, a->gang->pipeline, a->gang->tensor};
    status = plan_build(job->model, a->facts, mesh, a->rank, job->kernels, job->backend, &job->plan, err);
    if (!status)
        job->small = is_small(job);
    return status;
}

static tally_status open_all(struct job *job, struct tally_error *err)
{
    tally_status status = open_plan(job, err);
    if (!status)
        status = check_stop(job, err);
    if (!status)
        status = open_samples(job, err);
    if (!status)
        status = check_stop(job, err);
    if (!status)
        status = open_peers(job, err);
    if (status)
        return status;
    struct executor_inputs inputs = {.plan = job->plan,
                                     .train = job->data.train,
                                     .test = job->data.test,
                                     .order = job->order,
                                     .peers = job->peers ? peers_rpc_peers(job->peers) : NULL,
                                     .stop = &job->stop};
    status = executor_open(&inputs, &job->executor, err);
    if (!status)
        status = check_stop(job, err);
    return status ? status : open_transport(job, err);
}

static void close_all(struct job *job)
{
    pthread_mutex_lock(&job->mutex);
    struct transport_rpc *transport = job->transport;
    struct peers_rpc *peers = job->peers;
    job->transport = NULL;
    job->peers = NULL;
    pthread_mutex_unlock(&job->mutex);
    transport_rpc_close(transport);
    peers_rpc_close(peers);
    executor_close(job->executor);
    order_close(job->order);
    plan_free(job->plan);
    if (job->backend)
        job->kernels->close(job->backend);
    job_data_close(&job->data);
    model_free(job->model);
}

/* After the last step: the streams stay, so that a push that is refused late is told. */
static tally_status finish(struct job *job, struct tally_error *err)
{
    transport_rpc_done(job->transport);
    if (job->peers)
        peers_rpc_done(job->peers);
    atomic_store(&job->phase, PHASE_FINISHED);
    tally_status status = report(job, REPORT_FINISHED, job->plan->batches.steps, NULL, err);
    return status ? status : transport_rpc_watch(job->transport, err);
}

static void *job_main(void *arg)
{
    struct job *job = arg;
    struct tally_error err = {0};
    tally_status status = open_all(job, &err);
    if (!status)
        status = job->small ? train_elsewhere(job, &err) : train(job, &err);
    if (!status)
        status = finish(job, &err);
    if (status != TALLY_ECANCELLED)
        (void)report(job, REPORT_FAILED, 0, err.message, NULL); /* without memory: the lease tells */
    atomic_store(&job->phase, PHASE_ENDS);
    close_all(job);
    struct report *closed = job->closed;
    job->closed = NULL;
    post(job, closed);
    return NULL;
}

/* ---- the loop's side ---- */

tally_status job_start(const struct job_environment *environment, const Tally__V1__Assign *assign,
                       const struct job_events *events, void *user, struct job **ret_job, struct tally_error *err)
{
    struct job *job = calloc(1, sizeof *job);
    if (!job)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a job");
    job->env = *environment;
    job->events = *events;
    job->user = user;
    pthread_mutex_init(&job->mutex, NULL);
    pthread_cond_init(&job->trained, NULL);
    job->assign = message_copy(&assign->base);
    job->closed = report_new(job, REPORT_CLOSED, 0);
    if (!job->assign || !job->closed) {
        job_free(job);
        return tally_fail(err, TALLY_ENOMEM, "no memory for a job");
    }
    int failed = pthread_create(&job->thread, NULL, job_main, job);
    if (failed) {
        errno = failed;
        tally_status status = tally_fail_errno(err, "cannot start the job's thread");
        job_free(job);
        return status;
    }
    *ret_job = job;
    return TALLY_OK;
}

void job_end(struct job *job)
{
    pthread_mutex_lock(&job->mutex);
    atomic_store(&job->stop, true);
    if (job->transport)
        transport_rpc_interrupt(job->transport);
    if (job->peers)
        peers_rpc_interrupt(job->peers);
    pthread_mutex_unlock(&job->mutex);
}

uint64_t job_id(const struct job *job)
{
    return job->assign->job;
}

uint64_t job_generation(const struct job *job)
{
    return job->assign->generation;
}

void job_activity(struct job *job, char *text, size_t size)
{
    char waits[512] = "";
    pthread_mutex_lock(&job->mutex);
    if (job->transport)
        transport_rpc_activity(job->transport, waits, sizeof waits);
    if (job->peers && !waits[0])
        peers_rpc_activity(job->peers, waits, sizeof waits);
    pthread_mutex_unlock(&job->mutex);
    uint64_t id = job_id(job), step = atomic_load(&job->step);
    const char *colon = waits[0] ? ": " : "";
    switch ((enum phase)atomic_load(&job->phase)) {
    case PHASE_OPENS:
        snprintf(text, size, "job %" PRIu64 ": opens data and model", id);
        break;
    case PHASE_WEIGHTS:
        snprintf(text, size, "job %" PRIu64 ": %s", id, waits[0] ? waits : "takes its first weights");
        break;
    case PHASE_STEP:
        snprintf(text, size, "job %" PRIu64 ", step %" PRIu64 "%s%s", id, step, colon, waits);
        break;
    case PHASE_EVALUATION:
        snprintf(text, size, "job %" PRIu64 ", evaluates version %" PRIu64 "%s%s", id, step, colon, waits);
        break;
    case PHASE_FINISHED:
        snprintf(text, size, "job %" PRIu64 ": has run its last step", id);
        break;
    case PHASE_ENDS:
        snprintf(text, size, "job %" PRIu64 ": ends", id);
        break;
    }
}
