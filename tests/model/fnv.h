#ifndef TESTS_MODEL_FNV_H
#define TESTS_MODEL_FNV_H
/* FNV-1a (Fowler, Noll and Vo): a whole array in one number, as the scripts in tests/reference/ compute it. */
#include <stddef.h>
#include <stdint.h>

static inline uint64_t fnv(const void *data, size_t n)
{
    const unsigned char *bytes = data;
    uint64_t hash = UINT64_C(0xcbf29ce484222325);
    for (size_t i = 0; i < n; i++)
        hash = (hash ^ bytes[i]) * UINT64_C(0x100000001b3);
    return hash;
}
#endif
