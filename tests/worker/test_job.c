#include "tests/worker/test_job.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void *copied(const void *value, size_t bytes)
{
    void *p = malloc(bytes ? bytes : 1);
    if (!p)
        abort();
    memcpy(p, value, bytes);
    return p;
}

/* A message on the heap, as protobuf-c's free_unpacked wants it. */
#define NEW(type, INIT) ((type *)copied(&(type)INIT, sizeof(type)))

Tally__V1__JobSpec *spec_new(uint64_t seed, uint32_t batch, uint32_t micro, uint64_t epochs, uint64_t steps)
{
    Tally__V1__JobSpec *spec = NEW(Tally__V1__JobSpec, TALLY__V1__JOB_SPEC__INIT);
    spec->name = strdup("test");
    spec->has_seed = true;
    spec->seed = seed;
    spec->model = NEW(Tally__V1__Model, TALLY__V1__MODEL__INIT);
    spec->model->loss = NEW(Tally__V1__Loss, TALLY__V1__LOSS__INIT);
    spec->data = NEW(Tally__V1__Data, TALLY__V1__DATA__INIT);
    Tally__V1__Train *train = spec->train = NEW(Tally__V1__Train, TALLY__V1__TRAIN__INIT);
    train->has_batch_size = train->has_micro_batch_size = true;
    train->batch_size = batch;
    train->micro_batch_size = micro;
    train->has_epochs = epochs != 0;
    train->epochs = epochs;
    train->has_steps = steps != 0;
    train->steps = steps;
    spec_sgd(spec, 0.001, 0, 0, false);
    return spec;
}

void spec_free(Tally__V1__JobSpec *spec)
{
    tally__v1__job_spec__free_unpacked(spec, NULL);
}

void spec_sgd(Tally__V1__JobSpec *spec, double lr, double momentum, double weight_decay, bool nesterov)
{
    if (spec->train->optimizer)
        tally__v1__optimizer__free_unpacked(spec->train->optimizer, NULL);
    Tally__V1__Sgd *sgd = NEW(Tally__V1__Sgd, TALLY__V1__SGD__INIT);
    sgd->has_lr = sgd->has_momentum = sgd->has_weight_decay = sgd->has_nesterov = true;
    sgd->lr = lr;
    sgd->momentum = momentum;
    sgd->weight_decay = weight_decay;
    sgd->nesterov = nesterov;
    spec->train->optimizer = NEW(Tally__V1__Optimizer, TALLY__V1__OPTIMIZER__INIT);
    spec->train->optimizer->kind_case = TALLY__V1__OPTIMIZER__KIND_SGD;
    spec->train->optimizer->sgd = sgd;
}

void spec_cross_entropy(Tally__V1__JobSpec *spec, int64_t ignore_index, double label_smoothing)
{
    Tally__V1__CrossEntropy *loss = NEW(Tally__V1__CrossEntropy, TALLY__V1__CROSS_ENTROPY__INIT);
    loss->has_ignore_index = loss->has_label_smoothing = true;
    loss->ignore_index = ignore_index;
    loss->label_smoothing = label_smoothing;
    spec->model->loss->kind_case = TALLY__V1__LOSS__KIND_CROSS_ENTROPY;
    spec->model->loss->cross_entropy = loss;
}

void spec_mse(Tally__V1__JobSpec *spec)
{
    spec->model->loss->kind_case = TALLY__V1__LOSS__KIND_MSE_LOSS;
    spec->model->loss->mse_loss = NEW(Tally__V1__MseLoss, TALLY__V1__MSE_LOSS__INIT);
}

void spec_shuffle(Tally__V1__JobSpec *spec, bool shuffle)
{
    spec->data->has_shuffle = true;
    spec->data->shuffle = shuffle;
}

