#ifndef COMMON_SPEC_YAML_H
#define COMMON_SPEC_YAML_H
/*
 * A YAML document as a tree with positions: what spec_file.c maps onto messages and spec_print.c makes from them. The
 * tree is built from libfyaml's events, so that every bound is ours: bytes, depth, number of values. Anchors, aliases,
 * merge keys and tags are refused, so a document is never larger than its text. Private to common/.
 */
#include <stdbool.h>
#include <stddef.h>

#include "common/error.h"

enum yaml_kind { YAML_SCALAR, YAML_LIST, YAML_MAP };

struct yaml_node;

/* An element of a list (key NULL) or a pair of a mapping. */
struct yaml_item {
    struct yaml_node *key;
    struct yaml_node *value;
};

struct yaml_node {
    enum yaml_kind kind;
    bool plain;           /* scalar: not quoted, so that it may be a number, a truth value or nothing */
    int line, column;     /* from 1; 0: made by the program */
    const char *set_path; /* came from --set with this path; NULL: from the file */
    const char *text;     /* scalar, zero-terminated, of text_bytes */
    size_t text_bytes;
    struct yaml_item *items;
    size_t count, capacity;
};

/* Nodes and texts live as long as their arena. */
struct yaml_arena {
    struct yaml_chunk *chunks;
};

/* Zeroed memory; NULL: none left. */
void *yaml_alloc(struct yaml_arena *a, size_t bytes);
/* A zero-terminated copy. */
char *yaml_copy(struct yaml_arena *a, const char *text, size_t bytes);
struct yaml_node *yaml_new(struct yaml_arena *a, enum yaml_kind kind);
/* A scalar with a copy of text. */
struct yaml_node *yaml_new_scalar(struct yaml_arena *a, const char *text, size_t bytes, bool plain);
/* False: no memory. */
bool yaml_append(struct yaml_arena *a, struct yaml_node *parent, struct yaml_node *key, struct yaml_node *value);
void yaml_arena_free(struct yaml_arena *a);

/* One document. `where` stands before the position in errors; set_path (may be NULL) instead of positions, where the
 * text is --set's. */
tally_status yaml_parse(struct yaml_arena *a, const char *where, const char *set_path, const char *text, size_t bytes,
                        struct yaml_node **ret_root, struct tally_error *err);

/* Whether a node is an unquoted nothing, null or ~. */
bool yaml_is_null(const struct yaml_node *n);
/* The value of the first pair whose key is this text, or NULL. */
struct yaml_node *yaml_get(const struct yaml_node *map, const char *key, size_t key_bytes);

/* The offset of the first byte that is not UTF-8 (or is zero); bytes if there is none. */
size_t utf8_bad_byte(const char *text, size_t bytes);
#endif
