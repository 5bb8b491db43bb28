#include "tests/server/fake_cluster.h"

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "common/clock.h"
#include "common/limits.h"
#include "common/safetensors.h"
#include "common/sha256.h"

/* The whole mesh of a job: two shards, two workers. */
struct gang {
    struct fake_node *s0, *s1, *w0, *w1;
    struct model *model;
};

static struct gang join_gang(struct fake_cluster *f)
{
    struct gang g = {.model = fake_model()};
    g.s1 = fake_join(f, "s1");
    g.s0 = fake_join(f, "s0");
    g.w1 = fake_join(f, "w10"); /* behind w2 */
    g.w0 = fake_join(f, "w2");
    g.s0->model = g.s1->model = g.model;
    return g;
}

static bool opens(const struct fake_node *shard, uint64_t job)
{
    return shard->open_job && shard->open_job->job == job;
}

static bool is_assigned(const struct fake_node *worker, uint64_t job)
{
    return worker->assign && worker->assign->job == job;
}

static void assign_gang(struct fake_cluster *f, struct gang *g, uint64_t job)
{
    fake_until(f, opens(g->s0, job) && opens(g->s1, job));
    fake_opened(g->s0);
    fake_opened(g->s1);
    fake_until(f, is_assigned(g->w0, job) && is_assigned(g->w1, job));
}

static void start_gang(struct fake_cluster *f, struct gang *g, uint64_t job)
{
    assign_gang(f, g, job);
    fake_started(g->w0);
    fake_started(g->w1);
}

static void hold_version(struct gang *g, uint64_t version)
{
    g->s0->version = g->s1->version = version;
    g->s0->oldest = g->s1->oldest = version > 0 ? version - 1 : 0;
}

static void finish_gang(struct gang *g)
{
    fake_evals(g->w0, 10, 0, 1);
    fake_evals(g->w1, 10, 2, 3);
    fake_evals(g->w1, 20, 2, 3);
    fake_evals(g->w0, 20, 0, 1);
    hold_version(g, 20);
    fake_finished(g->w0, 20);
    fake_finished(g->w1, 20);
}

static char *result_path(const struct fake_cluster *f, uint64_t job, char path[160])
{
    snprintf(path, 160, "%s/results/%" PRIu64 "/model.safetensors", f->directory, job);
    return path;
}

/* The file holds the flat vector's parameters at a version, without padding, under PyTorch's names, and has the job's
 * hash. */
