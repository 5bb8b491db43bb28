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
    bool data;                        /* for the gradient of the input too */
    struct winner_shape shape;
    size_t segments, length, segment_vectors;
    size_t patch; /* floats of a patch filled up to vectors */
    size_t image; /* floats of a channels-last image and what may be read behind it */
    size_t block; /* images that are turned at a time */
    uint32_t *place, *lanes;
    uint32_t *pixel; /* [pixels]: of an output pixel's patch in a channels-last image */
};

/*
 * The gradient of the input as a convolution of dy with the weights turned round (conv_turned.c): where the stride is 1
 * and the output is hardly smaller than the input. All of one group.
 */
struct conv_turned {
    bool used;
    size_t patch;         /* out * kernel area */
    size_t padding[2];    /* around dy */
    size_t height, width; /* of dy with its padding */
    size_t *offset;       /* [patch]: as conv_plan.offset, in the padded dy */
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
    struct conv_turned turned;
};

/* Decides whether winners are the way for this shape, and prepares them. */
tally_status conv_winners_prepare(const struct kernel_op *op, struct conv_plan *plan, struct tally_error *err);
void conv_winners_destroy(struct conv_plan *plan);
/* Floats of workspace. */
size_t conv_winners_workspace(const struct kernel_op *op);
void conv_winners_backward_data(const struct kernel_op *op, const struct kernel_args *args);
/* Channels [begin, end), all of one group. */
void conv_winners_backward_weight(const struct kernel_op *op, const struct kernel_args *args, size_t begin, size_t end);

/* The same three for a turned convolution. */
tally_status conv_turned_prepare(const struct kernel_op *op, struct conv_plan *plan, struct tally_error *err);
size_t conv_turned_workspace(const struct kernel_op *op);
void conv_turned_backward_data(const struct kernel_op *op, const struct kernel_args *args);

/* The gradient of the convolution's own output, channels [begin, end) of image r: dy itself, or spread to the winners
 * in buffer. */
const float *conv_gradient(const struct kernel_op *op, const struct kernel_args *args, size_t r, size_t begin,
                           size_t end, float *buffer);
/* (channels, height, width) into the middle of (channels, height + 2 padding[0], width + 2 padding[1]), whose border is
 * left as it is. */
void conv_pad(size_t channels, size_t height, size_t width, const size_t padding[2], const float *from, float *to);
/* dy of channels [begin, end) of image r, with zeros where the ReLU was at 0. */
const float *conv_masked_dy(const struct kernel_op *op, const struct kernel_args *args, size_t r, size_t begin,
                            size_t end);
#endif
