#include "common/rng.h"

#include <assert.h>
#include <math.h>

#define PERIOD_OFFSET 397
#define MATRIX_A 0x9908b0dfu
#define TWO_PI 6.28318530717958647692

void rng_seed(struct rng *r, uint64_t seed)
{
    uint32_t word = (uint32_t)seed;
    r->state[0] = word;
    for (uint32_t i = 1; i < RNG_STATE_WORDS; i++) {
        word = 1812433253u * (word ^ (word >> 30)) + i;
        r->state[i] = word;
    }
    r->next = RNG_STATE_WORDS;
    r->has_cached_normal = false;
    r->cached_normal = 0;
}

static uint32_t twist(uint32_t high, uint32_t low)
{
    uint32_t mixed = (high & 0x80000000u) | (low & 0x7fffffffu);
    return (mixed >> 1) ^ ((low & 1) ? MATRIX_A : 0);
}

static void generate(struct rng *r)
{
    uint32_t *s = r->state;
    uint32_t i = 0;
    for (; i < RNG_STATE_WORDS - PERIOD_OFFSET; i++)
        s[i] = s[i + PERIOD_OFFSET] ^ twist(s[i], s[i + 1]);
    for (; i < RNG_STATE_WORDS - 1; i++)
        s[i] = s[i + PERIOD_OFFSET - RNG_STATE_WORDS] ^ twist(s[i], s[i + 1]);
    s[i] = s[PERIOD_OFFSET - 1] ^ twist(s[i], s[0]);
    r->next = 0;
}

uint32_t rng_u32(struct rng *r)
{
    if (r->next >= RNG_STATE_WORDS)
        generate(r);
    uint32_t y = r->state[r->next++];
    y ^= y >> 11;
    y ^= (y << 7) & 0x9d2c5680u;
    y ^= (y << 15) & 0xefc60000u;
    return y ^ (y >> 18);
}

uint64_t rng_u64(struct rng *r)
{
    uint64_t high = rng_u32(r);
    return high << 32 | rng_u32(r);
}

void rng_skip(struct rng *r, uint64_t n)
{
    while (n > 0) {
        if (r->next >= RNG_STATE_WORDS)
            generate(r);
        uint64_t left = RNG_STATE_WORDS - r->next;
        uint64_t take = n < left ? n : left;
        r->next += (uint32_t)take;
        n -= take;
    }
}

/*
 * fmaf, also where the C library's is slow because the build may not assume the instruction: x holds 24 bits and width
 * 24, so their product is exact in double. Adding from may round there (to 53 bits) and again to float, which is wrong
 * only if the first rounding lands on the midpoint of two floats: then the library's own is asked.
 */
static float fused(float x, float width, float from)
{
    double product = (double)x * (double)width;
    double sum = product + (double)from;
    float rounded = (float)sum;
    double product_part = sum - (double)from;
    double lost = (product - product_part) + ((double)from - (sum - product_part));
    if (lost == 0)
        return rounded;
    return fmaf(x, width, from);
}

static float unit_float(uint32_t word)
{
    return (float)(word & 0xffffffu) * 0x1p-24f;
}

void rng_uniform_fill(struct rng *r, float *dst, size_t n, double from, double to)
{
    float low = (float)from;
    float width = (float)to - low;
    for (size_t i = 0; i < n; i++)
        dst[i] = fused(unit_float(rng_u32(r)), width, low);
}

static double unit_double(struct rng *r)
{
    return (double)(rng_u64(r) & ((UINT64_C(1) << 53) - 1)) * 0x1p-53;
}

/* at::normal_distribution<double>: cosine first, the sine waits in the generator. */
static double normal_one(struct rng *r)
{
    if (r->has_cached_normal) {
        r->has_cached_normal = false;
        return r->cached_normal;
    }
    double u1 = unit_double(r);
    double u2 = unit_double(r);
    double radius = sqrt(-2.0 * log1p(-u2));
    double theta = TWO_PI * u1;
    r->cached_normal = radius * sin(theta);
    r->has_cached_normal = true;
    return radius * cos(theta);
}

#define NORMAL_BLOCK 16
#define NORMAL_HALF 8

static void normal_block(float *block, float mean, float std)
{
    for (size_t j = 0; j < NORMAL_HALF; j++) {
        double u1 = 1.0 - (double)block[j];
        double u2 = (double)block[j + NORMAL_HALF];
        double radius = sqrt(-2.0 * log(u1));
        double theta = TWO_PI * u2;
        block[j] = fmaf((float)(radius * cos(theta)), std, mean);
        block[j + NORMAL_HALF] = fmaf((float)(radius * sin(theta)), std, mean);
    }
}

void rng_normal_fill(struct rng *r, float *dst, size_t n, double mean, double std)
{
    if (n < NORMAL_BLOCK) {
        for (size_t i = 0; i < n; i++)
            dst[i] = (float)(normal_one(r) * std + mean);
        return;
    }
    for (size_t i = 0; i < n; i++)
        dst[i] = unit_float(rng_u32(r));
    size_t whole = n - n % NORMAL_BLOCK;
    for (size_t i = 0; i < whole; i += NORMAL_BLOCK)
        normal_block(dst + i, (float)mean, (float)std);
    if (whole == n)
        return;
    /* The last 16 are drawn anew, those of them that were done already too: so does PyTorch. */
    float *last = dst + n - NORMAL_BLOCK;
    for (size_t j = 0; j < NORMAL_BLOCK; j++)
        last[j] = unit_float(rng_u32(r));
    normal_block(last, (float)mean, (float)std);
}

void rng_randperm(struct rng *r, uint32_t n, uint32_t *dst)
{
    /* From there on PyTorch takes 64-bit draws. */
    assert(n < UINT32_MAX / 20);
    for (uint32_t i = 0; i < n; i++)
        dst[i] = i;
    for (uint32_t i = 0; i + 1 < n; i++) {
        uint32_t other = i + rng_u32(r) % (n - i);
        uint32_t kept = dst[i];
        dst[i] = dst[other];
        dst[other] = kept;
    }
}

void rng_loader_epoch(struct rng *r, struct rng *ret_order)
{
    rng_u64(r); /* the workers' base seed */
    rng_seed(ret_order, rng_u64(r));
}
