/*
 * A schedule is what a simple simulation does: a forward takes 1, a backward 2, a transfer nothing; a stage that is
 * free takes the first thing that is ready by its kind's preference and within its kind's limit. The time at which the
 * simulation ran an action is the one order of S3.
 */
#include "model/schedule.h"

#include <stdlib.h>
#include <string.h>

#include "common/check.h"

#define FORWARD_TIME 1
#define BACKWARD_TIME 2

struct segment_state {
    uint32_t forwards, backwards;           /* begun */
    uint32_t forwards_done, backwards_done; /* to the end */
};

struct stage_state {
    uint32_t *segments; /* its own, in order */
    uint32_t count;
    uint32_t limit;
    bool busy;
    uint64_t end;
    struct schedule_action action;
};

struct generator {
    struct schedule *out;
    struct segment_state *segments;
    struct stage_state *stages;
    uint32_t *segment_lists; /* memory of all stages' */
};

/* ---- preferences ---- */

static bool forward_ready(const struct generator *g, uint32_t k)
{
    uint32_t m = g->segments[k].forwards;
    return m < g->out->micro_batches && (k == 0 || g->segments[k - 1].forwards_done > m);
}

static bool backward_ready(const struct generator *g, uint32_t k)
{
    uint32_t m = g->segments[k].backwards;
    return m < g->segments[k].forwards_done && (k + 1 == g->out->segments || g->segments[k + 1].backwards_done > m);
}

/* The smaller goes first. Interleaved: groups of as many micro-batches as there are stages go through a segment; else
 * the oldest micro-batch, as far as it has come. */
static uint64_t rank_of(const struct generator *g, uint32_t chunk, uint32_t chunks, uint32_t m, bool backward)
{
    uint64_t order = backward ? chunks - 1 - chunk : chunk;
    if (g->out->kind == SCHEDULE_INTERLEAVED) {
        uint32_t stages = g->out->stages;
        return ((uint64_t)(m / stages) * chunks + order) * stages + m % stages;
    }
    return (uint64_t)m * chunks + order;
}

/* Micro-batches that are in flight already may go on. */
static bool allowed(const struct generator *g, const struct stage_state *s, uint32_t chunk)
{
    const struct segment_state *first = &g->segments[s->segments[0]];
    return chunk > 0 || first->forwards - first->backwards < s->limit;
}

static bool better(uint64_t rank, uint64_t *best)
{
    if (rank >= *best)
        return false;
    *best = rank;
    return true;
}

static bool pick_backward(const struct generator *g, const struct stage_state *s, struct schedule_action *ret)
{
    uint64_t best = UINT64_MAX;
    for (uint32_t c = 0; c < s->count; c++) {
        uint32_t k = s->segments[c], m = g->segments[k].backwards;
        if (backward_ready(g, k) && better(rank_of(g, c, s->count, m, true), &best))
            *ret = (struct schedule_action){k, m, true};
    }
    return best < UINT64_MAX;
}

static bool pick_forward(const struct generator *g, const struct stage_state *s, bool beyond,
                         struct schedule_action *ret)
{
    uint64_t best = UINT64_MAX;
    for (uint32_t c = 0; c < s->count; c++) {
        uint32_t k = s->segments[c], m = g->segments[k].forwards;
        if (forward_ready(g, k) && (beyond || allowed(g, s, c)) && better(rank_of(g, c, s->count, m, false), &best))
            *ret = (struct schedule_action){k, m, false};
    }
    return best < UINT64_MAX;
}

static bool forwards_left(const struct generator *g, const struct stage_state *s)
{
    for (uint32_t c = 0; c < s->count; c++)
        if (g->segments[s->segments[c]].forwards < g->out->micro_batches)
            return true;
    return false;
}

/* So many forwards first, then a forward and a backward in turn; each kind strictly in its order, so that a stage
 * rather waits than lets a later one begin. */
static bool pick_in_turn(const struct generator *g, const struct stage_state *s, struct schedule_action *ret)
{
    uint64_t forwards = 0, backwards = 0, best = UINT64_MAX, total = (uint64_t)s->count * g->out->micro_batches;
    for (uint32_t c = 0; c < s->count; c++) {
        forwards += g->segments[s->segments[c]].forwards;
        backwards += g->segments[s->segments[c]].backwards;
    }
    bool backward = forwards == total || forwards >= s->limit + backwards;
    for (uint32_t c = 0; c < s->count; c++) {
        const struct segment_state *segment = &g->segments[s->segments[c]];
        uint32_t m = backward ? segment->backwards : segment->forwards;
        if (m < g->out->micro_batches && better(rank_of(g, c, s->count, m, backward), &best))
            *ret = (struct schedule_action){s->segments[c], m, backward};
    }
    return best < UINT64_MAX && (backward ? backward_ready(g, ret->segment) : forward_ready(g, ret->segment));
}

