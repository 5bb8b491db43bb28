/* A whole worker in this process, from Register to Ended: a coordinator and shards that this test plays, over real RPC.
 */
#include "worker/control.h"

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
#include "tests/cluster/fake_coordinator.h"
#include "tests/worker/fake_shards.h"
#include "tests/worker/test_job.h"

#define JOB 5
#define EVALS_MAX 64

struct world {
    struct coordinator *c;
    struct control *control;
    struct test_job *job; /* for the shards, and the spec */
    struct fake_shards *shards;
    unsigned started, finished, failed, ended;
    uint64_t started_job, finished_step, ended_job, ended_generation, failed_job;
    char reason[TALLY_ERROR_MESSAGE_MAX];
    unsigned evals[EVALS_MAX]; /* by micro-batch: the first ones */
    unsigned eval_messages;
    uint64_t eval_steps[8];
    double eval_samples;
};

static void on_evals(struct world *w, const Tally__V1__Evals *evals)
{
    w->eval_steps[w->eval_messages++ % 8] = evals->step;
    for (size_t i = 0; i < evals->n_records; i++) {
        if (evals->records[i]->micro_batch < EVALS_MAX)
            w->evals[evals->records[i]->micro_batch]++;
        w->eval_samples += (double)evals->records[i]->samples;
    }
}

static void on_report(const Tally__V1__NodeMessage *message, void *user)
{
    struct world *w = user;
    switch (message->body_case) {
    case TALLY__V1__NODE_MESSAGE__BODY_STARTED:
        w->started++;
        w->started_job = message->started->job;
        break;
    case TALLY__V1__NODE_MESSAGE__BODY_EVALS:
        on_evals(w, message->evals);
        break;
    case TALLY__V1__NODE_MESSAGE__BODY_FINISHED:
        w->finished++;
        w->finished_step = message->finished->step;
        break;
    case TALLY__V1__NODE_MESSAGE__BODY_JOB_FAILED:
        w->failed++;
        w->failed_job = message->job_failed->job;
        snprintf(w->reason, sizeof w->reason, "%s", message->job_failed->reason);
        break;
    case TALLY__V1__NODE_MESSAGE__BODY_ENDED:
        w->ended++;
        w->ended_job = message->ended->job;
        w->ended_generation = message->ended->generation;
        break;
    default:
        fail_msg("a message of kind %d", (int)message->body_case);
    }
}

static bool is_registered(const void *user)
{
    return ((const struct world *)user)->c->stream != NULL && ((const struct world *)user)->c->beats > 0;
}

static bool has_started(const void *user)
{
    return ((const struct world *)user)->started > 0;
}

static bool has_finished(const void *user)
{
    return ((const struct world *)user)->finished > 0;
}

static bool has_failed(const void *user)
{
    return ((const struct world *)user)->failed > 0;
}

static bool has_ended(const void *user)
{
    return ((const struct world *)user)->ended > 0;
}

static bool has_waited(const void *user)
{
    return strstr(((const struct world *)user)->c->activity, "waits for slice") != NULL;
}

static bool has_gone(const void *user)
{
    return ((const struct world *)user)->c->open_streams == 0;
}

static void run_until(struct world *w, bool (*condition)(const void *user))
{
    if (!coordinator_run(w->c, condition, w, WAIT_MS))
        fail_msg("it did not come to that; failed: '%s', activity: '%s'", w->reason, w->c->activity);
}

/* 4.3 MB: runs on a thread of its own. */
static Tally__V1__JobSpec *large_spec(uint64_t steps)
{
    Tally__V1__JobSpec *spec = spec_new(9, 32, 32, 0, steps);
    spec_synthetic(spec, 0, 64, 3, (const uint32_t[]){1000}, 1, NULL, 0);
    spec_linear(spec, "a", 1070, true);
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_RELU);
    spec_linear(spec, "b", 3, true);
    spec_cross_entropy(spec, -100, 0);
    return spec;
}

