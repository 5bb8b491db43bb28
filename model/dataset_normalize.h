#ifndef MODEL_DATASET_NORMALIZE_H
#define MODEL_DATASET_NORMALIZE_H
/* Inside model/dataset*.c: (x - mean) / std as torchvision's ToTensor and Normalize compute it, every operation rounded
 * to float32. */
#include <stddef.h>

#include "model/dataset.h"

struct normalizer {
    size_t channels;   /* of mean and std: 1, or the sample's first dimension */
    size_t inner;      /* elements of a channel */
    float *mean, *std; /* NULL: nothing to do */
    float *table;      /* (channels, 256): what becomes of a byte; NULL: the inputs are no bytes */
};

/* spec may be NULL. bytes: the inputs are unsigned bytes, to be divided by 255 first. TALLY_EINVAL: as many means or
 * deviations as there are no channels. */
tally_status normalizer_init(struct normalizer *n, const Tally__V1__Normalize *spec, const struct dataset_info *info,
                             bool bytes, struct tally_error *err);
void normalizer_free(struct normalizer *n);

/* One sample. */
void normalizer_bytes(const struct normalizer *n, const unsigned char *src, float *dst);
void normalizer_floats(const struct normalizer *n, float *x);
#endif
