/* Operations on elements one by one, and the losses. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "kernels/cpu/op.h"

static tally_status elementwise_prepare(struct kernel_op *op, struct tally_error *err)
{
    const struct kernel_op_desc *d = &op->desc;
    const tally_status status = cpu_check_strides(d, d->elementwise.elements, d->elementwise.elements, err);
    if (status)
        return status;
    if (d->elementwise.elements == 0)
        return tally_fail(err, TALLY_EINVAL, "an element-wise operation on no elements");
    if ((int)d->elementwise.function < KERNEL_RELU || d->elementwise.function > KERNEL_GELU_TANH)
        return tally_fail(err, TALLY_EUNSUPPORTED, "the cpu backend lacks element-wise function %d",
                          (int)d->elementwise.function);
    (void)snprintf(op->formulation, sizeof op->formulation, "loops");
    return TALLY_OK;
}

static void elementwise_forward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    for (size_t r = 0; r < d->rows; r++)
        op->level->pointwise->forward(d->elementwise.function, d->elementwise.elements, args->x[0] + r * d->x_stride,
                                      args->y + r * d->y_stride);
}

static void elementwise_backward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    if (!args->dx[0])
        return;
    for (size_t r = 0; r < d->rows; r++)
        op->level->pointwise->backward(d->elementwise.function, d->elementwise.elements, args->dy + r * d->y_stride,
                                       args->x[0] + r * d->x_stride, args->y + r * d->y_stride,
                                       args->dx[0] + r * d->x_stride, args->dx_accumulate[0]);
}

static tally_status add_prepare(struct kernel_op *op, struct tally_error *err)
{
    const struct kernel_op_desc *d = &op->desc;
    const tally_status status = cpu_check_strides(d, d->add.elements, d->add.elements, err);
    if (status)
        return status;
    if (d->add.elements == 0)
        return tally_fail(err, TALLY_EINVAL, "an add of no elements");
    if (d->inputs < 2 || d->inputs > KERNEL_INPUTS_MAX)
        return tally_fail(err, TALLY_EINVAL, "an add has 2 to %d inputs, not %zu", KERNEL_INPUTS_MAX, d->inputs);
    (void)snprintf(op->formulation, sizeof op->formulation, "loops");
    return TALLY_OK;
}

static void add_forward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    for (size_t r = 0; r < d->rows; r++) {
        float *y = args->y + r * d->y_stride;
        op->level->pointwise->sum(d->add.elements, y, args->x[0] + r * d->x_stride, args->x[1] + r * d->x_stride);
        for (size_t i = 2; i < d->inputs; i++)
            op->level->pointwise->sum(d->add.elements, y, y, args->x[i] + r * d->x_stride);
    }
}

static void add_backward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    for (size_t i = 0; i < d->inputs; i++) {
        if (!args->dx[i])
            continue;
        for (size_t r = 0; r < d->rows; r++) {
            const float *dy = args->dy + r * d->y_stride;
            float *dx = args->dx[i] + r * d->x_stride;
            if (args->dx_accumulate[i])
                op->level->pointwise->sum(d->add.elements, dx, dx, dy);
            else
                memmove(dx, dy, d->add.elements * sizeof(float));
        }
    }
}

static tally_status cross_entropy_prepare(struct kernel_op *op, struct tally_error *err)
{
    const struct kernel_op_desc *d = &op->desc;
    if (d->cross_entropy.classes == 0)
        return tally_fail(err, TALLY_EINVAL, "cross_entropy needs at least one class");
    if (!(d->cross_entropy.label_smoothing >= 0.0f && d->cross_entropy.label_smoothing <= 1.0f))
        return tally_fail(err, TALLY_EINVAL, "label_smoothing must be between 0 and 1");
    const tally_status status = cpu_check_strides(d, d->cross_entropy.classes, 0, err);
    if (status)
        return status;
    op->saved_bytes = d->rows * 2 * sizeof(float);
    (void)snprintf(op->formulation, sizeof op->formulation, "loops");
    return TALLY_OK;
}

static struct loss_rows loss_rows(const struct kernel_op_desc *d, const struct kernel_args *args)
{
    return (struct loss_rows){.x = args->x[0],
                              .count = d->rows,
                              .stride = d->x_stride,
                              .classes = d->cross_entropy.classes,
                              .targets = args->targets,
                              .ignore_index = d->cross_entropy.ignore_index,
                              .smoothing = d->cross_entropy.label_smoothing};
}

static void cross_entropy_forward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct loss_rows rows = loss_rows(&op->desc, args);
    op->level->loss->cross_entropy(&rows, args->saved, args->loss);
}

static void cross_entropy_backward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct loss_rows rows = loss_rows(&op->desc, args);
    if (args->dx[0])
        op->level->loss->cross_entropy_backward(&rows, args->saved, args->dx[0], args->dx_accumulate[0]);
}

static tally_status mse_prepare(struct kernel_op *op, struct tally_error *err)
{
    const struct kernel_op_desc *d = &op->desc;
    if (d->mse.elements == 0)
        return tally_fail(err, TALLY_EINVAL, "mse of no elements");
    const tally_status status = cpu_check_strides(d, d->mse.elements, 0, err);
    if (status)
        return status;
    (void)snprintf(op->formulation, sizeof op->formulation, "loops");
    return TALLY_OK;
}

static void mse_forward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    const float *targets = args->targets;
    struct kernel_loss loss = {.weight = (double)d->rows * (double)d->mse.elements};
    for (size_t r = 0; r < d->rows; r++)
        loss.loss_sum += op->level->loss->squared_error(d->mse.elements, args->x[0] + r * d->x_stride,
                                                        targets + r * d->mse.elements);
    *args->loss = loss;
}

static void mse_backward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    const float *targets = args->targets;
    if (!args->dx[0])
        return;
    for (size_t r = 0; r < d->rows; r++)
        op->level->loss->squared_error_backward(d->mse.elements, args->x[0] + r * d->x_stride,
                                                targets + r * d->mse.elements, args->dx[0] + r * d->x_stride,
                                                args->dx_accumulate[0]);
}

const struct cpu_op_functions cpu_elementwise = {
    .prepare = elementwise_prepare,
    .forward = elementwise_forward,
    .backward_data = elementwise_backward,
};

const struct cpu_op_functions cpu_add = {
    .prepare = add_prepare,
    .forward = add_forward,
    .backward_data = add_backward,
};

const struct cpu_op_functions cpu_cross_entropy = {
    .prepare = cross_entropy_prepare,
    .forward = cross_entropy_forward,
    .backward_data = cross_entropy_backward,
};

const struct cpu_op_functions cpu_mse = {
    .prepare = mse_prepare,
    .forward = mse_forward,
    .backward_data = mse_backward,
};
