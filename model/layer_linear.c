/* torch.nn.Linear: the last dimension of a sample; the dimensions before it are more rows of the same product. */
#include "common/limits.h"
#include "model/layer.h"

static size_t in_features(const struct shape *in)
{
    return in->dim[in->ndim - 1];
}

static tally_status linear_shape(const struct layer_check *check, const struct shape *in, struct shape *ret_out)
{
    const Tally__V1__Linear *linear = check->spec->linear;
    char text[96];
    size_t features = in_features(in);
    if (linear->has_in_features && linear->in_features != features) {
        shape_text(in, text, sizeof text);
        if (in->ndim == 1)
            return layer_fail(check, "in_features", -1, "%u given, but %s gives %s", linear->in_features, check->input,
                              text);
        if (linear->in_features == in->elements)
            return layer_fail(
                check, "in_features", -1,
                "%u given, but %s gives %s, whose last dimension is %zu: add a layer {flatten: {}} before this one",
                linear->in_features, check->input, text, features);
        return layer_fail(check, "in_features", -1,
                          "%u given, but %s gives %s, whose last dimension is %zu (%zu with a flatten layer between)",
                          linear->in_features, check->input, text, features, in->elements);
    }
    size_t dim[MODEL_NDIM_MAX];
    for (size_t i = 0; i < in->ndim; i++)
        dim[i] = in->dim[i];
    dim[in->ndim - 1] = linear->out_features;
    if (!shape_set(ret_out, in->ndim, dim))
        return layer_fail(check, "out_features", -1, "%u features for each of %zu rows are too many",
                          linear->out_features, in->elements / features);
    return TALLY_OK;
}

static tally_status linear_params(const struct layer_check *check, const struct shape *in,
                                  struct layer_params *ret_params)
{
    const Tally__V1__Linear *linear = check->spec->linear;
    size_t features = in_features(in);
    if (!shape_set(&ret_params->weight, 2, (size_t[]){linear->out_features, features}))
        return layer_fail(check, "out_features", -1, "a weight of %u x %zu is too large", linear->out_features,
                          features);
    ret_params->bias = linear->bias;
    ret_params->fan_in = features;
    return TALLY_OK;
}

static uint64_t linear_flops(const struct layer *layer)
{
    uint64_t products = flops_mul(layer->out.elements, in_features(&layer->in));
    return flops_add(flops_mul(products, 2), layer->spec->linear->bias ? layer->out.elements : 0);
}

static void linear_lower(const struct layer *layer, struct kernel_op_desc *desc)
{
    desc->kind = KERNEL_LINEAR;
    desc->rows = layer->in.elements / in_features(&layer->in);
    desc->bias = layer->spec->linear->bias;
    desc->linear.in = in_features(&layer->in);
    desc->linear.out = layer->spec->linear->out_features;
}

static bool linear_absorb(struct kernel_op_desc *desc, const struct layer *next)
{
    if (next->type != &layer_relu || desc->relu)
        return false;
    desc->relu = true;
    return true;
}

static tally_status linear_complete(const struct layer *layer, Tally__V1__Layer *spec, struct tally_error *err)
{
    (void)err;
    spec->linear->has_in_features = 1;
    spec->linear->in_features = (uint32_t)in_features(&layer->in);
    return TALLY_OK;
}

const struct layer_type layer_linear = {
    .kind = "linear",
    .kind_case = TALLY__V1__LAYER__KIND_LINEAR,
    .inputs_min = 1,
    .inputs_max = 1,
    .shape = linear_shape,
    .params = linear_params,
    .flops = linear_flops,
    .lower = linear_lower,
    .absorb = linear_absorb,
    .complete = linear_complete,
};
