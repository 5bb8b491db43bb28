/* The executor on whole small models: gradients against finite differences in double, and the same bits whoever runs
 * which micro-batch. */
#include "worker/executor.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/worker/double_model.h"
#include "tests/worker/memory_hub.h"
#include "tests/worker/random_job.h"
#include "tests/worker/solo.h"

#if defined(__SANITIZE_THREAD__)
#define RANDOM_JOBS 4 /* there is one thread */
#define LARGE_JOBS 1
#elif defined(__SANITIZE_ADDRESS__)
#define RANDOM_JOBS 12 /* many times slower */
#define LARGE_JOBS 2
#else
#define RANDOM_JOBS 40
#define LARGE_JOBS 4
#endif

/* ---- gradients ---- */

/* All training samples, in the order of the first epoch's first step. */
struct batch {
    float *x;
    void *targets;
    size_t rows;
};

static struct batch read_first_step(const struct test_job *job, const struct test_rank *rank)
{
    const struct dataset_info *info = dataset_info(job->train);
    struct step_shape shape = batches_step(&rank->plan->batches, 1);
    struct batch b = {.rows = shape.samples};
    b.x = calloc(b.rows * info->input_elements, sizeof *b.x);
    b.targets = calloc(b.rows * info->target_elements, sizeof(int64_t));
    assert_non_null(b.x);
    assert_non_null(b.targets);
    dataset_read(job->train, order_epoch(rank->order, 1), b.rows, b.x, info->input_elements, b.targets);
    return b;
}

/* d loss_sum / d weight i, where the loss at w is `loss`; or NaN where it has a kink so near that differences say
 * nothing. */
static double difference(const struct test_job *job, const struct batch *b, double *w, size_t i, double loss)
{
    size_t stride = job->model->input.elements;
    double at = w[i], h = 1e-6;
    w[i] = at - h;
    double left = (loss - double_model_loss(job->model, w, b->x, stride, b->rows, b->targets)) / h;
    w[i] = at + h;
    double right = (double_model_loss(job->model, w, b->x, stride, b->rows, b->targets) - loss) / h;
    w[i] = at;
    return fabs(left - right) > 1e-4 * (1 + fabs(left) + fabs(right)) ? NAN : (left + right) / 2;
}

/* Takes the spec. Compares the loss and every weight's gradient, or 200 of each parameter's where it has more. */
static void check_gradients(Tally__V1__JobSpec *spec)
{
    struct solo solo;
    solo_open(spec, &(struct memory_hub_options){.poison = true, .scatter = true}, &solo);
    const struct test_job *job = solo.job;
    const struct model *model = job->model;
    const struct memory_hub *hub = solo.hub;
    double *w = calloc(model->flat_count, sizeof *w);
    assert_non_null(w);
    for (size_t i = 0; i < model->flat_count; i++)
        w[i] = (double)memory_hub_weights(hub)[i];
    solo_step(&solo, 1);
    assert_int_equal(memory_hub_version(hub), 1);
    struct batch b = read_first_step(job, &solo.rank);
    double loss = double_model_loss(model, w, b.x, model->input.elements, b.rows, b.targets);
    double got_loss = memory_hub_loss(hub, 1).loss_sum;
    if (fabs(got_loss - loss) > 1e-5 * fabs(loss) + 1e-5)
        fail_msg("loss %.9g, in double %.9g", got_loss, loss);
    size_t kinks = 0, checked = 0;
    for (size_t p = 0; p < model->param_count; p++) {
        const struct param *param = &model->params[p];
        double scale = 0;
        for (size_t i = 0; i < param->shape.elements; i++)
            scale = fmax(scale, fabs((double)memory_hub_gradient(hub)[param->offset + i]));
        size_t stride = param->shape.elements / 200 + 1;
        for (size_t i = 0; i < param->shape.elements; i += stride) {
            double want = difference(job, &b, w, param->offset + i, loss);
            double got = (double)memory_hub_gradient(hub)[param->offset + i];
            checked++;
            if (isnan(want)) {
                kinks++;
                continue;
            }
            if (!(fabs(got - want) <= 2e-4 * scale + 2e-4))
                fail_msg("%s[%zu]: %.9g, by differences %.9g", param->name, i, got, want);
        }
    }
    assert_true(checked > 0 && kinks * 10 <= checked);
    free(w);
    free(b.x);
    free(b.targets);
    solo_close(&solo);
}

