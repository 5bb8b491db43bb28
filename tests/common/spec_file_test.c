#include "common/spec_file.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/limits.h"
#include "proto/jobs.pb-c.h"
#include "proto/jobspec.pb-c.h"

#define COUNT(a) (sizeof(a) / sizeof((a)[0]))
#define GOOD "tests/common/testdata/good.yaml"

static const ProtobufCMessageDescriptor *const job_type = &tally__v1__job_spec__descriptor;

/* Reads text as a message of this type; the outcome's message is in *err. */
static tally_status read_text(const ProtobufCMessageDescriptor *type, const char *text, size_t bytes,
                              ProtobufCMessage **ret_msg, struct tally_error *err)
{
    struct spec_file *f = NULL;
    tally_status status = spec_open_text("f", text, bytes, &f, err);
    if (status == TALLY_OK)
        status = spec_read(f, type, ret_msg, err);
    spec_close(f);
    return status;
}

static void *must_read(const ProtobufCMessageDescriptor *type, const char *text)
{
    ProtobufCMessage *msg = NULL;
    struct tally_error err = {.message = ""};
    if (read_text(type, text, strlen(text), &msg, &err) != TALLY_OK)
        fail_msg("%s\n%s", err.message, text);
    return msg;
}

static void drop(void *msg)
{
    protobuf_c_message_free_unpacked(msg, NULL);
}

/* ---- what is refused, and in which words ---- */

struct bad {
    const ProtobufCMessageDescriptor *type;
    const char *text;
    const char *message;
};

#define JOB &tally__v1__job_spec__descriptor
#define LAYER &tally__v1__layer__descriptor
#define LINEAR &tally__v1__linear__descriptor
#define CONV &tally__v1__conv2d__descriptor
#define SGD &tally__v1__sgd__descriptor
#define DATA &tally__v1__data__descriptor
#define NORM &tally__v1__normalize__descriptor
#define PARALLEL &tally__v1__parallel__descriptor
#define PATH &tally__v1__safetensors_file__descriptor
#define CHUNK &tally__v1__result_chunk__descriptor
#define LAYER_KINDS "linear, conv2d, max_pool2d, avg_pool2d, relu, tanh, sigmoid, gelu, flatten, add"

