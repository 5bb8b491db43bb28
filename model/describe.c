/* The text of `tally plan`. */
#include "model/describe_build.h"

#include <inttypes.h>
#include <string.h>

#include "model/layer.h"
#include "model/plan_build.h"
#include "model/text_table.h"

static const struct plan_op *op_of_layer(const struct plan *plan, uint32_t layer)
{
    for (size_t i = 0; i < plan->op_count; i++)
        if (plan->ops[i].layer_begin <= layer && layer < plan->ops[i].layer_end)
            return &plan->ops[i];
    return NULL; /* a view */
}

/* As the rank of its stage in the first replica has it. */
static const char *formulation(const struct plan *const *plans, size_t op)
{
    const struct plan *plan = plans[plans[0]->segments[plans[0]->ops[op].segment].stage];
    return plan->kernels->formulation(plan->programs[0].ops[op]);
}

static void layer_row(struct text_table *table, const struct plan *const *plans, uint32_t i)
{
    const struct plan *plan = plans[0];
    const struct model *model = plan->model;
    const struct layer *layer = &model->layers[i];
    const struct plan_op *op = op_of_layer(plan, i);
    char in[96], out[96], count[32];
    size_t params = 0;
    if (layer->weight >= 0)
        params += model->params[layer->weight].shape.elements;
    if (layer->bias >= 0)
        params += model->params[layer->bias].shape.elements;
    text_table_row(table);
    text_table_cell(table, "%s", layer->name);
    text_table_cell(table, "%s", layer->type->kind);
    text_table_cell(table, "%s", shape_text(&layer->in, in, sizeof in));
    text_table_cell(table, "%s", shape_text(&layer->out, out, sizeof out));
    text_table_cell(table, "%s", params ? count_text(params, count, sizeof count) : "");
    text_table_cell(table, "%s", layer->forward_flops ? count_text(layer->forward_flops, count, sizeof count) : "");
    if (!op)
        text_table_cell(table, "a view");
    else if (op->layer_begin == i)
        text_table_cell(table, "%s", formulation(plans, (size_t)(op - plan->ops)));
    else
        text_table_cell(table, "with %s", model->layers[op->layer_begin].name);
}

static tally_status print_layers(FILE *out, const struct plan *const *plans, struct tally_error *err)
{
    const struct plan *plan = plans[0];
    static const char *const heads[] = {"LAYER",       "KIND",          "INPUT",    "OUTPUT",
                                        ">PARAMETERS", ">FLOPS/SAMPLE", "OPERATION"};
    const struct model *model = plan->model;
    struct text_table *table = text_table_new(heads, 7);
    char text[96], count[32];
    uint64_t flops = 0;
    if (!table)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a table");
    for (uint32_t i = 0; i < model->layer_count; i++) {
        layer_row(table, plans, i);
        flops = flops_add(flops, model->layers[i].forward_flops);
    }
    text_table_row(table);
    text_table_cell(table, "loss");
    text_table_cell(table, "%s", model->target_kind == DATASET_CLASSES ? "cross_entropy" : "mse_loss");
    text_table_cell(table, "%s", shape_text(&model->layers[model->layer_count - 1].out, text, sizeof text));
    for (int i = 0; i < 3; i++)
        text_table_cell(table, "%s", "");
    text_table_cell(table, "%s", formulation(plans, plan->op_count));
    text_table_row(table);
    text_table_cell(table, "total");
    for (int i = 0; i < 3; i++)
        text_table_cell(table, "%s", "");
    text_table_cell(table, "%s", count_text(model->param_elements, count, sizeof count));
    text_table_cell(table, "%s", count_text(flops, count, sizeof count));
    tally_status status = text_table_print(table, out, err);
    text_table_free(table);
    return status;
}

static void range_text(uint64_t begin, uint64_t end, char *text, size_t size)
{
    if (end <= begin)
        snprintf(text, size, "none");
    else if (end == begin + 1)
        snprintf(text, size, "%" PRIu64, begin);
    else
        snprintf(text, size, "%" PRIu64 "-%" PRIu64, begin, end - 1);
}

