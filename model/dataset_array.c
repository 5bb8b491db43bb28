#include "model/dataset_array.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/limits.h"

static const struct {
    const char *text;
    size_t bytes;
} types[] = {
    [DATA_BOOL] = {"bool", 1},   [DATA_U8] = {"uint8", 1},    [DATA_I8] = {"int8", 1},   [DATA_U16] = {"uint16", 2},
    [DATA_I16] = {"int16", 2},   [DATA_U32] = {"uint32", 4},  [DATA_I32] = {"int32", 4}, [DATA_I64] = {"int64", 8},
    [DATA_F32] = {"float32", 4}, [DATA_F64] = {"float64", 8},
};

size_t data_type_bytes(enum data_type type)
{
    return types[type].bytes;
}

const char *data_type_text(enum data_type type)
{
    return types[type].text;
}

bool data_type_is_float(enum data_type type)
{
    return type == DATA_F32 || type == DATA_F64;
}

tally_status data_array_measure(struct data_array *array, const char *name, const struct data_wish *wish,
                                uint64_t *ret_bytes, struct tally_error *err)
{
    char shape[DATA_SHAPE_TEXT_BYTES];
    uint64_t elements = 1, bytes;
    for (size_t i = 0; i < array->ndim; i++) {
        if (array->dim[i] == 0)
            return tally_fail(err, TALLY_EINVAL, "%s: holds no %s: its shape is %s", name,
                              i == 0 ? "samples" : "numbers", data_shape_text(array, shape));
        if (i > 0 && (__builtin_mul_overflow(elements, array->dim[i], &elements) || elements > TALLY_ELEMENTS_MAX))
            return tally_fail(err, TALLY_EINVAL, "%s: a sample of shape %s is too large (at most %zu elements)", name,
                              data_shape_text(array, shape), TALLY_ELEMENTS_MAX);
    }
    uint64_t samples = array->dim[0];
    if (samples > UINT32_MAX || __builtin_mul_overflow(samples, elements * types[array->type].bytes, &bytes) ||
        bytes > INT64_MAX)
        return tally_fail(err, TALLY_EINVAL, "%s: its shape %s is too large (at most %" PRIu32 " samples)", name,
                          data_shape_text(array, shape), UINT32_MAX);
    if (wish->limit > samples)
        return tally_fail(err, TALLY_EINVAL, "%s: holds %" PRIu64 " samples, fewer than the limit of %" PRIu64, name,
                          samples, wish->limit);
    array->samples = wish->limit ? wish->limit : samples;
    array->sample_elements = elements;
    array->sample_bytes = elements * types[array->type].bytes;
    *ret_bytes = bytes;
    return TALLY_OK;
}

tally_status data_array_open(const char *path, const struct data_wish *wish, data_parse *parse,
                             struct data_array *ret_array, struct tally_error *err)
{
    struct file_map map = {0};
    struct data_array array = {0};
    tally_status status = file_map_open(path, &map, err);
    if (status == TALLY_OK)
        status = parse(path, map.data, map.bytes, wish, &array, err);
    if (status != TALLY_OK || wish->probe || array.owned) {
        file_map_close(&map);
        array.data = array.owned;
    }
    array.map = map;
    if (status == TALLY_OK)
        *ret_array = array;
    return status;
}

void data_array_close(struct data_array *array)
{
    file_map_close(&array->map);
    free(array->owned);
    array->owned = NULL;
    array->data = NULL;
}

const char *data_shape_text(const struct data_array *array, char text[DATA_SHAPE_TEXT_BYTES])
{
    size_t at = 0;
    text[at++] = '(';
    for (size_t i = 0; i < array->ndim; i++)
        at += (size_t)snprintf(text + at, DATA_SHAPE_TEXT_BYTES - at, i > 0 ? ", %" PRIu64 : "%" PRIu64, array->dim[i]);
    snprintf(text + at, DATA_SHAPE_TEXT_BYTES - at, array->ndim == 1 ? ",)" : ")");
    return text;
}

static uint8_t swap8(uint8_t bits)
{
    return bits;
}

static uint16_t swap16(uint16_t bits)
{
    return __builtin_bswap16(bits);
}

static uint32_t swap32(uint32_t bits)
{
    return __builtin_bswap32(bits);
}

static uint64_t swap64(uint64_t bits)
{
    return __builtin_bswap64(bits);
}

