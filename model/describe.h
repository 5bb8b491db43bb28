#ifndef MODEL_DESCRIBE_H
#define MODEL_DESCRIBE_H
/* A plan in words: layers and the operations that compute them, slices and their shards, memory, and who runs which
 * micro-batches. */
#include <stdbool.h>
#include <stdio.h>

#include <jansson.h>

#include "common/error.h"
#include "model/plan.h"

/* plans: by rank, all of the job's mesh; plans that are alike may be the same one (describe_open). */

/* As tables. TALLY_EIO: out does not take it. */
tally_status describe_plan(FILE *out, const struct plan *const *plans, struct tally_error *err);

/* A step's schedule, simulated with computed costs, as a time chart in text or as an SVG picture. TALLY_EINVAL: the job
 * has no pipeline. */
tally_status describe_schedule(FILE *out, const struct plan *const *plans, bool svg, struct tally_error *err);

/* The plan as one JSON object (the caller's reference). Sizes are in bytes, shapes are lists of one sample's
 * dimensions. */
tally_status describe_plan_json(const struct plan *const *plans, json_t **ret_json, struct tally_error *err);

/*
 * Makes the plans of a job's workers, to describe them: on backend "cpu" (NULL) or another, with its best instruction
 * set or `isa`. *ret_plans belongs to *ret_session; free that. TALLY_EUNSUPPORTED: no such backend in this build.
 */
struct describe_session;
tally_status describe_open(const struct model *model, const Tally__V1__DataFacts *facts, const char *backend,
                           const char *isa, struct describe_session **ret_session, const struct plan *const **ret_plans,
                           struct tally_error *err);
/* Accepts NULL. */
void describe_close(struct describe_session *session);
#endif
