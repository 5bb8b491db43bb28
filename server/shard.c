/*
 * The loop's side of a shard: orders in, answers and reports out. What must be kept while it is on its way is in one of
 * three places: openings (a job is being built on the pool), the data thread (a trip comes back), unsent (there was no
 * room towards the coordinator).
 */
#include "server/shard.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/log.h"
#include "common/message_copy.h"
#include "server/shard_data.h"

#define RETRY_MS 20
#define DRAIN_MS 500

/* A job that is being built. */
struct opening {
    struct opening *next;
    uv_work_t work;
    struct shard *shard;
    Tally__V1__Order *order; /* a copy */
    uint64_t epoch;
    bool cancelled;
    struct shard_trip *end; /* the order to end it, which came meanwhile */
    struct shard_trip *trip;
    struct shard_job *job;
    tally_status status;
    struct tally_error err;
};

struct shard {
    uv_loop_t *loop;
    struct rpc_queue *queue; /* the loop's, joined to the data thread's */
    struct rpc_server *server;
    struct shard_events events;
    void *user;
    struct shard_data data;
    char address[RPC_ADDRESS_MAX];
    uint64_t epoch; /* one more each time that the coordinator was lost: older orders get no answer */
    struct opening *openings;
    struct shard_trip *unsent_answers; /* in order, with what to say */
    struct shard_report *unsent_reports;
    uv_timer_t retry;
    struct shard_trip *describe; /* NULL while it is on its way */
    char activity[256];
    struct shard_trip *stop;
    bool stopping, server_stopped;
};

/* ---- to the coordinator ---- */

/* What an answer says is told by which of these it is kept with. */
static tally_status say(struct shard *shard, const struct shard_trip *trip)
{
    Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;
    Tally__V1__Opened opened = TALLY__V1__OPENED__INIT;
    Tally__V1__Ended ended = TALLY__V1__ENDED__INIT;
    Tally__V1__JobFailed failed = TALLY__V1__JOB_FAILED__INIT;
    switch (trip->says) {
    case SHARD_SAYS_OPENED:
        opened.job = trip->job;
        opened.generation = trip->generation;
        opened.step = trip->step;
        message.body_case = TALLY__V1__NODE_MESSAGE__BODY_OPENED;
        message.opened = &opened;
        break;
    case SHARD_SAYS_ENDED:
        ended.job = trip->job;
        ended.generation = trip->generation;
        message.body_case = TALLY__V1__NODE_MESSAGE__BODY_ENDED;
        message.ended = &ended;
        break;
    case SHARD_SAYS_FAILED:
        failed.job = trip->job;
        failed.generation = trip->generation;
        failed.reason = (char *)trip->text; /* only read */
        message.body_case = TALLY__V1__NODE_MESSAGE__BODY_JOB_FAILED;
        message.job_failed = &failed;
        break;
    }
    return shard->events.send(&message, shard->user);
}

static tally_status say_steps(struct shard *shard, struct shard_report *report)
{
    Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;
    Tally__V1__Steps steps = TALLY__V1__STEPS__INIT;
    steps.job = report->job_id;
    steps.generation = report->generation;
    steps.n_records = report->count;
    steps.records = report->pointers;
    message.body_case = TALLY__V1__NODE_MESSAGE__BODY_STEPS;
    message.steps = &steps;
    return shard->events.send(&message, shard->user);
}

static void on_retry(uv_timer_t *timer);

static void retry_soon(struct shard *shard)
{
    if (!uv_is_active((uv_handle_t *)&shard->retry))
        uv_timer_start(&shard->retry, on_retry, RETRY_MS, 0);
}

/* Sends an answer or keeps it; takes the trip. Those of an older epoch go nowhere. */
static void send_answer(struct shard_trip *trip, enum shard_says says)
{
    struct shard *shard = trip->shard;
    trip->says = says;
    trip->next = NULL;
    struct shard_trip **last = &shard->unsent_answers;
    while (*last)
        last = &(*last)->next;
    *last = trip;
    on_retry(&shard->retry);
}

static void on_report(struct shard_report *report)
{
    struct shard *shard = report->shard;
    report->next = NULL;
    struct shard_report **last = &shard->unsent_reports;
    while (*last)
        last = &(*last)->next;
    *last = report;
    on_retry(&shard->retry);
}

/* Sends what waits, in order; reports first, as the answer that a job has ended is the last word about it. */
static void on_retry(uv_timer_t *timer)
{
    struct shard *shard = timer->data;
    while (shard->unsent_reports) {
        struct shard_report *report = shard->unsent_reports;
        if (!shard->stopping && say_steps(shard, report) == TALLY_ENOMEM) {
            retry_soon(shard);
            return;
        }
        shard->unsent_reports = report->next;
        shard_data_post_report(&shard->data, report);
    }
    while (shard->unsent_answers) {
        struct shard_trip *trip = shard->unsent_answers;
        if (!shard->stopping && trip->epoch == shard->epoch && say(shard, trip) == TALLY_ENOMEM) {
            retry_soon(shard);
            return;
        }
        shard->unsent_answers = trip->next;
        shard_trip_free(trip);
    }
}

