/* A message against its rules, wherever it came from: ranges, patterns, what must be there, exactly one kind. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/float_text.h"
#include "common/limits.h"
#include "common/spec_internal.h"

struct checked {
    const struct spec_file *f;
    const ProtobufCMessage *msg;
    const ProtobufCFieldDescriptor *field;
    const Tally__V1__FieldRule *rule;
};

static tally_status refuse(const struct checked *c, int index, const char *found, struct tally_error *err)
{
    char expected[SPEC_TEXT_BYTES] = "";
    struct spec_words w = {.text = expected, .bytes = sizeof expected};
    spec_expect_text(&w, c->msg->descriptor, c->field, true);
    return spec_error(c->f, err, c->msg, c->field->name, index, "%s, expected %s", found, expected);
}

static tally_status check_number(const struct checked *c, int index, const void *value, struct tally_error *err)
{
    const Tally__V1__FieldRule *rule = c->rule;
    double number = spec_number(c->field, value);
    bool right = isfinite(number) && (!rule->has_min || number >= rule->min) &&
                 (!rule->has_max || number <= rule->max) && (!rule->has_above || number > rule->above) &&
                 (!rule->has_below || number < rule->below);
    if (right)
        return TALLY_OK;
    char text[FLOAT_TEXT_BYTES];
    char found[FLOAT_TEXT_BYTES + 8];
    if (spec_is_integer(c->field))
        spec_integer_text(c->field, value, text, sizeof text);
    else if (c->field->type == PROTOBUF_C_TYPE_FLOAT)
        float_text(*(const float *)value, text);
    else
        double_text(number, text);
    snprintf(found, sizeof found, "found %s", text);
    return refuse(c, index, found, err);
}

/* dots: between parts, none of them empty, as PyTorch names modules inside modules. */
static bool is_name(const char *text, bool dots)
{
    size_t n = 0;
    for (; text[n]; n++) {
        if (dots && text[n] == '.' && n > 0 && text[n - 1] != '.' && text[n + 1])
            continue;
        bool letter = (text[n] >= 'a' && text[n] <= 'z') || (text[n] >= 'A' && text[n] <= 'Z') ||
                      (text[n] >= '0' && text[n] <= '9');
        if (!letter && text[n] != '-' && text[n] != '_')
            return false;
    }
    return n > 0;
}

static tally_status check_string(const struct checked *c, int index, const char *text, struct tally_error *err)
{
    size_t bytes = strlen(text);
    const char *pattern = c->rule->pattern ? c->rule->pattern : "";
    if (utf8_bad_byte(text, bytes) != bytes)
        return refuse(c, index, "found a string that is not UTF-8", err);
    bool name = strcmp(pattern, "name") == 0 || strcmp(pattern, "layer") == 0;
    bool right = name ? is_name(text, strcmp(pattern, "layer") == 0) : strcmp(pattern, "path") != 0 || bytes > 0;
    if (name && right && bytes > TALLY_NAME_MAX)
        return spec_error(c->f, err, c->msg, c->field->name, index, "has %zu characters, expected at most %d", bytes,
                          TALLY_NAME_MAX);
    if (right)
        return TALLY_OK;
    char shown[SPEC_TEXT_BYTES] = "";
    struct spec_words w = {.text = shown, .bytes = sizeof shown};
    spec_say(&w, "found ");
    if (bytes == 0)
        spec_say(&w, "an empty string");
    else
        spec_found_text(&w, &(struct yaml_node){.kind = YAML_SCALAR, .plain = true, .text = text, .text_bytes = bytes});
    return refuse(c, index, shown, err);
}

static tally_status check_value(const struct checked *c, int index, const void *value, struct tally_error *err)
{
    switch (c->field->type) {
    case PROTOBUF_C_TYPE_STRING: {
        const char *text = *(const char *const *)value;
        return check_string(c, index, text ? text : "", err);
    }
    case PROTOBUF_C_TYPE_MESSAGE: {
        const ProtobufCMessage *child = *(const ProtobufCMessage *const *)value;
        return child ? spec_check(c->f, child, err) : TALLY_OK;
    }
    case PROTOBUF_C_TYPE_ENUM: {
        int number = *(const int *)value;
        if (spec_enum_text(c->field->descriptor, number))
            return TALLY_OK;
        char found[32];
        snprintf(found, sizeof found, "found value %d", number);
        return refuse(c, index, found, err);
    }
    case PROTOBUF_C_TYPE_BYTES:
    case PROTOBUF_C_TYPE_BOOL:
        return TALLY_OK;
    default:
        return check_number(c, index, value, err);
    }
}

