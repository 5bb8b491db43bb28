#include "model/init.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "common/check.h"
#include "common/rng.h"
#include "common/safetensors.h"

/* The part of a parameter that lies in [begin, end) of the flat vector, seen from the parameter's first element. */
struct part {
    size_t first, count;
};

static struct part part_of(const struct param *param, size_t begin, size_t end)
{
    size_t param_end = param->offset + param->shape.elements;
    size_t from = begin > param->offset ? begin : param->offset;
    size_t to = end < param_end ? end : param_end;
    return (struct part){.first = from - param->offset, .count = from < to ? to - from : 0};
}

/* The bounds of torch.nn.init in its own steps, in double: the weight's, kaiming_uniform_(a=sqrt(5)), may differ from
 * the bias's 1/sqrt(fan_in) in the last bit. */
static double bound_of(const struct param *param)
{
    double fan_in = (double)param->fan_in;
    if (param->is_bias)
        return 1.0 / sqrt(fan_in);
    double slope = sqrt(5.0);
    double gain = sqrt(2.0 / (1.0 + slope * slope));
    double std = gain / sqrt(fan_in);
    return sqrt(3.0) * std;
}

static void draw(const struct model *model, size_t begin, size_t end, float *dst)
{
    struct rng r;
    rng_seed(&r, model->spec->seed);
    uint64_t pending = 0; /* draws that nobody here wanted */
    for (size_t i = 0; i < model->param_count && model->params[i].offset < end; i++) {
        const struct param *param = &model->params[i];
        struct part part = part_of(param, begin, end);
        if (part.count == 0) {
            pending += param->shape.elements;
            continue;
        }
        rng_skip(&r, pending + part.first);
        double bound = bound_of(param);
        rng_uniform_fill(&r, dst + (param->offset + part.first - begin), part.count, -bound, bound);
        pending = param->shape.elements - part.first - part.count;
    }
}

/* ---- from a file ---- */

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

static tally_status check_param(const char *path, const struct safetensors *file, const struct param *param,
                                struct tally_error *err)
{
    const struct safetensor *tensor = safetensors_find(file, param->name);
    char found[96], wanted[96];
    wanted_text(&param->shape, wanted, sizeof(wanted));
    if (!tensor)
        return tally_fail(err, TALLY_EINVAL, "%s: has no tensor %s, expected one of shape %s", path, param->name,
                          wanted);
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

static tally_status check_file(const struct model *model, const char *path, const struct safetensors *file,
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

static tally_status copy_file(const struct model *model, const char *path, size_t begin, size_t end, float *dst,
                              struct tally_error *err)
{
    struct safetensors *file = NULL;
    tally_status status = safetensors_open(path, &file, err);
    if (status == TALLY_OK)
        status = check_file(model, path, file, err);
    for (size_t i = 0; status == TALLY_OK && i < model->param_count; i++) {
        const struct param *param = &model->params[i];
        struct part part = part_of(param, begin, end);
        if (part.count > 0)
            memcpy(dst + (param->offset + part.first - begin),
                   safetensors_find(file, param->name)->data + part.first * sizeof(float), part.count * sizeof(float));
    }
    safetensors_close(file);
    return status;
}

tally_status init_weights(const struct model *model, size_t begin, size_t end, float *dst, struct tally_error *err)
{
    tally_check(begin <= end && end <= model->flat_count);
    const Tally__V1__Init *init = model->spec->model ? model->spec->model->init : NULL;
    memset(dst, 0, (end - begin) * sizeof(float));
    if (init && init->kind_case == TALLY__V1__INIT__KIND_SAFETENSORS)
        return copy_file(model, init->safetensors->path, begin, end, dst, err);
    draw(model, begin, end, dst);
    return TALLY_OK;
}