static void check_result(struct fake_cluster *f, uint64_t id, const struct model *model, uint64_t version)
{
    char path[160], step[24], hex[SHA256_HEX_BYTES];
    struct safetensors *file = NULL;
    struct tally_error err;
    if (safetensors_open(result_path(f, id, path), &file, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    struct sha256 *sum = NULL;
    assert_int_equal(sha256_new(&sum, NULL), TALLY_OK);
    assert_int_equal(safetensors_count(file), model->param_count);
    for (size_t p = 0; p < model->param_count; p++) {
        const struct param *param = &model->params[p];
        const struct safetensor *tensor = safetensors_at(file, p);
        assert_string_equal(tensor->name, param->name);
        assert_int_equal(tensor->elements, param->shape.elements);
        for (size_t i = 0; i < param->shape.elements; i++) {
            float value;
            memcpy(&value, tensor->data + i * sizeof value, sizeof value);
            if (value != fake_weight(param->offset + i, version))
                fail_msg("%s[%zu] is %g", param->name, i, (double)value);
        }
        sha256_update(sum, tensor->data, tensor->bytes, NULL);
    }
    assert_int_equal(sha256_final_hex(sum, hex, NULL), TALLY_OK);
    sha256_free(sum);
    Tally__V1__Job *job = fake_get(f, id);
    assert_string_equal(job->weights_sha256, hex);
    assert_int_equal(job->step, version);
    tally__v1__job__free_unpacked(job, NULL);
    assert_string_equal(safetensors_metadata(file, "job"), "tiny");
    assert_string_equal(safetensors_metadata(file, "seed"), "3");
    snprintf(step, sizeof step, "%" PRIu64, version);
    assert_string_equal(safetensors_metadata(file, "step"), step);
    safetensors_close(file);
}

/* ---- results over RPC ---- */

struct fetched {
    struct rpc_stream *stream;
    struct tally_error end;
    unsigned char *data;
    size_t bytes, total;
    bool bad;
};

static void on_chunk(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    struct fetched *r = user;
    const Tally__V1__ResultChunk *chunk = (const Tally__V1__ResultChunk *)message->header;
    size_t bytes = rpc_payload_bytes(message->payload);
    r->bad |= chunk->offset != r->bytes || bytes > 1 << 20 || (r->total != 0 && r->total != chunk->total);
    r->total = chunk->total;
    r->data = realloc(r->data, r->total + 1);
    rpc_payload_copy(message->payload, 0, bytes, r->data + r->bytes);
    r->bytes += bytes;
    rpc_stream_grant(stream, 1);
}

static void on_chunks_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    struct fetched *r = user;
    r->stream = NULL;
    r->end = *end;
}

static struct fetched fetch_result(struct fake_cluster *f, uint64_t job, const char *name, uint64_t offset)
{
    static const struct rpc_stream_events events = {.on_message = on_chunk, .on_end = on_chunks_end};
    struct fetched r = {.bytes = (size_t)offset};
    Tally__V1__ResultsRequest request = TALLY__V1__RESULTS_REQUEST__INIT;
    request.job = job;
    request.file = (char *)(uintptr_t)name;
    request.offset = offset;
    assert_int_equal(rpc_stream_open(f->channel, f->queue, &tally__v1__jobs__descriptor, "Results", &events, &r,
                                     &(struct rpc_stream_options){.credits = 2}, &r.stream, NULL),
                     TALLY_OK);
    assert_int_equal(rpc_stream_send(r.stream, &request.base, NULL), TALLY_OK);
    rpc_stream_close(r.stream);
    fake_until(f, !r.stream);
    return r;
}

static void check_download(struct fake_cluster *f, uint64_t job)
{
    char path[160];
    struct stat info;
    assert_int_equal(stat(result_path(f, job, path), &info), 0);
    size_t size = (size_t)info.st_size;
    unsigned char *file = malloc(size);
    FILE *in = fopen(path, "rb");
    assert_int_equal(fread(file, 1, size, in), size);
    fclose(in);
    const size_t offsets[] = {0, 1, 1 << 20, size - 1, size};
    for (size_t i = 0; i < 5; i++) {
        struct fetched r = fetch_result(f, job, "model.safetensors", offsets[i]);
        assert_int_equal(r.end.code, TALLY_OK);
        assert_false(r.bad);
        assert_int_equal(r.bytes, size);
        assert_true(offsets[i] == size || memcmp(r.data + offsets[i], file + offsets[i], size - offsets[i]) == 0);
        free(r.data);
    }
    free(file);
    struct fetched r = fetch_result(f, job, "model.safetensors", size + 1);
    assert_int_equal(r.end.code, TALLY_EINVAL);
    r = fetch_result(f, job, "../../jobs.sqlite", 0);
    assert_int_equal(r.end.code, TALLY_ENOTFOUND);
    r = fetch_result(f, 99, "model.safetensors", 0);
    assert_int_equal(r.end.code, TALLY_ENOTFOUND);
}

/* ---- a job from beginning to end ---- */

static void check_orders(const struct gang *g, uint64_t id)
{
    assert_int_equal(g->s0->open_job->job, id);
    assert_int_equal(g->s0->open_job->generation, 1);
    assert_int_equal(g->s0->open_job->shard, 0);
    assert_int_equal(g->s1->open_job->shard, 1);
    assert_int_equal(g->s1->open_job->shards, 2);
    assert_int_equal(g->s1->open_job->workers, 2);
    assert_int_equal(g->s1->open_job->facts->train_samples, 100);
    const Tally__V1__Assign *assign = g->w1->assign;
    assert_int_equal(g->w0->assign->rank, 0);
    assert_int_equal(assign->rank, 1);
    assert_int_equal(assign->generation, 1);
    assert_int_equal(assign->start_step, 0);
    assert_int_equal(assign->gang->data, 2);
    assert_int_equal(assign->gang->pipeline, 1);
    assert_int_equal(assign->gang->tensor, 1);
    assert_string_equal(assign->gang->workers[0], "w2");
    assert_string_equal(assign->gang->workers[1], "w10");
    assert_string_equal(assign->gang->shards[1], "s1");
    assert_string_equal(assign->gang->isa, "avx512");
    assert_int_equal(assign->n_shard_addresses, 2);
    assert_string_equal(assign->shard_addresses[1], g->s1->address);
    assert_int_equal(assign->n_peer_addresses, 2);
    assert_string_equal(assign->peer_addresses[0], g->w0->address);
    assert_int_equal(assign->spec->train->micro_batch_size, 5);
}

static void a_whole_job(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    uint64_t id = fake_submit(f, "one", "2", 2);
    struct fake_watch *w = fake_watch_open(f, id, 0, false);
    fake_until(f, strstr(w->reason, "waits for 2 workers: 0 of 2 here; and for 2 shards: 0 of 2 here"));
    struct gang g = join_gang(f);
    start_gang(f, &g, id);
    check_orders(&g, id);
    fake_steps(g.s0, 1, 7);
    fake_steps(g.s0, 5, 12); /* 5, 6 and 7 again */
    fake_until(f, w->steps == 12 && w->state == TALLY__V1__JOB_STATE__RUNNING);
    Tally__V1__Job *job = fake_get(f, id);
    assert_int_equal(job->state, TALLY__V1__JOB_STATE__RUNNING);
    assert_int_equal(job->step, 12);
    assert_int_equal(job->steps, 20);
    assert_true(job->started_unix_ms >= job->submitted_unix_ms && job->ended_unix_ms == 0);
    assert_int_equal(job->spec->train->batch_size, 10);
    assert_string_equal(job->gang->workers[0], "w2");
    tally__v1__job__free_unpacked(job, NULL);
    finish_gang(&g);
    fake_poll_for(f, 50);
    assert_int_equal(g.s0->fetches, 0); /* the last steps' report is still out */
    fake_steps(g.s0, 13, 20);
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__SUCCEEDED, "all 20 steps are done");
    assert_int_equal(w->steps, 20);
    double sum = 0;
    for (int step = 1; step <= 20; step++)
        sum += 1.0 / step;
    assert_true(fabs(w->loss_sum - sum) < 1e-12);
    assert_int_equal(w->evals, 2);
    assert_int_equal(w->last_eval.step, 20);
    assert_int_equal(w->last_eval.epoch, 2);
    assert_int_equal(w->last_eval.samples, 20);
    assert_true(w->last_eval.loss == 0.5 && w->last_eval.accuracy == 0.5);
    fake_until(f, g.s0->end_job && g.s1->end_job && g.w0->end_job && g.w1->end_job);
    assert_int_equal(g.s0->fetches, 1);
    check_result(f, id, g.model, 20);
    check_download(f, id);
    job = fake_get(f, id);
    assert_int_equal(job->spec->seed, 3); /* from the store */
    assert_true(job->ended_unix_ms >= job->started_unix_ms);
    tally__v1__job__free_unpacked(job, NULL);
    /* Watched again from every place: the rest, each once. */
    for (uint64_t after = 0; after <= w->last_seq + 1; after++) {
        struct fake_watch *again = fake_watch_open(f, id, after, false);
        fake_until(f, !again->stream);
        assert_int_equal(again->end.code, TALLY_OK);
        assert_false(again->gap);
        assert_int_equal(again->last_seq, after > w->last_seq ? after : w->last_seq);
        fake_watch_free(again);
    }
    /* The nodes are free for the next one, which has another number. */
    assert_int_equal(fake_submit(f, "two", "2", 2), id + 1);
    fake_until(f, g.s0->open_job->job == id + 1);
    fake_watch_free(w);
    fake_close(f);
    model_free(g.model);
}

