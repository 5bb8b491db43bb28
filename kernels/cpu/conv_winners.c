/*
 * Gradients of a convolution with a max pool behind it. A pooled pixel hands its gradient to one pixel of the
 * convolution, so of every four (for a 2 x 2 pool) three have none and the gradient of the convolution's own output
 * need not exist. Exact: what is left out is a product with zero.
 *
 * - weight: for each channel, the sum over its winners of dy times the patch under it, which stays in registers
 *   over the winners of several images.
 * - data: for each pixel of the convolution, the sum over the channels that won there of dy times their weights, then
 *   added to the image at its patch.
 */
#include <stdlib.h>
#include <string.h>

#include "kernels/cpu/conv.h"

/* Floats of the channels-last images that are turned at a time: they stay in the first-level cache. */
#define BLOCK_FLOATS ((size_t)10 << 10)

static tally_status make_tables(const struct kernel_op *op, struct conv_plan *plan, struct tally_error *err)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct kernel_window *w = &d->conv2d.window;
    struct conv_winners *win = &plan->winners;
    const size_t vector = win->level->vector;
    win->place = calloc(win->shape.vectors, sizeof *win->place);
    win->lanes = calloc(win->shape.vectors, sizeof *win->lanes);
    win->pixel = calloc(plan->pixels, sizeof *win->pixel);
    if (!win->place || !win->lanes || !win->pixel)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a convolution's tables");
    for (size_t s = 0; s < win->segments; s++) {
        /* A segment is a row of the kernel, or one element of it where dilation tears the row apart. */
        const bool whole = win->segments == w->kernel[0];
        const size_t row = whole ? s : s / w->kernel[1], column = whole ? 0 : s % w->kernel[1];
        const size_t place = (row * w->dilation[0] * plan->width + column * w->dilation[1]) * plan->in;
        for (size_t v = 0; v < win->segment_vectors; v++) {
            const size_t left = win->length - v * vector;
            win->place[s * win->segment_vectors + v] = (uint32_t)(place + v * vector);
            win->lanes[s * win->segment_vectors + v] = (uint32_t)(left < vector ? left : vector);
        }
    }
    for (size_t p = 0; p < plan->pixels; p++)
        win->pixel[p] = (uint32_t)(plan->pixel_offset[p] * plan->in);
    win->shape.place = win->place;
    win->shape.lanes = win->lanes;
    return TALLY_OK;
}

tally_status conv_winners_prepare(const struct kernel_op *op, struct conv_plan *plan, struct tally_error *err)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct kernel_window *w = &d->conv2d.window;
    struct conv_winners *win = &plan->winners;
    if (!d->conv2d.pool)
        return TALLY_OK;
    const bool whole = w->dilation[1] == 1 || w->kernel[1] == 1;
    win->segments = whole ? w->kernel[0] : w->kernel[0] * w->kernel[1];
    win->length = whole ? w->kernel[1] * plan->in : plan->in;
    const struct winner_level *level = win->length <= 8 ? op->level->narrow_winner : op->level->winner;
    win->segment_vectors = (win->length + level->vector - 1) / level->vector;
    win->shape.vectors = win->segments * win->segment_vectors;
    win->patch = win->shape.vectors * level->vector;
    win->image = cpu_line(plan->image + level->vector);
    win->block = BLOCK_FLOATS / win->image;
    win->block = win->block < 1 ? 1 : win->block > d->rows ? d->rows : win->block;
    /* Worth it where the winners' work, with its filled-up vectors, is at most half of that for all pixels: it needs a
     * load for every product. */
    if (2 * plan->y_plane * win->patch > plan->pixels * plan->patch)
        return TALLY_OK;
    /* Places are 32 bits wide. */
    if (win->block * win->image > UINT32_MAX || plan->out * win->patch > UINT32_MAX)
        return TALLY_OK;
    win->level = level;
    win->data = win->shape.vectors >= 8; /* fewer sums than that at a time wait for each other */
    return make_tables(op, plan, err);
}

void conv_winners_destroy(struct conv_plan *plan)
{
    free(plan->winners.place);
    free(plan->winners.lanes);
    free(plan->winners.pixel);
}

struct winner_buffers {
    float *images;          /* block x image, 2 at least */
    float *weights;         /* out x patch: weights or their gradient, in segments */
    struct winner *winners; /* out x y_plane, or block x y_plane */
    uint32_t *start;        /* pixels + 1 */
};

