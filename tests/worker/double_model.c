#include "tests/worker/double_model.h"

#include <assert.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static size_t pair(const uint32_t *values, size_t n, size_t index, size_t missing)
{
    return n == 0 ? missing : values[n == 1 ? 0 : index];
}

struct window {
    size_t kernel[2], stride[2], padding[2], dilation[2];
};

#define WINDOW(spec, default_stride)                                                                                   \
    {                                                                                                                  \
        .kernel = {pair(spec->kernel_size, spec->n_kernel_size, 0, 1),                                                 \
                   pair(spec->kernel_size, spec->n_kernel_size, 1, 1)},                                                \
        .stride = {pair(spec->stride, spec->n_stride, 0,                                                               \
                        default_stride ? default_stride : pair(spec->kernel_size, spec->n_kernel_size, 0, 1)),         \
                   pair(spec->stride, spec->n_stride, 1,                                                               \
                        default_stride ? default_stride : pair(spec->kernel_size, spec->n_kernel_size, 1, 1))},        \
        .padding = {pair(spec->padding, spec->n_padding, 0, 0), pair(spec->padding, spec->n_padding, 1, 0)},           \
        .dilation = {1, 1},                                                                                            \
    }

static void linear(const struct layer *layer, const double *w, const double *b, const double *x, double *y)
{
    size_t in = layer->in.dim[layer->in.ndim - 1], out = layer->out.dim[layer->out.ndim - 1];
    for (size_t r = 0; r < layer->in.elements / in; r++)
        for (size_t o = 0; o < out; o++) {
            double sum = b ? b[o] : 0;
            for (size_t i = 0; i < in; i++)
                sum += w[o * in + i] * x[r * in + i];
            y[r * out + o] = sum;
        }
}

/* Where the window's element (ky, kx) reads for output (oy, ox); false: in the padding. */
static bool window_at(const struct window *win, const struct shape *in, const size_t o[2], const size_t k[2],
                      size_t ret[2])
{
    for (int d = 0; d < 2; d++) {
        size_t at = o[d] * win->stride[d] + k[d] * win->dilation[d];
        if (at < win->padding[d] || at - win->padding[d] >= in->dim[1 + d])
            return false;
        ret[d] = at - win->padding[d];
    }
    return true;
}

static void conv(const struct layer *layer, const double *w, const double *b, const double *x, double *y)
{
    const Tally__V1__Conv2d *spec = layer->spec->conv2d;
    struct window win = WINDOW(spec, (size_t)1);
    win.dilation[0] = pair(spec->dilation, spec->n_dilation, 0, 1);
    win.dilation[1] = pair(spec->dilation, spec->n_dilation, 1, 1);
    size_t groups = spec->groups, in_group = layer->in.dim[0] / groups, out_group = layer->out.dim[0] / groups;
    for (size_t c = 0; c < layer->out.dim[0]; c++)
        for (size_t oy = 0; oy < layer->out.dim[1]; oy++)
            for (size_t ox = 0; ox < layer->out.dim[2]; ox++) {
                double sum = b ? b[c] : 0;
                for (size_t i = 0; i < in_group; i++)
                    for (size_t ky = 0; ky < win.kernel[0]; ky++)
                        for (size_t kx = 0; kx < win.kernel[1]; kx++) {
                            size_t at[2];
                            if (!window_at(&win, &layer->in, (size_t[2]){oy, ox}, (size_t[2]){ky, kx}, at))
                                continue;
                            size_t channel = c / out_group * in_group + i;
                            sum += w[((c * in_group + i) * win.kernel[0] + ky) * win.kernel[1] + kx] *
                                   x[(channel * layer->in.dim[1] + at[0]) * layer->in.dim[2] + at[1]];
                        }
                y[(c * layer->out.dim[1] + oy) * layer->out.dim[2] + ox] = sum;
            }
}

static void pool(const struct layer *layer, const struct window *win, bool max, const double *x, double *y)
{
    for (size_t c = 0; c < layer->out.dim[0]; c++)
        for (size_t oy = 0; oy < layer->out.dim[1]; oy++)
            for (size_t ox = 0; ox < layer->out.dim[2]; ox++) {
                double best = -INFINITY, sum = 0;
                for (size_t ky = 0; ky < win->kernel[0]; ky++)
                    for (size_t kx = 0; kx < win->kernel[1]; kx++) {
                        size_t at[2];
                        if (!window_at(win, &layer->in, (size_t[2]){oy, ox}, (size_t[2]){ky, kx}, at))
                            continue;
                        double v = x[(c * layer->in.dim[1] + at[0]) * layer->in.dim[2] + at[1]];
                        best = v > best ? v : best;
                        sum += v;
                    }
                y[(c * layer->out.dim[1] + oy) * layer->out.dim[2] + ox] =
                    max ? best : sum / (double)(win->kernel[0] * win->kernel[1]);
            }
}

