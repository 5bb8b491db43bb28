/* Pools without parameters: every channel of every sample is one plane. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cpu/op.h"
#include "kernels/cpu/window.h"

static struct pool_plane plane_of(const struct kernel_op_desc *d)
{
    return (struct pool_plane){.in_height = d->pool2d.in_height,
                               .in_width = d->pool2d.in_width,
                               .out_height = d->pool2d.out_height,
                               .out_width = d->pool2d.out_width,
                               .window = d->pool2d.window,
                               .count_include_pad = d->pool2d.count_include_pad,
                               .divisor_override = d->pool2d.divisor_override};
}

static tally_status check(const struct kernel_op *op, size_t *ret_out_elements, struct tally_error *err)
{
    const struct kernel_op_desc *d = &op->desc;
    const size_t in[2] = {d->pool2d.in_height, d->pool2d.in_width},
                 out[2] = {d->pool2d.out_height, d->pool2d.out_width};
    size_t in_elements, out_elements;
    tally_status status = CPU_ELEMENTS("the pool's input", &in_elements, err, d->pool2d.channels, in[0], in[1]);
    if (!status)
        status = CPU_ELEMENTS("the pool's output", &out_elements, err, d->pool2d.channels, out[0], out[1]);
    if (!status)
        status = cpu_check_window("the pool", &d->pool2d.window, in, out, true, err);
    if (!status)
        status = cpu_check_strides(d, in_elements, out_elements, err);
    if (status)
        return status;
    if (in[0] * in[1] > UINT32_MAX)
        return tally_fail(err, TALLY_EUNSUPPORTED, "a pool over a plane of more than 2^32 elements");
    for (int axis = 0; axis < 2; axis++)
        for (size_t i = 0; i < out[axis]; i++) {
            const struct window_span span = window_span_of(&d->pool2d.window, axis, i, in[axis]);
            if (span.first >= span.end)
                return tally_fail(err, TALLY_EINVAL, "the pool: window %zu (%s) lies in the padding alone", i,
                                  axis ? "width" : "height");
        }
    *ret_out_elements = out_elements;
    return TALLY_OK;
}

static tally_status max_prepare(struct kernel_op *op, struct tally_error *err)
{
    size_t out_elements;
    const tally_status status = check(op, &out_elements, err);
    if (status)
        return status;
    op->saved_bytes = op->desc.rows * out_elements * sizeof(uint32_t);
    (void)snprintf(op->formulation, sizeof op->formulation, "loops");
    return TALLY_OK;
}

static tally_status average_prepare(struct kernel_op *op, struct tally_error *err)
{
    size_t out_elements;
    const tally_status status = check(op, &out_elements, err);
    if (status)
        return status;
    if (op->desc.pool2d.window.dilation[0] != 1 || op->desc.pool2d.window.dilation[1] != 1)
        return tally_fail(err, TALLY_EINVAL, "an average pool has no dilation");
    (void)snprintf(op->formulation, sizeof op->formulation, "loops");
    return TALLY_OK;
}

static void max_forward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct pool_plane plane = plane_of(d);
    const size_t in = plane.in_height * plane.in_width, out = plane.out_height * plane.out_width;
    uint32_t *winner = args->saved;
    for (size_t r = 0; r < d->rows; r++)
        for (size_t c = 0; c < d->pool2d.channels; c++) {
            op->level->pool->max_forward(&plane, args->x[0] + r * d->x_stride + c * in, -0.0f, false,
                                         args->y + r * d->y_stride + c * out, winner);
            if (winner)
                winner += out;
        }
}

static void max_backward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct pool_plane plane = plane_of(d);
    const size_t in = plane.in_height * plane.in_width, out = plane.out_height * plane.out_width;
    const uint32_t *winner = args->saved;
    if (!args->dx[0])
        return;
    for (size_t r = 0; r < d->rows; r++)
        for (size_t c = 0; c < d->pool2d.channels; c++, winner += out) {
            float *dx = args->dx[0] + r * d->x_stride + c * in;
            if (!args->dx_accumulate[0])
                memset(dx, 0, in * sizeof(float));
            op->level->pool->max_backward(&plane, args->dy + r * d->y_stride + c * out, winner, dx);
        }
}

static void average_forward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct pool_plane plane = plane_of(d);
    const size_t in = plane.in_height * plane.in_width, out = plane.out_height * plane.out_width;
    for (size_t r = 0; r < d->rows; r++)
        for (size_t c = 0; c < d->pool2d.channels; c++)
            op->level->pool->average_forward(&plane, args->x[0] + r * d->x_stride + c * in,
                                             args->y + r * d->y_stride + c * out);
}

static void average_backward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct pool_plane plane = plane_of(d);
    const size_t in = plane.in_height * plane.in_width, out = plane.out_height * plane.out_width;
    if (!args->dx[0])
        return;
    for (size_t r = 0; r < d->rows; r++)
        for (size_t c = 0; c < d->pool2d.channels; c++) {
            float *dx = args->dx[0] + r * d->x_stride + c * in;
            if (!args->dx_accumulate[0])
                memset(dx, 0, in * sizeof(float));
            op->level->pool->average_backward(&plane, args->dy + r * d->y_stride + c * out, dx);
        }
}

const struct cpu_op_functions cpu_max_pool2d = {
    .prepare = max_prepare,
    .forward = max_forward,
    .backward_data = max_backward,
};

const struct cpu_op_functions cpu_average_pool2d = {
    .prepare = average_prepare,
    .forward = average_forward,
    .backward_data = average_backward,
};
