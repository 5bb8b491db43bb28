/* model/dataset_synthetic.c, through model/dataset.h. */
#include "model/dataset.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/model/data_files.h"

struct fixture {
    Tally__V1__Synthetic synthetic;
    Tally__V1__Source source;
    uint32_t shape[3], target_shape[3];
};

static void begin(struct fixture *f, uint64_t samples, uint32_t classes, uint32_t features, uint32_t targets)
{
    f->synthetic = (Tally__V1__Synthetic)TALLY__V1__SYNTHETIC__INIT;
    f->source = (Tally__V1__Source)TALLY__V1__SOURCE__INIT;
    f->source.kind_case = TALLY__V1__SOURCE__KIND_SYNTHETIC;
    f->source.synthetic = &f->synthetic;
    f->synthetic.samples = samples;
    f->synthetic.classes = classes;
    f->synthetic.shape = f->shape;
    f->synthetic.n_shape = 1;
    f->shape[0] = features;
    f->synthetic.target_shape = f->target_shape;
    f->synthetic.n_target_shape = targets > 0;
    f->target_shape[0] = targets;
}

static struct dataset *open_set(const struct fixture *f, enum dataset_target want, uint64_t seed, int part)
{
    struct dataset *set = NULL;
    struct tally_error err;
    if (dataset_open(&f->source, NULL, want, seed, part, &set, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    return set;
}

static void read_one(const struct dataset *set, uint32_t index, float *x, void *target)
{
    dataset_read(set, &index, 1, x, dataset_info(set)->input_elements, target);
}

/* Figures of this very generator: they may not change, or jobs would not repeat. */
static void test_the_same_on_every_machine(void **state)
{
    (void)state;
    struct fixture f;
    float x[5], y[2];
    int64_t class;
    begin(&f, 100, 3, 5, 2);
    struct dataset *set = open_set(&f, DATASET_CLASSES, 3, 0);
    read_one(set, 7, x, &class);
    static const float expected_x[5] = {-0x1.21a098p-4f, -0x1.49f804p-1f, -0x1.08fedp-4f, 0x1.1a6d96p-1f,
                                        0x1.e0c216p-2f};
    assert_memory_equal(x, expected_x, sizeof(x));
    assert_int_equal(class, 1);
    dataset_close(set);
    set = open_set(&f, DATASET_VALUES, 3, 1);
    read_one(set, 99, x, y);
    static const float expected_y[2] = {-0x1.82fc6ep+0f, 0x1.6fe032p-2f};
    assert_memory_equal(y, expected_y, sizeof(y));
    dataset_close(set);
}

static void moments(const float *x, size_t n, double *ret_mean, double *ret_variance)
{
    double sum = 0, squares = 0;
    for (size_t i = 0; i < n; i++) {
        sum += x[i];
        squares += (double)x[i] * x[i];
    }
    *ret_mean = sum / (double)n;
    *ret_variance = squares / (double)n - *ret_mean * *ret_mean;
}

static void test_noise_is_standard_normal(void **state)
{
    (void)state;
    enum { N = 200000 };
    struct fixture f;
    begin(&f, 2, 0, N, 1);
    struct dataset *set = open_set(&f, DATASET_VALUES, 1, 0);
    float *x = malloc(N * sizeof(float)), y, mean_of[2];
    assert_non_null(x);
    for (uint32_t row = 0; row < 2; row++) {
        double mean, variance, fourth = 0, neighbours = 0;
        size_t within = 0;
        read_one(set, row, x, &y);
        moments(x, N, &mean, &variance);
        for (size_t i = 0; i < N; i++) {
            fourth += pow(x[i], 4) / N;
            within += fabsf(x[i]) < 1;
            neighbours += i > 0 ? (double)x[i] * x[i - 1] / N : 0;
        }
        /* Four standard errors. */
        assert_true(fabs(mean) < 0.009);
        assert_true(fabs(variance - 1) < 0.013);
        assert_true(fabs(fourth - 3) < 0.09);
        assert_true(fabs((double)within / N - 0.6827) < 0.0042);
        assert_true(fabs(neighbours) < 0.009);
        mean_of[row] = x[0];
    }
    assert_true(mean_of[0] != mean_of[1]);
    free(x);
    dataset_close(set);
}

/* The centre of a class is what its samples have in common; the test part shares it, and not the noise. */
static void test_parts_share_centres(void **state)
{
    (void)state;
    enum { SAMPLES = 4000, FEATURES = 6, CLASSES = 4 };
    struct fixture f;
    begin(&f, SAMPLES, CLASSES, FEATURES, 0);
    double centre[3][CLASSES][FEATURES] = {0};
    float first[3][FEATURES];
    for (int set_index = 0; set_index < 3; set_index++) {
        struct dataset *set = open_set(&f, DATASET_CLASSES, set_index == 2 ? 9 : 8, set_index == 1);
        assert_int_equal(dataset_info(set)->class_min, 0);
        assert_int_equal(dataset_info(set)->class_max, CLASSES - 1);
        for (uint32_t i = 0; i < SAMPLES; i++) {
            float x[FEATURES];
            int64_t class;
            read_one(set, i, x, &class);
            if (i == 0)
                memcpy(first[set_index], x, sizeof(x));
            for (size_t j = 0; j < FEATURES; j++)
                centre[set_index][class][j] += x[j] / (SAMPLES / (double)CLASSES);
        }
        dataset_close(set);
    }
    double apart = 0;
    for (size_t c = 0; c < CLASSES; c++)
        for (size_t j = 0; j < FEATURES; j++) {
            assert_true(fabs(centre[0][c][j] - centre[1][c][j]) < 0.2);
            apart = fmax(apart, fabs(centre[0][c][j] - centre[2][c][j]));
        }
    assert_true(apart > 0.5);
    assert_memory_not_equal(first[0], first[1], sizeof(first[0]));
}

/* Centres that are too many to keep are the same numbers: the first elements do not depend on how many there are. */
static void test_large_centres(void **state)
{
    (void)state;
    enum { LARGE = 3000000, SMALL = 300 };
    struct fixture f;
    float *large = malloc(LARGE * sizeof(float)), small[SMALL];
    int64_t class;
    assert_non_null(large);
    begin(&f, 10, 2, LARGE, 0);
    struct dataset *set = open_set(&f, DATASET_CLASSES, 5, 0);
    read_one(set, 3, large, &class);
    dataset_close(set);
    begin(&f, 10, 2, SMALL, 0);
    set = open_set(&f, DATASET_CLASSES, 5, 0);
    read_one(set, 3, small, &class);
    dataset_close(set);
    assert_memory_equal(large, small, sizeof(small));
    free(large);
}

/* Least squares by gradient descent finds what the inputs say of the targets; only the noise is left. */
static void test_values_are_linear(void **state)
{
    (void)state;
    enum { SAMPLES = 400, FEATURES = 8 };
    struct fixture f;
    static float x[SAMPLES][FEATURES], y[SAMPLES], test_x[SAMPLES][FEATURES], test_y[SAMPLES];
    begin(&f, SAMPLES, 0, FEATURES, 1);
    struct dataset *set = open_set(&f, DATASET_VALUES, 5, 0), *test = open_set(&f, DATASET_VALUES, 5, 1);
    assert_int_equal(dataset_info(set)->target, DATASET_VALUES);
    assert_int_equal(dataset_info(set)->target_shape[0], 1);
    for (uint32_t i = 0; i < SAMPLES; i++) {
        read_one(set, i, x[i], &y[i]);
        read_one(test, i, test_x[i], &test_y[i]);
    }
    double w[FEATURES] = {0};
    for (int step = 0; step < 400; step++) {
        double gradient[FEATURES] = {0};
        for (size_t i = 0; i < SAMPLES; i++) {
            double error = -y[i];
            for (size_t j = 0; j < FEATURES; j++)
                error += w[j] * x[i][j];
            for (size_t j = 0; j < FEATURES; j++)
                gradient[j] += error * x[i][j] / SAMPLES;
        }
        for (size_t j = 0; j < FEATURES; j++)
            w[j] -= 0.5 * gradient[j];
    }
    double squares = 0, total = 0;
    for (size_t i = 0; i < SAMPLES; i++) {
        double error = -test_y[i];
        for (size_t j = 0; j < FEATURES; j++)
            error += w[j] * test_x[i][j];
        squares += error * error / SAMPLES;
        total += (double)test_y[i] * test_y[i] / SAMPLES;
    }
    assert_true(squares > 0.008 && squares < 0.013);
    assert_true(total > 10 * squares);
    dataset_close(set);
    dataset_close(test);
}

static void test_normalize_and_shapes(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f, 10, 2, 0, 0);
    f.synthetic.n_shape = 3;
    memcpy(f.shape, (uint32_t[]){3, 2, 2}, sizeof(f.shape));
    Tally__V1__Normalize normalize = TALLY__V1__NORMALIZE__INIT;
    normalize.n_mean = 3;
    normalize.mean = (float[]){0.1f, 0.2f, 0.3f};
    normalize.n_std = 1;
    normalize.std = (float[]){0.7f};
    struct dataset *plain = open_set(&f, DATASET_CLASSES, 2, 0), *set = NULL;
    assert_int_equal(dataset_open(&f.source, &normalize, DATASET_CLASSES, 2, 0, &set, NULL), TALLY_OK);
    assert_int_equal(dataset_info(set)->input_ndim, 3);
    assert_int_equal(dataset_info(set)->input_elements, 12);
    float x[12], expected[12];
    int64_t class;
    read_one(plain, 4, expected, &class);
    read_one(set, 4, x, &class);
    for (size_t i = 0; i < 12; i++) {
        float centred = expected[i] - normalize.mean[i / 4];
        expected[i] = centred / 0.7f;
    }
    assert_memory_equal(x, expected, sizeof(x));
    dataset_close(plain);
    dataset_close(set);
}

static void refused(const struct fixture *f, enum dataset_target want, const char *part)
{
    struct dataset *set = NULL;
    struct dataset_info info;
    struct tally_error err;
    assert_refused(dataset_open(&f->source, NULL, want, 0, 0, &set, &err), TALLY_EINVAL, &err, part);
    assert_refused(dataset_probe(&f->source, want, &info, &err), TALLY_EINVAL, &err, part);
}

static void test_refusals(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f, 10, 0, 4, 0);
    refused(&f, DATASET_CLASSES, "synthetic.classes is not given");
    refused(&f, DATASET_VALUES, "synthetic.target_shape is not given");
    begin(&f, 0, 2, 4, 0);
    refused(&f, DATASET_CLASSES, "synthetic.samples is 0");
    begin(&f, (uint64_t)1 << 32, 2, 4, 0);
    refused(&f, DATASET_CLASSES, "synthetic.samples is 4294967296");
    begin(&f, 10, 2, 0, 0);
    refused(&f, DATASET_CLASSES, "synthetic.shape has the dimension 0");
    begin(&f, 10, 2, 0, 0);
    f.synthetic.n_shape = 3;
    memcpy(f.shape, (uint32_t[]){1 << 20, 1 << 20, 2}, sizeof(f.shape));
    refused(&f, DATASET_CLASSES, "expected 1 to 1099511627776 elements");
    f.source.kind_case = TALLY__V1__SOURCE__KIND__NOT_SET;
    refused(&f, DATASET_CLASSES, "no data source is given");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_same_on_every_machine),
        cmocka_unit_test(test_noise_is_standard_normal),
        cmocka_unit_test(test_parts_share_centres),
        cmocka_unit_test(test_large_centres),
        cmocka_unit_test(test_values_are_linear),
        cmocka_unit_test(test_normalize_and_shapes),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
