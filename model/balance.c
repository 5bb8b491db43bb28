/* The smallest limit that so many runs can keep is found by bisection (a limit is tried by filling runs from the
 * right), which is exact for whole numbers and needs no table of n x runs. */
#include "model/balance.h"

#include <stdlib.h>

static uint64_t add(uint64_t a, uint64_t b)
{
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}

/* need[i]: the fewest runs of at most `limit` that costs[i, n) can be cut into; need[n] is 0. false: one alone is
 * larger. */
static bool fewest_runs(const uint64_t *costs, size_t n, uint64_t limit, size_t *need)
{
    size_t end = n; /* of the run that begins at or before i, filled as far to the right as it goes */
    uint64_t sum = 0;
    need[n] = 0;
    for (size_t i = n; i-- > 0;) {
        if (costs[i] > limit)
            return false;
        sum += costs[i]; /* below 2 limit, or wraps: looked at at once */
        while (sum > limit || sum < costs[i])
            sum -= costs[--end];
        need[i] = need[end] + 1;
    }
    return true;
}

static uint64_t smallest_limit(const uint64_t *costs, size_t n, size_t runs, size_t *need)
{
    uint64_t low = 0, high = 0;
    for (size_t i = 0; i < n; i++)
        high = add(high, costs[i]);
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (fewest_runs(costs, n, middle, need) && need[0] <= runs)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* The end of a run from `begin`, such that the rest can still be cut into `left` runs. */
static size_t choose_end(const uint64_t *costs, size_t n, size_t begin, size_t left, uint64_t limit, const size_t *need,
                         uint64_t rest)
{
    uint64_t share = rest / (left + 1), sum = 0, best_distance = UINT64_MAX;
    size_t best = begin + 1;
    for (size_t end = begin + 1; end + left <= n; end++) {
        sum = add(sum, costs[end - 1]);
        if (sum > limit)
            break;
        uint64_t distance = sum > share ? sum - share : share - sum;
        if (need[end] <= left && distance < best_distance) {
            best = end;
            best_distance = distance;
        }
    }
    return best;
}

bool balance_cut(const uint64_t *costs, size_t n, size_t runs, size_t *ret_begin)
{
    if (runs == 0 || n < runs)
        return false;
    size_t *need = calloc(n + 1, sizeof *need);
    if (!need)
        return false;
    uint64_t limit = smallest_limit(costs, n, runs, need), rest = 0;
    if (limit == UINT64_MAX) /* sums that cannot be told apart: any cut is as good */
        for (size_t i = 0; i <= n; i++)
            need[i] = i < n;
    else
        fewest_runs(costs, n, limit, need);
    for (size_t i = 0; i < n; i++)
        rest = add(rest, costs[i]);
    ret_begin[0] = 0;
    for (size_t r = 0; r + 1 < runs; r++) {
        ret_begin[r + 1] = choose_end(costs, n, ret_begin[r], runs - 1 - r, limit, need, rest);
        for (size_t i = ret_begin[r]; i < ret_begin[r + 1]; i++)
            rest = rest == UINT64_MAX ? rest : rest - costs[i];
    }
    ret_begin[runs] = n;
    free(need);
    return true;
}
