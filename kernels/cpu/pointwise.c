/* One level's element-wise loops: elementwise.h's arithmetic, which the compiler turns into vectors. */
#include "kernels/cpu/level.h"
#include "kernels/cpu/simd.h"
#include "kernels/elementwise.h"

static void sum(size_t n, float *dst, const float *a, const float *b)
{
    size_t i = 0;
    for (; i + VL <= n; i += VL)
        v_store(dst + i, v_add(v_load(a + i), v_load(b + i)));
    for (; i < n; i++)
        dst[i] = a[i] + b[i];
}

/* SGD in blocks: inputs may be outputs, so each block is computed in local arrays that the compiler knows to be apart.
 * The new momentum is not read before the next step: it goes past the caches, which saves reading what it overwrites
 * and leaves room for the weights, which are sent at once. */
#define SGD_BLOCK 64

FORCE_INLINE void sgd_block(size_t n, const struct kernel_sgd *sgd, bool use_momentum, bool first, float weight,
                            const float *a, const float *b, const float *w, const float *m, float *w_out, float *m_out)
{
    float g[SGD_BLOCK], new_w[SGD_BLOCK], new_m[SGD_BLOCK];
    const float one_minus_dampening = (float)(1.0 - sgd->dampening);
    for (size_t i = 0; i < n; i++)
        g[i] = (b ? a[i] + b[i] : a[i]) / weight;
    for (size_t i = 0; i < n; i++)
        new_w[i] = elementwise_sgd(g[i], w[i], use_momentum && !first ? m[i] : 0.0f, sgd->lr, sgd->momentum,
                                   one_minus_dampening, sgd->weight_decay, use_momentum, sgd->nesterov, sgd->maximize,
                                   first, &new_m[i]);
    memcpy(w_out, new_w, n * sizeof(float));
    if (!use_momentum)
        return;
    if (n < SGD_BLOCK) {
        memcpy(m_out, new_m, n * sizeof(float));
        return;
    }
    for (size_t i = 0; i < SGD_BLOCK; i += VL)
        v_stream(m_out + i, v_load(new_m + i));
}

/* How many floats before the first that stands at a vector's alignment. */
FORCE_INLINE size_t misaligned(const float *p)
{
    return -((uintptr_t)p / sizeof(float)) % VL;
}

FORCE_INLINE void sgd_loop(size_t n, const struct kernel_sgd *sgd, bool use_momentum, bool first, float weight,
                           const float *a, const float *b, const float *w, const float *m, float *w_out, float *m_out)
{
    size_t i = use_momentum ? misaligned(m_out) : 0; /* whole blocks are aligned */
    i = i < n ? i : n;
    if (i > 0)
        sgd_block(i, sgd, use_momentum, first, weight, a, b, w, use_momentum && !first ? m : NULL, w_out, m_out);
    for (; i + SGD_BLOCK <= n; i += SGD_BLOCK)
        sgd_block(SGD_BLOCK, sgd, use_momentum, first, weight, a + i, b ? b + i : NULL, w + i,
                  use_momentum && !first ? m + i : NULL, w_out + i, use_momentum ? m_out + i : NULL);
    if (i < n)
        sgd_block(n - i, sgd, use_momentum, first, weight, a + i, b ? b + i : NULL, w + i,
                  use_momentum && !first ? m + i : NULL, w_out + i, use_momentum ? m_out + i : NULL);
    if (use_momentum)
        v_stream_end();
}

static void sgd(size_t n, const struct kernel_sgd *options, float weight, const float *a, const float *b,
                const float *w, const float *m, float *w_out, float *m_out)
{
    if (options->momentum == 0.0f)
        sgd_loop(n, options, false, false, weight, a, b, w, m, w_out, m_out);
    else if (options->first)
        sgd_loop(n, options, true, true, weight, a, b, w, m, w_out, m_out);
    else
        sgd_loop(n, options, true, false, weight, a, b, w, m, w_out, m_out);
}

#define FORWARD_LOOP(f)                                                                                                \
    for (size_t i = 0; i < n; i++)                                                                                     \
        y[i] = f(x[i]);                                                                                                \
    break

