#include "tests/server/fake_cluster.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/clock.h"
#include "common/limits.h"
#include "common/message_copy.h"
#include "common/spec_file.h"

#define BEAT_NS 20000000

/* ---- the coordinator's thread ---- */

static void on_closed(void *user)
{
    struct fake_cluster *f = user;
    f->coordinator = NULL;
}

static void on_stop(uv_async_t *async)
{
    struct fake_cluster *f = async->data;
    coordinator_close(f->coordinator, on_closed, f);
    uv_close((uv_handle_t *)async, NULL);
}

static void *coordinator_thread(void *user)
{
    struct fake_cluster *f = user;
    const struct coordinator_options options = {
        .listen = f->listen,
        .directory = f->directory,
        .lease_ms = f->lease_ms,
        .start_timeout_ms = f->start_timeout_ms,
        .end_timeout_ms = f->end_timeout_ms,
        .last_reports_timeout_ms = f->last_reports_timeout_ms,
        .reader_timeout_ms = f->reader_timeout_ms,
    };
    uv_loop_init(&f->loop);
    uv_async_init(&f->loop, &f->stop, on_stop);
    f->stop.data = f;
    if (coordinator_open(&f->loop, &options, &f->coordinator, &f->open_error) != TALLY_OK)
        uv_close((uv_handle_t *)&f->stop, NULL);
    pthread_barrier_wait(&f->opened);
    uv_run(&f->loop, UV_RUN_DEFAULT);
    if (uv_loop_close(&f->loop) != 0) {
        fprintf(stderr, "the coordinator left handles on its loop\n");
        abort();
    }
    return NULL;
}

void fake_start(struct fake_cluster *f)
{
    f->open_error = (struct tally_error){0};
    assert_int_equal(pthread_create(&f->thread, NULL, coordinator_thread, f), 0);
    pthread_barrier_wait(&f->opened);
    if (f->open_error.code != TALLY_OK)
        fail_msg("%s", f->open_error.message);
    assert_int_equal(
        rpc_channel_new(f->listen, &(struct rpc_channel_options){.own_connection = true}, &f->channel, NULL), TALLY_OK);
}

struct fake_cluster *fake_open(int64_t lease_ms)
{
    struct fake_cluster *f = calloc(1, sizeof *f);
    snprintf(f->directory, sizeof f->directory, "/tmp/tally-coord-XXXXXX");
    assert_non_null(mkdtemp(f->directory));
    snprintf(f->listen, sizeof f->listen, "unix:%s/c.sock", f->directory);
    f->lease_ms = lease_ms;
    pthread_barrier_init(&f->opened, NULL, 2);
    assert_int_equal(rpc_data_queue_new(&f->queue, NULL), TALLY_OK);
    fake_start(f);
    return f;
}

static bool all_ended(const struct fake_cluster *f)
{
    for (size_t i = 0; i < f->node_count; i++) {
        if (f->nodes[i]->stream || (f->nodes[i]->server && !f->nodes[i]->server_stopped))
            return false;
    }
    return true;
}

static void node_free(struct fake_node *node)
{
    rpc_server_free(node->server);
    tally__v1__open_job__free_unpacked(node->open_job, NULL);
    tally__v1__assign__free_unpacked(node->assign, NULL);
    tally__v1__end_job__free_unpacked(node->end_job, NULL);
    free(node);
}

static void on_server_stopped(void *user)
{
    ((struct fake_node *)user)->server_stopped = true;
}

void fake_stop(struct fake_cluster *f)
{
    uv_async_send(&f->stop);
    pthread_join(f->thread, NULL);
    assert_null(f->coordinator);
    for (size_t i = 0; i < f->node_count; i++) {
        if (f->nodes[i]->server)
            rpc_server_stop(f->nodes[i]->server, 0, on_server_stopped, f->nodes[i]);
    }
    fake_until(f, all_ended(f));
    for (size_t i = 0; i < f->node_count; i++)
        node_free(f->nodes[i]);
    f->node_count = 0;
    rpc_channel_free(f->channel);
    f->channel = NULL;
}

