#include <assert.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "server/coordinator_internal.h"

#define MS_NS INT64_C(1000000)
/* The reports of the last steps are at most a report interval behind the weights. */
#define CATCH_UP_MS 2000
/* A queued job's reason may change with every node that comes; events tell it at most so often. */
#define REASON_INTERVAL_MS 1000
/* Without a step for so long, watchers are told who does what, once. */
#define STALL_MS 30000

/* ---- making and freeing ---- */

static tally_status job_plan(struct job *job, struct tally_error *err)
{
    const Tally__V1__Train *train = job->spec->train;
    tally_status status =
        batches_init(&job->batches, job->facts->train_samples, train->batch_size, train->micro_batch_size,
                     job->spec->data->drop_last, train->epochs, train->steps, err);
    if (status == TALLY_OK)
        status = gang_size_of(job->spec, &job->size, err);
    if (status == TALLY_OK)
        status = eval_sum_open(&job->batches, job->facts->test_samples, &job->evals, err);
    if (status != TALLY_OK)
        return status;
    job->lr = train->optimizer->kind_case == TALLY__V1__OPTIMIZER__KIND_SGD ? train->optimizer->sgd->lr : 0;
    job->classes = job->spec->model->loss->kind_case == TALLY__V1__LOSS__KIND_CROSS_ENTROPY;
    job->record->steps = job->batches.steps;
    return TALLY_OK;
}

tally_status job_new(struct coordinator *c, Tally__V1__Job *record, const char *request_id, Tally__V1__JobSpec *spec,
                     Tally__V1__DataFacts *facts, struct job **ret_job, struct tally_error *err)
{
    struct job *job = calloc(1, sizeof *job);
    if (!job) {
        tally__v1__job__free_unpacked(record, NULL);
        tally__v1__job_spec__free_unpacked(spec, NULL);
        tally__v1__data_facts__free_unpacked(facts, NULL);
        return tally_fail(err, TALLY_ENOMEM, "no memory for a job");
    }
    job->coordinator = c;
    job->record = record;
    job->spec = spec;
    job->facts = facts;
    job->tail_end = &job->tail;
    job->request_id = strdup(request_id);
    tally_status status = job->request_id ? TALLY_OK : tally_fail(err, TALLY_ENOMEM, "no memory for a job");
    if (status == TALLY_OK && spec)
        status = job_plan(job, err);
    if (status != TALLY_OK) {
        job_free(job);
        return status;
    }
    *ret_job = job;
    return TALLY_OK;
}

/* What only a job that has not ended needs. */
static void release_plan(struct job *job)
{
    tally__v1__job_spec__free_unpacked(job->spec, NULL);
    tally__v1__data_facts__free_unpacked(job->facts, NULL);
    eval_sum_close(job->evals);
    free(job->workers);
    free(job->shards);
    job->spec = NULL;
    job->facts = NULL;
    job->evals = NULL;
    job->workers = job->shards = NULL;
    job->worker_count = job->shard_count = 0;
}

static void drop_tail(struct job *job, size_t keep_bytes)
{
    while (job->tail && job->tail_bytes > keep_bytes && job->tail->last <= job->visible_seq) {
        struct event_batch *batch = job->tail;
        job->tail = batch->next;
        job->tail_bytes -= batch->bytes;
        event_batch_unref(batch);
    }
    if (!job->tail)
        job->tail_end = &job->tail;
}

void job_free(struct job *job)
{
    if (!job)
        return;
    release_plan(job);
    job->visible_seq = UINT64_MAX;
    drop_tail(job, 0);
    event_batch_unref(job->open);
    tally__v1__job__free_unpacked(job->record, NULL);
    free(job->request_id);
    free(job);
}

/* ---- events and the store ---- */

struct event_batch *job_open_batch(struct job *job)
{
    if (job->open && job->open->bytes >= TALLY_EVENT_BATCH_MAX_BYTES)
        job_commit(job, NULL);
    if (!job->open)
        job->open = event_batch_new(job->last_seq + 1);
    return job->open;
}

void job_event(struct job *job, Tally__V1__Event *event)
{
    struct event_batch *batch = job_open_batch(job);
    struct tally_error err;
    event->unix_ms = tally_unix_ms();
    if (!batch)
        log_error("job %" PRIu64 ": an event is lost: no memory", job->record->id);
    else if (event_batch_add(batch, event, &err) != TALLY_OK)
        log_error("job %" PRIu64 ": an event is lost: %s", job->record->id, err.message);
    else
        job->last_seq = batch->last;
}

