#ifndef COMMON_FILE_H
#define COMMON_FILE_H
/* Files and paths. Every error names the path. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#include "common/error.h"

/*
 * The whole of a regular file of at most max_bytes. *ret_data is malloc'd, with a zero byte behind the last one.
 * TALLY_EINVAL: not a regular file; TALLY_ENOMEM: larger than max_bytes.
 */
tally_status file_read(const char *path, size_t max_bytes, char **ret_data, size_t *ret_bytes, struct tally_error *err);

/* ---- a file that appears whole or not at all: a temporary one beside it, fsync, rename, fsync of the folder ---- */

struct file_atomic;

tally_status file_atomic_open(const char *path, mode_t mode, struct file_atomic **ret_f, struct tally_error *err);
tally_status file_atomic_write(struct file_atomic *f, const void *data, size_t bytes, struct tally_error *err);
tally_status file_atomic_commit(struct file_atomic *f, struct tally_error *err);
/* Frees; without a commit the temporary file is removed and what stood at path stays. Accepts NULL. */
void file_atomic_free(struct file_atomic *f);
/* The three at once. */
tally_status file_write_atomic(const char *path, const void *data, size_t bytes, mode_t mode, struct tally_error *err);

/* ---- read-only mapping ---- */

struct file_map {
    const unsigned char *data; /* NULL if bytes is 0 */
    size_t bytes;
};

/* A regular file. The map is private; who shortens the file while it is mapped kills its readers (SIGBUS), so it is for
 * files the user says are still. */
tally_status file_map_open(const char *path, struct file_map *ret_map, struct tally_error *err);
/* Accepts one that is all zero; leaves it so. */
void file_map_close(struct file_map *map);

/* ---- folders and paths; the strings are malloc'd, NULL only without memory ---- */

/* rm -rf, as far as it goes: what cannot be removed stays. Does not follow links. */
void file_remove_tree(const char *path);
/* mkdir -p. */
tally_status file_make_dirs(const char *path, mode_t mode, struct tally_error *err);
/* b alone if it is absolute. */
char *path_join(const char *a, const char *b);
/* "a/b" -> "a", "b" -> ".", "/b" -> "/". */
char *path_dirname(const char *path);
/* The last step of path; points into it. */
const char *path_basename(const char *path);
/*
 * path, if it is relative, seen from folder base (NULL: the working directory), made absolute; "." steps and double
 * slashes are taken out, ".." steps are kept (they are the file system's to resolve).
 */
char *path_absolute(const char *base, const char *path);

/*
 * For the start of a main(): where a standard descriptor (0, 1, 2) is closed, the next file that is opened would take
 * its number, and messages would be written into it. Puts /dev/null there, so that writing fails as it should.
 * false: there is no /dev/null, and no safe way to go on.
 */
bool file_guard_standard(void);
#endif
