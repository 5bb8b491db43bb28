#ifndef TESTS_MODEL_JOB_TEXT_H
#define TESTS_MODEL_JOB_TEXT_H
/* Jobs and models from a few lines of YAML, for tests. */
#include <stddef.h>

#include "common/error.h"
#include "model/model.h"

/* A job whose layers are `layers` (a YAML flow list), with a synthetic source of this shape. loss: "cross_entropy" or
 * "mse_loss". Fails the test on bad YAML. */
Tally__V1__JobSpec *job_of_layers(const char *layers, const char *loss, size_t ndim, const size_t *input);

/* Its facts: so many samples; target_ndim 0 for classes. Free with tally__v1__data_facts__free_unpacked. */
Tally__V1__DataFacts *facts_of(size_t ndim, const size_t *input, size_t target_ndim, const size_t *target,
                               uint64_t train_samples, uint64_t test_samples);

/* The model of both, with cross entropy; target_ndim > 0: with mse_loss. */
tally_status model_of_layers(const char *layers, size_t ndim, const size_t *input, size_t target_ndim,
                             const size_t *target, struct model **ret_model, struct tally_error *err);

/*
 * A random model over an image of 1 to 3 channels: convolutions, pools, functions, branches that are added again, and
 * linear layers, some of them on samples of more than one dimension. seed says which. It ends in `classes` outputs.
 */
struct model *random_model(unsigned seed, size_t classes);
#endif