void job_notice(struct job *job, const char *format, ...)
{
    char text[REASON_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    Tally__V1__Notice notice = TALLY__V1__NOTICE__INIT;
    notice.text = text;
    Tally__V1__Event event = TALLY__V1__EVENT__INIT;
    event.body_case = TALLY__V1__EVENT__BODY_NOTICE;
    event.notice = &notice;
    job_event(job, &event);
}

static void tell_state(struct job *job)
{
    Tally__V1__StateChange change = TALLY__V1__STATE_CHANGE__INIT;
    change.state = job->record->state;
    change.reason = job->record->reason;
    Tally__V1__Event event = TALLY__V1__EVENT__INIT;
    event.body_case = TALLY__V1__EVENT__BODY_STATE;
    event.state = &change;
    job_event(job, &event);
    job->record_changed = true;
    job->reason_changed = false;
    job->reason_told_ns = tally_now_ns();
}

struct commit {
    struct job *job;
    uint64_t last;
};

static void show(struct job *job, uint64_t seq)
{
    if (seq > job->visible_seq)
        job->visible_seq = seq;
    watch_wake(job->coordinator, job);
    /* Without a store this is all there is. */
    if (job->coordinator->store_failure.code == TALLY_OK)
        drop_tail(job, job_phase_is_terminal(job->phase) ? 0 : TALLY_EVENT_TAIL_BYTES);
}

static void on_committed(const struct tally_error *err, void *user)
{
    struct commit commit = *(struct commit *)user;
    free(user);
    struct job *job = commit.job;
    if (err->code != TALLY_OK) {
        coordinator_store_failed(job->coordinator, err);
        show(job, job->last_seq);
        return;
    }
    show(job, commit.last);
    if (!job->stored) {
        job->stored = true;
        jobs_schedule(job->coordinator);
    }
}

static tally_status give_to_store(struct job *job, struct event_batch *batch, struct tally_error *err)
{
    struct store *store = job->coordinator->store;
    struct commit *commit = malloc(sizeof *commit);
    if (!commit)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a job's record");
    *commit = (struct commit){job, job->last_seq};
    tally_status status;
    if (!job->inserted)
        status =
            store_insert(store, job->record, job->request_id, job->spec, job->facts, batch, on_committed, commit, err);
    else
        status = store_update(store, job->record->id, job->record_changed ? job->record : NULL, batch, on_committed,
                              commit, err);
    if (status != TALLY_OK)
        free(commit);
    return status;
}

tally_status job_commit(struct job *job, struct tally_error *err)
{
    struct coordinator *c = job->coordinator;
    if (!job->open && !job->record_changed)
        return TALLY_OK;
    struct event_batch *batch = job->open;
    struct tally_error why;
    tally_status status = c->store_failure.code == TALLY_OK ? give_to_store(job, batch, &why) : TALLY_OK;
    if (status != TALLY_OK && !job->inserted) {
        if (err)
            *err = why;
        return status;
    }
    job->inserted = true;
    job->record_changed = false;
    job->open = NULL;
    if (batch) {
        *job->tail_end = batch;
        job->tail_end = &batch->next;
        job->tail_bytes += batch->bytes;
    }
    if (status != TALLY_OK)
        coordinator_store_failed(c, &why);
    if (c->store_failure.code != TALLY_OK)
        show(job, job->last_seq);
    return TALLY_OK;
}

/* ---- collecting the weights ---- */

static void on_collected(const struct results_outcome *outcome, void *user)
{
    struct job *job = user;
    struct coordinator *c = job->coordinator;
    bool wanted = job->phase == JOB_COLLECTING || job->phase == JOB_STOP_KEEPING || job->phase == JOB_FAIL_KEEPING;
    job->collector = NULL;
    if (wanted && !c->closing) {
        char *sha256 = outcome->error.code == TALLY_OK ? strdup(outcome->sha256) : NULL;
        if (outcome->error.code != TALLY_OK) {
            job_apply(job, JOB_EVENT_COLLECT_FAILED, "the weights could not be kept: %s", outcome->error.message);
        } else if (!sha256) {
            job_apply(job, JOB_EVENT_COLLECT_FAILED, "the weights could not be kept: no memory");
        } else {
            if (job->record->weights_sha256 != protobuf_c_empty_string)
                free(job->record->weights_sha256);
            job->record->weights_sha256 = sha256;
            job->collected = true;
            job->collected_version = outcome->version;
            job->deadline_ns = tally_now_ns() + CATCH_UP_MS * MS_NS;
            report_check_collected(job, false);
        }
    }
    coordinator_less_busy(c);
}

static tally_status start_collect(struct job *job, struct tally_error *err)
{
    struct coordinator *c = job->coordinator;
    size_t n = job->shard_count;
    const char **names = calloc(2 * n, sizeof *names);
    char *path = download_path(c, job->record->id);
    tally_status status = tally_fail(err, TALLY_ENOMEM, "no memory");
    if (names && path) {
        for (size_t i = 0; i < n; i++) {
            names[i] = job->shards[i].name;
            names[n + i] = job->shards[i].address;
        }
        const struct results_request request = {
            .job = job->record->id,
            .generation = job->record->generation,
            .version = job->phase == JOB_COLLECTING ? job->batches.steps : RESULTS_ANY_VERSION,
            .spec = job->spec,
            .facts = job->facts,
            .shard_names = names,
            .shard_addresses = names + n,
            .shards = n,
            .path = path,
        };
        status = results_start(&request, c->queue, on_collected, job, &job->collector, err);
        if (status == TALLY_OK)
            c->busy++;
    }
    free(names);
    free(path);
    return status;
}

/* ---- transitions ---- */

static char *join(const char *first, const char *second)
{
    size_t size = strlen(first) + strlen(second) + sizeof "; ";
    char *text = malloc(size);
    if (text)
        snprintf(text, size, "%s%s%s", first, first[0] && second[0] ? "; " : "", second);
    return text;
}

static void replace_reason(struct job *job, char *reason)
{
    if (!reason)
        return;
    if (job->record->reason != protobuf_c_empty_string)
        free(job->record->reason);
    job->record->reason = reason;
}

static void keep_reason(struct job *job, unsigned actions, const char *reason)
{
    const char *old = job->record->reason;
    if (actions & JOB_ACT_SET_REASON)
        replace_reason(job, strdup(reason));
    else if (actions & JOB_ACT_ADD_REASON)
        replace_reason(job, join(old, reason));
    else if (actions & JOB_ACT_LEAD_REASON)
        replace_reason(job, join(reason, old));
}

void job_lead_reason(struct job *job, const char *text)
{
    keep_reason(job, JOB_ACT_LEAD_REASON, text);
    tell_state(job);
}

static int64_t phase_deadline(const struct coordinator *c, enum job_phase phase)
{
    switch (job_phase_patience(phase)) {
    case JOB_WAITS_FOR_START:
        return tally_now_ns() + c->start_timeout_ns;
    case JOB_WAITS_FOR_END:
        return tally_now_ns() + c->end_timeout_ns;
    default:
        return 0;
    }
}

static void enter_phase(struct job *job, enum job_phase phase)
{
    Tally__V1__Job *record = job->record;
    job->phase = phase;
    record->state = job_phase_state(phase);
    job->deadline_ns = phase_deadline(job->coordinator, phase);
    if (phase == JOB_TRAINING) {
        record->started_unix_ms = tally_unix_ms();
        job->progress_ns = tally_now_ns();
    }
    if (job_phase_is_terminal(phase)) {
        record->ended_unix_ms = tally_unix_ms();
        job->coordinator->live_jobs--;
    }
    tell_state(job);
    log_info("job %" PRIu64 " %s: %s%s%s", record->id, record->name, job_phase_text(phase),
             record->reason[0] ? ": " : "", record->reason);
}

static void carry_out(struct job *job, unsigned actions)
{
    struct tally_error err;
    if ((actions & JOB_ACT_CANCEL_COLLECT) && job->collector)
        results_cancel(job->collector);
    if (actions & JOB_ACT_OPEN_SHARDS)
        job_open_shards(job);
    if (actions & JOB_ACT_ASSIGN_WORKERS)
        job_assign_workers(job);
    if (actions & (JOB_ACT_END_WORKERS | JOB_ACT_END_NODES))
        job_end_nodes(job, job->workers, job->worker_count);
    if (actions & JOB_ACT_END_NODES)
        job_end_nodes(job, job->shards, job->shard_count);
    if ((actions & JOB_ACT_COLLECT) && start_collect(job, &err) != TALLY_OK)
        job_apply(job, JOB_EVENT_COLLECT_FAILED, "the weights could not be kept: %s", err.message);
    else if ((actions & JOB_ACT_END_WORKERS) && job_nodes_ended(job->workers, job->worker_count))
        job_apply(job, JOB_EVENT_DRAINED, "every worker has dropped the job");
}

void job_apply(struct job *job, enum job_event event, const char *format, ...)
{
    struct job_transition to = job_next(job->phase, event);
    if (to.phase == job->phase)
        return;
    char reason[REASON_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(reason, sizeof reason, format, args);
    va_end(args);
    keep_reason(job, to.actions, reason);
    enter_phase(job, to.phase);
    carry_out(job, to.actions);
    if (job->phase != to.phase)
        return; /* carried on already */
    if (job_phase_is_terminal(job->phase))
        release_plan(job);
    job_commit(job, NULL);
    if (job_phase_is_terminal(job->phase))
        jobs_schedule(job->coordinator);
}

/* ---- the queue ---- */

static void set_waiting(struct job *job, const char *reason)
{
    if (strcmp(job->record->reason, reason) == 0)
        return;
    replace_reason(job, strdup(reason));
    job->reason_changed = true;
}

static void start(struct job *job, struct gang *gang)
{
    struct tally_error err;
    tally_status status = job_take_gang(job, gang, &err);
    gang_clear(gang);
    if (status != TALLY_OK)
        job_apply(job, JOB_EVENT_FAILED, "it could not be started: %s", err.message);
    else
        job_apply(job, JOB_EVENT_GANG, "%zu shard%s make%s the first weights for %zu worker%s", job->shard_count,
                  job->shard_count == 1 ? "" : "s", job->shard_count == 1 ? "s" : "", job->worker_count,
                  job->worker_count == 1 ? "" : "s");
}

void jobs_schedule(struct coordinator *c)
{
    const struct job *ahead = NULL;
    size_t left = c->live_jobs;
    for (size_t i = 0; i < c->job_count && left > 0 && !c->closing && c->store_failure.code == TALLY_OK; i++) {
        struct job *job = c->jobs[i];
        left -= !job_phase_is_terminal(job->phase);
        if (job->phase != JOB_QUEUED || !job->stored)
            continue;
        struct gang gang;
        struct tally_error err;
        if (!ahead && gang_form(c->members, &job->size, &gang, &err) == TALLY_OK) {
            start(job, &gang);
            continue;
        }
        if (ahead)
            tally_fail(&err, TALLY_EUNAVAIL, "waits for job %" PRIu64 ", which came before it", ahead->record->id);
        set_waiting(job, err.message);
        ahead = ahead ? ahead : job;
    }
}

/* ---- time ---- */

static void on_deadline(struct job *job)
{
    char text[REASON_MAX / 2];
    if (job->collected) {
        report_check_collected(job, true);
        return;
    }
    job->deadline_ns = 0;
    job_waits_text(job, text, sizeof text);
    log_warn("job %" PRIu64 " %s: %s: waited in vain for %s", job->record->id, job->record->name,
             job_phase_text(job->phase), text);
    if (job->phase == JOB_STOP_DRAINING || job->phase == JOB_FAIL_DRAINING)
        job_notice(job, "goes on without %s", text);
    job_apply(job, JOB_EVENT_DEADLINE, "waited in vain for %s", text);
}

static void check_stall(struct job *job, int64_t now_ns)
{
    if (job->phase != JOB_TRAINING || job->stall_told || now_ns - job->progress_ns < STALL_MS * MS_NS)
        return;
    char text[REASON_MAX - 64];
    job->stall_told = true;
    job_waits_text(job, text, sizeof text);
    job_notice(job, "no step was reported for %d s: %s", STALL_MS / 1000, text);
}

void job_tick(struct job *job, int64_t now_ns)
{
    if (job->phase == JOB_QUEUED && job->stored && job->reason_changed &&
        now_ns - job->reason_told_ns >= REASON_INTERVAL_MS * MS_NS)
        tell_state(job);
    if (job->deadline_ns != 0 && now_ns >= job->deadline_ns)
        on_deadline(job);
    else
        check_stall(job, now_ns);
    job_commit(job, NULL);
}
