#ifndef COMMON_SHA256_H
#define COMMON_SHA256_H
/* SHA-256, by libcrypto. */
#include <stddef.h>

#include "common/error.h"

#define SHA256_BYTES 32
#define SHA256_HEX_BYTES 65 /* with the terminating zero */

struct sha256;

tally_status sha256_new(struct sha256 **ret_s, struct tally_error *err);
tally_status sha256_update(struct sha256 *s, const void *data, size_t bytes, struct tally_error *err);
/* Ends the sum: lower-case hexadecimal. Afterwards only sha256_free. */
tally_status sha256_final_hex(struct sha256 *s, char ret_hex[SHA256_HEX_BYTES], struct tally_error *err);
/* Accepts NULL. */
void sha256_free(struct sha256 *s);

/* The four at once. */
tally_status sha256_hex(const void *data, size_t bytes, char ret_hex[SHA256_HEX_BYTES], struct tally_error *err);
#endif
