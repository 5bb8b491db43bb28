/* Which stage of the pipeline computes each layer. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/balance.h"
#include "model/build.h"
#include "model/layer.h"

/*
 * Moving a byte takes a core about as long as so many operations of a product: some 50 GFLOP/s of products against 12
 * GB/s of memory. It decides only between cuts, and must be the same everywhere, so it is no measurement.
 */
#define FLOPS_PER_BYTE 4

struct stager {
    struct model *model;
    const Tally__V1__Pipeline *pipeline;
    const struct spec_file *file;
    struct tally_error *err;
};

static tally_status out_of_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "out of memory for the model's stages");
}

/* ---- costs ---- */

static uint64_t param_bytes(const struct model *model, const struct layer *layer)
{
    uint64_t elements = layer->weight >= 0 ? model->params[layer->weight].shape.elements : 0;
    return flops_mul(elements, sizeof(float));
}

struct layers_cost layers_cost(const struct model *model, uint32_t begin, uint32_t end)
{
    const struct layer *first = &model->layers[begin], *last = &model->layers[end - 1];
    const Tally__V1__Train *train = model->spec->train;
    uint32_t rows = train && train->micro_batch_size > 0 ? train->micro_batch_size : 1;
    uint64_t flops = 0;
    for (uint32_t i = begin; i < end; i++)
        flops = flops_add(flops, model->layers[i].forward_flops);
    uint64_t bytes = flops_mul(flops_mul(first->in.elements, first->input_count) + last->out.elements, sizeof(float));
    uint64_t weights = param_bytes(model, first);
    struct layers_cost cost = {.forward =
                                   flops_add(flops, flops_mul(FLOPS_PER_BYTE, flops_add(bytes, weights / rows)))};
    /* The gradient of the inputs is another product of the same size, where anything before this wants it. */
    bool inputs = false;
    for (size_t k = 0; k < first->input_count; k++)
        inputs |= first->inputs[k] != MODEL_INPUT;
    uint64_t products = (uint64_t)inputs + (first->weight >= 0);
    cost.backward = flops_mul(products, cost.forward);
    /* Gradients are summed, sent, and weights come back. */
    cost.backward = flops_add(cost.backward, flops_mul(4 * FLOPS_PER_BYTE, weights / rows));
    return cost;
}

/* ---- stages by cost ---- */

static tally_status too_many(const struct stager *s, size_t runs, size_t operations)
{
    uint32_t chunks = s->pipeline->chunks;
    char times[48] = "";
    if (chunks > 1)
        snprintf(times, sizeof times, " of %u chunks", chunks);
    if (s->file)
        return spec_error(s->file, s->err, &s->pipeline->base, "stages", -1,
                          "found %u%s, expected at most %zu in all: the model has so many operations",
                          s->pipeline->stages, times, operations);
    return tally_fail(s->err, TALLY_EINVAL,
                      "parallel.pipeline.stages: %zu runs of layers, but the model has %zu operations", runs,
                      operations);
}

/* Operations as they are without any stages: where each begins, and what it costs. Returns how many. */
static size_t list_operations(const struct model *model, const uint32_t *readers, uint32_t *begin, uint64_t *costs)
{
    size_t n = 0;
    for (uint32_t i = 0; i < model->layer_count;) {
        struct kernel_op_desc desc;
        if (model->layers[i].type->view) {
            i++;
            continue;
        }
        uint32_t end = fuse_layers(model, readers, i, &desc);
        struct layers_cost cost = layers_cost(model, i, end);
        begin[n] = i;
        costs[n++] = flops_add(cost.forward, cost.backward);
        i = end;
    }
    return n;
}

static tally_status cut_by_cost(const struct stager *s, uint32_t stages, const uint32_t *begin, const uint64_t *costs,
                                size_t n, size_t *cuts)
{
    struct model *model = s->model;
    size_t runs = (size_t)stages * s->pipeline->chunks;
    if (runs > n)
        return too_many(s, runs, n);
    if (!balance_cut(costs, n, runs, cuts))
        return out_of_memory(s->err);
    for (size_t r = 0; r < runs; r++) {
        /* A view goes with what is before it. */
        uint32_t from = r == 0 ? 0 : begin[cuts[r]];
        uint32_t to = r + 1 == runs ? (uint32_t)model->layer_count : begin[cuts[r + 1]];
        for (uint32_t i = from; i < to; i++)
            model->layers[i].stage = (uint32_t)(r % stages);
    }
    return TALLY_OK;
}

static tally_status stages_by_cost(const struct stager *s, uint32_t stages)
{
    size_t layers = s->model->layer_count;
    uint32_t *readers = calloc(layers, sizeof *readers), *begin = calloc(layers, sizeof *begin);
    uint64_t *costs = calloc(layers, sizeof *costs);
    size_t *cuts = calloc(layers + 1, sizeof *cuts);
    tally_status status = readers && begin && costs && cuts ? TALLY_OK : out_of_memory(s->err);
    if (status == TALLY_OK) {
        count_readers(s->model, readers);
        size_t n = list_operations(s->model, readers, begin, costs);
        status = cut_by_cost(s, stages, begin, costs, n, cuts);
    }
    free(readers);
    free(begin);
    free(costs);
    free(cuts);
    return status;
}

/* ---- stages by placement ---- */