Tally__V1__Layer *spec_plain(Tally__V1__JobSpec *spec, const char *name, Tally__V1__Layer__KindCase kind)
{
    Tally__V1__Model *model = spec->model;
    Tally__V1__Layer *layer = NEW(Tally__V1__Layer, TALLY__V1__LAYER__INIT);
    layer->name = name ? strdup(name) : NULL;
    layer->kind_case = kind;
    switch (kind) {
    case TALLY__V1__LAYER__KIND_LINEAR:
        layer->linear = NEW(Tally__V1__Linear, TALLY__V1__LINEAR__INIT);
        break;
    case TALLY__V1__LAYER__KIND_CONV2D:
        layer->conv2d = NEW(Tally__V1__Conv2d, TALLY__V1__CONV2D__INIT);
        break;
    case TALLY__V1__LAYER__KIND_MAX_POOL2D:
        layer->max_pool2d = NEW(Tally__V1__MaxPool2d, TALLY__V1__MAX_POOL2D__INIT);
        break;
    case TALLY__V1__LAYER__KIND_AVG_POOL2D:
        layer->avg_pool2d = NEW(Tally__V1__AvgPool2d, TALLY__V1__AVG_POOL2D__INIT);
        break;
    case TALLY__V1__LAYER__KIND_RELU:
        layer->relu = NEW(Tally__V1__Relu, TALLY__V1__RELU__INIT);
        break;
    case TALLY__V1__LAYER__KIND_TANH:
        layer->tanh = NEW(Tally__V1__Tanh, TALLY__V1__TANH__INIT);
        break;
    case TALLY__V1__LAYER__KIND_SIGMOID:
        layer->sigmoid = NEW(Tally__V1__Sigmoid, TALLY__V1__SIGMOID__INIT);
        break;
    case TALLY__V1__LAYER__KIND_GELU:
        layer->gelu = NEW(Tally__V1__Gelu, TALLY__V1__GELU__INIT);
        break;
    case TALLY__V1__LAYER__KIND_FLATTEN:
        layer->flatten = NEW(Tally__V1__Flatten, TALLY__V1__FLATTEN__INIT);
        break;
    case TALLY__V1__LAYER__KIND_ADD:
        layer->add = NEW(Tally__V1__Add, TALLY__V1__ADD__INIT);
        break;
    default:
        fail_msg("no such kind of layer: %d", (int)kind);
    }
    model->layers = realloc(model->layers, (model->n_layers + 1) * sizeof *model->layers);
    assert_non_null(model->layers);
    model->layers[model->n_layers++] = layer;
    return layer;
}

Tally__V1__Layer *spec_linear(Tally__V1__JobSpec *spec, const char *name, uint32_t out, bool bias)
{
    Tally__V1__Layer *layer = spec_plain(spec, name, TALLY__V1__LAYER__KIND_LINEAR);
    layer->linear->has_out_features = layer->linear->has_bias = true;
    layer->linear->out_features = out;
    layer->linear->bias = bias;
    return layer;
}

static uint32_t *one(uint32_t value)
{
    return copied(&value, sizeof value);
}

Tally__V1__Layer *spec_conv(Tally__V1__JobSpec *spec, const char *name, uint32_t out, uint32_t kernel, uint32_t stride,
                            uint32_t padding, uint32_t groups)
{
    Tally__V1__Layer *layer = spec_plain(spec, name, TALLY__V1__LAYER__KIND_CONV2D);
    Tally__V1__Conv2d *c = layer->conv2d;
    c->has_out_channels = c->has_groups = true;
    c->out_channels = out;
    c->groups = groups;
    c->n_kernel_size = c->n_stride = c->n_padding = 1;
    c->kernel_size = one(kernel);
    c->stride = one(stride);
    c->padding = one(padding);
    return layer;
}

Tally__V1__Layer *spec_max_pool(Tally__V1__JobSpec *spec, const char *name, uint32_t kernel, uint32_t stride,
                                uint32_t padding)
{
    Tally__V1__Layer *layer = spec_plain(spec, name, TALLY__V1__LAYER__KIND_MAX_POOL2D);
    Tally__V1__MaxPool2d *p = layer->max_pool2d;
    p->n_kernel_size = p->n_stride = p->n_padding = 1;
    p->kernel_size = one(kernel);
    p->stride = one(stride);
    p->padding = one(padding);
    return layer;
}

Tally__V1__Layer *spec_avg_pool(Tally__V1__JobSpec *spec, const char *name, uint32_t kernel, uint32_t stride,
                                uint32_t padding)
{
    Tally__V1__Layer *layer = spec_plain(spec, name, TALLY__V1__LAYER__KIND_AVG_POOL2D);
    Tally__V1__AvgPool2d *p = layer->avg_pool2d;
    p->n_kernel_size = p->n_stride = p->n_padding = 1;
    p->kernel_size = one(kernel);
    p->stride = one(stride);
    p->padding = one(padding);
    return layer;
}

void spec_from(Tally__V1__Layer *layer, const char *name)
{
    layer->from = realloc(layer->from, (layer->n_from + 1) * sizeof *layer->from);
    assert_non_null(layer->from);
    layer->from[layer->n_from++] = strdup(name);
}

