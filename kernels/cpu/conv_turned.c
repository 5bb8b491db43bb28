/*
 * The gradient of a convolution's input as a convolution: dx is dy, with zeros around it, under the weights with their
 * two channel dimensions exchanged and the kernel turned by half a turn. One product an image, written (or added)
 * straight to dx; the other way (conv.c) makes columns and scatters them, which costs memory traffic but no work on the
 * border: so this way is taken where there is hardly a border.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/conv.h"

tally_status conv_turned_prepare(const struct kernel_op *op, struct conv_plan *plan, struct tally_error *err)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct kernel_window *w = &d->conv2d.window;
    struct conv_turned *t = &plan->turned;
    if (plan->winners.data || w->stride[0] != 1 || w->stride[1] != 1)
        return TALLY_OK;
    /* Patches of dy are gathered once for each of few input channels: not worth it. */
    if (plan->in < 16)
        return TALLY_OK;
    /* The work of one multiply-add for every input pixel instead of every output pixel: up to a quarter more pays. */
    if (4 * d->conv2d.in_height * d->conv2d.in_width > 5 * plan->pixels)
        return TALLY_OK;
    for (int axis = 0; axis < 2; axis++) {
        const size_t reach = (w->kernel[axis] - 1) * w->dilation[axis];
        if (w->padding[axis] > reach)
            return TALLY_OK;
        t->padding[axis] = reach - w->padding[axis];
    }
    t->height = d->conv2d.out_height + 2 * t->padding[0];
    t->width = d->conv2d.out_width + 2 * t->padding[1];
    size_t ignored;
    if (CPU_ELEMENTS("dy with its padding", &ignored, NULL, plan->out, t->height, t->width))
        return TALLY_OK;
    t->patch = plan->out * w->kernel[0] * w->kernel[1];
    t->offset = calloc(t->patch, sizeof *t->offset);
    if (!t->offset)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a convolution's tables");
    size_t *offset = t->offset;
    for (size_t o = 0; o < plan->out; o++)
        for (size_t i = 0; i < w->kernel[0]; i++)
            for (size_t j = 0; j < w->kernel[1]; j++)
                *offset++ = (o * t->height + i * w->dilation[0]) * t->width + j * w->dilation[1];
    t->used = true;
    return TALLY_OK;
}

struct turned_buffers {
    float *unpooled, *padded, *weights, *product;
};

static struct turned_buffers cut(const struct kernel_op *op, float *workspace, size_t *ret_floats)
{
    const struct conv_plan *plan = op->plan;
    const struct conv_turned *t = &plan->turned;
    const size_t unpooled = op->desc.conv2d.pool ? cpu_line(plan->out * plan->pixels) : 0;
    const size_t padded = cpu_line(plan->out * t->height * t->width), weights = cpu_line(plan->in * t->patch);
    struct turned_buffers b;
    b.unpooled = workspace;
    b.padded = b.unpooled + unpooled;
    b.weights = b.padded + padded;
    b.product = b.weights + weights;
    *ret_floats = unpooled + padded + weights +
                  op->level->gemm->workspace(op->desc.conv2d.in_height * op->desc.conv2d.in_width, t->patch);
    return b;
}

size_t conv_turned_workspace(const struct kernel_op *op)
{
    float nothing;
    size_t floats;
    (void)cut(op, &nothing, &floats);
    return floats;
}

/* (out, in, kernel) to (in, out, kernel turned round). */
static void turn_weights(const struct kernel_op *op, const float *from, float *to)
{
    const struct conv_plan *plan = op->plan;
    const size_t area = op->desc.conv2d.window.kernel[0] * op->desc.conv2d.window.kernel[1];
    for (size_t o = 0; o < plan->out; o++)
        for (size_t c = 0; c < plan->in; c++) {
            const float *w = from + (o * plan->in + c) * area;
            float *turned = to + (c * plan->out + o) * area;
            for (size_t i = 0; i < area; i++)
                turned[i] = w[area - 1 - i];
        }
}

void conv_turned_backward_data(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct conv_plan *plan = op->plan;
    const struct conv_turned *t = &plan->turned;
    const size_t in_pixels = d->conv2d.in_height * d->conv2d.in_width;
    const bool pad = t->padding[0] || t->padding[1];
    size_t ignored;
    const struct turned_buffers b = cut(op, args->workspace, &ignored);
    memset(b.padded, 0, plan->out * t->height * t->width * sizeof(float));
    for (size_t g = 0; g < d->conv2d.groups; g++) {
        turn_weights(op, args->weight + g * plan->out * plan->patch, b.weights);
        for (size_t r = 0; r < d->rows; r++) {
            const float *dy = conv_gradient(op, args, r, g * plan->out, (g + 1) * plan->out, b.unpooled);
            if (pad)
                conv_pad(plan->out, d->conv2d.out_height, d->conv2d.out_width, t->padding, dy, b.padded);
            const struct patches patches = {.image = pad ? b.padded : dy,
                                            .offset = t->offset,
                                            .image_width = t->width,
                                            .out_width = d->conv2d.in_width,
                                            .stride = {1, 1}};
            op->level->gemm->run(&(struct gemm_call){.m = plan->in,
                                                     .n = in_pixels,
                                                     .k = t->patch,
                                                     .a = b.weights,
                                                     .a_row = t->patch,
                                                     .a_k = 1,
                                                     .pack = op->level->patch->pack,
                                                     .pack_source = &patches,
                                                     .c = args->dx[0] + r * d->x_stride + g * plan->in * in_pixels,
                                                     .ldc = in_pixels,
                                                     .accumulate = args->dx_accumulate[0],
                                                     .workspace = b.product});
        }
    }
}
