#ifndef SERVER_SHARD_JOB_H
#define SERVER_SHARD_JOB_H
/*
 * One job at a shard. It is built on a thread of the loop's pool, and then belongs to the data thread until it is freed
 * there. Inside the shard only.
 */
#include <stdint.h>

#include "common/error.h"
#include "proto/cluster.pb-c.h"
#include "proto/rpc.h"
#include "server/shard_store.h"

struct shard_data;
struct shard_exchange;
struct shard_fetch;
struct shard_trip;

/* Steps that were applied, on their way to the coordinator: filled by the data thread, sent by the loop, and given
 * back. */
#define SHARD_REPORT_STEPS 2048
struct shard_report {
    struct rpc_task task;
    struct shard *shard;
    struct shard_data *data;
    struct shard_job *job; /* the data thread's */
    uint64_t job_id, generation;
    size_t count;
    struct shard_report *next; /* the loop's, while it cannot be sent */
    Tally__V1__StepRecord *pointers[SHARD_REPORT_STEPS];
    Tally__V1__StepRecord records[SHARD_REPORT_STEPS];
};

struct shard_job {
    struct shard_job *next;
    uint64_t id;
    uint64_t steps;
    uint32_t workers, stages; /* rank = replica * stages + stage */
    uint32_t first_slice, slice_count;
    uint32_t *slice_stage; /* by slice of the shard: who pushes it */
    const struct kernels *kernels;
    struct kernel_backend *backend;
    struct kernel_stream *stream;
    struct shard_sum *sum;
    struct shard_store *store;
    struct shard_exchange *exchanges; /* that have said Hello */
    struct shard_fetch *fetches;

    struct shard_report *reports[2]; /* the shard of slice 0 alone */
    struct shard_report *filling;    /* one of them; NULL while both are on their way */
    unsigned reports_out;
    int64_t reported_ns;

    int64_t waiting_since_ns;   /* 0: no slice waits for its buffer */
    bool failed;                /* said so; waits for the end */
    struct shard_trip *failure; /* made beforehand: to say so needs no memory */

    struct shard_trip *end;   /* of a job that closes: answered when nothing is left; may be NULL */
    int64_t closing_since_ns; /* 0: it does not close */
    bool cut;                 /* its streams had their time to end by themselves */
};

/* From the order to the first weights. wake, and nothing else, is shared with other threads. shard is only passed on.
 * The job is not yet in any list. Errors: one sentence that says what is wrong. */
tally_status shard_job_new(const Tally__V1__OpenJob *order, struct shard *shard, struct shard_wake *wake,
                           struct shard_job **ret_job, struct tally_error *err);
/* No stream, fetch, report or send of it may be left. NULL is allowed. */
void shard_job_free(struct shard_job *job);
#endif
