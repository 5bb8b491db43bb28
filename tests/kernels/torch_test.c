/* Small operations against values that PyTorch gave (torch_reference.h, written by
 * tests/reference/kernels_reference.py).
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>

#include "tests/kernels/rig.h"
#include "tests/kernels/torch_reference.h"

enum tensor { X, WEIGHT, BIAS, DY, TARGET };

/* The script's formula. */
static float value(size_t case_, size_t tensor, size_t index)
{
    const uint32_t bits = (uint32_t)(index * 2654435761u + tensor * 40503u + case_ * 97u) >> 8;
    return (float)bits * 0x1p-23f - 1.0f;
}

static void fill_rows(float *p, size_t rows, size_t n, size_t stride, size_t case_, size_t tensor, float scale)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < n; i++)
            p[r * stride + i] = value(case_, tensor, r * n + i) * scale;
}

static size_t expect(size_t case_, size_t at, const float *got, size_t rows, size_t n, size_t stride)
{
    for (size_t r = 0; r < rows; r++)
        for (size_t i = 0; i < n; i++, at++) {
            assert_true(at < torch_cases[case_].count);
            const float e = torch_cases[case_].values[at], g = got[r * stride + i];
            if (!(fabsf(e - g) <= 2e-6f * (1 + fabsf(e))))
                fail_msg("case %zu [%zu]: %.9g, PyTorch gives %.9g", case_, at, (double)g, (double)e);
        }
    return at;
}

/* y, dx, dweight, dbias (or loss, dx) in the order of the script. scale: of x. */
static void check(size_t case_, struct kernel_op_desc desc, float scale)
{
    for (const char *const *level = rig_levels(); *level; level++) {
        struct rig *rig = rig_open(*level, &desc, case_, 0);
        const struct kernel_op_desc *d = &rig->desc;
        fill_rows((float *)(uintptr_t)rig->args.x[0], d->rows, rig->x_elements, d->x_stride, case_, X, scale);
        if (rig->weight_elements)
            fill_rows((float *)(uintptr_t)rig->args.weight, 1, rig->weight_elements, 0, case_, WEIGHT, 1);
        if (rig->bias_elements)
            fill_rows((float *)(uintptr_t)rig->args.bias, 1, rig->bias_elements, 0, case_, BIAS, 1);
        fill_rows(rig->dy_kept, d->rows, rig->y_elements, d->y_stride, case_, DY, 1);
        if (d->kind == KERNEL_MSE)
            fill_rows((float *)(uintptr_t)rig->args.targets, d->rows, rig->x_elements, rig->x_elements, case_, TARGET,
                      1);
        for (size_t r = 0; d->kind == KERNEL_CROSS_ENTROPY && r < d->rows; r++)
            ((int64_t *)(uintptr_t)rig->args.targets)[r] =
                r % 4 == 3 ? -100 : (int64_t)(r * 3 % d->cross_entropy.classes);
        rig_forward(rig);
        rig_backward(rig, false, 0);
        const float loss[2] = {(float)rig->loss.loss_sum, (float)rig->loss.correct};
        const size_t losses = d->kind == KERNEL_CROSS_ENTROPY ? 2 : d->kind == KERNEL_MSE ? 1 : 0;
        size_t at = expect(case_, 0, loss, 1, losses, 0);
        at = expect(case_, at, rig->args.y, d->rows, rig->y_elements, d->y_stride);
        at = expect(case_, at, rig->args.dx[0], d->rows, rig->x_elements, d->x_stride);
        at = expect(case_, at, rig->args.dweight, 1, rig->weight_elements, 0);
        at = expect(case_, at, rig->args.dbias, 1, rig->bias_elements, 0);
        assert_int_equal(at, torch_cases[case_].count);
        rig_close(rig);
    }
}

static void linear(void **state)
{
    (void)state;
    check(0, (struct kernel_op_desc){.kind = KERNEL_LINEAR, .rows = 3, .bias = true, .linear = {5, 4}}, 1);
    check(1, (struct kernel_op_desc){.kind = KERNEL_LINEAR, .rows = 4, .bias = true, .relu = true, .linear = {6, 3}},
          1);
}

static void conv2d(void **state)
{
    (void)state;
    static const struct {
        size_t rows, in, out, height, width, groups;
        bool relu, pool;
        struct kernel_window window, pool_window;
    } cases[] = {
        {2, 2, 3, 6, 7, 1, false, false, {{3, 3}, {1, 1}, {0, 0}, {1, 1}}, {{0, 0}, {0, 0}, {0, 0}, {0, 0}}},
        {2, 2, 4, 7, 8, 2, true, false, {{3, 2}, {2, 1}, {1, 0}, {1, 2}}, {{0, 0}, {0, 0}, {0, 0}, {0, 0}}},
        {2, 1, 3, 10, 10, 1, true, true, {{5, 5}, {1, 1}, {0, 0}, {1, 1}}, {{2, 2}, {2, 2}, {0, 0}, {1, 1}}},
        {1, 4, 5, 9, 11, 1, true, true, {{3, 3}, {1, 1}, {1, 1}, {1, 1}}, {{3, 2}, {2, 2}, {0, 0}, {1, 1}}},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct kernel_op_desc d = {.kind = KERNEL_CONV2D, .rows = cases[i].rows, .bias = true, .relu = cases[i].relu};
        d.conv2d.in_channels = cases[i].in;
        d.conv2d.out_channels = cases[i].out;
        d.conv2d.in_height = cases[i].height;
        d.conv2d.in_width = cases[i].width;
        d.conv2d.groups = cases[i].groups;
        d.conv2d.window = cases[i].window;
        d.conv2d.pool = cases[i].pool;
        d.conv2d.pool_window = cases[i].pool_window;
        rig_complete(&d, false);
        check(2 + i, d, 1);
    }
}

