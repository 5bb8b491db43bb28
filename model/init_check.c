#include "model/init_check.h"

#include <stdlib.h>
#include <string.h>

#include "common/spec_file.h"

static bool same_shape(const struct safetensor *tensor, const struct shape *shape)
{
    if (tensor->dims != shape->ndim)
        return false;
    for (size_t i = 0; i < shape->ndim; i++)
        if (tensor->shape[i] != shape->dim[i])
            return false;
    return true;
}

/* "(64, 3)" as safetensors_shape_text prints it. */
static void wanted_text(const struct shape *shape, char *text, size_t size)
{
    struct safetensor like = {.dims = (uint32_t)shape->ndim};
    for (size_t i = 0; i < shape->ndim; i++)
        like.shape[i] = shape->dim[i];
    safetensors_shape_text(&like, text, size);
}

static tally_status missing(const char *path, const struct safetensors *file, const char *name, const char *wanted,
                            struct tally_error *err)
{
    size_t n = safetensors_count(file);
    const char **names = calloc(n + 1, sizeof *names);
    if (!names)
        return tally_fail(err, TALLY_ENOMEM, "%s: out of memory for the names of %zu tensors", path, n);
    for (size_t i = 0; i < n; i++)
        names[i] = safetensors_at(file, i)->name;
    const char *near = spec_nearest(name, names, n);
    tally_fail(err, TALLY_EINVAL, "%s: has no tensor %s, expected one of shape %s%s%s%s", path, name, wanted,
               near ? " (there is " : "", near ? near : "", near ? ")" : "");
    free(names);
    return TALLY_EINVAL;
}

static tally_status check_param(const char *path, const struct safetensors *file, const struct param *param,
                                struct tally_error *err)
{
    const struct safetensor *tensor = safetensors_find(file, param->name);
    char found[96], wanted[96];
    wanted_text(&param->shape, wanted, sizeof(wanted));
    if (!tensor)
        return missing(path, file, param->name, wanted, err);
    safetensors_shape_text(tensor, found, sizeof(found));
    if (!same_shape(tensor, &param->shape))
        return tally_fail(err, TALLY_EINVAL, "%s: its tensor %s has the shape %s, expected %s", path, param->name,
                          found, wanted);
    if (tensor->dtype != SAFETENSORS_F32)
        return tally_fail(err, TALLY_EINVAL, "%s: its tensor %s is %s, expected F32", path, param->name,
                          safetensors_dtype_text(tensor->dtype));
    return TALLY_OK;
}

static bool has_param(const struct model *model, const char *name)
{
    for (size_t i = 0; i < model->param_count; i++)
        if (strcmp(model->params[i].name, name) == 0)
            return true;
    return false;
}

tally_status init_check(const struct model *model, const char *path, const struct safetensors *file,
                        struct tally_error *err)
{
    for (size_t i = 0; i < model->param_count; i++) {
        tally_status status = check_param(path, file, &model->params[i], err);
        if (status != TALLY_OK)
            return status;
    }
    /* Every parameter is there once, so only a larger file has others. */
    if (safetensors_count(file) == model->param_count)
        return TALLY_OK;
    for (size_t i = 0; i < safetensors_count(file); i++) {
        const char *name = safetensors_at(file, i)->name;
        if (!has_param(model, name))
            return tally_fail(err, TALLY_EINVAL, "%s: the model has no parameter for its tensor %s", path, name);
    }
    return tally_fail(err, TALLY_EINTERNAL, "%s: has %zu tensors for %zu parameters", path, safetensors_count(file),
                      model->param_count);
}
