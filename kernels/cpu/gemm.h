#ifndef KERNELS_CPU_GEMM_H
#define KERNELS_CPU_GEMM_H
/*
 * The product of two matrices, C = A B or C += A B, in f32, by the calling thread, without allocating.
 *
 * A is never copied: a tile broadcasts its elements from where they are, by strides or by tables of offsets (so that A
 * may be the patches of an image). B is packed a block at a time into panels of a few vectors' width by the caller's
 * function, which may transpose, or gather patches of an image. C is row-major.
 *
 * Every element of C is a sum over k in ascending order within blocks whose size depends on k alone, the blocks added
 * in order. So its bits depend on neither m nor n, nor on where in C it stands: rows may be computed in any parts.
 */
#include <stdbool.h>
#include <stddef.h>

/*
 * Packs a block of B, rows [k0, k0 + kc) and columns [j0, j0 + nc), as panels one behind the other: a panel has PANEL
 * (simd.h) columns, the last what is left, rounded up to whole vectors with zeros; its rows follow each other without a
 * gap. So panel p begins at block + p * panel * kc.
 */
typedef void gemm_pack(const void *source, size_t k0, size_t kc, size_t j0, size_t nc, float *block);

/* A matrix for the two packers below. */
struct gemm_matrix {
    const float *data;
    size_t stride;
};

struct gemm_call {
    size_t m, n, k;
    const float *a; /* element (i, k): a[i * a_row + k * a_k], or, with tables, a[a_row_offset[i] + a_k_offset[k]] */
    size_t a_row, a_k;
    const size_t *a_row_offset, *a_k_offset; /* both or neither */
    gemm_pack *pack;
    const void *pack_source;
    const struct gemm_matrix *ahead; /* where pack_rows will read: fetched into the cache beforehand; NULL: no need */
    float *c;                        /* element (i, j): c[i * ldc + j] */
    size_t ldc;
    bool accumulate;  /* C += A B */
    float *workspace; /* gemm_workspace(n, k) floats, 64-byte aligned */
};

/* The functions of one level. */
struct gemm_level {
    void (*run)(const struct gemm_call *call);
    size_t (*workspace)(size_t n, size_t k); /* floats */
    gemm_pack *pack_rows;                    /* B(k, j) = data[k * stride + j]; source: struct gemm_matrix */
    gemm_pack *pack_columns;                 /* B(k, j) = data[j * stride + k] */
    /* out = in transposed, with a bias for each row of in (NULL: none) and max(., 0) if relu. in: (rows, columns), out:
     * (columns, rows). */
    void (*transpose_bias)(size_t rows, size_t columns, const float *in, size_t in_stride, const float *bias, bool relu,
                           float *out, size_t out_stride);
};
#endif
