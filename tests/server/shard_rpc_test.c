/* A shard over RPC: what workers and coordinators may do to it, and what it answers. */
#include "tests/server/shard_rig.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/limits.h"
#include "model/batches.h"
#include "model/init.h"

#define STEPS 5

static struct rig rig;

/* Two slices of the first weight, one for the rest; steps of 4 micro-batches and of 3 in turn. */
static const struct rig_job plain = {.id = 1,
                                     .generation = 1,
                                     .workers = 3,
                                     .shards = 1,
                                     .inputs = 700,
                                     .widths = {500, 10},
                                     .layers = 2,
                                     .samples = 7,
                                     .steps = STEPS,
                                     .batch = 4,
                                     .lr = 0.05,
                                     .momentum = 0.9};

static struct rig_job job_with(uint64_t id)
{
    struct rig_job job = plain;
    job.id = id;
    return job;
}

static uint32_t leaves_of(uint64_t step)
{
    return step % 2 == 1 ? 4 : 3;
}

static uint64_t random_state = 1;

static uint32_t random_below(size_t n)
{
    random_state = rig_mix(random_state);
    return (uint32_t)(random_state >> 33) % (uint32_t)n;
}

static int open_rig(void **state)
{
    (void)state;
    rig_open(&rig);
    return 0;
}

static int close_rig(void **state)
{
    (void)state;
    rig_close(&rig);
    return 0;
}

/* One worker, one push a slice, in order. */
static void run_clean(struct rig_stream *s, const struct model *model, uint64_t from, uint64_t to)
{
    uint32_t slices = (uint32_t)model->slice_count;
    for (uint64_t step = from; step <= to; step++) {
        for (uint32_t slice = slices; slice-- > 0;)
            rig_push(s, step, (struct tree_node){0, leaves_of(step)}, slice);
        rig_wait_version(s, 0, slices, step);
    }
}

static float *fetched(uint64_t job, uint64_t version, const struct model *model)
{
    float *weights = calloc(model->flat_count, sizeof *weights);
    uint32_t slices;
    struct tally_error err;
    assert_non_null(weights);
    if (rig_fetch(&rig, job, version, weights, model->flat_count, &slices, &err) != TALLY_OK)
        fail_msg("%s", err.message);
    assert_int_equal(slices, model->slice_count);
    return weights;
}

static void assert_same_weights(uint64_t job, uint64_t other, uint64_t version, const struct model *model)
{
    float *a = fetched(job, version, model), *b = fetched(other, version, model);
    assert_memory_equal(a, b, model->flat_count * sizeof *a);
    free(a);
    free(b);
}

/* ---- the plain way ---- */

static void test_opens_and_sends_first_weights(void **state)
{
    (void)state;
    struct model *model = rig_open_job(&rig, &plain);
    assert_int_equal(rig.opened_step, 0);
    assert_int_equal(model->slice_count, 3);
    static struct rig_stream s;
    rig_stream_open(&rig, &s, model, 64);
    rig_hello(&s, 1, 1, 0, TALLY_PROTOCOL_MAJOR);
    rig_wait_version(&s, 0, 3, 0);
    float *expected = calloc(model->flat_count, sizeof *expected);
    assert_int_equal(init_weights(model, 0, model->flat_count, expected, NULL), TALLY_OK);
    assert_memory_equal(s.weights, expected, model->flat_count * sizeof *expected);
    float *kept = fetched(1, 0, model);
    assert_memory_equal(kept, expected, model->flat_count * sizeof *expected);
    free(kept);
    free(expected);

    run_clean(&s, model, 1, STEPS);
    assert_int_equal(s.updates, 3 * (STEPS + 1));
    assert_int_equal(s.refusals, 0);
    kept = fetched(1, STEPS, model);
    assert_memory_equal(s.weights, kept, model->flat_count * sizeof *kept);
    free(kept);
    rig_run_ms(&rig, 150);
    assert_int_equal(rig.step_count, STEPS);
    for (uint64_t step = 1; step <= STEPS; step++) {
        const Tally__V1__StepRecord *record = &rig.steps[step - 1];
        struct tree_node root = {0, leaves_of(step)};
        assert_int_equal(record->step, step);
        assert_true(record->weight == rig_weight(step, root) && record->loss_sum == rig_loss(step, root));
        assert_true(record->correct == rig_weight(step, root) / 2);
        assert_true(record->mono_us > 0 && record->unix_ms > 0);
    }
    Tally__V1__HoldingReply holding;
    assert_int_equal(rig_holding(&rig, 1, &holding, NULL), TALLY_OK);
    assert_int_equal(holding.version, STEPS);
    assert_int_equal(holding.oldest_version, STEPS - 1);
    assert_int_equal(holding.generation, 1);
    assert_int_equal(holding.parameter_bytes, model->flat_count * sizeof(float));
    assert_int_equal(holding.pushes_applied, 3 * STEPS);
    assert_int_equal(holding.pushes_repeated + holding.pushes_refused, 0);
    char activity[256];
    shard_activity(rig.shard, activity, sizeof activity);
    rig_run_ms(&rig, 50);
    shard_activity(rig.shard, activity, sizeof activity);
    assert_string_equal(activity, "job 1, all 5 steps are applied");
    rig_stream_close(&s);
    assert_int_equal(s.end.code, TALLY_OK);
    rig_end_job(&rig, 1, 1);
    model_free(model);
}

