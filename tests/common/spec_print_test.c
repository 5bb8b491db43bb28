#include "common/spec_print.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/spec_file.h"
#include "common/spec_schema.h"
#include "proto/jobs.pb-c.h"
#include "proto/jobspec.pb-c.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))

static void *must_read(const ProtobufCMessageDescriptor *type, const char *text)
{
    struct spec_file *f = NULL;
    ProtobufCMessage *msg = NULL;
    struct tally_error err = {.message = ""};
    if (spec_open_text("f", text, strlen(text), &f, &err) != TALLY_OK || spec_read(f, type, &msg, &err) != TALLY_OK)
        fail_msg("%s\n%s", err.message, text);
    spec_close(f);
    return msg;
}

static void drop(void *msg)
{
    protobuf_c_message_free_unpacked(msg, NULL);
}

static void check_yaml(const ProtobufCMessage *msg, unsigned flags, const char *expected)
{
    char *text = NULL;
    assert_int_equal(spec_yaml_text(msg, flags, &text, NULL), TALLY_OK);
    assert_string_equal(text, expected);
    free(text);
}

static void check_json(const ProtobufCMessage *msg, unsigned flags, const char *expected)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    assert_int_equal(spec_print_json(out, msg, flags, NULL), TALLY_OK);
    assert_int_equal(fclose(out), 0);
    assert_string_equal(text, expected);
    free(text);
}

static void check_same(const ProtobufCMessage *a, const ProtobufCMessage *b)
{
    size_t bytes = protobuf_c_message_get_packed_size(a);
    assert_int_equal(protobuf_c_message_get_packed_size(b), bytes);
    uint8_t *left = malloc(bytes + 1);
    uint8_t *right = malloc(bytes + 1);
    assert_non_null(left);
    assert_non_null(right);
    protobuf_c_message_pack(a, left);
    protobuf_c_message_pack(b, right);
    assert_memory_equal(left, right, bytes);
    free(left);
    free(right);
}

/* What spec_open and spec_read took is printed and taken again as the same bytes of the wire format. */
static void example_comes_back(void **state)
{
    (void)state;
    struct spec_file *f = NULL;
    ProtobufCMessage *msg = NULL;
    char *text = NULL;
    assert_int_equal(spec_open("tests/common/testdata/good.yaml", &f, NULL), TALLY_OK);
    assert_int_equal(spec_read(f, &tally__v1__job_spec__descriptor, &msg, NULL), TALLY_OK);
    spec_close(f);
    assert_int_equal(spec_yaml_text(msg, 0, &text, NULL), TALLY_OK);
    ProtobufCMessage *again = must_read(&tally__v1__job_spec__descriptor, text);
    check_same(msg, again);
    drop(again);
    free(text);
    /* With defaults: what filling them in gives. */
    assert_int_equal(spec_yaml_text(msg, SPEC_PRINT_DEFAULTS, &text, NULL), TALLY_OK);
    again = must_read(&tally__v1__job_spec__descriptor, text);
    assert_int_equal(spec_fill_defaults(msg, NULL), TALLY_OK);
    check_same(msg, again);
    drop(again);
    free(text);
    drop(msg);
}

static void yaml_is_as_people_write_it(void **state)
{
    (void)state;
    Tally__V1__JobSpec *job = must_read(
        &tally__v1__job_spec__descriptor,
        "{name: a, model: {layers: [{name: c, conv2d: {out_channels: 1, kernel_size: [5]}}, {relu: {}}], loss: "
        "{cross_entropy: {}}}, data: {train: {synthetic: {samples: 1, shape: [2, 3]}}, normalize: {mean: 0.286, std: "
        "[1, 2]}}, train: {batch_size: 1, steps: 1, optimizer: {sgd: {lr: 1e-3}}}, parallel: {data: {count: 2}, "
        "pipeline: "
        "{placement: [[c], {layers: [d, e]}], schedule: 1f1b}, tensor: {layers: {c: row, 'x y': column}}}}");
    check_yaml(&job->base, 0,
               "name: a\n"
               "model:\n"
               "  layers:\n"
               "    - {name: c, conv2d: {out_channels: 1, kernel_size: 5}}\n"
               "    - {relu: {}}\n"
               "  loss: {cross_entropy: {}}\n"
               "data:\n"
               "  train: {synthetic: {samples: 1, shape: [2, 3]}}\n"
               "  normalize: {mean: 0.286, std: [1, 2]}\n"
               "train:\n"
               "  batch_size: 1\n"
               "  steps: 1\n"
               "  optimizer: {sgd: {lr: 0.001}}\n"
               "parallel:\n"
               "  data: 2\n"
               "  pipeline: {placement: [[c], [d, e]], schedule: 1f1b}\n"
               "  tensor: {layers: {c: row, \"x y\": column}}\n");
    drop(job);
    Tally__V1__Relu relu = TALLY__V1__RELU__INIT;
    check_yaml(&relu.base, 0, "{}\n");
}

