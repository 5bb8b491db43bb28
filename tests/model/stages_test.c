/* Layers on stages, and what plans make of it: every operation, slice and tensor that crosses is somebody's, once. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model/plan.h"
#include "tests/model/fake_kernels.h"
#include "tests/model/job_text.h"

#define STAGES_MAX 8
#define NAMES_MAX 40

/* A pipeline without memory of its own. */
struct pipeline {
    Tally__V1__Parallel parallel;
    Tally__V1__Pipeline pipeline;
    Tally__V1__Stage stage[STAGES_MAX], *stages[STAGES_MAX];
    char *names[STAGES_MAX][NAMES_MAX];
};

static void pipeline_init(struct pipeline *p)
{
    *p = (struct pipeline){.parallel = TALLY__V1__PARALLEL__INIT, .pipeline = TALLY__V1__PIPELINE__INIT};
    p->parallel.pipeline = &p->pipeline;
    p->pipeline.placement = p->stages;
    for (size_t i = 0; i < STAGES_MAX; i++) {
        p->stage[i] = (Tally__V1__Stage)TALLY__V1__STAGE__INIT;
        p->stage[i].layers = p->names[i];
        p->stages[i] = &p->stage[i];
    }
}

static void place(struct pipeline *p, uint32_t stage, const char *layer)
{
    if (p->pipeline.n_placement <= stage)
        p->pipeline.n_placement = stage + 1;
    assert_true(p->stage[stage].n_layers < NAMES_MAX);
    p->names[stage][p->stage[stage].n_layers++] = (char *)layer;
}

static void by_cost(struct pipeline *p, uint32_t stages, uint32_t chunks)
{
    p->pipeline.has_stages = 1;
    p->pipeline.stages = stages;
    p->pipeline.has_chunks = 1;
    p->pipeline.chunks = chunks;
}

static tally_status build(const char *layers, size_t ndim, const size_t *in, const struct pipeline *p,
                          struct model **ret_model, struct tally_error *err)
{
    Tally__V1__JobSpec *spec = job_of_layers(layers, "cross_entropy", ndim, in);
    Tally__V1__DataFacts *facts = facts_of(ndim, in, 0, NULL, 100, 0);
    spec->parallel = p ? (Tally__V1__Parallel *)&p->parallel : NULL;
    tally_status status = model_build(spec, facts, ret_model, err);
    spec->parallel = NULL;
    tally__v1__job_spec__free_unpacked(spec, NULL);
    tally__v1__data_facts__free_unpacked(facts, NULL);
    return status;
}

static const size_t image28[3] = {1, 28, 28};
static const char lenet[] =
    "[{name: conv1, conv2d: {out_channels: 20, kernel_size: 5}}, {name: pool1, max_pool2d: {kernel_size: 2}},"
    " {name: conv2, conv2d: {out_channels: 50, kernel_size: 5}}, {max_pool2d: {kernel_size: 2}}, {name: flat, flatten: "
    "{}},"
    " {name: fc1, linear: {out_features: 500}}, {name: act, relu: {}}, {name: fc2, linear: {out_features: 10}}]";

static void assert_stages(const struct model *model, const uint32_t *stage, const uint32_t *segment)
{
    for (size_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].stage != stage[i] || model->layers[i].segment != segment[i])
            fail_msg("layer %s: stage %u, segment %u", model->layers[i].name, model->layers[i].stage,
                     model->layers[i].segment);
}