static void a_repeated_submit_makes_one_job(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    uint64_t id = fake_submit(f, "same", "2", 2);
    assert_int_equal(fake_submit(f, "same", "2", 2), id);
    assert_int_equal(fake_submit(f, "other", "2", 2), id + 1);
    fake_restart(f);
    assert_int_equal(fake_submit(f, "same", "2", 2), id);
    assert_int_equal(fake_submit(f, "third", "2", 2), id + 2);
    Tally__V1__ListRequest request = TALLY__V1__LIST_REQUEST__INIT;
    Tally__V1__ListReply *list = (Tally__V1__ListReply *)fake_call(f, "List", &request.base, NULL);
    assert_int_equal(list->n_jobs, 3);
    assert_int_equal(list->jobs[0]->id, id + 2);
    assert_int_equal(list->jobs[2]->id, id);
    assert_null(list->jobs[0]->spec);
    tally__v1__list_reply__free_unpacked(list, NULL);
    fake_close(f);
}

static void bad_requests_are_refused(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    Tally__V1__SubmitRequest request = TALLY__V1__SUBMIT_REQUEST__INIT;
    struct tally_error end;
    request.version = &version;
    request.request_id = "r";
    request.spec = fake_spec("2", 2);
    request.facts = fake_facts();
    version.major = 7;
    version.minor = 2;
    assert_null(fake_call(f, "Submit", &request.base, &end));
    assert_int_equal(end.code, TALLY_ESTATE);
    assert_string_equal(end.message, "the client speaks protocol version 7.2, this coordinator 1.0");
    version.major = TALLY_PROTOCOL_MAJOR;
    request.request_id = "";
    assert_null(fake_call(f, "Submit", &request.base, &end));
    assert_int_equal(end.code, TALLY_EINVAL);
    request.request_id = "r";
    request.spec->train->batch_size = 0;
    assert_null(fake_call(f, "Submit", &request.base, &end));
    assert_int_equal(end.code, TALLY_EINVAL);
    assert_non_null(strstr(end.message, "batch_size"));
    tally__v1__data_facts__free_unpacked(request.facts, NULL);
    request.facts = NULL;
    assert_null(fake_call(f, "Submit", &request.base, &end));
    assert_int_equal(end.code, TALLY_EINVAL);
    tally__v1__job_spec__free_unpacked(request.spec, NULL);
    Tally__V1__JobRef ref = TALLY__V1__JOB_REF__INIT;
    ref.id = 5;
    assert_null(fake_call(f, "Get", &ref.base, &end));
    assert_int_equal(end.code, TALLY_ENOTFOUND);
    Tally__V1__StopRequest stop = TALLY__V1__STOP_REQUEST__INIT;
    assert_null(fake_call(f, "Stop", &stop.base, &end));
    assert_int_equal(end.code, TALLY_ENOTFOUND);
    struct fake_watch *w = fake_watch_open(f, 5, 0, false);
    fake_until(f, !w->stream);
    assert_int_equal(w->end.code, TALLY_ENOTFOUND);
    fake_watch_free(w);
    fake_close(f);
}

