#include "common/safetensors.h"

#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cmocka.h>

#include "common/file.h"

static char home[256];

static int enter(void **state)
{
    (void)state;
    const char *base = getenv("TEST_TMPDIR");
    snprintf(home, sizeof home, "%s/safetensors_test-XXXXXX", base ? base : "/tmp");
    return mkdtemp(home) && chdir(home) == 0 ? 0 : -1;
}

/* A file of this header and so many bytes of data: 0, 1, 2 ... The caller frees. */
static unsigned char *make_file(const char *header, size_t data_bytes, size_t *ret_bytes)
{
    size_t header_bytes = strlen(header);
    unsigned char *file = calloc(1, 8 + header_bytes + data_bytes);
    assert_non_null(file);
    for (size_t i = 0; i < 8; i++)
        file[i] = (unsigned char)((uint64_t)header_bytes >> (8 * i));
    memcpy(file + 8, header, header_bytes);
    for (size_t i = 0; i < data_bytes; i++)
        file[8 + header_bytes + i] = (unsigned char)i;
    *ret_bytes = 8 + header_bytes + data_bytes;
    return file;
}

struct bad_header {
    const char *header;
    size_t data_bytes;
    const char *message;
};

static const struct bad_header bad_headers[] = {
    {"", 0, "f: its header does not begin with '{'"},
    {" {}", 0, "f: its header does not begin with '{'"},
    {"[]", 0, "f: its header does not begin with '{'"},
    {"{\"a\":1}", 0, "f: tensor 'a' is no JSON object"},
    {"{\"\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}", 4, "f: a tensor has no name"},
    {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,4]}}", 4, "f: tensor 'a' has no dtype"},
    {"{\"a\":{\"dtype\":\"F31\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
     "f: tensor 'a' has the unknown dtype 'F31'"},
    {"{\"a\":{\"dtype\":\"F32\",\"data_offsets\":[0,4]}}", 4, "f: tensor 'a' has no shape"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", 4,
     "f: tensor 'a': dimension 0 of its shape is no count"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.0],\"data_offsets\":[0,4]}}", 4,
     "f: tensor 'a': dimension 0 of its shape is no count"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", 4,
     "f: tensor 'a' has 9 dimensions, at most 8 are read"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
     "f: tensor 'a' has more elements than 1099511627776"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", 4, "f: tensor 'a' has no data_offsets of two counts"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4,8]}}", 4,
     "f: tensor 'a' has no data_offsets of two counts"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", 4,
     "f: tensor 'a' ends at 0, before it begins at 4"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 4,
     "f: tensor 'a' ends at 8, but the file holds 4 bytes of data"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,4]}}", 4,
     "f: tensor 'a' of shape (1, 2) in F32 needs 8 bytes, its offsets give 4"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":0}}", 4,
     "f: tensor 'a' has the unknown key 'x'"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]},"
     "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[4,12]}}",
     12, "f: tensors 'a' and 'b' overlap"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
     "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[8,12]}}",
     12, "f: 4 bytes before tensor 'b' belong to no tensor"},
    {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 5,
     "f: 1 bytes at its end belong to no tensor"},
    {"{}", 1, "f: 1 bytes at its end belong to no tensor"},
    {"{\"__metadata__\":[]}", 0, "f: __metadata__ is no JSON object"},
    {"{\"__metadata__\":{\"a\":1}}", 0, "f: __metadata__ 'a' is no string"},
};

static void bad_headers_are_refused(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof bad_headers / sizeof bad_headers[0]; i++) {
        size_t bytes = 0;
        struct safetensors *f = NULL;
        struct tally_error err = {0};
        unsigned char *file = make_file(bad_headers[i].header, bad_headers[i].data_bytes, &bytes);
        assert_int_equal(safetensors_open_memory("f", file, bytes, &f, &err), TALLY_EINVAL);
        assert_string_equal(err.message, bad_headers[i].message);
        assert_null(f);
        free(file);
    }
}

/* JSON's own errors: their exact words are jansson's. */
static void bad_json_is_refused(void **state)
{
    (void)state;
    static const char *const headers[] = {
        "{",
        "{}x",
        "{\"a\":{},\"a\":{}}",
        "{\"a\\u0000\":{}}",
        "{\"\xff\":{}}",
        "{\"a\":{\"dtype\":\"F32\",\"shape\":[99999999999999999999],\"data_offsets\":[0,4]}}",
    };
    for (size_t i = 0; i < sizeof headers / sizeof headers[0]; i++) {
        size_t bytes = 0;
        struct safetensors *f = NULL;
        struct tally_error err = {0};
        unsigned char *file = make_file(headers[i], 4, &bytes);
        assert_int_equal(safetensors_open_memory("f", file, bytes, &f, &err), TALLY_EINVAL);
        assert_memory_equal(err.message, "f: its header is no JSON: ", strlen("f: its header is no JSON: "));
        free(file);
    }
}

