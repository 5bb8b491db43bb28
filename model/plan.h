#ifndef MODEL_PLAN_H
#define MODEL_PLAN_H
/*
 * What one worker runs: operations in order, tensors with their places in one arena, and the list of actions of a step.
 * Made from the model, the mesh and the schedule; printed, simulated and tested without a worker. The executor
 * (worker/executor.h) runs any such list.
 *
 * Lowering fuses where a backend has one operation for it: linear + relu, conv2d (+ relu) + max_pool2d without padding.
 * Flatten is a view. Every rank knows all operations and tensors; it prepares and places those of its stage.
 *
 * With a pipeline the operations are cut into segments (model/model.h): what a stage runs at once. A tensor that is
 * made in one segment and read in others crosses: its value goes once to each other stage that reads it; its gradient
 * goes from segment to segment, from the last one that reads it to the one that made it, and each adds its part to what
 * came, in the very order of the model on one worker. So no bit depends on the cut.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "model/batches.h"
#include "model/evaluation.h"
#include "model/mesh.h"
#include "model/model.h"
#include "model/schedule.h"
#include "model/tree.h"

#define PLAN_NOWHERE UINT32_MAX

/* Where this rank has the gradient of a tensor. */
enum plan_gradient {
    PLAN_GRADIENT_NONE,    /* nowhere: not needed, or not here */
    PLAN_GRADIENT_SHARED,  /* in the gradient block: it lives within one backward of one segment */
    PLAN_GRADIENT_EDGE,    /* in the edge block: it comes from, or goes to, another stage; one copy for every second
                              micro-batch, so that one can be on its way while the next is made */
    PLAN_GRADIENT_SEGMENT, /* in an activation block: it waits from the backward of one segment to that of another here
                            */
};

/* An activation: (rows, stride) f32, or a view of another. */
struct plan_tensor {
    int32_t layer;   /* whose output it is; MODEL_INPUT */
    int32_t view_of; /* -1: has its own memory. Else a tensor that has: stride and offsets here are that one's */
    size_t elements, stride; /* of a sample */
    uint32_t home;       /* segment of this rank in whose activation block it lies; PLAN_NOWHERE: not of this rank */
    size_t value_offset; /* bytes in that block */
    enum plan_gradient gradient;
    uint32_t grad_home; /* PLAN_GRADIENT_SEGMENT: segment in whose activation block the gradient lies */
    size_t grad_offset; /* bytes in the block that `gradient` names; SIZE_MAX: needs none (the model's input, or nothing
                           before it has parameters), or not here */
    uint32_t readers;   /* operations, and the loss, that read it or a view of it */
};

struct plan_op {
    struct kernel_op_desc
        desc; /* of one sample: desc.rows is rows_per_sample; a program's operation has program.rows times as many */
    uint32_t layer_begin, layer_end; /* the layers that it computes */
    size_t input_count;
    int32_t *inputs;  /* tensors */
    bool *accumulate; /* by input: backward adds to the gradient (an operation later in the list has written it already)
                       */
    bool *input_grad; /* by input: wanted at all */
    int32_t output;   /* tensor; -1: the loss */
    int32_t weight, bias; /* params; -1: none */
    uint32_t segment;
    size_t weight_offset, bias_offset; /* floats in this rank's vector */
    bool backward;                     /* false: nothing before it, nor itself, has parameters */
    size_t saved_offset;               /* bytes in a micro-batch's activation block */
    size_t rows_per_sample; /* linear on samples of more than one dimension: rows of the product in a sample */
    /* Backward asks for backward_data first, then for backward_weight in these parts, in order, so that a slice can
     * leave as soon as it is whole (and its weights may then be replaced at any time): rows [part_rows[i], part_rows[i
     * + 1]). At least one part where there is a weight. */
    size_t part_count;
    size_t *part_rows; /* part_count + 1; NULL: no weight */
};

/* One program a row count that occurs; they share tensors' places and differ in the prepared operations. */
struct plan_program {
    uint32_t rows;
    struct kernel_op **ops; /* by plan op: op_count, then the loss at [op_count] */
};

enum action_kind {
    ACTION_FORWARD,  /* a segment's operations on a micro-batch (and the loss, in the last one) */
    ACTION_BACKWARD, /* gradients of a micro-batch into the subtree's sum */
    ACTION_PUSH,     /* the subtree's last leaf: its slices leave while this backward runs. Marks, on the list, what
                        BACKWARD with `push` does */
    ACTION_SEND, /* an activation to a peer; or its gradient, which marks, on the list, what the BACKWARD before it does
                    as soon as that gradient is whole */
    ACTION_RECEIVE, /* an activation or its gradient, before the FORWARD or BACKWARD that reads it */
};

struct action {
    enum action_kind kind;
    uint32_t micro_batch; /* leaf of the step */
    uint32_t chunk;       /* the segment */
    uint32_t slot;        /* which of the segment's activation blocks: micro-batches in flight have their own */
    uint32_t level;       /* BACKWARD: buffer of the tree's level that takes this leaf's gradient */
    uint32_t merges; /* BACKWARD: how many times the result is then added to the level below (levels level-1, ...) */
    struct tree_node push; /* BACKWARD: begin < end: this leaf completes this node of the cover; its slices go out */
    uint32_t peer, edge;   /* SEND, RECEIVE: rank, and index in plan->edges */
};

