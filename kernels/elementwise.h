#ifndef KERNELS_ELEMENTWISE_H
#define KERNELS_ELEMENTWISE_H
/*
 * The arithmetic of element-wise operations, for one element, in plain C that also compiles as C++ and CUDA. Every
 * backend and every instruction set runs these lines, with nothing fused (-ffp-contract=off, nvcc -fmad=false) and
 * nothing from libm, so all of them give the same bits.
 *
 * Everything is free of branches, so that loops over it become vector code. Errors against the exact value: exp, tanh,
 * sigmoid, erf within 4 ulp (tests/kernels/elementwise_test.c measures it). NaN gives NaN, infinities their limits.
 */
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define ELEMENTWISE static __host__ __device__ inline
#else
#define ELEMENTWISE static inline __attribute__((always_inline))
#endif

ELEMENTWISE float elementwise_from_bits(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

ELEMENTWISE uint32_t elementwise_bits(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* |x| with the sign of y. */
ELEMENTWISE float elementwise_copysign(float x, float y)
{
    return elementwise_from_bits((elementwise_bits(x) & 0x7fffffffu) | (elementwise_bits(y) & 0x80000000u));
}

ELEMENTWISE float elementwise_abs(float x)
{
    return elementwise_from_bits(elementwise_bits(x) & 0x7fffffffu);
}

/* x = n ln 2 + r: returns e^r - 1 and n, a whole number in *ret_n (as bits of a two's complement integer). |x| < 2^20.
 */
ELEMENTWISE float elementwise_reduced_exp(float x, uint32_t *ret_n)
{
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, which stands in the low bits */
    const float shifted = x * 1.44269504088896341f + magic;
    const float n = shifted - magic;
    float r =
        x - n * 0.693359375f; /* ln 2 in two parts (Cephes): the first has few bits, so that n times it is exact */
    r = r - n * -2.12194440e-4f;
    float p = 1.9875691500e-4f; /* Cephes expf */
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    *ret_n = elementwise_bits(shifted) - elementwise_bits(magic);
    return p * (r * r) + r;
}

/* 2^n for n in [-126, 127]. */
ELEMENTWISE float elementwise_exp2i(uint32_t n)
{
    return elementwise_from_bits((n + 127u) << 23);
}

ELEMENTWISE float elementwise_exp(float x)
{
    x = x < -105.0f ? -105.0f : x; /* below: 0 */
    x = x > 89.0f ? 89.0f : x;     /* above: infinity */
    uint32_t n;
    const float p = elementwise_reduced_exp(x, &n) + 1.0f;
    const uint32_t half = (uint32_t)((int32_t)n >> 1); /* in two factors: 2^n alone may be no normal number */
    return p * elementwise_exp2i(half) * elementwise_exp2i(n - half);
}

ELEMENTWISE float elementwise_tanh(float x)
{
    float a = elementwise_abs(x);
    a = a > 10.0f ? 10.0f : a;
    uint32_t n;
    const float p = elementwise_reduced_exp(2.0f * a, &n);
    const float s = elementwise_exp2i(n);
    const float e = s * p + (s - 1.0f); /* e^2a - 1 */
    return elementwise_copysign(e / (e + 2.0f), x);
}

ELEMENTWISE float elementwise_sigmoid(float x)
{
    const float e = elementwise_exp(-elementwise_abs(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

/* N. Juffa's two polynomials, with products and sums apart. */
ELEMENTWISE float elementwise_erf(float x)
{
    const float t = elementwise_abs(x);
    const float s = x * x;
    float big = -1.72853470e-5f * t + 3.83197126e-4f;
    const float u = -3.88396438e-3f * t + 2.42546219e-2f;
    big = big * s + u;
    big = big * t + -1.06777877e-1f;
    big = big * t + -6.34846687e-1f;
    big = big * t + -1.28717512e-1f;
    big = big * t - t;
    big = t > 4.0f ? -105.0f : big; /* 1 to the last bit; the polynomial is fitted up to there */
    big = elementwise_copysign(1.0f - elementwise_exp(big), x);
    float small = -5.96761703e-4f;
    small = small * s + 4.99119423e-3f;
    small = small * s + -2.67681349e-2f;
    small = small * s + 1.12819925e-1f;
    small = small * s + -3.76125336e-1f;
    small = small * s + 1.28379166e-1f;
    small = small * x + x;
    return t > 0.927734375f ? big : small;
}

/* NaN stays NaN, as in PyTorch. */
ELEMENTWISE float elementwise_relu(float x)
{
    return x <= 0.0f ? 0.0f : x;
}

/* y: the output (or the input: they have the same sign). The derivative at 0 is 0. */
ELEMENTWISE float elementwise_relu_backward(float dy, float y)
{
    return y <= 0.0f ? 0.0f : dy;
}

ELEMENTWISE float elementwise_tanh_backward(float dy, float y)
{
    return dy * (1.0f - y * y);
}

ELEMENTWISE float elementwise_sigmoid_backward(float dy, float y)
{
    return dy * ((1.0f - y) * y);
}

ELEMENTWISE float elementwise_gelu_erf(float x)
{
    return 0.5f * x * (1.0f + elementwise_erf(x * 0.707106781186547524f));
}

ELEMENTWISE float elementwise_gelu_erf_backward(float dy, float x)
{
    const float cdf = 0.5f * (1.0f + elementwise_erf(x * 0.707106781186547524f));
    const float pdf = 0.398942280401432678f * elementwise_exp(-0.5f * (x * x));
    return dy * (cdf + x * pdf);
}

ELEMENTWISE float elementwise_gelu_tanh(float x)
{
    const float inner = 0.797884560802865356f * (x + 0.044715f * (x * x * x));
    return 0.5f * x * (1.0f + elementwise_tanh(inner));
}

ELEMENTWISE float elementwise_gelu_tanh_backward(float dy, float x)
{
    const float x2 = x * x;
    const float t = elementwise_tanh(0.797884560802865356f * (x + 0.044715f * (x2 * x)));
    const float inner = 0.797884560802865356f * (1.0f + 3.0f * 0.044715f * x2);
    return dy * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * inner);
}

/* One parameter's step of torch.optim.SGD. g: the gradient, already divided. m: its momentum (any value where
 * use_momentum is false or first is true). Returns the new weight; *ret_m is the new momentum. */
ELEMENTWISE float elementwise_sgd(float g, float w, float m, float lr, float momentum, float one_minus_dampening,
                                  float weight_decay, bool use_momentum, bool nesterov, bool maximize, bool first,
                                  float *ret_m)
{
    float d = maximize ? -g : g;
    if (weight_decay != 0.0f)
        d = d + weight_decay * w;
    if (use_momentum) {
        m = first ? d : momentum * m + one_minus_dampening * d;
        d = nesterov ? d + momentum * m : m;
    }
    *ret_m = m;
    return w - lr * d;
}
#endif
