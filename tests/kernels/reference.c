#include "tests/kernels/reference.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

size_t reference_x_elements(const struct kernel_op_desc *d)
{
    switch (d->kind) {
    case KERNEL_LINEAR:
        return d->linear.in;
    case KERNEL_CONV2D:
        return d->conv2d.in_channels * d->conv2d.in_height * d->conv2d.in_width;
    case KERNEL_MAX_POOL2D:
    case KERNEL_AVG_POOL2D:
        return d->pool2d.channels * d->pool2d.in_height * d->pool2d.in_width;
    case KERNEL_ELEMENTWISE:
        return d->elementwise.elements;
    case KERNEL_ADD:
        return d->add.elements;
    case KERNEL_CROSS_ENTROPY:
        return d->cross_entropy.classes;
    case KERNEL_MSE:
        return d->mse.elements;
    }
    return 0;
}

size_t reference_y_elements(const struct kernel_op_desc *d)
{
    switch (d->kind) {
    case KERNEL_LINEAR:
        return d->linear.out;
    case KERNEL_CONV2D:
        return d->conv2d.out_channels * (d->conv2d.pool ? d->conv2d.pool_height * d->conv2d.pool_width
                                                        : d->conv2d.out_height * d->conv2d.out_width);
    case KERNEL_MAX_POOL2D:
    case KERNEL_AVG_POOL2D:
        return d->pool2d.channels * d->pool2d.out_height * d->pool2d.out_width;
    case KERNEL_ELEMENTWISE:
    case KERNEL_ADD:
        return reference_x_elements(d);
    case KERNEL_CROSS_ENTROPY:
    case KERNEL_MSE:
        return 0;
    }
    return 0;
}

size_t reference_weight_elements(const struct kernel_op_desc *d)
{
    if (d->kind == KERNEL_LINEAR)
        return d->linear.in * d->linear.out;
    if (d->kind == KERNEL_CONV2D)
        return d->conv2d.out_channels * (d->conv2d.in_channels / d->conv2d.groups) * d->conv2d.window.kernel[0] *
               d->conv2d.window.kernel[1];
    return 0;
}

size_t reference_bias_elements(const struct kernel_op_desc *d)
{
    if (!d->bias)
        return 0;
    return d->kind == KERNEL_LINEAR ? d->linear.out : d->kind == KERNEL_CONV2D ? d->conv2d.out_channels : 0;
}

static void *zeroed(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size);
    if (!p)
        abort();
    return p;
}

static double relu(double x)
{
    return x <= 0 ? 0 : x;
}

/* The input coordinate under an output coordinate and a place in the window; false: in the padding. */
static bool in_window(const struct kernel_window *w, int axis, size_t out, size_t k, size_t in, size_t *ret)
{
    const size_t at = out * w->stride[axis] + k * w->dilation[axis];
    if (at < w->padding[axis] || at - w->padding[axis] >= in)
        return false;
    *ret = at - w->padding[axis];
    return true;
}

/* Calls visit for every product of a convolution: y[y_at] += w[w_at] * x[x_at]. */
typedef void visit_product(double *w, double *x, double *y);

static void each_product(const struct kernel_op_desc *d, double *w, double *x, double *y, visit_product *visit)
{
    const struct kernel_window *win = &d->conv2d.window;
    const size_t ih = d->conv2d.in_height, iw = d->conv2d.in_width, oh = d->conv2d.out_height, ow = d->conv2d.out_width;
    const size_t gi = d->conv2d.in_channels / d->conv2d.groups, go = d->conv2d.out_channels / d->conv2d.groups;
    for (size_t o = 0; o < d->conv2d.out_channels; o++)
        for (size_t i = 0; i < oh; i++)
            for (size_t j = 0; j < ow; j++)
                for (size_t c = 0; c < gi; c++)
                    for (size_t a = 0; a < win->kernel[0]; a++)
                        for (size_t b = 0; b < win->kernel[1]; b++) {
                            size_t r, s;
                            if (in_window(win, 0, i, a, ih, &r) && in_window(win, 1, j, b, iw, &s))
                                visit(w + ((o * gi + c) * win->kernel[0] + a) * win->kernel[1] + b,
                                      x + ((o / go * gi + c) * ih + r) * iw + s, y + (o * oh + i) * ow + j);
                        }
}

