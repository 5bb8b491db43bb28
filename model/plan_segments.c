/* The operations cut by stage: segments, what crosses between them, and where this rank has what. */
#include <stdlib.h>

#include "model/plan_build.h"

static tally_status out_of_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "out of memory for the plan");
}

/* ---- segments ---- */

static void list_segments(struct plan *plan)
{
    bool pipeline = plan->mesh.pipeline > 1;
    for (size_t i = 0; i <= plan->op_count; i++) {
        struct plan_op *op = &plan->ops[i];
        struct plan_segment *last = plan->segment_count ? &plan->segments[plan->segment_count - 1] : NULL;
        /* The loss goes with the last operation. */
        uint32_t stage = pipeline && i < plan->op_count ? plan->model->layers[op->layer_begin].stage : 0;
        if (!last || (i < plan->op_count && last->stage != stage)) {
            last = &plan->segments[plan->segment_count++];
            *last = (struct plan_segment){.stage = stage, .op_begin = i, .slots = 1};
        }
        last->op_end = i + 1;
        last->backward |= op->backward;
        op->segment = plan->segment_count - 1;
    }
}

/* Slices lie in the order of the layers, and so of the segments; none is of two. */
static tally_status share_slices(struct plan *plan, struct tally_error *err)
{
    const struct model *model = plan->model;
    uint32_t s = 0;
    plan->slice_offsets = calloc(model->slice_count + 1, sizeof *plan->slice_offsets);
    if (!plan->slice_offsets)
        return out_of_memory(err);
    for (uint32_t k = 0; k < plan->segment_count; k++) {
        struct plan_segment *segment = &plan->segments[k];
        size_t last = segment->op_end <= plan->op_count ? segment->op_end - 1 : plan->op_count - 1;
        uint32_t layer_end = plan->ops[last].layer_end;
        segment->slice_begin = s;
        for (; s < model->slice_count && model->params[model->slices[s].param_begin].layer < layer_end; s++) {
            plan->slice_offsets[s] = plan_owns(plan, k) ? plan->flat_count : SIZE_MAX;
            plan->flat_count += plan_owns(plan, k) ? model->slices[s].count : 0;
            if (model->params[model->slices[s].param_end - 1].layer >= layer_end)
                return tally_fail(err, TALLY_EINTERNAL, "slice %u has parameters of two segments", s);
        }
        segment->slice_end = s;
    }
    if (s != model->slice_count)
        return tally_fail(err, TALLY_EINTERNAL, "%u of %zu slices are some segment's", s, model->slice_count);
    return TALLY_OK;
}

/* Where a parameter begins in this rank's vector. */
static size_t param_offset(const struct plan *plan, const struct plan_segment *segment, int32_t param)
{
    if (param < 0)
        return SIZE_MAX;
    return plan->model->params[param].offset - plan->model->slices[segment->slice_begin].offset +
           plan->slice_offsets[segment->slice_begin];
}

static void place_params(struct plan *plan)
{
    for (size_t i = 0; i <= plan->op_count; i++) {
        struct plan_op *op = &plan->ops[i];
        op->weight_offset = op->bias_offset = SIZE_MAX;
        if (!plan_owns(plan, op->segment))
            continue;
        op->weight_offset = param_offset(plan, &plan->segments[op->segment], op->weight);
        op->bias_offset = param_offset(plan, &plan->segments[op->segment], op->bias);
    }
}

/* ---- tensors ---- */

/* What happens to one tensor, by segment. */
struct uses {
    uint32_t maker; /* segment; PLAN_NOWHERE: the model's input */
    bool *reads;    /* by segment */
    bool *touches;  /* by segment: has a part in its gradient, or takes it */
    size_t *op;     /* by segment that touches: the first operation that does, which backward comes to last */
};

static void collect_uses(const struct plan *plan, int32_t tensor, struct uses *uses)
{
    uses->maker = PLAN_NOWHERE;
    for (uint32_t k = 0; k < plan->segment_count; k++)
        uses->reads[k] = uses->touches[k] = false;
    for (size_t i = plan->op_count + 1; i-- > 0;) {
        const struct plan_op *op = &plan->ops[i];
        bool makes = op->output == tensor, touches = makes && plan->tensors[tensor].grad_offset != SIZE_MAX;
        if (makes)
            uses->maker = op->segment;
        for (size_t k = 0; k < op->input_count; k++)
            if (plan_root(plan, op->inputs[k]) == tensor) {
                uses->reads[op->segment] = true;
                touches |= op->input_grad[k];
            }
        if (touches) {
            uses->touches[op->segment] = true;
            uses->op[op->segment] = i;
        }
    }
}

