/* torch.nn.MaxPool2d and AvgPool2d on samples of (channels, height, width). */
#include "common/limits.h"
#include "model/layer.h"

static const size_t zeros[2] = {0, 0}, ones[2] = {1, 1};

static void max_window(const Tally__V1__MaxPool2d *pool, struct kernel_window *window)
{
    window_pair(pool->n_kernel_size, pool->kernel_size, ones, window->kernel);
    window_pair(pool->n_stride, pool->stride, window->kernel, window->stride);
    window_pair(pool->n_padding, pool->padding, zeros, window->padding);
    window_pair(pool->n_dilation, pool->dilation, ones, window->dilation);
}

static void avg_window(const Tally__V1__AvgPool2d *pool, struct kernel_window *window)
{
    window_pair(pool->n_kernel_size, pool->kernel_size, ones, window->kernel);
    window_pair(pool->n_stride, pool->stride, window->kernel, window->stride);
    window_pair(pool->n_padding, pool->padding, zeros, window->padding);
    window_pair(0, NULL, ones, window->dilation);
}

/*
 * A window that begins in the padding and, for its dilation, steps over the whole input. PyTorch gives -infinity there,
 * and a gradient to nowhere. It takes a step larger than the input, so there are no more than a few windows.
 */
static bool sees_only_padding(size_t in, const struct kernel_window *w, size_t i, size_t outputs)
{
    size_t dilation = w->dilation[i], padding = w->padding[i];
    for (size_t o = 0; dilation > in && o < outputs && o * w->stride[i] < padding; o++) {
        size_t before = padding - o * w->stride[i], steps = (before + dilation - 1) / dilation;
        if (steps >= w->kernel[i] || steps * dilation - before >= in)
            return true;
    }
    return false;
}

static tally_status pool2d_shape(const struct layer_check *check, const struct shape *in, const struct kernel_window *w,
                                 bool pair, bool ceil_mode, struct shape *ret_out)
{
    size_t dim[3];
    tally_status status = layer_needs_image(check, in);
    if (status != TALLY_OK)
        return status;
    dim[0] = in->dim[0];
    for (size_t i = 0; i < 2; i++) {
        size_t size = in->dim[1 + i];
        if (2 * w->padding[i] > w->kernel[i])
            return layer_fail(check, "padding", -1, "%zu is more than half of kernel_size %zu", w->padding[i],
                              w->kernel[i]);
        dim[1 + i] = window_outputs(size, w->kernel[i], w->stride[i], w->padding[i], w->dilation[i], ceil_mode);
        if (dim[1 + i] == 0)
            return layer_fail(check, "kernel_size", pair ? (int)i : -1,
                              "a window of %zu (dilation %zu) does not fit the %s of %zu (padding %zu) that %s gives",
                              w->kernel[i], w->dilation[i], i ? "width" : "height", size, w->padding[i], check->input);
        if (sees_only_padding(size, w, i, dim[1 + i]))
            return layer_fail(check, "dilation", -1,
                              "a window of %zu with dilation %zu and padding %zu sees only padding over a %s of %zu",
                              w->kernel[i], w->dilation[i], w->padding[i], i ? "width" : "height", size);
    }
    if (!shape_set(ret_out, 3, dim))
        return layer_fail(check, NULL, -1, "an output of %zu x %zu x %zu is too large", dim[0], dim[1], dim[2]);
    return TALLY_OK;
}

static void pool2d_lower(const struct layer *layer, struct kernel_op_desc *desc)
{
    desc->rows = 1;
    desc->pool2d.channels = layer->in.dim[0];
    desc->pool2d.in_height = layer->in.dim[1];
    desc->pool2d.in_width = layer->in.dim[2];
    desc->pool2d.out_height = layer->out.dim[1];
    desc->pool2d.out_width = layer->out.dim[2];
}

static uint64_t pool2d_flops(const struct layer *layer, const struct kernel_window *w)
{
    return flops_mul(layer->out.elements, flops_mul(w->kernel[0], w->kernel[1]));
}

