#include "common/spec_yaml.h"

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <libfyaml.h>

#include "common/limits.h"

#define CHUNK_BYTES (64u << 10)
#define ALIGNMENT 16u

struct yaml_chunk {
    struct yaml_chunk *next;
    size_t used, size;
    _Alignas(ALIGNMENT) unsigned char data[];
};

void *yaml_alloc(struct yaml_arena *a, size_t bytes)
{
    if (bytes > SIZE_MAX / 2)
        return NULL;
    size_t rounded = (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
    struct yaml_chunk *c = a->chunks;
    if (!c || c->size - c->used < rounded) {
        size_t size = rounded > CHUNK_BYTES ? rounded : CHUNK_BYTES;
        c = calloc(1, sizeof *c + size);
        if (!c)
            return NULL;
        c->size = size;
        c->next = a->chunks;
        a->chunks = c;
    }
    void *memory = c->data + c->used;
    c->used += rounded;
    return memory;
}

char *yaml_copy(struct yaml_arena *a, const char *text, size_t bytes)
{
    char *copy = yaml_alloc(a, bytes + 1);
    if (copy && bytes > 0)
        memcpy(copy, text, bytes);
    return copy;
}

struct yaml_node *yaml_new(struct yaml_arena *a, enum yaml_kind kind)
{
    struct yaml_node *n = yaml_alloc(a, sizeof *n);
    if (n) {
        n->kind = kind;
        n->text = "";
    }
    return n;
}

struct yaml_node *yaml_new_scalar(struct yaml_arena *a, const char *text, size_t bytes, bool plain)
{
    struct yaml_node *n = yaml_new(a, YAML_SCALAR);
    char *copy = yaml_copy(a, text, bytes);
    if (!n || !copy)
        return NULL;
    n->text = copy;
    n->text_bytes = bytes;
    n->plain = plain;
    return n;
}

bool yaml_append(struct yaml_arena *a, struct yaml_node *parent, struct yaml_node *key, struct yaml_node *value)
{
    if (parent->count == parent->capacity) {
        size_t capacity = parent->capacity ? 2 * parent->capacity : 4;
        struct yaml_item *items = yaml_alloc(a, capacity * sizeof *items);
        if (!items)
            return false;
        if (parent->count > 0)
            memcpy(items, parent->items, parent->count * sizeof *items);
        parent->items = items;
        parent->capacity = capacity;
    }
    parent->items[parent->count++] = (struct yaml_item){key, value};
    return true;
}

void yaml_arena_free(struct yaml_arena *a)
{
    while (a->chunks) {
        struct yaml_chunk *next = a->chunks->next;
        free(a->chunks);
        a->chunks = next;
    }
}

bool yaml_is_null(const struct yaml_node *n)
{
    return n->kind == YAML_SCALAR && n->plain &&
           (n->text_bytes == 0 || strcmp(n->text, "~") == 0 || strcmp(n->text, "null") == 0 ||
            strcmp(n->text, "Null") == 0 || strcmp(n->text, "NULL") == 0);
}

struct yaml_node *yaml_get(const struct yaml_node *map, const char *key, size_t key_bytes)
{
    for (size_t i = 0; i < map->count; i++) {
        const struct yaml_node *k = map->items[i].key;
        if (k && k->text_bytes == key_bytes && memcmp(k->text, key, key_bytes) == 0)
            return map->items[i].value;
    }
    return NULL;
}

/* The length of the UTF-8 sequence at p, of at most left bytes; 0: it is none (RFC 3629: no surrogates, nothing
 * overlong). */
static size_t utf8_length(const unsigned char *p, size_t left)
{
    if (p[0] < 0x80)
        return p[0] != 0;
    size_t n = p[0] >= 0xf0 ? 4 : p[0] >= 0xe0 ? 3 : 2;
    if (p[0] < 0xc2 || p[0] > 0xf4 || n > left)
        return 0;
    for (size_t i = 1; i < n; i++) {
        if ((p[i] & 0xc0) != 0x80)
            return 0;
    }
    if ((p[0] == 0xe0 && p[1] < 0xa0) || (p[0] == 0xed && p[1] > 0x9f) || (p[0] == 0xf0 && p[1] < 0x90) ||
        (p[0] == 0xf4 && p[1] > 0x8f))
        return 0;
    return n;
}

size_t utf8_bad_byte(const char *text, size_t bytes)
{
    size_t i = 0;
    while (i < bytes) {
        size_t n = utf8_length((const unsigned char *)text + i, bytes - i);
        if (n == 0)
            break;
        i += n;
    }
    return i;
}

/* ---- from events to the tree ---- */

struct builder {
    struct yaml_arena *arena;
    const char *where;
    const char *set_path;
    struct yaml_node *root;
    struct yaml_node *open[TALLY_SPEC_DEPTH_MAX]; /* collections not ended yet */
    struct yaml_node *key[TALLY_SPEC_DEPTH_MAX];  /* in an open mapping: the key that waits for its value */
    size_t depth;
    size_t values;
    int documents;
    struct fy_token_iter *iterator;
    char *scratch; /* the text of the scalar at hand */
    size_t scratch_size;
    int line, column; /* of the last event that had a position */
};

static tally_status fail_at(const struct builder *b, struct tally_error *err, int line, int column, const char *text)
{
    if (b->set_path)
        return tally_fail(err, TALLY_EINVAL, "%s: %s", b->where, text);
    return tally_fail(err, TALLY_EINVAL, "%s:%d:%d: %s", b->where, line, column, text);
}

static tally_status no_memory(const struct builder *b, struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "%s: no memory to read it", b->where);
}

