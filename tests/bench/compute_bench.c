/*
 * What a training step costs a worker alone: forward, backward and the gradients' tree through the executor, for the
 * models of the project's speed goals, with nobody behind the transport. Prints the best and the median step;
 * `compute_bench NAME` runs one.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/clock.h"
#include "tests/worker/solo.h"

#define STEPS_MAX 20000

static Tally__V1__JobSpec *base(uint32_t micro, uint32_t steps, uint32_t classes, const uint32_t *shape, size_t ndim)
{
    Tally__V1__JobSpec *spec = spec_new(1, 64, micro, 0, steps);
    spec_synthetic(spec, 0, 64, classes, shape, ndim, NULL, 0);
    spec_shuffle(spec, false);
    spec_cross_entropy(spec, -100, 0);
    return spec;
}

static Tally__V1__JobSpec *dense(uint32_t micro, uint32_t steps, uint32_t in, uint32_t a, uint32_t b, uint32_t out)
{
    Tally__V1__JobSpec *spec = base(micro, steps, out, &in, 1);
    spec_linear(spec, NULL, a, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    if (b) {
        spec_linear(spec, NULL, b, true);
        spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    }
    spec_linear(spec, NULL, out, true);
    return spec;
}

static Tally__V1__JobSpec *cnn(uint32_t micro, uint32_t steps)
{
    Tally__V1__JobSpec *spec = base(micro, steps, 10, (const uint32_t[]){1, 28, 28}, 3);
    spec_seed_cnn(spec);
    return spec;
}

static int by_value(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Takes the spec. */
static void measure(const char *name, Tally__V1__JobSpec *spec)
{
    static int64_t took[STEPS_MAX];
    struct solo solo;
    solo_open(spec, &(struct memory_hub_options){.discard = true}, &solo);
    uint64_t steps = solo.rank.plan->batches.steps;
    for (uint64_t step = 1; step <= steps; step++) {
        int64_t start = tally_now_ns();
        solo_step(&solo, step);
        took[step - 1] = tally_now_ns() - start;
    }
    qsort(took, steps, sizeof took[0], by_value);
    printf("%-34s %-8s best %10.1f us   median %10.1f us   %7.0f samples/s   %6.1f MB\n", name,
           solo.rank.kernels->isa(solo.rank.backend), (double)took[0] / 1000, (double)took[steps / 2] / 1000,
           64e9 / (double)took[steps / 2], (double)executor_memory_bytes(solo.rank.executor) / 1e6);
    solo_close(&solo);
}

static const char *wanted;

static void test_all(void **state)
{
    (void)state;
    struct {
        const char *name;
        Tally__V1__JobSpec *spec;
    } models[] = {
        {"1-1-1 (executor alone)", dense(64, 20000, 1, 1, 0, 2)},
        {"10-20-2", dense(64, 20000, 10, 20, 0, 2)},
        {"10-20-2, 4 micro-batches", dense(16, 20000, 10, 20, 0, 2)},
        {"cnn", cnn(64, 60)},
        {"cnn, 4 micro-batches", cnn(16, 60)},
        {"784-512-256-10", dense(64, 300, 784, 512, 256, 10)},
        {"784-4096-4096-10", dense(64, 10, 784, 4096, 4096, 10)},
        {"784-4096-4096-10, 2 micro-batches", dense(32, 10, 784, 4096, 4096, 10)},
    };
    for (size_t i = 0; i < sizeof models / sizeof models[0]; i++) {
        if (!wanted || strcmp(wanted, models[i].name) == 0)
            measure(models[i].name, models[i].spec);
        else
            spec_free(models[i].spec);
    }
}

int main(int argc, char **argv)
{
    wanted = argc > 1 ? argv[1] : NULL;
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_all)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
