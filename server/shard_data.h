#ifndef SERVER_SHARD_DATA_H
#define SERVER_SHARD_DATA_H
/*
 * The data thread of a shard: it owns the jobs' slices, serves Parameters, and adds and sends without handing over to
 * anybody. The loop's thread and this one talk through trips and reports, which travel as tasks of the other's queue.
 * Inside the shard only.
 */
#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "common/error.h"
#include "proto/parameters.pb-c.h"
#include "proto/rpc.h"
#include "server/shard_job.h"

struct shard;

/* What the loop tells the coordinator at the end of a trip. */
enum shard_says { SHARD_SAYS_OPENED, SHARD_SAYS_ENDED, SHARD_SAYS_FAILED };

/* An errand from the loop to the data thread and back, or one way. */
struct shard_trip {
    struct rpc_task task;
    struct shard *shard;
    struct shard_data *data;
    void (*answer)(struct shard_trip *trip); /* the loop's: where the data thread sends it back to */
    uint64_t job, generation;
    uint64_t epoch;                     /* the loop's: whose orders it belongs to */
    uint64_t step;                      /* of an opened job */
    struct shard_job *opened;           /* to be adopted */
    struct shard_trip *next;            /* the loop's */
    enum shard_says says;               /* the loop's */
    char text[TALLY_ERROR_MESSAGE_MAX]; /* a reason, an activity; "" for none */
};

/* NULL: no memory. */
struct shard_trip *shard_trip_new(struct shard *shard, uint64_t job, uint64_t generation);
void shard_trip_free(struct shard_trip *trip);

struct shard_data {
    /* Set before the thread starts. */
    struct rpc_queue *queue, *loop_queue;
    void (*on_report)(struct shard_report *report); /* on the loop: it comes back through shard_data_post_report */
    void (*on_failed)(struct shard_trip *trip);     /* on the loop, which frees it: job trip->job cannot go on */
    struct shard_wake wake;
    uv_thread_t thread;

    /* The data thread's. */
    struct shard_job *jobs;           /* held */
    struct shard_job *closing;        /* ended, and something still refers to them */
    struct shard_exchange *strangers; /* streams that have not said Hello, or whose job is gone */
    struct shard_trip *stop;          /* asked to end */
    bool pending_reports;             /* a job has steps to report */
    int64_t sweep_ns;                 /* when to look after streams next */
};

/* The loop's side. Each takes the trip and sends it back. */
void shard_data_post_adopt(struct shard_data *data, struct shard_trip *trip); /* opened is NULL in the answer where it
    was taken, or freed; text tells why it was not */
void shard_data_post_end(struct shard_data *data, struct shard_trip *trip);   /* answered when nothing of it is left */
void shard_data_post_lost(struct shard_data *data, struct shard_trip *trip);  /* ends all jobs */
void shard_data_post_describe(struct shard_data *data, struct shard_trip *trip); /* text: the activity */
void shard_data_post_stop(struct shard_data *data,
                          struct shard_trip *trip); /* ends all jobs, answers, and the thread ends */
void shard_data_post_report(struct shard_data *data, struct shard_report *report);

/* data zeroed but for what is set before. The thread runs until it is asked to stop. */
tally_status shard_data_start(struct shard_data *data, struct tally_error *err);

/* ---- the data thread's own parts ---- */

struct shard_job *shard_data_find(struct shard_data *data, uint64_t id);
/* The job cannot go on: its streams end with the reason, and the coordinator is told. */
void shard_data_fail(struct shard_data *data, struct shard_job *job, const char *reason);
/* A slice has new weights: sends them, and notes the step. */
void shard_data_updated(struct shard_data *data, struct shard_job *job, const struct shard_update *update);
/* What has been noted goes to the coordinator now. */
void shard_data_report(struct shard_data *data, struct shard_job *job);
/* A push waits for a buffer. */
void shard_data_waits(struct shard_data *data, struct shard_job *job);

/* shard_exchange.c: Exchange. */
void shard_exchange_open(struct rpc_stream *stream, void *data);
void shard_exchange_send_slice(struct shard_job *job, uint32_t slice);
/* Lets workers push on that were held back while too much waited here. After every change of what is held. */
void shard_exchange_give_credits(struct shard_job *job);
/* Ends the job's streams of generations below `below`, with a status that says why. */
void shard_exchange_finish(struct shard_job *job, uint64_t below, tally_status status, const char *reason);
void shard_exchange_finish_strangers(struct shard_data *data, const char *reason);
/* Cuts streams that were finished and do not end, and finishes strangers that say nothing. true: look again soon. */
bool shard_exchange_sweep(struct shard_data *data, int64_t now_ns);
/* "worker w1" or "rank 1, which has no stream": who owes that leaf of that slice. */
void shard_exchange_owner(const struct shard_job *job, const struct shard_missing *missing, char *text, size_t size);
/* Names of workers that have not read what was sent to them; "" for none. */
void shard_exchange_slow(const struct shard_job *job, char *text, size_t size);

/* shard_read.c: Holding and Fetch. */
void shard_read_holding(struct rpc_stream *stream, const struct rpc_message *request, void *data);
void shard_read_fetch(struct rpc_stream *stream, const struct rpc_message *request, void *data);
void shard_read_finish(struct shard_job *job, tally_status status, const char *reason);
/* Cuts those of which nothing has been taken since then. */
void shard_read_cut(struct shard_job *job, int64_t since_ns);
#endif
