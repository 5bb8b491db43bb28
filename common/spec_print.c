#include "common/spec_print.h"

#include <stdlib.h>
#include <string.h>

#include "common/float_text.h"
#include "common/spec_emit.h"
#include "common/spec_internal.h"

/* Making the tree of one message. Every function returns NULL where memory ends. */
struct printing {
    struct yaml_arena *arena;
    bool defaults;
    bool short_forms; /* YAML: shorthand and scalar_or_list; JSON's readers want one form */
};

static struct yaml_node *message_tree(const struct printing *p, const ProtobufCMessage *msg);
static struct yaml_node *short_tree(const struct printing *p, const ProtobufCMessage *msg, const char *shorthand);

static struct yaml_node *base64_node(const struct printing *p, const ProtobufCBinaryData *data)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    char *text = yaml_alloc(p->arena, (data->len + 2) / 3 * 4 + 1);
    struct yaml_node *node = yaml_new(p->arena, YAML_SCALAR);
    if (!text || !node)
        return NULL;
    size_t used = 0;
    for (size_t i = 0; i < data->len; i += 3) {
        size_t left = data->len - i;
        uint32_t bits = (uint32_t)data->data[i] << 16;
        bits |= left > 1 ? (uint32_t)data->data[i + 1] << 8 : 0;
        bits |= left > 2 ? data->data[i + 2] : 0;
        text[used++] = digits[bits >> 18];
        text[used++] = digits[bits >> 12 & 63];
        text[used++] = left > 1 ? digits[bits >> 6 & 63] : '=';
        text[used++] = left > 2 ? digits[bits & 63] : '=';
    }
    node->text = text;
    node->text_bytes = used;
    return node;
}

static struct yaml_node *enum_node(const struct printing *p, const ProtobufCEnumDescriptor *type, int value)
{
    const char *name = spec_enum_text(type, value);
    char number[16];
    if (name)
        return yaml_new_scalar(p->arena, name, strlen(name), false);
    snprintf(number, sizeof number, "%d", value);
    return yaml_new_scalar(p->arena, number, strlen(number), true);
}

/* owner: the type that has the field. */
static struct yaml_node *value_tree(const struct printing *p, const ProtobufCMessageDescriptor *owner,
                                    const ProtobufCFieldDescriptor *field, const void *value)
{
    char text[FLOAT_TEXT_BYTES];
    switch (field->type) {
    case PROTOBUF_C_TYPE_MESSAGE: {
        const ProtobufCMessage *child = *(const ProtobufCMessage *const *)value;
        return child ? short_tree(p, child, spec_rule(owner, field)->shorthand) : yaml_new(p->arena, YAML_MAP);
    }
    case PROTOBUF_C_TYPE_STRING: {
        const char *string = *(const char *const *)value;
        return yaml_new_scalar(p->arena, string ? string : "", string ? strlen(string) : 0, false);
    }
    case PROTOBUF_C_TYPE_BYTES:
        return base64_node(p, value);
    case PROTOBUF_C_TYPE_ENUM:
        return enum_node(p, field->descriptor, *(const int *)value);
    case PROTOBUF_C_TYPE_BOOL: {
        bool set = *(const protobuf_c_boolean *)value != 0;
        return yaml_new_scalar(p->arena, set ? "true" : "false", set ? 4 : 5, true);
    }
    case PROTOBUF_C_TYPE_FLOAT:
        return yaml_new_scalar(p->arena, text, float_text(*(const float *)value, text), true);
    case PROTOBUF_C_TYPE_DOUBLE:
        return yaml_new_scalar(p->arena, text, double_text(*(const double *)value, text), true);
    default:
        return yaml_new_scalar(p->arena, text, spec_integer_text(field, value, text, sizeof text), true);
    }
}

static struct yaml_node *map_tree(const struct printing *p, const ProtobufCMessage *msg,
                                  const ProtobufCFieldDescriptor *field)
{
    struct yaml_node *map = yaml_new(p->arena, YAML_MAP);
    size_t n = spec_count(msg, field);
    for (size_t i = 0; map && i < n; i++) {
        const ProtobufCMessage *entry = spec_message(msg, field, i);
        const ProtobufCFieldDescriptor *key = protobuf_c_message_descriptor_get_field_by_name(entry->descriptor, "key");
        const ProtobufCFieldDescriptor *value =
            protobuf_c_message_descriptor_get_field_by_name(entry->descriptor, "value");
        struct yaml_node *key_node = value_tree(p, entry->descriptor, key, spec_value(entry, key, 0));
        struct yaml_node *value_node = value_tree(p, entry->descriptor, value, spec_value(entry, value, 0));
        if (!key_node || !value_node || !yaml_append(p->arena, map, key_node, value_node))
            return NULL;
    }
    return map;
}

