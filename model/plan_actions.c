/* The list of a step: which leaves this rank runs, into which buffer each gradient goes, when sums are merged and when
 * they leave. */
#include "model/plan_build.h"

/*
 * A leaf of a subtree that is summed from left to right. Its gradient goes to a buffer above those that wait for their
 * right sibling (one for each turn to the right on the way to it), and then closes every node that ends with it: as
 * many as the way's last turns to the right.
 */
static void leaf_place(struct tree_node node, uint32_t leaf, uint32_t *ret_level, uint32_t *ret_merges)
{
    uint32_t level = 0, merges = 0;
    while (node.end - node.begin > 1) {
        uint32_t middle = node.begin + tree_split(node.end - node.begin);
        if (leaf < middle) {
            node.end = middle;
            merges = 0;
        } else {
            node.begin = middle;
            level++;
            merges++;
        }
    }
    *ret_level = level;
    *ret_merges = merges;
}

static struct tree_node share(const struct plan *plan, uint32_t leaves)
{
    uint32_t data_index = plan->rank / (plan->mesh.pipeline * plan->mesh.tensor);
    return tree_share(leaves, data_index, plan->mesh.data);
}

static uint32_t step_levels(const struct plan *plan, uint32_t leaves)
{
    struct tree_node cover[TREE_COVER_MAX], mine = share(plan, leaves);
    size_t nodes = tree_cover(leaves, mine.begin, mine.end, cover);
    uint32_t levels = 1;
    for (size_t i = 0; i < nodes; i++)
        for (uint32_t leaf = cover[i].begin; leaf < cover[i].end; leaf++) {
            uint32_t level, merges;
            leaf_place(cover[i], leaf, &level, &merges);
            levels = level + 1 > levels ? level + 1 : levels;
        }
    return levels;
}

uint32_t plan_levels(const struct plan *plan)
{
    const struct batches *b = &plan->batches;
    struct step_shape first = batches_step(b, 1);
    struct step_shape last = batches_step(b, b->steps < b->epoch_steps ? b->steps : b->epoch_steps);
    uint32_t full = step_levels(plan, first.leaves), tail = step_levels(plan, last.leaves);
    return full > tail ? full : tail;
}

size_t plan_actions_max(const struct plan *plan)
{
    /* Of the first rank in the first step: no other has more leaves. Each may be a node of its own. */
    struct tree_node most = tree_share(batches_step(&plan->batches, 1).leaves, 0, plan->mesh.data);
    return 3 * (size_t)(most.end - most.begin);
}

size_t plan_step_actions(const struct plan *plan, uint32_t leaves, struct action *actions)
{
    struct tree_node cover[TREE_COVER_MAX], mine = share(plan, leaves);
    size_t nodes = tree_cover(leaves, mine.begin, mine.end, cover), n = 0;
    for (size_t i = 0; i < nodes; i++) {
        for (uint32_t leaf = cover[i].begin; leaf < cover[i].end; leaf++) {
            struct action a = {.kind = ACTION_FORWARD, .micro_batch = leaf};
            actions[n++] = a;
            a.kind = ACTION_BACKWARD;
            leaf_place(cover[i], leaf, &a.level, &a.merges);
            if (leaf + 1 == cover[i].end)
                a.push = cover[i];
            actions[n++] = a;
        }
        actions[n++] = (struct action){.kind = ACTION_PUSH, .micro_batch = cover[i].end - 1, .push = cover[i]};
    }
    return n;
}
