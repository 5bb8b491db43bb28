/* What proto/wire.c says of a message must be what protobuf-c makes of it, however the message is cut into pieces. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "common/limits.h"
#include "proto/jobs.pb-c.h"
#include "proto/parameters.pb-c.h"
#include "proto/peers.pb-c.h"
#include "proto/wire.h"

struct pieces {
    const uint8_t *data;
    size_t bytes, piece;
};

static bool next_piece(void *context, const uint8_t **ret_data, size_t *ret_bytes)
{
    struct pieces *p = context;
    if (p->bytes == 0)
        return false;
    size_t n = p->piece < p->bytes ? p->piece : p->bytes;
    *ret_data = p->data;
    *ret_bytes = n;
    p->data += n;
    p->bytes -= n;
    return true;
}

static enum wire_payload find(const uint8_t *data, size_t bytes, size_t piece, size_t *ret_header, size_t *ret_begin)
{
    struct pieces p = {.data = data, .bytes = bytes, .piece = piece};
    return wire_find_payload(next_piece, &p, bytes, 15, ret_header, ret_begin);
}

static void test_payload_field(void **state)
{
    (void)state;
    assert_int_equal(wire_payload_field(&tally__v1__push__descriptor)->id, 15);
    assert_int_equal(wire_payload_field(&tally__v1__update__descriptor)->id, 15);
    assert_int_equal(wire_payload_field(&tally__v1__tensor_message__descriptor)->id, 15);
    assert_int_equal(wire_payload_field(&tally__v1__result_chunk__descriptor)->id, 3);
    assert_null(wire_payload_field(&tally__v1__job__descriptor));
    assert_null(wire_payload_field(&tally__v1__list_request__descriptor)); /* no field at all */
    assert_null(wire_payload_field(&tally__v1__event__descriptor));        /* a oneof */
}

static void test_finds_what_was_packed(void **state)
{
    (void)state;
    static const size_t sizes[] = {0, 1, 127, 128, 5000, 16384, 100000};
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        uint8_t *payload = malloc(sizes[s] + 1);
        memset(payload, 0x7a, sizes[s]); /* 0x7a is the tag of field 15 itself */
        Tally__V1__Push push = TALLY__V1__PUSH__INIT;
        Tally__V1__Hello hello = TALLY__V1__HELLO__INIT;
        hello.worker = "w\x7a\x7a";
        push.job = UINT64_MAX;
        push.step = 300;
        push.weight = 0.1;
        push.hello = &hello;
        push.gradient = (ProtobufCBinaryData){.len = sizes[s], .data = payload};
        size_t bytes = protobuf_c_message_get_packed_size(&push.base);
        uint8_t *all = malloc(bytes);
        protobuf_c_message_pack(&push.base, all);
        for (size_t piece = 1; piece <= bytes; piece = piece < 40 ? piece + 1 : piece * 2) {
            size_t header = 0, begin = 0;
            enum wire_payload found = find(all, bytes, piece, &header, &begin);
            assert_int_equal(found, sizes[s] ? WIRE_PAYLOAD_LAST : WIRE_PAYLOAD_ABSENT);
            assert_int_equal(bytes - begin, sizes[s]);
            push.gradient.len = 0;
            assert_int_equal(header, protobuf_c_message_get_packed_size(&push.base));
            push.gradient.len = sizes[s];
            uint8_t prefix[WIRE_PREFIX_MAX];
            if (sizes[s]) {
                assert_int_equal(wire_payload_prefix(15, sizes[s], prefix), begin - header);
                assert_memory_equal(prefix, all + header, begin - header);
            }
        }
        free(all);
        free(payload);
    }
}

