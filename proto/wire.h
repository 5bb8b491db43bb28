#ifndef PROTO_WIRE_H
#define PROTO_WIRE_H
/*
 * The few parts of protobuf's encoding that large payloads need beside protobuf-c: finding the payload of a data
 * message without unpacking it, writing the tag in front of it, and memory for the small rest. Source:
 * https://protobuf.dev/programming-guides/encoding/
 */
#include <protobuf-c/protobuf-c.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The field that is carried by reference: the highest-numbered one, if it is a singular proto3 `bytes` outside any
 * oneof; else NULL. */
const ProtobufCFieldDescriptor *wire_payload_field(const ProtobufCMessageDescriptor *type);

/* A tag and a length are at most 5 + 10 bytes. Returns how many were written; out may be NULL. */
#define WIRE_PREFIX_MAX 15
size_t wire_payload_prefix(uint32_t field, size_t payload_bytes, uint8_t *out);

/* Gives the next piece of a message, never an empty one; false behind the last. */
typedef bool (*wire_next)(void *context, const uint8_t **ret_data, size_t *ret_bytes);

enum wire_payload {
    WIRE_PAYLOAD_LAST,   /* the payload is the end of the message: *ret_header bytes, tag and length, then the payload
                            from *ret_begin on */
    WIRE_PAYLOAD_ABSENT, /* all is header */
    WIRE_PAYLOAD_INSIDE, /* it is there but other fields follow: unpack the whole */
    WIRE_MALFORMED,
};
/* Walks the top level of a message of `total` bytes up to its payload field. */
enum wire_payload wire_find_payload(wire_next next, void *context, size_t total, uint32_t field, size_t *ret_header,
                                    size_t *ret_begin);

/*
 * Memory for one unpacked message at a time: a block that is used again for each, and malloc beyond it up to a limit,
 * so that a small message that unpacks into a large one (2 bytes can become a struct) is refused. Zero it before the
 * first use.
 */
struct wire_arena {
    ProtobufCAllocator allocator; /* hand this to protobuf_c_message_unpack */
    unsigned char *block;
    size_t used;
    size_t overflow_bytes;
    struct wire_overflow *overflow;
};
#define WIRE_ARENA_BLOCK 2048

/* Forgets what was allocated. false: out of memory. */
bool wire_arena_reset(struct wire_arena *arena);
/* NULL: above the limit or out of memory. Aligned to 16. */
void *wire_arena_alloc(struct wire_arena *arena, size_t bytes);
void wire_arena_clear(struct wire_arena *arena);
#endif
