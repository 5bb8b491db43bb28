/*
 * YAML nodes onto a message: keys, types, duplicates, oneofs. What a value may be beyond its type is checked on the
 * finished message (spec_check.c). The message is whole at every moment, so that it can be freed after any error.
 */
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/limits.h"
#include "common/spec_internal.h"
#include "common/spec_scalar.h"

/* A field that a node is read into. index: of the element, -1: not repeated. */
struct target {
    ProtobufCMessage *msg;
    const ProtobufCFieldDescriptor *field;
    int index;
};

static tally_status read_message(struct spec_file *f, const struct yaml_node *node, ProtobufCMessage *msg,
                                 const ProtobufCFieldDescriptor *short_field, struct tally_error *err);

static tally_status no_memory(const struct spec_file *f, struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "%s: no memory to read it", f->name);
}

/* "found X, expected Y[, did you mean Z?]" at a node. */
static tally_status refuse(const struct spec_file *f, const struct target *t, const struct yaml_node *node,
                           const char *hint, struct tally_error *err)
{
    char path[SPEC_PATH_BYTES];
    char found[SPEC_TEXT_BYTES] = "";
    char expected[SPEC_TEXT_BYTES] = "";
    struct spec_words found_words = {.text = found, .bytes = sizeof found};
    struct spec_words expected_words = {.text = expected, .bytes = sizeof expected};
    spec_path(f, t->msg, t->field->name, t->index, path, sizeof path);
    spec_found_text(&found_words, node);
    spec_expect_text(&expected_words, t->msg->descriptor, t->field, t->index >= 0);
    if (hint && hint[0])
        return spec_report(f, err, node, path, "found %s, expected %s (did you mean %s?)", found, expected, hint);
    return spec_report(f, err, node, path, "found %s, expected %s", found, expected);
}

/* Quotes around what would have been right without them. */
static tally_status refuse_quoted(const struct spec_file *f, const struct target *t, const struct yaml_node *node,
                                  bool right, struct tally_error *err)
{
    char hint[SPEC_TEXT_BYTES];
    snprintf(hint, sizeof hint, "%.64s without the quotes", node->text);
    return refuse(f, t, node, right ? hint : NULL, err);
}

/* ---- one scalar ---- */

static tally_status store_integer(const struct spec_file *f, const struct target *t, const struct yaml_node *node,
                                  bool negative, uint64_t magnitude, void *dst, struct tally_error *err)
{
    bool wide = spec_value_bytes(t->field->type) == 8;
    uint64_t max = spec_is_unsigned(t->field) ? (wide ? UINT64_MAX : UINT32_MAX)
                                              : (wide ? (uint64_t)INT64_MAX : (uint64_t)INT32_MAX) + (negative ? 1 : 0);
    if (magnitude > max || (negative && spec_is_unsigned(t->field)))
        return refuse(f, t, node, NULL, err);
    uint64_t value = negative ? 0 - magnitude : magnitude;
    if (wide)
        memcpy(dst, &value, sizeof value);
    else
        memcpy(dst, &(uint32_t){(uint32_t)value}, sizeof(uint32_t));
    return TALLY_OK;
}

static tally_status read_integer(const struct spec_file *f, const struct target *t, const struct yaml_node *node,
                                 void *dst, struct tally_error *err)
{
    bool negative = false;
    uint64_t magnitude = 0;
    enum scalar_problem problem = scalar_integer(node->text, &negative, &magnitude);
    if (!node->plain)
        return refuse_quoted(f, t, node, problem == SCALAR_OK, err);
    if (problem == SCALAR_OK)
        return store_integer(f, t, node, negative, magnitude, dst, err);
    char hint[SPEC_TEXT_BYTES];
    scalar_integer_hint(node->text, hint, sizeof hint);
    return refuse(f, t, node, hint, err);
}

static tally_status read_number(const struct spec_file *f, const struct target *t, const struct yaml_node *node,
                                void *dst, struct tally_error *err)
{
    double value = 0;
    enum scalar_problem problem = scalar_double(node->text, &value);
    bool single = t->field->type == PROTOBUF_C_TYPE_FLOAT;
    if (!node->plain)
        return refuse_quoted(f, t, node, problem == SCALAR_OK, err);
    if (problem == SCALAR_WRONG) {
        char hint[SPEC_TEXT_BYTES];
        scalar_double_hint(node->text, hint, sizeof hint);
        return refuse(f, t, node, hint, err);
    }
    /* As Python does on the way to a float32 tensor: to double first, then rounded once. */
    float rounded = problem == SCALAR_OK ? (float)value : 0;
    if (problem == SCALAR_TOO_LARGE || (single && !isfinite(rounded))) {
        char path[SPEC_PATH_BYTES];
        spec_path(f, t->msg, t->field->name, t->index, path, sizeof path);
        return spec_report(f, err, node, path, "found '%.40s', expected a number of magnitude at most %.2g", node->text,
                           single ? (double)FLT_MAX : DBL_MAX);
    }
    if (single)
        memcpy(dst, &rounded, sizeof rounded);
    else
        memcpy(dst, &value, sizeof value);
    return TALLY_OK;
}

