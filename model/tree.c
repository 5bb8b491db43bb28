#include "model/tree.h"

#include "common/check.h"
#include "common/limits.h"

static struct tree_node node(uint32_t begin, uint32_t end)
{
    return (struct tree_node){.begin = begin, .end = end};
}

/* One step down from *at towards range, which must fit into one of its children: false where it does not (or *at is a
 * leaf). */
static bool descend(struct tree_node *at, struct tree_node range)
{
    uint32_t n = at->end - at->begin;
    if (n < 2)
        return false;
    uint32_t middle = at->begin + tree_split(n);
    if (range.end <= middle)
        at->end = middle;
    else if (range.begin >= middle)
        at->begin = middle;
    else
        return false;
    return true;
}

uint32_t tree_split(uint32_t n)
{
    tally_check(n >= 2);
    return UINT32_C(1) << (31 - __builtin_clz(n - 1));
}

bool tree_is_node(uint32_t leaves, struct tree_node range)
{
    if (range.begin >= range.end || range.end > leaves)
        return false;
    struct tree_node at = node(0, leaves);
    while (at.begin != range.begin || at.end != range.end)
        if (!descend(&at, range))
            return false;
    return true;
}

struct tree_node tree_parent(uint32_t leaves, struct tree_node child)
{
    struct tree_node at = node(0, leaves), parent = at;
    tally_check(tree_is_node(leaves, child));
    while (at.begin != child.begin || at.end != child.end) {
        parent = at;
        if (!descend(&at, child))
            break;
    }
    return parent;
}

struct tree_node tree_sibling(uint32_t leaves, struct tree_node child)
{
    struct tree_node parent = tree_parent(leaves, child);
    return child.begin == parent.begin ? node(child.end, parent.end) : node(parent.begin, child.begin);
}

size_t tree_cover(uint32_t leaves, uint32_t begin, uint32_t end, struct tree_node cover[TREE_COVER_MAX])
{
    tally_check(leaves <= TALLY_MICRO_BATCHES_MAX && end <= leaves);
    size_t count = 0;
    /* From the left: the node that starts at begin and is the largest that ends by end. On the way down from the root
     * that is the first one that starts at begin and fits. */
    while (begin < end) {
        struct tree_node at = node(0, leaves);
        while (at.begin != begin || at.end > end)
            descend(&at, node(begin, begin + 1));
        tally_check(count < TREE_COVER_MAX);
        cover[count++] = at;
        begin = at.end;
    }
    return count;
}

struct tree_node tree_share(uint32_t leaves, uint32_t rank, uint32_t ranks)
{
    tally_check(ranks > 0 && rank < ranks);
    /* The first ranks take one more: the tree's left children are its large ones, so the shares are more often whole
     * nodes. */
    uint32_t least = leaves / ranks, more = leaves % ranks;
    uint32_t begin = rank * least + (rank < more ? rank : more);
    return node(begin, begin + least + (rank < more));
}

uint32_t tree_levels(uint32_t n)
{
    if (n < 2)
        return n;
    return 1 + (uint32_t)(32 - __builtin_clz(n - 1));
}
