#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/spec_internal.h"

/* Open addressing by the message's address; a power of two, at most half full. */
struct spec_places {
    struct spec_place *slots;
    size_t capacity, count;
    const ProtobufCMessage *root;
};

#define FIRST_CAPACITY 64

struct spec_places *spec_places_new(void)
{
    return calloc(1, sizeof(struct spec_places));
}

void spec_places_clear(struct spec_places *p)
{
    free(p->slots);
    *p = (struct spec_places){0};
}

void spec_places_free(struct spec_places *p)
{
    if (!p)
        return;
    spec_places_clear(p);
    free(p);
}

static struct spec_place *slot_of(struct spec_place *slots, size_t capacity, const ProtobufCMessage *msg)
{
    uint64_t hash = (uint64_t)(uintptr_t)msg * UINT64_C(0x9e3779b97f4a7c15);
    size_t i = (size_t)(hash >> 32) & (capacity - 1);
    while (slots[i].msg && slots[i].msg != msg)
        i = (i + 1) & (capacity - 1);
    return &slots[i];
}

struct spec_place *spec_places_find(const struct spec_places *p, const ProtobufCMessage *msg)
{
    if (p->capacity == 0 || !msg)
        return NULL;
    struct spec_place *slot = slot_of(p->slots, p->capacity, msg);
    return slot->msg ? slot : NULL;
}

static bool grow(struct spec_places *p)
{
    size_t capacity = p->capacity ? 2 * p->capacity : FIRST_CAPACITY;
    struct spec_place *slots = calloc(capacity, sizeof *slots);
    if (!slots)
        return false;
    for (size_t i = 0; i < p->capacity; i++) {
        if (p->slots[i].msg)
            *slot_of(slots, capacity, p->slots[i].msg) = p->slots[i];
    }
    free(p->slots);
    p->slots = slots;
    p->capacity = capacity;
    return true;
}

bool spec_places_add(struct spec_places *p, const struct spec_place *place)
{
    if (2 * (p->count + 1) > p->capacity && !grow(p))
        return false;
    struct spec_place *slot = slot_of(p->slots, p->capacity, place->msg);
    if (!slot->msg)
        p->count++;
    *slot = *place;
    if (!place->parent)
        p->root = place->msg;
    return true;
}

static const char *entry_key(const ProtobufCMessage *entry)
{
    const ProtobufCFieldDescriptor *key = protobuf_c_message_descriptor_get_field_by_name(entry->descriptor, "key");
    const char *text =
        key && key->type == PROTOBUF_C_TYPE_STRING ? *(const char *const *)spec_member(entry, key) : NULL;
    return text ? text : "";
}

/* What the program added after reading has no place yet; what it moved inside its list has an old index. */
static bool walk_field(struct spec_places *p, const ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field)
{
    if (field->type != PROTOBUF_C_TYPE_MESSAGE)
        return true;
    size_t n = spec_count(msg, field);
    bool map = spec_is_map(field);
    for (size_t i = 0; i < n; i++) {
        const ProtobufCMessage *child = spec_message(msg, field, i);
        if (!child)
            continue;
        struct spec_place *known = spec_places_find(p, child);
        struct spec_place place = known ? *known : (struct spec_place){.msg = child};
        place.parent = msg;
        place.field = field;
        place.index = i;
        place.map_key = map ? entry_key(child) : NULL;
        if (!spec_places_add(p, &place) || !spec_places_walk(p, child))
            return false;
    }
    return true;
}

bool spec_places_walk(struct spec_places *p, const ProtobufCMessage *root)
{
    if (!spec_places_find(p, root) && !spec_places_add(p, &(struct spec_place){.msg = root}))
        return false;
    for (unsigned i = 0; i < root->descriptor->n_fields; i++) {
        if (!walk_field(p, root, &root->descriptor->fields[i]))
            return false;
    }
    return true;
}

static const struct spec_place *place_of(const struct spec_file *f, const ProtobufCMessage *msg)
{
    struct spec_place *place = spec_places_find(f->places, msg);
    if (!place && msg && f->places->root && spec_places_walk(f->places, f->places->root))
        place = spec_places_find(f->places, msg);
    return place;
}