/* ---- nodes ---- */

static void bad_nodes_are_refused(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(300);
    fake_join(f, "w0");
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    Tally__V1__Register request = TALLY__V1__REGISTER__INIT;
    request.version = &version;
    request.role = TALLY__V1__ROLE__WORKER;
    request.name = "w1";
    request.address = "unix:/w1";
    request.isa = "avx2";
    version.major = 3;
    struct fake_node *node = fake_node_new(f, "w1", &request);
    fake_until(f, !node->stream);
    assert_int_equal(node->end.code, TALLY_ESTATE);
    assert_string_equal(node->end.message, "w1 speaks protocol version 3.0, this coordinator 1.0");
    version.major = TALLY_PROTOCOL_MAJOR;
    request.name = "w0";
    request.pid = 1234;
    node = fake_node_new(f, "w0", &request);
    fake_until(f, !node->stream);
    assert_int_equal(node->end.code, TALLY_ESTATE);
    assert_non_null(strstr(node->end.message, "live node of the name w0"));
    /* One that registers twice on a stream. */
    Tally__V1__NodeMessage empty = TALLY__V1__NODE_MESSAGE__INIT;
    request.name = "w3";
    node = fake_node_new(f, "w3", &request);
    fake_until(f, node->registered);
    Tally__V1__NodeMessage again = TALLY__V1__NODE_MESSAGE__INIT;
    again.body_case = TALLY__V1__NODE_MESSAGE__BODY_REGISTER;
    again.register_ = &request;
    fake_say(node, &empty); /* of a newer minor version: ignored */
    fake_say(node, &again);
    fake_until(f, !node->stream);
    assert_int_equal(node->end.code, TALLY_EINVAL);
    assert_string_equal(node->end.message, "a node registers once a stream");
    fake_close(f);
}

static void a_worker_dies(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    uint64_t id = fake_submit(f, "one", "2", 2);
    struct fake_watch *w = fake_watch_open(f, id, 0, false);
    struct gang g = join_gang(f);
    start_gang(f, &g, id);
    snprintf(g.w1->activity, sizeof g.w1->activity, "step 6: waits for slice 1 from s1");
    fake_steps(g.s0, 1, 4);
    hold_version(&g, 5);
    fake_poll_for(f, 60);
    g.w0->answers_ended = g.w1->answers_ended = false;
    fake_job_failed(g.s0, "the stream of worker w10 broke"); /* what others complain of first */
    fake_until(f, g.w0->end_job);
    fake_kill(f, g.w1);
    fake_poll_for(f, 60);
    assert_int_equal(g.s0->fetches, 0); /* w2 may still push */
    assert_int_equal(w->state, TALLY__V1__JOB_STATE__STOPPING);
    fake_ended(g.w0);
    fake_until(f, g.s1->fetches == 1);
    fake_steps(g.s0, 5, 5); /* on its way while the weights were fetched */
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED,
                     "worker w10 was lost: its connection closed (it last said: step 6: waits for slice 1 from s1); "
                     "shard s0: the stream of worker w10 broke");
    assert_int_equal(w->steps, 5);
    assert_true(w->notices >= 1);
    check_result(f, id, g.model, 5);
    fake_watch_free(w);
    fake_close(f);
    model_free(g.model);
}