static bool pick(const struct generator *g, const struct stage_state *s, struct schedule_action *ret)
{
    if (g->out->kind == SCHEDULE_GPIPE)
        return forwards_left(g, s) ? pick_forward(g, s, true, ret) : pick_backward(g, s, ret);
    if (g->out->kind == SCHEDULE_INTERLEAVED)
        return pick_in_turn(g, s, ret);
    return pick_backward(g, s, ret) || pick_forward(g, s, false, ret);
}

/* ---- the run ---- */

static void begin(struct generator *g, uint32_t stage, const struct schedule_action *action, uint64_t now)
{
    struct stage_state *s = &g->stages[stage];
    struct segment_state *segment = &g->segments[action->segment];
    struct schedule_list *list = &g->out->lists[stage];
    *(action->backward ? &segment->backwards : &segment->forwards) += 1;
    s->busy = true;
    s->end = now + (action->backward ? BACKWARD_TIME : FORWARD_TIME);
    s->action = *action;
    list->actions[list->count++] = *action;
}

static void finish(struct generator *g, struct stage_state *s)
{
    struct segment_state *segment = &g->segments[s->action.segment];
    *(s->action.backward ? &segment->backwards_done : &segment->forwards_done) += 1;
    s->busy = false;
}

/* Everybody waits: the oldest micro-batch that can go on does, out of its stage's order. */
static bool relieve(struct generator *g, uint64_t now)
{
    struct schedule_action best = {UINT32_MAX, UINT32_MAX, false}, a;
    for (uint32_t s = 0; s < g->out->stages; s++) {
        const struct stage_state *stage = &g->stages[s];
        if ((pick_backward(g, stage, &a) || pick_forward(g, stage, true, &a)) && a.micro_batch < best.micro_batch)
            best = a;
    }
    if (best.segment == UINT32_MAX)
        return false;
    begin(g, g->out->stage_of[best.segment], &best, now);
    return true;
}

static tally_status run(struct generator *g, struct tally_error *err)
{
    uint32_t stages = g->out->stages;
    size_t left = 2 * (size_t)g->out->segments * g->out->micro_batches;
    for (uint64_t now = 0; left > 0;) {
        uint64_t next = UINT64_MAX;
        for (uint32_t s = 0; s < stages; s++) {
            struct schedule_action action;
            if (!g->stages[s].busy && pick(g, &g->stages[s], &action))
                begin(g, s, &action, now);
        }
        for (uint32_t s = 0; s < stages; s++)
            if (g->stages[s].busy && g->stages[s].end < next)
                next = g->stages[s].end;
        if (next == UINT64_MAX) {
            if (!relieve(g, now))
                return tally_fail(err, TALLY_EINTERNAL, "a %s schedule of %u stages stops",
                                  schedule_kind_text(g->out->kind), stages);
            continue;
        }
        now = next;
        for (uint32_t s = 0; s < stages; s++)
            if (g->stages[s].busy && g->stages[s].end == now) {
                finish(g, &g->stages[s]);
                left--;
            }
    }
    return TALLY_OK;
}

/* ---- limits ---- */

/* How many stages begin before this one. */
static uint32_t position(const struct generator *g, uint32_t stage)
{
    uint32_t before = 0;
    for (uint32_t s = 0; s < g->out->stages; s++)
        before += g->stages[s].segments[0] < g->stages[stage].segments[0];
    return before;
}

static void set_limits(struct generator *g)
{
    uint32_t stages = g->out->stages;
    bool chunks = g->out->segments > stages;
    if (!chunks && g->out->kind == SCHEDULE_INTERLEAVED)
        g->out->kind = SCHEDULE_1F1B; /* it is one */
    for (uint32_t s = 0; s < stages; s++) {
        uint32_t at = position(g, s);
        if (g->out->kind == SCHEDULE_INTERLEAVED)
            g->stages[s].limit = 2 * (stages - 1 - at) + (g->stages[s].count - 1) * stages + 1;
        else
            g->stages[s].limit = chunks ? stages : stages - at;
    }
}

/* ---- life ---- */

