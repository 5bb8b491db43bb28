/* Workers over RPC against shards that this test plays: the same bits as in memory, and every failure with its reason.
 */
#include "worker/transport_rpc.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/clock.h"
#include "proto/rpc.h"
#include "tests/worker/fake_shards.h"
#include "tests/worker/memory_peers.h"
#include "tests/worker/random_job.h"
#include "tests/worker/solo.h"
#include "worker/training.h"

#define JOB 7
#define GENERATION 3

/* One worker of a run, with its threads. */
struct worker {
    const struct test_job *job;
    struct test_rank rank;
    uint32_t index;
    bool on_data_thread;
    struct peers *peers; /* of a pipeline's stage; NULL: it has the whole model */
    int64_t wait_ms;
    size_t shards;
    char *const *names, *const *addresses;
    struct data_thread *data;
    struct transport_rpc *transport;
    struct data_work work;
    pthread_t thread;
    pthread_mutex_t mutex;
    pthread_cond_t ended;
    bool done;
    tally_status status;
    struct tally_error err;
};

static tally_status train(struct worker *w)
{
    struct training training = {.plan = w->rank.plan,
                                .executor = w->rank.executor,
                                .transport = transport_rpc_transport(w->transport),
                                .peers = w->peers};
    return training_run(&training, 0, &w->err);
}

static void train_there(struct data_work *work)
{
    struct worker *w = (struct worker *)((char *)work - offsetof(struct worker, work));
    w->status = train(w);
    pthread_mutex_lock(&w->mutex);
    w->done = true;
    pthread_cond_signal(&w->ended);
    pthread_mutex_unlock(&w->mutex);
}

static void *worker_main(void *arg)
{
    struct worker *w = arg;
    w->status = transport_rpc_connect(w->transport, &w->err);
    if (w->status)
        return NULL;
    if (!w->on_data_thread) {
        w->status = train(w);
        return NULL;
    }
    w->work.run = train_there;
    data_thread_run(w->data, &w->work);
    pthread_mutex_lock(&w->mutex);
    while (!w->done)
        pthread_cond_wait(&w->ended, &w->mutex);
    pthread_mutex_unlock(&w->mutex);
    return NULL;
}

static void worker_start(struct worker *w)
{
    struct tally_error err;
    char name[16];
    snprintf(name, sizeof name, "w%u", w->index);
    pthread_mutex_init(&w->mutex, NULL);
    pthread_cond_init(&w->ended, NULL);
    struct transport_rpc_options options = {.job = JOB,
                                            .generation = GENERATION,
                                            .worker = name,
                                            .rank = w->index,
                                            .model = w->job->model,
                                            .kernels = w->rank.kernels,
                                            .backend = w->rank.backend,
                                            .weights = executor_weights(w->rank.executor),
                                            .slice_offsets = w->peers ? w->rank.plan->slice_offsets : NULL,
                                            .shards = w->shards,
                                            .shard_names = w->names,
                                            .shard_addresses = w->addresses,
                                            .on_data_thread = w->on_data_thread,
                                            .wait_ms = w->wait_ms ? w->wait_ms : 30000};
    if (data_thread_start(&w->data, &err))
        fail_msg("%s", err.message);
    options.thread = w->data;
    if (transport_rpc_open(&options, &w->transport, &err))
        fail_msg("%s", err.message);
    assert_int_equal(pthread_create(&w->thread, NULL, worker_main, w), 0);
}

static void worker_join(struct worker *w)
{
    pthread_join(w->thread, NULL);
}

static void worker_close(struct worker *w)
{
    transport_rpc_close(w->transport);
    data_thread_stop(w->data);
    test_rank_close(&w->rank);
    pthread_cond_destroy(&w->ended);
    pthread_mutex_destroy(&w->mutex);
}

struct run {
    uint32_t workers, shards;
    bool on_data_thread;
    enum shard_fault fault;
    uint64_t at_step;
    int64_t wait_ms;
    struct memory_peers **peers; /* workers are the stages of pipelines, and these are made; NULL: replicas */
};

/* As many replicas as there are workers for. */
static void open_stages(const struct test_job *job, const struct run *run, struct worker *workers)
{
    struct plan **plans = calloc(run->workers, sizeof *plans);
    struct mesh mesh = {run->workers / job->model->stage_count, job->model->stage_count, 1};
    struct tally_error err;
    assert_non_null(plans);
    for (uint32_t i = 0; i < run->workers; i++) {
        test_rank_plan(job, i, mesh, NULL, &workers[i].rank);
        plans[i] = workers[i].rank.plan;
    }
    if (memory_peers_open(plans, run->workers, NULL, run->peers, &err))
        fail_msg("%s", err.message);
    for (uint32_t i = 0; i < run->workers; i++) {
        workers[i].peers = memory_peers_of(*run->peers, i);
        test_rank_start(job, workers[i].peers, &workers[i].rank);
    }
    free(plans);
}