/* A model in two parts, of which each is held on its own, gives the same bits. */
static void test_parts(void **state)
{
    (void)state;
    struct rig_job whole = job_with(1), first = job_with(2), second = job_with(3);
    first.shards = second.shards = 2;
    second.shard = 1;
    struct model *model = rig_open_job(&rig, &whole), *same = rig_open_job(&rig, &first);
    model_free(same);
    same = rig_open_job(&rig, &second);
    model_free(same);
    static struct rig_stream s, part[2];
    uint32_t middle, slices = (uint32_t)model->slice_count, begin;
    model_shard_slices(model, 2, 0, &begin, &middle);
    assert_true(begin == 0 && middle > 0 && middle < slices);
    rig_stream_open(&rig, &s, model, 64);
    rig_hello(&s, 1, 1, 0, TALLY_PROTOCOL_MAJOR);
    rig_wait_version(&s, 0, slices, 0);
    run_clean(&s, model, 1, STEPS);
    for (uint32_t p = 0; p < 2; p++) {
        rig_stream_open(&rig, &part[p], model, 64);
        rig_hello(&part[p], 2 + p, 1, 0, TALLY_PROTOCOL_MAJOR);
        rig_wait_version(&part[p], p ? middle : 0, p ? slices : middle, 0);
    }
    for (uint64_t step = 1; step <= STEPS; step++)
        for (uint32_t p = 0; p < 2; p++) {
            for (uint32_t slice = p ? middle : 0; slice < (p ? slices : middle); slice++)
                rig_push(&part[p], step, (struct tree_node){0, leaves_of(step)}, slice);
            rig_wait_version(&part[p], p ? middle : 0, p ? slices : middle, step);
        }
    size_t cut = model->slices[middle].offset;
    assert_memory_equal(s.weights, part[0].weights, cut * sizeof(float));
    assert_memory_equal(s.weights + cut, part[1].weights + cut, (model->flat_count - cut) * sizeof(float));
    rig_push(&part[1], 1, (struct tree_node){0, 1}, 0);
    rig_wait_refusals(&part[1], 1);
    assert_int_equal(part[1].last_code, TALLY__V1__REFUSAL__CODE__WRONG_SLICE);
    for (uint32_t p = 0; p < 2; p++) {
        rig_stream_close(&part[p]);
        rig_end_job(&rig, 2 + p, 1);
    }
    rig_stream_close(&s);
    rig_end_job(&rig, 1, 1);
    model_free(model);
}

/* More shards than slices: some have none, and are never in the way. */
static void test_part_without_slices(void **state)
{
    (void)state;
    struct rig_job job = job_with(1);
    job.shards = 5;
    struct model *model = NULL;
    for (job.shard = 0; job.shard < 5; job.shard++) {
        uint32_t begin, end, count;
        model_free(model);
        model = rig_open_job(&rig, &job);
        model_shard_slices(model, 5, job.shard, &begin, &end);
        Tally__V1__HoldingReply holding;
        assert_int_equal(rig_holding(&rig, 1, &holding, NULL), TALLY_OK);
        assert_int_equal(holding.version, begin == end ? STEPS : 0);
        assert_int_equal(rig.opened_step, 0);
        float *weights = calloc(model->flat_count, sizeof *weights);
        assert_int_equal(rig_fetch(&rig, 1, 0, weights, model->flat_count, &count, NULL), TALLY_OK);
        assert_int_equal(count, end - begin);
        free(weights);
        rig_end_job(&rig, 1, 1);
    }
    model_free(model);
}

/* ---- repeated, reordered, stale, partial ---- */

struct task {
    struct tree_node node;
    uint32_t slice, stream;
};

static size_t list_tasks(uint64_t step, uint32_t slices, struct task *tasks)
{
    size_t count = 0;
    for (uint32_t rank = 0; rank < 3; rank++) {
        struct tree_node share = tree_share(leaves_of(step), rank, 3), cover[TREE_COVER_MAX];
        size_t nodes = tree_cover(leaves_of(step), share.begin, share.end, cover);
        for (size_t i = 0; i < nodes; i++)
            for (uint32_t slice = 0; slice < slices; slice++)
                tasks[count++] = (struct task){cover[i], slice, rank};
    }
    for (size_t i = count; i > 1; i--) {
        size_t j = random_below(i);
        struct task other = tasks[j];
        tasks[j] = tasks[i - 1];
        tasks[i - 1] = other;
    }
    return count;
}

