#include "common/spec_schema.h"

#include <stdlib.h>
#include <string.h>

#include "common/float_text.h"
#include "common/spec_emit.h"
#include "common/spec_internal.h"

#define COMMENT_BYTES 512
#define DEPTH_MAX 16

/* A key that a file may have. */
struct row {
    char *key;   /* "model.layers[].conv2d.kernel_size" */
    char *type;  /* "integer of at least 1, or a list of 1 to 2" */
    char *value; /* its default; "" if there is none; "required" */
    char *comment;
    const ProtobufCMessageDescriptor *owner;
    const ProtobufCFieldDescriptor *field;
};

struct rows {
    struct yaml_arena arena;
    struct row *rows;
    size_t count, capacity;
    const ProtobufCMessageDescriptor *open[DEPTH_MAX]; /* the types around, so that a type inside itself ends */
    size_t depth;
    bool failed; /* no memory */
};

static char *keep(struct rows *r, const char *text)
{
    char *copy = yaml_copy(&r->arena, text, strlen(text));
    r->failed = r->failed || !copy;
    return copy;
}

static void default_text(const ProtobufCMessageDescriptor *owner, const ProtobufCFieldDescriptor *field,
                         struct spec_words *w)
{
    char text[FLOAT_TEXT_BYTES];
    const void *value = field->default_value;
    if (spec_rule(owner, field)->required)
        spec_say(w, "required");
    if (!value || field->label != PROTOBUF_C_LABEL_OPTIONAL || field->type == PROTOBUF_C_TYPE_BYTES)
        return;
    if (field->type == PROTOBUF_C_TYPE_STRING)
        spec_say(w, "%s", (const char *)value);
    else if (field->type == PROTOBUF_C_TYPE_ENUM)
        spec_say(w, "%s", spec_enum_text(field->descriptor, *(const int *)value));
    else if (field->type == PROTOBUF_C_TYPE_BOOL)
        spec_say(w, "%s", *(const protobuf_c_boolean *)value ? "true" : "false");
    else if (spec_is_integer(field)) {
        spec_integer_text(field, value, text, sizeof text);
        spec_say(w, "%s", text);
    } else if (field->type == PROTOBUF_C_TYPE_FLOAT) {
        float_text(*(const float *)value, text);
        spec_say(w, "%s", text);
    } else {
        double_text(*(const double *)value, text);
        spec_say(w, "%s", text);
    }
}

/* As spec_expect_text, without the article. */
static void type_text(const ProtobufCMessageDescriptor *owner, const ProtobufCFieldDescriptor *field,
                      struct spec_words *w)
{
    char whole[SPEC_TEXT_BYTES] = "";
    struct spec_words words = {.text = whole, .bytes = sizeof whole};
    if (spec_is_map(field)) {
        const ProtobufCFieldDescriptor *value =
            protobuf_c_message_descriptor_get_field_by_name(field->descriptor, "value");
        spec_expect_text(&words, field->descriptor, value, false);
        spec_say(w, "mapping to %s", whole);
        return;
    }
    spec_expect_text(&words, owner, field, false);
    const char *text = strncmp(whole, "an ", 3) == 0 ? whole + 3 : strncmp(whole, "a ", 2) == 0 ? whole + 2 : whole;
    spec_say(w, "%s", text);
    if (spec_is_list(field) && !spec_rule(owner, field)->scalar_or_list) {
        whole[0] = '\0';
        words.used = 0;
        spec_expect_text(&words, owner, field, true);
        spec_say(w, ", each %s", whole);
    }
}

