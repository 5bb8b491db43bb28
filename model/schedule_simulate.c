/* The simulation that every schedule must pass before it runs. It knows nothing of how a schedule is made. */
#include <stdlib.h>

#include "model/schedule.h"

struct simulation {
    const struct schedule *schedule;
    const struct schedule_costs *costs;
    const struct schedule_edge *edges;
    size_t edge_count;
    struct schedule_edge *chain;  /* where the costs have no edges */
    uint64_t *forward, *backward; /* [segment][micro-batch]: when it was done, plus 1; 0: not yet */
    size_t *at;                   /* by stage: position in its list */
    uint64_t *now;                /* by stage */
    struct schedule_report *report;
    struct tally_error *err;
};

static size_t cell(const struct simulation *s, uint32_t segment, uint32_t m)
{
    return (size_t)segment * s->schedule->micro_batches + m;
}

static tally_status out_of_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "out of memory for a schedule's simulation");
}

/* ---- the lists by themselves ---- */

static tally_status wrong(const struct simulation *s, uint32_t stage, const struct schedule_action *a, const char *what)
{
    return tally_fail(s->err, TALLY_EINVAL, "stage %u's list: %s of micro-batch %u in segment %u %s", stage,
                      a->backward ? "backward" : "forward", a->micro_batch, a->segment, what);
}

static tally_status check_list(const struct simulation *s, uint32_t stage, uint32_t *next)
{
    const struct schedule *schedule = s->schedule;
    const struct schedule_list *list = &schedule->lists[stage];
    for (size_t i = 0; i < list->count; i++) {
        const struct schedule_action *a = &list->actions[i];
        if (a->segment >= schedule->segments || schedule->stage_of[a->segment] != stage)
            return wrong(s, stage, a, "is not this stage's");
        if (a->micro_batch >= schedule->micro_batches)
            return wrong(s, stage, a, "is of no micro-batch");
        if (a->micro_batch != next[2 * a->segment + a->backward])
            return wrong(s, stage, a, "is not the next one: each once, in increasing order");
        next[2 * a->segment + a->backward]++;
    }
    return TALLY_OK;
}

static tally_status check_lists(const struct simulation *s)
{
    uint32_t *next = calloc(2 * (size_t)s->schedule->segments, sizeof *next);
    if (!next)
        return out_of_memory(s->err);
    tally_status status = TALLY_OK;
    for (uint32_t stage = 0; stage < s->schedule->stages && status == TALLY_OK; stage++)
        status = check_list(s, stage, next);
    for (uint32_t i = 0; i < 2 * s->schedule->segments && status == TALLY_OK; i++)
        if (next[i] != s->schedule->micro_batches)
            status = tally_fail(s->err, TALLY_EINVAL, "%u of %u %ss of segment %u are in a list", next[i],
                                s->schedule->micro_batches, i % 2 ? "backward" : "forward", i / 2);
    free(next);
    return status;
}

/* ---- what waits for what ---- */

static tally_status use_chain(struct simulation *s)
{
    uint32_t segments = s->schedule->segments;
    s->edges = s->costs->edges;
    s->edge_count = s->costs->edge_count;
    if (s->edges || segments < 2)
        return TALLY_OK;
    s->chain = calloc(2 * (size_t)segments, sizeof *s->chain);
    if (!s->chain)
        return out_of_memory(s->err);
    for (uint32_t k = 0; k + 1 < segments; k++) {
        uint64_t cost = s->schedule->stage_of[k] == s->schedule->stage_of[k + 1] ? 0 : s->costs->transfer;
        s->chain[s->edge_count++] = (struct schedule_edge){k, k + 1, false, cost};
        s->chain[s->edge_count++] = (struct schedule_edge){k + 1, k, true, cost};
    }
    s->edges = s->chain;
    return TALLY_OK;
}

/* When everything that the action needs is there; false: not all of it has been made. ret_segment: what is missing. */
static bool ready_at(const struct simulation *s, const struct schedule_action *a, uint64_t *ret_time,
                     uint32_t *ret_segment)
{
    uint64_t time = 0;
    if (a->backward) {
        time = s->forward[cell(s, a->segment, a->micro_batch)];
        *ret_segment = a->segment;
        if (time-- == 0)
            return false;
    }
    for (size_t i = 0; i < s->edge_count; i++) {
        const struct schedule_edge *e = &s->edges[i];
        if (e->to != a->segment || e->backward != a->backward)
            continue;
        uint64_t done = (e->backward ? s->backward : s->forward)[cell(s, e->from, a->micro_batch)];
        *ret_segment = e->from;
        if (done == 0)
            return false;
        if (done - 1 + e->cost > time)
            time = done - 1 + e->cost;
    }
    *ret_time = time;
    return true;
}

