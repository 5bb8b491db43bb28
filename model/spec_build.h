#ifndef MODEL_SPEC_BUILD_H
#define MODEL_SPEC_BUILD_H
/* The checks of a job's spec, inside model/ alone. Each says what is wrong at its place: file is never NULL, and spec
 * is the message that it knows. */
#include "common/error.h"
#include "common/spec_file.h"
#include "model/model.h"

/* What needs neither the data nor shapes: the length, the optimizer, replicas, and the layers named by placement and
 * tensor splits. */
tally_status spec_check_train(const Tally__V1__JobSpec *spec, const struct spec_file *file, struct tally_error *err);
tally_status spec_check_parallel(const Tally__V1__JobSpec *spec, const struct spec_file *file, struct tally_error *err);

/* What needs the data's facts and the model: that there is a step, normalisation, class counts, the limits of
 * shuffling. */
tally_status spec_check_facts(const Tally__V1__JobSpec *spec, const Tally__V1__DataFacts *facts,
                              const struct model *model, const struct spec_file *file, struct tally_error *err);

/* Samples of a micro-batch: as given, or the batch over the replicas (an elastic job's largest number of them), rounded
 * up. */
uint32_t spec_micro_batch(const Tally__V1__JobSpec *spec);
/* Replicas to begin with: as given, or an elastic job's largest number; 1 where nothing is said. */
uint32_t spec_replicas(const Tally__V1__JobSpec *spec);

/* Makes every path absolute, seen from folder (NULL: the working directory), and looks whether the files are there. */
tally_status spec_resolve_paths(Tally__V1__JobSpec *spec, const char *folder, const struct spec_file *file,
                                struct tally_error *err);
/* Refuses a path that is not absolute. */
tally_status spec_check_paths(const Tally__V1__JobSpec *spec, const struct spec_file *file, struct tally_error *err);

/* The facts of the data, from the files' headers. *ret_facts is the caller's: tally__v1__data_facts__free_unpacked. */
tally_status spec_probe(const Tally__V1__JobSpec *spec, const struct spec_file *file, Tally__V1__DataFacts **ret_facts,
                        struct tally_error *err);

/* The class indices in the files that the job names, against the model's outputs. */
tally_status spec_check_targets(const Tally__V1__JobSpec *spec, const struct model *model, const struct spec_file *file,
                                struct tally_error *err);

/* The safetensors file of model.init, if there is one, against the model's parameters. */
tally_status spec_check_init(const Tally__V1__JobSpec *spec, const struct model *model, const struct spec_file *file,
                             struct tally_error *err);
#endif
