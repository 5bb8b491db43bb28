#ifndef COMMON_SPEC_RULES_H
#define COMMON_SPEC_RULES_H
/*
 * What the .proto files say beyond protobuf-c's descriptors: FieldRules, labels of enums, which messages are map
 * entries, comments. Decoded once from the embedded descriptor set, a constant of the program; safe from any thread.
 * Private to common/.
 */
#include <stdbool.h>
#include <stddef.h>

#include <protobuf-c/protobuf-c.h>

#include "google/protobuf/descriptor.pb-c.h"
#include "proto/rules.pb-c.h"

#define SPEC_NESTING_MAX 8

struct spec_message_info {
    char *name;     /* "tally.v1.Conv2d" */
    bool map_entry; /* an element of a map<key, value> field */
    bool proto3;    /* scalars have no presence */
    const Google__Protobuf__FileDescriptorProto *file;
    const Google__Protobuf__DescriptorProto *proto;
    Tally__V1__FieldRule **rules;       /* by field, in the order of proto->field; NULL: none */
    int32_t path[2 * SPEC_NESTING_MAX]; /* in file, as SourceCodeInfo spells it */
    size_t path_n;
};

struct spec_enum_info {
    char *name;
    const Google__Protobuf__EnumDescriptorProto *proto;
    char **labels; /* by value, in the order of proto->value; NULL: its name */
    const Google__Protobuf__FileDescriptorProto *file;
    int32_t path[2 * SPEC_NESTING_MAX];
    size_t path_n;
};

/* NULL: not of our .proto files, or no memory when they were decoded. */
const struct spec_message_info *spec_message_info(const ProtobufCMessageDescriptor *type);
const struct spec_enum_info *spec_enum_info(const ProtobufCEnumDescriptor *type);
/* Never NULL: an empty rule where there is none. */
const Tally__V1__FieldRule *spec_rule(const ProtobufCMessageDescriptor *type, const ProtobufCFieldDescriptor *field);
/* A repeated field that is a mapping in YAML. */
bool spec_is_map(const ProtobufCFieldDescriptor *field);
bool spec_is_list(const ProtobufCFieldDescriptor *field);

/*
 * The comment of a message (field NULL) or field, in one line, into text; "" if there is none. The one behind it is
 * preferred to the one before.
 */
void spec_comment(const ProtobufCMessageDescriptor *type, const ProtobufCFieldDescriptor *field, char *text,
                  size_t text_bytes);
#endif
