#include "model/order.h"

#include <inttypes.h>
#include <stdlib.h>

#include "common/check.h"
#include "common/rng.h"

struct order {
    uint32_t samples;
    bool shuffle;
    uint64_t epoch;     /* whose order is in indices; 0: none yet */
    struct rng initial; /* PyTorch's default generator behind the model's initialisation */
    struct rng now;     /* and behind the epochs that were asked for */
    uint32_t indices[];
};

tally_status order_open(uint64_t samples, bool shuffle, uint64_t seed, uint64_t init_draws, struct order **ret_order,
                        struct tally_error *err)
{
    if (samples == 0 || samples > UINT32_MAX)
        return tally_fail(err, TALLY_EINVAL, "a training set of %" PRIu64 " samples, expected 1 to %" PRIu32, samples,
                          UINT32_MAX);
    struct order *order = malloc(sizeof(*order) + samples * sizeof(uint32_t));
    if (!order)
        return tally_fail(err, TALLY_ENOMEM, "no memory for the order of %" PRIu64 " samples", samples);
    order->samples = (uint32_t)samples;
    order->shuffle = shuffle;
    order->epoch = 0;
    rng_seed(&order->initial, seed);
    if (shuffle)
        rng_skip(&order->initial, init_draws);
    order->now = order->initial;
    for (uint32_t i = 0; i < order->samples; i++)
        order->indices[i] = i;
    *ret_order = order;
    return TALLY_OK;
}

void order_close(struct order *order)
{
    free(order);
}

/* randperm of 2^32 / 20 and more, where PyTorch takes 64-bit draws and the inside-out variant of the shuffle
 * (ATen/native/TensorFactories.cpp, randperm_cpu). */
static void shuffle_large(struct rng *r, uint32_t n, uint32_t *dst)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t other = (uint32_t)(rng_u64(r) % ((uint64_t)i + 1));
        dst[i] = i;
        dst[i] = dst[other];
        dst[other] = i;
    }
}

const uint32_t *order_epoch(struct order *order, uint64_t epoch)
{
    tally_check(epoch >= 1);
    if (!order->shuffle || epoch == order->epoch)
        return order->indices;
    if (epoch < order->epoch) {
        order->now = order->initial;
        order->epoch = 0;
    }
    struct rng generator;
    while (order->epoch < epoch) {
        rng_loader_epoch(&order->now, &generator);
        order->epoch++;
    }
    if (order->samples < UINT32_MAX / 20)
        rng_randperm(&generator, order->samples, order->indices);
    else
        shuffle_large(&generator, order->samples, order->indices);
    return order->indices;
}
