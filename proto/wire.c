#include "proto/wire.h"

#include <stdlib.h>

#include "common/limits.h"

const ProtobufCFieldDescriptor *wire_payload_field(const ProtobufCMessageDescriptor *type)
{
    if (type->n_fields == 0)
        return NULL;
    const ProtobufCFieldDescriptor *last = &type->fields[type->n_fields - 1]; /* sorted by number */
    bool fits = last->type == PROTOBUF_C_TYPE_BYTES && last->label == PROTOBUF_C_LABEL_NONE &&
                !(last->flags & PROTOBUF_C_FIELD_FLAG_ONEOF);
    return fits ? last : NULL;
}

static size_t put_varint(uint64_t value, uint8_t *out)
{
    size_t n = 0;
    for (;;) {
        uint8_t byte = (uint8_t)(value & 0x7f);
        value >>= 7;
        if (value)
            byte |= 0x80;
        if (out)
            out[n] = byte;
        n++;
        if (!value)
            return n;
    }
}

size_t wire_payload_prefix(uint32_t field, size_t payload_bytes, uint8_t *out)
{
    size_t n = put_varint((uint64_t)field << 3 | PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED, out);
    return n + put_varint(payload_bytes, out ? out + n : NULL);
}

/* ---- walking ---- */

struct cursor {
    wire_next next;
    void *context;
    const uint8_t *data;
    size_t left;   /* of this piece */
    size_t offset; /* of the next byte, in the message */
    size_t total;
};

static bool get_byte(struct cursor *c, uint8_t *ret_byte)
{
    if (c->left == 0 && !c->next(c->context, &c->data, &c->left))
        return false;
    *ret_byte = *c->data++;
    c->left--;
    c->offset++;
    return true;
}

static bool get_varint(struct cursor *c, uint64_t *ret_value)
{
    uint64_t value = 0;
    for (unsigned shift = 0; shift < 70; shift += 7) {
        uint8_t byte;
        if (!get_byte(c, &byte))
            return false;
        value |= (uint64_t)(byte & 0x7f) << shift;
        if (!(byte & 0x80)) {
            *ret_value = value;
            return true;
        }
    }
    return false; /* longer than 10 bytes */
}

static bool skip(struct cursor *c, uint64_t bytes)
{
    if (bytes > c->total - c->offset)
        return false;
    c->offset += (size_t)bytes;
    while (bytes > c->left) {
        bytes -= c->left;
        c->left = 0;
        if (!c->next(c->context, &c->data, &c->left))
            return false;
    }
    c->data += bytes;
    c->left -= (size_t)bytes;
    return true;
}

static bool skip_field(struct cursor *c, unsigned wire_type)
{
    uint64_t n;
    switch (wire_type) {
    case PROTOBUF_C_WIRE_TYPE_VARINT:
        return get_varint(c, &n);
    case PROTOBUF_C_WIRE_TYPE_64BIT:
        return skip(c, 8);
    case PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED:
        return get_varint(c, &n) && skip(c, n);
    case PROTOBUF_C_WIRE_TYPE_32BIT:
        return skip(c, 4);
    default:
        return false; /* groups: protobuf-c does not know them either */
    }
}

enum wire_payload wire_find_payload(wire_next next, void *context, size_t total, uint32_t field, size_t *ret_header,
                                    size_t *ret_begin)
{
    struct cursor c = {.next = next, .context = context, .total = total};
    while (c.offset < total) {
        size_t start = c.offset;
        uint64_t tag;
        if (!get_varint(&c, &tag) || tag >> 3 == 0 || tag >> 3 > UINT32_MAX >> 3)
            return WIRE_MALFORMED;
        unsigned wire_type = (unsigned)(tag & 7);
        if (tag >> 3 != field || wire_type != PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED) {
            if (!skip_field(&c, wire_type))
                return WIRE_MALFORMED;
            continue;
        }
        uint64_t bytes;
        if (!get_varint(&c, &bytes) || bytes > total - c.offset)
            return WIRE_MALFORMED;
        if (c.offset + bytes != total)
            return WIRE_PAYLOAD_INSIDE;
        *ret_header = start;
        *ret_begin = c.offset;
        return WIRE_PAYLOAD_LAST;
    }
    *ret_header = total;
    *ret_begin = total;
    return WIRE_PAYLOAD_ABSENT;
}

/* ---- memory ---- */

struct wire_overflow {
    struct wire_overflow *next;
    _Alignas(16) unsigned char bytes[];
};

static void *arena_alloc(void *context, size_t bytes)
{
    return wire_arena_alloc(context, bytes);
}

static void arena_free(void *context, void *memory)
{
    (void)context;
    (void)memory; /* all at once, at the next reset */
}

static void free_overflow(struct wire_arena *arena)
{
    while (arena->overflow) {
        struct wire_overflow *next = arena->overflow->next;
        free(arena->overflow);
        arena->overflow = next;
    }
    arena->overflow_bytes = 0;
}

bool wire_arena_reset(struct wire_arena *arena)
{
    free_overflow(arena);
    arena->used = 0;
    if (!arena->block) {
        arena->block = aligned_alloc(16, WIRE_ARENA_BLOCK);
        arena->allocator = (ProtobufCAllocator){.alloc = arena_alloc, .free = arena_free, .allocator_data = arena};
    }
    return arena->block != NULL;
}

void *wire_arena_alloc(struct wire_arena *arena, size_t bytes)
{
    if (bytes > TALLY_UNPACK_MAX_BYTES)
        return NULL;
    size_t rounded = (bytes + 15) & ~(size_t)15;
    if (rounded == 0)
        rounded = 16;
    if (rounded <= WIRE_ARENA_BLOCK - arena->used) {
        void *memory = arena->block + arena->used;
        arena->used += rounded;
        return memory;
    }
    size_t cost = rounded + sizeof(struct wire_overflow);
    if (cost > TALLY_UNPACK_MAX_BYTES - arena->overflow_bytes)
        return NULL;
    struct wire_overflow *o = malloc(cost);
    if (!o)
        return NULL;
    o->next = arena->overflow;
    arena->overflow = o;
    arena->overflow_bytes += cost;
    return o->bytes;
}

void wire_arena_clear(struct wire_arena *arena)
{
    free_overflow(arena);
    free(arena->block);
    *arena = (struct wire_arena){0};
}
