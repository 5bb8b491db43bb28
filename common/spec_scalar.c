#include "common/spec_scalar.h"

#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#define HINT_TEXT_BYTES 64

enum scalar_problem scalar_integer(const char *text, bool *ret_negative, uint64_t *ret_magnitude)
{
    bool negative = *text == '-';
    if (*text == '-' || *text == '+')
        text++;
    if (!isdigit((unsigned char)*text) || (text[0] == '0' && text[1] != '\0'))
        return SCALAR_WRONG;
    uint64_t magnitude = 0;
    bool overflow = false;
    for (; isdigit((unsigned char)*text); text++) {
        uint64_t digit = (uint64_t)(*text - '0');
        overflow = overflow || __builtin_mul_overflow(magnitude, 10, &magnitude) ||
                   __builtin_add_overflow(magnitude, digit, &magnitude);
    }
    if (*text != '\0')
        return SCALAR_WRONG;
    if (overflow)
        return SCALAR_TOO_LARGE;
    *ret_negative = negative && magnitude > 0;
    *ret_magnitude = magnitude;
    return SCALAR_OK;
}

static const char *skip_digits(const char *text)
{
    while (isdigit((unsigned char)*text))
        text++;
    return text;
}

static bool is_decimal(const char *text)
{
    if (*text == '-' || *text == '+')
        text++;
    const char *end = skip_digits(text);
    size_t digits = (size_t)(end - text);
    if (*end == '.') {
        const char *fraction = end + 1;
        end = skip_digits(fraction);
        digits += (size_t)(end - fraction);
    }
    if (digits == 0)
        return false;
    if (*end == 'e' || *end == 'E') {
        end++;
        if (*end == '-' || *end == '+')
            end++;
        const char *exponent = end;
        end = skip_digits(exponent);
        if (end == exponent)
            return false;
    }
    return *end == '\0';
}

enum scalar_problem scalar_double(const char *text, double *ret_value)
{
    if (!is_decimal(text))
        return SCALAR_WRONG;
    double value = strtod(text, NULL);
    if (!isfinite(value))
        return SCALAR_TOO_LARGE;
    *ret_value = value;
    return SCALAR_OK;
}

bool scalar_bool(const char *text, bool *ret_value)
{
    bool is_true = strcmp(text, "true") == 0;
    if (!is_true && strcmp(text, "false") != 0)
        return false;
    *ret_value = is_true;
    return true;
}

/* Digits grouped by '_': 1_000. */
static bool without_groups(const char *text, char *plain)
{
    size_t n = 0;
    bool grouped = false;
    for (; *text; text++) {
        if (*text == '_') {
            grouped = true;
            continue;
        }
        if (n + 1 == HINT_TEXT_BYTES)
            return false;
        plain[n++] = *text;
    }
    plain[n] = '\0';
    return grouped;
}

void scalar_integer_hint(const char *text, char *hint, size_t hint_bytes)
{
    hint[0] = '\0';
    char plain[HINT_TEXT_BYTES];
    bool negative;
    uint64_t magnitude;
    double value;
    if (without_groups(text, plain)) {
        if (scalar_integer(plain, &negative, &magnitude) == SCALAR_OK)
            snprintf(hint, hint_bytes, "%s", plain);
        return;
    }
    /* 64.0, 1e3, 007 */
    if (scalar_double(text, &value) == SCALAR_OK) {
        if (fabs(value) < 0x1p53 && floor(value) == value)
            snprintf(hint, hint_bytes, "%.0f", value + 0.0);
        return;
    }
    if (text[0] == '0' && (text[1] == 'x' || text[1] == 'o' || text[1] == 'b')) {
        int base = text[1] == 'x' ? 16 : text[1] == 'o' ? 8 : 2;
        char *end = NULL;
        errno = 0;
        magnitude = strtoull(text + 2, &end, base);
        if (isalnum((unsigned char)text[2]) && *end == '\0' && errno == 0)
            snprintf(hint, hint_bytes, "%" PRIu64, magnitude);
    }
}

void scalar_double_hint(const char *text, char *hint, size_t hint_bytes)
{
    char plain[HINT_TEXT_BYTES];
    hint[0] = '\0';
    if (without_groups(text, plain) && is_decimal(plain))
        snprintf(hint, hint_bytes, "%s", plain);
}

const char *scalar_bool_hint(const char *text)
{
    static const char *const yes[] = {"true", "yes", "on", "y", "1"};
    static const char *const no[] = {"false", "no", "off", "n", "0"};
    for (size_t i = 0; i < sizeof yes / sizeof yes[0]; i++) {
        if (strcasecmp(text, yes[i]) == 0)
            return "true";
        if (strcasecmp(text, no[i]) == 0)
            return "false";
    }
    return "";
}
