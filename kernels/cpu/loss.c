/* One level's losses. A row of many classes goes through 16 interleaved lanes, so that the order of its sums does not
 * depend on the vectors' width; of few classes, 16 rows go together, one a lane. */
#include <math.h>

#include "kernels/cpu/level.h"
#include "kernels/cpu/simd.h"
#include "kernels/elementwise.h"

#define LANES 16

/* A target that is neither a class nor ignored poisons its row: it must not be read, nor pass unseen. */
FORCE_INLINE bool loss_is_class(const struct loss_rows *rows, int64_t target)
{
    return target >= 0 && (uint64_t)target < rows->classes;
}

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

/* ---- cross entropy, many classes: row by row ---- */

/* saved[0]: the largest x, saved[1]: 1 / sum of exp(x - largest), for the gradient. */
static double row_loss(const struct loss_rows *rows, const float *x, size_t target, float saved[2])
{
    const size_t classes = rows->classes;
    const float m = row_maximum(x, classes);
    float sums[LANES] = {0}, buffer[LANES];
    for (size_t i = 0; i < classes; i += LANES) {
        const float *v = lanes_of(x + i, classes - i, -INFINITY, buffer);
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
    saved[0] = m;
    saved[1] = (float)(1.0 / sum);
    const double log_sum = log(sum);
    double loss = log_sum - ((double)x[target] - (double)m);
    if (rows->smoothing != 0.0f) {
        double others = 0; /* of -log p over all classes */
        for (size_t i = 0; i < classes; i++)
            others += log_sum - ((double)x[i] - (double)m);
        loss = (1.0 - (double)rows->smoothing) * loss + (double)rows->smoothing / (double)classes * others;
    }
    return loss;
}

static void row_backward(const struct loss_rows *rows, const float *x, size_t target, const float saved[2], float *dx,
                         bool accumulate)
{
    const float each = rows->smoothing / (float)rows->classes;
    float buffer[LANES], p[LANES], d[LANES];
    for (size_t i = 0; i < rows->classes; i += LANES) {
        const size_t left = rows->classes - i < LANES ? rows->classes - i : LANES;
        const float *v = lanes_of(x + i, rows->classes - i, -INFINITY, buffer);
        for (size_t l = 0; l < LANES; l++)
            p[l] = elementwise_exp(v[l] - saved[0]) * saved[1];
        for (size_t l = 0; l < LANES; l++)
            d[l] = p[l] - each;
        if (target >= i && target - i < left) /* the two that nearly cancel are subtracted first */
            d[target - i] = p[target - i] - (1.0f - rows->smoothing) - each;
        for (size_t l = 0; l < left; l++)
            dx[i + l] = accumulate ? dx[i + l] + d[l] : d[l];
    }
}

/* ---- cross entropy, at most LANES classes: LANES rows at once ---- */

/* [class][row]; lanes without a row hold zeros. */
typedef float block[LANES][LANES];

FORCE_INLINE void turn_in(const struct loss_rows *rows, size_t first, size_t n, block t)
{
    const float *x = rows->x + first * rows->stride;
    for (size_t c = 0; c < rows->classes; c++)
        for (size_t l = n; l < LANES; l++)
            t[c][l] = 0;
    for (size_t l = 0; l < n; l++)
        for (size_t c = 0; c < rows->classes; c++)
            t[c][l] = x[l * rows->stride + c];
}

/* As torch.argmax: NaN is the largest of all, and the first counts. */
FORCE_INLINE void block_largest(size_t classes, block t, float largest[LANES], uint32_t which[LANES])
{
    for (size_t l = 0; l < LANES; l++) {
        largest[l] = -INFINITY;
        which[l] = 0;
    }
    for (uint32_t c = 0; c < classes; c++)
        for (size_t l = 0; l < LANES; l++) {
            const bool larger = !(t[c][l] <= largest[l]) & (largest[l] == largest[l]);
            which[l] = larger ? c : which[l];
            largest[l] = larger ? t[c][l] : largest[l];
        }
}

static double sum_of_differences(size_t classes, block t, const float largest[LANES], size_t lane)
{
    double sum = 0; /* of x - largest over all classes */
    for (size_t c = 0; c < classes; c++)
        sum += (double)t[c][lane] - (double)largest[lane];
    return sum;
}

/* One logarithm for all rows: a product of LANES sums of at most LANES exponentials is far from overflow. */
static void block_forward(const struct loss_rows *rows, size_t first, size_t n, float *saved, struct kernel_loss *loss)
{
    const size_t classes = rows->classes;
    const double smoothing = (double)rows->smoothing;
    block t;
    float largest[LANES], inverse[LANES];
    uint32_t which[LANES];
    double sums[LANES] = {0}, product = 1, logs = 0;
    turn_in(rows, first, n, t);
    block_largest(classes, t, largest, which);
    for (size_t c = 0; c < classes; c++)
        for (size_t l = 0; l < LANES; l++)
            sums[l] += (double)elementwise_exp(t[c][l] - largest[l]);
    for (size_t l = 0; l < LANES; l++)
        inverse[l] = (float)(1.0 / sums[l]);
    for (size_t l = 0; l < n; l++) {
        const int64_t target = rows->targets[first + l];
        if (target == rows->ignore_index)
            continue;
        loss->weight += 1;
        if (!loss_is_class(rows, target)) {
            product = inverse[l] = NAN;
            continue;
        }
        product *= sums[l];
        loss->correct += which[l] == (uint64_t)target;
        double of_target = (double)t[target][l] - (double)largest[l];
        if (smoothing != 0)
            of_target = (1.0 - smoothing) * of_target +
                        smoothing / (double)classes * sum_of_differences(classes, t, largest, l);
        logs += of_target;
    }
    loss->loss_sum += log(product) - logs;
    if (saved)
        for (size_t l = 0; l < n; l++) {
            saved[2 * (first + l)] = largest[l];
            saved[2 * (first + l) + 1] = inverse[l];
        }
}

static void block_backward(const struct loss_rows *rows, size_t first, size_t n, const float *saved, float *dx,
                           bool accumulate)
{
    const float each = rows->smoothing / (float)rows->classes;
    block t;
    float largest[LANES] = {0}, inverse[LANES] = {0};
    uint32_t target[LANES] = {0};
    turn_in(rows, first, n, t);
    for (size_t l = 0; l < n; l++) {
        largest[l] = saved[2 * (first + l)];
        inverse[l] = saved[2 * (first + l) + 1];
        target[l] = loss_is_class(rows, rows->targets[first + l]) ? (uint32_t)rows->targets[first + l] : 0;
    }
    for (uint32_t c = 0; c < rows->classes; c++)
        for (size_t l = 0; l < LANES; l++) { /* the two that nearly cancel are subtracted first */
            const float p = elementwise_exp(t[c][l] - largest[l]) * inverse[l];
            t[c][l] = p - (target[l] == c ? 1.0f - rows->smoothing : 0.0f) - each;
        }
    for (size_t l = 0; l < n; l++) {
        float *row = dx + (first + l) * rows->stride;
        const bool ignored = rows->targets[first + l] == rows->ignore_index;
        for (size_t c = 0; c < rows->classes; c++) {
            const float d = ignored ? 0 : t[c][l];
            row[c] = accumulate ? row[c] + d : d;
        }
    }
}

/* ---- cross entropy ---- */

static void cross_entropy(const struct loss_rows *rows, float *saved, struct kernel_loss *ret_loss)
{
    struct kernel_loss loss = {0};
    if (rows->classes <= LANES) {
        for (size_t r = 0; r < rows->count; r += LANES)
            block_forward(rows, r, rows->count - r < LANES ? rows->count - r : LANES, saved, &loss);
        *ret_loss = loss;
        return;
    }
    for (size_t r = 0; r < rows->count; r++) {
        const float *x = rows->x + r * rows->stride;
        float unused[2], *of_row = saved ? saved + 2 * r : unused;
        of_row[0] = of_row[1] = NAN;
        if (rows->targets[r] == rows->ignore_index)
            continue;
        loss.weight += 1;
        if (!loss_is_class(rows, rows->targets[r])) {
            loss.loss_sum = (double)NAN;
            continue;
        }
        const size_t target = (size_t)rows->targets[r];
        loss.loss_sum += row_loss(rows, x, target, of_row);
        loss.correct += is_first_largest(x, rows->classes, target);
    }
    *ret_loss = loss;
}

static void cross_entropy_backward(const struct loss_rows *rows, const float *saved, float *dx, bool accumulate)
{
    if (rows->classes <= LANES) {
        for (size_t r = 0; r < rows->count; r += LANES)
            block_backward(rows, r, rows->count - r < LANES ? rows->count - r : LANES, saved, dx, accumulate);
        return;
    }
    for (size_t r = 0; r < rows->count; r++) {
        float *of_row = dx + r * rows->stride;
        /* A poisoned row has NaN as its saved values, so any class will do. */
        if (rows->targets[r] != rows->ignore_index)
            row_backward(rows, rows->x + r * rows->stride,
                         loss_is_class(rows, rows->targets[r]) ? (size_t)rows->targets[r] : 0, saved + 2 * r, of_row,
                         accumulate);
        else if (!accumulate)
            memset(of_row, 0, rows->classes * sizeof(float));
    }
}

/* ---- squared error ---- */

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