static tally_status read_bool(const struct spec_file *f, const struct target *t, const struct yaml_node *node,
                              void *dst, struct tally_error *err)
{
    bool value = false;
    bool right = scalar_bool(node->text, &value);
    if (!node->plain)
        return refuse_quoted(f, t, node, right, err);
    if (!right)
        return refuse(f, t, node, scalar_bool_hint(node->text), err);
    *(protobuf_c_boolean *)dst = value;
    return TALLY_OK;
}

static tally_status read_enum(const struct spec_file *f, const struct target *t, const struct yaml_node *node,
                              void *dst, struct tally_error *err)
{
    int value = 0;
    if (spec_enum_parse(t->field->descriptor, node->text, &value) != TALLY_OK)
        return refuse(f, t, node, spec_nearest_enum(t->field->descriptor, node->text), err);
    memcpy(dst, &value, sizeof value);
    return TALLY_OK;
}

static int base64_digit(char c)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    const char *at = c ? strchr(digits, c) : NULL;
    return at ? (int)(at - digits) : -1;
}

static tally_status read_bytes(const struct spec_file *f, const struct target *t, const struct yaml_node *node,
                               void *dst, struct tally_error *err)
{
    size_t n = node->text_bytes;
    if (n % 4 != 0)
        return refuse(f, t, node, NULL, err);
    size_t padding = n > 0 && node->text[n - 1] == '=' ? 1 + (node->text[n - 2] == '=') : 0;
    uint8_t *data = malloc(n / 4 * 3 + 1);
    if (!data)
        return no_memory(f, err);
    size_t used = 0;
    uint32_t bits = 0;
    for (size_t i = 0; i < n; i++) {
        int digit = i >= n - padding ? 0 : base64_digit(node->text[i]);
        if (digit < 0) {
            free(data);
            return refuse(f, t, node, NULL, err);
        }
        bits = bits << 6 | (uint32_t)digit;
        if (i % 4 == 3) {
            data[used++] = (uint8_t)(bits >> 16);
            data[used++] = (uint8_t)(bits >> 8);
            data[used++] = (uint8_t)bits;
        }
    }
    *(ProtobufCBinaryData *)dst = (ProtobufCBinaryData){.len = used - padding, .data = data};
    return TALLY_OK;
}

static tally_status read_string(const struct spec_file *f, const struct yaml_node *node, void *dst,
                                struct tally_error *err)
{
    char *copy = strndup(node->text, node->text_bytes);
    if (!copy)
        return no_memory(f, err);
    *(char **)dst = copy;
    return TALLY_OK;
}

/* Writes *dst on success only. */
static tally_status read_scalar(const struct spec_file *f, const struct target *t, const struct yaml_node *node,
                                void *dst, struct tally_error *err)
{
    if (node->kind != YAML_SCALAR || yaml_is_null(node))
        return refuse(f, t, node, NULL, err);
    switch (t->field->type) {
    case PROTOBUF_C_TYPE_DOUBLE:
    case PROTOBUF_C_TYPE_FLOAT:
        return read_number(f, t, node, dst, err);
    case PROTOBUF_C_TYPE_BOOL:
        return read_bool(f, t, node, dst, err);
    case PROTOBUF_C_TYPE_ENUM:
        return read_enum(f, t, node, dst, err);
    case PROTOBUF_C_TYPE_STRING:
        return read_string(f, node, dst, err);
    case PROTOBUF_C_TYPE_BYTES:
        return read_bytes(f, t, node, dst, err);
    default:
        return read_integer(f, t, node, dst, err);
    }
}

/* ---- one message in a field ---- */

/* Whether a message of this type needs no key. */
static bool empty_is_enough(const ProtobufCMessageDescriptor *type)
{
    for (unsigned i = 0; i < type->n_fields; i++) {
        if (spec_in_oneof(&type->fields[i]) || spec_rule(type, &type->fields[i])->required)
            return false;
    }
    return true;
}