/* A line that would be too long is broken into a block. */
static void long_lines_are_broken(void **state)
{
    (void)state;
    char path[121];
    memset(path, 'p', sizeof path - 1);
    path[sizeof path - 1] = '\0';
    char text[512];
    snprintf(text, sizeof text, "{train: {idx: {inputs: %s, targets: t}}, drop_last: true}", path);
    Tally__V1__Data *data = must_read(&tally__v1__data__descriptor, text);
    char expected[512];
    snprintf(expected, sizeof expected, "train:\n  idx:\n    inputs: %s\n    targets: t\ndrop_last: true\n", path);
    check_yaml(&data->base, 0, expected);
    drop(must_read(&tally__v1__data__descriptor, expected));
    drop(data);
}

/* Strings that mean something else without quotes, in some YAML, or hold what breaks a line. */
static void strings_come_back(void **state)
{
    (void)state;
    static const char *const strings[][2] = {
        {"plain", "plain"},
        {"a/b.gz", "a/b.gz"},
        {"/a-b_c", "/a-b_c"},
        {"./a", "./a"},
        {"1f1b", "1f1b"},
        {"", "\"\""},
        {"true", "\"true\""},
        {"No", "\"No\""},
        {"null", "\"null\""},
        {"~", "\"~\""},
        {"12", "\"12\""},
        {"1e5", "\"1e5\""},
        {"0x1f", "\"0x1f\""},
        {"1_000", "\"1_000\""},
        {"2020-01-01", "\"2020-01-01\""},
        {".inf", "\".inf\""},
        {"-", "\"-\""},
        {"- a", "\"- a\""},
        {"a: b", "\"a: b\""},
        {"a #b", "\"a #b\""},
        {"{a}", "\"{a}\""},
        {"*a", "\"*a\""},
        {"a\nb", "\"a\\nb\""},
        {"\t", "\"\\t\""},
        {"a\"\\", "\"a\\\"\\\\\""},
        {"\x01\x7f", "\"\\u0001\\u007f\""},
        {"\xc3\xa4", "\"\xc3\xa4\""},
        {"\xc2\x85", "\"\\u0085\""},
        {"\xe2\x80\xa8", "\"\\u2028\""},
        {"\xef\xbb\xbf", "\"\\ufeff\""},
        {"\xf0\x9f\x98\x80", "\"\xf0\x9f\x98\x80\""},
        {"a ", "\"a \""},
        {"<<", "\"<<\""},
        {"=", "\"=\""},
    };
    for (size_t i = 0; i < COUNT(strings); i++) {
        char copy[64];
        char expected[80];
        char *text = NULL;
        snprintf(copy, sizeof copy, "%s", strings[i][0]);
        Tally__V1__Csv csv = TALLY__V1__CSV__INIT;
        csv.path = copy;
        csv.target = copy;
        snprintf(expected, sizeof expected, "path: %s\ntarget: %s\n", strings[i][1], strings[i][1]);
        check_yaml(&csv.base, 0, expected);
        if (copy[0] == '\0')
            continue; /* a path is not empty */
        assert_int_equal(spec_yaml_text(&csv.base, 0, &text, NULL), TALLY_OK);
        Tally__V1__Csv *again = must_read(&tally__v1__csv__descriptor, text);
        assert_string_equal(again->target, strings[i][0]);
        drop(again);
        free(text);
    }
}

