/* Cuts against all cuts there are. */
#include "model/balance.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/support/splitmix.h"

#define N_MAX 12

static uint64_t sum(const uint64_t *costs, size_t begin, size_t end)
{
    uint64_t s = 0;
    for (size_t i = begin; i < end; i++)
        s += costs[i];
    return s;
}

/* The smallest largest run, by trying everything. */
static uint64_t brute_force(const uint64_t *costs, size_t n, size_t runs)
{
    if (runs == 1)
        return sum(costs, 0, n);
    uint64_t best = UINT64_MAX;
    for (size_t first = 1; first + runs - 1 <= n; first++) {
        uint64_t here = sum(costs, 0, first), rest = brute_force(costs + first, n - first, runs - 1);
        uint64_t most = here > rest ? here : rest;
        best = most < best ? most : best;
    }
    return best;
}

static uint64_t largest(const uint64_t *costs, size_t n, size_t runs, const size_t *begin)
{
    uint64_t most = 0;
    assert_int_equal(begin[0], 0);
    assert_int_equal(begin[runs], n);
    for (size_t r = 0; r < runs; r++) {
        assert_true(begin[r] < begin[r + 1]);
        uint64_t here = sum(costs, begin[r], begin[r + 1]);
        most = here > most ? here : most;
    }
    return most;
}

static void equals_brute_force(void **state)
{
    (void)state;
    uint64_t random = 7;
    uint64_t costs[N_MAX];
    size_t begin[N_MAX + 1];
    for (int i = 0; i < 4000; i++) {
        size_t n = 1 + splitmix(&random) % N_MAX, runs = 1 + splitmix(&random) % n;
        uint64_t range = (uint64_t[]){2, 10, 1000, UINT64_C(1) << 50}[splitmix(&random) % 4];
        for (size_t k = 0; k < n; k++)
            costs[k] = splitmix(&random) % range;
        assert_true(balance_cut(costs, n, runs, begin));
        assert_true(largest(costs, n, runs, begin) == brute_force(costs, n, runs));
    }
}

static void equal_layers_are_shared_equally(void **state)
{
    (void)state;
    const uint64_t costs[12] = {5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5, 5};
    size_t begin[13];
    for (size_t runs = 1; runs <= 12; runs++) {
        assert_true(balance_cut(costs, 12, runs, begin));
        for (size_t r = 0; r < runs; r++) {
            size_t length = begin[r + 1] - begin[r];
            assert_true(length >= 12 / runs && length <= (12 + runs - 1) / runs);
        }
    }
}

static void extremes(void **state)
{
    (void)state;
    const uint64_t huge[4] = {UINT64_MAX, UINT64_MAX, 1, UINT64_MAX}, zeros[3] = {0, 0, 0};
    size_t begin[5];
    assert_true(balance_cut(huge, 4, 3, begin));
    assert_int_equal(begin[3], 4);
    for (size_t r = 0; r < 3; r++)
        assert_true(begin[r] < begin[r + 1]);
    assert_true(balance_cut(zeros, 3, 3, begin));
    assert_int_equal(begin[1], 1);
    assert_false(balance_cut(zeros, 3, 4, begin));
    assert_false(balance_cut(zeros, 3, 0, begin));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(equals_brute_force),
        cmocka_unit_test(equal_layers_are_shared_equally),
        cmocka_unit_test(extremes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