/* Refusals that the noise will bring for sure, and those that it will unless the slice's step has been applied. */
struct noise {
    unsigned sure, maybe;
};

static void push_noise(struct rig_stream *s, uint64_t step, const struct task *task, struct noise *noise)
{
    struct tree_node leaf = {task->node.begin, task->node.begin + 1};
    Tally__V1__Push push = TALLY__V1__PUSH__INIT;
    push.job = s->job;
    push.generation = s->generation;
    push.step = step;
    push.leaf_begin = task->node.begin;
    push.leaf_end = task->node.end;
    push.slice = task->slice;
    push.weight = rig_weight(step, task->node);
    switch (random_below(7)) {
    case 0: /* part of what will come */
        rig_push(s, step, leaf, task->slice);
        break;
    case 1: /* what came in the step before */
        if (step > 1)
            rig_push(s, step - 1, leaf, task->slice);
        break;
    case 2: /* too early */
        rig_push(s, step + 2, leaf, task->slice);
        noise->sure++;
        break;
    case 3: /* too short */
        push.leaf_end = push.leaf_begin + 1;
        push.weight = rig_weight(step, leaf);
        rig_push_raw(s, &push, 10);
        noise->maybe++;
        break;
    case 4:
        push.generation--;
        rig_push_raw(s, &push, 0);
        noise->sure++;
        break;
    case 5:
        push.slice = 99;
        rig_push_raw(s, &push, 4);
        noise->sure++;
        break;
    default:
        break;
    }
}

static void test_messy_equals_clean(void **state)
{
    (void)state;
    struct rig_job clean_job = job_with(1), messy_job = job_with(2);
    struct model *model = rig_open_job(&rig, &clean_job), *same = rig_open_job(&rig, &messy_job);
    model_free(same);
    uint32_t slices = (uint32_t)model->slice_count;
    static struct rig_stream clean, messy[3];
    rig_stream_open(&rig, &clean, model, 64);
    rig_hello(&clean, 1, 1, 0, TALLY_PROTOCOL_MAJOR);
    for (uint32_t r = 0; r < 3; r++) {
        rig_stream_open(&rig, &messy[r], model, 64);
        rig_hello(&messy[r], 2, 1, r, TALLY_PROTOCOL_MAJOR);
        rig_wait_version(&messy[r], 0, slices, 0);
    }
    struct noise noise = {0};
    for (uint64_t step = 1; step <= STEPS; step++) {
        struct task tasks[32];
        size_t count = list_tasks(step, slices, tasks);
        for (size_t i = 0; i < count; i++) {
            const struct task *task = &tasks[i];
            for (int n = 0; n < 3; n++)
                push_noise(&messy[task->stream], step, task, &noise);
            rig_push(&messy[task->stream], step, task->node, task->slice);
            if (random_below(3) == 0) /* the same from another worker as well */
                rig_push(&messy[random_below(3)], step, task->node, task->slice);
        }
        run_clean(&clean, model, step, step);
        for (uint32_t r = 0; r < 3; r++)
            rig_wait_version(&messy[r], 0, slices, step);
        assert_same_weights(1, 2, step, model);
        assert_same_weights(1, 2, step - 1, model);
    }
    uint64_t refused = 0;
    for (uint32_t r = 0; r < 3; r++) {
        assert_memory_equal(messy[r].weights, clean.weights, model->flat_count * sizeof(float));
        refused += messy[r].refusals;
        rig_stream_close(&messy[r]);
    }
    assert_true(noise.sure > 20 && noise.maybe > 0);
    Tally__V1__HoldingReply holding;
    assert_int_equal(rig_holding(&rig, 2, &holding, NULL), TALLY_OK);
    assert_in_range(holding.pushes_refused, noise.sure, noise.sure + noise.maybe);
    assert_true(holding.pushes_repeated > 0);
    assert_int_equal(holding.pushes_refused, refused);
    rig_stream_close(&clean);
    rig_end_job(&rig, 2, 1);
    rig_end_job(&rig, 1, 1);
    model_free(model);
}

