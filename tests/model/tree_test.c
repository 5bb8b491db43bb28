#include "model/tree.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define LEAVES_MAX 200

/* The header's definition, word by word. */
static uint32_t split_by_definition(uint32_t n)
{
    uint32_t power = 1;
    while (power * 2 < n)
        power *= 2;
    return power;
}

static float sum_by_definition(const float *leaf, uint32_t begin, uint32_t end)
{
    if (end - begin == 1)
        return leaf[begin];
    uint32_t middle = begin + split_by_definition(end - begin);
    return sum_by_definition(leaf, begin, middle) + sum_by_definition(leaf, middle, end);
}

static void mark_nodes(bool is_node[LEAVES_MAX + 1][LEAVES_MAX + 1], uint32_t begin, uint32_t end)
{
    is_node[begin][end] = true;
    if (end - begin < 2)
        return;
    uint32_t middle = begin + split_by_definition(end - begin);
    mark_nodes(is_node, begin, middle);
    mark_nodes(is_node, middle, end);
}

static void check_family(uint32_t leaves, uint32_t begin, uint32_t end)
{
    if (end - begin < 2)
        return;
    uint32_t middle = begin + split_by_definition(end - begin);
    struct tree_node left = {begin, middle}, right = {middle, end};
    struct tree_node of[2] = {left, right}, other[2] = {right, left};
    for (int i = 0; i < 2; i++) {
        struct tree_node parent = tree_parent(leaves, of[i]), sibling = tree_sibling(leaves, of[i]);
        assert_int_equal(parent.begin, begin);
        assert_int_equal(parent.end, end);
        assert_int_equal(sibling.begin, other[i].begin);
        assert_int_equal(sibling.end, other[i].end);
        check_family(leaves, of[i].begin, of[i].end);
    }
}

static void test_split(void **state)
{
    (void)state;
    for (uint32_t n = 2; n <= 70000; n++)
        assert_int_equal(tree_split(n), split_by_definition(n));
    assert_int_equal(tree_split(UINT32_MAX), UINT32_C(1) << 31);
}

static void test_nodes_are_those_of_the_definition(void **state)
{
    (void)state;
    static bool is_node[LEAVES_MAX + 1][LEAVES_MAX + 1];
    for (uint32_t leaves = 1; leaves <= LEAVES_MAX; leaves++) {
        memset(is_node, 0, sizeof(is_node));
        mark_nodes(is_node, 0, leaves);
        for (uint32_t begin = 0; begin <= leaves; begin++)
            for (uint32_t end = 0; end <= leaves; end++)
                assert_int_equal(tree_is_node(leaves, (struct tree_node){begin, end}), is_node[begin][end]);
        assert_false(tree_is_node(leaves, (struct tree_node){0, leaves + 1}));
        assert_false(tree_is_node(leaves, (struct tree_node){leaves, leaves + 1}));
        assert_false(tree_is_node(leaves, (struct tree_node){1, 0}));
        check_family(leaves, 0, leaves);
    }
    assert_false(tree_is_node(0, (struct tree_node){0, 0}));
}

static void check_cover(uint32_t leaves, uint32_t begin, uint32_t end)
{
    struct tree_node cover[TREE_COVER_MAX];
    size_t count = tree_cover(leaves, begin, end, cover);
    assert_true(count <= TREE_COVER_MAX);
    uint32_t at = begin;
    for (size_t i = 0; i < count; i++) {
        assert_int_equal(cover[i].begin, at);
        assert_true(tree_is_node(leaves, cover[i]));
        at = cover[i].end;
        if (cover[i].end - cover[i].begin == leaves)
            continue;
        struct tree_node parent = tree_parent(leaves, cover[i]);
        assert_true(parent.begin < begin || parent.end > end);
    }
    assert_int_equal(at, end);
}

static void test_covers(void **state)
{
    (void)state;
    for (uint32_t leaves = 1; leaves <= LEAVES_MAX; leaves++)
        for (uint32_t begin = 0; begin <= leaves; begin++)
            for (uint32_t end = begin; end <= leaves; end++)
                check_cover(leaves, begin, end);
    check_cover(65536, 1, 65535);
    check_cover(65535, 1, 65534);
    struct tree_node cover[TREE_COVER_MAX];
    assert_int_equal(tree_cover(8, 3, 3, cover), 0);
    assert_int_equal(tree_cover(65536, 1, 65535, cover), 30);
    assert_int_equal(tree_cover(7, 4, 7, cover), 1);
    assert_int_equal(tree_cover(7, 0, 7, cover), 1);
}