/* Loops of their own for each type and byte order, so that the compiler vectorises them. memcpy: mapped elements may
 * lie anywhere. */
#define CONVERT(name, element, bits, swapper, result)                                                                  \
    static void name(const unsigned char *src, result *dst, size_t n, bool swap)                                       \
    {                                                                                                                  \
        element value;                                                                                                 \
        if (!swap) {                                                                                                   \
            for (size_t i = 0; i < n; i++) {                                                                           \
                memcpy(&value, src + i * sizeof(value), sizeof(value));                                                \
                dst[i] = (result)value;                                                                                \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        for (size_t i = 0; i < n; i++) {                                                                               \
            bits word;                                                                                                 \
            memcpy(&word, src + i * sizeof(word), sizeof(word));                                                       \
            word = swapper(word);                                                                                      \
            memcpy(&value, &word, sizeof(value));                                                                      \
            dst[i] = (result)value;                                                                                    \
        }                                                                                                              \
    }

CONVERT(u8_to_f32, uint8_t, uint8_t, swap8, float)
CONVERT(i8_to_f32, int8_t, uint8_t, swap8, float)
CONVERT(u16_to_f32, uint16_t, uint16_t, swap16, float)
CONVERT(i16_to_f32, int16_t, uint16_t, swap16, float)
CONVERT(u32_to_f32, uint32_t, uint32_t, swap32, float)
CONVERT(i32_to_f32, int32_t, uint32_t, swap32, float)
CONVERT(i64_to_f32, int64_t, uint64_t, swap64, float)
CONVERT(f32_to_f32, float, uint32_t, swap32, float)
CONVERT(f64_to_f32, double, uint64_t, swap64, float)

CONVERT(u8_to_i64, uint8_t, uint8_t, swap8, int64_t)
CONVERT(i8_to_i64, int8_t, uint8_t, swap8, int64_t)
CONVERT(u16_to_i64, uint16_t, uint16_t, swap16, int64_t)
CONVERT(i16_to_i64, int16_t, uint16_t, swap16, int64_t)
CONVERT(u32_to_i64, uint32_t, uint32_t, swap32, int64_t)
CONVERT(i32_to_i64, int32_t, uint32_t, swap32, int64_t)
CONVERT(i64_to_i64, int64_t, uint64_t, swap64, int64_t)

void data_to_f32(const struct data_array *array, const unsigned char *src, float *dst, size_t n)
{
    switch (array->type) {
    case DATA_BOOL:
        for (size_t i = 0; i < n; i++)
            dst[i] = src[i] ? 1.0f : 0.0f;
        return;
    case DATA_U8:
        u8_to_f32(src, dst, n, false);
        return;
    case DATA_I8:
        i8_to_f32(src, dst, n, false);
        return;
    case DATA_U16:
        u16_to_f32(src, dst, n, array->swap);
        return;
    case DATA_I16:
        i16_to_f32(src, dst, n, array->swap);
        return;
    case DATA_U32:
        u32_to_f32(src, dst, n, array->swap);
        return;
    case DATA_I32:
        i32_to_f32(src, dst, n, array->swap);
        return;
    case DATA_I64:
        i64_to_f32(src, dst, n, array->swap);
        return;
    case DATA_F32:
        f32_to_f32(src, dst, n, array->swap);
        return;
    case DATA_F64:
        f64_to_f32(src, dst, n, array->swap);
        return;
    }
}

void data_to_i64(const struct data_array *array, const unsigned char *src, int64_t *dst, size_t n)
{
    switch (array->type) {
    case DATA_BOOL:
        for (size_t i = 0; i < n; i++)
            dst[i] = src[i] != 0;
        return;
    case DATA_U8:
        u8_to_i64(src, dst, n, false);
        return;
    case DATA_I8:
        i8_to_i64(src, dst, n, false);
        return;
    case DATA_U16:
        u16_to_i64(src, dst, n, array->swap);
        return;
    case DATA_I16:
        i16_to_i64(src, dst, n, array->swap);
        return;
    case DATA_U32:
        u32_to_i64(src, dst, n, array->swap);
        return;
    case DATA_I32:
        i32_to_i64(src, dst, n, array->swap);
        return;
    case DATA_I64:
        i64_to_i64(src, dst, n, array->swap);
        return;
    case DATA_F32:
    case DATA_F64:
        return;
    }
}
