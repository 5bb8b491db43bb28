#ifndef SERVER_COORDINATOR_INTERNAL_H
#define SERVER_COORDINATOR_INTERNAL_H
/*
 * What the coordinator's parts share. Reading order: coordinator.c (life and clock), coordinator_job.c (a job's life),
 * coordinator_cluster.c (nodes), coordinator_reports.c (what nodes report of a job), coordinator_api.c,
 * coordinator_watch.c, coordinator_download.c (clients).
 *
 * R1  Every change of a job's phase goes through job_apply, which asks job_next (job_state.h) what to do.
 * R2  What a job tells is appended to job->open and committed by job_commit; watchers see it once it is durable.
 * R3  A job is freed only when its first record was not taken by the store (nobody was told of it), or with the
 * coordinator. What its gang and spec need goes when it ends: after job_apply look at job->phase before touching them.
 * R4  Nothing frees a member but cluster_lose, which leaves no pointer to it behind.
 */
#include "model/batches.h"
#include "proto/cluster.pb-c.h"
#include "proto/rpc.h"
#include "server/coordinator.h"
#include "server/eval_sum.h"
#include "server/event_batch.h"
#include "server/gang.h"
#include "server/job_state.h"
#include "server/membership.h"
#include "server/results.h"
#include "server/store.h"

struct job;
struct watcher;
struct download;
struct session;

struct coordinator {
    uv_loop_t *loop;
    char *directory;
    char address[RPC_ADDRESS_MAX];
    int64_t lease_ns, start_timeout_ns, end_timeout_ns, last_reports_timeout_ns, reader_timeout_ns;
    struct rpc_queue *queue;
    struct rpc_server *server;
    struct store *store;
    struct tally_error store_failure; /* code TALLY_OK: none. Sticky */
    struct membership *members;
    struct session *sessions; /* every node's stream, also before it registered */
    size_t job_count, job_room, live_jobs;
    struct job **jobs; /* by id */
    uint64_t next_job;
    struct watcher *watchers;
    size_t watcher_count;
    struct download *downloads;
    size_t download_count;
    uv_timer_t tick;
    /* Closing: what still runs on other threads and will come back to the loop. */
    size_t busy;
    bool closing, server_stopped;
    void (*on_closed)(void *user);
    void *closed_user;
};

/* A node's part in a job. */
struct gang_node {
    struct member *member; /* NULL: lost */
    char name[TALLY_NODE_NAME_MAX + 1];
    char address[TALLY_NODE_ADDRESS_MAX + 1];
    bool given;    /* OpenJob or Assign was sent */
    bool ready;    /* Opened or Started came */
    bool finished; /* workers: Finished came */
    bool told;     /* EndJob was sent */
    bool ended;    /* Ended came, or the node was never given the job */
};

struct job {
    struct coordinator *coordinator;
    Tally__V1__Job *record; /* what clients see, without spec */
    char *request_id;
    bool inserted, stored; /* its first record was given to the store; is durable */
    enum job_phase phase;
    /* Until it ends: */
    Tally__V1__JobSpec *spec;
    Tally__V1__DataFacts *facts;
    struct batches batches;
    struct gang_size size;
    struct eval_sum *evals;
    double lr;
    bool classes; /* its loss has classes: accuracy means something */
    /* From its gang's forming on: */
    size_t worker_count, shard_count;
    struct gang_node *workers, *shards;
    int64_t deadline_ns; /* of the phase; 0: none */
    int64_t progress_ns; /* the last step's report */
    bool stall_told;
    int64_t reason_told_ns; /* QUEUED: the last time that an event told the reason */
    bool reason_changed;
    struct results *collector;
    bool collected; /* the weights are there; the last steps' reports are waited for */
    uint64_t collected_version;
    uint64_t reported; /* the last step that shard 0 has reported */
    /* Events: */
    uint64_t last_seq, visible_seq;       /* made; durable */
    struct event_batch *open;             /* not yet committed */
    struct event_batch *tail, **tail_end; /* committed, the newest of them: what watchers read without the store */
    size_t tail_bytes;
    bool record_changed;
};

/* A node's stream. */
struct session {
    struct session *previous, *next;
    struct coordinator *coordinator;
    struct rpc_stream *stream;
    struct member *member; /* NULL: not registered, or lost */
    int64_t opened_ns;
    bool refused;
};

/* How far a client has read what it is sent; zero at first. */
struct reader {
    uint64_t sent;
    size_t queued_bytes;
    int64_t since_ns;
};

#define REASON_MAX TALLY_ERROR_MESSAGE_MAX

/* ---- coordinator.c ---- */

