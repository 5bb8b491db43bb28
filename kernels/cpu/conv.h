#ifndef KERNELS_CPU_CONV_H
#define KERNELS_CPU_CONV_H
/* What the files of a convolution share. */
#include "kernels/cpu/op.h"

/*
 * Gradients from a max pool's winners alone (conv_winners.c): images are turned to channels-last, a patch is `segments`
 * rows of the kernel, each of `length` contiguous floats.
 */
struct conv_winners {
    const struct winner_level *level; /* NULL: not for this shape */
    struct winner_shape shape;
    size_t segments, length, segment_vectors;
    size_t patch; /* floats of a patch filled up to vectors */
    size_t image; /* floats of a channels-last image and what may be read behind it */
    size_t block; /* images that are turned at a time */
    uint32_t *place, *lanes;
    uint32_t *pixel; /* [pixels]: of an output pixel's patch in a channels-last image */
};

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
    struct conv_winners winners;
};

/* Decides whether winners are the way for this shape, and prepares them. */
tally_status conv_winners_prepare(const struct kernel_op *op, struct conv_plan *plan, struct tally_error *err);
void conv_winners_destroy(struct conv_plan *plan);
/* Floats of workspace. */
size_t conv_winners_workspace(const struct kernel_op *op);
void conv_winners_backward_data(const struct kernel_op *op, const struct kernel_args *args);
/* Channels [begin, end), all of one group. */
void conv_winners_backward_weight(const struct kernel_op *op, const struct kernel_args *args, size_t begin, size_t end);

/* dy of channels [begin, end) of image r, with zeros where the ReLU was at 0. */
const float *conv_masked_dy(const struct kernel_op *op, const struct kernel_args *args, size_t r, size_t begin,
                            size_t end);
#endif
