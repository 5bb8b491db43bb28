/* One level's patches of an image: gathered into the panels of a product, and scattered back. */
#include "kernels/cpu/level.h"
#include "kernels/cpu/simd.h"

FORCE_INLINE void copy_run(float *to, const float *from, size_t n)
{
    for (; n >= VL; n -= VL, to += VL, from += VL)
        v_store(to, v_load(from));
    if (n & 8)
        memcpy(to, from, 32), to += 8, from += 8;
    if (n & 4)
        memcpy(to, from, 16), to += 4, from += 4;
    if (n & 2)
        memcpy(to, from, 8), to += 2, from += 2;
    if (n & 1)
        *to = *from;
}

/* A run: output pixels side by side in one row. */
FORCE_INLINE void pack_run(const struct patches *p, size_t k0, size_t kc, const float *origin, size_t n, size_t pitch,
                           float *panel)
{
    if (p->stride[1] == 1) {
        for (size_t k = 0; k < kc; k++)
            copy_run(panel + k * pitch, origin + p->offset[k0 + k], n);
        return;
    }
    for (size_t k = 0; k < kc; k++) {
        const float *from = origin + p->offset[k0 + k];
        for (size_t j = 0; j < n; j++)
            panel[k * pitch + j] = from[j * p->stride[1]];
    }
}

static void pack_panel(const struct patches *p, size_t k0, size_t kc, size_t j0, size_t width, float *panel)
{
    const size_t pitch = (width + VL - 1) / VL * VL;
    size_t row = j0 / p->out_width, column = j0 % p->out_width;
    size_t j = 0;
    while (j < width) {
        const size_t n = p->out_width - column < width - j ? p->out_width - column : width - j;
        const float *origin = p->image + row * p->stride[0] * p->image_width + column * p->stride[1];
        if (n == 8)
            pack_run(p, k0, kc, origin, 8, pitch, panel + j);
        else if (n == 16)
            pack_run(p, k0, kc, origin, 16, pitch, panel + j);
        else
            pack_run(p, k0, kc, origin, n, pitch, panel + j);
        j += n;
        column = 0;
        row++;
    }
    if (width < pitch)
        for (size_t k = 0; k < kc; k++)
            memset(panel + k * pitch + width, 0, (pitch - width) * sizeof(float));
}

static void pack(const void *source, size_t k0, size_t kc, size_t j0, size_t nc, float *block)
{
    for (size_t j = 0; j < nc; j += PANEL)
        pack_panel(source, k0, kc, j0 + j, nc - j < PANEL ? nc - j : PANEL, block + j * kc);
}

static void scatter(const struct patches *p, size_t k0, size_t kc, size_t pixels, const float *columns, float *image)
{
    for (size_t k = 0; k < kc; k++, columns += pixels) {
        for (size_t j = 0, row = 0; j < pixels; j += p->out_width, row++) {
            float *to = image + p->offset[k0 + k] + row * p->stride[0] * p->image_width;
            const float *from = columns + j;
            if (p->stride[1] != 1) {
                for (size_t i = 0; i < p->out_width; i++)
                    to[i * p->stride[1]] += from[i];
                continue;
            }
            size_t i = 0;
            for (; i + VL <= p->out_width; i += VL)
                v_store(to + i, v_add(v_load(to + i), v_load(from + i)));
            for (; i < p->out_width; i++)
                to[i] += from[i];
        }
    }
}

const struct patch_level LEVEL(cpu_patch) = {
    .pack = pack,
    .scatter = scatter,
};
