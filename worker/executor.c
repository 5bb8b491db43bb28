/*
 * DESIGN. One arena in the backend's memory holds the weights, a block of activations and targets for each micro-batch
 * in flight (slot), the activations' gradients (of one micro-batch at a time), the workspace and the gradient sums of
 * levels 1 and up of the tree; level 0 is where the transport wants it (T2). The arguments of every operation are
 * written once, when the executor is opened; a step changes only where gradients of parameters go.
 *
 * Backward of a leaf writes its gradient into the buffer of its level. When the last part that touches a slice has run,
 * the slice is added to the levels below as often as the action says, and leaves if the leaf completes a node that is
 * pushed.
 */
#include "worker/executor.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "worker/executor_layout.h"

struct executor {
    struct executor_inputs in;
    const struct plan *plan;
    const struct kernels *kernels;
    struct kernel_stream *stream;
    struct executor_layout layout;
    char *arena;
    struct kernel_args *args; /* [slot][op], the loss at [op_count] */
    float **level0;           /* by slice: the node's sum, while it is being computed; NULL: not asked for yet */
    struct kernel_loss *sums; /* by level */
    struct action *actions;   /* of a step of so many leaves */
    size_t action_count;
    uint32_t actions_leaves;     /* 0: none made yet */
    uint64_t epoch;              /* whose order is at hand; 0: none */
    const uint32_t *epoch_order; /* belongs to in.order */
    uint32_t *indices;           /* of an evaluation micro-batch */
    float *host_input;           /* staging where the backend's memory is not the host's */
    void *host_targets;
};

/* What a step's actions need to know. */
struct run {
    struct executor *ex;
    struct transport *transport;
    uint64_t step;
    struct step_shape shape;
    struct tally_error *err;
};

static float *block_floats(const struct executor *ex, uint32_t slot, size_t offset)
{
    return (float *)(ex->arena + ex->layout.activations + slot * ex->layout.activation_stride + offset);
}

static float *tensor_value(const struct executor *ex, uint32_t slot, int32_t tensor)
{
    return block_floats(ex, slot, executor_tensor(ex->plan, tensor)->value_offset);
}

static float *tensor_grad(const struct executor *ex, int32_t tensor)
{
    size_t offset = executor_tensor(ex->plan, tensor)->grad_offset;
    return offset == SIZE_MAX ? NULL : (float *)(ex->arena + ex->layout.gradients + offset);
}

static struct kernel_args *op_args(const struct executor *ex, uint32_t slot, size_t op)
{
    return &ex->args[slot * (ex->plan->op_count + 1) + op];
}

static void *slot_targets(const struct executor *ex, uint32_t slot)
{
    return block_floats(ex, slot, ex->plan->target_offset);
}

static struct kernel_loss *slot_loss(const struct executor *ex, uint32_t slot)
{
    return (struct kernel_loss *)block_floats(ex, slot, ex->plan->loss_offset);
}

static float *level_floats(const struct executor *ex, uint32_t level)
{
    assert(level > 0);
    return (float *)(ex->arena + ex->layout.levels + (level - 1) * ex->layout.level_stride);
}

static void init_args(struct executor *ex, uint32_t slot)
{
    const struct plan *plan = ex->plan;
    const float *weights = executor_weights(ex);
    for (size_t i = 0; i <= plan->op_count; i++) {
        const struct plan_op *op = &plan->ops[i];
        struct kernel_args *args = op_args(ex, slot, i);
        for (size_t j = 0; j < op->input_count; j++) {
            args->x[j] = tensor_value(ex, slot, op->inputs[j]);
            args->dx[j] = op->input_grad[j] ? tensor_grad(ex, op->inputs[j]) : NULL;
            args->dx_accumulate[j] = op->accumulate[j];
        }
        if (op->output >= 0) {
            args->y = tensor_value(ex, slot, op->output);
            args->dy = tensor_grad(ex, op->output);
        }
        args->weight = op->weight >= 0 ? weights + plan->model->params[op->weight].offset : NULL;
        args->bias = op->bias >= 0 ? weights + plan->model->params[op->bias].offset : NULL;
        args->saved = block_floats(ex, slot, op->saved_offset);
        args->workspace = ex->arena + ex->layout.workspace;
    }
    struct kernel_args *loss = op_args(ex, slot, plan->op_count);
    loss->targets = slot_targets(ex, slot);
    loss->loss = slot_loss(ex, slot);
}