static tally_status check_shape(const struct schedule_shape *shape, struct tally_error *err)
{
    size_t actions;
    bool none = shape->stages == 0 || shape->segments < shape->stages;
    for (uint32_t k = 0; k < shape->segments && !none; k++)
        none = shape->stage_of[k] >= shape->stages;
    if (none)
        return tally_fail(err, TALLY_EINVAL, "a schedule of %u segments on %u stages: every stage needs one",
                          shape->segments, shape->stages);
    if (__builtin_mul_overflow(2 * (size_t)shape->segments, shape->micro_batches, &actions) ||
        actions > SCHEDULE_ACTIONS_MAX)
        return tally_fail(err, TALLY_EINVAL,
                          "a schedule of %u segments and %u micro-batches is too long: at most %zu forwards and "
                          "backwards; a larger train.micro_batch_size makes fewer",
                          shape->segments, shape->micro_batches, SCHEDULE_ACTIONS_MAX);
    return TALLY_OK;
}

static bool alloc(struct generator *g, const struct schedule_shape *shape)
{
    struct schedule *out = g->out = calloc(1, sizeof *out);
    if (!out)
        return false;
    *out = (struct schedule){.kind = shape->kind,
                             .stages = shape->stages,
                             .segments = shape->segments,
                             .micro_batches = shape->micro_batches};
    out->stage_of = calloc(shape->segments, sizeof *out->stage_of);
    out->lists = calloc(shape->stages, sizeof *out->lists);
    g->segments = calloc(shape->segments, sizeof *g->segments);
    g->stages = calloc(shape->stages, sizeof *g->stages);
    g->segment_lists = calloc(shape->segments, sizeof *g->segment_lists);
    if (!out->stage_of || !out->lists || !g->segments || !g->stages || !g->segment_lists)
        return false;
    memcpy(out->stage_of, shape->stage_of, shape->segments * sizeof *out->stage_of);
    return true;
}

static tally_status share_out(struct generator *g, struct tally_error *err)
{
    struct schedule *out = g->out;
    uint32_t *next = g->segment_lists;
    for (uint32_t s = 0; s < out->stages; s++) {
        struct stage_state *stage = &g->stages[s];
        stage->segments = next;
        for (uint32_t k = 0; k < out->segments; k++)
            if (out->stage_of[k] == s)
                stage->segments[stage->count++] = k;
        next += stage->count;
        if (stage->count == 0)
            return tally_fail(err, TALLY_EINVAL, "stage %u of a schedule has no segment", s);
        out->lists[s].actions =
            calloc(2 * (size_t)stage->count * out->micro_batches + 1, sizeof *out->lists[s].actions);
        if (!out->lists[s].actions)
            return tally_fail(err, TALLY_ENOMEM, "out of memory for a schedule");
    }
    return TALLY_OK;
}

tally_status schedule_build(const struct schedule_shape *shape, struct schedule **ret_schedule, struct tally_error *err)
{
    struct generator g = {0};
    tally_status status = check_shape(shape, err);
    if (status == TALLY_OK && !alloc(&g, shape))
        status = tally_fail(err, TALLY_ENOMEM, "out of memory for a schedule");
    if (status == TALLY_OK)
        status = share_out(&g, err);
    if (status == TALLY_OK) {
        set_limits(&g);
        status = run(&g, err);
    }
    free(g.segments);
    free(g.stages);
    free(g.segment_lists);
    if (status == TALLY_OK)
        *ret_schedule = g.out;
    else
        schedule_free(g.out);
    return status;
}

void schedule_free(struct schedule *schedule)
{
    if (!schedule)
        return;
    for (uint32_t s = 0; schedule->lists && s < schedule->stages; s++)
        free(schedule->lists[s].actions);
    free(schedule->lists);
    free(schedule->stage_of);
    free(schedule);
}

uint32_t schedule_segment_blocks(const struct schedule *schedule, uint32_t segment)
{
    const struct schedule_list *list = &schedule->lists[schedule->stage_of[segment]];
    uint32_t now = 0, most = 0;
    for (size_t i = 0; i < list->count; i++) {
        if (list->actions[i].segment != segment)
            continue;
        tally_check(!list->actions[i].backward || now > 0);
        now = list->actions[i].backward ? now - 1 : now + 1;
        most = now > most ? now : most;
    }
    return most;
}

const char *schedule_kind_text(enum schedule_kind kind)
{
    static const char *const texts[] = {"gpipe", "1f1b", "interleaved"};
    return texts[kind];
}
