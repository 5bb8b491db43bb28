/* One level's losses, a row at a time. Sums run in 16 interleaved lanes at every level, so their order does not depend
 * on the vectors' width. */
#include <math.h>

#include "kernels/cpu/level.h"
#include "kernels/cpu/simd.h"
#include "kernels/elementwise.h"

#define LANES 16

/* The next LANES values of a row, or what is left of it and then the filler. */
FORCE_INLINE const float *lanes_of(const float *x, size_t left, float filler, float buffer[LANES])
{
    if (left >= LANES)
        return x;
    for (size_t l = 0; l < LANES; l++)
        buffer[l] = filler;
    memcpy(buffer, x, left * sizeof(float));
    return buffer;
}

static float row_maximum(const float *x, size_t n)
{
    float largest[LANES], buffer[LANES];
    for (size_t l = 0; l < LANES; l++)
        largest[l] = -INFINITY;
    for (size_t i = 0; i < n; i += LANES) {
        const float *v = lanes_of(x + i, n - i, -INFINITY, buffer);
        for (size_t l = 0; l < LANES; l++)
            largest[l] = v[l] > largest[l] ? v[l] : largest[l];
    }
    for (size_t half = LANES / 2; half > 0; half /= 2)
        for (size_t l = 0; l < half; l++)
            largest[l] = largest[l + half] > largest[l] ? largest[l + half] : largest[l];
    return largest[0];
}

/* As torch.argmax: NaN is the largest of all, and the first counts. */
static bool is_first_largest(const float *x, size_t n, size_t target)
{
    const float t = x[target];
    for (size_t i = 0; i < target; i++)
        if (isnan(x[i]) || x[i] >= t) /* false where t is NaN and x[i] is not */
            return false;
    if (isnan(t))
        return true;
    for (size_t i = target + 1; i < n; i++)
        if (isnan(x[i]) || x[i] > t)
            return false;
    return true;
}

static double cross_entropy(const struct loss_row *row, float ret[2], bool *ret_correct)
{
    const float m = row_maximum(row->x, row->classes);
    float sums[LANES] = {0}, buffer[LANES];
    for (size_t i = 0; i < row->classes; i += LANES) {
        const float *v = lanes_of(row->x + i, row->classes - i, -INFINITY, buffer);
        for (size_t l = 0; l < LANES; l++)
            sums[l] += elementwise_exp(v[l] - m);
    }
    if (m == -INFINITY) /* every x is -inf or NaN: -inf - -inf; the filler must not decide */
        sums[0] = NAN;
    double halves[LANES];
    for (size_t l = 0; l < LANES; l++)
        halves[l] = (double)sums[l];
    for (size_t half = LANES / 2; half > 0; half /= 2)
        for (size_t l = 0; l < half; l++)
            halves[l] += halves[l + half];
    const double sum = halves[0];
    ret[0] = m;
    ret[1] = (float)(1.0 / sum);
    *ret_correct = is_first_largest(row->x, row->classes, row->target);
    const double log_sum = log(sum);
    double loss = log_sum - ((double)row->x[row->target] - (double)m);
    if (row->smoothing != 0.0f) {
        double others = 0; /* of -log p over all classes */
        for (size_t i = 0; i < row->classes; i++)
            others += log_sum - ((double)row->x[i] - (double)m);
        loss = (1.0 - (double)row->smoothing) * loss + (double)row->smoothing / (double)row->classes * others;
    }
    return loss;
}

static void cross_entropy_backward(const struct loss_row *row, const float saved[2], float *dx, bool accumulate)
{
    const float each = row->smoothing / (float)row->classes;
    float buffer[LANES], p[LANES], d[LANES];
    for (size_t i = 0; i < row->classes; i += LANES) {
        const size_t left = row->classes - i < LANES ? row->classes - i : LANES;
        const float *v = lanes_of(row->x + i, row->classes - i, -INFINITY, buffer);
        for (size_t l = 0; l < LANES; l++)
            p[l] = elementwise_exp(v[l] - saved[0]) * saved[1];
        for (size_t l = 0; l < LANES; l++)
            d[l] = p[l] - each;
        if (row->target >= i && row->target - i < left) /* the two that nearly cancel are subtracted first */
            d[row->target - i] = p[row->target - i] - (1.0f - row->smoothing) - each;
        for (size_t l = 0; l < left; l++)
            dx[i + l] = accumulate ? dx[i + l] + d[l] : d[l];
    }
}

static double squared_error(size_t n, const float *x, const float *target)
{
    double sums[8] = {0};
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (size_t l = 0; l < 8; l++) {
            const double d = (double)x[i + l] - (double)target[i + l];
            sums[l] += d * d;
        }
    for (size_t l = 0; i < n; i++, l++) {
        const double d = (double)x[i] - (double)target[i];
        sums[l] += d * d;
    }
    return ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
}

static void squared_error_backward(size_t n, const float *x, const float *target, float *dx, bool accumulate)
{
    if (accumulate) {
        for (size_t i = 0; i < n; i++)
            dx[i] += 2.0f * (x[i] - target[i]);
    } else {
        for (size_t i = 0; i < n; i++)
            dx[i] = 2.0f * (x[i] - target[i]);
    }
}

const struct loss_level LEVEL(cpu_loss) = {
    .cross_entropy = cross_entropy,
    .cross_entropy_backward = cross_entropy_backward,
    .squared_error = squared_error,
    .squared_error_backward = squared_error_backward,
};
