#ifndef KERNELS_CPU_CONV_H
#define KERNELS_CPU_CONV_H
#include "kernels/cpu/op.h"

/* What a convolution works out once. Everything is about one group of channels. */
struct conv_plan {
    size_t in, out;       /* channels of a group */
    size_t patch;         /* in * kernel area: elements under one output pixel */
    size_t pixels;        /* of the convolution's own output */
    size_t height, width; /* of the input with its padding */
    size_t image;         /* in * height * width */
    size_t y_plane;       /* pixels of y: pooled if there is a pool */
    size_t column_rows;   /* rows of the columns' matrix that backward_data makes at a time */
    bool padded;
    struct pool_plane pool;
    size_t *offset;       /* [patch]: of a patch's element in the padded image, for output pixel 0 */
    size_t *pixel_offset; /* [pixels]: of output pixel's patch in the padded image */
};
#endif
