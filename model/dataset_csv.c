#include "model/dataset_csv.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "common/limits.h"
#include "common/spec_file.h"
#include "model/number_text.h"

/* Integers up to here are exact in a double. */
#define CLASS_MAX 9007199254740992.0

/* Column names that a wrong one is compared with. */
#define NEAREST_MAX 64

struct field {
    const unsigned char *text; /* without quotes around it or spaces beside it */
    size_t bytes;
    bool quoted; /* "" in it stands for a quote */
    bool last;   /* of its line */
    size_t column;
};

struct reader {
    const char *name;
    const unsigned char *at, *end, *line_start;
    const unsigned char *header; /* NULL: none */
    size_t line;                 /* from 1 */
    size_t columns, target;
    const struct csv_wish *wish;
    struct tally_error *err;
    /* What was read. */
    uint64_t rows, capacity;
    float *inputs;
    void *targets; /* int64_t or float */
};

#define FOUND_BYTES 48

/* What stands in a field, printable. */
static const char *found_text(const struct field *field, char text[FOUND_BYTES])
{
    if (field->bytes == 0)
        return "nothing";
    size_t n = 0, room = FOUND_BYTES - 6;
    text[n++] = '\'';
    for (size_t i = 0; i < field->bytes && n < room; i++) {
        unsigned char c = field->text[i];
        text[n++] = c >= 0x20 && c < 0x7f ? (char)c : '?';
    }
    snprintf(text + n, FOUND_BYTES - n, field->bytes + 1 > n ? "...'" : "'");
    return text;
}

static bool at_line_end(const struct reader *r, const unsigned char *at)
{
    return at == r->end || *at == '\n' || (*at == '\r' && (at + 1 == r->end || at[1] == '\n'));
}

static tally_status quoted_field(struct reader *r, struct field *field)
{
    size_t line = r->line;
    field->quoted = true;
    field->text = ++r->at;
    while (r->at < r->end) {
        if (*r->at == '"' && (r->at + 1 == r->end || r->at[1] != '"'))
            break;
        if (*r->at == '"')
            r->at++;
        if (*r->at++ == '\n') {
            r->line++;
            r->line_start = r->at;
        }
    }
    if (r->at == r->end)
        return tally_fail(r->err, TALLY_EINVAL, "%s:%zu:%zu: the quote that opens here is never closed", r->name, line,
                          field->column);
    field->bytes = (size_t)(r->at++ - field->text);
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t'))
        r->at++;
    if (!at_line_end(r, r->at) && *r->at != ',')
        return tally_fail(r->err, TALLY_EINVAL, "%s:%zu:%zu: expected a comma behind the closing quote", r->name,
                          r->line, (size_t)(r->at - r->line_start) + 1);
    return TALLY_OK;
}

/* The field at r->at. Behind it, r->at is at the next one, or at the next line if it was the last. */
static tally_status next_field(struct reader *r, struct field *field)
{
    while (r->at < r->end && (*r->at == ' ' || *r->at == '\t'))
        r->at++;
    *field = (struct field){.text = r->at, .column = (size_t)(r->at - r->line_start) + 1};
    if (r->at < r->end && *r->at == '"') {
        tally_status status = quoted_field(r, field);
        if (status != TALLY_OK)
            return status;
    } else {
        while (!at_line_end(r, r->at) && *r->at != ',')
            r->at++;
        const unsigned char *end = r->at;
        while (end > field->text && (end[-1] == ' ' || end[-1] == '\t'))
            end--;
        field->bytes = (size_t)(end - field->text);
    }
    field->last = at_line_end(r, r->at);
    if (!field->last) {
        r->at++;
        return TALLY_OK;
    }
    if (r->at < r->end && *r->at == '\r')
        r->at++;
    if (r->at < r->end)
        r->at++;
    r->line++;
    r->line_start = r->at;
    return TALLY_OK;
}

