/*
 * Received messages. A payload keeps the whole byte buffer that gRPC handed over (a 1 MiB message is some tens of
 * slices) and says where in it the payload begins; it always reaches to the buffer's end.
 */
#include <assert.h>
#include <grpc/byte_buffer_reader.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "proto/rpc_internal.h"

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "payloads are little-endian f32 and used in place");

struct rpc_payload {
    atomic_uint refs;
    grpc_byte_buffer *buffer;
    size_t first_slice;
    size_t first_skip; /* bytes of the first slice before the payload */
    size_t bytes;
};

struct rpc_payload *rpc_payload_ref(struct rpc_payload *payload)
{
    atomic_fetch_add_explicit(&payload->refs, 1, memory_order_relaxed);
    return payload;
}

struct rpc_payload *rpc_payload_unref(struct rpc_payload *payload)
{
    if (payload && atomic_fetch_sub_explicit(&payload->refs, 1, memory_order_acq_rel) == 1) {
        grpc_byte_buffer_destroy(payload->buffer);
        free(payload);
    }
    return NULL;
}

size_t rpc_payload_bytes(const struct rpc_payload *payload)
{
    return payload->bytes;
}

bool rpc_payload_segment(const struct rpc_payload *payload, size_t *position, const void **ret_data, size_t *ret_bytes)
{
    const grpc_slice_buffer *slices = &payload->buffer->data.raw.slice_buffer;
    while (payload->first_slice + *position < slices->count) {
        const grpc_slice *slice = &slices->slices[payload->first_slice + *position];
        size_t skip = *position == 0 ? payload->first_skip : 0;
        ++*position;
        size_t bytes = GRPC_SLICE_LENGTH(*slice) - skip;
        if (bytes == 0)
            continue;
        *ret_data = GRPC_SLICE_START_PTR(*slice) + skip;
        *ret_bytes = bytes;
        return true;
    }
    return false;
}

void rpc_payload_copy(const struct rpc_payload *payload, size_t offset, size_t bytes, void *out)
{
    assert(offset <= payload->bytes && bytes <= payload->bytes - offset);
    size_t position = 0, n;
    const void *data;
    unsigned char *to = out;
    while (bytes > 0 && rpc_payload_segment(payload, &position, &data, &n)) {
        if (offset >= n) {
            offset -= n;
            continue;
        }
        size_t take = n - offset < bytes ? n - offset : bytes;
        memcpy(to, (const unsigned char *)data + offset, take);
        to += take;
        bytes -= take;
        offset = 0;
    }
}

tally_status rpc_payload_copy_floats(const struct rpc_payload *payload, float *out, size_t count,
                                     struct tally_error *err)
{
    if (count > SIZE_MAX / sizeof(float) || payload->bytes != count * sizeof(float))
        return tally_fail(err, TALLY_EINVAL, "the payload has %zu bytes, not %zu floats", payload->bytes, count);
    rpc_payload_copy(payload, 0, payload->bytes, out);
    return TALLY_OK;
}

/* ---- floats in place ---- */

void rpc_payload_reader_init(struct rpc_payload_reader *reader, const struct rpc_payload *payload)
{
    reader->payload = payload;
    reader->position = 0;
    reader->data = NULL;
    reader->bytes = 0;
}

static bool more(struct rpc_payload_reader *r)
{
    const void *data;
    if (r->bytes > 0)
        return true;
    if (!rpc_payload_segment(r->payload, &r->position, &data, &r->bytes))
        return false;
    r->data = data;
    return true;
}

static bool in_place(const struct rpc_payload_reader *r)
{
    return (uintptr_t)r->data % sizeof(float) == 0 && r->bytes >= sizeof(float);
}

static void take(struct rpc_payload_reader *r, unsigned char *to, size_t bytes)
{
    memcpy(to, r->data, bytes);
    r->data += bytes;
    r->bytes -= bytes;
}

bool rpc_payload_reader_next(struct rpc_payload_reader *reader, const float **ret_run, size_t *ret_count)
{
    struct rpc_payload_reader *r = reader;
    if (!more(r))
        return false;
    if (in_place(r)) {
        *ret_run = (const float *)(const void *)r->data;
        *ret_count = r->bytes / sizeof(float);
        r->data += *ret_count * sizeof(float);
        r->bytes -= *ret_count * sizeof(float);
        return true;
    }
    unsigned char *bounce = (unsigned char *)r->bounce;
    size_t filled = 0;
    while (filled < sizeof r->bounce && more(r)) {
        size_t split = filled % sizeof(float); /* bytes of a float that has begun */
        if (split == 0 && in_place(r))
            break;
        size_t want = split ? sizeof(float) - split : sizeof r->bounce - filled;
        size_t n = r->bytes < want ? r->bytes : want;
        take(r, bounce + filled, n);
        filled += n;
    }
    *ret_run = r->bounce;
    *ret_count = filled / sizeof(float);
    return *ret_count > 0;
}

/* ---- decoding ---- */

struct walk {
    const grpc_slice_buffer *slices;
    size_t next;
};

static bool next_slice(void *context, const uint8_t **ret_data, size_t *ret_bytes)
{
    struct walk *w = context;
    while (w->next < w->slices->count) {
        const grpc_slice *slice = &w->slices->slices[w->next++];
        if (GRPC_SLICE_LENGTH(*slice) > 0) {
            *ret_data = GRPC_SLICE_START_PTR(*slice);
            *ret_bytes = GRPC_SLICE_LENGTH(*slice);
            return true;
        }
    }
    return false;
}

