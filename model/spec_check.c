/* What a job's train, data and parallel sections mean together, beyond the type and range of each value. */
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/batches.h"
#include "model/mesh.h"
#include "model/spec_build.h"

static tally_status out_of_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "out of memory for the job's spec");
}

uint32_t spec_replicas(const Tally__V1__JobSpec *spec)
{
    return mesh_of_spec(spec).data;
}

uint32_t spec_micro_batch(const Tally__V1__JobSpec *spec)
{
    const Tally__V1__Train *train = spec->train;
    if (train->has_micro_batch_size)
        return train->micro_batch_size;
    uint32_t replicas = spec_replicas(spec);
    if (spec->parallel && spec->parallel->data && spec->parallel->data->has_max)
        replicas = spec->parallel->data->max;
    return train->batch_size / replicas + (train->batch_size % replicas != 0);
}

/* The update is computed in float32. */
static tally_status check_float32(const Tally__V1__Sgd *sgd, const char *field, double value,
                                  const struct spec_file *file, struct tally_error *err)
{
    if (fabs(value) <= (double)FLT_MAX)
        return TALLY_OK;
    return spec_error(file, err, &sgd->base, field, -1, "found %g, expected a number of magnitude at most %.2g", value,
                      (double)FLT_MAX);
}

tally_status spec_check_train(const Tally__V1__JobSpec *spec, const struct spec_file *file, struct tally_error *err)
{
    const Tally__V1__Train *train = spec->train;
    const Tally__V1__Sgd *sgd = train->optimizer->sgd;
    if (!train->has_epochs && !train->has_steps)
        return spec_error(file, err, &train->base, NULL, -1,
                          "has neither epochs nor steps, expected at least one of them");
    if (train->has_micro_batch_size && train->micro_batch_size > train->batch_size)
        return spec_error(file, err, &train->base, "micro_batch_size", -1,
                          "found %u, expected at most batch_size, which is %u", train->micro_batch_size,
                          train->batch_size);
    tally_status status = check_float32(sgd, "lr", sgd->lr, file, err);
    if (status == TALLY_OK)
        status = check_float32(sgd, "momentum", sgd->momentum, file, err);
    if (status == TALLY_OK)
        status = check_float32(sgd, "dampening", sgd->dampening, file, err);
    if (status == TALLY_OK)
        status = check_float32(sgd, "weight_decay", sgd->weight_decay, file, err);
    if (status != TALLY_OK)
        return status;
    if (sgd->nesterov && (sgd->momentum == 0 || sgd->dampening != 0))
        return spec_error(file, err, &sgd->base, "nesterov", -1,
                          "needs momentum above 0 and dampening 0, found momentum %g and dampening %g", sgd->momentum,
                          sgd->dampening);
    return TALLY_OK;
}

static tally_status check_replicas(const Tally__V1__Replicas *data, const struct spec_file *file,
                                   struct tally_error *err)
{
    if (!data)
        return TALLY_OK;
    if (data->has_min != data->has_max)
        return spec_error(file, err, &data->base, data->has_min ? "min" : "max", -1,
                          "is given without %s, expected both for an elastic job", data->has_min ? "max" : "min");
    if (data->has_min && data->min > data->max)
        return spec_error(file, err, &data->base, "min", -1, "found %u, expected at most max, which is %u", data->min,
                          data->max);
    if (data->has_min && data->has_count && (data->count < data->min || data->count > data->max))
        return spec_error(file, err, &data->base, "count", -1, "found %u, expected min to max, which is %u to %u",
                          data->count, data->min, data->max);
    return TALLY_OK;
}

/* ---- layers by name ---- */

struct layer_names {
    size_t n;
    const char **names; /* given, or the index */
    char (*indices)[16];
    uint32_t *stage; /* where it is placed, from 1; 0: not yet */
};

static void names_free(struct layer_names *names)
{
    free(names->names);
    free(names->indices);
    free(names->stage);
}