/* What a shard does: holds what arrived, and adds siblings, left + right, as soon as it has both. */
struct arrived {
    bool have[LEAVES_MAX + 1][LEAVES_MAX + 1];
    float sum[LEAVES_MAX + 1][LEAVES_MAX + 1];
};

static void arrive(struct arrived *a, uint32_t leaves, struct tree_node node, float sum)
{
    for (;;) {
        a->have[node.begin][node.end] = true;
        a->sum[node.begin][node.end] = sum;
        if (node.end - node.begin == leaves)
            return;
        struct tree_node other = tree_sibling(leaves, node);
        if (!a->have[other.begin][other.end])
            return;
        float other_sum = a->sum[other.begin][other.end];
        sum = node.begin < other.begin ? sum + other_sum : other_sum + sum;
        node = tree_parent(leaves, node);
    }
}

static void test_sums_do_not_depend_on_shares_or_arrival(void **state)
{
    (void)state;
    static struct arrived a;
    static struct tree_node sent[LEAVES_MAX * 2];
    float leaf[LEAVES_MAX];
    srand(7);
    for (uint32_t leaves = 1; leaves <= LEAVES_MAX; leaves++) {
        for (uint32_t i = 0; i < leaves; i++)
            leaf[i] = ((float)rand() / (float)RAND_MAX - 0.5f) * (float)(1 << rand() % 24);
        float expected = sum_by_definition(leaf, 0, leaves);
        for (uint32_t ranks = 1; ranks <= 9; ranks++) {
            memset(&a, 0, sizeof(a));
            size_t count = 0;
            for (uint32_t rank = 0; rank < ranks; rank++) {
                struct tree_node share = tree_share(leaves, rank, ranks);
                count += tree_cover(leaves, share.begin, share.end, sent + count);
            }
            for (size_t i = count; i > 0; i--) {
                size_t next = (size_t)rand() % i;
                struct tree_node node = sent[next];
                sent[next] = sent[i - 1];
                arrive(&a, leaves, node, sum_by_definition(leaf, node.begin, node.end));
            }
            assert_true(a.have[0][leaves]);
            assert_memory_equal(&a.sum[0][leaves], &expected, sizeof(expected));
        }
    }
}

static void test_shares(void **state)
{
    (void)state;
    for (uint32_t leaves = 0; leaves <= LEAVES_MAX; leaves++)
        for (uint32_t ranks = 1; ranks <= 20; ranks++) {
            uint32_t at = 0, least = UINT32_MAX, most = 0;
            for (uint32_t rank = 0; rank < ranks; rank++) {
                struct tree_node share = tree_share(leaves, rank, ranks);
                assert_int_equal(share.begin, at);
                uint32_t n = share.end - share.begin;
                least = n < least ? n : least;
                most = n > most ? n : most;
                at = share.end;
            }
            assert_int_equal(at, leaves);
            assert_true(most - least <= 1);
        }
    /* Powers of two: every worker sends one node. */
    struct tree_node cover[TREE_COVER_MAX];
    for (uint32_t leaves = 1; leaves <= 256; leaves *= 2)
        for (uint32_t ranks = 1; ranks <= leaves; ranks *= 2)
            for (uint32_t rank = 0; rank < ranks; rank++) {
                struct tree_node share = tree_share(leaves, rank, ranks);
                assert_int_equal(tree_cover(leaves, share.begin, share.end, cover), 1);
            }
}

/* Buffers in use when a node is summed left to right, its left child's sum waiting while the right one is made. */
static uint32_t levels_by_definition(uint32_t n)
{
    if (n < 2)
        return n;
    uint32_t left = levels_by_definition(split_by_definition(n));
    uint32_t right = 1 + levels_by_definition(n - split_by_definition(n));
    return left > right ? left : right;
}

static void test_levels(void **state)
{
    (void)state;
    static const uint32_t expected[][2] = {{0, 0}, {1, 1}, {2, 2}, {3, 3}, {4, 3}, {5, 4}, {8, 4}, {9, 5}, {65536, 17}};
    for (size_t i = 0; i < sizeof(expected) / sizeof(expected[0]); i++)
        assert_int_equal(tree_levels(expected[i][0]), expected[i][1]);
    for (uint32_t n = 1; n <= 3000; n++)
        assert_true(levels_by_definition(n) <= tree_levels(n));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split),  cmocka_unit_test(test_nodes_are_those_of_the_definition),
        cmocka_unit_test(test_covers), cmocka_unit_test(test_sums_do_not_depend_on_shares_or_arrival),
        cmocka_unit_test(test_shares), cmocka_unit_test(test_levels),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
