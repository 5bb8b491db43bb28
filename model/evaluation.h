#ifndef MODEL_EVALUATION_H
#define MODEL_EVALUATION_H
/*
 * How a test set is cut into micro-batches: a pure function of the job, like a step's. The samples come in file order;
 * the results are summed by the tree over the leaves (model/tree.h), so they do not depend on who ran which.
 */
#include <stdint.h>

#include "model/batches.h"

struct evaluation {
    uint64_t samples; /* of the test set; 0: no evaluation */
    uint32_t rows;    /* samples of a full micro-batch: those of training, or more where there would be too many
                         micro-batches for a tree */
    uint32_t leaves;
};

/* test_samples is below 2^48, micro (samples of a training micro-batch) at least 1. */
struct evaluation evaluation_of(uint64_t test_samples, uint32_t micro);

/* The test samples of micro-batch leaf. */
struct sample_range evaluation_leaf(const struct evaluation *evaluation, uint32_t leaf);
#endif
