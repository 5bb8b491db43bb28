#include "tests/server/shard_rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/limits.h"
#include "common/log.h"

#define WAIT_NS (INT64_C(20) * 1000000000)

/* ---- the loop ---- */

static void on_tick(uv_timer_t *timer)
{
    (void)timer;
}

void rig_wait(struct rig *rig, bool (*done)(void *user), void *user, const char *what)
{
    int64_t deadline = tally_now_ns() + WAIT_NS;
    while (!done(user)) {
        if (tally_now_ns() > deadline)
            fail_msg("waited too long for %s", what);
        uv_run(&rig->loop, UV_RUN_ONCE);
    }
}

void rig_run_ms(struct rig *rig, int64_t ms)
{
    int64_t deadline = tally_now_ns() + ms * 1000000;
    while (tally_now_ns() < deadline)
        uv_run(&rig->loop, UV_RUN_ONCE);
}

static bool is_set(void *user)
{
    return *(bool *)user;
}

/* ---- the coordinator ---- */

static void take_steps(struct rig *rig, const Tally__V1__Steps *steps)
{
    rig->steps = realloc(rig->steps, (rig->step_count + steps->n_records) * sizeof *rig->steps);
    assert_non_null(rig->steps);
    for (size_t i = 0; i < steps->n_records; i++)
        rig->steps[rig->step_count++] = *steps->records[i];
    rig->reports++;
}

static tally_status take_message(const Tally__V1__NodeMessage *message, void *user)
{
    struct rig *rig = user;
    if (rig->no_room)
        return TALLY_ENOMEM;
    switch (message->body_case) {
    case TALLY__V1__NODE_MESSAGE__BODY_OPENED:
        rig->opened++;
        rig->opened_step = message->opened->step;
        break;
    case TALLY__V1__NODE_MESSAGE__BODY_ENDED:
        rig->ended++;
        break;
    case TALLY__V1__NODE_MESSAGE__BODY_JOB_FAILED:
        rig->failed++;
        snprintf(rig->failure, sizeof rig->failure, "%s", message->job_failed->reason);
        break;
    case TALLY__V1__NODE_MESSAGE__BODY_STEPS:
        take_steps(rig, message->steps);
        break;
    default:
        fail_msg("the shard said %d to its coordinator", (int)message->body_case);
    }
    return TALLY_OK;
}

static void on_stopped(void *user)
{
    ((struct rig *)user)->stopped = true;
}

