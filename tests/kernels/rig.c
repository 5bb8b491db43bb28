#include "tests/kernels/rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "tests/support/fnv.h"
#include "tests/support/splitmix.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#else
#define ASAN_POISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#define ASAN_UNPOISON_MEMORY_REGION(address, bytes) ((void)(address), (void)(bytes))
#endif

#define MARGIN 32 /* floats before and behind every buffer */
static const float MARGIN_VALUE = 12345.0f;
/* What a gradient holds already where it is accumulated to. */
static const float ALREADY = 0.5f;

uint64_t rig_random(uint64_t *state)
{
    return splitmix(state);
}

size_t rig_between(uint64_t *state, size_t low, size_t high)
{
    return low + rig_random(state) % (high - low + 1);
}

float rig_uniform(uint64_t *state)
{
    return (float)(rig_random(state) >> 40) * 0x1p-23f - 1.0f;
}

/* Reading a margin is found by the address sanitizer. */
static void guard(const float *p, size_t n)
{
    ASAN_POISON_MEMORY_REGION(p - MARGIN, MARGIN * sizeof *p);
    ASAN_POISON_MEMORY_REGION(p + n, MARGIN * sizeof *p);
}

static void unguard(const float *p, size_t n)
{
    ASAN_UNPOISON_MEMORY_REGION(p - MARGIN, MARGIN * sizeof *p);
    ASAN_UNPOISON_MEMORY_REGION(p + n, MARGIN * sizeof *p);
}

static float *buffer(size_t n, size_t misalign)
{
    const size_t bytes = ((n + misalign + 2 * MARGIN) * sizeof(float) + 63) / 64 * 64 + 64;
    float *start = aligned_alloc(64, bytes);
    assert_non_null(start);
    memset(start, 0, bytes);
    float *p = start + MARGIN + misalign;
    for (size_t i = 0; i < MARGIN; i++) {
        p[i - MARGIN] = MARGIN_VALUE;
        p[n + i] = MARGIN_VALUE;
    }
    guard(p, n);
    return p;
}

static void release(const float *p, size_t misalign)
{
    if (p)
        free((float *)(uintptr_t)p - MARGIN - misalign);
}

static void check_margin(const float *p, size_t n)
{
    if (!p)
        return;
    unguard(p, n);
    for (size_t i = 0; i < MARGIN; i++) {
        assert_true(p[(ptrdiff_t)i - MARGIN] == MARGIN_VALUE);
        assert_true(p[n + i] == MARGIN_VALUE);
    }
    guard(p, n);
}

static double *doubles(size_t n)
{
    double *p = calloc(n ? n : 1, sizeof *p);
    assert_non_null(p);
    return p;
}

/* rows x n random values, NaN between them; copied to wide (may be NULL). */
static void fill(uint64_t *state, float *p, size_t rows, size_t n, size_t stride, double *wide)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < stride; i++) {
            p[r * stride + i] = i < n ? rig_uniform(state) : NAN;
            if (i < n && wide)
                wide[r * n + i] = (double)p[r * stride + i];
        }
}

static size_t misalign_of(const struct rig *rig)
{
    return ((uintptr_t)rig->args.x[0] / sizeof(float) - MARGIN) % 16;
}

static void make_targets(struct rig *rig, uint64_t *state)
{
    const struct kernel_op_desc *d = &rig->desc;
    if (d->kind == KERNEL_CROSS_ENTROPY) {
        int64_t *t = calloc(d->rows, sizeof *t);
        assert_non_null(t);
        for (size_t r = 0; r < d->rows; r++)
            t[r] = rig_random(state) % 5 == 0 ? d->cross_entropy.ignore_index
                                              : (int64_t)(rig_random(state) % d->cross_entropy.classes);
        rig->args.targets = t;
    } else if (d->kind == KERNEL_MSE) {
        float *t = calloc(d->rows * d->mse.elements, sizeof *t);
        assert_non_null(t);
        fill(state, t, d->rows, d->mse.elements, d->mse.elements, NULL);
        rig->args.targets = t;
    }
    rig->ref.targets = rig->args.targets;
    rig->args.loss = &rig->loss;
}

