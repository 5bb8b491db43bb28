/* From the layers of a job to a model: who reads whom, shapes, parameters. The kinds are in layer_*.c, the flat vector
 * in slices.c, the loss in loss.c. */
#include "model/model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/limits.h"
#include "common/message_copy.h"
#include "common/spec_file.h"
#include "model/build.h"
#include "model/layer.h"

struct builder {
    struct model *model;
    const Tally__V1__Model *spec;        /* the caller's, whose positions file knows; the model keeps a copy */
    const Tally__V1__Pipeline *pipeline; /* likewise; NULL: one stage */
    const struct spec_file *file;
    uint32_t *readers; /* of each layer */
    struct tally_error *err;
};

static tally_status out_of_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "out of memory for the model");
}

static tally_status shape_from(const uint32_t *dims, size_t n, struct shape *ret_shape)
{
    size_t dim[MODEL_NDIM_MAX];
    if (n == 0 || n > 3)
        return TALLY_EINVAL;
    for (size_t i = 0; i < n; i++)
        dim[i] = dims[i];
    return shape_set(ret_shape, n, dim) ? TALLY_OK : TALLY_EINVAL;
}

static tally_status take_facts(struct model *model, const Tally__V1__DataFacts *facts, struct tally_error *err)
{
    if (shape_from(facts->input_shape, facts->n_input_shape, &model->input) != TALLY_OK)
        return tally_fail(err, TALLY_EINVAL,
                          "data: samples must have 1 to 3 dimensions, none of them 0, and at most %zu elements",
                          TALLY_ELEMENTS_MAX);
    if (facts->train_samples == 0)
        return tally_fail(err, TALLY_EINVAL, "data.train: no samples");
    model->target_kind = DATASET_CLASSES;
    if (facts->n_target_shape == 0)
        return TALLY_OK;
    model->target_kind = DATASET_VALUES;
    if (shape_from(facts->target_shape, facts->n_target_shape, &model->target) != TALLY_OK)
        return tally_fail(err, TALLY_EINVAL,
                          "data: targets must have 1 to 3 dimensions, none of them 0, and at most %zu elements",
                          TALLY_ELEMENTS_MAX);
    return TALLY_OK;
}

static tally_status name_layer(Tally__V1__Layer *spec, size_t index, struct tally_error *err)
{
    char text[24];
    if (spec->name)
        return TALLY_OK;
    snprintf(text, sizeof text, "%zu", index);
    spec->name = strdup(text);
    return spec->name ? TALLY_OK : out_of_memory(err);
}

static int32_t find_layer(const struct model *model, size_t count, const char *name)
{
    for (size_t i = 0; i < count; i++)
        if (strcmp(model->layers[i].name, name) == 0)
            return (int32_t)i;
    return -1;
}

/* Names, kinds; all layers, before any is looked at, so that `from` knows which names there are. */
static tally_status take_layers(struct builder *b)
{
    struct model *model = b->model;
    for (uint32_t i = 0; i < model->layer_count; i++) {
        Tally__V1__Layer *copy = model->spec->model->layers[i];
        struct layer *layer = &model->layers[i];
        struct layer_check check = {.file = b->file, .index = i, .spec = b->spec->layers[i], .err = b->err};
        layer->weight = layer->bias = -1;
        layer->spec = copy;
        layer->type = layer_type_find(copy->kind_case);
        if (!layer->type)
            return layer_fail(&check, NULL, -1, "a layer needs a kind: linear, conv2d, relu ...");
        check.type = layer->type;
        tally_status status = name_layer(copy, i, b->err);
        if (status != TALLY_OK)
            return status;
        layer->name = copy->name;
        if (strcmp(layer->name, "input") == 0)
            return layer_fail(&check, "name", -1, "'input' is the model's input; expected another name");
        int32_t other = find_layer(model, i, layer->name);
        if (other >= 0)
            return layer_fail(&check, "name", -1, "'%s' is already the name of layer %d; expected one of its own",
                              layer->name, other);
    }
    return TALLY_OK;
}

static tally_status unknown_source(const struct builder *b, const struct layer_check *check, int item, const char *name)
{
    const struct model *model = b->model;
    int32_t later = find_layer(model, model->layer_count, name);
    if (later >= 0)
        return layer_fail(check, "from", item,
                          "layer '%s' does not come before this one; expected an earlier layer or 'input'", name);
    const char **names = calloc(check->index + 1, sizeof *names);
    if (!names)
        return out_of_memory(b->err);
    names[0] = "input";
    for (size_t i = 0; i < check->index; i++)
        names[i + 1] = model->layers[i].name;
    const char *near = spec_nearest(name, names, check->index + 1);
    tally_status status =
        near ? layer_fail(check, "from", item, "no layer '%s' (did you mean '%s'?)", name, near)
             : layer_fail(check, "from", item, "no layer '%s'; expected an earlier layer or 'input'", name);
    free(names);
    return status;
}

