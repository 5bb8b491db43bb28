#ifndef TESTS_WORKER_TEST_JOB_H
#define TESTS_WORKER_TEST_JOB_H
/* Jobs for tests, made in C: a spec put together layer by layer, its data and model, and the ranks that run it. All of
 * it fails the test where it fails. */
#include "worker/executor.h"

/* ---- specs ---- */

Tally__V1__JobSpec *spec_new(uint64_t seed, uint32_t batch, uint32_t micro, uint64_t epochs, uint64_t steps);
void spec_free(Tally__V1__JobSpec *spec);
void spec_sgd(Tally__V1__JobSpec *spec, double lr, double momentum, double weight_decay, bool nesterov);
void spec_cross_entropy(Tally__V1__JobSpec *spec, int64_t ignore_index, double label_smoothing);
void spec_mse(Tally__V1__JobSpec *spec);
void spec_shuffle(Tally__V1__JobSpec *spec, bool shuffle);
/* names may be NULL (the layer's index) */
Tally__V1__Layer *spec_linear(Tally__V1__JobSpec *spec, const char *name, uint32_t out, bool bias);
Tally__V1__Layer *spec_conv(Tally__V1__JobSpec *spec, const char *name, uint32_t out, uint32_t kernel, uint32_t stride,
                            uint32_t padding, uint32_t groups);
Tally__V1__Layer *spec_max_pool(Tally__V1__JobSpec *spec, const char *name, uint32_t kernel, uint32_t stride,
                                uint32_t padding);
Tally__V1__Layer *spec_avg_pool(Tally__V1__JobSpec *spec, const char *name, uint32_t kernel, uint32_t stride,
                                uint32_t padding);
/* relu, tanh, sigmoid, gelu, flatten, add */
Tally__V1__Layer *spec_plain(Tally__V1__JobSpec *spec, const char *name, Tally__V1__Layer__KindCase kind);
void spec_from(Tally__V1__Layer *layer, const char *name);
/* So many stages, balanced by cost. chunks 1: not said */
void spec_stages(Tally__V1__JobSpec *spec, uint32_t stages, Tally__V1__Schedule schedule, uint32_t chunks);
/* A layer's place. New stages are made up to this one. */
void spec_place(Tally__V1__JobSpec *spec, uint32_t stage, const char *layer);
/* All layers of the seed's CNN: conv1, pool, conv2, pool, flatten, fc1, relu, fc2. */
void spec_seed_cnn(Tally__V1__JobSpec *spec);
/* A whole job: 5-6-3 with relu, 20 training samples in batches of 8, micro-batches of 4 (an epoch is 3 steps, the last
 * of one micro-batch), 10 test samples. All parameters are in slice 0 (a.weight .. b.bias). */
Tally__V1__JobSpec *spec_small_job(uint64_t steps);
/* part 0: train, 1: test */
void spec_synthetic(Tally__V1__JobSpec *spec, int part, uint64_t samples, uint32_t classes, const uint32_t *shape,
                    size_t ndim, const uint32_t *target_shape, size_t target_ndim);
void spec_npy(Tally__V1__JobSpec *spec, int part, const char *inputs, const char *targets, uint64_t limit);
void spec_idx(Tally__V1__JobSpec *spec, int part, const char *inputs, const char *targets, uint64_t limit);
void spec_normalize(Tally__V1__JobSpec *spec, float mean, float std);

/* ---- a job that is ready to run ---- */

struct test_job {
    Tally__V1__JobSpec *spec; /* owned */
    Tally__V1__DataFacts facts;
    uint32_t input_shape[3], target_shape[3];
    struct dataset *train, *test;
    struct model *model;
};

/* Takes the spec. */
struct test_job *test_job_open(Tally__V1__JobSpec *spec);
void test_job_close(struct test_job *job);

/* One rank of it, with a backend of its own. */
struct test_rank {
    const struct kernels *kernels;
    struct kernel_backend *backend;
    struct plan *plan;
    struct order *order;
    struct executor *executor;
};
void test_rank_open(const struct test_job *job, uint32_t rank, uint32_t ranks, const char *isa, struct test_rank *ret);
/* The same in two parts: the plan, and, with its peers (NULL where it has none), the executor. */
void test_rank_plan(const struct test_job *job, uint32_t rank, struct mesh mesh, const char *isa,
                    struct test_rank *ret);
void test_rank_start(const struct test_job *job, struct peers *peers, struct test_rank *rank);
void test_rank_close(struct test_rank *rank);
#endif
