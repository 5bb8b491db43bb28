#include "model/number_text.h"

#include <locale.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define TEXT_MAX 512

struct decimal {
    bool negative, exact; /* exact: every digit is in mantissa */
    uint64_t mantissa;
    int exponent; /* of ten */
};

static bool is_digit(const unsigned char *at, const unsigned char *end)
{
    return at < end && *at >= '0' && *at <= '9';
}

static void add_digit(struct decimal *d, unsigned char digit)
{
    if (d->mantissa < UINT64_MAX / 10 - 1)
        d->mantissa = d->mantissa * 10 + (uint64_t)(digit - '0');
    else
        d->exact = false;
}

/* False where the text is no number. */
static bool scan(const unsigned char *at, const unsigned char *end, struct decimal *d)
{
    *d = (struct decimal){.exact = true};
    if (at < end && (*at == '+' || *at == '-'))
        d->negative = *at++ == '-';
    const unsigned char *first = at;
    size_t digits = 0;
    for (; is_digit(at, end); at++, digits++)
        add_digit(d, *at);
    if (at < end && *at == '.') {
        for (at++; is_digit(at, end); at++, digits++) {
            add_digit(d, *at);
            d->exponent--;
        }
    }
    if (digits == 0 || first == end)
        return false;
    if (at < end && (*at == 'e' || *at == 'E')) {
        at++;
        bool negative = at < end && *at == '-';
        if (at < end && (*at == '+' || *at == '-'))
            at++;
        if (!is_digit(at, end))
            return false;
        int value = 0;
        for (; is_digit(at, end); at++)
            value = value < 100000 ? value * 10 + (*at - '0') : value;
        d->exponent += negative ? -value : value;
    }
    return at == end;
}

bool number_text_parse(const unsigned char *text, size_t bytes, double *ret_value)
{
    /* Powers of ten that are exact in a double: one rounding makes the product or quotient right (Clinger 1990). */
    static const double power[] = {1e0,  1e1,  1e2,  1e3,  1e4,  1e5,  1e6,  1e7,  1e8,  1e9,  1e10, 1e11,
                                   1e12, 1e13, 1e14, 1e15, 1e16, 1e17, 1e18, 1e19, 1e20, 1e21, 1e22};
    struct decimal d;
    if (bytes > TEXT_MAX || !scan(text, text + bytes, &d))
        return false;
    if (d.exact && d.mantissa <= (uint64_t)1 << 53 && d.exponent >= -22 && d.exponent <= 22) {
        double value = (double)d.mantissa;
        value = d.exponent < 0 ? value / power[-d.exponent] : value * power[d.exponent];
        *ret_value = d.negative ? -value : value;
        return true;
    }
    char copy[TEXT_MAX + 1];
    memcpy(copy, text, bytes);
    copy[bytes] = '\0';
    locale_t c_locale = newlocale(LC_NUMERIC_MASK, "C", (locale_t)0);
    if (!c_locale)
        return false;
    *ret_value = strtod_l(copy, NULL, c_locale);
    freelocale(c_locale);
    return true;
}
