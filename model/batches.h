#ifndef MODEL_BATCHES_H
#define MODEL_BATCHES_H
/*
 * Which samples a step's micro-batches hold: a pure function of the job, so that nobody needs to be told. A step's
 * global batch is a range of its epoch's order (model/order.h); micro-batch i is the range [i * micro, (i + 1) * micro)
 * of it. The last batch of an epoch may be short (unless drop_last), and with it the number of micro-batches and the
 * last of them.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"

struct batches {
    uint64_t samples;     /* of the training set */
    uint32_t batch;       /* samples of a full step */
    uint32_t micro;       /* samples of a full micro-batch */
    uint64_t epoch_steps; /* steps in an epoch */
    uint64_t steps;       /* steps in the job */
};

/* epochs or steps may be 0: not given. TALLY_EINVAL where the job would have no step (both 0, or drop_last leaves
 * nothing), or too many micro-batches. */
tally_status batches_init(struct batches *b, uint64_t samples, uint32_t batch, uint32_t micro, bool drop_last,
                          uint64_t epochs, uint64_t steps, struct tally_error *err);

struct step_shape {
    uint64_t epoch;        /* from 1 */
    bool epoch_end;        /* the epoch's last step */
    uint64_t first_sample; /* position in the epoch's order */
    uint32_t samples;
    uint32_t leaves; /* micro-batches: ceil(samples / micro) */
};

/* step from 1 to b->steps. */
struct step_shape batches_step(const struct batches *b, uint64_t step);

/* Positions in the epoch's order, and how many, of micro-batch leaf of a step. */
struct sample_range {
    uint64_t first;
    uint32_t count;
};
struct sample_range batches_leaf(const struct batches *b, const struct step_shape *step, uint32_t leaf);

/* The numbers of rows that occur in training micro-batches: at most 3 (full, last of a full step, last of an epoch's
 * short step). Returns how many, largest first. */
size_t batches_row_counts(const struct batches *b, uint32_t ret_rows[3]);
#endif
