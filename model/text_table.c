#include "model/text_table.h"

#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

struct text_table {
    size_t columns, rows, capacity;
    bool right[TEXT_TABLE_COLUMNS_MAX], failed;
    size_t next; /* cell of the last row */
    char (*cells)[TEXT_TABLE_CELL_MAX + 1];
};

struct text_table *text_table_new(const char *const *heads, size_t columns)
{
    struct text_table *table = columns <= TEXT_TABLE_COLUMNS_MAX ? calloc(1, sizeof *table) : NULL;
    if (!table)
        return NULL;
    table->columns = columns;
    text_table_row(table);
    for (size_t i = 0; i < columns; i++) {
        table->right[i] = heads[i][0] == '>';
        text_table_cell(table, "%s", heads[i] + table->right[i]);
    }
    return table;
}

void text_table_free(struct text_table *table)
{
    if (!table)
        return;
    free(table->cells);
    free(table);
}

void text_table_row(struct text_table *table)
{
    if (table->rows == table->capacity) {
        size_t capacity = table->capacity ? 2 * table->capacity : 16;
        void *cells = reallocarray(table->cells, capacity * table->columns, sizeof *table->cells);
        if (!cells) {
            table->failed = true;
            return;
        }
        table->cells = cells;
        table->capacity = capacity;
    }
    for (size_t i = 0; i < table->columns; i++)
        table->cells[table->rows * table->columns + i][0] = '\0';
    table->rows++;
    table->next = 0;
}

void text_table_cell(struct text_table *table, const char *format, ...)
{
    if (table->failed || table->next == table->columns)
        return;
    va_list args;
    va_start(args, format);
    vsnprintf(table->cells[(table->rows - 1) * table->columns + table->next++], TEXT_TABLE_CELL_MAX + 1, format, args);
    va_end(args);
}

tally_status text_table_print(const struct text_table *table, FILE *out, struct tally_error *err)
{
    size_t width[TEXT_TABLE_COLUMNS_MAX] = {0};
    if (!table || table->failed)
        return tally_fail(err, TALLY_ENOMEM, "out of memory for a table");
    for (size_t i = 0; i < table->rows * table->columns; i++) {
        size_t length = strlen(table->cells[i]), *widest = &width[i % table->columns];
        *widest = length > *widest ? length : *widest;
    }
    for (size_t r = 0; r < table->rows; r++) {
        size_t blanks = 0; /* not printed at a line's end */
        for (size_t c = 0; c < table->columns; c++) {
            const char *cell = table->cells[r * table->columns + c];
            size_t length = strlen(cell), pad = width[c] - length;
            blanks += table->right[c] ? pad : 0;
            if (length > 0) {
                fprintf(out, "%*s%s", (int)blanks, "", cell);
                blanks = 0;
            }
            blanks += (table->right[c] ? 0 : pad) + 2;
        }
        fputc('\n', out);
    }
    return TALLY_OK;
}

const char *count_text(unsigned long long count, char *text, size_t size)
{
    char digits[32];
    int n = snprintf(digits, sizeof digits, "%llu", count);
    size_t used = 0;
    for (int i = 0; i < n && used + 2 < size; i++) {
        if (i > 0 && (n - i) % 3 == 0)
            text[used++] = ',';
        text[used++] = digits[i];
    }
    text[used] = '\0';
    return text;
}

const char *bytes_text(unsigned long long bytes, char *text, size_t size)
{
    static const char *const units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double value = (double)bytes;
    size_t unit = 0;
    while (value >= 1023.95 && unit + 1 < sizeof units / sizeof *units) {
        value /= 1024;
        unit++;
    }
    snprintf(text, size, unit == 0 || value >= 99.95 ? "%.0f %s" : "%.1f %s", value, units[unit]);
    return text;
}