static void add_row(struct rows *r, const char *key, const ProtobufCMessageDescriptor *owner,
                    const ProtobufCFieldDescriptor *field)
{
    if (r->count == r->capacity) {
        size_t capacity = r->capacity ? 2 * r->capacity : 64;
        struct row *rows = realloc(r->rows, capacity * sizeof *rows);
        if (!rows) {
            r->failed = true;
            return;
        }
        r->rows = rows;
        r->capacity = capacity;
    }
    char type[SPEC_TEXT_BYTES] = "";
    char value[SPEC_TEXT_BYTES] = "";
    char comment[COMMENT_BYTES] = "";
    struct spec_words type_words = {.text = type, .bytes = sizeof type};
    struct spec_words value_words = {.text = value, .bytes = sizeof value};
    type_text(owner, field, &type_words);
    default_text(owner, field, &value_words);
    spec_comment(owner, field, comment, sizeof comment);
    /* A mapping without a comment of its own says what its type says. */
    if (comment[0] == '\0' && field->type == PROTOBUF_C_TYPE_MESSAGE && !spec_is_map(field))
        spec_comment(field->descriptor, NULL, comment, sizeof comment);
    r->rows[r->count++] = (struct row){.key = keep(r, key),
                                       .type = keep(r, type),
                                       .value = keep(r, value),
                                       .comment = keep(r, comment),
                                       .owner = owner,
                                       .field = field};
}

static void add_type(struct rows *r, const char *prefix, const ProtobufCMessageDescriptor *type)
{
    if (r->depth == DEPTH_MAX)
        return;
    for (size_t i = 0; i < r->depth; i++) {
        if (r->open[i] == type)
            return;
    }
    r->open[r->depth++] = type;
    for (unsigned i = 0; i < type->n_fields && !r->failed; i++) {
        const ProtobufCFieldDescriptor *field = &type->fields[i];
        char key[SPEC_PATH_BYTES] = "";
        struct spec_words w = {.text = key, .bytes = sizeof key};
        spec_say(&w, "%s%s%s", prefix, prefix[0] ? "." : "", field->name);
        bool map = spec_is_map(field);
        if (map)
            spec_say(&w, ".KEY");
        else if (spec_is_list(field) && field->type == PROTOBUF_C_TYPE_MESSAGE)
            spec_say(&w, "[]");
        add_row(r, key, type, field);
        if (field->type == PROTOBUF_C_TYPE_MESSAGE && !map)
            add_type(r, key, field->descriptor);
    }
    r->depth--;
}

/* Whether key is path or below it; "[...]" in either counts for nothing. */
static bool is_below(const char *key, const char *path)
{
    while (*path) {
        if (*key == '[')
            key += strcspn(key, "]") + 1;
        if (*path == '[') {
            path += strcspn(path, "]");
            path += *path == ']';
            continue;
        }
        if (*key != *path)
            return false;
        key++;
        path++;
    }
    return *key == '\0' || *key == '.' || *key == '[';
}

static tally_status refuse_path(const struct rows *r, const char *path, struct tally_error *err)
{
    const char **names = malloc((r->count + 1) * sizeof *names);
    if (!names)
        return tally_fail(err, TALLY_ENOMEM, "no memory for the schema");
    for (size_t i = 0; i < r->count; i++)
        names[i] = r->rows[i].key;
    const char *nearest = spec_nearest(path, names, r->count);
    free(names);
    if (nearest)
        return tally_fail(err, TALLY_EINVAL, "unknown key '%.128s' (did you mean %s?)", path, nearest);
    return tally_fail(err, TALLY_EINVAL, "unknown key '%.128s'", path);
}

static tally_status collect(struct rows *r, const ProtobufCMessageDescriptor *type, const char *path,
                            struct tally_error *err)
{
    add_type(r, "", type);
    if (r->failed)
        return tally_fail(err, TALLY_ENOMEM, "no memory for the schema");
    if (!path || path[0] == '\0')
        return TALLY_OK;
    size_t kept = 0;
    for (size_t i = 0; i < r->count; i++)
        kept += is_below(r->rows[i].key, path);
    if (kept == 0)
        return refuse_path(r, path, err);
    kept = 0;
    for (size_t i = 0; i < r->count; i++) {
        if (is_below(r->rows[i].key, path))
            r->rows[kept++] = r->rows[i];
    }
    r->count = kept;
    return TALLY_OK;
}

