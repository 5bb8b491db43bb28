/* Layers to operations: fusion, views, strides, and the flow of gradients. */
#include <stdlib.h>

#include "model/build.h"
#include "model/layer.h"
#include "model/plan_build.h"

struct lowering {
    struct plan *plan;
    const struct model *model;
    uint32_t *readers; /* of each layer, by layers */
    int32_t *tensor;   /* of each layer's output; -1: inside a fused operation */
    bool *compact;     /* by tensor with memory: rows may not be padded */
    bool *needs_grad;  /* by tensor with memory */
    struct tally_error *err;
};

static tally_status out_of_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "out of memory for the plan");
}

static int32_t tensor_of(const struct lowering *l, int32_t source)
{
    return source == MODEL_INPUT ? 0 : l->tensor[source];
}

static int32_t add_tensor(struct lowering *l, int32_t layer, int32_t view_of, size_t elements)
{
    struct plan *plan = l->plan;
    plan->tensors[plan->tensor_count] =
        (struct plan_tensor){.layer = layer, .view_of = view_of, .elements = elements, .grad_offset = SIZE_MAX};
    return (int32_t)plan->tensor_count++;
}

static tally_status op_inputs(struct lowering *l, struct plan_op *op, size_t n)
{
    op->input_count = n;
    op->inputs = calloc(n, sizeof *op->inputs);
    op->accumulate = calloc(n, sizeof *op->accumulate);
    op->input_grad = calloc(n, sizeof *op->input_grad);
    return op->inputs && op->accumulate && op->input_grad ? TALLY_OK : out_of_memory(l->err);
}

/* The operation that begins with layer *i; leaves *i at its last layer. */
static tally_status lower_op(struct lowering *l, uint32_t *i)
{
    const struct layer *layer = &l->model->layers[*i];
    struct plan_op *op = &l->plan->ops[l->plan->op_count++];
    *op = (struct plan_op){.layer_begin = *i, .weight = layer->weight, .bias = layer->bias};
    tally_status status = op_inputs(l, op, layer->input_count);
    if (status != TALLY_OK)
        return status;
    for (size_t k = 0; k < layer->input_count; k++)
        op->inputs[k] = tensor_of(l, layer->inputs[k]);
    op->layer_end = fuse_layers(l->model, l->readers, *i, &op->desc);
    op->rows_per_sample = op->desc.rows;
    *i = op->layer_end - 1;
    op->output = l->tensor[*i] = add_tensor(l, (int32_t)*i, -1, l->model->layers[*i].out.elements);
    return TALLY_OK;
}

static tally_status lower_layers(struct lowering *l)
{
    tally_status status = TALLY_OK;
    add_tensor(l, MODEL_INPUT, -1, l->model->input.elements);
    for (uint32_t i = 0; i < l->model->layer_count && status == TALLY_OK; i++) {
        const struct layer *layer = &l->model->layers[i];
        if (layer->type->view)
            l->tensor[i] =
                add_tensor(l, (int32_t)i, plan_root(l->plan, tensor_of(l, layer->inputs[0])), layer->out.elements);
        else
            status = lower_op(l, &i);
    }
    if (status != TALLY_OK)
        return status;
    struct plan_op *loss = &l->plan->ops[l->plan->op_count];
    *loss = (struct plan_op){.layer_begin = (uint32_t)l->model->layer_count,
                             .layer_end = (uint32_t)l->model->layer_count,
                             .output = -1,
                             .weight = -1,
                             .bias = -1,
                             .rows_per_sample = 1};
    l->plan->output = l->tensor[l->model->layer_count - 1];
    status = op_inputs(l, loss, 1);
    if (status != TALLY_OK)
        return status;
    loss->inputs[0] = l->plan->output;
    loss_lower(l->model, &loss->desc);
    return TALLY_OK;
}

/*
 * A product over the rows inside a sample walks from one sample into the next with one stride, so these samples lie
 * without padding between; and the inputs of an operation share one stride.
 */
