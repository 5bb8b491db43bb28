/* The training loop of several ranks, each on its own thread, in memory: evaluations are whole, exact, and of the right
 * version. */
#include "worker/training.h"

#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/worker/eval_table.h"
#include "tests/worker/memory_hub.h"
#include "tests/worker/random_job.h"
#include "tests/worker/test_job.h"

struct worker {
    struct training training;
    struct test_rank rank;
    struct eval_table *table;
    uint64_t start, last_progress;
    pthread_t thread;
    tally_status status;
    struct tally_error err;
};

static void on_evaluated(uint64_t version, uint32_t micro_batch, const struct kernel_loss *loss, uint32_t samples,
                         void *user)
{
    struct worker *w = user;
    eval_table_add(w->table, version, micro_batch, loss, samples);
}

static void on_progress(uint64_t step, bool evaluating, void *user)
{
    struct worker *w = user;
    (void)evaluating;
    assert_true(step >= w->last_progress);
    w->last_progress = step;
}

static void *train(void *arg)
{
    struct worker *w = arg;
    w->status = training_run(&w->training, w->start, &w->err);
    return NULL;
}

/* Trains with so many ranks; the table is the caller's to free. weights: flat. */
static struct eval_table *run_job(const struct test_job *job, uint32_t ranks, float *ret_weights)
{
    struct eval_table *table = calloc(1, sizeof *table);
    struct worker *workers = calloc(ranks, sizeof *workers);
    assert_non_null(table);
    assert_non_null(workers);
    pthread_mutex_init(&table->mutex, NULL);
    for (uint32_t r = 0; r < ranks; r++)
        test_rank_open(job, r, ranks, NULL, &workers[r].rank);
    struct test_rank server; /* a backend for the hub alone: ranks run at the same time */
    test_rank_open(job, 0, ranks, NULL, &server);
    struct memory_hub *hub;
    struct tally_error err;
    if (memory_hub_open(server.plan, &(struct memory_hub_options){.clients = ranks}, &hub, &err))
        fail_msg("%s", err.message);
    for (uint32_t r = 0; r < ranks; r++) {
        struct worker *w = &workers[r];
        w->table = table;
        w->training = (struct training){.plan = w->rank.plan,
                                        .executor = w->rank.executor,
                                        .transport = memory_hub_join(hub, r, executor_weights(w->rank.executor)),
                                        .events = {.on_progress = on_progress, .on_evaluated = on_evaluated},
                                        .user = w};
    }
    for (uint32_t r = 0; r < ranks; r++)
        assert_int_equal(pthread_create(&workers[r].thread, NULL, train, &workers[r]), 0);
    for (uint32_t r = 0; r < ranks; r++)
        pthread_join(workers[r].thread, NULL);
    for (uint32_t r = 0; r < ranks; r++)
        if (workers[r].status)
            fail_msg("rank %u of %u: %s", r, ranks, workers[r].err.message);
    assert_int_equal(memory_hub_version(hub), server.plan->batches.steps);
    memcpy(ret_weights, memory_hub_weights(hub), job->model->flat_count * sizeof *ret_weights);
    memory_hub_close(hub);
    test_rank_close(&server);
    for (uint32_t r = 0; r < ranks; r++)
        test_rank_close(&workers[r].rank);
    free(workers);
    pthread_mutex_destroy(&table->mutex);
    return table;
}

/* Every micro-batch once at every version that is evaluated, and at no other. */
static void check_whole(const struct eval_table *table, const struct test_job *job)
{
    struct test_rank rank;
    test_rank_open(job, 0, 1, NULL, &rank);
    const struct plan *plan = rank.plan;
    assert_true(plan->batches.steps < EVAL_VERSIONS_MAX && plan->evaluation.leaves <= EVAL_LEAVES_MAX);
    for (uint64_t v = 0; v < EVAL_VERSIONS_MAX; v++) {
        bool due = v > 0 && v <= plan->batches.steps &&
                   (v == plan->batches.steps || batches_step(&plan->batches, v).epoch_end);
        uint64_t samples = 0;
        for (uint32_t i = 0; i < EVAL_LEAVES_MAX; i++) {
            if (table->cells[v][i].times != (due && i < plan->evaluation.leaves))
                fail_msg("version %llu, micro-batch %u: run %u times", (unsigned long long)v, i,
                         table->cells[v][i].times);
            samples += table->cells[v][i].samples;
        }
        assert_int_equal(samples, due ? plan->evaluation.samples : 0);
    }
    test_rank_close(&rank);
}

/* Takes the spec. */
static void check_job(Tally__V1__JobSpec *spec)
{
    struct test_job *job = test_job_open(spec);
    size_t bytes = job->model->flat_count * sizeof(float);
    float *want = malloc(bytes), *got = malloc(bytes);
    struct eval_table *one = run_job(job, 1, want);
    check_whole(one, job);
    for (uint32_t ranks = 2; ranks <= 5; ranks++) {
        struct eval_table *many = run_job(job, ranks, got);
        check_whole(many, job);
        assert_memory_equal(want, got, bytes);
        assert_memory_equal(one->cells, many->cells, sizeof one->cells);
        free(many);
    }
    free(one);
    free(want);
    free(got);
    test_job_close(job);
}

static void test_random_jobs(void **state)
{
    (void)state;
    for (uint64_t seed = 700; seed < 712; seed++)
        check_job(random_job(seed, &(struct random_options){.steps = 9, .test_set = true}));
}

/* The last step of an epoch has 1 leaf of 4: the ranks without one must neither stop the others nor evaluate what may
 * be replaced. */
