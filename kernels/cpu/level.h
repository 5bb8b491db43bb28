#ifndef KERNELS_CPU_LEVEL_H
#define KERNELS_CPU_LEVEL_H
/*
 * What one instruction set offers to the operations above: loops over contiguous floats, without any knowledge of
 * descriptors, buffers or errors. The files compiled once a level (gemm.c, pointwise.c, loss.c, pool.c, patch.c,
 * winners.c) fill in a part each; level.c joins them.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/cpu/gemm.h"
#include "kernels/kernels.h"

struct pointwise_level {
    void (*sum)(size_t n, float *dst, const float *a, const float *b);
    void (*sgd)(size_t n, const struct kernel_sgd *sgd, float weight, const float *a, const float *b, const float *w,
                const float *m, float *w_out, float *m_out);
    void (*forward)(enum kernel_function function, size_t n, const float *x, float *y);
    /* dx = or += the derivative of the function at x (where it gave y) times dy. */
    void (*backward)(enum kernel_function function, size_t n, const float *dy, const float *x, const float *y,
                     float *dx, bool accumulate);
    void (*relu_mask)(size_t n, const float *y, float *dy);       /* dy = 0 where y <= 0 */
    void (*bias_relu)(size_t n, float bias, bool relu, float *y); /* y = y + bias, and max(y, 0) */
    void (*column_sums)(size_t rows, size_t columns, const float *x, size_t stride,
                        float *sums);         /* sums[j] = sum over rows, in order */
    float (*total)(size_t n, const float *x); /* in 16 interleaved sums */
};

struct loss_rows {
    const float *x;
    size_t count, stride; /* rows; floats from one to the next, of dx too */
    size_t classes;
    const int64_t *targets; /* [count] */
    int64_t ignore_index;
    float smoothing;
};

struct loss_level {
    /* saved (may be NULL): 2 * count floats for backward. */
    void (*cross_entropy)(const struct loss_rows *rows, float *saved, struct kernel_loss *ret_loss);
    void (*cross_entropy_backward)(const struct loss_rows *rows, const float *saved, float *dx, bool accumulate);
    double (*squared_error)(size_t n, const float *x, const float *target);
    void (*squared_error_backward)(size_t n, const float *x, const float *target, float *dx, bool accumulate);
};

/* One channel's plane under a pool. */
struct pool_plane {
    size_t in_height, in_width, out_height, out_width;
    struct kernel_window window;
    bool count_include_pad;
    size_t divisor_override;
};

struct pool_level {
    /* y: the maxima of x + bias (relu: or 0); winner (may be NULL): the index in the plane of each. */
    void (*max_forward)(const struct pool_plane *plane, const float *x, float bias, bool relu, float *y,
                        uint32_t *winner);
    /* dx += dy at the winners; dx is the plane's. */
    void (*max_backward)(const struct pool_plane *plane, const float *dy, const uint32_t *winner, float *dx);
    void (*average_forward)(const struct pool_plane *plane, const float *x, float *y);
    void (*average_backward)(const struct pool_plane *plane, const float *dy, float *dx); /* dx += */
};

/* The patches of one image (or of one group of its channels): the matrix of (channels * kernel area) x (output pixels),
 * which is never stored whole. */
struct patches {
    const float *image;   /* (channels, height, width), padding included */
    const size_t *offset; /* of element (channel, kernel row, kernel column) in the image, for output pixel 0 */
    size_t image_width;   /* padding included */
    size_t out_width;
    size_t stride[2];
};

struct patch_level {
    gemm_pack *pack; /* source: struct patches; k over (channel, kernel row, kernel column), j over output pixels */
    /* image += the columns, each at its pixels: the transpose of pack. columns: elements [k0, k0 + kc) of a patch x
     * pixels. */
    void (*scatter)(const struct patches *patches, size_t k0, size_t kc, size_t pixels, const float *columns,
                    float *image);
};

/*
 * Gradients of a convolution behind which a max pool stands: only the winners have one. Images are channels-last,
 * (height, width, channels), so that what lies under one row of the kernel is contiguous: a segment. A patch is
 * segments of one length, each filled up to whole vectors.
 */
struct winner_shape {
    size_t vectors;        /* of a patch */
    const uint32_t *place; /* [vectors]: each vector's first float in the image, for output pixel 0 */
    const uint32_t *lanes; /* [vectors]: how many of its floats belong to the segment */
};

struct winner {
    uint32_t at; /* floats: of the patch in the images (weight), of the channel's weights (data) */
    float dy;
};

struct winner_level {
    size_t vector; /* floats */
    /* sums[vectors * vector] += sum over the winners of dy * the patch at images + at. Up to a vector is read behind a
     * patch. */
    void (*weight)(const struct winner_shape *shape, size_t n, const struct winner *winners, const float *images,
                   float *sums);
    /* For each pixel p: the patch at image + pixel[p] += sum over winners start[p] .. start[p + 1] of dy * weights[at
     * ...]. */
    void (*data)(const struct winner_shape *shape, size_t pixels, const uint32_t *pixel, const uint32_t *start,
                 const struct winner *winners, const float *weights, float *image);
};

struct cpu_level {
    const char *name;
    const struct gemm_level *gemm;
    const struct pointwise_level *pointwise;
    const struct loss_level *loss;
    const struct pool_level *pool;
    const struct patch_level *patch;
    const struct winner_level *winner;
    const struct winner_level *narrow_winner; /* of at most 8 floats: no worse for short segments */
};

extern const struct cpu_level cpu_level_generic, cpu_level_avx2, cpu_level_avx512;
#endif