static void pools(void **state)
{
    (void)state;
    static const struct {
        enum kernel_op_kind kind;
        size_t channels, height, width;
        struct kernel_window window;
        bool ceil_mode, count_include_pad;
        size_t divisor;
    } cases[] = {
        {KERNEL_MAX_POOL2D, 2, 7, 9, {{3, 3}, {2, 2}, {1, 1}, {1, 1}}, false, false, 0},
        {KERNEL_MAX_POOL2D, 1, 8, 9, {{2, 3}, {2, 2}, {0, 1}, {2, 1}}, true, false, 0},
        {KERNEL_AVG_POOL2D, 2, 7, 9, {{3, 3}, {2, 2}, {1, 1}, {1, 1}}, false, true, 0},
        {KERNEL_AVG_POOL2D, 1, 8, 9, {{2, 3}, {2, 2}, {1, 1}, {1, 1}}, true, false, 0},
        {KERNEL_AVG_POOL2D, 1, 8, 9, {{3, 3}, {2, 2}, {1, 1}, {1, 1}}, true, true, 0},
        {KERNEL_AVG_POOL2D, 1, 8, 9, {{3, 3}, {2, 2}, {1, 1}, {1, 1}}, false, true, 5},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct kernel_op_desc d = {.kind = cases[i].kind, .rows = 1};
        d.pool2d.channels = cases[i].channels;
        d.pool2d.in_height = cases[i].height;
        d.pool2d.in_width = cases[i].width;
        d.pool2d.window = cases[i].window;
        d.pool2d.count_include_pad = cases[i].count_include_pad;
        d.pool2d.divisor_override = cases[i].divisor;
        rig_complete(&d, cases[i].ceil_mode);
        check(6 + i, d, 1);
    }
}

static void elementwise(void **state)
{
    (void)state;
    for (size_t f = KERNEL_RELU; f <= KERNEL_GELU_TANH; f++)
        check(
            12 + f,
            (struct kernel_op_desc){.kind = KERNEL_ELEMENTWISE, .rows = 2, .elementwise = {(enum kernel_function)f, 9}},
            4);
}

static void losses(void **state)
{
    (void)state;
    check(17, (struct kernel_op_desc){.kind = KERNEL_CROSS_ENTROPY, .rows = 7, .cross_entropy = {5, -100, 0}}, 1);
    check(18, (struct kernel_op_desc){.kind = KERNEL_CROSS_ENTROPY, .rows = 6, .cross_entropy = {19, -100, 0.1f}}, 1);
    check(19, (struct kernel_op_desc){.kind = KERNEL_MSE, .rows = 4, .mse = {5}}, 1);
}

static void sgd(void **state)
{
    (void)state;
    static const struct kernel_sgd options[] = {
        {.lr = 0.1f},
        {.lr = 0.1f, .momentum = 0.9f, .weight_decay = 0.05f},
        {.lr = 0.1f, .momentum = 0.9f, .nesterov = true},
        {.lr = 0.1f, .momentum = 0.8f, .dampening = 0.3, .weight_decay = 0.01f, .maximize = true},
    };
    const struct kernels *k = kernels_find("cpu");
    for (const char *const *level = rig_levels(); *level; level++) {
        struct kernel_backend *backend;
        struct kernel_stream *stream;
        assert_int_equal(k->open(*level, 0, &backend, NULL), TALLY_OK);
        assert_int_equal(k->stream_open(backend, &stream, NULL), TALLY_OK);
        for (size_t i = 0; i < sizeof options / sizeof options[0]; i++) {
            float w[7], m[7] = {0}, g[7];
            fill_rows(w, 1, 7, 0, 20 + i, WEIGHT, 1);
            for (size_t step = 0; step < 3; step++) {
                struct kernel_sgd o = options[i];
                o.first = step == 0;
                fill_rows(g, 1, 7, 0, 20 + i, 10 + step, 1);
                k->sgd(stream, 7, &o, 3, g, NULL, w, m, w, m);
            }
            assert_int_equal(expect(20 + i, 0, w, 1, 7, 0), torch_cases[20 + i].count);
        }
        k->stream_close(stream);
        k->close(backend);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear),      cmocka_unit_test(conv2d), cmocka_unit_test(pools),
        cmocka_unit_test(elementwise), cmocka_unit_test(losses), cmocka_unit_test(sgd),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