static uint32_t slice_at(const struct model *model, size_t offset)
{
    uint32_t low = 0, high = (uint32_t)model->slice_count - 1;
    while (low < high) {
        uint32_t mid = low + (high - low) / 2;
        if (model->slices[mid].offset + model->slices[mid].count <= offset)
            low = mid + 1;
        else
            high = mid;
    }
    return low;
}

static uint32_t shards_of(const struct plan *plan)
{
    const Tally__V1__Parallel *parallel = plan->model->spec->parallel;
    return parallel && parallel->shards > 0 ? parallel->shards : 1;
}

static tally_status print_params(FILE *out, const struct plan *plan, struct tally_error *err)
{
    static const char *const heads[] = {"PARAMETER", "SHAPE", ">OFFSET", "SLICES", "SHARDS"};
    const struct model *model = plan->model;
    struct text_table *table = text_table_new(heads, 5);
    char text[96];
    if (!table)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a table");
    for (size_t i = 0; i < model->param_count; i++) {
        const struct param *p = &model->params[i];
        uint32_t first = slice_at(model, p->offset), last = slice_at(model, p->offset + p->shape.elements - 1);
        text_table_row(table);
        text_table_cell(table, "%s", p->name);
        text_table_cell(table, "%s", shape_text(&p->shape, text, sizeof text));
        text_table_cell(table, "%s", count_text(p->offset, text, sizeof text));
        range_text(first, (uint64_t)last + 1, text, sizeof text);
        text_table_cell(table, "%s", text);
        range_text(model_slice_shard(model, shards_of(plan), first),
                   (uint64_t)model_slice_shard(model, shards_of(plan), last) + 1, text, sizeof text);
        text_table_cell(table, "%s", text);
    }
    tally_status status = text_table_print(table, out, err);
    text_table_free(table);
    return status;
}

static tally_status print_shards(FILE *out, const struct plan *plan, struct tally_error *err)
{
    static const char *const heads[] = {"SHARD", "SLICES", ">WEIGHTS x2", ">MOMENTUM x2", ">PENDING", ">MEMORY"};
    struct text_table *table = text_table_new(heads, 6);
    char text[96];
    if (!table)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a table");
    for (uint32_t s = 0; s < shards_of(plan); s++) {
        struct shard_memory m = plan_shard_memory(plan->model, shards_of(plan), s);
        uint32_t begin, end;
        model_shard_slices(plan->model, shards_of(plan), s, &begin, &end);
        text_table_row(table);
        text_table_cell(table, "s%u", s);
        range_text(begin, end, text, sizeof text);
        text_table_cell(table, "%s", text);
        text_table_cell(table, "%s", bytes_text(m.weights, text, sizeof text));
        text_table_cell(table, "%s", bytes_text(m.momentum, text, sizeof text));
        text_table_cell(table, "%s", bytes_text(m.pending, text, sizeof text));
        text_table_cell(table, "%s", bytes_text(m.total, text, sizeof text));
    }
    tally_status status = text_table_print(table, out, err);
    text_table_free(table);
    return status;
}

static void cover_text(const struct tree_node *cover, size_t nodes, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < nodes && used < size; i++) {
        char range[48];
        range_text(cover[i].begin, cover[i].end, range, sizeof range);
        int n = snprintf(text + used, size - used, "%s%s", i ? ", " : "", range);
        used += n > 0 ? (size_t)n : 0;
    }
}

static tally_status print_workers(FILE *out, const struct plan *const *plans, struct tally_error *err)
{
    static const char *const heads[] = {"WORKER",       "MICRO-BATCHES", "SUMS SENT", ">WEIGHTS", ">GRADIENTS",
                                        ">ACTIVATIONS", ">WORKSPACE",    ">MEMORY",   "STAGE"};
    const struct plan *plan = plans[0];
    bool pipeline = plan->mesh.pipeline > 1;
    struct step_shape step = batches_step(&plan->batches, 1);
    struct text_table *table = text_table_new(heads, pipeline ? 9 : 8);
    char text[TEXT_TABLE_CELL_MAX + 1];
    if (!table)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a table");
    for (uint32_t rank = 0; rank < plan->mesh.data * plan->mesh.pipeline; rank++) {
        struct plan other = describe_rank(plans[rank], rank);
        struct plan_memory m = plan_memory(&other);
        struct tree_node cover[TREE_COVER_MAX], mine = tree_share(step.leaves, other.data_index, plan->mesh.data);
        size_t nodes = tree_cover(step.leaves, mine.begin, mine.end, cover);
        text_table_row(table);
        text_table_cell(table, "w%u", rank);
        range_text(mine.begin, mine.end, text, sizeof text);
        text_table_cell(table, "%s", text);
        cover_text(cover, nodes, text, sizeof text);
        text_table_cell(table, "%s", text);
        text_table_cell(table, "%s", bytes_text(m.weights, text, sizeof text));
        text_table_cell(table, "%s", bytes_text(m.gradients, text, sizeof text));
        text_table_cell(table, "%s", bytes_text(m.activations + m.activation_gradients, text, sizeof text));
        text_table_cell(table, "%s", bytes_text(m.workspace, text, sizeof text));
        text_table_cell(table, "%s", bytes_text(m.total, text, sizeof text));
        if (pipeline)
            text_table_cell(table, "%u", other.stage);
    }
    tally_status status = text_table_print(table, out, err);
    text_table_free(table);
    return status;
}

