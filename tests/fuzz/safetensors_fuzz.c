/* Any bytes as a safetensors file: refused with a reason, or every byte of every tensor can be read. */
#include <assert.h>
#include <stdint.h>
#include <string.h>

#include "common/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct safetensors *f = NULL;
    struct tally_error err = {.message = ""};
    if (safetensors_open_memory("fuzz", data, size, &f, &err) != TALLY_OK) {
        assert(err.message[0] != '\0' && !f);
        return 0;
    }
    uint64_t total = 0;
    volatile unsigned char sum = 0;
    for (size_t i = 0; i < safetensors_count(f); i++) {
        const struct safetensor *t = safetensors_at(f, i);
        char shape[64];
        safetensors_shape_text(t, shape, sizeof shape);
        assert(safetensors_find(f, t->name) == t);
        for (uint64_t j = 0; j < t->bytes; j++)
            sum = (unsigned char)(sum + t->data[j]);
        total += t->bytes;
    }
    assert(total <= size);
    safetensors_close(f);
    return 0;
}