static tally_status fail_layer(const struct stager *s, const Tally__V1__Stage *stage, int item, const char *what)
{
    if (s->file)
        return spec_error(s->file, s->err, &stage->base, "layers", item, "layer '%s' %s", stage->layers[item], what);
    return tally_fail(s->err, TALLY_EINVAL, "parallel.pipeline.placement: layer '%s' %s", stage->layers[item], what);
}

static tally_status place_named(const struct stager *s, uint32_t *placed, uint32_t number)
{
    const Tally__V1__Stage *stage = s->pipeline->placement[number];
    for (size_t i = 0; i < stage->n_layers; i++) {
        size_t layer = 0;
        while (layer < s->model->layer_count && strcmp(s->model->layers[layer].name, stage->layers[i]) != 0)
            layer++;
        if (layer == s->model->layer_count)
            return fail_layer(s, stage, (int)i, "is not in the model");
        if (placed[layer])
            return fail_layer(s, stage, (int)i, "is placed already, expected each layer once");
        placed[layer] = number + 1;
    }
    return TALLY_OK;
}

/* A convolution and the pool that it takes in round in another order when they run apart, so they stay together, with
 * what lies between, wherever the pool was placed: no placement may change a bit. */
static tally_status keep_pools(const struct stager *s)
{
    struct model *model = s->model;
    uint32_t *readers = calloc(model->layer_count, sizeof *readers);
    uint32_t *stages = calloc(model->layer_count, sizeof *stages);
    tally_status status = readers && stages ? TALLY_OK : out_of_memory(s->err);
    if (status == TALLY_OK) {
        count_readers(model, readers);
        for (size_t i = 0; i < model->layer_count; i++) {
            stages[i] = model->layers[i].stage;
            model->layers[i].stage = 0; /* as without a pipeline */
        }
        for (uint32_t i = 0; i < model->layer_count;) {
            struct kernel_op_desc desc = {0};
            uint32_t end = model->layers[i].type->view ? i + 1 : fuse_layers(model, readers, i, &desc);
            bool pool = desc.kind == KERNEL_CONV2D && desc.conv2d.pool;
            for (uint32_t k = i + 1; k < end && pool; k++)
                stages[k] = stages[i];
            i = end;
        }
        for (size_t i = 0; i < model->layer_count; i++)
            model->layers[i].stage = stages[i];
    }
    free(readers);
    free(stages);
    return status;
}

static tally_status stages_by_placement(const struct stager *s)
{
    struct model *model = s->model;
    uint32_t *placed = calloc(model->layer_count, sizeof *placed), stage = 0; /* from 1; 0: not named */
    tally_status status = placed ? TALLY_OK : out_of_memory(s->err);
    for (uint32_t i = 0; i < s->pipeline->n_placement && status == TALLY_OK; i++)
        status = place_named(s, placed, i);
    for (size_t i = 0; i < model->layer_count && status == TALLY_OK; i++) {
        if (placed[i])
            stage = placed[i] - 1;
        model->layers[i].stage = stage;
    }
    free(placed);
    return status == TALLY_OK ? keep_pools(s) : status;
}

/* ---- segments ---- */

static tally_status empty_stage(const struct stager *s, uint32_t stage)
{
    if (s->file && s->pipeline->n_placement > stage)
        return spec_error(s->file, s->err, &s->pipeline->placement[stage]->base, NULL, -1,
                          "stage %u has nothing to compute: expected a layer that is no view (flatten) and no pool "
                          "computed with the convolution before it",
                          stage);
    return tally_fail(s->err, TALLY_EINVAL, "parallel.pipeline: stage %u has nothing to compute", stage);
}

static tally_status number_segments(const struct stager *s)
{
    struct model *model = s->model;
    bool used[MODEL_STAGES_MAX] = {false};
    uint32_t n = 0;
    model->segment_stage = calloc(model->layer_count, sizeof *model->segment_stage);
    if (!model->segment_stage)
        return out_of_memory(s->err);
    for (size_t i = 0; i < model->layer_count; i++) {
        struct layer *layer = &model->layers[i];
        if (!layer->type->view && (n == 0 || model->segment_stage[n - 1] != layer->stage)) {
            model->segment_stage[n++] = layer->stage;
            used[layer->stage] = true;
        }
        layer->segment = n == 0 ? 0 : n - 1;
    }
    model->segment_count = n;
    for (uint32_t stage = 0; stage < model->stage_count; stage++)
        if (!used[stage])
            return empty_stage(s, stage);
    return TALLY_OK;
}

tally_status stages_build(struct model *model, const Tally__V1__Pipeline *pipeline, const struct spec_file *file,
                          struct tally_error *err)
{
    struct stager s = {.model = model, .pipeline = pipeline, .file = file, .err = err};
    size_t stages = 1;
    if (pipeline && pipeline->n_placement > 0)
        stages = pipeline->n_placement;
    else if (pipeline && pipeline->has_stages)
        stages = pipeline->stages;
    if (stages == 0 || stages > MODEL_STAGES_MAX)
        return tally_fail(err, TALLY_EINVAL, "parallel.pipeline: %zu stages, expected 1 to %d", stages,
                          MODEL_STAGES_MAX);
    model->stage_count = (uint32_t)stages;
    tally_status status = TALLY_OK;
    if (stages > 1)
        status = pipeline->n_placement > 0 ? stages_by_placement(&s) : stages_by_cost(&s, (uint32_t)stages);
    return status == TALLY_OK ? number_segments(&s) : status;
}
