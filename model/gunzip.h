#ifndef MODEL_GUNZIP_H
#define MODEL_GUNZIP_H
/* Reading a gzip file (RFC 1952) that is in memory, member after member, through zlib. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "common/error.h"

/* Deflate packs at most so many bytes into one (zlib's technical notes): what a file of n bytes declares beyond n times
 * this cannot be in it. */
#define GUNZIP_RATIO_MAX 1032

struct gunzip;

bool gunzip_detect(const unsigned char *data, size_t bytes);

/* data stays the caller's and must stay; name is for errors. */
tally_status gunzip_open(const char *name, const unsigned char *data, size_t bytes, struct gunzip **ret_g,
                         struct tally_error *err);
/* The next `bytes` bytes; *ret_bytes is smaller only at the end of the last member, whose check sum was then right.
 * TALLY_EINVAL: damaged or cut off. */
tally_status gunzip_read(struct gunzip *g, void *dst, size_t bytes, size_t *ret_bytes, struct tally_error *err);
/* Accepts NULL. */
void gunzip_close(struct gunzip *g);
#endif
