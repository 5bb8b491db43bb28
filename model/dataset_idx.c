/* The IDX format of http://yann.lecun.com/exdb/mnist/: two zero bytes, the element type, the number of dimensions, each
 * as a big-endian 32-bit number, the elements; plain or gzip. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/dataset_array.h"
#include "model/gunzip.h"

#define IDX_HEADER_MAX (4 + 4 * DATA_DIMS_MAX)

static bool idx_type(unsigned char code, enum data_type *ret_type)
{
    switch (code) {
    case 0x08:
        *ret_type = DATA_U8;
        return true;
    case 0x09:
        *ret_type = DATA_I8;
        return true;
    case 0x0b:
        *ret_type = DATA_I16;
        return true;
    case 0x0c:
        *ret_type = DATA_I32;
        return true;
    case 0x0d:
        *ret_type = DATA_F32;
        return true;
    case 0x0e:
        *ret_type = DATA_F64;
        return true;
    default:
        return false;
    }
}

/* head: the file's first bytes, IDX_HEADER_MAX of them where there are so many. */
static tally_status parse_header(const char *name, const unsigned char *head, size_t bytes,
                                 const struct data_wish *wish, struct data_array *array, size_t *ret_header_bytes,
                                 uint64_t *ret_data_bytes, struct tally_error *err)
{
    if (bytes < 4)
        return tally_fail(err, TALLY_EINVAL, "%s: not an IDX file: it has %zu bytes, its header alone has at least 8",
                          name, bytes);
    if (head[0] != 0 || head[1] != 0 || !idx_type(head[2], &array->type))
        return tally_fail(err, TALLY_EINVAL,
                          "%s: not an IDX file: it begins with %02x %02x %02x %02x, expected 00 00, a type of 08, 09, "
                          "0b, 0c, 0d or 0e, and the number of dimensions",
                          name, head[0], head[1], head[2], head[3]);
    array->ndim = head[3];
    if (array->ndim < 1 || array->ndim > DATA_DIMS_MAX)
        return tally_fail(err, TALLY_EINVAL, "%s: the IDX file has %zu dimensions, expected 1 to %d", name, array->ndim,
                          DATA_DIMS_MAX);
    size_t header_bytes = 4 + 4 * array->ndim;
    if (bytes < header_bytes)
        return tally_fail(err, TALLY_EINVAL, "%s: the IDX file ends after %zu of its header's %zu bytes", name, bytes,
                          header_bytes);
    for (size_t i = 0; i < array->ndim; i++) {
        uint32_t word;
        memcpy(&word, head + 4 + 4 * i, 4);
        array->dim[i] = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? __builtin_bswap32(word) : word;
    }
    array->swap = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__;
    *ret_header_bytes = header_bytes;
    return data_array_measure(array, name, wish, ret_data_bytes, err);
}

static tally_status wrong_length(const char *name, const struct data_array *array, uint64_t expected, const char *found,
                                 struct tally_error *err)
{
    char shape[DATA_SHAPE_TEXT_BYTES];
    return tally_fail(err, TALLY_EINVAL, "%s: %s, expected %" PRIu64 " for its shape %s of %s", name, found, expected,
                      data_shape_text(array, shape), data_type_text(array->type));
}

static tally_status parse_plain(const char *name, const unsigned char *data, size_t bytes, const struct data_wish *wish,
                                struct data_array *array, struct tally_error *err)
{
    size_t header_bytes;
    uint64_t data_bytes;
    tally_status status = parse_header(name, data, bytes, wish, array, &header_bytes, &data_bytes, err);
    if (status != TALLY_OK)
        return status;
    if (bytes - header_bytes != data_bytes) {
        char found[64];
        snprintf(found, sizeof(found), "the IDX file has %zu bytes of data", bytes - header_bytes);
        return wrong_length(name, array, data_bytes, found, err);
    }
    array->data = data + header_bytes;
    return TALLY_OK;
}

