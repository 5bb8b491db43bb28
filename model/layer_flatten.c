/* torch.nn.Flatten: dimensions start_dim..end_dim become one. Dimension 0 is the batch, which stays. */
#include "model/layer.h"

/* A dimension that may be counted from the end, as one of a sample (from 0). */
static tally_status sample_dim(const struct layer_check *check, const char *field, int32_t dim, const struct shape *in,
                               size_t *ret_dim)
{
    int64_t ndim = (int64_t)in->ndim + 1, d = dim < 0 ? dim + ndim : dim;
    char text[96];
    if (d < 0 || d >= ndim)
        return layer_fail(check, field, -1, "%d is no dimension of (batch, %s): expected %lld to %lld", dim,
                          shape_text(in, text, sizeof text), (long long)-ndim, (long long)ndim - 1);
    if (d == 0)
        return layer_fail(check, field, -1, "%d is the batch, which cannot be flattened", dim);
    *ret_dim = (size_t)d - 1;
    return TALLY_OK;
}

static tally_status flatten_shape(const struct layer_check *check, const struct shape *in, struct shape *ret_out)
{
    const Tally__V1__Flatten *flatten = check->spec->flatten;
    size_t start = 0, end = 0, dim[MODEL_NDIM_MAX], ndim = 0;
    tally_status status = sample_dim(check, "start_dim", flatten->start_dim, in, &start);
    if (status == TALLY_OK)
        status = sample_dim(check, "end_dim", flatten->end_dim, in, &end);
    if (status != TALLY_OK)
        return status;
    if (start > end)
        return layer_fail(check, "start_dim", -1, "%d comes after end_dim %d", flatten->start_dim, flatten->end_dim);
    for (size_t i = 0; i < in->ndim; i++) {
        if (i > start && i <= end)
            dim[ndim - 1] *= in->dim[i];
        else
            dim[ndim++] = in->dim[i];
    }
    if (!shape_set(ret_out, ndim, dim))
        return layer_fail(check, NULL, -1, "the output is too large");
    return TALLY_OK;
}

const struct layer_type layer_flatten = {
    .kind = "flatten",
    .kind_case = TALLY__V1__LAYER__KIND_FLATTEN,
    .inputs_min = 1,
    .inputs_max = 1,
    .view = true,
    .shape = flatten_shape,
};
