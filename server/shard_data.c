#include "server/shard_data.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/check.h"
#include "common/clock.h"

#define MS INT64_C(1000000)

/* Steps travel together for so long: a small model makes more than ten thousand of them a second. */
#define REPORT_NS (100 * MS)
/* While a job closes, or a stream was told its end. */
#define LOOK_AGAIN_NS (5 * MS)
#define IDLE_NS (1000 * MS)
/* A stream of a job that closes is cut after so long. */
#define CUT_NS (1000 * MS)
/* Weights that a worker does not read hold up the job for so long. */
#define STALL_NS (30000 * MS)
/* Whoever fetches weights and does not read them may hold it up for so long, and is cut then. */
#define FETCH_STALL_NS (5000 * MS)

/* ---- trips ---- */

struct shard_trip *shard_trip_new(struct shard *shard, uint64_t job, uint64_t generation)
{
    struct shard_trip *trip = calloc(1, sizeof *trip);
    if (trip) {
        trip->shard = shard;
        trip->job = job;
        trip->generation = generation;
    }
    return trip;
}

void shard_trip_free(struct shard_trip *trip)
{
    free(trip);
}

static struct shard_trip *trip_of(struct rpc_task *task)
{
    return (struct shard_trip *)(void *)((char *)task - offsetof(struct shard_trip, task));
}

static struct shard_report *report_of(struct rpc_task *task)
{
    return (struct shard_report *)(void *)((char *)task - offsetof(struct shard_report, task));
}

static void run_answer(struct rpc_task *task)
{
    struct shard_trip *trip = trip_of(task);
    trip->answer(trip);
}

/* Back to the loop. */
static void answer(struct shard_data *data, struct shard_trip *trip)
{
    if (!trip || !trip->answer)
        return;
    trip->task.run = run_answer;
    rpc_queue_post(data->loop_queue, &trip->task);
}

static void post(struct shard_data *data, struct shard_trip *trip, void (*run)(struct rpc_task *task))
{
    trip->data = data;
    trip->task.run = run;
    rpc_queue_post(data->queue, &trip->task);
}

/* ---- steps for the coordinator ---- */

static void run_report(struct rpc_task *task)
{
    struct shard_report *report = report_of(task);
    report->data->on_report(report);
}

void shard_data_report(struct shard_data *data, struct shard_job *job)
{
    struct shard_report *report = job->filling;
    if (!report || report->count == 0)
        return;
    /* The second one goes only when it must: while it fills, steps go on. */
    bool full = report->count == SHARD_REPORT_STEPS, last = report->records[report->count - 1].step == job->steps;
    if (job->reports_out > 0 && !full && !last)
        return;
    struct shard_report *other = report == job->reports[0] ? job->reports[1] : job->reports[0];
    report->data = data;
    report->generation = shard_store_generation(job->store);
    report->task.run = run_report;
    job->reported_ns = tally_now_ns();
    job->filling = job->reports_out == 0 ? other : NULL;
    job->reports_out++;
    /* Without room for its record slice 0 may not be updated. */
    shard_store_hold_updates(job->store, job->filling == NULL);
    rpc_queue_post(data->loop_queue, &report->task);
}

static void on_report_back(struct rpc_task *task)
{
    struct shard_report *report = report_of(task);
    struct shard_job *job = report->job;
    report->count = 0;
    job->reports_out--;
    if (!job->filling) {
        job->filling = report;
        shard_store_hold_updates(job->store, false);
        atomic_store(&report->data->wake.wanted, true); /* has the thread try again what waits */
    }
}

void shard_data_post_report(struct shard_data *data, struct shard_report *report)
{
    report->task.run = on_report_back;
    rpc_queue_post(data->queue, &report->task);
}

static void note_step(struct shard_data *data, struct shard_job *job, const struct shard_update *update)
{
    struct shard_report *report = job->filling;
    tally_check(report && report->count < SHARD_REPORT_STEPS);
    Tally__V1__StepRecord *record = &report->records[report->count++];
    record->step = update->version;
    record->loss_sum = update->loss_sum;
    record->weight = update->weight;
    record->correct = update->correct;
    record->mono_us = tally_now_us();
    record->unix_ms = tally_unix_ms();
    if (report->count == SHARD_REPORT_STEPS || update->version == job->steps)
        shard_data_report(data, job);
    else
        data->pending_reports = true;
}

/* ---- updates ---- */

struct shard_job *shard_data_find(struct shard_data *data, uint64_t id)
{
    struct shard_job *job = data->jobs;
    while (job && job->id != id)
        job = job->next;
    return job;
}

void shard_data_updated(struct shard_data *data, struct shard_job *job, const struct shard_update *update)
{
    shard_exchange_send_slice(job, update->slice);
    if (update->slice == 0)
        note_step(data, job, update);
}

void shard_data_waits(struct shard_data *data, struct shard_job *job)
{
    (void)data;
    if (job->waiting_since_ns == 0)
        job->waiting_since_ns = tally_now_ns();
}

