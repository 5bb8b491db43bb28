#include "common/spec_rules.h"

#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/spec_file.h"
#include "proto/descriptor_set.h"

/* Numbers of proto/rules.proto's extensions and of descriptor.proto's fields in a SourceCodeInfo path. */
#define RULE_TAG 50101
#define LABEL_TAG 50102
#define PATH_FILE_MESSAGE 4
#define PATH_FILE_ENUM 5
#define PATH_MESSAGE_FIELD 2
#define PATH_MESSAGE_NESTED 3
#define PATH_MESSAGE_ENUM 4

#define TYPES_MAX 512

static struct {
    Google__Protobuf__FileDescriptorSet *set;
    struct spec_message_info messages[TYPES_MAX];
    size_t message_n;
    struct spec_enum_info enums[TYPES_MAX];
    size_t enum_n;
} tables;

static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

/* An option the descriptor's own .proto does not know: its bytes without their length. */
static bool find_option(const ProtobufCMessage *options, uint32_t tag, const uint8_t **ret_data, size_t *ret_bytes)
{
    for (unsigned i = 0; options && i < options->n_unknown_fields; i++) {
        const ProtobufCMessageUnknownField *f = &options->unknown_fields[i];
        if (f->tag != tag || f->wire_type != PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED)
            continue;
        size_t prefix = 0;
        while (prefix < f->len && (f->data[prefix] & 0x80))
            prefix++;
        if (prefix == f->len)
            continue;
        *ret_data = f->data + prefix + 1;
        *ret_bytes = f->len - prefix - 1;
        return true;
    }
    return false;
}

static char *join_name(const char *scope, const char *name)
{
    size_t bytes = strlen(scope) + strlen(name) + 2;
    char *text = malloc(bytes);
    if (text)
        snprintf(text, bytes, "%s%s%s", scope, scope[0] ? "." : "", name);
    return text;
}

static void add_enum(const Google__Protobuf__FileDescriptorProto *file, const Google__Protobuf__EnumDescriptorProto *e,
                     const char *scope, const int32_t *path, size_t path_n, int32_t kind, size_t index)
{
    if (tables.enum_n == TYPES_MAX || path_n + 2 > 2 * SPEC_NESTING_MAX)
        return;
    struct spec_enum_info *info = &tables.enums[tables.enum_n];
    info->name = join_name(scope, e->name);
    info->labels = calloc(e->n_value + 1, sizeof *info->labels);
    if (!info->name || !info->labels)
        return;
    for (size_t i = 0; i < e->n_value; i++) {
        const uint8_t *data;
        size_t bytes;
        const Google__Protobuf__EnumValueOptions *options = e->value[i]->options;
        if (options && find_option(&options->base, LABEL_TAG, &data, &bytes))
            info->labels[i] = strndup((const char *)data, bytes);
    }
    info->proto = e;
    info->file = file;
    if (path_n > 0)
        memcpy(info->path, path, path_n * sizeof *path);
    info->path[path_n] = kind;
    info->path[path_n + 1] = (int32_t)index;
    info->path_n = path_n + 2;
    tables.enum_n++;
}

static void read_rules(struct spec_message_info *info)
{
    const Google__Protobuf__DescriptorProto *m = info->proto;
    for (size_t i = 0; i < m->n_field; i++) {
        const uint8_t *data;
        size_t bytes;
        if (m->field[i]->options && find_option(&m->field[i]->options->base, RULE_TAG, &data, &bytes))
            info->rules[i] = tally__v1__field_rule__unpack(NULL, bytes, data);
    }
}

static void add_message(const Google__Protobuf__FileDescriptorProto *file, const Google__Protobuf__DescriptorProto *m,
                        const char *scope, const int32_t *path, size_t path_n, int32_t kind, size_t index)
{
    if (tables.message_n == TYPES_MAX || path_n + 2 > 2 * SPEC_NESTING_MAX)
        return;
    struct spec_message_info *info = &tables.messages[tables.message_n];
    info->name = join_name(scope, m->name);
    info->rules = calloc(m->n_field + 1, sizeof(Tally__V1__FieldRule *));
    if (!info->name || !info->rules)
        return;
    tables.message_n++;
    info->file = file;
    info->proto = m;
    info->map_entry = m->options && m->options->map_entry;
    info->proto3 = file->syntax && strcmp(file->syntax, "proto3") == 0;
    if (path_n > 0)
        memcpy(info->path, path, path_n * sizeof *path);
    info->path[path_n] = kind;
    info->path[path_n + 1] = (int32_t)index;
    info->path_n = path_n + 2;
    read_rules(info);
    for (size_t i = 0; i < m->n_nested_type; i++)
        add_message(file, m->nested_type[i], info->name, info->path, info->path_n, PATH_MESSAGE_NESTED, i);
    for (size_t i = 0; i < m->n_enum_type; i++)
        add_enum(file, m->enum_type[i], info->name, info->path, info->path_n, PATH_MESSAGE_ENUM, i);
}

static int compare_messages(const void *a, const void *b)
{
    return strcmp(((const struct spec_message_info *)a)->name, ((const struct spec_message_info *)b)->name);
}

static int compare_enums(const void *a, const void *b)
{
    return strcmp(((const struct spec_enum_info *)a)->name, ((const struct spec_enum_info *)b)->name);
}

