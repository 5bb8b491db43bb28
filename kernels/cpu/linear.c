/*
 * torch.nn.Linear with an optional ReLU behind it: three products.
 *
 * - forward: y^T = W x^T. The rows of W stream from where they are, once; x^T is the small operand that is packed. y^T
 *   is turned over with bias and ReLU.
 * - data: dx = dy W, W packed in panels (which also takes the sting out of powers of two as its leading dimension).
 * - weight: dW = dy^T x, a part of W's rows at a time.
 */
#include <stdio.h>

#include "kernels/cpu/op.h"

/* Rows of x in one forward product: bounds y^T. */
#define FORWARD_ROWS ((size_t)128)

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static tally_status linear_prepare(struct kernel_op *op, struct tally_error *err)
{
    const struct kernel_op_desc *d = &op->desc;
    size_t ignored;
    tally_status status = CPU_ELEMENTS("the weight", &ignored, err, d->linear.in, d->linear.out);
    if (!status)
        status = cpu_check_strides(d, d->linear.in, d->linear.out, err);
    if (status)
        return status;
    const struct gemm_level *gemm = op->level->gemm;
    const size_t rows = min_size(d->rows, FORWARD_ROWS);
    size_t floats = cpu_line(d->linear.out * rows) + gemm->workspace(rows, d->linear.in);
    const size_t data = gemm->workspace(d->linear.in, d->linear.out), weight = gemm->workspace(d->linear.in, d->rows);
    floats = floats > data ? floats : data;
    floats = floats > weight ? floats : weight;
    op->workspace_bytes = floats * sizeof(float);
    (void)snprintf(op->formulation, sizeof op->formulation, "product%s%s", d->bias ? " + bias" : "",
                   d->relu ? " + relu" : "");
    return TALLY_OK;
}

static void linear_forward(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct gemm_level *gemm = op->level->gemm;
    const size_t in = d->linear.in, out = d->linear.out, block = min_size(d->rows, FORWARD_ROWS);
    float *transposed = args->workspace;
    for (size_t r = 0; r < d->rows; r += block) {
        const size_t rows = min_size(block, d->rows - r);
        const struct gemm_matrix x = {args->x[0] + r * d->x_stride, d->x_stride};
        gemm->run(&(struct gemm_call){.m = out,
                                      .n = rows,
                                      .k = in,
                                      .a = args->weight,
                                      .a_row = in,
                                      .a_k = 1,
                                      .pack = gemm->pack_columns,
                                      .pack_source = &x,
                                      .c = transposed,
                                      .ldc = rows,
                                      .workspace = transposed + cpu_line(out * block)});
        gemm->transpose_bias(out, rows, transposed, rows, d->bias ? args->bias : NULL, d->relu,
                             args->y + r * d->y_stride, d->y_stride);
    }
}

/* dy = 0 where the ReLU was at 0, for outputs [begin, end). Doing it again changes nothing, so nobody need know who
 * came first. */
static void mask(const struct kernel_op *op, const struct kernel_args *args, size_t begin, size_t end)
{
    const struct kernel_op_desc *d = &op->desc;
    if (d->relu)
        for (size_t r = 0; r < d->rows; r++)
            op->level->pointwise->relu_mask(end - begin, args->y + r * d->y_stride + begin,
                                            args->dy + r * d->y_stride + begin);
}

static void linear_backward_data(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct gemm_level *gemm = op->level->gemm;
    if (!args->dx[0])
        return;
    mask(op, args, 0, d->linear.out);
    const struct gemm_matrix weight = {args->weight, d->linear.in};
    gemm->run(&(struct gemm_call){.m = d->rows,
                                  .n = d->linear.in,
                                  .k = d->linear.out,
                                  .a = args->dy,
                                  .a_row = d->y_stride,
                                  .a_k = 1,
                                  .pack = gemm->pack_rows,
                                  .pack_source = &weight,
                                  .ahead = &weight,
                                  .c = args->dx[0],
                                  .ldc = d->x_stride,
                                  .accumulate = args->dx_accumulate[0],
                                  .workspace = args->workspace});
}

static void linear_backward_weight(const struct kernel_op *op, const struct kernel_args *args, size_t row_begin,
                                   size_t row_end)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct gemm_level *gemm = op->level->gemm;
    mask(op, args, row_begin, row_end);
    const struct gemm_matrix x = {args->x[0], d->x_stride};
    gemm->run(&(struct gemm_call){.m = row_end - row_begin,
                                  .n = d->linear.in,
                                  .k = d->rows,
                                  .a = args->dy + row_begin,
                                  .a_row = 1,
                                  .a_k = d->y_stride,
                                  .pack = gemm->pack_rows,
                                  .pack_source = &x,
                                  .c = args->dweight + row_begin * d->linear.in,
                                  .ldc = d->linear.in,
                                  .workspace = args->workspace});
    if (d->bias)
        op->level->pointwise->column_sums(d->rows, row_end - row_begin, args->dy + row_begin, d->y_stride,
                                          args->dbias + row_begin);
}

const struct cpu_op_functions cpu_linear = {
    .prepare = linear_prepare,
    .forward = linear_forward,
    .backward_data = linear_backward_data,
    .backward_weight = linear_backward_weight,
};
