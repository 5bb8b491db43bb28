#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/spec_internal.h"

bool spec_in_oneof(const ProtobufCFieldDescriptor *field)
{
    return field->flags & PROTOBUF_C_FIELD_FLAG_ONEOF;
}

void *spec_member(const ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field)
{
    return (char *)(uintptr_t)msg + field->offset;
}

static const void *quantifier(const ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field)
{
    return (const char *)msg + field->quantifier_offset;
}

size_t spec_value_bytes(ProtobufCType type)
{
    switch (type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
    case PROTOBUF_C_TYPE_FLOAT:
    case PROTOBUF_C_TYPE_ENUM:
        return 4;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
    case PROTOBUF_C_TYPE_DOUBLE:
        return 8;
    case PROTOBUF_C_TYPE_BOOL:
        return sizeof(protobuf_c_boolean);
    case PROTOBUF_C_TYPE_BYTES:
        return sizeof(ProtobufCBinaryData);
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_MESSAGE:
        break;
    }
    return sizeof(void *);
}

/* Of a scalar without presence (proto3). */
static bool is_zero(const ProtobufCFieldDescriptor *field, const void *value)
{
    static const char zeros[sizeof(ProtobufCBinaryData)];
    if (field->type == PROTOBUF_C_TYPE_STRING) {
        const char *text = *(const char *const *)value;
        return !text || text[0] == '\0';
    }
    if (field->type == PROTOBUF_C_TYPE_BYTES)
        return ((const ProtobufCBinaryData *)value)->len == 0;
    return memcmp(value, zeros, spec_value_bytes(field->type)) == 0;
}

size_t spec_count(const ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field)
{
    const void *member = spec_member(msg, field);
    if (field->label == PROTOBUF_C_LABEL_REPEATED)
        return *(const size_t *)quantifier(msg, field);
    if (spec_in_oneof(field) && *(const uint32_t *)quantifier(msg, field) != field->id)
        return 0;
    if (field->type == PROTOBUF_C_TYPE_MESSAGE)
        return *(const void *const *)member != NULL;
    if (spec_in_oneof(field))
        return 1;
    if (field->label == PROTOBUF_C_LABEL_NONE)
        return !is_zero(field, member);
    if (field->type == PROTOBUF_C_TYPE_STRING) {
        const void *text = *(const void *const *)member;
        return text && text != field->default_value;
    }
    if (field->label == PROTOBUF_C_LABEL_REQUIRED)
        return 1;
    return *(const protobuf_c_boolean *)quantifier(msg, field) != 0;
}

const void *spec_value(const ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field, size_t i)
{
    const void *member = spec_member(msg, field);
    if (field->label == PROTOBUF_C_LABEL_REPEATED)
        return *(const char *const *)member + i * spec_value_bytes(field->type);
    return member;
}

const ProtobufCMessage *spec_message(const ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field, size_t i)
{
    return *(const ProtobufCMessage *const *)spec_value(msg, field, i);
}

double spec_number(const ProtobufCFieldDescriptor *field, const void *value)
{
    switch (field->type) {
    case PROTOBUF_C_TYPE_INT32:
    case PROTOBUF_C_TYPE_SINT32:
    case PROTOBUF_C_TYPE_SFIXED32:
    case PROTOBUF_C_TYPE_ENUM:
        return *(const int32_t *)value;
    case PROTOBUF_C_TYPE_UINT32:
    case PROTOBUF_C_TYPE_FIXED32:
        return *(const uint32_t *)value;
    case PROTOBUF_C_TYPE_INT64:
    case PROTOBUF_C_TYPE_SINT64:
    case PROTOBUF_C_TYPE_SFIXED64:
        return (double)*(const int64_t *)value;
    case PROTOBUF_C_TYPE_UINT64:
    case PROTOBUF_C_TYPE_FIXED64:
        return (double)*(const uint64_t *)value;
    case PROTOBUF_C_TYPE_FLOAT:
        return (double)*(const float *)value;
    case PROTOBUF_C_TYPE_DOUBLE:
        return *(const double *)value;
    case PROTOBUF_C_TYPE_BOOL:
        return *(const protobuf_c_boolean *)value;
    case PROTOBUF_C_TYPE_STRING:
    case PROTOBUF_C_TYPE_BYTES:
    case PROTOBUF_C_TYPE_MESSAGE:
        break;
    }
    return 0;
}

size_t spec_integer_text(const ProtobufCFieldDescriptor *field, const void *value, char *text, size_t text_bytes)
{
    int n = 0;
    bool wide = spec_value_bytes(field->type) == 8;
    if (spec_is_unsigned(field))
        n = snprintf(text, text_bytes, "%" PRIu64, wide ? *(const uint64_t *)value : *(const uint32_t *)value);
    else
        n = snprintf(text, text_bytes, "%" PRId64, wide ? *(const int64_t *)value : *(const int32_t *)value);
    return (size_t)n;
}

static tally_status fill_field(ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field, struct tally_error *err)
{
    if (field->type == PROTOBUF_C_TYPE_MESSAGE) {
        tally_status status = TALLY_OK;
        size_t n = spec_count(msg, field);
        for (size_t i = 0; i < n && status == TALLY_OK; i++)
            status = spec_fill_defaults((ProtobufCMessage *)(uintptr_t)spec_message(msg, field, i), err);
        return status;
    }
    if (field->label != PROTOBUF_C_LABEL_OPTIONAL || spec_in_oneof(field) || !field->default_value ||
        spec_count(msg, field) > 0)
        return TALLY_OK;
    void *member = spec_member(msg, field);
    if (field->type == PROTOBUF_C_TYPE_STRING) {
        char *text = strdup(field->default_value);
        if (!text)
            return tally_fail(err, TALLY_ENOMEM, "no memory for the default of %s", field->name);
        *(char **)member = text;
        return TALLY_OK;
    }
    if (field->type == PROTOBUF_C_TYPE_BYTES)
        return TALLY_OK;
    memcpy(member, field->default_value, spec_value_bytes(field->type));
    *(protobuf_c_boolean *)((char *)msg + field->quantifier_offset) = 1;
    return TALLY_OK;
}

tally_status spec_fill_defaults(ProtobufCMessage *msg, struct tally_error *err)
{
    tally_status status = TALLY_OK;
    for (unsigned i = 0; i < msg->descriptor->n_fields && status == TALLY_OK; i++)
        status = fill_field(msg, &msg->descriptor->fields[i], err);
    return status;
}
