#ifndef MODEL_INIT_H
#define MODEL_INIT_H
/* The first weights: PyTorch's own init from the seed (weight, then bias, in construction order, uniform in
 * +-1/sqrt(fan_in)), or a safetensors file. */
#include "model/model.h"

/* Writes elements [begin, end) of the flat vector (floats; padding 0) to dst[0 .. end - begin). Deterministic: every
 * range comes out of the same full vector. Holds no more than one tensor beyond dst. For safetensors: every parameter
 * must be there, with its shape, as F32; extra tensors are refused by name. */
tally_status init_weights(const struct model *model, size_t begin, size_t end, float *dst, struct tally_error *err);
#endif