/* A new message behind *slot, whose pointer is set (and *count grows, if given) before anything can fail. */
static tally_status read_child(struct spec_file *f, const struct target *t, const struct yaml_node *node,
                               const char *map_key, ProtobufCMessage **slot, size_t *count, struct tally_error *err)
{
    const ProtobufCMessageDescriptor *type = t->field->descriptor;
    const Tally__V1__FieldRule *rule = spec_rule(t->msg->descriptor, t->field);
    const ProtobufCFieldDescriptor *short_field = NULL;
    if (map_key)
        short_field = protobuf_c_message_descriptor_get_field_by_name(type, "value");
    else if (node->kind != YAML_MAP && rule->shorthand)
        short_field = protobuf_c_message_descriptor_get_field_by_name(type, rule->shorthand);
    if (!short_field && node->kind != YAML_MAP) {
        bool enough = yaml_is_null(node) && empty_is_enough(type);
        return refuse(f, t, node, enough ? "{}, which takes every default" : NULL, err);
    }
    ProtobufCMessage *msg = malloc(type->sizeof_message);
    if (!msg)
        return no_memory(f, err);
    type->message_init(msg);
    *slot = msg;
    if (count)
        ++*count;
    struct spec_place place = {.msg = msg,
                               .parent = t->msg,
                               .field = t->field,
                               .index = t->index > 0 ? (size_t)t->index : 0,
                               .map_key = map_key,
                               .node = node,
                               .short_field = map_key ? NULL : short_field};
    if (!spec_places_add(f->places, &place))
        return no_memory(f, err);
    return read_message(f, node, msg, short_field, err);
}

/* ---- fields ---- */

static tally_status read_one(struct spec_file *f, const struct target *t, const struct yaml_node *node,
                             struct tally_error *err)
{
    void *member = spec_member(t->msg, t->field);
    void *quantifier = (char *)t->msg + t->field->quantifier_offset;
    tally_status status;
    if (t->field->type == PROTOBUF_C_TYPE_MESSAGE) {
        ProtobufCMessage *child = NULL;
        status = read_child(f, t, node, NULL, &child, NULL, err);
        if (child) {
            *(ProtobufCMessage **)member = child;
            if (spec_in_oneof(t->field))
                *(uint32_t *)quantifier = t->field->id;
        }
        return status;
    }
    status = read_scalar(f, t, node, member, err);
    if (status != TALLY_OK)
        return status;
    if (spec_in_oneof(t->field))
        *(uint32_t *)quantifier = t->field->id;
    else if (t->field->label == PROTOBUF_C_LABEL_OPTIONAL && t->field->type != PROTOBUF_C_TYPE_STRING)
        *(protobuf_c_boolean *)quantifier = 1;
    return TALLY_OK;
}

/* Room for n elements, none of them there yet. */
static void *reserve(const struct target *t, size_t n)
{
    void *array = calloc(n > 0 ? n : 1, spec_value_bytes(t->field->type));
    *(void **)spec_member(t->msg, t->field) = array;
    return array;
}

static tally_status read_element(struct spec_file *f, const struct target *t, const struct yaml_node *node,
                                 const char *map_key, char *array, struct tally_error *err)
{
    size_t *count = (size_t *)((char *)t->msg + t->field->quantifier_offset);
    char *slot = array + *count * spec_value_bytes(t->field->type);
    if (t->field->type == PROTOBUF_C_TYPE_MESSAGE)
        return read_child(f, t, node, map_key, (ProtobufCMessage **)slot, count, err);
    tally_status status = read_scalar(f, t, node, slot, err);
    if (status == TALLY_OK)
        ++*count;
    return status;
}

static tally_status read_list(struct spec_file *f, ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field,
                              const struct yaml_node *node, struct tally_error *err)
{
    const Tally__V1__FieldRule *rule = spec_rule(msg->descriptor, field);
    struct target t = {msg, field, -1};
    bool single = node->kind != YAML_LIST && rule->scalar_or_list;
    if (node->kind != YAML_LIST && (!single || yaml_is_null(node)))
        return refuse(f, &t, node, NULL, err);
    if (single && node->kind == YAML_MAP && field->type != PROTOBUF_C_TYPE_MESSAGE)
        return refuse(f, &t, node, NULL, err);
    size_t n = single ? 1 : node->count;
    if (rule->has_max_items && n > rule->max_items)
        return spec_error(f, err, msg, field->name, -1, "has %zu elements, expected %s%u", n,
                          rule->has_min_items && rule->min_items == rule->max_items ? "" : "at most ", rule->max_items);
    if (rule->has_min_items && n < rule->min_items)
        return spec_error(f, err, msg, field->name, -1, "has %zu elements, expected at least %u", n, rule->min_items);
    char *array = reserve(&t, n);
    if (!array)
        return no_memory(f, err);
    tally_status status = TALLY_OK;
    for (size_t i = 0; i < n && status == TALLY_OK; i++) {
        t.index = single ? -1 : (int)i;
        /* A scalar that stands for a list is worded as the list. */
        status = read_element(f, &t, single ? node : node->items[i].value, NULL, array, err);
    }
    return status;
}

