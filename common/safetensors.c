#include "common/safetensors.h"

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/file.h"
#include "common/limits.h"

#define PREFIX_BYTES 8
#define METADATA_KEY "__metadata__"

struct safetensors {
    char *file_name;
    struct file_map map; /* of a file that was opened by path */
    json_t *header;      /* owns the names and the metadata's strings */
    json_t *metadata;    /* borrowed from header; NULL: none */
    json_t *by_name;     /* name -> index */
    struct safetensor *tensors;
    size_t count;
};

static const struct {
    const char *text;
    uint32_t bytes;
} dtypes[] = {
    [SAFETENSORS_F32] = {"F32", 4},   [SAFETENSORS_F64] = {"F64", 8}, [SAFETENSORS_F16] = {"F16", 2},
    [SAFETENSORS_BF16] = {"BF16", 2}, [SAFETENSORS_I64] = {"I64", 8}, [SAFETENSORS_I32] = {"I32", 4},
    [SAFETENSORS_I16] = {"I16", 2},   [SAFETENSORS_I8] = {"I8", 1},   [SAFETENSORS_U64] = {"U64", 8},
    [SAFETENSORS_U32] = {"U32", 4},   [SAFETENSORS_U16] = {"U16", 2}, [SAFETENSORS_U8] = {"U8", 1},
    [SAFETENSORS_BOOL] = {"BOOL", 1},
};

const char *safetensors_dtype_text(enum safetensors_dtype dtype)
{
    return (size_t)dtype < sizeof dtypes / sizeof dtypes[0] ? dtypes[dtype].text : "unknown";
}

void safetensors_shape_text(const struct safetensor *t, char *text, size_t text_bytes)
{
    size_t used = 0;
    if (text_bytes == 0)
        return;
    text[0] = '\0';
    for (uint32_t i = 0; i <= t->dims && used < text_bytes; i++) {
        int n = i == t->dims ? snprintf(text + used, text_bytes - used,
                                        i == 0   ? "()"
                                        : i == 1 ? ",)"
                                                 : ")")
                             : snprintf(text + used, text_bytes - used, "%s%llu", i == 0 ? "(" : ", ",
                                        (unsigned long long)t->shape[i]);
        if (n < 0)
            return;
        used += (size_t)n;
    }
}

/* ---- reading ---- */

/* A JSON integer that is no negative number. */
static bool count_of(const json_t *value, uint64_t *ret_count)
{
    if (!json_is_integer(value) || json_integer_value(value) < 0)
        return false;
    *ret_count = (uint64_t)json_integer_value(value);
    return true;
}

static tally_status read_dtype(const char *file, struct safetensor *t, const json_t *entry, struct tally_error *err)
{
    const json_t *dtype = json_object_get(entry, "dtype");
    if (!json_is_string(dtype))
        return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' has no dtype", file, t->name);
    const char *text = json_string_value(dtype);
    for (size_t i = 0; i < sizeof dtypes / sizeof dtypes[0]; i++) {
        if (strcmp(text, dtypes[i].text) == 0) {
            t->dtype = (enum safetensors_dtype)i;
            return TALLY_OK;
        }
    }
    return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' has the unknown dtype '%.32s'", file, t->name, text);
}

static tally_status read_shape(const char *file, struct safetensor *t, const json_t *entry, struct tally_error *err)
{
    const json_t *shape = json_object_get(entry, "shape");
    if (!json_is_array(shape))
        return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' has no shape", file, t->name);
    size_t dims = json_array_size(shape);
    if (dims > SAFETENSORS_DIMS_MAX)
        return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' has %zu dimensions, at most %d are read", file, t->name,
                          dims, SAFETENSORS_DIMS_MAX);
    t->dims = (uint32_t)dims;
    t->elements = 1;
    for (size_t i = 0; i < dims; i++) {
        if (!count_of(json_array_get(shape, i), &t->shape[i]))
            return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s': dimension %zu of its shape is no count", file,
                              t->name, i);
        if (__builtin_mul_overflow(t->elements, t->shape[i], &t->elements) || t->elements > TALLY_ELEMENTS_MAX)
            return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' has more elements than %zu", file, t->name,
                              TALLY_ELEMENTS_MAX);
    }
    return TALLY_OK;
}

