/* The losses: what they want of the model's output and of the targets, and the operation that computes them. */
#include <stdio.h>

#include "model/build.h"
#include "model/layer.h"

enum dataset_target loss_target(const Tally__V1__Loss *loss)
{
    return loss->kind_case == TALLY__V1__LOSS__KIND_MSE_LOSS ? DATASET_VALUES : DATASET_CLASSES;
}

static tally_status loss_fail(const Tally__V1__Loss *loss, const struct spec_file *file, struct tally_error *err,
                              const char *text)
{
    bool mse = loss->kind_case == TALLY__V1__LOSS__KIND_MSE_LOSS;
    if (file)
        return spec_error(file, err, mse ? &loss->mse_loss->base : &loss->cross_entropy->base, NULL, -1, "%s", text);
    return tally_fail(err, TALLY_EINVAL, "model.loss.%s: %s", mse ? "mse_loss" : "cross_entropy", text);
}

/* Where a flatten layer would most likely mend it: before the first linear layer that got more than one dimension. */
static const struct layer *flatten_before(const struct model *model)
{
    for (size_t i = 0; i < model->layer_count; i++)
        if (model->layers[i].type == &layer_linear && model->layers[i].in.ndim > 1)
            return &model->layers[i];
    return NULL;
}

static tally_status output_misfit(const struct model *model, const Tally__V1__Loss *loss, const struct spec_file *file,
                                  const char *wanted, bool may_flatten, struct tally_error *err)
{
    const struct layer *last = &model->layers[model->layer_count - 1],
                       *linear = may_flatten ? flatten_before(model) : NULL;
    char out[96], text[TALLY_ERROR_MESSAGE_MAX / 2], hint[192] = "";
    if (linear)
        snprintf(hint, sizeof hint, ": add a layer {flatten: {}} before layer '%.64s' (linear)", linear->name);
    else if (may_flatten && last->out.ndim > 1)
        snprintf(hint, sizeof hint, ": add a layer {flatten: {}} and a linear one behind it");
    snprintf(text, sizeof text, "%s, but the last layer '%.64s' (%s) gives %s%s", wanted, last->name, last->type->kind,
             shape_text(&last->out, out, sizeof out), hint);
    return loss_fail(loss, file, err, text);
}

tally_status loss_check(const struct model *model, const Tally__V1__Loss *loss, const struct spec_file *file,
                        struct tally_error *err)
{
    const struct shape *out = &model->layers[model->layer_count - 1].out;
    bool classes = model->target_kind == DATASET_CLASSES;
    char wanted[160], shape[96];
    if (loss->kind_case == TALLY__V1__LOSS__KIND_CROSS_ENTROPY) {
        if (!classes)
            return loss_fail(
                loss, file, err,
                "needs class indices as targets, but the data's targets are values (mse_loss takes those)");
        if (out->ndim != 1)
            return output_misfit(model, loss, file, "needs one output a class", true, err);
        return TALLY_OK;
    }
    if (classes)
        return loss_fail(
            loss, file, err,
            "needs values as targets, but the data's targets are class indices (cross_entropy takes those)");
    if (!shape_equal(out, &model->target)) {
        snprintf(wanted, sizeof wanted, "the targets are %s", shape_text(&model->target, shape, sizeof shape));
        return output_misfit(model, loss, file, wanted, model->target.ndim == 1 && out->ndim > 1, err);
    }
    return TALLY_OK;
}

void loss_lower(const struct model *model, struct kernel_op_desc *desc)
{
    const Tally__V1__Loss *loss = model->spec->model->loss;
    const struct shape *out = &model->layers[model->layer_count - 1].out;
    *desc = (struct kernel_op_desc){.rows = 1, .inputs = 1};
    if (loss->kind_case == TALLY__V1__LOSS__KIND_MSE_LOSS) {
        desc->kind = KERNEL_MSE;
        desc->mse.elements = out->elements;
        return;
    }
    desc->kind = KERNEL_CROSS_ENTROPY;
    desc->cross_entropy.classes = out->elements;
    desc->cross_entropy.ignore_index = loss->cross_entropy->ignore_index;
    desc->cross_entropy.label_smoothing = (float)loss->cross_entropy->label_smoothing;
}
