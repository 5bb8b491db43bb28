#ifndef SERVER_RESULTS_H
#define SERVER_RESULTS_H
/*
 * Collects a job's weights from its shards into a safetensors file: a thread of its own with a data queue, so that
 * neither the network nor the disk holds the coordinator's loop up. What is fetched is written as it comes; nothing is
 * held but a few slices in flight.
 */
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"
#include "common/sha256.h"
#include "proto/jobs.pb-c.h"
#include "proto/rpc.h"

#define RESULTS_ANY_VERSION UINT64_MAX

struct results_request {
    uint64_t job, generation;
    uint64_t version; /* that every shard must hold; RESULTS_ANY_VERSION: the newest that all of them hold */
    const Tally__V1__JobSpec *spec;
    const Tally__V1__DataFacts *facts;
    const char *const *shard_names, *const *shard_addresses; /* by shard index */
    size_t shards;
    const char *path; /* of the file; its folder is made */
};

struct results_outcome {
    struct tally_error error;      /* code TALLY_OK: the file is there, durable and whole */
    uint64_t version;              /* of the weights in it */
    char sha256[SHA256_HEX_BYTES]; /* of the weights' bytes in model order, without padding */
};

/* On the loop's thread, once. */
typedef void (*results_done)(const struct results_outcome *outcome, void *user);

struct results;

/* Copies the request. loop_queue: where done runs; it must outlive that. *ret_results is good until done returns. */
tally_status results_start(const struct results_request *request, struct rpc_queue *loop_queue, results_done done,
                           void *user, struct results **ret_results, struct tally_error *err);

/* On the loop's thread: makes done come soon, with TALLY_ECANCELLED unless the end was already on its way. */
void results_cancel(struct results *results);
#endif
