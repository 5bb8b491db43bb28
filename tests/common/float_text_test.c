#include "common/float_text.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static void check_double(double value, const char *expected)
{
    char text[FLOAT_TEXT_BYTES];
    assert_int_equal(double_text(value, text), strlen(expected));
    assert_string_equal(text, expected);
}

static void check_float(float value, const char *expected)
{
    char text[FLOAT_TEXT_BYTES];
    assert_int_equal(float_text(value, text), strlen(expected));
    assert_string_equal(text, expected);
}

static void shortest(void **state)
{
    (void)state;
    check_double(0.1, "0.1");
    check_double(1, "1");
    check_double(-0.0, "-0");
    check_double(1e-5, "1e-05");
    check_double(0.1 + 0.2, "0.30000000000000004");
    check_double(1.0 / 3, "0.3333333333333333");
    check_double(5e-324, "5e-324");
    check_double(DBL_MAX, "1.7976931348623157e+308");
    check_double(-DBL_MIN, "-2.2250738585072014e-308");
    check_float(0.1f, "0.1");
    check_float(0.353f, "0.353");
    check_float(16777216.0f, "16777216");
    check_float(1e-45f, "1e-45");
    check_float(FLT_MAX, "3.4028235e+38");
    check_float(1.0f / 3, "0.33333334");
}

static void no_numbers(void **state)
{
    (void)state;
    check_double(NAN, "nan");
    check_double(-(double)NAN, "nan");
    check_double(INFINITY, "inf");
    check_double(-INFINITY, "-inf");
    check_float(-INFINITY, "-inf");
}

/* Random bit patterns read back to the same bits. */
static void same_bits(void **state)
{
    (void)state;
    uint64_t x = 88172645463325252u;
    for (int i = 0; i < 20000; i++) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        char text[FLOAT_TEXT_BYTES];
        double d;
        float f;
        memcpy(&d, &x, sizeof d);
        memcpy(&f, &x, sizeof f);
        if (isfinite(d)) {
            assert_true(double_text(d, text) < FLOAT_TEXT_BYTES);
            double back = strtod(text, NULL);
            assert_memory_equal(&back, &d, sizeof d);
        }
        if (isfinite(f)) {
            float_text(f, text);
            float back = strtof(text, NULL);
            assert_memory_equal(&back, &f, sizeof f);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shortest),
        cmocka_unit_test(no_numbers),
        cmocka_unit_test(same_bits),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