/* Takes the spec. The worker is registered when this returns. */
static struct world *setup(Tally__V1__JobSpec *spec, enum shard_fault fault, uint64_t at_step)
{
    struct world *w = calloc(1, sizeof *w);
    assert_non_null(w);
    w->job = test_job_open(spec);
    struct fake_shards_options shards = {
        .job = JOB, .generation = 1, .workers = 1, .shards = 1, .fault = fault, .at_step = at_step};
    w->shards = fake_shards_start(w->job, &shards);
    w->c = coordinator_new(ANSWER_ACCEPT, true);
    w->c->lease_ms = 900;
    w->c->on_report = on_report;
    w->c->user = w;
    coordinator_serve(w->c);
    char listen[160];
    snprintf(listen, sizeof listen, "unix:%s/w0.sock", w->c->directory);
    struct control_options options = {
        .name = "w0", .listen = listen, .coordinator = w->c->address, .backend = "cpu", .join_timeout_ms = 5000};
    struct tally_error err;
    if (control_open(&w->c->loop, &options, &w->control, &err))
        fail_msg("%s", err.message);
    assert_string_equal(control_address(w->control), listen);
    run_until(w, is_registered);
    return w;
}

static void teardown(struct world *w)
{
    int64_t start = tally_now_ns();
    control_leave(w->control);
    control_leave(w->control); /* twice is allowed */
    run_until(w, has_gone);
    coordinator_free(w->c); /* runs the loop out: the control's handles are among those that end */
    assert_true(tally_now_ns() - start < INT64_C(3000000000));
    struct tally_error err;
    assert_int_equal(control_close(w->control, &err), TALLY_OK);
    fake_shards_stop(w->shards);
    test_job_close(w->job);
    free(w);
}

static void assign_from(struct world *w, uint64_t generation, const char *isa, uint64_t start_step)
{
    char *workers[] = {"w0"};
    Tally__V1__Gang gang = TALLY__V1__GANG__INIT;
    gang.data = gang.pipeline = gang.tensor = 1;
    gang.n_workers = gang.n_shards = 1;
    gang.workers = workers;
    gang.shards = (char **)fake_shards_names(w->shards);
    gang.isa = (char *)isa;
    Tally__V1__Assign a = TALLY__V1__ASSIGN__INIT;
    a.job = JOB;
    a.generation = generation;
    a.start_step = start_step;
    a.spec = w->job->spec;
    a.facts = &w->job->facts;
    a.gang = &gang;
    a.n_shard_addresses = 1;
    a.shard_addresses = (char **)fake_shards_addresses(w->shards);
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_ASSIGN;
    order.assign = &a;
    coordinator_send(w->c, &order);
}

static void assign(struct world *w, uint64_t generation, const char *isa)
{
    assign_from(w, generation, isa, 0);
}

static void end_job(struct world *w, uint64_t job, uint64_t generation)
{
    Tally__V1__EndJob end = TALLY__V1__END_JOB__INIT;
    end.job = job;
    end.generation = generation;
    end.reason = "the test ends it";
    Tally__V1__Order order = TALLY__V1__ORDER__INIT;
    order.body_case = TALLY__V1__ORDER__BODY_END_JOB;
    order.end_job = &end;
    coordinator_send(w->c, &order);
}

/* EndJob, and Ended within half a second. */
static void end_and_wait(struct world *w, uint64_t generation)
{
    int64_t start = tally_now_ns();
    w->ended = 0;
    end_job(w, JOB, generation);
    run_until(w, has_ended);
    assert_true(tally_now_ns() - start < 500000000);
    assert_int_equal(w->ended_job, JOB);
    assert_int_equal(w->ended_generation, generation);
}

