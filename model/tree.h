#ifndef MODEL_TREE_H
#define MODEL_TREE_H
/*
 * The canonical binary tree over the micro-batches (leaves) of a step. A node over n leaves splits at the largest power
 * of two below n, and its sum is left + right. Sums that follow it do not depend on who computed which part, or in
 * which order the parts arrived. A node is written as its range of leaves [begin, end).
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct tree_node {
    uint32_t begin, end;
};

/* A tree of at most 2^16 leaves (limits.h) has no more nodes on a path, and a range no more in its cover. */
#define TREE_COVER_MAX 34

/* Leaves in the left child of a node over n >= 2 leaves: the largest power of two below n. */
uint32_t tree_split(uint32_t n);

/* Is [begin, end) a node of the tree over so many leaves? The root and the leaves are. */
bool tree_is_node(uint32_t leaves, struct tree_node node);

/* The parent of a node that is not the root, and its sibling. */
struct tree_node tree_parent(uint32_t leaves, struct tree_node node);
struct tree_node tree_sibling(uint32_t leaves, struct tree_node node);

/* The largest nodes inside [begin, end), left to right: what a worker that runs these leaves sends. Returns how many (0
 * for an empty range). */
size_t tree_cover(uint32_t leaves, uint32_t begin, uint32_t end, struct tree_node cover[TREE_COVER_MAX]);

/* The leaves of rank in 0..ranks-1: contiguous, as equal as can be; empty for some where there are more ranks than
 * leaves. */
struct tree_node tree_share(uint32_t leaves, uint32_t rank, uint32_t ranks);

/* Levels of partial sums that a worker holds at most while it sums a node's n leaves left to right: 1 + ceil(log2 n).
 */
uint32_t tree_levels(uint32_t n);
#endif
