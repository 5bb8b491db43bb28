/* Functions of each element: torch.nn.ReLU, Tanh, Sigmoid, GELU. */
#include "model/layer.h"

static tally_status same_shape(const struct layer_check *check, const struct shape *in, struct shape *ret_out)
{
    (void)check;
    *ret_out = *in;
    return TALLY_OK;
}

static uint64_t one_each(const struct layer *layer)
{
    return layer->out.elements;
}

static void lower(const struct layer *layer, struct kernel_op_desc *desc, enum kernel_function function)
{
    desc->kind = KERNEL_ELEMENTWISE;
    desc->rows = 1;
    desc->elementwise.function = function;
    desc->elementwise.elements = layer->out.elements;
}

static void relu_lower(const struct layer *layer, struct kernel_op_desc *desc)
{
    lower(layer, desc, KERNEL_RELU);
}

static void tanh_lower(const struct layer *layer, struct kernel_op_desc *desc)
{
    lower(layer, desc, KERNEL_TANH);
}

static void sigmoid_lower(const struct layer *layer, struct kernel_op_desc *desc)
{
    lower(layer, desc, KERNEL_SIGMOID);
}

static void gelu_lower(const struct layer *layer, struct kernel_op_desc *desc)
{
    bool by_tanh = layer->spec->gelu->approximate == TALLY__V1__GELU__APPROXIMATE__tanh;
    lower(layer, desc, by_tanh ? KERNEL_GELU_TANH : KERNEL_GELU_ERF);
}

#define ELEMENTWISE(NAME, CASE)                                                                                        \
    const struct layer_type layer_##NAME = {                                                                           \
        .kind = #NAME,                                                                                                 \
        .kind_case = TALLY__V1__LAYER__KIND_##CASE,                                                                    \
        .inputs_min = 1,                                                                                               \
        .inputs_max = 1,                                                                                               \
        .shape = same_shape,                                                                                           \
        .flops = one_each,                                                                                             \
        .lower = NAME##_lower,                                                                                         \
    }

ELEMENTWISE(relu, RELU);
ELEMENTWISE(tanh, TANH);
ELEMENTWISE(sigmoid, SIGMOID);
ELEMENTWISE(gelu, GELU);
