/* Fields that hold one number or a pair, and how many outputs a window has: shared by convolutions and pools. */
#include <stdlib.h>

#include "model/layer.h"

void window_pair(size_t n, const uint32_t *values, const size_t fallback[2], size_t ret_pair[2])
{
    for (size_t i = 0; i < 2; i++)
        ret_pair[i] = n == 0 ? fallback[i] : values[n == 1 ? 0 : i];
}

size_t window_outputs(size_t in, size_t kernel, size_t stride, size_t padding, size_t dilation, bool ceil_mode)
{
    /* All are below 2^41 but dilation * (kernel - 1), which is below 2^64: nothing else can overflow once that is known
     * to fit. */
    size_t padded = in + 2 * padding;
    size_t reach = dilation * (kernel - 1) + 1;
    if (!ceil_mode)
        return reach > padded ? 0 : (padded - reach) / stride + 1;
    if (reach > padded + stride - 1)
        return 0;
    size_t outputs = (padded + stride - 1 - reach) / stride + 1;
    if ((outputs - 1) * stride >= in + padding)
        outputs--;
    return outputs;
}

tally_status window_complete(size_t *n, uint32_t **values, const size_t pair[2], struct tally_error *err)
{
    uint32_t *two = malloc(2 * sizeof *two);
    if (!two)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a layer's fields");
    two[0] = (uint32_t)pair[0];
    two[1] = (uint32_t)pair[1];
    free(*values);
    *values = two;
    *n = 2;
    return TALLY_OK;
}

tally_status layer_needs_image(const struct layer_check *check, const struct shape *in)
{
    char text[96];
    if (in->ndim == 3)
        return TALLY_OK;
    return layer_fail(check, NULL, -1, "%s reads samples of (channels, height, width), but %s gives %s",
                      check->type->kind, check->input, shape_text(in, text, sizeof text));
}