static void layers_follow_the_one_before(void **state)
{
    (void)state;
    struct pipeline p;
    struct model *model = NULL;
    struct tally_error err = {0};
    pipeline_init(&p);
    place(&p, 0, "conv1");
    place(&p, 0, "fc1");
    place(&p, 1, "conv2");
    place(&p, 1, "fc2");
    assert_int_equal(build(lenet, 3, image28, &p, &model, &err), TALLY_OK);
    assert_stages(model, (const uint32_t[]){0, 0, 1, 1, 1, 0, 0, 1}, (const uint32_t[]){0, 0, 1, 1, 1, 2, 2, 3});
    assert_int_equal(model->stage_count, 2);
    assert_int_equal(model->segment_count, 4);
    model_free(model);

    /* The first layer is not named: stage 0. A view computes nothing, so it cuts nothing. */
    pipeline_init(&p);
    place(&p, 1, "flat");
    place(&p, 0, "fc1");
    place(&p, 1, "fc2");
    assert_int_equal(build(lenet, 3, image28, &p, &model, &err), TALLY_OK);
    assert_stages(model, (const uint32_t[]){0, 0, 0, 0, 1, 0, 0, 1}, (const uint32_t[]){0, 0, 0, 0, 0, 0, 0, 1});
    model_free(model);

    /* A pool stays with the convolution that it is one operation with; what follows it by name does not. */
    pipeline_init(&p);
    place(&p, 1, "pool1");
    place(&p, 0, "fc1");
    assert_int_equal(build(lenet, 3, image28, &p, &model, &err), TALLY_OK);
    assert_stages(model, (const uint32_t[]){0, 0, 1, 1, 1, 0, 0, 0}, (const uint32_t[]){0, 0, 1, 1, 1, 2, 2, 2});
    model_free(model);
}

static void refusals(void **state)
{
    (void)state;
    struct pipeline p[5];
    struct tally_error err = {0};
    struct model *model = NULL;
    for (size_t i = 0; i < 5; i++)
        pipeline_init(&p[i]);
    place(&p[0], 0, "conv1");
    place(&p[0], 1, "conv7");
    place(&p[1], 0, "conv1");
    place(&p[1], 1, "conv1");
    place(&p[2], 0, "conv1");
    place(&p[2], 1, "flat");
    place(&p[2], 0, "fc1");
    by_cost(&p[3], 5, 1); /* conv1 + pool, conv2 + pool, fc1 + relu, fc2 */
    by_cost(&p[4], 2, 3);
    static const char *const says[5] = {
        "'conv7' is not in the model", "'conv1' is placed already", "stage 1 has nothing to compute",
        "5 runs of layers, but the model has 4 operations", "6 runs of layers, but the model has 4 operations"};
    for (size_t i = 0; i < 5; i++) {
        assert_int_equal(build(lenet, 3, image28, &p[i], &model, &err), TALLY_EINVAL);
        if (!strstr(err.message, says[i]))
            fail_msg("\"%s\" does not say \"%s\"", err.message, says[i]);
        assert_null(model);
    }
}

/* Four equal layers on two stages: two each; and dealt out in turn with two chunks. */
static void equal_layers_are_shared(void **state)
{
    (void)state;
    static const char layers[] = "[{linear: {out_features: 64}}, {relu: {}}, {linear: {out_features: 64}}, {relu: {}}, "
                                 "{linear: {out_features: 64}}, {relu: {}}, {linear: {out_features: 64}}]";
    const size_t in[1] = {64};
    struct pipeline p;
    struct model *model = NULL;
    struct tally_error err = {0};
    pipeline_init(&p);
    by_cost(&p, 2, 1);
    assert_int_equal(build(layers, 1, in, &p, &model, &err), TALLY_OK);
    assert_stages(model, (const uint32_t[]){0, 0, 0, 0, 1, 1, 1}, (const uint32_t[]){0, 0, 0, 0, 1, 1, 1});
    model_free(model);
    by_cost(&p, 2, 2);
    assert_int_equal(build(layers, 1, in, &p, &model, &err), TALLY_OK);
    assert_stages(model, (const uint32_t[]){0, 0, 1, 1, 0, 0, 1}, (const uint32_t[]){0, 0, 1, 1, 2, 2, 3});
    assert_int_equal(model->segment_stage[2], 0);
    model_free(model);
}

/* ---- plans ---- */

