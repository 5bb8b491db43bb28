#include <stdlib.h>

#include "model/describe_build.h"
#include "model/plan_build.h"

struct describe_session {
    const struct kernels *kernels;
    struct kernel_backend *backend;
    size_t ranks, count;
    struct plan **plans; /* by rank */
    struct plan **made;  /* each once */
};

static tally_status out_of_memory(struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "out of memory for the plan");
}

static uint32_t share_size(const struct plan *plan, uint64_t step, uint32_t data_index)
{
    struct tree_node share = tree_share(batches_step(&plan->batches, step).leaves, data_index, plan->mesh.data);
    return share.end - share.begin;
}

/* Would the plan of this rank hold the same buffers? */
static bool alike(const struct plan *plan, uint32_t rank)
{
    const struct batches *b = &plan->batches;
    uint64_t last = b->steps < b->epoch_steps ? b->steps : b->epoch_steps;
    uint32_t data_index = rank / plan->mesh.pipeline;
    if (plan->mesh.pipeline == 1)
        return true;
    return plan->stage == rank % plan->mesh.pipeline &&
           share_size(plan, 1, plan->data_index) == share_size(plan, 1, data_index) &&
           share_size(plan, last, plan->data_index) == share_size(plan, last, data_index);
}

struct plan describe_rank(const struct plan *plan, uint32_t rank)
{
    struct plan other = *plan;
    other.rank = rank;
    other.data_index = rank / plan->mesh.pipeline;
    other.levels = plan_levels(&other);
    return other;
}

static tally_status make_plans(struct describe_session *s, const struct model *model, const Tally__V1__DataFacts *facts,
                               struct mesh mesh, struct tally_error *err)
{
    s->ranks = (size_t)mesh.data * mesh.pipeline;
    s->plans = calloc(s->ranks, sizeof *s->plans);
    s->made = calloc(s->ranks, sizeof *s->made);
    if (!s->plans || !s->made)
        return out_of_memory(err);
    for (uint32_t rank = 0; rank < s->ranks; rank++) {
        for (size_t i = 0; i < s->count && !s->plans[rank]; i++)
            if (alike(s->made[i], rank))
                s->plans[rank] = s->made[i];
        if (s->plans[rank])
            continue;
        tally_status status = plan_build(model, facts, mesh, rank, s->kernels, s->backend, &s->made[s->count], err);
        if (status != TALLY_OK)
            return status;
        s->plans[rank] = s->made[s->count++];
    }
    return TALLY_OK;
}

tally_status describe_open(const struct model *model, const Tally__V1__DataFacts *facts, const char *backend,
                           const char *isa, struct describe_session **ret_session, const struct plan *const **ret_plans,
                           struct tally_error *err)
{
    const char *name = backend ? backend : "cpu";
    struct mesh mesh = mesh_of_spec(model->spec);
    struct describe_session *session = calloc(1, sizeof *session);
    if (!session)
        return out_of_memory(err);
    tally_status status = TALLY_OK;
    session->kernels = kernels_find(name);
    if (!session->kernels)
        status = tally_fail(err, TALLY_EUNSUPPORTED, "this build has no backend '%s'", name);
    if (status == TALLY_OK)
        status = session->kernels->open(isa, 0, &session->backend, err);
    if (status == TALLY_OK)
        status = make_plans(session, model, facts, mesh, err);
    if (status != TALLY_OK) {
        describe_close(session);
        return status;
    }
    *ret_session = session;
    *ret_plans = (const struct plan *const *)session->plans;
    return TALLY_OK;
}

void describe_close(struct describe_session *session)
{
    if (!session)
        return;
    for (size_t i = 0; i < session->count; i++)
        plan_free(session->made[i]);
    free(session->plans);
    free(session->made);
    if (session->backend)
        session->kernels->close(session->backend);
    free(session);
}