static struct yaml_node *field_tree(const struct printing *p, const ProtobufCMessage *msg,
                                    const ProtobufCFieldDescriptor *field, bool may_be_scalar)
{
    size_t n = spec_count(msg, field);
    if (spec_is_map(field))
        return map_tree(p, msg, field);
    if (field->label != PROTOBUF_C_LABEL_REPEATED ||
        (n == 1 && may_be_scalar && p->short_forms && spec_rule(msg->descriptor, field)->scalar_or_list))
        return value_tree(p, msg->descriptor, field, spec_value(msg, field, 0));
    struct yaml_node *list = yaml_new(p->arena, YAML_LIST);
    for (size_t i = 0; list && i < n; i++) {
        struct yaml_node *value = value_tree(p, msg->descriptor, field, spec_value(msg, field, i));
        if (!value || !yaml_append(p->arena, list, NULL, value))
            return NULL;
    }
    return list;
}

/* Whether an absent field is printed all the same. */
static bool has_shown_default(const struct printing *p, const ProtobufCMessage *msg,
                              const ProtobufCFieldDescriptor *field)
{
    const struct spec_message_info *info = spec_message_info(msg->descriptor);
    if (!p->defaults || spec_in_oneof(field))
        return false;
    if (info && info->proto3)
        return field->type != PROTOBUF_C_TYPE_MESSAGE || field->label == PROTOBUF_C_LABEL_REPEATED;
    return field->label == PROTOBUF_C_LABEL_OPTIONAL && field->default_value != NULL;
}

static struct yaml_node *message_tree(const struct printing *p, const ProtobufCMessage *msg)
{
    struct yaml_node *map = yaml_new(p->arena, YAML_MAP);
    for (unsigned i = 0; map && i < msg->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &msg->descriptor->fields[i];
        if (spec_count(msg, field) == 0 && !has_shown_default(p, msg, field))
            continue;
        struct yaml_node *key = yaml_new_scalar(p->arena, field->name, strlen(field->name), false);
        struct yaml_node *value = field_tree(p, msg, field, true);
        if (!key || !value || !yaml_append(p->arena, map, key, value))
            return NULL;
    }
    return map;
}

/* Where the field that shorthand names is the only one to print, it stands for the whole message. */
static struct yaml_node *short_tree(const struct printing *p, const ProtobufCMessage *msg, const char *shorthand)
{
    const ProtobufCFieldDescriptor *lone =
        shorthand && p->short_forms ? protobuf_c_message_descriptor_get_field_by_name(msg->descriptor, shorthand)
                                    : NULL;
    for (unsigned i = 0; lone && i < msg->descriptor->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &msg->descriptor->fields[i];
        bool printed = spec_count(msg, field) > 0 || has_shown_default(p, msg, field);
        if (printed != (field == lone))
            return message_tree(p, msg);
    }
    return lone ? field_tree(p, msg, lone, false) : message_tree(p, msg);
}

/* ---- the interface ---- */

enum form { FORM_YAML, FORM_JSON };

static tally_status no_memory(const ProtobufCMessage *msg, struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "no memory to print a %s", msg->descriptor->short_name);
}

static tally_status print(FILE *out, const ProtobufCMessage *msg, unsigned flags, enum form form,
                          struct tally_error *err)
{
    struct yaml_arena arena = {0};
    struct printing p = {&arena, flags & SPEC_PRINT_DEFAULTS, form == FORM_YAML};
    struct yaml_node *tree = message_tree(&p, msg);
    if (tree && form == FORM_YAML)
        emit_yaml(out, tree);
    else if (tree)
        emit_json(out, tree, flags & SPEC_PRINT_COMPACT);
    yaml_arena_free(&arena);
    if (!tree)
        return no_memory(msg, err);
    if (ferror(out))
        return tally_fail_errno(err, "cannot print a %s", msg->descriptor->short_name);
    return TALLY_OK;
}

tally_status spec_print_yaml(FILE *out, const ProtobufCMessage *msg, unsigned flags, struct tally_error *err)
{
    return print(out, msg, flags, FORM_YAML, err);
}

tally_status spec_print_json(FILE *out, const ProtobufCMessage *msg, unsigned flags, struct tally_error *err)
{
    return print(out, msg, flags, FORM_JSON, err);
}

tally_status spec_yaml_text(const ProtobufCMessage *msg, unsigned flags, char **ret_text, struct tally_error *err)
{
    char *text = NULL;
    size_t bytes = 0;
    FILE *out = open_memstream(&text, &bytes);
    if (!out)
        return no_memory(msg, err);
    tally_status status = spec_print_yaml(out, msg, flags, err);
    if (fclose(out) != 0 && status == TALLY_OK)
        status = no_memory(msg, err);
    if (status == TALLY_OK)
        *ret_text = text;
    else
        free(text);
    return status;
}

tally_status spec_to_json(const ProtobufCMessage *msg, unsigned flags, json_t **ret_json, struct tally_error *err)
{
    struct yaml_arena arena = {0};
    struct printing p = {&arena, flags & SPEC_PRINT_DEFAULTS, false};
    struct yaml_node *tree = message_tree(&p, msg);
    json_t *json = tree ? emit_jansson(tree) : NULL;
    yaml_arena_free(&arena);
    if (!json)
        return tally_fail(err, TALLY_EINVAL,
                          "a %s cannot be made into JSON: a string is not UTF-8, or no memory is left",
                          msg->descriptor->short_name);
    *ret_json = json;
    return TALLY_OK;
}
