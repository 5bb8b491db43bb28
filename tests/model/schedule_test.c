/* Schedules of every small shape: each passes the simulation, and keeps its kind's bounds. */
#include "model/schedule_chart.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/splitmix.h"

#define STAGES_MAX 8
#define CHUNKS_MAX 4
#define SEGMENTS_MAX (STAGES_MAX * CHUNKS_MAX)
#define MICRO_BATCHES_MAX 32

struct built {
    struct schedule *schedule;
    struct schedule_report *report;
    uint64_t forward[SEGMENTS_MAX], backward[SEGMENTS_MAX];
};

static struct built build(enum schedule_kind kind, uint32_t stages, uint32_t segments, const uint32_t *stage_of,
                          uint32_t micro_batches, uint64_t transfer)
{
    struct built b = {0};
    struct tally_error err = {0};
    struct schedule_shape shape = {kind, stages, segments, micro_batches, stage_of};
    if (schedule_build(&shape, &b.schedule, &err))
        fail_msg("%s, %u stages, %u segments, %u micro-batches: %s", schedule_kind_text(kind), stages, segments,
                 micro_batches, err.message);
    for (uint32_t k = 0; k < segments; k++) {
        b.forward[k] = 1;
        b.backward[k] = 2;
    }
    struct schedule_costs costs = {.forward = b.forward, .backward = b.backward, .transfer = transfer};
    if (schedule_simulate(b.schedule, &costs, &b.report, &err))
        fail_msg("%s, %u stages, %u segments, %u micro-batches: %s", schedule_kind_text(kind), stages, segments,
                 micro_batches, err.message);
    return b;
}

static void built_free(struct built *b)
{
    schedule_free(b->schedule);
    schedule_report_free(b->report);
}

