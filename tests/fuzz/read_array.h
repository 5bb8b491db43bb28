#ifndef TESTS_FUZZ_READ_ARRAY_H
#define TESTS_FUZZ_READ_ARRAY_H
#include <stdlib.h>
#include <string.h>

#include "model/dataset_array.h"

/* Reads every element, so that a sanitizer sees what lies outside the file. */
static inline void fuzz_read_all(const struct data_array *array)
{
    float *values = malloc(array->sample_elements * sizeof(float));
    int64_t *classes = malloc(array->sample_elements * sizeof(int64_t));
    if (!values || !classes)
        abort();
    for (uint64_t i = 0; i < array->samples; i++) {
        data_to_f32(array, array->data + i * array->sample_bytes, values, array->sample_elements);
        data_to_i64(array, array->data + i * array->sample_bytes, classes, array->sample_elements);
    }
    free(values);
    free(classes);
}

/* The bytes as they are, in memory of just their size. What can be opened whole can be probed, with the same shape. A
 * refusal gives its reason. */
static inline void fuzz_parse(data_parse *parse, uint64_t limit, const uint8_t *data, size_t size)
{
    struct data_wish wish = {.limit = limit}, probe = {.limit = limit, .probe = true};
    struct data_array array = {0}, probed = {0};
    struct tally_error err = {0};
    unsigned char *copy = malloc(size ? size : 1);
    if (!copy)
        abort();
    memcpy(copy, data, size);
    tally_status status = parse("fuzz", copy, size, &wish, &array, &err);
    if (status == TALLY_OK) {
        fuzz_read_all(&array);
        if (limit == 0 && (parse("fuzz", copy, size, &probe, &probed, &err) != TALLY_OK || probed.ndim != array.ndim ||
                           memcmp(probed.dim, array.dim, sizeof(array.dim)) != 0))
            abort();
    } else if (strncmp(err.message, "fuzz: ", 6) != 0) {
        abort();
    }
    data_array_close(&array);
    data_array_close(&probed);
    free(copy);
}
#endif
