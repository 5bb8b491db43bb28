#ifndef COMMON_MESSAGE_COPY_H
#define COMMON_MESSAGE_COPY_H
#include <protobuf-c/protobuf-c.h>

/* A deep copy, with fields that are not known here too; protobuf_c_message_free_unpacked(copy, NULL) frees it. NULL:
 * out of memory. */
void *message_copy(const ProtobufCMessage *message);
#endif