static double function(const struct layer *layer, double x)
{
    switch (layer->spec->kind_case) {
    case TALLY__V1__LAYER__KIND_RELU:
        return x > 0 ? x : 0;
    case TALLY__V1__LAYER__KIND_TANH:
        return tanh(x);
    case TALLY__V1__LAYER__KIND_SIGMOID:
        return 1 / (1 + exp(-x));
    case TALLY__V1__LAYER__KIND_GELU:
        if (layer->spec->gelu->approximate == TALLY__V1__GELU__APPROXIMATE__tanh)
            return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
        return 0.5 * x * (1 + erf(x * M_SQRT1_2));
    default:
        return x; /* flatten */
    }
}

static void forward(const struct model *model, const struct layer *layer, const double *weights,
                    const double *const *inputs, double *y)
{
    const double *w = layer->weight >= 0 ? weights + model->params[layer->weight].offset : NULL;
    const double *b = layer->bias >= 0 ? weights + model->params[layer->bias].offset : NULL;
    switch (layer->spec->kind_case) {
    case TALLY__V1__LAYER__KIND_LINEAR:
        linear(layer, w, b, inputs[0], y);
        break;
    case TALLY__V1__LAYER__KIND_CONV2D:
        conv(layer, w, b, inputs[0], y);
        break;
    case TALLY__V1__LAYER__KIND_MAX_POOL2D: {
        struct window win = WINDOW(layer->spec->max_pool2d, (size_t)0);
        pool(layer, &win, true, inputs[0], y);
        break;
    }
    case TALLY__V1__LAYER__KIND_AVG_POOL2D: {
        struct window win = WINDOW(layer->spec->avg_pool2d, (size_t)0);
        pool(layer, &win, false, inputs[0], y);
        break;
    }
    case TALLY__V1__LAYER__KIND_ADD:
        for (size_t i = 0; i < layer->out.elements; i++) {
            y[i] = 0;
            for (size_t k = 0; k < layer->input_count; k++)
                y[i] += inputs[k][i];
        }
        break;
    default:
        for (size_t i = 0; i < layer->out.elements; i++)
            y[i] = function(layer, inputs[0][i]);
    }
}

static double cross_entropy(const Tally__V1__CrossEntropy *spec, const double *x, size_t classes, int64_t target)
{
    if (target == spec->ignore_index)
        return 0;
    double max = -INFINITY, sum = 0, smooth = 0;
    for (size_t c = 0; c < classes; c++)
        max = x[c] > max ? x[c] : max;
    for (size_t c = 0; c < classes; c++)
        sum += exp(x[c] - max);
    double log_sum = max + log(sum);
    for (size_t c = 0; c < classes; c++)
        smooth += log_sum - x[c];
    double eps = spec->label_smoothing;
    return (1 - eps) * (log_sum - x[target]) + eps * smooth / (double)classes;
}

static double sample_loss(const struct model *model, const double *weights, double **outputs, const double *input,
                          const void *targets, size_t row)
{
    for (size_t i = 0; i < model->layer_count; i++) {
        const struct layer *layer = &model->layers[i];
        const double *inputs[64];
        for (size_t k = 0; k < layer->input_count; k++)
            inputs[k] = layer->inputs[k] == MODEL_INPUT ? input : outputs[layer->inputs[k]];
        forward(model, layer, weights, inputs, outputs[i]);
    }
    const struct layer *last = &model->layers[model->layer_count - 1];
    const double *y = outputs[model->layer_count - 1];
    const Tally__V1__Loss *loss = model->spec->model->loss;
    if (loss->kind_case == TALLY__V1__LOSS__KIND_CROSS_ENTROPY)
        return cross_entropy(loss->cross_entropy, y, last->out.elements, ((const int64_t *)targets)[row]);
    double sum = 0;
    for (size_t i = 0; i < last->out.elements; i++) {
        double d = y[i] - (double)((const float *)targets)[row * last->out.elements + i];
        sum += d * d;
    }
    return sum;
}

double double_model_loss(const struct model *model, const double *weights, const float *x, size_t stride, size_t rows,
                         const void *targets)
{
    double **outputs = calloc(model->layer_count, sizeof *outputs), sum = 0;
    double *input = calloc(model->input.elements, sizeof *input);
    assert(outputs && input);
    for (size_t i = 0; i < model->layer_count; i++) {
        outputs[i] = calloc(model->layers[i].out.elements, sizeof **outputs);
        assert(outputs[i]);
    }
    for (size_t r = 0; r < rows; r++) {
        for (size_t i = 0; i < model->input.elements; i++)
            input[i] = (double)x[r * stride + i];
        sum += sample_loss(model, weights, outputs, input, targets, r);
    }
    for (size_t i = 0; i < model->layer_count; i++)
        free(outputs[i]);
    free(outputs);
    free(input);
    return sum;
}
