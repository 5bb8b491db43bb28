#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "server/coordinator_internal.h"

/* The member's part in the job; NULL: none. */
static struct gang_node *find_node(const struct job *job, const struct member *member, bool *ret_worker)
{
    *ret_worker = member->role == TALLY__V1__ROLE__WORKER;
    struct gang_node *nodes = *ret_worker ? job->workers : job->shards;
    size_t count = *ret_worker ? job->worker_count : job->shard_count;
    for (size_t i = 0; i < count; i++) {
        if (nodes[i].member == member)
            return &nodes[i];
    }
    return NULL;
}

static bool all_ready(const struct gang_node *nodes, size_t count)
{
    for (size_t i = 0; i < count; i++) {
        if (!nodes[i].ready)
            return false;
    }
    return true;
}

/* ---- starting ---- */

static void take_ready(struct job *job, struct gang_node *node, bool worker)
{
    node->ready = true;
    if (!worker && all_ready(job->shards, job->shard_count))
        job_apply(job, JOB_EVENT_OPENED, "%zu worker%s open%s the data and take%s the first weights", job->worker_count,
                  job->worker_count == 1 ? "" : "s", job->worker_count == 1 ? "s" : "",
                  job->worker_count == 1 ? "s" : "");
    else if (worker && all_ready(job->workers, job->worker_count))
        job_apply(job, JOB_EVENT_STARTED, "steps run");
}

/* ---- steps and evaluations ---- */

static void tell_evals(struct job *job)
{
    struct eval_result result;
    while (eval_sum_take(job->evals, job->reported, &result)) {
        Tally__V1__EvalDone done = TALLY__V1__EVAL_DONE__INIT;
        done.step = result.step;
        done.epoch = result.epoch;
        done.loss = result.loss_sum / result.weight;
        done.accuracy = job->classes ? result.correct / result.weight : -1;
        done.samples = result.samples;
        Tally__V1__Event event = TALLY__V1__EVENT__INIT;
        event.body_case = TALLY__V1__EVENT__BODY_EVAL;
        event.eval = &done;
        job_event(job, &event);
    }
}

/* One step's event. false: it cannot be right; the job has failed. */
static bool take_step(struct job *job, const struct gang_node *shard, const Tally__V1__StepRecord *record)
{
    if (record->step <= job->reported)
        return true; /* repeated by a later generation */
    if (record->step != job->reported + 1 || record->step > job->batches.steps) {
        job_apply(job, JOB_EVENT_FAILED, "shard %s reported step %" PRIu64 " behind step %" PRIu64 " of %" PRIu64,
                  shard->name, record->step, job->reported, job->batches.steps);
        return false;
    }
    struct step_shape shape = batches_step(&job->batches, record->step);
    Tally__V1__StepDone done = TALLY__V1__STEP_DONE__INIT;
    done.step = record->step;
    done.epoch = shape.epoch;
    done.loss = record->loss_sum / record->weight;
    done.samples = shape.samples;
    done.lr = job->lr;
    done.correct = record->correct;
    done.mono_us = record->mono_us;
    struct event_batch *batch = job_open_batch(job);
    if (!batch || event_batch_add_step(batch, record->unix_ms, &done, NULL) != TALLY_OK) {
        job_apply(job, JOB_EVENT_FAILED, "no memory for the events of step %" PRIu64, record->step);
        return false;
    }
    job->last_seq = batch->last;
    job->reported = record->step;
    return true;
}

static void take_steps(struct job *job, const struct gang_node *shard, const Tally__V1__Steps *steps)
{
    for (size_t i = 0; i < steps->n_records; i++) {
        if (!take_step(job, shard, steps->records[i]) || job_phase_is_terminal(job->phase))
            return;
    }
    job->record->step = job->reported;
    job->record_changed = true;
    job->progress_ns = tally_now_ns();
    job->stall_told = false;
    tell_evals(job);
    report_check_trained(job);
    report_check_collected(job, false);
}

static void take_evals(struct job *job, const struct gang_node *worker, const Tally__V1__Evals *evals)
{
    struct tally_error err;
    if (eval_sum_add(job->evals, evals, &err) != TALLY_OK) {
        job_apply(job, JOB_EVENT_FAILED, "worker %s reported an evaluation that cannot be: %s", worker->name,
                  err.message);
        return;
    }
    tell_evals(job);
    report_check_trained(job);
}

