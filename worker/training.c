#include "worker/training.h"

/* Data-parallel ranks only: the plan refuses other meshes. */
static bool has_leaves(const struct plan *plan, uint32_t leaves, uint32_t rank)
{
    struct tree_node share = tree_share(leaves, rank, plan->mesh.data);
    return share.begin < share.end;
}

bool training_has_leaves(const struct plan *plan, uint64_t step)
{
    if (step < 1 || step > plan->batches.steps)
        return false;
    return has_leaves(plan, batches_step(&plan->batches, step).leaves, plan->rank);
}

bool training_evaluates(const struct plan *plan, uint64_t version)
{
    if (!plan->evaluation.leaves || !version)
        return false;
    return version == plan->batches.steps || batches_step(&plan->batches, version).epoch_end;
}

struct tree_node training_evaluation_share(const struct plan *plan, uint64_t version)
{
    uint64_t next = version < plan->batches.steps ? version + 1 : version;
    uint32_t leaves = batches_step(&plan->batches, next).leaves;
    uint32_t position = 0, sharers = 0;
    for (uint32_t rank = 0; rank < plan->mesh.data; rank++) {
        if (!has_leaves(plan, leaves, rank))
            continue;
        position += rank < plan->rank;
        sharers++;
    }
    if (!has_leaves(plan, leaves, plan->rank))
        return (struct tree_node){0, 0};
    return tree_share(plan->evaluation.leaves, position, sharers);
}

static tally_status evaluate(const struct training *t, uint64_t version, struct tally_error *err)
{
    struct tree_node share = training_evaluation_share(t->plan, version);
    if (share.begin == share.end)
        return TALLY_OK;
    if (t->events.on_progress)
        t->events.on_progress(version, true, t->user);
    for (uint32_t i = share.begin; i < share.end; i++) {
        struct kernel_loss loss;
        uint32_t samples;
        tally_status status = executor_evaluate(t->executor, t->transport, version, i, &loss, &samples, err);
        if (status)
            return status;
        if (t->events.on_evaluated)
            t->events.on_evaluated(version, i, &loss, samples, t->user);
    }
    if (t->events.on_evaluation_end)
        t->events.on_evaluation_end(version, t->user);
    return TALLY_OK;
}

tally_status training_run(const struct training *t, uint64_t start_step, struct tally_error *err)
{
    uint64_t steps = t->plan->batches.steps;
    bool idle = !training_has_leaves(t->plan, 1); /* no step has more leaves than the first */
    if (start_step > steps)
        return tally_fail(err, TALLY_EINVAL, "cannot start from version %llu: the job has %llu steps",
                          (unsigned long long)start_step, (unsigned long long)steps);
    for (uint64_t version = start_step; !idle; version++) {
        tally_status status = TALLY_OK;
        if (training_evaluates(t->plan, version))
            status = evaluate(t, version, err);
        if (status)
            return status;
        if (version == steps)
            break;
        if (t->events.on_progress)
            t->events.on_progress(version + 1, false, t->user);
        status = executor_step(t->executor, t->transport, version + 1, err);
        if (status)
            return status;
    }
    return t->transport->flush(t->transport, err);
}