/* NULL: no such job. */
struct job *coordinator_find_job(struct coordinator *c, uint64_t id);
/* TALLY_ENOMEM: too many. */
tally_status coordinator_add_job(struct coordinator *c, struct job *job, struct tally_error *err);
void coordinator_drop_job(struct coordinator *c, struct job *job);
/* A write failed: jobs that have not ended fail with the reason. */
void coordinator_store_failed(struct coordinator *c, const struct tally_error *err);
/* Called at every tick. true: something waits on the stream, and since reader_timeout_ms nothing of it was read. sent:
 * grows with what is given to the stream. */
bool coordinator_reader_is_stuck(const struct coordinator *c, struct reader *reader, struct rpc_stream *stream,
                                 uint64_t sent, int64_t now_ns);
/* After something that coordinator->busy counts has come back. */
void coordinator_less_busy(struct coordinator *c);

/* ---- coordinator_job.c ---- */

/* Takes record, spec and facts (both NULL for a job that has ended), also on failure. */
tally_status job_new(struct coordinator *c, Tally__V1__Job *record, const char *request_id, Tally__V1__JobSpec *spec,
                     Tally__V1__DataFacts *facts, struct job **ret_job, struct tally_error *err);
void job_free(struct job *job);

/* Something happened: see job_next. reason: one sentence; what of it is kept the table says. */
void job_apply(struct job *job, enum job_event event, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* Puts text before the job's reason: the cause of what the reason tells. */
void job_lead_reason(struct job *job, const char *text);

/* Appends an event (its seq is set), to be committed. */
void job_event(struct job *job, Tally__V1__Event *event);
void job_notice(struct job *job, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* The batch that takes the next event; NULL: out of memory. */
struct event_batch *job_open_batch(struct job *job);
/* Hands what has changed to the store. Fails only for a job that is new, which is then as it was. */
tally_status job_commit(struct job *job, struct tally_error *err);

/* Forms gangs for jobs that wait, first in, first out. */
void jobs_schedule(struct coordinator *c);
/* Deadlines, stalls, reasons. */
void job_tick(struct job *job, int64_t now_ns);

/* ---- coordinator_orders.c: what a job asks of its nodes ---- */

/* Marks the members as the job's, and fills in the record's gang. */
tally_status job_take_gang(struct job *job, const struct gang *gang, struct tally_error *err);
void job_open_shards(struct job *job);
void job_assign_workers(struct job *job);
/* EndJob to those of count nodes that have the job and have not been told. */
void job_end_nodes(struct job *job, struct gang_node *nodes, size_t count);
bool job_nodes_ended(const struct gang_node *nodes, size_t count);
/* What the job's phase waits for: "worker w1 (step 3: waits for slice 4 from s0)". */
void job_waits_text(const struct job *job, char *text, size_t size);

/* ---- coordinator_reports.c ---- */

/* A registered node's message, other than a heartbeat. */
void report_take(struct coordinator *c, struct member *member, const Tally__V1__NodeMessage *message);
/* A node was lost: how, in words ("its connection closed"). Its gang_node has no member any more. */
void report_lost(struct coordinator *c, uint64_t job, const struct member *member, const char *how);
/* All that was waited for may be here. */
void report_check_trained(struct job *job);
/* The collected weights' last steps have been reported, or are not waited for any longer. */
void report_check_collected(struct job *job, bool late);

/* ---- coordinator_cluster.c ---- */

extern const struct rpc_method cluster_methods[];
extern const size_t cluster_method_count;
/* Sends an order; a node that does not read is lost soon after. */
void cluster_send(struct member *member, const Tally__V1__Order *order);
/* Leases, and streams that do not register. */
void cluster_tick(struct coordinator *c, int64_t now_ns);
void cluster_close(struct coordinator *c);

/* ---- coordinator_api.c, coordinator_watch.c, coordinator_download.c ---- */

extern const struct rpc_method jobs_methods[];
extern const size_t jobs_method_count;
void watch_request(struct rpc_stream *stream, const struct rpc_message *request, void *user);
/* job has new durable events, or has ended: its watchers are served. */
void watch_wake(struct coordinator *c, struct job *job);
/* Ends the streams of those who read nothing. */
void watch_tick(struct coordinator *c, int64_t now_ns);
void watch_close(struct coordinator *c);
void download_request(struct rpc_stream *stream, const struct rpc_message *request, void *user);
void download_tick(struct coordinator *c, int64_t now_ns);
void download_close(struct coordinator *c);
/* DIR/results/ID/model.safetensors; malloc'd, NULL: out of memory. */
char *download_path(const struct coordinator *c, uint64_t job);
#endif
