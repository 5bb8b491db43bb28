/* One level's product: see gemm.h. Compiled once for each instruction set. */
#include "kernels/cpu/gemm.h"

#include <assert.h>

#include "kernels/cpu/level.h"
#include "kernels/cpu/simd.h"

/* Of k in a block: a panel of so many rows stays in the first-level cache (32 KiB and more) beside the streams of A. */
#define BLOCK_K ((size_t)(VL == 16 ? 128 : 256))
/* Of columns packed at a time: a block of B, BLOCK_K x BLOCK_N floats, stays in the second-level cache. */
#define BLOCK_N ((size_t)512)
/* Of rows that pass under one panel before the next is taken: their part of A stays in the second-level cache. */
#define BLOCK_M ((size_t)96)

typedef void tile_function(size_t kc, const float *const *a, size_t a_k, const size_t *a_k_offset, const float *b,
                           float *c, size_t ldc, size_t last, bool accumulate);

/* c[rows][vectors] (+)= sum over k. last: lanes of the last vector that are columns of C. */
FORCE_INLINE void tile(const size_t rows, const size_t vectors, const bool table, size_t kc, const float *const *a,
                       size_t a_k, const size_t *a_k_offset, const float *b, float *c, size_t ldc, size_t last,
                       bool accumulate)
{
    vf sum[TILE_ROWS][TILE_VECTORS];
    const float *row[TILE_ROWS];
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        row[i] = a[i];
        UNROLL
        for (size_t v = 0; v < vectors; v++)
            sum[i][v] = v_zero();
    }
    size_t offset = 0;
    for (size_t k = 0; k < kc; k++) {
        vf bv[TILE_VECTORS];
        if (table)
            offset = a_k_offset[k];
        UNROLL
        for (size_t v = 0; v < vectors; v++)
            bv[v] = v_load(b + v * VL);
        UNROLL
        for (size_t i = 0; i < rows; i++) {
            const vf av = v_set1(row[i][offset]);
            UNROLL
            for (size_t v = 0; v < vectors; v++)
                sum[i][v] = v_fma(av, bv[v], sum[i][v]);
        }
        b += vectors * VL;
        if (!table)
            offset += a_k;
    }
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        float *ci = c + i * ldc;
        UNROLL
        for (size_t v = 0; v < vectors; v++) {
            if (v + 1 < vectors || last == VL) {
                v_store(ci + v * VL, accumulate ? v_add(v_load(ci + v * VL), sum[i][v]) : sum[i][v]);
            } else {
                v_store_n(ci + v * VL, accumulate ? v_add(v_load_n(ci + v * VL, last), sum[i][v]) : sum[i][v], last);
            }
        }
    }
}

#define TILE_FUNCTION(rows, vectors, table)                                                                            \
    static void tile_##rows##_##vectors##_##table(size_t kc, const float *const *a, size_t a_k,                        \
                                                  const size_t *a_k_offset, const float *b, float *c, size_t ldc,      \
                                                  size_t last, bool accumulate)                                        \
    {                                                                                                                  \
        tile(rows, vectors, table, kc, a, a_k, a_k_offset, b, c, ldc, last, accumulate);                               \
    }
#define TILE_FUNCTIONS_ROW(rows, table)                                                                                \
    TILE_FUNCTION(rows, 1, table)                                                                                      \
    TILE_FUNCTION(rows, 2, table)                                                                                      \
    TILE_FUNCTIONS_WIDE(rows, table)
#if TILE_VECTORS == 4
#define TILE_FUNCTIONS_WIDE(rows, table) TILE_FUNCTION(rows, 3, table) TILE_FUNCTION(rows, 4, table)
#define TILE_ENTRY(rows, table)                                                                                        \
    {                                                                                                                  \
        tile_##rows##_1_##table, tile_##rows##_2_##table, tile_##rows##_3_##table, tile_##rows##_4_##table             \
    }
#else
#define TILE_FUNCTIONS_WIDE(rows, table)
#define TILE_ENTRY(rows, table)                                                                                        \
    {                                                                                                                  \
        tile_##rows##_1_##table, tile_##rows##_2_##table                                                               \
    }
#endif
#if TILE_ROWS == 6
#define TILE_FUNCTIONS(table)                                                                                          \
    TILE_FUNCTIONS_ROW(1, table)                                                                                       \
    TILE_FUNCTIONS_ROW(2, table)                                                                                       \
    TILE_FUNCTIONS_ROW(3, table)                                                                                       \
    TILE_FUNCTIONS_ROW(4, table)                                                                                       \
    TILE_FUNCTIONS_ROW(5, table)                                                                                       \
    TILE_FUNCTIONS_ROW(6, table)