static void test_every_refusal_says_why(void **state)
{
    (void)state;
    struct rig_job job = job_with(1);
    job.generation = 3;
    struct model *model = rig_open_job(&rig, &job);
    static struct rig_stream s;
    rig_stream_open(&rig, &s, model, 64);
    rig_hello(&s, 1, 3, 1, TALLY_PROTOCOL_MAJOR);
    rig_wait_version(&s, 0, 3, 0);
    Tally__V1__Push good = TALLY__V1__PUSH__INIT;
    good.job = 1;
    good.generation = 3;
    good.step = 1;
    good.leaf_end = 2;
    good.slice = 2;
    good.weight = 1;
    struct {
        Tally__V1__Push push;
        Tally__V1__Refusal__Code code;
        const char *says;
    } cases[] = {
        {good, TALLY__V1__REFUSAL__CODE__NO_SUCH_JOB, "a push of job 9 on a stream of job 1"},
        {good, TALLY__V1__REFUSAL__CODE__OLD_GENERATION, "generation 2"},
        {good, TALLY__V1__REFUSAL__CODE__WRONG_STEP, "step 3"},
        {good, TALLY__V1__REFUSAL__CODE__NOT_A_NODE, "[1, 3)"},
        {good, TALLY__V1__REFUSAL__CODE__WRONG_SLICE, "slice 3"},
        {good, TALLY__V1__REFUSAL__CODE__WRONG_SIZE, "12 bytes"},
    };
    cases[0].push.job = 9;
    cases[1].push.generation = 2;
    cases[2].push.step = 3;
    cases[3].push.leaf_begin = 1;
    cases[3].push.leaf_end = 3;
    cases[4].push.slice = 3;
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        rig_push_raw(&s, &cases[i].push, 12);
        rig_wait_refusals(&s, i + 1);
        assert_int_equal(s.last_code, cases[i].code);
        if (!strstr(s.last_reason, cases[i].says))
            fail_msg("\"%s\" does not say \"%s\"", s.last_reason, cases[i].says);
        assert_int_equal(s.last_step, cases[i].push.step);
        assert_int_equal(s.last_leaf_begin, cases[i].push.leaf_begin);
        assert_int_equal(s.last_leaf_end, cases[i].push.leaf_end);
        assert_int_equal(s.last_slice, cases[i].push.slice);
    }
    good.weight = -1;
    rig_push_raw(&s, &good, model->slices[2].count * sizeof(float));
    rig_wait_refusals(&s, 7);
    assert_int_equal(s.last_code, TALLY__V1__REFUSAL__CODE__WRONG_WEIGHT);
    /* And on it goes. */
    run_clean(&s, model, 1, 1);
    /* More of them than there are credits, from a worker that reads none for a while. */
    s.grant = 0;
    rig_run_ms(&rig, 20);
    cases[5].push.step = 2;
    for (int i = 0; i < 200; i++)
        rig_push_raw(&s, &cases[5].push, 13);
    rig_run_ms(&rig, 50);
    rpc_stream_grant(s.stream, 100000);
    s.grant = 1;
    rig_wait_refusals(&s, 207);
    run_clean(&s, model, 2, 2);
    rig_stream_close(&s);
    rig_end_job(&rig, 1, 3);
    model_free(model);
}

/* ---- Hello ---- */

static void expect_refused_stream(uint64_t job, uint64_t generation, uint32_t rank, uint32_t major, tally_status code,
                                  const char *says)
{
    static struct rig_stream s;
    rig_stream_open(&rig, &s, NULL, 4);
    rig_hello(&s, job, generation, rank, major);
    rig_wait_end(&s);
    assert_int_equal(s.end.code, code);
    if (!strstr(s.end.message, says))
        fail_msg("\"%s\" does not say \"%s\"", s.end.message, says);
    rig_stream_close(&s);
}