static void forward(enum kernel_function function, size_t n, const float *x, float *y)
{
    switch (function) {
    case KERNEL_RELU:
        FORWARD_LOOP(elementwise_relu);
    case KERNEL_TANH:
        FORWARD_LOOP(elementwise_tanh);
    case KERNEL_SIGMOID:
        FORWARD_LOOP(elementwise_sigmoid);
    case KERNEL_GELU_ERF:
        FORWARD_LOOP(elementwise_gelu_erf);
    case KERNEL_GELU_TANH:
        FORWARD_LOOP(elementwise_gelu_tanh);
    }
}

#define BACKWARD_LOOP(f, at)                                                                                           \
    if (accumulate) {                                                                                                  \
        for (size_t i = 0; i < n; i++)                                                                                 \
            dx[i] += f(dy[i], at[i]);                                                                                  \
    } else {                                                                                                           \
        for (size_t i = 0; i < n; i++)                                                                                 \
            dx[i] = f(dy[i], at[i]);                                                                                   \
    }                                                                                                                  \
    break

static void backward(enum kernel_function function, size_t n, const float *dy, const float *x, const float *y,
                     float *dx, bool accumulate)
{
    switch (function) {
    case KERNEL_RELU:
        BACKWARD_LOOP(elementwise_relu_backward, y);
    case KERNEL_TANH:
        BACKWARD_LOOP(elementwise_tanh_backward, y);
    case KERNEL_SIGMOID:
        BACKWARD_LOOP(elementwise_sigmoid_backward, y);
    case KERNEL_GELU_ERF:
        BACKWARD_LOOP(elementwise_gelu_erf_backward, x);
    case KERNEL_GELU_TANH:
        BACKWARD_LOOP(elementwise_gelu_tanh_backward, x);
    }
}

static void relu_mask(size_t n, const float *y, float *dy)
{
    for (size_t i = 0; i < n; i++)
        dy[i] = elementwise_relu_backward(dy[i], y[i]);
}

static void bias_relu(size_t n, float bias, bool relu, float *y)
{
    if (relu) {
        for (size_t i = 0; i < n; i++)
            y[i] = elementwise_relu(y[i] + bias);
    } else {
        for (size_t i = 0; i < n; i++)
            y[i] = y[i] + bias;
    }
}

static void column_sums(size_t rows, size_t columns, const float *x, size_t stride, float *sums)
{
    size_t j = 0;
    for (; j + 4 * VL <= columns; j += 4 * VL) {
        vf s[4];
        UNROLL
        for (size_t v = 0; v < 4; v++)
            s[v] = v_load(x + j + v * VL);
        for (size_t i = 1; i < rows; i++) {
            UNROLL
            for (size_t v = 0; v < 4; v++)
                s[v] = v_add(s[v], v_load(x + i * stride + j + v * VL));
        }
        UNROLL
        for (size_t v = 0; v < 4; v++)
            v_store(sums + j + v * VL, s[v]);
    }
    for (; j < columns; j += VL) {
        const size_t lanes = columns - j < VL ? columns - j : VL;
        vf s = v_load_n(x + j, lanes);
        for (size_t i = 1; i < rows; i++)
            s = v_add(s, v_load_n(x + i * stride + j, lanes));
        v_store_n(sums + j, s, lanes);
    }
}

static float total(size_t n, const float *x)
{
    float lane[16] = {0};
    size_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (size_t l = 0; l < 16; l++)
            lane[l] += x[i + l];
    for (size_t l = 0; i < n; i++, l++)
        lane[l] += x[i];
    for (size_t half = 8; half > 0; half /= 2)
        for (size_t l = 0; l < half; l++)
            lane[l] += lane[l + half];
    return lane[0];
}

const struct pointwise_level LEVEL(cpu_pointwise) = {
    .sum = sum,
    .sgd = sgd,
    .forward = forward,
    .backward = backward,
    .relu_mask = relu_mask,
    .bias_relu = bias_relu,
    .column_sums = column_sums,
    .total = total,
};
