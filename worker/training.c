#include "worker/training.h"

static bool has_leaves(const struct plan *plan, uint32_t leaves, uint32_t data_index)
{
    struct tree_node share = tree_share(leaves, data_index, plan->mesh.data);
    return share.begin < share.end;
}

bool training_has_leaves(const struct plan *plan, uint64_t step)
{
    if (step < 1 || step > plan->batches.steps)
        return false;
    return has_leaves(plan, batches_step(&plan->batches, step).leaves, plan->data_index);
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
    for (uint32_t replica = 0; replica < plan->mesh.data; replica++) {
        if (!has_leaves(plan, leaves, replica))
            continue;
        position += replica < plan->data_index;
        sharers++;
    }
    if (!has_leaves(plan, leaves, plan->data_index))
        return (struct tree_node){0, 0};
    return tree_share(plan->evaluation.leaves, position, sharers);
}

struct evaluating {
    const struct training *training;
    uint64_t version;
};

static void on_evaluated(uint32_t micro_batch, const struct kernel_loss *loss, uint32_t samples, void *user)
{
    const struct evaluating *e = user;
    if (e->training->events.on_evaluated)
        e->training->events.on_evaluated(e->version, micro_batch, loss, samples, e->training->user);
}

static tally_status evaluate(const struct training *t, uint64_t version, struct tally_error *err)
{
    struct tree_node share = training_evaluation_share(t->plan, version);
    struct evaluating evaluating = {t, version};
    if (share.begin == share.end)
        return TALLY_OK;
    if (t->events.on_progress)
        t->events.on_progress(version, true, t->user);
    tally_status status =
        executor_evaluate_share(t->executor, t->transport, version, share, on_evaluated, &evaluating, err);
    if (!status && t->events.on_evaluation_end)
        t->events.on_evaluation_end(version, t->user);
    return status;
}

/* All that was given away may be forgotten. */
static tally_status flush(const struct training *t, struct tally_error *err)
{
    tally_status status = t->transport->flush(t->transport, err);
    return status || !t->peers ? status : t->peers->flush(t->peers, UINT64_MAX, err);
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
    return flush(t, err);
}