static void test_gradients_mlp(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = spec_new(1, 12, 5, 0, 1); /* 5 + 5 + 2 rows */
    spec_synthetic(spec, 0, 12, 4, (const uint32_t[]){7}, 1, NULL, 0);
    spec_linear(spec, "a", 9, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, "b", 6, false);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_TANH);
    spec_linear(spec, "c", 4, true);
    spec_cross_entropy(spec, -100, 0.1);
    check_gradients(spec);
}

static void test_gradients_residual_mse(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = spec_new(2, 9, 4, 0, 1);
    spec_synthetic(spec, 0, 9, 0, (const uint32_t[]){6}, 1, (const uint32_t[]){3}, 1);
    spec_linear(spec, "stem", 8, true);
    spec_plain(spec, "act", TALLY__V1__LAYER__KIND_GELU);
    spec_linear(spec, "left", 8, true);
    spec_from(spec_linear(spec, "right", 8, true), "act");
    Tally__V1__Layer *sum = spec_plain(spec, "sum", TALLY__V1__LAYER__KIND_ADD);
    spec_from(sum, "left");
    spec_from(sum, "right");
    spec_from(sum, "act");
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_SIGMOID);
    spec_linear(spec, "out", 3, true);
    spec_mse(spec);
    check_gradients(spec);
}

static void test_gradients_cnn(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = spec_new(3, 6, 4, 0, 1);
    spec_synthetic(spec, 0, 6, 5, (const uint32_t[]){2, 10, 9}, 3, NULL, 0);
    spec_conv(spec, "c1", 4, 3, 1, 0, 1);
    spec_max_pool(spec, NULL, 2, 2, 0);
    spec_conv(spec, "c2", 6, 3, 1, 1, 2);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    spec_avg_pool(spec, NULL, 2, 2, 0);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_FLATTEN);
    spec_linear(spec, "f", 7, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, "g", 5, true);
    spec_cross_entropy(spec, -100, 0);
    check_gradients(spec);
}

/* A convolution that strides, a pool that overlaps. */
static void test_gradients_strided(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = spec_new(4, 5, 5, 0, 1);
    spec_synthetic(spec, 0, 5, 3, (const uint32_t[]){1, 12, 12}, 3, NULL, 0);
    spec_conv(spec, "c1", 3, 3, 2, 1, 1);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_TANH);
    spec_max_pool(spec, NULL, 3, 1, 1);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_FLATTEN);
    spec_linear(spec, "f", 3, true);
    spec_cross_entropy(spec, -100, 0);
    check_gradients(spec);
}

static void test_gradients_linear_inside_a_sample(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = spec_new(5, 6, 3, 0, 1);
    spec_synthetic(spec, 0, 6, 4, (const uint32_t[]){2, 3, 5}, 3, NULL, 0);
    spec_linear(spec, "rows", 4, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_TANH);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_FLATTEN);
    spec_linear(spec, "out", 4, true);
    spec_cross_entropy(spec, -100, 0);
    check_gradients(spec);
}

static void test_gradients_random(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < RANDOM_JOBS; seed++)
        check_gradients(random_job(seed, &(struct random_options){.steps = 1}));
}

/* ---- bits ---- */

struct outcome {
    float *weights;
    struct kernel_loss *losses; /* by step */
    uint64_t pushes;
};

static void outcome_free(struct outcome *o)
{
    free(o->weights);
    free(o->losses);
}

/* All ranks in turn on one thread, step by step. */
static struct outcome run_job(const struct test_job *job, uint32_t ranks, bool scatter)
{
    struct test_rank *rank = calloc(ranks, sizeof *rank);
    struct transport **transport = calloc(ranks, sizeof *transport);
    assert_non_null(rank);
    assert_non_null(transport);
    for (uint32_t r = 0; r < ranks; r++)
        test_rank_open(job, r, ranks, NULL, &rank[r]);
    struct memory_hub_options options = {.clients = ranks, .poison = true, .scatter = scatter};
    struct memory_hub *hub;
    struct tally_error err;
    if (memory_hub_open(rank[0].plan, &options, &hub, &err))
        fail_msg("%s", err.message);
    for (uint32_t r = 0; r < ranks; r++)
        transport[r] = memory_hub_join(hub, r, executor_weights(rank[r].executor));
    uint64_t steps = rank[0].plan->batches.steps;
    for (uint64_t step = 1; step <= steps; step++) {
        for (uint32_t r = 0; r < ranks; r++)
            if (executor_step(rank[r].executor, transport[r], step, &err))
                fail_msg("rank %u, step %llu: %s", r, (unsigned long long)step, err.message);
        assert_int_equal(memory_hub_version(hub), step);
    }
    struct outcome o = {.weights = calloc(job->model->flat_count, sizeof(float)),
                        .losses = calloc(steps + 1, sizeof(struct kernel_loss)),
                        .pushes = memory_hub_pushes(hub)};
    assert_non_null(o.weights);
    assert_non_null(o.losses);
    memcpy(o.weights, memory_hub_weights(hub), job->model->flat_count * sizeof(float));
    for (uint64_t step = 1; step <= steps; step++)
        o.losses[step] = memory_hub_loss(hub, step);
    memory_hub_close(hub);
    for (uint32_t r = 0; r < ranks; r++)
        test_rank_close(&rank[r]);
    free(rank);
    free(transport);
    return o;
}

