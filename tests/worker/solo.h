#ifndef TESTS_WORKER_SOLO_H
#define TESTS_WORKER_SOLO_H
/* A job with a single rank, ready to step in this thread. */
#include "tests/worker/memory_hub.h"
#include "tests/worker/test_job.h"

struct solo {
    struct test_job *job; /* NULL: the caller's */
    struct test_rank rank;
    struct memory_hub *hub;
    struct transport *transport;
};

/* Takes the spec. options may be NULL. */
void solo_open(Tally__V1__JobSpec *spec, const struct memory_hub_options *options, struct solo *ret_solo);
/* Lends the job. */
void solo_open_job(const struct test_job *job, const struct memory_hub_options *options, struct solo *ret_solo);
void solo_close(struct solo *solo);
/* Runs the step, or fails the test. */
void solo_step(struct solo *solo, uint64_t step);
#endif