static const struct yaml_node *node_in(const struct spec_place *place, const char *field, int index)
{
    const struct yaml_node *value = place->node;
    if (!field)
        return value;
    if (!place->map_key && !(place->short_field && strcmp(place->short_field->name, field) == 0)) {
        value = value->kind == YAML_MAP ? yaml_get(value, field, strlen(field)) : NULL;
        if (!value)
            return place->node;
    }
    if (index >= 0 && value->kind == YAML_LIST && (size_t)index < value->count)
        return value->items[index].value;
    return value;
}

const struct yaml_node *spec_node_of(const struct spec_file *f, const ProtobufCMessage *msg, const char *field,
                                     int index)
{
    const struct spec_place *place = place_of(f, msg);
    while (place && !place->node) {
        field = place->field ? place->field->name : NULL;
        index = place->field && spec_is_list(place->field) ? (int)place->index : -1;
        place = place->parent ? place_of(f, place->parent) : NULL;
    }
    return place ? node_in(place, field, index) : f->root;
}

static void add_step(struct spec_words *w, const char *name)
{
    spec_say(w, "%s%s", w->used > 0 ? "." : "", name);
}

static void add_message_path(const struct spec_file *f, const struct spec_place *place, struct spec_words *w)
{
    if (!place || !place->parent)
        return;
    const struct spec_place *parent = place_of(f, place->parent);
    add_message_path(f, parent, w);
    /* A mapping's value and what shorthand stands for have the path of what holds them. */
    if (parent && !parent->map_key && parent->short_field != place->field)
        add_step(w, place->field->name);
    if (place->map_key)
        add_step(w, place->map_key);
    else if (spec_is_list(place->field))
        spec_say(w, "[%zu]", place->index);
}

size_t spec_path(const struct spec_file *f, const ProtobufCMessage *msg, const char *field, int index, char *text,
                 size_t text_bytes)
{
    struct spec_words w = {.text = text, .bytes = text_bytes};
    text[0] = '\0';
    const struct spec_place *place = f ? place_of(f, msg) : NULL;
    add_message_path(f, place, &w);
    bool silent =
        place && (place->map_key || (place->short_field && field && strcmp(place->short_field->name, field) == 0));
    if (field && !silent)
        add_step(&w, field);
    if (field && index >= 0)
        spec_say(&w, "[%d]", index);
    return w.used;
}

void spec_position_text(const struct spec_file *f, const struct yaml_node *node, const char *path, char *text,
                        size_t text_bytes)
{
    struct spec_words w = {.text = text, .bytes = text_bytes};
    text[0] = '\0';
    if (node && node->set_path) {
        spec_say(&w, "--set %s", node->set_path);
        if (strcmp(node->set_path, path) == 0)
            return;
    } else if (f) {
        spec_say(&w, "%s", f->name);
        if (node && node->line > 0)
            spec_say(&w, ":%d:%d", node->line, node->column);
    }
    if (path[0] != '\0')
        spec_say(&w, "%s%s", w.used > 0 ? ": " : "", path);
}

static tally_status reportv(const struct spec_file *f, struct tally_error *err, const struct yaml_node *node,
                            const char *path, const char *format, va_list args)
{
    if (!err)
        return TALLY_EINVAL;
    char where[SPEC_PATH_BYTES];
    spec_position_text(f, node, path, where, sizeof where);
    tally_failv(err, TALLY_EINVAL, format, args);
    if (where[0] != '\0')
        tally_error_prefix(err, "%s", where);
    return TALLY_EINVAL;
}

tally_status spec_report(const struct spec_file *f, struct tally_error *err, const struct yaml_node *node,
                         const char *path, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    tally_status status = reportv(f, err, node, path, format, args);
    va_end(args);
    return status;
}

tally_status spec_error(const struct spec_file *f, struct tally_error *err, const ProtobufCMessage *msg,
                        const char *field, int index, const char *format, ...)
{
    char path[SPEC_PATH_BYTES];
    spec_path(f, msg, field, index, path, sizeof path);
    va_list args;
    va_start(args, format);
    tally_status status = reportv(f, err, f ? spec_node_of(f, msg, field, index) : NULL, path, format, args);
    va_end(args);
    return status;
}

void spec_where(const struct spec_file *f, const ProtobufCMessage *msg, const char *field, int index, char *text,
                size_t text_bytes)
{
    char path[SPEC_PATH_BYTES];
    spec_path(f, msg, field, index, path, sizeof path);
    spec_position_text(f, f ? spec_node_of(f, msg, field, index) : NULL, path, text, text_bytes);
}