static void make_parameters(struct rig *rig, uint64_t *state, size_t misalign)
{
    const size_t w = rig->weight_elements, b = rig->bias_elements;
    rig->ref.weight = doubles(w);
    rig->ref.dweight = doubles(w);
    rig->ref.bias = doubles(b);
    rig->ref.dbias = doubles(b);
    if (w) {
        float *weight = buffer(w, misalign);
        fill(state, weight, 1, w, w, rig->ref.weight);
        rig->args.weight = weight;
        rig->args.dweight = buffer(w, misalign);
    }
    if (b) {
        float *bias = buffer(b, misalign);
        fill(state, bias, 1, b, b, rig->ref.bias);
        rig->args.bias = bias;
        rig->args.dbias = buffer(b, misalign);
    }
}

struct rig *rig_open(const char *isa, const struct kernel_op_desc *desc, uint64_t seed, size_t misalign)
{
    struct rig *rig = calloc(1, sizeof *rig);
    assert_non_null(rig);
    struct tally_error err = {0};
    rig->kernels = kernels_find("cpu");
    assert_non_null(rig->kernels);
    assert_int_equal(rig->kernels->open(isa, 0, &rig->backend, &err), TALLY_OK);
    assert_int_equal(rig->kernels->stream_open(rig->backend, &rig->stream, &err), TALLY_OK);
    rig->desc = *desc;
    struct kernel_op_desc *d = &rig->desc;
    rig->x_elements = reference_x_elements(d);
    rig->y_elements = reference_y_elements(d);
    if (!d->x_stride)
        d->x_stride = rig->kernels->row_stride(rig->backend, rig->x_elements);
    if (!d->y_stride)
        d->y_stride = rig->y_elements ? rig->kernels->row_stride(rig->backend, rig->y_elements) : 0;
    if (rig->kernels->prepare(rig->backend, d, &rig->op, &err))
        fail_msg("prepare: %s", err.message);
    rig->weight_elements = reference_weight_elements(d);
    rig->bias_elements = reference_bias_elements(d);
    rig->weight_rows = d->kind == KERNEL_LINEAR ? d->linear.out : d->kind == KERNEL_CONV2D ? d->conv2d.out_channels : 0;
    const size_t inputs = d->kind == KERNEL_ADD ? d->inputs : 1;
    for (size_t i = 0; i < inputs; i++) {
        float *x = buffer(d->rows * d->x_stride, misalign);
        rig->ref.x[i] = doubles(d->rows * rig->x_elements);
        rig->ref.dx[i] = doubles(d->rows * rig->x_elements);
        fill(&seed, x, d->rows, rig->x_elements, d->x_stride, rig->ref.x[i]);
        rig->args.x[i] = x;
        rig->args.dx[i] = buffer(d->rows * d->x_stride, misalign);
    }
    rig->args.y = buffer(d->rows * d->y_stride, misalign);
    rig->args.dy = buffer(d->rows * d->y_stride, misalign);
    rig->dy_kept = calloc(d->rows * d->y_stride + 1, sizeof(float));
    assert_non_null(rig->dy_kept);
    rig->ref.y = doubles(d->rows * rig->y_elements);
    rig->ref.dy = doubles(d->rows * rig->y_elements);
    rig->ref.winner = calloc(d->rows * rig->y_elements + 1, sizeof(size_t));
    fill(&seed, rig->dy_kept, d->rows, rig->y_elements, d->y_stride, rig->ref.dy);
    make_parameters(rig, &seed, misalign);
    make_targets(rig, &seed);
    const size_t saved = rig->kernels->saved_bytes(rig->op), workspace = rig->kernels->workspace_bytes(rig->op);
    rig->args.saved = buffer((saved + 3) / 4, 0);
    rig->args.workspace = buffer((workspace + 3) / 4, 0);
    return rig;
}

