#ifndef MODEL_PLAN_H
#define MODEL_PLAN_H
/*
 * What one worker runs: operations in order, tensors with their places in one arena, and the list of actions of a step.
 * Made from the model, the mesh and the schedule; printed, simulated and tested without a worker. The executor
 * (worker/executor.h) runs any such list.
 *
 * Lowering fuses where a backend has one operation for it: linear + relu, conv2d (+ relu) + max_pool2d without padding.
 * Flatten is a view. A stage holds the operations of its layers; with one stage that is the whole model.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kernels/kernels.h"
#include "model/batches.h"
#include "model/evaluation.h"
#include "model/model.h"
#include "model/tree.h"

/* The gang's shape. rank = (data_index * pipeline + stage) * tensor + tensor_index. */
struct mesh {
    uint32_t data, pipeline, tensor;
};

/* An activation: (rows, stride) f32, or a view of another. */
struct plan_tensor {
    int32_t layer;   /* whose output it is; MODEL_INPUT */
    int32_t view_of; /* -1: has its own memory. Else a tensor that has: stride and offsets here are that one's */
    size_t elements, stride; /* of a sample */
    size_t value_offset;     /* bytes in a micro-batch's activation block */
    size_t grad_offset; /* bytes in the gradient block; SIZE_MAX: needs none (the model's input, or nothing before it
                           has parameters) */
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
    int32_t weight, bias;   /* params; -1: none */
    bool backward;          /* false: nothing before it, nor itself, has parameters */
    size_t saved_offset;    /* bytes in a micro-batch's activation block */
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
    ACTION_FORWARD,  /* the stage's operations on a micro-batch (and the loss, in the last stage) */
    ACTION_BACKWARD, /* gradients of a micro-batch into the subtree's sum */
    ACTION_PUSH,     /* the subtree's last leaf: its slices leave while this backward runs. Marks, on the list, what
                        BACKWARD with `push` does */
    ACTION_SEND,     /* an activation or its gradient to a peer */
    ACTION_RECEIVE,
};

struct action {
    enum action_kind kind;
    uint32_t micro_batch; /* leaf of the step */
    uint32_t chunk;       /* model chunk of this worker; 0 */
    uint32_t slot;        /* which activation block: micro-batches in flight have their own */
    uint32_t level;       /* BACKWARD: buffer of the tree's level that takes this leaf's gradient */
    uint32_t merges; /* BACKWARD: how many times the result is then added to the level below (levels level-1, ...) */
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
    struct plan_tensor *tensors; /* [0] is the model's input */
    size_t op_count;
    struct plan_op *ops; /* op_count, then the loss at [op_count], which reads the output */
    size_t program_count;
    struct plan_program *programs;
    int32_t output;      /* tensor that the loss reads */
    size_t input_stride; /* of the model's input rows */
    uint32_t rows_max;   /* of any program */
    struct evaluation evaluation;
    size_t target_bytes;     /* of a full micro-batch's targets */
    size_t target_offset;    /* where they lie in the activation block */
    size_t loss_offset;      /* where the loss's struct kernel_loss lies in the activation block */
    size_t activation_bytes; /* of one micro-batch's block: tensors (the input too), saved, targets, loss */
    size_t slots;            /* activation blocks */
    size_t gradient_bytes;   /* of the activations' gradients */
    size_t workspace_bytes;
    uint32_t levels; /* flat gradient vectors: 1 + ceil(log2 of the leaves) at most; level 0 always */
};

/* What a worker holds, in bytes. */
struct plan_memory {
    size_t weights;     /* the flat vector */
    size_t gradients;   /* the flat vector, levels times */
    size_t activations; /* activation_bytes, slots times */
    size_t activation_gradients;
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
 * Keeps model, which must live longer. */
tally_status plan_build(const struct model *model, const Tally__V1__DataFacts *facts, struct mesh mesh, uint32_t rank,
                        const struct kernels *kernels, struct kernel_backend *backend, struct plan **ret_plan,
                        struct tally_error *err);
void plan_free(struct plan *plan);

/* The actions of this rank in a step of so many leaves. actions: at least plan_actions_max(). Returns how many; 0: this
 * rank has no leaf. */
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
