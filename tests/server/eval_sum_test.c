#include "server/eval_sum.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "model/tree.h"

#define LEAVES 7

static double tree_sum(const double *values, uint32_t begin, uint32_t end)
{
    if (end - begin == 1)
        return values[begin];
    uint32_t middle = begin + tree_split(end - begin);
    return tree_sum(values, begin, middle) + tree_sum(values, middle, end);
}

static tally_status add(struct eval_sum *sum, uint64_t step, uint32_t micro_batch, double loss, double weight,
                        struct tally_error *err)
{
    Tally__V1__EvalRecord record = TALLY__V1__EVAL_RECORD__INIT, *records[1] = {&record};
    record.micro_batch = micro_batch;
    record.loss_sum = loss;
    record.weight = weight;
    record.correct = micro_batch;
    record.samples = 4;
    Tally__V1__Evals evals = TALLY__V1__EVALS__INIT;
    evals.step = step;
    evals.n_records = 1;
    evals.records = records;
    return eval_sum_add(sum, &evals, err);
}

static struct eval_sum *open_sum(uint64_t steps)
{
    struct batches batches;
    assert_int_equal(batches_init(&batches, 40, 8, 4, false, 0, steps, NULL), TALLY_OK); /* 5 steps an epoch */
    struct eval_sum *sum = NULL;
    assert_int_equal(eval_sum_open(&batches, LEAVES * 4 - 1, &sum, NULL), TALLY_OK);
    return sum;
}

/* Any order, records repeated: the figures are those of the tree, to the bit. */
static void any_order_gives_the_trees_sum(void **state)
{
    (void)state;
    double values[LEAVES];
    uint32_t order[LEAVES];
    srand(3);
    for (int round = 0; round < 50; round++) {
        struct eval_sum *sum = open_sum(5);
        for (uint32_t i = 0; i < LEAVES; i++) {
            values[i] = exp((double)(rand() % 60) - 30) / 3;
            order[i] = i;
        }
        for (uint32_t i = LEAVES - 1; i > 0; i--) {
            uint32_t j = (uint32_t)rand() % (i + 1), keep = order[i];
            order[i] = order[j];
            order[j] = keep;
        }
        struct eval_result result;
        for (uint32_t i = 0; i < LEAVES; i++) {
            assert_false(eval_sum_take(sum, 5, &result));
            assert_int_equal(add(sum, 5, order[i], values[order[i]], 4, NULL), TALLY_OK);
            assert_int_equal(add(sum, 5, order[i / 2], 1e9, 4, NULL), TALLY_OK); /* repeated: ignored */
        }
        assert_false(eval_sum_take(sum, 4, &result)); /* before its step was reported */
        assert_true(eval_sum_take(sum, 5, &result));
        double expect = tree_sum(values, 0, LEAVES);
        assert_memory_equal(&result.loss_sum, &expect, sizeof expect);
        assert_true(result.weight == 4 * LEAVES && result.correct == 21 && result.samples == 4 * LEAVES);
        assert_int_equal(result.step, 5);
        assert_int_equal(result.epoch, 1);
        assert_true(eval_sum_done(sum));
        assert_int_equal(add(sum, 5, 0, 1, 1, NULL), TALLY_OK); /* late: ignored */
        assert_false(eval_sum_take(sum, 5, &result));
        eval_sum_close(sum);
    }
}

/* 12 steps of 5 an epoch: evaluations after 5, 10 and 12, taken in this order whichever is whole first. */
static void evaluations_come_in_order(void **state)
{
    (void)state;
    struct eval_sum *sum = open_sum(12);
    const uint64_t steps[] = {12, 10, 5};
    struct eval_result result;
    char text[100];
    eval_sum_waits(sum, text, sizeof text);
    assert_string_equal(text, "the evaluation after step 5: 0 of 7 micro-batches");
    for (int i = 0; i < 3; i++) {
        assert_false(eval_sum_take(sum, 12, &result));
        for (uint32_t leaf = 0; leaf < LEAVES; leaf++)
            assert_int_equal(add(sum, steps[i], leaf, 1, 4, NULL), TALLY_OK);
    }
    for (int i = 2; i >= 0; i--) {
        assert_false(eval_sum_done(sum));
        assert_true(eval_sum_take(sum, 12, &result));
        assert_int_equal(result.step, steps[i]);
        assert_int_equal(result.epoch, (steps[i] + 4) / 5);
    }
    assert_true(eval_sum_done(sum));
    eval_sum_close(sum);
}

static void far_ahead_is_held(void **state)
{
    (void)state;
    struct eval_sum *sum = open_sum(500);
    for (uint64_t step = 500; step > 0; step -= 5)
        assert_int_equal(add(sum, step, 0, (double)step, 4, NULL), TALLY_OK);
    struct eval_result result;
    for (uint64_t step = 5; step <= 500; step += 5) {
        for (uint32_t leaf = 1; leaf < LEAVES; leaf++)
            assert_int_equal(add(sum, step, leaf, 0, 4, NULL), TALLY_OK);
        assert_true(eval_sum_take(sum, 500, &result));
        assert_true(result.step == step && result.loss_sum == (double)step);
    }
    eval_sum_close(sum);
}

static void the_impossible_is_refused(void **state)
{
    (void)state;
    struct eval_sum *sum = open_sum(12);
    struct tally_error err;
    assert_int_equal(add(sum, 0, 0, 1, 1, &err), TALLY_EINVAL);
    assert_int_equal(add(sum, 4, 0, 1, 1, &err), TALLY_EINVAL);
    assert_int_equal(add(sum, 15, 0, 1, 1, &err), TALLY_EINVAL);
    assert_int_equal(add(sum, UINT64_MAX, 0, 1, 1, &err), TALLY_EINVAL);
    assert_int_equal(add(sum, 5, LEAVES, 1, 1, &err), TALLY_EINVAL);
    assert_int_equal(add(sum, 5, 0, 1, -1, &err), TALLY_EINVAL);
    assert_int_equal(add(sum, 5, 0, 1, NAN, &err), TALLY_EINVAL);
    assert_int_equal(add(sum, 5, 0, NAN, 1, &err), TALLY_OK); /* a loss may diverge */
    eval_sum_close(sum);

    struct batches batches;
    assert_int_equal(batches_init(&batches, 40, 8, 4, false, 0, 5, NULL), TALLY_OK);
    assert_int_equal(eval_sum_open(&batches, UINT64_MAX, &sum, &err), TALLY_EINVAL);
    assert_int_equal(eval_sum_open(&batches, 0, &sum, &err), TALLY_OK); /* no test set */
    assert_true(eval_sum_done(sum));
    assert_int_equal(add(sum, 5, 0, 1, 1, &err), TALLY_EINVAL);
    eval_sum_close(sum);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(any_order_gives_the_trees_sum),
        cmocka_unit_test(evaluations_come_in_order),
        cmocka_unit_test(far_ahead_is_held),
        cmocka_unit_test(the_impossible_is_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
