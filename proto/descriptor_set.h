#ifndef PROTO_DESCRIPTOR_SET_H
#define PROTO_DESCRIPTOR_SET_H
/* The FileDescriptorSet of every .proto here, with imports and comments: what reflection answers from and the job
 * file's mapper reads rules and help from. */
#include <stddef.h>

extern const unsigned char tally_descriptor_set[];
extern const size_t tally_descriptor_set_bytes;
#endif
