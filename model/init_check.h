#ifndef MODEL_INIT_CHECK_H
#define MODEL_INIT_CHECK_H
/* A safetensors file against a model's parameters, by its header alone. */
#include "common/error.h"
#include "common/safetensors.h"
#include "model/model.h"

/* Every parameter is there under its name, with its shape, as F32, and nothing else is. TALLY_EINVAL names the tensor;
 * path is the file's, for errors. */
tally_status init_check(const struct model *model, const char *path, const struct safetensors *file,
                        struct tally_error *err);
#endif
