#include "server/shard_sum.h"

#include <stdlib.h>

#include "common/check.h"

/* With w, m, their successors and two operands: 6 x 8 KiB, which a 48 KiB first-level cache just holds; the second
 * level always does. */
#define BLOCK_FLOATS 2048

/* A term's position: what is left of its current run. */
struct cursor {
    const float *run;
    size_t left;
    const struct shard_term *term;
    struct rpc_payload_reader reader;
};

struct shard_sum {
    const struct kernels *kernels;
    struct kernel_stream *stream;
    const struct shard_gradient_ops *ops;
    _Alignas(64) float partial[BLOCK_FLOATS];
    struct cursor cursors[SHARD_TERMS_MAX];
};

tally_status shard_sum_new(const struct kernels *kernels, struct kernel_stream *stream,
                           const struct shard_gradient_ops *ops, struct shard_sum **ret_sum, struct tally_error *err)
{
    if (!kernels->host_memory)
        return tally_fail(err, TALLY_EUNSUPPORTED, "backend %s does not keep its memory where a shard can read it",
                          kernels->name);
    struct shard_sum *sum = aligned_alloc(64, (sizeof *sum + 63) / 64 * 64);
    if (!sum)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a shard's sums");
    sum->kernels = kernels;
    sum->stream = stream;
    sum->ops = ops;
    *ret_sum = sum;
    return TALLY_OK;
}

void shard_sum_free(struct shard_sum *sum)
{
    free(sum);
}

static void begin(struct shard_sum *sum, const struct shard_term *terms, size_t count, size_t n)
{
    tally_check(count >= 1 && count <= SHARD_TERMS_MAX);
    for (size_t i = 0; i < count; i++) {
        struct cursor *cursor = &sum->cursors[i];
        cursor->term = &terms[i];
        cursor->run = terms[i].floats;
        cursor->left = terms[i].floats ? n : 0;
        if (!terms[i].floats)
            sum->ops->reader_init(&cursor->reader, terms[i].gradient);
    }
}

/* The floats from here on that lie in one piece in every term, at most `most` and a block; then as many are taken off
 * by advance(). */
static size_t piece(struct shard_sum *sum, size_t count, size_t most)
{
    size_t n = most < BLOCK_FLOATS ? most : BLOCK_FLOATS;
    for (size_t i = 0; i < count; i++) {
        struct cursor *cursor = &sum->cursors[i];
        if (cursor->left == 0) {
            bool more = sum->ops->reader_next(&cursor->reader, &cursor->run, &cursor->left);
            tally_check(more && cursor->left > 0); /* its length was checked when it came */
        }
        if (cursor->left < n)
            n = cursor->left;
    }
    return n;
}

static void advance(struct shard_sum *sum, size_t count, size_t n)
{
    for (size_t i = 0; i < count; i++) {
        sum->cursors[i].run += n;
        sum->cursors[i].left -= n;
    }
}

/* Adds terms 1..count-1 to term 0 for n floats, but for the last addition, whose operands are returned. count >= 2. */
static void add_but_last(struct shard_sum *sum, size_t count, size_t n, const float **ret_a, const float **ret_b)
{
    const float *before = sum->cursors[0].run;
    for (size_t i = 1;; i++) {
        const struct cursor *cursor = &sum->cursors[i];
        const float *a = cursor->term->left ? cursor->run : before;
        const float *b = cursor->term->left ? before : cursor->run;
        if (i + 1 == count) {
            *ret_a = a;
            *ret_b = b;
            return;
        }
        sum->kernels->sum(sum->stream, n, sum->partial, a, b);
        before = sum->partial;
    }
}

void shard_sum_into(struct shard_sum *sum, const struct shard_term *terms, size_t count, size_t n, float *dst)
{
    tally_check(count >= 2);
    begin(sum, terms, count, n);
    for (size_t done = 0, take; done < n; done += take) {
        take = piece(sum, count, n - done);
        const float *a, *b;
        add_but_last(sum, count, take, &a, &b);
        sum->kernels->sum(sum->stream, take, dst + done, a, b);
        advance(sum, count, take);
    }
}

void shard_sum_sgd(struct shard_sum *sum, const struct shard_term *terms, size_t count, size_t n,
                   const struct shard_sgd *sgd)
{
    begin(sum, terms, count, n);
    for (size_t done = 0, take; done < n; done += take) {
        take = piece(sum, count, n - done);
        const float *a = sum->cursors[0].run, *b = NULL;
        if (count > 1)
            add_but_last(sum, count, take, &a, &b);
        sum->kernels->sgd(sum->stream, take, sgd->options, sgd->weight, a, b, sgd->w + done,
                          sgd->m ? sgd->m + done : NULL, sgd->w_out + done, sgd->m_out ? sgd->m_out + done : NULL);
        advance(sum, count, take);
    }
}
