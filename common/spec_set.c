/* --set key.path=value: changes the document before it is mapped. */
#include <stdlib.h>
#include <string.h>

#include "common/limits.h"
#include "common/spec_internal.h"

/* One assignment being applied. */
struct setting {
    struct spec_file *f;
    const char *path; /* lives in the arena */
    const char *at;   /* what of it is left */
    struct yaml_node *value;
};

static tally_status refuse(const struct setting *s, struct tally_error *err, const char *text)
{
    return tally_fail(err, TALLY_EINVAL, "--set %s: %s", s->path, text);
}

static tally_status refuse_step(const struct setting *s, struct tally_error *err, const char *text, const char *step,
                                size_t bytes)
{
    return tally_fail(err, TALLY_EINVAL, "--set %s: %s '%.*s'", s->path, text, bytes < 64 ? (int)bytes : 64, step);
}

static tally_status no_memory(const struct setting *s, struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "--set %s: no memory", s->path);
}

/* The next step of the path: a key, or what stands between brackets. */
static tally_status next_step(struct setting *s, const char **ret_step, size_t *ret_bytes, bool *ret_bracket,
                              struct tally_error *err)
{
    bool first = s->at == s->path;
    bool bracket = *s->at == '[';
    if (!first && !bracket) {
        if (*s->at != '.')
            return refuse_step(s, err, "expected '.' or '[' at", s->at, strlen(s->at));
        s->at++;
    }
    if (bracket)
        s->at++;
    size_t bytes = strcspn(s->at, bracket ? "]" : ".[]");
    if (bytes == 0)
        return refuse(s, err, "a key is empty, expected key.path=value");
    if (bracket && s->at[bytes] != ']')
        return refuse(s, err, "a '[' is not closed");
    *ret_step = s->at;
    *ret_bytes = bytes;
    *ret_bracket = bracket;
    s->at += bytes + (bracket ? 1 : 0);
    return TALLY_OK;
}

/* The place of the pair with this key in a mapping; made, with an empty value, where there is none. NULL: no memory. */
static struct yaml_node **pair_place(struct setting *s, struct yaml_node *map, const char *key, size_t bytes)
{
    for (size_t i = 0; i < map->count; i++) {
        if (map->items[i].key->text_bytes == bytes && memcmp(map->items[i].key->text, key, bytes) == 0)
            return &map->items[i].value;
    }
    struct yaml_node *key_node = yaml_new_scalar(&s->f->arena, key, bytes, true);
    struct yaml_node *nothing = yaml_new_scalar(&s->f->arena, "", 0, true);
    if (!key_node || !nothing || !yaml_append(&s->f->arena, map, key_node, nothing))
        return NULL;
    key_node->set_path = s->path;
    nothing->set_path = s->path;
    return &map->items[map->count - 1].value;
}

/* The place of an element: by its index, or by the value of its `name`. */
static tally_status element_place(struct setting *s, struct yaml_node *list, const char *step, size_t bytes,
                                  struct yaml_node ***ret_place, struct tally_error *err)
{
    bool digits = strspn(step, "0123456789") >= bytes;
    size_t index = 0;
    /* Names of digits are unnamed layers' own: their index. */
    for (size_t i = 0; digits && i < bytes && index < TALLY_SPEC_VALUES_MAX; i++)
        index = 10 * index + (size_t)(step[i] - '0');
    if (digits) {
        if (index >= list->count)
            return tally_fail(err, TALLY_EINVAL, "--set %s: the list has %zu elements, there is no [%.*s]", s->path,
                              list->count, bytes < 20 ? (int)bytes : 20, step);
        *ret_place = &list->items[index].value;
        return TALLY_OK;
    }
    for (size_t i = 0; i < list->count; i++) {
        const struct yaml_node *element = list->items[i].value;
        const struct yaml_node *name = element->kind == YAML_MAP ? yaml_get(element, "name", 4) : NULL;
        if (name && name->text_bytes == bytes && memcmp(name->text, step, bytes) == 0) {
            *ret_place = &list->items[i].value;
            return TALLY_OK;
        }
    }
    return refuse_step(s, err, "no element of the list has the name", step, bytes);
}

static tally_status descend(struct setting *s, struct yaml_node ***place, struct tally_error *err)
{
    const char *step = NULL;
    size_t bytes = 0;
    bool bracket = false;
    tally_status status = next_step(s, &step, &bytes, &bracket, err);
    if (status != TALLY_OK)
        return status;
    struct yaml_node *node = **place;
    if (node->kind == YAML_LIST) {
        if (!bracket)
            return refuse_step(s, err, "a list is there, expected [index] or [name] before", step, bytes);
        return element_place(s, node, step, bytes, place, err);
    }
    if (node->kind == YAML_SCALAR) {
        if (bracket)
            return refuse_step(s, err, "no list is there, so there is no element", step, bytes);
        /* Nothing there yet, or a shorthand that the longer path replaces: data: 2 by data.min=1. */
        node = yaml_new(&s->f->arena, YAML_MAP);
        if (!node)
            return no_memory(s, err);
        node->set_path = s->path;
        **place = node;
    }
    *place = pair_place(s, node, step, bytes);
    return *place ? TALLY_OK : no_memory(s, err);
}

static tally_status apply(struct setting *s, struct tally_error *err)
{
    if (s->f->root->kind != YAML_MAP)
        return refuse(s, err, "the file is no mapping, so no key can be set in it");
    struct yaml_node **place = &s->f->root;
    tally_status status = TALLY_OK;
    int depth = 0;
    while (status == TALLY_OK && *s->at != '\0') {
        if (++depth > TALLY_SPEC_DEPTH_MAX)
            return refuse(s, err, "the path has too many steps");
        status = descend(s, &place, err);
    }
    if (status == TALLY_OK)
        *place = s->value;
    return status;
}

tally_status spec_set(struct spec_file *f, const char *assignment, struct tally_error *err)
{
    const char *equals = strchr(assignment, '=');
    if (!equals || equals == assignment)
        return tally_fail(err, TALLY_EINVAL, "--set %.64s: expected key.path=value", assignment);
    size_t path_bytes = (size_t)(equals - assignment);
    if (utf8_bad_byte(assignment, path_bytes) != path_bytes)
        return tally_fail(err, TALLY_EINVAL, "--set: the key path is not UTF-8");
    if (path_bytes > SPEC_PATH_BYTES / 2)
        return tally_fail(err, TALLY_EINVAL, "--set %.64s...: the path has %zu bytes, expected at most %d", assignment,
                          path_bytes, SPEC_PATH_BYTES / 2);
    struct setting s = {.f = f, .path = yaml_copy(&f->arena, assignment, path_bytes)};
    if (!s.path)
        return tally_fail(err, TALLY_ENOMEM, "--set %.64s: no memory", assignment);
    s.at = s.path;
    char where[SPEC_PATH_BYTES];
    struct spec_words w = {.text = where, .bytes = sizeof where};
    spec_say(&w, "--set %s", s.path);
    tally_status status = yaml_parse(&f->arena, where, s.path, equals + 1, strlen(equals + 1), &s.value, err);
    return status == TALLY_OK ? apply(&s, err) : status;
}
