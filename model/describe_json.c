/* A plan as JSON, for programs. */
#include <jansson.h>

#include "model/describe_build.h"
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

static json_t *operations_json(const struct plan *const *plans)
{
    const struct plan *plan = plans[0];
    json_t *list = json_array();
    for (size_t i = 0; i <= plan->op_count; i++) {
        const struct plan_op *op = &plan->ops[i];
        uint32_t stage = plan->segments[op->segment].stage;
        json_t *layers = json_array();
        for (uint32_t l = op->layer_begin; l < op->layer_end; l++)
            json_array_append_new(layers, json_string(plan->model->layers[l].name));
        if (i == plan->op_count)
            json_array_append_new(layers, json_string("loss"));
        json_array_append_new(list, json_pack("{s:o, s:i, s:i, s:s, s:I}", "layers", layers, "stage", (int)stage,
                                              "segment", (int)op->segment, "formulation",
                                              plan->kernels->formulation(plans[stage]->programs[0].ops[i]), "parts",
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

/* null: no pipeline */
static json_t *pipeline_json(const struct plan *plan, tally_status *ret_status, struct tally_error *err)
{
    struct described_schedule d;
    if (plan->mesh.pipeline == 1)
        return json_null();
    *ret_status = described_schedule_open(plan, &d, err);
    if (*ret_status != TALLY_OK)
        return NULL;
    json_t *stages = json_array();
    for (uint32_t s = 0; s < plan->mesh.pipeline; s++)
        json_array_append_new(stages, json_pack("{s:i, s:f, s:f, s:i}", "stage", (int)s, "cost_share",
                                                described_share(plan, &d, s), "idle", described_idle(&d, s),
                                                "in_flight", (int)d.report->stage[s].micro_batches));
    json_t *edges = json_array();
    for (size_t i = 0; i < plan->edge_count; i++) {
        const struct plan_edge *e = &plan->edges[i];
        json_array_append_new(edges,
                              json_pack("{s:s, s:i, s:i, s:I}", "direction", e->backward ? "backward" : "forward",
                                        "from_segment", (int)e->from, "to_segment", (int)e->to, "elements",
                                        (json_int_t)plan->tensors[e->tensor].elements));
    }
    json_t *root =
        json_pack("{s:s, s:i, s:f, s:o, s:o}", "schedule", schedule_kind_text(plan->schedule), "micro_batches",
                  (int)d.schedule->micro_batches, "bubble", d.report->bubble, "stages", stages, "edges", edges);
    described_schedule_free(&d);
    return root;
}

static json_t *workers_json(const struct plan *const *plans)
{
    const struct plan *plan = plans[0];
    json_t *list = json_array();
    struct step_shape step = batches_step(&plan->batches, 1);
    for (uint32_t rank = 0; rank < plan->mesh.data * plan->mesh.pipeline; rank++) {
        struct plan other = describe_rank(plans[rank], rank);
        struct plan_memory m = plan_memory(&other);
        struct tree_node cover[TREE_COVER_MAX], mine = tree_share(step.leaves, other.data_index, plan->mesh.data);
        size_t nodes = tree_cover(step.leaves, mine.begin, mine.end, cover);
        json_t *sums = json_array();
        for (size_t i = 0; i < nodes; i++)
            json_array_append_new(sums, range_json(cover[i].begin, cover[i].end));
        json_t *memory = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I}", "weights", (json_int_t)m.weights, "gradients",
                                   (json_int_t)m.gradients, "activations", (json_int_t)m.activations,
                                   "activation_gradients", (json_int_t)m.activation_gradients, "workspace",
                                   (json_int_t)m.workspace, "total", (json_int_t)m.total);
        json_array_append_new(list, json_pack("{s:i, s:i, s:o, s:o, s:o}", "rank", (int)rank, "stage", (int)other.stage,
                                              "micro_batches", range_json(mine.begin, mine.end), "sums", sums, "memory",
                                              memory));
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

tally_status describe_plan_json(const struct plan *const *plans, json_t **ret_json, struct tally_error *err)
{
    const struct plan *plan = plans[0];
    tally_status status = TALLY_OK;
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
    failed |= json_object_set_new(root, "operations", operations_json(plans));
    failed |= json_object_set_new(root, "slices", slices_json(plan, shards));
    failed |= json_object_set_new(root, "steps",
                                  json_pack("{s:I, s:I, s:I, s:i, s:i}", "count", (json_int_t)b->steps, "in_epoch",
                                            (json_int_t)b->epoch_steps, "samples", (json_int_t)b->samples, "batch",
                                            (int)b->batch, "micro_batch", (int)b->micro));
    failed |=
        json_object_set_new(root, "evaluation",
                            json_pack("{s:I, s:i, s:i}", "samples", (json_int_t)plan->evaluation.samples, "micro_batch",
                                      (int)plan->evaluation.rows, "micro_batches", (int)plan->evaluation.leaves));
    json_t *pipeline = pipeline_json(plan, &status, err);
    if (status != TALLY_OK) {
        json_decref(root);
        return status;
    }
    failed |= json_object_set_new(root, "pipeline", pipeline);
    failed |= json_object_set_new(root, "workers", workers_json(plans));
    failed |= json_object_set_new(root, "shards", shards_json(plan, shards));
    if (failed) {
        json_decref(root);
        return tally_fail(err, TALLY_ENOMEM, "out of memory for the plan's JSON");
    }
    *ret_json = root;
    return TALLY_OK;
}
