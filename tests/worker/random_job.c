#include "tests/worker/random_job.h"

#include <stdio.h>

#include "tests/support/splitmix.h"
#include "tests/worker/test_job.h"

uint32_t random_below(uint64_t *state, uint32_t n)
{
    return (uint32_t)((splitmix(state) >> 32) * n >> 32);
}

static Tally__V1__Layer__KindCase random_function(uint64_t *state)
{
    static const Tally__V1__Layer__KindCase kinds[] = {TALLY__V1__LAYER__KIND_RELU, TALLY__V1__LAYER__KIND_RELU,
                                                       TALLY__V1__LAYER__KIND_TANH, TALLY__V1__LAYER__KIND_SIGMOID,
                                                       TALLY__V1__LAYER__KIND_GELU};
    return kinds[random_below(state, sizeof kinds / sizeof kinds[0])];
}

/* Two branches from one layer, added up. */
static void residual(uint64_t *state, Tally__V1__JobSpec *spec, uint32_t width)
{
    char stem[24], left[24], right[24];
    size_t n = spec->model->n_layers;
    snprintf(stem, sizeof stem, "stem%zu", n);
    snprintf(left, sizeof left, "left%zu", n);
    snprintf(right, sizeof right, "right%zu", n);
    spec_linear(spec, stem, width, true);
    spec_linear(spec, left, width, random_below(state, 2));
    Tally__V1__Layer *layer;
    if (random_below(state, 2)) {
        layer = spec_linear(spec, right, width, true);
        spec_from(layer, stem);
    } else {
        snprintf(right, sizeof right, "%s", stem);
    }
    layer = spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_ADD);
    spec_from(layer, left);
    spec_from(layer, right);
}

static void dense_layers(uint64_t *state, Tally__V1__JobSpec *spec, bool deep)
{
    uint32_t layers = deep ? 3 + random_below(state, 6) : random_below(state, 3);
    for (uint32_t i = 0; i < layers; i++) {
        uint32_t width = 1 + random_below(state, 40);
        if (random_below(state, 3) == 0)
            residual(state, spec, width);
        else
            spec_linear(spec, NULL, width, random_below(state, 4) != 0);
        if (random_below(state, 4))
            spec_plain(spec, NULL, random_function(state));
    }
}

/* Images of (channels, side, side); leaves them flat. */
static void image_layers(uint64_t *state, Tally__V1__JobSpec *spec, uint32_t channels, uint32_t side)
{
    uint32_t layers = 1 + random_below(state, 2);
    for (uint32_t i = 0; i < layers; i++) {
        uint32_t kernel = 1 + random_below(state, 3), padding = random_below(state, 2);
        uint32_t groups = channels % 2 == 0 && random_below(state, 3) == 0 ? 2 : 1;
        uint32_t out = groups * (1 + random_below(state, 5));
        if (side + 2 * padding < kernel)
            break;
        spec_conv(spec, NULL, out, kernel, 1, padding, groups);
        side = side + 2 * padding - kernel + 1;
        channels = out;
        if (random_below(state, 2))
            spec_plain(spec, NULL, random_function(state));
        if (side >= 2 && random_below(state, 3)) {
            if (random_below(state, 3))
                spec_max_pool(spec, NULL, 2, 2, 0);
            else
                spec_avg_pool(spec, NULL, 2, 2, 0);
            side /= 2;
        }
    }
    spec_plain(spec, NULL, TALLY__V1__LAYER__KIND_FLATTEN);
}

Tally__V1__JobSpec *random_job(uint64_t seed, const struct random_options *options)
{
    uint64_t state = seed * 77 + 1;
    uint32_t batch = 1 + random_below(&state, 40), micro = 1 + random_below(&state, batch);
    bool mse = random_below(&state, 4) == 0, image = random_below(&state, 2);
    Tally__V1__JobSpec *spec = spec_new(seed, batch, micro, 0, options->steps);
    uint32_t shape[3] = {1 + random_below(&state, 3), 4 + random_below(&state, 6), 0};
    shape[2] = shape[1];
    uint32_t features = 1 + random_below(&state, 30), outputs = 2 + random_below(&state, 6);
    if (options->wide)
        features = random_below(&state, 2) ? 300000 : 3000;
    image &= !options->wide;
    uint64_t samples = 1 + random_below(&state, 3 * batch);
    for (int part = 0; part < (options->test_set ? 2 : 1); part++)
        spec_synthetic(spec, part, part ? 1 + random_below(&state, 50) : samples, mse ? 0 : outputs,
                       image ? shape : &features, image ? 3 : 1, &outputs, mse ? 1 : 0);
    spec_shuffle(spec, random_below(&state, 2));
    if (image)
        image_layers(&state, spec, shape[0], shape[1]);
    if (options->wide)
        spec_linear(spec, NULL, features > 100000 ? 3 : 400, true);
    dense_layers(&state, spec, options->deep);
    spec_linear(spec, "out", outputs, true);
    if (mse)
        spec_mse(spec);
    else
        spec_cross_entropy(spec, -100, random_below(&state, 3) ? 0 : 0.1);
    spec_sgd(spec, 0.05, random_below(&state, 2) ? 0.9 : 0, random_below(&state, 2) ? 0.01 : 0, false);
    return spec;
}
