/* Pipelines in one process, a thread a rank: whatever the placement, the schedule and the replicas, the bytes of the
 * model on one worker, evaluations too. */
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/worker/eval_table.h"
#include "tests/worker/memory_hub.h"
#include "tests/worker/memory_peers.h"
#include "tests/worker/random_job.h"
#include "tests/worker/test_job.h"
#include "worker/training.h"

#ifdef __SANITIZE_THREAD__
#define RANDOM_JOBS 20
#else
#define RANDOM_JOBS 250
#endif
#define RANDOM_SEED 20240

struct outcome {
    float *weights;
    struct kernel_loss *losses; /* by step */
    struct eval_table evals;
    uint64_t sent, sent_bytes;
};

struct worker {
    struct test_rank rank;
    struct training training;
    struct outcome *outcome;
    pthread_t thread;
    tally_status status;
    struct tally_error err;
};

static void on_evaluated(uint64_t version, uint32_t micro_batch, const struct kernel_loss *loss, uint32_t samples,
                         void *user)
{
    struct worker *w = user;
    eval_table_add(&w->outcome->evals, version, micro_batch, loss, samples);
}

static void *train(void *arg)
{
    struct worker *w = arg;
    w->status = training_run(&w->training, 0, &w->err);
    return NULL;
}

static void plan_workers(const struct test_job *job, struct mesh mesh, struct worker *workers, struct plan **plans)
{
    for (uint32_t r = 0; r < mesh.data * mesh.pipeline; r++) {
        test_rank_plan(job, r, mesh, NULL, &workers[r].rank);
        plans[r] = workers[r].rank.plan;
    }
}

static struct outcome *run_mesh(const struct test_job *job, struct mesh mesh, const char *what)
{
    uint32_t ranks = mesh.data * mesh.pipeline;
    struct worker *workers = calloc(ranks, sizeof *workers);
    struct plan **plans = calloc(ranks, sizeof *plans);
    struct outcome *outcome = calloc(1, sizeof *outcome);
    struct memory_peers *peers;
    struct memory_hub *hub;
    struct test_rank server; /* a backend for the hub alone */
    struct tally_error err = {0};
    assert_true(workers && plans && outcome);
    pthread_mutex_init(&outcome->evals.mutex, NULL);
    plan_workers(job, mesh, workers, plans);
    test_rank_plan(job, 0, mesh, NULL, &server);
    if (memory_peers_open(plans, ranks, NULL, &peers, &err) ||
        memory_hub_open(server.plan, &(struct memory_hub_options){.clients = ranks, .poison = true}, &hub, &err))
        fail_msg("%s: %s", what, err.message);
    for (uint32_t r = 0; r < ranks; r++) {
        struct worker *w = &workers[r];
        test_rank_start(job, memory_peers_of(peers, r), &w->rank);
        w->outcome = outcome;
        w->training = (struct training){
            .plan = w->rank.plan,
            .executor = w->rank.executor,
            .transport = memory_hub_join_stage(hub, r, executor_weights(w->rank.executor), w->rank.plan->slice_offsets),
            .peers = memory_peers_of(peers, r),
            .events = {.on_evaluated = on_evaluated},
            .user = w};
    }
    for (uint32_t r = 0; r < ranks; r++)
        assert_int_equal(pthread_create(&workers[r].thread, NULL, train, &workers[r]), 0);
    for (uint32_t r = 0; r < ranks; r++)
        pthread_join(workers[r].thread, NULL);
    for (uint32_t r = 0; r < ranks; r++)
        if (workers[r].status)
            fail_msg("%s: rank %u of %u x %u: %s", what, r, mesh.data, mesh.pipeline, workers[r].err.message);
    uint64_t steps = server.plan->batches.steps;
    assert_int_equal(memory_hub_version(hub), steps);
    outcome->weights = calloc(job->model->flat_count, sizeof(float));
    outcome->losses = calloc(steps + 1, sizeof *outcome->losses);
    assert_true(outcome->weights && outcome->losses);
    memcpy(outcome->weights, memory_hub_weights(hub), job->model->flat_count * sizeof(float));
    for (uint64_t step = 1; step <= steps; step++)
        outcome->losses[step] = memory_hub_loss(hub, step);
    outcome->sent = memory_peers_sent(peers, &outcome->sent_bytes);
    memory_hub_close(hub);
    memory_peers_close(peers);
    test_rank_close(&server);
    for (uint32_t r = 0; r < ranks; r++)
        test_rank_close(&workers[r].rank);
    free(workers);
    free(plans);
    return outcome;
}

