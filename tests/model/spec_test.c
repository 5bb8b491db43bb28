/* Job files from text to a complete spec, and what is refused, with its place. */
#include "model/spec.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "common/message_copy.h"
#include "common/safetensors.h"
#include "common/spec_print.h"
#include "tests/model/data_files.h"

static const char base[] = "name: job\n"                                                          /* 1 */
                           "model:\n"                                                             /* 2 */
                           "  layers:\n"                                                          /* 3 */
                           "    - {name: conv1, conv2d: {out_channels: 4, kernel_size: 3}}\n"     /* 4 */
                           "    - {max_pool2d: {kernel_size: 2}}\n"                               /* 5 */
                           "    - {flatten: {}}\n"                                                /* 6 */
                           "    - {name: fc1, linear: {out_features: 12}}\n"                      /* 7 */
                           "    - {relu: {}}\n"                                                   /* 8 */
                           "    - {name: fc2, linear: {out_features: 5}}\n"                       /* 9 */
                           "  loss: {cross_entropy: {}}\n"                                        /* 10 */
                           "data:\n"                                                              /* 11 */
                           "  train: {synthetic: {samples: 100, classes: 5, shape: [2, 8, 8]}}\n" /* 12 */
                           "  test: {synthetic: {samples: 20, classes: 5, shape: [2, 8, 8]}}\n"   /* 13 */
                           "  normalize: {mean: [0.5, 0.25], std: 2}\n"                           /* 14 */
                           "train:\n"                                                             /* 15 */
                           "  batch_size: 24\n"                                                   /* 16 */
                           "  epochs: 2\n"                                                        /* 17 */
                           "  optimizer: {sgd: {lr: 0.1, momentum: 0.9}}\n"                       /* 18 */
                           "parallel: {data: 2, shards: 2}\n";                                    /* 19 */

/* base with `from` (which is in it) replaced by `to`, in a file of this name. */
static const char *job_path(const char *name, const char *from, const char *to)
{
    const char *path = data_path(name), *at = from ? strstr(base, from) : base;
    char *text = NULL;
    assert_non_null(at);
    int n = asprintf(&text, "%.*s%s%s", (int)(at - base), base, from ? to : "", from ? at + strlen(from) : base);
    assert_true(n > 0);
    write_data(path, text, (size_t)n);
    free(text);
    return path;
}