/* The first `bytes` bytes in one piece: in place where they are, else gathered in the arena. NULL: out of memory. */
static const uint8_t *gather(const grpc_slice_buffer *slices, size_t bytes, struct wire_arena *arena)
{
    static const uint8_t nothing[1];
    struct walk w = {.slices = slices};
    const uint8_t *data;
    size_t n;
    if (bytes == 0)
        return nothing;
    if (!next_slice(&w, &data, &n))
        return NULL;
    if (n >= bytes)
        return data;
    uint8_t *all = wire_arena_alloc(arena, bytes);
    size_t filled = 0;
    while (all) {
        size_t part = n < bytes - filled ? n : bytes - filled;
        memcpy(all + filled, data, part);
        filled += part;
        if (filled == bytes || !next_slice(&w, &data, &n))
            break;
    }
    return filled == bytes ? all : NULL;
}

/* Takes over buffer, also where it fails. */
static struct rpc_payload *payload_new(grpc_byte_buffer *buffer, size_t begin)
{
    struct rpc_payload *payload = malloc(sizeof *payload);
    if (!payload) {
        grpc_byte_buffer_destroy(buffer);
        return NULL;
    }
    const grpc_slice_buffer *slices = &buffer->data.raw.slice_buffer;
    size_t i = 0, skip = begin;
    for (; i < slices->count && skip >= GRPC_SLICE_LENGTH(slices->slices[i]); i++)
        skip -= GRPC_SLICE_LENGTH(slices->slices[i]);
    *payload = (struct rpc_payload){
        .refs = 1, .buffer = buffer, .first_slice = i, .first_skip = skip, .bytes = slices->length - begin};
    return payload;
}

static grpc_byte_buffer *buffer_of_copy(const ProtobufCBinaryData *bytes)
{
    grpc_slice slice = grpc_slice_from_copied_buffer((const char *)bytes->data, bytes->len);
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(&slice, 1);
    grpc_slice_unref(slice);
    return buffer;
}

static tally_status unpack(const grpc_slice_buffer *slices, size_t bytes, const ProtobufCMessageDescriptor *type,
                           struct wire_arena *arena, ProtobufCMessage **ret_message, struct tally_error *err)
{
    const uint8_t *data = gather(slices, bytes, arena);
    if (!data)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a %s of %zu bytes", type->name, bytes);
    ProtobufCMessage *message = protobuf_c_message_unpack(type, &arena->allocator, bytes, data);
    if (!message)
        return tally_fail(err, TALLY_EINVAL, "a message of %zu bytes is no %s", bytes, type->name);
    *ret_message = message;
    return TALLY_OK;
}

tally_status rpc_message_decode(grpc_byte_buffer *buffer, const ProtobufCMessageDescriptor *type,
                                struct wire_arena *arena, struct rpc_message *ret_message, struct tally_error *err)
{
    const grpc_slice_buffer *slices = &buffer->data.raw.slice_buffer;
    const ProtobufCFieldDescriptor *field = wire_payload_field(type);
    size_t header = slices->length, begin = slices->length;
    enum wire_payload found = WIRE_PAYLOAD_ABSENT;
    ProtobufCMessage *message = NULL;
    tally_status status;
    if (!wire_arena_reset(arena)) {
        status = tally_fail(err, TALLY_ENOMEM, "no memory for a %s", type->name);
        goto out;
    }
    if (buffer->data.raw.compression != GRPC_COMPRESS_NONE) {
        status = tally_fail(err, TALLY_EUNSUPPORTED, "compressed messages are not taken");
        goto out;
    }
    if (field) {
        struct walk w = {.slices = slices};
        found = wire_find_payload(next_slice, &w, slices->length, field->id, &header, &begin);
        if (found != WIRE_PAYLOAD_LAST)
            header = begin = slices->length; /* let protobuf-c judge the whole of it */
    }
    status = unpack(slices, header, type, arena, &message, err);
    if (status)
        goto out;
    struct rpc_payload *payload = NULL;
    if (field) {
        ProtobufCBinaryData *inside = (void *)((char *)message + field->offset);
        if (found != WIRE_PAYLOAD_LAST && inside->len > 0) {
            grpc_byte_buffer *copy = buffer_of_copy(inside);
            grpc_byte_buffer_destroy(buffer);
            buffer = copy;
            begin = 0;
        }
        *inside = (ProtobufCBinaryData){0}; /* where it was: the payload has it now */
        payload = payload_new(buffer, begin);
        buffer = NULL;
        if (!payload) {
            status = tally_fail(err, TALLY_ENOMEM, "no memory for a %s", type->name);
            goto out;
        }
    }
    *ret_message = (struct rpc_message){.header = message, .payload = payload};
out:
    if (buffer)
        grpc_byte_buffer_destroy(buffer);
    return status;
}

ProtobufCMessage *rpc_message_copy(const struct rpc_message *message)
{
    const ProtobufCMessageDescriptor *type = message->header->descriptor;
    size_t head = protobuf_c_message_get_packed_size(message->header);
    size_t body = message->payload ? message->payload->bytes : 0;
    uint8_t prefix[WIRE_PREFIX_MAX];
    size_t prefix_bytes = body ? wire_payload_prefix(wire_payload_field(type)->id, body, prefix) : 0;
    uint8_t *all = malloc(head + prefix_bytes + body + 1);
    if (!all)
        return NULL;
    protobuf_c_message_pack(message->header, all);
    if (body) {
        memcpy(all + head, prefix, prefix_bytes);
        rpc_payload_copy(message->payload, 0, body, all + head + prefix_bytes);
    }
    ProtobufCMessage *copy = protobuf_c_message_unpack(type, NULL, head + prefix_bytes + body, all);
    free(all);
    return copy;
}
