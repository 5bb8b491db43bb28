#include "model/init.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/safetensors.h"
#include "tests/model/data_files.h"
#include "tests/model/init_reference.h"
#include "tests/support/fnv.h"

#define PARAMS_MAX (2 * FAN_INS)
#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

/* Only what init_weights reads of a model. */
struct fixture {
    struct model model;
    struct param params[PARAMS_MAX];
    char names[PARAMS_MAX][16];
    Tally__V1__JobSpec spec;
    Tally__V1__Model spec_model;
    Tally__V1__Init init;
    Tally__V1__SafetensorsFile file;
};

static void begin(struct fixture *f, uint64_t seed)
{
    memset(f, 0, sizeof(*f));
    f->spec = (Tally__V1__JobSpec)TALLY__V1__JOB_SPEC__INIT;
    f->spec_model = (Tally__V1__Model)TALLY__V1__MODEL__INIT;
    f->init = (Tally__V1__Init)TALLY__V1__INIT__INIT;
    f->file = (Tally__V1__SafetensorsFile)TALLY__V1__SAFETENSORS_FILE__INIT;
    f->init.kind_case = TALLY__V1__INIT__KIND_SAFETENSORS;
    f->init.safetensors = &f->file;
    f->spec.seed = seed;
    f->spec.model = &f->spec_model;
    f->model.spec = &f->spec;
    f->model.params = f->params;
}

static struct param *add_param(struct fixture *f, const char *name, bool is_bias, size_t fan_in, size_t ndim,
                               const size_t *dim)
{
    size_t i = f->model.param_count++;
    assert_true(i < PARAMS_MAX);
    snprintf(f->names[i], sizeof(f->names[i]), "%s", name);
    struct param *param = &f->params[i];
    *param = (struct param){.name = f->names[i],
                            .is_bias = is_bias,
                            .fan_in = fan_in,
                            .offset = f->model.flat_count,
                            .shape = {.ndim = ndim, .elements = 1}};
    for (size_t d = 0; d < ndim; d++) {
        param->shape.dim[d] = dim[d];
        param->shape.elements *= dim[d];
    }
    f->model.flat_count += (param->shape.elements + 15) / 16 * 16;
    return param;
}

static void add_reference(struct fixture *f, const struct param_reference *reference, size_t n)
{
    for (size_t i = 0; i < n; i++)
        add_param(f, reference[i].name, reference[i].is_bias, reference[i].fan_in, reference[i].ndim, reference[i].dim);
}