static tally_status resolve_inputs(struct builder *b, const struct layer_check *check)
{
    struct layer *layer = &b->model->layers[check->index];
    const Tally__V1__Layer *spec = check->spec;
    size_t n = spec->n_from ? spec->n_from : 1;
    if (n < layer->type->inputs_min)
        return layer_fail(check, spec->n_from ? "from" : NULL, -1,
                          "%s needs `from` with at least %zu layers, such as from: [a, b]", layer->type->kind,
                          layer->type->inputs_min);
    if (n > layer->type->inputs_max)
        return layer_fail(check, "from", -1, "%s reads at most %zu, but `from` names %zu", layer->type->kind,
                          layer->type->inputs_max, n);
    layer->inputs = calloc(n, sizeof *layer->inputs);
    if (!layer->inputs)
        return out_of_memory(b->err);
    layer->input_count = n;
    if (spec->n_from == 0)
        layer->inputs[0] = (int32_t)check->index - 1; /* the first: MODEL_INPUT */
    for (size_t i = 0; i < spec->n_from; i++) {
        layer->inputs[i] =
            strcmp(spec->from[i], "input") == 0 ? MODEL_INPUT : find_layer(b->model, check->index, spec->from[i]);
        if (layer->inputs[i] < 0 && strcmp(spec->from[i], "input") != 0)
            return unknown_source(b, check, (int)i, spec->from[i]);
    }
    for (size_t i = 0; i < n; i++)
        if (layer->inputs[i] != MODEL_INPUT)
            b->readers[layer->inputs[i]]++;
    return TALLY_OK;
}

static const struct shape *shape_of(const struct model *model, int32_t source)
{
    return source == MODEL_INPUT ? &model->input : &model->layers[source].out;
}

static void source_text(const struct model *model, int32_t source, char *text, size_t size)
{
    if (source == MODEL_INPUT)
        snprintf(text, size, "the model's input");
    else
        snprintf(text, size, "layer '%.64s' (%s)", model->layers[source].name, model->layers[source].type->kind);
}

static tally_status same_inputs(const struct builder *b, const struct layer_check *check)
{
    const struct layer *layer = &b->model->layers[check->index];
    const struct shape *first = shape_of(b->model, layer->inputs[0]);
    char one[96], other[96], first_text[96], other_text[96];
    for (size_t i = 1; i < layer->input_count; i++) {
        const struct shape *shape = shape_of(b->model, layer->inputs[i]);
        if (shape_equal(first, shape))
            continue;
        source_text(b->model, layer->inputs[0], one, sizeof one);
        source_text(b->model, layer->inputs[i], other, sizeof other);
        return layer_fail(check, "from", (int)i, "%s needs inputs of one shape, but %s gives %s and %s gives %s",
                          layer->type->kind, one, shape_text(first, first_text, sizeof first_text), other,
                          shape_text(shape, other_text, sizeof other_text));
    }
    return TALLY_OK;
}

static tally_status add_param(struct model *model, uint32_t layer, bool is_bias, const struct shape *shape,
                              size_t fan_in, struct tally_error *err)
{
    struct param *p = &model->params[model->param_count];
    *p = (struct param){.layer = layer, .is_bias = is_bias, .shape = *shape, .fan_in = fan_in};
    if (asprintf(&p->name, "%s.%s", model->layers[layer].name, is_bias ? "bias" : "weight") < 0) {
        p->name = NULL;
        return out_of_memory(err);
    }
    *(is_bias ? &model->layers[layer].bias : &model->layers[layer].weight) = (int32_t)model->param_count++;
    return TALLY_OK;
}

static tally_status add_params(struct builder *b, const struct layer_check *check)
{
    struct layer *layer = &b->model->layers[check->index];
    struct layer_params params = {0};
    if (!layer->type->params)
        return TALLY_OK;
    tally_status status = layer->type->params(check, &layer->in, &params);
    if (status == TALLY_OK)
        status = add_param(b->model, check->index, false, &params.weight, params.fan_in, b->err);
    if (status == TALLY_OK && params.bias) {
        struct shape bias;
        shape_set(&bias, 1, params.weight.dim);
        status = add_param(b->model, check->index, true, &bias, params.fan_in, b->err);
    }
    return status;
}

static tally_status build_layer(struct builder *b, uint32_t index)
{
    struct layer *layer = &b->model->layers[index];
    struct layer_check check = {
        .file = b->file, .index = index, .spec = b->spec->layers[index], .type = layer->type, .err = b->err};
    char input[96];
    tally_status status = resolve_inputs(b, &check);
    if (status == TALLY_OK)
        status = same_inputs(b, &check);
    if (status != TALLY_OK)
        return status;
    layer->in = *shape_of(b->model, layer->inputs[0]);
    source_text(b->model, layer->inputs[0], input, sizeof input);
    check.input = input;
    status = layer->type->shape(&check, &layer->in, &layer->out);
    if (status == TALLY_OK)
        status = add_params(b, &check);
    if (status == TALLY_OK)
        layer->forward_flops = layer->type->flops ? layer->type->flops(layer) : 0;
    return status;
}