static int compare_keys(const void *a, const void *b)
{
    const struct yaml_node *left = *(const struct yaml_node *const *)a;
    const struct yaml_node *right = *(const struct yaml_node *const *)b;
    int order = strcmp(left->text, right->text);
    if (order != 0)
        return order;
    if (left->line != right->line)
        return left->line < right->line ? -1 : 1;
    return (left->column > right->column) - (left->column < right->column);
}

static tally_status refuse_duplicate(const struct spec_file *f, const ProtobufCMessage *msg, const char *field,
                                     const struct yaml_node *first, const struct yaml_node *second,
                                     struct tally_error *err)
{
    char path[SPEC_PATH_BYTES];
    struct spec_words w = {.text = path, .bytes = sizeof path};
    w.used = spec_path(f, msg, field, -1, path, sizeof path);
    spec_say(&w, "%s%s", w.used > 0 ? "." : "", second->text);
    return spec_report(f, err, second, path, "is given twice, first in line %d", first->line);
}

/* Sorted, equal keys are neighbours. */
static tally_status check_map_keys(const struct spec_file *f, const ProtobufCMessage *msg,
                                   const ProtobufCFieldDescriptor *field, const struct yaml_node *node,
                                   struct tally_error *err)
{
    const struct yaml_node **keys = malloc((node->count + 1) * sizeof *keys);
    if (!keys)
        return no_memory(f, err);
    for (size_t i = 0; i < node->count; i++)
        keys[i] = node->items[i].key;
    qsort(keys, node->count, sizeof *keys, compare_keys);
    tally_status status = TALLY_OK;
    for (size_t i = 1; i < node->count && status == TALLY_OK; i++) {
        if (strcmp(keys[i - 1]->text, keys[i]->text) == 0)
            status = refuse_duplicate(f, msg, field->name, keys[i - 1], keys[i], err);
    }
    free(keys);
    return status;
}

static tally_status read_map(struct spec_file *f, ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field,
                             const struct yaml_node *node, struct tally_error *err)
{
    struct target t = {msg, field, -1};
    if (node->kind != YAML_MAP)
        return refuse(f, &t, node, NULL, err);
    tally_status status = check_map_keys(f, msg, field, node, err);
    if (status != TALLY_OK)
        return status;
    char *array = reserve(&t, node->count);
    if (!array)
        return no_memory(f, err);
    for (size_t i = 0; i < node->count && status == TALLY_OK; i++) {
        t.index = (int)i;
        status = read_element(f, &t, node->items[i].value, node->items[i].key->text, array, err);
    }
    return status;
}

/* An element of a map field: its key and, from node, its value. */
static tally_status read_map_entry(struct spec_file *f, const struct yaml_node *node, ProtobufCMessage *entry,
                                   const ProtobufCFieldDescriptor *value_field, struct tally_error *err)
{
    const struct spec_place *place = spec_places_find(f->places, entry);
    const ProtobufCFieldDescriptor *key_field =
        protobuf_c_message_descriptor_get_field_by_name(entry->descriptor, "key");
    struct yaml_node key = {.kind = YAML_SCALAR,
                            .plain = true,
                            .line = node->line,
                            .column = node->column,
                            .set_path = node->set_path,
                            .text = place->map_key,
                            .text_bytes = strlen(place->map_key)};
    struct target t = {entry, key_field, -1};
    tally_status status = key_field->type == PROTOBUF_C_TYPE_STRING
                              ? read_string(f, &key, spec_member(entry, key_field), err)
                              : read_one(f, &t, &key, err);
    t.field = value_field;
    return status == TALLY_OK ? read_one(f, &t, node, err) : status;
}

/* ---- a mapping onto a message ---- */

