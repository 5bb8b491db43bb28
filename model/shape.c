#include <stdint.h>
#include <stdio.h>

#include "common/limits.h"
#include "model/layer.h"

bool shape_set(struct shape *shape, size_t ndim, const size_t *dim)
{
    struct shape s = {.ndim = ndim, .elements = 1};
    for (size_t i = 0; i < ndim; i++) {
        s.dim[i] = dim[i];
        if (dim[i] == 0 || __builtin_mul_overflow(s.elements, dim[i], &s.elements) || s.elements > TALLY_ELEMENTS_MAX)
            return false;
    }
    *shape = s;
    return true;
}

bool shape_equal(const struct shape *a, const struct shape *b)
{
    if (a->ndim != b->ndim)
        return false;
    for (size_t i = 0; i < a->ndim; i++)
        if (a->dim[i] != b->dim[i])
            return false;
    return true;
}

const char *shape_text(const struct shape *shape, char *text, size_t size)
{
    size_t used = 0;
    if (size > 0)
        text[0] = '\0';
    for (size_t i = 0; i < shape->ndim && used < size; i++) {
        int n = snprintf(text + used, size - used, i ? "x%zu" : "%zu", shape->dim[i]);
        used += n > 0 ? (size_t)n : 0;
    }
    return text;
}

uint64_t flops_mul(uint64_t a, uint64_t b)
{
    uint64_t product;
    return __builtin_mul_overflow(a, b, &product) ? UINT64_MAX : product;
}

uint64_t flops_add(uint64_t a, uint64_t b)
{
    uint64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? UINT64_MAX : sum;
}
