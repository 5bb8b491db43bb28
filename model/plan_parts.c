/* Which part of which operation's backward completes a slice. */
#include <stdlib.h>

#include "model/plan_build.h"

/* The rows (first dimension) of a parameter that must be there before what the slice holds of it is whole: [0, this).
 */
static size_t rows_until(const struct param *param, const struct slice *slice)
{
    size_t row = param->shape.elements / param->shape.dim[0];
    size_t end = slice->offset + slice->count, param_end = param->offset + param->shape.elements;
    if (end > param_end)
        end = param_end;
    return (end - param->offset + row - 1) / row;
}

static uint32_t first_slice_of(const struct model *model, uint32_t param)
{
    size_t low = 0, high = model->slice_count; /* the first that ends behind the parameter's start */
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (model->slices[mid].offset + model->slices[mid].count <= model->params[param].offset)
            low = mid + 1;
        else
            high = mid;
    }
    return (uint32_t)low;
}

static tally_status cut_parts(struct plan_op *op, const struct model *model, struct tally_error *err)
{
    const struct param *weight = &model->params[op->weight];
    uint32_t first = first_slice_of(model, (uint32_t)op->weight), end = first;
    while (end < model->slice_count && model->slices[end].offset < weight->offset + weight->shape.elements)
        end++;
    op->part_rows = calloc((size_t)(end - first) + 1, sizeof *op->part_rows);
    if (!op->part_rows)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for the plan");
    for (uint32_t s = first; s < end; s++) {
        size_t rows = rows_until(weight, &model->slices[s]);
        if (rows > op->part_rows[op->part_count]) /* several slices may lie in one row */
            op->part_rows[++op->part_count] = rows;
    }
    return TALLY_OK;
}

tally_status plan_cut_parts(struct plan *plan, struct tally_error *err)
{
    tally_status status = TALLY_OK;
    for (size_t i = 0; i < plan->op_count && status == TALLY_OK; i++)
        if (plan->ops[i].weight >= 0)
            status = cut_parts(&plan->ops[i], plan->model, err);
    return status;
}

static uint32_t op_of_layer(const struct plan *plan, uint32_t layer)
{
    size_t low = 0, high = plan->op_count; /* the first that ends behind it: operations are in the layers' order */
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (plan->ops[mid].layer_end <= layer)
            low = mid + 1;
        else
            high = mid;
    }
    return (uint32_t)low;
}

static uint32_t part_of_rows(const struct plan_op *op, size_t rows)
{
    size_t low = 0, high = op->part_count - 1;
    while (low < high) {
        size_t mid = low + (high - low) / 2;
        if (op->part_rows[mid + 1] < rows)
            low = mid + 1;
        else
            high = mid;
    }
    return (uint32_t)low;
}

struct slice_source plan_slice_source(const struct plan *plan, uint32_t slice)
{
    const struct slice *s = &plan->model->slices[slice];
    struct slice_source source = {UINT32_MAX, 0};
    for (uint32_t p = s->param_begin; p < s->param_end; p++) {
        uint32_t op = op_of_layer(plan, plan->model->params[p].layer);
        uint32_t part = part_of_rows(&plan->ops[op], rows_until(&plan->model->params[p], s));
        /* Backward comes to the first operation last. */
        if (op < source.op || (op == source.op && part > source.part))
            source = (struct slice_source){op, part};
    }
    return source;
}
