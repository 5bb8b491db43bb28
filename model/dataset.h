#ifndef MODEL_DATASET_H
#define MODEL_DATASET_H
/*
 * Data sources behind one interface: idx (plain or gzip), npy, csv, synthetic. A set is opened once a process: files
 * are mapped, or decoded once into memory; a read copies one micro-batch's rows, converting and normalising on the way,
 * and allocates nothing.
 */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"
#include "proto/jobspec.pb-c.h"

enum dataset_target { DATASET_CLASSES, DATASET_VALUES };

struct dataset_info {
    uint64_t samples;      /* after `limit` */
    size_t input_ndim;     /* 1 to 3 */
    size_t input_shape[3]; /* of a sample: [features] or [channels, height, width] (or two dimensions) */
    size_t input_elements;
    enum dataset_target target;
    size_t target_ndim; /* DATASET_VALUES: the target's shape */
    size_t target_shape[3];
    size_t target_elements; /* 1 for classes */
    int64_t class_min,
        class_max; /* DATASET_CLASSES: over the set. Known after dataset_open; headers alone do not tell */
};

struct dataset;

/* want: what the job's loss needs, for sources that could be either (npy integers are classes or values as asked; idx
 * targets are classes). seed: the job's, for synthetic. normalize may be NULL. A relative path is an error here:
 * callers make paths absolute. part: 0 for train, 1 for test: a synthetic test set has the same centres and other
 * noise. Unsigned bytes (idx, npy) are divided by 255, normalised or not; targets never are. More `limit` than samples
 * is an error. A file that is mapped (plain idx, npy) must stay as it is while the set is open. Errors name the file
 * and what is wrong with it (missing, short, wrong magic, not gzip, counts that differ, line and column of a csv). */
tally_status dataset_open(const Tally__V1__Source *source, const Tally__V1__Normalize *normalize,
                          enum dataset_target want, uint64_t seed, int part, struct dataset **ret_set,
                          struct tally_error *err);
void dataset_close(struct dataset *set);
const struct dataset_info *dataset_info(const struct dataset *set);

/* The shape and number of samples from headers and file sizes alone, as far as the source allows (csv is read through):
 * cheap enough for `validate`. */
tally_status dataset_probe(const Tally__V1__Source *source, enum dataset_target want, struct dataset_info *ret_info,
                           struct tally_error *err);

/* TALLY_EINVAL with the first target that is neither a class, 0 to classes - 1, nor `ignore`. The set's targets are
 * classes. */
tally_status dataset_check_classes(const struct dataset *set, int64_t classes, int64_t ignore, struct tally_error *err);
/* The same of a source that was probed, without opening its inputs where they are a file of their own. */
tally_status dataset_probe_classes(const Tally__V1__Source *source, int64_t classes, int64_t ignore,
                                   struct tally_error *err);

/* Copies `count` samples: the one of indices[i] to row i of x, (count, stride) f32, in shape order. targets:
 * int64_t[count] for classes, float[count][target_elements] for values. indices are below info.samples. What lies
 * between input_elements and stride is left alone. Threads may share a set. */
void dataset_read(const struct dataset *set, const uint32_t *indices, size_t count, float *x, size_t stride,
                  void *targets);
#endif
