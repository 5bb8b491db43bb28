#include "common/file.h"

#include <dirent.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

/* A folder of the test's own; the current folder while a test runs. */
static char home[256];

static int enter(void **state)
{
    (void)state;
    const char *base = getenv("TEST_TMPDIR");
    snprintf(home, sizeof home, "%s/file_test-XXXXXX", base ? base : "/tmp");
    return mkdtemp(home) && chdir(home) == 0 ? 0 : -1;
}

static size_t files_here(void)
{
    DIR *dir = opendir(".");
    assert_non_null(dir);
    size_t n = 0;
    for (struct dirent *e = readdir(dir); e; e = readdir(dir))
        n += e->d_name[0] != '.' || strlen(e->d_name) > 2;
    closedir(dir);
    return n;
}

static void read_back(void **state)
{
    (void)state;
    char *data = NULL;
    size_t bytes = 0;
    assert_int_equal(file_write_atomic("a", "x\0y", 3, 0600, NULL), TALLY_OK);
    assert_int_equal(file_read("a", 3, &data, &bytes, NULL), TALLY_OK);
    assert_int_equal(bytes, 3);
    assert_memory_equal(data, "x\0y\0", 4);
    free(data);
    struct stat info;
    assert_int_equal(stat("a", &info), 0);
    assert_int_equal(info.st_mode & 0777, 0600);
    assert_int_equal(file_write_atomic("a", "", 0, 0644, NULL), TALLY_OK);
    assert_int_equal(file_read("a", 0, &data, &bytes, NULL), TALLY_OK);
    assert_int_equal(bytes, 0);
    assert_int_equal(data[0], '\0');
    free(data);
    assert_int_equal(files_here(), 1); /* nothing temporary stays */
}

static void refused_reads(void **state)
{
    (void)state;
    char *data = NULL;
    size_t bytes = 7;
    struct tally_error err;
    assert_int_equal(file_write_atomic("long", "12345", 5, 0644, NULL), TALLY_OK);
    assert_int_equal(file_read("long", 4, &data, &bytes, &err), TALLY_ENOMEM);
    assert_string_equal(err.message, "long has 5 bytes, at most 4 are read");
    assert_int_equal(file_read("absent", 4, &data, &bytes, &err), TALLY_ENOTFOUND);
    assert_string_equal(err.message, "cannot open absent: No such file or directory");
    assert_int_equal(file_read(".", 4, &data, &bytes, &err), TALLY_EINVAL);
    assert_string_equal(err.message, ". is a folder, expected a file");
    assert_int_equal(mkfifo("pipe", 0600), 0);
    assert_int_equal(file_read("pipe", 4, &data, &bytes, &err), TALLY_EINVAL);
    assert_string_equal(err.message, "pipe is no regular file, expected a file");
    assert_null(data);
    assert_int_equal(bytes, 7);
    unlink("pipe");
    unlink("long");
}

static void dropped_write_keeps_the_old(void **state)
{
    (void)state;
    struct file_atomic *f = NULL;
    char *data = NULL;
    size_t bytes = 0;
    assert_int_equal(file_write_atomic("kept", "old", 3, 0644, NULL), TALLY_OK);
    size_t before = files_here();
    assert_int_equal(file_atomic_open("kept", 0644, &f, NULL), TALLY_OK);
    assert_int_equal(file_atomic_write(f, "new", 3, NULL), TALLY_OK);
    assert_int_equal(files_here(), before + 1);
    file_atomic_free(f);
    assert_int_equal(files_here(), before);
    assert_int_equal(file_read("kept", 10, &data, &bytes, NULL), TALLY_OK);
    assert_string_equal(data, "old");
    free(data);
    assert_int_equal(file_atomic_open("kept", 0644, &f, NULL), TALLY_OK);
    assert_int_equal(file_atomic_commit(f, NULL), TALLY_OK);
    assert_int_equal(file_atomic_commit(f, NULL), TALLY_EINTERNAL);
    file_atomic_free(f);
    file_atomic_free(NULL);
}

static void refused_writes(void **state)
{
    (void)state;
    struct tally_error err;
    assert_int_equal(file_write_atomic("absent/a", "x", 1, 0644, &err), TALLY_ENOTFOUND);
    assert_string_equal(err.message, "cannot make a file beside absent/a: No such file or directory");
    assert_int_equal(file_write_atomic("a/", "x", 1, 0644, &err), TALLY_EINVAL);
    assert_int_equal(file_write_atomic("", "x", 1, 0644, &err), TALLY_EINVAL);
    assert_int_equal(mkdir("folder", 0755), 0);
    assert_int_equal(file_write_atomic("folder", "x", 1, 0644, &err), TALLY_EIO);
    assert_string_equal(err.message, "cannot put folder in its place: Is a directory");
    rmdir("folder");
}