static uint32_t smaller(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* Segment k on stage k % stages. */
static void check_round_robin(enum schedule_kind kind, uint32_t stages, uint32_t chunks, uint32_t micro_batches)
{
    uint32_t stage_of[SEGMENTS_MAX] = {0}, segments = stages * chunks;
    for (uint32_t k = 0; k < segments; k++)
        stage_of[k] = k % stages;
    struct built b = build(kind, stages, segments, stage_of, micro_batches, 0);
    for (uint32_t s = 0; s < stages; s++) {
        const struct schedule_stage_report *r = &b.report->stage[s];
        assert_int_equal(b.schedule->lists[s].count, 2 * chunks * micro_batches);
        assert_int_equal(r->busy, 3 * (uint64_t)chunks * micro_batches);
        if (kind == SCHEDULE_GPIPE)
            assert_int_equal(r->micro_batches, micro_batches);
        if (kind == SCHEDULE_1F1B)
            assert_true(r->micro_batches <= stages);
        if (kind != SCHEDULE_GPIPE && chunks == 1)
            assert_int_equal(r->micro_batches, smaller(stages - s, micro_batches));
        if (kind == SCHEDULE_INTERLEAVED)
            assert_true(r->blocks <= 2 * (stages - 1 - s) + (chunks - 1) * stages + 1);
        uint32_t blocks = 0;
        for (uint32_t k = s; k < segments; k += stages)
            blocks += schedule_segment_blocks(b.schedule, k);
        assert_true(blocks >= r->blocks);
    }
    /* The bubble of GPipe and 1F1B: S - 1 of M + S - 1 turns. */
    if (chunks == 1)
        assert_int_equal(b.report->makespan, 3 * (uint64_t)(micro_batches + stages - 1));
    /* Chunks may only make it smaller. */
    if (kind == SCHEDULE_INTERLEAVED && micro_batches % stages == 0)
        assert_int_equal(b.report->makespan, 3 * ((uint64_t)micro_batches * chunks + stages - 1));
    built_free(&b);
}

static void every_small_shape(void **state)
{
    (void)state;
    for (uint32_t stages = 1; stages <= STAGES_MAX; stages++)
        for (uint32_t chunks = 1; chunks <= CHUNKS_MAX; chunks++)
            for (uint32_t m = 1; m <= MICRO_BATCHES_MAX; m++)
                for (int kind = 0; kind < 3; kind++)
                    check_round_robin((enum schedule_kind)kind, stages, chunks, m);
}

/* Stages in any order, with any number of segments. */
static void any_placement(void **state)
{
    (void)state;
    uint64_t random = 3;
    for (int i = 0; i < 1500; i++) {
        uint32_t stages = 1 + (uint32_t)(splitmix(&random) % STAGES_MAX),
                 segments = stages + (uint32_t)(splitmix(&random) % 12);
        uint32_t stage_of[SEGMENTS_MAX] = {0}, micro_batches = 1 + (uint32_t)(splitmix(&random) % MICRO_BATCHES_MAX);
        for (uint32_t k = 0; k < segments; k++)
            stage_of[k] = k < stages ? k : (uint32_t)(splitmix(&random) % stages);
        for (uint32_t k = segments; k-- > 1;) {
            uint32_t other = (uint32_t)(splitmix(&random) % (k + 1)), kept = stage_of[k];
            stage_of[k] = stage_of[other];
            stage_of[other] = kept;
        }
        enum schedule_kind kind = (enum schedule_kind)(splitmix(&random) % 3);
        struct built b = build(kind, stages, segments, stage_of, micro_batches, splitmix(&random) % 3);
        for (uint32_t s = 0; s < stages && kind == SCHEDULE_1F1B; s++)
            assert_true(b.report->stage[s].micro_batches <= stages);
        built_free(&b);
    }
}

static void limits(void **state)
{
    (void)state;
    const uint32_t on_one[3] = {0, 0, 0}, beyond[2] = {0, 2};
    struct schedule *schedule = NULL;
    struct tally_error err;
    const struct schedule_shape shapes[] = {
        {SCHEDULE_GPIPE, 0, 1, 1, on_one},          {SCHEDULE_GPIPE, 2, 3, 1, on_one}, /* stage 1 has none */
        {SCHEDULE_GPIPE, 4, 3, 1, on_one},          {SCHEDULE_GPIPE, 2, 2, 1, beyond},
        {SCHEDULE_GPIPE, 1, 3, UINT32_MAX, on_one},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        assert_int_equal(schedule_build(&shapes[i], &schedule, &err), TALLY_EINVAL);
    assert_null(schedule);
}

/* ---- what the simulation must find ---- */

static struct schedule *two_stages(uint32_t micro_batches)
{
    static const uint32_t stage_of[2] = {0, 1};
    struct schedule *schedule;
    struct tally_error err;
    struct schedule_shape shape = {SCHEDULE_1F1B, 2, 2, micro_batches, stage_of};
    assert_int_equal(schedule_build(&shape, &schedule, &err), TALLY_OK);
    return schedule;
}

static void assert_refused(const struct schedule *schedule, const char *word)
{
    const uint64_t ones[2] = {1, 1};
    struct schedule_costs costs = {.forward = ones, .backward = ones};
    struct schedule_report *report = NULL;
    struct tally_error err;
    assert_int_equal(schedule_simulate(schedule, &costs, &report, &err), TALLY_EINVAL);
    if (!strstr(err.message, word))
        fail_msg("'%s' says nothing of '%s'", err.message, word);
    assert_null(report);
}

static void swap(struct schedule_action *a, struct schedule_action *b)
{
    struct schedule_action kept = *a;
    *a = *b;
    *b = kept;
}

static void simulation_finds_faults(void **state)
{
    (void)state;
    struct schedule *s = two_stages(2);
    s->lists[0].count--;
    assert_refused(s, "1 of 2 backwards of segment 0");
    schedule_free(s);

    s = two_stages(2);
    s->lists[1].actions[2] = s->lists[1].actions[0]; /* twice */
    assert_refused(s, "not the next one");
    schedule_free(s);

    s = two_stages(2);
    s->lists[1].actions[0].segment = 0;
    assert_refused(s, "not this stage's");
    schedule_free(s);

    s = two_stages(2);
    swap(&s->lists[1].actions[0], &s->lists[1].actions[1]); /* backward before its forward */
    assert_refused(s, "stops");
    schedule_free(s);

    s = two_stages(2);
    assert_true(!s->lists[0].actions[1].backward && s->lists[0].actions[2].backward);
    /* Stage 0 asks for the gradient of 0 before it sends the activation of 1; stage 1 wants both activations first. */
    swap(&s->lists[0].actions[1], &s->lists[0].actions[2]);
    swap(&s->lists[1].actions[1], &s->lists[1].actions[2]);
    assert_refused(s, "stage 0 waits with the backward of micro-batch 0 in segment 0 for segment 1, on stage 1");
    schedule_free(s);
}

static void costs_and_edges(void **state)
{
    (void)state;
    /* Segment 1 and 2 both read segment 0; 3 reads both. */
    static const uint32_t stage_of[4] = {0, 1, 2, 0};
    const uint64_t forward[4] = {1, 5, 7, 1}, backward[4] = {2, 10, 14, 2};
    const struct schedule_edge edges[] = {{0, 1, false, 1}, {0, 2, false, 1}, {1, 3, false, 1}, {2, 3, false, 1},
                                          {3, 1, true, 1},  {3, 2, true, 1},  {1, 0, true, 1},  {2, 0, true, 1}};
    struct schedule *schedule;
    struct schedule_report *report;
    struct tally_error err;
    struct schedule_shape shape = {SCHEDULE_GPIPE, 3, 4, 1, stage_of};
    assert_int_equal(schedule_build(&shape, &schedule, &err), TALLY_OK);
    struct schedule_costs costs = {.forward = forward, .backward = backward, .edge_count = 8, .edges = edges};
    assert_int_equal(schedule_simulate(schedule, &costs, &report, &err), TALLY_OK);
    /* Branches run side by side: 1 + 1 + 7 + 1 + 1, and back 2 + 1 + 14 + 1 + 2. */
    assert_int_equal(report->makespan, 31);
    assert_int_equal(report->stage[1].busy, 15);
    assert_int_equal(report->stage[1].spans[0].begin, 2);
    assert_int_equal(report->stage[1].spans[0].end, 7);
    assert_true(report->bubble > 1 - 42.0 / 93 - 1e-9 && report->bubble < 1 - 42.0 / 93 + 1e-9);
    schedule_report_free(report);
    schedule_free(schedule);
}

/* ---- charts ---- */

static char *chart(const struct built *b, size_t width)
{
    char *text = NULL;
    size_t bytes = 0;
    struct tally_error err;
    FILE *out = open_memstream(&text, &bytes);
    assert_non_null(out);
    assert_int_equal(width ? schedule_chart_text(out, b->schedule, b->report, width, &err)
                           : schedule_chart_svg(out, b->schedule, b->report, &err),
                     TALLY_OK);
    assert_int_equal(fclose(out), 0);
    return text;
}

static void charts(void **state)
{
    (void)state;
    static const uint32_t stage_of[2] = {0, 1}, crossed[4] = {0, 1, 0, 1};
    struct built b = build(SCHEDULE_1F1B, 2, 2, stage_of, 4, 0);
    assert_int_equal(b.report->makespan, 15);
    char *text = chart(&b, 15);
    assert_string_equal(text, "stage 0   part 0   |01..aa2bb3cc.dd|\n"
                              "stage 1   part 1   |.0aa1bb2cc3dd..|\n");
    free(text);
    built_free(&b);

    b = build(SCHEDULE_GPIPE, 2, 2, stage_of, 3, 0);
    text = chart(&b, 12);
    assert_string_equal(text, "stage 0   part 0   |012...aabbcc|\n"
                              "stage 1   part 1   |.012aabbcc..|\n");
    free(text);
    built_free(&b);

    b = build(SCHEDULE_GPIPE, 2, 4, crossed, 1, 0);
    text = chart(&b, 24); /* two columns a unit */
    assert_string_equal(text, "stage 0   part 0   |00..................aaaa|\n"
                              "          part 2   |....00......aaaa........|\n"
                              "stage 1   part 1   |..00............aaaa....|\n"
                              "          part 3   |......00aaaa............|\n");
    free(text);
    text = chart(&b, 0);
    size_t rects = 0;
    for (const char *at = text; (at = strstr(at, "<title>")); at++)
        rects++;
    assert_int_equal(rects, 8);
    assert_non_null(strstr(text, "<svg xmlns"));
    assert_non_null(strstr(text, "backward of micro-batch 0, part 3"));
    assert_non_null(strstr(text, "bubble 50.0 %"));
    free(text);
    built_free(&b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_small_shape),       cmocka_unit_test(any_placement),   cmocka_unit_test(limits),
        cmocka_unit_test(simulation_finds_faults), cmocka_unit_test(costs_and_edges), cmocka_unit_test(charts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
