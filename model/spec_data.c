/* The files that a job names: their paths, whether they are there, and what their headers say. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/file.h"
#include "common/safetensors.h"
#include "model/build.h"
#include "model/init_check.h"
#include "model/spec_build.h"

/* A path in the spec, and where it stands. */
struct path_field {
    ProtobufCMessage *msg;
    const char *field;
    char **path;
};

#define PATHS_MAX 5 /* two sets of two files, and the initial weights */

static size_t add_source(Tally__V1__Source *source, struct path_field *fields)
{
    if (!source)
        return 0;
    switch (source->kind_case) {
    case TALLY__V1__SOURCE__KIND_IDX:
        fields[0] = (struct path_field){&source->idx->base, "inputs", &source->idx->inputs};
        fields[1] = (struct path_field){&source->idx->base, "targets", &source->idx->targets};
        return 2;
    case TALLY__V1__SOURCE__KIND_NPY:
        fields[0] = (struct path_field){&source->npy->base, "inputs", &source->npy->inputs};
        fields[1] = (struct path_field){&source->npy->base, "targets", &source->npy->targets};
        return 2;
    case TALLY__V1__SOURCE__KIND_CSV:
        fields[0] = (struct path_field){&source->csv->base, "path", &source->csv->path};
        return 1;
    default:
        return 0;
    }
}

static const Tally__V1__SafetensorsFile *init_file(const Tally__V1__JobSpec *spec)
{
    const Tally__V1__Init *init = spec->model->init;
    return init && init->kind_case == TALLY__V1__INIT__KIND_SAFETENSORS ? init->safetensors : NULL;
}

static size_t list_paths(const Tally__V1__JobSpec *spec, struct path_field fields[PATHS_MAX])
{
    size_t n = add_source(spec->data->train, fields);
    n += add_source(spec->data->test, fields + n);
    if (init_file(spec)) {
        Tally__V1__SafetensorsFile *file = spec->model->init->safetensors;
        fields[n++] = (struct path_field){&file->base, "path", &file->path};
    }
    return n;
}

tally_status spec_resolve_paths(Tally__V1__JobSpec *spec, const char *folder, const struct spec_file *file,
                                struct tally_error *err)
{
    struct path_field fields[PATHS_MAX];
    size_t n = list_paths(spec, fields);
    for (size_t i = 0; i < n; i++) {
        struct stat st;
        char *absolute = path_absolute(folder, *fields[i].path);
        if (!absolute)
            return tally_fail(err, TALLY_ENOMEM, "out of memory for the job's paths");
        free(*fields[i].path);
        *fields[i].path = absolute;
        if (stat(absolute, &st) != 0 || access(absolute, R_OK) != 0)
            return spec_error(file, err, fields[i].msg, fields[i].field, -1, "cannot read %s: %s", absolute,
                              strerror(errno));
        if (!S_ISREG(st.st_mode))
            return spec_error(file, err, fields[i].msg, fields[i].field, -1, "%s is %s, expected a file", absolute,
                              S_ISDIR(st.st_mode) ? "a folder" : "not a regular file");
    }
    return TALLY_OK;
}

tally_status spec_check_paths(const Tally__V1__JobSpec *spec, const struct spec_file *file, struct tally_error *err)
{
    struct path_field fields[PATHS_MAX];
    size_t n = list_paths(spec, fields);
    for (size_t i = 0; i < n; i++)
        if (**fields[i].path != '/')
            return spec_error(file, err, fields[i].msg, fields[i].field, -1, "found '%s', expected an absolute path",
                              *fields[i].path);
    return TALLY_OK;
}

/* The message that stands for a source in errors: its kind's. All members of the oneof are pointers to messages. */
static const ProtobufCMessage *source_message(const Tally__V1__Source *source)
{
    return source->kind_case == TALLY__V1__SOURCE__KIND__NOT_SET ? &source->base
                                                                 : (const ProtobufCMessage *)source->idx;
}

/* What a synthetic source must say for this loss, at its place. */
static tally_status check_synthetic(const Tally__V1__Source *source, enum dataset_target want,
                                    const struct spec_file *file, struct tally_error *err)
{
    if (source->kind_case != TALLY__V1__SOURCE__KIND_SYNTHETIC)
        return TALLY_OK;
    const Tally__V1__Synthetic *synthetic = source->synthetic;
    if (want == DATASET_CLASSES && !synthetic->has_classes)
        return spec_error(file, err, &synthetic->base, "classes", -1,
                          "is missing, expected the number of classes: the loss is cross_entropy");
    if (want == DATASET_VALUES && synthetic->n_target_shape == 0)
        return spec_error(file, err, &synthetic->base, "target_shape", -1,
                          "is missing, expected the shape of a target: the loss is mse_loss");
    return TALLY_OK;
}

static tally_status probe_source(const Tally__V1__Source *source, enum dataset_target want,
                                 const struct spec_file *file, struct dataset_info *info, struct tally_error *err)
{
    struct tally_error inner = {0};
    *info = (struct dataset_info){0};
    tally_status status = check_synthetic(source, want, file, err);
    if (status != TALLY_OK)
        return status;
    status = dataset_probe(source, want, info, &inner);
    if (status == TALLY_OK)
        return TALLY_OK;
    spec_error(file, err, source_message(source), NULL, -1, "%s", inner.message);
    if (err)
        err->code = status;
    return status;
}