static tally_status alloc_tables(struct executor *ex, struct tally_error *err)
{
    const struct plan *plan = ex->plan;
    ex->args = calloc(plan->slots * (plan->op_count + 1), sizeof *ex->args);
    ex->level0 = calloc(plan->model->slice_count + 1, sizeof *ex->level0);
    ex->sums = calloc((size_t)plan->levels + 1, sizeof *ex->sums);
    ex->actions = calloc(plan_actions_max(plan) + 1, sizeof *ex->actions);
    ex->indices = calloc(plan->rows_max, sizeof *ex->indices);
    bool ok = ex->args && ex->level0 && ex->sums && ex->actions && ex->indices;
    if (!ex->kernels->host_memory) {
        ex->host_input = calloc((size_t)plan->rows_max * plan->input_stride, sizeof *ex->host_input);
        ex->host_targets = calloc(1, plan->target_bytes);
        ok = ok && ex->host_input && ex->host_targets;
    }
    return ok ? TALLY_OK : tally_fail(err, TALLY_ENOMEM, "no memory for the executor's tables");
}

tally_status executor_open(const struct executor_inputs *inputs, struct executor **ret_executor,
                           struct tally_error *err)
{
    const struct plan *plan = inputs->plan;
    struct executor *ex = calloc(1, sizeof *ex);
    if (!ex)
        return tally_fail(err, TALLY_ENOMEM, "no memory for an executor");
    ex->in = *inputs;
    ex->plan = plan;
    ex->kernels = plan->kernels;
    void *arena = NULL;
    tally_status status = executor_layout_init(&ex->layout, plan, err);
    if (!status)
        status = alloc_tables(ex, err);
    if (!status)
        status = ex->kernels->stream_open(plan->backend, &ex->stream, err);
    if (!status)
        status = ex->kernels->alloc(plan->backend, ex->layout.bytes, &arena, err);
    if (status) {
        executor_close(ex);
        return status;
    }
    ex->arena = arena;
    for (uint32_t slot = 0; slot < plan->slots; slot++)
        init_args(ex, slot);
    *ret_executor = ex;
    return TALLY_OK;
}

void executor_close(struct executor *ex)
{
    if (!ex)
        return;
    if (ex->arena)
        ex->kernels->free(ex->plan->backend, ex->arena);
    if (ex->stream)
        ex->kernels->stream_close(ex->stream);
    executor_layout_clear(&ex->layout);
    free(ex->args);
    free(ex->level0);
    free(ex->sums);
    free(ex->actions);
    free(ex->indices);
    free(ex->host_input);
    free(ex->host_targets);
    free(ex);
}

float *executor_weights(struct executor *ex)
{
    return (float *)(ex->arena + ex->layout.weights);
}

size_t executor_memory_bytes(const struct executor *ex)
{
    return ex->layout.bytes;
}

static tally_status check_stop(const struct executor *ex, struct tally_error *err)
{
    if (ex->in.stop && atomic_load_explicit(ex->in.stop, memory_order_relaxed))
        return tally_fail(err, TALLY_ECANCELLED, "the job was ended");
    return TALLY_OK;
}

/* ---- forward ---- */

static void read_samples(struct executor *ex, const struct dataset *set, const uint32_t *indices, uint32_t count,
                         uint32_t slot)
{
    const struct plan *plan = ex->plan;
    float *input = tensor_value(ex, slot, 0);
    void *targets = slot_targets(ex, slot);
    if (ex->kernels->host_memory) {
        dataset_read(set, indices, count, input, plan->input_stride, targets);
        return;
    }
    dataset_read(set, indices, count, ex->host_input, plan->input_stride, ex->host_targets);
    ex->kernels->upload(ex->stream, input, ex->host_input, count * plan->input_stride * sizeof(float));
    ex->kernels->upload(ex->stream, targets, ex->host_targets, plan->target_bytes / plan->rows_max * count);
}

static tally_status find_program(const struct executor *ex, uint32_t rows, const struct plan_program **ret_program,
                                 struct tally_error *err)
{
    *ret_program = plan_program(ex->plan, rows);
    return *ret_program ? TALLY_OK : tally_fail(err, TALLY_EINTERNAL, "the plan has no program for %u rows", rows);
}

/* All operations and the loss, in order, each as soon as its own weights are there. keep: for a backward to come. */
static tally_status forward_ops(struct executor *ex, struct transport *transport, const struct plan_program *program,
                                uint32_t slot, uint64_t version, bool keep, struct tally_error *err)
{
    for (size_t i = 0; i <= ex->plan->op_count; i++) { /* the last is the loss */
        tally_status status = check_stop(ex, err);
        if (status)
            return status;
        struct executor_op *op = &ex->layout.ops[i];
        if (op->version != version && op->reads.begin != op->reads.end) {
            status = transport->wait_slices(transport, op->reads.begin, op->reads.end, version, err);
            if (status)
                return status;
            op->version = version;
        }
        struct kernel_args *args = op_args(ex, slot, i);
        void *saved = args->saved;
        if (!keep)
            args->saved = NULL;
        ex->kernels->forward(program->ops[i], ex->stream, args);
        args->saved = saved;
    }
    return TALLY_OK;
}

