#ifndef COMMON_SAFETENSORS_H
#define COMMON_SAFETENSORS_H
/*
 * The safetensors format (https://github.com/huggingface/safetensors): 8 bytes of header length, a JSON object, the
 * data. The reader maps the file and trusts nothing in it; the writer streams, and the file appears whole or not at
 * all.
 */
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"

#define SAFETENSORS_DIMS_MAX 8

enum safetensors_dtype {
    SAFETENSORS_F32,
    SAFETENSORS_F64,
    SAFETENSORS_F16,
    SAFETENSORS_BF16,
    SAFETENSORS_I64,
    SAFETENSORS_I32,
    SAFETENSORS_I16,
    SAFETENSORS_I8,
    SAFETENSORS_U64,
    SAFETENSORS_U32,
    SAFETENSORS_U16,
    SAFETENSORS_U8,
    SAFETENSORS_BOOL,
};

/* Row-major (C order), little-endian. */
struct safetensor {
    const char *name;
    enum safetensors_dtype dtype;
    uint32_t dims; /* 0: a scalar, one element */
    uint64_t shape[SAFETENSORS_DIMS_MAX];
    uint64_t elements;         /* the product of shape */
    const unsigned char *data; /* bytes of it; may be unaligned: memcpy from it */
    uint64_t bytes;
};

/* ---- reading ---- */

struct safetensors;

/* The file's every length, type, shape and offset is checked before this returns; refusals name the tensor. */
tally_status safetensors_open(const char *path, struct safetensors **ret_f, struct tally_error *err);
/* The same over memory that stays the caller's; name is for errors. */
tally_status safetensors_open_memory(const char *name, const void *data, size_t bytes, struct safetensors **ret_f,
                                     struct tally_error *err);
size_t safetensors_count(const struct safetensors *f);
/* In the order of their data. i < count. Valid until safetensors_close. */
const struct safetensor *safetensors_at(const struct safetensors *f, size_t i);
/* NULL: none of this name. */
const struct safetensor *safetensors_find(const struct safetensors *f, const char *name);
/* A string of __metadata__; NULL: no such key. */
const char *safetensors_metadata(const struct safetensors *f, const char *key);
/* Accepts NULL. */
void safetensors_close(struct safetensors *f);

/* "F32", ... */
const char *safetensors_dtype_text(enum safetensors_dtype dtype);
/* "(64, 3, 3)" as PyTorch prints a size, cut to fit. */
void safetensors_shape_text(const struct safetensor *t, char *text, size_t text_bytes);

/* ---- writing ---- */

/* An F32 tensor to be written. */
struct safetensors_entry {
    const char *name;
    uint32_t dims;
    const uint64_t *shape;
};

struct safetensors_string {
    const char *key;
    const char *value;
};

struct safetensors_writer;

/*
 * Begins a file beside path and writes its header: the entries in the order given, which is also the data's. Entries
 * and metadata are only read here. Errors: TALLY_EINVAL for a name twice or a shape too large; the file system's.
 */
tally_status safetensors_writer_open(const char *path, const struct safetensors_entry *entries, size_t n,
                                     const struct safetensors_string *metadata, size_t metadata_n,
                                     struct safetensors_writer **ret_w, struct tally_error *err);
/* The next bytes of the data: every entry's elements, one entry behind the other, in pieces of any size. */
tally_status safetensors_writer_write(struct safetensors_writer *w, const void *data, size_t bytes,
                                      struct tally_error *err);
/* All data was written: sync, and put the file in its place. TALLY_EINVAL if data is missing. */
tally_status safetensors_writer_commit(struct safetensors_writer *w, struct tally_error *err);
/* Frees; without a commit the file is dropped and what stood at path stays. Accepts NULL. */
void safetensors_writer_free(struct safetensors_writer *w);
#endif