/* Puts a finished scalar or a collection that begins into its parent. */
static tally_status place(struct builder *b, struct yaml_node *n, struct tally_error *err)
{
    n->line = b->line;
    n->column = b->column;
    n->set_path = b->set_path;
    if (++b->values > TALLY_SPEC_VALUES_MAX)
        return fail_at(b, err, b->line, b->column, "too many values for a job file");
    if (b->depth == 0) {
        b->root = n;
        return TALLY_OK;
    }
    struct yaml_node *parent = b->open[b->depth - 1];
    struct yaml_node **key = &b->key[b->depth - 1];
    if (parent->kind == YAML_MAP && !*key) {
        if (n->kind != YAML_SCALAR)
            return fail_at(b, err, n->line, n->column, "a key is a list or a mapping, expected a name");
        if (n->plain && strcmp(n->text, "<<") == 0)
            return fail_at(b, err, n->line, n->column, "merge keys (<<) are not supported, write the keys out");
        *key = n;
        return TALLY_OK;
    }
    if (!yaml_append(b->arena, parent, *key, n))
        return no_memory(b, err);
    *key = NULL;
    return TALLY_OK;
}

static tally_status begin_collection(struct builder *b, enum yaml_kind kind, struct tally_error *err)
{
    struct yaml_node *n = yaml_new(b->arena, kind);
    if (!n)
        return no_memory(b, err);
    tally_status status = place(b, n, err);
    if (status != TALLY_OK)
        return status;
    if (b->depth == TALLY_SPEC_DEPTH_MAX)
        return fail_at(b, err, n->line, n->column, "lists and mappings nest too deep for a job file");
    b->open[b->depth] = n;
    b->key[b->depth++] = NULL;
    return TALLY_OK;
}

/* Into b->scratch. By chunks: fy_token_get_text of 0.7.12 leaks for quoted scalars of many escapes. */
static bool token_text(struct builder *b, struct fy_token *token, size_t *ret_bytes)
{
    size_t used = 0;
    int failed = 0;
    const struct fy_iter_chunk *chunk = NULL;
    fy_token_iter_start(token, b->iterator);
    while ((chunk = fy_token_iter_chunk_next(b->iterator, chunk, &failed)) != NULL) {
        if (chunk->len > b->scratch_size - used) {
            size_t size = 2 * (used + chunk->len);
            char *larger = realloc(b->scratch, size);
            if (!larger) {
                failed = -1;
                break;
            }
            b->scratch = larger;
            b->scratch_size = size;
        }
        if (chunk->len > 0)
            memcpy(b->scratch + used, chunk->str, chunk->len);
        used += chunk->len;
    }
    fy_token_iter_finish(b->iterator);
    *ret_bytes = used;
    return failed == 0;
}