void rig_open(struct rig *rig)
{
    static const struct shard_events events = {.send = take_message, .on_stopped = on_stopped};
    struct tally_error err;
    *rig = (struct rig){0};
    tally_log_init("test", "", TALLY_LOG_WARN);
    assert_int_equal(uv_loop_init(&rig->loop), 0);
    uv_timer_init(&rig->loop, &rig->tick);
    uv_timer_start(&rig->tick, on_tick, 5, 5);
    snprintf(rig->directory, sizeof rig->directory, "/tmp/tally-shard-XXXXXX");
    assert_non_null(mkdtemp(rig->directory));
    snprintf(rig->address, sizeof rig->address, "unix:%s/s", rig->directory);
    if (shard_open(&rig->loop, rig->address, &events, rig, &rig->shard, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    rig->queue = shard_loop_queue(rig->shard);
    assert_int_equal(rpc_channel_new(rig->address, NULL, &rig->channel, NULL), TALLY_OK);
}

void rig_close(struct rig *rig)
{
    while (rig->streams) {
        rpc_stream_cancel(rig->streams->stream);
        rig->streams->grant = 0;
        rig_stream_close(rig->streams);
    }
    rpc_channel_free(rig->channel);
    shard_stop(rig->shard, "the test is over");
    rig_wait(rig, is_set, &rig->stopped, "the shard to stop");
    shard_free(rig->shard);
    uv_close((uv_handle_t *)&rig->tick, NULL);
    uv_run(&rig->loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&rig->loop), 0);
    rmdir(rig->directory);
    free(rig->steps);
}

/* ---- jobs ---- */

/* Messages whose parts are all here: no allocation to undo. */
struct built_job {
    Tally__V1__JobSpec spec;
    Tally__V1__Model model;
    Tally__V1__Layer layers[4], *layer_list[4];
    Tally__V1__Linear linears[4];
    Tally__V1__Loss loss;
    Tally__V1__MseLoss mse;
    Tally__V1__Init init;
    Tally__V1__SafetensorsFile file;
    Tally__V1__Data data;
    Tally__V1__Source source;
    Tally__V1__Synthetic synthetic;
    Tally__V1__Train train;
    Tally__V1__Optimizer optimizer;
    Tally__V1__Sgd sgd;
    Tally__V1__DataFacts facts;
    uint32_t shape[1], target_shape[1];
};

static void build_layers(struct built_job *b, const struct rig_job *job)
{
    b->model = (Tally__V1__Model)TALLY__V1__MODEL__INIT;
    for (size_t i = 0; i < job->layers; i++) {
        b->linears[i] = (Tally__V1__Linear)TALLY__V1__LINEAR__INIT;
        b->linears[i].has_out_features = true;
        b->linears[i].out_features = job->widths[i];
        b->layers[i] = (Tally__V1__Layer)TALLY__V1__LAYER__INIT;
        b->layers[i].kind_case = TALLY__V1__LAYER__KIND_LINEAR;
        b->layers[i].linear = &b->linears[i];
        b->layer_list[i] = &b->layers[i];
    }
    b->model.layers = b->layer_list;
    b->model.n_layers = job->layers;
    b->mse = (Tally__V1__MseLoss)TALLY__V1__MSE_LOSS__INIT;
    b->loss = (Tally__V1__Loss)TALLY__V1__LOSS__INIT;
    b->loss.kind_case = TALLY__V1__LOSS__KIND_MSE_LOSS;
    b->loss.mse_loss = &b->mse;
    b->model.loss = &b->loss;
    b->file = (Tally__V1__SafetensorsFile)TALLY__V1__SAFETENSORS_FILE__INIT;
    b->file.path = (char *)job->safetensors;
    b->init = (Tally__V1__Init)TALLY__V1__INIT__INIT;
    b->init.kind_case = TALLY__V1__INIT__KIND_SAFETENSORS;
    b->init.safetensors = &b->file;
    b->model.init = job->safetensors ? &b->init : NULL;
}

static void build_job(struct built_job *b, const struct rig_job *job)
{
    build_layers(b, job);
    b->shape[0] = job->inputs;
    b->target_shape[0] = job->widths[job->layers - 1];
    b->synthetic = (Tally__V1__Synthetic)TALLY__V1__SYNTHETIC__INIT;
    b->synthetic.has_samples = true;
    b->synthetic.samples = job->samples;
    b->synthetic.n_shape = b->synthetic.n_target_shape = 1;
    b->synthetic.shape = b->shape;
    b->synthetic.target_shape = b->target_shape;
    b->source = (Tally__V1__Source)TALLY__V1__SOURCE__INIT;
    b->source.kind_case = TALLY__V1__SOURCE__KIND_SYNTHETIC;
    b->source.synthetic = &b->synthetic;
    b->data = (Tally__V1__Data)TALLY__V1__DATA__INIT;
    b->data.train = &b->source;
    b->sgd = (Tally__V1__Sgd)TALLY__V1__SGD__INIT;
    b->sgd.has_lr = b->sgd.has_momentum = true;
    b->sgd.lr = job->lr;
    b->sgd.momentum = job->momentum;
    b->optimizer = (Tally__V1__Optimizer)TALLY__V1__OPTIMIZER__INIT;
    b->optimizer.kind_case = TALLY__V1__OPTIMIZER__KIND_SGD;
    b->optimizer.sgd = &b->sgd;
    b->train = (Tally__V1__Train)TALLY__V1__TRAIN__INIT;
    b->train.has_batch_size = b->train.has_micro_batch_size = b->train.has_steps = true;
    b->train.batch_size = job->batch;
    b->train.micro_batch_size = 1;
    b->train.steps = job->steps;
    b->train.optimizer = &b->optimizer;
    b->spec = (Tally__V1__JobSpec)TALLY__V1__JOB_SPEC__INIT;
    b->spec.name = (char *)"test";
    b->spec.has_seed = true;
    b->spec.seed = 1;
    b->spec.model = &b->model;
    b->spec.data = &b->data;
    b->spec.train = &b->train;
    b->facts = (Tally__V1__DataFacts)TALLY__V1__DATA_FACTS__INIT;
    b->facts.n_input_shape = b->facts.n_target_shape = 1;
    b->facts.input_shape = b->shape;
    b->facts.target_shape = b->target_shape;
    b->facts.train_samples = job->samples;
}

void rig_order_open(struct rig *rig, const struct rig_job *job)
{
    struct built_job built;
    build_job(&built, job);
    Tally__V1__OpenJob open = TALLY__V1__OPEN_JOB__INIT;
    open.job = job->id;
    open.generation = job->generation;
    open.spec = &built.spec;
    open.facts = &built.facts;
    open.shard = job->shard;
    open.shards = job->shards;
    open.workers = job->workers;
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_OPEN_JOB;
    order.open_job = &open;
    shard_order(rig->shard, &order);
}

void rig_order_end(struct rig *rig, uint64_t job, uint64_t generation, const char *reason)
{
    Tally__V1__EndJob end = TALLY__V1__END_JOB__INIT;
    end.job = job;
    end.generation = generation;
    end.reason = (char *)reason;
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_END_JOB;
    order.end_job = &end;
    shard_order(rig->shard, &order);
}

struct counted {
    const unsigned *count, *failed;
    unsigned target, failed_before;
};

static bool counted(void *user)
{
    const struct counted *c = user;
    return *c->count >= c->target || *c->failed > c->failed_before;
}

struct model *rig_open_job(struct rig *rig, const struct rig_job *job)
{
    struct counted c = {&rig->opened, &rig->failed, rig->opened + 1, rig->failed};
    rig_order_open(rig, job);
    rig_wait(rig, counted, &c, "a job to be opened");
    if (rig->failed > c.failed_before)
        fail_msg("%s", rig->failure);
    return rig_model(job);
}

struct model *rig_model(const struct rig_job *job)
{
    struct built_job built;
    struct model *model;
    struct tally_error err;
    build_job(&built, job);
    if (model_build(&built.spec, &built.facts, &model, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    return model;
}

void rig_end_job(struct rig *rig, uint64_t job, uint64_t generation)
{
    struct counted c = {&rig->ended, &rig->failed, rig->ended + 1, rig->failed};
    rig_order_end(rig, job, generation, "the test ends it");
    rig_wait(rig, counted, &c, "a job to end");
}

struct holding {
    bool done;
    struct tally_error end;
    Tally__V1__HoldingReply *ret;
};

static void on_holding(const struct tally_error *end, const struct rpc_message *reply, void *user)
{
    struct holding *holding = user;
    holding->done = true;
    holding->end = *end;
    if (reply)
        *holding->ret = *(const Tally__V1__HoldingReply *)(const void *)reply->header;
}

tally_status rig_holding(struct rig *rig, uint64_t job, Tally__V1__HoldingReply *ret, struct tally_error *err)
{
    struct holding holding = {.ret = ret};
    Tally__V1__HoldingRequest request = TALLY__V1__HOLDING_REQUEST__INIT;
    request.job = job;
    assert_int_equal(rpc_unary(rig->channel, rig->queue, &tally__v1__parameters__descriptor, "Holding", &request.base,
                               NULL, on_holding, &holding, NULL, NULL),
                     TALLY_OK);
    rig_wait(rig, is_set, &holding.done, "Holding");
    if (err)
        *err = holding.end;
    return holding.end.code;
}

static void on_fetched(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct rig_fetch *fetch = user;
    const Tally__V1__Update *update = (const void *)message->header;
    size_t count = rpc_payload_bytes(message->payload) / sizeof(float);
    assert_int_equal(update->version, fetch->version);
    assert_int_equal(update->job, fetch->job);
    if (fetch->slices > 0)
        assert_int_equal(update->slice, fetch->next_slice);
    assert_true(count <= fetch->room - fetch->used);
    assert_int_equal(rpc_payload_copy_floats(message->payload, fetch->out + fetch->used, count, NULL), TALLY_OK);
    fetch->used += count;
    fetch->slices++;
    fetch->next_slice = update->slice + 1;
    rpc_stream_grant(stream, 1);
}

static void on_fetch_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct rig_fetch *fetch = user;
    fetch->end = *end;
    fetch->done = true;
}

static void fetch_start(struct rig *rig, struct rpc_channel *channel, struct rig_fetch *fetch, unsigned credits)
{
    static const struct rpc_stream_events events = {.on_message = on_fetched, .on_end = on_fetch_end};
    const struct rpc_stream_options options = {.credits = credits};
    assert_int_equal(rpc_stream_open(channel, rig->queue, &tally__v1__parameters__descriptor, "Fetch", &events, fetch,
                                     &options, &fetch->stream, NULL),
                     TALLY_OK);
    Tally__V1__FetchRequest request = TALLY__V1__FETCH_REQUEST__INIT;
    request.job = fetch->job;
    request.version = fetch->version;
    assert_int_equal(rpc_stream_send(fetch->stream, &request.base, NULL), TALLY_OK);
    rpc_stream_close(fetch->stream);
}

tally_status rig_fetch(struct rig *rig, uint64_t job, uint64_t version, float *out, size_t room, uint32_t *ret_slices,
                       struct tally_error *err)
{
    struct rig_fetch fetch = {.job = job, .version = version, .out = out, .room = room};
    fetch_start(rig, rig->channel, &fetch, 2);
    rig_wait(rig, rig_fetch_ended, &fetch, "Fetch");
    if (err)
        *err = fetch.end;
    *ret_slices = fetch.slices;
    return fetch.end.code;
}

struct rpc_channel *rig_fetch_start(struct rig *rig, struct rig_fetch *fetch, uint64_t job, uint64_t version)
{
    const struct rpc_channel_options own = {.own_connection = true};
    struct rpc_channel *channel = NULL;
    *fetch = (struct rig_fetch){.job = job, .version = version};
    assert_int_equal(rpc_channel_new(rig->address, &own, &channel, NULL), TALLY_OK);
    fetch_start(rig, channel, fetch, 0);
    return channel;
}

bool rig_fetch_ended(void *fetch)
{
    return ((const struct rig_fetch *)fetch)->done;
}

/* ---- numbers ---- */

uint64_t rig_mix(uint64_t x)
{
    x += 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x ^ (x >> 31);
}

static struct tree_node half(struct tree_node node, bool right)
{
    uint32_t middle = node.begin + tree_split(node.end - node.begin);
    return right ? (struct tree_node){middle, node.end} : (struct tree_node){node.begin, middle};
}

/* Magnitudes differ, so that another order of summation gives other bits. */
float rig_gradient(uint64_t step, struct tree_node node, size_t index)
{
    if (node.end - node.begin > 1)
        return rig_gradient(step, half(node, false), index) + rig_gradient(step, half(node, true), index);
    uint64_t bits = rig_mix(step * 1000003 + node.begin * 10007 + index * 17);
    return ldexpf((float)(bits & 0xFFFFFF) / (float)0x1000000 - 0.5f, (int)(bits >> 60) - 8);
}

double rig_weight(uint64_t step, struct tree_node node)
{
    if (node.end - node.begin > 1)
        return rig_weight(step, half(node, false)) + rig_weight(step, half(node, true));
    return 1.0 + (double)(rig_mix(step * 31 + node.begin) % 64);
}

double rig_loss(uint64_t step, struct tree_node node)
{
    if (node.end - node.begin > 1)
        return rig_loss(step, half(node, false)) + rig_loss(step, half(node, true));
    return (double)(rig_mix(step * 37 + node.begin) >> 12) * 0x1p-40;
}

/* ---- streams ---- */

struct rig_sent {
    struct rig_sent *next;
    float floats[];
};

static void on_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct rig_stream *s = user;
    const Tally__V1__Update *update = (const void *)message->header;
    assert_int_equal(update->job, s->job);
    if (update->refusal) {
        s->refusals++;
        s->last_code = update->refusal->code;
        s->last_step = update->refusal->step;
        s->last_leaf_begin = update->refusal->leaf_begin;
        s->last_leaf_end = update->refusal->leaf_end;
        s->last_slice = update->refusal->slice;
        snprintf(s->last_reason, sizeof s->last_reason, "%s", update->refusal->reason);
    } else {
        const struct slice *slice = &s->model->slices[update->slice];
        assert_true(update->slice < s->slices);
        assert_true(update->version + 1 > s->versions[update->slice]); /* never the same one twice, never an older */
        s->versions[update->slice] = update->version + 1;
        s->updates++;
        assert_int_equal(rpc_payload_copy_floats(message->payload, s->weights + slice->offset, slice->count, NULL),
                         TALLY_OK);
    }
    if (s->grant)
        rpc_stream_grant(stream, s->grant);
}

static void on_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct rig_stream *s = user;
    s->end = *end;
    s->ended = true;
}

