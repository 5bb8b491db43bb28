#ifndef MODEL_MESH_H
#define MODEL_MESH_H
/* The gang's shape. */
#include <stdint.h>

#include "proto/jobspec.pb-c.h"

/* rank = (data_index * pipeline + stage) * tensor + tensor_index. */
struct mesh {
    uint32_t data, pipeline, tensor;
};

/* What a job's `parallel` asks for; spec may say nothing of it. data: of an elastic job without a count, the most
 * replicas. Each is at least 1. */
struct mesh mesh_of_spec(const Tally__V1__JobSpec *spec);

/* Its workers; UINT64_MAX: too many to be counted. */
uint64_t mesh_workers(struct mesh mesh);
#endif
