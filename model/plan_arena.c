/* Where everything lies: a micro-batch's activation block, the blocks of the activations' gradients, and what that
 * comes to. */
#include <stdlib.h>

#include "model/plan_build.h"

#define ALIGN ((size_t)64)
/* No machine holds more; sums of a few such sizes stay inside size_t. */
#define BYTES_MAX ((size_t)1 << 56)

static tally_status too_large(struct tally_error *err)
{
    return tally_fail(err, TALLY_EINVAL,
                      "a micro-batch's activations are too large: choose a smaller train.micro_batch_size");
}

/* Takes `bytes` at the end of a block. */
static bool append(size_t *block, size_t bytes, size_t *ret_offset)
{
    if (bytes > BYTES_MAX || *block > BYTES_MAX)
        return false;
    *ret_offset = *block;
    *block += (bytes + ALIGN - 1) / ALIGN * ALIGN;
    return true;
}

static bool tensor_bytes(const struct plan *plan, size_t t, size_t *ret_bytes)
{
    return !__builtin_mul_overflow(plan->tensors[t].stride, (size_t)plan->rows_max * sizeof(float), ret_bytes);
}

/* What lies in the activation block of one segment. All activations are kept for backward, so they lie one behind the
 * other. */
static tally_status place_block(struct plan *plan, uint32_t k, const size_t *saved_bytes, struct tally_error *err)
{
    struct plan_segment *segment = &plan->segments[k];
    size_t bytes, *block = &segment->block_bytes;
    for (size_t t = 0; t < plan->tensor_count; t++) {
        struct plan_tensor *tensor = &plan->tensors[t];
        if (tensor->view_of >= 0)
            continue;
        if (tensor->home == k && (!tensor_bytes(plan, t, &bytes) || !append(block, bytes, &tensor->value_offset)))
            return too_large(err);
        if (tensor->gradient == PLAN_GRADIENT_SEGMENT && tensor->grad_home == k &&
            (!tensor_bytes(plan, t, &bytes) || !append(block, bytes, &tensor->grad_offset)))
            return too_large(err);
    }
    for (size_t i = segment->op_begin; i < segment->op_end; i++)
        if (!append(block, saved_bytes[i], &plan->ops[i].saved_offset))
            return too_large(err);
    if (k + 1 < plan->segment_count)
        return TALLY_OK;
    return append(block, plan->target_bytes, &plan->target_offset) &&
                   append(block, sizeof(struct kernel_loss), &plan->loss_offset)
               ? TALLY_OK
               : too_large(err);
}

static tally_status place_values(struct plan *plan, const size_t *saved_bytes, struct tally_error *err)
{
    size_t target =
        plan->model->target_kind == DATASET_CLASSES ? sizeof(int64_t) : plan->model->target.elements * sizeof(float);
    if (__builtin_mul_overflow(target, plan->rows_max, &plan->target_bytes))
        return too_large(err);
    for (uint32_t k = 0; k < plan->segment_count; k++) {
        size_t blocks;
        if (!plan_owns(plan, k))
            continue;
        tally_status status = place_block(plan, k, saved_bytes, err);
        if (status != TALLY_OK)
            return status;
        if (__builtin_mul_overflow(plan->segments[k].block_bytes, (size_t)plan->segments[k].slots, &blocks) ||
            blocks > BYTES_MAX || plan->activation_bytes > BYTES_MAX)
            return too_large(err);
        plan->activation_bytes += blocks;
    }
    return plan->activation_bytes <= BYTES_MAX ? TALLY_OK : too_large(err);
}

/* Gradients that cross. */
static tally_status place_edges(struct plan *plan, struct tally_error *err)
{
    for (size_t t = 0; t < plan->tensor_count; t++) {
        struct plan_tensor *tensor = &plan->tensors[t];
        size_t bytes;
        if (tensor->view_of < 0 && tensor->gradient == PLAN_GRADIENT_EDGE &&
            (!tensor_bytes(plan, t, &bytes) || !append(&plan->edge_bytes, bytes, &tensor->grad_offset)))
            return too_large(err);
    }
    return plan->edge_bytes <= BYTES_MAX ? TALLY_OK : too_large(err);
}

/* A view lies where the tensor does. */
static void place_views(struct plan *plan)
{
    for (size_t t = 0; t < plan->tensor_count; t++) {
        struct plan_tensor *view = &plan->tensors[t];
        if (view->view_of < 0)
            continue;
        const struct plan_tensor *root = &plan->tensors[view->view_of];
        view->home = root->home;
        view->value_offset = root->value_offset;
        view->gradient = root->gradient;
        view->grad_home = root->grad_home;
        view->grad_offset = root->grad_offset;
    }
}

