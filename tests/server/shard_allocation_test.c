/* A step of a shard's slices allocates nothing, once the first one has shown what it takes: with several workers,
 * partial sums and pushes that are repeated. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "kernels/kernels.h"
#include "server/shard_store.h"
#include "tests/support/allocations.h"

#define LEAVES 7
#define FLOATS 3000
#define STEPS 20

static float gradient[FLOATS];

static size_t array_bytes(const void *array)
{
    (void)array;
    return sizeof gradient;
}

static void *array_ref(void *array)
{
    return array;
}

static void array_unref(void *array)
{
    (void)array;
}

static void array_reader_init(struct rpc_payload_reader *reader, const void *array)
{
    (void)array;
    reader->position = 0;
}

static bool array_reader_next(struct rpc_payload_reader *reader, const float **ret_run, size_t *ret_count)
{
    size_t left = FLOATS - reader->position, take = left < 999 ? left : 999;
    *ret_run = gradient + reader->position;
    *ret_count = take;
    reader->position += take;
    return take > 0;
}

static const struct shard_gradient_ops array_ops = {array_bytes, array_ref, array_unref, array_reader_init,
                                                    array_reader_next};

static void no_wake(void *user)
{
    (void)user;
}

static enum shard_taken push_leaf(struct shard_store *store, uint64_t step, uint32_t leaf, uint32_t slice)
{
    const struct shard_push push = {
        .generation = 1, .step = step, .leaves = {leaf, leaf + 1}, .slice = slice, .weight = 1, .gradient = gradient};
    struct shard_update update;
    struct shard_refusal refusal;
    struct tally_error err;
    return shard_store_push(store, &push, &update, &refusal, &err);
}

/* Leaves 0, 2, 4, 6, then 1, 3, 5: as many held and as many partial sums as there can be. */
static void run_step(struct shard_store *store, uint64_t step)
{
    for (uint32_t i = 0; i < LEAVES; i++)
        for (uint32_t slice = 0; slice < 2; slice++) {
            uint32_t leaf = i < 4 ? 2 * i : 2 * (i - 4) + 1;
            enum shard_taken expected = i + 1 < LEAVES ? SHARD_HELD : SHARD_UPDATED;
            if (push_leaf(store, step, leaf, slice) != expected ||
                push_leaf(store, step, leaf, slice) != SHARD_REPEATED)
                abort();
        }
}

static void test_no_allocation_in_a_step(void **state)
{
    (void)state;
    const struct kernels *kernels = kernels_find("cpu");
    static const struct shard_range slices[2] = {{0, FLOATS}, {FLOATS, FLOATS}};
    struct shard_wake wake = {.wake = no_wake};
    struct shard_store_config config = {.job = 1,
                                        .generation = 1,
                                        .slices = slices,
                                        .slice_count = 2,
                                        .sgd = {.lr = 0.1f, .momentum = 0.9f},
                                        .kernels = kernels,
                                        .gradients = &array_ops,
                                        .wake = &wake};
    struct kernel_stream *stream;
    struct shard_store *store;
    assert_int_equal(batches_init(&config.batches, LEAVES, LEAVES, 1, false, 0, STEPS, NULL), TALLY_OK);
    assert_int_equal(kernels->open(NULL, 0, &config.backend, NULL), TALLY_OK);
    assert_int_equal(kernels->stream_open(config.backend, &stream, NULL), TALLY_OK);
    assert_int_equal(shard_sum_new(kernels, stream, &array_ops, &config.sum, NULL), TALLY_OK);
    assert_int_equal(shard_store_new(&config, &store, NULL), TALLY_OK);
    unsigned long start = allocations();
    run_step(store, 1);
    unsigned long first = allocations();
    for (uint64_t step = 2; step <= STEPS; step++)
        run_step(store, step);
    unsigned long last = allocations();
    assert_true(!allocations_counted() || first > start); /* the counting works */
    assert_int_equal(last - first, 0);
    assert_int_equal(shard_store_version(store), STEPS);
    shard_store_free(store);
    shard_sum_free(config.sum);
    kernels->stream_close(stream);
    kernels->close(config.backend);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_no_allocation_in_a_step)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
