#include "common/error.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

/* What is quoted from files and requests may be anything; a message is one line of UTF-8. */
static void a_message_is_one_line_of_text(void **state)
{
    (void)state;
    static const struct {
        const char *quoted, *message;
    } cases[] = {
        {"plain", "found plain"},
        {"\x1b[31mred\x07", "found  [31mred "},
        {"two\r\nlines", "found two  lines"},
        {"gr\xc3\xb6\xc3\x9f"
         "e \xe2\x82\xac \xf0\x9f\x90\x88",
         "found gr\xc3\xb6\xc3\x9f"
         "e \xe2\x82\xac \xf0\x9f\x90\x88"},
        {"cut \xe2\x82", "found cut ??"},
        {"\xff\xfe\x80 \xc0\xaf \xf5\x80\x80\x80", "found ??? ?? ????"},
        {"\x7f", "found ?"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct tally_error err = {0};
        assert_int_equal(tally_fail(&err, TALLY_EINVAL, "found %s", cases[i].quoted), TALLY_EINVAL);
        assert_string_equal(err.message, cases[i].message);
        tally_fail(&err, TALLY_EINVAL, "wrong");
        assert_int_equal(tally_error_prefix(&err, "found %s", cases[i].quoted), TALLY_EINVAL);
        assert_memory_equal(err.message, cases[i].message, strlen(cases[i].message));
        errno = ENOENT;
        assert_int_equal(tally_fail_errno(&err, "found %s", cases[i].quoted), TALLY_ENOTFOUND);
        assert_memory_equal(err.message, cases[i].message, strlen(cases[i].message));
        assert_string_equal(err.message + strlen(cases[i].message), ": No such file or directory");
    }
}

/* What is cut is cut between characters, or says so. */
static void a_long_message_is_cut(void **state)
{
    (void)state;
    static char text[3 * TALLY_ERROR_MESSAGE_MAX];
    for (size_t i = 0; i + 3 < sizeof text; i += 3)
        memcpy(text + i, "\xe2\x82\xac", 3);
    struct tally_error err = {0};
    tally_fail(&err, TALLY_EINVAL, "%s", text);
    size_t length = strlen(err.message);
    assert_int_equal(length, TALLY_ERROR_MESSAGE_MAX - 1);
    for (size_t i = 0; i < length; i++)
        assert_true(err.message[i] == '?' || err.message[i] == text[i]);
    tally_error_prefix(&err, "%s", text);
    assert_true(strlen(err.message) < TALLY_ERROR_MESSAGE_MAX);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(a_message_is_one_line_of_text),
        cmocka_unit_test(a_long_message_is_cut),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