/* A gradient lives from the first operation (in backward's order, which is from the last to the first) that writes it
 * to the backward of the one that made the tensor. */
struct life {
    int32_t tensor;
    size_t first_op, last_op; /* in the plan's order: it is live in the backward of all of [first_op, last_op] */
    size_t bytes, offset;
};

static int larger_first(const void *a, const void *b)
{
    const struct life *x = a, *y = b;
    if (x->bytes != y->bytes)
        return x->bytes > y->bytes ? -1 : 1;
    return x->tensor < y->tensor ? -1 : 1;
}

/* The lowest offset at which `life` meets none of those placed before it. They are few: a new try a conflict is cheap.
 */
static size_t lowest_offset(const struct life *placed, size_t n, const struct life *life)
{
    size_t offset = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (size_t i = 0; i < n; i++) {
            const struct life *p = &placed[i];
            bool together = p->first_op <= life->last_op && life->first_op <= p->last_op;
            if (together && offset < p->offset + p->bytes && p->offset < offset + life->bytes) {
                offset = p->offset + p->bytes;
                moved = true;
            }
        }
    }
    return offset;
}

static size_t gradient_lives(const struct plan *plan, struct life *lives, bool *ret_fits)
{
    size_t n = 0;
    *ret_fits = true;
    for (size_t i = 0; i < plan->op_count; i++) {
        const struct plan_tensor *tensor = &plan->tensors[plan->ops[i].output];
        struct life *life = &lives[n];
        if (tensor->gradient != PLAN_GRADIENT_SHARED)
            continue;
        *life = (struct life){.tensor = plan->ops[i].output, .first_op = i, .last_op = i};
        for (size_t k = i + 1; k <= plan->op_count; k++)
            for (size_t j = 0; j < plan->ops[k].input_count; j++)
                if (plan_root(plan, plan->ops[k].inputs[j]) == life->tensor)
                    life->last_op = k;
        size_t bytes;
        if (!tensor_bytes(plan, (size_t)life->tensor, &bytes) || bytes > BYTES_MAX)
            *ret_fits = false;
        else
            life->bytes = (bytes + ALIGN - 1) / ALIGN * ALIGN;
        n++;
    }
    return n;
}

static tally_status place_gradients(struct plan *plan, struct tally_error *err)
{
    bool fits;
    struct life *lives = calloc(plan->op_count + 1, sizeof *lives);
    if (!lives)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for the plan");
    size_t n = gradient_lives(plan, lives, &fits);
    qsort(lives, n, sizeof *lives, larger_first);
    for (size_t i = 0; i < n && fits; i++) {
        struct life *life = &lives[i];
        life->offset = lowest_offset(lives, i, life);
        plan->tensors[life->tensor].grad_offset = life->offset;
        if (life->offset + life->bytes > plan->gradient_bytes)
            plan->gradient_bytes = life->offset + life->bytes;
        fits = plan->gradient_bytes <= BYTES_MAX;
    }
    free(lives);
    return fits ? TALLY_OK : too_large(err);
}

tally_status plan_place(struct plan *plan, const size_t *saved_bytes, struct tally_error *err)
{
    tally_status status = place_values(plan, saved_bytes, err);
    if (status == TALLY_OK)
        status = place_gradients(plan, err);
    if (status == TALLY_OK)
        status = place_edges(plan, err);
    place_views(plan);
    return status;
}

struct plan_memory plan_memory(const struct plan *plan)
{
    size_t flat = plan->flat_count * sizeof(float);
    struct plan_memory m = {
        .weights = flat,
        .gradients = flat * plan->levels,
        .activations = plan->activation_bytes,
        .activation_gradients = plan->gradient_bytes + 2 * plan->edge_bytes,
        .workspace = plan->workspace_bytes,
    };
    m.total = m.weights + m.gradients + m.activations + m.activation_gradients + m.workspace;
    return m;
}

struct shard_memory plan_shard_memory(const struct model *model, uint32_t shards, uint32_t shard)
{
    uint32_t begin, end;
    size_t bytes = 0;
    model_shard_slices(model, shards, shard, &begin, &end);
    for (uint32_t s = begin; s < end; s++)
        bytes += model->slices[s].count * sizeof(float);
    const Tally__V1__Optimizer *optimizer = model->spec->train ? model->spec->train->optimizer : NULL;
    bool momentum =
        optimizer && optimizer->kind_case == TALLY__V1__OPTIMIZER__KIND_SGD && optimizer->sgd->momentum != 0;
    struct shard_memory m = {.weights = 2 * bytes, .momentum = momentum ? 2 * bytes : 0, .pending = bytes};
    m.total = m.weights + m.momentum + m.pending;
    return m;
}
