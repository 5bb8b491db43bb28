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

enum tile_mode {
    TILE_SET = 0,
    TILE_ADD = 1,
    TILE_FETCH = 2
}; /* C = or C +=; FETCH: C is far away, ask for it before it is written */

typedef void tile_function(size_t kc, const float *const *a, size_t a_k, const size_t *a_k_offset, const float *b,
                           float *c, size_t ldc, size_t last, enum tile_mode mode, const float *ahead,
                           size_t ahead_stride);

/* A matrix of more is not expected in the second-level cache. */
#define FAR_FLOATS ((size_t)1 << 18)
/* What is asked of memory for later while a tile is computed: a line of each of TILE_ROWS rows for every so many steps.
 */
#define AHEAD_FLOATS 16

/*
 * c[rows][vectors] (+)= sum over k. last: lanes of the last vector that are columns of C.
 * ahead: TILE_ROWS rows of kc floats, ahead_stride apart, that will be read soon; NULL: none.
 */
FORCE_INLINE void tile(const size_t rows, const size_t vectors, const bool table, size_t kc, const float *const *a,
                       size_t a_k, const size_t *a_k_offset, const float *b, float *c, size_t ldc, size_t last,
                       enum tile_mode mode, const float *ahead, size_t ahead_stride)
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
    if (mode & TILE_FETCH) {
        UNROLL
        for (size_t i = 0; i < rows; i++) {
            UNROLL
            for (size_t v = 0; v < vectors * VL; v += AHEAD_FLOATS)
                __builtin_prefetch(c + i * ldc + v, 1);
        }
    }
    const bool accumulate = mode & TILE_ADD;
    const size_t step = ahead ? AHEAD_FLOATS : kc;
    size_t offset = 0;
    for (size_t k = 0; k < kc;) {
        const size_t end = k + step < kc ? k + step : kc;
        if (ahead) {
            UNROLL
            for (size_t i = 0; i < TILE_ROWS; i++)
                __builtin_prefetch(ahead + i * ahead_stride + k);
        }
        for (; k < end; k++) {
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
    }
    UNROLL
    for (size_t i = 0; i < rows; i++) {
        float *ci = c + i * ldc;
        UNROLL
        for (size_t v = 0; v < vectors; v++) {
            if (v + 1 < vectors || last == VL)
                v_store(ci + v * VL, accumulate ? v_add(v_load(ci + v * VL), sum[i][v]) : sum[i][v]);
            else
                v_store_n(ci + v * VL, accumulate ? v_add(v_load_n(ci + v * VL, last), sum[i][v]) : sum[i][v], last);
        }
    }
}

