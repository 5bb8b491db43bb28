#ifndef MODEL_ORDER_H
#define MODEL_ORDER_H
/*
 * The order of the training samples in an epoch: what PyTorch's DataLoader(shuffle=True) would use in a program that
 * calls torch.manual_seed(seed), builds the model (init_draws numbers of the generator, model/init.h) and then loops
 * over the loader. shuffle false: 0, 1, 2 ...
 */
#include <stdbool.h>
#include <stdint.h>

#include "common/error.h"

struct order;

/* samples < 2^32. */
tally_status order_open(uint64_t samples, bool shuffle, uint64_t seed, uint64_t init_draws, struct order **ret_order,
                        struct tally_error *err);
void order_close(struct order *order);

/* The sample indices of epoch (from 1): an array of `samples`, valid until the next call or close. Going back is
 * allowed (it starts over). Allocates nothing. */
const uint32_t *order_epoch(struct order *order, uint64_t epoch);
#endif
