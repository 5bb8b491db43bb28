/*
 * What was sent by reference is on the wire what protobuf-c packs, and what protobuf-c packs is read by reference,
 * however gRPC cuts it into slices. This test makes the slices itself, so it is one of the few outside proto/ that sees
 * gRPC.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/clock.h"
#include "common/limits.h"
#include "proto/jobs.pb-c.h"
#include "proto/parameters.pb-c.h"
#include "proto/rpc_internal.h"
#include "tests/proto/rpc_fixture.h"

static uint32_t random_state = 1;

static uint32_t next_random(void)
{
    random_state = random_state * 1664525u + 1013904223u;
    return random_state >> 8;
}

/* A byte buffer of these bytes in slices of 1..max bytes, some of them empty, at odd addresses. */
static grpc_byte_buffer *cut(const uint8_t *data, size_t bytes, size_t max)
{
    grpc_slice slices[4096];
    size_t n = 0, at = 0;
    while (at < bytes) {
        assert_true(n < 4095);
        size_t take = n == 4094 ? bytes - at : 1 + next_random() % max;
        if (take > bytes - at)
            take = bytes - at;
        if (next_random() % 16 == 0 && n < 4000)
            slices[n++] = grpc_empty_slice();
        size_t shift = next_random() % 4;
        grpc_slice whole = grpc_slice_malloc(take + shift);
        memcpy(GRPC_SLICE_START_PTR(whole) + shift, data + at, take);
        slices[n++] = grpc_slice_sub(whole, shift, take + shift);
        grpc_slice_unref(whole);
        at += take;
    }
    grpc_byte_buffer *buffer = grpc_raw_byte_buffer_create(slices, n);
    for (size_t i = 0; i < n; i++)
        grpc_slice_unref(slices[i]);
    return buffer;
}

static void fill_push(Tally__V1__Push *push, Tally__V1__Hello *hello)
{
    tally__v1__push__init(push);
    tally__v1__hello__init(hello);
    push->job = 1u << 20;
    push->step = 300;
    push->leaf_end = 17;
    push->loss_sum = -1.5;
    hello->worker = "worker with a name that does not fit into one small slice";
    push->hello = hello;
}

static void test_decodes_any_cut(void **state)
{
    (void)state;
    static const size_t counts[] = {0, 1, 2, 7, 1000, 20000};
    struct wire_arena arena = {0};
    for (size_t c = 0; c < 6; c++) {
        float *floats = malloc(counts[c] * 4 + 4), *got = malloc(counts[c] * 4 + 4);
        for (size_t i = 0; i < counts[c]; i++)
            floats[i] = (float)next_random();
        Tally__V1__Push push;
        Tally__V1__Hello hello;
        fill_push(&push, &hello);
        push.gradient = (ProtobufCBinaryData){.len = counts[c] * 4, .data = (uint8_t *)floats};
        size_t bytes = protobuf_c_message_get_packed_size(&push.base);
        uint8_t *packed = malloc(bytes);
        protobuf_c_message_pack(&push.base, packed);
        for (int round = 0; round < 60; round++) {
            struct rpc_message message;
            struct tally_error err = {0};
            size_t max = round < 20 ? bytes / 1000 + 1 + (size_t)round : bytes;
            assert_int_equal(rpc_message_decode(cut(packed, bytes, max), push.base.descriptor, &arena, &message, &err),
                             TALLY_OK);
            const Tally__V1__Push *p = (const Tally__V1__Push *)message.header;
            assert_int_equal(p->step, 300);
            assert_string_equal(p->hello->worker, hello.worker);
            assert_int_equal(p->gradient.len, 0);
            assert_int_equal(rpc_payload_bytes(message.payload), counts[c] * 4);
            assert_int_equal(rpc_payload_copy_floats(message.payload, got, counts[c], &err), TALLY_OK);
            assert_memory_equal(got, floats, counts[c] * 4);
            struct rpc_payload_reader reader;
            const float *run;
            size_t count, at = 0;
            rpc_payload_reader_init(&reader, message.payload);
            while (rpc_payload_reader_next(&reader, &run, &count)) {
                assert_true(count > 0 && at + count <= counts[c]);
                assert_int_equal((uintptr_t)run % 4, 0);
                assert_memory_equal(run, floats + at, count * 4);
                at += count;
            }
            assert_int_equal(at, counts[c]);
            size_t from = counts[c] ? next_random() % (counts[c] * 4) : 0,
                   part = counts[c] ? next_random() % (counts[c] * 4 - from) : 0;
            rpc_payload_copy(message.payload, from, part, got);
            assert_memory_equal(got, (char *)floats + from, part);
            Tally__V1__Push *copy = (Tally__V1__Push *)rpc_message_copy(&message);
            assert_int_equal(copy->gradient.len, counts[c] * 4);
            assert_memory_equal(copy->gradient.data, floats, counts[c] * 4);
            protobuf_c_message_free_unpacked(&copy->base, NULL);
            rpc_payload_unref(message.payload);
        }
        free(packed);
        free(floats);
        free(got);
    }
    wire_arena_clear(&arena);
}

