/* Shapes and parameters against PyTorch's (shapes_reference.h), the layout of the flat vector, and what is refused. */
#include "model/model.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/limits.h"
#include "tests/model/job_text.h"

struct shape_case {
    const char *layer;
    size_t in_ndim, in[3];
    size_t out_ndim, out[3]; /* 0: refused */
    size_t weight_ndim, weight[4];
    int bias;
};

#include "tests/model/shapes_reference.h"

static void assert_dims(const struct shape *shape, size_t ndim, const size_t *dim, const char *what)
{
    char text[96];
    bool same = shape->ndim == ndim && memcmp(shape->dim, dim, ndim * sizeof *dim) == 0;
    if (!same)
        fail_msg("%s: got %s", what, shape_text(shape, text, sizeof text));
}

/* The layer alone, with one behind it that makes the loss fit. */
static void shapes_are_pytorchs(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof shape_cases / sizeof *shape_cases; i++) {
        const struct shape_case *c = &shape_cases[i];
        char layers[512];
        struct model *model = NULL;
        struct tally_error err = {0};
        snprintf(layers, sizeof layers, "[{%s}, {flatten: {}}, {linear: {out_features: 2}}]", c->layer);
        tally_status status = model_of_layers(layers, c->in_ndim, c->in, 0, NULL, &model, &err);
        if ((status == TALLY_OK) != (c->out_ndim > 0))
            fail_msg("%s: %s", c->layer, status == TALLY_OK ? "taken, but PyTorch refuses it" : err.message);
        if (status != TALLY_OK)
            continue;
        const struct layer *layer = &model->layers[0];
        assert_dims(&layer->out, c->out_ndim, c->out, c->layer);
        assert_int_equal(layer->weight >= 0, c->weight_ndim > 0);
        assert_int_equal(layer->bias >= 0, c->bias);
        if (layer->weight >= 0) {
            assert_dims(&model->params[layer->weight].shape, c->weight_ndim, c->weight, c->layer);
            assert_string_equal(model->params[layer->weight].name, "0.weight");
        }
        if (layer->bias >= 0)
            assert_dims(&model->params[layer->bias].shape, 1, c->weight, c->layer);
        model_free(model);
    }
}

static const char lenet[] =
    "[{name: conv1, conv2d: {out_channels: 20, kernel_size: 5}}, {max_pool2d: {kernel_size: 2}},"
    " {name: conv2, conv2d: {out_channels: 50, kernel_size: 5}}, {max_pool2d: {kernel_size: 2}}, {flatten: {}},"
    " {name: fc1, linear: {out_features: 500}}, {relu: {}}, {name: fc2, linear: {out_features: 10}}]";