static void test_hello(void **state)
{
    (void)state;
    struct rig_job job = job_with(1);
    job.generation = 2;
    struct model *model = rig_open_job(&rig, &job);
    expect_refused_stream(1, 2, 0, 7, TALLY_ESTATE, "w0 speaks protocol 7.0, this shard speaks 1.0");
    expect_refused_stream(8, 2, 0, TALLY_PROTOCOL_MAJOR, TALLY_ENOTFOUND, "holds no job 8");
    expect_refused_stream(1, 1, 0, TALLY_PROTOCOL_MAJOR, TALLY_ESTATE, "is at generation 2");
    expect_refused_stream(1, 3, 0, TALLY_PROTOCOL_MAJOR, TALLY_ESTATE, "is at generation 2");
    expect_refused_stream(1, 2, 3, TALLY_PROTOCOL_MAJOR, TALLY_EINVAL, "rank 3 in a gang of 3");

    static struct rig_stream s, newer;
    rig_stream_open(&rig, &s, model, 4); /* a push where the Hello should be */
    s.job = 1;
    s.generation = 2;
    rig_push(&s, 1, (struct tree_node){0, 4}, 2);
    rig_wait_end(&s);
    assert_int_equal(s.end.code, TALLY_EINVAL);
    rig_stream_close(&s);

    rig_stream_open(&rig, &s, model, 4); /* two of them */
    rig_hello(&s, 1, 2, 0, TALLY_PROTOCOL_MAJOR);
    rig_hello(&s, 1, 2, 0, TALLY_PROTOCOL_MAJOR);
    rig_wait_end(&s);
    assert_int_equal(s.end.code, TALLY_EINVAL);
    assert_non_null(strstr(s.end.message, "second Hello"));
    rig_stream_close(&s);

    /* A worker that came again takes its own place. */
    rig_stream_open(&rig, &s, model, 64);
    rig_hello(&s, 1, 2, 0, TALLY_PROTOCOL_MAJOR);
    rig_wait_version(&s, 0, 3, 0);
    rig_stream_open(&rig, &newer, model, 64);
    rig_hello(&newer, 1, 2, 0, TALLY_PROTOCOL_MAJOR);
    rig_wait_end(&s);
    assert_int_equal(s.end.code, TALLY_ECANCELLED);
    assert_non_null(strstr(s.end.message, "newer stream"));
    rig_wait_version(&newer, 0, 3, 0);
    run_clean(&newer, model, 1, 2);
    rig_stream_close(&s);
    rig_stream_close(&newer);
    rig_end_job(&rig, 1, 2);
    model_free(model);
}

/* A stage's worker is sent its own slices alone, at first and later. */
static void test_hello_for_some_slices(void **state)
{
    (void)state;
    struct rig_job job = job_with(1);
    struct model *model = rig_open_job(&rig, &job);
    static const uint32_t wanted[2][2] = {{1, 2}, {2, 3}}, beyond[2] = {2, 9}, empty[2] = {1, 1},
                          mixed[4] = {2, 3, 0, 1};
    static struct rig_stream all, one, two;
    rig_stream_open(&rig, &all, model, 64);
    rig_hello(&all, 1, 1, 0, TALLY_PROTOCOL_MAJOR);
    rig_stream_open(&rig, &one, model, 64);
    rig_hello_for(&one, 1, 1, 1, wanted[0], 1);
    rig_stream_open(&rig, &two, model, 64); /* of other shards there may be more */
    rig_hello_for(&two, 1, 1, 2, beyond, 1);
    rig_wait_version(&all, 0, 3, 0);
    run_clean(&all, model, 1, STEPS);
    rig_wait_version(&one, 1, 2, STEPS);
    rig_wait_version(&two, 2, 3, STEPS);
    assert_int_equal(one.updates, STEPS + 1);
    assert_int_equal(two.updates, STEPS + 1);
    assert_int_equal(one.versions[0] + one.versions[2] + two.versions[0] + two.versions[1], 0);
    assert_memory_equal(one.weights + model->slices[1].offset, all.weights + model->slices[1].offset,
                        model->slices[1].count * sizeof *all.weights);
    rig_stream_close(&one);
    rig_stream_close(&two);
    const struct {
        const uint32_t *range;
        size_t count;
    } wrong[2] = {{empty, 1}, {mixed, 2}};
    for (size_t i = 0; i < 2; i++) {
        rig_stream_open(&rig, &one, model, 64);
        rig_hello_for(&one, 1, 1, 1, wrong[i].range, wrong[i].count);
        rig_wait_end(&one);
        assert_int_equal(one.end.code, TALLY_EINVAL);
        assert_non_null(strstr(one.end.message, "empty or out of order"));
        rig_stream_close(&one);
    }
    rig_stream_close(&all);
    rig_end_job(&rig, 1, 1);
    model_free(model);
}

/* ---- streams that die, or do not read ---- */

static void test_stream_dies_mid_push(void **state)
{
    (void)state;
    struct rig_job clean_job = job_with(1), other_job = job_with(2);
    struct model *model = rig_open_job(&rig, &clean_job), *same = rig_open_job(&rig, &other_job);
    model_free(same);
    static struct rig_stream clean, s;
    rig_stream_open(&rig, &clean, model, 64);
    rig_hello(&clean, 1, 1, 0, TALLY_PROTOCOL_MAJOR);
    run_clean(&clean, model, 1, STEPS);
    for (uint64_t step = 1; step <= STEPS; step++) {
        /* One worker gives up somewhere in the step, at another point each time; the next one repeats the whole step.
         */
        for (int life = 0; life < 2; life++) {
            rig_stream_open(&rig, &s, model, 64);
            rig_hello(&s, 2, 1, 0, TALLY_PROTOCOL_MAJOR);
            rig_wait_version(&s, 0, 3, step - 1);
            if (life == 0) {
                for (uint32_t slice = 0; slice < 3; slice++)
                    rig_push(&s, step, (struct tree_node){0, 2}, slice);
                rig_run_ms(&rig, (int64_t)step - 1);
                rpc_stream_cancel(s.stream);
            } else {
                run_clean(&s, model, step, step);
            }
            rig_stream_close(&s);
        }
    }
    assert_same_weights(1, 2, STEPS, model);
    assert_same_weights(1, 2, STEPS - 1, model);
    rig_stream_close(&clean);
    rig_end_job(&rig, 2, 1);
    rig_end_job(&rig, 1, 1);
    model_free(model);
}

