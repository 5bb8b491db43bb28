#include "server/event_batch.h"

#include <assert.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "common/limits.h"

/* Tags: field number << 3 | wire type. */
enum {
    TAG_EVENTS_EVENT = 1 << 3 | 2,
    TAG_EVENT_SEQ = 1 << 3 | 0,
    TAG_EVENT_UNIX_MS = 2 << 3 | 0,
    TAG_EVENT_STEP = 4 << 3 | 2,
    TAG_STEP_STEP = 1 << 3 | 0,
    TAG_STEP_EPOCH = 2 << 3 | 0,
    TAG_STEP_LOSS = 3 << 3 | 1,
    TAG_STEP_SAMPLES = 4 << 3 | 0,
    TAG_STEP_LR = 5 << 3 | 1,
    TAG_STEP_CORRECT = 6 << 3 | 1,
    TAG_STEP_MONO_US = 7 << 3 | 0,
};

/* Four varints with their tags at 11 bytes, three doubles at 9. */
#define STEP_MAX (4 * 11 + 3 * 9)
/* Tag and length of the event, seq, unix_ms, tag and length of the step. */
#define STEP_EVENT_MAX (2 + 11 + 11 + 2 + STEP_MAX)
_Static_assert(STEP_EVENT_MAX < 128, "lengths below 128 take one byte");

struct event_batch *event_batch_new(uint64_t first)
{
    struct event_batch *batch = calloc(1, sizeof *batch);
    if (!batch)
        return NULL;
    atomic_init(&batch->references, 1);
    batch->first = first;
    batch->last = first - 1;
    return batch;
}

struct event_batch *event_batch_from(uint64_t first, uint64_t last, const void *data, size_t bytes)
{
    struct event_batch *batch = event_batch_new(first);
    if (!batch)
        return NULL;
    batch->data = malloc(bytes > 0 ? bytes : 1);
    if (!batch->data)
        return event_batch_unref(batch);
    memcpy(batch->data, data, bytes);
    batch->last = last;
    batch->bytes = batch->room = bytes;
    return batch;
}

struct event_batch *event_batch_ref(struct event_batch *batch)
{
    atomic_fetch_add_explicit(&batch->references, 1, memory_order_relaxed);
    return batch;
}

struct event_batch *event_batch_unref(struct event_batch *batch)
{
    if (batch && atomic_fetch_sub_explicit(&batch->references, 1, memory_order_acq_rel) == 1) {
        free(batch->data);
        free(batch);
    }
    return NULL;
}

/* Makes room for more bytes behind those that are there. */
static tally_status reserve(struct event_batch *batch, size_t more, struct tally_error *err)
{
    if (batch->room - batch->bytes >= more)
        return TALLY_OK;
    size_t room = batch->room > 0 ? batch->room : 1024;
    while (room - batch->bytes < more)
        room *= 2;
    uint8_t *data = realloc(batch->data, room);
    if (!data)
        return tally_fail(err, TALLY_ENOMEM, "no memory for %zu bytes of events", room);
    batch->data = data;
    batch->room = room;
    return TALLY_OK;
}

static uint8_t *put_varint(uint8_t *at, uint64_t value)
{
    while (value >= 128) {
        *at++ = (uint8_t)(value | 128);
        value >>= 7;
    }
    *at++ = (uint8_t)value;
    return at;
}

/* As proto3 wants it: a field that is zero is left out. */
static uint8_t *put_integer(uint8_t *at, uint8_t tag, uint64_t value)
{
    if (value == 0)
        return at;
    *at++ = tag;
    return put_varint(at, value);
}

static uint8_t *put_double(uint8_t *at, uint8_t tag, double value)
{
    /* protobuf-c leaves out what compares equal to 0, -0.0 too. */
    if (value == 0)
        return at;
    *at++ = tag;
    uint64_t bits;
    memcpy(&bits, &value, sizeof bits);
    for (int i = 0; i < 8; i++)
        *at++ = (uint8_t)(bits >> (8 * i));
    return at;
}

