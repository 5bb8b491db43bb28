#ifndef COMMON_SPEC_SCHEMA_H
#define COMMON_SPEC_SCHEMA_H
/* What a file of a message type may hold: every key with type, default, range and the comment of the .proto. */
#include <stdio.h>

#include <protobuf-c/protobuf-c.h>

#include "common/error.h"

/*
 * path (may be NULL): only the key of this path and those below it ("train.optimizer", "model.layers.conv2d"). Aligned
 * text. TALLY_EINVAL names the nearest key where the path is none.
 */
tally_status spec_schema_print(FILE *out, const ProtobufCMessageDescriptor *type, const char *path,
                               struct tally_error *err);

/* A JSON array of {key, type, required?, default?, comment?, values?}. */
tally_status spec_schema_json(FILE *out, const ProtobufCMessageDescriptor *type, const char *path,
                              struct tally_error *err);
#endif