static tally_status names_open(const Tally__V1__Model *model, struct layer_names *names, struct tally_error *err)
{
    *names = (struct layer_names){.n = model->n_layers};
    names->names = calloc(names->n + 1, sizeof *names->names);
    names->indices = calloc(names->n + 1, sizeof *names->indices);
    names->stage = calloc(names->n + 1, sizeof *names->stage);
    if (!names->names || !names->indices || !names->stage) {
        names_free(names);
        return out_of_memory(err);
    }
    for (size_t i = 0; i < names->n; i++) {
        snprintf(names->indices[i], sizeof names->indices[i], "%u", (unsigned)i);
        names->names[i] = model->layers[i]->name ? model->layers[i]->name : names->indices[i];
    }
    return TALLY_OK;
}

/* Its index, or names->n with the refusal in err. */
static size_t find_name(const struct layer_names *names, const char *name, const struct spec_file *file,
                        const ProtobufCMessage *msg, const char *field, int item, struct tally_error *err)
{
    for (size_t i = 0; i < names->n; i++)
        if (strcmp(names->names[i], name) == 0)
            return i;
    const char *near = spec_nearest(name, names->names, names->n);
    if (near)
        spec_error(file, err, msg, field, item, "no layer '%s' in the model (did you mean '%s'?)", name, near);
    else
        spec_error(file, err, msg, field, item, "no layer '%s' in the model", name);
    return names->n;
}

static tally_status check_stage(const Tally__V1__Stage *stage, uint32_t number, struct layer_names *names,
                                const struct spec_file *file, struct tally_error *err)
{
    if (stage->n_layers == 0)
        return spec_error(file, err, &stage->base, NULL, -1, "the stage has no layers, expected at least one");
    for (size_t i = 0; i < stage->n_layers; i++) {
        size_t layer = find_name(names, stage->layers[i], file, &stage->base, "layers", (int)i, err);
        if (layer == names->n)
            return TALLY_EINVAL;
        if (names->stage[layer] != 0)
            return spec_error(file, err, &stage->base, "layers", (int)i,
                              "layer '%s' is already in stage %u of the placement, expected each layer once",
                              stage->layers[i], names->stage[layer] - 1);
        names->stage[layer] = number + 1;
    }
    return TALLY_OK;
}

static tally_status check_pipeline(const Tally__V1__Pipeline *pipeline, struct layer_names *names,
                                   const struct spec_file *file, struct tally_error *err)
{
    if (!pipeline)
        return TALLY_OK;
    for (size_t i = 0; i < pipeline->n_placement; i++) {
        tally_status status = check_stage(pipeline->placement[i], (uint32_t)i, names, file, err);
        if (status != TALLY_OK)
            return status;
    }
    if (pipeline->has_stages && pipeline->n_placement > 0 && pipeline->n_placement != pipeline->stages)
        return spec_error(file, err, &pipeline->base, "stages", -1,
                          "found %u, expected the number of lists in placement, which is %zu", pipeline->stages,
                          pipeline->n_placement);
    return TALLY_OK;
}

static tally_status check_tensor(const Tally__V1__JobSpec *spec, const struct layer_names *names,
                                 const struct spec_file *file, struct tally_error *err)
{
    const Tally__V1__Tensor *tensor = spec->parallel->tensor;
    if (!tensor)
        return TALLY_OK;
    for (size_t i = 0; i < tensor->n_layers; i++) {
        const Tally__V1__Tensor__LayersEntry *entry = tensor->layers[i];
        const char *key = entry->key ? entry->key : ""; /* absent in a request */
        size_t layer = find_name(names, key, file, &entry->base, NULL, -1, err);
        if (layer == names->n)
            return TALLY_EINVAL;
        Tally__V1__Layer__KindCase kind = spec->model->layers[layer]->kind_case;
        if (kind != TALLY__V1__LAYER__KIND_LINEAR && kind != TALLY__V1__LAYER__KIND_CONV2D)
            return spec_error(file, err, &entry->base, NULL, -1,
                              "layer '%s' has no weight to split, expected a linear or conv2d layer", key);
    }
    if (tensor->has_size && tensor->size > 1)
        return spec_error(file, err, &tensor->base, "size", -1,
                          "tensor splits above 1 are not available in this version");
    return TALLY_OK;
}