static void json_of_any_message(void **state)
{
    (void)state;
    char name[] = "a\"\n\xff";
    char empty[] = "";
    uint8_t bytes[] = {0, 255, 62, 97};
    Tally__V1__Job job = TALLY__V1__JOB__INIT;
    job.id = UINT64_MAX;
    job.name = name;
    job.state = TALLY__V1__JOB_STATE__RUNNING;
    job.submitted_unix_ms = INT64_MIN;
    job.reason = empty;
    check_json(&job.base, SPEC_PRINT_COMPACT,
               "{\"id\":18446744073709551615,\"name\":\"a\\\"\\n\xef\xbf\xbd\",\"state\":\"RUNNING\","
               "\"submitted_unix_ms\":-9223372036854775808}\n");
    Tally__V1__JobRef ref = TALLY__V1__JOB_REF__INIT;
    check_json(&ref.base, 0, "{}\n");
    check_json(&ref.base, SPEC_PRINT_DEFAULTS, "{\n  \"id\": 0\n}\n");
    Tally__V1__ListReply list = TALLY__V1__LIST_REPLY__INIT;
    check_json(&list.base, SPEC_PRINT_DEFAULTS | SPEC_PRINT_COMPACT, "{\"jobs\":[]}\n");
    for (size_t n = 0; n <= 4; n++) {
        static const char *const base64[] = {"", "AA==", "AP8=", "AP8+", "AP8+YQ=="};
        char expected[64];
        Tally__V1__ResultChunk chunk = TALLY__V1__RESULT_CHUNK__INIT;
        chunk.total = 1;
        chunk.data.len = n;
        chunk.data.data = bytes;
        if (n == 0)
            snprintf(expected, sizeof expected, "{\"total\":1}\n");
        else
            snprintf(expected, sizeof expected, "{\"total\":1,\"data\":\"%s\"}\n", base64[n]);
        check_json(&chunk.base, SPEC_PRINT_COMPACT, expected);
    }
    Tally__V1__StepDone step = TALLY__V1__STEP_DONE__INIT;
    Tally__V1__Event event = TALLY__V1__EVENT__INIT;
    step.loss = NAN;
    step.lr = 0.1 + 0.2;
    event.seq = 1;
    event.body_case = TALLY__V1__EVENT__BODY_STEP;
    event.step = &step;
    check_json(&event.base, SPEC_PRINT_COMPACT, "{\"seq\":1,\"step\":{\"loss\":null,\"lr\":0.30000000000000004}}\n");
    check_yaml(&event.base, 0, "seq: 1\nstep:\n  loss: .nan\n  lr: 0.30000000000000004\n");
    step.loss = -INFINITY;
    check_yaml(&step.base, 0, "loss: -.inf\nlr: 0.30000000000000004\n");
    job.state = (Tally__V1__JobState)99;
    check_json(&job.base, SPEC_PRINT_COMPACT,
               "{\"id\":18446744073709551615,\"name\":\"a\\\"\\n\xef\xbf\xbd\",\"state\":99,"
               "\"submitted_unix_ms\":-9223372036854775808}\n");
}

static void jansson_of_a_message(void **state)
{
    (void)state;
    json_t *json = NULL;
    struct tally_error err;
    char bad_name[] = "\xff";
    Tally__V1__Train *train =
        must_read(&tally__v1__train__descriptor,
                  "{batch_size: 4, epochs: 18446744073709551615, optimizer: {sgd: {lr: 0.1, momentum: 1}}}");
    assert_int_equal(spec_to_json(&train->base, 0, &json, NULL), TALLY_OK);
    assert_int_equal(json_integer_value(json_object_get(json, "batch_size")), 4);
    assert_true(json_real_value(json_object_get(json, "epochs")) == 18446744073709551616.0);
    json_t *sgd = json_object_get(json_object_get(json, "optimizer"), "sgd");
    assert_true(json_real_value(json_object_get(sgd, "lr")) == 0.1);
    assert_true(json_number_value(json_object_get(sgd, "momentum")) == 1);
    assert_null(json_object_get(sgd, "nesterov"));
    json_decref(json);
    assert_int_equal(spec_to_json(&train->base, SPEC_PRINT_DEFAULTS, &json, NULL), TALLY_OK);
    sgd = json_object_get(json_object_get(json, "optimizer"), "sgd");
    assert_true(json_is_false(json_object_get(sgd, "nesterov")));
    assert_string_equal(json_string_value(json_object_get(json, "reduction")), "canonical");
    json_decref(json);
    drop(train);
    Tally__V1__Job job = TALLY__V1__JOB__INIT;
    job.name = bad_name;
    assert_int_equal(spec_to_json(&job.base, 0, &json, &err), TALLY_EINVAL);
}

