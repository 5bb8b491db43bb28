/*
 * torch.nn.Conv2d with an optional ReLU and an optional max pool behind it, an image (and a group of channels) at a
 * time, so that what one image makes stays in the second-level cache.
 *
 * - forward: the product of the weights and the image's patches, which are gathered into the product's panels. Bias,
 *   ReLU and pool pass over the result while it is in the cache; with a pool the convolution's own output is nowhere
 *   else, only the winners' places are saved.
 * - data: the product of the weights' transpose and dy, whose columns are added to the image at their patches.
 * - weight: the product of the patches and dy's transpose, the patches read in place through tables of offsets.
 */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/conv.h"

/* Floats of columns that are made before they are scattered. */
#define COLUMNS_FLOATS ((size_t)1 << 16)

static size_t max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static tally_status check(const struct kernel_op *op, struct tally_error *err)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct kernel_window *w = &d->conv2d.window;
    const size_t in[2] = {d->conv2d.in_height, d->conv2d.in_width},
                 out[2] = {d->conv2d.out_height, d->conv2d.out_width};
    const size_t groups = d->conv2d.groups;
    if (groups == 0 || d->conv2d.in_channels % groups || d->conv2d.out_channels % groups)
        return tally_fail(err, TALLY_EINVAL, "conv2d: %zu groups must divide %zu input and %zu output channels", groups,
                          d->conv2d.in_channels, d->conv2d.out_channels);
    size_t in_elements, conv_elements, y_elements, ignored;
    tally_status status = CPU_ELEMENTS("conv2d's input", &in_elements, err, d->conv2d.in_channels, in[0], in[1]);
    if (!status)
        status = CPU_ELEMENTS("conv2d's output", &conv_elements, err, d->conv2d.out_channels, out[0], out[1]);
    if (!status)
        status = CPU_ELEMENTS("conv2d's weight", &ignored, err, d->conv2d.out_channels, d->conv2d.in_channels / groups,
                              w->kernel[0], w->kernel[1]);
    if (!status)
        status = cpu_check_window("conv2d", w, in, out, false, err);
    if (!status)
        status = CPU_ELEMENTS("conv2d's padded input", &ignored, err, d->conv2d.in_channels, in[0] + 2 * w->padding[0],
                              in[1] + 2 * w->padding[1]);
    y_elements = conv_elements;
    if (!status && d->conv2d.pool) {
        const size_t pooled[2] = {d->conv2d.pool_height, d->conv2d.pool_width};
        const struct kernel_window *p = &d->conv2d.pool_window;
        if (p->padding[0] || p->padding[1] || p->dilation[0] != 1 || p->dilation[1] != 1)
            return tally_fail(err, TALLY_EUNSUPPORTED, "conv2d: a fused pool has no padding and no dilation");
        status = cpu_check_window("conv2d's pool", p, out, pooled, false, err);
        if (!status)
            status =
                CPU_ELEMENTS("conv2d's pooled output", &y_elements, err, d->conv2d.out_channels, pooled[0], pooled[1]);
        if (!status && out[0] * out[1] > UINT32_MAX)
            return tally_fail(err, TALLY_EUNSUPPORTED, "conv2d: a pool over a plane of more than 2^32 elements");
    }
    return status ? status : cpu_check_strides(d, in_elements, y_elements, err);
}

static void conv_destroy(void *memory)
{
    struct conv_plan *plan = memory;
    if (!plan)
        return;
    conv_winners_destroy(plan);
    free(plan->turned.offset);
    free(plan->offset);
    free(plan->pixel_offset);
    free(plan);
}