static tally_status check_readers(const struct builder *b)
{
    const struct model *model = b->model;
    for (uint32_t i = 0; i + 1 < model->layer_count; i++) {
        struct layer_check check = {
            .file = b->file, .index = i, .spec = b->spec->layers[i], .type = model->layers[i].type, .err = b->err};
        if (b->readers[i] == 0)
            return layer_fail(&check, NULL, -1,
                              "no layer reads layer '%s' (%s), and only the last layer gives the model's output",
                              model->layers[i].name, model->layers[i].type->kind);
    }
    return TALLY_OK;
}

static tally_status build(struct builder *b, const struct spec_file *file, const Tally__V1__Loss *loss)
{
    struct model *model = b->model;
    tally_status status = take_layers(b);
    for (uint32_t i = 0; i < model->layer_count && status == TALLY_OK; i++)
        status = build_layer(b, i);
    if (status == TALLY_OK)
        status = check_readers(b);
    if (status == TALLY_OK && model->param_count == 0)
        status =
            file ? spec_error(file, b->err, &b->spec->base, "layers", -1,
                              "no layer has parameters: there is nothing to train")
                 : tally_fail(b->err, TALLY_EINVAL, "model.layers: no layer has parameters: there is nothing to train");
    if (status == TALLY_OK)
        status = loss_check(model, loss, file, b->err);
    if (status == TALLY_OK)
        status = stages_build(model, b->pipeline, file, b->err);
    if (status == TALLY_OK)
        status = slices_build(model, b->err);
    model->init_draws = model->param_elements; /* all are uniform: one draw an element */
    return status;
}

tally_status model_build_at(const Tally__V1__JobSpec *spec, const Tally__V1__DataFacts *facts,
                            const struct spec_file *file, struct model **ret_model, struct tally_error *err)
{
    if (!spec->model || spec->model->n_layers == 0 || spec->model->n_layers > INT32_MAX || !spec->model->loss ||
        spec->model->loss->kind_case == TALLY__V1__LOSS__KIND__NOT_SET)
        return tally_fail(err, TALLY_EINVAL, "model: layers and a loss are needed");
    struct builder b = {
        .spec = spec->model, .pipeline = spec->parallel ? spec->parallel->pipeline : NULL, .file = file, .err = err};
    struct model *model = b.model = calloc(1, sizeof *model);
    if (!model)
        return out_of_memory(err);
    tally_status status = take_facts(model, facts, err);
    if (status == TALLY_OK && !(model->spec = message_copy(&spec->base)))
        status = out_of_memory(err);
    if (status == TALLY_OK)
        status = spec_fill_defaults(&model->spec->base, err);
    if (status != TALLY_OK)
        goto out;
    model->layer_count = spec->model->n_layers;
    model->layers = calloc(model->layer_count, sizeof *model->layers);
    model->params = calloc(2 * model->layer_count, sizeof *model->params);
    b.readers = calloc(model->layer_count, sizeof *b.readers);
    if (!model->layers || !model->params || !b.readers)
        status = out_of_memory(err);
    else
        status = build(&b, file, spec->model->loss);
    if (status == TALLY_OK)
        status = model_complete_layers(model, model->spec->model, err);
out:
    free(b.readers);
    if (status == TALLY_OK)
        *ret_model = model;
    else
        model_free(model);
    return status;
}

tally_status model_build(const Tally__V1__JobSpec *spec, const Tally__V1__DataFacts *facts, struct model **ret_model,
                         struct tally_error *err)
{
    return model_build_at(spec, facts, NULL, ret_model, err);
}

tally_status model_complete_layers(const struct model *model, Tally__V1__Model *spec, struct tally_error *err)
{
    tally_status status = TALLY_OK;
    for (size_t i = 0; i < model->layer_count && status == TALLY_OK; i++) {
        const struct layer *layer = &model->layers[i];
        status = name_layer(spec->layers[i], i, err);
        if (status == TALLY_OK && layer->type->complete)
            status = layer->type->complete(layer, spec->layers[i], err);
    }
    return status;
}

void model_free(struct model *model)
{
    if (!model)
        return;
    for (size_t i = 0; model->layers && i < model->layer_count; i++)
        free(model->layers[i].inputs);
    for (size_t i = 0; model->params && i < model->param_count; i++)
        free(model->params[i].name);
    free(model->layers);
    free(model->params);
    free(model->slices);
    free(model->segment_stage);
    if (model->spec)
        tally__v1__job_spec__free_unpacked(model->spec, NULL);
    free(model);
}
