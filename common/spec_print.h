#ifndef COMMON_SPEC_PRINT_H
#define COMMON_SPEC_PRINT_H
/*
 * Any message as YAML or JSON. Keys in the order of the .proto; enums by label, bytes as base64, 64-bit integers as
 * numbers, floats with the fewest digits that read back to the same bits. Absent fields are left out.
 */
#include <stdio.h>

#include <jansson.h>
#include <protobuf-c/protobuf-c.h>

#include "common/error.h"

enum {
    /* Also absent scalars that have a declared default (and in proto3 messages every scalar, so that a reader finds
       each key). */
    SPEC_PRINT_DEFAULTS = 1,
    /* JSON on one line. */
    SPEC_PRINT_COMPACT = 2,
};

/* YAML that spec_open and spec_read take back to the same message. Ends with a newline. */
tally_status spec_print_yaml(FILE *out, const ProtobufCMessage *msg, unsigned flags, struct tally_error *err);

/* One JSON value and a newline. A float that JSON cannot hold (NaN, infinity) is null. */
tally_status spec_print_json(FILE *out, const ProtobufCMessage *msg, unsigned flags, struct tally_error *err);

/* The same as a string the caller frees. */
tally_status spec_yaml_text(const ProtobufCMessage *msg, unsigned flags, char **ret_text, struct tally_error *err);

/* The same as a jansson value (the caller's reference), to put it into a larger one; doubles print with 17 digits
 * there. */
tally_status spec_to_json(const ProtobufCMessage *msg, unsigned flags, json_t **ret_json, struct tally_error *err);
#endif
