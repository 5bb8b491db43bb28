#ifndef MODEL_LAYER_H
#define MODEL_LAYER_H
/*
 * The kinds of layers, inside model/ alone. A kind is one table entry: what it reads, its shape rule, its parameters,
 * its cost and how it becomes an operation of kernels/kernels.h. Adding one is a file with the entry, and its line in
 * layers.c (and the message in proto/jobspec.proto).
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"
#include "common/spec_file.h"
#include "kernels/kernels.h"
#include "model/model.h"

/* The layer that a rule looks at, so that what is wrong with it can be said at its place. */
struct layer_check {
    const struct spec_file *file; /* NULL: errors carry the key's path alone */
    uint32_t index;
    const Tally__V1__Layer *spec;
    const struct layer_type *type;
    const char *input; /* who it reads, for messages: "layer 'conv1' (conv2d)", "the model's input" */
    struct tally_error *err;
};

/* field: of the kind's message (with `item`, an element of it, or -1), or "name" or "from" of the layer; NULL: the
 * layer as a whole. Returns TALLY_EINVAL. */
tally_status layer_fail(const struct layer_check *check, const char *field, int item, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* The parameters of a layer: PyTorch's shapes. */
struct layer_params {
    struct shape weight; /* ndim 0: none */
    bool bias;           /* (weight.dim[0]) */
    size_t fan_in;       /* of the weight: what init draws from */
};

struct layer_type {
    const char *kind; /* the key in a job file */
    Tally__V1__Layer__KindCase kind_case;
    size_t inputs_min, inputs_max;
    bool view; /* the output is the input's elements as they lie: no operation */

    /* Checks the layer's fields against its input's shape and gives its output's shape. */
    tally_status (*shape)(const struct layer_check *check, const struct shape *in, struct shape *ret_out);
    /* NULL: it has none. in is one that shape() took. TALLY_EINVAL: too large. */
    tally_status (*params)(const struct layer_check *check, const struct shape *in, struct layer_params *ret_params);
    /* Multiplications and additions (or comparisons, or function values) of one sample's forward; UINT64_MAX: more than
     * that. NULL: 0. */
    uint64_t (*flops)(const struct layer *layer);
    /* Sets the kind, its part of the union, bias, and in rows the rows of the operation that a sample is (1, but for
     * products). NULL: a view. */
    void (*lower)(const struct layer *layer, struct kernel_op_desc *desc);
    /* Takes the next layer (the only reader of this operation's output) into the operation, if that computes the same.
     * NULL: never. */
    bool (*absorb)(struct kernel_op_desc *desc, const struct layer *next);
    /* Writes what was inferred or left to a default into the spec. NULL: nothing to add. TALLY_ENOMEM. */
    tally_status (*complete)(const struct layer *layer, Tally__V1__Layer *spec, struct tally_error *err);
};

/* NULL: no such kind. */
const struct layer_type *layer_type_find(Tally__V1__Layer__KindCase kind_case);

extern const struct layer_type layer_linear, layer_conv2d, layer_max_pool2d, layer_avg_pool2d, layer_relu, layer_tanh,
    layer_sigmoid, layer_gelu, layer_flatten, layer_add;

/* ---- shapes ---- */

/* false: a dimension of 0, or more than TALLY_ELEMENTS_MAX elements. ndim is at most MODEL_NDIM_MAX. */
bool shape_set(struct shape *shape, size_t ndim, const size_t *dim);
/* a * b, or UINT64_MAX where that is too large. */
uint64_t flops_mul(uint64_t a, uint64_t b);
uint64_t flops_add(uint64_t a, uint64_t b);

/* ---- windows: fields that hold one number or a pair (height, width) ---- */

/* n 0: `fallback` (a pair); 1: both; 2: as given. */
void window_pair(size_t n, const uint32_t *values, const size_t fallback[2], size_t ret_pair[2]);
/*
 * Outputs of a window over `in` elements, as torch.nn.functional's pools and convolutions count them: floor((in + 2
 * padding - dilation (kernel - 1) - 1) / stride) + 1; with ceil_mode rounded up, but the last window must begin inside
 * the input or its left padding. 0: none fits.
 */
size_t window_outputs(size_t in, size_t kernel, size_t stride, size_t padding, size_t dilation, bool ceil_mode);
/* Makes a repeated field hold two values. */
tally_status window_complete(size_t *n, uint32_t **values, const size_t pair[2], struct tally_error *err);
/* in as (channels, height, width), or the refusal. */
tally_status layer_needs_image(const struct layer_check *check, const struct shape *in);
#endif
