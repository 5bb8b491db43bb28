/* What `tally plan` prints: the numbers must be those of the plan, and every operation that models are lowered to must
 * exist on the cpu backend. */
#include "model/describe.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model/text_table.h"
#include "tests/model/job_text.h"

static void counts_and_bytes(void **state)
{
    (void)state;
    static const struct {
        unsigned long long value;
        const char *count, *bytes;
    } cases[] = {{0, "0", "0 B"},
                 {999, "999", "999 B"},
                 {1000, "1,000", "1000 B"},
                 {1023, "1,023", "1023 B"},
                 {1024, "1,024", "1.0 KiB"},
                 {1536, "1,536", "1.5 KiB"},
                 {102400, "102,400", "100 KiB"},
                 {1048575, "1,048,575", "1.0 MiB"},
                 {1234567, "1,234,567", "1.2 MiB"},
                 {UINT64_MAX, "18,446,744,073,709,551,615", "16.0 EiB"}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char text[40];
        assert_string_equal(count_text(cases[i].value, text, sizeof text), cases[i].count);
        assert_string_equal(bytes_text(cases[i].value, text, sizeof text), cases[i].bytes);
    }
    char small[6];
    assert_string_equal(count_text(123456789, small, sizeof small), "123,4");
}

static char *printed(tally_status (*print)(FILE *out, const void *what, struct tally_error *err), const void *what)
{
    char *text = NULL;
    size_t bytes = 0;
    struct tally_error err = {0};
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    if (print(out, what, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    assert_int_equal(fclose(out), 0);
    return text;
}

static tally_status print_table(FILE *out, const void *what, struct tally_error *err)
{
    return text_table_print(what, out, err);
}

static tally_status print_plan(FILE *out, const void *what, struct tally_error *err)
{
    return describe_plan(out, what, err);
}

static void columns_are_as_wide_as_their_cells(void **state)
{
    (void)state;
    static const char *const heads[] = {"NAME", ">SIZE", "NOTE"};
    struct text_table *table = text_table_new(heads, 3);
    assert_non_null(table);
    text_table_row(table);
    text_table_cell(table, "a");
    text_table_cell(table, "%d", 12345);
    text_table_row(table);
    text_table_cell(table, "longer");
    text_table_cell(table, "%s", "");
    text_table_cell(table, "x");
    char *text = printed(print_table, table);
    assert_string_equal(text, "NAME     SIZE  NOTE\n"
                              "a       12345\n"
                              "longer         x\n");
    free(text);
    text_table_free(table);
}

static const char lenet[] =
    "[{name: conv1, conv2d: {out_channels: 20, kernel_size: 5}}, {max_pool2d: {kernel_size: 2}},"
    " {name: conv2, conv2d: {out_channels: 50, kernel_size: 5}}, {max_pool2d: {kernel_size: 2}}, {flatten: {}},"
    " {name: fc1, linear: {out_features: 500}}, {relu: {}}, {name: fc2, linear: {out_features: 10}}]";

static void the_seed_network(void **state)
{
    (void)state;
    size_t image[3] = {1, 28, 28};
    struct model *model = NULL;
    struct tally_error err = {0};
    if (model_of_layers(lenet, 3, image, 0, NULL, &model, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    Tally__V1__DataFacts *facts = facts_of(3, image, 0, NULL, 100, 21);
    struct describe_session *session = NULL;
    const struct plan *const *plans = NULL;
    if (describe_open(model, facts, NULL, "generic", &session, &plans, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    char *text = printed(print_plan, plans);
    static const char *const lines[] = {
        "job: 431,080 parameters (1.6 MiB) in 4 slices; 1 worker, 1 shard; backend cpu, generic\n",
        "conv2  conv2d         20x12x12  50x8x8        25,050     3,203,200  ",
        "3      max_pool2d     50x8x8    50x4x4                       3,200  with conv2\n",
        "total                                        431,080     4,616,450\n",
        "fc1.weight    500x800     25,616  1-2     0\n",
        "13 steps, 13 in an epoch of 100 samples. A step: 8 samples, 4 micro-batches of 2; the last of an epoch: 4 "
        "samples, 2 micro-batches of 2\n",
        "An evaluation: 21 samples, 11 micro-batches of 2, the last of 1\n",
        "w0      0-3            0-3        1.6 MiB    4.9 MiB  ",
        "s0     0-3        3.3 MiB          0 B  1.6 MiB  4.9 MiB\n",
    };
    for (size_t i = 0; i < sizeof lines / sizeof *lines; i++)
        if (!strstr(text, lines[i]))
            fail_msg("no line\n%sin\n%s", lines[i], text);
    free(text);
    describe_close(session);
    tally__v1__data_facts__free_unpacked(facts, NULL);
    model_free(model);
}

static size_t integer_at(const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    assert_true(json_is_integer(value));
    return (size_t)json_integer_value(value);
}

static void check_json(const struct plan *plan, const json_t *root)
{
    const struct model *model = plan->model;
    size_t i, params = 0, floats = 0, leaves = 0, held = 0;
    json_t *item;
    assert_int_equal(json_array_size(json_object_get(root, "layers")), model->layer_count);
    assert_int_equal(json_array_size(json_object_get(root, "operations")), plan->op_count + 1);
    json_array_foreach(json_object_get(root, "layers"), i, item)
    {
        assert_int_equal(json_array_size(json_object_get(item, "output")), model->layers[i].out.ndim);
        params += json_array_size(json_object_get(item, "parameters"));
    }
    assert_int_equal(params, model->param_count);
    json_array_foreach(json_object_get(root, "slices"), i, item)
    {
        floats += integer_at(item, "count");
        assert_int_equal(integer_at(item, "operation"), plan_slice_source(plan, (uint32_t)i).op);
    }
    assert_int_equal(floats, model->flat_count);
    json_array_foreach(json_object_get(root, "workers"), i, item)
    {
        json_t *range = json_object_get(item, "micro_batches");
        assert_int_equal(json_integer_value(json_array_get(range, 0)), leaves);
        leaves = (size_t)json_integer_value(json_array_get(range, 1));
    }
    assert_int_equal(leaves, batches_step(&plan->batches, 1).leaves);
    json_array_foreach(json_object_get(root, "shards"), i, item)
    {
        held += integer_at(json_object_get(item, "memory"), "pending");
    }
    assert_int_equal(held, model->flat_count * sizeof(float));
}

/* Every random model can be planned on the cpu backend, for several workers and shards. */
static void random_models_on_the_cpu(void **state)
{
    (void)state;
    for (unsigned seed = 0; seed < 60; seed++) {
        struct model *model = random_model(seed, 2 + seed % 5);
        Tally__V1__DataFacts *facts = facts_of(0, NULL, 0, NULL, 20 + seed, seed % 3);
        struct describe_session *session = NULL;
        const struct plan *const *plans = NULL;
        struct tally_error err = {0};
        json_t *root = NULL;
        Tally__V1__Parallel parallel = TALLY__V1__PARALLEL__INIT;
        Tally__V1__Replicas replicas = TALLY__V1__REPLICAS__INIT;
        parallel.data = &replicas;
        parallel.shards = 1 + seed % 4;
        replicas.has_count = 1;
        replicas.count = 1 + seed % 6;
        model->spec->parallel = &parallel;
        if (describe_open(model, facts, "cpu", seed % 2 ? "generic" : NULL, &session, &plans, &err) != TALLY_OK)
            fail_msg("seed %u: %s", seed, err.message);
        assert_int_equal(plans[0]->mesh.data, replicas.count);
        assert_int_equal(describe_plan_json(plans, &root, &err), TALLY_OK);
        check_json(plans[0], root);
        json_decref(root);
        char *text = printed(print_plan, plans);
        free(text);
        describe_close(session);
        model->spec->parallel = NULL;
        tally__v1__data_facts__free_unpacked(facts, NULL);
        model_free(model);
    }
}

static void no_such_backend(void **state)
{
    (void)state;
    struct model *model = random_model(1, 2);
    Tally__V1__DataFacts *facts = facts_of(0, NULL, 0, NULL, 20, 0);
    struct describe_session *session = NULL;
    const struct plan *const *plans = NULL;
    struct tally_error err = {0};
    assert_int_equal(describe_open(model, facts, "abacus", NULL, &session, &plans, &err), TALLY_EUNSUPPORTED);
    assert_string_equal(err.message, "this build has no backend 'abacus'");
    tally__v1__data_facts__free_unpacked(facts, NULL);
    model_free(model);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(counts_and_bytes), cmocka_unit_test(columns_are_as_wide_as_their_cells),
        cmocka_unit_test(the_seed_network), cmocka_unit_test(random_models_on_the_cpu),
        cmocka_unit_test(no_such_backend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