static void test_payload_in_the_middle(void **state)
{
    (void)state;
    /* gradient, then step = 5, then gradient again, then job = 1: the last gradient wins. */
    static const uint8_t bytes[] = {0x7a, 3, 'a', 'b', 'c', 0x18, 5, 0x7a, 4, 1, 2, 3, 4, 0x08, 1};
    struct wire_arena arena = {0};
    struct rpc_message message;
    struct tally_error err = {0};
    for (size_t max = 1; max < 16; max++) {
        assert_int_equal(
            rpc_message_decode(cut(bytes, sizeof bytes, max), &tally__v1__push__descriptor, &arena, &message, &err),
            TALLY_OK);
        uint8_t got[4];
        assert_int_equal(((const Tally__V1__Push *)message.header)->step, 5);
        assert_int_equal(((const Tally__V1__Push *)message.header)->job, 1);
        assert_int_equal(rpc_payload_bytes(message.payload), 4);
        rpc_payload_copy(message.payload, 0, 4, got);
        assert_memory_equal(got, bytes + 9, 4);
        rpc_payload_unref(message.payload);
    }
    wire_arena_clear(&arena);
}

static void test_truncated_and_noise(void **state)
{
    (void)state;
    struct wire_arena arena = {0};
    Tally__V1__Push push;
    Tally__V1__Hello hello;
    uint8_t packed[512], noise[64], payload[40] = {1, 2, 3};
    fill_push(&push, &hello);
    push.gradient = (ProtobufCBinaryData){.len = sizeof payload, .data = payload};
    size_t bytes = protobuf_c_message_pack(&push.base, packed);
    unsigned refused = 0;
    for (size_t cut_at = 0; cut_at < bytes; cut_at++) {
        struct rpc_message message;
        struct tally_error err = {0};
        tally_status status = rpc_message_decode(cut(packed, cut_at, 9), push.base.descriptor, &arena, &message, &err);
        if (status) {
            assert_int_equal(status, TALLY_EINVAL);
            assert_non_null(strstr(err.message, "tally.v1.Push"));
            refused++;
        } else {
            rpc_payload_unref(message.payload); /* it ended between two fields */
        }
    }
    assert_true(refused > bytes - 20);
    for (int round = 0; round < 20000; round++) {
        struct rpc_message message;
        for (size_t i = 0; i < sizeof noise; i++)
            noise[i] = (uint8_t)next_random();
        if (rpc_message_decode(cut(noise, next_random() % sizeof noise, 20), push.base.descriptor, &arena, &message,
                               NULL) == TALLY_OK)
            rpc_payload_unref(message.payload);
    }
    wire_arena_clear(&arena);
}

/* Two bytes a submessage on the wire become a struct each: refused before the memory is taken. */
static void test_unfolding_is_bounded(void **state)
{
    (void)state;
    struct wire_arena arena = {0};
    struct rpc_message message;
    struct tally_error err = {0};
    size_t bytes = TALLY_MESSAGE_MAX_BYTES - 2;
    uint8_t *data = malloc(bytes);
    for (size_t i = 0; i < bytes; i += 2) {
        data[i] = 0x0a; /* ListReply.jobs = 1, empty */
        data[i + 1] = 0;
    }
    assert_int_equal(
        rpc_message_decode(cut(data, bytes, bytes), &tally__v1__list_reply__descriptor, &arena, &message, &err),
        TALLY_EINVAL);
    free(data);
    wire_arena_clear(&arena);
}

/* ---- on the wire: the server sees messages as if it knew no field, and so keeps their bytes ---- */

static struct {
    uint8_t *packed; /* what must arrive next */
    size_t bytes;
    atomic_uint right, wrong, rounds; /* rounds orders the two above between the threads */
} wire;

static void raw_message(struct rpc_stream *stream, const struct rpc_message *message, void *user)
{
    (void)user;
    size_t bytes = protobuf_c_message_get_packed_size(message->header);
    uint8_t *got = malloc(bytes + 1);
    protobuf_c_message_pack(message->header, got);
    bool same = atomic_load(&wire.rounds) > 0 && bytes == wire.bytes && memcmp(got, wire.packed, bytes) == 0;
    atomic_fetch_add(same ? &wire.right : &wire.wrong, 1);
    free(got);
    rpc_stream_grant(stream, 1);
}