#define TILE_TABLE(table)                                                                                              \
    {                                                                                                                  \
        TILE_ENTRY(1, table), TILE_ENTRY(2, table), TILE_ENTRY(3, table), TILE_ENTRY(4, table), TILE_ENTRY(5, table),  \
            TILE_ENTRY(6, table)                                                                                       \
    }
#else
#define TILE_FUNCTIONS(table)                                                                                          \
    TILE_FUNCTIONS_ROW(1, table)                                                                                       \
    TILE_FUNCTIONS_ROW(2, table)                                                                                       \
    TILE_FUNCTIONS_ROW(3, table)                                                                                       \
    TILE_FUNCTIONS_ROW(4, table)
#define TILE_TABLE(table)                                                                                              \
    {                                                                                                                  \
        TILE_ENTRY(1, table), TILE_ENTRY(2, table), TILE_ENTRY(3, table), TILE_ENTRY(4, table)                         \
    }
#endif

TILE_FUNCTIONS(0)
TILE_FUNCTIONS(1)
static tile_function *const tiles[2][TILE_ROWS][TILE_VECTORS] = {TILE_TABLE(0), TILE_TABLE(1)};

static size_t min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

/* The rows [i0, i1) under one packed panel. */
static void run_panel(const struct gemm_call *call, size_t k0, size_t kc, size_t i0, size_t i1, size_t j, size_t width,
                      const float *panel)
{
    const bool table = call->a_row_offset != NULL;
    const size_t vectors = (width + VL - 1) / VL;
    const size_t last = width - (vectors - 1) * VL;
    const bool accumulate = call->accumulate || k0 > 0;
    for (size_t i = i0; i < i1; i += TILE_ROWS) {
        const size_t rows = min_size(TILE_ROWS, i1 - i);
        const float *a[TILE_ROWS];
        for (size_t r = 0; r < rows; r++)
            a[r] = table ? call->a + call->a_row_offset[i + r] : call->a + (i + r) * call->a_row + k0 * call->a_k;
        tiles[table][rows - 1][vectors - 1](kc, a, call->a_k, table ? call->a_k_offset + k0 : NULL, panel,
                                            call->c + i * call->ldc + j, call->ldc, last, accumulate);
    }
}

/* k is cut into equal blocks, the last a little shorter. */
static size_t block_k(size_t k)
{
    const size_t blocks = (k + BLOCK_K - 1) / BLOCK_K;
    return blocks ? ((k + blocks - 1) / blocks + 7) / 8 * 8 : 8;
}

static void gemm_run(const struct gemm_call *call)
{
    const size_t kc_max = block_k(call->k);
    for (size_t k0 = 0; k0 < call->k; k0 += kc_max) {
        const size_t kc = min_size(kc_max, call->k - k0);
        for (size_t j0 = 0; j0 < call->n; j0 += BLOCK_N) {
            const size_t nc = min_size(BLOCK_N, call->n - j0);
            for (size_t j = 0; j < nc; j += PANEL) {
                const size_t width = min_size(PANEL, nc - j);
                call->pack(call->pack_source, k0, kc, j0 + j, width, (width + VL - 1) / VL * VL,
                           call->workspace + j * kc);
            }
            for (size_t i0 = 0; i0 < call->m; i0 += BLOCK_M) {
                const size_t i1 = min_size(i0 + BLOCK_M, call->m);
                for (size_t j = 0; j < nc; j += PANEL)
                    run_panel(call, k0, kc, i0, i1, j0 + j, min_size(PANEL, nc - j), call->workspace + j * kc);
            }
        }
    }
}

static size_t gemm_workspace(size_t n, size_t k)
{
    return (min_size(n, BLOCK_N) + PANEL - 1) / PANEL * PANEL * block_k(k);
}

