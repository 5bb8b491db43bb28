#include "model/init.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "common/check.h"
#include "common/rng.h"
#include "common/safetensors.h"
#include "model/init_check.h"

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

static tally_status copy_file(const struct model *model, const char *path, size_t begin, size_t end, float *dst,
                              struct tally_error *err)
{
    struct safetensors *file = NULL;
    tally_status status = safetensors_open(path, &file, err);
    if (status == TALLY_OK)
        status = init_check(model, path, file, err);
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
