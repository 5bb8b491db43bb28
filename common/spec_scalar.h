#ifndef COMMON_SPEC_SCALAR_H
#define COMMON_SPEC_SCALAR_H
/* From the text of a plain YAML scalar to a number or truth value, and what was probably meant where it is none.
 * Private to common/. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum scalar_problem {
    SCALAR_OK,
    SCALAR_WRONG,    /* no number at all */
    SCALAR_TOO_LARGE /* of magnitude */
};

/* Decimal digits with an optional sign; no leading zeros. */
enum scalar_problem scalar_integer(const char *text, bool *ret_negative, uint64_t *ret_magnitude);
/* Digits with an optional sign, point and exponent; never infinite or NaN. */
enum scalar_problem scalar_double(const char *text, double *ret_value);
bool scalar_bool(const char *text, bool *ret_value);

/* The spelling that the scalar_ function above would take, or "" if the text is no slip that is known. */
void scalar_integer_hint(const char *text, char *hint, size_t hint_bytes);
void scalar_double_hint(const char *text, char *hint, size_t hint_bytes);
const char *scalar_bool_hint(const char *text);
#endif