void rig_close(struct rig *rig)
{
    const size_t misalign = misalign_of(rig);
    for (size_t i = 0; i < KERNEL_INPUTS_MAX; i++) {
        release(rig->args.x[i], misalign);
        release(rig->args.dx[i], misalign);
        free(rig->ref.x[i]);
        free(rig->ref.dx[i]);
    }
    const float *const floats[] = {rig->args.y,    rig->args.dy,      rig->args.weight,
                                   rig->args.bias, rig->args.dweight, rig->args.dbias};
    for (size_t i = 0; i < sizeof floats / sizeof floats[0]; i++)
        release(floats[i], misalign);
    release(rig->args.saved, 0);
    release(rig->args.workspace, 0);
    free((void *)(uintptr_t)rig->args.targets);
    free(rig->dy_kept);
    free(rig->ref.y);
    free(rig->ref.dy);
    free(rig->ref.winner);
    free(rig->ref.weight);
    free(rig->ref.dweight);
    free(rig->ref.bias);
    free(rig->ref.dbias);
    rig->kernels->release(rig->op);
    rig->kernels->stream_close(rig->stream);
    rig->kernels->close(rig->backend);
    free(rig);
}

static size_t windows(const struct kernel_window *w, int axis, size_t in, bool ceil_mode)
{
    const size_t room = in + 2 * w->padding[axis] - (w->kernel[axis] - 1) * w->dilation[axis] - 1;
    size_t out = room / w->stride[axis] + 1;
    if (ceil_mode && room % w->stride[axis] && out * w->stride[axis] < in + w->padding[axis])
        out++;
    return out;
}

void rig_complete(struct kernel_op_desc *d, bool ceil_mode)
{
    if (d->kind == KERNEL_CONV2D) {
        d->conv2d.out_height = windows(&d->conv2d.window, 0, d->conv2d.in_height, false);
        d->conv2d.out_width = windows(&d->conv2d.window, 1, d->conv2d.in_width, false);
        if (d->conv2d.pool) {
            d->conv2d.pool_height = windows(&d->conv2d.pool_window, 0, d->conv2d.out_height, false);
            d->conv2d.pool_width = windows(&d->conv2d.pool_window, 1, d->conv2d.out_width, false);
        }
    } else {
        d->pool2d.out_height = windows(&d->pool2d.window, 0, d->pool2d.in_height, ceil_mode);
        d->pool2d.out_width = windows(&d->pool2d.window, 1, d->pool2d.in_width, ceil_mode);
    }
}

void rig_forward(struct rig *rig)
{
    rig->kernels->forward(rig->op, rig->stream, &rig->args);
}

void rig_backward(struct rig *rig, bool accumulate, size_t part_rows)
{
    const struct kernel_op_desc *d = &rig->desc;
    memcpy(rig->args.dy, rig->dy_kept, d->rows * d->y_stride * sizeof(float));
    for (size_t i = 0; i < KERNEL_INPUTS_MAX; i++) {
        rig->args.dx_accumulate[i] = accumulate;
        for (size_t j = 0; rig->args.dx[i] && j < d->rows * d->x_stride; j++)
            rig->args.dx[i][j] = accumulate ? ALREADY : NAN;
    }
    for (size_t i = 0; i < rig->weight_elements; i++)
        rig->args.dweight[i] = NAN;
    for (size_t i = 0; i < rig->bias_elements; i++)
        rig->args.dbias[i] = NAN;
    rig->kernels->backward_data(rig->op, rig->stream, &rig->args);
    const size_t step = part_rows ? part_rows : rig->weight_rows;
    for (size_t b = 0; b < rig->weight_rows; b += step)
        rig->kernels->backward_weight(rig->op, rig->stream, &rig->args, b,
                                      b + step < rig->weight_rows ? b + step : rig->weight_rows);
}