static bool field_is(const struct field *field, const char *text)
{
    size_t i = 0;
    for (; i < field->bytes; i++, text++) {
        if (*text == '\0' || (unsigned char)*text != field->text[i])
            return false;
        if (field->quoted && field->text[i] == '"')
            i++;
    }
    return *text == '\0';
}

/* "column 3" or "column 3 (name)" into text. */
static const char *column_text(const struct reader *r, size_t column, char *text, size_t size)
{
    snprintf(text, size, "column %zu", column);
    if (!r->header)
        return text;
    struct reader again = {.at = r->header, .line_start = r->header, .end = r->end};
    struct field field = {0};
    for (size_t i = 0; i <= column; i++)
        if (next_field(&again, &field) != TALLY_OK)
            return text;
    char found[FOUND_BYTES];
    snprintf(text, size, "column %zu (%s)", column, found_text(&field, found));
    return text;
}

static tally_status bad_field(const struct reader *r, size_t line, size_t column, const struct field *field,
                              const char *expected)
{
    char found[FOUND_BYTES], where[FOUND_BYTES + 32];
    return tally_fail(r->err, TALLY_EINVAL, "%s:%zu:%zu: %s: found %s, expected %s", r->name, line, field->column,
                      column_text(r, column, where, sizeof(where)), found_text(field, found), expected);
}

/* The target's index as a number: false where it is none. */
static bool target_index(const char *target, size_t columns, size_t *ret_index, bool *ret_in_range)
{
    char *end;
    if (*target != '-' && (*target < '0' || *target > '9'))
        return false;
    long long value = strtoll(target, &end, 10);
    if (*end != '\0')
        return false;
    long long count = (long long)columns;
    *ret_in_range = value >= -count && value < count;
    if (*ret_in_range)
        *ret_index = (size_t)(value < 0 ? value + count : value);
    return true;
}

/* The column (of the first ones) whose name is most like the target's, into text: " (did you mean 'label'?)"; else "".
 */
static const char *nearest_name(const struct reader *r, char *text, size_t size)
{
    struct reader again = {.at = r->header, .line_start = r->header, .end = r->end};
    struct field field = {0};
    char names[NEAREST_MAX][FOUND_BYTES];
    const char *pointers[NEAREST_MAX];
    size_t n = 0;
    for (size_t i = 0; i < r->columns && n < NEAREST_MAX && next_field(&again, &field) == TALLY_OK; i++) {
        if (field.bytes == 0 || field.bytes >= FOUND_BYTES)
            continue;
        memcpy(names[n], field.text, field.bytes);
        names[n][field.bytes] = '\0';
        pointers[n] = names[n];
        n++;
    }
    const char *near = spec_nearest(r->wish->target, pointers, n);
    text[0] = '\0';
    if (near)
        snprintf(text, size, " (did you mean '%s'?)", near);
    return text;
}

/* The names of the header, as many as have room. */
static const char *header_names(const struct reader *r, char *text, size_t size)
{
    struct reader again = {.at = r->header, .line_start = r->header, .end = r->end};
    struct field field = {0};
    size_t n = 0;
    text[0] = '\0';
    for (size_t i = 0; i < r->columns && n + FOUND_BYTES + 2 < size && next_field(&again, &field) == TALLY_OK; i++) {
        char found[FOUND_BYTES];
        n += (size_t)snprintf(text + n, size - n, i > 0 ? ", %s" : "%s", found_text(&field, found));
    }
    return text;
}