static tally_status add_scalar(struct builder *b, struct fy_token *token, struct tally_error *err)
{
    size_t bytes = 0;
    if (token && !token_text(b, token, &bytes))
        return no_memory(b, err);
    const char *text = bytes > 0 ? b->scratch : "";
    enum fy_scalar_style style = token ? fy_token_scalar_style(token) : FYSS_PLAIN;
    bool plain = style == FYSS_PLAIN;
    /* The mark lies behind the quote. */
    if ((style == FYSS_SINGLE_QUOTED || style == FYSS_DOUBLE_QUOTED) && b->column > 1)
        b->column--;
    /* The file has no zero byte, but "\0" in double quotes is one. */
    if (utf8_bad_byte(text, bytes) != bytes)
        return fail_at(b, err, b->line, b->column, "a string holds a zero byte or is not UTF-8");
    struct yaml_node *n = yaml_new_scalar(b->arena, text, bytes, plain);
    return n ? place(b, n, err) : no_memory(b, err);
}

static void take_position(struct builder *b, const struct fy_mark *mark)
{
    if (!mark)
        return;
    b->line = mark->line + 1;
    b->column = mark->column + 1;
}

/* The mark of an anchor, tag or alias lies behind its sign. */
static tally_status refuse_sign(struct builder *b, struct fy_token *token, int sign_bytes, const char *text,
                                struct tally_error *err)
{
    take_position(b, token ? fy_token_start_mark(token) : NULL);
    return fail_at(b, err, b->line, b->column > sign_bytes ? b->column - sign_bytes : 1, text);
}

static tally_status refuse_decoration(struct builder *b, struct fy_event *event, struct tally_error *err)
{
    struct fy_token *anchor = fy_event_get_anchor_token(event);
    struct fy_token *tag = fy_event_get_tag_token(event);
    if (anchor)
        return refuse_sign(b, anchor, 1, "anchors (&) are not supported, write the value out", err);
    if (tag)
        return refuse_sign(b, tag, 0, "tags (!) are not supported, the key decides the type", err);
    return TALLY_OK;
}

static tally_status take_event(struct builder *b, struct fy_event *event, struct tally_error *err)
{
    take_position(b, fy_event_start_mark(event));
    tally_status status;
    switch (event->type) {
    case FYET_DOCUMENT_START:
        if (++b->documents > 1)
            return fail_at(b, err, b->line, b->column, "a second document begins, expected one");
        return TALLY_OK;
    case FYET_MAPPING_START:
        status = refuse_decoration(b, event, err);
        return status == TALLY_OK ? begin_collection(b, YAML_MAP, err) : status;
    case FYET_SEQUENCE_START:
        status = refuse_decoration(b, event, err);
        return status == TALLY_OK ? begin_collection(b, YAML_LIST, err) : status;
    case FYET_MAPPING_END:
    case FYET_SEQUENCE_END:
        if (b->depth == 0)
            return fail_at(b, err, b->line, b->column, "a list or mapping ends that never began");
        b->depth--;
        return TALLY_OK;
    case FYET_SCALAR:
        status = refuse_decoration(b, event, err);
        return status == TALLY_OK ? add_scalar(b, event->scalar.value, err) : status;
    case FYET_ALIAS:
        return refuse_sign(b, event->alias.anchor, 1, "aliases (*) are not supported, write the value out", err);
    default:
        return TALLY_OK;
    }
}