static void outcome_free(struct outcome *o)
{
    pthread_mutex_destroy(&o->evals.mutex);
    free(o->weights);
    free(o->losses);
    free(o);
}

static void assert_same(const struct outcome *want, const struct outcome *got, const struct test_job *job,
                        const char *what)
{
    for (size_t i = 0; i < job->model->flat_count; i++)
        if (memcmp(&want->weights[i], &got->weights[i], sizeof(float)) != 0)
            fail_msg("%s: weight %zu is %.9g, on one worker %.9g", what, i, (double)got->weights[i],
                     (double)want->weights[i]);
    uint64_t steps = job->spec->train->steps;
    if (memcmp(want->losses, got->losses, (steps + 1) * sizeof *want->losses))
        fail_msg("%s: other losses than on one worker", what);
    if (memcmp(want->evals.cells, got->evals.cells, sizeof want->evals.cells))
        fail_msg("%s: other evaluations than on one worker", what);
}

/* Of the jobs that were checked: so that a generator that makes only easy ones shows. */
static struct {
    unsigned jobs, pipelines, chunks, skips;
} seen;

static void count_job(const struct model *model)
{
    bool skips = false;
    for (size_t i = 0; i < model->layer_count; i++)
        for (size_t k = 0; k < model->layers[i].input_count; k++)
            skips |= model->layers[i].inputs[k] != MODEL_INPUT &&
                     model->layers[model->layers[i].inputs[k]].segment + 1 < model->layers[i].segment;
    seen.jobs++;
    seen.pipelines += model->stage_count > 1;
    seen.chunks += model->segment_count > model->stage_count;
    seen.skips += skips;
}

/* Takes both specs: the same job, without and with a pipeline. */
static void check_job(Tally__V1__JobSpec *plain, Tally__V1__JobSpec *spec, uint32_t replicas, const char *what)
{
    struct test_job *one = test_job_open(plain), *job = test_job_open(spec);
    assert_int_equal(one->model->flat_count, job->model->flat_count);
    count_job(job->model);
    struct outcome *want = run_mesh(one, (struct mesh){1, 1, 1}, what);
    struct outcome *got = run_mesh(job, (struct mesh){replicas, job->model->stage_count, 1}, what);
    assert_same(want, got, job, what);
    assert_int_equal(want->sent, 0);
    assert_true(job->model->stage_count == 1 || got->sent > 0);
    outcome_free(want);
    outcome_free(got);
    test_job_close(one);
    test_job_close(job);
}

/* ---- random jobs ---- */

static const Tally__V1__Schedule schedules[] = {TALLY__V1__SCHEDULE__gpipe, TALLY__V1__SCHEDULE__one_f_one_b,
                                                TALLY__V1__SCHEDULE__interleaved};

/* Is it sure to be something that a stage can do alone? */
static bool stands_alone(const Tally__V1__Layer *layer)
{
    return layer->kind_case != TALLY__V1__LAYER__KIND_FLATTEN &&
           layer->kind_case != TALLY__V1__LAYER__KIND_MAX_POOL2D && layer->kind_case != TALLY__V1__LAYER__KIND_RELU;
}

static size_t operations_of(const Tally__V1__JobSpec *spec)
{
    size_t n = 0;
    for (size_t i = 0; i < spec->model->n_layers; i++)
        n += stands_alone(spec->model->layers[i]);
    return n;
}