/* Takes the spec. */
static void check_bits(Tally__V1__JobSpec *spec, const char *what)
{
    struct test_job *job = test_job_open(spec);
    struct outcome one = run_job(job, 1, false);
    for (size_t i = 0; i < job->model->flat_count; i++)
        if (!isfinite(one.weights[i]))
            fail_msg("%s: weight %zu is %g", what, i, (double)one.weights[i]);
    const uint32_t ranks[] = {2, 3, 5, 8};
    for (size_t k = 0; k < sizeof ranks / sizeof ranks[0]; k++) {
        struct outcome many = run_job(job, ranks[k], k % 2 == 0 && job->model->slice_count < 4);
        if (memcmp(one.weights, many.weights, job->model->flat_count * sizeof(float)))
            fail_msg("%s: %u workers give other weights than one", what, ranks[k]);
        uint64_t steps = job->spec->train->steps;
        if (memcmp(one.losses, many.losses, (steps + 1) * sizeof *one.losses))
            fail_msg("%s: %u workers give other losses than one", what, ranks[k]);
        assert_true(many.pushes >= one.pushes);
        outcome_free(&many);
    }
    outcome_free(&one);
    test_job_close(job);
}

static void test_bits_random(void **state)
{
    (void)state;
    for (uint64_t seed = 100; seed < 100 + RANDOM_JOBS; seed++) {
        char what[32];
        snprintf(what, sizeof what, "seed %llu", (unsigned long long)seed);
        check_bits(random_job(seed, &(struct random_options){.steps = 5}), what);
    }
}

static void test_bits_of_every_number_of_leaves(void **state)
{
    (void)state;
    for (uint32_t leaves = 1; leaves <= 9; leaves++) {
        /* The last batch of the epoch holds 3 samples less; the last micro-batch of each is short. */
        Tally__V1__JobSpec *spec = spec_new(leaves, leaves * 4 - 1, 4, 0, 5);
        spec_synthetic(spec, 0, 2 * (leaves * 4 - 1) + (leaves * 4 + 1) / 2, 3, (const uint32_t[]){11}, 1, NULL, 0);
        spec_linear(spec, NULL, 13, true);
        spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
        spec_linear(spec, NULL, 3, true);
        spec_cross_entropy(spec, -100, 0);
        spec_sgd(spec, 0.1, 0.9, 0, true);
        char what[32];
        snprintf(what, sizeof what, "%u leaves", leaves);
        check_bits(spec, what);
    }
}

/* Parameters of several slices, and rows that are longer than a slice. */
static void test_bits_of_large_parameters(void **state)
{
    (void)state;
    for (uint64_t seed = 1; seed <= LARGE_JOBS; seed++) {
        char what[32];
        snprintf(what, sizeof what, "wide, seed %llu", (unsigned long long)seed);
        check_bits(random_job(seed, &(struct random_options){.steps = 2, .wide = true}), what);
    }
}

/* ---- the rest ---- */

struct failing {
    struct transport transport;
    struct transport *inner;
    unsigned waits, destinations, pushes;
    unsigned fail_wait, fail_destination, fail_push; /* the n-th call; 0: none */
    uint32_t wait_begin[8], wait_end[8];
};

static tally_status failing_wait(struct transport *t, uint32_t begin, uint32_t end, uint64_t version,
                                 struct tally_error *err)
{
    struct failing *f = (struct failing *)t;
    if (f->waits < 8) {
        f->wait_begin[f->waits] = begin;
        f->wait_end[f->waits] = end;
    }
    if (++f->waits == f->fail_wait)
        return tally_fail(err, TALLY_ETIMEDOUT, "no weights");
    return f->inner->wait_slices(f->inner, begin, end, version, err);
}

