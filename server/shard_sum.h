#ifndef SERVER_SHARD_SUM_H
#define SERVER_SHARD_SUM_H
/*
 * Sums of gradients in tree order, block by block: all partial sums of a block stay in the first-level cache, and the
 * last addition is one pass with the optimizer. Gradients are read where the network left them.
 */
#include <stdbool.h>
#include <stddef.h>

#include "common/error.h"
#include "kernels/kernels.h"
#include "proto/rpc.h"

/* How a gradient that somebody else owns is held and read: a received payload, or an array in tests. */
struct shard_gradient_ops {
    size_t (*bytes)(const void *gradient);
    void *(*ref)(void *gradient);
    void (*unref)(void *gradient);
    void (*reader_init)(struct rpc_payload_reader *reader, const void *gradient);
    /* As rpc_payload_reader_next. */
    bool (*reader_next)(struct rpc_payload_reader *reader, const float **ret_run, size_t *ret_count);
};

/* struct rpc_payload. */
extern const struct shard_gradient_ops shard_payload_ops;

/* One operand: one of the two is set. */
struct shard_term {
    const void *gradient;
    const float *floats;
    bool left; /* it stands left of the sum of the terms before it; of no meaning for the first term */
};

/* A path from a leaf to the root of the largest tree has a term a level, and the leaf itself. */
#define SHARD_TERMS_MAX 18

/* Readers and scratch, for one thread. */
struct shard_sum;

/* kernels: of a backend in host memory; stream is one of its. Both must outlive the sum. TALLY_ENOMEM. */
tally_status shard_sum_new(const struct kernels *kernels, struct kernel_stream *stream,
                           const struct shard_gradient_ops *ops, struct shard_sum **ret_sum, struct tally_error *err);
void shard_sum_free(struct shard_sum *sum);

/* dst = the sum of count >= 2 terms of n floats each: ((t0 . t1) . t2) ..., with t_i on its side. dst may be one of the
 * terms' floats. */
void shard_sum_into(struct shard_sum *sum, const struct shard_term *terms, size_t count, size_t n, float *dst);

/* The same sum, of count >= 1 terms, as the gradient of an SGD step: kernels->sgd. */
struct shard_sgd {
    const struct kernel_sgd *options;
    float weight; /* of the whole step */
    const float *w, *m;
    float *w_out, *m_out; /* m, m_out: NULL without momentum */
};
void shard_sum_sgd(struct shard_sum *sum, const struct shard_term *terms, size_t count, size_t n,
                   const struct shard_sgd *sgd);
#endif
