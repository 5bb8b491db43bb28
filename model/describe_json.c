/* A plan as JSON, for programs. */
#include <jansson.h>

#include "model/describe.h"
#include "model/layer.h"
#include "model/plan_build.h"

static json_t *shape_json(const struct shape *shape)
{
    json_t *list = json_array();
    for (size_t i = 0; i < shape->ndim; i++)
        json_array_append_new(list, json_integer((json_int_t)shape->dim[i]));
    return list;
}

static json_t *count_json(uint64_t count)
{
    return json_integer(count > INT64_MAX ? INT64_MAX : (json_int_t)count);
}

static json_t *range_json(uint64_t begin, uint64_t end)
{
    return json_pack("[I, I]", (json_int_t)begin, (json_int_t)end);
}

static json_t *layers_json(const struct model *model)
{
    json_t *list = json_array();
    for (size_t i = 0; i < model->layer_count; i++) {
        const struct layer *layer = &model->layers[i];
        json_t *inputs = json_array(), *params = json_array();
        for (size_t k = 0; k < layer->input_count; k++)
            json_array_append_new(
                inputs, json_string(layer->inputs[k] == MODEL_INPUT ? "input" : model->layers[layer->inputs[k]].name));
        for (size_t p = 0; p < model->param_count; p++)
            if (model->params[p].layer == i)
                json_array_append_new(params, json_pack("{s:s, s:o, s:I}", "name", model->params[p].name, "shape",
                                                        shape_json(&model->params[p].shape), "offset",
                                                        (json_int_t)model->params[p].offset));
        json_array_append_new(list, json_pack("{s:s, s:s, s:o, s:o, s:o, s:o, s:o}", "name", layer->name, "kind",
                                              layer->type->kind, "from", inputs, "input", shape_json(&layer->in),
                                              "output", shape_json(&layer->out), "parameters", params, "forward_flops",
                                              count_json(layer->forward_flops)));
    }
    return list;
}

static json_t *operations_json(const struct plan *plan)
{
    json_t *list = json_array();
    for (size_t i = 0; i <= plan->op_count; i++) {
        const struct plan_op *op = &plan->ops[i];
        json_t *layers = json_array();
        for (uint32_t l = op->layer_begin; l < op->layer_end; l++)
            json_array_append_new(layers, json_string(plan->model->layers[l].name));
        if (i == plan->op_count)
            json_array_append_new(layers, json_string("loss"));
        json_array_append_new(list, json_pack("{s:o, s:s, s:I}", "layers", layers, "formulation",
                                              plan->kernels->formulation(plan->programs[0].ops[i]), "parts",
                                              (json_int_t)op->part_count));
    }
    return list;
}

static json_t *slices_json(const struct plan *plan, uint32_t shards)
{
    json_t *list = json_array();
    for (uint32_t s = 0; s < plan->model->slice_count; s++) {
        const struct slice *slice = &plan->model->slices[s];
        struct slice_source source = plan_slice_source(plan, s);
        json_array_append_new(list, json_pack("{s:I, s:I, s:i, s:i, s:i}", "offset", (json_int_t)slice->offset, "count",
                                              (json_int_t)slice->count, "shard",
                                              (int)model_slice_shard(plan->model, shards, s), "operation",
                                              (int)source.op, "part", (int)source.part));
    }
    return list;
}

static json_t *workers_json(const struct plan *plan)
{
    json_t *list = json_array();
    struct step_shape step = batches_step(&plan->batches, 1);
    for (uint32_t rank = 0; rank < plan->mesh.data; rank++) {
        struct plan other = *plan;
        other.rank = other.data_index = rank;
        other.levels = plan_levels(&other);
        struct plan_memory m = plan_memory(&other);
        struct tree_node cover[TREE_COVER_MAX], mine = tree_share(step.leaves, rank, plan->mesh.data);
        size_t nodes = tree_cover(step.leaves, mine.begin, mine.end, cover);
        json_t *sums = json_array();
        for (size_t i = 0; i < nodes; i++)
            json_array_append_new(sums, range_json(cover[i].begin, cover[i].end));
        json_t *memory = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "weights", (json_int_t)m.weights, "gradients",
                                   (json_int_t)m.gradients, "activations", (json_int_t)m.activations,
                                   "activation_gradients", (json_int_t)m.activation_gradients, "workspace",
                                   (json_int_t)m.workspace, "total", (json_int_t)m.total);
        json_array_append_new(list, json_pack("{s:i, s:o, s:o, s:o}", "rank", (int)rank, "micro_batches",
                                              range_json(mine.begin, mine.end), "sums", sums, "memory", memory));
    }
    return list;
}

static json_t *shards_json(const struct plan *plan, uint32_t shards)
{
    json_t *list = json_array();
    for (uint32_t s = 0; s < shards; s++) {
        uint32_t begin, end;
        struct shard_memory m = plan_shard_memory(plan->model, shards, s);
        model_shard_slices(plan->model, shards, s, &begin, &end);
        json_t *memory =
            json_pack("{s:I, s:I, s:I, s:I}", "weights", (json_int_t)m.weights, "momentum", (json_int_t)m.momentum,
                      "pending", (json_int_t)m.pending, "total", (json_int_t)m.total);
        json_array_append_new(
            list, json_pack("{s:i, s:o, s:o}", "shard", (int)s, "slices", range_json(begin, end), "memory", memory));
    }
    return list;
}

tally_status describe_plan_json(const struct plan *plan, json_t **ret_json, struct tally_error *err)
{
    const struct model *model = plan->model;
    const Tally__V1__Parallel *parallel = model->spec->parallel;
    uint32_t shards = parallel && parallel->shards > 0 ? parallel->shards : 1;
    const struct batches *b = &plan->batches;
    json_t *root = json_pack("{s:s, s:s, s:s}", "job", model->spec->name ? model->spec->name : "job", "backend",
                             plan->kernels->name, "isa", plan->kernels->isa(plan->backend));
    if (!root)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for the plan's JSON");
    int failed = 0;
    failed |= json_object_set_new(root, "mesh",
                                  json_pack("{s:i, s:i, s:i}", "data", (int)plan->mesh.data, "pipeline",
                                            (int)plan->mesh.pipeline, "tensor", (int)plan->mesh.tensor));
    failed |= json_object_set_new(root, "parameters", count_json(model->param_elements));
    failed |= json_object_set_new(root, "input", shape_json(&model->input));
    failed |= json_object_set_new(root, "layers", layers_json(model));
    failed |= json_object_set_new(root, "operations", operations_json(plan));
    failed |= json_object_set_new(root, "slices", slices_json(plan, shards));
    failed |= json_object_set_new(root, "steps",
                                  json_pack("{s:I, s:I, s:I, s:i, s:i}", "count", (json_int_t)b->steps, "in_epoch",
                                            (json_int_t)b->epoch_steps, "samples", (json_int_t)b->samples, "batch",
                                            (int)b->batch, "micro_batch", (int)b->micro));
    failed |=
        json_object_set_new(root, "evaluation",
                            json_pack("{s:I, s:i, s:i}", "samples", (json_int_t)plan->evaluation.samples, "micro_batch",
                                      (int)plan->evaluation.rows, "micro_batches", (int)plan->evaluation.leaves));
    failed |= json_object_set_new(root, "workers", workers_json(plan));
    failed |= json_object_set_new(root, "shards", shards_json(plan, shards));
    if (failed) {
        json_decref(root);
        return tally_fail(err, TALLY_ENOMEM, "out of memory for the plan's JSON");
    }
    *ret_json = root;
    return TALLY_OK;
}