static void a_shard_dies(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    uint64_t id = fake_submit(f, "one", "2", 2);
    struct fake_watch *w = fake_watch_open(f, id, 0, false);
    struct gang g = join_gang(f);
    start_gang(f, &g, id);
    fake_steps(g.s0, 1, 4);
    fake_until(f, w->steps == 4);
    fake_kill(f, g.s1);
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED, "shard s1 was lost: its connection closed");
    fake_until(f, g.s0->end_job && g.w0->end_job && g.w1->end_job);
    assert_int_equal(g.s0->end_jobs + g.w0->end_jobs + g.w1->end_jobs, 3);
    struct fetched r = fetch_result(f, id, "model.safetensors", 0);
    assert_int_equal(r.end.code, TALLY_ESTATE);
    assert_string_equal(r.end.message, "job 1 has left no model.safetensors");
    fake_watch_free(w);
    fake_close(f);
    model_free(g.model);
}

static void a_lease_runs_out(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(300);
    uint64_t id = fake_submit(f, "one", "2", 2);
    struct fake_watch *w = fake_watch_open(f, id, 0, false);
    struct gang g = join_gang(f);
    start_gang(f, &g, id);
    fake_steps(g.s0, 1, 4);
    fake_poll_for(f, 700); /* beating keeps a lease */
    assert_int_equal(w->state, TALLY__V1__JOB_STATE__RUNNING);
    assert_true(g.w0->acks > 10);
    int64_t begin = tally_now_ns();
    hold_version(&g, 4);
    g.w0->silent = true;
    fake_until(f, !w->stream);
    assert_in_range((tally_now_ns() - begin) / 1000000, 200, 2000);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED, "worker w2 was lost: no heartbeat for 0.3 s");
    check_result(f, id, g.model, 4);
    fake_until(f, !g.w0->stream);
    assert_int_equal(g.w0->end.code, TALLY_ETIMEDOUT);
    assert_string_equal(g.w0->end.message, "no heartbeat for 0.3 s");
    /* It may come back. */
    fake_join(f, "w2");
    fake_watch_free(w);
    fake_close(f);
    model_free(g.model);
}

static void the_same_process_registers_again(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    struct fake_node *old = fake_join(f, "w0");
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    Tally__V1__Register request = TALLY__V1__REGISTER__INIT;
    version.major = TALLY_PROTOCOL_MAJOR;
    request.version = &version;
    request.role = TALLY__V1__ROLE__WORKER;
    request.name = "w0";
    request.address = old->address;
    request.isa = "avx2";
    request.pid = 1; /* as fake_join's first */
    request.incarnation = 77;
    struct fake_node *again = fake_node_new(f, "w0", &request);
    fake_until(f, again->registered && !old->stream);
    assert_int_equal(old->end.code, TALLY_ESTATE);
    fake_close(f);
}

/* ---- stopping ---- */

static void a_stop_keeps_the_weights(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    uint64_t id = fake_submit(f, "one", "2", 2);
    struct fake_watch *w = fake_watch_open(f, id, 0, false);
    struct gang g = join_gang(f);
    start_gang(f, &g, id);
    fake_steps(g.s0, 1, 8);
    hold_version(&g, 9);
    g.s1->version = 8; /* shard 0 is a step ahead */
    g.s1->oldest = 7;
    fake_until(f, w->steps == 8);
    fake_stop_job(f, id, "Ctrl-C");
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__STOPPED, "a stop was asked for: Ctrl-C");
    assert_int_equal(g.w0->end_jobs, 1);
    check_result(f, id, g.model, 8);
    fake_stop_job(f, id, "again"); /* no error */
    Tally__V1__Job *job = fake_get(f, id);
    assert_int_equal(job->state, TALLY__V1__JOB_STATE__STOPPED);
    tally__v1__job__free_unpacked(job, NULL);
    fake_watch_free(w);
    fake_close(f);
    model_free(g.model);
}

static void a_stop_before_the_start_leaves_nothing(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    uint64_t queued = fake_submit(f, "one", "2", 2);
    fake_stop_job(f, queued, "");
    struct fake_watch *w = fake_watch_open(f, queued, 0, false);
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__STOPPED, "a stop was asked for");
    fake_watch_free(w);
    uint64_t opening = fake_submit(f, "two", "2", 2);
    w = fake_watch_open(f, opening, 0, false);
    struct gang g = join_gang(f);
    fake_until(f, g.s0->open_job && g.s1->open_job);
    fake_stop_job(f, opening, "");
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__STOPPED, "a stop was asked for");
    fake_until(f, g.s0->end_job && g.s1->end_job);
    assert_null(g.w0->end_job); /* it was never given the job */
    assert_int_equal(g.s0->fetches, 0);
    fake_watch_free(w);
    /* Workers that were not given a job are free at once. */
    fake_submit(f, "three", "2", 2);
    fake_until(f, g.s0->open_job->job == opening + 1);
    fake_close(f);
    model_free(g.model);
}