static struct job_file *load(const char *path, const struct job_overrides *overrides)
{
    struct job_file *job = NULL;
    struct tally_error err = {0};
    if (job_file_load(path, overrides, &job, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    return job;
}

static void a_spec_is_complete(void **state)
{
    (void)state;
    struct job_file *job = load(job_path("my net.v2.yaml", "name: job\n", "\n"), NULL);
    const Tally__V1__JobSpec *spec = job_file_spec(job);
    const Tally__V1__DataFacts *facts = job_file_facts(job);
    assert_string_equal(spec->name, "my-net-v2");
    assert_true(spec->has_seed && spec->train->has_reduction && spec->data->has_shuffle);
    assert_int_equal(spec->train->micro_batch_size, 12);
    assert_int_equal(spec->parallel->data->count, 2);
    assert_int_equal(spec->parallel->shards, 2);
    const Tally__V1__Layer *conv = spec->model->layers[0];
    assert_int_equal(conv->conv2d->in_channels, 2);
    assert_int_equal(conv->conv2d->n_kernel_size, 2);
    assert_int_equal(conv->conv2d->n_padding, 2);
    assert_int_equal(spec->model->layers[1]->max_pool2d->stride[1], 2);
    assert_string_equal(spec->model->layers[1]->name, "1");
    assert_int_equal(spec->model->layers[3]->linear->in_features, 36);
    assert_int_equal(facts->train_samples, 100);
    assert_int_equal(facts->test_samples, 20);
    assert_int_equal(facts->n_input_shape, 3);
    assert_int_equal(facts->n_target_shape, 0);
    assert_int_equal(job_file_model(job)->param_count, 6);
    job_file_free(job);
}

/* What -o yaml prints of a complete spec is a job file that means the same. */
static void a_complete_spec_reads_back(void **state)
{
    (void)state;
    static const struct {
        const char *from, *to;
    } cases[] = {
        {NULL, NULL},
        {"data: 2", "data: {min: 1, max: 3}"},
        {"{max_pool2d: {kernel_size: 2}}", "{avg_pool2d: {kernel_size: [2, 3], divisor_override: 5}}"},
        {"data: 2", "pipeline: {placement: [[conv1, fc1, fc2]]}, tensor: {layers: {fc1: row}}"},
        {"epochs: 2", "steps: 7\n  micro_batch_size: 5"},
        {"    - {relu: {}}\n",
         "    - {name: r, relu: {}}\n    - {name: sum, from: [fc1, r], add: {}}\n    - {gelu: {approximate: tanh}}\n"},
        {"parallel:", "checkpoint: {every_steps: 10}\nparallel:"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++)
        for (unsigned flags = 0; flags < 2; flags++) {
            struct job_file *job = load(job_path("first.yaml", cases[i].from, cases[i].to), NULL);
            char *text = NULL;
            struct tally_error err = {0};
            assert_int_equal(spec_yaml_text(&job_file_spec(job)->base, flags ? SPEC_PRINT_DEFAULTS : 0, &text, &err),
                             TALLY_OK);
            const char *path = data_path("second.yaml");
            write_data(path, text, strlen(text));
            struct job_file *again = load(path, NULL);
            size_t bytes = tally__v1__job_spec__get_packed_size(job_file_spec(job));
            unsigned char *a = malloc(bytes), *b = malloc(bytes);
            assert_non_null(a);
            assert_non_null(b);
            assert_int_equal(tally__v1__job_spec__get_packed_size(job_file_spec(again)), bytes);
            tally__v1__job_spec__pack(job_file_spec(job), a);
            tally__v1__job_spec__pack(job_file_spec(again), b);
            assert_memory_equal(a, b, bytes);
            free(a);
            free(b);
            free(text);
            job_file_free(job);
            job_file_free(again);
        }
}

static void overrides_come_last(void **state)
{
    (void)state;
    static const char *const set[] = {"train.optimizer.sgd.lr=0.5", "model.layers[fc1].linear.out_features=7",
                                      "parallel.data=3"};
    struct job_overrides overrides = {.set = set, .set_count = 3, .data = 4, .shards = 3};
    struct job_file *job = load(job_path("job.yaml", NULL, NULL), &overrides);
    const Tally__V1__JobSpec *spec = job_file_spec(job);
    assert_true(spec->train->optimizer->sgd->lr == 0.5);
    assert_int_equal(spec->model->layers[3]->linear->out_features, 7);
    assert_int_equal(spec->parallel->data->count, 4);
    assert_int_equal(spec->parallel->shards, 3);
    assert_int_equal(spec->train->micro_batch_size, 6);
    job_file_free(job);
    struct tally_error err = {0};
    struct job_overrides wrong = {.set = (const char *const[]){"train.batch_size=0"}, .set_count = 1};
    assert_int_equal(job_file_load(job_path("job.yaml", NULL, NULL), &wrong, &job, &err), TALLY_EINVAL);
    assert_non_null(strstr(err.message, "--set train.batch_size"));
}

/* An elastic job begins with its largest number of workers, and cuts its batch for that. */
static void micro_batches_by_default(void **state)
{
    (void)state;
    static const struct {
        const char *data;
        uint32_t micro, count;
    } cases[] = {{"data: 5", 5, 5},
                 {"data: {min: 2, max: 7}", 4, 7},
                 {"data: {count: 2, min: 2, max: 7}", 4, 2},
                 {"data: 64", 1, 64},
                 {"shards: 1", 24, 1}};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        char parallel[64];
        snprintf(parallel, sizeof parallel, "{%s}", cases[i].data);
        struct job_file *job = load(job_path("job.yaml", "{data: 2, shards: 2}", parallel), NULL);
        assert_int_equal(job_file_spec(job)->train->micro_batch_size, cases[i].micro);
        assert_int_equal(job_file_spec(job)->parallel->data->count, cases[i].count);
        job_file_free(job);
    }
}

/* ---- refusals ---- */

static const struct {
    const char *from, *to, *message; /* behind "FOLDER/job.yaml:" */
} refused[] = {
    {"  epochs: 2\n", "", "16:3: train: has neither epochs nor steps, expected at least one of them"},
    {"epochs: 2", "epochs: 2\n  micro_batch_size: 25",
     "18:21: train.micro_batch_size: found 25, expected at most batch_size, which is 24"},
    {"momentum: 0.9", "momentum: 1e39",
     "18:40: train.optimizer.sgd.momentum: found 1e+39, expected a number of magnitude at most 3.4e+38"},
    {"momentum: 0.9", "dampening: -1e300",
     "18:41: train.optimizer.sgd.dampening: found -1e+300, expected a number of magnitude at most 3.4e+38"},
    {"epochs: 2", "epochs: 18446744073709551615",
     "17:11: train.epochs: 18446744073709551615 epochs of 5 steps are more than can be counted"},
    {"momentum: 0.9", "nesterov: true",
     "18:40: train.optimizer.sgd.nesterov: needs momentum above 0 and dampening 0, found momentum 0 and dampening 0"},
    {"momentum: 0.9", "momentum: 0.9, dampening: 0.5, nesterov: true",
     "18:71: train.optimizer.sgd.nesterov: needs momentum above 0 and dampening 0, found momentum 0.9 and dampening "
     "0.5"},
    {"data: 2", "data: {min: 3, max: 2}", "19:24: parallel.data.min: found 3, expected at most max, which is 2"},
    {"data: 2", "data: {max: 2}", "19:24: parallel.data.max: is given without min, expected both for an elastic job"},
    {"data: 2", "data: {count: 4, min: 1, max: 2}",
     "19:26: parallel.data.count: found 4, expected min to max, which is 1 to 2"},
    {"data: 2", "pipeline: {placement: [[conv1, fc], [fc2]]}",
     "19:43: parallel.pipeline.placement[0][1]: no layer 'fc' in the model (did you mean 'fc1'?)"},
    {"data: 2", "pipeline: {placement: [[conv1, banana], [fc2]]}",
     "19:43: parallel.pipeline.placement[0][1]: no layer 'banana' in the model"},
    {"data: 2", "pipeline: {placement: [[conv1, fc1], [fc2, conv1]]}",
     "19:55: parallel.pipeline.placement[1][1]: layer 'conv1' is already in stage 0 of the placement, expected each "
     "layer once"},
    {"data: 2", "pipeline: {stages: 3, placement: [[conv1, fc1], [fc2]]}",
     "19:31: parallel.pipeline.stages: found 3, expected the number of lists in placement, which is 2"},
    {"data: 2", "tensor: {layers: {fc3: row}}",
     "19:35: parallel.tensor.layers.fc3: no layer 'fc3' in the model (did you mean 'fc1'?)"},
    {"data: 2", "tensor: {layers: {4: row}}",
     "19:33: parallel.tensor.layers.4: layer '4' has no weight to split, expected a linear or conv2d layer"},
    {"data: 2", "tensor: {size: 2}",
     "19:27: parallel.tensor.size: tensor splits above 1 are not available in this version"},
    {"mean: [0.5, 0.25]", "mean: [1, 2, 3]",
     "14:21: data.normalize.mean: has 3 numbers, expected one for all or one for each of the 2 channels"},
    {"samples: 20, classes: 5", "samples: 20, classes: 6",
     "13:44: data.test.synthetic.classes: found 6, expected at most the 5 outputs of the last layer, 'fc2'"},
    {"samples: 20, classes: 5, shape: [2, 8, 8]", "samples: 20, classes: 5, shape: [2, 8, 9]",
     "13:9: data.test: samples are 2x8x9, expected 2x8x8 as in data.train"},
    {"samples: 20, classes: 5, ", "samples: 20, ",
     "13:21: data.test.synthetic.classes: is missing, expected the number of classes: the loss is cross_entropy"},
    {"{cross_entropy: {}}", "{mse_loss: {}}",
     "12:22: data.train.synthetic.target_shape: is missing, expected the shape of a target: the loss is mse_loss"},
    {"synthetic: {samples: 100, classes: 5, shape: [2, 8, 8]}", "idx: {inputs: nothing.gz, targets: job.yaml}",
     "12:25: data.train.idx.inputs: cannot read %s/nothing.gz: No such file or directory"},
    {"synthetic: {samples: 100, classes: 5, shape: [2, 8, 8]}", "npy: {inputs: ., targets: job.yaml}",
     "12:25: data.train.npy.inputs: %s is a folder, expected a file"},
    {"  loss:", "  init: {safetensors: {path: gone.safetensors}}\n  loss:",
     "10:30: model.init.safetensors.path: cannot read %s/gone.safetensors: No such file or directory"},
    {"parallel:", "  micro_batch_size: 1\n  steps: 3\nparallel:", NULL}, /* taken */
    {"batch_size: 24", "batch_size: 101", NULL},                         /* one short step an epoch */
    {"train:\n  batch", "parallel: {data: 2}\ntrain:\n  batch",
     "20:1: parallel: is given twice"}, /* a duplicate key: the mapper's */
    {"train: {synthetic", "drop_last: true\n  train: {synthetic", NULL},
    {"{max_pool2d: {kernel_size: 2}}", "{max_pool2d: {kernel_size: 7}}",
     "5:34: model.layers[1].max_pool2d.kernel_size: a window of 7 (dilation 1) does not fit the height of 6 (padding "
     "0) that layer 'conv1' (conv2d) gives"},
    {"{flatten: {}}", "{tanh: {}}",
     "10:25: model.loss.cross_entropy: needs one output a class, but the last layer 'fc2' (linear) gives 4x3x5: add a "
     "layer {flatten: {}} before layer 'fc1' "
     "(linear)"},
};

static void refusals_say_where(void **state)
{
    (void)state;
    size_t wrong = 0;
    for (size_t i = 0; i < sizeof refused / sizeof *refused; i++) {
        struct job_file *job = NULL;
        struct tally_error err = {0};
        const char *path = job_path("job.yaml", refused[i].from, refused[i].to);
        char folder[1024], expected[2048];
        snprintf(folder, sizeof folder, "%.*s", (int)(strrchr(path, '/') - path), path);
        tally_status status = job_file_load(path, NULL, &job, &err);
        if (!refused[i].message) {
            if (status != TALLY_OK)
                fail_msg("%s: %s", refused[i].to, err.message);
            job_file_free(job);
            continue;
        }
        const char *hole = strstr(refused[i].message, "%s");
        int before = hole ? (int)(hole - refused[i].message) : (int)strlen(refused[i].message);
        snprintf(expected, sizeof expected, "%s:%.*s%s%s", path, before, refused[i].message, hole ? folder : "",
                 hole ? hole + 2 : "");
        if (status == TALLY_OK)
            fail_msg("taken: %s", refused[i].to);
        if (strncmp(err.message, expected, strlen(expected)) != 0) {
            print_error("%s\n  instead of\n%s\n", err.message, expected);
            wrong++;
        }
        assert_null(job);
    }
    assert_int_equal(wrong, 0);
}

static void a_step_must_be_left(void **state)
{
    (void)state;
    struct job_file *job = NULL;
    struct tally_error err = {0};
    struct job_overrides overrides = {.set = (const char *const[]){"data.drop_last=true", "train.batch_size=101"},
                                      .set_count = 2};
    assert_int_equal(job_file_load(job_path("job.yaml", NULL, NULL), &overrides, &job, &err), TALLY_EINVAL);
    assert_string_equal(
        err.message,
        "--set train.batch_size: drop_last leaves no batch: batch_size is 101, the training set has 100 samples");
    overrides =
        (struct job_overrides){.set = (const char *const[]){"train.batch_size=100000", "train.micro_batch_size=1",
                                                            "data.train.synthetic.samples=100000"},
                               .set_count = 3};
    assert_int_equal(job_file_load(job_path("job.yaml", NULL, NULL), &overrides, &job, &err), TALLY_EINVAL);
    assert_string_equal(
        err.message,
        "--set train.micro_batch_size: 100000 micro-batches of 1 in a batch of 100000: at most 65536 are allowed");
}

/* ---- initial weights ---- */

static void write_weights(const char *path, const struct safetensors_entry *entries, size_t n)
{
    struct safetensors_writer *writer = NULL;
    struct tally_error err = {0};
    static const float zeros[512];
    assert_int_equal(safetensors_writer_open(path, entries, n, NULL, 0, &writer, &err), TALLY_OK);
    for (size_t i = 0; i < n; i++) {
        uint64_t elements = 1;
        for (uint32_t d = 0; d < entries[i].dims; d++)
            elements *= entries[i].shape[d];
        assert_int_equal(safetensors_writer_write(writer, zeros, (size_t)elements * sizeof(float), &err), TALLY_OK);
    }
    assert_int_equal(safetensors_writer_commit(writer, &err), TALLY_OK);
    safetensors_writer_free(writer);
}

static void initial_weights_must_fit(void **state)
{
    (void)state;
    static const uint64_t conv_w[4] = {4, 2, 3, 3}, conv_b[1] = {4}, fc1_w[2] = {12, 36}, fc1_b[1] = {12},
                          fc2_w[2] = {5, 12}, fc2_b[1] = {5}, turned[2] = {36, 12};
    struct safetensors_entry entries[7] = {
        {"conv1.weight", 4, conv_w}, {"conv1.bias", 1, conv_b}, {"fc1.weight", 2, fc1_w}, {"fc1.bias", 1, fc1_b},
        {"fc2.weight", 2, fc2_w},    {"fc2.bias", 1, fc2_b},    {"fc3.bias", 1, fc2_b}};
    static const char *const messages[] = {
        NULL, "start.safetensors: the model has no parameter for its tensor fc3.bias",
        "start.safetensors: has no tensor fc2.bias, expected one of shape (5,) (there is fc1.bias)",
        "start.safetensors: its tensor fc1.weight has the shape (36, 12), expected (12, 36)"};
    for (size_t i = 0; i < 4; i++) {
        struct job_file *job = NULL;
        struct tally_error err = {0};
        entries[2].shape = i == 3 ? turned : fc1_w;
        write_weights(data_path("start.safetensors"), entries, i == 1 ? 7 : i == 2 ? 5 : 6);
        const char *path = job_path("job.yaml", "  loss:", "  init: {safetensors: {path: start.safetensors}}\n  loss:");
        tally_status status = job_file_load(path, NULL, &job, &err);
        if (!messages[i]) {
            if (status != TALLY_OK)
                fail_msg("%s", err.message);
            assert_int_equal(job_file_spec(job)->model->init->safetensors->path[0], '/');
            job_file_free(job);
            continue;
        }
        assert_int_equal(status, TALLY_EINVAL);
        assert_non_null(strstr(err.message, ":10:30: model.init.safetensors.path: "));
        if (!strstr(err.message, messages[i]))
            fail_msg("%s", err.message);
    }
}

/* ---- specs that came over RPC ---- */

static void a_requests_spec_is_checked_too(void **state)
{
    (void)state;
    struct job_file *job = load(job_path("job.yaml", NULL, NULL), NULL);
    struct tally_error err = {0};
    Tally__V1__DataFacts *facts = (Tally__V1__DataFacts *)job_file_facts(job);
    Tally__V1__JobSpec *spec = message_copy(&job_file_spec(job)->base);
    assert_int_equal(job_spec_check(spec, facts, &err), TALLY_OK);
    size_t bytes = tally__v1__job_spec__get_packed_size(job_file_spec(job));
    assert_int_equal(tally__v1__job_spec__get_packed_size(spec), bytes);
    spec->train->has_micro_batch_size = 0;
    tally__v1__parallel__free_unpacked(spec->parallel, NULL);
    spec->parallel = NULL;
    assert_int_equal(job_spec_check(spec, facts, &err), TALLY_OK);
    assert_int_equal(spec->train->micro_batch_size, 24);
    assert_int_equal(spec->parallel->data->count, 1);

    spec->train->micro_batch_size = 99;
    assert_int_equal(job_spec_check(spec, facts, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "job: train.micro_batch_size: found 99, expected at most batch_size, which is 24");
    spec->train->micro_batch_size = 8;
    spec->model->layers[3]->linear->in_features = 35;
    assert_int_equal(job_spec_check(spec, facts, &err), TALLY_EINVAL);
    assert_string_equal(err.message,
                        "job: model.layers[3].linear.in_features: 35 given, but layer '2' (flatten) gives 36");
    spec->model->layers[3]->linear->in_features = 36;
    facts->train_samples = 0;
    assert_int_equal(job_spec_check(spec, facts, &err), TALLY_EINVAL);
    facts->train_samples = UINT64_MAX;
    assert_int_equal(job_spec_check(spec, facts, &err), TALLY_EINVAL);
    facts->train_samples = 100;
    facts->test_samples = 0;
    assert_int_equal(job_spec_check(spec, facts, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "job: data.test: holds no samples, expected at least one");
    facts->test_samples = 20;
    tally__v1__source__free_unpacked(spec->data->test, NULL);
    spec->data->test = NULL;
    assert_int_equal(job_spec_check(spec, facts, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "job: data: 20 test samples are counted, but data.test is not given");
    facts->test_samples = 0;
    spec->model->layers[0]->conv2d->n_kernel_size = 0;
    assert_int_equal(job_spec_check(spec, facts, &err), TALLY_EINVAL);
    spec->model->layers[0]->conv2d->n_kernel_size = 2;
    assert_int_equal(job_spec_check(spec, facts, &err), TALLY_OK);
    tally__v1__job_spec__free_unpacked(spec, NULL);
    job_file_free(job);
}

static void a_requests_paths_are_absolute(void **state)
{
    (void)state;
    struct job_file *job = load(job_path("job.yaml", NULL, NULL), NULL);
    struct tally_error err = {0};
    Tally__V1__JobSpec *spec = message_copy(&job_file_spec(job)->base);
    Tally__V1__Csv csv = TALLY__V1__CSV__INIT;
    Tally__V1__Source source = TALLY__V1__SOURCE__INIT, *kept = spec->data->train;
    csv.path = (char *)"data.csv";
    csv.target = (char *)"y";
    source.kind_case = TALLY__V1__SOURCE__KIND_CSV;
    source.csv = &csv;
    spec->data->train = &source;
    assert_int_equal(job_spec_check(spec, job_file_facts(job), &err), TALLY_EINVAL);
    assert_string_equal(err.message, "job: data.train.csv.path: found 'data.csv', expected an absolute path");
    csv.path = (char *)"/nowhere/data.csv"; /* the coordinator may not see it: that is no error */
    assert_int_equal(job_spec_check(spec, job_file_facts(job), &err), TALLY_OK);
    spec->data->train = kept;
    tally__v1__job_spec__free_unpacked(spec, NULL);
    job_file_free(job);
}

static void values_as_targets(void **state)
{
    (void)state;
    struct job_overrides overrides = {.set = (const char *const[]){"model.loss={mse_loss: {}}",
                                                                   "data.train.synthetic.target_shape=5",
                                                                   "data.test.synthetic.target_shape=[5]"},
                                      .set_count = 3};
    struct job_file *job = load(job_path("job.yaml", NULL, NULL), &overrides);
    assert_int_equal(job_file_facts(job)->n_target_shape, 1);
    assert_int_equal(job_file_facts(job)->target_shape[0], 5);
    assert_int_equal(job_file_model(job)->target_kind, DATASET_VALUES);
    job_file_free(job);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_spec_is_complete),
        cmocka_unit_test(a_complete_spec_reads_back),
        cmocka_unit_test(overrides_come_last),
        cmocka_unit_test(micro_batches_by_default),
        cmocka_unit_test(refusals_say_where),
        cmocka_unit_test(a_step_must_be_left),
        cmocka_unit_test(initial_weights_must_fit),
        cmocka_unit_test(a_requests_spec_is_checked_too),
        cmocka_unit_test(a_requests_paths_are_absolute),
        cmocka_unit_test(values_as_targets),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
