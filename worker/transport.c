#include "worker/transport.h"

#include <stdio.h>

const char *transport_slice_text(const struct model *model, uint32_t slice, char *text, size_t size)
{
    const struct slice *s = &model->slices[slice];
    const char *first = model->params[s->param_begin].name;
    if (s->param_end - s->param_begin == 1)
        snprintf(text, size, "slice %u (%s)", slice, first);
    else
        snprintf(text, size, "slice %u (%s .. %s)", slice, first, model->params[s->param_end - 1].name);
    return text;
}
