#include "server/gang.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

#include "model/mesh.h"

static uint32_t at_least_one(uint32_t value)
{
    return value > 0 ? value : 1;
}

tally_status gang_size_of(const Tally__V1__JobSpec *spec, struct gang_size *ret_size, struct tally_error *err)
{
    const Tally__V1__Parallel *parallel = spec->parallel;
    struct gang_size size = {1, 1, 1, 1, 1};
    struct mesh mesh = mesh_of_spec(spec);
    size.pipeline = mesh.pipeline;
    size.tensor = mesh.tensor;
    size.data_max = size.data_min = mesh.data;
    if (parallel && parallel->data && (parallel->data->has_min || parallel->data->has_max)) { /* elastic */
        size.data_max = at_least_one(parallel->data->has_max ? parallel->data->max : parallel->data->min);
        size.data_min = at_least_one(parallel->data->has_min ? parallel->data->min : 1);
    }
    if (parallel)
        size.shards = at_least_one(parallel->shards);
    if (size.data_min > size.data_max)
        return tally_fail(err, TALLY_EINVAL, "parallel.data: min %" PRIu32 " is larger than max %" PRIu32,
                          size.data_min, size.data_max);
    /* 32-bit factors: the products of two fit. */
    uint64_t replica = (uint64_t)size.pipeline * size.tensor;
    if (replica > TALLY_NODES_MAX || replica * size.data_min + size.shards > TALLY_NODES_MAX)
        return tally_fail(err, TALLY_EINVAL,
                          "a mesh of %" PRIu32 " x %" PRIu32 " x %" PRIu32 " workers and %" PRIu32
                          " shards: a cluster has at most %d nodes",
                          size.data_min, size.pipeline, size.tensor, size.shards, TALLY_NODES_MAX);
    *ret_size = size;
    return TALLY_OK;
}

static const char *plural(uint64_t count)
{
    return count == 1 ? "" : "s";
}

/* "waits for 2 workers: 1 of 2 here (1 busy)" and the same of shards. */
static tally_status fail_waiting(const struct membership *m, uint64_t workers, size_t workers_idle, uint64_t shards,
                                 size_t shards_idle, struct tally_error *err)
{
    char text[2][128] = {"", ""};
    size_t parts = 0;
    const struct {
        Tally__V1__Role role;
        uint64_t need;
        size_t idle;
    } rows[2] = {{TALLY__V1__ROLE__WORKER, workers, workers_idle}, {TALLY__V1__ROLE__SHARD, shards, shards_idle}};
    for (size_t i = 0; i < 2; i++) {
        if (rows[i].idle >= rows[i].need)
            continue;
        size_t busy = membership_role_count(m, rows[i].role) - rows[i].idle;
        int used = snprintf(text[parts], sizeof text[parts], "%" PRIu64 " %s%s: %zu of %" PRIu64 " here", rows[i].need,
                            role_text(rows[i].role), plural(rows[i].need), rows[i].idle, rows[i].need);
        if (busy > 0 && used > 0 && (size_t)used < sizeof text[parts])
            snprintf(text[parts] + used, sizeof text[parts] - (size_t)used, " and idle, %zu busy", busy);
        parts++;
    }
    return tally_fail(err, TALLY_EUNAVAIL, "waits for %s%s%s", text[0], parts > 1 ? "; and for " : "", text[1]);
}

tally_status gang_form(const struct membership *m, const struct gang_size *size, struct gang *ret_gang,
                       struct tally_error *err)
{
    uint64_t replica = (uint64_t)size->pipeline * size->tensor;
    uint64_t most = replica * size->data_max;
    size_t workers_max = most < TALLY_NODES_MAX ? (size_t)most : TALLY_NODES_MAX;
    struct gang gang = {0};
    tally_status status;
    gang.workers = calloc(workers_max, sizeof(struct member *));
    gang.shards = calloc(size->shards, sizeof(struct member *));
    if (!gang.workers || !gang.shards) {
        status = tally_fail(err, TALLY_ENOMEM, "no memory for a gang");
        goto fail;
    }
    size_t workers = membership_idle(m, TALLY__V1__ROLE__WORKER, gang.workers, workers_max);
    gang.shard_count = membership_idle(m, TALLY__V1__ROLE__SHARD, gang.shards, size->shards);
    if (workers < replica * size->data_min || gang.shard_count < size->shards) {
        status = fail_waiting(m, replica * size->data_min, workers, size->shards, gang.shard_count, err);
        goto fail;
    }
    gang.data = (uint32_t)(workers / replica);
    if (gang.data > size->data_max)
        gang.data = size->data_max;
    gang.worker_count = (size_t)(gang.data * replica);
    gang.isa = ISA_AVX512;
    for (size_t i = 0; i < gang.worker_count; i++) {
        if (gang.workers[i]->isa < gang.isa)
            gang.isa = gang.workers[i]->isa;
    }
    *ret_gang = gang;
    return TALLY_OK;
fail:
    gang_clear(&gang);
    return status;
}

void gang_clear(struct gang *gang)
{
    free(gang->workers);
    free(gang->shards);
    *gang = (struct gang){0};
}