static float *all_weights(const struct fixture *f)
{
    float *flat = malloc(f->model.flat_count * sizeof(float));
    assert_non_null(flat);
    memset(flat, 0xff, f->model.flat_count * sizeof(float));
    struct tally_error err;
    if (init_weights(&f->model, 0, f->model.flat_count, flat, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    return flat;
}

static void check_padding(const struct fixture *f, const float *flat)
{
    for (size_t i = 0; i < f->model.param_count; i++) {
        size_t end = i + 1 < f->model.param_count ? f->params[i + 1].offset : f->model.flat_count;
        for (size_t j = f->params[i].offset + f->params[i].shape.elements; j < end; j++)
            assert_memory_equal(&flat[j], &(float){0}, sizeof(float));
    }
}

static void check_pytorch(uint64_t seed, const struct param_reference *reference, size_t n)
{
    static struct fixture f;
    begin(&f, seed);
    add_reference(&f, reference, n);
    float *flat = all_weights(&f);
    for (size_t i = 0; i < n; i++) {
        const float *w = flat + f.params[i].offset;
        size_t elements = f.params[i].shape.elements;
        assert_memory_equal(&w[0], &reference[i].first[0], sizeof(float));
        assert_memory_equal(&w[elements > 1], &reference[i].first[1], sizeof(float));
        assert_memory_equal(&w[elements - 1], &reference[i].last, sizeof(float));
        assert_int_equal(fnv(w, elements * sizeof(float)), reference[i].fnv);
    }
    check_padding(&f, flat);
    free(flat);
}

static void test_pytorch(void **state)
{
    (void)state;
    check_pytorch(3, mlp_reference, COUNT(mlp_reference));
    check_pytorch(UINT32_MAX, cnn_reference, COUNT(cnn_reference));
    check_pytorch(12345, groups_reference, COUNT(groups_reference));
}

static void test_every_bound(void **state)
{
    (void)state;
    static struct fixture f;
    begin(&f, 1);
    for (size_t fan_in = 1; fan_in <= FAN_INS; fan_in++) {
        char name[16];
        snprintf(name, sizeof(name), "%zu.weight", fan_in);
        add_param(&f, name, false, fan_in, 2, (size_t[]){1, fan_in});
        snprintf(name, sizeof(name), "%zu.bias", fan_in);
        add_param(&f, name, true, fan_in, 1, (size_t[]){1});
    }
    float *flat = all_weights(&f);
    for (size_t i = 0; i < f.model.param_count; i++)
        assert_int_equal(fnv(flat + f.params[i].offset, f.params[i].shape.elements * sizeof(float)),
                         fan_in_reference[i / 2][i % 2]);
    free(flat);
}

/* Every range is cut out of the one vector. */
static void check_ranges(const struct fixture *f)
{
    float *flat = all_weights(f), *part = malloc(f->model.flat_count * sizeof(float));
    assert_non_null(part);
    for (size_t begin = 0; begin <= f->model.flat_count; begin += 7)
        for (size_t end = begin; end <= f->model.flat_count; end += 11) {
            memset(part, 0xff, f->model.flat_count * sizeof(float));
            assert_int_equal(init_weights(&f->model, begin, end, part, NULL), TALLY_OK);
            if (end > begin)
                assert_memory_equal(part, flat + begin, (end - begin) * sizeof(float));
            uint32_t untouched = 0xffffffff;
            if (end - begin < f->model.flat_count)
                assert_memory_equal(&part[end - begin], &untouched, sizeof(float));
        }
    free(flat);
    free(part);
}

static void test_ranges(void **state)
{
    (void)state;
    static struct fixture f;
    begin(&f, 3);
    add_reference(&f, groups_reference, COUNT(groups_reference));
    check_ranges(&f);
}

/* ---- safetensors ---- */

/* Writes f's parameters but for `without`, plus `extra`, values 1, 2, 3 ... through the file. */
static void write_file(struct fixture *f, const char *path, const char *without, const char *extra)
{
    static struct safetensors_entry entries[PARAMS_MAX];
    static uint64_t shape[PARAMS_MAX][4];
    size_t n = 0, elements = 0;
    /* Last to first: the order in the file is not the model's. */
    for (size_t i = f->model.param_count; i-- > 0;) {
        const struct param *param = &f->params[i];
        if (without && strcmp(param->name, without) == 0)
            continue;
        for (size_t d = 0; d < param->shape.ndim; d++)
            shape[n][d] = param->shape.dim[d];
        entries[n] = (struct safetensors_entry){param->name, (uint32_t)param->shape.ndim, shape[n]};
        elements += param->shape.elements;
        n++;
    }
    if (extra) {
        shape[n][0] = 1;
        entries[n] = (struct safetensors_entry){extra, 1, shape[n]};
        elements++;
        n++;
    }
    struct safetensors_writer *w = NULL;
    assert_int_equal(safetensors_writer_open(path, entries, n, NULL, 0, &w, NULL), TALLY_OK);
    for (size_t i = 0; i < elements; i++) {
        float value = (float)(i + 1);
        assert_int_equal(safetensors_writer_write(w, &value, sizeof(value), NULL), TALLY_OK);
    }
    assert_int_equal(safetensors_writer_commit(w, NULL), TALLY_OK);
    safetensors_writer_free(w);
    f->file.path = (char *)(uintptr_t)path;
    f->spec_model.init = &f->init;
}

static void test_file(void **state)
{
    (void)state;
    static struct fixture f;
    begin(&f, 3);
    add_reference(&f, groups_reference, COUNT(groups_reference));
    write_file(&f, data_path("weights.safetensors"), NULL, NULL);
    float *flat = all_weights(&f), expected = 1;
    for (size_t i = f.model.param_count; i-- > 0;)
        for (size_t j = 0; j < f.params[i].shape.elements; j++, expected++)
            assert_true(flat[f.params[i].offset + j] == expected);
    check_padding(&f, flat);
    free(flat);
    check_ranges(&f);
}

static void refused(const struct fixture *f, const char *part)
{
    struct tally_error err;
    float first;
    /* Whatever range is asked for, the whole file is judged. */
    assert_refused(init_weights(&f->model, 0, 1, &first, &err), TALLY_EINVAL, &err, part);
}

static void test_file_that_does_not_fit(void **state)
{
    (void)state;
    static struct fixture f;
    const char *path = data_path("other.safetensors");
    begin(&f, 3);
    add_reference(&f, groups_reference, COUNT(groups_reference));
    write_file(&f, path, "3.bias", NULL);
    refused(&f, "other.safetensors: has no tensor 3.bias, expected one of shape (3,)");
    write_file(&f, path, NULL, "4.weight");
    refused(&f, "the model has no parameter for its tensor 4.weight");
    write_file(&f, path, "2.weight", "2.weights");
    refused(&f, "has no tensor 2.weight, expected one of shape (5, 7)");
    write_file(&f, path, NULL, NULL);
    f.params[f.model.param_count - 1].shape.dim[0] = 4;
    refused(&f, "its tensor 3.bias has the shape (3,), expected (4,)");
    f.params[f.model.param_count - 1].shape = (struct shape){.ndim = 2, .dim = {3, 1}, .elements = 3};
    refused(&f, "its tensor 3.bias has the shape (3,), expected (3, 1)");
    unlink(path);
    struct tally_error err;
    float first;
    assert_int_equal(init_weights(&f.model, 0, 1, &first, &err), TALLY_ENOTFOUND);
    assert_non_null(strstr(err.message, "other.safetensors"));
}

static void test_file_of_another_type(void **state)
{
    (void)state;
    static struct fixture f;
    static const char header[] = "{\"0.bias\":{\"dtype\":\"F16\",\"shape\":[4],\"data_offsets\":[0,8]}}";
    struct bytes b = {0};
    const char *path = data_path("half.safetensors");
    begin(&f, 3);
    add_param(&f, "0.bias", true, 1, 1, (size_t[]){4});
    unsigned char length[8] = {sizeof(header) - 1};
    put(&b, length, 8);
    put_text(&b, header);
    put(&b, "01234567", 8);
    write_bytes(path, &b);
    f.file.path = (char *)(uintptr_t)path;
    f.spec_model.init = &f.init;
    refused(&f, "half.safetensors: its tensor 0.bias is F16, expected F32");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pytorch),
        cmocka_unit_test(test_every_bound),
        cmocka_unit_test(test_ranges),
        cmocka_unit_test(test_file),
        cmocka_unit_test(test_file_that_does_not_fit),
        cmocka_unit_test(test_file_of_another_type),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
