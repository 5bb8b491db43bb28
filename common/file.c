#include "common/file.h"

#include <errno.h>
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

/* Opens for reading and makes sure that it is a regular file. */
static tally_status open_regular(const char *path, int *ret_fd, size_t *ret_bytes, struct tally_error *err)
{
    /* A FIFO would block in open without O_NONBLOCK; for regular files it means nothing. */
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return tally_fail_errno(err, "cannot open %s", path);
    struct stat info;
    if (fstat(fd, &info) < 0) {
        tally_status status = tally_fail_errno(err, "cannot look at %s", path);
        close(fd);
        return status;
    }
    if (!S_ISREG(info.st_mode)) {
        close(fd);
        return tally_fail(err, TALLY_EINVAL, "%s is %s, expected a file", path,
                          S_ISDIR(info.st_mode) ? "a folder" : "no regular file");
    }
    *ret_fd = fd;
    *ret_bytes = (size_t)info.st_size;
    return TALLY_OK;
}

/* Reads until the end or until max is full. */
static tally_status read_up_to(int fd, const char *path, char *data, size_t max, size_t *ret_bytes,
                               struct tally_error *err)
{
    size_t bytes = 0;
    while (bytes < max) {
        ssize_t n = read(fd, data + bytes, max - bytes);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return tally_fail_errno(err, "cannot read %s", path);
        if (n == 0)
            break;
        bytes += (size_t)n;
    }
    *ret_bytes = bytes;
    return TALLY_OK;
}

tally_status file_read(const char *path, size_t max_bytes, char **ret_data, size_t *ret_bytes, struct tally_error *err)
{
    int fd = -1;
    size_t size = 0;
    tally_status status = open_regular(path, &fd, &size, err);
    if (status != TALLY_OK)
        return status;
    char *data = NULL;
    if (size > max_bytes) {
        status = tally_fail(err, TALLY_ENOMEM, "%s has %zu bytes, at most %zu are read", path, size, max_bytes);
        goto out;
    }
    data = malloc(size + 2);
    if (!data) {
        status = tally_fail(err, TALLY_ENOMEM, "no memory for the %zu bytes of %s", size, path);
        goto out;
    }
    size_t bytes = 0;
    status = read_up_to(fd, path, data, size + 1, &bytes, err);
    if (status != TALLY_OK)
        goto out;
    if (bytes > size) {
        status = tally_fail(err, TALLY_EIO, "%s grew while it was read", path);
        goto out;
    }
    data[bytes] = '\0';
    *ret_data = data;
    *ret_bytes = bytes;
    data = NULL;
out:
    free(data);
    close(fd);
    return status;
}

struct file_atomic {
    int fd;
    char *path;
    char *temporary; /* NULL once it is renamed or was never made */
};

tally_status file_atomic_open(const char *path, mode_t mode, struct file_atomic **ret_f, struct tally_error *err)
{
    static const char suffix[] = ".tmp-XXXXXX";
    size_t length = strlen(path);
    if (length == 0 || path[length - 1] == '/')
        return tally_fail(err, TALLY_EINVAL, "'%s' is no file's path", path);
    struct file_atomic *f = calloc(1, sizeof *f);
    if (!f)
        return tally_fail(err, TALLY_ENOMEM, "no memory to write %s", path);
    f->fd = -1;
    f->path = strdup(path);
    char *name = malloc(length + sizeof suffix);
    if (!f->path || !name) {
        free(name);
        file_atomic_free(f);
        return tally_fail(err, TALLY_ENOMEM, "no memory to write %s", path);
    }
    memcpy(name, path, length);
    memcpy(name + length, suffix, sizeof suffix);
    f->fd = mkostemp(name, O_CLOEXEC);
    if (f->fd < 0) {
        tally_status status = tally_fail_errno(err, "cannot make a file beside %s", path);
        free(name);
        file_atomic_free(f);
        return status;
    }
    f->temporary = name;
    if (fchmod(f->fd, mode) < 0) {
        tally_status status = tally_fail_errno(err, "cannot set the mode of %s", path);
        file_atomic_free(f);
        return status;
    }
    *ret_f = f;
    return TALLY_OK;
}

tally_status file_atomic_write(struct file_atomic *f, const void *data, size_t bytes, struct tally_error *err)
{
    const unsigned char *from = data;
    while (bytes > 0) {
        /* Linux writes at most 2 GiB - 4 KiB at once. */
        ssize_t n = write(f->fd, from, bytes < ((size_t)1 << 30) ? bytes : (size_t)1 << 30);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return tally_fail_errno(err, "cannot write %s", f->path);
        from += n;
        bytes -= (size_t)n;
    }
    return TALLY_OK;
}