static void stream_open(struct rig *rig, struct rig_stream *s, const struct model *model, unsigned credits,
                        struct rpc_channel *channel)
{
    static const struct rpc_stream_events events = {.on_message = on_message, .on_end = on_end};
    const struct rpc_stream_options options = {
        .credits = credits, .max_queued_messages = 4096, .max_queued_bytes = (size_t)1 << 30};
    *s = (struct rig_stream){.rig = rig, .grant = 1, .model = model, .channel = channel};
    s->slices = model ? (uint32_t)model->slice_count : 0;
    s->versions = calloc(s->slices + 1u, sizeof *s->versions);
    s->weights = calloc(model ? model->flat_count : 1, sizeof *s->weights);
    assert_non_null(s->versions);
    assert_non_null(s->weights);
    assert_int_equal(rpc_stream_open(channel ? channel : rig->channel, rig->queue, &tally__v1__parameters__descriptor,
                                     "Exchange", &events, s, &options, &s->stream, NULL),
                     TALLY_OK);
    rpc_stream_ref(s->stream);
    s->next = rig->streams;
    rig->streams = s;
}

void rig_stream_open(struct rig *rig, struct rig_stream *s, const struct model *model, unsigned credits)
{
    stream_open(rig, s, model, credits, NULL);
}

void rig_stream_open_alone(struct rig *rig, struct rig_stream *s, const struct model *model, unsigned credits)
{
    const struct rpc_channel_options options = {.own_connection = true};
    struct rpc_channel *channel;
    assert_int_equal(rpc_channel_new(rig->address, &options, &channel, NULL), TALLY_OK);
    stream_open(rig, s, model, credits, channel);
}

