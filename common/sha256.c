#include "common/sha256.h"

#include <openssl/evp.h>
#include <stdlib.h>

struct sha256 {
    EVP_MD_CTX *evp;
};

tally_status sha256_new(struct sha256 **ret_s, struct tally_error *err)
{
    struct sha256 *s = malloc(sizeof *s);
    if (!s)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a SHA-256 sum");
    s->evp = EVP_MD_CTX_new();
    if (!s->evp || EVP_DigestInit_ex(s->evp, EVP_sha256(), NULL) != 1) {
        sha256_free(s);
        return tally_fail(err, TALLY_EUNSUPPORTED, "libcrypto gives no SHA-256");
    }
    *ret_s = s;
    return TALLY_OK;
}

tally_status sha256_update(struct sha256 *s, const void *data, size_t bytes, struct tally_error *err)
{
    if (bytes > 0 && EVP_DigestUpdate(s->evp, data, bytes) != 1)
        return tally_fail(err, TALLY_EINTERNAL, "libcrypto failed in a SHA-256 sum");
    return TALLY_OK;
}

tally_status sha256_final_hex(struct sha256 *s, char ret_hex[SHA256_HEX_BYTES], struct tally_error *err)
{
    static const char digits[] = "0123456789abcdef";
    unsigned char sum[EVP_MAX_MD_SIZE];
    unsigned int bytes = 0;
    if (EVP_DigestFinal_ex(s->evp, sum, &bytes) != 1 || bytes != SHA256_BYTES)
        return tally_fail(err, TALLY_EINTERNAL, "libcrypto failed to end a SHA-256 sum");
    for (size_t i = 0; i < SHA256_BYTES; i++) {
        ret_hex[2 * i] = digits[sum[i] >> 4];
        ret_hex[2 * i + 1] = digits[sum[i] & 15];
    }
    ret_hex[SHA256_HEX_BYTES - 1] = '\0';
    return TALLY_OK;
}

void sha256_free(struct sha256 *s)
{
    if (!s)
        return;
    EVP_MD_CTX_free(s->evp);
    free(s);
}

tally_status sha256_hex(const void *data, size_t bytes, char ret_hex[SHA256_HEX_BYTES], struct tally_error *err)
{
    struct sha256 *s = NULL;
    tally_status status = sha256_new(&s, err);
    if (status == TALLY_OK)
        status = sha256_update(s, data, bytes, err);
    if (status == TALLY_OK)
        status = sha256_final_hex(s, ret_hex, err);
    sha256_free(s);
    return status;
}
