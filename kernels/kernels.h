#ifndef KERNELS_KERNELS_H
#define KERNELS_KERNELS_H
/*
 * The operations of a training step, and the table of functions that a backend (cpu, cuda) fills in. Nothing above this
 * header knows which it runs.
 *
 * Tensors are f32. An activation is (rows, sample): row r, one sample, begins at x + r * stride (floats); inside a
 * sample the elements are contiguous in row-major order, (channels, height, width) for images. stride >= the sample's
 * elements; the floats between are never read for their value and may hold anything. Strides come from row_stride():
 * powers of two as leading dimension halve the speed of a product. Parameters are contiguous, in PyTorch's layout, at
 * the alignment of the flat parameter vector (64 bytes).
 *
 * Rules that every backend keeps, because results must not depend on who runs a micro-batch:
 * - R1 The formulation of an operation is a pure function of its description and the backend's instruction set:
 *   never of a timing, a thread count, an address or earlier calls. The same description and inputs give the same bits.
 * - R2 prepare() does all the allocating; forward, backward and the rest allocate nothing.
 * - R3 Gradients are sums over the rows, not means: whoever applies the step divides once by the step's weight.
 * - R4 A backend object and its streams are used by one thread at a time; several objects may be used side by side. The
 *   calling thread is the only one that computes.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"

#define KERNEL_INPUTS_MAX 64 /* operands of an add: jobspec.proto bounds Layer.from likewise */

enum kernel_op_kind {
    KERNEL_LINEAR,     /* torch.nn.Linear, with an optional ReLU behind it */
    KERNEL_CONV2D,     /* torch.nn.Conv2d, with an optional ReLU and an optional max pool behind it */
    KERNEL_MAX_POOL2D, /* torch.nn.MaxPool2d */
    KERNEL_AVG_POOL2D, /* torch.nn.AvgPool2d */
    KERNEL_ELEMENTWISE,
    KERNEL_ADD, /* sum of two or more inputs, in the order given */
    KERNEL_CROSS_ENTROPY,
    KERNEL_MSE,
};

enum kernel_function { KERNEL_RELU, KERNEL_TANH, KERNEL_SIGMOID, KERNEL_GELU_ERF, KERNEL_GELU_TANH };

/* The window of a convolution or a pool; index 0 is height, 1 is width. */
struct kernel_window {
    size_t kernel[2];
    size_t stride[2];
    size_t padding[2];
    size_t dilation[2];
};

/* One operation on a fixed number of rows. Zero-initialise, then set what the kind needs. */
struct kernel_op_desc {
    enum kernel_op_kind kind;
    size_t rows;   /* samples; 1 or more. linear: rows of the product (samples * the leading dimensions of a sample) */
    size_t inputs; /* add: operands; every other kind: 1 */
    size_t x_stride; /* floats from one row to the next, of every input and of its gradient */
    size_t y_stride; /* of the output and of its gradient */
    bool bias;       /* linear, conv2d */
    bool relu;       /* linear, conv2d: y = max(y, 0) behind it (before the pool) */
    union {
        struct {
            size_t in, out; /* weight (out, in), bias (out) */
        } linear;
        struct {
            size_t in_channels, in_height, in_width;
            size_t out_channels, out_height, out_width; /* of the convolution, before the pool */
            size_t groups; /* weight (out_channels, in_channels / groups, kernel[0], kernel[1]) */
            struct kernel_window window;
            bool pool; /* a max pool behind it: y is (out_channels, pool_height, pool_width), the convolution's own
                          output is nowhere */
            struct kernel_window pool_window; /* dilation 1, padding 0 */
            size_t pool_height, pool_width;
        } conv2d;
        struct {
            size_t channels, in_height, in_width, out_height, out_width;
            struct kernel_window window;
            bool count_include_pad;  /* avg */
            size_t divisor_override; /* avg; 0: none */
        } pool2d;
        struct {
            enum kernel_function function;
            size_t elements; /* of a sample */
        } elementwise;
        struct {
            size_t elements;
        } add;
        struct {
            size_t classes;
            int64_t ignore_index;
            float label_smoothing;
        } cross_entropy;
        struct {
            size_t elements;
        } mse;
    };
};

/* What a loss over some rows comes to: sums, so that any rows can be added. */
struct kernel_loss {
    double loss_sum;
    double weight;  /* cross_entropy: non-ignored targets; mse: elements. The mean is loss_sum / weight */
    double correct; /* cross_entropy: rows with a counted target whose first largest output is the target; mse: 0 */
};

/* Buffers of a call: all in the backend's memory. */
struct kernel_args {
    const float *x[KERNEL_INPUTS_MAX];
    float *y;
    const float *weight; /* linear, conv2d */
    const float *bias;   /* where desc.bias */
    void *saved;         /* saved_bytes(): written by forward, read by backward of the same rows; forward may get NULL:
                            evaluation, nothing is kept */
    void *workspace;     /* workspace_bytes(): scratch within one call, 64-byte aligned */