static uint32_t *dims_copy(const size_t *shape, size_t ndim)
{
    uint32_t *dims = calloc(ndim + 1, sizeof *dims);
    for (size_t i = 0; dims && i < ndim; i++)
        dims[i] = (uint32_t)shape[i];
    return dims;
}

static void info_shapes(const struct dataset_info *info, struct shape *input, struct shape *target)
{
    *input = (struct shape){.ndim = info->input_ndim};
    *target = (struct shape){.ndim = info->target == DATASET_VALUES ? info->target_ndim : 0};
    memcpy(input->dim, info->input_shape, info->input_ndim * sizeof *input->dim);
    memcpy(target->dim, info->target_shape, target->ndim * sizeof *target->dim);
}

static tally_status check_alike(const Tally__V1__Data *data, const struct dataset_info *train,
                                const struct dataset_info *test, const struct spec_file *file, struct tally_error *err)
{
    struct shape in[2], target[2];
    char a[96], b[96];
    info_shapes(train, &in[0], &target[0]);
    info_shapes(test, &in[1], &target[1]);
    if (!shape_equal(&in[0], &in[1]))
        return spec_error(file, err, &data->base, "test", -1, "samples are %s, expected %s as in data.train",
                          shape_text(&in[1], b, sizeof b), shape_text(&in[0], a, sizeof a));
    if (!shape_equal(&target[0], &target[1]))
        return spec_error(file, err, &data->base, "test", -1, "targets are %s, expected %s as in data.train",
                          shape_text(&target[1], b, sizeof b), shape_text(&target[0], a, sizeof a));
    return TALLY_OK;
}

static tally_status check_dims(const struct dataset_info *info, const Tally__V1__Data *data,
                               const struct spec_file *file, struct tally_error *err)
{
    for (size_t i = 0; i < info->input_ndim + info->target_ndim; i++) {
        size_t dim = i < info->input_ndim ? info->input_shape[i] : info->target_shape[i - info->input_ndim];
        if (dim == 0 || dim > UINT32_MAX)
            return spec_error(file, err, &data->base, "train", -1, "a dimension of %zu in a sample, expected 1 to %u",
                              dim, UINT32_MAX);
    }
    return TALLY_OK;
}

tally_status spec_probe(const Tally__V1__JobSpec *spec, const struct spec_file *file, Tally__V1__DataFacts **ret_facts,
                        struct tally_error *err)
{
    enum dataset_target want = loss_target(spec->model->loss);
    struct dataset_info train, test = {0};
    tally_status status = probe_source(spec->data->train, want, file, &train, err);
    if (status == TALLY_OK)
        status = check_dims(&train, spec->data, file, err);
    if (status == TALLY_OK && spec->data->test)
        status = probe_source(spec->data->test, want, file, &test, err);
    if (status == TALLY_OK && spec->data->test)
        status = check_alike(spec->data, &train, &test, file, err);
    if (status != TALLY_OK)
        return status;
    Tally__V1__DataFacts *facts = malloc(sizeof *facts);
    if (!facts)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for the data's facts");
    tally__v1__data_facts__init(facts);
    facts->train_samples = train.samples;
    facts->test_samples = test.samples;
    facts->n_input_shape = train.input_ndim;
    facts->n_target_shape = train.target == DATASET_VALUES ? train.target_ndim : 0;
    facts->input_shape = dims_copy(train.input_shape, facts->n_input_shape);
    facts->target_shape = dims_copy(train.target_shape, facts->n_target_shape);
    if (!facts->input_shape || !facts->target_shape) {
        tally__v1__data_facts__free_unpacked(facts, NULL);
        return tally_fail(err, TALLY_ENOMEM, "out of memory for the data's facts");
    }
    *ret_facts = facts;
    return TALLY_OK;
}

static tally_status check_targets(const Tally__V1__Source *source, const struct model *model,
                                  const struct spec_file *file, struct tally_error *err)
{
    struct tally_error inner = {0};
    if (!source)
        return TALLY_OK;
    tally_status status = dataset_probe_classes(source, (int64_t)model->layers[model->layer_count - 1].out.elements,
                                                model->spec->model->loss->cross_entropy->ignore_index, &inner);
    if (status == TALLY_OK)
        return TALLY_OK;
    spec_error(file, err, source_message(source),
               source->kind_case == TALLY__V1__SOURCE__KIND_CSV ? "target" : "targets", -1, "%s", inner.message);
    if (err)
        err->code = status;
    return status;
}

tally_status spec_check_targets(const Tally__V1__JobSpec *spec, const struct model *model, const struct spec_file *file,
                                struct tally_error *err)
{
    if (model->target_kind != DATASET_CLASSES)
        return TALLY_OK;
    tally_status status = check_targets(spec->data->train, model, file, err);
    return status == TALLY_OK ? check_targets(spec->data->test, model, file, err) : status;
}

tally_status spec_check_init(const Tally__V1__JobSpec *spec, const struct model *model, const struct spec_file *file,
                             struct tally_error *err)
{
    const Tally__V1__SafetensorsFile *init = init_file(spec);
    struct safetensors *tensors = NULL;
    struct tally_error inner = {0};
    if (!init)
        return TALLY_OK;
    tally_status status = safetensors_open(init->path, &tensors, &inner);
    if (status == TALLY_OK)
        status = init_check(model, init->path, tensors, &inner);
    safetensors_close(tensors);
    if (status != TALLY_OK) {
        spec_error(file, err, &init->base, "path", -1, "%s", inner.message);
        if (err)
            err->code = status;
    }
    return status;
}