/* "4 micro-batches of 16" or "3 micro-batches of 16, the last of 8" */
static void print_cut(FILE *out, uint64_t samples, uint32_t rows, uint32_t leaves)
{
    uint64_t last = samples - (uint64_t)(leaves - 1) * rows;
    if (leaves == 1)
        fprintf(out, "1 micro-batch of %" PRIu64, last);
    else
        fprintf(out, "%u micro-batches of %u", leaves, rows);
    if (leaves > 1 && last != rows)
        fprintf(out, ", the last of %" PRIu64, last);
}

static void print_steps(FILE *out, const struct plan *plan)
{
    const struct batches *b = &plan->batches;
    struct step_shape first = batches_step(b, 1);
    fprintf(out, "%" PRIu64 " steps, %" PRIu64 " in an epoch of %" PRIu64 " samples. A step: %u samples, ", b->steps,
            b->epoch_steps, b->samples, first.samples);
    print_cut(out, first.samples, b->micro, first.leaves);
    if (b->steps >= b->epoch_steps) {
        struct step_shape last = batches_step(b, b->epoch_steps);
        if (last.samples != first.samples) {
            fprintf(out, "; the last of an epoch: %u samples, ", last.samples);
            print_cut(out, last.samples, b->micro, last.leaves);
        }
    }
    fprintf(out, "\n");
    if (plan->evaluation.leaves > 0) {
        fprintf(out, "An evaluation: %" PRIu64 " samples, ", plan->evaluation.samples);
        print_cut(out, plan->evaluation.samples, plan->evaluation.rows, plan->evaluation.leaves);
        fprintf(out, "\n");
    }
}

tally_status describe_plan(FILE *out, const struct plan *const *plans, struct tally_error *err)
{
    const struct plan *plan = plans[0];
    const struct model *model = plan->model;
    const struct mesh *m = &plan->mesh;
    char count[32], bytes[32];
    fprintf(out, "%s: %s parameters (%s) in %zu slice%s; %u worker%s, %u shard%s; backend %s, %s\n\n",
            model->spec->name ? model->spec->name : "job", count_text(model->param_elements, count, sizeof count),
            bytes_text(model->flat_count * sizeof(float), bytes, sizeof bytes), model->slice_count,
            model->slice_count == 1 ? "" : "s", m->data * m->pipeline * m->tensor,
            m->data * m->pipeline * m->tensor == 1 ? "" : "s", shards_of(plan), shards_of(plan) == 1 ? "" : "s",
            plan->kernels->name, plan->kernels->isa(plan->backend));
    tally_status status = print_layers(out, plans, err);
    fputc('\n', out);
    if (status == TALLY_OK)
        status = print_params(out, plan, err);
    fputc('\n', out);
    print_steps(out, plan);
    fputc('\n', out);
    if (status == TALLY_OK && m->pipeline > 1) {
        status = describe_stages(out, plan, err);
        fputc('\n', out);
    }
    if (status == TALLY_OK)
        status = print_workers(out, plans, err);
    fputc('\n', out);
    if (status == TALLY_OK)
        status = print_shards(out, plan, err);
    if (status == TALLY_OK && ferror(out))
        status = tally_fail(err, TALLY_EIO, "the plan could not be written");
    return status;
}
