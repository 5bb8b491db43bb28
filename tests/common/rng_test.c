#include "common/rng.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/common/rng_reference.h"
#include "tests/support/fnv.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

static void check_words(uint64_t seed, const uint32_t *expected, size_t n)
{
    struct rng r;
    rng_seed(&r, seed);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(rng_u32(&r) & 0x7fffffffu, expected[i]);
}

static void words_are_torch_s(void **state)
{
    (void)state;
    check_words(0, torch_u31_seed_0, COUNT(torch_u31_seed_0));
    check_words(3, torch_u31_seed_3, COUNT(torch_u31_seed_3));
    check_words(4294967295u, torch_u31_seed_4294967295, COUNT(torch_u31_seed_4294967295));
    check_words((UINT64_C(1) << 32) + 5, torch_u31_seed_low_bits_5, COUNT(torch_u31_seed_low_bits_5));
}

/* The C++ standard's own check value: the 10000th word of mt19937 with its default seed. */
static void ten_thousandth_word(void **state)
{
    (void)state;
    struct rng r;
    rng_seed(&r, 5489);
    for (int i = 0; i < 9999; i++)
        rng_u32(&r);
    assert_int_equal(rng_u32(&r), 4123659995u);
}

static void long_words_are_torch_s(void **state)
{
    (void)state;
    struct rng r;
    rng_seed(&r, 3);
    for (size_t i = 0; i < COUNT(torch_u63_seed_3); i++)
        assert_true((rng_u64(&r) & (UINT64_MAX >> 1)) == torch_u63_seed_3[i]);
}

static void check_uniform(double from, double to, const uint32_t *expected, size_t n)
{
    struct rng r;
    float values[64];
    rng_seed(&r, 3);
    rng_uniform_fill(&r, values, n, from, to);
    for (size_t i = 0; i < n; i++)
        assert_int_equal(bits_of(values[i]), expected[i]);
}

static void uniform_is_torch_s(void **state)
{
    (void)state;
    check_uniform(-0.2, 0.2, torch_uniform_seed_3, COUNT(torch_uniform_seed_3));
    check_uniform(-1.0 / 3, 7.1, torch_uniform_odd_bounds, COUNT(torch_uniform_odd_bounds));
}

/* The shortcut for the fused product and sum against the C library's, over awkward bounds. */
static void uniform_is_fused(void **state)
{
    (void)state;
    static const double bounds[][2] = {
        {-0.2, 0.2},  {-1e-3, 1e-3}, {0, 1},       {-1, 1e-7},   {1, 1 + 1e-6},
        {-3e5, 7e-4}, {1e-30, 1.0},  {1e-10, 0.9}, {-1e-9, 0.7}, {-0.03535533905932738, 0.03535533905932738},
    };
    for (size_t b = 0; b < COUNT(bounds); b++) {
        struct rng r, same;
        float values[1000];
        rng_seed(&r, b);
        same = r;
        for (int round = 0; round < 50; round++) {
            rng_uniform_fill(&r, values, COUNT(values), bounds[b][0], bounds[b][1]);
            for (size_t i = 0; i < COUNT(values); i++) {
                float low = (float)bounds[b][0];
                float x = (float)(rng_u32(&same) & 0xffffffu) * 0x1p-24f;
                assert_int_equal(bits_of(values[i]), bits_of(fmaf(x, (float)bounds[b][1] - low, low)));
            }
        }
    }
}

static void check_parameter(struct rng *r, size_t n, double fan_in, uint64_t expected)
{
    float *values = malloc(n * sizeof *values);
    assert_non_null(values);
    double bound = 1 / sqrt(fan_in);
    rng_uniform_fill(r, values, n, -bound, bound);
    assert_true(fnv(values, n * sizeof *values) == expected);
    free(values);
}

/* Conv2d(1, 20, 5), Conv2d(20, 50, 5), Linear(800, 500), Linear(500, 10) after manual_seed(3): every bit of every
 * parameter. */
static void build_model(struct rng *r)
{
    rng_seed(r, 3);
    check_parameter(r, 20 * 25, 25, TORCH_MODEL_W1);
    check_parameter(r, 20, 25, TORCH_MODEL_B1);
    check_parameter(r, 50 * 20 * 25, 500, TORCH_MODEL_W2);
    check_parameter(r, 50, 500, TORCH_MODEL_B2);
    check_parameter(r, 500 * 800, 800, TORCH_MODEL_W3);
    check_parameter(r, 500, 800, TORCH_MODEL_B3);
    check_parameter(r, 10 * 500, 500, TORCH_MODEL_W4);
    check_parameter(r, 10, 500, TORCH_MODEL_B4);
}

static void check_epoch(struct rng *r, const uint32_t *expected, size_t n)
{
    struct rng order;
    uint32_t indices[100];
    rng_loader_epoch(r, &order);
    rng_randperm(&order, (uint32_t)n, indices);
    assert_memory_equal(indices, expected, n * sizeof *indices);
}

