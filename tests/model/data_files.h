#ifndef TESTS_MODEL_DATA_FILES_H
#define TESTS_MODEL_DATA_FILES_H
/* For the tests of data sets: files in the test's own folder. Include behind cmocka.h. */
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <zlib.h>

#include "common/error.h"

struct bytes {
    size_t n;
    unsigned char data[4096];
};

static inline void put(struct bytes *b, const void *data, size_t n)
{
    assert_true(b->n + n <= sizeof(b->data));
    memcpy(b->data + b->n, data, n);
    b->n += n;
}

static inline void put_text(struct bytes *b, const char *text)
{
    put(b, text, strlen(text));
}

/* An absolute path; valid until the 8th call from here. */
static inline const char *data_path(const char *name)
{
    static char path[8][1024];
    static size_t next;
    const char *folder = getenv("TEST_TMPDIR");
    char *result = path[next++ % 8];
    snprintf(result, sizeof(path[0]), "%s/%s", folder && folder[0] == '/' ? folder : "/tmp", name);
    return result;
}

static inline void write_data(const char *path, const void *data, size_t n)
{
    FILE *f = fopen(path, "wb");
    assert_non_null(f);
    assert_int_equal(fwrite(data, 1, n, f), n);
    assert_int_equal(fclose(f), 0);
}

static inline void write_bytes(const char *path, const struct bytes *b)
{
    write_data(path, b->data, b->n);
}

static inline void write_gzip(const char *path, const char *mode, const void *data, size_t n)
{
    gzFile f = gzopen(path, mode);
    assert_non_null(f);
    assert_int_equal(gzwrite(f, data, (unsigned)n), (int)n);
    assert_int_equal(gzclose(f), Z_OK);
}

/* The sentence that a refusal must contain, and that of a file which was accepted by mistake. */
static inline void assert_refused(tally_status status, tally_status expected, const struct tally_error *err,
                                  const char *part)
{
    assert_int_equal(status, expected);
    if (!strstr(err->message, part))
        fail_msg("the message is \"%s\", expected \"%s\" in it", err->message, part);
}
#endif
