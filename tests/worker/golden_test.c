/* PyTorch's losses for the same programs (tests/golden), through the executor in this process: each within its stated
 * bound. */
#include <jansson.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "tests/worker/solo.h"

#define FASHION "/usr/share/datasets/fashion-mnist/train-"

/* Of the CNNs, that many steps under a sanitizer, where they are slow and much alike; the optimised build runs all. */
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
#define STEPS_MAX 20
#else
#define STEPS_MAX SIZE_MAX
#endif

static json_t *golden;

static double number(const json_t *object, const char *key)
{
    return json_number_value(json_object_get(object, key)); /* 0 where it is not there, as in torch.optim.SGD */
}

static Tally__V1__JobSpec *case_spec(const json_t *c, uint32_t micro)
{
    uint32_t batch = (uint32_t)number(c, "batch_size");
    size_t steps = json_array_size(json_object_get(c, "losses"));
    assert_true(steps > 0);
    Tally__V1__JobSpec *spec = spec_new((uint64_t)number(c, "seed"), batch, micro ? micro : batch, 0, steps);
    const json_t *sgd = json_object_get(c, "sgd");
    spec_sgd(spec, number(sgd, "lr"), number(sgd, "momentum"), number(sgd, "weight_decay"),
             json_is_true(json_object_get(sgd, "nesterov")));
    spec_shuffle(spec, json_is_true(json_object_get(c, "shuffle")));
    spec_cross_entropy(spec, -100, 0);
    return spec;
}

static void small_data(Tally__V1__JobSpec *spec, uint64_t limit)
{
    char here[3000], x[4096], y[4096];
    assert_non_null(getcwd(here, sizeof here));
    snprintf(x, sizeof x, "%s/examples/data/x10.npy", here);
    snprintf(y, sizeof y, "%s/examples/data/y2.npy", here);
    spec_npy(spec, 0, x, y, limit);
}

static void fashion_data(Tally__V1__JobSpec *spec, const json_t *c)
{
    spec_idx(spec, 0, FASHION "images-idx3-ubyte.gz", FASHION "labels-idx1-ubyte.gz", (uint64_t)number(c, "samples"));
    spec_normalize(spec, 0.2860f, 0.3530f);
}

static void mlp(Tally__V1__JobSpec *spec, const char *first, const char *second)
{
    spec_linear(spec, first, 20, true);
    spec_plain(spec, "relu", TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, second, 2, true);
}

static void check_state(const json_t *state, const struct model *model, const float *weights, double bound)
{
    assert_int_equal(json_object_size(state), model->param_count);
    for (size_t p = 0; p < model->param_count; p++) {
        const struct param *param = &model->params[p];
        const json_t *want = json_object_get(state, param->name);
        if (!want)
            fail_msg("PyTorch has no %s", param->name);
        double squares = 0;
        for (size_t i = 0; i < param->shape.elements; i++)
            squares += (double)weights[param->offset + i] * (double)weights[param->offset + i];
        double ratio = squares / number(want, "sum_of_squares");
        if (!(fabs(ratio - 1) <= fmax(1e-5, 10 * bound)))
            fail_msg("%s: sum of squares %.9g, PyTorch's %.9g", param->name, squares, number(want, "sum_of_squares"));
    }
}

/* Takes the spec. Prints how far the losses are from PyTorch's, as a share of the bound. */
static void check(const char *name, Tally__V1__JobSpec *spec)
{
    const json_t *c = json_object_get(golden, name), *losses = json_object_get(c, "losses");
    double bound = fmax(2e-6, 10 * number(c, "drift")), worst = 0;
    struct solo solo;
    solo_open(spec, NULL, &solo);
    size_t steps = json_array_size(losses), run = steps > 50 && steps > STEPS_MAX ? STEPS_MAX : steps;
    for (size_t i = 0; i < run; i++) {
        solo_step(&solo, i + 1);
        struct kernel_loss sums = memory_hub_loss(solo.hub, i + 1);
        double want = json_number_value(json_array_get(losses, i)), got = sums.loss_sum / sums.weight;
        double off = fabs(got - want) / want;
        worst = off > worst ? off : worst;
        if (!(off <= bound))
            fail_msg("%s, step %zu: loss %.9g, PyTorch's %.9g", name, i + 1, got, want);
    }
    print_message("%s: %.2g relative at most, allowed are %.2g\n", name, worst, bound);
    if (run == steps)
        check_state(json_object_get(c, "state"), solo.job->model, memory_hub_weights(solo.hub), bound);
    solo_close(&solo);
}

static void test_seed_data_parallel(void **state)
{
    (void)state;
    const json_t *c = json_object_get(golden, "seed_data_parallel");
    for (uint32_t micro = 0; micro <= 32; micro += 32) {
        Tally__V1__JobSpec *spec = case_spec(c, micro);
        small_data(spec, 64);
        mlp(spec, "0", "2");
        check("seed_data_parallel", spec);
    }
}

static void test_seed_model_parallel(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = case_spec(json_object_get(golden, "seed_model_parallel"), 0);
    small_data(spec, 64);
    mlp(spec, "layer1.0", "layer2.0");
    check("seed_model_parallel", spec);
}

static void test_seed_accumulation(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = case_spec(json_object_get(golden, "seed_accumulation"), 16);
    small_data(spec, 250);
    mlp(spec, "0", "2");
    check("seed_accumulation", spec);
}

static void test_seed_cnn(void **state)
{
    (void)state;
    const json_t *c = json_object_get(golden, "seed_cnn");
    Tally__V1__JobSpec *spec = case_spec(c, 0);
    fashion_data(spec, c);
    spec_seed_cnn(spec);
    check("seed_cnn", spec);
}

static void test_fashion_cnn_momentum(void **state)
{
    (void)state;
    const json_t *c = json_object_get(golden, "fashion_cnn_momentum");
    Tally__V1__JobSpec *spec = case_spec(c, 0);
    fashion_data(spec, c);
    spec_seed_cnn(spec);
    check("fashion_cnn_momentum", spec);
}

static void test_fashion_mlp_nesterov(void **state)
{
    (void)state;
    const json_t *c = json_object_get(golden, "fashion_mlp_nesterov");
    Tally__V1__JobSpec *spec = case_spec(c, 0);
    fashion_data(spec, c);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_FLATTEN);
    spec_linear(spec, "fc1", 256, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, "fc2", 64, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, "fc3", 10, true);
    check("fashion_mlp_nesterov", spec);
}

static int load(void **state)
{
    (void)state;
    json_error_t error;
    golden = json_load_file("tests/golden/golden.json", 0, &error);
    if (!golden)
        fprintf(stderr, "tests/golden/golden.json: %s\n", error.text);
    return golden ? 0 : -1;
}

static int unload(void **state)
{
    (void)state;
    json_decref(golden);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_seed_data_parallel),   cmocka_unit_test(test_seed_model_parallel),
        cmocka_unit_test(test_seed_accumulation),    cmocka_unit_test(test_seed_cnn),
        cmocka_unit_test(test_fashion_cnn_momentum), cmocka_unit_test(test_fashion_mlp_nesterov),
    };
    return cmocka_run_group_tests(tests, load, unload);
}
