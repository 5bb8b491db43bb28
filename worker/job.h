#ifndef WORKER_JOB_H
#define WORKER_JOB_H
/*
 * One job on this worker, from Assign to EndJob: a thread that opens data, model, plan and streams, trains, and then
 * watches its streams until it is ended. The functions here are the loop thread's; none of them blocks.
 */
#include "proto/cluster.pb-c.h"
#include "worker/data_thread.h"
#include "worker/peers_service.h"

struct job;

struct job_environment {
    const char *worker;  /* this worker's name */
    const char *backend; /* of kernels_find */
    struct data_thread *thread;
    struct peers_service *peers; /* on the data thread */
    struct rpc_queue *queue;     /* the loop's */
};

/* On the loop's thread. */
struct job_events {
    /* Started, Evals, Finished or JobFailed. After Finished only a JobFailed may come (a push that was refused late),
     * after that nothing. */
    void (*on_report)(struct job *job, const Tally__V1__NodeMessage *message, void *user);
    /* The last callback: its thread has ended, after job_end or a failure. The job is freed when this returns. */
    void (*on_closed)(struct job *job, void *user);
};

/* assign and events are copied, environment is lent. */
tally_status job_start(const struct job_environment *environment, const Tally__V1__Assign *assign,
                       const struct job_events *events, void *user, struct job **ret_job, struct tally_error *err);
/* Drops it now: what it computes stops at the next operation. on_closed follows; reports that are under way may come
 * before it. */
void job_end(struct job *job);

uint64_t job_id(const struct job *job);
uint64_t job_generation(const struct job *job);
/* What it does or waits for now, in words. */
void job_activity(struct job *job, char *text, size_t size);
#endif
