/* In which order this rank's stage runs a step, and how many micro-batches its segments keep meanwhile. */
#include <stdlib.h>

#include "model/plan_build.h"

static tally_status out_of_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "out of memory for the plan");
}

/* Nobody runs what would stop, or do something twice. */
static tally_status check_schedule(const struct plan *plan, const struct schedule *schedule, struct tally_error *err)
{
    uint64_t *ones = calloc(plan->segment_count, sizeof *ones);
    if (!ones)
        return out_of_memory(err);
    for (uint32_t k = 0; k < plan->segment_count; k++)
        ones[k] = 1;
    struct schedule_costs costs = {.forward = ones, .backward = ones, .transfer = 1};
    struct schedule_report *report = NULL;
    tally_status status = schedule_simulate(schedule, &costs, &report, err);
    schedule_report_free(report);
    free(ones);
    return status;
}

static void raise_slots(struct plan *plan, uint32_t segment, uint32_t slots)
{
    if (slots > plan->segments[segment].slots)
        plan->segments[segment].slots = slots;
}

static tally_status add_order(struct plan *plan, const uint32_t *stage_of, uint32_t micro_batches,
                              struct tally_error *err)
{
    for (size_t i = 0; i < plan->order_count; i++)
        if (plan->orders[i].micro_batches == micro_batches)
            return TALLY_OK;
    if (micro_batches == 0)
        return TALLY_OK;
    struct schedule_shape shape = {.kind = plan->schedule,
                                   .stages = plan->mesh.pipeline,
                                   .segments = plan->segment_count,
                                   .micro_batches = micro_batches,
                                   .stage_of = stage_of};
    struct schedule *schedule = NULL;
    tally_status status = schedule_build(&shape, &schedule, err);
    if (status == TALLY_OK)
        status = check_schedule(plan, schedule, err);
    if (status != TALLY_OK) {
        schedule_free(schedule);
        return status;
    }
    for (uint32_t k = 0; k < plan->segment_count; k++)
        raise_slots(plan, k, schedule_segment_blocks(schedule, k));
    struct schedule_list *list = &schedule->lists[plan->stage];
    plan->orders[plan->order_count++] = (struct plan_order){micro_batches, list->count, list->actions};
    list->actions = NULL; /* ours now */
    schedule_free(schedule);
    return TALLY_OK;
}

/*
 * An evaluation runs forward of segment k on its i-th micro-batch at turn i + k, later segments first
 * (worker/executor.c). What lies in the block of segment k is read by later segments of the same stage some turns
 * later.
 */
static void evaluation_slots(struct plan *plan)
{
    for (size_t i = 0; i < plan->op_count; i++) {
        const struct plan_op *op = &plan->ops[i];
        for (size_t k = 0; k < op->input_count && plan_owns(plan, op->segment); k++) {
            uint32_t home = plan->tensors[plan_root(plan, op->inputs[k])].home;
            raise_slots(plan, home, op->segment - home);
        }
    }
}

tally_status plan_schedule(struct plan *plan, struct tally_error *err)
{
    if (plan->mesh.pipeline == 1)
        return TALLY_OK;
    const struct batches *b = &plan->batches;
    struct step_shape first = batches_step(b, 1),
                      last = batches_step(b, b->steps < b->epoch_steps ? b->steps : b->epoch_steps);
    uint32_t *stage_of = calloc(plan->segment_count, sizeof *stage_of);
    if (!stage_of)
        return out_of_memory(err);
    for (uint32_t k = 0; k < plan->segment_count; k++)
        stage_of[k] = plan->segments[k].stage;
    struct tree_node full = plan_share(plan, first.leaves), tail = plan_share(plan, last.leaves);
    tally_status status = add_order(plan, stage_of, full.end - full.begin, err);
    if (status == TALLY_OK)
        status = add_order(plan, stage_of, tail.end - tail.begin, err);
    if (status == TALLY_OK && plan->evaluation.leaves > 0)
        evaluation_slots(plan);
    free(stage_of);
    return status;
}

uint32_t plan_peer_room(const struct plan *plan, uint32_t from_stage, uint32_t to_stage)
{
    uint32_t training = 0, evaluation = 0;
    for (size_t i = 0; i < plan->edge_count; i++) {
        const struct plan_edge *e = &plan->edges[i];
        if (plan->segments[e->from].stage != from_stage || plan->segments[e->to].stage != to_stage)
            continue;
        /* A micro-batch whose value was sent is in flight where it was made; one whose gradient was sent, where it
         * goes.
         */
        training += plan->segments[e->backward ? e->to : e->from].slots;
        evaluation += e->backward ? 0 : e->to - e->from + 1;
    }
    if (training == 0)
        return 0;
    return (training > evaluation ? training : evaluation) + 1;
}