static void test_runs_a_job(void **state)
{
    (void)state;
    struct world *w = setup(spec_small_job(7), SHARD_WELL, 0);
    assert_string_equal(w->c->name, "w0");
    assert_string_equal(w->c->backend, "cpu");
    assert_true(w->c->isa[0] != 0);
    assign(w, 1, "generic");
    run_until(w, has_finished);
    assert_int_equal(w->started, 1);
    assert_int_equal(w->started_job, JOB);
    assert_int_equal(w->finished_step, 7);
    /* Epochs of 3 steps: evaluated at 3, 6 and 7, 3 micro-batches each, 10 samples in all. */
    assert_int_equal(w->eval_messages, 3);
    assert_int_equal(w->eval_steps[0], 3);
    assert_int_equal(w->eval_steps[1], 6);
    assert_int_equal(w->eval_steps[2], 7);
    for (int i = 0; i < 3; i++)
        assert_int_equal(w->evals[i], 3);
    assert_true(w->eval_samples == 30);
    assert_int_equal(w->failed, 0);
    assert_int_equal(w->ended, 0);
    end_and_wait(w, 1);
    assert_int_equal(w->failed, 0);
    assert_int_equal(memory_hub_version(fake_shards_hub(w->shards)), 7);
    teardown(w);
}

/* A gang that takes over behind the last step has only its evaluation to do. */
static void test_starts_behind_the_last_step(void **state)
{
    (void)state;
    struct world *w = setup(spec_small_job(7), SHARD_WELL, 0);
    assign(w, 1, "");
    run_until(w, has_finished);
    end_and_wait(w, 1);
    w->started = w->finished = w->eval_messages = 0;
    assign_from(w, 1, "", 7);
    run_until(w, has_finished);
    assert_int_equal(w->started, 1);
    assert_int_equal(w->finished_step, 7);
    assert_int_equal(w->eval_messages, 1);
    assert_int_equal(w->eval_steps[0], 7);
    end_and_wait(w, 1);
    const uint64_t too_late[] = {8, UINT64_MAX};
    for (int i = 0; i < 2; i++) {
        w->failed = 0;
        assign_from(w, 1, "", too_late[i]);
        run_until(w, has_failed);
        assert_non_null(strstr(w->reason, "the job has 7 steps"));
        end_and_wait(w, 1);
    }
    teardown(w);
}

/* The data thread evaluates for seconds: the end of the job must reach it in between. */
static void test_ends_while_it_evaluates(void **state)
{
    (void)state;
    Tally__V1__JobSpec *spec = spec_new(9, 8, 4, 0, 1);
    spec_synthetic(spec, 0, 8, 3, (const uint32_t[]){2000}, 1, NULL, 0);
    spec_synthetic(spec, 1, 4000000, 3, (const uint32_t[]){2000}, 1, NULL, 0);
    spec_linear(spec, "a", 3, true);
    spec_cross_entropy(spec, -100, 0);
    struct world *w = setup(spec, SHARD_WELL, 0);
    assign(w, 1, "");
    run_until(w, has_started);
    usleep(100000);
    end_and_wait(w, 1);
    assert_int_equal(w->finished, 0);
    assert_int_equal(w->failed, 0);
    teardown(w);
}

static void test_runs_a_larger_job(void **state)
{
    (void)state;
    struct world *w = setup(large_spec(12), SHARD_WELL, 0);
    assign(w, 1, "");
    run_until(w, has_finished);
    assert_int_equal(w->finished_step, 12);
    end_and_wait(w, 1);
    teardown(w);
}

static void test_ends_in_the_middle(void **state)
{
    (void)state;
    for (int large = 0; large < 2; large++) {
        struct world *w = setup(large ? large_spec(1000000) : spec_small_job(1000000), SHARD_WELL, 0);
        assign(w, 1, "");
        run_until(w, has_started);
        usleep(20000);
        end_and_wait(w, 1);
        assert_int_equal(w->finished, 0);
        assert_int_equal(w->failed, 0);
        teardown(w);
    }
}

/* EndJob, or the worker's own end, at many moments between opening and the last step. */
static void test_ends_at_any_moment(void **state)
{
    (void)state;
    for (unsigned i = 0; i < 24; i++) {
        bool large = i % 2;
        struct world *w = setup(large ? large_spec(10) : spec_small_job(30), SHARD_WELL, 0);
        assign(w, 1, "");
        for (unsigned k = 0; k <= i % 3; k++) /* the order is on its way, or has arrived */
            uv_run(&w->c->loop, UV_RUN_NOWAIT);
        usleep(i * i * 40); /* 0 to 21 ms */
        if (i % 4 < 3)
            end_and_wait(w, 1);
        assert_int_equal(w->failed, 0);
        teardown(w);
    }
}