static struct fake_shards *run_start(const struct test_job *job, const struct run *run, struct worker *workers)
{
    if (run->peers)
        open_stages(job, run, workers);
    for (uint32_t i = 0; i < run->workers && !run->peers; i++)
        test_rank_open(job, i, run->workers, NULL, &workers[i].rank);
    struct fake_shards_options options = {.job = JOB,
                                          .generation = GENERATION,
                                          .workers = run->workers,
                                          .shards = run->shards,
                                          .fault = run->fault,
                                          .at_step = run->at_step};
    struct fake_shards *shards = fake_shards_start(job, &options);
    for (uint32_t i = 0; i < run->workers; i++) {
        struct worker *w = &workers[i];
        w->job = job;
        w->index = i;
        w->on_data_thread = run->on_data_thread;
        w->wait_ms = run->wait_ms;
        w->shards = run->shards;
        w->names = fake_shards_names(shards);
        w->addresses = fake_shards_addresses(shards);
        worker_start(w);
    }
    return shards;
}

/* All ranks in this thread, in memory: what the weights must come to. */
static float *weights_in_memory(const struct test_job *job)
{
    struct solo solo;
    solo_open_job(job, NULL, &solo);
    for (uint64_t step = 1; step <= solo.rank.plan->batches.steps; step++)
        solo_step(&solo, step);
    float *weights = malloc(job->model->flat_count * sizeof *weights);
    assert_non_null(weights);
    memcpy(weights, memory_hub_weights(solo.hub), job->model->flat_count * sizeof *weights);
    solo_close(&solo);
    return weights;
}

/* Takes the spec. */
static void check_trains(Tally__V1__JobSpec *spec, struct run run)
{
    struct test_job *job = test_job_open(spec);
    float *want = weights_in_memory(job);
    struct worker *workers = calloc(run.workers, sizeof *workers);
    assert_non_null(workers);
    struct fake_shards *shards = run_start(job, &run, workers);
    for (uint32_t i = 0; i < run.workers; i++)
        worker_join(&workers[i]);
    for (uint32_t i = 0; i < run.workers; i++)
        if (workers[i].status)
            fail_msg("worker %u of %u, %u shards: %s", i, run.workers, run.shards, workers[i].err.message);
    uint64_t steps = workers[0].rank.plan->batches.steps;
    /* What was pushed last may still be on its way to the shard. */
    int64_t deadline = tally_now_ns() + INT64_C(10000000000);
    while (memory_hub_version(fake_shards_hub(shards)) < steps && tally_now_ns() < deadline)
        usleep(1000);
    for (uint32_t i = 0; i < run.workers; i++)
        worker_close(&workers[i]);
    assert_int_equal(memory_hub_version(fake_shards_hub(shards)), steps);
    assert_memory_equal(want, memory_hub_weights(fake_shards_hub(shards)), job->model->flat_count * sizeof *want);
    fake_shards_stop(shards);
    free(workers);
    free(want);
    test_job_close(job);
}

/* Each stage's worker takes and pushes its own slices alone. */
static void test_trains_stages(void **state)
{
    (void)state;
    for (uint32_t shards = 1; shards <= 3; shards++)
        for (uint32_t replicas = 1; replicas <= 2; replicas++) {
            Tally__V1__JobSpec *spec = spec_new(3, 32, 4, 0, 4);
            struct memory_peers *peers = NULL;
            spec_synthetic(spec, 0, 76, 10, (const uint32_t[]){1, 28, 28}, 3, NULL, 0);
            spec_seed_cnn(spec);
            spec_cross_entropy(spec, -100, 0);
            spec_stages(spec, 0, TALLY__V1__SCHEDULE__one_f_one_b, 1);
            spec_place(spec, 0, "conv1");
            spec_place(spec, 0, "fc1");
            spec_place(spec, 1, "conv2");
            spec_place(spec, 1, "fc2");
            check_trains(spec, (struct run){.workers = 2 * replicas, .shards = shards, .peers = &peers});
            memory_peers_close(peers);
        }
}

/* Some 5 MB in 7 slices. */
static Tally__V1__JobSpec *large_spec(uint64_t steps)
{
    Tally__V1__JobSpec *spec = spec_new(9, 24, 8, 0, steps);
    spec_synthetic(spec, 0, 60, 3, (const uint32_t[]){900}, 1, NULL, 0);
    spec_linear(spec, "a", 900, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, "b", 500, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, "c", 3, true);
    spec_cross_entropy(spec, -100, 0);
    spec_sgd(spec, 0.05, 0.9, 0, false);
    return spec;
}