static void say_hello(struct rig_stream *s, uint64_t job, uint64_t generation, Tally__V1__Hello *hello, uint32_t major)
{
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    version.major = major;
    char name[16];
    snprintf(name, sizeof name, "w%u", hello->rank);
    hello->version = &version;
    hello->worker = name;
    Tally__V1__Push push = TALLY__V1__PUSH__INIT;
    push.job = s->job = job;
    push.generation = s->generation = generation;
    push.hello = hello;
    rpc_stream_send(s->stream, &push.base, NULL);
}

void rig_hello(struct rig_stream *s, uint64_t job, uint64_t generation, uint32_t rank, uint32_t major)
{
    Tally__V1__Hello hello = TALLY__V1__HELLO__INIT;
    hello.rank = rank;
    say_hello(s, job, generation, &hello, major);
}

void rig_hello_for(struct rig_stream *s, uint64_t job, uint64_t generation, uint32_t rank, const uint32_t *range,
                   size_t ranges)
{
    Tally__V1__SliceRange slices[8], *pointers[8];
    assert_true(ranges <= 8);
    for (size_t i = 0; i < ranges; i++) {
        slices[i] = (Tally__V1__SliceRange)TALLY__V1__SLICE_RANGE__INIT;
        slices[i].begin = range[2 * i];
        slices[i].end = range[2 * i + 1];
        pointers[i] = &slices[i];
    }
    Tally__V1__Hello hello = TALLY__V1__HELLO__INIT;
    hello.rank = rank;
    hello.n_slices = ranges;
    hello.slices = pointers;
    say_hello(s, job, generation, &hello, TALLY_PROTOCOL_MAJOR);
}