/* A maximal run of operations in one stage. */
struct plan_segment {
    uint32_t stage;
    size_t op_begin, op_end;         /* the last one's op_end is op_count + 1: it has the loss */
    uint32_t slice_begin, slice_end; /* of its parameters */
    bool backward;                   /* any of its operations has one */
    uint32_t slots;                  /* activation blocks, for micro-batches in flight */
    size_t block_bytes;              /* of one of them; 0 in another rank's segment */
};

/* What crosses from one stage to another, for each micro-batch: the number of an edge is that of the messages. */
struct plan_edge {
    bool backward;     /* the gradient, else the value */
    int32_t tensor;    /* with memory of its own */
    uint32_t from, to; /* segments. `to`: the first that reads the value in its stage; the next that adds to the
                          gradient, or made the tensor */
    size_t op;         /* backward: the operation of `from` whose backward_data completes it there */
};

/* The order of a step of so many micro-batches of this rank. */
struct plan_order {
    uint32_t micro_batches;
    size_t count;
    struct schedule_action *actions;
};

struct plan {
    const struct model *model;
    const struct kernels *kernels;
    struct kernel_backend *backend;
    struct mesh mesh;
    uint32_t rank;
    uint32_t data_index, stage; /* of the rank */
    struct batches batches;
    size_t tensor_count;
    struct plan_tensor *tensors; /* [0] is the model's input */
    size_t op_count;
    struct plan_op *ops; /* op_count, then the loss at [op_count], which reads the output */
    uint32_t segment_count;
    struct plan_segment *segments;
    size_t edge_count;
    struct plan_edge *edges;
    size_t order_count; /* 0: without a pipeline each micro-batch's backward follows its forward */
    struct plan_order orders[2];
    enum schedule_kind schedule;
    size_t program_count;
    struct plan_program *programs;
    int32_t output;      /* tensor that the loss reads */
    size_t input_stride; /* of the model's input rows */
    uint32_t rows_max;   /* of any program */
    struct evaluation evaluation;
    size_t target_bytes;     /* of a full micro-batch's targets */
    size_t target_offset;    /* where they lie in the last segment's activation block */
    size_t loss_offset;      /* where the loss's struct kernel_loss lies there */
    size_t activation_bytes; /* of all activation blocks: tensors (the input too), saved, targets, loss */
    size_t gradient_bytes;   /* of the activations' gradients within a segment */
    size_t edge_bytes;       /* of one of the two copies of the gradients that cross */
    size_t workspace_bytes;
    size_t *slice_offsets; /* by slice: floats in this rank's vector of parameters; SIZE_MAX: another stage's */
    size_t flat_count;     /* floats of this rank's vector: its segments' parameters, in model order */
    uint32_t levels;       /* such vectors of gradients: 1 + ceil(log2 of the leaves) at most; level 0 always */
};

/* What a worker holds, in bytes. */
struct plan_memory {
    size_t weights;              /* its vector of parameters */
    size_t gradients;            /* as many floats, levels times */
    size_t activations;          /* activation_bytes */
    size_t activation_gradients; /* with those that cross */
    size_t workspace;
    size_t total;
};
struct plan_memory plan_memory(const struct plan *plan);

/* What a shard holds of its slices, in bytes. */
struct shard_memory {
    size_t weights;  /* two versions */
    size_t momentum; /* two versions, where the optimizer has any */
    size_t pending;  /* one sum that waits for its sibling */
    size_t total;
};
struct shard_memory plan_shard_memory(const struct model *model, uint32_t shards, uint32_t shard);

/* Prepares every operation for every row count that occurs in training and, where there is a test set, in evaluation.
 * Keeps model, which must live longer. mesh.pipeline: the model's stages, or 1: the whole model on each worker. */
tally_status plan_build(const struct model *model, const Tally__V1__DataFacts *facts, struct mesh mesh, uint32_t rank,
                        const struct kernels *kernels, struct kernel_backend *backend, struct plan **ret_plan,
                        struct tally_error *err);
void plan_free(struct plan *plan);

/* The actions of this rank in a step of so many leaves. actions: at least plan_actions_max(). Returns how many; 0: this
 * rank has no leaf. */
size_t plan_actions_max(const struct plan *plan);
size_t plan_step_actions(const struct plan *plan, uint32_t leaves, struct action *actions);

/* How many tensors may be on their way from one stage to another, sent and not received, so that no schedule and no
 * evaluation can stop: a sender that finds more room than this used up may wait. 0: they exchange nothing. */
uint32_t plan_peer_room(const struct plan *plan, uint32_t from_stage, uint32_t to_stage);

/* Is segment k this rank's? */
static inline bool plan_owns(const struct plan *plan, uint32_t k)
{
    return plan->segments[k].stage == plan->stage;
}

/* Does this rank's stage need the data: the model's input, or the targets? */
static inline bool plan_reads_samples(const struct plan *plan)
{
    return plan->tensors[0].home != PLAN_NOWHERE || plan_owns(plan, plan->segment_count - 1);
}

/* The rank of a stage in this rank's replica. */
static inline uint32_t plan_peer(const struct plan *plan, uint32_t stage)
{
    return (plan->data_index * plan->mesh.pipeline + stage) * plan->mesh.tensor;
}

/* The program of a row count; NULL: not one that plan_build foresaw. */
const struct plan_program *plan_program(const struct plan *plan, uint32_t rows);

/* The operations whose backward completes slice s: it may leave after backward_weight of part `part` of op. */
struct slice_source {
    uint32_t op, part;
};
struct slice_source plan_slice_source(const struct plan *plan, uint32_t slice);
#endif