/* Every layer somewhere, every stage with an operation; some layers are not named, and follow. */
static void place_layers(uint64_t *state, Tally__V1__JobSpec *spec, uint32_t stages)
{
    uint32_t next = 0;
    for (size_t i = 0; i < spec->model->n_layers; i++) {
        char name[16];
        const Tally__V1__Layer *layer = spec->model->layers[i];
        bool needed = next < stages && stands_alone(layer);
        if (!needed && random_below(state, 3) == 0)
            continue;
        snprintf(name, sizeof name, "%zu", i);
        spec_place(spec, needed ? next : random_below(state, stages), layer->name ? layer->name : name);
        next += needed;
    }
}

/* What the schedule and the placement are, and how many replicas. */
static uint32_t random_pipeline(uint64_t *state, Tally__V1__JobSpec *spec)
{
    size_t operations = operations_of(spec);
    uint32_t most = operations < 5 ? (uint32_t)operations : 5,
             stages = most < 2 ? 1 : 2 + random_below(state, most - 1);
    if (random_below(state, 3)) {
        spec_stages(spec, 0, schedules[random_below(state, 3)], 1);
        place_layers(state, spec, stages);
    } else {
        uint32_t most_chunks = (uint32_t)operations / stages, chunks;
        chunks = 1 + random_below(state, most_chunks < 3 ? most_chunks : 3);
        spec_stages(spec, stages, schedules[random_below(state, 3)], chunks);
    }
    return 1 + random_below(state, 3);
}

static void test_random_jobs(void **state)
{
    (void)state;
    print_message("seed %d\n", RANDOM_SEED);
    for (uint64_t seed = RANDOM_SEED; seed < RANDOM_SEED + RANDOM_JOBS; seed++) {
        const struct random_options options = {.steps = 4, .test_set = seed % 3 == 0, .deep = seed % 2};
        char what[32];
        uint64_t random = seed;
        Tally__V1__JobSpec *spec = random_job(seed, &options);
        uint32_t replicas = random_pipeline(&random, spec);
        snprintf(what, sizeof what, "seed %llu", (unsigned long long)seed);
        check_job(random_job(seed, &options), spec, replicas, what);
    }
    print_message(
        "%u jobs: %u with several stages, %u with several segments on one, %u where a tensor passes a segment "
        "over\n",
        seen.jobs, seen.pipelines, seen.chunks, seen.skips);
    assert_true(seen.pipelines > seen.jobs / 5 * 4 && seen.chunks > seen.jobs / 4);
}

/* ---- the seed's CNN: activations cross 0 -> 1 -> 0 -> 1 ---- */

static Tally__V1__JobSpec *cnn(void)
{
    Tally__V1__JobSpec *spec = spec_new(3, 32, 4, 0, 3);
    spec_synthetic(spec, 0, 76, 10, (const uint32_t[]){1, 28, 28}, 3, NULL, 0);
    spec_synthetic(spec, 1, 21, 10, (const uint32_t[]){1, 28, 28}, 3, NULL, 0);
    spec_seed_cnn(spec);
    spec_cross_entropy(spec, -100, 0);
    spec_sgd(spec, 0.01, 0.9, 0, false);
    return spec;
}

static void test_seed_cnn(void **state)
{
    (void)state;
    for (size_t i = 0; i < 3; i++)
        for (uint32_t replicas = 1; replicas <= 3; replicas++) {
            char what[64];
            Tally__V1__JobSpec *spec = cnn();
            spec_stages(spec, 0, schedules[i], 1);
            spec_place(spec, 0, "conv1");
            spec_place(spec, 0, "fc1");
            spec_place(spec, 1, "conv2");
            spec_place(spec, 1, "fc2");
            snprintf(what, sizeof what, "cnn, schedule %zu, %u replicas", i, replicas);
            check_job(cnn(), spec, replicas, what);
        }
}

/* ---- branches: one layer read on several stages, by turns, and the input too ---- */