static void the_seed_network(void **state)
{
    (void)state;
    static const char *const names[] = {"conv1.weight", "conv1.bias", "conv2.weight", "conv2.bias",
                                        "fc1.weight",   "fc1.bias",   "fc2.weight",   "fc2.bias"};
    static const size_t fan_in[] = {25, 25, 500, 500, 800, 800, 500, 500};
    struct model *model = NULL;
    struct tally_error err = {0};
    size_t image[3] = {1, 28, 28};
    if (model_of_layers(lenet, 3, image, 0, NULL, &model, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    assert_int_equal(model->param_count, 8);
    assert_int_equal(model->param_elements, 431080);
    assert_int_equal(model->init_draws, 431080);
    for (size_t i = 0; i < 8; i++) {
        assert_string_equal(model->params[i].name, names[i]);
        assert_int_equal(model->params[i].fan_in, fan_in[i]);
    }
    assert_int_equal(model->layers[0].forward_flops, (2 * 25 + 1) * 20 * 24 * 24);
    assert_int_equal(model->layers[2].forward_flops, (2 * 20 * 25 + 1) * 50 * 8 * 8);
    assert_int_equal(model->layers[5].forward_flops, (2 * 800 + 1) * 500);
    assert_string_equal(model->layers[1].name, "1");
    /* What was inferred and left out stands in the model's own spec. */
    const Tally__V1__Conv2d *conv2 = model->spec->model->layers[2]->conv2d;
    assert_int_equal(conv2->in_channels, 20);
    assert_int_equal(conv2->n_kernel_size, 2);
    assert_int_equal(conv2->n_stride, 2);
    assert_int_equal(conv2->stride[1], 1);
    assert_int_equal(model->spec->model->layers[1]->max_pool2d->stride[0], 2);
    assert_int_equal(model->spec->model->layers[5]->linear->in_features, 800);
    /* fc1.weight is 1.6 MB: two slices of whole rows; what is small shares. */
    assert_int_equal(model->slice_count, 4);
    assert_int_equal(model->slices[1].count % 800, 0);
    model_free(model);
}

/* ---- the flat vector ---- */

static size_t padded_end(const struct param *p)
{
    return p->offset + (p->shape.elements + 15) / 16 * 16;
}

static void check_slice(const struct model *model, const struct slice *s)
{
    assert_true(s->count > 0);
    assert_true(s->count * sizeof(float) <= TALLY_SLICE_MAX_BYTES);
    assert_true(s->param_begin < s->param_end && s->param_end <= model->param_count);
    for (uint32_t p = 0; p < model->param_count; p++) {
        const struct param *param = &model->params[p];
        bool touches = param->offset < s->offset + s->count && s->offset < param->offset + param->shape.elements;
        assert_int_equal(touches, p >= s->param_begin && p < s->param_end);
        if (!touches)
            continue;
        bool whole = s->offset <= param->offset && padded_end(param) <= s->offset + s->count;
        size_t row = param->shape.elements / param->shape.dim[0];
        if (whole)
            continue;
        assert_int_equal(s->param_end - s->param_begin, 1);
        if (row * sizeof(float) <= TALLY_SLICE_MAX_BYTES - 64)
            assert_int_equal((s->offset - param->offset) % row, 0);
    }
}

static void check_layout(const struct model *model)
{
    size_t end = 0, elements = 0;
    for (size_t i = 0; i < model->param_count; i++) {
        assert_int_equal(model->params[i].offset % 16, 0);
        assert_int_equal(model->params[i].offset, end);
        end = padded_end(&model->params[i]);
        elements += model->params[i].shape.elements;
    }
    assert_int_equal(model->flat_count, end);
    assert_int_equal(model->param_elements, elements);
    end = 0;
    for (size_t i = 0; i < model->slice_count; i++) {
        assert_int_equal(model->slices[i].offset, end);
        end += model->slices[i].count;
        check_slice(model, &model->slices[i]);
    }
    assert_int_equal(end, model->flat_count);
}

static void check_shards(const struct model *model, uint32_t shards)
{
    uint32_t next = 0, largest = 0;
    size_t most = 0, biggest = 0;
    for (uint32_t i = 0; i < model->slice_count; i++)
        biggest = model->slices[i].count > biggest ? model->slices[i].count : biggest;
    for (uint32_t s = 0; s < shards; s++) {
        uint32_t begin, end;
        size_t floats = 0;
        model_shard_slices(model, shards, s, &begin, &end);
        assert_int_equal(begin, next);
        assert_true(end >= begin);
        if (model->slice_count >= shards)
            assert_true(end > begin);
        for (uint32_t i = begin; i < end; i++) {
            floats += model->slices[i].count;
            assert_int_equal(model_slice_shard(model, shards, i), s);
        }
        if (floats > most) {
            most = floats;
            largest = s;
        }
        next = end;
    }
    (void)largest;
    assert_int_equal(next, model->slice_count);
    /* No shard holds more than its part and a slice, but where each shard needs one of few. */
    if (model->slice_count >= 4 * shards)
        assert_true(most <= model->flat_count / shards + biggest);
}

static void layout_of_random_models(void **state)
{
    (void)state;
    for (unsigned seed = 0; seed < 200; seed++) {
        struct model *model = random_model(seed, 1 + seed % 7);
        check_layout(model);
        for (uint32_t shards = 1; shards <= 5; shards++)
            check_shards(model, shards);
        model_free(model);
    }
}

static void layout_of_large_layers(void **state)
{
    (void)state;
    static const struct {
        size_t in;
        const char *layers;
    } cases[] = {
        {4096,
         "[{linear: {out_features: 4096}}, {relu: {}}, {linear: {out_features: 4096}}, {linear: {out_features: 10}}]"},
        {262144, "[{linear: {out_features: 5}}]"},              /* a row is exactly a slice */
        {262141, "[{linear: {out_features: 3}}]"},              /* the padding behind the last row must fit too */
        {700000, "[{linear: {out_features: 3, bias: false}}]"}, /* a row is larger than a slice */
        {1, "[{linear: {out_features: 1000001}}, {linear: {out_features: 2}}]"}, /* so is a bias */
        {87381, "[{linear: {out_features: 3}}]"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model *model = NULL;
        struct tally_error err = {0};
        if (model_of_layers(cases[i].layers, 1, &cases[i].in, 0, NULL, &model, &err) != TALLY_OK)
            fail_msg("%s", err.message);
        check_layout(model);
        for (uint32_t shards = 1; shards <= 9; shards++)
            check_shards(model, shards);
        model_free(model);
    }
}

/* ---- refusals ---- */

static void refusals(void **state)
{
    (void)state;
    static const struct {
        const char *layers, *message;
        size_t ndim, in[3], target_ndim, target[3];
    } cases[] = {
        {"[{linear: {out_features: 10}}]",
         "model.loss.cross_entropy: needs one output a class, but the last layer '0' (linear) gives 1x28x10: add a "
         "layer {flatten: {}} before layer '0' "
         "(linear)",
         3,
         {1, 28, 28},
         0,
         {0}},
        {"[{linear: {in_features: 784, out_features: 10}}]",
         "model.layers[0].linear.in_features: 784 given, but the model's input gives 1x28x28, whose last dimension is "
         "28: add a layer {flatten: {}} before "
         "this one",
         3,
         {1, 28, 28},
         0,
         {0}},
        {"[{conv2d: {out_channels: 4, kernel_size: 3}}, {linear: {in_features: 9, out_features: 10}}]",
         "model.layers[1].linear.in_features: 9 given, but layer '0' (conv2d) gives 4x26x26, whose last dimension is "
         "26 (2704 with a flatten layer between)",
         3,
         {1, 28, 28},
         0,
         {0}},
        {"[{name: fc, linear: {out_features: 7}}, {conv2d: {out_channels: 1, kernel_size: 1}}]",
         "model.layers[1]: conv2d reads samples of (channels, height, width), but layer 'fc' (linear) gives 7",
         1,
         {5},
         0,
         {0}},
        {"[{conv2d: {in_channels: 3, out_channels: 1, kernel_size: 1}}]",
         "model.layers[0].conv2d.in_channels: 3 given, but the model's input gives 1x4x4: 1 channels",
         3,
         {1, 4, 4},
         0,
         {0}},
        {"[{conv2d: {out_channels: 1, kernel_size: [2, 5]}}]",
         "model.layers[0].conv2d.kernel_size[1]: a window of 5 (dilation 1) does not fit the width of 4 (padding 0) "
         "that the model's input gives",
         3,
         {1, 4, 4},
         0,
         {0}},
        {"[{conv2d: {out_channels: 3, kernel_size: 1, groups: 2}}]",
         "model.layers[0].conv2d.groups: 2 does not divide out_channels 3",
         3,
         {2, 4, 4},
         0,
         {0}},
        {"[{conv2d: {out_channels: 4, kernel_size: 1, groups: 2}}]",
         "model.layers[0].conv2d.groups: 2 does not divide the 3 input channels",
         3,
         {3, 4, 4},
         0,
         {0}},
        {"[{max_pool2d: {kernel_size: 2, padding: 2}}, {flatten: {}}, {linear: {out_features: 2}}]",
         "model.layers[0].max_pool2d.padding: 2 is more than half of kernel_size 2",
         3,
         {1, 8, 8},
         0,
         {0}},
        {"[{max_pool2d: {kernel_size: 2, padding: 1, dilation: 3}}, {flatten: {}}, {linear: {out_features: 2}}]",
         "model.layers[0].max_pool2d.dilation: a window of 2 with dilation 3 and padding 1 sees only padding over a "
         "height of 2",
         3,
         {1, 2, 2},
         0,
         {0}},
        {"[{flatten: {start_dim: 0}}, {linear: {out_features: 2}}]",
         "model.layers[0].flatten.start_dim: 0 is the batch, which cannot be flattened",
         3,
         {1, 2, 2},
         0,
         {0}},
        {"[{flatten: {end_dim: 4}}, {linear: {out_features: 2}}]",
         "model.layers[0].flatten.end_dim: 4 is no dimension of (batch, 1x2x2): expected -4 to 3",
         3,
         {1, 2, 2},
         0,
         {0}},
        {"[{flatten: {start_dim: 3, end_dim: 2}}, {linear: {out_features: 2}}]",
         "model.layers[0].flatten.start_dim: 3 comes after end_dim 2",
         3,
         {1, 2, 2},
         0,
         {0}},
        {"[{name: fc1, linear: {out_features: 3}}, {from: fc, relu: {}}]",
         "model.layers[1].from[0]: no layer 'fc' (did you mean 'fc1'?)",
         1,
         {3},
         0,
         {0}},
        {"[{name: fc1, linear: {out_features: 3}}, {from: elephant, relu: {}}]",
         "model.layers[1].from[0]: no layer 'elephant'; expected an earlier layer or 'input'",
         1,
         {3},
         0,
         {0}},
        {"[{from: b, linear: {out_features: 3}}, {name: b, relu: {}}]",
         "model.layers[0].from[0]: layer 'b' does not come before this one; expected an earlier layer or 'input'",
         1,
         {3},
         0,
         {0}},
        {"[{name: a, linear: {out_features: 3}}, {name: a, relu: {}}]",
         "model.layers[1].name: 'a' is already the name of layer 0; expected one of its own",
         1,
         {3},
         0,
         {0}},
        {"[{linear: {out_features: 3}}, {name: '0', relu: {}}]",
         "model.layers[1].name: '0' is already the name of layer 0; expected one of its own",
         1,
         {3},
         0,
         {0}},
        {"[{name: input, linear: {out_features: 3}}]",
         "model.layers[0].name: 'input' is the model's input; expected another name",
         1,
         {3},
         0,
         {0}},
        {"[{name: a, linear: {out_features: 3}}, {add: {}}]",
         "model.layers[1]: add needs `from` with at least 2 layers, such as from: [a, b]",
         1,
         {3},
         0,
         {0}},
        {"[{name: a, linear: {out_features: 3}}, {from: [a, input], relu: {}}]",
         "model.layers[1].from: relu reads at most 1, but `from` names 2",
         1,
         {3},
         0,
         {0}},
        {"[{name: a, linear: {out_features: 3}}, {from: [a, input], add: {}}]",
         "model.layers[1].from[1]: add needs inputs of one shape, but layer 'a' (linear) gives 3 and the model's input "
         "gives 4",
         1,
         {4},
         0,
         {0}},
        {"[{name: a, linear: {out_features: 3}}, {from: input, linear: {out_features: 2}}]",
         "model.layers[0]: no layer reads layer 'a' (linear), and only the last layer gives the model's output",
         1,
         {4},
         0,
         {0}},
        {"[{relu: {}}]", "model.layers: no layer has parameters: there is nothing to train", 1, {4}, 0, {0}},
        {"[{linear: {out_features: 4}}]",
         "model.loss.mse_loss: the targets are 3, but the last layer '0' (linear) gives 4",
         1,
         {2},
         1,
         {3}},
        {"[{linear: {out_features: 4294967295}}, {linear: {out_features: 4294967295}}]",
         "model.layers[1].linear.out_features: a weight of 4294967295 x 4294967295 is too large",
         1,
         {2},
         0,
         {0}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct model *model = NULL;
        struct tally_error err = {0};
        tally_status status = model_of_layers(cases[i].layers, cases[i].ndim, cases[i].in, cases[i].target_ndim,
                                              cases[i].target, &model, &err);
        assert_int_equal(status, TALLY_EINVAL);
        assert_null(model);
        assert_string_equal(err.message, cases[i].message);
    }
}

static void targets_must_fit_the_loss(void **state)
{
    (void)state;
    size_t in[1] = {3}, target[1] = {2};
    struct model *model = NULL;
    struct tally_error err = {0};
    Tally__V1__JobSpec *spec = job_of_layers("[{linear: {out_features: 2}}]", "cross_entropy", 1, in);
    Tally__V1__DataFacts *facts = facts_of(1, in, 1, target, 10, 0);
    assert_int_equal(model_build(spec, facts, &model, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "model.loss.cross_entropy: needs class indices as targets, but the data's targets "
                                     "are values (mse_loss takes those)");
    tally__v1__job_spec__free_unpacked(spec, NULL);
    tally__v1__data_facts__free_unpacked(facts, NULL);
    spec = job_of_layers("[{linear: {out_features: 2}}]", "mse_loss", 1, in);
    facts = facts_of(1, in, 0, NULL, 10, 0);
    assert_int_equal(model_build(spec, facts, &model, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "model.loss.mse_loss: needs values as targets, but the data's targets are class "
                                     "indices (cross_entropy takes those)");
    tally__v1__job_spec__free_unpacked(spec, NULL);
    tally__v1__data_facts__free_unpacked(facts, NULL);
}

static void facts_are_not_trusted(void **state)
{
    (void)state;
    size_t in[4] = {3, 2, 2, 2}, zero[2] = {3, 0};
    struct model *model = NULL;
    struct tally_error err = {0};
    Tally__V1__JobSpec *spec = job_of_layers("[{linear: {out_features: 2}}]", "cross_entropy", 1, in);
    Tally__V1__DataFacts *facts[] = {facts_of(0, in, 0, NULL, 10, 0), facts_of(4, in, 0, NULL, 10, 0),
                                     facts_of(2, zero, 0, NULL, 10, 0), facts_of(1, in, 0, NULL, 0, 0)};
    for (size_t i = 0; i < sizeof facts / sizeof *facts; i++) {
        assert_int_equal(model_build(spec, facts[i], &model, &err), TALLY_EINVAL);
        tally__v1__data_facts__free_unpacked(facts[i], NULL);
    }
    tally__v1__job_spec__free_unpacked(spec, NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shapes_are_pytorchs),
        cmocka_unit_test(the_seed_network),
        cmocka_unit_test(layout_of_random_models),
        cmocka_unit_test(layout_of_large_layers),
        cmocka_unit_test(refusals),
        cmocka_unit_test(targets_must_fit_the_loss),
        cmocka_unit_test(facts_are_not_trusted),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
