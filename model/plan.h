#ifndef MODEL_PLAN_H
#define MODEL_PLAN_H
/*
 * What one worker runs: operations in order, tensors with their places in one arena, and the list of actions of a step. Made from the model, the mesh and
 * the schedule; printed, simulated and tested without a worker. The executor (worker/executor.h) runs any such list.
 *
 * Lowering fuses where a backend has one operation for it: linear + relu, conv2d (+ relu) + max_pool2d without padding. Flatten is a view. A stage holds
 * the operations of its layers; with one stage that is the whole model.
 */
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "model/batches.h"
#include "model/model.h"
#include "model/tree.h"

/* The gang's shape. rank = (data_index * pipeline + stage) * tensor + tensor_index. */
struct mesh {
    uint32_t data, pipeline, tensor;
};

/* An activation: (rows, stride) f32, or a view of another. */
struct plan_tensor {
    int32_t layer; /* whose output it is; MODEL_INPUT */
    int32_t view_of; /* -1: has its own memory */
    size_t elements, stride; /* of a sample */
    size_t value_offset;     /* bytes in a micro-batch's activation block */
    size_t grad_offset;      /* bytes in the gradient block; SIZE_MAX: needs none (the model's input) */
    uint32_t readers;
};

struct plan_op {
    struct kernel_op_desc desc; /* for full micro-batches; rows are set for other row counts */
    uint32_t layer_begin, layer_end; /* the layers that it computes */
    size_t input_count;
    int32_t *inputs;    /* tensors */
    bool *accumulate;   /* by input: backward adds to the gradient (an operation later in the list has written it already) */
    bool *input_grad;   /* by input: wanted at all */
    int32_t output;     /* tensor */
    int32_t weight, bias; /* params; -1: none */
    size_t saved_offset;  /* bytes in a micro-batch's activation block */
    size_t rows_per_sample; /* linear on samples of more than one dimension: rows of the product in a sample */
    /* The parts in which backward_weight is asked for, so that a slice can leave as soon as it is whole: rows [part[i], part[i + 1]). At least one part where there is a weight. */
    size_t part_count;
    size_t *part_rows; /* part_count + 1 */
};

/* One program a row count that occurs; they share tensors' places and differ in the prepared operations. */
struct plan_program {
    uint32_t rows;
    struct kernel_op **ops; /* by plan op; then the loss, at [op_count] */
};

enum action_kind {
    ACTION_FORWARD,   /* the stage's operations on a micro-batch (and the loss, in the last stage) */
    ACTION_BACKWARD,  /* gradients of a micro-batch into the subtree's sum */
    ACTION_PUSH,      /* the subtree's last leaf: its slices leave while this backward runs. Marks, on the list, what BACKWARD with `push` does */
    ACTION_SEND,      /* an activation or its gradient to a peer */
    ACTION_RECEIVE,
    ACTION_EVALUATE,  /* forward and loss of an evaluation micro-batch */
};

struct action {
    enum action_kind kind;
    uint32_t micro_batch; /* leaf of the step */
    uint32_t chunk;       /* model chunk of this worker; 0 */
    uint32_t slot;        /* which activation block: micro-batches in flight have their own */
    uint32_t level;       /* BACKWARD: buffer of the tree's level that takes this leaf's gradient */
    uint32_t merges;      /* BACKWARD: how many times the result is then added to the level below (levels level-1, ...) */
    struct tree_node push; /* BACKWARD: begin < end: this leaf completes this node of the cover; its slices go out */
    uint32_t peer, edge;   /* SEND, RECEIVE */
};

struct plan {
    const struct model *model;
    const struct kernels *kernels;
    struct kernel_backend *backend;
    struct mesh mesh;
    uint32_t rank;
    struct batches batches;
    size_t tensor_count;
    struct plan_tensor *tensors;
    size_t op_count;
    struct plan_op *ops;
    size_t program_count;
    struct plan_program *programs;
    int32_t output;          /* tensor that the loss reads */
    size_t input_stride;     /* of the model's input rows */
    size_t target_bytes;     /* of a full micro-batch's targets */
    size_t activation_bytes; /* of one micro-batch's block: tensors and saved */
    size_t slots;            /* activation blocks */
    size_t gradient_bytes;   /* of the activations' gradients */
    size_t workspace_bytes;
    uint32_t levels;         /* flat gradient vectors: 1 + ceil(log2 of the leaves) at most; level 0 always */
    size_t host_arena_bytes; /* everything above plus weights and gradients: what memory figures print */
};

/* Prepares every operation for every row count that occurs in training and, with eval_samples > 0, in evaluation. Keeps model, which must live longer. */
tally_status plan_build(const struct model *model, const Tally__V1__DataFacts *facts, struct mesh mesh, uint32_t rank, const struct kernels *kernels,
                        struct kernel_backend *backend, struct plan **ret_plan, struct tally_error *err);
void plan_free(struct plan *plan);

/* The actions of this rank in a step of so many leaves. actions: at least plan_actions_max(). Returns how many; 0: this rank has no leaf. */
size_t plan_actions_max(const struct plan *plan);
size_t plan_step_actions(const struct plan *plan, uint32_t leaves, struct action *actions);

/* The program of a row count; NULL: not one that plan_build foresaw. */
const struct plan_program *plan_program(const struct plan *plan, uint32_t rows);

/* The operations whose backward completes slice s: it may leave after backward_weight of part `part` of op. */
struct slice_source {
    uint32_t op, part;
};
struct slice_source plan_slice_source(const struct plan *plan, uint32_t slice);
#endif
