#include "model/dataset_normalize.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

static float normalized(float x, float mean, float std)
{
    float centred = x - mean;
    return centred / std;
}

static tally_status check(const Tally__V1__Normalize *spec, const struct dataset_info *info, struct tally_error *err)
{
    size_t channels = info->input_shape[0];
    const char *names[2] = {"mean", "std"};
    size_t counts[2] = {spec->n_mean, spec->n_std};
    for (int i = 0; i < 2; i++) {
        if (counts[i] == 1 || counts[i] == channels)
            continue;
        if (channels == 1)
            return tally_fail(err, TALLY_EINVAL,
                              "normalize.%s has %zu numbers, expected 1 (the first dimension of a sample is 1)",
                              names[i], counts[i]);
        return tally_fail(err, TALLY_EINVAL,
                          "normalize.%s has %zu numbers, expected 1 or %zu (the first dimension of a sample)", names[i],
                          counts[i], channels);
    }
    for (size_t i = 0; i < spec->n_mean; i++)
        if (!isfinite(spec->mean[i]))
            return tally_fail(err, TALLY_EINVAL, "normalize.mean has %g, expected finite numbers", spec->mean[i]);
    for (size_t i = 0; i < spec->n_std; i++)
        if (!isfinite(spec->std[i]) || spec->std[i] <= 0)
            return tally_fail(err, TALLY_EINVAL, "normalize.std has %g, expected numbers above 0", spec->std[i]);
    return TALLY_OK;
}

static void fill_table(struct normalizer *n)
{
    for (size_t c = 0; c < n->channels; c++)
        for (int byte = 0; byte < 256; byte++) {
            float x = (float)byte / 255.0f;
            n->table[c * 256 + (size_t)byte] = n->mean ? normalized(x, n->mean[c], n->std[c]) : x;
        }
}

tally_status normalizer_init(struct normalizer *n, const Tally__V1__Normalize *spec, const struct dataset_info *info,
                             bool bytes, struct tally_error *err)
{
    *n = (struct normalizer){.channels = 1};
    if (spec) {
        tally_status status = check(spec, info, err);
        if (status != TALLY_OK)
            return status;
        n->channels = spec->n_mean > spec->n_std ? spec->n_mean : spec->n_std;
        n->mean = malloc(n->channels * sizeof(float));
        n->std = malloc(n->channels * sizeof(float));
        for (size_t c = 0; n->mean && n->std && c < n->channels; c++) {
            n->mean[c] = spec->mean[spec->n_mean == 1 ? 0 : c];
            n->std[c] = spec->std[spec->n_std == 1 ? 0 : c];
        }
    }
    n->inner = info->input_elements / n->channels;
    if (bytes)
        n->table = malloc(n->channels * 256 * sizeof(float));
    if ((spec && (!n->mean || !n->std)) || (bytes && !n->table)) {
        normalizer_free(n);
        return tally_fail(err, TALLY_ENOMEM, "no memory to normalize %zu channels", n->channels);
    }
    if (bytes)
        fill_table(n);
    return TALLY_OK;
}

void normalizer_free(struct normalizer *n)
{
    free(n->mean);
    free(n->std);
    free(n->table);
    n->mean = n->std = n->table = NULL;
}

void normalizer_bytes(const struct normalizer *n, const unsigned char *src, float *dst)
{
    for (size_t c = 0; c < n->channels; c++) {
        const float *table = n->table + c * 256;
        for (size_t i = 0; i < n->inner; i++)
            dst[i] = table[src[i]];
        src += n->inner;
        dst += n->inner;
    }
}

void normalizer_floats(const struct normalizer *n, float *x)
{
    if (!n->mean)
        return;
    for (size_t c = 0; c < n->channels; c++) {
        float mean = n->mean[c], std = n->std[c];
        for (size_t i = 0; i < n->inner; i++)
            x[i] = normalized(x[i], mean, std);
        x += n->inner;
    }
}
