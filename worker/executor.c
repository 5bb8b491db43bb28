/*
 * DESIGN. One arena in the backend's memory holds the weights, for each of this rank's segments a block of activations
 * for each micro-batch in flight (slot: the micro-batch's number modulo the segment's slots), the activations'
 * gradients (those within a segment: of one micro-batch at a time; those that cross: of two), the workspace and the
 * gradient sums of levels 1 and up of the tree; level 0 is where the transport wants it (T2). The arguments of every
 * operation are written when the executor is opened, and again before each use where a segment has several slots; a
 * step changes only them and where gradients of parameters go.
 *
 * Backward of a leaf writes its gradient into the buffer of its level. When the last part that touches a slice has run,
 * the slice is added to the levels below as often as the action says, and leaves if the leaf completes a node that is
 * pushed. Every schedule runs the backwards of a segment in the order of the leaves, so a segment's levels work by
 * themselves.
 *
 * What was sent to a peer may be read until the peers' flush of its ticket: each block and each copy of the gradients
 * that cross remembers the last ticket, and is claimed before it is written anew.
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
    bool fixed;                    /* every buffer has one place only: args stay as they are */
    struct kernel_args *args;      /* by op, the loss at [op_count] */
    float **level0;                /* by slice: the node's sum, while it is being computed; NULL: not asked for yet */
    struct kernel_loss *sums;      /* [segment][level] */
    struct kernel_loss *leaf_sums; /* of a leaf: leaf modulo leaf_sum_count, which is at least those in flight */
    uint32_t leaf_sum_count;
    uint64_t **block_sent;    /* [segment][slot]: ticket of what was sent last; 0: nothing that was not released */
    uint64_t (*edge_sent)[2]; /* [segment][copy] */
    struct action *actions;   /* of a step of so many leaves */
    size_t action_count;
    uint32_t actions_leaves;     /* 0: none made yet */
    uint64_t epoch;              /* whose order is at hand; 0: none */
    const uint32_t *epoch_order; /* belongs to in.order */
    uint32_t *indices;           /* of an evaluation micro-batch */
    float *sample;      /* where a stage that wants targets alone lets the input go; NULL: it wants both or none */
    float *host_input;  /* staging where the backend's memory is not the host's */
    void *host_targets; /* likewise, or where a stage that wants inputs alone lets the targets go */
};

/* What a step's actions, or an evaluation, need to know. */
struct run {
    struct executor *ex;
    struct transport *transport;
    uint64_t step; /* the step; of an evaluation: the version of the weights */
    bool evaluation;
    struct step_shape shape; /* of a step */
    struct tally_error *err;
};

static bool has_loss(const struct plan *plan, uint32_t segment)
{
    return segment + 1 == plan->segment_count;
}

static char *block(const struct executor *ex, uint32_t segment, uint32_t leaf)
{
    const struct executor_blocks *blocks = &ex->layout.blocks[segment];
    return ex->arena + blocks->offset + leaf % ex->plan->segments[segment].slots * blocks->stride;
}

static float *tensor_value(const struct executor *ex, uint32_t leaf, int32_t tensor)
{
    const struct plan_tensor *t = executor_tensor(ex->plan, tensor);
    return (float *)(block(ex, t->home, leaf) + t->value_offset);
}

static float *tensor_grad(const struct executor *ex, uint32_t leaf, int32_t tensor)
{
    const struct plan_tensor *t = executor_tensor(ex->plan, tensor);
    switch (t->gradient) {
    case PLAN_GRADIENT_SHARED:
        return (float *)(ex->arena + ex->layout.gradients + t->grad_offset);
    case PLAN_GRADIENT_EDGE:
        return (float *)(ex->arena + ex->layout.edges + leaf % 2 * ex->layout.edge_stride + t->grad_offset);
    case PLAN_GRADIENT_SEGMENT:
        return (float *)(block(ex, t->grad_home, leaf) + t->grad_offset);
    case PLAN_GRADIENT_NONE:
        break;
    }
    return NULL;
}

static void *leaf_targets(const struct executor *ex, uint32_t leaf)
{
    return block(ex, ex->plan->segment_count - 1, leaf) + ex->plan->target_offset;
}

static struct kernel_loss *leaf_loss(const struct executor *ex, uint32_t leaf)
{
    return (struct kernel_loss *)(block(ex, ex->plan->segment_count - 1, leaf) + ex->plan->loss_offset);
}

