#ifndef COMMON_SPEC_INTERNAL_H
#define COMMON_SPEC_INTERNAL_H
/* What the files of spec_file.h share. Reading order: spec_yaml, spec_place, spec_text, spec_map, spec_check,
 * spec_file. Private to common/. */
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <protobuf-c/protobuf-c.h>

#include "common/error.h"
#include "common/spec_file.h"
#include "common/spec_rules.h"
#include "common/spec_yaml.h"

#define SPEC_PATH_BYTES 512
#define SPEC_TEXT_BYTES 512

struct spec_file {
    char *name;
    struct yaml_arena arena;
    struct yaml_node *root; /* NULL: not from a file */
    struct spec_places *places;
};

/* ---- spec_place.c: where each message of a tree is ---- */

struct spec_place {
    const ProtobufCMessage *msg;
    const ProtobufCMessage *parent;              /* NULL: the root */
    const ProtobufCFieldDescriptor *field;       /* of the parent */
    size_t index;                                /* in a repeated field */
    const char *map_key;                         /* of an element of a map field */
    const struct yaml_node *node;                /* what it was read from; NULL: made by the program */
    const ProtobufCFieldDescriptor *short_field; /* node is not the message but, by shorthand, this field of it */
};

struct spec_places *spec_places_new(void);
void spec_places_free(struct spec_places *p);
void spec_places_clear(struct spec_places *p);
/* False: no memory. */
bool spec_places_add(struct spec_places *p, const struct spec_place *place);
struct spec_place *spec_places_find(const struct spec_places *p, const ProtobufCMessage *msg);
/* Adds root and every message in it that is not there yet. False: no memory. */
bool spec_places_walk(struct spec_places *p, const ProtobufCMessage *root);

/* The node of a value, or of the nearest that holds it; NULL: not from a file. */
const struct yaml_node *spec_node_of(const struct spec_file *f, const ProtobufCMessage *msg, const char *field,
                                     int index);
/* "model.layers[2].name", cut to fit; returns its length. */
size_t spec_path(const struct spec_file *f, const ProtobufCMessage *msg, const char *field, int index, char *text,
                 size_t text_bytes);
/* "FILE:LINE:COL: path" or what of it there is. */
void spec_position_text(const struct spec_file *f, const struct yaml_node *node, const char *path, char *text,
                        size_t text_bytes);
/* Position, path and text into err; returns code. */
tally_status spec_report(const struct spec_file *f, struct tally_error *err, const struct yaml_node *node,
                         const char *path, const char *format, ...) __attribute__((format(printf, 5, 6)));

/* ---- spec_text.c: words for errors and for the schema ---- */

struct spec_words {
    char *text;
    size_t bytes, used;
};

/* Appends, cut to fit. */
void spec_say(struct spec_words *w, const char *format, ...) __attribute__((format(printf, 2, 3)));
/* " of at least 1", " from 1 to 256", " above 0", or nothing. */
void spec_range_text(struct spec_words *w, const ProtobufCFieldDescriptor *field, const Tally__V1__FieldRule *rule);
/* "an integer of at least 1", "one of gpipe, 1f1b, interleaved", ...; element: of one element of a repeated field. */
void spec_expect_text(struct spec_words *w, const ProtobufCMessageDescriptor *type,
                      const ProtobufCFieldDescriptor *field, bool element);
/* "'abc'", "a list", "nothing": what stands in a node. */
void spec_found_text(struct spec_words *w, const struct yaml_node *node);
/* "a, b, c": the fields of one oneof, or of the whole message where group is NULL. */
void spec_fields_text(struct spec_words *w, const ProtobufCMessageDescriptor *type,
                      const ProtobufCFieldDescriptor *group);
const char *spec_nearest_field(const ProtobufCMessageDescriptor *type, const char *key);
const char *spec_nearest_enum(const ProtobufCEnumDescriptor *type, const char *text);
bool spec_is_integer(const ProtobufCFieldDescriptor *field);
bool spec_is_unsigned(const ProtobufCFieldDescriptor *field);

/* ---- spec_access.c: values of a message by its descriptor ---- */

bool spec_in_oneof(const ProtobufCFieldDescriptor *field);
void *spec_member(const ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field);
/* Bytes of one value of this type in memory. */
size_t spec_value_bytes(ProtobufCType type);
/* How many values a field has: elements if repeated, else 1 if it was given, 0 if not. Scalars of proto3 are given
 * where they are not zero. */
size_t spec_count(const ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field);
/* The i-th of them; also a scalar's only one where it was not given (its default). */
const void *spec_value(const ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field, size_t i);
/* The i-th message of a message field. */
const ProtobufCMessage *spec_message(const ProtobufCMessage *msg, const ProtobufCFieldDescriptor *field, size_t i);
/* A number as a double: integers, bool and enum too. */
double spec_number(const ProtobufCFieldDescriptor *field, const void *value);
/* The decimal text of an integer field's value; returns its length. */
size_t spec_integer_text(const ProtobufCFieldDescriptor *field, const void *value, char *text, size_t text_bytes);

/* ---- spec_map.c, spec_check.c ---- */

/* Maps f->root onto a new message and fills f->places. */
tally_status spec_map(struct spec_file *f, const ProtobufCMessageDescriptor *type, ProtobufCMessage **ret_msg,
                      struct tally_error *err);
/* Checks msg and all in it against their rules. */
tally_status spec_check(const struct spec_file *f, const ProtobufCMessage *msg, struct tally_error *err);
#endif
