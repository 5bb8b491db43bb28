#ifndef TESTS_WORKER_DOUBLE_MODEL_H
#define TESTS_WORKER_DOUBLE_MODEL_H
/* A model's loss in double, in the plainest loops from the layers' definitions: what finite differences are taken of.
 */
#include "model/model.h"

/* The loss summed over rows. weights: flat. x: (rows, stride). targets: as dataset_read writes them. */
double double_model_loss(const struct model *model, const double *weights, const float *x, size_t stride, size_t rows,
                         const void *targets);
#endif