void shard_data_fail(struct shard_data *data, struct shard_job *job, const char *reason)
{
    if (job->failed)
        return;
    job->failed = true;
    shard_exchange_finish(job, UINT64_MAX, TALLY_ESTATE, reason);
    struct shard_trip *failure = job->failure;
    job->failure = NULL;
    failure->generation = shard_store_generation(job->store);
    snprintf(failure->text, sizeof failure->text, "%s", reason);
    failure->answer = data->on_failed;
    answer(data, failure);
}

static void retry(struct shard_data *data)
{
    struct shard_update update;
    if (!atomic_load_explicit(&data->wake.wanted, memory_order_relaxed))
        return;
    atomic_store(&data->wake.wanted, false); /* before the store looks: it sets it again if it finds a buffer in use */
    for (struct shard_job *job = data->jobs; job; job = job->next) {
        uint32_t slice;
        unsigned readers;
        bool updated = false;
        while (shard_store_retry(job->store, &update)) {
            shard_data_updated(data, job, &update);
            updated = true;
        }
        if (updated)
            shard_exchange_give_credits(job);
        if (shard_store_waiting(job->store, &slice, &readers) == 0)
            job->waiting_since_ns = 0;
    }
}

static void check_stall(struct shard_data *data, struct shard_job *job, int64_t now_ns)
{
    uint32_t slice;
    unsigned readers;
    if (job->waiting_since_ns == 0 || job->failed || now_ns - job->waiting_since_ns < FETCH_STALL_NS)
        return;
    shard_read_cut(job, now_ns - FETCH_STALL_NS);
    if (now_ns - job->waiting_since_ns < STALL_NS || shard_store_waiting(job->store, &slice, &readers) == 0)
        return;
    char slow[200], reason[400];
    shard_exchange_slow(job, slow, sizeof slow);
    snprintf(reason, sizeof reason, "step %" PRIu64 ": slice %" PRIu32 " waited 30 s for %s",
             shard_store_version(job->store) + 1, slice,
             readers == 0 ? "the coordinator to take reports of steps"
             : slow[0]    ? "workers that do not read its older weights: "
                          : "somebody who does not read its older weights");
    if (readers > 0 && slow[0])
        snprintf(reason + strlen(reason), sizeof reason - strlen(reason), "%s", slow);
    shard_data_fail(data, job, reason);
}

/* ---- jobs come and go ---- */

static bool same_part(const struct shard_job *a, const struct shard_job *b)
{
    return a->first_slice == b->first_slice && a->slice_count == b->slice_count && a->steps == b->steps &&
           shard_store_parameter_bytes(a->store) == shard_store_parameter_bytes(b->store);
}

/* The job is held already: NULL, or why it cannot be opened with this generation. */
static const char *reopen(struct shard_job *held, const struct shard_job *again, uint64_t generation)
{
    if (held->failed)
        return "it has failed here";
    if (!same_part(held, again))
        return "another part of it is held here";
    if (generation < shard_store_generation(held->store))
        return "a later generation of it is held here";
    shard_store_set_generation(held->store, generation);
    held->workers = again->workers;
    shard_exchange_finish(held, generation, TALLY_ECANCELLED, "a later generation took this one's place");
    return NULL;
}

static void on_adopt(struct rpc_task *task)
{
    struct shard_trip *trip = trip_of(task);
    struct shard_data *data = trip->data;
    struct shard_job *job = trip->opened, *held = shard_data_find(data, trip->job);
    const char *refused = NULL;
    trip->opened = NULL;
    if (held) {
        refused = reopen(held, job, trip->generation);
        shard_job_free(job);
        job = held;
    } else {
        job->next = data->jobs;
        data->jobs = job;
    }
    snprintf(trip->text, sizeof trip->text, "%s", refused ? refused : "");
    trip->step = job->slice_count > 0 ? shard_store_version(job->store) : 0;
    answer(data, trip);
}

static void close_job(struct shard_data *data, struct shard_job *job, const char *reason, struct shard_trip *end)
{
    struct shard_job **link = &data->jobs;
    while (*link != job)
        link = &(*link)->next;
    *link = job->next;
    job->next = data->closing;
    data->closing = job;
    job->end = end;
    job->closing_since_ns = tally_now_ns();
    shard_exchange_finish(job, UINT64_MAX, TALLY_ECANCELLED, reason);
    shard_read_finish(job, TALLY_ECANCELLED, reason);
}

static void close_all(struct shard_data *data, const char *reason)
{
    while (data->jobs)
        close_job(data, data->jobs, reason, NULL);
    shard_exchange_finish_strangers(data, reason);
}

static void on_job_end(struct rpc_task *task)
{
    struct shard_trip *trip = trip_of(task);
    struct shard_data *data = trip->data;
    struct shard_job *job = shard_data_find(data, trip->job);
    if (job && shard_store_generation(job->store) <= trip->generation)
        close_job(data, job, trip->text, trip);
    else
        answer(data, trip);
}