static tally_status syntax_error(const struct builder *b, struct fy_diag *diag, struct tally_error *err)
{
    void *iterator = NULL;
    const struct fy_diag_error *reason = fy_diag_errors_iterate(diag, &iterator);
    if (!reason || !reason->msg)
        return fail_at(b, err, b->line, b->column, "is no YAML");
    /* libfyaml counts these from 1 already, and gives 0 where it does not know. */
    int line = reason->line > 0 ? reason->line : b->line;
    int column = reason->column > 0 ? reason->column : b->column;
    char text[256];
    snprintf(text, sizeof text, "is no YAML: %.*s", (int)strcspn(reason->msg, "\n"), reason->msg);
    return fail_at(b, err, line, column, text);
}

static tally_status check_bytes(const struct builder *b, const char *text, size_t bytes, struct tally_error *err)
{
    size_t bad = utf8_bad_byte(text, bytes);
    if (bad == bytes)
        return TALLY_OK;
    int line = 1;
    int column = 1;
    for (size_t i = 0; i < bad; i++) {
        if (text[i] == '\n') {
            line++;
            column = 0;
        }
        column += ((unsigned char)text[i] & 0xc0) != 0x80;
    }
    return fail_at(b, err, line, column, text[bad] == '\0' ? "a zero byte, expected text" : "is not UTF-8 text");
}

static tally_status build(struct builder *b, struct fy_parser *parser, struct fy_diag *diag, struct tally_error *err)
{
    tally_status status = TALLY_OK;
    bool ended = false;
    while (status == TALLY_OK && !ended) {
        struct fy_event *event = fy_parser_parse(parser);
        if (!event)
            break;
        ended = event->type == FYET_STREAM_END;
        status = take_event(b, event, err);
        fy_parser_event_free(parser, event);
    }
    if (status == TALLY_OK && (!ended || fy_parser_get_stream_error(parser)))
        status = syntax_error(b, diag, err);
    if (status == TALLY_OK && (!b->root || (yaml_is_null(b->root) && !b->set_path)))
        status = b->set_path ? TALLY_OK : fail_at(b, err, 1, 1, "is empty, expected a mapping");
    return status;
}

tally_status yaml_parse(struct yaml_arena *a, const char *where, const char *set_path, const char *text, size_t bytes,
                        struct yaml_node **ret_root, struct tally_error *err)
{
    struct builder b = {.arena = a, .where = where, .set_path = set_path, .line = 1, .column = 1};
    if (bytes > TALLY_JOB_FILE_MAX_BYTES)
        return tally_fail(err, TALLY_ENOMEM, "%s: has %zu bytes, at most %u are read", where, bytes,
                          TALLY_JOB_FILE_MAX_BYTES);
    tally_status status = check_bytes(&b, text, bytes, err);
    if (status != TALLY_OK)
        return status;
    struct fy_diag_cfg diag_config;
    fy_diag_cfg_default(&diag_config);
    diag_config.fp = NULL;
    struct fy_diag *diag = fy_diag_create(&diag_config);
    struct fy_parser *parser = NULL;
    if (!diag)
        return no_memory(&b, err);
    fy_diag_set_collect_errors(diag, true);
    /* Duplicate keys are found by whoever maps the tree, with both positions. */
    struct fy_parse_cfg config = {.flags = FYPCF_QUIET | FYPCF_COLLECT_DIAG | FYPCF_ALLOW_DUPLICATE_KEYS |
                                           FYPCF_DEFAULT_VERSION_1_2 | FYPCF_JSON_NONE,
                                  .diag = diag};
    parser = fy_parser_create(&config);
    b.iterator = fy_token_iter_create(NULL);
    if (!parser || !b.iterator || fy_parser_set_string(parser, text, bytes) != 0)
        status = no_memory(&b, err);
    if (status == TALLY_OK)
        status = build(&b, parser, diag, err);
    if (status == TALLY_OK && !b.root) {
        b.root = yaml_new_scalar(a, "", 0, true); /* --set key= */
        if (b.root)
            b.root->set_path = set_path;
        else
            status = no_memory(&b, err);
    }
    if (b.iterator)
        fy_token_iter_destroy(b.iterator);
    free(b.scratch);
    if (parser)
        fy_parser_destroy(parser);
    fy_diag_destroy(diag);
    if (status == TALLY_OK)
        *ret_root = b.root;
    return status;
}
