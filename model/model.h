#ifndef MODEL_MODEL_H
#define MODEL_MODEL_H
/*
 * A model: the layers of a job file with their shapes, and all their parameters in one flat vector, cut into slices. A
 * pure function of the spec and the data's facts, so that client, coordinator, shards and workers each build the same.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"
#include "model/dataset.h"
#include "proto/jobs.pb-c.h"
#include "proto/jobspec.pb-c.h"

#define MODEL_NDIM_MAX 4

/* Of one sample, without the batch dimension. */
struct shape {
    size_t ndim;
    size_t dim[MODEL_NDIM_MAX];
    size_t elements;
};

#define MODEL_INPUT (-1) /* as a layer's input: the model's own */

struct param {
    char *name; /* PyTorch state_dict: "conv1.weight" */
    uint32_t layer;
    bool is_bias;
    struct shape shape; /* (out, in) or (out, in / groups, kh, kw); (out) */
    size_t offset;      /* floats from the start of the flat vector; a multiple of 16 (64 bytes) */
    size_t fan_in;      /* of the layer's weight: init draws uniformly from +-1/sqrt(fan_in) */
};

/* A contiguous range of the flat vector, at most TALLY_SLICE_MAX_BYTES. A parameter larger than that is cut between its
 * rows (first dimension) where a row fits, and shares its slices with no other; smaller neighbours share one slice as
 * long as they fit and one stage of the pipeline computes with them. Padding between parameters belongs to a slice and
 * is 0. */
struct slice {
    size_t offset, count;            /* floats */
    uint32_t param_begin, param_end; /* the parameters that it touches */
};

struct layer {
    const char *name; /* given, or its index */
    const struct layer_type *type;
    const Tally__V1__Layer *spec; /* belongs to the model's own copy of the job spec */
    size_t input_count;
    int32_t *inputs;        /* earlier layers, or MODEL_INPUT */
    struct shape in, out;   /* in: of each input (all alike) */
    int32_t weight, bias;   /* index in params; -1: none */
    uint64_t forward_flops; /* of one sample: multiplications and additions */
    uint32_t stage;         /* of the pipeline: who computes it */
    uint32_t segment;       /* maximal runs of layers in one stage, views (flatten) left out: they compute nothing */
};

#define MODEL_STAGES_MAX 256 /* jobspec.proto bounds Pipeline.stages and placement likewise */

struct model {
    Tally__V1__JobSpec *spec; /* a copy with defaults filled in */
    struct shape input, target;
    enum dataset_target target_kind;
    size_t layer_count;
    struct layer *layers;
    size_t param_count;
    struct param *params;  /* in model order: by layer, weight before bias */
    size_t param_elements; /* without padding */
    size_t flat_count;     /* floats of the flat vector, padding included */
    size_t slice_count;
    struct slice *slices; /* by offset; they cover the flat vector; none has parameters of two segments */
    uint32_t stage_count, segment_count;
    uint32_t *segment_stage; /* by segment */
    uint64_t init_draws;     /* 32-bit numbers that PyTorch's init takes from the generator */
};

/* spec: checked (model/spec.h). Takes a copy. TALLY_EINVAL says which layer does not fit, with the shapes around it. */
tally_status model_build(const Tally__V1__JobSpec *spec, const Tally__V1__DataFacts *facts, struct model **ret_model,
                         struct tally_error *err);
void model_free(struct model *model);

/* The shard of slice s among so many: contiguous runs of slices, as equal in bytes as can be; some shards have none
 * where there are fewer slices. */
uint32_t model_slice_shard(const struct model *model, uint32_t shards, uint32_t slice);
/* The slices [begin, end) of a shard. */
void model_shard_slices(const struct model *model, uint32_t shards, uint32_t shard, uint32_t *ret_begin,
                        uint32_t *ret_end);

/* "20x24x24" into text, at most size bytes with the terminating zero. Returns text. */
const char *shape_text(const struct shape *shape, char *text, size_t size);
bool shape_equal(const struct shape *a, const struct shape *b);
#endif