static void nothing_to_release(void *user)
{
    (void)user;
}

static float *new_sent(struct rig_stream *s, size_t count)
{
    struct rig_sent *sent = malloc(sizeof *sent + count * sizeof(float));
    assert_non_null(sent);
    sent->next = s->sent;
    s->sent = sent;
    return sent->floats;
}

void rig_push_raw(struct rig_stream *s, Tally__V1__Push *push, size_t bytes)
{
    float *floats = new_sent(s, bytes / sizeof(float) + 1);
    memset(floats, 0, bytes);
    rpc_stream_send_payload(s->stream, &push->base, floats, bytes, nothing_to_release, NULL, NULL);
}

void rig_push(struct rig_stream *s, uint64_t step, struct tree_node node, uint32_t slice)
{
    const struct slice *range = &s->model->slices[slice];
    float *floats = new_sent(s, range->count);
    for (size_t i = 0; i < range->count; i++)
        floats[i] = rig_gradient(step, node, range->offset + i);
    Tally__V1__Push push = TALLY__V1__PUSH__INIT;
    push.job = s->job;
    push.generation = s->generation;
    push.step = step;
    push.leaf_begin = node.begin;
    push.leaf_end = node.end;
    push.slice = slice;
    push.weight = rig_weight(step, node);
    push.loss_sum = rig_loss(step, node);
    push.correct = rig_weight(step, node) / 2;
    rpc_stream_send_payload(s->stream, &push.base, floats, range->count * sizeof(float), nothing_to_release, NULL,
                            NULL);
}