static struct kernel_loss *leaf_sum(const struct executor *ex, uint32_t leaf)
{
    return &ex->leaf_sums[leaf % ex->leaf_sum_count];
}

static struct kernel_loss *level_sums(const struct executor *ex, uint32_t segment)
{
    return &ex->sums[segment * ((size_t)ex->plan->levels + 1)];
}

static float *level_floats(const struct executor *ex, uint32_t level)
{
    assert(level > 0);
    return (float *)(ex->arena + ex->layout.levels + (level - 1) * ex->layout.level_stride);
}

/* Where operation i finds the tensors of a leaf. */
static void place_args(struct executor *ex, size_t i, uint32_t leaf)
{
    const struct plan_op *op = &ex->plan->ops[i];
    struct kernel_args *args = &ex->args[i];
    for (size_t j = 0; j < op->input_count; j++) {
        args->x[j] = tensor_value(ex, leaf, op->inputs[j]);
        args->dx[j] = op->input_grad[j] ? tensor_grad(ex, leaf, op->inputs[j]) : NULL;
    }
    if (op->output >= 0) {
        args->y = tensor_value(ex, leaf, op->output);
        args->dy = tensor_grad(ex, leaf, op->output);
    } else {
        args->targets = leaf_targets(ex, leaf);
        args->loss = leaf_loss(ex, leaf);
    }
    args->saved = block(ex, op->segment, leaf) + op->saved_offset;
}

static void init_args(struct executor *ex)
{
    const struct plan *plan = ex->plan;
    const float *weights = executor_weights(ex);
    ex->fixed = plan->edge_bytes == 0;
    for (uint32_t k = 0; k < plan->segment_count; k++)
        ex->fixed &= !plan_owns(plan, k) || plan->segments[k].slots == 1;
    for (size_t i = 0; i <= plan->op_count; i++) {
        const struct plan_op *op = &plan->ops[i];
        struct kernel_args *args = &ex->args[i];
        if (!plan_owns(plan, op->segment))
            continue;
        for (size_t j = 0; j < op->input_count; j++)
            args->dx_accumulate[j] = op->accumulate[j];
        args->weight = op->weight >= 0 ? weights + op->weight_offset : NULL;
        args->bias = op->bias >= 0 ? weights + op->bias_offset : NULL;
        args->workspace = ex->arena + ex->layout.workspace;
        place_args(ex, i, 0);
    }
}

static struct kernel_args *op_args(struct executor *ex, size_t i, uint32_t leaf)
{
    if (!ex->fixed)
        place_args(ex, i, leaf);
    return &ex->args[i];
}

/* Tables of the pipeline's. */
static bool alloc_segments(struct executor *ex)
{
    const struct plan *plan = ex->plan;
    ex->block_sent = calloc(plan->segment_count, sizeof *ex->block_sent);
    ex->edge_sent = calloc(plan->segment_count, sizeof *ex->edge_sent);
    if (!ex->block_sent || !ex->edge_sent)
        return false;
    for (uint32_t k = 0; k < plan->segment_count; k++) {
        if (!plan_owns(plan, k))
            continue;
        ex->block_sent[k] = calloc(plan->segments[k].slots, sizeof *ex->block_sent[k]);
        if (!ex->block_sent[k])
            return false;
    }
    return true;
}

static bool alloc_samples(struct executor *ex)
{
    const struct plan *plan = ex->plan;
    bool inputs = plan->tensors[0].home != PLAN_NOWHERE, targets = plan_owns(plan, plan->segment_count - 1);
    if (targets && plan->tensors[0].home != plan->segment_count - 1) {
        ex->sample = calloc(plan->model->input.elements, sizeof *ex->sample);
        if (!ex->sample)
            return false;
    }
    if (inputs && !ex->kernels->host_memory) {
        ex->host_input = calloc((size_t)plan->rows_max * plan->input_stride, sizeof *ex->host_input);
        if (!ex->host_input)
            return false;
    }
    if (!ex->kernels->host_memory || (inputs && plan->tensors[0].home != plan->segment_count - 1)) {
        ex->host_targets = calloc(1, plan->target_bytes);
        if (!ex->host_targets)
            return false;
    }
    return true;
}