static tally_status read_gzip_header(const char *name, struct gunzip *g, const struct data_wish *wish,
                                     struct data_array *array, size_t *ret_header_bytes, uint64_t *ret_data_bytes,
                                     struct tally_error *err)
{
    unsigned char head[IDX_HEADER_MAX];
    size_t have = 0, more = 0;
    tally_status status = gunzip_read(g, head, 4, &have, err);
    if (status == TALLY_OK && have == 4 && head[3] >= 1 && head[3] <= DATA_DIMS_MAX)
        status = gunzip_read(g, head + 4, 4 * (size_t)head[3], &more, err);
    if (status != TALLY_OK)
        return status;
    return parse_header(name, head, have + more, wish, array, ret_header_bytes, ret_data_bytes, err);
}

/* Reads the rest of the file: it must have exactly so many bytes, and their check sum. */
static tally_status expect_rest(const char *name, struct gunzip *g, const struct data_array *array, uint64_t already,
                                uint64_t expected, struct tally_error *err)
{
    unsigned char piece[16384];
    uint64_t total = already;
    size_t got;
    char found[80];
    do {
        tally_status status = gunzip_read(g, piece, sizeof(piece), &got, err);
        if (status != TALLY_OK)
            return status;
        total += got;
        if (total > expected) {
            snprintf(found, sizeof(found), "the IDX file has more than %" PRIu64 " bytes of data", expected);
            return wrong_length(name, array, expected, found, err);
        }
    } while (got == sizeof(piece));
    if (total == expected)
        return TALLY_OK;
    snprintf(found, sizeof(found), "the IDX file has %" PRIu64 " bytes of data", total);
    return wrong_length(name, array, expected, found, err);
}

static tally_status decode(const char *name, struct gunzip *g, struct data_array *array, uint64_t data_bytes,
                           struct tally_error *err)
{
    size_t needed = array->samples * array->sample_bytes, got;
    unsigned char *owned = malloc(needed);
    if (!owned)
        return tally_fail(err, TALLY_ENOMEM, "%s: no memory for its %zu bytes of data", name, needed);
    tally_status status = gunzip_read(g, owned, needed, &got, err);
    if (status == TALLY_OK && (got < needed || needed == data_bytes))
        status = expect_rest(name, g, array, got, data_bytes, err);
    if (status != TALLY_OK) {
        free(owned);
        return status;
    }
    array->owned = owned;
    array->data = owned;
    return TALLY_OK;
}

/* The size that the last member's trailer states, modulo 2^32. */
static uint32_t stated_size(const unsigned char *data, size_t bytes)
{
    const unsigned char *tail = data + bytes - 4;
    return (uint32_t)tail[0] | (uint32_t)tail[1] << 8 | (uint32_t)tail[2] << 16 | (uint32_t)tail[3] << 24;
}

static tally_status parse_gzip(const char *name, const unsigned char *data, size_t bytes, const struct data_wish *wish,
                               struct data_array *array, struct tally_error *err)
{
    struct gunzip *g = NULL;
    size_t header_bytes;
    uint64_t data_bytes;
    tally_status status = gunzip_open(name, data, bytes, &g, err);
    if (status != TALLY_OK)
        return status;
    status = read_gzip_header(name, g, wish, array, &header_bytes, &data_bytes, err);
    if (status != TALLY_OK)
        goto out;
    if (data_bytes / GUNZIP_RATIO_MAX > bytes) {
        char found[80];
        snprintf(found, sizeof(found), "cannot hold what its header declares in %zu bytes of gzip", bytes);
        status = wrong_length(name, array, data_bytes, found, err);
        goto out;
    }
    if (!wish->probe)
        status = decode(name, g, array, data_bytes, err);
    /* A file of one member that was not cut off ends with its size. Only where it does not, all of it must be unpacked
     * to know. */
    else if (bytes < 4 || stated_size(data, bytes) != (uint32_t)(header_bytes + data_bytes))
        status = expect_rest(name, g, array, 0, data_bytes, err);
out:
    gunzip_close(g);
    return status;
}

tally_status data_idx_parse(const char *name, const unsigned char *data, size_t bytes, const struct data_wish *wish,
                            struct data_array *ret_array, struct tally_error *err)
{
    struct data_array array = {0};
    tally_status status = gunzip_detect(data, bytes) ? parse_gzip(name, data, bytes, wish, &array, err)
                                                     : parse_plain(name, data, bytes, wish, &array, err);
    if (status == TALLY_OK)
        *ret_array = array;
    return status;
}