static void pack_rows(const void *source, size_t k0, size_t kc, size_t j0, size_t width, size_t pitch, float *panel)
{
    const struct gemm_matrix *b = source;
    const float *from = b->data + k0 * b->stride + j0;
    if (width == PANEL) {
        for (size_t k = 0; k < kc; k++, from += b->stride, panel += PANEL) {
            UNROLL
            for (size_t v = 0; v < TILE_VECTORS; v++)
                v_store(panel + v * VL, v_load(from + v * VL));
        }
        return;
    }
    const size_t last = width - (pitch - VL);
    for (size_t k = 0; k < kc; k++, from += b->stride, panel += pitch) {
        for (size_t v = 0; v + VL < pitch; v += VL)
            v_store(panel + v, v_load(from + v));
        v_store(panel + pitch - VL, v_load_n(from + pitch - VL, last));
    }
}

#if VL >= 8
/* 8 rows of 8 become 8 columns of 8. */
FORCE_INLINE void transpose_8x8(__m256 r[8])
{
    __m256 t[8], u[8];
    UNROLL
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
    }
    UNROLL
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_shuffle_ps(t[i], t[i + 2], 0x44);
        u[i + 1] = _mm256_shuffle_ps(t[i], t[i + 2], 0xee);
        u[i + 2] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0x44);
        u[i + 3] = _mm256_shuffle_ps(t[i + 1], t[i + 3], 0xee);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        r[i] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x20);
        r[i + 4] = _mm256_permute2f128_ps(u[i], u[i + 4], 0x31);
    }
}
#endif

static void pack_columns(const void *source, size_t k0, size_t kc, size_t j0, size_t width, size_t pitch, float *panel)
{
    const struct gemm_matrix *b = source;
    const float *from = b->data + j0 * b->stride + k0;
    size_t j = 0;
#if VL >= 8
    for (; j + 8 <= width; j += 8) {
        size_t k = 0;
        for (; k + 8 <= kc; k += 8) {
            __m256 r[8];
            UNROLL
            for (size_t i = 0; i < 8; i++)
                r[i] = _mm256_loadu_ps(from + (j + i) * b->stride + k);
            transpose_8x8(r);
            UNROLL
            for (size_t i = 0; i < 8; i++)
                _mm256_storeu_ps(panel + (k + i) * pitch + j, r[i]);
        }
        for (; k < kc; k++)
            for (size_t i = j; i < j + 8; i++)
                panel[k * pitch + i] = from[i * b->stride + k];
    }
#endif
    for (; j < width; j++)
        for (size_t k = 0; k < kc; k++)
            panel[k * pitch + j] = from[j * b->stride + k];
    for (; j < pitch; j++)
        for (size_t k = 0; k < kc; k++)
            panel[k * pitch + j] = 0;
}

FORCE_INLINE float relu_or_self(float x, bool relu)
{
    return relu && x <= 0 ? 0 : x; /* NaN stays */
}

static void transpose_bias(size_t rows, size_t columns, const float *in, size_t in_stride, const float *bias, bool relu,
                           float *out, size_t out_stride)
{
    size_t i = 0;
#if VL >= 8
    for (; i + 8 <= rows; i += 8) {
        const __m256 b = bias ? _mm256_loadu_ps(bias + i) : _mm256_setzero_ps();
        size_t j = 0;
        for (; j + 8 <= columns; j += 8) {
            __m256 r[8];
            UNROLL
            for (size_t t = 0; t < 8; t++)
                r[t] = _mm256_loadu_ps(in + (i + t) * in_stride + j);
            transpose_8x8(r);
            UNROLL
            for (size_t t = 0; t < 8; t++) {
                if (bias)
                    r[t] = _mm256_add_ps(r[t], b);
                if (relu) /* not a maximum: that would keep -0 */
                    r[t] = _mm256_andnot_ps(_mm256_cmp_ps(r[t], _mm256_setzero_ps(), _CMP_LE_OQ), r[t]);
                _mm256_storeu_ps(out + (j + t) * out_stride + i, r[t]);
            }
        }
        for (; j < columns; j++)
            for (size_t t = i; t < i + 8; t++)
                out[j * out_stride + t] =
                    relu_or_self(bias ? in[t * in_stride + j] + bias[t] : in[t * in_stride + j], relu);
    }
#endif
    for (; i < rows; i++)
        for (size_t j = 0; j < columns; j++)
            out[j * out_stride + i] =
                relu_or_self(bias ? in[i * in_stride + j] + bias[i] : in[i * in_stride + j], relu);
}

const struct gemm_level LEVEL(cpu_gemm) = {
    .run = gemm_run,
    .workspace = gemm_workspace,
    .pack_rows = pack_rows,
    .pack_columns = pack_columns,
    .transpose_bias = transpose_bias,
};
