#include <jansson.h>
#include <stdlib.h>
#include <string.h>

#include "common/file.h"
#include "common/limits.h"
#include "common/safetensors.h"

#define PREFIX_BYTES 8
#define ALIGNMENT 8
#define FLOAT_BYTES 4
#define METADATA_KEY "__metadata__"

struct safetensors_writer {
    char *path;
    struct file_atomic *file;
    uint64_t data_bytes;
    uint64_t written;
};

static tally_status entry_bytes(const char *path, const struct safetensors_entry *e, uint64_t *ret_bytes,
                                struct tally_error *err)
{
    uint64_t elements = 1;
    if (e->dims > SAFETENSORS_DIMS_MAX)
        return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' has %u dimensions, at most %d are written", path, e->name,
                          e->dims, SAFETENSORS_DIMS_MAX);
    for (uint32_t i = 0; i < e->dims; i++) {
        if (__builtin_mul_overflow(elements, e->shape[i], &elements) || elements > TALLY_ELEMENTS_MAX)
            return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' has more elements than %zu", path, e->name,
                              TALLY_ELEMENTS_MAX);
    }
    *ret_bytes = elements * FLOAT_BYTES;
    return TALLY_OK;
}

static tally_status no_memory(const char *path, struct tally_error *err)
{
    return tally_fail(err, TALLY_ENOMEM, "no memory to write %s", path);
}

static tally_status add_metadata(json_t *header, const char *path, const struct safetensors_string *metadata, size_t n,
                                 struct tally_error *err)
{
    if (n == 0)
        return TALLY_OK;
    json_t *map = json_object();
    if (!map || json_object_set_new(header, METADATA_KEY, map) != 0)
        return no_memory(path, err);
    for (size_t i = 0; i < n; i++) {
        if (json_object_get(map, metadata[i].key))
            return tally_fail(err, TALLY_EINVAL, "%s: metadata '%s' is given twice", path, metadata[i].key);
        if (json_object_set_new(map, metadata[i].key, json_string(metadata[i].value)) != 0)
            return tally_fail(err, TALLY_EINVAL, "%s: metadata '%s' is not UTF-8", path, metadata[i].key);
    }
    return TALLY_OK;
}

static tally_status add_entry(json_t *header, const char *path, const struct safetensors_entry *e, uint64_t begin,
                              uint64_t *ret_end, struct tally_error *err)
{
    uint64_t bytes = 0;
    tally_status status = entry_bytes(path, e, &bytes, err);
    if (status != TALLY_OK)
        return status;
    uint64_t end = begin + bytes;
    if (end < begin || end > INT64_MAX)
        return tally_fail(err, TALLY_EINVAL, "%s: its tensors have more bytes than a file can hold", path);
    if (e->name[0] == '\0' || strcmp(e->name, METADATA_KEY) == 0)
        return tally_fail(err, TALLY_EINVAL, "%s: '%s' is no name for a tensor", path, e->name);
    if (json_object_get(header, e->name))
        return tally_fail(err, TALLY_EINVAL, "%s: tensor '%s' is given twice", path, e->name);
    json_t *shape = json_array();
    for (uint32_t i = 0; shape && i < e->dims; i++) {
        if (json_array_append_new(shape, json_integer((json_int_t)e->shape[i])) != 0) {
            json_decref(shape);
            shape = NULL;
        }
    }
    if (!shape)
        return no_memory(path, err);
    json_t *entry = json_pack("{s:s, s:o, s:[I, I]}", "dtype", "F32", "shape", shape, "data_offsets", (json_int_t)begin,
                              (json_int_t)end);
    if (!entry)
        return no_memory(path, err);
    if (json_object_set_new(header, e->name, entry) != 0)
        return tally_fail(err, TALLY_EINVAL, "%s: the name of tensor '%s' is not UTF-8", path, e->name);
    *ret_end = end;
    return TALLY_OK;
}

static tally_status write_header(struct safetensors_writer *w, const json_t *header, struct tally_error *err)
{
    char *text = json_dumps(header, JSON_COMPACT);
    if (!text)
        return no_memory(w->path, err);
    size_t bytes = strlen(text);
    /* Spaces behind the JSON align the data, as the reference implementation does. */
    size_t padding = (ALIGNMENT - bytes % ALIGNMENT) % ALIGNMENT;
    tally_status status = TALLY_OK;
    unsigned char prefix[PREFIX_BYTES];
    for (size_t i = 0; i < PREFIX_BYTES; i++)
        prefix[i] = (unsigned char)((uint64_t)(bytes + padding) >> (8 * i));
    if (bytes + padding > TALLY_SAFETENSORS_HEADER_MAX_BYTES)
        status = tally_fail(err, TALLY_EINVAL, "%s: its header would have %zu bytes, at most %u are allowed", w->path,
                            bytes + padding, TALLY_SAFETENSORS_HEADER_MAX_BYTES);
    if (status == TALLY_OK)
        status = file_atomic_write(w->file, prefix, sizeof prefix, err);
    if (status == TALLY_OK)
        status = file_atomic_write(w->file, text, bytes, err);
    if (status == TALLY_OK)
        status = file_atomic_write(w->file, "        ", padding, err);
    free(text);
    return status;
}

tally_status safetensors_writer_open(const char *path, const struct safetensors_entry *entries, size_t n,
                                     const struct safetensors_string *metadata, size_t metadata_n,
                                     struct safetensors_writer **ret_w, struct tally_error *err)
{
    tally_status status = TALLY_OK;
    json_t *header = json_object();
    struct safetensors_writer *w = calloc(1, sizeof *w);
    if (w)
        w->path = strdup(path);
    if (!header || !w || !w->path) {
        status = no_memory(path, err);
        goto out;
    }
    status = add_metadata(header, path, metadata, metadata_n, err);
    for (size_t i = 0; i < n && status == TALLY_OK; i++)
        status = add_entry(header, path, &entries[i], w->data_bytes, &w->data_bytes, err);
    if (status == TALLY_OK)
        status = file_atomic_open(path, 0644, &w->file, err);
    if (status == TALLY_OK)
        status = write_header(w, header, err);
    if (status == TALLY_OK) {
        *ret_w = w;
        w = NULL;
    }
out:
    json_decref(header);
    safetensors_writer_free(w);
    return status;
}

tally_status safetensors_writer_write(struct safetensors_writer *w, const void *data, size_t bytes,
                                      struct tally_error *err)
{
    if (bytes > w->data_bytes - w->written)
        return tally_fail(err, TALLY_EINVAL, "%s: more data than its tensors hold", w->path);
    tally_status status = file_atomic_write(w->file, data, bytes, err);
    if (status == TALLY_OK)
        w->written += bytes;
    return status;
}

tally_status safetensors_writer_commit(struct safetensors_writer *w, struct tally_error *err)
{
    if (w->written != w->data_bytes)
        return tally_fail(err, TALLY_EINVAL, "%s: %llu of its %llu bytes of data were written", w->path,
                          (unsigned long long)w->written, (unsigned long long)w->data_bytes);
    return file_atomic_commit(w->file, err);
}

void safetensors_writer_free(struct safetensors_writer *w)
{
    if (!w)
        return;
    file_atomic_free(w->file);
    free(w->path);
    free(w);
}
