#include <stdlib.h>

#include "model/describe.h"

struct describe_session {
    const struct kernels *kernels;
    struct kernel_backend *backend;
    struct plan *plan;
};

tally_status describe_open(const struct model *model, const Tally__V1__DataFacts *facts, const char *backend,
                           const char *isa, struct describe_session **ret_session, const struct plan **ret_plan,
                           struct tally_error *err)
{
    const char *name = backend ? backend : "cpu";
    const Tally__V1__Parallel *parallel = model->spec->parallel;
    struct mesh mesh = {parallel && parallel->data && parallel->data->has_count ? parallel->data->count : 1, 1, 1};
    struct describe_session *session = calloc(1, sizeof *session);
    if (!session)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for the plan");
    tally_status status = TALLY_OK;
    session->kernels = kernels_find(name);
    if (!session->kernels)
        status = tally_fail(err, TALLY_EUNSUPPORTED, "this build has no backend '%s'", name);
    if (status == TALLY_OK)
        status = session->kernels->open(isa, 0, &session->backend, err);
    if (status == TALLY_OK)
        status = plan_build(model, facts, mesh, 0, session->kernels, session->backend, &session->plan, err);
    if (status != TALLY_OK) {
        describe_close(session);
        return status;
    }
    *ret_session = session;
    *ret_plan = session->plan;
    return TALLY_OK;
}

void describe_close(struct describe_session *session)
{
    if (!session)
        return;
    plan_free(session->plan);
    if (session->backend)
        session->kernels->close(session->backend);
    free(session);
}
