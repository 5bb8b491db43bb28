#ifndef MODEL_SPEC_H
#define MODEL_SPEC_H
/*
 * A job file, from its text to a spec that every part can trust: read by the mapper (types, ranges), then checked for
 * meaning with the position of each value (layers that exist, shapes that fit, data that is there), paths made
 * absolute, defaults that depend on other fields filled in.
 */
#include "common/error.h"
#include "common/spec_file.h"
#include "model/model.h"

struct job_file; /* owns the text, positions, spec, facts and model */

struct job_overrides {
    const char *const *set; /* "key.path=value" */
    size_t set_count;
    uint32_t data, shards; /* --data, --shards; 0: as in the file */
};

/* path "-" reads standard input (relative paths are then from the working directory). Errors are `FILE:LINE:COL:
 * key.path: what, what was expected`. */
tally_status job_file_load(const char *path, const struct job_overrides *overrides, struct job_file **ret_job,
                           struct tally_error *err);
void job_file_free(struct job_file *job);
/* Complete: name, micro_batch_size, pairs, parallel and so on are set. */
const Tally__V1__JobSpec *job_file_spec(const struct job_file *job);
const Tally__V1__DataFacts *job_file_facts(const struct job_file *job);
const struct model *job_file_model(const struct job_file *job);

/* The same checks on a spec that came over RPC (positions are then key paths alone). Fills in what is missing in *spec.
 */
tally_status job_spec_check(Tally__V1__JobSpec *spec, const Tally__V1__DataFacts *facts, struct tally_error *err);
#endif
