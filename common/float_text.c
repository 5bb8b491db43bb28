#include "common/float_text.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static size_t special(double value, char *text)
{
    const char *word = isnan(value) ? "nan" : value > 0 ? "inf" : "-inf";
    size_t n = strlen(word);
    memcpy(text, word, n + 1);
    return n;
}

size_t float_text(float value, char text[FLOAT_TEXT_BYTES])
{
    if (!isfinite(value))
        return special((double)value, text);
    int n = 0;
    for (int digits = 1; digits <= 9; digits++) {
        n = snprintf(text, FLOAT_TEXT_BYTES, "%.*g", digits, (double)value);
        if (strtof(text, NULL) == value)
            break;
    }
    return (size_t)n;
}

size_t double_text(double value, char text[FLOAT_TEXT_BYTES])
{
    if (!isfinite(value))
        return special(value, text);
    /* 15 digits are enough for most numbers that people write: then fewer may do. Else 16 or 17. */
    int n = snprintf(text, FLOAT_TEXT_BYTES, "%.15g", value);
    int first = strtod(text, NULL) == value ? 1 : 16;
    for (int digits = first; digits <= 17; digits++) {
        n = snprintf(text, FLOAT_TEXT_BYTES, "%.*g", digits, value);
        if (strtod(text, NULL) == value)
            break;
    }
    return (size_t)n;
}