static void forward_product(double *w, double *x, double *y)
{
    *y += *w * *x;
}

static void data_product(double *w, double *dx, double *dy)
{
    *dx += *w * *dy;
}

static void weight_product(double *dw, double *x, double *dy)
{
    *dw += *x * *dy;
}

static void max_pool(const struct kernel_window *w, size_t ih, size_t iw, size_t oh, size_t ow, const double *x,
                     double *y, size_t *winner)
{
    for (size_t i = 0; i < oh; i++)
        for (size_t j = 0; j < ow; j++) {
            double best = -INFINITY;
            size_t at = SIZE_MAX;
            for (size_t a = 0; a < w->kernel[0]; a++)
                for (size_t b = 0; b < w->kernel[1]; b++) {
                    size_t r, s;
                    if (!in_window(w, 0, i, a, ih, &r) || !in_window(w, 1, j, b, iw, &s))
                        continue;
                    if (at == SIZE_MAX)
                        at = r * iw + s;
                    if (x[r * iw + s] > best || isnan(x[r * iw + s])) {
                        best = x[r * iw + s];
                        at = r * iw + s;
                    }
                }
            y[i * ow + j] = best;
            winner[i * ow + j] = at;
        }
}

static void conv_forward(const struct kernel_op_desc *d, struct reference *r, size_t row)
{
    const size_t pixels = d->conv2d.out_height * d->conv2d.out_width, y_elements = reference_y_elements(d);
    double *conv = zeroed(d->conv2d.out_channels * pixels, sizeof *conv);
    each_product(d, r->weight, r->x[0] + row * reference_x_elements(d), conv, forward_product);
    for (size_t i = 0; i < d->conv2d.out_channels * pixels; i++) {
        if (d->bias)
            conv[i] += r->bias[i / pixels];
        if (d->relu)
            conv[i] = relu(conv[i]);
    }
    if (d->conv2d.pool) {
        const size_t pooled = d->conv2d.pool_height * d->conv2d.pool_width;
        for (size_t c = 0; c < d->conv2d.out_channels; c++)
            max_pool(&d->conv2d.pool_window, d->conv2d.out_height, d->conv2d.out_width, d->conv2d.pool_height,
                     d->conv2d.pool_width, conv + c * pixels, r->y + row * y_elements + c * pooled,
                     r->winner + row * y_elements + c * pooled);
    } else {
        memcpy(r->y + row * y_elements, conv, y_elements * sizeof *conv);
    }
    free(conv);
}

static void conv_backward(const struct kernel_op_desc *d, struct reference *r, size_t row)
{
    const size_t pixels = d->conv2d.out_height * d->conv2d.out_width, n = reference_y_elements(d),
                 plane = n / d->conv2d.out_channels;
    double *g = zeroed(d->conv2d.out_channels * pixels, sizeof *g);
    for (size_t i = 0; i < n; i++) {
        const double dy = d->relu && r->y[row * n + i] <= 0 ? 0 : r->dy[row * n + i];
        if (d->conv2d.pool)
            g[i / plane * pixels + r->winner[row * n + i]] += dy;
        else
            g[i] = dy;
    }
    double *x = r->x[0] + row * reference_x_elements(d);
    each_product(d, r->weight, r->dx[0] + row * reference_x_elements(d), g, data_product);
    each_product(d, r->dweight, x, g, weight_product);
    if (d->bias)
        for (size_t i = 0; i < d->conv2d.out_channels * pixels; i++)
            r->dbias[i / pixels] += g[i];
    free(g);
}

static void linear(const struct kernel_op_desc *d, struct reference *r, size_t row, bool backward)
{
    const size_t in = d->linear.in, out = d->linear.out;
    const double *x = r->x[0] + row * in;
    for (size_t o = 0; o < out; o++) {
        double *y = &r->y[row * out + o];
        if (!backward) {
            *y = d->bias ? r->bias[o] : 0;
            for (size_t i = 0; i < in; i++)
                *y += r->weight[o * in + i] * x[i];
            if (d->relu)
                *y = relu(*y);
            continue;
        }
        const double dy = d->relu && *y <= 0 ? 0 : r->dy[row * out + o];
        for (size_t i = 0; i < in; i++) {
            r->dx[0][row * in + i] += r->weight[o * in + i] * dy;
            r->dweight[o * in + i] += x[i] * dy;
        }
        if (d->bias)
            r->dbias[o] += dy;
    }
}