static Tally__V1__JobSpec *branches(uint64_t seed)
{
    Tally__V1__JobSpec *spec = spec_new(seed, 20, 3, 0, 4); /* leaves of 3, the last of 2 */
    spec_synthetic(spec, 0, 47, 4, (const uint32_t[]){7}, 1, NULL, 0);
    spec_synthetic(spec, 1, 19, 4, (const uint32_t[]){7}, 1, NULL, 0);
    spec_linear(spec, "a", 9, true);
    spec_linear(spec, "b", 9, true);
    spec_from(spec_linear(spec, "c", 9, false), "a");
    spec_from(spec_plain(spec, "d", TALLY__V1__LAYER__KIND_TANH), "b");
    spec_from(spec_linear(spec, "e", 9, true), "a");
    spec_from(spec_linear(spec, "f", 9, true), "input");
    static const char *const sum[] = {"a", "c", "d", "a", "e", "f"};
    Tally__V1__Layer *add = spec_plain(spec, "sum", TALLY__V1__LAYER__KIND_ADD);
    for (size_t i = 0; i < sizeof sum / sizeof *sum; i++)
        spec_from(add, sum[i]);
    spec_linear(spec, "g", 9, true);
    add = spec_plain(spec, "again", TALLY__V1__LAYER__KIND_ADD);
    spec_from(add, "g");
    spec_from(add, "a");
    spec_linear(spec, "out", 4, true);
    spec_cross_entropy(spec, -100, 0);
    spec_sgd(spec, 0.05, 0.9, 0, true);
    return spec;
}

static void test_branches(void **state)
{
    (void)state;
    static const char *const names[] = {"a", "b", "c", "d", "e", "f", "sum", "g", "again", "out"};
    enum { LAYERS = sizeof names / sizeof *names };
    uint64_t random = 5;
    for (uint64_t i = 0; i < RANDOM_JOBS / 4; i++) {
        Tally__V1__JobSpec *spec = branches(i);
        uint32_t stages = 2 + random_below(&random, 4), first[5];
        spec_stages(spec, 0, schedules[i % 3], 1);
        for (uint32_t s = 0; s < stages; s++) {
            bool taken = true;
            while (taken) {
                first[s] = random_below(&random, LAYERS);
                taken = false;
                for (uint32_t other = 0; other < s; other++)
                    taken |= first[other] == first[s];
            }
            spec_place(spec, s, names[first[s]]);
        }
        for (uint32_t l = 0; l < LAYERS; l++) {
            bool placed = false;
            for (uint32_t s = 0; s < stages; s++)
                placed |= first[s] == l;
            if (!placed)
                spec_place(spec, random_below(&random, stages), names[l]);
        }
        char what[32];
        snprintf(what, sizeof what, "branches %llu", (unsigned long long)i);
        check_job(branches(i), spec, 1 + random_below(&random, 3), what);
    }
}

/* Nothing on the first stage has parameters: nothing comes back to it. */
static Tally__V1__JobSpec *no_parameters_first(void)
{
    Tally__V1__JobSpec *spec = spec_new(1, 24, 2, 0, 5);
    spec_synthetic(spec, 0, 50, 3, (const uint32_t[]){2, 6, 6}, 3, NULL, 0);
    spec_synthetic(spec, 1, 30, 3, (const uint32_t[]){2, 6, 6}, 3, NULL, 0);
    spec_avg_pool(spec, "pool", 2, 2, 0);
    spec_plain(spec, "tanh", TALLY__V1__LAYER__KIND_TANH);
    spec_plain(spec, "flat", TALLY__V1__LAYER__KIND_FLATTEN);
    spec_linear(spec, "a", 8, true);
    spec_plain(spec, "relu", TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, "b", 3, true);
    spec_cross_entropy(spec, -100, 0);
    return spec;
}

static void test_no_parameters_first(void **state)
{
    (void)state;
    for (size_t i = 0; i < 3; i++) {
        Tally__V1__JobSpec *spec = no_parameters_first();
        spec_stages(spec, 0, schedules[i], 1);
        spec_place(spec, 1, "pool");
        spec_place(spec, 0, "a");
        spec_place(spec, 2, "relu"); /* apart from the product that it is one operation with, on one worker */
        spec_place(spec, 0, "b");
        check_job(no_parameters_first(), spec, 2, "no parameters first");
    }
}