/* ---- failures ---- */

static void a_job_that_fails_at_opening(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    uint64_t id = fake_submit(f, "one", "2", 2);
    struct fake_watch *w = fake_watch_open(f, id, 0, false);
    struct gang g = join_gang(f);
    fake_until(f, g.s0->open_job && g.s1->open_job);
    fake_opened(g.s0);
    fake_job_failed(g.s1, "start.safetensors: no such file");
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED, "shard s1: start.safetensors: no such file");
    assert_null(g.w0->assign);
    fake_watch_free(w);
    fake_close(f);
    model_free(g.model);
}

static void a_worker_that_cannot_start(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    uint64_t id = fake_submit(f, "one", "2", 2);
    struct fake_watch *w = fake_watch_open(f, id, 0, false);
    struct gang g = join_gang(f);
    assign_gang(f, &g, id);
    fake_job_failed(g.w1, "train-images: it is short");
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED, "worker w10: train-images: it is short");
    fake_watch_free(w);
    fake_close(f);
    model_free(g.model);
}

static void impossible_reports_fail_the_job(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    struct gang g = join_gang(f);
    const char *const texts[] = {"shard s0 reported step 9 behind step 4 of 20",
                                 "worker w2 reported an evaluation that cannot be: no evaluation follows step 3",
                                 "worker w10 finished at step 19 of 20"};
    for (int i = 0; i < 3; i++) {
        char request_id[8];
        snprintf(request_id, sizeof request_id, "r%d", i);
        uint64_t id = fake_submit(f, request_id, "2", 2);
        struct fake_watch *w = fake_watch_open(f, id, 0, false);
        start_gang(f, &g, id);
        fake_steps(g.s0, 1, 4);
        hold_version(&g, 4);
        if (i == 0)
            fake_steps(g.s0, 9, 9);
        else if (i == 1)
            fake_evals(g.w0, 3, 0, 0);
        else
            fake_finished(g.w1, 19);
        fake_until(f, !w->stream);
        fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED, texts[i]);
        check_result(f, id, g.model, 4);
        fake_watch_free(w);
    }
    fake_close(f);
    model_free(g.model);
}

static void weights_that_cannot_be_written(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    char path[160];
    snprintf(path, sizeof path, "%s/results", f->directory);
    FILE *file = fopen(path, "w"); /* where a folder should be */
    fclose(file);
    uint64_t id = fake_submit(f, "one", "2", 2);
    struct fake_watch *w = fake_watch_open(f, id, 0, false);
    struct gang g = join_gang(f);
    start_gang(f, &g, id);
    fake_steps(g.s0, 1, 20);
    finish_gang(&g);
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED, "the weights could not be kept: ");
    assert_non_null(strstr(w->reason, path));
    fake_watch_free(w);
    fake_close(f);
    model_free(g.model);
}

/* A shard that is still summing when the last worker has finished is asked again; one that fails is named. */
static void shards_are_asked_until_they_are_there(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    struct gang g = join_gang(f);
    uint64_t id = fake_submit(f, "one", "2", 2);
    struct fake_watch *w = fake_watch_open(f, id, 0, false);
    start_gang(f, &g, id);
    fake_steps(g.s0, 1, 20);
    finish_gang(&g);
    g.s1->version = 19;
    g.s1->oldest = 18;
    fake_until(f, strstr(w->reason, "the weights are fetched"));
    fake_poll_for(f, 100);
    assert_int_equal(g.s1->fetches, 0);
    fake_stop_job(f, id, "too late");
    hold_version(&g, 20);
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__SUCCEEDED, "all 20 steps");
    check_result(f, id, g.model, 20);
    fake_watch_free(w);

    id = fake_submit(f, "two", "2", 2);
    w = fake_watch_open(f, id, 0, false);
    start_gang(f, &g, id);
    fake_steps(g.s0, 1, 3);
    g.s1->deaf = true;
    fake_stop_job(f, id, "");
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED,
                     "the weights could not be kept: shard s1 does not say what it holds: it is deaf");
    fake_watch_free(w);
    fake_close(f);
    model_free(g.model);
}

