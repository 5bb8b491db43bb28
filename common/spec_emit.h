#ifndef COMMON_SPEC_EMIT_H
#define COMMON_SPEC_EMIT_H
/* A yaml_node tree as text. Plain scalars are numbers and truth values; all others are strings. Private to common/. */
#include <stdio.h>

#include <jansson.h>

#include "common/spec_yaml.h"

/* A line may be so long where a mapping or list is written in one. */
#define SPEC_LINE_WIDTH 110

/* Whether out failed is the caller's to look up (ferror). */
void emit_yaml(FILE *out, const struct yaml_node *root);
void emit_json(FILE *out, const struct yaml_node *root, bool compact);
/* NULL: no memory, or a string that is not UTF-8. */
json_t *emit_jansson(const struct yaml_node *root);
#endif