static tally_status failing_destination(struct transport *t, uint32_t slice, float **ret_gradient,
                                        struct tally_error *err)
{
    struct failing *f = (struct failing *)t;
    if (++f->destinations == f->fail_destination)
        return tally_fail(err, TALLY_EUNAVAIL, "no room");
    return f->inner->destination(f->inner, slice, ret_gradient, err);
}

static tally_status failing_push(struct transport *t, const struct transport_push *push, struct tally_error *err)
{
    struct failing *f = (struct failing *)t;
    if (++f->pushes == f->fail_push)
        return tally_fail(err, TALLY_ESTATE, "refused");
    return f->inner->push(f->inner, push, err);
}

static tally_status failing_flush(struct transport *t, struct tally_error *err)
{
    return ((struct failing *)t)->inner->flush(((struct failing *)t)->inner, err);
}

static void test_failures_of_the_transport(void **state)
{
    (void)state;
    static const struct {
        unsigned wait, destination, push;
        tally_status want;
    } cases[] = {
        {1, 0, 0, TALLY_ETIMEDOUT}, {2, 0, 0, TALLY_ETIMEDOUT}, {0, 1, 0, TALLY_EUNAVAIL}, {0, 0, 1, TALLY_ESTATE}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct solo solo;
        struct tally_error err;
        solo_open(spec_small_job(4), NULL, &solo);
        struct failing f = {.transport = {failing_wait, failing_destination, failing_push, failing_flush},
                            .inner = solo.transport,
                            .fail_wait = cases[i].wait,
                            .fail_destination = cases[i].destination,
                            .fail_push = cases[i].push};
        assert_int_equal(executor_step(solo.rank.executor, &f.transport, 1, &err), cases[i].want);
        assert_int_equal(err.code, cases[i].want);
        solo_close(&solo);
    }
}

/* One wait for each layer's own slices, at the first micro-batch that needs them. */
static void test_waits_for_what_it_reads(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = spec_new(9, 8, 4, 0, 2);
    spec_synthetic(spec, 0, 16, 3, (const uint32_t[]){600}, 1, NULL, 0);
    spec_linear(spec, "a", 600, true); /* 1.4 MB: slices of its own */
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, "b", 3, true);
    spec_cross_entropy(spec, -100, 0);
    struct solo solo;
    struct tally_error err;
    solo_open(spec, NULL, &solo);
    struct failing f = {.transport = {failing_wait, failing_destination, failing_push, failing_flush},
                        .inner = solo.transport};
    assert_int_equal(executor_step(solo.rank.executor, &f.transport, 1, &err), TALLY_OK);
    assert_int_equal(f.waits, 2); /* although there are two micro-batches */
    for (int i = 0; i < 2; i++) {
        const struct layer *layer = &solo.job->model->layers[i ? 2 : 0];
        const struct param *w = &solo.job->model->params[layer->weight], *b = &solo.job->model->params[layer->bias];
        const struct slice *first = &solo.job->model->slices[f.wait_begin[i]],
                           *last = &solo.job->model->slices[f.wait_end[i] - 1];
        assert_true(first->offset <= w->offset && w->offset < first->offset + first->count);
        size_t end = b->offset + b->shape.elements;
        assert_true(last->offset < end && end <= last->offset + last->count);
    }
    assert_true(f.wait_end[0] - f.wait_begin[0] >= 2);
    assert_true(f.wait_end[1] - f.wait_begin[1] == 1);
    assert_int_equal(f.pushes, solo.job->model->slice_count);
    solo_close(&solo);
}

/* What `tally plan` says a worker holds is what it allocates, but for what aligns its parts. */
static void test_memory_is_as_planned(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 20; seed++) {
        struct test_job *job = test_job_open(random_job(seed, &(struct random_options){.steps = 2}));
        for (uint32_t r = 0; r < 3; r++) {
            struct test_rank rank;
            test_rank_open(job, r, 3, NULL, &rank);
            struct plan_memory planned = plan_memory(rank.plan);
            /* The transport holds the gradients of level 0. */
            size_t held = executor_memory_bytes(rank.executor) + job->model->flat_count * sizeof(float);
            assert_in_range(held, planned.total, planned.total + 64 * (5 + rank.plan->levels));
            test_rank_close(&rank);
        }
        test_job_close(job);
    }
}