static void check_values(const struct rig *rig, const char *what, const float *got, size_t rows, size_t n,
                         size_t stride, const double *expected, double offset, double tolerance)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < n; i++) {
            const double e = expected[r * n + i] + offset, g = (double)got[r * stride + i];
            if (!(fabs(e - g) <= tolerance * (1 + fabs(e))) && !(isnan(e) && isnan(g)) && !(isinf(e) && e == g))
                fail_msg("%s at %s [%zu][%zu]: %.9g, expected %.9g (%s)", what, rig->kernels->isa(rig->backend), r, i,
                         g, e, rig->kernels->formulation(rig->op));
        }
}

void rig_check_forward(struct rig *rig, double tolerance)
{
    const struct kernel_op_desc *d = &rig->desc;
    reference_forward(d, &rig->ref);
    check_values(rig, "y", rig->args.y, d->rows, rig->y_elements, d->y_stride, rig->ref.y, 0, tolerance);
    if (d->kind == KERNEL_CROSS_ENTROPY || d->kind == KERNEL_MSE) {
        assert_true(fabs(rig->loss.loss_sum - rig->ref.loss_sum) <= tolerance * (1 + fabs(rig->ref.loss_sum)));
        assert_true(rig->loss.weight == rig->ref.loss_weight);
    }
}

void rig_check_backward(struct rig *rig, double tolerance, bool accumulate)
{
    const struct kernel_op_desc *d = &rig->desc;
    reference_backward(d, &rig->ref);
    for (size_t i = 0; i < KERNEL_INPUTS_MAX; i++)
        if (rig->args.dx[i])
            check_values(rig, "dx", rig->args.dx[i], d->rows, rig->x_elements, d->x_stride, rig->ref.dx[i],
                         accumulate ? (double)ALREADY : 0, tolerance);
    check_values(rig, "dweight", rig->args.dweight, 1, rig->weight_elements, 0, rig->ref.dweight, 0,
                 tolerance * sqrt((double)d->rows));
    check_values(rig, "dbias", rig->args.dbias, 1, rig->bias_elements, 0, rig->ref.dbias, 0,
                 tolerance * sqrt((double)d->rows));
    rig_check_margins(rig);
}

void rig_check_margins(struct rig *rig)
{
    const struct kernel_op_desc *d = &rig->desc;
    for (size_t i = 0; i < KERNEL_INPUTS_MAX; i++) {
        check_margin(rig->args.x[i], d->rows * d->x_stride);
        check_margin(rig->args.dx[i], d->rows * d->x_stride);
    }
    check_margin(rig->args.y, d->rows * d->y_stride);
    check_margin(rig->args.dy, d->rows * d->y_stride);
    check_margin(rig->args.dweight, rig->weight_elements);
    check_margin(rig->args.dbias, rig->bias_elements);
    check_margin(rig->args.saved, (rig->kernels->saved_bytes(rig->op) + 3) / 4);
    check_margin(rig->args.workspace, (rig->kernels->workspace_bytes(rig->op) + 3) / 4);
}

uint64_t rig_digest(const struct rig *rig)
{
    const struct kernel_op_desc *d = &rig->desc;
    uint64_t h = FNV_START;
    for (size_t r = 0; r < d->rows; r++) {
        h = fnv_on(h, rig->args.y + r * d->y_stride, rig->y_elements * sizeof(float));
        for (size_t i = 0; i < KERNEL_INPUTS_MAX; i++)
            if (rig->args.dx[i])
                h = fnv_on(h, rig->args.dx[i] + r * d->x_stride, rig->x_elements * sizeof(float));
    }
    h = fnv_on(h, rig->args.dweight, rig->weight_elements * sizeof(float));
    h = fnv_on(h, rig->args.dbias, rig->bias_elements * sizeof(float));
    return fnv_on(h, &rig->loss, sizeof rig->loss);
}

const char *const *rig_levels(void)
{
    static const char *const all[] = {"avx512", "avx2", "generic", NULL};
    const struct kernels *kernels = kernels_find("cpu");
    for (const char *const *level = all;; level++) {
        struct kernel_backend *backend;
        if (kernels->open(*level, 0, &backend, NULL) == TALLY_OK) {
            kernels->close(backend);
            return level; /* a machine that has one has those below */
        }
    }
}
