#ifndef SERVER_EVAL_SUM_H
#define SERVER_EVAL_SUM_H
/*
 * Evaluations of a job: the results of their micro-batches come from several workers in any order, some perhaps twice,
 * and are summed in the order of the canonical tree (model/tree.h) once all are there, so that the figures do not
 * depend on who ran what. Pure.
 */
#include <stdbool.h>
#include <stdint.h>

#include "common/error.h"
#include "model/batches.h"
#include "proto/cluster.pb-c.h"

struct eval_sum;

/* An evaluation: after each epoch and after the last step. samples 0: the job has none. TALLY_EINVAL: too many
 * micro-batches. */
tally_status eval_sum_open(const struct batches *batches, uint64_t samples, struct eval_sum **ret_sum,
                           struct tally_error *err);
/* Accepts NULL. */
void eval_sum_close(struct eval_sum *sum);

/*
 * Takes a worker's records of the weights at `step`. Records that are there already are ignored. TALLY_EINVAL: no
 * evaluation belongs to this step, or a record is impossible; TALLY_ENOMEM: too much waits.
 */
tally_status eval_sum_add(struct eval_sum *sum, const Tally__V1__Evals *evals, struct tally_error *err);

struct eval_result {
    uint64_t step, epoch;
    double loss_sum, weight, correct;
    uint64_t samples;
};

/* The next evaluation in order, if all of it is there: takes it out. */
bool eval_sum_take(struct eval_sum *sum, uint64_t reported_step, struct eval_result *ret_result);

/* All evaluations of the job were taken. */
bool eval_sum_done(const struct eval_sum *sum);
/* What the next evaluation lacks, for a person: "the evaluation after step 64: 3 of 10 micro-batches". */
void eval_sum_waits(const struct eval_sum *sum, char *text, size_t size);
#endif