static tally_status read_offsets(const char *file, struct safetensor *t, const json_t *entry, const unsigned char *data,
                                 uint64_t data_bytes, struct tally_error *err)
{
    const json_t *offsets = json_object_get(entry, "data_offsets");
    uint64_t begin = 0;
    uint64_t end = 0;
    if (!json_is_array(offsets) || json_array_size(offsets) != 2 || !count_of(json_array_get(offsets, 0), &begin) ||
        !count_of(json_array_get(offsets, 1), &end))
        return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' has no data_offsets of two counts", file, t->name);
    if (begin > end)
        return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' ends at %llu, before it begins at %llu", file, t->name,
                          (unsigned long long)end, (unsigned long long)begin);
    if (end > data_bytes)
        return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' ends at %llu, but the file holds %llu bytes of data",
                          file, t->name, (unsigned long long)end, (unsigned long long)data_bytes);
    t->bytes = t->elements * dtypes[t->dtype].bytes;
    if (end - begin != t->bytes) {
        char shape[128];
        safetensors_shape_text(t, shape, sizeof shape);
        return tally_fail(
            err, TALLY_EINVAL, "%s: tensor '%s' of shape %s in %s needs %llu bytes, its offsets give %llu", file,
            t->name, shape, dtypes[t->dtype].text, (unsigned long long)t->bytes, (unsigned long long)(end - begin));
    }
    t->data = data + begin;
    return TALLY_OK;
}

static tally_status read_tensor(const char *file, struct safetensor *t, const json_t *entry, const unsigned char *data,
                                uint64_t data_bytes, struct tally_error *err)
{
    if (t->name[0] == '\0')
        return tally_fail(err, TALLY_EINVAL, "%s: a tensor has no name", file);
    if (!json_is_object(entry))
        return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' is no JSON object", file, t->name);
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)(uintptr_t)entry, key, value)
    {
        if (strcmp(key, "dtype") != 0 && strcmp(key, "shape") != 0 && strcmp(key, "data_offsets") != 0)
            return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' has the unknown key '%.64s'", file, t->name, key);
    }
    tally_status status = read_dtype(file, t, entry, err);
    if (status == TALLY_OK)
        status = read_shape(file, t, entry, err);
    if (status == TALLY_OK)
        status = read_offsets(file, t, entry, data, data_bytes, err);
    return status;
}

static int compare_begin(const void *a, const void *b)
{
    const struct safetensor *left = a;
    const struct safetensor *right = b;
    if (left->data != right->data)
        return left->data < right->data ? -1 : 1;
    /* Empty tensors lie before the one that begins there too. */
    if (left->bytes != right->bytes)
        return left->bytes < right->bytes ? -1 : 1;
    return strcmp(left->name, right->name);
}

/* The tensors, sorted, must cover the data without an overlap and without a hole, as the format demands. */
static tally_status check_cover(const struct safetensors *f, const unsigned char *data, uint64_t data_bytes,
                                struct tally_error *err)
{
    uint64_t covered = 0;
    const char *before = NULL;
    for (size_t i = 0; i < f->count; i++) {
        const struct safetensor *t = &f->tensors[i];
        uint64_t begin = (uint64_t)(t->data - data);
        if (begin < covered)
            return tally_fail(err, TALLY_EINVAL, "%s: tensors '%s' and '%s' overlap", f->file_name, before, t->name);
        if (begin > covered)
            return tally_fail(err, TALLY_EINVAL, "%s: %llu bytes before tensor '%s' belong to no tensor", f->file_name,
                              (unsigned long long)(begin - covered), t->name);
        covered = begin + t->bytes;
        before = t->name;
    }
    if (covered != data_bytes)
        return tally_fail(err, TALLY_EINVAL, "%s: %llu bytes at its end belong to no tensor", f->file_name,
                          (unsigned long long)(data_bytes - covered));
    return TALLY_OK;
}

static tally_status read_metadata(struct safetensors *f, json_t *metadata, struct tally_error *err)
{
    if (!json_is_object(metadata))
        return tally_fail(err, TALLY_EINVAL, "%s: " METADATA_KEY " is no JSON object", f->file_name);
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value)
    {
        if (!json_is_string(value))
            return tally_fail(err, TALLY_EINVAL, "%s: " METADATA_KEY " '%.64s' is no string", f->file_name, key);
    }
    f->metadata = metadata;
    return TALLY_OK;
}

static tally_status read_header(struct safetensors *f, const unsigned char *data, uint64_t data_bytes,
                                struct tally_error *err)
{
    f->tensors = calloc(json_object_size(f->header) + 1, sizeof *f->tensors);
    f->by_name = json_object();
    if (!f->tensors || !f->by_name)
        return tally_fail(err, TALLY_ENOMEM, "no memory for the tensors of %s", f->file_name);
    const char *key;
    json_t *entry;
    json_object_foreach(f->header, key, entry)
    {
        tally_status status;
        if (strcmp(key, METADATA_KEY) == 0) {
            status = read_metadata(f, entry, err);
        } else {
            f->tensors[f->count].name = key;
            status = read_tensor(f->file_name, &f->tensors[f->count++], entry, data, data_bytes, err);
        }
        if (status != TALLY_OK)
            return status;
    }
    qsort(f->tensors, f->count, sizeof *f->tensors, compare_begin);
    for (size_t i = 0; i < f->count; i++) {
        if (json_object_set_new_nocheck(f->by_name, f->tensors[i].name, json_integer((json_int_t)i)) != 0)
            return tally_fail(err, TALLY_ENOMEM, "no memory for the tensors of %s", f->file_name);
    }
    return check_cover(f, data, data_bytes, err);
}