static void average_pool(const struct kernel_op_desc *d, struct reference *r, size_t plane, bool backward)
{
    const struct kernel_window *w = &d->pool2d.window;
    const size_t in[2] = {d->pool2d.in_height, d->pool2d.in_width},
                 out[2] = {d->pool2d.out_height, d->pool2d.out_width};
    for (size_t i = 0; i < out[0]; i++)
        for (size_t j = 0; j < out[1]; j++) {
            double sum = 0, inside = 0, padded = 0;
            const size_t y_at = plane * out[0] * out[1] + i * out[1] + j;
            for (int pass = 0; pass < 2; pass++)
                for (size_t a = 0; a < w->kernel[0]; a++)
                    for (size_t b = 0; b < w->kernel[1]; b++) {
                        size_t s, t;
                        if (pass == 0)
                            padded += i * w->stride[0] + a < in[0] + 2 * w->padding[0] &&
                                      j * w->stride[1] + b < in[1] + 2 * w->padding[1];
                        if (!in_window(w, 0, i, a, in[0], &s) || !in_window(w, 1, j, b, in[1], &t))
                            continue;
                        const size_t x_at = plane * in[0] * in[1] + s * in[1] + t;
                        const double divisor = d->pool2d.divisor_override    ? (double)d->pool2d.divisor_override
                                               : d->pool2d.count_include_pad ? padded
                                                                             : inside;
                        if (pass == 0) {
                            inside += 1;
                            sum += r->x[0][x_at];
                        } else if (backward) {
                            r->dx[0][x_at] += r->dy[y_at] / divisor;
                        } else {
                            r->y[y_at] = sum / divisor;
                        }
                    }
        }
}

