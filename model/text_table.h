#ifndef MODEL_TEXT_TABLE_H
#define MODEL_TEXT_TABLE_H
/* Text in columns that are as wide as their widest cell. */
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "common/error.h"

#define TEXT_TABLE_COLUMNS_MAX 12
#define TEXT_TABLE_CELL_MAX 120

struct text_table;

/* heads: the first row. A column whose head begins with '>' (not printed) is flushed right. NULL: no memory. */
struct text_table *text_table_new(const char *const *heads, size_t columns);
/* Accepts NULL. */
void text_table_free(struct text_table *table);
/* Begins a row. What cannot be kept for want of memory is told by text_table_print. */
void text_table_row(struct text_table *table);
/* The next cell of the row, cut to TEXT_TABLE_CELL_MAX. */
void text_table_cell(struct text_table *table, const char *format, ...) __attribute__((format(printf, 2, 3)));
tally_status text_table_print(const struct text_table *table, FILE *out, struct tally_error *err);

/* 1234567 as "1,234,567". Returns text. */
const char *count_text(unsigned long long count, char *text, size_t size);
/* 1536 as "1.5 KiB", in at most four digits. Returns text. */
const char *bytes_text(unsigned long long bytes, char *text, size_t size);
#endif