/* A limit on the file's size fails a write as a full disk does. */
static void full_disk(void **state)
{
    (void)state;
    struct rlimit old;
    struct tally_error err;
    static char data[8192];
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &old), 0);
    struct rlimit small = {4096, old.rlim_max};
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    tally_status status = file_write_atomic("big", data, sizeof data, 0644, &err);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &old), 0);
    assert_int_equal(status, TALLY_EIO);
    assert_string_equal(err.message, "cannot write big: File too large");
    assert_int_not_equal(access("big", F_OK), 0);
}

static void mapping(void **state)
{
    (void)state;
    struct file_map map = {0};
    struct tally_error err;
    assert_int_equal(file_write_atomic("m", "hello", 5, 0644, NULL), TALLY_OK);
    assert_int_equal(file_map_open("m", &map, NULL), TALLY_OK);
    assert_int_equal(map.bytes, 5);
    assert_memory_equal(map.data, "hello", 5);
    file_map_close(&map);
    assert_null(map.data);
    file_map_close(&map);
    assert_int_equal(file_write_atomic("m", "", 0, 0644, NULL), TALLY_OK);
    assert_int_equal(file_map_open("m", &map, NULL), TALLY_OK);
    assert_int_equal(map.bytes, 0);
    file_map_close(&map);
    assert_int_equal(file_map_open("absent", &map, &err), TALLY_ENOTFOUND);
}

static void folders(void **state)
{
    (void)state;
    struct tally_error err;
    assert_int_equal(file_make_dirs("d/e//f/", 0755, NULL), TALLY_OK);
    assert_int_equal(file_make_dirs("d/e/f", 0755, NULL), TALLY_OK);
    assert_int_equal(access("d/e/f", W_OK), 0);
    assert_int_equal(file_write_atomic("d/file", "", 0, 0644, NULL), TALLY_OK);
    assert_int_equal(file_make_dirs("d/file/x", 0755, &err), TALLY_EEXIST);
    assert_string_equal(err.message, "cannot make the folder d/file: a file of this name is there");
    assert_int_equal(file_make_dirs("", 0755, &err), TALLY_EINVAL);
    assert_int_equal(file_make_dirs("/", 0755, &err), TALLY_OK);
}

static void check_text(char *text, const char *expected)
{
    assert_non_null(text);
    assert_string_equal(text, expected);
    free(text);
}

static void paths(void **state)
{
    (void)state;
    check_text(path_join("a", "b"), "a/b");
    check_text(path_join("a/", "b"), "a/b");
    check_text(path_join("a", "/b"), "/b");
    check_text(path_join("", "b"), "b");
    check_text(path_dirname("a/b"), "a");
    check_text(path_dirname("a/b/"), "a");
    check_text(path_dirname("b"), ".");
    check_text(path_dirname("/b"), "/");
    check_text(path_dirname("//b"), "/");
    check_text(path_dirname("/"), "/");
    check_text(path_dirname(""), ".");
    check_text(path_dirname("a//b"), "a");
    assert_string_equal(path_basename("a/b"), "b");
    assert_string_equal(path_basename("b"), "b");
    check_text(path_absolute("/x/./y", "a//b/."), "/x/y/a/b");
    check_text(path_absolute("/x", "/a/../b"), "/a/../b");
    check_text(path_absolute(NULL, "/"), "/");
    check_text(path_absolute("/", "."), "/");
    char here[512];
    assert_non_null(getcwd(here, sizeof here));
    char expected[600];
    snprintf(expected, sizeof expected, "%s/d/a", here);
    check_text(path_absolute("d", "a"), expected);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(read_back),
        cmocka_unit_test(refused_reads),
        cmocka_unit_test(dropped_write_keeps_the_old),
        cmocka_unit_test(refused_writes),
        cmocka_unit_test(full_disk),
        cmocka_unit_test(mapping),
        cmocka_unit_test(folders),
        cmocka_unit_test(paths),
    };
    signal(SIGXFSZ, SIG_IGN);
    return cmocka_run_group_tests(tests, enter, NULL);
}