static void choose_strides(struct lowering *l)
{
    struct plan *plan = l->plan;
    for (size_t i = 0; i < plan->op_count; i++) {
        const struct plan_op *op = &plan->ops[i];
        if (op->rows_per_sample > 1)
            l->compact[plan_root(plan, op->inputs[0])] = l->compact[op->output] = true;
    }
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < plan->op_count; i++) {
            const struct plan_op *op = &plan->ops[i];
            bool any = false, all = true;
            for (size_t k = 0; k < op->input_count; k++) {
                any |= l->compact[plan_root(plan, op->inputs[k])];
                all &= l->compact[plan_root(plan, op->inputs[k])];
            }
            for (size_t k = 0; any && k < op->input_count; k++)
                l->compact[plan_root(plan, op->inputs[k])] = true;
            changed |= any && !all;
        }
    }
    for (size_t t = 0; t < plan->tensor_count; t++) {
        struct plan_tensor *tensor = &plan->tensors[t];
        int32_t root = plan_root(plan, (int32_t)t); /* is before its views */
        if ((size_t)root == t)
            tensor->stride =
                l->compact[t] ? tensor->elements : plan->kernels->row_stride(plan->backend, tensor->elements);
        else
            tensor->stride = plan->tensors[root].stride;
    }
}

static void set_strides(struct plan *plan)
{
    for (size_t i = 0; i <= plan->op_count; i++) {
        struct plan_op *op = &plan->ops[i];
        size_t rows = op->rows_per_sample;
        op->desc.x_stride = plan->tensors[op->inputs[0]].stride / rows;
        if (op->output >= 0)
            op->desc.y_stride = plan->tensors[op->output].stride / rows;
    }
    plan->input_stride = plan->tensors[0].stride;
}

/* Backward goes through the operations from the loss to the first: whoever comes to a tensor's gradient first writes
 * it, the others add. */
static void flow_gradients(struct lowering *l, bool *written)
{
    struct plan *plan = l->plan;
    for (size_t i = 0; i < plan->op_count; i++) {
        struct plan_op *op = &plan->ops[i];
        op->backward = op->weight >= 0;
        for (size_t k = 0; k < op->input_count; k++) {
            op->input_grad[k] = l->needs_grad[plan_root(plan, op->inputs[k])];
            op->backward |= op->input_grad[k];
        }
        l->needs_grad[op->output] = op->backward;
    }
    struct plan_op *loss = &plan->ops[plan->op_count];
    loss->backward = loss->input_grad[0] = l->needs_grad[plan_root(plan, plan->output)];
    for (size_t i = plan->op_count + 1; i-- > 0;) {
        struct plan_op *op = &plan->ops[i];
        for (size_t k = 0; k < op->input_count; k++) {
            int32_t root = plan_root(plan, op->inputs[k]);
            plan->tensors[op->inputs[k]].readers++;
            if (root != op->inputs[k])
                plan->tensors[root].readers++;
            if (!op->input_grad[k])
                continue;
            op->accumulate[k] = written[root];
            written[root] = true;
            plan->tensors[root].grad_offset = 0; /* wanted; plan_place says where */
        }
    }
}

tally_status plan_lower(struct plan *plan, struct tally_error *err)
{
    const struct model *model = plan->model;
    size_t layers = model->layer_count, tensors = layers + 1;
    struct lowering l = {.plan = plan, .model = model, .err = err};
    bool *written = calloc(tensors, sizeof *written);
    plan->tensors = calloc(tensors, sizeof *plan->tensors);
    plan->ops = calloc(layers + 1, sizeof *plan->ops);
    l.readers = calloc(layers, sizeof *l.readers);
    l.tensor = calloc(layers, sizeof *l.tensor);
    l.compact = calloc(tensors, sizeof *l.compact);
    l.needs_grad = calloc(tensors, sizeof *l.needs_grad);
    tally_status status = TALLY_OK;
    if (!written || !plan->tensors || !plan->ops || !l.readers || !l.tensor || !l.compact || !l.needs_grad) {
        status = out_of_memory(err);
        goto out;
    }
    for (size_t i = 0; i < layers; i++)
        l.tensor[i] = -1;
    count_readers(model, l.readers);
    status = lower_layers(&l);
    if (status != TALLY_OK)
        goto out;
    choose_strides(&l);
    set_strides(plan);
    flow_gradients(&l, written);
out:
    free(written);
    free(l.readers);
    free(l.tensor);
    free(l.compact);
    free(l.needs_grad);
    return status;
}
