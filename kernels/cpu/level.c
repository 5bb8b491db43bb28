/* Joins the parts of one level: see level.h. */
#include "kernels/cpu/level.h"

#include "kernels/cpu/simd.h"

extern const struct gemm_level LEVEL(cpu_gemm);
extern const struct pointwise_level LEVEL(cpu_pointwise);
extern const struct loss_level LEVEL(cpu_loss);
extern const struct pool_level LEVEL(cpu_pool);
extern const struct patch_level LEVEL(cpu_patch);
extern const struct winner_level LEVEL(cpu_winner);
#if VL > 8
extern const struct winner_level cpu_winner_avx2;
#define NARROW_WINNER cpu_winner_avx2
#else
#define NARROW_WINNER LEVEL(cpu_winner)
#endif

#define LEVEL_STRING2(x) #x
#define LEVEL_STRING(x) LEVEL_STRING2(x)

const struct cpu_level LEVEL(cpu_level) = {
    .name = LEVEL_STRING(CPU_LEVEL),
    .gemm = &LEVEL(cpu_gemm),
    .pointwise = &LEVEL(cpu_pointwise),
    .loss = &LEVEL(cpu_loss),
    .pool = &LEVEL(cpu_pool),
    .patch = &LEVEL(cpu_patch),
    .winner = &LEVEL(cpu_winner),
    .narrow_winner = &NARROW_WINNER,
};