void spec_seed_cnn(Tally__V1__JobSpec *spec)
{
    spec_conv(spec, "conv1", 20, 5, 1, 0, 1);
    spec_max_pool(spec, NULL, 2, 2, 0);
    spec_conv(spec, "conv2", 50, 5, 1, 0, 1);
    spec_max_pool(spec, NULL, 2, 2, 0);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_FLATTEN);
    spec_linear(spec, "fc1", 500, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, "fc2", 10, true);
}

static Tally__V1__Source *add_source(Tally__V1__JobSpec *spec, int part)
{
    Tally__V1__Source *source = NEW(Tally__V1__Source, TALLY__V1__SOURCE__INIT);
    Tally__V1__Source **place = part ? &spec->data->test : &spec->data->train;
    if (*place)
        tally__v1__source__free_unpacked(*place, NULL);
    return *place = source;
}

void spec_synthetic(Tally__V1__JobSpec *spec, int part, uint64_t samples, uint32_t classes, const uint32_t *shape,
                    size_t ndim, const uint32_t *target_shape, size_t target_ndim)
{
    Tally__V1__Source *source = add_source(spec, part);
    Tally__V1__Synthetic *s = NEW(Tally__V1__Synthetic, TALLY__V1__SYNTHETIC__INIT);
    source->kind_case = TALLY__V1__SOURCE__KIND_SYNTHETIC;
    source->synthetic = s;
    s->has_samples = true;
    s->samples = samples;
    s->has_classes = classes != 0;
    s->classes = classes;
    s->n_shape = ndim;
    s->shape = copied(shape, ndim * sizeof *shape);
    s->n_target_shape = target_ndim;
    s->target_shape = target_ndim ? copied(target_shape, target_ndim * sizeof *target_shape) : NULL;
}

Tally__V1__JobSpec *spec_small_job(uint64_t steps)
{
    Tally__V1__JobSpec *spec = spec_new(9, 8, 4, 0, steps);
    spec_synthetic(spec, 0, 20, 3, (const uint32_t[]){5}, 1, NULL, 0);
    spec_synthetic(spec, 1, 10, 3, (const uint32_t[]){5}, 1, NULL, 0);
    spec_linear(spec, "a", 6, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, "b", 3, true);
    spec_cross_entropy(spec, -100, 0);
    return spec;
}

void spec_npy(Tally__V1__JobSpec *spec, int part, const char *inputs, const char *targets, uint64_t limit)
{
    Tally__V1__Source *source = add_source(spec, part);
    Tally__V1__Npy *s = NEW(Tally__V1__Npy, TALLY__V1__NPY__INIT);
    source->kind_case = TALLY__V1__SOURCE__KIND_NPY;
    source->npy = s;
    s->inputs = strdup(inputs);
    s->targets = strdup(targets);
    s->has_limit = limit != 0;
    s->limit = limit;
}

void spec_idx(Tally__V1__JobSpec *spec, int part, const char *inputs, const char *targets, uint64_t limit)
{
    Tally__V1__Source *source = add_source(spec, part);
    Tally__V1__Idx *s = NEW(Tally__V1__Idx, TALLY__V1__IDX__INIT);
    source->kind_case = TALLY__V1__SOURCE__KIND_IDX;
    source->idx = s;
    s->inputs = strdup(inputs);
    s->targets = strdup(targets);
    s->has_limit = limit != 0;
    s->limit = limit;
}

void spec_normalize(Tally__V1__JobSpec *spec, float mean, float std)
{
    Tally__V1__Normalize *n = spec->data->normalize = NEW(Tally__V1__Normalize, TALLY__V1__NORMALIZE__INIT);
    n->n_mean = n->n_std = 1;
    n->mean = copied(&mean, sizeof mean);
    n->std = copied(&std, sizeof std);
}

static Tally__V1__Pipeline *spec_pipeline(Tally__V1__JobSpec *spec)
{
    if (!spec->parallel)
        spec->parallel = NEW(Tally__V1__Parallel, TALLY__V1__PARALLEL__INIT);
    if (!spec->parallel->pipeline)
        spec->parallel->pipeline = NEW(Tally__V1__Pipeline, TALLY__V1__PIPELINE__INIT);
    return spec->parallel->pipeline;
}

void spec_stages(Tally__V1__JobSpec *spec, uint32_t stages, Tally__V1__Schedule schedule, uint32_t chunks)
{
    Tally__V1__Pipeline *p = spec_pipeline(spec);
    p->has_stages = stages > 0;
    p->stages = stages;
    p->has_schedule = true;
    p->schedule = schedule;
    p->has_chunks = chunks > 1;
    p->chunks = chunks;
}

