/* Plans by brute force: who writes whose memory when, which gradient is whole when, and what the lists of actions sum
 * up to. */
#include "model/plan.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/model/fake_kernels.h"
#include "tests/model/job_text.h"

#define RANDOM_MODELS 300

static struct plan *plan_of(const struct model *model, uint32_t data, uint32_t rank, uint64_t train_samples,
                            uint64_t test_samples)
{
    struct plan *plan = NULL;
    struct tally_error err = {0};
    Tally__V1__DataFacts *facts = facts_of(0, NULL, 0, NULL, train_samples, test_samples);
    if (plan_build(model, facts, (struct mesh){data, 1, 1}, rank, &fake_kernels, NULL, &plan, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    tally__v1__data_facts__free_unpacked(facts, NULL);
    return plan;
}

static struct model *model_of(const char *layers, size_t ndim, const size_t *in)
{
    struct model *model = NULL;
    struct tally_error err = {0};
    if (model_of_layers(layers, ndim, in, 0, NULL, &model, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    return model;
}

/* ---- lowering ---- */

static const size_t image28[3] = {1, 28, 28};

static void convolutions_take_relu_and_pool(void **state)
{
    (void)state;
    static const struct {
        const char *layers;
        size_t ops;
        bool relu, pool; /* of the first operation */
    } cases[] = {
        {"[{conv2d: {out_channels: 2, kernel_size: 5}}, {max_pool2d: {kernel_size: 2}}, {flatten: {}}, {linear: "
         "{out_features: 2}}]",
         2, false, true},
        {"[{conv2d: {out_channels: 2, kernel_size: 5}}, {relu: {}}, {max_pool2d: {kernel_size: 2}}, {flatten: {}}, "
         "{linear: {out_features: 2}}]",
         2, true, true},
        {"[{conv2d: {out_channels: 2, kernel_size: 5}}, {max_pool2d: {kernel_size: 2}}, {relu: {}}, {flatten: {}}, "
         "{linear: {out_features: 2}}]",
         2, true, true},
        {"[{conv2d: {out_channels: 2, kernel_size: 5}}, {relu: {}}, {flatten: {}}, {linear: {out_features: 2}}]", 2,
         true, false},
        /* ceil_mode that changes nothing: 24 / 2 */
        {"[{conv2d: {out_channels: 2, kernel_size: 5}}, {max_pool2d: {kernel_size: 2, ceil_mode: true}}, {flatten: "
         "{}}, {linear: {out_features: 2}}]",
         2, false, true},
        {"[{conv2d: {out_channels: 2, kernel_size: 5}}, {max_pool2d: {kernel_size: 5, ceil_mode: true}}, {flatten: "
         "{}}, {linear: {out_features: 2}}]",
         3, false, false},
        {"[{conv2d: {out_channels: 2, kernel_size: 5}}, {max_pool2d: {kernel_size: 2, padding: 1}}, {flatten: {}}, "
         "{linear: {out_features: 2}}]",
         3, false, false},
        {"[{conv2d: {out_channels: 2, kernel_size: 5}}, {max_pool2d: {kernel_size: 2, dilation: 2}}, {flatten: {}}, "
         "{linear: {out_features: 2}}]",
         3, false, false},
        {"[{conv2d: {out_channels: 2, kernel_size: 5}}, {avg_pool2d: {kernel_size: 2}}, {flatten: {}}, {linear: "
         "{out_features: 2}}]",
         3, false, false},
        {"[{conv2d: {out_channels: 2, kernel_size: 5}}, {tanh: {}}, {flatten: {}}, {linear: {out_features: 2}}]", 3,
         false, false},
        /* somebody else reads what would be inside */
        {"[{name: c, conv2d: {out_channels: 2, kernel_size: 5}}, {name: r, relu: {}}, {from: [c, r], add: {}}, "
         "{flatten: {}}, {linear: {out_features: 2}}]",
         4, false, false},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model *model = model_of(cases[i].layers, 3, image28);
        struct plan *plan = plan_of(model, 1, 0, 100, 0);
        const struct kernel_op_desc *desc = fake_desc(plan->programs[0].ops[0]);
        if (plan->op_count != cases[i].ops || desc->relu != cases[i].relu || desc->conv2d.pool != cases[i].pool)
            fail_msg("%s: %zu operations", cases[i].layers, plan->op_count);
        assert_int_equal(desc->conv2d.out_height, 24);
        if (desc->conv2d.pool)
            assert_int_equal(desc->conv2d.pool_height, 12);
        plan_free(plan);
        model_free(model);
    }
    assert_int_equal(fake_kernels_live, 0);
}

static void linear_takes_relu(void **state)
{
    (void)state;
    size_t in[1] = {30};
    struct model *model = model_of("[{linear: {out_features: 20}}, {relu: {}}, {linear: {out_features: 10}}]", 1, in);
    struct plan *plan = plan_of(model, 1, 0, 100, 0);
    assert_int_equal(plan->op_count, 2);
    assert_true(plan->ops[0].desc.relu);
    assert_false(plan->ops[1].desc.relu);
    assert_int_equal(plan->ops[0].layer_end, 2);
    assert_int_equal(plan->ops[0].desc.x_stride, 48); /* 32 is a power of two: the backend pads */
    assert_false(plan->ops[0].input_grad[0]);
    assert_true(plan->ops[1].input_grad[0]);
    assert_int_equal(plan->tensors[0].grad_offset, SIZE_MAX);
    assert_int_equal(plan->ops[2].desc.kind, KERNEL_CROSS_ENTROPY);
    assert_int_equal(plan->ops[2].desc.cross_entropy.classes, 10);
    plan_free(plan);
    model_free(model);
}

/* A product over the rows of an image: its samples may not be padded, and neither may those that are added to it. */
static void rows_inside_a_sample(void **state)
{
    (void)state;
    size_t in[3] = {2, 3, 16};
    struct model *model = model_of("[{name: a, linear: {out_features: 8}}, {name: b, relu: {}}, {name: c, from: b, "
                                   "conv2d: {out_channels: 2, kernel_size: 1}},"
                                   " {from: [b, c], add: {}}, {flatten: {}}, {linear: {out_features: 4}}]",
                                   3, in);
    struct plan *plan = plan_of(model, 1, 0, 100, 0);
    assert_int_equal(plan->ops[0].rows_per_sample, 6);
    assert_int_equal(plan->ops[0].desc.x_stride, 16);
    assert_int_equal(plan->ops[0].desc.y_stride, 8);
    assert_int_equal(plan->input_stride, 96);
    assert_int_equal(fake_desc(plan->programs[0].ops[0])->rows, 6 * plan->programs[0].rows);
    const struct plan_op *add = &plan->ops[2];
    assert_int_equal(add->desc.kind, KERNEL_ADD);
    assert_int_equal(add->desc.x_stride, 48);
    assert_int_equal(plan->ops[1].desc.x_stride, 48);
    assert_int_equal(plan->ops[1].desc.y_stride, 48);
    plan_free(plan);
    model_free(model);
}

/* Backward comes to the add first, which writes both; the convolution before it then adds to what is there. */
static void gradients_add_up(void **state)
{
    (void)state;
    size_t in[3] = {2, 4, 4};
    struct model *model = model_of(
        "[{name: a, conv2d: {out_channels: 2, kernel_size: 1}}, {name: b, conv2d: {out_channels: 2, kernel_size: 1}},"
        " {from: [a, b, a, input], add: {}}, {flatten: {}}, {linear: {out_features: 4}}]",
        3, in);
    struct plan *plan = plan_of(model, 1, 0, 100, 0);
    const struct plan_op *b = &plan->ops[1], *add = &plan->ops[2];
    assert_false(add->accumulate[0]);
    assert_false(add->accumulate[1]);
    assert_true(add->accumulate[2]);
    assert_false(add->input_grad[3]);
    assert_true(b->accumulate[0]);
    assert_int_equal(plan->tensors[plan->ops[0].output].readers, 3);
    plan_free(plan);
    model_free(model);
}

static void nothing_before_has_parameters(void **state)
{
    (void)state;
    size_t in[3] = {2, 4, 4};
    struct model *model =
        model_of("[{avg_pool2d: {kernel_size: 2}}, {tanh: {}}, {flatten: {}}, {linear: {out_features: 4}}]", 3, in);
    struct plan *plan = plan_of(model, 1, 0, 100, 0);
    assert_false(plan->ops[0].backward);
    assert_false(plan->ops[1].backward);
    assert_true(plan->ops[2].backward);
    assert_false(plan->ops[2].input_grad[0]);
    assert_int_equal(plan->tensors[plan->ops[1].output].grad_offset, SIZE_MAX);
    plan_free(plan);
    model_free(model);
}

/* ---- memory ---- */

struct region {
    size_t begin, end;
};

static void assert_apart(const struct region *regions, size_t n, size_t bytes)
{
    for (size_t i = 0; i < n; i++) {
        assert_int_equal(regions[i].begin % 64, 0);
        assert_true(regions[i].end <= bytes);
        for (size_t k = 0; k < i; k++)
            assert_true(regions[i].end <= regions[k].begin || regions[k].end <= regions[i].begin);
    }
}

static void check_values(const struct plan *plan)
{
    struct region *regions = calloc(plan->tensor_count + plan->op_count + 3, sizeof *regions);
    size_t n = 0;
    for (size_t t = 0; t < plan->tensor_count; t++) {
        const struct plan_tensor *tensor = &plan->tensors[t];
        assert_true(tensor->stride >= tensor->elements);
        if (tensor->view_of < 0) {
            regions[n++] = (struct region){tensor->value_offset,
                                           tensor->value_offset + tensor->stride * plan->rows_max * sizeof(float)};
            continue;
        }
        const struct plan_tensor *root = &plan->tensors[tensor->view_of];
        assert_true(root->view_of < 0);
        assert_int_equal(tensor->elements, root->elements);
        assert_int_equal(tensor->stride, root->stride);
        assert_int_equal(tensor->value_offset, root->value_offset);
        assert_int_equal(tensor->grad_offset, root->grad_offset);
    }
    for (size_t i = 0; i <= plan->op_count; i++) {
        size_t most = 0;
        for (size_t p = 0; p < plan->program_count; p++) {
            size_t bytes = plan->kernels->saved_bytes(plan->programs[p].ops[i]);
            most = bytes > most ? bytes : most;
            assert_true(plan->kernels->workspace_bytes(plan->programs[p].ops[i]) <= plan->workspace_bytes);
        }
        if (most > 0)
            regions[n++] = (struct region){plan->ops[i].saved_offset, plan->ops[i].saved_offset + most};
    }
    regions[n++] = (struct region){plan->target_offset, plan->target_offset + plan->rows_max * sizeof(int64_t)};
    regions[n++] = (struct region){plan->loss_offset, plan->loss_offset + sizeof(struct kernel_loss)};
    assert_apart(regions, n, plan->activation_bytes);
    free(regions);
}

struct owners {
    int32_t *of; /* of each 64 bytes of the gradient block: the tensor whose gradient is there; -1: nobody's */
    const struct plan *plan;
};

static int32_t root_of(const struct plan *plan, int32_t t)
{
    return plan->tensors[t].view_of < 0 ? t : plan->tensors[t].view_of;
}

static void claim(struct owners *o, int32_t root)
{
    size_t begin = o->plan->tensors[root].grad_offset,
           bytes = o->plan->tensors[root].stride * o->plan->rows_max * sizeof(float);
    assert_true(begin % 64 == 0 && begin + bytes <= o->plan->gradient_bytes);
    for (size_t i = begin / 64; i < (begin + bytes + 63) / 64; i++)
        o->of[i] = root;
}

static void assert_whole(const struct owners *o, int32_t root)
{
    size_t begin = o->plan->tensors[root].grad_offset,
           bytes = o->plan->tensors[root].stride * o->plan->rows_max * sizeof(float);
    for (size_t i = begin / 64; i < (begin + bytes + 63) / 64; i++)
        assert_int_equal(o->of[i], root);
}

/* Runs backward on owners instead of numbers: what an operation reads must be all there, before and after it has
 * written its inputs' gradients. */
static void check_backward(const struct plan *plan)
{
    struct owners o = {.of = calloc(plan->gradient_bytes / 64 + 1, sizeof *o.of), .plan = plan};
    for (size_t i = 0; i <= plan->gradient_bytes / 64; i++)
        o.of[i] = -1;
    for (size_t i = plan->op_count + 1; i-- > 0;) {
        const struct plan_op *op = &plan->ops[i];
        if (!op->backward)
            continue;
        if (op->output >= 0)
            assert_whole(&o, op->output);
        for (size_t k = 0; k < op->input_count; k++) {
            int32_t root = root_of(plan, op->inputs[k]);
            if (!op->input_grad[k])
                continue;
            if (op->accumulate[k])
                assert_whole(&o, root);
            claim(&o, root);
        }
        for (size_t k = 0; k < op->input_count; k++)
            if (op->input_grad[k])
                assert_whole(&o, root_of(plan, op->inputs[k]));
        if (op->output >= 0)
            assert_whole(&o, op->output);
    }
    free(o.of);
}

/* Each reader that wants a gradient either writes first or adds: per tensor exactly one writes, and it is the first in
 * backward's order. */
static void check_accumulate(const struct plan *plan)
{
    for (size_t t = 0; t < plan->tensor_count; t++) {
        bool seen = false;
        for (size_t i = plan->op_count + 1; i-- > 0;)
            for (size_t k = 0; k < plan->ops[i].input_count; k++) {
                if (root_of(plan, plan->ops[i].inputs[k]) != (int32_t)t || !plan->ops[i].input_grad[k])
                    continue;
                assert_int_equal(plan->ops[i].accumulate[k], seen);
                seen = true;
            }
        if (plan->tensors[t].view_of < 0)
            assert_int_equal(seen, plan->tensors[t].grad_offset != SIZE_MAX);
    }
}

static void check_strides(const struct plan *plan)
{
    for (size_t i = 0; i <= plan->op_count; i++) {
        const struct plan_op *op = &plan->ops[i];
        for (size_t k = 0; k < op->input_count; k++)
            assert_int_equal(op->desc.x_stride * op->rows_per_sample, plan->tensors[op->inputs[k]].stride);
        if (op->rows_per_sample > 1)
            assert_int_equal(op->desc.x_stride, op->desc.linear.in);
        if (op->output >= 0)
            assert_int_equal(op->desc.y_stride * op->rows_per_sample, plan->tensors[op->output].stride);
        assert_int_equal(op->weight >= 0, op->part_count > 0);
    }
}

/* ---- slices ---- */

static void check_sources(const struct plan *plan)
{
    const struct model *model = plan->model;
    for (size_t i = 0; i < plan->op_count; i++) {
        const struct plan_op *op = &plan->ops[i];
        if (op->weight < 0)
            continue;
        assert_int_equal(op->part_rows[0], 0);
        assert_int_equal(op->part_rows[op->part_count], model->params[op->weight].shape.dim[0]);
        for (size_t p = 0; p < op->part_count; p++)
            assert_true(op->part_rows[p] < op->part_rows[p + 1]);
    }
    for (uint32_t s = 0; s < model->slice_count; s++) {
        const struct slice *slice = &model->slices[s];
        size_t last_op = SIZE_MAX, last_part = 0;
        /* The last, in backward's order, of the parts that write any element of the slice. */
        for (size_t i = plan->op_count; i-- > 0;)
            for (size_t part = 0; part < plan->ops[i].part_count; part++)
                for (int bias = 0; bias < 2; bias++) {
                    int32_t p = bias ? plan->ops[i].bias : plan->ops[i].weight;
                    if (p < 0)
                        continue;
                    const struct param *param = &model->params[p];
                    size_t row = param->shape.elements / param->shape.dim[0];
                    size_t begin = param->offset + plan->ops[i].part_rows[part] * row,
                           end = param->offset + plan->ops[i].part_rows[part + 1] * row;
                    if (begin < slice->offset + slice->count && slice->offset < end) {
                        last_op = i;
                        last_part = part;
                    }
                }
        struct slice_source source = plan_slice_source(plan, s);
        assert_int_equal(source.op, last_op);
        assert_int_equal(source.part, last_part);
    }
}

static void check_plan(const struct plan *plan)
{
    check_strides(plan);
    check_values(plan);
    check_accumulate(plan);
    check_backward(plan);
    check_sources(plan);
}

static void random_models(void **state)
{
    (void)state;
    for (unsigned seed = 0; seed < RANDOM_MODELS; seed++) {
        struct model *model = random_model(seed, 1 + seed % 11);
        struct plan *plan = plan_of(model, 1 + seed % 3, 0, 9 + seed % 17, seed % 5);
        check_plan(plan);
        plan_free(plan);
        model_free(model);
    }
    assert_int_equal(fake_kernels_live, 0);
}

static void large_layers(void **state)
{
    (void)state;
    static const struct {
        size_t in;
        const char *layers;
        size_t parts; /* of the first operation */
    } cases[] = {
        {800, "[{linear: {out_features: 500}}, {linear: {out_features: 10}}]", 2},
        {4096,
         "[{linear: {out_features: 4096}}, {relu: {}}, {linear: {out_features: 4096}}, {linear: {out_features: 10}}]",
         64},
        {700000, "[{linear: {out_features: 3}}]", 3},
        {1, "[{linear: {out_features: 1000001}}, {linear: {out_features: 2}}]", 4},
        {10, "[{linear: {out_features: 10}}]", 1},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model *model = model_of(cases[i].layers, 1, &cases[i].in);
        struct plan *plan = plan_of(model, 1, 0, 20, 0);
        assert_int_equal(plan->ops[0].part_count, cases[i].parts);
        check_plan(plan);
        plan_free(plan);
        model_free(model);
    }
}

/* A chain needs two gradients at a time, not all of them. */
static void gradients_share_memory(void **state)
{
    (void)state;
    size_t in[1] = {160};
    struct model *model = model_of("[{linear: {out_features: 160}}, {tanh: {}}, {linear: {out_features: 160}}, {tanh: "
                                   "{}}, {linear: {out_features: 160}},"
                                   " {tanh: {}}, {linear: {out_features: 160}}]",
                                   1, in);
    struct plan *plan = plan_of(model, 1, 0, 100, 0);
    assert_int_equal(plan->gradient_bytes, 2 * 160 * sizeof(float) * plan->rows_max);
    plan_free(plan);
    model_free(model);
}

/* ---- programs ---- */

static void programs_for_every_row_count(void **state)
{
    (void)state;
    size_t in[1] = {5};
    struct model *model = model_of("[{linear: {out_features: 3}}]", 1, in);
    model->spec->train->batch_size = 64;
    model->spec->train->micro_batch_size =
        24; /* 24 24 16; the last step of 1000 samples has 40: 24 16; a test set of 101: 24 24 24 24 5 */
    struct plan *plan = plan_of(model, 2, 1, 1000, 101);
    static const uint32_t rows[] = {24, 16, 5};
    assert_int_equal(plan->program_count, 3);
    for (size_t i = 0; i < 3; i++) {
        const struct plan_program *program = plan_program(plan, rows[i]);
        assert_non_null(program);
        assert_int_equal(fake_desc(program->ops[0])->rows, rows[i]);
        assert_int_equal(fake_desc(program->ops[1])->kind, KERNEL_CROSS_ENTROPY);
    }
    assert_null(plan_program(plan, 64));
    assert_int_equal(plan->rows_max, 24);
    assert_int_equal(plan->evaluation.leaves, 5);
    assert_int_equal(evaluation_leaf(&plan->evaluation, 4).first, 96);
    assert_int_equal(evaluation_leaf(&plan->evaluation, 4).count, 5);
    plan_free(plan);
    model_free(model);
}

static void failures_leave_nothing(void **state)
{
    (void)state;
    struct model *model = random_model(7, 3);
    Tally__V1__DataFacts *facts = facts_of(0, NULL, 0, NULL, 100, 0);
    for (size_t at = 1; at <= 3; at++) {
        struct plan *plan = NULL;
        struct tally_error err = {0};
        fake_kernels_fail_at = at;
        assert_int_equal(plan_build(model, facts, (struct mesh){1, 1, 1}, 0, &fake_kernels, NULL, &plan, &err),
                         TALLY_EUNSUPPORTED);
        assert_null(plan);
        assert_non_null(strstr(err.message, "asked to fail"));
        assert_int_equal(fake_kernels_live, 0);
    }
    fake_kernels_fail_at = 0;
    static const struct mesh meshes[] = {{0, 1, 1}, {2, 2, 1}, {1, 1, 2}, {1, 1, 1}};
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        struct plan *plan = NULL;
        struct tally_error err = {0};
        assert_int_not_equal(plan_build(model, facts, meshes[i], 3, &fake_kernels, NULL, &plan, &err), TALLY_OK);
        assert_null(plan);
    }
    tally__v1__data_facts__free_unpacked(facts, NULL);
    model_free(model);
}

/* ---- actions ---- */

/* Runs a rank's list on ranges of leaves instead of numbers, and gives what it pushes. */
static size_t run_actions(const struct plan *plan, uint32_t leaves, const struct action *actions, size_t n,
                          struct tree_node *pushed)
{
    struct tree_node level[34] = {{0, 0}};
    uint32_t forward = UINT32_MAX;
    size_t count = 0;
    for (size_t i = 0; i < n; i++) {
        const struct action *a = &actions[i];
        if (a->kind == ACTION_FORWARD) {
            forward = a->micro_batch;
            assert_int_equal(a->slot, 0);
        }
        if (a->kind == ACTION_PUSH) {
            assert_int_equal(pushed[count - 1].begin, a->push.begin);
            assert_int_equal(pushed[count - 1].end, a->push.end);
        }
        if (a->kind != ACTION_BACKWARD)
            continue;
        assert_int_equal(a->micro_batch, forward);
        assert_true(a->level < plan->levels && a->merges <= a->level);
        assert_true(level[a->level].begin == level[a->level].end); /* not in use */
        level[a->level] = (struct tree_node){a->micro_batch, a->micro_batch + 1};
        uint32_t at = a->level;
        for (uint32_t m = 0; m < a->merges; m++, at--) {
            assert_int_equal(level[at - 1].end, level[at].begin);
            level[at - 1].end = level[at].end;
            level[at] = (struct tree_node){0, 0};
            assert_true(tree_is_node(leaves, level[at - 1]));
        }
        if (a->push.begin == a->push.end)
            continue;
        assert_int_equal(at, 0);
        assert_int_equal(level[0].begin, a->push.begin);
        assert_int_equal(level[0].end, a->push.end);
        pushed[count++] = level[0];
        level[0] = (struct tree_node){0, 0};
    }
    for (size_t i = 0; i < 34; i++)
        assert_true(level[i].begin == level[i].end);
    return count;
}

static void check_rank(const struct model *model, uint32_t leaves, uint32_t ranks, uint32_t rank, uint32_t *next)
{
    struct plan *plan = plan_of(model, ranks, rank, leaves, 0);
    struct tree_node cover[TREE_COVER_MAX], pushed[TREE_COVER_MAX], mine = tree_share(leaves, rank, ranks);
    struct action *actions = calloc(plan_actions_max(plan), sizeof *actions);
    size_t n = plan_step_actions(plan, leaves, actions);
    assert_true(n <= plan_actions_max(plan));
    assert_int_equal(n == 0, mine.begin == mine.end);
    size_t nodes = tree_cover(leaves, mine.begin, mine.end, cover);
    assert_int_equal(run_actions(plan, leaves, actions, n, pushed), nodes);
    assert_memory_equal(cover, pushed, nodes * sizeof *cover);
    for (size_t i = 0; i < nodes; i++) {
        assert_int_equal(pushed[i].begin, *next);
        *next = pushed[i].end;
    }
    assert_true(plan->levels <= tree_levels(mine.end - mine.begin) || plan->levels == 1);
    free(actions);
    plan_free(plan);
}

static void actions_follow_the_tree(void **state)
{
    (void)state;
    size_t in[1] = {2};
    struct model *model = model_of("[{linear: {out_features: 2}}]", 1, in);
    for (uint32_t leaves = 1; leaves <= 40; leaves++)
        for (uint32_t ranks = 1; ranks <= 9; ranks++) {
            uint32_t next = 0;
            model->spec->train->batch_size = leaves;
            model->spec->train->micro_batch_size = 1;
            for (uint32_t rank = 0; rank < ranks; rank++)
                check_rank(model, leaves, ranks, rank, &next);
            assert_int_equal(next, leaves);
        }
    model_free(model);
}

/* The short last step of an epoch has its own tree. */
static void actions_of_a_short_step(void **state)
{
    (void)state;
    size_t in[1] = {2};
    struct model *model = model_of("[{linear: {out_features: 2}}]", 1, in);
    model->spec->train->batch_size = 16;
    model->spec->train->micro_batch_size = 2;
    for (uint64_t samples = 1; samples < 64; samples++) {
        struct plan *plan = plan_of(model, 1, 0, samples, 0);
        struct action actions[64];
        struct tree_node pushed[TREE_COVER_MAX];
        assert_true(plan_actions_max(plan) <= 64);
        for (uint64_t step = 1; step <= plan->batches.steps; step++) {
            struct step_shape shape = batches_step(&plan->batches, step);
            size_t n = plan_step_actions(plan, shape.leaves, actions);
            assert_int_equal(n, 2 * shape.leaves + 1);
            assert_int_equal(run_actions(plan, shape.leaves, actions, n, pushed), 1);
            for (uint32_t leaf = 0; leaf < shape.leaves; leaf++)
                assert_non_null(plan_program(plan, batches_leaf(&plan->batches, &shape, leaf).count));
        }
        plan_free(plan);
    }
    /* A batch that is larger than the set has the leaves of its samples. */
    model->spec->train->batch_size = 1 << 24;
    model->spec->train->micro_batch_size = 1;
    struct plan *plan = plan_of(model, 1, 0, 100, 0);
    assert_int_equal(plan_actions_max(plan), 300);
    plan_free(plan);
    model_free(model);
}

static void memory_adds_up(void **state)
{
    (void)state;
    size_t in[1] = {800};
    struct model *model = model_of("[{linear: {out_features: 500}}, {relu: {}}, {linear: {out_features: 10}}]", 1, in);
    struct plan *plan = plan_of(model, 1, 0, 100, 0);
    struct plan_memory m = plan_memory(plan);
    size_t flat = model->flat_count * sizeof(float), held = 0;
    assert_int_equal(m.weights, flat);
    assert_int_equal(plan->levels, 3); /* 4 micro-batches */
    assert_int_equal(m.gradients, 3 * flat);
    assert_int_equal(m.total, m.weights + m.gradients + m.activations + m.activation_gradients + m.workspace);
    for (uint32_t s = 0; s < 3; s++) {
        struct shard_memory shard = plan_shard_memory(model, 3, s);
        assert_int_equal(shard.momentum, 0);
        assert_int_equal(shard.total, shard.weights + shard.pending);
        held += shard.pending;
    }
    assert_int_equal(held, flat);
    model->spec->train->optimizer->sgd->momentum = 0.9;
    assert_int_equal(plan_shard_memory(model, 1, 0).momentum, 2 * flat);
    plan_free(plan);
    model_free(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(convolutions_take_relu_and_pool),
        cmocka_unit_test(linear_takes_relu),
        cmocka_unit_test(rows_inside_a_sample),
        cmocka_unit_test(gradients_add_up),
        cmocka_unit_test(nothing_before_has_parameters),
        cmocka_unit_test(random_models),
        cmocka_unit_test(large_layers),
        cmocka_unit_test(gradients_share_memory),
        cmocka_unit_test(programs_for_every_row_count),
        cmocka_unit_test(failures_leave_nothing),
        cmocka_unit_test(actions_follow_the_tree),
        cmocka_unit_test(actions_of_a_short_step),
        cmocka_unit_test(memory_adds_up),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
