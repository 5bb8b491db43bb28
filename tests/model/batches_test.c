#include "model/batches.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* Every sample of an epoch is in exactly one micro-batch, in order; drop_last leaves out the short batch; the row
 * counts are those that occur. */
static void check(uint64_t samples, uint32_t batch, uint32_t micro, bool drop_last, uint64_t epochs, uint64_t steps)
{
    struct batches b;
    struct tally_error err;
    if (drop_last && samples < batch) {
        assert_int_equal(batches_init(&b, samples, batch, micro, drop_last, epochs, steps, &err), TALLY_EINVAL);
        return;
    }
    assert_int_equal(batches_init(&b, samples, batch, micro, drop_last, epochs, steps, &err), TALLY_OK);
    uint64_t used = drop_last ? samples - samples % batch : samples;
    uint64_t epoch = 1, at = 0;
    bool occurs[512] = {0};
    for (uint64_t t = 1; t <= b.steps; t++) {
        struct step_shape step = batches_step(&b, t);
        assert_int_equal(step.epoch, epoch);
        assert_int_equal(step.first_sample, at);
        uint32_t sum = 0;
        for (uint32_t leaf = 0; leaf < step.leaves; leaf++) {
            struct sample_range range = batches_leaf(&b, &step, leaf);
            assert_int_equal(range.first, at + sum);
            assert_true(range.count > 0 && range.count <= micro);
            assert_true(range.count == micro || leaf + 1 == step.leaves);
            occurs[range.count] = true;
            sum += range.count;
        }
        assert_int_equal(sum, step.samples);
        at += sum;
        assert_true(sum == batch || at == samples);
        assert_int_equal(step.epoch_end, at == used);
        if (at == used) {
            at = 0;
            epoch++;
        }
    }
    uint64_t all = epochs * b.epoch_steps;
    assert_int_equal(b.steps, epochs == 0 ? steps : steps == 0 || steps > all ? all : steps);

    uint32_t rows[3];
    size_t count = batches_row_counts(&b, rows);
    assert_in_range(count, 1, 3);
    for (size_t i = 0; i < count; i++) {
        assert_true(occurs[rows[i]]);
        occurs[rows[i]] = false;
        assert_true(i == 0 || rows[i] < rows[i - 1]);
    }
    for (size_t i = 0; i < 512; i++)
        assert_false(occurs[i]);
}

static void test_every_sample_once(void **state)
{
    (void)state;
    static const uint64_t samples[] = {1, 2, 15, 16, 17, 58, 63, 64, 65, 100, 250, 257};
    static const uint32_t batch[] = {1, 3, 16, 64, 300}, micro[] = {1, 2, 5, 16, 64, 400};
    for (size_t i = 0; i < sizeof(samples) / sizeof(samples[0]); i++)
        for (size_t j = 0; j < sizeof(batch) / sizeof(batch[0]); j++)
            for (size_t k = 0; k < sizeof(micro) / sizeof(micro[0]); k++)
                for (int drop = 0; drop < 2; drop++) {
                    check(samples[i], batch[j], micro[k], drop, 2, 0);
                    check(samples[i], batch[j], micro[k], drop, 0, 3);
                    check(samples[i], batch[j], micro[k], drop, 3, 5);
                    check(samples[i], batch[j], micro[k], drop, 0, 1);
                }
}

static void test_short_last_batch(void **state)
{
    (void)state;
    struct batches b;
    assert_int_equal(batches_init(&b, 250, 64, 16, false, 2, 0, NULL), TALLY_OK);
    assert_int_equal(b.epoch_steps, 4);
    assert_int_equal(b.steps, 8);
    struct step_shape step = batches_step(&b, 8);
    assert_int_equal(step.epoch, 2);
    assert_true(step.epoch_end);
    assert_int_equal(step.samples, 58);
    assert_int_equal(step.leaves, 4);
    assert_int_equal(batches_leaf(&b, &step, 3).count, 10);
    uint32_t rows[3];
    assert_int_equal(batches_row_counts(&b, rows), 2);
    assert_int_equal(rows[0], 16);
    assert_int_equal(rows[1], 10);
    /* Three: full, last of a full step, last of the short step. */
    assert_int_equal(batches_init(&b, 250, 60, 16, false, 1, 0, NULL), TALLY_OK);
    assert_int_equal(batches_row_counts(&b, rows), 3);
    assert_int_equal(rows[0], 16);
    assert_int_equal(rows[1], 12);
    assert_int_equal(rows[2], 10);
    assert_int_equal(batches_step(&b, 5).samples, 10);
}

static void test_refusals(void **state)
{
    (void)state;
    struct batches b;
    struct tally_error err;
    assert_int_equal(batches_init(&b, 10, 4, 2, false, 0, 0, &err), TALLY_EINVAL);
    assert_int_equal(batches_init(&b, 0, 4, 2, false, 1, 0, &err), TALLY_EINVAL);
    assert_int_equal(batches_init(&b, 10, 0, 2, false, 1, 0, &err), TALLY_EINVAL);
    assert_int_equal(batches_init(&b, 10, 4, 0, false, 1, 0, &err), TALLY_EINVAL);
    assert_int_equal(batches_init(&b, 10, 11, 2, true, 1, 0, &err), TALLY_EINVAL);
    assert_non_null(strstr(err.message, "batch_size is 11, the training set has 10 samples"));
    assert_int_equal(batches_init(&b, 1000000, 65537, 1, false, 1, 0, &err), TALLY_EINVAL);
    assert_int_equal(batches_init(&b, 1000000, 65536, 1, false, 1, 0, &err), TALLY_OK);
    /* A batch larger than the set has as many micro-batches as the set fills. */
    assert_int_equal(batches_init(&b, 100, 16777216, 1, false, 1, 0, &err), TALLY_OK);
    assert_int_equal(batches_step(&b, 1).leaves, 100);
    assert_int_equal(batches_init(&b, 10, 2, 2, false, UINT64_MAX / 2, 0, &err), TALLY_EINVAL);
    assert_int_equal(batches_init(&b, 10, 2, 2, false, UINT64_MAX / 2, 7, &err), TALLY_OK);
    assert_int_equal(b.steps, 7);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_sample_once),
        cmocka_unit_test(test_short_last_batch),
        cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