void fake_restart(struct fake_cluster *f)
{
    fake_stop(f);
    fake_start(f);
}

void fake_close(struct fake_cluster *f)
{
    if (f->channel)
        fake_stop(f);
    fake_poll_for(f, 1);
    rpc_queue_free(f->queue);
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", f->directory);
    assert_int_equal(system(command), 0);
    pthread_barrier_destroy(&f->opened);
    free(f);
}

void fake_poll(struct fake_cluster *f)
{
    int64_t now = tally_now_ns();
    if (now >= f->next_beat_ns) {
        f->next_beat_ns = now + BEAT_NS;
        for (size_t i = 0; i < f->node_count; i++) {
            struct fake_node *node = f->nodes[i];
            if (!node->stream || !node->registered || node->silent)
                continue;
            Tally__V1__Heartbeat beat = TALLY__V1__HEARTBEAT__INIT;
            Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;
            beat.seq = ++node->beats;
            beat.activity = node->activity;
            message.body_case = TALLY__V1__NODE_MESSAGE__BODY_HEARTBEAT;
            message.heartbeat = &beat;
            fake_say(node, &message);
        }
    }
    rpc_queue_poll(f->queue, now + 2000000);
}

void fake_poll_for(struct fake_cluster *f, int64_t ms)
{
    int64_t until = tally_now_ns() + ms * 1000000;
    while (tally_now_ns() < until)
        fake_poll(f);
}

/* ---- a node's stream ---- */

static void on_order(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct fake_node *node = user;
    const Tally__V1__Order *order = (const Tally__V1__Order *)message->header;
    rpc_stream_grant(stream, 1);
    switch (order->body_case) {
    case TALLY__V1__ORDER__BODY_REGISTERED:
        node->registered = true;
        assert_int_equal(order->registered->lease_ms, node->cluster->lease_ms);
        assert_true(order->registered->epoch > 0);
        break;
    case TALLY__V1__ORDER__BODY_HEARTBEAT_ACK:
        assert_int_equal(order->heartbeat_ack->seq, ++node->acks);
        break;
    case TALLY__V1__ORDER__BODY_OPEN_JOB:
        tally__v1__open_job__free_unpacked(node->open_job, NULL);
        node->open_job = message_copy(&order->open_job->base);
        break;
    case TALLY__V1__ORDER__BODY_ASSIGN:
        tally__v1__assign__free_unpacked(node->assign, NULL);
        node->assign = message_copy(&order->assign->base);
        break;
    case TALLY__V1__ORDER__BODY_END_JOB:
        tally__v1__end_job__free_unpacked(node->end_job, NULL);
        node->end_job = message_copy(&order->end_job->base);
        node->end_jobs++;
        if (node->answers_ended)
            fake_ended(node);
        break;
    default:
        fail_msg("order %d", (int)order->body_case);
    }
}

static void on_node_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct fake_node *node = user;
    node->stream = NULL;
    node->end = *end;
}

void fake_say(struct fake_node *node, const Tally__V1__NodeMessage *message)
{
    struct tally_error err;
    if (node->stream && rpc_stream_send(node->stream, &message->base, &err) == TALLY_ENOMEM)
        fail_msg("%s: %s", node->name, err.message);
}

/* ---- a shard's service ---- */

static void on_holding(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct fake_node *node = user;
    (void)message;
    Tally__V1__HoldingReply reply = TALLY__V1__HOLDING_REPLY__INIT;
    reply.generation = node->open_job->generation;
    reply.version = node->version;
    reply.oldest_version = node->oldest;
    if (node->deaf)
        rpc_stream_finish(stream, TALLY_EINTERNAL, "it is deaf");
    else
        rpc_stream_reply(stream, &reply.base);
}

static void on_fetch_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    (void)end;
    (void)user;
}

