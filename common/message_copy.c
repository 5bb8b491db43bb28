#include "common/message_copy.h"

#include <stdlib.h>

void *message_copy(const ProtobufCMessage *message)
{
    size_t bytes = protobuf_c_message_get_packed_size(message);
    uint8_t *packed = malloc(bytes > 0 ? bytes : 1);
    if (!packed)
        return NULL;
    protobuf_c_message_pack(message, packed);
    void *copy = protobuf_c_message_unpack(message->descriptor, NULL, bytes, packed);
    free(packed);
    return copy;
}