static struct winner_buffers cut(const struct kernel_op *op, float *workspace, size_t *ret_floats)
{
    const struct conv_plan *plan = op->plan;
    const struct conv_winners *win = &plan->winners;
    const size_t most = plan->out > win->block ? plan->out : win->block;
    struct winner_buffers b;
    const size_t images = cpu_line((win->block > 2 ? win->block : 2) * win->image),
                 weights = cpu_line(plan->out * win->patch),
                 winners = cpu_line((most * plan->y_plane + 1) * sizeof(struct winner) / sizeof(float));
    b.images = workspace;
    b.weights = b.images + images;
    b.winners = (struct winner *)(void *)(b.weights + weights);
    b.start = (uint32_t *)(void *)(b.weights + weights + winners);
    *ret_floats = images + weights + winners + cpu_line(plan->pixels + 1);
    return b;
}

size_t conv_winners_workspace(const struct kernel_op *op)
{
    float nothing;
    size_t floats;
    (void)cut(op, &nothing, &floats);
    return floats;
}

/* One group's channels of one image: (channels, height, width) to (height, width, channels), with zeros around it. */
static void turn_image(const struct kernel_op *op, const float *x, float *image)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct conv_plan *plan = op->plan;
    const size_t height = d->conv2d.in_height, width = d->conv2d.in_width, plane = height * width;
    if (!plan->padded) {
        op->level->gemm->transpose_bias(plan->in, plane, x, plane, NULL, false, image, plan->in);
        return;
    }
    memset(image, 0, plan->image * sizeof(float));
    for (size_t i = 0; i < height; i++)
        op->level->gemm->transpose_bias(
            plan->in, width, x + i * width, plane, NULL, false,
            image + ((i + d->conv2d.window.padding[0]) * plan->width + d->conv2d.window.padding[1]) * plan->in,
            plan->in);
}

/* Back again, without what is around it: dx = or +=. buffer: as large as an image. */
static void turn_back(const struct kernel_op *op, const float *image, bool accumulate, float *dx, float *buffer)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct conv_plan *plan = op->plan;
    const size_t height = d->conv2d.in_height, width = d->conv2d.in_width, plane = height * width;
    float *to = accumulate ? buffer : dx;
    if (plan->padded) {
        for (size_t i = 0; i < height; i++)
            op->level->gemm->transpose_bias(
                width, plan->in,
                image + ((i + d->conv2d.window.padding[0]) * plan->width + d->conv2d.window.padding[1]) * plan->in,
                plan->in, NULL, false, to + i * width, plane);
    } else {
        op->level->gemm->transpose_bias(plane, plan->in, image, plan->in, NULL, false, to, plane);
    }
    if (accumulate)
        op->level->pointwise->sum(plan->in * plane, dx, dx, buffer);
}

/* Where element (channel, row, column) of the kernel stands in a patch of segments. */
static size_t place_in_patch(const struct kernel_op *op, size_t channel, size_t row, size_t column)
{
    const struct conv_plan *plan = op->plan;
    const struct conv_winners *win = &plan->winners;
    const size_t filled = win->segment_vectors * win->level->vector;
    if (win->segments == op->desc.conv2d.window.kernel[0])
        return row * filled + column * plan->in + channel;
    return (row * op->desc.conv2d.window.kernel[1] + column) * filled + channel;
}

/* Weights (out, patch) to segments, or segments back to weights. */
static void turn_weights(const struct kernel_op *op, size_t out, float *weights, float *segments, bool back)
{
    const struct conv_plan *plan = op->plan;
    const size_t *kernel = op->desc.conv2d.window.kernel;
    if (!back)
        memset(segments, 0, out * plan->winners.patch * sizeof(float));
    for (size_t i = 0; i < kernel[0]; i++)
        for (size_t j = 0; j < kernel[1]; j++) {
            const size_t in_segments = place_in_patch(op, 0, i, j), in_weights = i * kernel[1] + j,
                         area = kernel[0] * kernel[1];
            for (size_t o = 0; o < out; o++) {
                float *s = segments + o * plan->winners.patch + in_segments,
                      *w = weights + o * plan->patch + in_weights;
                for (size_t c = 0; c < plan->in; c++) {
                    if (back)
                        w[c * area] = s[c];
                    else
                        s[c] = w[c * area];
                }
            }
        }
}

