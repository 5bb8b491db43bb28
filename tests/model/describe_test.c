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

/* ---- pipelines ---- */

static tally_status print_schedule(FILE *out, const void *what, struct tally_error *err)
{
    return describe_schedule(out, what, false, err);
}

static tally_status print_svg(FILE *out, const void *what, struct tally_error *err)
{
    return describe_schedule(out, what, true, err);
}

static void assert_has(char *text, const char *const *lines, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strstr(text, lines[i]))
            fail_msg("no line\n%s\nin\n%s", lines[i], text);
    free(text);
}

/* The seed's placement: conv1 and fc1 on the first stage, conv2 and fc2 on the second; two replicas. */
static void a_pipeline(void **state)
{
    (void)state;
    size_t image[3] = {1, 28, 28};
    char *first[2] = {"conv1", "fc1"}, *second[2] = {"conv2", "fc2"};
    Tally__V1__Stage stage[2] = {TALLY__V1__STAGE__INIT, TALLY__V1__STAGE__INIT}, *stages[2] = {&stage[0], &stage[1]};
    Tally__V1__Pipeline pipeline = TALLY__V1__PIPELINE__INIT;
    Tally__V1__Parallel parallel = TALLY__V1__PARALLEL__INIT;
    Tally__V1__Replicas replicas = TALLY__V1__REPLICAS__INIT;
    struct describe_session *session = NULL;
    const struct plan *const *plans = NULL;
    struct model *model = NULL;
    struct tally_error err = {0};
    json_t *root = NULL;
    stage[0].n_layers = stage[1].n_layers = 2;
    stage[0].layers = first;
    stage[1].layers = second;
    pipeline.n_placement = 2;
    pipeline.placement = stages;
    pipeline.has_schedule = 1;
    pipeline.schedule = TALLY__V1__SCHEDULE__one_f_one_b;
    parallel.pipeline = &pipeline;
    parallel.data = &replicas;
    parallel.shards = 1;
    replicas.has_count = 1;
    replicas.count = 2;
    Tally__V1__JobSpec *spec = job_of_layers(lenet, "cross_entropy", 3, image);
    Tally__V1__DataFacts *facts = facts_of(3, image, 0, NULL, 100, 21);
    spec->parallel = &parallel;
    spec->train->batch_size = 12; /* 6 micro-batches, 3 a replica */
    assert_int_equal(model_build(spec, facts, &model, &err), TALLY_OK);
    spec->parallel = NULL;
    if (describe_open(model, facts, NULL, "generic", &session, &plans, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    static const char *const lines[] = {
        "4 workers",          "1f1b over 2 stages, 3 micro-batches a replica; by computed cost ",
        "conv1, 1, fc1, 6\n", "conv2, 3, fc2\n",
        "w3      3-5 ",
    };
    assert_has(printed(print_plan, plans), lines, sizeof lines / sizeof *lines);
    static const char *const rows[] = {
        "stage 0   part 0   |0",           "part 2", "stage 1   part 1   |", "stage 1   idle ",
        "micro-batches in flight at most", "bubble "};
    assert_has(printed(print_schedule, plans), rows, sizeof rows / sizeof *rows);
    static const char *const picture[] = {"<svg", "</svg>"};
    assert_has(printed(print_svg, plans), picture, 2);
    assert_int_equal(describe_plan_json(plans, &root, &err), TALLY_OK);
    json_t *described = json_object_get(root, "pipeline"), *item;
    assert_int_equal(json_array_size(json_object_get(described, "stages")), 2);
    assert_int_equal(json_array_size(json_object_get(root, "workers")), 4);
    double share = 0;
    size_t i, weights = 0;
    json_array_foreach(json_object_get(described, "stages"), i, item) share +=
        json_real_value(json_object_get(item, "cost_share"));
    assert_true(share > 1 - 1e-9 && share < 1 + 1e-9);
    json_array_foreach(json_object_get(root, "workers"), i, item) weights +=
        integer_at(json_object_get(item, "memory"), "weights");
    assert_int_equal(weights, 2 * model->flat_count * sizeof(float));
    json_decref(root);
    describe_close(session);
    model_free(model);
    tally__v1__job_spec__free_unpacked(spec, NULL);
    tally__v1__data_facts__free_unpacked(facts, NULL);
}

static void no_pipeline_no_schedule(void **state)
{
    (void)state;
    struct model *model = random_model(1, 2);
    Tally__V1__DataFacts *facts = facts_of(0, NULL, 0, NULL, 20, 0);
    struct describe_session *session = NULL;
    const struct plan *const *plans = NULL;
    struct tally_error err = {0};
    assert_int_equal(describe_open(model, facts, NULL, NULL, &session, &plans, &err), TALLY_OK);
    assert_int_equal(describe_schedule(stdout, plans, false, &err), TALLY_EINVAL);
    describe_close(session);
    tally__v1__data_facts__free_unpacked(facts, NULL);
    model_free(model);
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
        cmocka_unit_test(a_pipeline),       cmocka_unit_test(no_pipeline_no_schedule),
        cmocka_unit_test(no_such_backend),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