static void test_ranks_without_leaves(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = spec_new(1, 16, 4, 4, 0);
    spec_synthetic(spec, 0, 35, 3, (const uint32_t[]){6}, 1, NULL, 0);
    spec_synthetic(spec, 1, 33, 3, (const uint32_t[]){6}, 1, NULL, 0);
    spec_linear(spec, NULL, 12, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_TANH);
    spec_linear(spec, NULL, 3, true);
    spec_cross_entropy(spec, -100, 0);
    check_job(spec);
}

static void test_shares(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = spec_new(1, 16, 4, 2, 0); /* steps 16, 16, 3 samples: 4, 4, 1 leaves */
    spec_synthetic(spec, 0, 35, 3, (const uint32_t[]){6}, 1, NULL, 0);
    spec_synthetic(spec, 1, 33, 3, (const uint32_t[]){6}, 1, NULL, 0);
    spec_linear(spec, NULL, 3, true);
    spec_cross_entropy(spec, -100, 0);
    struct test_job *job = test_job_open(spec);
    for (uint32_t ranks = 1; ranks <= 6; ranks++) {
        uint32_t at[3] = {0};
        for (uint32_t r = 0; r < ranks; r++) {
            struct test_rank rank;
            test_rank_open(job, r, ranks, NULL, &rank);
            assert_false(training_evaluates(rank.plan, 0));
            assert_false(training_evaluates(rank.plan, 2));
            assert_true(training_evaluates(rank.plan, 3));
            assert_true(training_evaluates(rank.plan, 6));
            /* After step 3 comes one of 4 leaves; the job's last evaluation is shared as its last step, of 1 leaf. */
            const uint64_t versions[] = {3, 6};
            for (int i = 0; i < 2; i++) {
                struct tree_node share = training_evaluation_share(rank.plan, versions[i]);
                if (share.begin == share.end)
                    continue;
                assert_int_equal(share.begin, at[i]);
                at[i] = share.end;
                assert_true(i == 1 || r < 4 || ranks > 4);
            }
            test_rank_close(&rank);
        }
        assert_int_equal(at[0], 9);
        assert_int_equal(at[1], 9);
    }
    test_job_close(job);
}

/* A gang that takes over at version 3 evaluates it again, and one at the last version only evaluates. */
static void test_starts_in_the_middle(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = spec_new(1, 16, 4, 2, 0);
    spec_synthetic(spec, 0, 35, 3, (const uint32_t[]){6}, 1, NULL, 0);
    spec_synthetic(spec, 1, 10, 3, (const uint32_t[]){6}, 1, NULL, 0);
    spec_linear(spec, NULL, 3, true);
    spec_cross_entropy(spec, -100, 0);
    struct test_job *job = test_job_open(spec);
    struct eval_table *table = calloc(1, sizeof *table);
    struct worker w = {.table = table};
    pthread_mutex_init(&table->mutex, NULL);
    test_rank_open(job, 0, 1, NULL, &w.rank);
    struct memory_hub *hub;
    struct tally_error err;
    assert_int_equal(memory_hub_open(w.rank.plan, &(struct memory_hub_options){.clients = 1}, &hub, &err), TALLY_OK);
    w.training = (struct training){.plan = w.rank.plan,
                                   .executor = w.rank.executor,
                                   .transport = memory_hub_join(hub, 0, executor_weights(w.rank.executor)),
                                   .events = {.on_progress = on_progress, .on_evaluated = on_evaluated},
                                   .user = &w};
    for (uint64_t step = 1; step <= 3; step++)
        assert_int_equal(executor_step(w.rank.executor, w.training.transport, step, &err), TALLY_OK);
    w.start = 3;
    train(&w);
    assert_int_equal(w.status, TALLY_OK);
    assert_int_equal(memory_hub_version(hub), 6);
    check_whole(table, job);
    w.start = 6;
    train(&w);
    assert_int_equal(w.status, TALLY_OK);
    assert_int_equal(memory_hub_version(hub), 6);
    assert_int_equal(table->cells[6][0].times, 2);
    w.start = 7;
    train(&w);
    assert_int_equal(w.status, TALLY_EINVAL);
    memory_hub_close(hub);
    test_rank_close(&w.rank);
    pthread_mutex_destroy(&table->mutex);
    free(table);
    test_job_close(job);
}

static tally_status nothing_to_flush(struct transport *transport, struct tally_error *err)
{
    (void)transport;
    (void)err;
    return TALLY_OK;
}

/* The fifth rank of a step of four leaves: it has nothing to do, however many steps there are. */
static void test_idle_rank(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = spec_new(1, 16, 4, 0, UINT64_C(1000000000000000));
    spec_synthetic(spec, 0, 35, 3, (const uint32_t[]){6}, 1, NULL, 0);
    spec_synthetic(spec, 1, 10, 3, (const uint32_t[]){6}, 1, NULL, 0);
    spec_linear(spec, NULL, 3, true);
    spec_cross_entropy(spec, -100, 0);
    struct test_job *job = test_job_open(spec);
    struct transport transport = {.flush = nothing_to_flush};
    struct worker w = {.training = {.transport = &transport}};
    test_rank_open(job, 4, 5, NULL, &w.rank);
    w.training.plan = w.rank.plan;
    w.training.executor = w.rank.executor;
    train(&w);
    assert_int_equal(w.status, TALLY_OK);
    test_rank_close(&w.rank);
    test_job_close(job);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_random_jobs), cmocka_unit_test(test_ranks_without_leaves),
        cmocka_unit_test(test_shares),      cmocka_unit_test(test_starts_in_the_middle),
        cmocka_unit_test(test_idle_rank),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
