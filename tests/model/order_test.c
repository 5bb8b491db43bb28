#include "model/order.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/model/order_reference.h"
#include "tests/support/fnv.h"

#define REFERENCES (sizeof(order_reference) / sizeof(order_reference[0]))

static struct order *open_reference(size_t i)
{
    struct order *order = NULL;
    assert_int_equal(order_open(order_reference[i].samples, true, order_reference[i].seed,
                                order_reference[i].init_draws, &order, NULL),
                     TALLY_OK);
    return order;
}

static void check(struct order *order, size_t i)
{
    size_t samples = order_reference[i].samples;
    const uint32_t *indices = order_epoch(order, order_reference[i].epoch);
    for (size_t j = 0; j < 8 && j < samples; j++)
        assert_int_equal(indices[j], order_reference[i].first[j]);
    assert_int_equal(fnv(indices, samples * sizeof(*indices)), order_reference[i].fnv);
}

static bool same_case(size_t i, size_t j)
{
    return order_reference[i].seed == order_reference[j].seed &&
           order_reference[i].samples == order_reference[j].samples;
}

static void test_pytorch(void **state)
{
    (void)state;
    struct order *order = NULL;
    for (size_t i = 0; i < REFERENCES; i++) {
        if (i == 0 || !same_case(i, i - 1)) {
            order_close(order);
            order = open_reference(i);
        }
        check(order, i);
        check(order, i);
    }
    order_close(order);
}

/* Asked for in any order: forwards with gaps, back, and straight to the last. */
static void test_going_back(void **state)
{
    (void)state;
    for (size_t i = 0; i < REFERENCES; i++) {
        struct order *order = open_reference(i);
        for (size_t j = REFERENCES; j > 0; j--)
            if (same_case(i, j - 1))
                check(order, j - 1);
        check(order, i);
        order_epoch(order, 1000);
        check(order, i);
        order_close(order);
    }
}

static void test_file_order(void **state)
{
    (void)state;
    struct order *order = NULL;
    assert_int_equal(order_open(1000, false, 5, 100, &order, NULL), TALLY_OK);
    for (uint64_t epoch = 3; epoch > 0; epoch--) {
        const uint32_t *indices = order_epoch(order, epoch);
        for (uint32_t i = 0; i < 1000; i++)
            assert_int_equal(indices[i], i);
    }
    order_close(order);
}

static void test_every_sample_once(void **state)
{
    (void)state;
    enum { N = 70000 };
    struct order *order = NULL;
    static bool seen[N];
    assert_int_equal(order_open(N, true, 1, 12, &order, NULL), TALLY_OK);
    for (uint64_t epoch = 1; epoch <= 3; epoch++) {
        const uint32_t *indices = order_epoch(order, epoch);
        size_t in_place = 0;
        memset(seen, 0, sizeof(seen));
        for (size_t i = 0; i < N; i++) {
            assert_true(indices[i] < N);
            assert_false(seen[indices[i]]);
            seen[indices[i]] = true;
            in_place += indices[i] == i;
        }
        assert_true(in_place < 20);
    }
    order_close(order);
}

static void test_refusals(void **state)
{
    (void)state;
    struct order *order = NULL;
    struct tally_error err;
    assert_int_equal(order_open(0, true, 1, 0, &order, &err), TALLY_EINVAL);
    assert_int_equal(order_open((uint64_t)1 << 32, true, 1, 0, &order, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "a training set of 4294967296 samples, expected 1 to 4294967295");
    assert_null(order);
    order_close(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_pytorch),           cmocka_unit_test(test_going_back), cmocka_unit_test(test_file_order),
        cmocka_unit_test(test_every_sample_once), cmocka_unit_test(test_refusals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
