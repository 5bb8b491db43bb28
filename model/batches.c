#include "model/batches.h"

#include <inttypes.h>

#include "common/check.h"
#include "common/limits.h"

static uint64_t divide_up(uint64_t a, uint64_t b)
{
    return a / b + (a % b != 0);
}

static uint64_t smaller(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

tally_status batches_init(struct batches *b, uint64_t samples, uint32_t batch, uint32_t micro, bool drop_last,
                          uint64_t epochs, uint64_t steps, struct tally_error *err)
{
    if (samples == 0 || batch == 0 || micro == 0)
        return tally_fail(err, TALLY_EINVAL,
                          "a training set of %" PRIu64 " samples in batches of %u, micro-batches of %u: "
                          "each must be at least 1",
                          samples, batch, micro);
    if (epochs == 0 && steps == 0)
        return tally_fail(err, TALLY_EINVAL, "neither epochs nor steps is given");
    uint64_t epoch_steps = drop_last ? samples / batch : divide_up(samples, batch);
    if (epoch_steps == 0)
        return tally_fail(err, TALLY_EINVAL,
                          "drop_last leaves no batch: batch_size is %u, the training set has %" PRIu64 " samples",
                          batch, samples);
    if (micro > batch)
        micro = batch;
    uint64_t leaves = divide_up(smaller(samples, batch), micro);
    if (leaves > TALLY_MICRO_BATCHES_MAX)
        return tally_fail(err, TALLY_EINVAL, "%" PRIu64 " micro-batches of %u in a batch of %u: at most %u are allowed",
                          leaves, micro, batch, TALLY_MICRO_BATCHES_MAX);
    uint64_t total = steps;
    if (epochs > 0) {
        uint64_t epochs_total;
        if (__builtin_mul_overflow(epochs, epoch_steps, &epochs_total))
            epochs_total = UINT64_MAX;
        total = steps > 0 ? smaller(steps, epochs_total) : epochs_total;
    }
    if (total == UINT64_MAX)
        return tally_fail(err, TALLY_EINVAL, "%" PRIu64 " epochs of %" PRIu64 " steps are more than can be counted",
                          epochs, epoch_steps);
    *b = (struct batches){
        .samples = samples, .batch = batch, .micro = micro, .epoch_steps = epoch_steps, .steps = total};
    return TALLY_OK;
}

struct step_shape batches_step(const struct batches *b, uint64_t step)
{
    tally_check(step >= 1 && step <= b->steps);
    uint64_t in_epoch = (step - 1) % b->epoch_steps;
    uint64_t first = in_epoch * b->batch;
    uint32_t samples = (uint32_t)smaller(b->batch, b->samples - first);
    return (struct step_shape){
        .epoch = (step - 1) / b->epoch_steps + 1,
        .epoch_end = in_epoch + 1 == b->epoch_steps,
        .first_sample = first,
        .samples = samples,
        .leaves = (uint32_t)divide_up(samples, b->micro),
    };
}

struct sample_range batches_leaf(const struct batches *b, const struct step_shape *step, uint32_t leaf)
{
    tally_check(leaf < step->leaves);
    uint64_t skipped = (uint64_t)leaf * b->micro;
    return (struct sample_range){
        .first = step->first_sample + skipped,
        .count = (uint32_t)smaller(b->micro, step->samples - skipped),
    };
}

/* Puts rows into the list, largest first, unless it is there. */
static size_t add_rows(uint32_t rows[3], size_t count, uint32_t value)
{
    size_t at = 0;
    while (at < count && rows[at] > value)
        at++;
    if (at < count && rows[at] == value)
        return count;
    tally_check(count < 3);
    for (size_t i = count; i > at; i--)
        rows[i] = rows[i - 1];
    rows[at] = value;
    return count + 1;
}

size_t batches_row_counts(const struct batches *b, uint32_t ret_rows[3])
{
    size_t count = 0;
    /* Steps of an epoch differ only in that the last may be short. */
    uint64_t last = smaller(b->epoch_steps, b->steps);
    for (int i = 0; i < 2; i++) {
        struct step_shape step = batches_step(b, i == 0 ? 1 : last);
        count = add_rows(ret_rows, count, batches_leaf(b, &step, 0).count);
        count = add_rows(ret_rows, count, batches_leaf(b, &step, step.leaves - 1).count);
    }
    return count;
}
