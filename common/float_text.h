#ifndef COMMON_FLOAT_TEXT_H
#define COMMON_FLOAT_TEXT_H
/* The shortest decimal text that reads back to the same bits. In the C locale, which Tally's programs never leave. */
#include <stddef.h>

/* "-2.2250738585072014e-308" and a zero. */
#define FLOAT_TEXT_BYTES 32

/*
 * Writes the text and returns its length. Finite values are JSON numbers ("1", "0.1", "1e-05"); others are "nan",
 * "inf", "-inf", which JSON has not: write null there.
 */
size_t float_text(float value, char text[FLOAT_TEXT_BYTES]);
size_t double_text(double value, char text[FLOAT_TEXT_BYTES]);
#endif
