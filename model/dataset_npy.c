/* NumPy's .npy files, versions 1 to 3 (numpy/lib/format.py): a magic, a version, the header's length, the header (a
 * Python dictionary of three entries), the elements. */
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "model/dataset_array.h"

/* Three entries with four dimensions; NumPy itself refuses headers beyond 10,000 bytes. */
#define HEADER_MAX 10000

struct cursor {
    const char *name;
    const unsigned char *at, *end;
    struct tally_error *err;
};

static tally_status bad_header(struct cursor *c, const char *expected)
{
    if (c->at >= c->end)
        return tally_fail(c->err, TALLY_EINVAL, "%s: its npy header ends where %s was expected", c->name, expected);
    char found[24];
    snprintf(found, sizeof(found), *c->at >= 0x20 && *c->at < 0x7f ? "'%c'" : "byte 0x%02x", *c->at);
    return tally_fail(c->err, TALLY_EINVAL, "%s: its npy header has %s where %s was expected", c->name, found,
                      expected);
}

static void skip_spaces(struct cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n' || *c->at == '\t' || *c->at == '\r'))
        c->at++;
}

static bool take(struct cursor *c, const char *text)
{
    size_t n = strlen(text);
    skip_spaces(c);
    if ((size_t)(c->end - c->at) < n || memcmp(c->at, text, n) != 0)
        return false;
    c->at += n;
    return true;
}

/* A string in single or double quotes, without escapes, into text. */
static tally_status take_string(struct cursor *c, char *text, size_t size, const char *what)
{
    skip_spaces(c);
    if (c->at >= c->end || (*c->at != '\'' && *c->at != '"'))
        return bad_header(c, what);
    unsigned char quote = *c->at++;
    size_t n = 0;
    while (c->at < c->end && *c->at != quote && *c->at != '\\' && *c->at >= 0x20 && *c->at < 0x7f && n + 1 < size)
        text[n++] = (char)*c->at++;
    if (c->at >= c->end || *c->at != quote)
        return bad_header(c, "the end of a short string");
    c->at++;
    text[n] = '\0';
    return TALLY_OK;
}

static tally_status take_shape(struct cursor *c, struct data_array *array)
{
    if (!take(c, "("))
        return bad_header(c, "the shape, a tuple");
    array->ndim = 0;
    while (!take(c, ")")) {
        if (array->ndim == DATA_DIMS_MAX)
            return tally_fail(c->err, TALLY_EINVAL, "%s: has more than %d dimensions", c->name, DATA_DIMS_MAX);
        uint64_t value = 0;
        if (c->at >= c->end || *c->at < '0' || *c->at > '9')
            return bad_header(c, "a dimension");
        for (; c->at < c->end && *c->at >= '0' && *c->at <= '9'; c->at++)
            if (__builtin_mul_overflow(value, 10, &value) || __builtin_add_overflow(value, *c->at - '0', &value))
                return tally_fail(c->err, TALLY_EINVAL, "%s: a dimension of its npy header is too large", c->name);
        array->dim[array->ndim++] = value;
        if (take(c, ","))
            continue;
        /* "(3)" is no tuple. */
        if (array->ndim == 1 || !take(c, ")"))
            return bad_header(c, "a comma");
        break;
    }
    if (array->ndim == 0)
        return tally_fail(c->err, TALLY_EINVAL, "%s: holds a single number, expected an array of samples", c->name);
    return TALLY_OK;
}

static tally_status set_type(struct cursor *c, const char *descr, struct data_array *array)
{
    static const struct {
        const char *code;
        enum data_type type;
    } known[] = {{"b1", DATA_BOOL}, {"u1", DATA_U8},  {"i1", DATA_I8},  {"u2", DATA_U16}, {"i2", DATA_I16},
                 {"u4", DATA_U32},  {"i4", DATA_I32}, {"i8", DATA_I64}, {"f4", DATA_F32}, {"f8", DATA_F64}};
    static const struct {
        char kind;
        const char *text;
    } refused[] = {{'f', "floats of another size than 4 or 8 bytes"},
                   {'u', "unsigned 64-bit integers"},
                   {'c', "complex numbers"},
                   {'S', "byte strings"},
                   {'U', "strings"},
                   {'O', "Python objects"},
                   {'M', "dates"},
                   {'m', "time differences"},
                   {'V', "raw records"}};
    bool little = descr[0] == '<', big = descr[0] == '>', none = descr[0] == '|';
    if (little || big || none) {
        for (size_t i = 0; i < sizeof(known) / sizeof(known[0]); i++) {
            if (strcmp(descr + 1, known[i].code) != 0 || (none && data_type_bytes(known[i].type) > 1))
                continue;
            array->type = known[i].type;
            array->swap = __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ ? big : little;
            return TALLY_OK;
        }
    }
    const char *what = "an unknown type";
    for (size_t i = 0; (little || big || none) && i < sizeof(refused) / sizeof(refused[0]); i++)
        if (descr[1] == refused[i].kind)
            what = refused[i].text;
    if (strcmp(descr + (descr[0] != '\0'), "f2") == 0)
        what = "float16";
    return tally_fail(c->err, TALLY_EINVAL,
                      "%s: its elements are '%s' (%s), expected float32, float64, bool, int8 to int64 or uint8 to "
                      "uint32: convert it with astype",
                      c->name, descr, what);
}

