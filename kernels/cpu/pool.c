/*
 * One level's pools, a plane (one channel of one sample) at a time.
 *
 * The maximum follows PyTorch's loop: windows in row-major order from -inf, a value wins that is larger than the best
 * so far or is NaN. So the first of equal maxima wins, and the last NaN.
 */
#include <math.h>

#include "kernels/cpu/level.h"
#include "kernels/cpu/simd.h"
#include "kernels/cpu/window.h"
#include "kernels/elementwise.h"

FORCE_INLINE void take_larger(float value, uint32_t index, float *best, uint32_t *winner)
{
    const bool wins = value > *best || value != value;
    *best = wins ? value : *best;
    *winner = wins ? index : *winner;
}

/* 2 x 2 windows side by side: the usual pool, in a form that becomes vector code. */
FORCE_INLINE void max_row_2x2(size_t n, const float *restrict top, const float *restrict bottom, uint32_t top_index,
                              uint32_t width, float bias, bool relu, float *restrict y, uint32_t *restrict winner)
{
    for (size_t j = 0; j < n; j++) {
        const uint32_t at = top_index + 2 * (uint32_t)j;
        float best = top[2 * j] + bias;
        uint32_t index = at;
        take_larger(top[2 * j + 1] + bias, at + 1, &best, &index);
        take_larger(bottom[2 * j] + bias, at + width, &best, &index);
        take_larger(bottom[2 * j + 1] + bias, at + width + 1, &best, &index);
        y[j] = relu ? elementwise_relu(best) : best;
        winner[j] = index;
    }
}

static void max_forward(const struct pool_plane *plane, const float *x, float bias, bool relu, float *y,
                        uint32_t *winner)
{
    const struct kernel_window *w = &plane->window;
    const uint32_t width = (uint32_t)plane->in_width;
    const bool pairs = w->kernel[0] == 2 && w->kernel[1] == 2 && w->stride[1] == 2 && w->padding[0] == 0 &&
                       w->padding[1] == 0 && w->dilation[0] == 1 && w->dilation[1] == 1 &&
                       plane->out_width * 2 <= plane->in_width &&
                       (plane->out_height - 1) * w->stride[0] + 2 <= plane->in_height;
    uint32_t ignored[32];
    for (size_t i = 0; i < plane->out_height; i++) {
        const struct window_span rows = window_span_of(w, 0, i, plane->in_height);
        if (pairs) {
            const float *top = x + rows.first * plane->in_width;
            for (size_t j = 0; j < plane->out_width; j += 32) {
                const size_t n = plane->out_width - j < 32 ? plane->out_width - j : 32;
                const uint32_t at = (uint32_t)(rows.first * plane->in_width + 2 * j);
                max_row_2x2(n, top + 2 * j, top + 2 * j + plane->in_width, at, width, bias, relu,
                            y + i * plane->out_width + j, winner ? winner + i * plane->out_width + j : ignored);
            }
            continue;
        }
        for (size_t j = 0; j < plane->out_width; j++) {
            const struct window_span columns = window_span_of(w, 1, j, plane->in_width);
            float best = -INFINITY;
            uint32_t index = (uint32_t)(rows.first * plane->in_width + columns.first);
            for (size_t r = rows.first; r < rows.end; r += w->dilation[0])
                for (size_t c = columns.first; c < columns.end; c += w->dilation[1])
                    take_larger(x[r * plane->in_width + c] + bias, (uint32_t)(r * plane->in_width + c), &best, &index);
            y[i * plane->out_width + j] = relu ? elementwise_relu(best) : best;
            if (winner)
                winner[i * plane->out_width + j] = index;
        }
    }
}

static void max_backward(const struct pool_plane *plane, const float *dy, const uint32_t *winner, float *dx)
{
    const size_t n = plane->out_height * plane->out_width;
    for (size_t j = 0; j < n; j++)
        dx[winner[j]] += dy[j];
}

/* What the sum of a window is divided by, as torch.nn.AvgPool2d: the window cut to the padded input, or to the input
 * itself. */
static float divisor(const struct pool_plane *plane, size_t i, size_t j, struct window_span rows,
                     struct window_span columns)
{
    if (plane->divisor_override)
        return (float)plane->divisor_override;
    if (!plane->count_include_pad)
        return (float)((rows.end - rows.first) * (columns.end - columns.first));
    size_t sides[2];
    const size_t in[2] = {plane->in_height, plane->in_width}, out[2] = {i, j};
    for (int axis = 0; axis < 2; axis++) {
        const size_t start = out[axis] * plane->window.stride[axis];
        const size_t limit = in[axis] + 2 * plane->window.padding[axis];
        const size_t end = start + plane->window.kernel[axis];
        sides[axis] = (end < limit ? end : limit) - start;
    }
    return (float)(sides[0] * sides[1]);
}

static void average_forward(const struct pool_plane *plane, const float *x, float *y)
{
    for (size_t i = 0; i < plane->out_height; i++) {
        const struct window_span rows = window_span_of(&plane->window, 0, i, plane->in_height);
        for (size_t j = 0; j < plane->out_width; j++) {
            const struct window_span columns = window_span_of(&plane->window, 1, j, plane->in_width);
            float s = 0;
            for (size_t r = rows.first; r < rows.end; r++)
                for (size_t c = columns.first; c < columns.end; c++)
                    s += x[r * plane->in_width + c];
            y[i * plane->out_width + j] = s / divisor(plane, i, j, rows, columns);
        }
    }
}

static void average_backward(const struct pool_plane *plane, const float *dy, float *dx)
{
    for (size_t i = 0; i < plane->out_height; i++) {
        const struct window_span rows = window_span_of(&plane->window, 0, i, plane->in_height);
        for (size_t j = 0; j < plane->out_width; j++) {
            const struct window_span columns = window_span_of(&plane->window, 1, j, plane->in_width);
            const float g = dy[i * plane->out_width + j] / divisor(plane, i, j, rows, columns);
            for (size_t r = rows.first; r < rows.end; r++)
                for (size_t c = columns.first; c < columns.end; c++)
                    dx[r * plane->in_width + c] += g;
        }
    }
}

const struct pool_level LEVEL(cpu_pool) = {
    .max_forward = max_forward,
    .max_backward = max_backward,
    .average_forward = average_forward,
    .average_backward = average_backward,
};