/* Every way to cut a good file short is refused. */
static void cut_files_are_refused(void **state)
{
    (void)state;
    size_t bytes = 0;
    unsigned char *file = make_file("{\"a\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[0,8]}}", 8, &bytes);
    for (size_t n = 0; n < bytes; n++) {
        struct safetensors *f = NULL;
        /* Memory of exactly n bytes, so that a sanitizer sees the first byte read behind it. */
        unsigned char *cut = malloc(n > 0 ? n : 1);
        assert_non_null(cut);
        memcpy(cut, file, n);
        assert_int_equal(safetensors_open_memory("f", cut, n, &f, NULL), TALLY_EINVAL);
        free(cut);
    }
    struct safetensors *f = NULL;
    assert_int_equal(safetensors_open_memory("f", file, bytes, &f, NULL), TALLY_OK);
    safetensors_close(f);
    struct tally_error err;
    memset(file, 0xff, 8);
    assert_int_equal(safetensors_open_memory("f", file, bytes, &f, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "f: is no safetensors file, or a damaged one: its header would have "
                                     "18446744073709551615 bytes, at most 104857600 are allowed");
    file[7] = 0;
    free(file);
}

static void reads_a_file(void **state)
{
    (void)state;
    size_t bytes = 0;
    unsigned char *file = make_file("{\"b\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[4,12]},"
                                    "\"__metadata__\":{\"format\":\"pt\"},"
                                    "\"e\":{\"dtype\":\"F32\",\"shape\":[0,3],\"data_offsets\":[4,4]},"
                                    "\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}   ",
                                    12, &bytes);
    struct safetensors *f = NULL;
    assert_int_equal(safetensors_open_memory("f", file, bytes, &f, NULL), TALLY_OK);
    assert_int_equal(safetensors_count(f), 3);
    assert_string_equal(safetensors_at(f, 0)->name, "a");
    assert_string_equal(safetensors_at(f, 1)->name, "e");
    assert_string_equal(safetensors_at(f, 2)->name, "b");
    assert_null(safetensors_at(f, 3));
    const struct safetensor *b = safetensors_find(f, "b");
    assert_ptr_equal(b, safetensors_at(f, 2));
    assert_int_equal(b->dtype, SAFETENSORS_I64);
    assert_int_equal(b->bytes, 8);
    assert_int_equal(b->data[0], 4);
    assert_int_equal(safetensors_at(f, 0)->elements, 1);
    assert_int_equal(safetensors_at(f, 1)->elements, 0);
    assert_null(safetensors_find(f, "c"));
    assert_null(safetensors_find(f, "__metadata__"));
    assert_string_equal(safetensors_metadata(f, "format"), "pt");
    assert_null(safetensors_metadata(f, "other"));
    char text[32];
    safetensors_shape_text(safetensors_at(f, 0), text, sizeof text);
    assert_string_equal(text, "()");
    safetensors_shape_text(b, text, sizeof text);
    assert_string_equal(text, "(1,)");
    safetensors_shape_text(safetensors_at(f, 1), text, sizeof text);
    assert_string_equal(text, "(0, 3)");
    safetensors_shape_text(safetensors_at(f, 1), text, 4);
    assert_string_equal(text, "(0,");
    safetensors_close(f);
    safetensors_close(NULL);
    free(file);
}

static const uint64_t shape_w[] = {2, 3};
static const uint64_t shape_b[] = {2};
static const struct safetensors_entry entries[] = {{"fc.weight", 2, shape_w}, {"fc.bias", 1, shape_b}};
static const struct safetensors_string metadata[] = {{"job", "a \"b\""}, {"step", "7"}};
static const float values[] = {1, 2, 3, 4, 5, 6, 7, 8};

static void writes_what_it_reads(void **state)
{
    (void)state;
    struct safetensors_writer *w = NULL;
    struct safetensors *f = NULL;
    assert_int_equal(safetensors_writer_open("w", entries, 2, metadata, 2, &w, NULL), TALLY_OK);
    assert_int_equal(safetensors_writer_write(w, values, 5, NULL), TALLY_OK);
    assert_int_equal(safetensors_writer_write(w, (const char *)values + 5, sizeof values - 5, NULL), TALLY_OK);
    assert_int_not_equal(access("w", F_OK), 0); /* not before it is whole */
    assert_int_equal(safetensors_writer_commit(w, NULL), TALLY_OK);
    safetensors_writer_free(w);
    assert_int_equal(safetensors_open("w", &f, NULL), TALLY_OK);
    assert_int_equal(safetensors_count(f), 2);
    const struct safetensor *t = safetensors_at(f, 0);
    assert_string_equal(t->name, "fc.weight");
    assert_int_equal(t->dims, 2);
    assert_int_equal(t->shape[1], 3);
    assert_int_equal((uintptr_t)t->data % 8, 0);
    assert_memory_equal(t->data, values, 24);
    assert_memory_equal(safetensors_find(f, "fc.bias")->data, values + 6, 8);
    assert_string_equal(safetensors_metadata(f, "job"), "a \"b\"");
    assert_string_equal(safetensors_metadata(f, "step"), "7");
    safetensors_close(f);
}

/* The header, byte for byte: metadata first, keys in the order given, spaces up to a multiple of 8. */
static void header_bytes(void **state)
{
    (void)state;
    struct safetensors_writer *w = NULL;
    char *data = NULL;
    size_t bytes = 0;
    assert_int_equal(safetensors_writer_open("h", entries, 2, metadata, 2, &w, NULL), TALLY_OK);
    assert_int_equal(safetensors_writer_write(w, values, sizeof values, NULL), TALLY_OK);
    assert_int_equal(safetensors_writer_commit(w, NULL), TALLY_OK);
    safetensors_writer_free(w);
    assert_int_equal(file_read("h", 1000, &data, &bytes, NULL), TALLY_OK);
    static const char expected[] = "{\"__metadata__\":{\"job\":\"a \\\"b\\\"\",\"step\":\"7\"},"
                                   "\"fc.weight\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,24]},"
                                   "\"fc.bias\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[24,32]}}";
    size_t padded = (sizeof expected - 1 + 7) / 8 * 8;
    assert_int_equal(bytes, 8 + padded + sizeof values);
    assert_int_equal((unsigned char)data[0], padded);
    assert_memory_equal(data + 8, expected, sizeof expected - 1);
    for (size_t i = sizeof expected - 1; i < padded; i++)
        assert_int_equal(data[8 + i], ' ');
    free(data);
}

static void wrong_writes_are_refused(void **state)
{
    (void)state;
    struct safetensors_writer *w = NULL;
    struct tally_error err;
    const struct safetensors_entry twice[] = {entries[0], entries[0]};
    assert_int_equal(safetensors_writer_open("x", twice, 2, NULL, 0, &w, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "x: tensor 'fc.weight' is given twice");
    const uint64_t huge[] = {UINT64_C(1) << 40, 2};
    const struct safetensors_entry too_large = {"big", 2, huge};
    assert_int_equal(safetensors_writer_open("x", &too_large, 1, NULL, 0, &w, &err), TALLY_EINVAL);
    const struct safetensors_entry reserved = {"__metadata__", 1, shape_b};
    assert_int_equal(safetensors_writer_open("x", &reserved, 1, NULL, 0, &w, &err), TALLY_EINVAL);
    const struct safetensors_entry not_utf8 = {"\xff", 1, shape_b};
    assert_int_equal(safetensors_writer_open("x", &not_utf8, 1, NULL, 0, &w, &err), TALLY_EINVAL);
    assert_null(w);
    assert_int_equal(safetensors_writer_open("x", entries, 2, NULL, 0, &w, &err), TALLY_OK);
    assert_int_equal(safetensors_writer_write(w, values, 4, &err), TALLY_OK);
    assert_int_equal(safetensors_writer_commit(w, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "x: 4 of its 32 bytes of data were written");
    assert_int_equal(safetensors_writer_write(w, values, sizeof values, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "x: more data than its tensors hold");
    safetensors_writer_free(w);
    assert_int_not_equal(access("x", F_OK), 0);
}

/* A limit on the file's size fails a write as a full disk does; what stood there stays. */
static void full_disk_keeps_the_old(void **state)
{
    (void)state;
    struct safetensors_writer *w = NULL;
    struct tally_error err;
    struct rlimit old;
    static const float zeros[4096];
    const uint64_t shape[] = {4096};
    const struct safetensors_entry entry = {"t", 1, shape};
    char *data = NULL;
    size_t bytes = 0;
    assert_int_equal(file_write_atomic("full", "old", 3, 0644, NULL), TALLY_OK);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    struct rlimit small = {4096, old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    assert_int_equal(safetensors_writer_open("full", &entry, 1, NULL, 0, &w, &err), TALLY_OK);
    tally_status status = safetensors_writer_write(w, zeros, sizeof zeros, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(status, TALLY_EIO);
    assert_string_equal(err.message, "cannot write full: File too large");
    safetensors_writer_free(w);
    assert_int_equal(file_read("full", 10, &data, &bytes, NULL), TALLY_OK);
    assert_string_equal(data, "old");
    free(data);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(bad_headers_are_refused),  cmocka_unit_test(bad_json_is_refused),
        cmocka_unit_test(cut_files_are_refused),    cmocka_unit_test(reads_a_file),
        cmocka_unit_test(writes_what_it_reads),     cmocka_unit_test(header_bytes),
        cmocka_unit_test(wrong_writes_are_refused), cmocka_unit_test(full_disk_keeps_the_old),
    };
    signal(SIGXFSZ, SIG_IGN);
    return cmocka_run_group_tests(tests, enter, NULL);
}