static tally_status take_entry(struct cursor *c, struct data_array *array, bool seen[3], bool *fortran)
{
    static const char *const keys[3] = {"descr", "fortran_order", "shape"};
    char key[16], descr[32];
    tally_status status = take_string(c, key, sizeof(key), "a key");
    if (status != TALLY_OK)
        return status;
    size_t k = 0;
    while (k < 3 && strcmp(key, keys[k]) != 0)
        k++;
    if (k == 3 || seen[k])
        return tally_fail(c->err, TALLY_EINVAL, "%s: its npy header has the key '%s' %s", c->name, key,
                          k == 3 ? "beside descr, fortran_order and shape" : "twice");
    seen[k] = true;
    if (!take(c, ":"))
        return bad_header(c, "a colon");
    if (k == 2)
        return take_shape(c, array);
    if (k == 1) {
        *fortran = take(c, "True");
        return *fortran || take(c, "False") ? TALLY_OK : bad_header(c, "True or False");
    }
    if (take(c, "["))
        return tally_fail(c->err, TALLY_EINVAL, "%s: its elements are records of several fields, expected numbers",
                          c->name);
    status = take_string(c, descr, sizeof(descr), "the element type, a string");
    return status == TALLY_OK ? set_type(c, descr, array) : status;
}

static tally_status parse_dictionary(struct cursor *c, struct data_array *array)
{
    bool seen[3] = {false}, fortran = false;
    if (!take(c, "{"))
        return bad_header(c, "'{'");
    while (!take(c, "}")) {
        tally_status status = take_entry(c, array, seen, &fortran);
        if (status != TALLY_OK)
            return status;
        if (take(c, ","))
            continue;
        if (!take(c, "}"))
            return bad_header(c, "a comma or '}'");
        break;
    }
    skip_spaces(c);
    if (c->at != c->end)
        return bad_header(c, "its end");
    if (!seen[0] || !seen[1] || !seen[2])
        return tally_fail(c->err, TALLY_EINVAL, "%s: its npy header has no %s", c->name,
                          !seen[0]   ? "descr"
                          : !seen[1] ? "fortran_order"
                                     : "shape");
    if (fortran && array->ndim > 1)
        return tally_fail(c->err, TALLY_EINVAL,
                          "%s: is in Fortran order, where a sample's elements lie apart: save it with "
                          "numpy.ascontiguousarray",
                          c->name);
    return TALLY_OK;
}

/* Magic, version and length; c is left at the dictionary, and ends with it. */
static tally_status parse_preamble(struct cursor *c)
{
    static const unsigned char magic[6] = {0x93, 'N', 'U', 'M', 'P', 'Y'};
    size_t bytes = (size_t)(c->end - c->at);
    if (bytes < 10 || memcmp(c->at, magic, sizeof(magic)) != 0)
        return tally_fail(c->err, TALLY_EINVAL, "%s: not an npy file: it does not begin with \\x93NUMPY", c->name);
    unsigned major = c->at[6], minor = c->at[7];
    if (major < 1 || major > 3 || minor != 0)
        return tally_fail(c->err, TALLY_EINVAL, "%s: npy format %u.%u, expected 1.0, 2.0 or 3.0", c->name, major,
                          minor);
    size_t start = major == 1 ? 10 : 12;
    uint64_t length = (uint64_t)c->at[8] | (uint64_t)c->at[9] << 8;
    if (major > 1 && bytes >= 12)
        length |= (uint64_t)c->at[10] << 16 | (uint64_t)c->at[11] << 24;
    if (length > HEADER_MAX)
        return tally_fail(c->err, TALLY_EINVAL, "%s: its npy header has %" PRIu64 " bytes, expected at most %d",
                          c->name, length, HEADER_MAX);
    if (bytes < start + length)
        return tally_fail(c->err, TALLY_EINVAL, "%s: ends after %zu bytes, inside its npy header of %" PRIu64, c->name,
                          bytes, start + length);
    c->at += start;
    c->end = c->at + length;
    return TALLY_OK;
}

tally_status data_npy_parse(const char *name, const unsigned char *data, size_t bytes, const struct data_wish *wish,
                            struct data_array *ret_array, struct tally_error *err)
{
    struct data_array array = {0};
    uint64_t data_bytes;
    if (bytes == 0)
        return tally_fail(err, TALLY_EINVAL, "%s: not an npy file: it is empty", name);
    struct cursor c = {.name = name, .at = data, .end = data + bytes, .err = err};
    tally_status status = parse_preamble(&c);
    if (status == TALLY_OK)
        status = parse_dictionary(&c, &array);
    if (status == TALLY_OK)
        status = data_array_measure(&array, name, wish, &data_bytes, err);
    if (status != TALLY_OK)
        return status;
    size_t rest = bytes - (size_t)(c.end - data);
    char shape[DATA_SHAPE_TEXT_BYTES];
    if (rest != data_bytes)
        return tally_fail(err, TALLY_EINVAL, "%s: has %zu bytes of data, expected %" PRIu64 " for its shape %s of %s",
                          name, rest, data_bytes, data_shape_text(&array, shape), data_type_text(array.type));
    array.data = c.end;
    *ret_array = array;
    return TALLY_OK;
}
