#include "model/init_check.h"

#include <stdlib.h>
#include <string.h>

#include "common/spec_file.h"

static tally_status check_tensor(const struct param *param, const struct safetensor *tensor, struct tally_error *err)
{
    char wanted[96], found[160];
    bool same = tensor->dims == param->shape.ndim;
    for (size_t i = 0; same && i < param->shape.ndim; i++)
        same = tensor->shape[i] == param->shape.dim[i];
    if (!same) {
        safetensors_shape_text(tensor, found, sizeof found);
        return tally_fail(err, TALLY_EINVAL, "tensor %s has shape %s, the model's parameter is %s", param->name, found,
                          shape_text(&param->shape, wanted, sizeof wanted));
    }
    if (tensor->dtype != SAFETENSORS_F32)
        return tally_fail(err, TALLY_EINVAL, "tensor %s is %s, expected F32", param->name,
                          safetensors_dtype_text(tensor->dtype));
    return TALLY_OK;
}

static tally_status missing(const struct model *model, const struct safetensors *file, const struct param *param,
                            struct tally_error *err)
{
    size_t n = safetensors_count(file);
    const char **names = calloc(n + 1, sizeof *names);
    if (!names)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for the names of %zu tensors", n);
    for (size_t i = 0; i < n; i++)
        names[i] = safetensors_at(file, i)->name;
    const char *near = spec_nearest(param->name, names, n);
    tally_status status = near ? tally_fail(err, TALLY_EINVAL, "no tensor %s for layer '%s' (there is %s)", param->name,
                                            model->layers[param->layer].name, near)
                               : tally_fail(err, TALLY_EINVAL, "no tensor %s for layer '%s'", param->name,
                                            model->layers[param->layer].name);
    free(names);
    return status;
}

static bool is_param(const struct model *model, const char *name)
{
    for (size_t i = 0; i < model->param_count; i++)
        if (strcmp(model->params[i].name, name) == 0)
            return true;
    return false;
}

tally_status init_check(const struct model *model, const struct safetensors *file, struct tally_error *err)
{
    for (size_t i = 0; i < model->param_count; i++) {
        const struct safetensor *tensor = safetensors_find(file, model->params[i].name);
        tally_status status =
            tensor ? check_tensor(&model->params[i], tensor, err) : missing(model, file, &model->params[i], err);
        if (status != TALLY_OK)
            return status;
    }
    for (size_t i = 0; safetensors_count(file) != model->param_count && i < safetensors_count(file); i++)
        if (!is_param(model, safetensors_at(file, i)->name))
            return tally_fail(err, TALLY_EINVAL, "tensor %s is no parameter of the model",
                              safetensors_at(file, i)->name);
    return TALLY_OK;
}
