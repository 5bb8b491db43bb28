/* A plan's pipeline: what each stage has, and how a step goes through it. */
#include <stdlib.h>

#include "model/build.h"
#include "model/describe_build.h"
#include "model/schedule_chart.h"
#include "model/text_table.h"

/* A byte from one process to another on this machine takes about as long as so many operations: 1.5 GB/s through a UNIX
 * socket, 50 GFLOP/s. */
#define TRANSFER_FLOPS_PER_BYTE 32

static tally_status out_of_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "out of memory for a schedule");
}

static uint64_t times(uint64_t a, uint64_t b)
{
    return __builtin_mul_overflow(a, b, &a) ? UINT64_MAX / 4 : a;
}

/* Costs of a full micro-batch. UINT64_MAX / 4 at most each, so that a few can be added. */
static void segment_cost(const struct plan *plan, uint32_t k, uint64_t *ret_forward, uint64_t *ret_backward)
{
    const struct plan_segment *segment = &plan->segments[k];
    uint64_t forward = 0, backward = 0, rows = plan->batches.micro;
    for (size_t i = segment->op_begin; i < segment->op_end && i < plan->op_count; i++) {
        struct layers_cost cost = layers_cost(plan->model, plan->ops[i].layer_begin, plan->ops[i].layer_end);
        forward += cost.forward < UINT32_MAX * (uint64_t)4096 ? cost.forward : UINT32_MAX * (uint64_t)4096;
        backward += cost.backward < UINT32_MAX * (uint64_t)4096 ? cost.backward : UINT32_MAX * (uint64_t)4096;
    }
    *ret_forward = times(forward, rows);
    *ret_backward = segment->backward ? times(backward, rows) : 0;
}

static void set_edges(const struct plan *plan, struct schedule_edge *edges)
{
    for (size_t i = 0; i < plan->edge_count; i++) {
        const struct plan_edge *e = &plan->edges[i];
        uint64_t bytes = times(plan->tensors[e->tensor].elements, (uint64_t)plan->batches.micro * sizeof(float));
        edges[i] = (struct schedule_edge){e->from, e->to, e->backward, times(bytes, TRANSFER_FLOPS_PER_BYTE)};
    }
}

static tally_status build(const struct plan *plan, uint32_t micro_batches, struct described_schedule *ret,
                          struct tally_error *err)
{
    uint32_t n = plan->segment_count;
    uint32_t *stage_of = calloc(n, sizeof *stage_of);
    struct schedule_edge *edges = calloc(plan->edge_count + 1, sizeof *edges);
    struct described_schedule d = {.forward = calloc(n, sizeof *d.forward), .backward = calloc(n, sizeof *d.backward)};
    tally_status status = stage_of && edges && d.forward && d.backward ? TALLY_OK : out_of_memory(err);
    if (status == TALLY_OK) {
        for (uint32_t k = 0; k < n; k++) {
            stage_of[k] = plan->segments[k].stage;
            segment_cost(plan, k, &d.forward[k], &d.backward[k]);
        }
        set_edges(plan, edges);
        struct schedule_shape shape = {plan->schedule, plan->mesh.pipeline, n, micro_batches, stage_of};
        status = schedule_build(&shape, &d.schedule, err);
    }
    struct schedule_costs costs = {
        .forward = d.forward, .backward = d.backward, .edge_count = plan->edge_count, .edges = edges};
    if (status == TALLY_OK)
        status = schedule_simulate(d.schedule, &costs, &d.report, err);
    free(stage_of);
    free(edges);
    if (status == TALLY_OK)
        *ret = d;
    else
        described_schedule_free(&d);
    return status;
}

tally_status described_schedule_open(const struct plan *plan, struct described_schedule *ret, struct tally_error *err)
{
    struct tree_node most = tree_share(batches_step(&plan->batches, 1).leaves, 0, plan->mesh.data);
    return build(plan, most.end - most.begin, ret, err);
}

void described_schedule_free(struct described_schedule *d)
{
    schedule_free(d->schedule);
    schedule_report_free(d->report);
    free(d->forward);
    free(d->backward);
    *d = (struct described_schedule){0};
}

double described_share(const struct plan *plan, const struct described_schedule *d, uint32_t stage)
{
    double all = 0, here = 0;
    for (uint32_t k = 0; k < plan->segment_count; k++) {
        double cost = (double)d->forward[k] + (double)d->backward[k];
        all += cost;
        here += plan->segments[k].stage == stage ? cost : 0;
    }
    return all > 0 ? here / all : 0;
}