void report_check_trained(struct job *job)
{
    if (job->phase != JOB_TRAINING)
        return;
    for (size_t i = 0; i < job->worker_count; i++) {
        if (!job->workers[i].finished)
            return;
    }
    if (job->reported == job->batches.steps && eval_sum_done(job->evals))
        job_apply(job, JOB_EVENT_TRAINED, "all %" PRIu64 " steps are done, the weights are fetched",
                  job->batches.steps);
    else if (job->deadline_ns == 0)
        job->deadline_ns = tally_now_ns() + job->coordinator->last_reports_timeout_ns;
}

void report_check_collected(struct job *job, bool late)
{
    if (!job->collected || (!late && job->reported < job->collected_version))
        return;
    job->record->step = job->collected_version;
    job->collected = false;
    job_apply(job, JOB_EVENT_COLLECTED, "all %" PRIu64 " steps are done", job->batches.steps);
}

/* ---- ending ---- */

static void take_finished(struct job *job, struct gang_node *worker, const Tally__V1__Finished *finished)
{
    if (finished->step != job->batches.steps) {
        job_apply(job, JOB_EVENT_FAILED, "worker %s finished at step %" PRIu64 " of %" PRIu64, worker->name,
                  finished->step, job->batches.steps);
        return;
    }
    worker->finished = true;
    report_check_trained(job);
}

static void take_ended(struct coordinator *c, struct job *job, struct member *member)
{
    bool worker;
    struct gang_node *node = job ? find_node(job, member, &worker) : NULL;
    if (node && !node->told) {
        log_warn("%s %s answered Ended without having been told to end job %" PRIu64, role_text(member->role),
                 member->name, member->job);
        return;
    }
    member->job = 0;
    if (node) {
        node->ended = true;
        if (worker && job_nodes_ended(job->workers, job->worker_count))
            job_apply(job, JOB_EVENT_DRAINED, "every worker has dropped the job");
    }
    jobs_schedule(c);
}

/* ---- all of them ---- */

static bool names_job(const Tally__V1__NodeMessage *message, uint64_t *ret_job, uint64_t *ret_generation)
{
    switch (message->body_case) {
    case TALLY__V1__NODE_MESSAGE__BODY_OPENED:
        *ret_job = message->opened->job;
        *ret_generation = message->opened->generation;
        return true;
    case TALLY__V1__NODE_MESSAGE__BODY_STARTED:
        *ret_job = message->started->job;
        *ret_generation = message->started->generation;
        return true;
    case TALLY__V1__NODE_MESSAGE__BODY_STEPS:
        *ret_job = message->steps->job;
        *ret_generation = message->steps->generation;
        return true;
    case TALLY__V1__NODE_MESSAGE__BODY_EVALS:
        *ret_job = message->evals->job;
        *ret_generation = message->evals->generation;
        return true;
    case TALLY__V1__NODE_MESSAGE__BODY_FINISHED:
        *ret_job = message->finished->job;
        *ret_generation = message->finished->generation;
        return true;
    case TALLY__V1__NODE_MESSAGE__BODY_JOB_FAILED:
        *ret_job = message->job_failed->job;
        *ret_generation = message->job_failed->generation;
        return true;
    case TALLY__V1__NODE_MESSAGE__BODY_ENDED:
        *ret_job = message->ended->job;
        *ret_generation = message->ended->generation;
        return true;
    default:
        return false; /* of a newer minor version */
    }
}

