#include "tests/model/fake_kernels.h"

#include <stdlib.h>

struct kernel_op {
    struct kernel_op_desc desc;
};

size_t fake_kernels_live, fake_kernels_fail_at;

const struct kernel_op_desc *fake_desc(const struct kernel_op *op)
{
    return &op->desc;
}

static size_t row_stride(const struct kernel_backend *backend, size_t elements)
{
    (void)backend;
    size_t padded = (elements + 15) / 16 * 16;
    return (padded & (padded - 1)) == 0 ? padded + 16 : padded;
}

static tally_status prepare(struct kernel_backend *backend, const struct kernel_op_desc *desc,
                            struct kernel_op **ret_op, struct tally_error *err)
{
    (void)backend;
    if (fake_kernels_fail_at > 0 && --fake_kernels_fail_at == 0)
        return tally_fail(err, TALLY_EUNSUPPORTED, "asked to fail");
    struct kernel_op *op = malloc(sizeof *op);
    if (!op)
        return tally_fail(err, TALLY_ENOMEM, "no memory");
    op->desc = *desc;
    fake_kernels_live++;
    *ret_op = op;
    return TALLY_OK;
}

static void release(struct kernel_op *op)
{
    fake_kernels_live--;
    free(op);
}

static size_t saved_bytes(const struct kernel_op *op)
{
    return op->desc.kind == KERNEL_MAX_POOL2D || op->desc.kind == KERNEL_CONV2D
               ? op->desc.rows * op->desc.y_stride + op->desc.rows % 7
               : 0;
}

static size_t workspace_bytes(const struct kernel_op *op)
{
    return op->desc.rows * op->desc.x_stride;
}

static const char *formulation(const struct kernel_op *op)
{
    return op->desc.kind == KERNEL_CONV2D && op->desc.conv2d.pool ? "fake with pool" : "fake";
}

static const char *isa(const struct kernel_backend *backend)
{
    (void)backend;
    return "fake";
}

const struct kernels fake_kernels = {
    .name = "fake",
    .isa = isa,
    .row_stride = row_stride,
    .prepare = prepare,
    .release = release,
    .saved_bytes = saved_bytes,
    .workspace_bytes = workspace_bytes,
    .formulation = formulation,
};
