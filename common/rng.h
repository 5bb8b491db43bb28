#ifndef COMMON_RNG_H
#define COMMON_RNG_H
/*
 * PyTorch's CPU generator, bit for bit: mt19937 (Matsumoto and Nishimura 1998) as at::mt19937, and the distributions of
 * ATen/native/cpu/DistributionTemplates.h as its AVX2 and AVX-512 builds compute them.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define RNG_STATE_WORDS 624

/* A value: may be copied; needs no destructor. */
struct rng {
    uint32_t state[RNG_STATE_WORDS];
    uint32_t next;          /* the next word of state to hand out; RNG_STATE_WORDS: generate first */
    bool has_cached_normal; /* the second value of a Box-Muller pair waits */
    double cached_normal;
};

/* torch.manual_seed(seed): only the low 32 bits count, as there. */
void rng_seed(struct rng *r, uint64_t seed);

uint32_t rng_u32(struct rng *r);
/* The first 32-bit draw is the high word. */
uint64_t rng_u64(struct rng *r);
/* Goes past n 32-bit draws (one for each element of a uniform float tensor). */
void rng_skip(struct rng *r, uint64_t n);

/* tensor.uniform_(from, to) on n contiguous floats: fma(u24, to - from, from). One draw an element. */
void rng_uniform_fill(struct rng *r, float *dst, size_t n, double from, double to);

/*
 * tensor.normal_(mean, std) on n contiguous floats. n < 16: double Box-Muller with the generator's cached second value,
 * as PyTorch. n >= 16: blocks of 16; log, sin and cos are libm's in double, so values agree with PyTorch's vectorised
 * ones to a few units in the last place, not to the bit.
 */
void rng_normal_fill(struct rng *r, float *dst, size_t n, double mean, double std);

/* torch.randperm(n) on this generator; n < 2^32 / 20. */
void rng_randperm(struct rng *r, uint32_t n, uint32_t *dst);

/*
 * What DataLoader(shuffle=True) does with the default generator at the start of an epoch: draws two int64; the second
 * seeds *ret_order, whose randperm is the epoch's order. Call once an epoch, on the generator as the model's
 * initialisation left it.
 */
void rng_loader_epoch(struct rng *r, struct rng *ret_order);
#endif
