#ifndef MODEL_DATASET_ARRAY_H
#define MODEL_DATASET_ARRAY_H
/* Inside model/dataset*.c: one file as an array of samples, whatever its format, and the conversion of its elements. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"
#include "common/file.h"

/* Samples and three dimensions of one. */
#define DATA_DIMS_MAX 4

enum data_type {
    DATA_BOOL,
    DATA_U8,
    DATA_I8,
    DATA_U16,
    DATA_I16,
    DATA_U32,
    DATA_I32,
    DATA_I64,
    DATA_F32,
    DATA_F64,
};

size_t data_type_bytes(enum data_type type);
/* "uint8", "float32", ...: NumPy's names. */
const char *data_type_text(enum data_type type);
bool data_type_is_float(enum data_type type);

struct data_array {
    enum data_type type;
    bool swap; /* the elements are not in this machine's byte order */
    size_t ndim;
    uint64_t dim[DATA_DIMS_MAX]; /* dim[0]: all samples of the file, before `limit` */
    uint64_t samples;            /* at data */
    size_t sample_elements, sample_bytes;
    const unsigned char *data; /* (samples, sample_elements), unaligned; NULL after a probe */
    struct file_map map;       /* what data points into, */
    void *owned;               /* or this */
};

/* What of a file is wanted. */
struct data_wish {
    uint64_t limit; /* the first so many samples; 0: all. More than there are is an error */
    bool probe;     /* the shape alone, checked against the file's size as far as that is cheap */
};

/* Fills in sample_elements and sample_bytes from type, ndim and dim, and samples from wish; *ret_bytes: of all the
 * file's elements. TALLY_EINVAL: a zero or too large dimension, or more samples than indices can name, or fewer than
 * the limit. name is the file's, for errors. */
tally_status data_array_measure(struct data_array *array, const char *name, const struct data_wish *wish,
                                uint64_t *ret_bytes, struct tally_error *err);
/* Accepts one that is all zero. */
void data_array_close(struct data_array *array);

/* "(60000, 28, 28)" into text. */
#define DATA_SHAPE_TEXT_BYTES 96
const char *data_shape_text(const struct data_array *array, char text[DATA_SHAPE_TEXT_BYTES]);

/* n elements of the array's type at src, converted; floats are not for the second one. */
void data_to_f32(const struct data_array *array, const unsigned char *src, float *dst, size_t n);
void data_to_i64(const struct data_array *array, const unsigned char *src, int64_t *dst, size_t n);

/* ---- formats ---- */

/* Reads an array from a file that is in memory, whose data must stay where it is; name is for errors. */
typedef tally_status data_parse(const char *name, const unsigned char *data, size_t bytes, const struct data_wish *wish,
                                struct data_array *ret_array, struct tally_error *err);
data_parse data_idx_parse, data_npy_parse;

/* Maps the file at path and parses it; the array owns the map. */
tally_status data_array_open(const char *path, const struct data_wish *wish, data_parse *parse,
                             struct data_array *ret_array, struct tally_error *err);
#endif