/* A worker that reads nothing holds the buffers of the weights that are on their way to it; the others wait, nothing is
 * lost, and it is sent what is newest when it reads again. */
static void test_slow_reader(void **state)
{
    (void)state;
    struct rig_job clean_job = job_with(1), slow_job = job_with(2);
    clean_job.widths[0] = slow_job.widths[0] = 4000; /* more than a connection's buffers hold */
    struct model *model = rig_open_job(&rig, &clean_job), *same = rig_open_job(&rig, &slow_job);
    model_free(same);
    uint32_t slices = (uint32_t)model->slice_count;
    static struct rig_stream clean, fast, slow;
    rig_stream_open(&rig, &clean, model, 64);
    rig_hello(&clean, 1, 1, 0, TALLY_PROTOCOL_MAJOR);
    run_clean(&clean, model, 1, 4);
    rig_stream_open(&rig, &fast, model, 64);
    rig_hello(&fast, 2, 1, 0, TALLY_PROTOCOL_MAJOR);
    rig_stream_open_alone(&rig, &slow, model, 1);
    slow.grant = 0;
    rig_hello(&slow, 2, 1, 1, TALLY_PROTOCOL_MAJOR);
    rig_wait_version(&fast, 0, slices, 0);
    run_clean(&fast, model, 1, 1);
    for (uint32_t slice = 0; slice < slices; slice++) /* goes where version 0 is, which the slow one has not read */
        rig_push(&fast, 2, (struct tree_node){0, leaves_of(2)}, slice);
    rig_run_ms(&rig, 200);
    Tally__V1__HoldingReply holding;
    assert_int_equal(rig_holding(&rig, 2, &holding, NULL), TALLY_OK);
    assert_int_equal(holding.version, 1);
    assert_true(slow.updates < slices);
    char activity[256];
    shard_activity(rig.shard, activity, sizeof activity);
    rig_run_ms(&rig, 50);
    shard_activity(rig.shard, activity, sizeof activity);
    assert_non_null(strstr(activity, "of its older weights to end"));
    slow.grant = 1;
    rpc_stream_grant(slow.stream, 1);
    rig_wait_version(&fast, 0, slices, 2);
    run_clean(&fast, model, 3, 4);
    rig_wait_version(&slow, 0, slices, 4);
    assert_memory_equal(fast.weights, clean.weights, model->flat_count * sizeof(float));
    assert_memory_equal(slow.weights, clean.weights, model->flat_count * sizeof(float));
    /* A job ends although somebody does not read. */
    slow.grant = 0;
    rig_end_job(&rig, 2, 1);
    rig_wait_end(&fast);
    rig_stream_close(&fast);
    rpc_stream_cancel(slow.stream);
    rig_stream_close(&slow);
    rig_stream_close(&clean);
    rig_end_job(&rig, 1, 1);
    model_free(model);
}

/* ---- Fetch ---- */

static void test_fetch_says_what_is_held(void **state)
{
    (void)state;
    struct model *model = rig_open_job(&rig, &plain);
    static struct rig_stream s;
    struct tally_error err;
    uint32_t slices;
    float *weights = calloc(model->flat_count, sizeof *weights);
    rig_stream_open(&rig, &s, model, 64);
    rig_hello(&s, 1, 1, 0, TALLY_PROTOCOL_MAJOR);
    run_clean(&s, model, 1, 3);
    for (uint64_t version = 0; version < 6; version++) {
        bool held = version == 2 || version == 3;
        tally_status status = rig_fetch(&rig, 1, version, weights, model->flat_count, &slices, &err);
        assert_int_equal(status, held ? TALLY_OK : TALLY_ESTATE);
        assert_int_equal(slices, held ? model->slice_count : 0);
        if (!held)
            assert_non_null(strstr(err.message, "versions 2 to 3 are"));
    }
    /* Half of a step: one version is everywhere. */
    rig_push(&s, 4, (struct tree_node){0, 3}, 1);
    rig_wait_version(&s, 1, 2, 4);
    Tally__V1__HoldingReply holding;
    assert_int_equal(rig_holding(&rig, 1, &holding, NULL), TALLY_OK);
    assert_int_equal(holding.version, 3);
    assert_int_equal(holding.oldest_version, 3);
    assert_int_equal(rig_fetch(&rig, 1, 3, weights, model->flat_count, &slices, &err), TALLY_OK);
    assert_int_equal(rig_fetch(&rig, 1, 4, weights, model->flat_count, &slices, &err), TALLY_ESTATE);
    assert_int_equal(rig_fetch(&rig, 2, 3, weights, model->flat_count, &slices, &err), TALLY_ENOTFOUND);
    assert_int_equal(rig_holding(&rig, 2, &holding, &err), TALLY_ENOTFOUND);
    rig_stream_close(&s);
    rig_end_job(&rig, 1, 1);
    free(weights);
    model_free(model);
}