    /* backward. dy may be overwritten (a fused ReLU masks it in place, in backward_data or in the first backward_weight
     * part, whichever comes first). */
    float *dy;
    float *dx[KERNEL_INPUTS_MAX]; /* NULL: not wanted (a model's input needs none). Written in order, so that one buffer
                                     may stand twice (x + x): first =, then += */
    bool dx_accumulate[KERNEL_INPUTS_MAX]; /* dx += instead of dx =: the tensor has another reader whose gradient is
                                              there already */
    float *dweight;                        /* the whole parameter's gradient buffer; parts write their own rows */
    float *dbias;

    /* losses: x[0] are the outputs of the model */
    const void *targets;      /* cross_entropy: int64_t[rows]; mse: float[rows][elements], contiguous */
    struct kernel_loss *loss; /* written by forward; in host memory on cpu: see read_loss */
};

struct kernel_backend; /* an opened device */
struct kernel_stream;  /* a queue of operations in order */
struct kernel_op;      /* a prepared operation */

struct kernel_sgd {
    float lr, momentum, weight_decay;
    double dampening; /* 1 - dampening is what is rounded to f32, as in PyTorch */
    bool nesterov, maximize;
    bool first; /* no momentum buffer yet: it becomes the gradient, without dampening */
};

/* A backend. Every pointer is set. */
struct kernels {
    const char *name; /* cpu, cuda */

    /* isa: NULL for the best this machine has, or a lower one by name (generic, avx2, avx512), so that a gang runs one.
     * device: index. */
    tally_status (*open)(const char *isa, int device, struct kernel_backend **ret_backend, struct tally_error *err);
    void (*close)(struct kernel_backend *backend);
    const char *(*isa)(const struct kernel_backend *backend); /* what is in use; a static string */

    /* Memory of the device, 64-byte aligned, zeroed. Pages are touched, so that a step meets no page fault. */
    tally_status (*alloc)(struct kernel_backend *backend, size_t bytes, void **ret_memory, struct tally_error *err);
    void (*free)(struct kernel_backend *backend, void *memory);
    bool host_memory; /* alloc's memory can be read and written by the CPU: upload and download are memcpy, and callers
                         may skip them */
    void (*upload)(struct kernel_stream *stream, void *device, const void *host, size_t bytes);
    void (*download)(struct kernel_stream *stream, void *host, const void *device, size_t bytes);

    tally_status (*stream_open)(struct kernel_backend *backend, struct kernel_stream **ret_stream,
                                struct tally_error *err);
    void (*stream_close)(struct kernel_stream *stream);
    /* Waits until everything issued has run. An asynchronous failure of the device comes out here. */
    tally_status (*stream_sync)(struct kernel_stream *stream, struct tally_error *err);

    /* Floats from one row to the next for samples of so many elements. */
    size_t (*row_stride)(const struct kernel_backend *backend, size_t elements);

    /* Checks desc (its output sizes too) and makes the operation. TALLY_EUNSUPPORTED names what this backend lacks. */
    tally_status (*prepare)(struct kernel_backend *backend, const struct kernel_op_desc *desc,
                            struct kernel_op **ret_op, struct tally_error *err);
    void (*release)(struct kernel_op *op);
    size_t (*saved_bytes)(const struct kernel_op *op);
    size_t (*workspace_bytes)(const struct kernel_op *op);
    /* How it is computed, for plans and tests: "patches in a product + bias + max pool", "loops", ... ; owned by op. */
    const char *(*formulation)(const struct kernel_op *op);

    void (*forward)(struct kernel_op *op, struct kernel_stream *stream, const struct kernel_args *args);
    /* The gradient of the inputs. Losses: dx[0] = d loss_sum / dx. */
    void (*backward_data)(struct kernel_op *op, struct kernel_stream *stream, const struct kernel_args *args);
    /* The gradient of the parameters, of weight rows (first dimension) [row_begin, row_end) and the same entries of the
     * bias. The parts in which the plan asks for it are the same on every worker. Covering all rows once gives the
     * whole gradient. */
    void (*backward_weight)(struct kernel_op *op, struct kernel_stream *stream, const struct kernel_args *args,
                            size_t row_begin, size_t row_end);
    /* Where a loss's result may be read after the stream is in sync. */
    void (*read_loss)(struct kernel_stream *stream, const struct kernel_loss *device, struct kernel_loss *host);

    /* dst = a + b, element by element; dst may be a or b. Pointers need only the alignment of float. */
    void (*sum)(struct kernel_stream *stream, size_t n, float *dst, const float *a, const float *b);
    /* torch.optim.SGD on n parameters with gradient g = (a + b) / weight (a / weight where b is NULL): reads w and m,
     * writes w_out and m_out, which may be the same. m and m_out may be NULL where momentum is 0. The arithmetic is
     * kernels/elementwise.h's, in f32. */
    void (*sgd)(struct kernel_stream *stream, size_t n, const struct kernel_sgd *sgd, float weight, const float *a,
                const float *b, const float *w, const float *m, float *w_out, float *m_out);
};

/* The backend of that name; NULL: no such one in this build. "cpu" is always there. */
const struct kernels *kernels_find(const char *name);
#endif
