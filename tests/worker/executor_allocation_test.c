/* A step allocates nothing: every way to ask for memory is counted while executors run. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include <cmocka.h>

#include "tests/support/allocations.h"
#include "tests/worker/memory_hub.h"
#include "tests/worker/random_job.h"
#include "tests/worker/test_job.h"

/* Takes the spec. */
static void check_steps(Tally__V1__JobSpec *spec)
{
    struct test_job *job = test_job_open(spec);
    struct test_rank rank[2];
    struct transport *transport[2];
    for (uint32_t r = 0; r < 2; r++)
        test_rank_open(job, r, 2, NULL, &rank[r]);
    struct memory_hub *hub;
    struct tally_error err;
    assert_int_equal(memory_hub_open(rank[0].plan, &(struct memory_hub_options){.clients = 2}, &hub, &err), TALLY_OK);
    for (uint32_t r = 0; r < 2; r++)
        transport[r] = memory_hub_join(hub, r, executor_weights(rank[r].executor));
    uint64_t steps = rank[0].plan->batches.steps;
    unsigned long before = allocations();
    for (uint64_t step = 1; step <= steps; step++)
        for (uint32_t r = 0; r < 2; r++)
            if (executor_step(rank[r].executor, transport[r], step, &err))
                abort(); /* fail_msg would allocate */
    unsigned long after = allocations();
    assert_int_equal(after - before, 0);
    memory_hub_close(hub);
    for (uint32_t r = 0; r < 2; r++)
        test_rank_close(&rank[r]);
    test_job_close(job);
}

static void test_counts(void **state)
{
    (void)state;
    if (!allocations_counted())
        skip();
    unsigned long before = allocations();
    void *volatile p = malloc(10);
    free(p);
    assert_true(allocations() - before >= 2);
    before = allocations();
    void *volatile page = mmap(NULL, 4096, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    munmap(page, 4096);
    assert_true(allocations() - before >= 1);
}

/* From the first step on, over epochs, with accumulation and short micro-batches. */
static void test_steps_allocate_nothing(void **state)
{
    (void)state;
    if (!allocations_counted())
        skip();
    for (uint64_t seed = 300; seed < 320; seed++)
        check_steps(random_job(seed, &(struct random_options){.steps = 8}));
}

static void test_steps_of_a_cnn_allocate_nothing(void **state)
{
    (void)state;
    if (!allocations_counted())
        skip();
    Tally__V1__JobSpec *spec = spec_new(3, 32, 8, 0, 3);
    spec_synthetic(spec, 0, 80, 10, (const uint32_t[]){1, 28, 28}, 3, NULL, 0);
    spec_seed_cnn(spec);
    spec_cross_entropy(spec, -100, 0);
    check_steps(spec);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_steps_allocate_nothing),
        cmocka_unit_test(test_steps_of_a_cnn_allocate_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