static bool at_version(void *user)
{
    Tally__V1__HoldingReply holding;
    assert_int_equal(rig_holding(&rig, 1, &holding, NULL), TALLY_OK);
    return holding.version == *(const uint64_t *)user;
}

/* Whoever fetches and does not read holds a job up for some seconds, and does not end it. */
static void test_fetch_that_does_not_read(void **state)
{
    (void)state;
    struct rig_job job = job_with(1);
    job.widths[0] = 4000; /* more than a connection's buffers hold */
    struct model *model = rig_open_job(&rig, &job);
    static struct rig_stream s;
    static struct rig_fetch fetch;
    rig_stream_open(&rig, &s, model, 64);
    rig_hello(&s, 1, 1, 0, TALLY_PROTOCOL_MAJOR);
    rig_wait_version(&s, 0, (uint32_t)model->slice_count, 0);
    struct rpc_channel *channel = rig_fetch_start(&rig, &fetch, 1, 0);
    rig_run_ms(&rig, 100);
    run_clean(&s, model, 1, 1);
    for (uint32_t slice = 0; slice < model->slice_count; slice++) /* goes where version 0 is */
        rig_push(&s, 2, (struct tree_node){0, leaves_of(2)}, slice);
    rig_run_ms(&rig, 500);
    uint64_t held_up = 1, gone_on = 2;
    assert_true(at_version(&held_up));
    rig_wait(&rig, at_version, &gone_on, "a fetch that reads nothing to be cut");
    assert_int_equal(rig.failed, 0);
    rpc_stream_cancel(fetch.stream);
    rig_wait(&rig, rig_fetch_ended, &fetch, "its end");
    run_clean(&s, model, 3, 3);
    rig_stream_close(&s);
    rpc_channel_free(channel);
    rig_end_job(&rig, 1, 1);
    model_free(model);
}

/* ---- orders ---- */

static void test_generations(void **state)
{
    (void)state;
    struct rig_job job = job_with(1), clean_job = job_with(2);
    struct model *model = rig_open_job(&rig, &clean_job), *same = rig_open_job(&rig, &job);
    model_free(same);
    static struct rig_stream clean, s, next;
    rig_stream_open(&rig, &clean, model, 64);
    rig_hello(&clean, 2, 1, 0, TALLY_PROTOCOL_MAJOR);
    run_clean(&clean, model, 1, STEPS);
    rig_stream_open(&rig, &s, model, 64);
    rig_hello(&s, 1, 1, 0, TALLY_PROTOCOL_MAJOR);
    run_clean(&s, model, 1, 2);
    rig_push(&s, 3, (struct tree_node){0, 2}, 0); /* part of a step */
    rig_push(&s, 3, (struct tree_node){0, 4}, 1); /* and one slice of it */
    rig_wait_version(&s, 1, 2, 3);
    /* The next gang finds the weights, and the old one's streams are told. */
    job.generation = 2;
    same = rig_open_job(&rig, &job);
    model_free(same);
    assert_int_equal(rig.opened_step, 2);
    rig_wait_end(&s);
    assert_non_null(strstr(s.end.message, "later generation"));
    rig_stream_close(&s);
    rig_stream_open(&rig, &next, model, 64);
    rig_hello(&next, 1, 2, 0, TALLY_PROTOCOL_MAJOR);
    rig_wait_version(&next, 0, 3, 2);
    run_clean(&next, model, 3, STEPS);
    assert_memory_equal(next.weights, clean.weights, model->flat_count * sizeof(float));
    /* An order of an older generation changes nothing. */
    job.generation = 1;
    rig_order_open(&rig, &job);
    rig_run_ms(&rig, 300);
    assert_int_equal(rig.failed, 1);
    assert_non_null(strstr(rig.failure, "later generation"));
    rig_end_job(&rig, 1, 1);
    Tally__V1__HoldingReply holding;
    assert_int_equal(rig_holding(&rig, 1, &holding, NULL), TALLY_OK);
    assert_int_equal(holding.generation, 2);
    rig_stream_close(&next);
    rig_stream_close(&clean);
    rig_end_job(&rig, 1, 2);
    rig_end_job(&rig, 2, 1);
    model_free(model);
}