/* So that the new name survives a power cut. */
static tally_status sync_folder_of(const char *path, struct tally_error *err)
{
    char *folder = path_dirname(path);
    if (!folder)
        return tally_fail(err, TALLY_ENOMEM, "no memory to write %s", path);
    tally_status status = TALLY_OK;
    int fd = open(folder, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    /* Some file systems cannot sync a folder and say EINVAL: there is nothing more to do there. */
    if (fd < 0 || (fsync(fd) < 0 && errno != EINVAL))
        status = tally_fail_errno(err, "cannot sync the folder %s", folder);
    if (fd >= 0)
        close(fd);
    free(folder);
    return status;
}

tally_status file_atomic_commit(struct file_atomic *f, struct tally_error *err)
{
    if (!f->temporary)
        return tally_fail(err, TALLY_EINTERNAL, "%s was committed before", f->path);
    if (fsync(f->fd) < 0)
        return tally_fail_errno(err, "cannot sync %s", f->path);
    int closed = close(f->fd);
    f->fd = -1;
    if (closed < 0)
        return tally_fail_errno(err, "cannot close %s", f->path);
    if (rename(f->temporary, f->path) < 0)
        return tally_fail_errno(err, "cannot put %s in its place", f->path);
    free(f->temporary);
    f->temporary = NULL;
    return sync_folder_of(f->path, err);
}

void file_atomic_free(struct file_atomic *f)
{
    if (!f)
        return;
    if (f->fd >= 0)
        close(f->fd);
    if (f->temporary)
        unlink(f->temporary);
    free(f->temporary);
    free(f->path);
    free(f);
}

tally_status file_write_atomic(const char *path, const void *data, size_t bytes, mode_t mode, struct tally_error *err)
{
    struct file_atomic *f = NULL;
    tally_status status = file_atomic_open(path, mode, &f, err);
    if (status == TALLY_OK)
        status = file_atomic_write(f, data, bytes, err);
    if (status == TALLY_OK)
        status = file_atomic_commit(f, err);
    file_atomic_free(f);
    return status;
}

tally_status file_map_open(const char *path, struct file_map *ret_map, struct tally_error *err)
{
    int fd = -1;
    size_t bytes = 0;
    tally_status status = open_regular(path, &fd, &bytes, err);
    if (status != TALLY_OK)
        return status;
    void *data = NULL;
    if (bytes > 0) {
        data = mmap(NULL, bytes, PROT_READ, MAP_PRIVATE, fd, 0);
        if (data == MAP_FAILED)
            status = tally_fail_errno(err, "cannot map %s", path);
    }
    close(fd);
    if (status != TALLY_OK)
        return status;
    ret_map->data = data;
    ret_map->bytes = bytes;
    return TALLY_OK;
}

void file_map_close(struct file_map *map)
{
    if (map->data)
        munmap((void *)(uintptr_t)map->data, map->bytes);
    map->data = NULL;
    map->bytes = 0;
}

static int remove_entry(const char *path, const struct stat *st, int type, struct FTW *ftw)
{
    (void)st;
    (void)type;
    (void)ftw;
    remove(path);
    return 0;
}

void file_remove_tree(const char *path)
{
    nftw(path, remove_entry, 16, FTW_DEPTH | FTW_PHYS);
}

bool file_guard_standard(void)
{
    for (int fd = 0; fd <= 2; fd++) {
        /* The lowest free number is the one that is missing. */
        if (fcntl(fd, F_GETFD) < 0 && errno == EBADF && open("/dev/null", fd == 0 ? O_WRONLY : O_RDONLY) < 0)
            return false;
    }
    return true;
}

static tally_status make_one_dir(const char *path, mode_t mode, struct tally_error *err)
{
    if (mkdir(path, mode) == 0)
        return TALLY_OK;
    int saved = errno;
    struct stat info;
    if (stat(path, &info) == 0) {
        if (S_ISDIR(info.st_mode))
            return TALLY_OK;
        return tally_fail(err, TALLY_EEXIST, "cannot make the folder %s: a file of this name is there", path);
    }
    errno = saved;
    return tally_fail_errno(err, "cannot make the folder %s", path);
}

tally_status file_make_dirs(const char *path, mode_t mode, struct tally_error *err)
{
    if (path[0] == '\0')
        return tally_fail(err, TALLY_EINVAL, "cannot make a folder without a name");
    char *steps = strdup(path);
    if (!steps)
        return tally_fail(err, TALLY_ENOMEM, "no memory to make the folder %s", path);
    tally_status status = TALLY_OK;
    for (char *slash = strchr(steps + 1, '/'); slash && status == TALLY_OK; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        status = make_one_dir(steps, mode, err);
        *slash = '/';
    }
    if (status == TALLY_OK)
        status = make_one_dir(steps, mode, err);
    free(steps);
    return status;
}

static char *concat(const char *a, size_t a_bytes, const char *middle, const char *b)
{
    size_t middle_bytes = strlen(middle);
    size_t b_bytes = strlen(b);
    char *text = malloc(a_bytes + middle_bytes + b_bytes + 1);
    if (!text)
        return NULL;
    memcpy(text, a, a_bytes);
    memcpy(text + a_bytes, middle, middle_bytes);
    memcpy(text + a_bytes + middle_bytes, b, b_bytes + 1);
    return text;
}

char *path_join(const char *a, const char *b)
{
    size_t n = strlen(a);
    if (b[0] == '/' || n == 0)
        return strdup(b);
    return concat(a, n, a[n - 1] == '/' ? "" : "/", b);
}

char *path_dirname(const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    while (n > 0 && path[n - 1] != '/')
        n--;
    if (n == 0)
        return strdup(".");
    while (n > 1 && path[n - 1] == '/')
        n--;
    return strndup(path, n);
}

const char *path_basename(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* Takes out empty and "." steps of an absolute path, in place. */
static void tidy(char *path)
{
    char *to = path;
    const char *from = path;
    while (*from) {
        while (*from == '/')
            from++;
        size_t n = strcspn(from, "/");
        if (n > 0 && !(n == 1 && from[0] == '.')) {
            *to++ = '/';
            memmove(to, from, n);
            to += n;
        }
        from += n;
    }
    if (to == path)
        *to++ = '/';
    *to = '\0';
}

char *path_absolute(const char *base, const char *path)
{
    char *joined = base ? path_join(base, path) : strdup(path);
    if (!joined)
        return NULL;
    if (joined[0] != '/') {
        char here[PATH_MAX];
        char *whole = getcwd(here, sizeof here) ? path_join(here, joined) : NULL;
        free(joined);
        joined = whole;
    }
    if (joined)
        tidy(joined);
    return joined;
}