static void raw_half_close(struct rpc_stream *stream, void *user)
{
    (void)user;
    rpc_stream_finish(stream, TALLY_OK, NULL);
}

static void raw_open(struct rpc_stream *stream, void *user)
{
    static const struct rpc_stream_events events = {.on_message = raw_message, .on_half_close = raw_half_close};
    static const struct rpc_stream_options options = {.credits = 1};
    rpc_stream_accept(stream, &events, user, &options);
}

static ProtobufCMethodDescriptor raw_methods[8];
static ProtobufCServiceDescriptor raw_service;

static void add_raw(struct fixture *f)
{
    static const struct rpc_method methods[] = {{.name = "Exchange", .on_open = raw_open}};
    raw_service = tally__v1__parameters__descriptor;
    memcpy(raw_methods, raw_service.methods, raw_service.n_methods * sizeof raw_methods[0]);
    for (unsigned i = 0; i < raw_service.n_methods; i++)
        raw_methods[i].input = &tally__v1__list_request__descriptor; /* has no fields */
    raw_service.methods = raw_methods;
    struct rpc_service service = {&raw_service, f->data_queue, methods, 1, f};
    assert_int_equal(rpc_server_add(f->server, &service, NULL), TALLY_OK);
}

static void raw_end(struct rpc_stream *stream, const struct tally_error *end, void *user)
{
    (void)stream;
    assert_int_equal(end->code, TALLY_OK);
    atomic_store((atomic_bool *)user, true);
}

static void release_nothing(void *user)
{
    atomic_fetch_add((atomic_uint *)user, 1);
}

static void test_same_bytes_on_the_wire(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 127, 128, 1000, 16383, 16384, TALLY_SLICE_MAX_BYTES};
    static const struct rpc_stream_events events = {.on_end = raw_end};
    struct fixture f;
    struct rpc_stream *stream;
    struct tally_error err = {0};
    atomic_bool ended = false;
    atomic_uint released = 0;
    unsigned sent = 0;
    fixture_start(&f, false, false, add_raw);
    assert_int_equal(rpc_stream_open(f.channel, f.client_queue, &tally__v1__parameters__descriptor, "Exchange", &events,
                                     &ended, NULL, &stream, &err),
                     TALLY_OK);
    for (size_t s = 0; s < 8; s++) {
        Tally__V1__Push push;
        Tally__V1__Hello hello;
        uint8_t *payload = malloc(sizes[s] + 1);
        for (size_t i = 0; i < sizes[s]; i++)
            payload[i] = (uint8_t)next_random();
        fill_push(&push, &hello);
        if (s % 2)
            push.hello = NULL;
        push.gradient = (ProtobufCBinaryData){.len = sizes[s], .data = payload};
        wire.bytes = protobuf_c_message_get_packed_size(&push.base);
        wire.packed = malloc(wire.bytes);
        protobuf_c_message_pack(&push.base, wire.packed);
        atomic_fetch_add(&wire.rounds, 1);
        assert_int_equal(rpc_stream_send(stream, &push.base, &err), TALLY_OK); /* by protobuf-c */
        wait_count(f.client_queue, &wire.right, ++sent, "the packed message");
        if (sizes[s] > 0) /* two payloads are one too many */
            assert_int_equal(
                rpc_stream_send_payload(stream, &push.base, payload, sizes[s], release_nothing, &released, &err),
                TALLY_EINVAL);
        push.gradient = (ProtobufCBinaryData){0};
        assert_int_equal(
            rpc_stream_send_payload(stream, &push.base, payload, sizes[s], release_nothing, &released, &err), TALLY_OK);
        wait_count(f.client_queue, &wire.right, ++sent, "the message by reference");
        wait_count(f.client_queue, &released, (unsigned)s + 1, "the payload's release");
        free(payload);
        free(wire.packed);
    }
    rpc_stream_close(stream);
    wait_for(f.client_queue, &ended, "the end");
    assert_int_equal(atomic_load(&wire.wrong), 0);
    fixture_stop(&f);
}

int main(void)
{
    rpc_global_init();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decodes_any_cut),        cmocka_unit_test(test_payload_in_the_middle),
        cmocka_unit_test(test_truncated_and_noise),    cmocka_unit_test(test_unfolding_is_bounded),
        cmocka_unit_test(test_same_bytes_on_the_wire),
    };
    int failed = cmocka_run_group_tests_name("rpc payloads", tests, NULL, NULL);
    rpc_global_shutdown();
    return failed;
}