static double function_value(enum kernel_function f, double x)
{
    switch (f) {
    case KERNEL_RELU:
        return relu(x);
    case KERNEL_TANH:
        return tanh(x);
    case KERNEL_SIGMOID:
        return 1 / (1 + exp(-x));
    case KERNEL_GELU_ERF:
        return 0.5 * x * (1 + erf(x * M_SQRT1_2));
    case KERNEL_GELU_TANH:
        return 0.5 * x * (1 + tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    }
    return NAN;
}

static double function_slope(enum kernel_function f, double x)
{
    const double y = function_value(f, x);
    switch (f) {
    case KERNEL_RELU:
        return x <= 0 ? 0 : 1;
    case KERNEL_TANH:
        return 1 - y * y;
    case KERNEL_SIGMOID:
        return y * (1 - y);
    case KERNEL_GELU_ERF:
        return 0.5 * (1 + erf(x * M_SQRT1_2)) + x * exp(-0.5 * x * x) / sqrt(2 * M_PI);
    case KERNEL_GELU_TANH: {
        const double t = tanh(sqrt(2 / M_PI) * (x + 0.044715 * x * x * x));
        return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * sqrt(2 / M_PI) * (1 + 3 * 0.044715 * x * x);
    }
    }
    return NAN;
}

static void cross_entropy(const struct kernel_op_desc *d, struct reference *r, size_t row, bool backward)
{
    const size_t classes = d->cross_entropy.classes;
    const int64_t target = ((const int64_t *)r->targets)[row];
    const double smoothing = (double)d->cross_entropy.label_smoothing;
    if (target == d->cross_entropy.ignore_index)
        return;
    const double *x = r->x[0] + row * classes;
    double sum = 0;
    for (size_t c = 0; c < classes; c++)
        sum += exp(x[c]);
    for (size_t c = 0; c < classes; c++) {
        const double wanted = smoothing / (double)classes + ((size_t)target == c ? 1 - smoothing : 0);
        if (backward)
            r->dx[0][row * classes + c] = exp(x[c]) / sum - wanted;
        else
            r->loss_sum -= wanted * (x[c] - log(sum));
    }
    if (!backward)
        r->loss_weight += 1;
}

void reference_forward(const struct kernel_op_desc *d, struct reference *r)
{
    const size_t n = reference_x_elements(d);
    r->loss_sum = r->loss_weight = 0;
    for (size_t row = 0; row < d->rows; row++)
        switch (d->kind) {
        case KERNEL_LINEAR:
            linear(d, r, row, false);
            break;
        case KERNEL_CONV2D:
            conv_forward(d, r, row);
            break;
        case KERNEL_MAX_POOL2D:
            for (size_t c = 0, in = n / d->pool2d.channels, out = reference_y_elements(d) / d->pool2d.channels;
                 c < d->pool2d.channels; c++)
                max_pool(&d->pool2d.window, d->pool2d.in_height, d->pool2d.in_width, d->pool2d.out_height,
                         d->pool2d.out_width, r->x[0] + (row * d->pool2d.channels + c) * in,
                         r->y + (row * d->pool2d.channels + c) * out, r->winner + (row * d->pool2d.channels + c) * out);
            break;
        case KERNEL_AVG_POOL2D:
            for (size_t c = 0; c < d->pool2d.channels; c++)
                average_pool(d, r, row * d->pool2d.channels + c, false);
            break;
        case KERNEL_ELEMENTWISE:
            for (size_t i = row * n; i < (row + 1) * n; i++)
                r->y[i] = function_value(d->elementwise.function, r->x[0][i]);
            break;
        case KERNEL_ADD:
            for (size_t i = row * n; i < (row + 1) * n; i++) {
                r->y[i] = 0;
                for (size_t k = 0; k < d->inputs; k++)
                    r->y[i] += r->x[k][i];
            }
            break;
        case KERNEL_CROSS_ENTROPY:
            cross_entropy(d, r, row, false);
            break;
        case KERNEL_MSE:
            for (size_t i = row * n; i < (row + 1) * n; i++)
                r->loss_sum += pow(r->x[0][i] - (double)((const float *)r->targets)[i], 2);
            r->loss_weight += (double)n;
            break;
        }
}

void reference_backward(const struct kernel_op_desc *d, struct reference *r)
{
    const size_t n = reference_x_elements(d);
    for (size_t k = 0; k < (d->kind == KERNEL_ADD ? d->inputs : 1); k++)
        memset(r->dx[k], 0, d->rows * n * sizeof(double));
    memset(r->dweight, 0, reference_weight_elements(d) * sizeof(double));
    memset(r->dbias, 0, reference_bias_elements(d) * sizeof(double));
    for (size_t row = 0; row < d->rows; row++)
        switch (d->kind) {
        case KERNEL_LINEAR:
            linear(d, r, row, true);
            break;
        case KERNEL_CONV2D:
            conv_backward(d, r, row);
            break;
        case KERNEL_MAX_POOL2D: {
            const size_t out = reference_y_elements(d), plane_out = out / d->pool2d.channels,
                         plane_in = n / d->pool2d.channels;
            for (size_t i = 0; i < out; i++)
                r->dx[0][row * n + i / plane_out * plane_in + r->winner[row * out + i]] += r->dy[row * out + i];
            break;
        }
        case KERNEL_AVG_POOL2D:
            for (size_t c = 0; c < d->pool2d.channels; c++)
                average_pool(d, r, row * d->pool2d.channels + c, true);
            break;
        case KERNEL_ELEMENTWISE:
            for (size_t i = row * n; i < (row + 1) * n; i++)
                r->dx[0][i] = r->dy[i] * function_slope(d->elementwise.function, r->x[0][i]);
            break;
        case KERNEL_ADD:
            for (size_t k = 0; k < d->inputs; k++)
                memcpy(r->dx[k] + row * n, r->dy + row * n, n * sizeof(double));
            break;
        case KERNEL_CROSS_ENTROPY:
            cross_entropy(d, r, row, true);
            break;
        case KERNEL_MSE:
            for (size_t i = row * n; i < (row + 1) * n; i++)
                r->dx[0][i] = 2 * (r->x[0][i] - (double)((const float *)r->targets)[i]);
            break;
        }
}