/* What does not answer is named, and not waited for for ever. */
static void waits_have_ends(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    f->start_timeout_ms = f->end_timeout_ms = f->last_reports_timeout_ms = 600;
    fake_restart(f);
    struct gang g = join_gang(f);
    snprintf(g.s1->activity, sizeof g.s1->activity, "reads start.safetensors");
    uint64_t id = fake_submit(f, "opening", "2", 2);
    struct fake_watch *w = fake_watch_open(f, id, 0, false);
    fake_until(f, g.s0->open_job);
    fake_opened(g.s0);
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED, "waited in vain for shard s1 (reads start.safetensors)");
    fake_watch_free(w);

    id = fake_submit(f, "assigning", "2", 2);
    w = fake_watch_open(f, id, 0, false);
    assign_gang(f, &g, id);
    fake_started(g.w0);
    g.w0->answers_ended = false;
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED, "waited in vain for worker w10");
    assert_string_equal(w->notice, "goes on without worker w2");
    fake_watch_free(w);
    /* One that never let go is not given another job. */
    id = fake_submit(f, "reports", "2", 2);
    w = fake_watch_open(f, id, 0, false);
    fake_until(f, strstr(w->reason, "waits for 2 workers: 1 of 2 here and idle, 1 busy"));
    fake_ended(g.w0);
    g.w0->answers_ended = true;
    start_gang(f, &g, id);
    fake_steps(g.s0, 1, 20);
    fake_evals(g.w0, 10, 0, 3);
    fake_evals(g.w0, 20, 0, 2);
    hold_version(&g, 20);
    fake_finished(g.w0, 20);
    fake_finished(g.w1, 20);
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED,
                     "waited in vain for the evaluation after step 20: 3 of 4 micro-batches");
    check_result(f, id, g.model, 20);
    fake_watch_free(w);
    fake_close(f);
    model_free(g.model);
}

/* A disk that is full while a job runs: the job fails with the reason, the watcher is told, and no job is taken. */
static void a_full_disk_ends_the_job(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    struct gang g = join_gang(f);
    uint64_t id = fake_submit(f, "one", "2", 2);
    struct fake_watch *w = fake_watch_open(f, id, 0, false);
    start_gang(f, &g, id);
    fake_steps(g.s0, 1, 3);
    fake_until(f, w->steps == 3);
    struct rlimit old, low;
    getrlimit(RLIMIT_FSIZE, &old);
    low = old;
    low.rlim_cur = 4096;
    setrlimit(RLIMIT_FSIZE, &low);
    fake_steps(g.s0, 4, 6);
    fake_until(f, !w->stream);
    setrlimit(RLIMIT_FSIZE, &old);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED, "the coordinator cannot keep its records: ");
    assert_non_null(strstr(w->reason, f->directory));
    fake_watch_free(w);
    Tally__V1__Version version = TALLY__V1__VERSION__INIT;
    Tally__V1__SubmitRequest request = TALLY__V1__SUBMIT_REQUEST__INIT;
    struct tally_error end;
    version.major = TALLY_PROTOCOL_MAJOR;
    request.version = &version;
    request.request_id = "two";
    request.spec = fake_spec("2", 2);
    request.facts = fake_facts();
    assert_null(fake_call(f, "Submit", &request.base, &end));
    assert_int_equal(end.code, TALLY_EIO);
    assert_non_null(strstr(end.message, "the coordinator takes no jobs: "));
    tally__v1__job_spec__free_unpacked(request.spec, NULL);
    tally__v1__data_facts__free_unpacked(request.facts, NULL);
    fake_restart(f); /* there is room again */
    w = fake_watch_open(f, id, 0, false);
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED, "restarted");
    assert_int_equal(w->steps, 3);
    fake_watch_free(w);
    fake_close(f);
    model_free(g.model);
}

/* ---- the queue ---- */

static void first_in_first_out(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    struct fake_node *s0 = fake_join(f, "s0"), *w0 = fake_join(f, "w0");
    struct model *model = fake_model();
    s0->model = model;
    uint64_t large = fake_submit(f, "large", "2", 1);
    uint64_t small = fake_submit(f, "small", "{min: 1, max: 4}", 1);
    struct fake_watch *w = fake_watch_open(f, small, 0, false);
    fake_until(f, strstr(w->reason, "waits for job 1, which came before it"));
    Tally__V1__Job *job = fake_get(f, large);
    assert_string_equal(job->reason, "waits for 2 workers: 1 of 2 here");
    tally__v1__job__free_unpacked(job, NULL);
    assert_null(s0->open_job);
    fake_stop_job(f, large, "");
    fake_until(f, s0->open_job);
    assert_int_equal(s0->open_job->job, small);
    fake_opened(s0);
    fake_until(f, w0->assign);
    assert_int_equal(w0->assign->gang->data, 1); /* elastic: what was there */
    assert_int_equal(w0->assign->spec->train->micro_batch_size, 5);
    fake_kill(f, w0);
    fake_until(f, !w->stream);
    fake_watch_free(w);
    fake_close(f);
    model_free(model);
}

