/* torch.nn.Conv2d on samples of (channels, height, width). */
#include "common/limits.h"
#include "model/layer.h"

static const size_t zeros[2] = {0, 0}, ones[2] = {1, 1};

static void conv2d_window(const Tally__V1__Conv2d *conv, struct kernel_window *window)
{
    window_pair(conv->n_kernel_size, conv->kernel_size, ones, window->kernel);
    window_pair(conv->n_stride, conv->stride, ones, window->stride);
    window_pair(conv->n_padding, conv->padding, zeros, window->padding);
    window_pair(conv->n_dilation, conv->dilation, ones, window->dilation);
}

static tally_status check_channels(const struct layer_check *check, const struct shape *in)
{
    const Tally__V1__Conv2d *conv = check->spec->conv2d;
    char text[96];
    shape_text(in, text, sizeof text);
    if (conv->has_in_channels && conv->in_channels != in->dim[0])
        return layer_fail(check, "in_channels", -1, "%u given, but %s gives %s: %zu channels", conv->in_channels,
                          check->input, text, in->dim[0]);
    if (in->dim[0] % conv->groups != 0)
        return layer_fail(check, "groups", -1, "%u does not divide the %zu input channels", conv->groups, in->dim[0]);
    if (conv->out_channels % conv->groups != 0)
        return layer_fail(check, "groups", -1, "%u does not divide out_channels %u", conv->groups, conv->out_channels);
    return TALLY_OK;
}

static tally_status conv2d_shape(const struct layer_check *check, const struct shape *in, struct shape *ret_out)
{
    const Tally__V1__Conv2d *conv = check->spec->conv2d;
    struct kernel_window w;
    tally_status status = layer_needs_image(check, in);
    if (status == TALLY_OK)
        status = check_channels(check, in);
    if (status != TALLY_OK)
        return status;
    conv2d_window(conv, &w);
    size_t dim[3] = {conv->out_channels};
    for (size_t i = 0; i < 2; i++) {
        dim[1 + i] = window_outputs(in->dim[1 + i], w.kernel[i], w.stride[i], w.padding[i], w.dilation[i], false);
        if (dim[1 + i] == 0)
            return layer_fail(check, "kernel_size", conv->n_kernel_size == 2 ? (int)i : -1,
                              "a window of %zu (dilation %zu) does not fit the %s of %zu (padding %zu) that %s gives",
                              w.kernel[i], w.dilation[i], i ? "width" : "height", in->dim[1 + i], w.padding[i],
                              check->input);
    }
    if (!shape_set(ret_out, 3, dim))
        return layer_fail(check, "out_channels", -1, "an output of %zu x %zu x %zu is too large", dim[0], dim[1],
                          dim[2]);
    return TALLY_OK;
}

static tally_status conv2d_params(const struct layer_check *check, const struct shape *in,
                                  struct layer_params *ret_params)
{
    const Tally__V1__Conv2d *conv = check->spec->conv2d;
    struct kernel_window w;
    conv2d_window(conv, &w);
    size_t dim[4] = {conv->out_channels, in->dim[0] / conv->groups, w.kernel[0], w.kernel[1]};
    if (!shape_set(&ret_params->weight, 4, dim))
        return layer_fail(check, "out_channels", -1, "a weight of %zu x %zu x %zu x %zu is too large", dim[0], dim[1],
                          dim[2], dim[3]);
    ret_params->bias = conv->bias;
    ret_params->fan_in = dim[1] * dim[2] * dim[3];
    return TALLY_OK;
}

static uint64_t conv2d_flops(const struct layer *layer)
{
    const Tally__V1__Conv2d *conv = layer->spec->conv2d;
    struct kernel_window w;
    conv2d_window(conv, &w);
    uint64_t window = layer->in.dim[0] / conv->groups * w.kernel[0] * w.kernel[1];
    return flops_add(flops_mul(flops_mul(layer->out.elements, window), 2), conv->bias ? layer->out.elements : 0);
}

static void conv2d_lower(const struct layer *layer, struct kernel_op_desc *desc)
{
    const Tally__V1__Conv2d *conv = layer->spec->conv2d;
    desc->kind = KERNEL_CONV2D;
    desc->rows = 1;
    desc->bias = conv->bias;
    desc->conv2d.in_channels = layer->in.dim[0];
    desc->conv2d.in_height = layer->in.dim[1];
    desc->conv2d.in_width = layer->in.dim[2];
    desc->conv2d.out_channels = layer->out.dim[0];
    desc->conv2d.out_height = layer->out.dim[1];
    desc->conv2d.out_width = layer->out.dim[2];
    desc->conv2d.groups = conv->groups;
    conv2d_window(conv, &desc->conv2d.window);
}

/* A pool that the fused operation can do: no padding, no dilation, no partial window at the edge. */
static bool absorb_pool(struct kernel_op_desc *desc, const struct layer *next)
{
    struct kernel_op_desc pool = {0};
    next->type->lower(next, &pool);
    const struct kernel_window *w = &pool.pool2d.window;
    size_t in[2] = {pool.pool2d.in_height, pool.pool2d.in_width},
           out[2] = {pool.pool2d.out_height, pool.pool2d.out_width};
    for (size_t i = 0; i < 2; i++)
        if (w->padding[i] != 0 || w->dilation[i] != 1 ||
            out[i] != window_outputs(in[i], w->kernel[i], w->stride[i], 0, 1, false))
            return false;
    desc->conv2d.pool = true;
    desc->conv2d.pool_window = *w;
    desc->conv2d.pool_height = out[0];
    desc->conv2d.pool_width = out[1];
    return true;
}

/*
 * A relu before the pool, or behind it: the largest of max(x, 0) is max(the largest x, 0), and so is the gradient (the
 * winner of a window whose largest value is positive is the same either way, and all others get 0).
 */
static bool conv2d_absorb(struct kernel_op_desc *desc, const struct layer *next)
{
    if (next->type == &layer_relu && !desc->relu) {
        desc->relu = true;
        return true;
    }
    if (next->type == &layer_max_pool2d && !desc->conv2d.pool)
        return absorb_pool(desc, next);
    return false;
}

static tally_status conv2d_complete(const struct layer *layer, Tally__V1__Layer *spec, struct tally_error *err)
{
    Tally__V1__Conv2d *conv = spec->conv2d;
    struct kernel_window w;
    conv2d_window(conv, &w);
    conv->has_in_channels = 1;
    conv->in_channels = (uint32_t)layer->in.dim[0];
    tally_status status = window_complete(&conv->n_kernel_size, &conv->kernel_size, w.kernel, err);
    if (status == TALLY_OK)
        status = window_complete(&conv->n_stride, &conv->stride, w.stride, err);
    if (status == TALLY_OK)
        status = window_complete(&conv->n_padding, &conv->padding, w.padding, err);
    if (status == TALLY_OK)
        status = window_complete(&conv->n_dilation, &conv->dilation, w.dilation, err);
    return status;
}

const struct layer_type layer_conv2d = {
    .kind = "conv2d",
    .kind_case = TALLY__V1__LAYER__KIND_CONV2D,
    .inputs_min = 1,
    .inputs_max = 1,
    .shape = conv2d_shape,
    .params = conv2d_params,
    .flops = conv2d_flops,
    .lower = conv2d_lower,
    .absorb = conv2d_absorb,
    .complete = conv2d_complete,
};