/* ---- orders ---- */

static void on_adopted(struct shard_trip *trip)
{
    if (trip->text[0] == '\0')
        log_info("job %" PRIu64 " generation %" PRIu64 ": opened at step %" PRIu64, trip->job, trip->generation,
                 trip->step);
    send_answer(trip, trip->text[0] ? SHARD_SAYS_FAILED : SHARD_SAYS_OPENED);
}

static void on_ended(struct shard_trip *trip)
{
    log_info("job %" PRIu64 ": ended (%s)", trip->job, trip->text);
    send_answer(trip, SHARD_SAYS_ENDED);
}

static void on_failed(struct shard_trip *trip)
{
    trip->epoch = trip->shard->epoch; /* it is not about an order; the coordinator knows which jobs it still has */
    log_error("job %" PRIu64 ": %s", trip->job, trip->text);
    send_answer(trip, SHARD_SAYS_FAILED);
}

static void build(uv_work_t *work)
{
    struct opening *opening = work->data;
    opening->status = shard_job_new(opening->order->open_job, opening->shard, &opening->shard->data.wake, &opening->job,
                                    &opening->err);
}

static void maybe_stop_data(struct shard *shard);

static void on_built(uv_work_t *work, int status)
{
    (void)status; /* it is never cancelled through libuv */
    struct opening *opening = work->data;
    struct shard *shard = opening->shard;
    struct opening **link = &shard->openings;
    while (*link != opening)
        link = &(*link)->next;
    *link = opening->next;
    struct shard_trip *trip = opening->trip;
    if (opening->cancelled) {
        shard_job_free(opening->job);
        shard_trip_free(trip);
    } else if (opening->status != TALLY_OK) {
        snprintf(trip->text, sizeof trip->text, "%s", opening->err.message);
        log_error("job %" PRIu64 ": %s", trip->job, trip->text);
        send_answer(trip, SHARD_SAYS_FAILED);
    } else {
        trip->opened = opening->job;
        trip->answer = on_adopted;
        shard_data_post_adopt(&shard->data, trip);
    }
    if (opening->end)
        shard_data_post_end(&shard->data, opening->end);
    tally__v1__order__free_unpacked(opening->order, NULL);
    free(opening);
    maybe_stop_data(shard);
}

static void take_open(struct shard *shard, const Tally__V1__Order *order)
{
    struct shard_trip *trip = shard_trip_new(shard, order->open_job->job, order->open_job->generation);
    struct opening *opening = calloc(1, sizeof *opening);
    if (opening)
        opening->order = message_copy(&order->base);
    if (!trip || !opening || !opening->order) {
        log_error("job %" PRIu64 ": out of memory for the order to open it", order->open_job->job);
        if (trip) {
            snprintf(trip->text, sizeof trip->text, "out of memory for the order to open it");
            trip->epoch = shard->epoch;
            send_answer(trip, SHARD_SAYS_FAILED);
        }
        if (opening)
            protobuf_c_message_free_unpacked(opening->order ? &opening->order->base : NULL, NULL);
        free(opening);
        return;
    }
    trip->epoch = shard->epoch;
    opening->shard = shard;
    opening->trip = trip;
    opening->work.data = opening;
    opening->next = shard->openings;
    shard->openings = opening;
    uv_queue_work(shard->loop, &opening->work, build, on_built);
}

static void take_end(struct shard *shard, const Tally__V1__EndJob *order)
{
    struct shard_trip *trip = shard_trip_new(shard, order->job, order->generation);
    if (!trip) {
        log_error("job %" PRIu64 ": out of memory for the order to end it", order->job);
        return;
    }
    trip->epoch = shard->epoch;
    trip->answer = on_ended;
    snprintf(trip->text, sizeof trip->text, "%s", order->reason[0] ? order->reason : "the job has ended");
    struct opening *last = NULL;
    for (struct opening *opening = shard->openings; opening; opening = opening->next)
        if (opening->trip->job == order->job && opening->trip->generation <= order->generation) {
            opening->cancelled = true;
            last = opening;
        }
    if (last && !last->end)
        last->end = trip; /* goes on when the job that is being built has been freed */
    else
        shard_data_post_end(&shard->data, trip);
}

void shard_order(struct shard *shard, const Tally__V1__Order *order)
{
    if (shard->stopping)
        return;
    if (order->body_case == TALLY__V1__ORDER__BODY_OPEN_JOB)
        take_open(shard, order);
    else if (order->body_case == TALLY__V1__ORDER__BODY_END_JOB)
        take_end(shard, order->end_job);
}

static void on_trip_over(struct shard_trip *trip)
{
    shard_trip_free(trip);
}

void shard_lost(struct shard *shard, const char *reason)
{
    shard->epoch++;
    for (struct opening *opening = shard->openings; opening; opening = opening->next)
        opening->cancelled = true;
    struct shard_trip *trip = shard_trip_new(shard, 0, 0);
    if (!trip) {
        log_error("out of memory: jobs are kept though the coordinator was lost");
        return;
    }
    trip->answer = on_trip_over;
    snprintf(trip->text, sizeof trip->text, "%s", reason);
    shard_data_post_lost(&shard->data, trip);
}

