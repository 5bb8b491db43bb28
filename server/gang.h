#ifndef SERVER_GANG_H
#define SERVER_GANG_H
/* Which nodes run a job: the idle ones first in the natural order of names, as many as its mesh needs, or none. Pure.
 */
#include <stddef.h>

#include "common/error.h"
#include "proto/jobspec.pb-c.h"
#include "server/membership.h"

/* What a job needs. */
struct gang_size {
    uint32_t data_min, data_max; /* replicas: as many as are there between the two */
    uint32_t pipeline, tensor;
    uint32_t shards;
};

/* spec: checked (model/spec.h). TALLY_EINVAL: a mesh of more workers than a cluster has. */
tally_status gang_size_of(const Tally__V1__JobSpec *spec, struct gang_size *ret_size, struct tally_error *err);

struct gang {
    uint32_t data; /* replicas that it got */
    size_t worker_count, shard_count;
    struct member **workers; /* by rank */
    struct member **shards;
    enum isa isa; /* that all its workers run */
};

/*
 * Picks the members; does not mark them. TALLY_EUNAVAIL: not enough are idle; err's message says what the job waits
 * for: "waits for 2 workers: 1 of 2 here". TALLY_ENOMEM. On success the caller calls gang_clear.
 */
tally_status gang_form(const struct membership *m, const struct gang_size *size, struct gang *ret_gang,
                       struct tally_error *err);
/* Frees the arrays; leaves all zero. */
void gang_clear(struct gang *gang);
#endif
