/* One level's sums over winners: see struct winner_shape. */
#include "kernels/cpu/level.h"
#include "kernels/cpu/simd.h"

#define CHUNK 8 /* vectors that are summed at a time, in registers: enough to hide an addition's latency */

FORCE_INLINE void weight_chunk(const size_t vectors, const uint32_t *place, size_t n, const struct winner *winners,
                               const float *images, float *sums)
{
    vf sum[CHUNK];
    const float *from[CHUNK];
    UNROLL
    for (size_t v = 0; v < vectors; v++) {
        sum[v] = v_load(sums + v * VL);
        from[v] = images + place[v];
    }
    for (size_t i = 0; i < n; i++) {
        const vf dy = v_set1(winners[i].dy);
        const size_t at = winners[i].at;
        UNROLL
        for (size_t v = 0; v < vectors; v++)
            sum[v] = v_fma(dy, v_load(from[v] + at), sum[v]);
    }
    UNROLL
    for (size_t v = 0; v < vectors; v++)
        v_store(sums + v * VL, sum[v]);
}

/* All pixels for one chunk, so that the chunk's weights of every channel stay in the first-level cache. */
FORCE_INLINE void data_chunk(const size_t vectors, const uint32_t *place, const uint32_t *lanes, size_t pixels,
                             const uint32_t *pixel, const uint32_t *start, const struct winner *winners,
                             const float *weights, float *image)
{
    for (size_t p = 0; p < pixels; p++) {
        if (start[p] == start[p + 1])
            continue;
        vf sum[CHUNK];
        UNROLL
        for (size_t v = 0; v < vectors; v++)
            sum[v] = v_zero();
        for (size_t i = start[p]; i < start[p + 1]; i++) {
            const vf dy = v_set1(winners[i].dy);
            const float *from = weights + winners[i].at;
            UNROLL
            for (size_t v = 0; v < vectors; v++)
                sum[v] = v_fma(dy, v_load(from + v * VL), sum[v]);
        }
        UNROLL
        for (size_t v = 0; v < vectors; v++) {
            float *to = image + pixel[p] + place[v];
            if (lanes[v] == VL)
                v_store(to, v_add(v_load(to), sum[v]));
            else
                v_store_n(to, v_add(v_load_n(to, lanes[v]), sum[v]), lanes[v]);
        }
    }
}

/* Equal chunks rather than full ones and a rest. */
static size_t chunk_of(size_t vectors)
{
    const size_t chunks = (vectors + CHUNK - 1) / CHUNK;
    return (vectors + chunks - 1) / chunks;
}

#define EACH_CHUNK(call)                                                                                               \
    switch (n_vectors) {                                                                                               \
    case 1:                                                                                                            \
        call(1);                                                                                                       \
        break;                                                                                                         \
    case 2:                                                                                                            \
        call(2);                                                                                                       \
        break;                                                                                                         \
    case 3:                                                                                                            \
        call(3);                                                                                                       \
        break;                                                                                                         \
    case 4:                                                                                                            \
        call(4);                                                                                                       \
        break;                                                                                                         \
    case 5:                                                                                                            \
        call(5);                                                                                                       \
        break;                                                                                                         \
    case 6:                                                                                                            \
        call(6);                                                                                                       \
        break;                                                                                                         \
    case 7:                                                                                                            \
        call(7);                                                                                                       \
        break;                                                                                                         \
    default:                                                                                                           \
        call(8);                                                                                                       \
    }

static void weight(const struct winner_shape *shape, size_t n, const struct winner *winners, const float *images,
                   float *sums)
{
    const size_t chunk = chunk_of(shape->vectors);
    for (size_t v = 0; v < shape->vectors; v += chunk) {
        const size_t n_vectors = shape->vectors - v < chunk ? shape->vectors - v : chunk;
#define WEIGHT_CHUNK(k) weight_chunk(k, shape->place + v, n, winners, images, sums + v * VL)
        EACH_CHUNK(WEIGHT_CHUNK)
    }
}

static void data(const struct winner_shape *shape, size_t pixels, const uint32_t *pixel, const uint32_t *start,
                 const struct winner *winners, const float *weights, float *image)
{
    const size_t chunk = chunk_of(shape->vectors);
    for (size_t v = 0; v < shape->vectors; v += chunk) {
        const size_t n_vectors = shape->vectors - v < chunk ? shape->vectors - v : chunk;
#define DATA_CHUNK(k)                                                                                                  \
    data_chunk(k, shape->place + v, shape->lanes + v, pixels, pixel, start, winners, weights + v * VL, image)
        EACH_CHUNK(DATA_CHUNK)
    }
}

const struct winner_level LEVEL(cpu_winner) = {
    .vector = VL,
    .weight = weight,
    .data = data,
};
