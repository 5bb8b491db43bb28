#include "model/mesh.h"

static uint32_t at_least_one(uint32_t value)
{
    return value > 0 ? value : 1;
}

struct mesh mesh_of_spec(const Tally__V1__JobSpec *spec)
{
    const Tally__V1__Parallel *parallel = spec->parallel;
    struct mesh mesh = {1, 1, 1};
    if (!parallel)
        return mesh;
    const Tally__V1__Replicas *data = parallel->data;
    const Tally__V1__Pipeline *pipeline = parallel->pipeline;
    if (data && data->has_count)
        mesh.data = at_least_one(data->count);
    else if (data && data->has_max)
        mesh.data = at_least_one(data->max);
    if (pipeline && pipeline->n_placement > 0)
        mesh.pipeline = (uint32_t)pipeline->n_placement;
    else if (pipeline)
        mesh.pipeline = at_least_one(pipeline->stages);
    if (parallel->tensor)
        mesh.tensor = at_least_one(parallel->tensor->size);
    return mesh;
}

uint64_t mesh_workers(struct mesh mesh)
{
    uint64_t workers;
    if (__builtin_mul_overflow((uint64_t)mesh.data * mesh.pipeline, mesh.tensor, &workers))
        return UINT64_MAX;
    return workers;
}