static tally_status make_plan(struct kernel_op *op, struct tally_error *err)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct kernel_window *w = &d->conv2d.window;
    struct conv_plan *plan = calloc(1, sizeof *plan);
    op->plan = plan;
    if (!plan)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a convolution");
    plan->in = d->conv2d.in_channels / d->conv2d.groups;
    plan->out = d->conv2d.out_channels / d->conv2d.groups;
    plan->patch = plan->in * w->kernel[0] * w->kernel[1];
    plan->pixels = d->conv2d.out_height * d->conv2d.out_width;
    plan->padded = w->padding[0] || w->padding[1];
    plan->height = d->conv2d.in_height + 2 * w->padding[0];
    plan->width = d->conv2d.in_width + 2 * w->padding[1];
    plan->image = plan->in * plan->height * plan->width;
    plan->y_plane = d->conv2d.pool ? d->conv2d.pool_height * d->conv2d.pool_width : plan->pixels;
    plan->pool = (struct pool_plane){.in_height = d->conv2d.out_height,
                                     .in_width = d->conv2d.out_width,
                                     .out_height = d->conv2d.pool_height,
                                     .out_width = d->conv2d.pool_width,
                                     .window = d->conv2d.pool_window};
    plan->offset = calloc(plan->patch, sizeof *plan->offset);
    plan->pixel_offset = calloc(plan->pixels, sizeof *plan->pixel_offset);
    if (!plan->offset || !plan->pixel_offset)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a convolution's tables");
    size_t *offset = plan->offset;
    for (size_t c = 0; c < plan->in; c++)
        for (size_t i = 0; i < w->kernel[0]; i++)
            for (size_t j = 0; j < w->kernel[1]; j++)
                *offset++ = (c * plan->height + i * w->dilation[0]) * plan->width + j * w->dilation[1];
    for (size_t p = 0; p < plan->pixels; p++)
        plan->pixel_offset[p] =
            p / d->conv2d.out_width * w->stride[0] * plan->width + p % d->conv2d.out_width * w->stride[1];
    return TALLY_OK;
}

static void size_workspace(struct kernel_op *op)
{
    struct conv_plan *plan = op->plan;
    const struct gemm_level *gemm = op->level->gemm;
    const size_t conv = cpu_line(plan->out * plan->pixels), image = plan->padded ? cpu_line(plan->image) : 0;
    plan->column_rows = min_size(max_size(COLUMNS_FLOATS / plan->pixels / 6 * 6, 6), plan->patch);
    const size_t forward = image + (op->desc.conv2d.pool ? conv : 0) + gemm->workspace(plan->pixels, plan->patch);
    const size_t unpooled = op->desc.conv2d.pool ? conv : 0;
    const size_t data =
        unpooled + image + cpu_line(plan->column_rows * plan->pixels) + gemm->workspace(plan->pixels, plan->out);
    const size_t weight =
        unpooled + image + cpu_line(plan->patch * plan->out) + gemm->workspace(plan->out, plan->pixels);
    const size_t winners = plan->winners.level ? conv_winners_workspace(op) : 0;
    const size_t other = max_size(winners, plan->turned.used ? conv_turned_workspace(op) : 0);
    op->workspace_bytes = max_size(max_size(forward, other), max_size(data, weight)) * sizeof(float);
    if (op->desc.conv2d.pool)
        op->saved_bytes = op->desc.rows * op->desc.conv2d.out_channels * plan->y_plane * sizeof(uint32_t);
}

static tally_status conv_prepare(struct kernel_op *op, struct tally_error *err)
{
    const struct kernel_op_desc *d = &op->desc;
    tally_status status = check(op, err);
    if (!status)
        status = make_plan(op, err);
    if (!status)
        status = conv_winners_prepare(op, op->plan, err);
    if (!status)
        status = conv_turned_prepare(op, op->plan, err);
    if (status)
        return status;
    size_workspace(op);
    const struct conv_plan *plan = op->plan;
    (void)snprintf(op->formulation, sizeof op->formulation, "patches in a product%s%s%s%s%s", d->bias ? " + bias" : "",
                   d->relu ? " + relu" : "", d->conv2d.pool ? " + max pool" : "",
                   plan->winners.level ? ", weight gradient of winners" : "",
                   plan->winners.data  ? ", input gradient of winners"
                   : plan->turned.used ? ", turned for the input gradient"
                                       : "");
    return TALLY_OK;
}

void conv_pad(size_t channels, size_t height, size_t width, const size_t padding[2], const float *from, float *to)
{
    const size_t padded_height = height + 2 * padding[0], padded_width = width + 2 * padding[1];
    to += padding[0] * padded_width + padding[1];
    for (size_t c = 0; c < channels; c++, to += (padded_height - height) * padded_width)
        for (size_t i = 0; i < height; i++, from += width, to += padded_width)
            memcpy(to, from, width * sizeof(float));
}

/* The channels of group g of image r with zeros around them, in place or copied to buffer (whose border is zero
 * already). */
static const float *padded_image(const struct kernel_op *op, const float *x, size_t r, size_t g, float *buffer)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct conv_plan *plan = op->plan;
    const size_t height = d->conv2d.in_height, width = d->conv2d.in_width;
    const float *from = x + r * d->x_stride + g * plan->in * height * width;
    if (!plan->padded)
        return from;
    conv_pad(plan->in, height, width, d->conv2d.window.padding, from, buffer);
    return buffer;
}