static void take_of_job(struct job *job, struct member *member, const Tally__V1__NodeMessage *message)
{
    bool worker;
    struct gang_node *node = find_node(job, member, &worker);
    if (!node || node->ended)
        return;
    if (message->body_case == TALLY__V1__NODE_MESSAGE__BODY_OPENED && !worker)
        take_ready(job, node, false);
    else if (message->body_case == TALLY__V1__NODE_MESSAGE__BODY_STARTED && worker)
        take_ready(job, node, true);
    else if (message->body_case == TALLY__V1__NODE_MESSAGE__BODY_STEPS && !worker)
        take_steps(job, node, message->steps);
    else if (message->body_case == TALLY__V1__NODE_MESSAGE__BODY_EVALS && worker)
        take_evals(job, node, message->evals);
    else if (message->body_case == TALLY__V1__NODE_MESSAGE__BODY_FINISHED && worker)
        take_finished(job, node, message->finished);
    else if (message->body_case == TALLY__V1__NODE_MESSAGE__BODY_JOB_FAILED)
        job_apply(job, JOB_EVENT_FAILED, "%s %s: %.800s", role_text(member->role), member->name,
                  message->job_failed->reason);
    job_commit(job, NULL);
}

void report_take(struct coordinator *c, struct member *member, const Tally__V1__NodeMessage *message)
{
    uint64_t id = 0, generation = 0;
    if (!names_job(message, &id, &generation) || id == 0 || id != member->job)
        return; /* of a job that it has been taken from */
    struct job *job = coordinator_find_job(c, id);
    if (!job || job->record->generation != generation)
        return;
    if (message->body_case == TALLY__V1__NODE_MESSAGE__BODY_ENDED)
        take_ended(c, job, member);
    else if (!job_phase_is_terminal(job->phase))
        take_of_job(job, member, message);
}

/* "worker w1 (stage 1)" */
static void node_text(const struct job *job, const struct gang_node *node, bool worker, char *text, size_t size)
{
    if (worker && job->size.pipeline > 1)
        snprintf(text, size, "worker %s (stage %zu)", node->name,
                 (size_t)(node - job->workers) / job->size.tensor % job->size.pipeline);
    else
        snprintf(text, size, "%s %s", worker ? "worker" : "shard", node->name);
}

/* What a peer of a lost worker said that it waits for from there: "; worker w2 ... has waited 9.8 s for activation 3 of
 * step 41 from w1 (stage 1)". Appends nothing where nobody said so. */
static void append_waiter(const struct job *job, const struct gang_node *lost, char *text, size_t size)
{
    char from[TALLY_NODE_NAME_MAX + 16], at[TALLY_NODE_NAME_MAX + 16], who[TALLY_NODE_NAME_MAX + 64];
    snprintf(from, sizeof from, " from %s (stage", lost->name);
    snprintf(at, sizeof at, " at %s (stage", lost->name);
    for (size_t i = 0; i < job->worker_count; i++) {
        const struct gang_node *node = &job->workers[i];
        const char *activity = node->member ? node->member->activity : "";
        if (!strstr(activity, from) && !strstr(activity, at))
            continue;
        node_text(job, node, true, who, sizeof who);
        size_t used = strlen(text);
        snprintf(text + used, size - used, "; %s: %s", who, activity);
        return;
    }
}

void report_lost(struct coordinator *c, uint64_t id, const struct member *member, const char *how)
{
    struct job *job = id != 0 ? coordinator_find_job(c, id) : NULL;
    bool worker;
    if (!job || job_phase_is_terminal(job->phase))
        return;
    struct gang_node *node = find_node(job, member, &worker);
    if (!node)
        return;
    bool had_ended = node->ended;
    bool failing = job->phase == JOB_FAIL_DRAINING && !had_ended;
    node->member = NULL;
    node->ended = true;
    char text[REASON_MAX * 3 / 4], who[TALLY_NODE_NAME_MAX + 64];
    node_text(job, node, worker, who, sizeof who);
    snprintf(text, sizeof text, "%s was lost: %s%s%s%s", who, how, member->activity[0] ? " (it last said: " : "",
             member->activity, member->activity[0] ? ")" : "");
    if (worker)
        append_waiter(job, node, text, sizeof text);
    job_notice(job, "%s", text);
    if (worker && failing)
        job_lead_reason(job, text); /* what the others complained of */
    job_apply(job, worker ? JOB_EVENT_FAILED : JOB_EVENT_SHARD_LOST, "%s", text);
    if (worker && (job->phase == JOB_STOP_DRAINING || job->phase == JOB_FAIL_DRAINING) &&
        job_nodes_ended(job->workers, job->worker_count))
        job_apply(job, JOB_EVENT_DRAINED, "every worker has dropped the job");
    job_commit(job, NULL);
}