static tally_status refuse_missing(const struct checked *c, struct tally_error *err)
{
    char expected[SPEC_TEXT_BYTES] = "";
    struct spec_words w = {.text = expected, .bytes = sizeof expected};
    spec_expect_text(&w, c->msg->descriptor, c->field, false);
    return spec_error(c->f, err, c->msg, c->field->name, -1, "is missing, expected %s", expected);
}

static int compare_texts(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* A message from elsewhere may hold a key of a mapping twice. */
static tally_status check_map_keys(const struct checked *c, size_t n, struct tally_error *err)
{
    const ProtobufCFieldDescriptor *key = protobuf_c_message_descriptor_get_field_by_name(c->field->descriptor, "key");
    if (key->type != PROTOBUF_C_TYPE_STRING)
        return TALLY_OK;
    const char **keys = malloc(n * sizeof *keys);
    if (!keys)
        return tally_fail(err, TALLY_ENOMEM, "no memory to check %s", c->field->name);
    for (size_t i = 0; i < n; i++) {
        const ProtobufCMessage *entry = spec_message(c->msg, c->field, i);
        const char *text = *(const char *const *)spec_value(entry, key, 0);
        keys[i] = text ? text : "";
    }
    qsort(keys, n, sizeof *keys, compare_texts);
    tally_status status = TALLY_OK;
    for (size_t i = 1; i < n && status == TALLY_OK; i++) {
        if (strcmp(keys[i - 1], keys[i]) == 0)
            status = spec_error(c->f, err, c->msg, c->field->name, -1, "has the key '%.64s' twice", keys[i]);
    }
    free(keys);
    return status;
}

static tally_status check_field(const struct checked *c, struct tally_error *err)
{
    size_t n = spec_count(c->msg, c->field);
    bool repeated = c->field->label == PROTOBUF_C_LABEL_REPEATED;
    if (n == 0)
        return c->rule->required ? refuse_missing(c, err) : TALLY_OK;
    if (repeated && c->rule->has_max_items && n > c->rule->max_items)
        return spec_error(c->f, err, c->msg, c->field->name, -1, "has %zu elements, expected at most %u", n,
                          c->rule->max_items);
    if (repeated && c->rule->has_min_items && n < c->rule->min_items)
        return spec_error(c->f, err, c->msg, c->field->name, -1, "has %zu elements, expected at least %u", n,
                          c->rule->min_items);
    tally_status status = spec_is_map(c->field) ? check_map_keys(c, n, err) : TALLY_OK;
    for (size_t i = 0; i < n && status == TALLY_OK; i++)
        status = check_value(c, repeated && n > 1 ? (int)i : -1, spec_value(c->msg, c->field, i), err);
    return status;
}

/* At the first field of each oneof: one of its fields must have been given. */
static tally_status check_oneof(const struct spec_file *f, const ProtobufCMessage *msg, unsigned i,
                                struct tally_error *err)
{
    const ProtobufCMessageDescriptor *type = msg->descriptor;
    const ProtobufCFieldDescriptor *field = &type->fields[i];
    if (!spec_in_oneof(field))
        return TALLY_OK;
    for (unsigned j = 0; j < type->n_fields; j++) {
        const ProtobufCFieldDescriptor *other = &type->fields[j];
        if (!spec_in_oneof(other) || other->quantifier_offset != field->quantifier_offset)
            continue;
        if (j < i || spec_count(msg, other) > 0)
            return TALLY_OK;
    }
    char kinds[SPEC_TEXT_BYTES] = "";
    struct spec_words w = {.text = kinds, .bytes = sizeof kinds};
    spec_fields_text(&w, type, field);
    return spec_error(f, err, msg, NULL, -1, "has no kind, expected exactly one of %s", kinds);
}

tally_status spec_check(const struct spec_file *f, const ProtobufCMessage *msg, struct tally_error *err)
{
    tally_status status = TALLY_OK;
    for (unsigned i = 0; i < msg->descriptor->n_fields && status == TALLY_OK; i++) {
        const ProtobufCFieldDescriptor *field = &msg->descriptor->fields[i];
        struct checked c = {f, msg, field, spec_rule(msg->descriptor, field)};
        status = check_oneof(f, msg, i, err);
        if (status == TALLY_OK)
            status = check_field(&c, err);
    }
    return status;
}