static const struct bad bad[] = {
    /* the document */
    {JOB, "", "f:1:1: is empty, expected a mapping"},
    {JOB, "# nothing\n", "f:1:1: is empty, expected a mapping"},
    {JOB, "---\n", "f:1:1: is empty, expected a mapping"},
    {JOB, "~\n", "f:1:1: is empty, expected a mapping"},
    {JOB, "- a\n", "f:1:1: found a list, expected a mapping"},
    {JOB, "hello\n", "f:1:1: found 'hello', expected a mapping"},
    {JOB, "seed: 1\n---\nseed: 2\n", "f:2:1: a second document begins, expected one"},
    {JOB, "seed: 1\n...\n---\nseed: 2\n", "f:3:1: a second document begins, expected one"},
    {JOB, "seed: [1\n", "f:2:1: is no YAML: flow sequence without a closing bracket"},
    {JOB, "seed: 1\n model: 2\n", "f:1:7: is no YAML: invalid multiline plain key"},
    {JOB, "a: b: c\n", "f:1:5: is no YAML: invalid nested block mapping on the same line"},
    {JOB, "seed: \xff\n", "f:1:7: is not UTF-8 text"},
    {JOB, "name: \xc3\xa4\nseed: \xed\xa0\x80\n", "f:2:7: is not UTF-8 text"},
    {JOB, "seed: &a 1\n", "f:1:7: anchors (&) are not supported, write the value out"},
    {JOB, "seed: *a\n", "f:1:7: aliases (*) are not supported, write the value out"},
    {JOB, "<<: {seed: 1}\n", "f:1:1: merge keys (<<) are not supported, write the keys out"},
    {JOB, "seed: !!int 1\n", "f:1:7: tags (!) are not supported, the key decides the type"},
    {JOB, "[a]: 1\n", "f:1:1: a key is a list or a mapping, expected a name"},
    {JOB, "name: \"a\\0b\"\n", "f:1:7: a string holds a zero byte or is not UTF-8"},
    /* keys */
    {JOB, "nmae: x\n", "f:1:1: nmae: unknown key (did you mean name?)"},
    {JOB, "seed: 1\nParallel: {}\n", "f:2:1: Parallel: unknown key (did you mean parallel?)"},
    {JOB, "model:\n  layers:\n    - conv2d: {kernal_size: 5}\n",
     "f:3:16: model.layers[0].conv2d.kernal_size: unknown key (did you mean kernel_size?)"},
    {JOB, "model: {layers: [{relu: {}}, {max_pool_2d: {}}]}\n",
     "f:1:31: model.layers[1].max_pool_2d: unknown key (did you mean max_pool2d?)"},
    {LAYER, "conv: {}\n", "f:1:1: conv: unknown key (did you mean conv2d?)"},
    {SGD, "learning_rate: 1\n",
     "f:1:1: learning_rate: unknown key, expected one of lr, momentum, dampening, weight_decay, nesterov, maximize"},
    {LAYER, "relu: {inplace: true}\n", "f:1:8: relu.inplace: unknown key, expected none"},
    {JOB, "seed: 1\nname: a\nseed: 2\n", "f:3:1: seed: is given twice, first in line 1"},
    {JOB, "model: {layers: [{linear: {bias: true, bias: true}}]}\n",
     "f:1:40: model.layers[0].linear.bias: is given twice, first in line 1"},
    {PARALLEL, "tensor:\n  layers:\n    fc1: row\n    fc2: row\n    fc1: row\n",
     "f:5:5: tensor.layers.fc1: is given twice, first in line 3"},
    /* types */
    {JOB, "seed: abc\n", "f:1:7: seed: found 'abc', expected an integer from 0 to 4294967295"},
    {JOB, "seed: [1]\n", "f:1:7: seed: found a list, expected an integer from 0 to 4294967295"},
    {JOB, "seed: {a: 1}\n", "f:1:7: seed: found a mapping, expected an integer from 0 to 4294967295"},
    {JOB, "seed:\n", "f:1:1: seed: found nothing, expected an integer from 0 to 4294967295"},
    {JOB, "seed: null\n", "f:1:7: seed: found nothing, expected an integer from 0 to 4294967295"},
    {JOB, "seed: '1'\n",
     "f:1:7: seed: found the string \"1\", expected an integer from 0 to 4294967295 (did you mean 1 without the "
     "quotes?)"},
    {LINEAR, "out_features: 64.0\n",
     "f:1:15: out_features: found '64.0', expected an integer of at least 1 (did you mean 64?)"},
    {LINEAR, "out_features: 64.5\n", "f:1:15: out_features: found '64.5', expected an integer of at least 1"},
    {LINEAR, "out_features: 1e3\n",
     "f:1:15: out_features: found '1e3', expected an integer of at least 1 (did you mean 1000?)"},
    {LINEAR, "out_features: 0x10\n",
     "f:1:15: out_features: found '0x10', expected an integer of at least 1 (did you mean 16?)"},
    {LINEAR, "out_features: 0o17\n",
     "f:1:15: out_features: found '0o17', expected an integer of at least 1 (did you mean 15?)"},
    {LINEAR, "out_features: 017\n",
     "f:1:15: out_features: found '017', expected an integer of at least 1 (did you mean 17?)"},
    {LINEAR, "out_features: 1_000\n",
     "f:1:15: out_features: found '1_000', expected an integer of at least 1 (did you mean 1000?)"},
    {LINEAR, "out_features: -3\n", "f:1:15: out_features: found '-3', expected an integer of at least 1"},
    {LINEAR, "out_features: 4294967296\n",
     "f:1:15: out_features: found '4294967296', expected an integer of at least 1"},
    {LINEAR, "out_features: true\n", "f:1:15: out_features: found 'true', expected an integer of at least 1"},
    {LAYER, "flatten: {end_dim: 2147483648}\n", "f:1:20: flatten.end_dim: found '2147483648', expected an integer"},
    {LAYER, "flatten: {end_dim: -2147483649}\n", "f:1:20: flatten.end_dim: found '-2147483649', expected an integer"},
    {SGD, "lr: .inf\n", "f:1:5: lr: found '.inf', expected a number of at least 0"},
    {SGD, "lr: .nan\n", "f:1:5: lr: found '.nan', expected a number of at least 0"},
    {SGD, "lr: nan\n", "f:1:5: lr: found 'nan', expected a number of at least 0"},
    {SGD, "lr: 0x1p3\n", "f:1:5: lr: found '0x1p3', expected a number of at least 0"},
    {SGD, "lr: 1_0.5\n", "f:1:5: lr: found '1_0.5', expected a number of at least 0 (did you mean 10.5?)"},
    {SGD, "lr: 1,5\n", "f:1:5: lr: found '1,5', expected a number of at least 0"},
    {SGD, "lr: 1e\n", "f:1:5: lr: found '1e', expected a number of at least 0"},
    {SGD, "lr: .\n", "f:1:5: lr: found '.', expected a number of at least 0"},
    {SGD, "lr: 1e400\n", "f:1:5: lr: found '1e400', expected a number of magnitude at most 1.8e+308"},
    {NORM, "mean: -1e39\n", "f:1:7: mean: found '-1e39', expected a number of magnitude at most 3.4e+38"},
    {SGD, "nesterov: yes\n", "f:1:11: nesterov: found 'yes', expected true or false (did you mean true?)"},
    {SGD, "nesterov: True\n", "f:1:11: nesterov: found 'True', expected true or false (did you mean true?)"},
    {SGD, "nesterov: off\n", "f:1:11: nesterov: found 'off', expected true or false (did you mean false?)"},
    {SGD, "nesterov: 0\n", "f:1:11: nesterov: found '0', expected true or false (did you mean false?)"},
    {SGD, "nesterov: \"true\"\n",
     "f:1:11: nesterov: found the string \"true\", expected true or false (did you mean true without the quotes?)"},
    {SGD, "nesterov: maybe\n", "f:1:11: nesterov: found 'maybe', expected true or false"},
    {JOB, "name: [a]\n", "f:1:7: name: found a list, expected a name of letters, digits, '-' and '_'"},
    {PATH, "path: ~\n", "f:1:7: path: found nothing, expected a path"},
    {LAYER, "linear: 3\n", "f:1:9: linear: found '3', expected a mapping"},
    {LAYER, "relu:\n", "f:1:1: relu: found nothing, expected a mapping (did you mean {}, which takes every default?)"},
    {LAYER, "linear:\n", "f:1:1: linear: found nothing, expected a mapping"},
    {JOB, "model: {layers: {relu: {}}}\n", "f:1:17: model.layers: found a mapping, expected a list of 1 to 4096"},
    {PARALLEL, "data: two\n", "f:1:7: data: found 'two', expected an integer from 1 to 1024"},
    {PARALLEL, "pipeline: {schedule: 1f2b}\n",
     "f:1:22: pipeline.schedule: found '1f2b', expected one of gpipe, 1f1b, interleaved (did you mean 1f1b?)"},
    {PARALLEL, "pipeline: {schedule: one_f_one_b}\n",
     "f:1:22: pipeline.schedule: found 'one_f_one_b', expected one of gpipe, 1f1b, interleaved"},
    {PARALLEL, "pipeline: {placement: [[a, {b: c}]]}\n",
     "f:1:28: pipeline.placement[0][1]: found a mapping, expected a string"},
    {PARALLEL, "tensor: {layers: {fc1: colum}}\n",
     "f:1:24: tensor.layers.fc1: found 'colum', expected one of column, row (did you mean column?)"},
    {PARALLEL, "tensor: {layers: [fc1]}\n", "f:1:18: tensor.layers: found a list, expected a mapping"},
    {CHUNK, "data: abc\n", "f:1:7: data: found 'abc', expected base64"},
    {CHUNK, "data: ab=c\n", "f:1:7: data: found 'ab=c', expected base64"},
    {JOB, "name: aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa b\n",
     "f:1:7: name: found 'aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa...', expected a name of letters, digits, '-' and "
     "'_'"},
    /* lists */
    {CONV, "kernel_size: []\n", "f:1:14: kernel_size: has 0 elements, expected at least 1"},
    {CONV, "kernel_size: [1, 2, 3]\n", "f:1:14: kernel_size: has 3 elements, expected at most 2"},
    {CONV, "kernel_size: [1, x]\n", "f:1:18: kernel_size[1]: found 'x', expected an integer of at least 1"},
    {CONV, "kernel_size: x\n", "f:1:14: kernel_size: found 'x', expected an integer of at least 1 or a list of 1 to 2"},
    {CONV, "kernel_size: {a: 1}\n",
     "f:1:14: kernel_size: found a mapping, expected an integer of at least 1 or a list of 1 to 2"},
    {CONV, "kernel_size: [[1]]\n", "f:1:15: kernel_size[0]: found a list, expected an integer of at least 1"},
    {CONV, "kernel_size: [1, ~]\n", "f:1:18: kernel_size[1]: found nothing, expected an integer of at least 1"},
    /* rules */
    {LINEAR, "bias: true\n", "f:1:1: out_features: is missing, expected an integer of at least 1"},
    {LINEAR, "out_features: 0\n", "f:1:15: out_features: found 0, expected an integer of at least 1"},
    {CONV, "out_channels: 1\nkernel_size: [3, 0]\n",
     "f:2:18: kernel_size[1]: found 0, expected an integer of at least 1"},
    {JOB, "seed: 4294967296\n", "f:1:7: seed: found 4294967296, expected an integer from 0 to 4294967295"},
    {JOB, "seed: 18446744073709551616\n",
     "f:1:7: seed: found '18446744073709551616', expected an integer from 0 to 4294967295"},
    {JOB, "seed: 1\n", "f:1:1: model: is missing, expected a mapping"},
    {JOB, "name: a.b\n", "f:1:7: name: found 'a.b', expected a name of letters, digits, '-' and '_'"},
    {JOB, "model: {layers: [{name: a.b.}], loss: {}}\n",
     "f:1:25: model.layers[0].name: found 'a.b.', expected a name of letters, digits, '-' and '_', or several with '.' "
     "between"},
    {JOB, "model: {layers: [{name: .}], loss: {}}\n",
     "f:1:25: model.layers[0].name: found '.', expected a name of letters, digits, '-' and '_', or several with '.' "
     "between"},
    {JOB, "model: {layers: [{name: a..b}], loss: {}}\n",
     "f:1:25: model.layers[0].name: found 'a..b', expected a name of letters, digits, '-' and '_', or several with '.' "
     "between"},
    {JOB, "model: {layers: [{from: []}], loss: {}}\n",
     "f:1:25: model.layers[0].from: has 0 elements, expected at least 1"},
    {JOB, "name: ''\n", "f:1:7: name: found an empty string, expected a name of letters, digits, '-' and '_'"},
    {PATH, "path: ''\n", "f:1:7: path: found an empty string, expected a path"},
    {SGD, "lr: -0.5\n", "f:1:5: lr: found -0.5, expected a number of at least 0"},
    {NORM, "mean: 0\nstd: [1, 0]\n", "f:2:10: std[1]: found 0, expected a number above 0"},
    {PARALLEL, "data: 0\n", "f:1:7: data: found 0, expected an integer from 1 to 1024"},
    {PARALLEL, "data: {min: 0}\n", "f:1:13: data.min: found 0, expected an integer from 1 to 1024"},
    {LAYER, "{relu: {}, tanh: {}}\n", "f:1:12: tanh: relu is given too, expected exactly one of " LAYER_KINDS},
    {LAYER, "name: x\n", "f:1:1: has no kind, expected exactly one of " LAYER_KINDS},
    {DATA, "train: {}\n", "f:1:8: train: has no kind, expected exactly one of idx, npy, csv, synthetic"},
};