static tally_status run_forward(struct run *run, const struct action *action)
{
    struct executor *ex = run->ex;
    struct sample_range range = batches_leaf(&ex->plan->batches, &run->shape, action->micro_batch);
    const struct plan_program *program;
    tally_status status = find_program(ex, range.count, &program, run->err);
    if (status)
        return status;
    if (ex->epoch != run->shape.epoch) {
        ex->epoch_order = order_epoch(ex->in.order, run->shape.epoch);
        ex->epoch = run->shape.epoch;
    }
    read_samples(ex, ex->in.train, ex->epoch_order + range.first, range.count, action->slot);
    return forward_ops(ex, run->transport, program, action->slot, run->step - 1, true, run->err);
}

/* ---- backward ---- */

/* Level 0 of these slices has its memory; they follow each other where there are several. */
static tally_status acquire(struct run *run, struct slice_range range)
{
    struct executor *ex = run->ex;
    for (uint32_t s = range.begin; s < range.end; s++) {
        if (!ex->level0[s]) {
            tally_status status = run->transport->destination(run->transport, s, &ex->level0[s], run->err);
            if (status)
                return status;
        }
        if (s > range.begin && ex->level0[s] != ex->level0[s - 1] + ex->plan->model->slices[s - 1].count)
            return tally_fail(run->err, TALLY_EINTERNAL,
                              "the destinations of slices %u and %u do not follow each other", s - 1, s);
    }
    return TALLY_OK;
}

/* Where the whole parameter would begin, if its rows of these slices are to lie at their place in the level's buffer.
 */
static tally_status param_base(struct run *run, uint32_t level, int32_t param, struct slice_range range,
                               float **ret_base)
{
    struct executor *ex = run->ex;
    const struct model *model = ex->plan->model;
    size_t offset = model->params[param].offset;
    if (level) {
        *ret_base = level_floats(ex, level) + offset;
        return TALLY_OK;
    }
    tally_status status = acquire(run, range);
    if (status)
        return status;
    /* The parameter may begin in an earlier slice, whose memory is elsewhere: only the rows that are written need to
     * exist. */
    uintptr_t first = (uintptr_t)ex->level0[range.begin];
    *ret_base = (float *)(first + offset * sizeof(float) - model->slices[range.begin].offset * sizeof(float));
    return TALLY_OK;
}

static float *slice_sum(struct executor *ex, uint32_t level, uint32_t slice)
{
    return level ? level_floats(ex, level) + ex->plan->model->slices[slice].offset : ex->level0[slice];
}

/* The leaf's gradient of this slice is whole: adds it up and sends it on its way. */
static tally_status slice_done(struct run *run, const struct action *action, uint32_t slice)
{
    struct executor *ex = run->ex;
    size_t count = ex->plan->model->slices[slice].count;
    for (uint32_t level = action->level; level > action->level - action->merges; level--) {
        float *left = slice_sum(ex, level - 1, slice);
        ex->kernels->sum(ex->stream, count, left, left, slice_sum(ex, level, slice));
    }
    if (action->push.begin == action->push.end)
        return TALLY_OK;
    assert(action->level == action->merges);
    struct transport_push push = {
        .step = run->step, .node = action->push, .slice = slice, .sums = ex->sums[0], .gradient = ex->level0[slice]};
    ex->level0[slice] = NULL;
    return run->transport->push(run->transport, &push, run->err);
}

static tally_status backward_part(struct run *run, const struct action *action, struct kernel_op *op, size_t index,
                                  const struct executor_part *part)
{
    struct executor *ex = run->ex;
    struct kernel_args *args = op_args(ex, action->slot, index);
    const struct plan_op *plan_op = &ex->plan->ops[index];
    tally_status status = param_base(run, action->level, plan_op->weight, part->weight, &args->dweight);
    if (!status && plan_op->bias >= 0)
        status = param_base(run, action->level, plan_op->bias, part->bias, &args->dbias);
    if (status)
        return status;
    ex->kernels->backward_weight(op, ex->stream, args, part->row_begin, part->row_end);
    for (uint32_t i = part->done.begin; i < part->done.end && !status; i++)
        status = slice_done(run, action, ex->layout.done_slices[i]);
    return status;
}