static tally_status max_shape(const struct layer_check *check, const struct shape *in, struct shape *ret_out)
{
    struct kernel_window w;
    const Tally__V1__MaxPool2d *pool = check->spec->max_pool2d;
    max_window(pool, &w);
    return pool2d_shape(check, in, &w, pool->n_kernel_size == 2, pool->ceil_mode, ret_out);
}

static uint64_t max_flops(const struct layer *layer)
{
    struct kernel_window w;
    max_window(layer->spec->max_pool2d, &w);
    return pool2d_flops(layer, &w);
}

static void max_lower(const struct layer *layer, struct kernel_op_desc *desc)
{
    desc->kind = KERNEL_MAX_POOL2D;
    pool2d_lower(layer, desc);
    max_window(layer->spec->max_pool2d, &desc->pool2d.window);
}

static tally_status max_complete(const struct layer *layer, Tally__V1__Layer *spec, struct tally_error *err)
{
    (void)layer;
    Tally__V1__MaxPool2d *pool = spec->max_pool2d;
    struct kernel_window w;
    max_window(pool, &w);
    tally_status status = window_complete(&pool->n_kernel_size, &pool->kernel_size, w.kernel, err);
    if (status == TALLY_OK)
        status = window_complete(&pool->n_stride, &pool->stride, w.stride, err);
    if (status == TALLY_OK)
        status = window_complete(&pool->n_padding, &pool->padding, w.padding, err);
    if (status == TALLY_OK)
        status = window_complete(&pool->n_dilation, &pool->dilation, w.dilation, err);
    return status;
}

const struct layer_type layer_max_pool2d = {
    .kind = "max_pool2d",
    .kind_case = TALLY__V1__LAYER__KIND_MAX_POOL2D,
    .inputs_min = 1,
    .inputs_max = 1,
    .shape = max_shape,
    .flops = max_flops,
    .lower = max_lower,
    .complete = max_complete,
};

static tally_status avg_shape(const struct layer_check *check, const struct shape *in, struct shape *ret_out)
{
    struct kernel_window w;
    const Tally__V1__AvgPool2d *pool = check->spec->avg_pool2d;
    avg_window(pool, &w);
    return pool2d_shape(check, in, &w, pool->n_kernel_size == 2, pool->ceil_mode, ret_out);
}

static uint64_t avg_flops(const struct layer *layer)
{
    struct kernel_window w;
    avg_window(layer->spec->avg_pool2d, &w);
    return pool2d_flops(layer, &w);
}

static void avg_lower(const struct layer *layer, struct kernel_op_desc *desc)
{
    const Tally__V1__AvgPool2d *pool = layer->spec->avg_pool2d;
    desc->kind = KERNEL_AVG_POOL2D;
    pool2d_lower(layer, desc);
    avg_window(pool, &desc->pool2d.window);
    desc->pool2d.count_include_pad = pool->count_include_pad;
    desc->pool2d.divisor_override = pool->has_divisor_override ? pool->divisor_override : 0;
}

static tally_status avg_complete(const struct layer *layer, Tally__V1__Layer *spec, struct tally_error *err)
{
    (void)layer;
    Tally__V1__AvgPool2d *pool = spec->avg_pool2d;
    struct kernel_window w;
    avg_window(pool, &w);
    tally_status status = window_complete(&pool->n_kernel_size, &pool->kernel_size, w.kernel, err);
    if (status == TALLY_OK)
        status = window_complete(&pool->n_stride, &pool->stride, w.stride, err);
    if (status == TALLY_OK)
        status = window_complete(&pool->n_padding, &pool->padding, w.padding, err);
    return status;
}

const struct layer_type layer_avg_pool2d = {
    .kind = "avg_pool2d",
    .kind_case = TALLY__V1__LAYER__KIND_AVG_POOL2D,
    .inputs_min = 1,
    .inputs_max = 1,
    .shape = avg_shape,
    .flops = avg_flops,
    .lower = avg_lower,
    .complete = avg_complete,
};
