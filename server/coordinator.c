#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/log.h"
#include "server/coordinator_internal.h"

/* Leases and deadlines are looked at so often. */
#define TICK_MAX_MS 250
#define TICK_MIN_MS 10
#define DRAIN_MS 1000

/* ---- jobs ---- */

static size_t job_position(const struct coordinator *c, uint64_t id)
{
    size_t low = 0, high = c->job_count;
    while (low < high) {
        size_t middle = low + (high - low) / 2;
        if (c->jobs[middle]->record->id < id)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

struct job *coordinator_find_job(struct coordinator *c, uint64_t id)
{
    size_t at = job_position(c, id);
    return at < c->job_count && c->jobs[at]->record->id == id ? c->jobs[at] : NULL;
}

tally_status coordinator_add_job(struct coordinator *c, struct job *job, struct tally_error *err)
{
    assert(c->job_count == 0 || c->jobs[c->job_count - 1]->record->id < job->record->id);
    if (c->job_count == c->job_room) {
        size_t room = c->job_room > 0 ? 2 * c->job_room : 16;
        struct job **jobs = realloc(c->jobs, room * sizeof(struct job *));
        if (!jobs)
            return tally_fail(err, TALLY_ENOMEM, "no memory for another job");
        c->jobs = jobs;
        c->job_room = room;
    }
    c->jobs[c->job_count++] = job;
    c->live_jobs += !job_phase_is_terminal(job->phase);
    return TALLY_OK;
}

void coordinator_drop_job(struct coordinator *c, struct job *job)
{
    size_t at = job_position(c, job->record->id);
    assert(at < c->job_count && c->jobs[at] == job);
    c->live_jobs -= !job_phase_is_terminal(job->phase);
    c->job_count--;
    memmove(c->jobs + at, c->jobs + at + 1, (c->job_count - at) * sizeof(struct job *));
    job_free(job);
}

void coordinator_store_failed(struct coordinator *c, const struct tally_error *err)
{
    if (c->store_failure.code != TALLY_OK)
        return;
    c->store_failure = *err;
    log_error("the store: %s", err->message);
    /* Its jobs cannot be kept, so they do not go on; nothing is added to or taken from the array meanwhile. */
    for (size_t i = 0; i < c->job_count; i++)
        job_apply(c->jobs[i], JOB_EVENT_FAILED, "the coordinator cannot keep its records: %s", err->message);
}

bool coordinator_reader_is_stuck(const struct coordinator *c, struct reader *reader, struct rpc_stream *stream,
                                 uint64_t sent, int64_t now_ns)
{
    size_t queued_bytes = rpc_stream_queued_bytes(stream);
    if (queued_bytes == 0 || queued_bytes != reader->queued_bytes || sent != reader->sent) {
        *reader = (struct reader){.sent = sent, .queued_bytes = queued_bytes, .since_ns = now_ns};
        return false;
    }
    return now_ns - reader->since_ns >= c->reader_timeout_ns;
}

/* ---- opening ---- */

static tally_status restore_job(const struct store_job *stored, void *user, struct tally_error *err)
{
    struct coordinator *c = user;
    enum job_phase phase = job_phase_of_state(stored->job->state);
    Tally__V1__JobSpec *spec = NULL;
    Tally__V1__DataFacts *facts = NULL;
    tally_status status = TALLY_OK;
    if (!job_phase_is_terminal(phase))
        status = store_read_spec(c->store, stored->id, &spec, &facts, err);
    if (status != TALLY_OK) {
        tally__v1__job__free_unpacked(stored->job, NULL);
        return status;
    }
    struct job *job = NULL;
    status = job_new(c, stored->job, stored->request_id, spec, facts, &job, err);
    if (status != TALLY_OK)
        return tally_error_prefix(err, "job %" PRIu64, stored->id);
    job->phase = phase;
    job->inserted = job->stored = true;
    job->last_seq = job->visible_seq = stored->last_seq;
    status = coordinator_add_job(c, job, err);
    if (status != TALLY_OK)
        job_free(job);
    return status;
}

/* The one place that says what becomes of jobs whose coordinator ended under them. */
static void take_up_jobs(struct coordinator *c)
{
    for (size_t i = 0; i < c->job_count; i++) {
        struct job *job = c->jobs[i];
        if (!job_phase_is_terminal(job->phase))
            job_apply(job, JOB_EVENT_RESTARTED, "the coordinator was restarted while the job was %s",
                      job_phase_state(job->phase) == TALLY__V1__JOB_STATE__STARTING  ? "STARTING"
                      : job_phase_state(job->phase) == TALLY__V1__JOB_STATE__RUNNING ? "RUNNING"
                                                                                     : "STOPPING");
    }
}

static void on_tick(uv_timer_t *timer)
{
    struct coordinator *c = timer->data;
    int64_t now_ns = tally_now_ns();
    cluster_tick(c, now_ns);
    watch_tick(c, now_ns);
    download_tick(c, now_ns);
    /* Ended jobs are many, live ones few and mostly new. */
    size_t left = c->live_jobs;
    for (size_t i = c->job_count; i > 0 && left > 0; i--) {
        struct job *job = c->jobs[i - 1];
        if (job_phase_is_terminal(job->phase))
            continue;
        left--;
        job_tick(job, now_ns);
    }
}

static tally_status add_services(struct coordinator *c, struct tally_error *err)
{
    const struct rpc_service services[] = {
        {.descriptor = &tally__v1__jobs__descriptor, .methods = jobs_methods, .method_count = jobs_method_count},
        {.descriptor = &tally__v1__cluster__descriptor,
         .methods = cluster_methods,
         .method_count = cluster_method_count},
    };
    tally_status status = TALLY_OK;
    for (size_t i = 0; i < 2 && status == TALLY_OK; i++) {
        struct rpc_service service = services[i];
        service.queue = c->queue;
        service.user = c;
        status = rpc_server_add(c->server, &service, err);
    }
    return status;
}

static tally_status open_server(struct coordinator *c, const char *listen, struct tally_error *err)
{
    tally_status status = rpc_loop_queue_new(c->loop, &c->queue, err);
    if (status == TALLY_OK)
        status = rpc_server_new(c->queue, NULL, &c->server, err);
    if (status == TALLY_OK)
        status = add_services(c, err);
    if (status == TALLY_OK)
        status = rpc_server_listen(c->server, listen, c->address, sizeof c->address, err);
    return status;
}

static void free_all(struct coordinator *c)
{
    for (size_t i = 0; i < c->job_count; i++)
        job_free(c->jobs[i]);
    free(c->jobs);
    membership_close(c->members);
    free(c->directory);
    free(c);
}

static void on_failed_open(void *user)
{
    free_all(user);
}

static int64_t given_ns(int64_t given_ms, int64_t default_ms)
{
    return (given_ms > 0 ? given_ms : default_ms) * 1000000;
}

tally_status coordinator_open(uv_loop_t *loop, const struct coordinator_options *options,
                              struct coordinator **ret_coordinator, struct tally_error *err)
{
    struct coordinator *c = calloc(1, sizeof *c);
    if (!c)
        return tally_fail(err, TALLY_ENOMEM, "no memory for the coordinator");
    c->loop = loop;
    c->lease_ns = given_ns(options->lease_ms, TALLY_LEASE_MS);
    c->start_timeout_ns = given_ns(options->start_timeout_ms, TALLY_START_TIMEOUT_MS);
    c->end_timeout_ns = given_ns(options->end_timeout_ms, TALLY_END_TIMEOUT_MS);
    c->last_reports_timeout_ns = given_ns(options->last_reports_timeout_ms, TALLY_LAST_REPORTS_TIMEOUT_MS);
    c->reader_timeout_ns = given_ns(options->reader_timeout_ms, TALLY_READER_TIMEOUT_MS);
    c->directory = strdup(options->directory);
    tally_status status = c->directory ? membership_open(c->lease_ns, &c->members, err)
                                       : tally_fail(err, TALLY_ENOMEM, "no memory for the coordinator");
    if (status == TALLY_OK)
        status = store_open(loop, options->directory, &c->store, err);
    if (status == TALLY_OK)
        status = store_load(c->store, restore_job, c, err);
    if (status == TALLY_OK)
        status = open_server(c, options->listen, err);
    if (status == TALLY_OK)
        status = rpc_server_start(c->server, err);
    if (status != TALLY_OK) {
        rpc_server_free(c->server);
        rpc_queue_free(c->queue);
        if (c->store)
            store_close(c->store, on_failed_open, c);
        else
            free_all(c);
        return status;
    }
    c->next_job = store_next_job(c->store);
    take_up_jobs(c);
    uv_timer_init(loop, &c->tick);
    c->tick.data = c;
    int64_t tick_ms = c->lease_ns / 4000000;
    uint64_t every = (uint64_t)(tick_ms > TICK_MAX_MS ? TICK_MAX_MS : tick_ms < TICK_MIN_MS ? TICK_MIN_MS : tick_ms);
    uv_timer_start(&c->tick, on_tick, every, every);
    log_info("listens on %s, state in %s, start %" PRIu64 ", %zu jobs known, %zu of them wait", c->address,
             c->directory, store_epoch(c->store), c->job_count, c->live_jobs);
    jobs_schedule(c);
    *ret_coordinator = c;
    return TALLY_OK;
}

const char *coordinator_address(const struct coordinator *c)
{
    return c->address;
}

/* ---- closing ---- */

static void on_timer_closed(uv_handle_t *handle)
{
    struct coordinator *c = handle->data;
    void (*on_closed)(void *user) = c->on_closed;
    void *user = c->closed_user;
    free_all(c);
    if (on_closed)
        on_closed(user);
}

static void on_store_closed(void *user)
{
    struct coordinator *c = user;
    uv_close((uv_handle_t *)&c->tick, on_timer_closed);
}

static void on_rest(uv_timer_t *timer)
{
    struct coordinator *c = timer->data;
    rpc_server_free(c->server);
    rpc_queue_free(c->queue);
    store_close(c->store, on_store_closed, c);
}

/* Once no call is under way and nothing comes back from another thread any more, nothing but the store is left. Outside
 * of whatever callback this is in: the queue that runs it is about to be freed. */
static void close_rest(struct coordinator *c)
{
    if (c->closing && c->server_stopped && c->busy == 0)
        uv_timer_start(&c->tick, on_rest, 0, 0);
}

void coordinator_less_busy(struct coordinator *c)
{
    assert(c->busy > 0);
    c->busy--;
    close_rest(c);
}

static void on_server_stopped(void *user)
{
    struct coordinator *c = user;
    c->server_stopped = true;
    close_rest(c);
}

void coordinator_close(struct coordinator *c, void (*on_closed)(void *user), void *user)
{
    assert(!c->closing);
    c->closing = true;
    c->on_closed = on_closed;
    c->closed_user = user;
    uv_timer_stop(&c->tick);
    for (size_t i = 0; i < c->job_count; i++) {
        if (c->jobs[i]->collector)
            results_cancel(c->jobs[i]->collector);
    }
    watch_close(c);
    download_close(c);
    cluster_close(c);
    rpc_server_stop(c->server, DRAIN_MS, on_server_stopped, c);
}