static tally_status add_edge(struct plan *plan, size_t *capacity, struct plan_edge edge, struct tally_error *err)
{
    if (plan->edge_count == *capacity) {
        size_t more = *capacity ? 2 * *capacity : 16;
        struct plan_edge *edges = reallocarray(plan->edges, more, sizeof *edges);
        if (!edges)
            return out_of_memory(err);
        plan->edges = edges;
        *capacity = more;
    }
    plan->edges[plan->edge_count++] = edge;
    return TALLY_OK;
}

static bool stage_has_it(const struct plan *plan, const struct uses *uses, uint32_t before, uint32_t stage)
{
    if (plan->segments[uses->maker].stage == stage)
        return true;
    for (uint32_t k = 0; k < before; k++)
        if (uses->reads[k] && plan->segments[k].stage == stage)
            return true;
    return false;
}

static tally_status list_edges(struct plan *plan, int32_t tensor, const struct uses *uses, size_t *capacity,
                               struct tally_error *err)
{
    tally_status status = TALLY_OK;
    uint32_t later = PLAN_NOWHERE;
    if (uses->maker == PLAN_NOWHERE) /* whoever reads the model's input has the data */
        return TALLY_OK;
    for (uint32_t k = 0; k < plan->segment_count && status == TALLY_OK; k++)
        if (uses->reads[k] && !stage_has_it(plan, uses, k, plan->segments[k].stage))
            status = add_edge(plan, capacity, (struct plan_edge){.tensor = tensor, .from = uses->maker, .to = k}, err);
    for (uint32_t k = plan->segment_count; k-- > 0 && status == TALLY_OK;) {
        if (!uses->touches[k])
            continue;
        if (later != PLAN_NOWHERE && plan->segments[later].stage != plan->segments[k].stage)
            status = add_edge(
                plan, capacity,
                (struct plan_edge){.backward = true, .tensor = tensor, .from = later, .to = k, .op = uses->op[later]},
                err);
        later = k;
    }
    return status;
}

static void find_home(struct plan *plan, struct plan_tensor *tensor, const struct uses *uses)
{
    uint32_t touching = 0, mine = 0;
    tensor->home = tensor->grad_home = PLAN_NOWHERE;
    for (uint32_t k = plan->segment_count; k-- > 0;) {
        if (plan_owns(plan, k) && (uses->reads[k] || uses->maker == k))
            tensor->home = k; /* the first */
        touching += uses->touches[k];
        if (uses->touches[k] && plan_owns(plan, k)) {
            tensor->grad_home = k;
            mine++;
        }
    }
    if (mine == 0)
        tensor->gradient = PLAN_GRADIENT_NONE;
    else if (touching == 1)
        tensor->gradient = PLAN_GRADIENT_SHARED;
    else
        tensor->gradient = mine == 1 ? PLAN_GRADIENT_EDGE : PLAN_GRADIENT_SEGMENT;
    if (mine == 0)
        tensor->grad_offset = SIZE_MAX;
}

static tally_status cut_tensors(struct plan *plan, struct tally_error *err)
{
    struct uses uses = {.reads = calloc(plan->segment_count, sizeof *uses.reads),
                        .touches = calloc(plan->segment_count, sizeof *uses.touches),
                        .op = calloc(plan->segment_count, sizeof *uses.op)};
    tally_status status = uses.reads && uses.touches && uses.op ? TALLY_OK : out_of_memory(err);
    size_t capacity = 0;
    for (size_t t = 0; t < plan->tensor_count && status == TALLY_OK; t++) {
        struct plan_tensor *tensor = &plan->tensors[t];
        if (tensor->view_of >= 0)
            continue;
        collect_uses(plan, (int32_t)t, &uses);
        status = list_edges(plan, (int32_t)t, &uses, &capacity, err);
        find_home(plan, tensor, &uses);
    }
    free(uses.reads);
    free(uses.touches);
    free(uses.op);
    return status;
}

tally_status plan_cut_segments(struct plan *plan, struct tally_error *err)
{
    plan->segments = calloc(plan->op_count + 1, sizeof *plan->segments);
    if (!plan->segments)
        return out_of_memory(err);
    list_segments(plan);
    tally_status status = share_slices(plan, err);
    if (status != TALLY_OK)
        return status;
    place_params(plan);
    return cut_tensors(plan, err);
}
