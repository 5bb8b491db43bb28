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

/* One output of the usual pool, 2 x 2 windows side by side: what the vectors below do for several. */
FORCE_INLINE void max_2x2(const float *top, const float *bottom, uint32_t at, uint32_t width, float bias, bool relu,
                          float *y, uint32_t *winner)
{
    float best = top[0] + bias;
    uint32_t index = at;
    take_larger(top[1] + bias, at + 1, &best, &index);
    take_larger(bottom[0] + bias, at + width, &best, &index);
    take_larger(bottom[1] + bias, at + width + 1, &best, &index);
    *y = relu ? elementwise_relu(best) : best;
    *winner = index;
}

#if VL >= 8
FORCE_INLINE void take_larger_8(__m256 value, __m256i index, __m256 *best, __m256i *winner)
{
    const __m256 wins =
        _mm256_or_ps(_mm256_cmp_ps(value, *best, _CMP_GT_OQ), _mm256_cmp_ps(value, value, _CMP_UNORD_Q));
    *best = _mm256_blendv_ps(*best, value, wins);
    *winner = _mm256_castps_si256(_mm256_blendv_ps(_mm256_castsi256_ps(*winner), _mm256_castsi256_ps(index), wins));
}

FORCE_INLINE __m256i choose_8(__m256 if_, __m256i then, __m256i else_)
{
    const __m256i mask = _mm256_castps_si256(if_);
    return _mm256_or_si256(_mm256_and_si256(mask, then), _mm256_andnot_si256(mask, else_));
}

/* The largest of four values each, in their order, and its index: first, first + 1, first + width or first + width + 1.
 */
FORCE_INLINE __m256 largest_8(__m256 v0, __m256 v1, __m256 v2, __m256 v3, __m256i first, uint32_t width,
                              __m256i *ret_winner)
{
    const __m256i i1 = _mm256_add_epi32(first, _mm256_set1_epi32(1)),
                  i2 = _mm256_add_epi32(first, _mm256_set1_epi32((int)width)),
                  i3 = _mm256_add_epi32(first, _mm256_set1_epi32((int)width + 1));
    const __m256 nan = _mm256_or_ps(_mm256_cmp_ps(v0, v1, _CMP_UNORD_Q), _mm256_cmp_ps(v2, v3, _CMP_UNORD_Q));
    if (__builtin_expect(_mm256_movemask_ps(nan), 0)) {
        __m256 best = v0;
        *ret_winner = first;
        take_larger_8(v1, i1, &best, ret_winner);
        take_larger_8(v2, i2, &best, ret_winner);
        take_larger_8(v3, i3, &best, ret_winner);
        return best;
    }
    /* of equal operands (0 and -0) the instruction gives the second */
    const __m256 best = _mm256_max_ps(_mm256_max_ps(v3, v2), _mm256_max_ps(v1, v0));
    const __m256i last = choose_8(_mm256_cmp_ps(v2, best, _CMP_EQ_OQ), i2, i3);
    *ret_winner =
        choose_8(_mm256_cmp_ps(v0, best, _CMP_EQ_OQ), first, choose_8(_mm256_cmp_ps(v1, best, _CMP_EQ_OQ), i1, last));
    return best;
}

FORCE_INLINE __m256 relu_8(__m256 x)
{
    return _mm256_andnot_ps(_mm256_cmp_ps(x, _mm256_setzero_ps(), _CMP_LE_OQ), x);
}

/* Eight outputs. Columns are taken apart within halves of a register, so outputs stand as 0 1 4 5 2 3 6 7 until the
 * end. */
FORCE_INLINE void max_2x2_8(const float *top, const float *bottom, uint32_t at, uint32_t width, float bias, bool relu,
                            float *y, uint32_t *winner)
{
    const __m256 b = _mm256_set1_ps(bias);
    const __m256 t0 = _mm256_add_ps(_mm256_loadu_ps(top), b), t1 = _mm256_add_ps(_mm256_loadu_ps(top + 8), b);
    const __m256 u0 = _mm256_add_ps(_mm256_loadu_ps(bottom), b), u1 = _mm256_add_ps(_mm256_loadu_ps(bottom + 8), b);
    __m256i index = _mm256_add_epi32(_mm256_set1_epi32((int)at), _mm256_setr_epi32(0, 2, 8, 10, 4, 6, 12, 14));
    __m256 best = largest_8(_mm256_shuffle_ps(t0, t1, 0x88), _mm256_shuffle_ps(t0, t1, 0xdd),
                            _mm256_shuffle_ps(u0, u1, 0x88), _mm256_shuffle_ps(u0, u1, 0xdd), index, width, &index);
    if (relu)
        best = relu_8(best);
    _mm256_storeu_ps(y, _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(best), 0xd8)));
    _mm256_storeu_si256((__m256i *)(void *)winner, _mm256_permute4x64_epi64(index, 0xd8));
}

/* Four outputs, in half of the lanes. */
FORCE_INLINE void max_2x2_4(const float *top, const float *bottom, uint32_t at, uint32_t width, float bias, bool relu,
                            float *y, uint32_t *winner)
{
    const __m256 b = _mm256_set1_ps(bias);
    const __m256 t = _mm256_add_ps(_mm256_loadu_ps(top), b), u = _mm256_add_ps(_mm256_loadu_ps(bottom), b);
    __m256i index = _mm256_add_epi32(_mm256_set1_epi32((int)at), _mm256_setr_epi32(0, 2, 0, 2, 4, 6, 4, 6));
    __m256 best = largest_8(_mm256_shuffle_ps(t, t, 0x88), _mm256_shuffle_ps(t, t, 0xdd), _mm256_shuffle_ps(u, u, 0x88),
                            _mm256_shuffle_ps(u, u, 0xdd), index, width, &index);
    if (relu)
        best = relu_8(best);
    _mm_storeu_ps(y, _mm256_castps256_ps128(_mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(best), 0x08))));
    _mm_storeu_si128((__m128i *)(void *)winner, _mm256_castsi256_si128(_mm256_permute4x64_epi64(index, 0x08)));
}
#endif

/* n outputs of one row. Those that do not fill a vector are computed together with the ones before once more, where
 * there are enough. */
static void max_row_2x2(size_t n, const float *top, const float *bottom, uint32_t at, uint32_t width, float bias,
                        bool relu, float *y, uint32_t *winner)
{
    size_t j = 0;
#if VL >= 8
    for (; n >= 8 && j < n; j += 8) {
        if (j + 8 > n)
            j = n - 8;
        max_2x2_8(top + 2 * j, bottom + 2 * j, at + 2 * (uint32_t)j, width, bias, relu, y + j, winner + j);
    }
    for (; n >= 4 && j < n; j += 4) {
        if (j + 4 > n)
            j = n - 4;
        max_2x2_4(top + 2 * j, bottom + 2 * j, at + 2 * (uint32_t)j, width, bias, relu, y + j, winner + j);
    }
#endif
    for (; j < n; j++)
        max_2x2(top + 2 * j, bottom + 2 * j, at + 2 * (uint32_t)j, width, bias, relu, y + j, winner + j);
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
