#include "model/number_text.h"

#include <locale.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

static bool parse(const char *text, double *value)
{
    /* A copy of the exact size, so that reading beyond it is seen. */
    size_t n = strlen(text);
    unsigned char *copy = malloc(n ? n : 1);
    assert_non_null(copy);
    memcpy(copy, text, n);
    bool ok = number_text_parse(copy, n, value);
    free(copy);
    return ok;
}

static void same_as_strtod(const char *text)
{
    double value, expected = strtod(text, NULL);
    assert_true(parse(text, &value));
    assert_memory_equal(&value, &expected, sizeof(value));
}

static void test_numbers(void **state)
{
    (void)state;
    static const char *const numbers[] = {
        "0",
        "-0",
        "+7",
        "1.",
        ".5",
        "-.5e1",
        "1e0",
        "1E+2",
        "1e-2",
        "007",
        "0.1",
        "1e22",
        "1e23",
        "9007199254740993",
        "9007199254740992e22",
        "123456789012345678901234567890",
        "0.000000000000000000000000000000000000001",
        "1.7976931348623157e308",
        "4.9e-324",
        "2.2250738585072011e-308",
        "1e400",
        "-1e400",
        "1e-400",
        "1e99999999999",
        "0e99999999999",
        "18446744073709551615",
        "18446744073709551616",
        "1844674407370955161.5e-5",
        "0.1000000000000000055511151231257827021181583404541015625",
    };
    for (size_t i = 0; i < sizeof(numbers) / sizeof(numbers[0]); i++)
        same_as_strtod(numbers[i]);
    char text[64];
    srand(5);
    for (int i = 0; i < 20000; i++) {
        uint64_t bits = (uint64_t)rand() << 42 ^ (uint64_t)rand() << 21 ^ (uint64_t)rand();
        double value;
        memcpy(&value, &bits, sizeof(value));
        if (!isfinite(value))
            continue;
        snprintf(text, sizeof(text), "%.*g", 1 + rand() % 18, value);
        same_as_strtod(text);
        snprintf(text, sizeof(text), "%.*f", rand() % 12, (double)rand() / (1 + rand() % 100000));
        same_as_strtod(text);
    }
}

static void test_what_is_none(void **state)
{
    (void)state;
    static const char *const texts[] = {"",     "-",     ".",        "+.",   "e5",    "1e", "1e+", "1.2.3",
                                        "0x10", "nan",   "inf",      "1 ",   " 1",    "1f", "1,5", "--1",
                                        "1e5.", "1_000", "\xc2\xbd", "True", "1e--1", "+-1"};
    double value = 7;
    for (size_t i = 0; i < sizeof(texts) / sizeof(texts[0]); i++)
        assert_false(parse(texts[i], &value));
    assert_true(value == 7);
    char text[600];
    memset(text, '1', sizeof(text));
    text[513] = '\0';
    assert_false(parse(text, &value));
    text[512] = '\0';
    assert_true(parse(text, &value));
}

/* The comma of other countries changes nothing (where such a locale is installed). */
static void test_locale(void **state)
{
    (void)state;
    double value;
    if (!setlocale(LC_ALL, "de_DE.UTF-8") && !setlocale(LC_ALL, "fr_FR.UTF-8"))
        skip();
    assert_true(parse("1.5", &value) && value == 1.5);
    assert_true(parse("1.00000000000000000000001", &value) && value == 1);
    assert_false(parse("1,5", &value));
    setlocale(LC_ALL, "C");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_what_is_none),
        cmocka_unit_test(test_locale),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
