#include "common/sha256.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* FIPS 180-2, appendix B, and the empty message. */
static void known_sums(void **state)
{
    (void)state;
    char hex[SHA256_HEX_BYTES];
    assert_int_equal(sha256_hex("abc", 3, hex, NULL), TALLY_OK);
    assert_string_equal(hex, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    assert_int_equal(sha256_hex(NULL, 0, hex, NULL), TALLY_OK);
    assert_string_equal(hex, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
}

static void in_pieces(void **state)
{
    (void)state;
    static char million[1000000];
    memset(million, 'a', sizeof million);
    struct sha256 *s = NULL;
    assert_int_equal(sha256_new(&s, NULL), TALLY_OK);
    size_t at = 0;
    for (size_t piece = 1; at < sizeof million; piece = piece * 3 + 1) {
        size_t n = piece < sizeof million - at ? piece : sizeof million - at;
        assert_int_equal(sha256_update(s, million + at, n, NULL), TALLY_OK);
        at += n;
    }
    char hex[SHA256_HEX_BYTES];
    assert_int_equal(sha256_final_hex(s, hex, NULL), TALLY_OK);
    assert_string_equal(hex, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
    sha256_free(s);
    sha256_free(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(known_sums),
        cmocka_unit_test(in_pieces),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