tally_status event_batch_add(struct event_batch *batch, Tally__V1__Event *event, struct tally_error *err)
{
    event->seq = batch->last + 1;
    size_t size = tally__v1__event__get_packed_size(event);
    if (size > TALLY_EVENT_BATCH_MAX_BYTES)
        return tally_fail(err, TALLY_EINVAL, "an event of %zu bytes", size);
    tally_status status = reserve(batch, size + 11, err);
    if (status != TALLY_OK)
        return status;
    uint8_t *at = batch->data + batch->bytes;
    *at++ = TAG_EVENTS_EVENT;
    at = put_varint(at, size);
    at += tally__v1__event__pack(event, at);
    batch->bytes = (size_t)(at - batch->data);
    batch->last++;
    return TALLY_OK;
}

tally_status event_batch_add_step(struct event_batch *batch, int64_t unix_ms, const Tally__V1__StepDone *step,
                                  struct tally_error *err)
{
    tally_status status = reserve(batch, STEP_EVENT_MAX, err);
    if (status != TALLY_OK)
        return status;
    uint8_t *at = batch->data + batch->bytes;
    *at++ = TAG_EVENTS_EVENT;
    uint8_t *event_length = at++;
    at = put_integer(at, TAG_EVENT_SEQ, batch->last + 1);
    at = put_integer(at, TAG_EVENT_UNIX_MS, (uint64_t)unix_ms);
    *at++ = TAG_EVENT_STEP;
    uint8_t *step_length = at++;
    at = put_integer(at, TAG_STEP_STEP, step->step);
    at = put_integer(at, TAG_STEP_EPOCH, step->epoch);
    at = put_double(at, TAG_STEP_LOSS, step->loss);
    at = put_integer(at, TAG_STEP_SAMPLES, step->samples);
    at = put_double(at, TAG_STEP_LR, step->lr);
    at = put_double(at, TAG_STEP_CORRECT, step->correct);
    at = put_integer(at, TAG_STEP_MONO_US, (uint64_t)step->mono_us);
    *step_length = (uint8_t)(at - step_length - 1);
    *event_length = (uint8_t)(at - event_length - 1);
    batch->bytes = (size_t)(at - batch->data);
    assert(batch->bytes <= batch->room);
    batch->last++;
    return TALLY_OK;
}

/* The bytes of the event at `at`, with its tag and length; 0 where they do not fit into what is left. */
static size_t event_bytes(const uint8_t *at, size_t left)
{
    size_t used = 1, length = 0;
    for (unsigned shift = 0; used < left && shift < 35; shift += 7) {
        uint8_t byte = at[used++];
        length |= (size_t)(byte & 127) << shift;
        if (byte < 128)
            return length <= left - used ? used + length : 0;
    }
    return 0;
}

size_t event_batch_after(const struct event_batch *batch, uint64_t after, const uint8_t **ret_data)
{
    if (after >= batch->last)
        return 0;
    size_t at = 0;
    for (uint64_t seq = batch->first; seq <= after; seq++) {
        size_t bytes = event_bytes(batch->data + at, batch->bytes - at);
        if (bytes == 0)
            return 0;
        at += bytes;
    }
    *ret_data = batch->data + at;
    return batch->bytes - at;
}

void event_batch_message(const uint8_t *data, size_t bytes, Tally__V1__Events *message,
                         ProtobufCMessageUnknownField *field)
{
    assert(bytes > 1 && data[0] == TAG_EVENTS_EVENT);
    /* The first event's tag, and everything behind it as its "value". */
    *field = (ProtobufCMessageUnknownField){
        .tag = 1,
        .wire_type = PROTOBUF_C_WIRE_TYPE_LENGTH_PREFIXED,
        .len = bytes - 1,
        .data = (uint8_t *)(uintptr_t)(data + 1),
    };
    tally__v1__events__init(message);
    message->base.n_unknown_fields = 1;
    message->base.unknown_fields = field;
}