/* ---- restarts ---- */

static void a_restart_keeps_what_was_acknowledged(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    uint64_t running = fake_submit(f, "one", "2", 2);
    struct gang g = join_gang(f);
    start_gang(f, &g, running);
    fake_steps(g.s0, 1, 6);
    struct fake_watch *w = fake_watch_open(f, running, 0, false);
    fake_until(f, w->steps == 6);
    uint64_t queued = fake_submit(f, "two", "2", 2);
    fake_stop(f);
    assert_int_equal(w->end.code, TALLY_EUNAVAIL);
    uint64_t seen = w->last_seq;
    fake_watch_free(w);
    fake_start(f);
    w = fake_watch_open(f, running, seen, false);
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__FAILED, "the coordinator was restarted while the job was RUNNING");
    assert_int_equal(w->steps, 0); /* those that were seen are not told again */
    fake_watch_free(w);
    Tally__V1__Job *job = fake_get(f, running);
    assert_int_equal(job->step, 6);
    assert_string_equal(job->gang->workers[1], "w10");
    tally__v1__job__free_unpacked(job, NULL);
    /* The queued one waits on, and runs when nodes are there. */
    struct gang next = join_gang(f);
    start_gang(f, &next, queued);
    assert_int_equal(next.s0->open_job->job, queued);
    fake_close(f);
    model_free(g.model);
    model_free(next.model);
}

static void what_cannot_be_opened_is_told(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    uv_loop_t loop;
    struct coordinator *c = NULL;
    struct tally_error err;
    char other[96];
    snprintf(other, sizeof other, "%s/other", f->directory);
    uv_loop_init(&loop);
    /* The socket of one that lives, then its directory. */
    assert_int_equal(
        coordinator_open(&loop, &(struct coordinator_options){.listen = f->listen, .directory = other}, &c, &err),
        TALLY_EEXIST);
    assert_non_null(strstr(err.message, "c.sock"));
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(coordinator_open(&loop,
                                      &(struct coordinator_options){.listen = "127.0.0.1:0", .directory = f->directory},
                                      &c, &err),
                     TALLY_EEXIST);
    assert_non_null(strstr(err.message, "another coordinator"));
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
    fake_close(f);
}

/* ---- clients ---- */

/* A client that goes in the middle of everything leaves nothing behind. */
static void clients_may_vanish(void **state)
{
    (void)state;
    struct fake_cluster *f = fake_open(10000);
    uint64_t id = fake_submit(f, "one", "2", 2);
    struct gang g = join_gang(f);
    start_gang(f, &g, id);
    for (int i = 0; i < 30; i++) {
        struct fake_watch *w = fake_watch_open(f, id, (uint64_t)i % 3, false);
        if (i % 2)
            fake_poll(f);
        rpc_stream_cancel(w->stream);
        fake_until(f, !w->stream);
        fake_watch_free(w);
    }
    fake_steps(g.s0, 1, 20);
    finish_gang(&g);
    struct fake_watch *w = fake_watch_open(f, id, 0, false);
    fake_until(f, !w->stream);
    fake_watch_ended(w, TALLY__V1__JOB_STATE__SUCCEEDED, "");
    fake_watch_free(w);
    fake_close(f);
    model_free(g.model);
}

int main(void)
{
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    rpc_global_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_whole_job),
        cmocka_unit_test(a_repeated_submit_makes_one_job),
        cmocka_unit_test(bad_requests_are_refused),
        cmocka_unit_test(bad_nodes_are_refused),
        cmocka_unit_test(a_worker_dies),
        cmocka_unit_test(a_shard_dies),
        cmocka_unit_test(a_lease_runs_out),
        cmocka_unit_test(the_same_process_registers_again),
        cmocka_unit_test(a_stop_keeps_the_weights),
        cmocka_unit_test(a_stop_before_the_start_leaves_nothing),
        cmocka_unit_test(a_job_that_fails_at_opening),
        cmocka_unit_test(a_worker_that_cannot_start),
        cmocka_unit_test(impossible_reports_fail_the_job),
        cmocka_unit_test(weights_that_cannot_be_written),
        cmocka_unit_test(shards_are_asked_until_they_are_there),
        cmocka_unit_test(waits_have_ends),
        cmocka_unit_test(a_full_disk_ends_the_job),
        cmocka_unit_test(first_in_first_out),
        cmocka_unit_test(a_restart_keeps_what_was_acknowledged),
        cmocka_unit_test(what_cannot_be_opened_is_told),
        cmocka_unit_test(clients_may_vanish),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rpc_global_shutdown();
    return failed;
}
