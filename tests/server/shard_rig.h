#ifndef TESTS_SERVER_SHARD_RIG_H
#define TESTS_SERVER_SHARD_RIG_H
/* A shard in this process, the coordinator's orders by hand, and workers' streams over a UNIX socket. Everything runs
 * on the test's own loop, but for the shard's data thread. Whatever fails here ends the test with a message. */
#include <stdbool.h>
#include <stdint.h>
#include <uv.h>

#include "model/model.h"
#include "model/tree.h"
#include "proto/cluster.pb-c.h"
#include "proto/parameters.pb-c.h"
#include "proto/rpc.h"
#include "server/shard.h"

struct rig_stream;

struct rig {
    uv_loop_t loop;
    struct rpc_queue *queue; /* the shard's, of the loop */
    uv_timer_t tick;         /* so that waiting ends */
    struct shard *shard;
    char directory[64], address[96];
    struct rpc_channel *channel;
    bool stopped;
    bool no_room;               /* the coordinator takes nothing now */
    struct rig_stream *streams; /* open ones */

    /* What the shard said to the coordinator. */
    unsigned opened, ended, failed;
    uint64_t opened_step;
    char failure[512];
    Tally__V1__StepRecord *steps; /* all of them, in order of arrival */
    size_t step_count;
    unsigned reports;
};

void rig_open(struct rig *rig);
void rig_close(struct rig *rig);

/* Runs the loop until done(user); fails with `what` after 20 s. */
void rig_wait(struct rig *rig, bool (*done)(void *user), void *user, const char *what);
/* Runs the loop for so long. */
void rig_run_ms(struct rig *rig, int64_t ms);

/* ---- jobs ---- */

/* Linear layers inputs -> widths[0] -> ... with mse loss; batch micro-batches of one sample a step. */
struct rig_job {
    uint64_t id, generation;
    uint32_t workers, shard, shards;
    uint32_t inputs, widths[4];
    size_t layers;
    uint64_t samples, steps;
    uint32_t batch;
    double lr, momentum;
    const char *safetensors; /* initial weights, NULL: from the seed */
};

void rig_order_open(struct rig *rig, const struct rig_job *job); /* does not wait */
void rig_order_end(struct rig *rig, uint64_t job, uint64_t generation, const char *reason);
struct model *rig_model(const struct rig_job *job);
/* Waits for Opened, and fails on JobFailed. Returns the job's model; free it. */
struct model *rig_open_job(struct rig *rig, const struct rig_job *job);
void rig_end_job(struct rig *rig, uint64_t job, uint64_t generation);

tally_status rig_holding(struct rig *rig, uint64_t job, Tally__V1__HoldingReply *ret, struct tally_error *err);
/* Floats of the flat vector that the shard has, in slice order, at `out`; *ret_slices how many slices came. */
tally_status rig_fetch(struct rig *rig, uint64_t job, uint64_t version, float *out, size_t room, uint32_t *ret_slices,
                       struct tally_error *err);

/* A fetch without credits, on a connection of its own: it is sent what buffers hold, and reads nothing. Cancel the
 * stream, and free the channel behind its end. */
struct rig_fetch {
    struct rpc_stream *stream;
    bool done;
    struct tally_error end;
    uint64_t job, version;
    float *out;
    size_t room, used;
    uint32_t slices, next_slice;
};
struct rpc_channel *rig_fetch_start(struct rig *rig, struct rig_fetch *fetch, uint64_t job, uint64_t version);
bool rig_fetch_ended(void *fetch);

/* ---- a worker's stream ---- */

/* Static: rig_close ends what a failed test left open. */
struct rig_stream {
    struct rig *rig;
    struct rig_stream *next;
    struct rpc_channel *channel; /* of its own, or NULL */
    struct rpc_stream *stream;
    bool ended;
    struct tally_error end;
    uint64_t job, generation;
    unsigned grant; /* credits that are given back for each message; 0: the test grants */
    uint64_t updates, refusals;
    Tally__V1__Refusal__Code last_code;
    char last_reason[256];
    uint32_t last_leaf_begin, last_leaf_end, last_slice;
    uint64_t last_step;
    uint64_t *versions; /* by slice of the model, plus 1; 0: none came */
    uint32_t slices;
    float *weights; /* the flat vector, as it came */
    const struct model *model;
    struct rig_sent *sent;
};

void rig_stream_open(struct rig *rig, struct rig_stream *s, const struct model *model, unsigned credits);
/* On a connection of its own, whose buffers have not grown with what others sent. */
void rig_stream_open_alone(struct rig *rig, struct rig_stream *s, const struct model *model, unsigned credits);
void rig_hello(struct rig_stream *s, uint64_t job, uint64_t generation, uint32_t rank, uint32_t major);
/* The same, of a worker that wants slices [range[0], range[1]), [range[2], range[3]) ... alone. */
void rig_hello_for(struct rig_stream *s, uint64_t job, uint64_t generation, uint32_t rank, const uint32_t *range,
                   size_t ranges);
/* The right gradient of a node, of this step and slice. */
void rig_push(struct rig_stream *s, uint64_t step, struct tree_node node, uint32_t slice);
/* Any push with `bytes` of payload. */
void rig_push_raw(struct rig_stream *s, Tally__V1__Push *push, size_t bytes);
/* Waits until every slice of [begin, end) has come at this version or later. */
void rig_wait_version(struct rig_stream *s, uint32_t begin, uint32_t end, uint64_t version);
void rig_wait_refusals(struct rig_stream *s, uint64_t count);
void rig_wait_end(struct rig_stream *s);
/* Half-closes or cancels, waits for the end, frees. */
void rig_stream_close(struct rig_stream *s);

/* What rig_push sends: a pure function of the step, micro-batch and position in the flat vector. */
float rig_gradient(uint64_t step, struct tree_node node, size_t index);
double rig_weight(uint64_t step, struct tree_node node);
double rig_loss(uint64_t step, struct tree_node node);

uint64_t rig_mix(uint64_t x);
#endif