static tally_status refuse_unknown(const struct spec_file *f, const ProtobufCMessage *msg, const struct yaml_node *key,
                                   struct tally_error *err)
{
    char path[SPEC_PATH_BYTES];
    char known[SPEC_TEXT_BYTES] = "";
    struct spec_words path_words = {.text = path, .bytes = sizeof path};
    struct spec_words known_words = {.text = known, .bytes = sizeof known};
    path_words.used = spec_path(f, msg, NULL, -1, path, sizeof path);
    spec_say(&path_words, "%s%.64s", path_words.used > 0 ? "." : "", key->text);
    const char *nearest = spec_nearest_field(msg->descriptor, key->text);
    if (nearest)
        return spec_report(f, err, key, path, "unknown key (did you mean %s?)", nearest);
    spec_fields_text(&known_words, msg->descriptor, NULL);
    if (known[0] == '\0')
        return spec_report(f, err, key, path, "unknown key, expected none");
    return spec_report(f, err, key, path, "unknown key, expected one of %s", known);
}

/* Another kind of the same oneof that was given before. */
static const ProtobufCFieldDescriptor *other_kind(const ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field)
{
    if (!spec_in_oneof(field))
        return NULL;
    uint32_t given = *(const uint32_t *)((const char *)msg + field->quantifier_offset);
    return given ? protobuf_c_message_descriptor_get_field(msg->descriptor, given) : NULL;
}

static tally_status read_pair(struct spec_file *f, ProtobufCMessage *msg, const struct yaml_node *node, size_t i,
                              struct tally_error *err)
{
    const struct yaml_node *key = node->items[i].key;
    const struct yaml_node *value = node->items[i].value;
    const ProtobufCFieldDescriptor *field = protobuf_c_message_descriptor_get_field_by_name(msg->descriptor, key->text);
    if (!field)
        return refuse_unknown(f, msg, key, err);
    for (size_t j = 0; j < i; j++) {
        if (strcmp(node->items[j].key->text, key->text) == 0)
            return refuse_duplicate(f, msg, NULL, node->items[j].key, key, err);
    }
    const ProtobufCFieldDescriptor *other = other_kind(msg, field);
    if (other) {
        char kinds[SPEC_TEXT_BYTES] = "";
        char path[SPEC_PATH_BYTES];
        struct spec_words w = {.text = kinds, .bytes = sizeof kinds};
        spec_fields_text(&w, msg->descriptor, field);
        spec_path(f, msg, field->name, -1, path, sizeof path);
        return spec_report(f, err, key, path, "%s is given too, expected exactly one of %s", other->name, kinds);
    }
    if (spec_is_map(field))
        return read_map(f, msg, field, value, err);
    if (field->label == PROTOBUF_C_LABEL_REPEATED)
        return read_list(f, msg, field, value, err);
    return read_one(f, &(struct target){msg, field, -1}, value, err);
}

/* short_field: node is not a mapping of msg's fields but this field alone. */
static tally_status read_message(struct spec_file *f, const struct yaml_node *node, ProtobufCMessage *msg,
                                 const ProtobufCFieldDescriptor *short_field, struct tally_error *err)
{
    const struct spec_place *place = spec_places_find(f->places, msg);
    if (place->map_key)
        return read_map_entry(f, node, msg, short_field, err);
    if (short_field) {
        if (short_field->label == PROTOBUF_C_LABEL_REPEATED)
            return read_list(f, msg, short_field, node, err);
        return read_one(f, &(struct target){msg, short_field, -1}, node, err);
    }
    tally_status status = TALLY_OK;
    /* An unknown key ends the loop, so there are never more pairs than fields to compare. */
    for (size_t i = 0; i < node->count && status == TALLY_OK; i++)
        status = read_pair(f, msg, node, i, err);
    return status;
}

tally_status spec_map(struct spec_file *f, const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret_msg,
                      struct tally_error *err)
{
    if (f->root->kind != YAML_MAP) {
        char found[SPEC_TEXT_BYTES] = "";
        struct spec_words w = {.text = found, .bytes = sizeof found};
        spec_found_text(&w, f->root);
        return spec_report(f, err, f->root, "", "found %s, expected a mapping", found);
    }
    ProtobufCMessage *msg = malloc(type->sizeof_message);
    if (!msg)
        return no_memory(f, err);
    type->message_init(msg);
    spec_places_clear(f->places);
    tally_status status = spec_places_add(f->places, &(struct spec_place){.msg = msg, .node = f->root})
                              ? read_message(f, f->root, msg, NULL, err)
                              : no_memory(f, err);
    if (status == TALLY_OK) {
        *ret_msg = msg;
        return TALLY_OK;
    }
    spec_places_clear(f->places);
    protobuf_c_message_free_unpacked(msg, NULL);
    return status;
}
