/* Which layers become one operation. */
#include "model/build.h"
#include "model/layer.h"

void count_readers(const struct model *model, uint32_t *readers)
{
    for (size_t i = 0; i < model->layer_count; i++)
        readers[i] = 0;
    for (size_t i = 0; i < model->layer_count; i++)
        for (size_t k = 0; k < model->layers[i].input_count; k++)
            if (model->layers[i].inputs[k] != MODEL_INPUT)
                readers[model->layers[i].inputs[k]]++;
}

/* Is the next layer the only reader of layer i, in the same stage, and reads nothing else? */
static bool only_reader_is_next(const struct model *model, const uint32_t *readers, uint32_t i)
{
    if (i + 1 >= model->layer_count || readers[i] != 1)
        return false;
    const struct layer *next = &model->layers[i + 1];
    return next->input_count == 1 && next->inputs[0] == (int32_t)i && next->stage == model->layers[i].stage;
}

uint32_t fuse_layers(const struct model *model, const uint32_t *readers, uint32_t i, struct kernel_op_desc *ret_desc)
{
    const struct layer *layer = &model->layers[i];
    *ret_desc = (struct kernel_op_desc){.inputs = layer->input_count};
    layer->type->lower(layer, ret_desc);
    while (layer->type->absorb && only_reader_is_next(model, readers, i) &&
           layer->type->absorb(ret_desc, &model->layers[i + 1]))
        i++;
    return i + 1;
}
