#include "model/dataset_synthetic.h"

#include <math.h>
#include <stdlib.h>

/* Normal numbers are drawn from so many, the quantiles of evenly spaced probabilities: one table look-up each, and the
 * table stays in the first cache. */
#define QUANTILES 4096
/* Centres are kept up to so many floats (16 MiB), and made again for each sample beyond. */
#define CENTRES_MAX ((size_t)1 << 22)
#define WINDOW 32
#define TARGET_NOISE 0.1f

enum stream { STREAM_CENTRES, STREAM_NOISE, STREAM_WEIGHTS, STREAM_TARGET_NOISE };

struct synthetic {
    uint64_t key[4]; /* by stream */
    size_t elements, target_elements;
    uint32_t classes; /* 0: values */
    float *centres;   /* (classes, elements); NULL: too many to keep */
    float quantile[QUANTILES];
};

/* The output function of splitmix64 (Steele, Lea and Flood 2014). */
static uint64_t mix(uint64_t z)
{
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* log(x) for a normal x > 0, to 1e-12: libm's differs between machines in the last bit. */
static double natural_log(double x)
{
    int exponent;
    double m = frexp(x, &exponent);
    if (m < 0.70710678118654752) {
        m *= 2;
        exponent--;
    }
    double t = (m - 1) / (m + 1), square = t * t, sum = 0;
    for (int k = 15; k >= 1; k -= 2)
        sum = sum * square + 1.0 / k;
    return 2 * t * sum + exponent * 0.69314718055994531;
}

/* The standard normal quantile of p < 0.5 by P. J. Acklam's rational approximation (relative error 1.2e-9). */
static double normal_quantile(double p)
{
    static const double a[] = {-3.969683028665376e+01, 2.209460984245205e+02,  -2.759285104469687e+02,
                               1.383577518672690e+02,  -3.066479806614716e+01, 2.506628277459239e+00};
    static const double b[] = {-5.447609879822406e+01, 1.615858368580409e+02, -1.556989798598866e+02,
                               6.680131188771972e+01, -1.328068155288572e+01};
    static const double c[] = {-7.784894002430293e-03, -3.223964580411365e-01, -2.400758277161838e+00,
                               -2.549732539343734e+00, 4.374664141464968e+00,  2.938163982698783e+00};
    static const double d[] = {7.784695709041462e-03, 3.224671290700398e-01, 2.445134137142996e+00,
                               3.754408661907416e+00};
    if (p < 0.02425) {
        double q = sqrt(-2 * natural_log(p));
        return (((((c[0] * q + c[1]) * q + c[2]) * q + c[3]) * q + c[4]) * q + c[5]) /
               ((((d[0] * q + d[1]) * q + d[2]) * q + d[3]) * q + 1);
    }
    double q = p - 0.5, r = q * q;
    return (((((a[0] * r + a[1]) * r + a[2]) * r + a[3]) * r + a[4]) * r + a[5]) * q /
           (((((b[0] * r + b[1]) * r + b[2]) * r + b[3]) * r + b[4]) * r + 1);
}

/* Standard normal numbers of one row of a stream, from element `first`, a multiple of 4: four of them out of each 64
 * bits. */
static void fill_normal(const struct synthetic *s, enum stream stream, uint64_t row, size_t first, float *dst, size_t n)
{
    uint64_t key = mix(s->key[stream] + row);
    size_t i = 0;
    for (uint64_t word = first / 4; i + 4 <= n; word++, i += 4) {
        uint64_t bits = mix(key + word);
        for (size_t lane = 0; lane < 4; lane++)
            dst[i + lane] = s->quantile[bits >> (16 * lane) & (QUANTILES - 1)];
    }
    uint64_t bits = mix(key + (first + i) / 4);
    for (size_t lane = 0; i < n; lane++, i++)
        dst[i] = s->quantile[bits >> (16 * lane) & (QUANTILES - 1)];
}

tally_status synthetic_open(const Tally__V1__Synthetic *spec, const struct dataset_info *info, uint64_t seed, int part,
                            struct synthetic **ret_s, struct tally_error *err)
{
    struct synthetic *s = calloc(1, sizeof(*s));
    if (!s)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a synthetic data set");
    for (int stream = 0; stream < 4; stream++) {
        bool of_part = stream == STREAM_NOISE || stream == STREAM_TARGET_NOISE;
        s->key[stream] = mix(mix(mix(seed) + (uint64_t)stream) + (of_part ? (uint64_t)part + 1 : 0));
    }
    s->elements = info->input_elements;
    s->target_elements = info->target_elements;
    s->classes = info->target == DATASET_CLASSES ? spec->classes : 0;
    for (size_t k = 0; k < QUANTILES / 2; k++) {
        float value = (float)normal_quantile(((double)k + 0.5) / QUANTILES);
        s->quantile[k] = value;
        s->quantile[QUANTILES - 1 - k] = -value;
    }
    if (s->classes > 0 && s->elements <= CENTRES_MAX / s->classes) {
        s->centres = malloc(s->classes * s->elements * sizeof(float));
        if (!s->centres) {
            synthetic_close(s);
            return tally_fail(err, TALLY_ENOMEM, "no memory for a synthetic data set's %u centres", spec->classes);
        }
        for (uint32_t c = 0; c < s->classes; c++)
            fill_normal(s, STREAM_CENTRES, c, 0, s->centres + c * s->elements, s->elements);
    }
    *ret_s = s;
    return TALLY_OK;
}

void synthetic_close(struct synthetic *s)
{
    if (!s)
        return;
    free(s->centres);
    free(s);
}

int64_t synthetic_class(const struct synthetic *s, uint32_t sample)
{
    return sample % s->classes;
}

void synthetic_input(const struct synthetic *s, uint32_t sample, float *x)
{
    fill_normal(s, STREAM_NOISE, sample, 0, x, s->elements);
    if (s->classes == 0)
        return;
    uint32_t class = sample % s->classes;
    if (s->centres) {
        const float *centre = s->centres + class * s->elements;
        for (size_t i = 0; i < s->elements; i++)
            x[i] += centre[i];
        return;
    }
    float centre[256];
    for (size_t first = 0; first < s->elements; first += 256) {
        size_t n = s->elements - first < 256 ? s->elements - first : 256;
        fill_normal(s, STREAM_CENTRES, class, first, centre, n);
        for (size_t i = 0; i < n; i++)
            x[first + i] += centre[i];
    }
}

void synthetic_values(const struct synthetic *s, uint32_t sample, const float *x, float *y)
{
    size_t window = s->elements < WINDOW ? s->elements : WINDOW;
    float scale = (float)(1 / sqrt((double)window));
    float weight[WINDOW];
    fill_normal(s, STREAM_TARGET_NOISE, sample, 0, y, s->target_elements);
    for (size_t j = 0; j < s->target_elements; j++) {
        fill_normal(s, STREAM_WEIGHTS, j, 0, weight, window);
        size_t at = window == s->elements ? 0 : mix(s->key[STREAM_WEIGHTS] - 1 - j) % s->elements;
        float sum = 0;
        for (size_t k = 0; k < window; k++) {
            sum += weight[k] * x[at];
            at = at + 1 == s->elements ? 0 : at + 1;
        }
        y[j] = sum * scale + TARGET_NOISE * y[j];
    }
}