static struct patches patches_of(const struct kernel_op *op, const float *image)
{
    const struct conv_plan *plan = op->plan;
    return (struct patches){.image = image,
                            .offset = plan->offset,
                            .image_width = plan->width,
                            .out_width = op->desc.conv2d.out_width,
                            .stride = {op->desc.conv2d.window.stride[0], op->desc.conv2d.window.stride[1]}};
}

/* Bias, ReLU and pool over one group of one image. */
static void finish(const struct kernel_op *op, const struct kernel_args *args, size_t r, size_t g, float *conv)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct conv_plan *plan = op->plan;
    for (size_t o = 0; o < plan->out; o++) {
        const size_t channel = g * plan->out + o;
        const float bias = d->bias ? args->bias[channel] : -0.0f; /* x + -0 is x, for every x */
        if (!d->conv2d.pool) {
            if (d->bias || d->relu)
                op->level->pointwise->bias_relu(plan->pixels, bias, d->relu, conv + o * plan->pixels);
            continue;
        }
        uint32_t *winner = args->saved;
        if (winner)
            winner += (r * d->conv2d.out_channels + channel) * plan->y_plane;
        op->level->pool->max_forward(&plan->pool, conv + o * plan->pixels, bias, d->relu,
                                     args->y + r * d->y_stride + channel * plan->y_plane, winner);
    }
}

static void conv_forward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct conv_plan *plan = op->plan;
    float *padded = args->workspace;
    float *conv = padded + (plan->padded ? cpu_line(plan->image) : 0);
    float *workspace = conv + (d->conv2d.pool ? cpu_line(plan->out * plan->pixels) : 0);
    if (plan->padded)
        memset(padded, 0, plan->image * sizeof(float));
    for (size_t r = 0; r < d->rows; r++)
        for (size_t g = 0; g < d->conv2d.groups; g++) {
            const struct patches patches = patches_of(op, padded_image(op, args->x[0], r, g, padded));
            float *c = d->conv2d.pool ? conv : args->y + r * d->y_stride + g * plan->out * plan->pixels;
            op->level->gemm->run(&(struct gemm_call){.m = plan->out,
                                                     .n = plan->pixels,
                                                     .k = plan->patch,
                                                     .a = args->weight + g * plan->out * plan->patch,
                                                     .a_row = plan->patch,
                                                     .a_k = 1,
                                                     .pack = op->level->patch->pack,
                                                     .pack_source = &patches,
                                                     .c = c,
                                                     .ldc = plan->pixels,
                                                     .workspace = workspace});
            finish(op, args, r, g, c);
        }
}

const float *conv_masked_dy(const struct kernel_op *op, const struct kernel_args *args, size_t r, size_t begin,
                            size_t end)
{
    const struct conv_plan *plan = op->plan;
    const size_t at = r * op->desc.y_stride + begin * plan->y_plane;
    if (op->desc.relu) /* again and again gives the same, so nobody need know who came first */
        op->level->pointwise->relu_mask((end - begin) * plan->y_plane, args->y + at, args->dy + at);
    return args->dy + at;
}

const float *conv_gradient(const struct kernel_op *op, const struct kernel_args *args, size_t r, size_t begin,
                           size_t end, float *buffer)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct conv_plan *plan = op->plan;
    const float *dy = conv_masked_dy(op, args, r, begin, end);
    if (!d->conv2d.pool)
        return dy;
    const uint32_t *winner = (const uint32_t *)args->saved + (r * d->conv2d.out_channels + begin) * plan->y_plane;
    memset(buffer, 0, (end - begin) * plan->pixels * sizeof(float));
    for (size_t o = 0; o < end - begin; o++)
        op->level->pool->max_backward(&plan->pool, dy + o * plan->y_plane, winner + o * plan->y_plane,
                                      buffer + o * plan->pixels);
    return buffer;
}

/* dx = or += the inner part of a padded image. */
static void crop(const struct kernel_op *op, const struct kernel_args *args, size_t r, size_t g, const float *padded)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct conv_plan *plan = op->plan;
    const size_t height = d->conv2d.in_height, width = d->conv2d.in_width;
    const float *from = padded + d->conv2d.window.padding[0] * plan->width + d->conv2d.window.padding[1];
    float *to = args->dx[0] + r * d->x_stride + g * plan->in * height * width;
    for (size_t c = 0; c < plan->in; c++)
        for (size_t i = 0; i < height; i++) {
            float *row = to + (c * height + i) * width;
            const float *inner = from + (c * plan->height + i) * plan->width;
            if (args->dx_accumulate[0])
                op->level->pointwise->sum(width, row, row, inner);
            else
                memcpy(row, inner, width * sizeof(float));
        }
}