static void rows_free(struct rows *r)
{
    free(r->rows);
    yaml_arena_free(&r->arena);
}

static tally_status check_out(FILE *out, tally_status status, struct tally_error *err)
{
    if (status == TALLY_OK && ferror(out))
        return tally_fail_errno(err, "cannot print the schema");
    return status;
}

tally_status spec_schema_print(FILE *out, const ProtobufCMessageDescriptor *type, const char *path,
                               struct tally_error *err)
{
    struct rows r = {.count = 0};
    tally_status status = collect(&r, type, path, err);
    size_t key_width = 0;
    size_t value_width = 0;
    for (size_t i = 0; i < r.count; i++) {
        size_t key = strlen(r.rows[i].key);
        size_t value = strlen(r.rows[i].value);
        key_width = key > key_width ? key : key_width;
        value_width = value > value_width ? value : value_width;
    }
    for (size_t i = 0; i < r.count && status == TALLY_OK; i++) {
        const struct row *row = &r.rows[i];
        fprintf(out, "%-*s  %-*s  %s%s%s\n", (int)key_width, row->key, (int)value_width, row->value, row->type,
                row->comment[0] ? "  # " : "", row->comment);
    }
    rows_free(&r);
    return check_out(out, status, err);
}

static bool add_text(struct yaml_arena *a, struct yaml_node *map, const char *key, const char *text, bool plain)
{
    struct yaml_node *key_node = yaml_new_scalar(a, key, strlen(key), false);
    struct yaml_node *value = yaml_new_scalar(a, text, strlen(text), plain);
    return key_node && value && yaml_append(a, map, key_node, value);
}

static bool add_values(struct yaml_arena *a, struct yaml_node *map, const ProtobufCEnumDescriptor *type)
{
    struct yaml_node *key = yaml_new_scalar(a, "values", strlen("values"), false);
    struct yaml_node *list = yaml_new(a, YAML_LIST);
    if (!key || !list || !yaml_append(a, map, key, list))
        return false;
    for (unsigned i = 0; i < type->n_values; i++) {
        const char *name = spec_enum_text(type, type->values[i].value);
        struct yaml_node *value = yaml_new_scalar(a, name, strlen(name), false);
        if (!value || !yaml_append(a, list, NULL, value))
            return false;
    }
    return true;
}

static struct yaml_node *row_tree(struct rows *r, const struct row *row)
{
    struct yaml_arena *a = &r->arena;
    struct yaml_node *map = yaml_new(a, YAML_MAP);
    bool required = spec_rule(row->owner, row->field)->required;
    bool text = row->field->type == PROTOBUF_C_TYPE_STRING || row->field->type == PROTOBUF_C_TYPE_ENUM;
    if (!map || !add_text(a, map, "key", row->key, false) || !add_text(a, map, "type", row->type, false) ||
        (required && !add_text(a, map, "required", "true", true)) ||
        (!required && row->value[0] && !add_text(a, map, "default", row->value, !text)) ||
        (row->comment[0] && !add_text(a, map, "comment", row->comment, false)) ||
        (row->field->type == PROTOBUF_C_TYPE_ENUM && !add_values(a, map, row->field->descriptor)))
        return NULL;
    return map;
}

tally_status spec_schema_json(FILE *out, const ProtobufCMessageDescriptor *type, const char *path,
                              struct tally_error *err)
{
    struct rows r = {.count = 0};
    tally_status status = collect(&r, type, path, err);
    struct yaml_node *list = yaml_new(&r.arena, YAML_LIST);
    for (size_t i = 0; i < r.count && list && status == TALLY_OK; i++) {
        struct yaml_node *row = row_tree(&r, &r.rows[i]);
        if (!row || !yaml_append(&r.arena, list, NULL, row))
            list = NULL;
    }
    if (status == TALLY_OK && !list)
        status = tally_fail(err, TALLY_ENOMEM, "no memory for the schema");
    if (status == TALLY_OK)
        emit_json(out, list, false);
    rows_free(&r);
    return check_out(out, status, err);
}
