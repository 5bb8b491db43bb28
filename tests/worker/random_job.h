#ifndef TESTS_WORKER_RANDOM_JOB_H
#define TESTS_WORKER_RANDOM_JOB_H
/* Small random jobs: layers, shapes, losses, batches and micro-batches drawn from a seed; the same seed makes the same
 * job. */
#include <stdbool.h>
#include <stdint.h>

#include "proto/jobspec.pb-c.h"

struct random_options {
    uint32_t steps;
    bool test_set;
    bool deep; /* 3 to 8 linear layers or residual blocks, not 0 to 2 */
    bool wide; /* a parameter of several slices, of rows longer than a slice now and then */
};

/* Every spec is one that model_build takes. To be freed with spec_free. */
Tally__V1__JobSpec *random_job(uint64_t seed, const struct random_options *options);

/* 0 .. n - 1 from a generator of its own state. */
uint32_t random_below(uint64_t *state, uint32_t n);
#endif
