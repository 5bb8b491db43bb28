#include "server/event_batch.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static Tally__V1__StepDone step_of(uint64_t step, double loss, double lr, double correct, int64_t mono_us)
{
    Tally__V1__StepDone done = TALLY__V1__STEP_DONE__INIT;
    done.step = step;
    done.epoch = step / 3;
    done.loss = loss;
    done.samples = step % 5 * 64;
    done.lr = lr;
    done.correct = correct;
    done.mono_us = mono_us;
    return done;
}

/* The hand-written packing of a step is protobuf-c's own, for zeros and the largest values too. */
static void steps_are_packed_as_protobuf_c_does(void **state)
{
    (void)state;
    const uint64_t steps[] = {0, 1, 127, 128, 16384, UINT64_MAX};
    const double numbers[] = {0, -0.0, 1, -2.5e-300, INFINITY, NAN};
    struct event_batch *one = event_batch_new(1), *other = event_batch_new(1);
    for (size_t i = 0; i < 6; i++) {
        for (size_t j = 0; j < 6; j++) {
            Tally__V1__StepDone done =
                step_of(steps[i], numbers[j], numbers[5 - j], numbers[i], j % 2 ? INT64_MIN : (int64_t)steps[i]);
            Tally__V1__Event event = TALLY__V1__EVENT__INIT;
            event.unix_ms = i % 2 ? -1 : 1700000000000;
            event.body_case = TALLY__V1__EVENT__BODY_STEP;
            event.step = &done;
            assert_int_equal(event_batch_add_step(one, event.unix_ms, &done, NULL), TALLY_OK);
            assert_int_equal(event_batch_add(other, &event, NULL), TALLY_OK);
        }
    }
    assert_int_equal(one->bytes, other->bytes);
    assert_memory_equal(one->data, other->data, one->bytes);
    assert_int_equal(one->last, 36);
    event_batch_unref(one);
    event_batch_unref(other);
}

static struct event_batch *mixed_batch(uint64_t first, unsigned count)
{
    struct event_batch *batch = event_batch_new(first);
    char text[400];
    memset(text, 'x', sizeof text);
    for (unsigned i = 0; i < count; i++) {
        text[i * 7 % 399] = '\0';
        Tally__V1__Notice notice = TALLY__V1__NOTICE__INIT;
        notice.text = text;
        Tally__V1__Event event = TALLY__V1__EVENT__INIT;
        event.body_case = TALLY__V1__EVENT__BODY_NOTICE;
        event.notice = &notice;
        Tally__V1__StepDone done = step_of(first + i, 0.5, 0.1, 3, 77);
        if (i % 3 == 0)
            assert_int_equal(event_batch_add(batch, &event, NULL), TALLY_OK);
        else
            assert_int_equal(event_batch_add_step(batch, 5, &done, NULL), TALLY_OK);
        text[i * 7 % 399] = 'x';
    }
    return batch;
}

/* A part of a batch, sent without being unpacked, is read as the events behind `after`. */
static void a_batch_can_be_resumed_anywhere(void **state)
{
    (void)state;
    struct event_batch *batch = mixed_batch(100, 40);
    for (uint64_t after = 90; after < 145; after++) {
        const uint8_t *data = NULL;
        size_t bytes = event_batch_after(batch, after, &data);
        uint64_t next = after < 100 ? 100 : after + 1;
        if (after >= 139) {
            assert_int_equal(bytes, 0);
            continue;
        }
        Tally__V1__Events message;
        ProtobufCMessageUnknownField field;
        event_batch_message(data, bytes, &message, &field);
        size_t size = tally__v1__events__get_packed_size(&message);
        assert_int_equal(size, bytes);
        uint8_t *packed = malloc(size);
        assert_int_equal(tally__v1__events__pack(&message, packed), size);
        Tally__V1__Events *events = tally__v1__events__unpack(NULL, size, packed);
        assert_non_null(events);
        assert_int_equal(events->n_events, 140 - next);
        for (size_t i = 0; i < events->n_events; i++)
            assert_int_equal(events->events[i]->seq, next + i);
        tally__v1__events__free_unpacked(events, NULL);
        free(packed);
    }
    event_batch_unref(batch);
}

/* Bytes from a damaged store end the walk instead of leaving the batch. */
static void damaged_bytes_are_not_followed(void **state)
{
    (void)state;
    struct event_batch *good = mixed_batch(1, 6);
    for (size_t cut = 0; cut < good->bytes; cut += 3) {
        struct event_batch *bad = event_batch_from(1, 6, good->data, cut);
        for (uint64_t after = 0; after < 6; after++) {
            const uint8_t *data = bad->data;
            size_t bytes = event_batch_after(bad, after, &data);
            assert_true(bytes <= cut && data >= bad->data && data + bytes <= bad->data + cut);
        }
        event_batch_unref(bad);
    }
    uint8_t endless[40];
    memset(endless, 0xff, sizeof endless);
    struct event_batch *bad = event_batch_from(1, 6, endless, sizeof endless);
    const uint8_t *data;
    assert_int_equal(event_batch_after(bad, 3, &data), 0);
    event_batch_unref(bad);
    event_batch_unref(good);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(steps_are_packed_as_protobuf_c_does),
        cmocka_unit_test(a_batch_can_be_resumed_anywhere),
        cmocka_unit_test(damaged_bytes_are_not_followed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