static void loader_order_is_torch_s(void **state)
{
    (void)state;
    struct rng r;
    build_model(&r);
    struct rng again = r;
    check_epoch(&r, torch_loader_epoch_1, COUNT(torch_loader_epoch_1));
    check_epoch(&r, torch_loader_epoch_2, COUNT(torch_loader_epoch_2));
    check_epoch(&r, torch_loader_epoch_3, COUNT(torch_loader_epoch_3));
    check_epoch(&again, torch_loader_epoch_1, COUNT(torch_loader_epoch_1));
    rng_skip(&again, 3);
    check_epoch(&again, torch_loader_epoch_2_after_rand_3, COUNT(torch_loader_epoch_2_after_rand_3));
}

static void randperm_is_torch_s(void **state)
{
    (void)state;
    struct rng r;
    static uint32_t values[60000];
    rng_seed(&r, 11);
    rng_randperm(&r, 13, values);
    assert_memory_equal(values, torch_randperm_13_seed_11, sizeof torch_randperm_13_seed_11);
    rng_seed(&r, 11);
    rng_randperm(&r, 60000, values);
    assert_true(fnv(values, sizeof values) == TORCH_RANDPERM_60000);
}

static void randperm_of_few(void **state)
{
    (void)state;
    struct rng r, same;
    uint32_t values[2] = {7, 7};
    rng_seed(&r, 1);
    same = r;
    rng_randperm(&r, 0, values);
    assert_int_equal(values[0], 7);
    rng_randperm(&r, 1, values);
    assert_int_equal(values[0], 0);
    assert_int_equal(values[1], 7);
    assert_int_equal(rng_u32(&r), rng_u32(&same)); /* neither drew */
}

static void skip_is_drawing(void **state)
{
    (void)state;
    static const uint64_t counts[] = {0, 1, 3, 623, 624, 625, 1248, 100000};
    for (size_t c = 0; c < COUNT(counts); c++) {
        struct rng a, b;
        rng_seed(&a, 9);
        b = a;
        for (uint64_t i = 0; i < counts[c]; i++)
            rng_u32(&a);
        rng_skip(&b, counts[c]);
        for (int i = 0; i < 700; i++)
            assert_int_equal(rng_u32(&a), rng_u32(&b));
    }
}

static void check_near(const float *values, const uint32_t *expected, size_t n, float tolerance)
{
    for (size_t i = 0; i < n; i++) {
        float wanted = float_of(expected[i]);
        if (!(fabsf(values[i] - wanted) <= tolerance))
            fail_msg("value %zu: %.9g, PyTorch has %.9g", i, (double)values[i], (double)wanted);
    }
}

static void check_normal(const uint32_t *expected, size_t n, float tolerance)
{
    struct rng r;
    float values[64];
    rng_seed(&r, 3);
    rng_normal_fill(&r, values, n, 0.5, 2.0);
    check_near(values, expected, n, tolerance);
}

static void normal_is_torch_s(void **state)
{
    (void)state;
    /* Below 16 PyTorch computes with libm in double as we do: equal bits. */
    check_normal(torch_normal_1, 1, 0);
    check_normal(torch_normal_5, 5, 0);
    check_normal(torch_normal_15, 15, 0);
    /* From 16 on it uses vectorised polynomials. */
    check_normal(torch_normal_16, 16, 2e-6f);
    check_normal(torch_normal_32, 32, 2e-6f);
    check_normal(torch_normal_35, 35, 2e-6f);
}

static void normal_keeps_the_second_of_a_pair(void **state)
{
    (void)state;
    struct rng r;
    float values[7];
    rng_seed(&r, 3);
    rng_normal_fill(&r, values, 3, 0, 1);
    rng_normal_fill(&r, values + 3, 4, 0, 1);
    check_near(values, torch_normal_3_then_4, 7, 0);
    rng_normal_fill(&r, values, 1, 0, 1);
    rng_seed(&r, 3); /* forgets it */
    rng_normal_fill(&r, values, 3, 0, 1);
    check_near(values, torch_normal_3_then_4, 3, 0);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(words_are_torch_s),
        cmocka_unit_test(ten_thousandth_word),
        cmocka_unit_test(long_words_are_torch_s),
        cmocka_unit_test(uniform_is_torch_s),
        cmocka_unit_test(uniform_is_fused),
        cmocka_unit_test(loader_order_is_torch_s),
        cmocka_unit_test(randperm_is_torch_s),
        cmocka_unit_test(randperm_of_few),
        cmocka_unit_test(skip_is_drawing),
        cmocka_unit_test(normal_is_torch_s),
        cmocka_unit_test(normal_keeps_the_second_of_a_pair),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