static void test_ends_while_it_waits(void **state)
{
    (void)state;
    for (int large = 0; large < 2; large++) {
        struct world *w = setup(large ? large_spec(100) : spec_small_job(100), SHARD_GOES_SILENT, 2);
        assign(w, 1, "");
        /* Heartbeats go on, and say what it waits for. */
        run_until(w, has_waited);
        assert_non_null(strstr(w->c->activity, "job 5, step 3: waits for slice"));
        assert_non_null(strstr(w->c->activity, "of version 2 from s0"));
        end_and_wait(w, 1);
        assert_int_equal(w->failed, 0);
        teardown(w);
    }
}

static void test_leaves_in_the_middle(void **state)
{
    (void)state;
    struct world *w = setup(spec_small_job(1000000), SHARD_WELL, 0);
    assign(w, 1, "");
    run_until(w, has_started);
    teardown(w);
}

static void test_ends_what_it_does_not_have(void **state)
{
    (void)state;
    struct world *w = setup(spec_small_job(5), SHARD_WELL, 0);
    end_job(w, 99, 2);
    run_until(w, has_ended);
    assert_int_equal(w->ended_job, 99);
    assert_int_equal(w->ended_generation, 2);
    teardown(w);
}

static void test_refused_push(void **state)
{
    (void)state;
    struct world *w = setup(spec_small_job(50), SHARD_REFUSES, 4);
    assign(w, 1, "");
    run_until(w, has_failed);
    assert_int_equal(w->failed_job, JOB);
    assert_non_null(strstr(w->reason, "s0 refused the gradient of slice 0 (a.weight .. b.bias) for step 4"));
    end_and_wait(w, 1);
    assert_int_equal(w->failed, 1);
    teardown(w);
}

static void test_lost_stream(void **state)
{
    (void)state;
    struct world *w = setup(large_spec(50), SHARD_ENDS, 4);
    assign(w, 1, "");
    run_until(w, has_failed);
    assert_non_null(strstr(w->reason, "the stream to s0 was lost at step"));
    end_and_wait(w, 1);
    teardown(w);
}

static void test_data_that_is_not_there(void **state)
{
    (void)state;
    struct world *w = setup(spec_small_job(50), SHARD_WELL, 0);
    spec_npy(w->job->spec, 0, "/nowhere/x.npy", "/nowhere/y.npy", 0);
    assign(w, 1, "");
    run_until(w, has_failed);
    assert_non_null(strstr(w->reason, "data.train: "));
    assert_non_null(strstr(w->reason, "/nowhere/"));
    end_and_wait(w, 1);
    teardown(w);
}

static void test_data_of_another_size(void **state)
{
    (void)state;
    struct world *w = setup(spec_small_job(50), SHARD_WELL, 0);
    w->job->facts.train_samples = 21;
    assign(w, 1, "");
    run_until(w, has_failed);
    assert_string_equal(w->reason, "data.train: 20 samples here, 21 when the job was submitted");
    teardown(w);
}

static void test_unknown_isa(void **state)
{
    (void)state;
    struct world *w = setup(spec_small_job(50), SHARD_WELL, 0);
    assign(w, 1, "sparc");
    run_until(w, has_failed);
    assert_non_null(strstr(w->reason, "sparc"));
    teardown(w);
}

/* The coordinator goes while a job runs: it is dropped without a word, and the worker comes back. */
static void test_lost_coordinator(void **state)
{
    (void)state;
    struct world *w = setup(spec_small_job(1000000), SHARD_WELL, 0);
    assign(w, 1, "");
    run_until(w, has_started);
    coordinator_unserve(w->c);
    assert_null(w->c->stream);
    w->c->beats = 0;
    coordinator_serve(w->c);
    run_until(w, is_registered);
    assert_int_equal(w->c->registers, 2);
    assert_int_equal(w->failed + w->finished + w->ended, 0);
    assert_string_equal(w->c->activity, "waits for a job");
    teardown(w);
}