/* Runs a stage as far as it goes. */
static bool advance(struct simulation *s, uint32_t stage)
{
    const struct schedule_list *list = &s->schedule->lists[stage];
    struct schedule_stage_report *report = &s->report->stage[stage];
    bool moved = false;
    for (; s->at[stage] < list->count; s->at[stage]++) {
        const struct schedule_action *a = &list->actions[s->at[stage]];
        uint64_t ready;
        uint32_t missing;
        if (!ready_at(s, a, &ready, &missing))
            break;
        uint64_t begin = ready > s->now[stage] ? ready : s->now[stage];
        uint64_t cost = (a->backward ? s->costs->backward : s->costs->forward)[a->segment];
        report->spans[s->at[stage]] = (struct schedule_span){begin, begin + cost};
        report->busy += cost;
        s->now[stage] = begin + cost;
        (a->backward ? s->backward : s->forward)[cell(s, a->segment, a->micro_batch)] = begin + cost + 1;
        moved = true;
    }
    if (s->now[stage] > s->report->makespan)
        s->report->makespan = s->now[stage];
    return moved;
}

static tally_status deadlock(const struct simulation *s)
{
    for (uint32_t stage = 0; stage < s->schedule->stages; stage++) {
        const struct schedule_list *list = &s->schedule->lists[stage];
        if (s->at[stage] == list->count)
            continue;
        const struct schedule_action *a = &list->actions[s->at[stage]];
        uint64_t ready;
        uint32_t missing = 0;
        ready_at(s, a, &ready, &missing);
        return tally_fail(
            s->err, TALLY_EINVAL,
            "the schedule stops: stage %u waits with the %s of micro-batch %u in segment %u for segment %u, "
            "on stage %u, for ever",
            stage, a->backward ? "backward" : "forward", a->micro_batch, a->segment, missing,
            s->schedule->stage_of[missing]);
    }
    return TALLY_OK;
}

/* ---- counts ---- */

static void count_in_flight(const struct simulation *s, uint32_t stage)
{
    const struct schedule_list *list = &s->schedule->lists[stage];
    struct schedule_stage_report *report = &s->report->stage[stage];
    uint32_t first = 0, blocks = 0, started = 0, ended = 0;
    while (s->schedule->stage_of[first] != stage)
        first++;
    for (size_t i = 0; i < list->count; i++) {
        const struct schedule_action *a = &list->actions[i];
        blocks = a->backward ? blocks - 1 : blocks + 1;
        /* Forward comes to a stage's first segment first, backward last. */
        started += !a->backward && a->segment == first;
        ended += a->backward && a->segment == first;
        report->blocks = blocks > report->blocks ? blocks : report->blocks;
        if (started - ended > report->micro_batches)
            report->micro_batches = started - ended;
    }
}

/* ---- life ---- */

static tally_status alloc(struct simulation *s)
{
    const struct schedule *schedule = s->schedule;
    size_t cells = (size_t)schedule->segments * schedule->micro_batches;
    struct schedule_report *report = s->report = calloc(1, sizeof *report);
    s->forward = calloc(cells + 1, sizeof *s->forward);
    s->backward = calloc(cells + 1, sizeof *s->backward);
    s->at = calloc(schedule->stages, sizeof *s->at);
    s->now = calloc(schedule->stages, sizeof *s->now);
    if (!report || !s->forward || !s->backward || !s->at || !s->now)
        return out_of_memory(s->err);
    report->stages = schedule->stages;
    report->stage = calloc(schedule->stages, sizeof *report->stage);
    for (uint32_t i = 0; report->stage && i < schedule->stages; i++) {
        report->stage[i].spans = calloc(schedule->lists[i].count + 1, sizeof *report->stage[i].spans);
        if (!report->stage[i].spans)
            return out_of_memory(s->err);
    }
    return report->stage ? TALLY_OK : out_of_memory(s->err);
}

static tally_status simulate(struct simulation *s)
{
    uint32_t stages = s->schedule->stages;
    uint64_t busy = 0;
    for (bool moved = true; moved;) {
        moved = false;
        for (uint32_t stage = 0; stage < stages; stage++)
            moved |= advance(s, stage);
    }
    tally_status status = deadlock(s);
    if (status != TALLY_OK)
        return status;
    for (uint32_t stage = 0; stage < stages; stage++) {
        count_in_flight(s, stage);
        busy += s->report->stage[stage].busy;
    }
    if (s->report->makespan > 0)
        s->report->bubble = 1 - (double)busy / ((double)s->report->makespan * stages);
    return TALLY_OK;
}

tally_status schedule_simulate(const struct schedule *schedule, const struct schedule_costs *costs,
                               struct schedule_report **ret_report, struct tally_error *err)
{
    struct simulation s = {.schedule = schedule, .costs = costs, .err = err};
    tally_status status = alloc(&s);
    if (status == TALLY_OK)
        status = check_lists(&s);
    if (status == TALLY_OK)
        status = use_chain(&s);
    if (status == TALLY_OK)
        status = simulate(&s);
    free(s.chain);
    free(s.forward);
    free(s.backward);
    free(s.at);
    free(s.now);
    if (status == TALLY_OK)
        *ret_report = s.report;
    else
        schedule_report_free(s.report);
    return status;
}

void schedule_report_free(struct schedule_report *report)
{
    if (!report)
        return;
    for (uint32_t i = 0; report->stage && i < report->stages; i++)
        free(report->stage[i].spans);
    free(report->stage);
    free(report);
}
