#ifndef KERNELS_CPU_SIMD_H
#define KERNELS_CPU_SIMD_H
/*
 * The vectors of the instruction set that a file of one level is compiled for. Only those files include this header;
 * they are compiled once a level, and LEVEL(name) gives every function its own name at each.
 *
 * What the levels share is the order of every sum, not its rounding: avx2 and avx512 fuse a product into its sum,
 * generic does not.
 */
#include <stddef.h>
#include <string.h>

#define LEVEL_JOIN2(name, level) name##_##level
#define LEVEL_JOIN(name, level) LEVEL_JOIN2(name, level)
#define LEVEL(name) LEVEL_JOIN(name, CPU_LEVEL)

#define FORCE_INLINE static inline __attribute__((always_inline))

/* v_stream writes past the caches, to a whole vector's alignment; v_stream_end stands before anybody else is told.
 * VL: floats of a vector. TILE_ROWS x TILE_VECTORS: the accumulators of a product's tile, as many as the registers hold
 * beside its operands. */
#if defined(__AVX512F__)
#include <immintrin.h>
#define VL 16
#define TILE_ROWS 6
#define TILE_VECTORS 4
typedef __m512 vf;
FORCE_INLINE vf v_zero(void)
{
    return _mm512_setzero_ps();
}
FORCE_INLINE vf v_set1(float x)
{
    return _mm512_set1_ps(x);
}
FORCE_INLINE vf v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
FORCE_INLINE void v_store(float *p, vf x)
{
    _mm512_storeu_ps(p, x);
}
FORCE_INLINE void v_stream(float *p, vf x)
{
    _mm512_stream_ps(p, x);
}
FORCE_INLINE void v_stream_end(void)
{
    _mm_sfence();
}
FORCE_INLINE vf v_add(vf a, vf b)
{
    return _mm512_add_ps(a, b);
}
FORCE_INLINE vf v_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
/* The first n lanes, 1 <= n <= VL; the others are 0 and their memory is not touched. */
FORCE_INLINE vf v_load_n(const float *p, size_t n)
{
    return _mm512_maskz_loadu_ps((__mmask16)(0xffffu >> (16 - n)), p);
}
FORCE_INLINE void v_store_n(float *p, vf x, size_t n)
{
    _mm512_mask_storeu_ps(p, (__mmask16)(0xffffu >> (16 - n)), x);
}
#elif defined(__AVX2__)
#include <immintrin.h>
#define VL 8
#define TILE_ROWS 6
#define TILE_VECTORS 2
typedef __m256 vf;
FORCE_INLINE vf v_zero(void)
{
    return _mm256_setzero_ps();
}
FORCE_INLINE vf v_set1(float x)
{
    return _mm256_set1_ps(x);
}
FORCE_INLINE vf v_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
FORCE_INLINE void v_store(float *p, vf x)
{
    _mm256_storeu_ps(p, x);
}
FORCE_INLINE void v_stream(float *p, vf x)
{
    _mm256_stream_ps(p, x);
}
FORCE_INLINE void v_stream_end(void)
{
    _mm_sfence();
}
FORCE_INLINE vf v_add(vf a, vf b)
{
    return _mm256_add_ps(a, b);
}
FORCE_INLINE vf v_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
FORCE_INLINE vf v_load_n(const float *p, size_t n)
{
    float lanes[VL] __attribute__((aligned(32))) = {0};
    memcpy(lanes, p, n * sizeof(float));
    return _mm256_load_ps(lanes);
}
FORCE_INLINE void v_store_n(float *p, vf x, size_t n)
{
    float lanes[VL] __attribute__((aligned(32)));
    _mm256_store_ps(lanes, x);
    memcpy(p, lanes, n * sizeof(float));
}
#else
#define VL 4
#define TILE_ROWS 4
#define TILE_VECTORS 2
typedef float vf __attribute__((vector_size(16)));
FORCE_INLINE vf v_zero(void)
{
    return (vf){0, 0, 0, 0};
}
FORCE_INLINE vf v_set1(float x)
{
    return (vf){x, x, x, x};
}
FORCE_INLINE vf v_load(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
FORCE_INLINE void v_store(float *p, vf x)
{
    memcpy(p, &x, sizeof x);
}
FORCE_INLINE void v_stream(float *p, vf x)
{
    v_store(p, x);
}
FORCE_INLINE void v_stream_end(void)
{
}
FORCE_INLINE vf v_add(vf a, vf b)
{
    return a + b;
}
FORCE_INLINE vf v_fma(vf a, vf b, vf c)
{
    return a * b + c;
}
FORCE_INLINE vf v_load_n(const float *p, size_t n)
{
    vf x = {0, 0, 0, 0};
    memcpy(&x, p, n * sizeof(float));
    return x;
}
FORCE_INLINE void v_store_n(float *p, vf x, size_t n)
{
    memcpy(p, &x, n * sizeof(float));
}
#endif

#define PANEL (TILE_VECTORS * VL) /* columns of a packed panel */
#define DO_PRAGMA(x) _Pragma(#x)
#define UNROLL DO_PRAGMA(GCC unroll 8)
#endif