/* A later generation takes the place of the one that runs, without an EndJob. */
static void test_later_generation(void **state)
{
    (void)state;
    struct world *w = setup(spec_small_job(1000000), SHARD_GOES_SILENT, 1000);
    assign(w, 1, "");
    run_until(w, has_started);
    assign(w, 2, "");
    run_until(w, has_failed); /* these shards know generation 1 alone */
    assert_int_equal(w->failed_job, JOB);
    end_and_wait(w, 2);
    teardown(w);
}

static void test_unknown_backend(void **state)
{
    (void)state;
    uv_loop_t loop;
    assert_int_equal(uv_loop_init(&loop), 0);
    struct control_options options = {
        .name = "w0", .listen = "unix:/tmp/x", .coordinator = "unix:/tmp/y", .backend = "abacus"};
    struct control *control;
    struct tally_error err;
    assert_int_equal(control_open(&loop, &options, &control, &err), TALLY_EUNSUPPORTED);
    assert_string_equal(err.message, "no backend named abacus in this build");
    options.backend = "cpu";
    options.listen = "unix:/no/such/directory/w0.sock";
    assert_true(control_open(&loop, &options, &control, &err) != TALLY_OK);
    assert_non_null(strstr(err.message, "/no/such/directory"));
    options.listen = "unix:/tmp/tally-control-test.sock";
    options.coordinator = "nonsense";
    assert_int_equal(control_open(&loop, &options, &control, &err), TALLY_EINVAL);
    assert_int_equal(uv_loop_close(&loop), 0);
}

static bool has_tried(const void *user)
{
    return ((const struct world *)user)->c->registers > 0;
}

static void test_refused(void **state)
{
    (void)state;
    struct world w = {.c = coordinator_new(ANSWER_REFUSE, true)};
    w.c->refusal = "a worker named w0 is there already";
    coordinator_serve(w.c);
    char listen[160];
    snprintf(listen, sizeof listen, "unix:%s/w0.sock", w.c->directory);
    struct control_options options = {.name = "w0", .listen = listen, .coordinator = w.c->address, .backend = "cpu"};
    struct control *control;
    struct tally_error err;
    if (control_open(&w.c->loop, &options, &control, &err))
        fail_msg("%s", err.message);
    assert_true(coordinator_run(w.c, has_tried, &w, WAIT_MS));
    coordinator_free(w.c); /* the control leaves by itself */
    assert_int_equal(control_close(control, &err), TALLY_ESTATE);
    assert_non_null(strstr(err.message, "a worker named w0 is there already"));
}

int main(void)
{
    rpc_global_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_runs_a_job),
        cmocka_unit_test(test_starts_behind_the_last_step),
        cmocka_unit_test(test_ends_while_it_evaluates),
        cmocka_unit_test(test_runs_a_larger_job),
        cmocka_unit_test(test_ends_in_the_middle),
        cmocka_unit_test(test_ends_at_any_moment),
        cmocka_unit_test(test_ends_while_it_waits),
        cmocka_unit_test(test_leaves_in_the_middle),
        cmocka_unit_test(test_ends_what_it_does_not_have),
        cmocka_unit_test(test_refused_push),
        cmocka_unit_test(test_lost_stream),
        cmocka_unit_test(test_data_that_is_not_there),
        cmocka_unit_test(test_data_of_another_size),
        cmocka_unit_test(test_unknown_isa),
        cmocka_unit_test(test_lost_coordinator),
        cmocka_unit_test(test_later_generation),
        cmocka_unit_test(test_unknown_backend),
        cmocka_unit_test(test_refused),
    };
    int failed = cmocka_run_group_tests(tests, NULL, NULL);
    rpc_global_shutdown();
    return failed;
}