static tally_status find_target(struct reader *r, size_t named, size_t index)
{
    const char *target = r->wish->target;
    char names[400], near[FOUND_BYTES + 32];
    bool in_range = false;
    if (r->columns < 2)
        return tally_fail(r->err, TALLY_EINVAL, "%s: its lines have one column, expected inputs and a target", r->name);
    if (named > 1)
        return tally_fail(r->err, TALLY_EINVAL, "%s: its header has %zu columns named '%s'", r->name, named, target);
    r->target = index;
    if (named == 1)
        return TALLY_OK;
    if (target_index(target, r->columns, &r->target, &in_range)) {
        if (in_range)
            return TALLY_OK;
        return tally_fail(r->err, TALLY_EINVAL,
                          "%s: has %zu columns, so the target's index is from -%zu to %zu, not %s", r->name, r->columns,
                          r->columns, r->columns - 1, target);
    }
    if (!r->header)
        return tally_fail(r->err, TALLY_EINVAL,
                          "%s: without a header the target is a column's index, not the name '%s'", r->name, target);
    return tally_fail(r->err, TALLY_EINVAL, "%s: its header has no column '%s', only %s%s", r->name, target,
                      header_names(r, names, sizeof(names)), nearest_name(r, near, sizeof(near)));
}

/* Counts the first line's columns and finds the target. A header is passed; without one r stays where it was. */
static tally_status read_first_line(struct reader *r)
{
    struct reader start = *r;
    struct field field = {0};
    size_t named = 0, index = 0;
    if (r->wish->header)
        r->header = r->at;
    while (!field.last) {
        tally_status status = next_field(r, &field);
        if (status != TALLY_OK)
            return status;
        if (r->header && field_is(&field, r->wish->target) && named++ == 0)
            index = r->columns;
        r->columns++;
    }
    if (!r->header) {
        start.columns = r->columns;
        *r = start;
    }
    return find_target(r, named, index);
}

/* Only empty lines follow. */
static bool at_end(const struct reader *r)
{
    const unsigned char *at = r->at;
    while (at < r->end && (*at == '\n' || *at == '\r' || *at == ' ' || *at == '\t'))
        at++;
    return at == r->end;
}

static tally_status make_room(struct reader *r)
{
    uint64_t capacity = r->capacity ? r->capacity * 2 : 64;
    if (r->wish->wish.limit && capacity > r->wish->wish.limit)
        capacity = r->wish->wish.limit;
    size_t bytes;
    if (capacity <= UINT32_MAX && !__builtin_mul_overflow(capacity, (r->columns - 1) * sizeof(float), &bytes)) {
        float *inputs = realloc(r->inputs, bytes);
        if (inputs)
            r->inputs = inputs;
        void *targets = inputs ? realloc(r->targets, capacity * sizeof(int64_t)) : NULL;
        if (targets) {
            r->targets = targets;
            r->capacity = capacity;
            return TALLY_OK;
        }
    }
    return tally_fail(r->err, TALLY_ENOMEM, "%s: no memory for more than %" PRIu64 " samples of %zu numbers", r->name,
                      r->rows, r->columns - 1);
}

static tally_status read_target(struct reader *r, size_t line, size_t column, const struct field *field, double value)
{
    if (r->wish->classes) {
        if (value != floor(value) || fabs(value) > CLASS_MAX)
            return bad_field(r, line, column, field, "a class index, an integer");
        if (!r->wish->wish.probe)
            ((int64_t *)r->targets)[r->rows] = (int64_t)value;
    } else if (!r->wish->wish.probe) {
        ((float *)r->targets)[r->rows] = (float)value;
    }
    return TALLY_OK;
}

static tally_status read_row(struct reader *r)
{
    struct field field = {0};
    size_t line = r->line;
    float *input = r->inputs ? r->inputs + r->rows * (r->columns - 1) : NULL;
    for (size_t column = 0; !field.last; column++) {
        tally_status status = next_field(r, &field);
        if (status != TALLY_OK)
            return status;
        if (column == 0 && field.last && field.bytes == 0)
            return tally_fail(r->err, TALLY_EINVAL, "%s:%zu:1: an empty line, expected %zu fields", r->name, line,
                              r->columns);
        if (field.last != (column + 1 == r->columns))
            return tally_fail(r->err, TALLY_EINVAL, "%s:%zu:%zu: the line has %s %zu fields, expected %zu", r->name,
                              line, field.column, field.last ? "only" : "more than", column + 1, r->columns);
        double value;
        if (!number_text_parse(field.text, field.bytes, &value))
            return bad_field(r, line, column, &field, "a number");
        if (!isfinite((float)value))
            return bad_field(r, line, column, &field, "a number within float32's range");
        if (column == r->target)
            status = read_target(r, line, column, &field, value);
        else if (input)
            *input++ = (float)value;
        if (status != TALLY_OK)
            return status;
    }
    r->rows++;
    return TALLY_OK;
}

