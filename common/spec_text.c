#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "common/float_text.h"
#include "common/spec_internal.h"

#define FOUND_BYTES 40
#define NAME_BYTES 64
#define PREFIX_MIN 3

void spec_say(struct spec_words *w, const char *format, ...)
{
    if (w->used + 1 >= w->bytes)
        return;
    va_list args;
    va_start(args, format);
    int n = vsnprintf(w->text + w->used, w->bytes - w->used, format, args);
    va_end(args);
    if (n < 0)
        return;
    size_t left = w->bytes - w->used - 1;
    w->used += (size_t)n < left ? (size_t)n : left;
}

bool spec_is_unsigned(const ProtobufCFieldDescriptor *field)
{
    return field->type == PROTOBUF_C_TYPE_UINT32 || field->type == PROTOBUF_C_TYPE_FIXED32 ||
           field->type == PROTOBUF_C_TYPE_UINT64 || field->type == PROTOBUF_C_TYPE_FIXED64;
}

bool spec_is_integer(const ProtobufCFieldDescriptor *field)
{
    return spec_is_unsigned(field) || field->type == PROTOBUF_C_TYPE_INT32 || field->type == PROTOBUF_C_TYPE_SINT32 ||
           field->type == PROTOBUF_C_TYPE_SFIXED32 || field->type == PROTOBUF_C_TYPE_INT64 ||
           field->type == PROTOBUF_C_TYPE_SINT64 || field->type == PROTOBUF_C_TYPE_SFIXED64;
}

/* Bounds of the rules are double; whole ones read as integers. */
static void say_bound(struct spec_words *w, const char *before, double bound)
{
    char text[FLOAT_TEXT_BYTES];
    if (fabs(bound) < 1e15 && floor(bound) == bound)
        snprintf(text, sizeof text, "%.0f", bound);
    else
        double_text(bound, text);
    spec_say(w, "%s%s", before, text);
}

void spec_range_text(struct spec_words *w, const ProtobufCFieldDescriptor *field, const Tally__V1__FieldRule *rule)
{
    if (rule->range_text) {
        spec_say(w, " %s", rule->range_text);
        return;
    }
    bool has_min = rule->has_min;
    double min = rule->min;
    if (!has_min && !rule->has_above && spec_is_unsigned(field)) {
        has_min = true;
        min = 0;
    }
    if (has_min && rule->has_max) {
        say_bound(w, " from ", min);
        say_bound(w, " to ", rule->max);
        return;
    }
    const char *joint = "";
    if (has_min) {
        say_bound(w, " of at least ", min);
        joint = " and";
    }
    if (rule->has_above) {
        say_bound(w, " above ", rule->above);
        joint = " and";
    }
    if (rule->has_max) {
        spec_say(w, "%s", joint);
        say_bound(w, " of at most ", rule->max);
    }
    if (rule->has_below) {
        spec_say(w, "%s", joint);
        say_bound(w, " below ", rule->below);
    }
}

static void expect_enum(struct spec_words *w, const ProtobufCEnumDescriptor *type)
{
    spec_say(w, "%s", type->n_values > 1 ? "one of " : "");
    for (unsigned i = 0; i < type->n_values; i++)
        spec_say(w, "%s%s", i > 0 ? ", " : "", spec_enum_text(type, type->values[i].value));
}

static void expect_string(struct spec_words *w, const Tally__V1__FieldRule *rule)
{
    const char *pattern = rule->pattern ? rule->pattern : "";
    if (strcmp(pattern, "name") == 0)
        spec_say(w, "a name of letters, digits, '-' and '_'");
    else if (strcmp(pattern, "layer") == 0)
        spec_say(w, "a name of letters, digits, '-' and '_', or several with '.' between");
    else if (strcmp(pattern, "path") == 0)
        spec_say(w, "a path");
    else
        spec_say(w, "a string");
}

static void expect_value(struct spec_words *w, const ProtobufCMessageDescriptor *type,
                         const ProtobufCFieldDescriptor *field)
{
    const Tally__V1__FieldRule *rule = spec_rule(type, field);
    if (spec_is_integer(field)) {
        spec_say(w, "an integer");
        spec_range_text(w, field, rule);
    } else if (field->type == PROTOBUF_C_TYPE_DOUBLE || field->type == PROTOBUF_C_TYPE_FLOAT) {
        spec_say(w, "a number");
        spec_range_text(w, field, rule);
    } else if (field->type == PROTOBUF_C_TYPE_BOOL) {
        spec_say(w, "true or false");
    } else if (field->type == PROTOBUF_C_TYPE_ENUM) {
        expect_enum(w, field->descriptor);
    } else if (field->type == PROTOBUF_C_TYPE_STRING) {
        expect_string(w, rule);
    } else if (field->type == PROTOBUF_C_TYPE_BYTES) {
        spec_say(w, "base64");
    } else {
        const ProtobufCFieldDescriptor *short_field =
            rule->shorthand ? protobuf_c_message_descriptor_get_field_by_name(field->descriptor, rule->shorthand)
                            : NULL;
        if (short_field) {
            spec_expect_text(w, field->descriptor, short_field, false);
            spec_say(w, ", or ");
        }
        spec_say(w, "a mapping");
    }
}

static void expect_list(struct spec_words *w, const Tally__V1__FieldRule *rule)
{
    spec_say(w, "a list");
    if (rule->has_min_items && rule->has_max_items)
        spec_say(w, " of %u to %u", rule->min_items, rule->max_items);
    else if (rule->has_max_items)
        spec_say(w, " of at most %u", rule->max_items);
    else if (rule->has_min_items)
        spec_say(w, " of at least %u", rule->min_items);
}

