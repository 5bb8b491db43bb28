#ifndef MODEL_BALANCE_H
#define MODEL_BALANCE_H
/* Consecutive pieces of work cut into runs whose largest is as small as it can be: the stages of a pipeline. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/*
 * Cuts costs[0, n) into `runs` runs of at least one each: run r is [ret_begin[r], ret_begin[r + 1]), ret_begin holds
 * runs + 1. No cut has a smaller largest sum; among the best, each run is as near to an equal share of what is left as
 * it can be. Sums stop at UINT64_MAX. false: no memory, or n < runs, or no run.
 */
bool balance_cut(const uint64_t *costs, size_t n, size_t runs, size_t *ret_begin);
#endif