static uint64_t load_le64(const unsigned char *p)
{
    uint64_t value = 0;
    for (int i = PREFIX_BYTES - 1; i >= 0; i--)
        value = value << 8 | p[i];
    return value;
}

static tally_status parse(struct safetensors *f, const unsigned char *data, size_t bytes, struct tally_error *err)
{
    if (bytes < PREFIX_BYTES)
        return tally_fail(err, TALLY_EINVAL, "%s: %zu bytes are too few for a safetensors file", f->file_name, bytes);
    uint64_t header_bytes = load_le64(data);
    if (header_bytes > TALLY_SAFETENSORS_HEADER_MAX_BYTES)
        return tally_fail(err, TALLY_EINVAL,
                          "%s: is no safetensors file, or a damaged one: its header would have %llu bytes, at most %u "
                          "are allowed",
                          f->file_name, (unsigned long long)header_bytes, TALLY_SAFETENSORS_HEADER_MAX_BYTES);
    if (header_bytes > bytes - PREFIX_BYTES)
        return tally_fail(err, TALLY_EINVAL, "%s: its header has %llu bytes, but the file ends after %zu of them",
                          f->file_name, (unsigned long long)header_bytes, bytes - PREFIX_BYTES);
    const char *text = (const char *)data + PREFIX_BYTES;
    if (header_bytes == 0 || text[0] != '{')
        return tally_fail(err, TALLY_EINVAL, "%s: its header does not begin with '{'", f->file_name);
    json_error_t reason;
    f->header = json_loadb(text, (size_t)header_bytes, JSON_REJECT_DUPLICATES, &reason);
    if (!f->header)
        return tally_fail(err, TALLY_EINVAL, "%s: its header is no JSON: %s (byte %d)", f->file_name, reason.text,
                          reason.position);
    return read_header(f, data + PREFIX_BYTES + header_bytes, bytes - PREFIX_BYTES - (size_t)header_bytes, err);
}

static tally_status new_reader(const char *name, struct safetensors **ret_f, struct tally_error *err)
{
    struct safetensors *f = calloc(1, sizeof *f);
    if (f)
        f->file_name = strdup(name);
    if (!f || !f->file_name) {
        free(f);
        return tally_fail(err, TALLY_ENOMEM, "no memory to read %s", name);
    }
    *ret_f = f;
    return TALLY_OK;
}

tally_status safetensors_open(const char *path, struct safetensors **ret_f, struct tally_error *err)
{
    struct safetensors *f = NULL;
    tally_status status = new_reader(path, &f, err);
    if (status == TALLY_OK)
        status = file_map_open(path, &f->map, err);
    if (status == TALLY_OK)
        status = parse(f, f->map.data, f->map.bytes, err);
    if (status == TALLY_OK)
        *ret_f = f;
    else
        safetensors_close(f);
    return status;
}

tally_status safetensors_open_memory(const char *name, const void *data, size_t bytes, struct safetensors **ret_f,
                                     struct tally_error *err)
{
    struct safetensors *f = NULL;
    tally_status status = new_reader(name, &f, err);
    if (status == TALLY_OK)
        status = parse(f, data, bytes, err);
    if (status == TALLY_OK)
        *ret_f = f;
    else
        safetensors_close(f);
    return status;
}

size_t safetensors_count(const struct safetensors *f)
{
    return f->count;
}

const struct safetensor *safetensors_at(const struct safetensors *f, size_t i)
{
    return i < f->count ? &f->tensors[i] : NULL;
}

const struct safetensor *safetensors_find(const struct safetensors *f, const char *name)
{
    const json_t *index = json_object_get(f->by_name, name);
    return index ? &f->tensors[json_integer_value(index)] : NULL;
}

const char *safetensors_metadata(const struct safetensors *f, const char *key)
{
    return f->metadata ? json_string_value(json_object_get(f->metadata, key)) : NULL;
}

void safetensors_close(struct safetensors *f)
{
    if (!f)
        return;
    free(f->tensors);
    json_decref(f->by_name);
    json_decref(f->header);
    file_map_close(&f->map);
    free(f->file_name);
    free(f);
}
