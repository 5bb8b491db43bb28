#ifndef MODEL_SCHEDULE_H
#define MODEL_SCHEDULE_H
/*
 * In which order each stage of a pipeline runs the forwards and backwards of a step's micro-batches. The model is a
 * chain of segments, each on one stage; a stage may have several (chunks). A schedule is data: it is made from a shape
 * alone, simulated, printed and tested without a worker.
 *
 * Every list keeps these rules, so that no schedule can change a result:
 *   S1 each forward and each backward of a segment stands once, on the segment's stage;
 *   S2 a segment runs its forwards, and its backwards, in increasing order of the micro-batches;
 *   S3 there is one order of all that every list follows and in which every segment comes after what it depends on: so
 *      no stage waits for ever.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"

/* Forwards and backwards of all stages in a step. */
#define SCHEDULE_ACTIONS_MAX ((size_t)1 << 22)

enum schedule_kind {
    /* All forwards, then all backwards (Huang et al., GPipe, 2019). */
    SCHEDULE_GPIPE,
    /* A backward as soon as there is one (Narayanan et al., PipeDream-Flush, 2021): stage s of S, counted by its first
     * segment, has at most S - s micro-batches in flight, or S where a stage has several segments. */
    SCHEDULE_1F1B,
    /* The same for several segments a stage, in groups of S micro-batches a segment (Narayanan et al., Megatron-LM,
     * 2021): at most 2 (S - s - 1) + (C - 1) S + 1 blocks in flight in a stage of C segments, unless it would stop. */
    SCHEDULE_INTERLEAVED,
};

struct schedule_shape {
    enum schedule_kind kind;
    uint32_t stages, segments, micro_batches;
    const uint32_t *stage_of; /* by segment, in the order of forward; every stage has one at least */
};

struct schedule_action {
    uint32_t segment, micro_batch;
    bool backward;
};

struct schedule_list {
    size_t count;
    struct schedule_action *actions;
};

struct schedule {
    enum schedule_kind kind;
    uint32_t stages, segments, micro_batches;
    uint32_t *stage_of;
    struct schedule_list *lists; /* by stage */
};

/* TALLY_EINVAL: more than SCHEDULE_ACTIONS_MAX, or a shape that is none. */
tally_status schedule_build(const struct schedule_shape *shape, struct schedule **ret_schedule,
                            struct tally_error *err);
void schedule_free(struct schedule *schedule);

/* Micro-batches of a segment whose forward was begun and whose backward is not done, at most, while its stage follows
 * its list: the activation blocks that the segment needs. */
uint32_t schedule_segment_blocks(const struct schedule *schedule, uint32_t segment);

/* ---- simulation ---- */

/* Something goes from one segment to another; `backward`: from a later one to an earlier one. */
struct schedule_edge {
    uint32_t from, to;
    bool backward;
    uint64_t cost; /* of its way; 0 where both are on one stage */
};

/* In any one unit of time. */
struct schedule_costs {
    const uint64_t *forward, *backward; /* by segment, of a micro-batch */
    size_t edge_count;
    const struct schedule_edge *edges; /* NULL: each segment to the next, and back, */
    uint64_t transfer;                 /* at this cost where they are on two stages */
};

struct schedule_span {
    uint64_t begin, end;
};

struct schedule_stage_report {
    uint64_t busy;
    uint32_t micro_batches;      /* in flight at most: from the first forward to the last backward on this stage */
    uint32_t blocks;             /* in flight at most, over all its segments */
    struct schedule_span *spans; /* by action of its list */
};

struct schedule_report {
    uint64_t makespan;
    double bubble; /* the stages' idle share of it, all together */
    uint32_t stages;
    struct schedule_stage_report *stage;
};

/* Runs the lists: each stage in its order, an action as soon as what it depends on is there; sending takes no stage's
 * time. TALLY_EINVAL says what is wrong with the lists: S1 and S2, a deadlock (with who waits for what). */
tally_status schedule_simulate(const struct schedule *schedule, const struct schedule_costs *costs,
                               struct schedule_report **ret_report, struct tally_error *err);
void schedule_report_free(struct schedule_report *report);

const char *schedule_kind_text(enum schedule_kind kind);
#endif