static void test_trains_small_models(void **state)
{
    (void)state;
    for (int there = 0; there < 2; there++) {
        check_trains(spec_small_job(200), (struct run){1, 1, there, SHARD_WELL, 0, 0, NULL});
        check_trains(spec_small_job(50), (struct run){2, 1, there, SHARD_WELL, 0, 0, NULL});
        check_trains(spec_small_job(50),
                     (struct run){3, 2, there, SHARD_WELL, 0, 0, NULL}); /* one worker and one shard idle */
    }
}

static void test_trains_large_models(void **state)
{
    (void)state;
    for (int there = 0; there < 2; there++) {
        check_trains(large_spec(6), (struct run){1, 1, there, SHARD_WELL, 0, 0, NULL});
        check_trains(large_spec(6), (struct run){2, 3, there, SHARD_WELL, 0, 0, NULL});
        check_trains(large_spec(4), (struct run){3, 8, there, SHARD_WELL, 0, 0, NULL});
    }
}

static void test_trains_random_models(void **state)
{
    (void)state;
    for (uint32_t seed = 500; seed < 520; seed++)
        check_trains(random_job(seed, &(struct random_options){.steps = 6}),
                     (struct run){1 + seed % 4, 1 + seed % 3, seed % 2, SHARD_WELL, 0, 0, NULL});
}

/* Weights that come twice are taken once: they may be being read. */
static void test_repeated_weights(void **state)
{
    (void)state;
    check_trains(large_spec(5), (struct run){2, 1, false, SHARD_REPEATS, 0, 0, NULL});
}

/* Takes the spec. The first worker fails so, soon. */
static void check_fails(Tally__V1__JobSpec *spec, struct run run, tally_status status, const char *const *words)
{
    struct test_job *job = test_job_open(spec);
    struct worker *workers = calloc(run.workers, sizeof *workers);
    assert_non_null(workers);
    int64_t start = tally_now_ns();
    struct fake_shards *shards = run_start(job, &run, workers);
    for (uint32_t i = 0; i < run.workers; i++)
        worker_join(&workers[i]);
    assert_true(tally_now_ns() - start < INT64_C(10000000000));
    assert_int_equal(workers[0].status, status);
    assert_int_equal(workers[0].err.code, status);
    for (; *words; words++)
        if (!strstr(workers[0].err.message, *words))
            fail_msg("'%s' does not say '%s'", workers[0].err.message, *words);
    for (uint32_t i = 0; i < run.workers; i++)
        worker_close(&workers[i]);
    fake_shards_stop(shards);
    free(workers);
    test_job_close(job);
}

#define WORDS(...) ((const char *const[]){__VA_ARGS__, NULL})

static void test_refused_push(void **state)
{
    (void)state;
    for (int there = 0; there < 2; there++)
        check_fails(spec_small_job(50), (struct run){1, 1, there, SHARD_REFUSES, 5, 0, NULL}, TALLY_ESTATE,
                    WORDS("s0 refused", "slice 0 (a.weight .. b.bias)", "step 5", "it does not like it"));
}

static void test_lost_stream(void **state)
{
    (void)state;
    for (int there = 0; there < 2; there++)
        check_fails(large_spec(50), (struct run){1, 2, there, SHARD_ENDS, 3, 0, NULL}, TALLY_EUNAVAIL,
                    WORDS("the stream to s1 was lost at step", "it is tired"));
}

static void test_silent_shard(void **state)
{
    (void)state;
    for (int there = 0; there < 2; there++)
        check_fails(spec_small_job(50), (struct run){1, 1, there, SHARD_GOES_SILENT, 4, 300, NULL}, TALLY_ETIMEDOUT,
                    WORDS("w0 waited 0.3 s for slice 0 (a.weight .. b.bias) of version 4 from s0"));
}

static void test_wrong_weights(void **state)
{
    (void)state;
    static const struct {
        enum shard_fault fault;
        const char *word;
    } faults[] = {{SHARD_SENDS_WRONG_SIZE, "of a wrong size"},
                  {SHARD_SENDS_WRONG_SLICE, "of a slice that is not its own"},
                  {SHARD_SENDS_WRONG_JOB, "of another job or generation"}};
    for (size_t i = 0; i < 3; i++)
        check_fails(spec_small_job(50), (struct run){1, 1, i % 2, faults[i].fault, 2, 0, NULL}, TALLY_EINVAL,
                    WORDS("s0 sent weights", faults[i].word));
}

