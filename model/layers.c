/* The table of layers, and how a layer says what is wrong with it. */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "model/layer.h"

static const struct layer_type *const types[] = {
    &layer_linear, &layer_conv2d,  &layer_max_pool2d, &layer_avg_pool2d, &layer_relu,
    &layer_tanh,   &layer_sigmoid, &layer_gelu,       &layer_flatten,    &layer_add,
};

const struct layer_type *layer_type_find(Tally__V1__Layer__KindCase kind_case)
{
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (types[i]->kind_case == kind_case)
            return types[i];
    return NULL;
}

tally_status layer_fail(const struct layer_check *check, const char *field, int item, const char *format, ...)
{
    char text[TALLY_ERROR_MESSAGE_MAX];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    bool outer = !field || strcmp(field, "from") == 0 || strcmp(field, "name") == 0;
    if (check->file) {
        /* Any member of the oneof: all are pointers to a message. */
        const ProtobufCMessage *msg = outer ? &check->spec->base : (const ProtobufCMessage *)check->spec->linear;
        return spec_error(check->file, check->err, msg, field, item, "%s", text);
    }
    char index[24] = "";
    if (item >= 0)
        snprintf(index, sizeof index, "[%d]", item);
    return tally_fail(check->err, TALLY_EINVAL, "model.layers[%u]%s%s%s%s%s: %s", check->index, outer ? "" : ".",
                      outer ? "" : check->type->kind, field ? "." : "", field ? field : "", index, text);
}