void spec_place(Tally__V1__JobSpec *spec, uint32_t stage, const char *layer)
{
    Tally__V1__Pipeline *p = spec_pipeline(spec);
    while (p->n_placement <= stage) {
        p->placement = realloc(p->placement, (p->n_placement + 1) * sizeof *p->placement);
        if (!p->placement)
            abort();
        p->placement[p->n_placement++] = NEW(Tally__V1__Stage, TALLY__V1__STAGE__INIT);
    }
    Tally__V1__Stage *s = p->placement[stage];
    s->layers = realloc(s->layers, (s->n_layers + 1) * sizeof *s->layers);
    if (!s->layers)
        abort();
    s->layers[s->n_layers++] = strdup(layer);
}

/* ---- a job ---- */

static struct dataset *open_set(const struct test_job *job, const Tally__V1__Source *source, int part)
{
    struct tally_error err;
    struct dataset *set;
    bool mse = job->spec->model->loss->kind_case == TALLY__V1__LOSS__KIND_MSE_LOSS;
    if (dataset_open(source, job->spec->data->normalize, mse ? DATASET_VALUES : DATASET_CLASSES, job->spec->seed, part,
                     &set, &err))
        fail_msg("%s", err.message);
    return set;
}

struct test_job *test_job_open(Tally__V1__JobSpec *spec)
{
    struct test_job *job = calloc(1, sizeof *job);
    assert_non_null(job);
    job->spec = spec;
    job->train = open_set(job, spec->data->train, 0);
    if (spec->data->test)
        job->test = open_set(job, spec->data->test, 1);
    const struct dataset_info *info = dataset_info(job->train);
    job->facts = (Tally__V1__DataFacts)TALLY__V1__DATA_FACTS__INIT;
    job->facts.train_samples = info->samples;
    job->facts.test_samples = job->test ? dataset_info(job->test)->samples : 0;
    job->facts.n_input_shape = info->input_ndim;
    job->facts.input_shape = job->input_shape;
    for (size_t i = 0; i < info->input_ndim; i++)
        job->input_shape[i] = (uint32_t)info->input_shape[i];
    if (info->target == DATASET_VALUES) {
        job->facts.n_target_shape = info->target_ndim;
        job->facts.target_shape = job->target_shape;
        for (size_t i = 0; i < info->target_ndim; i++)
            job->target_shape[i] = (uint32_t)info->target_shape[i];
    }
    struct tally_error err;
    if (model_build(spec, &job->facts, &job->model, &err))
        fail_msg("%s", err.message);
    return job;
}

void test_job_close(struct test_job *job)
{
    if (!job)
        return;
    model_free(job->model);
    dataset_close(job->train);
    dataset_close(job->test);
    spec_free(job->spec);
    free(job);
}

void test_rank_plan(const struct test_job *job, uint32_t rank, struct mesh mesh, const char *isa, struct test_rank *ret)
{
    struct tally_error err = {0};
    struct test_rank r = {.kernels = kernels_find("cpu")};
    if (r.kernels->open(isa, 0, &r.backend, &err) ||
        plan_build(job->model, &job->facts, mesh, rank, r.kernels, r.backend, &r.plan, &err) ||
        order_open(job->facts.train_samples, job->spec->data->shuffle, job->spec->seed, job->model->init_draws,
                   &r.order, &err))
        fail_msg("%s", err.message);
    *ret = r;
}

void test_rank_start(const struct test_job *job, struct peers *peers, struct test_rank *rank)
{
    struct tally_error err = {0};
    struct executor_inputs inputs = {
        .plan = rank->plan, .train = job->train, .test = job->test, .order = rank->order, .peers = peers};
    if (executor_open(&inputs, &rank->executor, &err))
        fail_msg("%s", err.message);
}

void test_rank_open(const struct test_job *job, uint32_t rank, uint32_t ranks, const char *isa, struct test_rank *ret)
{
    test_rank_plan(job, rank, (struct mesh){ranks, 1, 1}, isa, ret);
    test_rank_start(job, NULL, ret);
}

void test_rank_close(struct test_rank *rank)
{
    executor_close(rank->executor);
    order_close(rank->order);
    plan_free(rank->plan);
    rank->kernels->close(rank->backend);
    *rank = (struct test_rank){0};
}