tally_status spec_check_parallel(const Tally__V1__JobSpec *spec, const struct spec_file *file, struct tally_error *err)
{
    struct layer_names names;
    if (!spec->parallel)
        return TALLY_OK;
    tally_status status = check_replicas(spec->parallel->data, file, err);
    if (status == TALLY_OK)
        status = names_open(spec->model, &names, err);
    if (status != TALLY_OK)
        return status;
    status = check_pipeline(spec->parallel->pipeline, &names, file, err);
    if (status == TALLY_OK)
        status = check_tensor(spec, &names, file, err);
    names_free(&names);
    return status;
}

/* ---- with the data's facts ---- */

static tally_status check_normalize(const Tally__V1__Normalize *normalize, size_t channels,
                                    const struct spec_file *file, struct tally_error *err)
{
    if (!normalize)
        return TALLY_OK;
    char each[64];
    snprintf(each, sizeof each, " or one for each of the %zu channels", channels);
    const struct {
        const char *field;
        size_t n;
    } lists[] = {{"mean", normalize->n_mean}, {"std", normalize->n_std}};
    for (size_t i = 0; i < 2; i++)
        if (lists[i].n != 1 && lists[i].n != channels)
            return spec_error(file, err, &normalize->base, lists[i].field, -1,
                              "has %zu numbers, expected one for all%s", lists[i].n,
                              channels == 1 ? ": the inputs have one channel" : each);
    return TALLY_OK;
}

static tally_status check_classes(const Tally__V1__Source *source, const struct model *model,
                                  const struct spec_file *file, struct tally_error *err)
{
    size_t outputs = model->layers[model->layer_count - 1].out.elements;
    if (!source || source->kind_case != TALLY__V1__SOURCE__KIND_SYNTHETIC || model->target_kind != DATASET_CLASSES ||
        source->synthetic->classes <= outputs)
        return TALLY_OK;
    return spec_error(file, err, &source->synthetic->base, "classes", -1,
                      "found %u, expected at most the %zu outputs of the last layer, '%s'", source->synthetic->classes,
                      outputs, model->layers[model->layer_count - 1].name);
}

/* What is to blame where batches_init refuses: epochs alone can make the steps too many, samples being below 2^32. */
static const char *batches_field(const Tally__V1__Train *train)
{
    if (train->has_epochs && train->epochs > UINT32_MAX)
        return "epochs";
    return train->has_micro_batch_size ? "micro_batch_size" : "batch_size";
}

tally_status spec_check_facts(const Tally__V1__JobSpec *spec, const Tally__V1__DataFacts *facts,
                              const struct model *model, const struct spec_file *file, struct tally_error *err)
{
    const Tally__V1__Data *data = spec->data;
    const Tally__V1__Train *train = spec->train;
    struct batches batches;
    struct tally_error inner = {0};
    if ((facts->test_samples > 0) != (data->test != NULL))
        return data->test ? spec_error(file, err, &data->base, "test", -1, "holds no samples, expected at least one")
                          : spec_error(file, err, &data->base, NULL, -1,
                                       "%" PRIu64 " test samples are counted, but data.test is not given",
                                       facts->test_samples);
    if (facts->train_samples > UINT32_MAX || facts->test_samples > UINT32_MAX)
        return spec_error(file, err, &data->base, facts->train_samples > UINT32_MAX ? "train" : "test", -1,
                          "holds %" PRIu64 " samples, expected at most %" PRIu32 "; limit says how many to use",
                          facts->train_samples > UINT32_MAX ? facts->train_samples : facts->test_samples, UINT32_MAX);
    if (batches_init(&batches, facts->train_samples, train->batch_size, spec_micro_batch(spec), data->drop_last,
                     train->epochs, train->steps, &inner) != TALLY_OK)
        return spec_error(file, err, &train->base, batches_field(train), -1, "%s", inner.message);
    tally_status status = check_normalize(data->normalize, facts->input_shape[0], file, err);
    if (status == TALLY_OK)
        status = check_classes(data->train, model, file, err);
    if (status == TALLY_OK)
        status = check_classes(data->test, model, file, err);
    return status;
}
