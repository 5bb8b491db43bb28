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

struct tree_node plan_share(const struct plan *plan, uint32_t leaves)
{
    return tree_share(leaves, plan->data_index, plan->mesh.data);
}

static uint32_t step_levels(const struct plan *plan, uint32_t leaves)
{
    struct tree_node cover[TREE_COVER_MAX], mine = plan_share(plan, leaves);
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

/* Actions of one micro-batch in this rank, PUSH included. */
static size_t actions_each(const struct plan *plan)
{
    size_t n = 0;
    for (uint32_t k = 0; k < plan->segment_count; k++)
        n += plan_owns(plan, k) ? 3 : 0;
    for (size_t i = 0; i < plan->edge_count; i++)
        n += plan_owns(plan, plan->edges[i].from) || plan_owns(plan, plan->edges[i].to);
    return n;
}

size_t plan_actions_max(const struct plan *plan)
{
    /* Of the first replica in the first step: no other has more leaves. Each may be a node of its own. */
    struct tree_node most = tree_share(batches_step(&plan->batches, 1).leaves, 0, plan->mesh.data);
    return actions_each(plan) * (most.end - most.begin);
}

/* What crosses from (ACTION_SEND) or to (ACTION_RECEIVE) a segment. */
static size_t crossings(const struct plan *plan, enum action_kind kind, bool backward, const struct action *of,
                        struct action *actions)
{
    size_t n = 0;
    for (uint32_t i = 0; i < plan->edge_count; i++) {
        const struct plan_edge *e = &plan->edges[i];
        uint32_t here = kind == ACTION_SEND ? e->from : e->to, there = kind == ACTION_SEND ? e->to : e->from;
        if (e->backward != backward || here != of->chunk)
            continue;
        actions[n] = *of;
        actions[n].kind = kind;
        actions[n].edge = i;
        actions[n++].peer = plan_peer(plan, plan->segments[there].stage);
    }
    return n;
}

static size_t forward_actions(const struct plan *plan, uint32_t segment, uint32_t leaf, struct action *actions)
{
    struct action a = {
        .kind = ACTION_FORWARD, .micro_batch = leaf, .chunk = segment, .slot = leaf % plan->segments[segment].slots};
    size_t n = crossings(plan, ACTION_RECEIVE, false, &a, actions);
    actions[n++] = a;
    return n + crossings(plan, ACTION_SEND, false, &a, actions + n);
}

static size_t backward_actions(const struct plan *plan, uint32_t segment, struct tree_node node, uint32_t leaf,
                               struct action *actions)
{
    struct action a = {.micro_batch = leaf, .chunk = segment, .slot = leaf % plan->segments[segment].slots};
    if (!plan->segments[segment].backward)
        return 0;
    size_t n = crossings(plan, ACTION_RECEIVE, true, &a, actions);
    struct action *backward = &actions[n++];
    *backward = a;
    backward->kind = ACTION_BACKWARD;
    leaf_place(node, leaf, &backward->level, &backward->merges);
    if (leaf + 1 == node.end)
        backward->push = node;
    n += crossings(plan, ACTION_SEND, true, &a, actions + n);
    if (leaf + 1 == node.end) {
        actions[n] = a;
        actions[n].kind = ACTION_PUSH;
        actions[n++].push = node;
    }
    return n;
}

/* The node of the cover that holds a leaf. */
static struct tree_node node_of(const struct tree_node *cover, size_t nodes, uint32_t leaf)
{
    size_t i = 0;
    while (i + 1 < nodes && cover[i].end <= leaf)
        i++;
    return cover[i];
}

static const struct plan_order *find_order(const struct plan *plan, uint32_t micro_batches)
{
    for (size_t i = 0; i < plan->order_count; i++)
        if (plan->orders[i].micro_batches == micro_batches)
            return &plan->orders[i];
    return NULL;
}

size_t plan_step_actions(const struct plan *plan, uint32_t leaves, struct action *actions)
{
    struct tree_node cover[TREE_COVER_MAX], mine = plan_share(plan, leaves);
    size_t nodes = tree_cover(leaves, mine.begin, mine.end, cover), n = 0;
    const struct plan_order *order = find_order(plan, mine.end - mine.begin);
    if (plan->mesh.pipeline == 1)
        for (uint32_t leaf = mine.begin; leaf < mine.end; leaf++) {
            n += forward_actions(plan, 0, leaf, actions + n);
            n += backward_actions(plan, 0, node_of(cover, nodes, leaf), leaf, actions + n);
        }
    for (size_t i = 0; order && i < order->count; i++) {
        const struct schedule_action *a = &order->actions[i];
        uint32_t leaf = mine.begin + a->micro_batch;
        n += a->backward ? backward_actions(plan, a->segment, node_of(cover, nodes, leaf), leaf, actions + n)
                         : forward_actions(plan, a->segment, leaf, actions + n);
    }
    return n;
}
