#ifndef TESTS_SERVER_FAKE_CLUSTER_H
#define TESTS_SERVER_FAKE_CLUSTER_H
/*
 * A coordinator on a thread of its own, and fake shards, workers and clients, all on one data queue that the test's
 * thread polls: a test is written as what happens one after the other, and every wait is fake_until(condition).
 */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "model/model.h"
#include "proto/cluster.pb-c.h"
#include "proto/jobs.pb-c.h"
#include "proto/parameters.pb-c.h"
#include "proto/rpc.h"
#include "server/coordinator.h"

struct fake_node {
    struct fake_cluster *cluster;
    char name[32], address[128];
    Tally__V1__Role role;
    struct rpc_stream *stream; /* NULL: ended */
    struct tally_error end;
    bool registered, silent; /* silent: does not beat */
    char activity[64];
    uint64_t beats, acks;
    Tally__V1__OpenJob *open_job; /* the last orders of each kind */
    Tally__V1__Assign *assign;
    Tally__V1__EndJob *end_job;
    unsigned end_jobs;
    bool answers_ended; /* to EndJob, at once */
    /* A shard's service: */
    struct rpc_server *server;
    bool server_stopped;
    const struct model *model;
    uint64_t version, oldest;
    unsigned fetches;
    bool refuses_fetch, deaf; /* deaf: Holding is never answered */
};

struct fake_watch {
    struct rpc_stream *stream; /* NULL: ended */
    struct tally_error end;
    uint64_t last_seq;
    bool gap; /* an event was missing, repeated or out of order */
    unsigned steps, evals, notices, messages;
    double loss_sum;
    Tally__V1__EvalDone last_eval;
    Tally__V1__JobState state;
    char reason[1100], notice[1100], states[1200]; /* states: one after the other, with their reasons, a line each */
    bool holds;                                    /* grants nothing: a slow reader */
};

struct fake_cluster {
    char directory[64], listen[96];
    int64_t lease_ms, start_timeout_ms, end_timeout_ms, last_reports_timeout_ms,
        reader_timeout_ms; /* changed before fake_restart */
    pthread_t thread;
    uv_loop_t loop;
    uv_async_t stop;
    struct coordinator *coordinator;
    struct tally_error open_error;
    pthread_barrier_t opened;
    struct rpc_queue *queue;
    struct rpc_channel *channel;
    struct fake_node *nodes[64];
    size_t node_count;
    int64_t next_beat_ns;
};

/* A new state directory; starts the coordinator. */
struct fake_cluster *fake_open(int64_t lease_ms);
/* The coordinator ends; the state stays, and a new one takes it up. */
void fake_restart(struct fake_cluster *f);
void fake_stop(struct fake_cluster *f);
void fake_start(struct fake_cluster *f);
void fake_close(struct fake_cluster *f);

/* Polls, and lets nodes beat, until the condition holds; fails the test after ten seconds. */
#define fake_until(f, condition)                                                                                       \
    do {                                                                                                               \
        int64_t fake_deadline = tally_now_ns() + INT64_C(10000000000);                                                 \
        while (!(condition)) {                                                                                         \
            if (tally_now_ns() > fake_deadline)                                                                        \
                fail_msg("%s:%d: waited in vain for %s", __FILE__, __LINE__, #condition);                              \
            fake_poll(f);                                                                                              \
        }                                                                                                              \
    } while (0)
void fake_poll(struct fake_cluster *f);
void fake_poll_for(struct fake_cluster *f, int64_t ms);

/* A node that has asked to join; fake_join waits until it is registered. */
struct fake_node *fake_node_new(struct fake_cluster *f, const char *name, const Tally__V1__Register *request);
struct fake_node *fake_join(struct fake_cluster *f, const char *name);
void fake_say(struct fake_node *node, const Tally__V1__NodeMessage *message);
void fake_opened(struct fake_node *node);
void fake_started(struct fake_node *node);
/* Steps first..last, loss 1/step. */
void fake_steps(struct fake_node *shard, uint64_t first, uint64_t last);
/* Micro-batches first..last of the evaluation at step: 5 samples each, of which micro_batch + 1 are right. */
void fake_evals(struct fake_node *worker, uint64_t step, uint32_t first, uint32_t last);
void fake_finished(struct fake_node *worker, uint64_t step);
void fake_job_failed(struct fake_node *node, const char *reason);
void fake_ended(struct fake_node *node);
/* Its connection breaks. */
void fake_kill(struct fake_cluster *f, struct fake_node *node);
/* Value i of the flat vector at a version, as fake shards hold it. */
float fake_weight(size_t i, uint64_t version);

/* A job of 20 steps of 10 samples, 10 an epoch, 2 micro-batches a step; 4 micro-batches an evaluation. workers:
 * parallel.data, as YAML. */
Tally__V1__JobSpec *fake_spec(const char *workers, unsigned shards);
Tally__V1__DataFacts *fake_facts(void);
struct model *fake_model(void);

/* Unary calls; the reply is the caller's, NULL with *ret_end set. */
ProtobufCMessage *fake_call(struct fake_cluster *f, const char *method, const ProtobufCMessage *request,
                            struct tally_error *ret_end);
/* The job's id. */
uint64_t fake_submit(struct fake_cluster *f, const char *request_id, const char *workers, unsigned shards);
Tally__V1__Job *fake_get(struct fake_cluster *f, uint64_t job);
struct fake_watch *fake_watch_open(struct fake_cluster *f, uint64_t job, uint64_t after, bool holds);
/* It has ended with the event of this state, whose reason has text in it. */
void fake_watch_ended(const struct fake_watch *w, Tally__V1__JobState state, const char *text);
void fake_watch_free(struct fake_watch *w);
void fake_stop_job(struct fake_cluster *f, uint64_t job, const char *reason);
#endif