static tally_status alloc_tables(struct executor *ex, struct tally_error *err)
{
    const struct plan *plan = ex->plan;
    ex->leaf_sum_count = (plan->batches.batch + plan->batches.micro - 1) / plan->batches.micro;
    ex->args = calloc(plan->op_count + 1, sizeof *ex->args);
    ex->level0 = calloc(plan->model->slice_count + 1, sizeof *ex->level0);
    ex->sums = calloc(plan->segment_count * ((size_t)plan->levels + 1), sizeof *ex->sums);
    ex->leaf_sums = calloc(ex->leaf_sum_count, sizeof *ex->leaf_sums);
    ex->actions = calloc(plan_actions_max(plan) + 1, sizeof *ex->actions);
    ex->indices = calloc(plan->rows_max, sizeof *ex->indices);
    bool ok = ex->args && ex->level0 && ex->sums && ex->leaf_sums && ex->actions && ex->indices && alloc_segments(ex) &&
              alloc_samples(ex);
    return ok ? TALLY_OK : tally_fail(err, TALLY_ENOMEM, "no memory for the executor's tables");
}

tally_status executor_open(const struct executor_inputs *inputs, struct executor **ret_executor,
                           struct tally_error *err)
{
    const struct plan *plan = inputs->plan;
    if (plan->edge_count > 0 && !plan->kernels->host_memory)
        return tally_fail(err, TALLY_EUNSUPPORTED, "backend %s keeps activations where they cannot be sent from",
                          plan->kernels->name);
    if (plan->edge_count > 0 && !inputs->peers)
        return tally_fail(err, TALLY_EINVAL, "a stage of a pipeline needs its peers");
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
    init_args(ex);
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
    free(ex->leaf_sums);
    for (uint32_t k = 0; ex->block_sent && k < ex->plan->segment_count; k++)
        free(ex->block_sent[k]);
    free(ex->block_sent);
    free(ex->edge_sent);
    free(ex->sample);
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

/* ---- peers ---- */

static struct sample_range leaf_range(const struct run *run, uint32_t leaf)
{
    const struct plan *plan = run->ex->plan;
    return run->evaluation ? evaluation_leaf(&plan->evaluation, leaf) : batches_leaf(&plan->batches, &run->shape, leaf);
}

/* The memory with this ticket may be written from here on. */
static tally_status claim(struct run *run, uint64_t *sent)
{
    uint64_t ticket = *sent;
    *sent = 0;
    return ticket ? run->ex->in.peers->flush(run->ex->in.peers, ticket, run->err) : TALLY_OK;
}

static uint64_t *block_ticket(const struct executor *ex, uint32_t segment, uint32_t leaf)
{
    return &ex->block_sent[segment][leaf % ex->plan->segments[segment].slots];
}

/* The ticket of the memory that holds what an edge carries, on this side. */
static uint64_t *edge_ticket(const struct executor *ex, const struct plan_edge *edge, uint32_t segment, uint32_t leaf)
{
    const struct plan_tensor *t = &ex->plan->tensors[edge->tensor];
    if (!edge->backward)
        return block_ticket(ex, t->home, leaf);
    return t->gradient == PLAN_GRADIENT_SEGMENT ? block_ticket(ex, t->grad_home, leaf)
                                                : &ex->edge_sent[segment][leaf % 2];
}

static float *edge_floats(const struct executor *ex, const struct plan_edge *edge, uint32_t leaf)
{
    return edge->backward ? tensor_grad(ex, leaf, edge->tensor) : tensor_value(ex, leaf, edge->tensor);
}

static struct peer_tensor name_tensor(const struct run *run, uint32_t edge, uint32_t leaf)
{
    const struct plan_edge *e = &run->ex->plan->edges[edge];
    const struct plan_tensor *t = &run->ex->plan->tensors[e->tensor];
    return (struct peer_tensor){.step = run->step,
                                .evaluation = run->evaluation,
                                .micro_batch = leaf,
                                .edge = edge,
                                .direction =
                                    e->backward ? TALLY__V1__DIRECTION__BACKWARD : TALLY__V1__DIRECTION__FORWARD,
                                .rows = leaf_range(run, leaf).count,
                                .columns = t->elements,
                                .stride = t->stride};
}

static tally_status send_edge(struct run *run, uint32_t edge, uint32_t leaf)
{
    struct executor *ex = run->ex;
    const struct plan_edge *e = &ex->plan->edges[edge];
    struct peer_tensor tensor = name_tensor(run, edge, leaf);
    if (e->backward)
        tensor.sums = *leaf_sum(ex, leaf);
    tally_status status = ex->kernels->stream_sync(ex->stream, run->err);
    if (status)
        return status;
    return ex->in.peers->send(ex->in.peers, plan_peer(ex->plan, ex->plan->segments[e->to].stage), &tensor,
                              edge_floats(ex, e, leaf), edge_ticket(ex, e, e->from, leaf), run->err);
}

static tally_status receive_edge(struct run *run, uint32_t edge, uint32_t leaf)
{
    struct executor *ex = run->ex;
    const struct plan_edge *e = &ex->plan->edges[edge];
    struct peer_tensor tensor = name_tensor(run, edge, leaf);
    tally_status status = check_stop(ex, run->err);
    if (!status)
        status = claim(run, edge_ticket(ex, e, e->to, leaf));
    if (!status)
        status = ex->in.peers->receive(ex->in.peers, plan_peer(ex->plan, ex->plan->segments[e->from].stage), &tensor,
                                       edge_floats(ex, e, leaf), run->err);
    if (!status && e->backward)
        *leaf_sum(ex, leaf) = tensor.sums;
    return status;
}

/* ---- forward ---- */

/* The inputs go to the segment that reads them first, the targets to the one with the loss. */
static void read_samples(struct executor *ex, const struct dataset *set, const uint32_t *indices, uint32_t count,
                         uint32_t segment, uint32_t leaf)
{
    const struct plan *plan = ex->plan;
    bool inputs = plan->tensors[0].home == segment, targets = has_loss(plan, segment), host = ex->kernels->host_memory;
    float *x = inputs ? tensor_value(ex, leaf, 0) : NULL;
    void *y = targets ? leaf_targets(ex, leaf) : NULL;
    dataset_read(set, indices, count,
                 !inputs ? ex->sample
                 : host  ? x
                         : ex->host_input,
                 inputs ? plan->input_stride : 0, targets && host ? y : ex->host_targets);
    if (inputs && !host)
        ex->kernels->upload(ex->stream, x, ex->host_input, count * plan->input_stride * sizeof(float));
    if (targets && !host)
        ex->kernels->upload(ex->stream, y, ex->host_targets, plan->target_bytes / plan->rows_max * count);
}

static tally_status find_program(const struct executor *ex, uint32_t rows, const struct plan_program **ret_program,
                                 struct tally_error *err)
{
    *ret_program = plan_program(ex->plan, rows);
    return *ret_program ? TALLY_OK : tally_fail(err, TALLY_EINTERNAL, "the plan has no program for %u rows", rows);
}

/* A segment's operations (and the loss), in order, each as soon as its own weights are there. In training, what
 * backward needs is kept. */
static tally_status forward_ops(struct run *run, const struct plan_program *program, uint32_t segment, uint32_t leaf)
{
    struct executor *ex = run->ex;
    uint64_t version = run->evaluation ? run->step : run->step - 1;
    for (size_t i = ex->plan->segments[segment].op_begin; i < ex->plan->segments[segment].op_end; i++) {
        tally_status status = check_stop(ex, run->err);
        if (status)
            return status;
        struct executor_op *op = &ex->layout.ops[i];
        if (op->version != version && op->reads.begin != op->reads.end) {
            status = run->transport->wait_slices(run->transport, op->reads.begin, op->reads.end, version, run->err);
            if (status)
                return status;
            op->version = version;
        }
        struct kernel_args *args = op_args(ex, i, leaf);
        void *saved = args->saved;
        if (run->evaluation)
            args->saved = NULL;
        ex->kernels->forward(program->ops[i], ex->stream, args);
        args->saved = saved;
    }
    return TALLY_OK;
}

static void read_leaf(struct run *run, struct sample_range range, uint32_t segment, uint32_t leaf)
{
    struct executor *ex = run->ex;
    if (ex->plan->tensors[0].home != segment && !has_loss(ex->plan, segment))
        return;
    if (run->evaluation) {
        for (uint32_t i = 0; i < range.count; i++)
            ex->indices[i] = (uint32_t)(range.first + i);
        read_samples(ex, ex->in.test, ex->indices, range.count, segment, leaf);
        return;
    }
    if (ex->epoch != run->shape.epoch) {
        ex->epoch_order = order_epoch(ex->in.order, run->shape.epoch);
        ex->epoch = run->shape.epoch;
    }
    read_samples(ex, ex->in.train, ex->epoch_order + range.first, range.count, segment, leaf);
}

static tally_status run_forward(struct run *run, uint32_t segment, uint32_t leaf)
{
    struct executor *ex = run->ex;
    struct sample_range range = leaf_range(run, leaf);
    const struct plan_program *program;
    tally_status status = find_program(ex, range.count, &program, run->err);
    if (!status)
        status = claim(run, block_ticket(ex, segment, leaf));
    if (status)
        return status;
    read_leaf(run, range, segment, leaf);
    return forward_ops(run, program, segment, leaf);
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
 * local: its offset in this rank's vector. */
static tally_status param_base(struct run *run, uint32_t level, int32_t param, size_t local, struct slice_range range,
                               float **ret_base)
{
    struct executor *ex = run->ex;
    const struct model *model = ex->plan->model;
    size_t offset = model->params[param].offset;
    if (level) {
        *ret_base = level_floats(ex, level) + local;
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
    return level ? level_floats(ex, level) + ex->plan->slice_offsets[slice] : ex->level0[slice];
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
    struct transport_push push = {.step = run->step,
                                  .node = action->push,
                                  .slice = slice,
                                  .sums = level_sums(ex, action->chunk)[0],
                                  .gradient = ex->level0[slice]};
    ex->level0[slice] = NULL;
    return run->transport->push(run->transport, &push, run->err);
}

static tally_status backward_part(struct run *run, const struct action *action, struct kernel_op *op, size_t index,
                                  const struct executor_part *part)
{
    struct executor *ex = run->ex;
    struct kernel_args *args = &ex->args[index]; /* placed already */
    const struct plan_op *plan_op = &ex->plan->ops[index];
    tally_status status =
        param_base(run, action->level, plan_op->weight, plan_op->weight_offset, part->weight, &args->dweight);
    if (!status && plan_op->bias >= 0)
        status = param_base(run, action->level, plan_op->bias, plan_op->bias_offset, part->bias, &args->dbias);
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
    /* Before the weights' gradients: pushing one lets the new weights in (T1), and another stage may wait for this. */
    struct kernel_args *args = op_args(ex, index, action->micro_batch);
    if (op->wants_data)
        ex->kernels->backward_data(program->ops[index], ex->stream, args);
    for (uint32_t e = 0; e < ex->plan->edge_count && !status; e++) {
        const struct plan_edge *edge = &ex->plan->edges[e];
        if (edge->backward && edge->op == index && edge->from == action->chunk)
            status = send_edge(run, e, action->micro_batch);
    }
    for (size_t i = 0; i < op->part_count && !status; i++)
        status = backward_part(run, action, program->ops[index], index, &ex->layout.parts[op->part_begin + i]);
    return status;
}

/* Loss, weight and correct answers go up the same tree as the gradients. */
static tally_status sum_losses(struct run *run, const struct action *action)
{
    struct executor *ex = run->ex;
    struct kernel_loss *sums = level_sums(ex, action->chunk), *leaf = leaf_sum(ex, action->micro_batch);
    if (has_loss(ex->plan, action->chunk)) {
        tally_status status = ex->kernels->stream_sync(ex->stream, run->err);
        if (status)
            return status;
        ex->kernels->read_loss(ex->stream, leaf_loss(ex, action->micro_batch), leaf);
    }
    sums[action->level] = *leaf;
    for (uint32_t level = action->level; level > action->level - action->merges; level--) {
        struct kernel_loss *left = &sums[level - 1];
        const struct kernel_loss *right = &sums[level];
        left->loss_sum += right->loss_sum;
        left->weight += right->weight;
        left->correct += right->correct;
    }
    return TALLY_OK;
}

static tally_status run_backward(struct run *run, const struct action *action)
{
    struct executor *ex = run->ex;
    const struct plan_segment *segment = &ex->plan->segments[action->chunk];
    if (action->level >= ex->plan->levels || action->merges > action->level)
        return tally_fail(run->err, TALLY_EINTERNAL, "an action's level %u (merges %u) is not one of the plan's %u",
                          action->level, action->merges, ex->plan->levels);
    struct sample_range range = leaf_range(run, action->micro_batch);
    const struct plan_program *program;
    tally_status status = find_program(ex, range.count, &program, run->err);
    if (!status)
        status = claim(run, &ex->edge_sent[action->chunk][action->micro_batch % 2]);
    if (!status)
        status = sum_losses(run, action);
    for (size_t i = segment->op_end; i-- > segment->op_begin && !status;)
        if (ex->plan->ops[i].backward)
            status = backward_op(run, action, program, i);
    return status;
}

/* ---- steps ---- */

static tally_status check_action(const struct run *run, const struct action *action)
{
    const struct plan *plan = run->ex->plan;
    bool crosses = action->kind == ACTION_SEND || action->kind == ACTION_RECEIVE;
    if (action->chunk >= plan->segment_count || !plan_owns(plan, action->chunk))
        return tally_fail(run->err, TALLY_EINTERNAL, "an action of segment %u, which this worker does not have",
                          action->chunk);
    if (crosses && (action->edge >= plan->edge_count ||
                    !(action->kind == ACTION_SEND ? plan->edges[action->edge].from == action->chunk
                                                  : plan->edges[action->edge].to == action->chunk)))
        return tally_fail(run->err, TALLY_EINTERNAL, "an action of edge %u, which is none of segment %u", action->edge,
                          action->chunk);
    return TALLY_OK;
}

static tally_status run_action(struct run *run, const struct action *action)
{
    tally_status status = check_action(run, action);
    if (status)
        return status;
    switch (action->kind) {
    case ACTION_FORWARD:
        return run_forward(run, action->chunk, action->micro_batch);
    case ACTION_BACKWARD:
        return run_backward(run, action);
    case ACTION_PUSH: /* happened inside backward */
        return TALLY_OK;
    case ACTION_SEND: /* a gradient left inside backward */
        return run->ex->plan->edges[action->edge].backward ? TALLY_OK
                                                           : send_edge(run, action->edge, action->micro_batch);
    case ACTION_RECEIVE:
        return receive_edge(run, action->edge, action->micro_batch);
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

static tally_status evaluate_segment(struct run *run, uint32_t segment, uint32_t leaf, executor_evaluated done,
                                     void *user)
{
    struct executor *ex = run->ex;
    const struct plan *plan = ex->plan;
    tally_status status = TALLY_OK;
    for (uint32_t e = 0; e < plan->edge_count && !status; e++)
        if (!plan->edges[e].backward && plan->edges[e].to == segment)
            status = receive_edge(run, e, leaf);
    if (!status)
        status = run_forward(run, segment, leaf);
    for (uint32_t e = 0; e < plan->edge_count && !status; e++)
        if (!plan->edges[e].backward && plan->edges[e].from == segment)
            status = send_edge(run, e, leaf);
    if (status || !has_loss(plan, segment))
        return status;
    status = ex->kernels->stream_sync(ex->stream, run->err);
    if (status)
        return status;
    struct kernel_loss loss;
    ex->kernels->read_loss(ex->stream, leaf_loss(ex, leaf), &loss);
    done(leaf, &loss, leaf_range(run, leaf).count, user);
    return TALLY_OK;
}

/* Turn t runs segment k on the (t - k)-th micro-batch, later segments first: all stages follow the same turns, so none
 * waits for ever, and a block is read before it is written again. */
tally_status executor_evaluate_share(struct executor *ex, struct transport *transport, uint64_t version,
                                     struct tree_node share, executor_evaluated done, void *user,
                                     struct tally_error *err)
{
    const struct plan *plan = ex->plan;
    assert((ex->in.test || !plan_reads_samples(plan)) && share.begin <= share.end &&
           share.end <= plan->evaluation.leaves);
    struct run run = {.ex = ex, .transport = transport, .step = version, .evaluation = true, .err = err};
    uint64_t leaves = share.end - share.begin, turns = leaves ? leaves + plan->segment_count - 1 : 0;
    tally_status status = TALLY_OK;
    for (uint64_t turn = 0; turn < turns; turn++)
        for (uint32_t k = plan->segment_count; k-- > 0 && !status;)
            if (plan_owns(plan, k) && turn >= k && turn - k < leaves)
                status = evaluate_segment(&run, k, share.begin + (uint32_t)(turn - k), done, user);
    return status;
}

struct evaluated {
    struct kernel_loss loss;
    uint32_t samples;
};

static void on_evaluated(uint32_t micro_batch, const struct kernel_loss *loss, uint32_t samples, void *user)
{
    (void)micro_batch;
    *(struct evaluated *)user = (struct evaluated){*loss, samples};
}

tally_status executor_evaluate(struct executor *ex, struct transport *transport, uint64_t version, uint32_t micro_batch,
                               struct kernel_loss *ret_loss, uint32_t *ret_samples, struct tally_error *err)
{
    struct evaluated evaluated = {0};
    assert(ex->plan->mesh.pipeline == 1);
    tally_status status = executor_evaluate_share(
        ex, transport, version, (struct tree_node){micro_batch, micro_batch + 1}, on_evaluated, &evaluated, err);
    if (status)
        return status;
    *ret_loss = evaluated.loss;
    *ret_samples = evaluated.samples;
    return TALLY_OK;
}
