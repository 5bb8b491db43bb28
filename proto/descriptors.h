#ifndef PROTO_DESCRIPTORS_H
#define PROTO_DESCRIPTORS_H
/* The embedded descriptor set, looked into by name. A file is named by its index; rpc_descriptors_files(d) stands for
 * "none". */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"
#include "google/protobuf/descriptor.pb-c.h"

struct rpc_descriptors;

/* TALLY_EINTERNAL: what is embedded cannot be read. */
tally_status rpc_descriptors_new(struct rpc_descriptors **ret_descriptors, struct tally_error *err);
void rpc_descriptors_free(struct rpc_descriptors *descriptors);

size_t rpc_descriptors_files(const struct rpc_descriptors *descriptors);
const Google__Protobuf__FileDescriptorProto *rpc_descriptors_file(const struct rpc_descriptors *descriptors,
                                                                  size_t file);
/* The file as it was encoded; static memory. */
ProtobufCBinaryData rpc_descriptors_raw(const struct rpc_descriptors *descriptors, size_t file);

size_t rpc_descriptors_by_name(const struct rpc_descriptors *descriptors, const char *name);
/* symbol: the full name of a message, field, oneof, enum, value, service, method or extension, without a leading dot.
 */
size_t rpc_descriptors_by_symbol(const struct rpc_descriptors *descriptors, const char *symbol);
/* type: the full name of the message that is extended. */
size_t rpc_descriptors_by_extension(const struct rpc_descriptors *descriptors, const char *type, int32_t number);
size_t rpc_descriptors_extensions(const struct rpc_descriptors *descriptors, const char *type, int32_t *out,
                                  size_t out_max);

/* Whether the .proto declares a stream of requests; false if the method is not in the set. */
bool rpc_descriptors_method(const struct rpc_descriptors *descriptors, const char *service, const char *method,
                            bool *ret_client_streaming);
#endif