static tally_status read_rows(struct reader *r)
{
    const struct data_wish *wish = &r->wish->wish;
    while (!at_end(r) && (wish->limit == 0 || r->rows < wish->limit)) {
        tally_status status = TALLY_OK;
        if (!wish->probe && r->rows == r->capacity)
            status = make_room(r);
        if (status == TALLY_OK && r->rows == UINT32_MAX)
            status = tally_fail(r->err, TALLY_EINVAL, "%s: has more than %" PRIu32 " samples", r->name, UINT32_MAX);
        if (status == TALLY_OK)
            status = read_row(r);
        if (status != TALLY_OK)
            return status;
    }
    return TALLY_OK;
}

static tally_status begin(struct reader *r, const unsigned char *text, size_t bytes)
{
    if (bytes >= 2 && ((text[0] == 0xff && text[1] == 0xfe) || (text[0] == 0xfe && text[1] == 0xff)))
        return tally_fail(r->err, TALLY_EINVAL, "%s: is UTF-16 text, expected UTF-8 or ASCII", r->name);
    if (bytes >= 3 && text[0] == 0xef && text[1] == 0xbb && text[2] == 0xbf)
        r->at = r->line_start = text + 3;
    if (at_end(r))
        return tally_fail(r->err, TALLY_EINVAL, "%s: is empty, expected %s", r->name,
                          r->wish->header ? "a header and a line a sample" : "a line a sample");
    return read_first_line(r);
}

static tally_status finish(struct reader *r, struct data_array *ret_inputs, struct data_array *ret_targets)
{
    struct data_array inputs = {.type = DATA_F32, .ndim = 2, .dim = {r->rows, r->columns - 1}, .owned = r->inputs};
    struct data_array targets = {
        .type = r->wish->classes ? DATA_I64 : DATA_F32, .ndim = 2, .dim = {r->rows, 1}, .owned = r->targets};
    uint64_t data_bytes;
    if (r->rows == 0)
        return tally_fail(r->err, TALLY_EINVAL, "%s: has a header and no samples", r->name);
    tally_status status = data_array_measure(&inputs, r->name, &r->wish->wish, &data_bytes, r->err);
    if (status == TALLY_OK)
        status = data_array_measure(&targets, r->name, &r->wish->wish, &data_bytes, r->err);
    if (status != TALLY_OK)
        return status;
    inputs.data = inputs.owned;
    targets.data = targets.owned;
    *ret_inputs = inputs;
    *ret_targets = targets;
    return TALLY_OK;
}

tally_status data_csv_parse(const char *name, const unsigned char *text, size_t bytes, const struct csv_wish *wish,
                            struct data_array *ret_inputs, struct data_array *ret_targets, struct tally_error *err)
{
    /* An empty file has no text at all. */
    static const unsigned char nothing[1];
    if (bytes == 0)
        text = nothing;
    struct reader r = {
        .name = name, .at = text, .line_start = text, .end = text + bytes, .line = 1, .wish = wish, .err = err};
    tally_status status = begin(&r, text, bytes);
    if (status == TALLY_OK)
        status = read_rows(&r);
    if (status == TALLY_OK)
        status = finish(&r, ret_inputs, ret_targets);
    if (status != TALLY_OK) {
        free(r.inputs);
        free(r.targets);
    }
    return status;
}