static void test_end_and_loss(void **state)
{
    (void)state;
    struct rig_job job = job_with(1);
    struct model *model = rig_open_job(&rig, &job);
    static struct rig_stream s;
    rig_stream_open(&rig, &s, model, 64);
    rig_hello(&s, 1, 1, 0, TALLY_PROTOCOL_MAJOR);
    rig_wait_version(&s, 0, 3, 0);
    rig_end_job(&rig, 1, 1);
    rig_wait_end(&s);
    assert_int_equal(s.end.code, TALLY_ECANCELLED);
    assert_string_equal(s.end.message, "the test ends it");
    rig_stream_close(&s);
    expect_refused_stream(1, 1, 0, TALLY_PROTOCOL_MAJOR, TALLY_ENOTFOUND, "holds no job 1");
    rig_end_job(&rig, 1, 1); /* again */
    rig_end_job(&rig, 77, 1);
    assert_int_equal(rig.ended, 3);

    /* Ended while it is being opened: one answer, and it is not there. */
    rig_order_open(&rig, &job);
    rig_end_job(&rig, 1, 1);
    rig_run_ms(&rig, 100);
    assert_int_equal(rig.opened, 1);
    assert_int_equal(rig.ended, 4);
    Tally__V1__HoldingReply holding;
    assert_int_equal(rig_holding(&rig, 1, &holding, NULL), TALLY_ENOTFOUND);

    /* Lost: nothing is answered, held or in the making. */
    struct model *same = rig_open_job(&rig, &job);
    model_free(same);
    struct rig_job other = job_with(2);
    rig_order_open(&rig, &other);
    shard_lost(rig.shard, "the coordinator was lost");
    rig_run_ms(&rig, 300);
    assert_int_equal(rig.opened, 2);
    assert_int_equal(rig.ended, 4);
    assert_int_equal(rig_holding(&rig, 1, &holding, NULL), TALLY_ENOTFOUND);
    assert_int_equal(rig_holding(&rig, 2, &holding, NULL), TALLY_ENOTFOUND);
    same = rig_open_job(&rig, &job);
    model_free(same);
    rig_end_job(&rig, 1, 1);
    model_free(model);
}

static void test_cannot_open(void **state)
{
    (void)state;
    struct rig_job job = job_with(1);
    job.safetensors = "/nowhere/at/all.safetensors";
    rig_order_open(&rig, &job);
    rig_run_ms(&rig, 300);
    assert_int_equal(rig.failed, 1);
    assert_non_null(strstr(rig.failure, "/nowhere/at/all.safetensors"));
    job.safetensors = NULL;
    job.shard = 1;
    rig_order_open(&rig, &job);
    rig_run_ms(&rig, 100);
    assert_int_equal(rig.failed, 2);
    assert_non_null(strstr(rig.failure, "part 1 of 1"));
    assert_int_equal(rig.opened, 0);
}

/* While the coordinator takes no reports, steps go on until there is no room for another one, and none is lost. */
static void test_reports_wait(void **state)
{
    (void)state;
    struct rig_job job = job_with(1);
    job.inputs = 2;
    job.layers = 1;
    job.widths[0] = 1;
    job.steps = 6000;
    struct model *model = rig_open_job(&rig, &job);
    static struct rig_stream s;
    rig_stream_open(&rig, &s, model, 64);
    rig_hello(&s, 1, 1, 0, TALLY_PROTOCOL_MAJOR);
    rig_wait_version(&s, 0, 1, 0);
    rig.no_room = true;
    uint64_t step = 1;
    for (; step < 1500; step++)
        run_clean(&s, model, step, step);
    rig.no_room = false;
    for (; step <= 6000; step++)
        run_clean(&s, model, step, step);
    rig_run_ms(&rig, 150);
    assert_int_equal(rig.step_count, 6000);
    for (uint64_t i = 0; i < rig.step_count; i++)
        assert_int_equal(rig.steps[i].step, i + 1);
    assert_true(rig.reports < 600);
    rig_stream_close(&s);
    rig_end_job(&rig, 1, 1);
    model_free(model);
}

int main(void)
{
    rpc_global_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_opens_and_sends_first_weights, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_parts, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_part_without_slices, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_messy_equals_clean, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_every_refusal_says_why, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_hello, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_hello_for_some_slices, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_stream_dies_mid_push, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_slow_reader, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_fetch_says_what_is_held, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_fetch_that_does_not_read, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_generations, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_end_and_loss, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_cannot_open, open_rig, close_rig),
        cmocka_unit_test_setup_teardown(test_reports_wait, open_rig, close_rig),
    };
    int failures = cmocka_run_group_tests(tests, NULL, NULL);
    rpc_global_shutdown();
    return failures;
}