static struct plan *plan_of(const struct model *model, struct mesh mesh, uint32_t rank, uint64_t samples)
{
    struct plan *plan = NULL;
    struct tally_error err = {0};
    Tally__V1__DataFacts *facts = facts_of(0, NULL, 0, NULL, samples, 9);
    if (plan_build(model, facts, mesh, rank, &fake_kernels, NULL, &plan, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    tally__v1__data_facts__free_unpacked(facts, NULL);
    return plan;
}

/* The same model on stages. The caller frees both. */
static struct model *on_stages(const struct model *plain, const struct pipeline *p, struct tally_error *err)
{
    struct model *model = NULL;
    size_t in[3] = {plain->input.dim[0], plain->input.dim[1], plain->input.dim[2]};
    Tally__V1__DataFacts *facts = facts_of(3, in, 0, NULL, 100, 0);
    plain->spec->parallel = (Tally__V1__Parallel *)&p->parallel;
    model_build(plain->spec, facts, &model, err);
    plain->spec->parallel = NULL;
    tally__v1__data_facts__free_unpacked(facts, NULL);
    return model;
}

static void check_slices(const struct model *plain, const struct model *model, struct plan *const *plans)
{
    assert_int_equal(plain->flat_count, model->flat_count);
    for (size_t i = 0; i < model->param_count; i++)
        assert_int_equal(plain->params[i].offset, model->params[i].offset);
    size_t floats = 0;
    for (uint32_t s = 0; s < model->stage_count; s++)
        floats += plans[s]->flat_count;
    assert_int_equal(floats, model->flat_count);
    for (uint32_t i = 0; i < model->slice_count; i++) {
        uint32_t owners = 0;
        const struct slice *slice = &model->slices[i];
        uint32_t stage = model->layers[model->params[slice->param_begin].layer].stage;
        for (uint32_t p = slice->param_begin; p < slice->param_end; p++)
            assert_int_equal(model->layers[model->params[p].layer].segment,
                             model->layers[model->params[slice->param_begin].layer].segment);
        for (uint32_t s = 0; s < model->stage_count; s++) {
            if (plans[s]->slice_offsets[i] == SIZE_MAX)
                continue;
            owners++;
            assert_int_equal(s, stage);
            assert_true(plans[s]->slice_offsets[i] + slice->count <= plans[s]->flat_count);
        }
        assert_int_equal(owners, 1);
    }
}

/* Every tensor that one rank sends, its peer receives, as often, and in the same order on each side. */
static void check_messages(struct plan *const *plans, uint32_t stages, uint32_t leaves)
{
    const struct plan *plan = plans[0];
    uint32_t *sent = calloc(plan->edge_count * leaves + 1, sizeof *sent);
    uint32_t *received = calloc(plan->edge_count * leaves + 1, sizeof *received);
    assert_true(sent && received);
    for (uint32_t s = 0; s < stages; s++) {
        size_t most = plan_actions_max(plans[s]);
        struct action *actions = calloc(most + 1, sizeof *actions);
        size_t n = plan_step_actions(plans[s], leaves, actions), forwards = 0;
        assert_true(n <= most);
        for (size_t i = 0; i < n; i++) {
            const struct action *a = &actions[i];
            assert_true(plan_owns(plans[s], a->chunk) && a->slot < plans[s]->segments[a->chunk].slots);
            forwards += a->kind == ACTION_FORWARD;
            if (a->kind != ACTION_SEND && a->kind != ACTION_RECEIVE)
                continue;
            const struct plan_edge *e = &plans[s]->edges[a->edge];
            uint32_t there = a->kind == ACTION_SEND ? e->to : e->from;
            assert_int_equal(a->peer, plan->segments[there].stage);
            (a->kind == ACTION_SEND ? sent : received)[a->edge * leaves + a->micro_batch]++;
        }
        uint32_t mine = 0;
        for (uint32_t k = 0; k < plan->segment_count; k++)
            mine += plan_owns(plans[s], k);
        assert_int_equal(forwards, mine * leaves);
        free(actions);
    }
    for (size_t i = 0; i < plan->edge_count * leaves; i++)
        assert_true(sent[i] == 1 && received[i] == 1);
    free(sent);
    free(received);
}

static void check_edges(struct plan *const *plans, uint32_t stages)
{
    const struct plan *plan = plans[0];
    for (size_t i = 0; i < plan->edge_count; i++) {
        const struct plan_edge *e = &plan->edges[i];
        uint32_t from = plan->segments[e->from].stage, to = plan->segments[e->to].stage;
        assert_true(from != to && e->backward == (e->from > e->to));
        assert_true(plan_peer_room(plan, from, to) > 0);
        for (uint32_t s = 0; s < stages; s++)
            assert_memory_equal(&plans[s]->edges[i].from, &e->from, sizeof e->from);
        const struct plan_tensor *here = &plans[from]->tensors[e->tensor], *there = &plans[to]->tensors[e->tensor];
        assert_true(e->backward ? here->gradient >= PLAN_GRADIENT_EDGE && there->gradient >= PLAN_GRADIENT_EDGE
                                : here->home != PLAN_NOWHERE && there->home == e->to);
    }
}

static void check_model(unsigned seed, uint32_t stages, uint32_t chunks, enum schedule_kind kind)
{
    struct model *plain = random_model(seed, 4);
    struct pipeline p;
    struct tally_error err = {0};
    pipeline_init(&p);
    by_cost(&p, stages, chunks);
    p.pipeline.schedule = kind == SCHEDULE_GPIPE  ? TALLY__V1__SCHEDULE__gpipe
                          : kind == SCHEDULE_1F1B ? TALLY__V1__SCHEDULE__one_f_one_b
                                                  : TALLY__V1__SCHEDULE__interleaved;
    struct model *model = on_stages(plain, &p, &err);
    struct plan *whole = plan_of(plain, (struct mesh){1, 1, 1}, 0, 10), *plans[STAGES_MAX];
    if (!model) {
        /* Only for want of operations. */
        assert_true(whole->op_count < (size_t)stages * chunks);
        assert_non_null(strstr(err.message, "operations"));
    } else {
        assert_int_equal(model->segment_count, stages == 1 ? 1 : stages * chunks);
        for (uint32_t s = 0; s < stages; s++)
            plans[s] = plan_of(model, (struct mesh){1, stages, 1}, s, 10);
        /* Balancing cuts between operations. */
        assert_int_equal(plans[0]->op_count, whole->op_count);
        check_slices(plain, model, plans);
        if (stages > 1) {
            uint32_t leaves = batches_step(&plans[0]->batches, 1).leaves;
            check_edges(plans, stages);
            check_messages(plans, stages, leaves);
        }
        for (uint32_t s = 0; s < stages; s++)
            plan_free(plans[s]);
    }
    plan_free(whole);
    model_free(model);
    model_free(plain);
}

static void random_models_on_stages(void **state)
{
    (void)state;
    for (unsigned seed = 0; seed < 150; seed++)
        check_model(seed, 1 + seed % 5, 1 + seed / 5 % 3, (enum schedule_kind)(seed % 3));
    assert_int_equal(fake_kernels_live, 0);
}

static void meshes_must_fit(void **state)
{
    (void)state;
    struct pipeline p;
    struct model *model = NULL;
    struct plan *plan = NULL;
    struct tally_error err = {0};
    pipeline_init(&p);
    by_cost(&p, 3, 1);
    assert_int_equal(build(lenet, 3, image28, &p, &model, &err), TALLY_OK);
    Tally__V1__DataFacts *facts = facts_of(3, image28, 0, NULL, 100, 0);
    static const struct {
        struct mesh mesh;
        uint32_t rank;
    } wrong[] = {{{1, 2, 1}, 0}, {{1, 4, 1}, 0}, {{2, 3, 1}, 6}, {{1, 3, 2}, 0}, {{0, 3, 1}, 0}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        assert_int_not_equal(plan_build(model, facts, wrong[i].mesh, wrong[i].rank, &fake_kernels, NULL, &plan, &err),
                             TALLY_OK);
    /* The whole model on each worker is a mesh too. */
    assert_int_equal(plan_build(model, facts, (struct mesh){2, 1, 1}, 1, &fake_kernels, NULL, &plan, &err), TALLY_OK);
    assert_int_equal(plan->segment_count, 1);
    assert_int_equal(plan->edge_count, 0);
    plan_free(plan);
    assert_int_equal(plan_build(model, facts, (struct mesh){2, 3, 1}, 5, &fake_kernels, NULL, &plan, &err), TALLY_OK);
    assert_int_equal(plan->data_index, 1);
    assert_int_equal(plan->stage, 2);
    assert_int_equal(plan_peer(plan, 0), 3);
    plan_free(plan);
    tally__v1__data_facts__free_unpacked(facts, NULL);
    model_free(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(layers_follow_the_one_before),
        cmocka_unit_test(refusals),
        cmocka_unit_test(equal_layers_are_shared),
        cmocka_unit_test(random_models_on_stages),
        cmocka_unit_test(meshes_must_fit),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