static void test_stops(void **state)
{
    (void)state;
    struct test_job *job = test_job_open(spec_small_job(4));
    struct test_rank rank;
    test_rank_open(job, 0, 1, NULL, &rank);
    executor_close(rank.executor); /* for one that can be stopped */
    atomic_bool stop = false;
    struct executor_inputs inputs = {
        .plan = rank.plan, .train = job->train, .test = job->test, .order = rank.order, .stop = &stop};
    struct memory_hub *hub;
    struct tally_error err;
    assert_int_equal(executor_open(&inputs, &rank.executor, &err), TALLY_OK);
    assert_int_equal(memory_hub_open(rank.plan, &(struct memory_hub_options){.clients = 1}, &hub, &err), TALLY_OK);
    struct transport *transport = memory_hub_join(hub, 0, executor_weights(rank.executor));
    assert_int_equal(executor_step(rank.executor, transport, 1, &err), TALLY_OK);
    atomic_store(&stop, true);
    assert_int_equal(executor_step(rank.executor, transport, 2, &err), TALLY_ECANCELLED);
    assert_int_equal(memory_hub_version(hub), 1);
    memory_hub_close(hub);
    test_rank_close(&rank);
    test_job_close(job);
}

static void test_refuses_what_it_cannot_run(void **state)
{
    (void)state;
    struct solo solo;
    struct tally_error err;
    solo_open(spec_small_job(4), NULL, &solo);
    struct action send = {.kind = ACTION_SEND};
    assert_int_equal(executor_run(solo.rank.executor, solo.transport, 1, &send, 1, &err), TALLY_EINTERNAL);
    struct action unknown = {.kind = (enum action_kind)99};
    assert_int_equal(executor_run(solo.rank.executor, solo.transport, 1, &unknown, 1, &err), TALLY_EUNSUPPORTED);
    struct action deep = {.kind = ACTION_BACKWARD, .level = 30};
    assert_int_equal(executor_run(solo.rank.executor, solo.transport, 1, &deep, 1, &err), TALLY_EINTERNAL);
    solo_close(&solo);
}

static void test_evaluates(void **state)
{
    (void)state;
    struct solo solo;
    struct tally_error err;
    solo_open(spec_small_job(4), NULL, &solo);
    assert_int_equal(solo.rank.plan->evaluation.leaves, 3); /* 4 + 4 + 2 */
    double w[256];
    assert_true(solo.job->model->flat_count <= 256);
    for (size_t i = 0; i < solo.job->model->flat_count; i++)
        w[i] = (double)memory_hub_weights(solo.hub)[i];
    for (uint32_t i = 0; i < 3; i++) {
        struct kernel_loss loss;
        uint32_t samples;
        assert_int_equal(executor_evaluate(solo.rank.executor, solo.transport, 0, i, &loss, &samples, &err), TALLY_OK);
        assert_int_equal(samples, i < 2 ? 4 : 2);
        float x[4 * 5];
        int64_t targets[4];
        uint32_t indices[4] = {4 * i, 4 * i + 1, 4 * i + 2, 4 * i + 3};
        dataset_read(solo.job->test, indices, samples, x, 5, targets);
        double want = double_model_loss(solo.job->model, w, x, 5, samples, targets);
        assert_true(fabs(loss.loss_sum - want) <= 1e-5 * want);
        assert_true(loss.weight == samples && loss.correct >= 0 && loss.correct <= samples);
    }
    solo_close(&solo);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gradients_mlp),
        cmocka_unit_test(test_gradients_residual_mse),
        cmocka_unit_test(test_gradients_cnn),
        cmocka_unit_test(test_gradients_strided),
        cmocka_unit_test(test_gradients_linear_inside_a_sample),
        cmocka_unit_test(test_gradients_random),
        cmocka_unit_test(test_bits_random),
        cmocka_unit_test(test_bits_of_every_number_of_leaves),
        cmocka_unit_test(test_bits_of_large_parameters),
        cmocka_unit_test(test_failures_of_the_transport),
        cmocka_unit_test(test_waits_for_what_it_reads),
        cmocka_unit_test(test_memory_is_as_planned),
        cmocka_unit_test(test_stops),
        cmocka_unit_test(test_refuses_what_it_cannot_run),
        cmocka_unit_test(test_evaluates),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
