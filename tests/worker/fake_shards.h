#ifndef TESTS_WORKER_FAKE_SHARDS_H
#define TESTS_WORKER_FAKE_SHARDS_H
/*
 * Shards for a worker's tests: the Parameters service over real RPC on UNIX sockets, with a memory hub behind it that
 * sums and applies. They run on a thread of their own, and can be told to misbehave.
 */
#include "tests/worker/memory_hub.h"
#include "tests/worker/test_job.h"

struct fake_shards;

enum shard_fault {
    SHARD_WELL,
    SHARD_REFUSES,     /* the first push of `at_step` */
    SHARD_ENDS,        /* the stream, at the first push of `at_step` */
    SHARD_GOES_SILENT, /* from the first push of `at_step` on: takes them and never answers */
    SHARD_SENDS_WRONG_SIZE,
    SHARD_SENDS_WRONG_SLICE,
    SHARD_SENDS_WRONG_JOB,
    SHARD_REPEATS, /* sends every slice twice */
};

struct fake_shards_options {
    uint64_t job, generation;
    uint32_t workers, shards;
    enum shard_fault fault; /* of the last shard */
    uint64_t at_step;
};

/* Lends job. Fails the test where it fails. */
struct fake_shards *fake_shards_start(const struct test_job *job, const struct fake_shards_options *options);
void fake_shards_stop(struct fake_shards *shards);

char *const *fake_shards_names(const struct fake_shards *shards); /* "s0", ... */
char *const *fake_shards_addresses(const struct fake_shards *shards);
/* When nobody trains any more. */
const struct memory_hub *fake_shards_hub(const struct fake_shards *shards);
unsigned fake_shards_hellos(const struct fake_shards *shards);
#endif
