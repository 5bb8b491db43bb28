/* plan_build: lower (plan_lower.c), cut (plan_segments.c, plan_parts.c), schedule (plan_order.c), prepare, place
 * (plan_arena.c). The list of a step is in plan_actions.c. */
#include "model/plan.h"

#include <stdlib.h>

#include "model/plan_build.h"

static tally_status out_of_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "out of memory for the plan");
}

static tally_status check_mesh(const struct model *model, struct mesh mesh, uint32_t rank, struct tally_error *err)
{
    if (mesh.data == 0 || mesh.pipeline == 0 || mesh.tensor == 0)
        return tally_fail(err, TALLY_EINVAL, "a mesh of %u x %u x %u has no worker", mesh.data, mesh.pipeline,
                          mesh.tensor);
    if (mesh.tensor > 1)
        return tally_fail(err, TALLY_EUNSUPPORTED,
                          "a mesh of %u x %u x %u: tensor splits above 1 are not available in this version", mesh.data,
                          mesh.pipeline, mesh.tensor);
    if (mesh.pipeline > 1 && mesh.pipeline != model->stage_count)
        return tally_fail(err, TALLY_EINVAL, "a mesh of %u x %u x %u: the model is placed on %u stages", mesh.data,
                          mesh.pipeline, mesh.tensor, model->stage_count);
    if (rank / mesh.pipeline >= mesh.data)
        return tally_fail(err, TALLY_EINVAL, "rank %u is outside a mesh of %u x %u x %u", rank, mesh.data,
                          mesh.pipeline, mesh.tensor);
    return TALLY_OK;
}

static enum schedule_kind schedule_of(const Tally__V1__JobSpec *spec)
{
    const Tally__V1__Pipeline *pipeline = spec->parallel ? spec->parallel->pipeline : NULL;
    if (!pipeline || pipeline->schedule == TALLY__V1__SCHEDULE__gpipe)
        return SCHEDULE_GPIPE;
    return pipeline->schedule == TALLY__V1__SCHEDULE__one_f_one_b ? SCHEDULE_1F1B : SCHEDULE_INTERLEAVED;
}

static tally_status take_batches(struct plan *plan, const Tally__V1__DataFacts *facts, struct tally_error *err)
{
    const Tally__V1__JobSpec *spec = plan->model->spec;
    if (!spec->train || !spec->data || spec->train->batch_size == 0 || spec->train->micro_batch_size == 0)
        return tally_fail(err, TALLY_EINVAL,
                          "the job's spec is not complete: train.batch_size and train.micro_batch_size are needed");
    tally_status status =
        batches_init(&plan->batches, facts->train_samples, spec->train->batch_size, spec->train->micro_batch_size,
                     spec->data->drop_last, spec->train->epochs, spec->train->steps, err);
    if (status == TALLY_OK)
        plan->evaluation = evaluation_of(facts->test_samples, plan->batches.micro);
    return status;
}

static void add_program(struct plan *plan, uint32_t rows)
{
    if (rows > 0 && !plan_program(plan, rows)) {
        plan->programs[plan->program_count++].rows = rows;
        if (rows > plan->rows_max)
            plan->rows_max = rows;
    }
}

static tally_status list_programs(struct plan *plan, struct tally_error *err)
{
    const struct evaluation *e = &plan->evaluation;
    uint32_t rows[3];
    size_t n = batches_row_counts(&plan->batches, rows);
    plan->programs = calloc(n + 2, sizeof *plan->programs);
    if (!plan->programs)
        return out_of_memory(err);
    for (size_t i = 0; i < n; i++)
        add_program(plan, rows[i]);
    if (e->leaves > 0) {
        add_program(plan, evaluation_leaf(e, 0).count);
        add_program(plan, evaluation_leaf(e, e->leaves - 1).count);
    }
    return TALLY_OK;
}

static tally_status prepare_failed(const struct plan *plan, const struct plan_op *op, uint32_t rows,
                                   struct tally_error *err)
{
    const struct model *model = plan->model;
    if (op->layer_begin == model->layer_count)
        return tally_error_prefix(err, "the loss, on %u samples", rows);
    return tally_error_prefix(err, "layer '%s', on %u samples", model->layers[op->layer_begin].name, rows);
}

