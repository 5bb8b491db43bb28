/* model/dataset_normalize.c, through model/dataset.h. */
#include "model/dataset.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "tests/model/data_files.h"
#include "tests/model/normalize_reference.h"
#include "tests/support/fnv.h"

struct fixture {
    Tally__V1__Npy npy;
    Tally__V1__Source source;
    Tally__V1__Normalize normalize;
    char inputs[1024], targets[1024];
};

static void write_npy(const char *path, const char *descr, const char *shape, const void *data, size_t n)
{
    struct bytes b = {0};
    char header[128];
    int length =
        snprintf(header, sizeof(header), "{'descr': '%s', 'fortran_order': False, 'shape': (%s), }\n", descr, shape);
    put(&b, "\x93NUMPY\1\0", 8);
    put(&b, (unsigned char[]){(unsigned char)length, 0}, 2);
    put_text(&b, header);
    put(&b, data, n);
    write_bytes(path, &b);
}

static void begin(struct fixture *f)
{
    f->npy = (Tally__V1__Npy)TALLY__V1__NPY__INIT;
    f->source = (Tally__V1__Source)TALLY__V1__SOURCE__INIT;
    f->normalize = (Tally__V1__Normalize)TALLY__V1__NORMALIZE__INIT;
    f->source.kind_case = TALLY__V1__SOURCE__KIND_NPY;
    f->source.npy = &f->npy;
    snprintf(f->inputs, sizeof(f->inputs), "%s", data_path("nx.npy"));
    snprintf(f->targets, sizeof(f->targets), "%s", data_path("ny.npy"));
    f->npy.inputs = f->inputs;
    f->npy.targets = f->targets;
    write_npy(f->targets, "|u1", "1,", "\1", 1);
}

static void check(const struct fixture *f, const Tally__V1__Normalize *normalize, size_t elements, uint32_t last,
                  uint64_t hash)
{
    struct dataset *set = NULL;
    struct tally_error err;
    if (dataset_open(&f->source, normalize, DATASET_CLASSES, 0, 0, &set, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    float x[768];
    int64_t class;
    assert_int_equal(dataset_info(set)->input_elements, elements);
    dataset_read(set, (uint32_t[]){0}, 1, x, elements, &class);
    assert_memory_equal(&x[elements - 1], &last, sizeof(last));
    assert_int_equal(fnv(x, elements * sizeof(float)), hash);
    dataset_close(set);
}

static void test_torch(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(normalize_reference) / sizeof(normalize_reference[0]); i++) {
        struct fixture f;
        float mean[3], std[3];
        unsigned char bytes[768];
        float floats[768];
        char shape[32];
        size_t elements = 256 * (size_t)normalize_reference[i].channels;
        begin(&f);
        memcpy(mean, normalize_reference[i].mean, sizeof(mean));
        memcpy(std, normalize_reference[i].std, sizeof(std));
        f.normalize.n_mean = (size_t)normalize_reference[i].means;
        f.normalize.n_std = (size_t)normalize_reference[i].stds;
        f.normalize.mean = mean;
        f.normalize.std = std;
        for (size_t j = 0; j < elements; j++) {
            float seventh = (float)j / 7;
            bytes[j] = (unsigned char)j;
            floats[j] = seventh - 50;
        }
        const Tally__V1__Normalize *normalize = f.normalize.n_mean > 0 ? &f.normalize : NULL;
        snprintf(shape, sizeof(shape), "1, %d, 16, 16", normalize_reference[i].channels);
        write_npy(f.inputs, "|u1", shape, bytes, elements);
        check(&f, normalize, elements, normalize_reference[i].last_byte, normalize_reference[i].fnv_bytes);
        write_npy(f.inputs, "<f4", shape, floats, elements * sizeof(float));
        check(&f, normalize, elements, normalize_reference[i].last_float, normalize_reference[i].fnv_floats);
    }
}

/* One a feature. */
static void test_features(void **state)
{
    (void)state;
    struct fixture f;
    struct dataset *set = NULL;
    begin(&f);
    write_npy(f.inputs, "<f4", "1, 3", (float[]){10, 20, 30}, 12);
    f.normalize.n_mean = f.normalize.n_std = 3;
    f.normalize.mean = (float[]){1, 2, 3};
    f.normalize.std = (float[]){3, 2, 9};
    assert_int_equal(dataset_open(&f.source, &f.normalize, DATASET_CLASSES, 0, 0, &set, NULL), TALLY_OK);
    float x[3];
    int64_t class;
    dataset_read(set, (uint32_t[]){0}, 1, x, 3, &class);
    assert_memory_equal(x, ((float[]){3, 9, 3}), sizeof(x));
    dataset_close(set);
}

static void refused(const struct fixture *f, const char *part)
{
    struct dataset *set = NULL;
    struct tally_error err;
    assert_refused(dataset_open(&f->source, &f->normalize, DATASET_CLASSES, 0, 0, &set, &err), TALLY_EINVAL, &err,
                   part);
    assert_null(set);
}

static void test_refusals(void **state)
{
    (void)state;
    struct fixture f;
    begin(&f);
    write_npy(f.inputs, "|u1", "1, 3, 1, 2", "abcdef", 6);
    f.normalize.mean = (float[]){0, 0, 0, 0};
    f.normalize.std = (float[]){1, 1, 1, 1};
    f.normalize.n_mean = 2;
    f.normalize.n_std = 1;
    refused(&f, "normalize.mean has 2 numbers, expected 1 or 3 (the first dimension of a sample)");
    f.normalize.n_mean = 1;
    f.normalize.n_std = 4;
    refused(&f, "normalize.std has 4 numbers, expected 1 or 3");
    f.normalize.n_std = 0;
    refused(&f, "normalize.std has 0 numbers");
    f.normalize.n_std = 3;
    f.normalize.std[2] = 0;
    refused(&f, "normalize.std has 0, expected numbers above 0");
    f.normalize.std[2] = NAN;
    refused(&f, "normalize.std has nan, expected numbers above 0");
    f.normalize.std[2] = 1;
    f.normalize.mean[0] = INFINITY;
    refused(&f, "normalize.mean has inf, expected finite numbers");
    write_npy(f.inputs, "|u1", "1, 1, 2, 3", "abcdef", 6);
    refused(&f, "normalize.std has 3 numbers, expected 1 (the first dimension of a sample is 1)");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_torch),
        cmocka_unit_test(test_features),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