static tally_status backward_op(struct run *run, const struct action *action, const struct plan_program *program,
                                size_t index)
{
    struct executor *ex = run->ex;
    const struct executor_op *op = &ex->layout.ops[index];
    tally_status status = check_stop(ex, run->err);
    if (status)
        return status;
    /* Before the weights' gradients: pushing one lets the new weights in (T1). */
    if (op->wants_data)
        ex->kernels->backward_data(program->ops[index], ex->stream, op_args(ex, action->slot, index));
    for (size_t i = 0; i < op->part_count && !status; i++)
        status = backward_part(run, action, program->ops[index], index, &ex->layout.parts[op->part_begin + i]);
    return status;
}

/* Loss, weight and correct answers go up the same tree as the gradients. */
static tally_status sum_losses(struct run *run, const struct action *action)
{
    struct executor *ex = run->ex;
    tally_status status = ex->kernels->stream_sync(ex->stream, run->err);
    if (status)
        return status;
    ex->kernels->read_loss(ex->stream, slot_loss(ex, action->slot), &ex->sums[action->level]);
    for (uint32_t level = action->level; level > action->level - action->merges; level--) {
        struct kernel_loss *left = &ex->sums[level - 1];
        const struct kernel_loss *right = &ex->sums[level];
        left->loss_sum += right->loss_sum;
        left->weight += right->weight;
        left->correct += right->correct;
    }
    return TALLY_OK;
}

static tally_status run_backward(struct run *run, const struct action *action)
{
    struct executor *ex = run->ex;
    if (action->level >= ex->plan->levels || action->merges > action->level)
        return tally_fail(run->err, TALLY_EINTERNAL, "an action's level %u (merges %u) is not one of the plan's %u",
                          action->level, action->merges, ex->plan->levels);
    struct sample_range range = batches_leaf(&ex->plan->batches, &run->shape, action->micro_batch);
    const struct plan_program *program;
    tally_status status = find_program(ex, range.count, &program, run->err);
    if (!status)
        status = sum_losses(run, action);
    if (status)
        return status;
    for (size_t i = ex->plan->op_count + 1; i-- > 0 && !status;)
        if (ex->plan->ops[i].backward)
            status = backward_op(run, action, program, i);
    return status;
}

/* ---- steps ---- */

static tally_status run_action(struct run *run, const struct action *action)
{
    switch (action->kind) {
    case ACTION_FORWARD:
        return run_forward(run, action);
    case ACTION_BACKWARD:
        return run_backward(run, action);
    case ACTION_PUSH: /* happened inside backward */
        return TALLY_OK;
    case ACTION_SEND:
    case ACTION_RECEIVE:
        break;
    }
    return tally_fail(run->err, TALLY_EUNSUPPORTED, "this worker cannot run actions of kind %d", (int)action->kind);
}

tally_status executor_run(struct executor *ex, struct transport *transport, uint64_t step, const struct action *actions,
                          size_t count, struct tally_error *err)
{
    struct run run = {
        .ex = ex, .transport = transport, .step = step, .shape = batches_step(&ex->plan->batches, step), .err = err};
    tally_status status = TALLY_OK;
    for (size_t i = 0; i < count && !status; i++)
        status = run_action(&run, &actions[i]);
    return status;
}

tally_status executor_step(struct executor *ex, struct transport *transport, uint64_t step, struct tally_error *err)
{
    uint32_t leaves = batches_step(&ex->plan->batches, step).leaves;
    if (leaves != ex->actions_leaves) {
        ex->action_count = plan_step_actions(ex->plan, leaves, ex->actions);
        ex->actions_leaves = leaves;
    }
    return executor_run(ex, transport, step, ex->actions, ex->action_count, err);
}

/* ---- evaluation ---- */

tally_status executor_evaluate(struct executor *ex, struct transport *transport, uint64_t version, uint32_t micro_batch,
                               struct kernel_loss *ret_loss, uint32_t *ret_samples, struct tally_error *err)
{
    assert(ex->in.test && micro_batch < ex->plan->evaluation.leaves);
    struct sample_range range = evaluation_leaf(&ex->plan->evaluation, micro_batch);
    for (uint32_t i = 0; i < range.count; i++)
        ex->indices[i] = (uint32_t)(range.first + i);
    const struct plan_program *program;
    tally_status status = find_program(ex, range.count, &program, err);
    if (status)
        return status;
    read_samples(ex, ex->in.test, ex->indices, range.count, 0);
    status = forward_ops(ex, transport, program, 0, version, false, err);
    if (!status)
        status = ex->kernels->stream_sync(ex->stream, err);
    if (status)
        return status;
    ex->kernels->read_loss(ex->stream, slot_loss(ex, 0), ret_loss);
    *ret_samples = range.count;
    return TALLY_OK;
}
