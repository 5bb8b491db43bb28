/* The sum of two or more layers of one shape, in the order of `from`. */
#include "model/layer.h"

static tally_status add_shape(const struct layer_check *check, const struct shape *in, struct shape *ret_out)
{
    (void)check;
    *ret_out = *in; /* that all inputs are alike is checked for every layer that has several */
    return TALLY_OK;
}

static uint64_t add_flops(const struct layer *layer)
{
    return flops_mul(layer->out.elements, layer->input_count - 1);
}

static void add_lower(const struct layer *layer, struct kernel_op_desc *desc)
{
    desc->kind = KERNEL_ADD;
    desc->rows = 1;
    desc->add.elements = layer->out.elements;
}

const struct layer_type layer_add = {
    .kind = "add",
    .kind_case = TALLY__V1__LAYER__KIND_ADD,
    .inputs_min = 2,
    .inputs_max = KERNEL_INPUTS_MAX,
    .shape = add_shape,
    .flops = add_flops,
    .lower = add_lower,
};