double described_idle(const struct described_schedule *d, uint32_t stage)
{
    return d->report->makespan ? 1 - (double)d->report->stage[stage].busy / (double)d->report->makespan : 0;
}

/* "conv1, 1, fc1" */
static void layers_text(const struct plan *plan, uint32_t stage, char *text, size_t size)
{
    size_t used = 0;
    text[0] = '\0';
    for (size_t i = 0; i < plan->op_count && used < size; i++) {
        const struct plan_op *op = &plan->ops[i];
        for (uint32_t l = op->layer_begin; l < op->layer_end && used < size; l++)
            if (plan->segments[op->segment].stage == stage)
                used +=
                    (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "", plan->model->layers[l].name);
    }
}

static uint64_t sent_bytes(const struct plan *plan, uint32_t stage)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < plan->edge_count; i++)
        if (plan->segments[plan->edges[i].from].stage == stage)
            bytes += plan->tensors[plan->edges[i].tensor].elements * sizeof(float) * plan->batches.micro;
    return bytes;
}

tally_status describe_stages(FILE *out, const struct plan *plan, struct tally_error *err)
{
    static const char *const heads[] = {"STAGE", ">COST", ">IDLE", ">IN FLIGHT", ">SENT A MICRO-BATCH", "LAYERS"};
    struct described_schedule d;
    char text[TEXT_TABLE_CELL_MAX + 1];
    tally_status status = described_schedule_open(plan, &d, err);
    if (status != TALLY_OK)
        return status;
    struct text_table *table = text_table_new(heads, 6);
    if (!table)
        status = out_of_memory(err);
    for (uint32_t stage = 0; status == TALLY_OK && stage < plan->mesh.pipeline; stage++) {
        text_table_row(table);
        text_table_cell(table, "%u", stage);
        text_table_cell(table, "%.1f %%", 100 * described_share(plan, &d, stage));
        text_table_cell(table, "%.1f %%", 100 * described_idle(&d, stage));
        text_table_cell(table, "%u", d.report->stage[stage].micro_batches);
        text_table_cell(table, "%s", bytes_text(sent_bytes(plan, stage), text, sizeof text));
        layers_text(plan, stage, text, sizeof text);
        text_table_cell(table, "%s", text);
    }
    if (status == TALLY_OK) {
        fprintf(out, "%s over %u stages, %u micro-batches a replica; by computed cost %.1f %% of the time is bubble\n",
                schedule_kind_text(plan->schedule), plan->mesh.pipeline, d.schedule->micro_batches,
                100 * d.report->bubble);
        status = text_table_print(table, out, err);
    }
    text_table_free(table);
    described_schedule_free(&d);
    return status;
}

tally_status describe_schedule(FILE *out, const struct plan *const *plans, bool svg, struct tally_error *err)
{
    const struct plan *plan = plans[0];
    struct described_schedule d;
    if (plan->mesh.pipeline == 1)
        return tally_fail(err, TALLY_EINVAL,
                          "the job has no pipeline: each micro-batch's backward follows its forward");
    tally_status status = described_schedule_open(plan, &d, err);
    if (status != TALLY_OK)
        return status;
    if (svg) {
        status = schedule_chart_svg(out, d.schedule, d.report, err);
    } else {
        fprintf(
            out,
            "%s, %u micro-batches: a digit is a forward, a letter a backward (a: micro-batch 0), by computed cost\n",
            schedule_kind_text(plan->schedule), d.schedule->micro_batches);
        status = schedule_chart_text(out, d.schedule, d.report, SCHEDULE_CHART_WIDTH, err);
        for (uint32_t stage = 0; stage < plan->mesh.pipeline; stage++) {
            char bytes[32];
            struct plan_memory m = plan_memory(plans[stage]);
            fprintf(out, "stage %-3u idle %.1f %%, %u micro-batches in flight at most, %s of activations\n", stage,
                    100 * described_idle(&d, stage), d.report->stage[stage].micro_batches,
                    bytes_text(m.activations + m.activation_gradients, bytes, sizeof bytes));
        }
        fprintf(out, "bubble    %.1f %%\n", 100 * d.report->bubble);
        if (status == TALLY_OK && ferror(out))
            status = tally_fail(err, TALLY_EIO, "the schedule could not be written");
    }
    described_schedule_free(&d);
    return status;
}