float fake_weight(size_t i, uint64_t version)
{
    return (float)i * 0.5f + (float)version;
}

static void on_fetch(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    static const struct rpc_stream_events events = {.on_end = on_fetch_end};
    struct fake_node *node = user;
    const Tally__V1__FetchRequest *request = (const Tally__V1__FetchRequest *)message->header;
    uint32_t begin, end;
    rpc_stream_accept(stream, &events, node,
                      &(struct rpc_stream_options){.max_queued_bytes = 64 << 20, .max_queued_messages = 1000});
    node->fetches++;
    if (node->refuses_fetch || request->version < node->oldest || request->version > node->version) {
        rpc_stream_finish(stream, TALLY_ESTATE, "it does not hold that version");
        return;
    }
    model_shard_slices(node->model, node->open_job->shards, node->open_job->shard, &begin, &end);
    for (uint32_t s = begin; s < end; s++) {
        const struct slice *slice = &node->model->slices[s];
        float *data = malloc(slice->count * sizeof *data);
        for (size_t i = 0; i < slice->count; i++)
            data[i] = fake_weight(slice->offset + i, request->version);
        Tally__V1__Update update = TALLY__V1__UPDATE__INIT;
        update.job = request->job;
        update.version = request->version;
        update.slice = s;
        assert_int_equal(
            rpc_stream_send_payload(stream, &update.base, data, slice->count * sizeof *data, free, data, NULL),
            TALLY_OK);
    }
    rpc_stream_finish(stream, TALLY_OK, NULL);
}

static void serve_parameters(struct fake_node *node)
{
    static const struct rpc_method methods[] = {{.name = "Holding", .on_request = on_holding},
                                                {.name = "Fetch", .on_request = on_fetch}};
    struct fake_cluster *f = node->cluster;
    const struct rpc_service service = {.descriptor = &tally__v1__parameters__descriptor,
                                        .queue = f->queue,
                                        .methods = methods,
                                        .method_count = 2,
                                        .user = node};
    struct tally_error err;
    if (rpc_server_new(f->queue, NULL, &node->server, &err) != TALLY_OK ||
        rpc_server_add(node->server, &service, &err) != TALLY_OK ||
        rpc_server_listen(node->server, node->address, NULL, 0, &err) != TALLY_OK ||
        rpc_server_start(node->server, &err) != TALLY_OK)
        fail_msg("%s", err.message);
}

/* ---- joining ---- */