struct wanted {
    const struct rig_stream *s;
    uint32_t begin, end;
    uint64_t version;
};

static bool has_version(void *user)
{
    const struct wanted *wanted = user;
    for (uint32_t i = wanted->begin; i < wanted->end; i++)
        if (wanted->s->versions[i] < wanted->version + 1)
            return wanted->s->ended; /* it will not come: the assertion below tells */
    return true;
}

void rig_wait_version(struct rig_stream *s, uint32_t begin, uint32_t end, uint64_t version)
{
    struct wanted wanted = {s, begin, end, version};
    char what[64];
    snprintf(what, sizeof what, "version %d of slices %u to %u", (int)version, begin, end);
    rig_wait(s->rig, has_version, &wanted, what);
    if (s->ended)
        fail_msg("the stream ended: %s", s->end.message);
}

static bool has_refusals(void *user)
{
    const struct wanted *wanted = user;
    return wanted->s->refusals >= wanted->version || wanted->s->ended;
}

void rig_wait_refusals(struct rig_stream *s, uint64_t count)
{
    struct wanted wanted = {.s = s, .version = count};
    rig_wait(s->rig, has_refusals, &wanted, "a refusal");
    if (s->ended)
        fail_msg("the stream ended: %s", s->end.message);
}

void rig_wait_end(struct rig_stream *s)
{
    rig_wait(s->rig, is_set, &s->ended, "the stream's end");
}

void rig_stream_close(struct rig_stream *s)
{
    rpc_stream_close(s->stream);
    rig_wait_end(s);
    rpc_stream_unref(s->stream);
    rpc_channel_free(s->channel);
    struct rig_stream **link = &s->rig->streams;
    while (*link != s)
        link = &(*link)->next;
    *link = s->next;
    while (s->sent) {
        struct rig_sent *next = s->sent->next;
        free(s->sent);
        s->sent = next;
    }
    free(s->versions);
    free(s->weights);
}
