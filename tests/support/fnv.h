#ifndef TESTS_SUPPORT_FNV_H
#define TESTS_SUPPORT_FNV_H
/* FNV-1a (Fowler, Noll and Vo): a whole array in one number, as the scripts in tests/reference/ compute it. */
#include <stddef.h>
#include <stdint.h>

#define FNV_START UINT64_C(0xcbf29ce484222325)

/* Goes on from the number of what stands before. */
static inline uint64_t fnv_on(uint64_t hash, const void *data, size_t n)
{
    const unsigned char *bytes = data;
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    return hash;
}

static inline uint64_t fnv(const void *data, size_t n)
{
    return fnv_on(FNV_START, data, n);
}
#endif