static void decode_tables(void)
{
    tables.set = google__protobuf__file_descriptor_set__unpack(NULL, tally_descriptor_set_bytes, tally_descriptor_set);
    for (size_t i = 0; tables.set && i < tables.set->n_file; i++) {
        const Google__Protobuf__FileDescriptorProto *file = tables.set->file[i];
        const char *scope = file->package ? file->package : "";
        for (size_t j = 0; j < file->n_message_type; j++)
            add_message(file, file->message_type[j], scope, NULL, 0, PATH_FILE_MESSAGE, j);
        for (size_t j = 0; j < file->n_enum_type; j++)
            add_enum(file, file->enum_type[j], scope, NULL, 0, PATH_FILE_ENUM, j);
    }
    qsort(tables.messages, tables.message_n, sizeof tables.messages[0], compare_messages);
    qsort(tables.enums, tables.enum_n, sizeof tables.enums[0], compare_enums);
}

const struct spec_message_info *spec_message_info(const ProtobufCMessageDescriptor *type)
{
    pthread_once(&tables_once, decode_tables);
    struct spec_message_info key = {.name = (char *)(uintptr_t)type->name};
    return bsearch(&key, tables.messages, tables.message_n, sizeof key, compare_messages);
}

const struct spec_enum_info *spec_enum_info(const ProtobufCEnumDescriptor *type)
{
    pthread_once(&tables_once, decode_tables);
    struct spec_enum_info key = {.name = (char *)(uintptr_t)type->name};
    return bsearch(&key, tables.enums, tables.enum_n, sizeof key, compare_enums);
}

/* The index of a field in proto->field; proto->n_field if it is not there. */
static size_t field_index(const struct spec_message_info *info, const ProtobufCFieldDescriptor *field)
{
    size_t i = 0;
    while (i < info->proto->n_field && (uint32_t)info->proto->field[i]->number != field->id)
        i++;
    return i;
}

const Tally__V1__FieldRule *spec_rule(const ProtobufCMessageDescriptor *type, const ProtobufCFieldDescriptor *field)
{
    static const Tally__V1__FieldRule empty = TALLY__V1__FIELD_RULE__INIT;
    const struct spec_message_info *info = spec_message_info(type);
    size_t i = info ? field_index(info, field) : 0;
    if (!info || i == info->proto->n_field || !info->rules[i])
        return &empty;
    return info->rules[i];
}

bool spec_is_map(const ProtobufCFieldDescriptor *field)
{
    if (field->label != PROTOBUF_C_LABEL_REPEATED || field->type != PROTOBUF_C_TYPE_MESSAGE)
        return false;
    const struct spec_message_info *info = spec_message_info(field->descriptor);
    return info && info->map_entry;
}

bool spec_is_list(const ProtobufCFieldDescriptor *field)
{
    return field->label == PROTOBUF_C_LABEL_REPEATED && !spec_is_map(field);
}

/* ---- enums ---- */

static const char *enum_label(const struct spec_enum_info *info, int value)
{
    for (size_t i = 0; info && i < info->proto->n_value; i++) {
        if (info->proto->value[i]->number == value)
            return info->labels[i];
    }
    return NULL;
}

const char *spec_enum_text(const ProtobufCEnumDescriptor *type, int value)
{
    const char *label = enum_label(spec_enum_info(type), value);
    if (label)
        return label;
    const ProtobufCEnumValue *v = protobuf_c_enum_descriptor_get_value(type, value);
    return v ? v->name : NULL;
}

tally_status spec_enum_parse(const ProtobufCEnumDescriptor *type, const char *text, int *ret_value)
{
    for (unsigned i = 0; i < type->n_values; i++) {
        const char *name = spec_enum_text(type, type->values[i].value);
        if (name && strcmp(name, text) == 0) {
            *ret_value = type->values[i].value;
            return TALLY_OK;
        }
    }
    return TALLY_ENOTFOUND;
}

/* ---- comments ---- */

/* Line breaks become spaces, runs of spaces one. */
static void one_line(const char *from, char *text, size_t text_bytes)
{
    size_t used = 0;
    bool gap = false;
    for (; *from && used + 2 < text_bytes; from++) {
        if (*from == ' ' || *from == '\n' || *from == '\t' || *from == '\r') {
            gap = used > 0;
            continue;
        }
        if (gap)
            text[used++] = ' ';
        gap = false;
        text[used++] = *from;
    }
    /* Never half a UTF-8 character. */
    if (*from) {
        while (used > 0 && ((unsigned char)text[used - 1] & 0xc0) == 0x80)
            used--;
        if (used > 0 && ((unsigned char)text[used - 1] & 0xc0) == 0xc0)
            used--;
    }
    text[used] = '\0';
}

void spec_comment(const ProtobufCMessageDescriptor *type, const ProtobufCFieldDescriptor *field, char *text,
                  size_t text_bytes)
{
    text[0] = '\0';
    const struct spec_message_info *info = spec_message_info(type);
    if (!info || !info->file->source_code_info)
        return;
    int32_t path[2 * SPEC_NESTING_MAX + 2];
    size_t path_n = info->path_n;
    memcpy(path, info->path, path_n * sizeof *path);
    if (field) {
        path[path_n++] = PATH_MESSAGE_FIELD;
        path[path_n++] = (int32_t)field_index(info, field);
    }
    const Google__Protobuf__SourceCodeInfo *source = info->file->source_code_info;
    for (size_t i = 0; i < source->n_location; i++) {
        const Google__Protobuf__SourceCodeInfo__Location *at = source->location[i];
        if (at->n_path != path_n || memcmp(at->path, path, path_n * sizeof *path) != 0)
            continue;
        const char *behind = at->trailing_comments;
        const char *before = at->leading_comments;
        if (behind && behind[0])
            one_line(behind, text, text_bytes);
        else if (before && before[0])
            one_line(before, text, text_bytes);
        return;
    }
}
