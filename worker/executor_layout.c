#include "worker/executor_layout.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

const struct plan_tensor *executor_tensor(const struct plan *plan, int32_t tensor)
{
    const struct plan_tensor *t = &plan->tensors[tensor];
    while (t->view_of >= 0)
        t = &plan->tensors[t->view_of];
    return t;
}

/* The slices that floats [begin, end) of the flat vector lie in. */
static struct slice_range slices_of(const struct model *model, size_t begin, size_t end)
{
    uint32_t low = 0, high = (uint32_t)model->slice_count;
    while (high - low > 1) {
        uint32_t middle = low + (high - low) / 2;
        if (model->slices[middle].offset <= begin)
            low = middle;
        else
            high = middle;
    }
    struct slice_range range = {low, low + 1};
    while (range.end < model->slice_count && model->slices[range.end].offset < end)
        range.end++;
    return range;
}

/* The slices of rows [begin, end) of a parameter. */
static struct slice_range rows_slices(const struct model *model, int32_t param, size_t begin, size_t end)
{
    const struct param *p = &model->params[param];
    size_t row = p->shape.elements / p->shape.dim[0];
    return slices_of(model, p->offset + begin * row, p->offset + end * row);
}

static void init_op(struct executor_layout *layout, const struct plan *plan, size_t index, size_t *part)
{
    const struct plan_op *op = &plan->ops[index];
    struct executor_op *out = &layout->ops[index];
    out->version = UINT64_MAX;
    out->part_begin = *part;
    if (!plan_owns(plan, op->segment))
        return;
    out->part_count = op->weight >= 0 ? op->part_count : 0;
    for (size_t i = 0; i < op->input_count; i++)
        out->wants_data |= op->input_grad[i];
    for (size_t i = 0; i < out->part_count; i++) {
        struct executor_part *p = &layout->parts[(*part)++];
        p->row_begin = op->part_rows[i];
        p->row_end = op->part_rows[i + 1];
        p->weight = rows_slices(plan->model, op->weight, p->row_begin, p->row_end);
        if (op->bias >= 0)
            p->bias = rows_slices(plan->model, op->bias, p->row_begin, p->row_end);
    }
    if (op->weight < 0)
        return;
    const struct param *w = &plan->model->params[op->weight];
    out->reads = slices_of(plan->model, w->offset, w->offset + w->shape.elements);
    if (op->bias >= 0) {
        const struct param *b = &plan->model->params[op->bias];
        struct slice_range bias = slices_of(plan->model, b->offset, b->offset + b->shape.elements);
        out->reads.begin = bias.begin < out->reads.begin ? bias.begin : out->reads.begin;
        out->reads.end = bias.end > out->reads.end ? bias.end : out->reads.end;
    }
}

/* The slices that a part completes. */
static uint32_t list_done(struct executor_layout *layout, const struct plan *plan, size_t op, size_t index,
                          uint32_t count)
{
    struct executor_part *part = &layout->parts[layout->ops[op].part_begin + index];
    const struct plan_segment *segment = &plan->segments[plan->ops[op].segment];
    part->done.begin = count;
    for (uint32_t s = segment->slice_begin; s < segment->slice_end; s++) {
        struct slice_source source = plan_slice_source(plan, s);
        if (source.op == op && source.part == index)
            layout->done_slices[count++] = s;
    }
    part->done.end = count;
    return count;
}

/* Sorts the slices by the part that completes them. */
static tally_status init_done(struct executor_layout *layout, const struct plan *plan, struct tally_error *err)
{
    uint32_t count = 0, mine = 0;
    for (size_t i = 0; i < plan->op_count; i++)
        for (size_t j = 0; j < layout->ops[i].part_count; j++)
            count = list_done(layout, plan, i, j, count);
    for (uint32_t k = 0; k < plan->segment_count; k++)
        mine += plan_owns(plan, k) ? plan->segments[k].slice_end - plan->segments[k].slice_begin : 0;
    if (count != mine)
        return tally_fail(err, TALLY_EINTERNAL, "the plan completes %u of %u slices", count, mine);
    return TALLY_OK;
}

/* Takes `times` pieces of `bytes` each; returns the first one's offset, and how far it is from one to the next. */
static size_t carve(struct executor_layout *layout, size_t bytes, size_t times, size_t *ret_stride, bool *overflow)
{
    size_t offset = layout->bytes, padded, all;
    if (__builtin_add_overflow(bytes, (size_t)63, &padded))
        *overflow = true;
    padded &= ~(size_t)63;
    if (__builtin_mul_overflow(padded, times, &all) || __builtin_add_overflow(offset, all, &layout->bytes))
        *overflow = true;
    if (ret_stride)
        *ret_stride = padded;
    return offset;
}

static tally_status place(struct executor_layout *layout, const struct plan *plan, struct tally_error *err)
{
    bool overflow = false;
    size_t flat;
    if (__builtin_mul_overflow(plan->flat_count, sizeof(float), &flat))
        overflow = true;
    layout->weights = carve(layout, flat, 1, NULL, &overflow);
    for (uint32_t k = 0; k < plan->segment_count; k++)
        if (plan_owns(plan, k))
            layout->blocks[k].offset = carve(layout, plan->segments[k].block_bytes, plan->segments[k].slots,
                                             &layout->blocks[k].stride, &overflow);
    layout->gradients = carve(layout, plan->gradient_bytes, 1, NULL, &overflow);
    layout->edges = carve(layout, plan->edge_bytes, 2, &layout->edge_stride, &overflow);
    layout->workspace = carve(layout, plan->workspace_bytes, 1, NULL, &overflow);
    layout->levels = carve(layout, flat, plan->levels ? plan->levels - 1 : 0, &layout->level_stride, &overflow);
    if (overflow)
        return tally_fail(err, TALLY_ENOMEM, "the model's buffers are larger than the address space");
    return TALLY_OK;
}

tally_status executor_layout_init(struct executor_layout *layout, const struct plan *plan, struct tally_error *err)
{
    memset(layout, 0, sizeof *layout);
    for (size_t i = 0; i < plan->op_count; i++)
        if (plan->ops[i].weight >= 0 && plan_owns(plan, plan->ops[i].segment))
            layout->part_count += plan->ops[i].part_count;
    layout->ops = calloc(plan->op_count + 1, sizeof *layout->ops);
    layout->parts = calloc(layout->part_count + 1, sizeof *layout->parts);
    layout->done_slices = calloc(plan->model->slice_count + 1, sizeof *layout->done_slices);
    layout->blocks = calloc(plan->segment_count, sizeof *layout->blocks);
    if (!layout->ops || !layout->parts || !layout->done_slices || !layout->blocks)
        return tally_fail(err, TALLY_ENOMEM, "no memory for the executor's tables");
    size_t part = 0;
    for (size_t i = 0; i <= plan->op_count; i++)
        init_op(layout, plan, i, &part);
    tally_status status = init_done(layout, plan, err);
    return status ? status : place(layout, plan, err);
}

void executor_layout_clear(struct executor_layout *layout)
{
    free(layout->ops);
    free(layout->parts);
    free(layout->done_slices);
    free(layout->blocks);
    memset(layout, 0, sizeof *layout);
}