static void on_lost(struct rpc_task *task)
{
    struct shard_trip *trip = trip_of(task);
    close_all(trip->data, trip->text);
    answer(trip->data, trip);
}

static void on_stop(struct rpc_task *task)
{
    struct shard_trip *trip = trip_of(task);
    close_all(trip->data, trip->text);
    trip->data->stop = trip;
}

/* What is left of closing jobs to be waited for, and the end of those of which nothing is. */
static void reap(struct shard_data *data, int64_t now_ns)
{
    for (struct shard_job **link = &data->closing; *link;) {
        struct shard_job *job = *link;
        if (!job->cut && now_ns - job->closing_since_ns > CUT_NS) {
            shard_read_cut(job, now_ns);
            job->cut = true;
        }
        if (job->exchanges || job->fetches || job->reports_out > 0 || !shard_store_idle(job->store)) {
            link = &job->next;
            continue;
        }
        *link = job->next;
        struct shard_trip *end = job->end;
        shard_job_free(job);
        answer(data, end);
    }
}

/* ---- what it does, in words ---- */

static void describe(const struct shard_job *job, char *text, size_t size)
{
    struct shard_missing missing;
    int used = snprintf(text, size, "job %" PRIu64 ", ", job->id);
    shard_store_describe(job->store, text + used, size - (size_t)used);
    if (!shard_store_missing(job->store, &missing))
        return;
    size_t end = strlen(text);
    end += (size_t)snprintf(text + end, size - end, " of ");
    if (end < size)
        shard_exchange_owner(job, &missing, text + end, size - end);
}

static void on_describe(struct rpc_task *task)
{
    struct shard_trip *trip = trip_of(task);
    struct shard_data *data = trip->data;
    if (data->jobs)
        describe(data->jobs, trip->text, 256);
    else
        snprintf(trip->text, sizeof trip->text, "%s", data->closing ? "closes a job" : "holds no job");
    answer(data, trip);
}

void shard_data_post_adopt(struct shard_data *data, struct shard_trip *trip)
{
    post(data, trip, on_adopt);
}

void shard_data_post_end(struct shard_data *data, struct shard_trip *trip)
{
    post(data, trip, on_job_end);
}

void shard_data_post_lost(struct shard_data *data, struct shard_trip *trip)
{
    post(data, trip, on_lost);
}

void shard_data_post_describe(struct shard_data *data, struct shard_trip *trip)
{
    post(data, trip, on_describe);
}

void shard_data_post_stop(struct shard_data *data, struct shard_trip *trip)
{
    post(data, trip, on_stop);
}

/* ---- the thread ---- */

static int64_t report_due(struct shard_data *data, int64_t now_ns, int64_t deadline_ns)
{
    data->pending_reports = false;
    for (struct shard_job *job = data->jobs; job; job = job->next) {
        if (!job->filling || job->filling->count == 0)
            continue;
        if (now_ns - job->reported_ns >= REPORT_NS)
            shard_data_report(data, job);
        data->pending_reports = data->pending_reports || (job->filling && job->filling->count > 0);
        if (now_ns - job->reported_ns < REPORT_NS && job->reported_ns + REPORT_NS < deadline_ns)
            deadline_ns = job->reported_ns + REPORT_NS;
    }
    return deadline_ns;
}

/* What is due between two polls. Returns when to look again at the latest. */
static int64_t look_after(struct shard_data *data)
{
    int64_t now_ns = tally_now_ns(), deadline_ns = now_ns + IDLE_NS;
    retry(data);
    if (data->pending_reports)
        deadline_ns = report_due(data, now_ns, deadline_ns);
    if (now_ns < data->sweep_ns && !data->closing)
        return deadline_ns < data->sweep_ns ? deadline_ns : data->sweep_ns;
    for (struct shard_job *job = data->jobs; job; job = job->next)
        check_stall(data, job, now_ns);
    bool again = shard_exchange_sweep(data, now_ns);
    reap(data, now_ns);
    data->sweep_ns = now_ns + (again || data->closing ? LOOK_AGAIN_NS : IDLE_NS);
    return deadline_ns < data->sweep_ns ? deadline_ns : data->sweep_ns;
}

static void run(void *user)
{
    struct shard_data *data = user;
    pthread_setname_np(pthread_self(), "shard-data");
    while (!data->stop || data->jobs || data->closing || data->strangers)
        rpc_queue_poll(data->queue, look_after(data));
    shard_wake_settle(&data->wake);
    answer(data, data->stop);
}

static void wake(void *user)
{
    rpc_queue_wake(user);
}

tally_status shard_data_start(struct shard_data *data, struct tally_error *err)
{
    atomic_init(&data->wake.wanted, false);
    atomic_init(&data->wake.releasing, 0);
    data->wake.wake = wake;
    data->wake.user = data->queue;
    if (uv_thread_create(&data->thread, run, data) != 0)
        return tally_fail(err, TALLY_EIO, "cannot start the shard's data thread");
    return TALLY_OK;
}