void conv_winners_backward_data(const struct kernel_op *op, const struct kernel_args *args)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct conv_plan *plan = op->plan;
    const struct conv_winners *win = &plan->winners;
    size_t ignored;
    const struct winner_buffers b = cut(op, args->workspace, &ignored);
    for (size_t g = 0; g < d->conv2d.groups; g++) {
        turn_weights(op, plan->out, (float *)(uintptr_t)args->weight + g * plan->out * plan->patch, b.weights, false);
        for (size_t r = 0; r < d->rows; r++) {
            const float *dy = conv_masked_dy(op, args, r, g * plan->out, (g + 1) * plan->out);
            const uint32_t *pixel =
                (const uint32_t *)args->saved + (r * d->conv2d.out_channels + g * plan->out) * plan->y_plane;
            const size_t n = plan->out * plan->y_plane;
            /* Sort the winners by pixel, channels in order: count, sum up, place from behind. */
            memset(b.start, 0, (plan->pixels + 1) * sizeof *b.start);
            for (size_t i = 0; i < n; i++)
                b.start[pixel[i]] += dy[i] != 0;
            for (size_t p = 1; p <= plan->pixels; p++)
                b.start[p] += b.start[p - 1];
            for (size_t o = plan->out; o-- > 0;)
                for (size_t i = (o + 1) * plan->y_plane; i-- > o * plan->y_plane;)
                    if (dy[i] != 0)
                        b.winners[--b.start[pixel[i]]] = (struct winner){(uint32_t)(o * win->patch), dy[i]};
            memset(b.images, 0, plan->image * sizeof(float));
            win->level->data(&win->shape, plan->pixels, win->pixel, b.start, b.winners, b.weights, b.images);
            float *dx = args->dx[0] + r * d->x_stride + g * plan->in * d->conv2d.in_height * d->conv2d.in_width;
            turn_back(op, b.images, args->dx_accumulate[0], dx, b.images + win->image);
        }
    }
}

void conv_winners_backward_weight(const struct kernel_op *op, const struct kernel_args *args, size_t begin, size_t end)
{
    const struct kernel_op_desc *d = &op->desc;
    const struct conv_plan *plan = op->plan;
    const struct conv_winners *win = &plan->winners;
    const size_t channels = end - begin,
                 first_in = begin / plan->out * plan->in * d->conv2d.in_height * d->conv2d.in_width;
    size_t ignored;
    const struct winner_buffers b = cut(op, args->workspace, &ignored);
    memset(b.images, 0,
           win->block * win->image *
               sizeof(float)); /* what is read behind an image must be numbers, though they are not used */
    memset(b.weights, 0, channels * win->patch * sizeof(float));
    if (d->bias)
        memset(args->dbias + begin, 0, channels * sizeof(float));
    for (size_t r0 = 0; r0 < d->rows; r0 += win->block) {
        const size_t rows = d->rows - r0 < win->block ? d->rows - r0 : win->block;
        for (size_t r = 0; r < rows; r++) {
            turn_image(op, args->x[0] + (r0 + r) * d->x_stride + first_in, b.images + r * win->image);
            (void)conv_masked_dy(op, args, r0 + r, begin, end);
        }
        for (size_t o = 0; o < channels; o++) {
            size_t n = 0;
            for (size_t r = 0; r < rows; r++) {
                const float *dy = args->dy + (r0 + r) * d->y_stride + (begin + o) * plan->y_plane;
                const uint32_t *pixel =
                    (const uint32_t *)args->saved + ((r0 + r) * d->conv2d.out_channels + begin + o) * plan->y_plane;
                for (size_t i = 0; i < plan->y_plane; i++) {
                    b.winners[n] = (struct winner){(uint32_t)(r * win->image) + win->pixel[pixel[i]], dy[i]};
                    n += dy[i] != 0;
                }
                if (d->bias)
                    args->dbias[begin + o] += op->level->pointwise->total(plan->y_plane, dy);
            }
            win->level->weight(&win->shape, n, b.winners, b.images, b.weights + o * win->patch);
        }
    }
    turn_weights(op, channels, args->dweight + begin * plan->patch, b.weights, true);
}
