#ifndef MODEL_DATASET_SYNTHETIC_H
#define MODEL_DATASET_SYNTHETIC_H
/*
 * Inside model/dataset*.c: made-up samples. Every number is a function of (seed, part, sample, element) alone, made
 * with integers and the four operations and roots of IEEE doubles, so that all machines make the same ones.
 *
 * Classes: sample i is of class i % classes, its input is the class's centre plus noise, both standard normal.
 * Values: the input is standard normal; a target element is a fixed linear function of at most 32 neighbouring input
 * elements, plus noise of 0.1.
 */
#include "model/dataset.h"

struct synthetic;

/* info: the shapes, as dataset_info will give them. */
tally_status synthetic_open(const Tally__V1__Synthetic *spec, const struct dataset_info *info, uint64_t seed, int part,
                            struct synthetic **ret_s, struct tally_error *err);
void synthetic_close(struct synthetic *s);

int64_t synthetic_class(const struct synthetic *s, uint32_t sample);
void synthetic_input(const struct synthetic *s, uint32_t sample, float *x);
/* x: what synthetic_input gave. */
void synthetic_values(const struct synthetic *s, uint32_t sample, const float *x, float *y);
#endif