struct fake_node *fake_node_new(struct fake_cluster *f, const char *name, const Tally__V1__Register *request)
{
    static const struct rpc_stream_events events = {.on_message = on_order, .on_end = on_node_end};
    struct fake_node *node = calloc(1, sizeof *node);
    struct tally_error err;
    node->cluster = f;
    node->answers_ended = true;
    node->role = name[0] == 's' ? TALLY__V1__ROLE__SHARD : TALLY__V1__ROLE__WORKER;
    snprintf(node->name, sizeof node->name, "%s", name);
    snprintf(node->address, sizeof node->address, "unix:%s/%s.sock", f->directory, name);
    assert_true(f->node_count < 64);
    f->nodes[f->node_count++] = node;
    if (rpc_stream_open(f->channel, f->queue, &tally__v1__cluster__descriptor, "Join", &events, node,
                        &(struct rpc_stream_options){.credits = 64}, &node->stream, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    Tally__V1__Register own = TALLY__V1__REGISTER__INIT;
    Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;
    version.major = TALLY_PROTOCOL_MAJOR;
    version.minor = TALLY_PROTOCOL_MINOR;
    own.version = &version;
    own.role = node->role;
    own.name = node->name;
    own.incarnation = (uint64_t)(uintptr_t)node;
    own.address = node->address;
    own.pid = (uint32_t)f->node_count;
    own.backend = "cpu";
    own.isa = "avx512";
    message.body_case = TALLY__V1__NODE_MESSAGE__BODY_REGISTER;
    message.register_ = (Tally__V1__Register *)(uintptr_t)(request ? request : &own);
    fake_say(node, &message);
    return node;
}

struct fake_node *fake_join(struct fake_cluster *f, const char *name)
{
    struct fake_node *node = fake_node_new(f, name, NULL);
    if (node->role == TALLY__V1__ROLE__SHARD)
        serve_parameters(node);
    fake_until(f, node->registered);
    return node;
}

void fake_kill(struct fake_cluster *f, struct fake_node *node)
{
    node->silent = true;
    rpc_stream_cancel(node->stream);
    fake_until(f, !node->stream);
    if (node->server) {
        rpc_server_stop(node->server, 0, on_server_stopped, node);
        fake_until(f, node->server_stopped);
        rpc_server_free(node->server);
        node->server = NULL;
    }
}

/* ---- what nodes say ---- */

static void name_job(const struct fake_node *node, uint64_t *job, uint64_t *generation)
{
    assert_true(node->open_job || node->assign);
    *job = node->open_job ? node->open_job->job : node->assign->job;
    *generation = node->open_job ? node->open_job->generation : node->assign->generation;
}

#define SAY(node, kind, KIND, ...)                                                                                     \
    do {                                                                                                               \
        Tally__V1__NodeMessage message = TALLY__V1__NODE_MESSAGE__INIT;                                                \
        name_job(node, &body.job, &body.generation);                                                                   \
        message.body_case = TALLY__V1__NODE_MESSAGE__BODY_##KIND;                                                      \
        message.kind = &body;                                                                                          \
        fake_say(node, &message);                                                                                      \
    } while (0)

void fake_opened(struct fake_node *node)
{
    Tally__V1__Opened body = TALLY__V1__OPENED__INIT;
    SAY(node, opened, OPENED);
}

void fake_started(struct fake_node *node)
{
    Tally__V1__Started body = TALLY__V1__STARTED__INIT;
    SAY(node, started, STARTED);
}

void fake_finished(struct fake_node *node, uint64_t step)
{
    Tally__V1__Finished body = TALLY__V1__FINISHED__INIT;
    body.step = step;
    SAY(node, finished, FINISHED);
}

void fake_job_failed(struct fake_node *node, const char *reason)
{
    Tally__V1__JobFailed body = TALLY__V1__JOB_FAILED__INIT;
    body.reason = (char *)(uintptr_t)reason;
    SAY(node, job_failed, JOB_FAILED);
}

void fake_ended(struct fake_node *node)
{
    Tally__V1__Ended body = TALLY__V1__ENDED__INIT;
    SAY(node, ended, ENDED);
}

void fake_steps(struct fake_node *node, uint64_t first, uint64_t last)
{
    size_t n = (size_t)(last - first + 1);
    Tally__V1__StepRecord *records = calloc(n, sizeof *records), **list = calloc(n, sizeof *list);
    for (size_t i = 0; i < n; i++) {
        tally__v1__step_record__init(&records[i]);
        records[i].step = first + i;
        records[i].loss_sum = 10.0 / (double)(first + i);
        records[i].weight = 10;
        records[i].correct = 4;
        records[i].mono_us = (int64_t)(first + i) * 100;
        records[i].unix_ms = 1700000000000 + (int64_t)(first + i);
        list[i] = &records[i];
    }
    Tally__V1__Steps body = TALLY__V1__STEPS__INIT;
    body.n_records = n;
    body.records = list;
    SAY(node, steps, STEPS);
    free(records);
    free(list);
}

void fake_evals(struct fake_node *node, uint64_t step, uint32_t first, uint32_t last)
{
    Tally__V1__EvalRecord records[8], *list[8];
    assert_true(last - first < 8);
    for (uint32_t i = 0; i <= last - first; i++) {
        tally__v1__eval_record__init(&records[i]);
        records[i].micro_batch = first + i;
        records[i].loss_sum = 2.5;
        records[i].weight = 5;
        records[i].correct = first + i + 1;
        records[i].samples = 5;
        list[i] = &records[i];
    }
    Tally__V1__Evals body = TALLY__V1__EVALS__INIT;
    body.step = step;
    body.n_records = last - first + 1;
    body.records = list;
    SAY(node, evals, EVALS);
}

/* ---- the job ---- */

Tally__V1__JobSpec *fake_spec(const char *workers, unsigned shards)
{
    char text[2000];
    int length = snprintf(text, sizeof text,
                          "name: tiny\nseed: 3\n"
                          "model:\n  layers:\n    - {name: a, linear: {out_features: 600}}\n    - {relu: {}}\n"
                          "    - {name: b, linear: {out_features: 3}}\n  loss: {cross_entropy: {}}\n"
                          "data:\n  train: {synthetic: {samples: 100, classes: 3, shape: [600]}}\n"
                          "  test: {synthetic: {samples: 20, classes: 3, shape: [600]}}\n"
                          "train: {batch_size: 10, micro_batch_size: 5, epochs: 2, optimizer: {sgd: {lr: 0.1}}}\n"
                          "parallel: {data: %s, shards: %u}\n",
                          workers, shards);
    struct spec_file *file = NULL;
    ProtobufCMessage *message = NULL;
    struct tally_error err;
    if (spec_open_text("job.yaml", text, (size_t)length, &file, &err) != TALLY_OK ||
        spec_read(file, &tally__v1__job_spec__descriptor, &message, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    spec_close(file);
    return (Tally__V1__JobSpec *)message;
}

Tally__V1__DataFacts *fake_facts(void)
{
    static uint32_t shape[] = {600};
    Tally__V1__DataFacts facts = TALLY__V1__DATA_FACTS__INIT;
    facts.n_input_shape = 1;
    facts.input_shape = shape;
    facts.train_samples = 100;
    facts.test_samples = 20;
    return message_copy(&facts.base);
}

struct model *fake_model(void)
{
    Tally__V1__JobSpec *spec = fake_spec("1", 1);
    Tally__V1__DataFacts *facts = fake_facts();
    struct model *model = NULL;
    struct tally_error err;
    if (model_build(spec, facts, &model, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    tally__v1__job_spec__free_unpacked(spec, NULL);
    tally__v1__data_facts__free_unpacked(facts, NULL);
    return model;
}

/* ---- clients ---- */

struct call {
    bool done;
    struct tally_error end;
    ProtobufCMessage *reply;
};

static void on_reply(const struct tally_error *end, const struct rpc_message *reply, void *user)
{
    struct call *call = user;
    call->done = true;
    call->end = *end;
    if (reply)
        call->reply = message_copy(reply->header);
}

ProtobufCMessage *fake_call(struct fake_cluster *f, const char *method, const ProtobufCMessage *request,
                            struct tally_error *ret_end)
{
    struct call call = {0};
    struct tally_error err;
    if (rpc_unary(f->channel, f->queue, &tally__v1__jobs__descriptor, method, request, NULL, on_reply, &call, NULL,
                  &err) != TALLY_OK)
        fail_msg("%s", err.message);
    fake_until(f, call.done);
    if (ret_end)
        *ret_end = call.end;
    else if (call.end.code != TALLY_OK)
        fail_msg("%s: %s", method, call.end.message);
    return call.reply;
}

uint64_t fake_submit(struct fake_cluster *f, const char *request_id, const char *workers, unsigned shards)
{
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    Tally__V1__SubmitRequest request = TALLY__V1__SUBMIT_REQUEST__INIT;
    version.major = TALLY_PROTOCOL_MAJOR;
    request.version = &version;
    request.request_id = (char *)(uintptr_t)request_id;
    request.spec = fake_spec(workers, shards);
    request.facts = fake_facts();
    Tally__V1__Job *job = (Tally__V1__Job *)fake_call(f, "Submit", &request.base, NULL);
    uint64_t id = job->id;
    assert_string_equal(job->name, "tiny");
    assert_int_equal(job->steps, 20);
    tally__v1__job__free_unpacked(job, NULL);
    tally__v1__job_spec__free_unpacked(request.spec, NULL);
    tally__v1__data_facts__free_unpacked(request.facts, NULL);
    return id;
}

Tally__V1__Job *fake_get(struct fake_cluster *f, uint64_t job)
{
    Tally__V1__JobRef ref = TALLY__V1__JOB_REF__INIT;
    ref.id = job;
    return (Tally__V1__Job *)fake_call(f, "Get", &ref.base, NULL);
}

static void note_event(struct fake_watch *w, const Tally__V1__Event *event)
{
    w->gap |= event->seq != w->last_seq + 1;
    w->last_seq = event->seq;
    size_t used = strlen(w->states);
    switch (event->body_case) {
    case TALLY__V1__EVENT__BODY_STATE:
        w->state = event->state->state;
        snprintf(w->reason, sizeof w->reason, "%s", event->state->reason);
        snprintf(w->states + used, sizeof w->states - used, "%d %s\n", (int)event->state->state, event->state->reason);
        break;
    case TALLY__V1__EVENT__BODY_STEP:
        w->steps++;
        w->loss_sum += event->step->loss;
        w->gap |= event->step->lr != 0.1 || event->step->mono_us != (int64_t)event->step->step * 100;
        break;
    case TALLY__V1__EVENT__BODY_EVAL:
        w->evals++;
        w->last_eval = *event->eval;
        break;
    case TALLY__V1__EVENT__BODY_NOTICE:
        w->notices++;
        snprintf(w->notice, sizeof w->notice, "%s", event->notice->text);
        break;
    default:
        fail_msg("event %d", (int)event->body_case);
    }
}

static void on_events(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct fake_watch *w = user;
    const Tally__V1__Events *events = (const Tally__V1__Events *)message->header;
    w->messages++;
    for (size_t i = 0; i < events->n_events; i++)
        note_event(w, events->events[i]);
    if (!w->holds)
        rpc_stream_grant(stream, 1);
}

static void on_watch_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct fake_watch *w = user;
    w->stream = NULL;
    w->end = *end;
}

struct fake_watch *fake_watch_open(struct fake_cluster *f, uint64_t job, uint64_t after, bool holds)
{
    static const struct rpc_stream_events events = {.on_message = on_events, .on_end = on_watch_end};
    struct fake_watch *w = calloc(1, sizeof *w);
    Tally__V1__WatchRequest request = TALLY__V1__WATCH_REQUEST__INIT;
    struct tally_error err;
    request.job = job;
    request.after = after;
    w->last_seq = after;
    w->holds = holds;
    if (rpc_stream_open(f->channel, f->queue, &tally__v1__jobs__descriptor, "Watch", &events, w,
                        &(struct rpc_stream_options){.credits = holds ? 1 : 4}, &w->stream, &err) != TALLY_OK ||
        rpc_stream_send(w->stream, &request.base, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    rpc_stream_close(w->stream);
    return w;
}

void fake_watch_free(struct fake_watch *w)
{
    assert_null(w->stream);
    free(w);
}

void fake_watch_ended(const struct fake_watch *w, Tally__V1__JobState state, const char *text)
{
    assert_int_equal(w->end.code, TALLY_OK);
    assert_false(w->gap);
    if (w->state != state || !strstr(w->reason, text))
        fail_msg("ended in state %d: %s", (int)w->state, w->reason);
}

void fake_stop_job(struct fake_cluster *f, uint64_t job, const char *reason)
{
    Tally__V1__StopRequest request = TALLY__V1__STOP_REQUEST__INIT;
    request.job = job;
    request.reason = (char *)(uintptr_t)reason;
    tally__v1__job__free_unpacked((Tally__V1__Job *)fake_call(f, "Stop", &request.base, NULL), NULL);
}