/* ---- activity ---- */

static void on_described(struct shard_trip *trip)
{
    struct shard *shard = trip->shard;
    snprintf(shard->activity, sizeof shard->activity, "%.255s", trip->text);
    shard->describe = trip;
}

void shard_activity(struct shard *shard, char *text, size_t size)
{
    snprintf(text, size, "%s", shard->activity);
    struct shard_trip *trip = shard->describe;
    if (!trip || shard->stopping)
        return;
    shard->describe = NULL;
    trip->answer = on_described;
    shard_data_post_describe(&shard->data, trip);
}

const char *shard_address(const struct shard *shard)
{
    return shard->address;
}

struct rpc_queue *shard_loop_queue(const struct shard *shard)
{
    return shard->queue;
}

/* ---- life ---- */

static tally_status serve(struct shard *shard, const char *address, struct tally_error *err)
{
    static const struct rpc_method methods[] = {
        {.name = "Exchange", .on_open = shard_exchange_open},
        {.name = "Fetch", .on_request = shard_read_fetch},
        {.name = "Holding", .on_request = shard_read_holding},
    };
    const struct rpc_service service = {
        .descriptor = &tally__v1__parameters__descriptor,
        .queue = shard->data.queue,
        .methods = methods,
        .method_count = sizeof methods / sizeof *methods,
        .user = &shard->data,
    };
    tally_status status = rpc_server_new(shard->queue, NULL, &shard->server, err);
    if (status == TALLY_OK)
        status = rpc_server_add(shard->server, &service, err);
    if (status == TALLY_OK)
        status = rpc_server_listen(shard->server, address, shard->address, sizeof shard->address, err);
    return status;
}

/* Of a shard whose data thread does not run. */
static void free_parts(struct shard *shard)
{
    rpc_server_free(shard->server);
    rpc_queue_free(shard->queue);
    rpc_queue_free(shard->data.queue);
    shard_trip_free(shard->describe);
    shard_trip_free(shard->stop);
    free(shard);
}

static tally_status make_parts(struct shard *shard, struct tally_error *err)
{
    shard->describe = shard_trip_new(shard, 0, 0);
    shard->stop = shard_trip_new(shard, 0, 0);
    if (!shard->describe || !shard->stop)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a shard");
    tally_status status = rpc_data_queue_new(&shard->data.queue, err);
    if (status == TALLY_OK)
        status = rpc_loop_queue_join(shard->loop, shard->data.queue, &shard->queue, err);
    shard->data.loop_queue = shard->queue;
    return status;
}

tally_status shard_open(uv_loop_t *loop, const char *address, const struct shard_events *events, void *user,
                        struct shard **ret_shard, struct tally_error *err)
{
    struct shard *shard = calloc(1, sizeof *shard);
    if (!shard)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a shard");
    shard->loop = loop;
    shard->events = *events;
    shard->user = user;
    shard->data.on_report = on_report;
    shard->data.on_failed = on_failed;
    snprintf(shard->activity, sizeof shard->activity, "holds no job");
    tally_status status = make_parts(shard, err);
    if (status == TALLY_OK)
        status = serve(shard, address, err);
    if (status == TALLY_OK)
        status = shard_data_start(&shard->data, err);
    if (status != TALLY_OK) {
        free_parts(shard);
        return status;
    }
    status = rpc_server_start(shard->server, err);
    if (status != TALLY_OK) {
        shard->stop->answer = NULL;
        shard_data_post_stop(&shard->data, shard->stop);
        uv_thread_join(&shard->data.thread);
        free_parts(shard);
        return status;
    }
    uv_timer_init(loop, &shard->retry);
    shard->retry.data = shard;
    *ret_shard = shard;
    return TALLY_OK;
}

static void on_retry_closed(uv_handle_t *handle)
{
    struct shard *shard = handle->data;
    shard->events.on_stopped(shard->user);
}

static void on_data_stopped(struct shard_trip *trip)
{
    struct shard *shard = trip->shard;
    uv_thread_join(&shard->data.thread);
    uv_close((uv_handle_t *)&shard->retry, on_retry_closed);
}

static void on_server_stopped(void *user)
{
    struct shard *shard = user;
    shard->server_stopped = true;
    maybe_stop_data(shard);
}

/* The data thread ends last, when no stream and no job in the making can need it. */
static void maybe_stop_data(struct shard *shard)
{
    if (!shard->server_stopped || shard->openings)
        return;
    snprintf(shard->stop->text, sizeof shard->stop->text, "the shard has stopped");
    shard->stop->answer = on_data_stopped;
    shard_data_post_stop(&shard->data, shard->stop);
}

void shard_stop(struct shard *shard, const char *reason)
{
    shard_lost(shard, reason);
    shard->stopping = true;
    on_retry(&shard->retry); /* gives everything back */
    rpc_server_stop(shard->server, DRAIN_MS, on_server_stopped, shard);
}

void shard_free(struct shard *shard)
{
    if (shard)
        free_parts(shard);
}