/* ---- memory ---- */

/* What the plan says is what the executor takes, and the gradients that the transport holds: but for alignment. */
static void test_memory(void **state)
{
    (void)state;
    static const struct mesh meshes[] = {{1, 2, 1}, {2, 2, 1}, {3, 2, 1}};
    size_t weights = 0;
    for (size_t i = 0; i < sizeof meshes / sizeof *meshes; i++) {
        Tally__V1__JobSpec *spec = cnn();
        spec_stages(spec, 2, schedules[i], 1);
        struct test_job *job = test_job_open(spec);
        for (uint32_t r = 0; r < meshes[i].data * meshes[i].pipeline; r++) {
            struct test_rank rank;
            test_rank_plan(job, r, meshes[i], NULL, &rank);
            struct plan *plans[1] = {rank.plan};
            struct memory_peers *peers;
            struct tally_error err;
            assert_int_equal(memory_peers_open(plans, 1, NULL, &peers, &err), TALLY_OK);
            test_rank_start(job, memory_peers_of(peers, 0), &rank);
            struct plan_memory m = plan_memory(rank.plan);
            size_t used = executor_memory_bytes(rank.executor) + rank.plan->flat_count * sizeof(float);
            assert_true(used >= m.total && used - m.total <= m.total / 100);
            assert_int_equal(m.weights, rank.plan->flat_count * sizeof(float));
            weights += m.weights;
            memory_peers_close(peers);
            test_rank_close(&rank);
        }
        assert_int_equal(weights, meshes[i].data * job->model->flat_count * sizeof(float));
        weights = 0;
        test_job_close(job);
    }
}

/* ---- a rank is gone ---- */

struct waiter {
    struct test_rank rank;
    struct training training;
    tally_status status;
    struct tally_error err;
};

static void *wait_for_peer(void *arg)
{
    struct waiter *w = arg;
    w->status = training_run(&w->training, 0, &w->err);
    return NULL;
}

static void test_peer_that_never_comes(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = branches(1);
    spec_stages(spec, 2, TALLY__V1__SCHEDULE__gpipe, 1);
    struct test_job *job = test_job_open(spec);
    for (int break_it = 0; break_it < 2; break_it++) {
        struct waiter w = {0};
        struct test_rank other;
        struct memory_peers *peers;
        struct memory_hub *hub;
        struct tally_error err;
        pthread_t thread;
        test_rank_plan(job, 0, (struct mesh){1, 2, 1}, NULL, &other);
        test_rank_plan(job, 1, (struct mesh){1, 2, 1}, NULL, &w.rank);
        struct plan *plans[2] = {other.plan, w.rank.plan};
        struct memory_peers_options options = {.wait_ms = break_it ? 20000 : 50};
        assert_int_equal(memory_peers_open(plans, 2, &options, &peers, &err), TALLY_OK);
        assert_int_equal(memory_hub_open(other.plan, &(struct memory_hub_options){.clients = 1}, &hub, &err), TALLY_OK);
        test_rank_start(job, memory_peers_of(peers, 1), &w.rank);
        w.training = (struct training){
            .plan = w.rank.plan,
            .executor = w.rank.executor,
            .transport = memory_hub_join_stage(hub, 0, executor_weights(w.rank.executor), w.rank.plan->slice_offsets),
            .peers = memory_peers_of(peers, 1)};
        assert_int_equal(pthread_create(&thread, NULL, wait_for_peer, &w), 0);
        if (break_it)
            memory_peers_break(peers);
        pthread_join(thread, NULL);
        assert_int_equal(w.status, break_it ? TALLY_EUNAVAIL : TALLY_ETIMEDOUT);
        memory_hub_close(hub);
        memory_peers_close(peers);
        test_rank_close(&w.rank);
        test_rank_close(&other);
    }
    test_job_close(job);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_seed_cnn), cmocka_unit_test(test_random_jobs),
        cmocka_unit_test(test_branches), cmocka_unit_test(test_no_parameters_first),
        cmocka_unit_test(test_memory),   cmocka_unit_test(test_peer_that_never_comes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
