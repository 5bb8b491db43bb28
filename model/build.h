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

/*
 * The stage and segment of every layer: from the placement (a layer that it does not name follows the layer before it,
 * the first one goes to stage 0; a max pool that is one operation with a convolution goes with it), or, where only
 * `stages` is given, `stages` x `chunks` runs of operations with the largest cost as small as it can be, dealt out in
 * turn. pipeline may be NULL: one stage. TALLY_EINVAL: an unknown layer, one that is placed twice, a stage without an
 * operation.
 */
tally_status stages_build(struct model *model, const Tally__V1__Pipeline *pipeline, const struct spec_file *file,
                          struct tally_error *err);

/* How often the layers read each layer's output. readers: layer_count. */
void count_readers(const struct model *model, uint32_t *readers);
/* Layers [i, return) are one operation, described in *ret_desc for one sample: what the kind absorbs, if it is of the
 * same stage and nobody else reads what comes between. Layer i is no view. */
uint32_t fuse_layers(const struct model *model, const uint32_t *readers, uint32_t i, struct kernel_op_desc *ret_desc);

/* What an operation of layers [begin, end) costs on one sample, in floating-point operations that take as long: its
 * own, and the bytes that it moves. backward: the gradients of parameters, and of its inputs. */
struct layers_cost {
    uint64_t forward, backward;
};
struct layers_cost layers_cost(const struct model *model, uint32_t begin, uint32_t end);

/* Gives every parameter its offset and cuts the flat vector. TALLY_EINVAL: too large. */
tally_status slices_build(struct model *model, struct tally_error *err);
#endif
