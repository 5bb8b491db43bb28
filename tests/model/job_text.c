#include "tests/model/job_text.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/spec_file.h"

Tally__V1__JobSpec *job_of_layers(const char *layers, const char *loss, size_t ndim, const size_t *input)
{
    char *text = NULL, shape[128] = "";
    struct spec_file *file = NULL;
    ProtobufCMessage *msg = NULL;
    struct tally_error err = {0};
    for (size_t i = 0; i < ndim; i++)
        snprintf(shape + strlen(shape), sizeof shape - strlen(shape), "%s%zu", i ? ", " : "", input[i]);
    int n = asprintf(&text,
                     "model:\n  layers: %s\n  loss: {%s: {}}\n"
                     "data: {train: {synthetic: {samples: 100, classes: 2, target_shape: 1, shape: [%s]}}}\n"
                     "train: {batch_size: 8, micro_batch_size: 2, epochs: 1, optimizer: {sgd: {}}}\n",
                     layers, loss, shape);
    assert_true(n > 0);
    tally_status status = spec_open_text("test.yaml", text, strlen(text), &file, &err);
    if (status == TALLY_OK)
        status = spec_read(file, &tally__v1__job_spec__descriptor, &msg, &err);
    if (status != TALLY_OK)
        fail_msg("%s\n%s", err.message, text);
    spec_close(file);
    free(text);
    return (Tally__V1__JobSpec *)msg;
}

static uint32_t *dims_of(size_t ndim, const size_t *dim)
{
    uint32_t *dims = calloc(ndim + 1, sizeof *dims);
    assert_non_null(dims);
    for (size_t i = 0; i < ndim; i++)
        dims[i] = (uint32_t)dim[i];
    return dims;
}

Tally__V1__DataFacts *facts_of(size_t ndim, const size_t *input, size_t target_ndim, const size_t *target,
                               uint64_t train_samples, uint64_t test_samples)
{
    Tally__V1__DataFacts *facts = malloc(sizeof *facts);
    assert_non_null(facts);
    tally__v1__data_facts__init(facts);
    facts->n_input_shape = ndim;
    facts->input_shape = dims_of(ndim, input);
    facts->n_target_shape = target_ndim;
    facts->target_shape = dims_of(target_ndim, target);
    facts->train_samples = train_samples;
    facts->test_samples = test_samples;
    return facts;
}

tally_status model_of_layers(const char *layers, size_t ndim, const size_t *input, size_t target_ndim,
                             const size_t *target, struct model **ret_model, struct tally_error *err)
{
    Tally__V1__JobSpec *spec = job_of_layers(layers, target_ndim ? "mse_loss" : "cross_entropy", ndim, input);
    Tally__V1__DataFacts *facts = facts_of(ndim, input, target_ndim, target, 100, 0);
    tally_status status = model_build(spec, facts, ret_model, err);
    tally__v1__job_spec__free_unpacked(spec, NULL);
    tally__v1__data_facts__free_unpacked(facts, NULL);
    return status;
}

/* ---- random models ---- */

struct writer {
    unsigned state;
    char text[8192];
    size_t used, layers;
    size_t dim[3], ndim;
};

static unsigned pick(struct writer *w, unsigned n)
{
    w->state = w->state * 1103515245u + 12345u;
    return (w->state >> 16) % n;
}

static void layer(struct writer *w, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void layer(struct writer *w, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    w->used += (size_t)snprintf(w->text + w->used, sizeof w->text - w->used, "%s{name: l%zu, ", w->layers ? ", " : "",
                                w->layers);
    w->used += (size_t)vsnprintf(w->text + w->used, sizeof w->text - w->used, format, args);
    w->used += (size_t)snprintf(w->text + w->used, sizeof w->text - w->used, "}");
    va_end(args);
    assert_true(w->used < sizeof w->text - 256);
    w->layers++;
}

/* a -> conv -> function, and a -> conv: added; sometimes also a itself. Shapes stay. */
static void image_branch(struct writer *w)
{
    char base[32] = "input";
    if (w->layers > 0)
        snprintf(base, sizeof base, "l%zu", w->layers - 1);
    layer(w, "from: %s, conv2d: {out_channels: %zu, kernel_size: 3, padding: 1}", base, w->dim[0]);
    if (pick(w, 2))
        layer(w, "relu: {}");
    size_t left = w->layers - 1;
    layer(w, "from: %s, conv2d: {out_channels: %zu, kernel_size: 1}", base, w->dim[0]);
    if (pick(w, 2))
        layer(w, "from: [l%zu, l%zu, %s], add: {}", left, w->layers - 1, base);
    else
        layer(w, "from: [l%zu, l%zu], add: {}", w->layers - 1, left);
}

static void image_layer(struct writer *w)
{
    switch (pick(w, 6)) {
    case 0:
    case 1:
        w->dim[0] = 1 + pick(w, 9);
        layer(w, "conv2d: {out_channels: %zu, kernel_size: 3, padding: 1}", w->dim[0]);
        break;
    case 2:
        if (w->dim[1] < 2 || w->dim[2] < 2)
            break;
        w->dim[1] /= 2;
        w->dim[2] /= 2;
        layer(w, "%s: {kernel_size: 2}", pick(w, 3) ? "max_pool2d" : "avg_pool2d");
        break;
    case 3:
        image_branch(w);
        break;
    case 4:
        layer(w, "linear: {out_features: %zu}", w->dim[2] = 1 + pick(w, 12)); /* on rows of the image */
        break;
    default:
        layer(w, "%s: {}", (const char *[]){"relu", "tanh", "gelu", "sigmoid"}[pick(w, 4)]);
    }
}

static void flat_layer(struct writer *w)
{
    switch (pick(w, 3)) {
    case 0:
        layer(w, "linear: {out_features: %u}", 1 + pick(w, pick(w, 4) ? 40 : 3000));
        break;
    case 1:
        layer(w, "relu: {}");
        break;
    default:
        if (w->layers > 0)
            layer(w, "from: [l%zu, l%zu], add: {}", w->layers - 1, w->layers - 1);
    }
}

struct model *random_model(unsigned seed, size_t classes)
{
    struct writer w = {.state = seed * 2654435761u + 1};
    struct model *model = NULL;
    struct tally_error err = {0};
    size_t input[3] = {1 + pick(&w, 3), 4 + pick(&w, 10), 4 + pick(&w, 10)};
    memcpy(w.dim, input, sizeof input);
    w.used = (size_t)snprintf(w.text, sizeof w.text, "[");
    for (unsigned i = pick(&w, 7); i > 0; i--)
        image_layer(&w);
    layer(&w, "flatten: {}");
    for (unsigned i = pick(&w, 5); i > 0; i--)
        flat_layer(&w);
    layer(&w, "linear: {out_features: %zu}", classes);
    snprintf(w.text + w.used, sizeof w.text - w.used, "]");
    if (model_of_layers(w.text, 3, input, 0, NULL, &model, &err) != TALLY_OK)
        fail_msg("%s\n%s", err.message, w.text);
    return model;
}
