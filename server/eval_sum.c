#include "server/eval_sum.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "common/limits.h"
#include "model/evaluation.h"
#include "model/tree.h"

struct leaf {
    bool here;
    double loss_sum, weight, correct;
    uint64_t samples;
};

struct pending {
    uint32_t here;       /* leaves */
    struct leaf *leaves; /* NULL: nothing came yet */
};

struct eval_sum {
    struct batches batches;
    uint32_t leaves; /* micro-batches of an evaluation; 0: none is wanted */
    uint64_t count;  /* evaluations of the job */
    uint64_t taken;
    /* Evaluations taken + 1 .. taken + room, as a ring; most jobs never need more than two. */
    size_t room, head, pending;
    struct pending *window;
};

/* How many evaluations there are up to and with step; they follow each epoch, and the last step. */
static uint64_t evaluations_until(const struct batches *b, uint64_t step)
{
    return step / b->epoch_steps + (step == b->steps && step % b->epoch_steps != 0);
}

static uint64_t evaluation_step(const struct eval_sum *sum, uint64_t number)
{
    return number < sum->count ? number * sum->batches.epoch_steps : sum->batches.steps;
}

tally_status eval_sum_open(const struct batches *batches, uint64_t samples, struct eval_sum **ret_sum,
                           struct tally_error *err)
{
    if (samples > TALLY_ELEMENTS_MAX)
        return tally_fail(err, TALLY_EINVAL, "a test set of %" PRIu64 " samples: at most %zu are allowed", samples,
                          TALLY_ELEMENTS_MAX);
    struct eval_sum *sum = calloc(1, sizeof *sum);
    if (!sum)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a job's evaluations");
    sum->batches = *batches;
    sum->leaves = evaluation_of(samples, batches->micro).leaves;
    sum->count = sum->leaves > 0 ? evaluations_until(batches, batches->steps) : 0;
    *ret_sum = sum;
    return TALLY_OK;
}

void eval_sum_close(struct eval_sum *sum)
{
    if (!sum)
        return;
    for (size_t i = 0; i < sum->room; i++)
        free(sum->window[i].leaves);
    free(sum->window);
    free(sum);
}

/* Makes the ring hold at least so many evaluations. */
static tally_status grow(struct eval_sum *sum, uint64_t least, struct tally_error *err)
{
    size_t room = sum->room > 0 ? sum->room : 4;
    while (room < least)
        room *= 2;
    struct pending *window = calloc(room, sizeof *window);
    if (!window)
        return tally_fail(err, TALLY_ENOMEM, "no memory for %zu evaluations", room);
    for (size_t i = 0; i < sum->room; i++)
        window[i] = sum->window[(sum->head + i) % sum->room];
    free(sum->window);
    sum->window = window;
    sum->room = room;
    sum->head = 0;
    return TALLY_OK;
}

/* The evaluation after step, with room for its leaves; NULL in *ret_evaluation: it was taken already. */
static tally_status find(struct eval_sum *sum, uint64_t step, struct pending **ret_evaluation, struct tally_error *err)
{
    uint64_t number = step <= sum->batches.steps ? evaluations_until(&sum->batches, step) : 0;
    if (number == 0 || number > sum->count || evaluation_step(sum, number) != step)
        return tally_fail(err, TALLY_EINVAL, "no evaluation follows step %" PRIu64, step);
    *ret_evaluation = NULL;
    if (number <= sum->taken)
        return TALLY_OK;
    uint64_t offset = number - sum->taken - 1;
    size_t bytes = sum->leaves * sizeof(struct leaf);
    if (offset >= TALLY_EVAL_PENDING_BYTES / sizeof(struct pending) ||
        sum->pending >= TALLY_EVAL_PENDING_BYTES / bytes + 1)
        return tally_fail(err, TALLY_ENOMEM,
                          "the evaluation after step %" PRIu64 " came while that after step %" PRIu64
                          " still lacks results, with too many in between",
                          step, evaluation_step(sum, sum->taken + 1));
    if (offset >= sum->room) {
        tally_status status = grow(sum, offset + 1, err);
        if (status != TALLY_OK)
            return status;
    }
    struct pending *evaluation = &sum->window[(sum->head + offset) % sum->room];
    if (!evaluation->leaves) {
        evaluation->leaves = calloc(sum->leaves, sizeof(struct leaf));
        if (!evaluation->leaves)
            return tally_fail(err, TALLY_ENOMEM, "no memory for an evaluation of %" PRIu32 " micro-batches",
                              sum->leaves);
        sum->pending++;
    }
    *ret_evaluation = evaluation;
    return TALLY_OK;
}

tally_status eval_sum_add(struct eval_sum *sum, const Tally__V1__Evals *evals, struct tally_error *err)
{
    struct pending *evaluation = NULL;
    tally_status status = find(sum, evals->step, &evaluation, err);
    if (status != TALLY_OK || !evaluation)
        return status;
    for (size_t i = 0; i < evals->n_records; i++) {
        const Tally__V1__EvalRecord *record = evals->records[i];
        if (record->micro_batch >= sum->leaves || !(record->weight >= 0) || !isfinite(record->weight))
            return tally_fail(err, TALLY_EINVAL,
                              "an impossible result of micro-batch %" PRIu32 " of %" PRIu32
                              " in the evaluation after step %" PRIu64,
                              record->micro_batch, sum->leaves, evals->step);
        struct leaf *leaf = &evaluation->leaves[record->micro_batch];
        if (leaf->here)
            continue;
        *leaf = (struct leaf){true, record->loss_sum, record->weight, record->correct, record->samples};
        evaluation->here++;
    }
    return TALLY_OK;
}

static struct leaf sum_node(const struct leaf *leaves, uint32_t begin, uint32_t end)
{
    if (end - begin == 1)
        return leaves[begin];
    uint32_t middle = begin + tree_split(end - begin);
    struct leaf left = sum_node(leaves, begin, middle), right = sum_node(leaves, middle, end);
    left.loss_sum += right.loss_sum;
    left.weight += right.weight;
    left.correct += right.correct;
    left.samples += right.samples;
    return left;
}

bool eval_sum_take(struct eval_sum *sum, uint64_t reported_step, struct eval_result *ret_result)
{
    if (sum->room == 0 || sum->taken == sum->count)
        return false;
    struct pending *evaluation = &sum->window[sum->head];
    uint64_t step = evaluation_step(sum, sum->taken + 1);
    if (evaluation->here < sum->leaves || step > reported_step)
        return false;
    struct leaf total = sum_node(evaluation->leaves, 0, sum->leaves);
    *ret_result = (struct eval_result){
        .step = step,
        .epoch = batches_step(&sum->batches, step).epoch,
        .loss_sum = total.loss_sum,
        .weight = total.weight,
        .correct = total.correct,
        .samples = total.samples,
    };
    free(evaluation->leaves);
    *evaluation = (struct pending){0};
    sum->head = (sum->head + 1) % sum->room;
    sum->taken++;
    sum->pending--;
    return true;
}

bool eval_sum_done(const struct eval_sum *sum)
{
    return sum->taken == sum->count;
}

void eval_sum_waits(const struct eval_sum *sum, char *text, size_t size)
{
    if (eval_sum_done(sum)) {
        snprintf(text, size, "no evaluation");
        return;
    }
    uint32_t here = sum->room > 0 ? sum->window[sum->head].here : 0;
    snprintf(text, size, "the evaluation after step %" PRIu64 ": %" PRIu32 " of %" PRIu32 " micro-batches",
             evaluation_step(sum, sum->taken + 1), here, sum->leaves);
}