static void test_nobody_there(void **state)
{
    (void)state;
    for (int there = 0; there < 2; there++) {
        struct test_job *job = test_job_open(spec_small_job(5));
        char *const names[] = {"s0"}, *const addresses[] = {"unix:/tmp/tally-no-such-socket"};
        struct worker w = {.job = job, .on_data_thread = there, .shards = 1, .names = names, .addresses = addresses};
        test_rank_open(job, 0, 1, NULL, &w.rank);
        worker_start(&w);
        worker_join(&w);
        assert_int_equal(w.status, TALLY_EUNAVAIL);
        assert_non_null(strstr(w.err.message, "the stream to s0 was lost"));
        worker_close(&w);
        test_job_close(job);
    }
}

static void test_interrupted_while_it_waits(void **state)
{
    (void)state;
    for (int there = 0; there < 2; there++) {
        struct test_job *job = test_job_open(spec_small_job(50));
        struct worker w = {0};
        struct run run = {1, 1, there, SHARD_GOES_SILENT, 3, 0, NULL};
        struct fake_shards *shards = run_start(job, &run, &w);
        char text[256] = "";
        int64_t deadline = tally_now_ns() + INT64_C(10000000000);
        while (!strstr(text, "version 3") && tally_now_ns() < deadline) {
            usleep(1000);
            transport_rpc_activity(w.transport, text, sizeof text);
        }
        assert_string_equal(text, "waits for slice 0 (a.weight .. b.bias) of version 3 from s0");
        int64_t start = tally_now_ns();
        transport_rpc_interrupt(w.transport);
        worker_join(&w);
        assert_true(tally_now_ns() - start < 500000000);
        assert_int_equal(w.status, TALLY_ECANCELLED);
        worker_close(&w);
        fake_shards_stop(shards);
        test_job_close(job);
    }
}

/* After the last step a stream may end; a refusal is still told. */
static void test_watches_after_the_last_step(void **state)
{
    (void)state;
    for (int refused = 0; refused < 2; refused++) {
        struct test_job *job = test_job_open(spec_small_job(5));
        struct worker w = {0};
        struct run run = {1, 1, true, refused ? SHARD_REFUSES : SHARD_ENDS, 5, 0, NULL};
        struct fake_shards *shards = run_start(job, &run, &w);
        worker_join(&w);
        struct tally_error err;
        if (!w.status) { /* else it has seen the end or the refusal already */
            transport_rpc_done(w.transport);
            if (refused) {
                assert_int_equal(transport_rpc_watch(w.transport, &err), TALLY_ESTATE);
                assert_non_null(strstr(err.message, "it does not like it"));
            } else {
                usleep(50000);
                transport_rpc_interrupt(w.transport);
                tally_status status = transport_rpc_watch(w.transport, &err);
                assert_true(status == TALLY_ECANCELLED);
            }
        }
        worker_close(&w);
        fake_shards_stop(shards);
        test_job_close(job);
    }
}

static void test_refuses_wrong_options(void **state)
{
    (void)state;
    struct test_job *job = test_job_open(spec_small_job(5));
    struct test_rank rank;
    test_rank_open(job, 0, 1, NULL, &rank);
    struct data_thread *data;
    struct tally_error err;
    assert_int_equal(data_thread_start(&data, &err), TALLY_OK);
    char *const names[] = {"s0"}, *const addresses[] = {"nonsense"};
    struct transport_rpc_options options = {.worker = "w0",
                                            .model = job->model,
                                            .kernels = rank.kernels,
                                            .backend = rank.backend,
                                            .weights = executor_weights(rank.executor),
                                            .thread = data};
    struct transport_rpc *t;
    assert_int_equal(transport_rpc_open(&options, &t, &err), TALLY_EINVAL); /* no shard */
    options.shards = 1;
    options.shard_names = names;
    options.shard_addresses = addresses;
    assert_int_equal(transport_rpc_open(&options, &t, &err), TALLY_EINVAL);
    assert_non_null(strstr(err.message, "s0"));
    data_thread_stop(data);
    test_rank_close(&rank);
    test_job_close(job);
}

int main(void)
{
    rpc_global_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_trains_small_models),
        cmocka_unit_test(test_trains_large_models),
        cmocka_unit_test(test_trains_stages),
        cmocka_unit_test(test_trains_random_models),
        cmocka_unit_test(test_repeated_weights),
        cmocka_unit_test(test_refused_push),
        cmocka_unit_test(test_lost_stream),
        cmocka_unit_test(test_silent_shard),
        cmocka_unit_test(test_wrong_weights),
        cmocka_unit_test(test_nobody_there),
        cmocka_unit_test(test_interrupted_while_it_waits),
        cmocka_unit_test(test_watches_after_the_last_step),
        cmocka_unit_test(test_refuses_wrong_options),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rpc_global_shutdown();
    return failed;
}
