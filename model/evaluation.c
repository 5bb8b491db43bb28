#include "model/evaluation.h"

#include <assert.h>

#include "common/limits.h"

struct evaluation evaluation_of(uint64_t test_samples, uint32_t micro)
{
    uint64_t least = (test_samples + TALLY_MICRO_BATCHES_MAX - 1) / TALLY_MICRO_BATCHES_MAX;
    struct evaluation e = {.samples = test_samples, .rows = least > micro ? (uint32_t)least : micro};
    assert(least <= UINT32_MAX);
    e.leaves = (uint32_t)((test_samples + e.rows - 1) / e.rows);
    return e;
}

struct sample_range evaluation_leaf(const struct evaluation *evaluation, uint32_t leaf)
{
    assert(leaf < evaluation->leaves);
    uint64_t first = (uint64_t)leaf * evaluation->rows, left = evaluation->samples - first;
    return (struct sample_range){.first = first, .count = left < evaluation->rows ? (uint32_t)left : evaluation->rows};
}
