#ifndef MODEL_DESCRIBE_H
#define MODEL_DESCRIBE_H
/* A plan in words: layers and the operations that compute them, slices and their shards, memory, and who runs which
 * micro-batches. */
#include <stdio.h>

#include <jansson.h>

#include "common/error.h"
#include "model/plan.h"

/* As tables. TALLY_EIO: out does not take it. */
tally_status describe_plan(FILE *out, const struct plan *plan, struct tally_error *err);

/* The same as one JSON object (the caller's reference). Sizes are in bytes, shapes are lists of one sample's
 * dimensions. */
tally_status describe_plan_json(const struct plan *plan, json_t **ret_json, struct tally_error *err);

/*
 * Makes the plan of a job's first worker, to describe it: on backend "cpu" (NULL) or another, with its best instruction
 * set or `isa`. *ret_plan belongs to *ret_session; free that. TALLY_EUNSUPPORTED: no such backend in this build.
 */
struct describe_session;
tally_status describe_open(const struct model *model, const Tally__V1__DataFacts *facts, const char *backend,
                           const char *isa, struct describe_session **ret_session, const struct plan **ret_plan,
                           struct tally_error *err);
/* Accepts NULL. */
void describe_close(struct describe_session *session);
#endif