void spec_expect_text(struct spec_words *w, const ProtobufCMessageDescriptor *type,
                      const ProtobufCFieldDescriptor *field, bool element)
{
    const Tally__V1__FieldRule *rule = spec_rule(type, field);
    if (element || field->label != PROTOBUF_C_LABEL_REPEATED) {
        expect_value(w, type, field);
    } else if (spec_is_map(field)) {
        spec_say(w, "a mapping");
    } else if (rule->scalar_or_list) {
        expect_value(w, type, field);
        spec_say(w, " or ");
        expect_list(w, rule);
    } else {
        expect_list(w, rule);
    }
}

void spec_found_text(struct spec_words *w, const struct yaml_node *node)
{
    if (node->kind != YAML_SCALAR) {
        spec_say(w, "%s", node->kind == YAML_LIST ? "a list" : "a mapping");
        return;
    }
    if (yaml_is_null(node)) {
        spec_say(w, "nothing");
        return;
    }
    char shown[FOUND_BYTES + 1];
    size_t n = 0;
    for (; n < FOUND_BYTES && node->text[n]; n++) {
        unsigned char c = (unsigned char)node->text[n];
        shown[n] = c < 0x20 || c == 0x7f ? ' ' : (char)c;
    }
    bool cut = node->text[n] != '\0';
    while (cut && n > 0 && ((unsigned char)node->text[n] & 0xc0) == 0x80)
        n--;
    shown[n] = '\0';
    spec_say(w, node->plain ? "'%s%s'" : "the string \"%s%s\"", shown, cut ? "..." : "");
}

void spec_fields_text(struct spec_words *w, const ProtobufCMessageDescriptor *type,
                      const ProtobufCFieldDescriptor *group)
{
    const char *joint = "";
    for (unsigned i = 0; i < type->n_fields; i++) {
        const ProtobufCFieldDescriptor *field = &type->fields[i];
        if (group && !(spec_in_oneof(field) && field->quantifier_offset == group->quantifier_offset))
            continue;
        spec_say(w, "%s%s", joint, field->name);
        joint = ", ";
    }
}

/* ---- the nearest name ---- */

/* Insertions, deletions, changes and swaps of neighbours that make a of b (optimal string alignment); at most
 * NAME_BYTES each. */
static size_t distance(const char *a, size_t a_n, const char *b, size_t b_n)
{
    size_t rows[3][NAME_BYTES + 1];
    for (size_t j = 0; j <= b_n; j++)
        rows[0][j] = j;
    for (size_t i = 1; i <= a_n; i++) {
        size_t *row = rows[i % 3];
        const size_t *above = rows[(i + 2) % 3];
        const size_t *before = rows[(i + 1) % 3];
        row[0] = i;
        for (size_t j = 1; j <= b_n; j++) {
            size_t best = above[j - 1] + (a[i - 1] != b[j - 1]);
            if (above[j] + 1 < best)
                best = above[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && before[j - 2] + 1 < best)
                best = before[j - 2] + 1;
            row[j] = best;
        }
    }
    return rows[a_n % 3][b_n];
}

/* Lower case without '_' and '-': Conv2D, conv_2d and conv2d are the same slip. */
static size_t fold(const char *text, char *folded)
{
    size_t n = 0;
    for (; *text && n < NAME_BYTES; text++) {
        if (*text != '_' && *text != '-')
            folded[n++] = (char)tolower((unsigned char)*text);
    }
    return n;
}

struct nearest {
    char text[NAME_BYTES];
    size_t text_n;
    const char *best;
    size_t best_distance;
};

static struct nearest nearest_begin(const char *text)
{
    struct nearest n = {.best = NULL};
    n.text_n = strlen(text) <= NAME_BYTES ? fold(text, n.text) : 0;
    /* At most a third of the letters may differ, and at least one. */
    n.best_distance = n.text_n / 3 + 1 + (n.text_n < 3);
    return n;
}

static void nearest_try(struct nearest *n, const char *name)
{
    char folded[NAME_BYTES];
    if (n->text_n == 0 || strlen(name) > NAME_BYTES)
        return;
    size_t name_n = fold(name, folded);
    size_t d = distance(n->text, n->text_n, folded, name_n);
    /* The beginning of a name is as near as one slip: conv, max_pool, micro_batch. */
    if (n->text_n >= PREFIX_MIN && name_n > n->text_n && memcmp(n->text, folded, n->text_n) == 0)
        d = 1;
    if (d < n->best_distance) {
        n->best = name;
        n->best_distance = d;
    }
}

const char *spec_nearest(const char *text, const char *const *names, size_t count)
{
    struct nearest n = nearest_begin(text);
    for (size_t i = 0; i < count; i++)
        nearest_try(&n, names[i]);
    return n.best;
}

const char *spec_nearest_field(const ProtobufCMessageDescriptor *type, const char *key)
{
    struct nearest n = nearest_begin(key);
    for (unsigned i = 0; i < type->n_fields; i++)
        nearest_try(&n, type->fields[i].name);
    return n.best;
}

const char *spec_nearest_enum(const ProtobufCEnumDescriptor *type, const char *text)
{
    struct nearest n = nearest_begin(text);
    for (unsigned i = 0; i < type->n_values; i++)
        nearest_try(&n, spec_enum_text(type, type->values[i].value));
    return n.best;
}