static void test_other_shapes(void **state)
{
    (void)state;
    size_t header = 99, begin = 99;
    static const uint8_t before[] = {0x7a, 2, 1, 2, 0x08, 1}; /* field 15, then field 1 */
    static const uint8_t twice[] = {0x7a, 1, 1, 0x7a, 2, 1, 2};
    static const uint8_t unknown[] = {0xfa, 0x7f, 1, 9, 0x7a, 1, 5}; /* an unknown field 2047 in front */
    static const uint8_t varint[] = {0x78, 1};                       /* field 15, but a number */
    assert_int_equal(find(before, sizeof before, 1, &header, &begin), WIRE_PAYLOAD_INSIDE);
    assert_int_equal(find(twice, sizeof twice, 2, &header, &begin), WIRE_PAYLOAD_INSIDE);
    assert_int_equal(find(unknown, sizeof unknown, 1, &header, &begin), WIRE_PAYLOAD_LAST);
    assert_int_equal(header, 4);
    assert_int_equal(begin, 6);
    assert_int_equal(find(varint, sizeof varint, 1, &header, &begin), WIRE_PAYLOAD_ABSENT);
    assert_int_equal(find(varint, 0, 1, &header, &begin), WIRE_PAYLOAD_ABSENT);
}

static void test_malformed(void **state)
{
    (void)state;
    static const struct {
        uint8_t data[12];
        size_t bytes;
    } bad[] = {
        {{0x7a}, 1},                                                                 /* no length */
        {{0x7a, 5, 1}, 3},                                                           /* longer than what is there */
        {{0x7a, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}, 11},       /* 2^64-1 bytes */
        {{0x08, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}, 12}, /* a varint of 11 bytes */
        {{0x0b}, 1},                                                                 /* a group */
        {{0x00, 1}, 2},                                                              /* field 0 */
        {{0x09, 1, 2}, 3},                                                           /* 64 bits cut */
        {{0x12, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 1}, 11},       /* skips 2^64-1 */
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        size_t header, begin;
        for (size_t piece = 1; piece <= bad[i].bytes; piece++)
            assert_int_equal(find(bad[i].data, bad[i].bytes, piece, &header, &begin), WIRE_MALFORMED);
    }
}

/* Any bytes: no crash, and never a payload outside the message. */
static void test_noise(void **state)
{
    (void)state;
    uint32_t x = 12345;
    for (int round = 0; round < 20000; round++) {
        uint8_t data[32];
        for (size_t i = 0; i < sizeof data; i++) {
            x = x * 1664525u + 1013904223u;
            data[i] = (uint8_t)(x >> 24);
            if (round % 3 == 0 && i % 5 == 0)
                data[i] = 0x7a;
        }
        size_t n = x % (sizeof data + 1), header = 0, begin = 0;
        enum wire_payload found = find(data, n, 1 + x % 7, &header, &begin);
        if (found == WIRE_PAYLOAD_LAST || found == WIRE_PAYLOAD_ABSENT)
            assert_true(header <= begin && begin <= n);
    }
}

static void test_arena(void **state)
{
    (void)state;
    struct wire_arena arena = {0};
    assert_true(wire_arena_reset(&arena));
    unsigned char *first = wire_arena_alloc(&arena, 3);
    unsigned char *second = wire_arena_alloc(&arena, 0);
    assert_int_equal((uintptr_t)first % 16, 0);
    assert_ptr_not_equal(first, second);
    unsigned char *large = wire_arena_alloc(&arena, 1 << 20); /* beyond the block */
    memset(large, 1, 1 << 20);
    assert_null(wire_arena_alloc(&arena, TALLY_UNPACK_MAX_BYTES));
    assert_null(wire_arena_alloc(&arena, SIZE_MAX));
    assert_true(wire_arena_reset(&arena));
    assert_ptr_equal(wire_arena_alloc(&arena, 3), first); /* the block is used again */
    assert_non_null(wire_arena_alloc(&arena, TALLY_UNPACK_MAX_BYTES - 4096));
    wire_arena_clear(&arena);
    wire_arena_clear(&arena);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_payload_field), cmocka_unit_test(test_finds_what_was_packed),
        cmocka_unit_test(test_other_shapes),  cmocka_unit_test(test_malformed),
        cmocka_unit_test(test_noise),         cmocka_unit_test(test_arena),
    };
    return cmocka_run_group_tests_name("wire", tests, NULL, NULL);
}