#define TILE_FUNCTION(rows, vectors, table)                                                                            \
    static void tile_##rows##_##vectors##_##table(                                                                     \
        size_t kc, const float *const *a, size_t a_k, const size_t *a_k_offset, const float *b, float *c, size_t ldc,  \
        size_t last, enum tile_mode mode, const float *ahead, size_t ahead_stride)                                     \
    {                                                                                                                  \
        tile(rows, vectors, table, kc, a, a_k, a_k_offset, b, c, ldc, last, mode, ahead, ahead_stride);                \
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

/* Where a call stands: a block of k and of columns. */
struct position {
    size_t k0, kc, j0, nc;
    size_t tiles; /* computed in this block so far */
};

/* The next block of B's source, in pieces of TILE_ROWS rows and kc columns, a piece a tile, as long as there are
 * pieces. */
static const float *ahead_in_b(const struct gemm_call *call, const struct position *at)
{
    const bool next_columns = at->k0 + at->kc >= call->k;
    const size_t k = next_columns ? 0 : at->k0 + at->kc, j = next_columns ? at->j0 + at->nc : at->j0;
    if (j >= call->n)
        return NULL;
    const size_t across = (min_size(BLOCK_N, call->n - j) + at->kc - 1) / at->kc;
    const size_t row = at->tiles / across * TILE_ROWS, column = at->tiles % across * at->kc;
    if (row + TILE_ROWS > min_size(at->kc, call->k - k) || j + column + at->kc > call->n)
        return NULL;
    return call->ahead->data + (k + row) * call->ahead->stride + j + column;
}

/* A streams by: the next tile's rows if there is one panel, else those of the next rows' block, a share of them under
 * each panel. */
static const float *ahead_in_a(const struct gemm_call *call, const struct position *at, size_t i0, size_t i, size_t j)
{
    const size_t panels = (at->nc + PANEL - 1) / PANEL, tile = (i - i0) / TILE_ROWS;
    size_t row = panels == 1 ? i + TILE_ROWS : i + BLOCK_M, k = at->k0;
    if (tile % panels != j / PANEL)
        return NULL;
    if (row >= call->m) {
        row = panels == 1 ? 0 : i - i0;
        k += at->kc;
    }
    if (row + TILE_ROWS > call->m || k + at->kc > call->k)
        return NULL;
    return call->a + row * call->a_row + k;
}

/* The rows [i0, i1) under one packed panel. */
static void run_panel(const struct gemm_call *call, struct position *at, size_t i0, size_t i1, size_t j)
{
    const float *panel = call->workspace + j * at->kc;
    const size_t k0 = at->k0, width = min_size(PANEL, at->nc - j), vectors = (width + VL - 1) / VL;
    const size_t last = width - (vectors - 1) * VL;
    const bool table = call->a_row_offset != NULL, stream = !table && call->a_k == 1 && call->m * call->k > FAR_FLOATS;
    const enum tile_mode mode =
        (call->accumulate || k0 > 0 ? TILE_ADD : TILE_SET) | (call->m * call->ldc > FAR_FLOATS ? TILE_FETCH : TILE_SET);
    for (size_t i = i0; i < i1; i += TILE_ROWS) {
        const size_t rows = min_size(TILE_ROWS, i1 - i);
        const float *a[TILE_ROWS];
        const float *ahead = call->ahead ? ahead_in_b(call, at) : stream ? ahead_in_a(call, at, i0, i, j) : NULL;
        for (size_t r = 0; r < rows; r++)
            a[r] = table ? call->a + call->a_row_offset[i + r] : call->a + (i + r) * call->a_row + k0 * call->a_k;
        tiles[table][rows - 1][vectors - 1](at->kc, a, call->a_k, table ? call->a_k_offset + k0 : NULL, panel,
                                            call->c + i * call->ldc + at->j0 + j, call->ldc, last, mode, ahead,
                                            call->ahead ? call->ahead->stride : call->a_row);
        at->tiles++;
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
    for (size_t j0 = 0; j0 < call->n; j0 += BLOCK_N)
        for (size_t k0 = 0; k0 < call->k; k0 += kc_max) { /* inside, so that a block of C stays in the cache */
            struct position at = {
                .k0 = k0, .kc = min_size(kc_max, call->k - k0), .j0 = j0, .nc = min_size(BLOCK_N, call->n - j0)};
            call->pack(call->pack_source, k0, at.kc, j0, at.nc, call->workspace);
            for (size_t i0 = 0; i0 < call->m; i0 += BLOCK_M)
                for (size_t j = 0; j < at.nc; j += PANEL)
                    run_panel(call, &at, i0, min_size(i0 + BLOCK_M, call->m), j);
        }
}

static size_t gemm_workspace(size_t n, size_t k)
{
    return (min_size(n, BLOCK_N) + PANEL - 1) / PANEL * PANEL * block_k(k);
}

static void pack_rows(const void *source, size_t k0, size_t kc, size_t j0, size_t nc, float *block)
{
    const struct gemm_matrix *b = source;
    const size_t rest = nc % PANEL, full = nc - rest, pitch = (rest + VL - 1) / VL * VL;
    for (size_t k = 0; k < kc; k++) {
        const float *from = b->data + (k0 + k) * b->stride + j0;
        for (size_t j = 0; j < full; j += PANEL) {
            float *to = block + j * kc + k * PANEL;
            UNROLL
            for (size_t v = 0; v < PANEL; v += VL)
                v_store(to + v, v_load(from + j + v));
        }
        float *to = block + full * kc + k * pitch;
        for (size_t v = 0; v < rest; v += VL)
            v_store(to + v, rest - v < VL ? v_load_n(from + full + v, rest - v) : v_load(from + full + v));
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

static void pack_columns_panel(const float *from, size_t stride, size_t kc, size_t width, float *panel)
{
    const size_t pitch = (width + VL - 1) / VL * VL;
    size_t j = 0;
#if VL >= 8
    for (; j + 8 <= width; j += 8) {
        size_t k = 0;
        for (; k + 8 <= kc; k += 8) {
            __m256 r[8];
            UNROLL
            for (size_t i = 0; i < 8; i++)
                r[i] = _mm256_loadu_ps(from + (j + i) * stride + k);
            transpose_8x8(r);
            UNROLL
            for (size_t i = 0; i < 8; i++)
                _mm256_storeu_ps(panel + (k + i) * pitch + j, r[i]);
        }
        for (; k < kc; k++)
            for (size_t i = j; i < j + 8; i++)
                panel[k * pitch + i] = from[i * stride + k];
    }
#endif
    for (; j < width; j++)
        for (size_t k = 0; k < kc; k++)
            panel[k * pitch + j] = from[j * stride + k];
    for (; j < pitch; j++)
        for (size_t k = 0; k < kc; k++)
            panel[k * pitch + j] = 0;
}

static void pack_columns(const void *source, size_t k0, size_t kc, size_t j0, size_t nc, float *block)
{
    const struct gemm_matrix *b = source;
    for (size_t j = 0; j < nc; j += PANEL)
        pack_columns_panel(b->data + (j0 + j) * b->stride + k0, b->stride, kc, min_size(PANEL, nc - j), block + j * kc);
}

FORCE_INLINE float relu_or_self(float x, bool relu)
{
    return relu && x <= 0 ? 0 : x; /* NaN stays */
}

#if VL >= 8
FORCE_INLINE void transpose_bias_8x8(const float *in, size_t in_stride, const float *bias, bool relu, float *out,
                                     size_t out_stride)
{
    __m256 r[8];
    UNROLL
    for (size_t t = 0; t < 8; t++)
        r[t] = _mm256_loadu_ps(in + t * in_stride);
    transpose_8x8(r);
    UNROLL
    for (size_t t = 0; t < 8; t++) {
        if (bias)
            r[t] = _mm256_add_ps(r[t], _mm256_loadu_ps(bias));
        if (relu) /* not a maximum: that would keep -0 */
            r[t] = _mm256_andnot_ps(_mm256_cmp_ps(r[t], _mm256_setzero_ps(), _CMP_LE_OQ), r[t]);
        _mm256_storeu_ps(out + t * out_stride, r[t]);
    }
}
#endif

static void transpose_bias(size_t rows, size_t columns, const float *in, size_t in_stride, const float *bias, bool relu,
                           float *out, size_t out_stride)
{
#if VL >= 8
    if (rows >= 8 && columns >= 8) {
        /* What is left at an edge is done together with what lies before it, once more: the same numbers. */
        for (size_t i = 0; i < rows; i += 8) {
            i = min_size(i, rows - 8);
            for (size_t j = 0; j < columns; j += 8) {
                j = min_size(j, columns - 8);
                transpose_bias_8x8(in + i * in_stride + j, in_stride, bias ? bias + i : NULL, relu,
                                   out + j * out_stride + i, out_stride);
            }
        }
        return;
    }
#endif
    for (size_t i = 0; i < rows; i++)
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
