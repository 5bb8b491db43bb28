#ifndef MODEL_BUILD_H
#define MODEL_BUILD_H
/* The pieces of model_build, inside model/ alone. */
#include "common/error.h"
#include "common/spec_file.h"
#include "kernels/kernels.h"
#include "model/model.h"

/* model_build with the positions of a job file, for its errors. file may be NULL; otherwise spec is the message that it
 * read (or a part of it). */
tally_status model_build_at(const Tally__V1__JobSpec *spec, const Tally__V1__DataFacts *facts,
                            const struct spec_file *file, struct model **ret_model, struct tally_error *err);

/* Writes what the layers infer (in_features, pairs ...) and their names into a spec of the same layers. TALLY_ENOMEM.
 */
tally_status model_complete_layers(const struct model *model, Tally__V1__Model *spec, struct tally_error *err);

/* What the job's loss wants as targets. */
enum dataset_target loss_target(const Tally__V1__Loss *loss);
/* Does the model's output fit the loss and the targets? */
tally_status loss_check(const struct model *model, const Tally__V1__Loss *loss, const struct spec_file *file,
                        struct tally_error *err);
/* The loss as an operation; rows are 1 and strides are not set. */
void loss_lower(const struct model *model, struct kernel_op_desc *desc);

/* Gives every parameter its offset and cuts the flat vector. TALLY_EINVAL: too large. */
tally_status slices_build(struct model *model, struct tally_error *err);
#endif