/* All that differ are told, not the first alone. */
static void bad_files_are_refused(void **state)
{
    (void)state;
    int wrong = 0;
    for (size_t i = 0; i < COUNT(bad); i++) {
        ProtobufCMessage *msg = NULL;
        struct tally_error err = {.message = "taken"};
        tally_status status = read_text(bad[i].type, bad[i].text, strlen(bad[i].text), &msg, &err);
        if (strcmp(err.message, bad[i].message) != 0) {
            print_error("case %zu: %s  expected: %s\n  found:    %s\n", i, bad[i].text, bad[i].message, err.message);
            wrong++;
        }
        assert_int_equal(status, TALLY_EINVAL);
        assert_null(msg);
        /* without a place for the reason too */
        assert_int_equal(read_text(bad[i].type, bad[i].text, strlen(bad[i].text), &msg, NULL), TALLY_EINVAL);
    }
    assert_int_equal(wrong, 0);
}

static void zero_byte_is_refused(void **state)
{
    (void)state;
    ProtobufCMessage *msg = NULL;
    struct tally_error err;
    assert_int_equal(read_text(job_type, "seed: 1\n\0", 9, &msg, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "f:2:1: a zero byte, expected text");
}

static void bounds_hold(void **state)
{
    (void)state;
    ProtobufCMessage *msg = NULL;
    struct tally_error err;
    char deep[2 * TALLY_SPEC_DEPTH_MAX];
    memset(deep, '[', sizeof deep);
    assert_int_equal(read_text(job_type, deep, sizeof deep, &msg, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "f:1:33: lists and mappings nest too deep for a job file");
    size_t bytes = TALLY_JOB_FILE_MAX_BYTES + 1;
    char *large = malloc(bytes);
    assert_non_null(large);
    memset(large, ' ', bytes);
    assert_int_equal(read_text(job_type, large, bytes, &msg, &err), TALLY_ENOMEM);
    assert_string_equal(err.message, "f: has 16777217 bytes, at most 16777216 are read");
    memset(large, ',', bytes);
    for (size_t i = 1; i < 3 * (size_t)TALLY_SPEC_VALUES_MAX; i += 2)
        large[i] = '1';
    large[0] = '[';
    assert_int_equal(read_text(job_type, large, 3 * (size_t)TALLY_SPEC_VALUES_MAX, &msg, &err), TALLY_EINVAL);
    assert_non_null(strstr(err.message, "too many values for a job file"));
    free(large);
    char name[TALLY_NAME_MAX + 32];
    snprintf(name, sizeof name, "name: %0*d\n", TALLY_NAME_MAX + 1, 0);
    assert_int_equal(read_text(job_type, name, strlen(name), &msg, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "f:1:7: name: has 201 characters, expected at most 200");
}

/* ---- what is read ---- */

static void the_example_is_read(void **state)
{
    (void)state;
    struct spec_file *f = NULL;
    ProtobufCMessage *msg = NULL;
    struct tally_error err = {.message = ""};
    if (spec_open(GOOD, &f, &err) != TALLY_OK || spec_read(f, job_type, &msg, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    assert_string_equal(spec_name(f), GOOD);
    const Tally__V1__JobSpec *job = (const Tally__V1__JobSpec *)msg;
    assert_string_equal(job->name, "fashion-cnn");
    assert_true(job->has_seed);
    assert_int_equal(job->seed, 3);
    assert_int_equal(job->model->n_layers, 8);
    const Tally__V1__Layer *conv = job->model->layers[0];
    assert_string_equal(conv->name, "conv1");
    assert_int_equal(conv->kind_case, TALLY__V1__LAYER__KIND_CONV2D);
    assert_int_equal(conv->conv2d->n_kernel_size, 1);
    assert_int_equal(conv->conv2d->kernel_size[0], 5);
    assert_false(conv->conv2d->has_groups);
    assert_int_equal(conv->conv2d->groups, 1);
    assert_int_equal(job->model->layers[2]->conv2d->n_kernel_size, 2);
    assert_int_equal(job->model->layers[7]->n_from, 1);
    assert_int_equal(job->model->loss->kind_case, TALLY__V1__LOSS__KIND_CROSS_ENTROPY);
    assert_int_equal(job->model->loss->cross_entropy->ignore_index, -100);
    assert_int_equal(job->data->train->idx->limit, 4096);
    assert_true(job->data->normalize->mean[0] == 0.2860f);
    assert_true(job->data->normalize->std[0] == 0.3530f);
    assert_true(job->train->optimizer->sgd->lr == 0.001);
    assert_true(job->parallel->data->has_count);
    assert_int_equal(job->parallel->data->count, 2);
    assert_int_equal(job->parallel->pipeline->n_placement, 2);
    assert_string_equal(job->parallel->pipeline->placement[1]->layers[1], "fc2");
    assert_int_equal(job->parallel->pipeline->schedule, TALLY__V1__SCHEDULE__one_f_one_b);
    assert_int_equal(job->parallel->tensor->n_layers, 2);
    assert_string_equal(job->parallel->tensor->layers[1]->key, "fc2");
    assert_int_equal(job->parallel->tensor->layers[1]->value, TALLY__V1__SPLIT__row);
    assert_true(job->checkpoint->has_every_steps);
    assert_false(job->checkpoint->has_keep);
    /* It packs, and comes back the same. */
    size_t bytes = protobuf_c_message_get_packed_size(msg);
    uint8_t *packed = malloc(bytes);
    assert_non_null(packed);
    assert_int_equal(protobuf_c_message_pack(msg, packed), bytes);
    ProtobufCMessage *again = protobuf_c_message_unpack(job_type, NULL, bytes, packed);
    assert_non_null(again);
    uint8_t *repacked = malloc(bytes);
    assert_non_null(repacked);
    assert_int_equal(protobuf_c_message_pack(again, repacked), bytes);
    assert_memory_equal(packed, repacked, bytes);
    free(packed);
    free(repacked);
    drop(again);
    drop(msg);
    spec_close(f);
}

static void scalars_are_exact(void **state)
{
    (void)state;
    Tally__V1__Sgd *sgd =
        must_read(SGD, "{lr: +1.5E-3, momentum: .5, dampening: -2., weight_decay: 0, nesterov: true}");
    assert_true(sgd->lr == 1.5e-3);
    assert_true(sgd->momentum == 0.5);
    assert_true(sgd->dampening == -2);
    assert_true(sgd->has_weight_decay);
    assert_true(sgd->nesterov);
    drop(sgd);
    Tally__V1__CrossEntropy *loss =
        must_read(&tally__v1__cross_entropy__descriptor, "ignore_index: -9223372036854775808");
    assert_true(loss->ignore_index == INT64_MIN);
    drop(loss);
    Tally__V1__Train *train =
        must_read(&tally__v1__train__descriptor, "{batch_size: 1, epochs: 18446744073709551615, optimizer: {sgd: {}}}");
    assert_true(train->epochs == UINT64_MAX);
    drop(train);
    /* To double first, then to float: 0x1.000001p0 + a little rounds down by way of double's tie, as in Python. */
    Tally__V1__Normalize *norm = must_read(NORM, "{mean: 1.00000005960464477539062500001, std: 1}");
    assert_true(norm->mean[0] == (float)1.00000005960464477539062500001);
    drop(norm);
    Tally__V1__ResultChunk *chunk = must_read(CHUNK, "{data: AP8+YQ==, offset: 7}");
    assert_int_equal(chunk->data.len, 4);
    assert_memory_equal(chunk->data.data, "\x00\xff\x3e\x61", 4);
    assert_int_equal(chunk->offset, 7);
    drop(chunk);
}

/* The ends of a range belong to it. */
static void bounds_belong_to_the_range(void **state)
{
    (void)state;
    drop(must_read(&tally__v1__cross_entropy__descriptor, "label_smoothing: 1"));
    drop(must_read(&tally__v1__cross_entropy__descriptor, "label_smoothing: 0"));
    drop(must_read(&tally__v1__train__descriptor, "{batch_size: 16777216, optimizer: {sgd: {lr: 0}}}"));
    drop(must_read(PARALLEL, "{shards: 1, data: 1024}"));
    drop(must_read(PARALLEL, "{shards: 256, data: 1}"));
    Tally__V1__Flatten *flatten =
        must_read(&tally__v1__flatten__descriptor, "{start_dim: -2147483648, end_dim: 2147483647}");
    assert_int_equal(flatten->start_dim, INT32_MIN);
    assert_int_equal(flatten->end_dim, INT32_MAX);
    drop(flatten);
}

static void strings_keep_what_was_written(void **state)
{
    (void)state;
    static const char *const cases[][2] = {
        {"path: 007", "007"},
        {"path: 1.10", "1.10"},
        {"path: yes", "yes"},
        {"path: 'null'", "null"},
        {"path: \"a\\tb\"", "a\tb"},
        {"path: a b # c", "a b"},
        {"path: 'it''s'", "it's"},
        {"path: |\n  a\n  b\n", "a\nb\n"},
        {"path: >-\n  a\n  b\n", "a b"},
        {"path: \xc3\xa4.bin", "\xc3\xa4.bin"},
        {"\xef\xbb\xbfpath: a\r\n", "a"},
        {"{\"path\": \"json\"}", "json"},
    };
    for (size_t i = 0; i < COUNT(cases); i++) {
        Tally__V1__SafetensorsFile *file = must_read(PATH, cases[i][0]);
        assert_string_equal(file->path, cases[i][1]);
        drop(file);
    }
}

static void shorthand_is_read(void **state)
{
    (void)state;
    Tally__V1__Parallel *p =
        must_read(PARALLEL, "{data: {min: 1, max: 4}, pipeline: {placement: [a, [b, c], {layers: d}]}}");
    assert_false(p->data->has_count);
    assert_int_equal(p->data->max, 4);
    assert_int_equal(p->pipeline->n_placement, 3);
    assert_string_equal(p->pipeline->placement[0]->layers[0], "a");
    assert_int_equal(p->pipeline->placement[1]->n_layers, 2);
    assert_string_equal(p->pipeline->placement[2]->layers[0], "d");
    drop(p);
}

/* ---- positions ---- */

static void check_where(const struct spec_file *f, const ProtobufCMessage *msg, const char *field, int index,
                        const char *expected)
{
    char text[256];
    spec_where(f, msg, field, index, text, sizeof text);
    assert_string_equal(text, expected);
}

static void positions_are_kept(void **state)
{
    (void)state;
    struct spec_file *f = NULL;
    ProtobufCMessage *msg = NULL;
    assert_int_equal(spec_open(GOOD, &f, NULL), TALLY_OK);
    assert_int_equal(spec_read(f, job_type, &msg, NULL), TALLY_OK);
    const Tally__V1__JobSpec *job = (const Tally__V1__JobSpec *)msg;
    check_where(f, msg, NULL, -1, GOOD ":1:1");
    check_where(f, NULL, NULL, -1, GOOD ":1:1");
    check_where(f, msg, "seed", -1, GOOD ":2:7: seed");
    check_where(f, &job->model->layers[7]->base, "from", 0, GOOD ":12:26: model.layers[7].from[0]");
    check_where(f, &job->model->layers[7]->base, "from", 5, GOOD ":12:25: model.layers[7].from[5]");
    check_where(f, &job->model->layers[7]->base, NULL, -1, GOOD ":12:7: model.layers[7]");
    check_where(f, &job->model->layers[7]->base, "linear", -1, GOOD ":12:40: model.layers[7].linear");
    check_where(f, &job->model->layers[2]->conv2d->base, "stride", -1, GOOD ":7:29: model.layers[2].conv2d.stride");
    check_where(f, &job->parallel->data->base, "count", -1, GOOD ":25:9: parallel.data");
    check_where(f, &job->parallel->data->base, "min", -1, GOOD ":25:9: parallel.data.min");
    check_where(f, &job->parallel->pipeline->placement[1]->base, NULL, -1,
                GOOD ":27:40: parallel.pipeline.placement[1]");
    check_where(f, &job->parallel->pipeline->placement[1]->base, "layers", 1,
                GOOD ":27:48: parallel.pipeline.placement[1][1]");
    check_where(f, &job->parallel->tensor->layers[1]->base, "value", -1, GOOD ":28:48: parallel.tensor.layers.fc2");
    char little[10];
    spec_where(f, msg, "seed", -1, little, sizeof little);
    assert_int_equal(strlen(little), sizeof little - 1);
    struct tally_error err;
    assert_int_equal(spec_error(f, &err, &job->train->base, "steps", -1, "is %s", "wrong"), TALLY_EINVAL);
    assert_string_equal(err.message, GOOD ":20:3: train.steps: is wrong");
    assert_int_equal(spec_error(NULL, &err, &job->train->base, "steps", -1, "is wrong"), TALLY_EINVAL);
    assert_string_equal(err.message, "steps: is wrong");
    assert_int_equal(spec_error(NULL, &err, NULL, NULL, -1, "is wrong"), TALLY_EINVAL);
    assert_string_equal(err.message, "is wrong");
    assert_int_equal(spec_error(f, NULL, &job->train->base, "steps", -1, "is wrong"), TALLY_EINVAL);
    drop(msg);
    spec_close(f);
}

/* What a program puts into the message after reading has a path, and the position of what is around it. */
static void positions_of_what_was_added(void **state)
{
    (void)state;
    static const char text[] = "batch_size: 1\nsteps: 1\noptimizer:\n  sgd: {}\n";
    struct spec_file *f = NULL;
    ProtobufCMessage *msg = NULL;
    assert_int_equal(spec_open_text("f", text, sizeof text - 1, &f, NULL), TALLY_OK);
    assert_int_equal(spec_read(f, &tally__v1__train__descriptor, &msg, NULL), TALLY_OK);
    Tally__V1__Train *train = (Tally__V1__Train *)msg;
    Tally__V1__Sgd *old = train->optimizer->sgd;
    Tally__V1__Sgd added = TALLY__V1__SGD__INIT;
    train->optimizer->sgd = &added;
    check_where(f, &added.base, "lr", -1, "f:4:8: optimizer.sgd.lr");
    train->optimizer->sgd = old;
    Tally__V1__Sgd stranger = TALLY__V1__SGD__INIT;
    check_where(f, &stranger.base, "lr", -1, "f:1:1: lr");
    drop(msg);
    spec_close(f);
}

/* ---- --set ---- */

struct setting {
    const char *assignment;
    const char *message; /* NULL: taken */
};

static const struct setting settings[] = {
    {"train.batch_size=32", NULL},
    {"parallel.data.min=1", NULL},
    {"parallel.data={min: 1, max: 2}", NULL},
    {"parallel.pipeline.placement[1]=[conv2]", NULL},
    {"parallel.pipeline.placement[1][0]=fc2", NULL},
    {"parallel.tensor.layers[fc2]=column", NULL},
    {"data.test.synthetic={samples: 1, shape: 2}", NULL},
    {"model.layers[0].conv2d.stride=[2, 1]", NULL},
    {"name=x=y", "--set name: found 'x=y', expected a name of letters, digits, '-' and '_'"},
    {"train.batch_size=0", "--set train.batch_size: found 0, expected an integer from 1 to 16777216"},
    {"train.batch_size=", "--set train.batch_size: found nothing, expected an integer from 1 to 16777216"},
    {"train.bach_size=1", "--set train.bach_size: unknown key (did you mean batch_size?)"},
    {"train.optimizer={sgd: {lr: x}}",
     "--set train.optimizer: train.optimizer.sgd.lr: found 'x', expected a number of at least 0"},
    {"model.layers[fc1].linear.out_features=x",
     "--set model.layers[fc1].linear.out_features: model.layers[5].linear.out_features: found 'x', expected an integer "
     "of at least 1"},
    {"model.layers[fc9].name=x", "--set model.layers[fc9].name: no element of the list has the name 'fc9'"},
    {"model.layers[8].name=x", "--set model.layers[8].name: the list has 8 elements, there is no [8]"},
    {"model.layers[99999999999999999999].name=x",
     "--set model.layers[99999999999999999999].name: the list has 8 elements, there is no [99999999999999999999]"},
    {"model.layers.fc1=x", "--set model.layers.fc1: a list is there, expected [index] or [name] before 'fc1'"},
    {"name[0]=x", "--set name[0]: no list is there, so there is no element '0'"},
    {"train=[1", "--set train: is no YAML: flow sequence without a closing bracket"},
    {"train", "--set train: expected key.path=value"},
    {"=1", "--set =1: expected key.path=value"},
    {"a..b=1", "--set a..b: a key is empty, expected key.path=value"},
    {"a[b=1", "--set a[b: a '[' is not closed"},
    {"model.layers[0]x=1", "--set model.layers[0]x: expected '.' or '[' at 'x'"},
    {"model.layers[0].tanh={}",
     "--set model.layers[0].tanh: conv2d is given too, expected exactly one of " LAYER_KINDS},
    {"name=\xff", "--set name: is not UTF-8 text"},
};

static tally_status read_with(const char *assignment, ProtobufCMessage **ret_msg, struct tally_error *err)
{
    struct spec_file *f = NULL;
    tally_status status = spec_open(GOOD, &f, err);
    if (status == TALLY_OK)
        status = spec_set(f, assignment, err);
    if (status == TALLY_OK)
        status = spec_read(f, job_type, ret_msg, err);
    spec_close(f);
    return status;
}

static void settings_are_applied(void **state)
{
    (void)state;
    int wrong = 0;
    for (size_t i = 0; i < COUNT(settings); i++) {
        ProtobufCMessage *msg = NULL;
        struct tally_error err = {.message = ""};
        const char *expected = settings[i].message ? settings[i].message : "";
        tally_status status = read_with(settings[i].assignment, &msg, &err);
        if (strcmp(err.message, expected) != 0) {
            print_error("%s\n  expected: %s\n  found:    %s\n", settings[i].assignment, expected, err.message);
            wrong++;
        }
        assert_int_equal(status == TALLY_OK, settings[i].message == NULL);
        if (msg)
            drop(msg);
    }
    assert_int_equal(wrong, 0);
}

static Tally__V1__JobSpec *must_set(const char *assignment)
{
    ProtobufCMessage *msg = NULL;
    struct tally_error err = {.message = ""};
    if (read_with(assignment, &msg, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    return (Tally__V1__JobSpec *)msg;
}

static void settings_have_their_effect(void **state)
{
    (void)state;
    Tally__V1__JobSpec *job = must_set("train.optimizer.sgd.lr=0.25");
    assert_true(job->train->optimizer->sgd->lr == 0.25);
    assert_true(job->train->optimizer->sgd->momentum == 0.9);
    drop(job);
    job = must_set("model.layers[fc1].linear.out_features=7");
    assert_int_equal(job->model->layers[5]->linear->out_features, 7);
    drop(job);
    job = must_set("model.layers[2].conv2d.kernel_size=7");
    assert_int_equal(job->model->layers[2]->conv2d->n_kernel_size, 1);
    assert_int_equal(job->model->layers[2]->conv2d->kernel_size[0], 7);
    drop(job);
    job = must_set("parallel.data.min=3"); /* the shorthand gives way */
    assert_false(job->parallel->data->has_count);
    assert_int_equal(job->parallel->data->min, 3);
    drop(job);
    job = must_set("checkpoint.keep=9");
    assert_int_equal(job->checkpoint->keep, 9);
    assert_int_equal(job->checkpoint->every_steps, 100);
    drop(job);
}

static void a_setting_has_a_position(void **state)
{
    (void)state;
    struct spec_file *f = NULL;
    ProtobufCMessage *msg = NULL;
    assert_int_equal(spec_open(GOOD, &f, NULL), TALLY_OK);
    assert_int_equal(spec_set(f, "train.steps=7", NULL), TALLY_OK);
    assert_int_equal(spec_set(f, "train.steps=8", NULL), TALLY_OK); /* the last one counts */
    assert_int_equal(spec_read(f, job_type, &msg, NULL), TALLY_OK);
    const Tally__V1__Train *train = ((const Tally__V1__JobSpec *)msg)->train;
    assert_int_equal(train->steps, 8);
    check_where(f, &train->base, "steps", -1, "--set train.steps");
    check_where(f, &train->base, "batch_size", -1, GOOD ":20:15: train.batch_size");
    drop(msg);
    spec_close(f);
}

/* ---- messages from elsewhere ---- */

static void messages_are_checked(void **state)
{
    (void)state;
    struct spec_file *f = NULL;
    struct tally_error err;
    Tally__V1__Sgd sgd = TALLY__V1__SGD__INIT;
    Tally__V1__Optimizer optimizer = TALLY__V1__OPTIMIZER__INIT;
    Tally__V1__Train train = TALLY__V1__TRAIN__INIT;
    train.optimizer = &optimizer;
    optimizer.kind_case = TALLY__V1__OPTIMIZER__KIND_SGD;
    optimizer.sgd = &sgd;
    assert_int_equal(spec_check_message("request", &train.base, NULL, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "request: batch_size: is missing, expected an integer from 1 to 16777216");
    train.has_batch_size = 1;
    train.batch_size = 2;
    sgd.has_lr = 1;
    sgd.lr = NAN;
    assert_int_equal(spec_check_message("request", &train.base, NULL, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "request: optimizer.sgd.lr: found nan, expected a number of at least 0");
    sgd.lr = 1;
    train.has_reduction = 1;
    train.reduction = (Tally__V1__Reduction)9;
    assert_int_equal(spec_check_message("request", &train.base, NULL, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "request: reduction: found value 9, expected one of canonical, fast");
    train.reduction = TALLY__V1__REDUCTION__fast;
    assert_int_equal(spec_check_message("request", &train.base, &f, &err), TALLY_OK);
    check_where(f, &sgd.base, "lr", -1, "request: optimizer.sgd.lr");
    spec_close(f);
    optimizer.kind_case = TALLY__V1__OPTIMIZER__KIND__NOT_SET;
    assert_int_equal(spec_check_message("request", &train.base, NULL, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "request: optimizer: has no kind, expected exactly one of sgd");
}

static void strings_and_mappings_from_elsewhere(void **state)
{
    (void)state;
    struct tally_error err;
    char bad_text[] = "a\xff";
    Tally__V1__SafetensorsFile file = TALLY__V1__SAFETENSORS_FILE__INIT;
    file.path = bad_text;
    assert_int_equal(spec_check_message("request", &file.base, NULL, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "request: path: found a string that is not UTF-8, expected a path");
    char key[] = "fc1";
    Tally__V1__Tensor__LayersEntry a = TALLY__V1__TENSOR__LAYERS_ENTRY__INIT;
    Tally__V1__Tensor__LayersEntry b = TALLY__V1__TENSOR__LAYERS_ENTRY__INIT;
    Tally__V1__Tensor__LayersEntry *entries[] = {&a, &b};
    Tally__V1__Tensor tensor = TALLY__V1__TENSOR__INIT;
    a.key = key;
    b.key = key;
    tensor.n_layers = 2;
    tensor.layers = entries;
    assert_int_equal(spec_check_message("request", &tensor.base, NULL, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "request: layers: has the key 'fc1' twice");
    tensor.n_layers = 1;
    a.has_value = 1;
    a.value = (Tally__V1__Split)7;
    assert_int_equal(spec_check_message("request", &tensor.base, NULL, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "request: layers.fc1: found value 7, expected one of column, row");
}

/* ---- the rest ---- */

static void defaults_are_filled(void **state)
{
    (void)state;
    Tally__V1__Layer *layer = must_read(LAYER, "conv2d: {out_channels: 1, kernel_size: 1, bias: false}");
    assert_int_equal(spec_fill_defaults(&layer->base, NULL), TALLY_OK);
    assert_true(layer->conv2d->has_groups);
    assert_int_equal(layer->conv2d->groups, 1);
    assert_true(layer->conv2d->has_bias);
    assert_false(layer->conv2d->bias);            /* was given */
    assert_false(layer->conv2d->has_in_channels); /* has none */
    assert_null(layer->name);
    drop(layer);
}

static void nearest_names(void **state)
{
    (void)state;
    static const char *const names[] = {"conv1", "conv2", "linear", "fc"};
    assert_string_equal(spec_nearest("conv3", names, COUNT(names)), "conv1");
    assert_string_equal(spec_nearest("Linaer", names, COUNT(names)), "linear");
    assert_string_equal(spec_nearest("f", names, COUNT(names)), "fc");
    assert_string_equal(spec_nearest("lin", names, COUNT(names)), "linear");
    assert_string_equal(spec_nearest("conv", names, COUNT(names)), "conv1");
    assert_null(spec_nearest("li", names, COUNT(names)));
    assert_null(spec_nearest("dropout", names, COUNT(names)));
    assert_null(spec_nearest("", names, COUNT(names)));
    char longest[1000];
    memset(longest, 'a', sizeof longest - 1);
    longest[sizeof longest - 1] = '\0';
    assert_null(spec_nearest(longest, names, COUNT(names)));
    int value = -1;
    assert_int_equal(spec_enum_parse(&tally__v1__schedule__descriptor, "1f1b", &value), TALLY_OK);
    assert_int_equal(value, TALLY__V1__SCHEDULE__one_f_one_b);
    assert_int_equal(spec_enum_parse(&tally__v1__schedule__descriptor, "x", &value), TALLY_ENOTFOUND);
    assert_string_equal(spec_enum_text(&tally__v1__schedule__descriptor, 1), "1f1b");
    assert_null(spec_enum_text(&tally__v1__schedule__descriptor, 77));
}

static void missing_files(void **state)
{
    (void)state;
    struct spec_file *f = NULL;
    struct tally_error err;
    assert_int_equal(spec_open("tests/common/testdata/absent.yaml", &f, &err), TALLY_ENOTFOUND);
    assert_string_equal(err.message, "cannot open tests/common/testdata/absent.yaml: No such file or directory");
    assert_null(f);
    spec_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_files_are_refused),
        cmocka_unit_test(zero_byte_is_refused),
        cmocka_unit_test(bounds_hold),
        cmocka_unit_test(the_example_is_read),
        cmocka_unit_test(scalars_are_exact),
        cmocka_unit_test(bounds_belong_to_the_range),
        cmocka_unit_test(strings_keep_what_was_written),
        cmocka_unit_test(shorthand_is_read),
        cmocka_unit_test(positions_are_kept),
        cmocka_unit_test(positions_of_what_was_added),
        cmocka_unit_test(settings_are_applied),
        cmocka_unit_test(settings_have_their_effect),
        cmocka_unit_test(a_setting_has_a_position),
        cmocka_unit_test(messages_are_checked),
        cmocka_unit_test(strings_and_mappings_from_elsewhere),
        cmocka_unit_test(defaults_are_filled),
        cmocka_unit_test(nearest_names),
        cmocka_unit_test(missing_files),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