static tally_status prepare(struct plan *plan, struct plan_program *program, size_t *saved_bytes,
                            struct tally_error *err)
{
    program->ops = calloc(plan->op_count + 1, sizeof *program->ops);
    if (!program->ops)
        return out_of_memory(err);
    for (size_t i = 0; i <= plan->op_count; i++) {
        struct kernel_op_desc desc = plan->ops[i].desc;
        tally_status status = TALLY_OK;
        if (!plan_owns(plan, plan->ops[i].segment))
            continue;
        if (__builtin_mul_overflow(plan->ops[i].rows_per_sample, program->rows, &desc.rows))
            status = tally_fail(err, TALLY_EINVAL, "too many rows");
        if (status == TALLY_OK)
            status = plan->kernels->prepare(plan->backend, &desc, &program->ops[i], err);
        if (status != TALLY_OK) {
            prepare_failed(plan, &plan->ops[i], program->rows, err);
            return status;
        }
        size_t saved = plan->kernels->saved_bytes(program->ops[i]),
               workspace = plan->kernels->workspace_bytes(program->ops[i]);
        if (saved > saved_bytes[i])
            saved_bytes[i] = saved;
        if (workspace > plan->workspace_bytes)
            plan->workspace_bytes = workspace;
    }
    return TALLY_OK;
}

static tally_status prepare_and_place(struct plan *plan, struct tally_error *err)
{
    size_t *saved_bytes = calloc(plan->op_count + 1, sizeof *saved_bytes);
    tally_status status = saved_bytes ? TALLY_OK : out_of_memory(err);
    for (size_t i = 0; i < plan->program_count && status == TALLY_OK; i++)
        status = prepare(plan, &plan->programs[i], saved_bytes, err);
    if (status == TALLY_OK)
        status = plan_place(plan, saved_bytes, err);
    free(saved_bytes);
    return status;
}

tally_status plan_build(const struct model *model, const Tally__V1__DataFacts *facts, struct mesh mesh, uint32_t rank,
                        const struct kernels *kernels, struct kernel_backend *backend, struct plan **ret_plan,
                        struct tally_error *err)
{
    tally_status status = check_mesh(model, mesh, rank, err);
    if (status != TALLY_OK)
        return status;
    struct plan *plan = calloc(1, sizeof *plan);
    if (!plan)
        return out_of_memory(err);
    *plan = (struct plan){.model = model,
                          .kernels = kernels,
                          .backend = backend,
                          .mesh = mesh,
                          .rank = rank,
                          .data_index = rank / (mesh.pipeline * mesh.tensor),
                          .stage = rank / mesh.tensor % mesh.pipeline,
                          .schedule = schedule_of(model->spec)};
    status = take_batches(plan, facts, err);
    if (status == TALLY_OK)
        status = list_programs(plan, err);
    if (status == TALLY_OK)
        status = plan_lower(plan, err);
    if (status == TALLY_OK)
        status = plan_cut_segments(plan, err);
    if (status == TALLY_OK)
        status = plan_schedule(plan, err);
    if (status == TALLY_OK)
        status = plan_cut_parts(plan, err);
    if (status == TALLY_OK)
        status = prepare_and_place(plan, err);
    if (status != TALLY_OK) {
        plan_free(plan);
        return status;
    }
    plan->levels = plan_levels(plan);
    *ret_plan = plan;
    return TALLY_OK;
}

void plan_free(struct plan *plan)
{
    if (!plan)
        return;
    for (size_t i = 0; i < plan->program_count; i++) {
        for (size_t k = 0; plan->programs[i].ops && k <= plan->op_count; k++)
            if (plan->programs[i].ops[k])
                plan->kernels->release(plan->programs[i].ops[k]);
        free(plan->programs[i].ops);
    }
    for (size_t i = 0; plan->ops && i <= plan->op_count; i++) {
        free(plan->ops[i].inputs);
        free(plan->ops[i].accumulate);
        free(plan->ops[i].input_grad);
        free(plan->ops[i].part_rows);
    }
    for (size_t i = 0; i < plan->order_count; i++)
        free(plan->orders[i].actions);
    free(plan->segments);
    free(plan->edges);
    free(plan->slice_offsets);
    free(plan->programs);
    free(plan->tensors);
    free(plan->ops);
    free(plan);
}

const struct plan_program *plan_program(const struct plan *plan, uint32_t rows)
{
    for (size_t i = 0; i < plan->program_count; i++)
        if (plan->programs[i].rows == rows)
            return &plan->programs[i];
    return NULL;
}