static void conv_backward_data(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct conv_plan *plan = op->plan;
    if (!args->dx[0])
        return;
    if (plan->winners.data) {
        conv_winners_backward_data(op, args);
        return;
    }
    if (plan->turned.used) {
        conv_turned_backward_data(op, args);
        return;
    }
    float *unpooled = args->workspace;
    float *padded = unpooled + (d->conv2d.pool ? cpu_line(plan->out * plan->pixels) : 0);
    float *columns = padded + (plan->padded ? cpu_line(plan->image) : 0);
    float *workspace = columns + cpu_line(plan->column_rows * plan->pixels);
    for (size_t r = 0; r < d->rows; r++)
        for (size_t g = 0; g < d->conv2d.groups; g++) {
            const float *dy = conv_gradient(op, args, r, g * plan->out, (g + 1) * plan->out, unpooled);
            const struct gemm_matrix b = {dy, plan->pixels};
            float *image = plan->padded ? padded : args->dx[0] + r * d->x_stride + g * plan->image;
            if (plan->padded || !args->dx_accumulate[0])
                memset(image, 0, plan->image * sizeof(float));
            const struct patches patches = patches_of(op, NULL);
            for (size_t k = 0; k < plan->patch; k += plan->column_rows) {
                const size_t rows = min_size(plan->column_rows, plan->patch - k);
                op->level->gemm->run(&(struct gemm_call){.m = rows,
                                                         .n = plan->pixels,
                                                         .k = plan->out,
                                                         .a = args->weight + g * plan->out * plan->patch + k,
                                                         .a_row = 1,
                                                         .a_k = plan->patch,
                                                         .pack = op->level->gemm->pack_rows,
                                                         .pack_source = &b,
                                                         .c = columns,
                                                         .ldc = plan->pixels,
                                                         .workspace = workspace});
                op->level->patch->scatter(&patches, k, rows, plan->pixels, columns, image);
            }
            if (plan->padded)
                crop(op, args, r, g, padded);
        }
}

/* Channels [begin, end), all of one group. */
static void weight_part(const struct kernel_op *op, const struct kernel_args *args, size_t begin, size_t end)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct conv_plan *plan = op->plan;
    const size_t n = end - begin, group = begin / plan->out;
    float *unpooled = args->workspace;
    float *padded = unpooled + (d->conv2d.pool ? cpu_line(plan->out * plan->pixels) : 0);
    float *sums = padded + (plan->padded ? cpu_line(plan->image) : 0);
    float *workspace = sums + cpu_line(plan->patch * plan->out);
    if (plan->padded)
        memset(padded, 0, plan->image * sizeof(float));
    if (d->bias)
        memset(args->dbias + begin, 0, n * sizeof(float));
    for (size_t r = 0; r < d->rows; r++) {
        const float *dy = conv_gradient(op, args, r, begin, end, unpooled);
        const struct gemm_matrix b = {dy, plan->pixels};
        op->level->gemm->run(&(struct gemm_call){.m = plan->patch,
                                                 .n = n,
                                                 .k = plan->pixels,
                                                 .a = padded_image(op, args->x[0], r, group, padded),
                                                 .a_row_offset = plan->offset,
                                                 .a_k_offset = plan->pixel_offset,
                                                 .pack = op->level->gemm->pack_columns,
                                                 .pack_source = &b,
                                                 .c = sums,
                                                 .ldc = n,
                                                 .accumulate = r > 0,
                                                 .workspace = workspace});
        if (d->bias)
            for (size_t o = 0; o < n; o++)
                args->dbias[begin + o] += op->level->pointwise->total(plan->pixels, dy + o * plan->pixels);
    }
    op->level->gemm->transpose_bias(plan->patch, n, sums, n, NULL, false, args->dweight + begin * plan->patch,
                                    plan->patch);
}

static void conv_backward_weight(const struct kernel_op *op, const struct kernel_args *args, size_t row_begin,
                                 size_t row_end)
{
    const struct conv_plan *plan = op->plan;
    while (row_begin < row_end) {
        const size_t group_end = min_size((row_begin / plan->out + 1) * plan->out, row_end);
        if (plan->winners.level)
            conv_winners_backward_weight(op, args, row_begin, group_end);
        else
            weight_part(op, args, row_begin, group_end);
        row_begin = group_end;
    }
}

const struct cpu_op_functions cpu_conv2d = {
    .prepare = conv_prepare,
    .forward = conv_forward,
    .backward_data = conv_backward_data,
    .backward_weight = conv_backward_weight,
    .destroy = conv_destroy,
};