static void a_full_device_is_told(void **state)
{
    (void)state;
    struct tally_error err;
    Tally__V1__JobRef ref = TALLY__V1__JOB_REF__INIT;
    FILE *out = fopen("/dev/full", "w");
    assert_non_null(out);
    setvbuf(out, NULL, _IONBF, 0);
    assert_int_equal(spec_print_json(out, &ref.base, 0, &err), TALLY_EIO);
    fclose(out);
}

/* ---- schema ---- */

static char *schema(const ProtobufCMessageDescriptor *type, const char *path)
{
    char *text = NULL;
    size_t bytes = 0;
    struct tally_error err;
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    assert_int_equal(spec_schema_print(out, type, path, &err), TALLY_OK);
    fclose(out);
    return text;
}

static void schema_of_a_key(void **state)
{
    (void)state;
    char *text = schema(&tally__v1__job_spec__descriptor, "train.optimizer");
    assert_string_equal(
        text, "train.optimizer                   required  mapping  # Exactly one optimizer.\n"
              "train.optimizer.sgd                         mapping  # torch.optim.SGD.\n"
              "train.optimizer.sgd.lr            0.001     number of at least 0\n"
              "train.optimizer.sgd.momentum      0         number of at least 0\n"
              "train.optimizer.sgd.dampening     0         number\n"
              "train.optimizer.sgd.weight_decay  0         number of at least 0\n"
              "train.optimizer.sgd.nesterov      false     true or false  # needs momentum above 0 and dampening 0\n"
              "train.optimizer.sgd.maximize      false     true or false\n");
    free(text);
    text = schema(&tally__v1__job_spec__descriptor, "model.layers[3].conv2d.kernel_size");
    assert_string_equal(text,
                        "model.layers[].conv2d.kernel_size  required  integer of at least 1 or a list of 1 to 2\n");
    free(text);
    text = schema(&tally__v1__job_spec__descriptor, "parallel.tensor.layers");
    assert_non_null(strstr(text, "parallel.tensor.layers.KEY"));
    free(text);
}

static void schema_of_everything(void **state)
{
    (void)state;
    char *text = schema(&tally__v1__job_spec__descriptor, NULL);
    assert_non_null(strstr(text, "\nparallel.data "));
    assert_non_null(strstr(text, "# letters, digits, '-' and '_'; default: the file's name without its extension\n"));
    assert_non_null(strstr(text, "one of gpipe, 1f1b, interleaved"));
    free(text);
    struct tally_error err;
    assert_int_equal(spec_schema_print(stderr, &tally__v1__job_spec__descriptor, "train.optimzer", &err), TALLY_EINVAL);
    assert_string_equal(err.message, "unknown key 'train.optimzer' (did you mean train.optimizer?)");
    assert_int_equal(spec_schema_print(stderr, &tally__v1__job_spec__descriptor, "train.optim", &err), TALLY_EINVAL);
}

static void schema_as_json(void **state)
{
    (void)state;
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    assert_int_equal(spec_schema_json(out, &tally__v1__job_spec__descriptor, NULL, NULL), TALLY_OK);
    fclose(out);
    json_t *list = json_loads(text, 0, NULL);
    assert_non_null(list);
    size_t i;
    json_t *row;
    int found = 0;
    json_array_foreach(list, i, row)
    {
        const char *key = json_string_value(json_object_get(row, "key"));
        assert_non_null(key);
        if (strcmp(key, "parallel.pipeline.schedule") == 0) {
            assert_string_equal(json_string_value(json_object_get(row, "default")), "gpipe");
            assert_string_equal(json_string_value(json_array_get(json_object_get(row, "values"), 1)), "1f1b");
            found++;
        } else if (strcmp(key, "train.batch_size") == 0) {
            assert_true(json_is_true(json_object_get(row, "required")));
            assert_null(json_object_get(row, "default"));
            found++;
        } else if (strcmp(key, "model.layers[].flatten.end_dim") == 0) {
            assert_int_equal(json_integer_value(json_object_get(row, "default")), -1);
            found++;
        }
    }
    assert_int_equal(found, 3);
    json_decref(list);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(example_comes_back),    cmocka_unit_test(yaml_is_as_people_write_it),
        cmocka_unit_test(long_lines_are_broken), cmocka_unit_test(strings_come_back),
        cmocka_unit_test(json_of_any_message),   cmocka_unit_test(jansson_of_a_message),
        cmocka_unit_test(a_full_device_is_told), cmocka_unit_test(schema_of_a_key),
        cmocka_unit_test(schema_of_everything),  cmocka_unit_test(schema_as_json),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
