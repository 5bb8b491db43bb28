/* What PyTorch does where a tolerance says nothing: NaN, ties, infinities, ignored and wrong targets, and that fusing
 * changes nothing. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>

#include "tests/kernels/rig.h"

static void set_x(struct rig *rig, size_t row, size_t i, float value)
{
    ((float *)(uintptr_t)rig->args.x[0])[row * rig->desc.x_stride + i] = value;
    rig->ref.x[0][row * rig->x_elements + i] = (double)value;
}

static struct kernel_op_desc pool_desc(size_t size, size_t kernel, size_t stride, size_t padding)
{
    struct kernel_op_desc d = {.kind = KERNEL_MAX_POOL2D, .rows = 2};
    d.pool2d.channels = 2;
    d.pool2d.in_height = d.pool2d.in_width = size;
    d.pool2d.window = (struct kernel_window){{kernel, kernel}, {stride, stride}, {padding, padding}, {1, 1}};
    rig_complete(&d, false);
    return d;
}

/* Values from a handful, so that ties are everywhere, and some NaN and infinities. */
static void coarse_x(struct rig *rig, uint64_t seed)
{
    static const float values[] = {0, 1, 1, -1, -0.0f, 2, 2, NAN, INFINITY, -INFINITY, -1, -2};
    for (size_t r = 0; r < rig->desc.rows; r++)
        for (size_t i = 0; i < rig->x_elements; i++)
            set_x(rig, r, i, values[rig_random(&seed) % (sizeof values / sizeof values[0])]);
}

static void max_pool_takes_the_first_maximum_and_nan(void **state)
{
    (void)state;
    static const size_t shapes[][4] = {{8, 2, 2, 0}, {40, 2, 2, 0}, {9, 3, 2, 1},
                                       {9, 3, 1, 0}, {7, 2, 2, 1},  {6, 2, 1, 0}};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (const char *const *level = rig_levels(); *level; level++) {
            const struct kernel_op_desc d = pool_desc(shapes[s][0], shapes[s][1], shapes[s][2], shapes[s][3]);
            struct rig *rig = rig_open(*level, &d, s, 0);
            coarse_x(rig, s);
            rig_forward(rig);
            rig_check_forward(rig, 0);
            for (size_t i = 0; i < d.rows * rig->y_elements; i++) /* the places too */
                assert_int_equal(((const uint32_t *)rig->args.saved)[i], rig->ref.winner[i]);
            rig_backward(rig, false, 0);
            rig_check_backward(rig, 1e-6, false);
            rig_close(rig);
        }
}

/* ceil_mode lets a window stand out of the input on both sides, as long as it is not by a whole stride. */
static void ceil_mode_takes_a_window_larger_than_the_input(void **state)
{
    (void)state;
    static const enum kernel_op_kind kinds[] = {KERNEL_MAX_POOL2D, KERNEL_AVG_POOL2D, KERNEL_AVG_POOL2D};
    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
        for (const char *const *level = rig_levels(); *level; level++) {
            struct kernel_op_desc d = pool_desc(8, 2, 2, 0);
            d.kind = kinds[k];
            d.pool2d.count_include_pad = k == 2;
            d.pool2d.in_height = 3; /* a window of 4; with padding also one of 6 over 2 + 2 columns */
            d.pool2d.in_width = 2;
            d.pool2d.window = (struct kernel_window){{4, 6}, {2, 3}, {0, 1}, {1, 1}};
            d.pool2d.out_height = d.pool2d.out_width = 1;
            struct rig *rig = rig_open(*level, &d, k, 0);
            rig_forward(rig);
            rig_check_forward(rig, 1e-6);
            rig_backward(rig, false, 0);
            rig_check_backward(rig, 1e-6, false);
            rig_close(rig);
        }
}

static void max_pool_of_known_values(void **state)
{
    (void)state;
    const struct kernel_op_desc d = pool_desc(2, 2, 2, 0);
    for (const char *const *level = rig_levels(); *level; level++) {
        struct rig *rig = rig_open(*level, &d, 0, 0);
        const float x[2][8] = {{1, 3, 3, 2, NAN, 5, NAN, 7},
                               {-INFINITY, -INFINITY, -INFINITY, -INFINITY, 0, -0.0f, 0, 0}};
        for (size_t r = 0; r < 2; r++)
            for (size_t i = 0; i < 8; i++)
                set_x(rig, r, i, x[r][i]);
        rig_forward(rig);
        const uint32_t *winner = rig->args.saved;
        assert_true(rig->args.y[0] == 3 && winner[0] == 1);
        assert_true(isnan(rig->args.y[1]) &&
                    winner[1] == 2); /* torch.nn.functional.max_pool2d: every NaN replaces the one before */
        assert_true(rig->args.y[rig->desc.y_stride] == -INFINITY && winner[2] == 0);
        assert_true(rig->args.y[rig->desc.y_stride + 1] == 0 && winner[3] == 0);
        rig_close(rig);
    }
}

/* A convolution, ReLU and pool in one against three operations: the same bits, gradients with the same zeros. */
static void check_fused(const char *level, struct kernel_op_desc fused, uint64_t seed)
{
    struct kernel_op_desc conv = fused, relu = {.kind = KERNEL_ELEMENTWISE, .rows = fused.rows},
                          pool = {.kind = KERNEL_MAX_POOL2D, .rows = fused.rows};
    conv.conv2d.pool = conv.relu = false;
    relu.elementwise.function = KERNEL_RELU;
    relu.elementwise.elements = reference_y_elements(&conv);
    pool.pool2d.channels = fused.conv2d.out_channels;
    pool.pool2d.in_height = fused.conv2d.out_height;
    pool.pool2d.in_width = fused.conv2d.out_width;
    pool.pool2d.window = fused.conv2d.pool_window;
    rig_complete(&pool, false);
    struct rig *one = rig_open(level, &fused, seed, 0), *c = rig_open(level, &conv, seed, 0),
               *r = rig_open(level, &relu, seed, 0), *p = rig_open(level, &pool, seed, 0);
    const size_t weights = one->weight_elements * sizeof(float), biases = one->bias_elements * sizeof(float);
    /* Few values, so that windows have ties, and a NaN in one image. */
    uint64_t random = seed;
    for (size_t row = 0; row < fused.rows; row++)
        for (size_t i = 0; i < one->x_elements; i++)
            set_x(one, row, i, (float)(rig_random(&random) % 3) - 1);
    if (seed % 4 == 0)
        set_x(one, fused.rows - 1, one->x_elements / 2, NAN);
    memcpy((float *)(uintptr_t)c->args.x[0], one->args.x[0], fused.rows * one->desc.x_stride * sizeof(float));
    for (size_t i = 0; i < one->weight_elements; i++)
        ((float *)(uintptr_t)one->args.weight)[i] = (float)(rig_random(&random) % 3) - 1;
    memcpy((float *)(uintptr_t)c->args.weight, one->args.weight, weights);
    if (biases)
        memcpy((float *)(uintptr_t)c->args.bias, one->args.bias, biases);
    memcpy(p->dy_kept, one->dy_kept, fused.rows * one->desc.y_stride * sizeof(float));

    const float *const x_of_r = r->args.x[0], *const x_of_p = p->args.x[0];
    rig_forward(one);
    rig_forward(c);
    r->args.x[0] = c->args.y;
    rig_forward(r);
    p->args.x[0] = fused.relu ? r->args.y : c->args.y;
    rig_forward(p);
    for (size_t row = 0; row < fused.rows; row++)
        for (size_t i = 0; i < one->y_elements; i++) {
            const float a = one->args.y[row * one->desc.y_stride + i], b = p->args.y[row * p->desc.y_stride + i];
            assert_true(a == b || (isnan(a) && isnan(b)));
        }

    rig_backward(one, false, 0);
    rig_backward(p, false, 0);
    memcpy(r->dy_kept, p->args.dx[0], fused.rows * r->desc.y_stride * sizeof(float));
    rig_backward(r, false, 0);
    memcpy(c->dy_kept, fused.relu ? r->args.dx[0] : p->args.dx[0], fused.rows * c->desc.y_stride * sizeof(float));
    rig_backward(c, false, 0);
    for (size_t i = 0; i < one->weight_elements;
         i++) /* sums in another order; a NaN in x meets a zero in one and nothing in the other */
        assert_true(isnan(c->args.dweight[i]) || fabsf(one->args.dweight[i] - c->args.dweight[i]) < 1e-3f);
    for (size_t row = 0; row < fused.rows; row++)
        for (size_t i = 0; i < one->x_elements; i++) {
            const float a = one->args.dx[0][row * one->desc.x_stride + i],
                        b = c->args.dx[0][row * c->desc.x_stride + i];
            assert_true(fabsf(a - b) < 1e-3f);
        }
    r->args.x[0] = x_of_r; /* the rigs free what they made */
    p->args.x[0] = x_of_p;
    rig_close(one);
    rig_close(c);
    rig_close(r);
    rig_close(p);
}

static void fusing_changes_nothing(void **state)
{
    (void)state;
    for (const char *const *level = rig_levels(); *level; level++)
        for (size_t i = 0; i < 24; i++) {
            struct kernel_op_desc d = {.kind = KERNEL_CONV2D, .rows = 3, .bias = i % 2, .relu = i % 3 != 0};
            d.conv2d.groups = 1;
            d.conv2d.in_channels = i % 5 == 0 ? 1 : 4;
            d.conv2d.out_channels = 7;
            d.conv2d.in_height = 12;
            d.conv2d.in_width = 11 + i % 4;
            d.conv2d.window = (struct kernel_window){{i % 2 ? 5 : 3, 3}, {1, 1 + i % 2}, {i % 3, 1}, {1, 1}};
            d.conv2d.pool = true;
            const size_t kernel = 2 + i % 2;
            d.conv2d.pool_window = (struct kernel_window){{kernel, 2}, {i % 4 == 3 ? 1 : kernel, 2}, {0, 0}, {1, 1}};
            rig_complete(&d, false);
            check_fused(*level, d, i);
        }
}

static void relu_keeps_nan_and_stops_at_zero(void **state)
{
    (void)state;
    const struct kernel_op_desc d = {.kind = KERNEL_ELEMENTWISE, .rows = 1, .elementwise = {KERNEL_RELU, 20}};
    for (const char *const *level = rig_levels(); *level; level++) {
        struct rig *rig = rig_open(*level, &d, 0, 0);
        set_x(rig, 0, 0, NAN);
        set_x(rig, 0, 1, 0);
        set_x(rig, 0, 2, -0.0f);
        set_x(rig, 0, 3, INFINITY);
        set_x(rig, 0, 4, -INFINITY);
        rig_forward(rig);
        assert_true(isnan(rig->args.y[0]) && rig->args.y[1] == 0 && rig->args.y[2] == 0 && rig->args.y[3] == INFINITY &&
                    rig->args.y[4] == 0);
        rig_backward(rig, false, 0);
        assert_true(rig->args.dx[0][0] == rig->dy_kept[0] && rig->args.dx[0][1] == 0 && rig->args.dx[0][2] == 0);
        assert_true(rig->args.dx[0][3] == rig->dy_kept[3] && rig->args.dx[0][4] == 0);
        rig_close(rig);
    }
}

/* The same ReLU behind a product: NaN reaches the output and its gradient passes. */
static void fused_relu_keeps_nan(void **state)
{
    (void)state;
    const struct kernel_op_desc d = {.kind = KERNEL_LINEAR, .rows = 9, .bias = true, .relu = true, .linear = {16, 19}};
    for (const char *const *level = rig_levels(); *level; level++) {
        struct rig *rig = rig_open(*level, &d, 0, 0);
        for (size_t r = 3; r < 9; r += 5)
            set_x(rig, r, 5, NAN);
        rig_forward(rig);
        for (size_t r = 0; r < 9; r++)
            for (size_t o = 0; o < 19; o++)
                assert_int_equal(isnan(rig->args.y[r * rig->desc.y_stride + o]) != 0, r == 3 || r == 8);
        rig_backward(rig, false, 0);
        for (size_t o = 0; o < 19; o++)
            assert_true(rig->args.dy[3 * rig->desc.y_stride + o] == rig->dy_kept[3 * rig->desc.y_stride + o]);
        rig_close(rig);
    }
}

static void cross_entropy_at_its_edges(void **state)
{
    (void)state;
    const struct kernel_op_desc d = {.kind = KERNEL_CROSS_ENTROPY, .rows = 6, .cross_entropy = {4, -100, 0}};
    for (const char *const *level = rig_levels(); *level; level++) {
        struct rig *rig = rig_open(*level, &d, 0, 0);
        int64_t *t = (int64_t *)(uintptr_t)rig->args.targets;
        const int64_t targets[6] = {-100, -100, 2, 1, 0, 3};
        memcpy(t, targets, sizeof targets);
        for (size_t r = 0; r < 6; r++)
            for (size_t c = 0; c < 4; c++)
                set_x(rig, r, c,
                      r == 2 ? 1000 : (float)c); /* row 2: a tie that would overflow without the maximum taken off */
        set_x(rig, 0, 0, NAN);                   /* ignored */
        rig_forward(rig);
        assert_true(rig->loss.weight == 4);
        assert_true(rig->loss.correct == 1); /* row 5; in row 2 the first largest is class 0 */
        const double lse = log(exp(0) + exp(1) + exp(2) + exp(3));
        assert_true(fabs(rig->loss.loss_sum - (log(4) + (lse - 1) + lse + (lse - 3))) < 1e-5);
        rig_backward(rig, false, 0);
        for (size_t c = 0; c < 4; c++) {
            assert_true(rig->args.dx[0][c] == 0);
            assert_true(fabsf(rig->args.dx[0][2 * rig->desc.x_stride + c] - (c == 2 ? -0.75f : 0.25f)) < 1e-6f);
        }
        memcpy(t, (const int64_t[6]){-100, -100, -100, -100, -100, -100}, sizeof targets);
        rig_forward(rig);
        assert_true(rig->loss.weight == 0 && rig->loss.loss_sum == 0 && rig->loss.correct == 0);

        /* A target that is no class: nothing is read out of bounds, and it does not pass unseen. */
        t[3] = 4;
        t[4] = INT64_MIN;
        rig_forward(rig);
        assert_true(isnan(rig->loss.loss_sum));
        rig_backward(rig, false, 0);
        assert_true(isnan(rig->args.dx[0][3 * rig->desc.x_stride]));
        assert_true(rig->args.dx[0][2 * rig->desc.x_stride] == 0);

        /* NaN and infinities as torch.nn.functional.cross_entropy */
        memcpy(t, (const int64_t[6]){0, -100, -100, -100, -100, -100}, sizeof targets);
        static const float edge[][4] = {
            {NAN, 1, 2, 3}, {INFINITY, 1, 2, 3}, {-INFINITY, -INFINITY, -INFINITY, -INFINITY}, {-INFINITY, 1, 2, 3}};
        for (size_t e = 0; e < 4; e++) {
            for (size_t c = 0; c < 4; c++)
                set_x(rig, 0, c, edge[e][c]);
            rig_forward(rig);
            assert_true(e < 3 ? isnan(rig->loss.loss_sum) : rig->loss.loss_sum == INFINITY);
        }
        rig_close(rig);
    }
}

static void argmax_is_the_first_largest_of(size_t classes)
{
    const struct kernel_op_desc d = {.kind = KERNEL_CROSS_ENTROPY, .rows = 1, .cross_entropy = {classes, -100, 0}};
    for (const char *const *level = rig_levels(); *level; level++) {
        struct rig *rig = rig_open(*level, &d, 0, 0);
        int64_t *t = (int64_t *)(uintptr_t)rig->args.targets;
        for (size_t c = 0; c < classes; c++)
            set_x(rig, 0, c, c == 7 || c == classes - 3 ? 5 : 1);
        for (int64_t c = 0; c < (int64_t)classes; c++) {
            *t = c;
            rig_forward(rig);
            assert_true(rig->loss.correct == (c == 7 ? 1 : 0));
        }
        set_x(rig, 0, classes - 2, NAN); /* torch.argmax: NaN is the largest, and the first of them counts */
        set_x(rig, 0, classes - 1, NAN);
        for (int64_t c = 0; c < (int64_t)classes; c++) {
            *t = c;
            rig_forward(rig);
            assert_true(rig->loss.correct == (c == (int64_t)classes - 2 ? 1 : 0));
        }
        rig_close(rig);
    }
}

static void argmax_is_the_first_largest(void **state)
{
    (void)state;
    argmax_is_the_first_largest_of(40);
    argmax_is_the_first_largest_of(12);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(max_pool_takes_the_first_maximum_and_nan),
        cmocka_unit_test(max_pool_of_known_values),
        cmocka_unit_test(ceil_mode_takes_a_window_larger_than_the_input),
        cmocka_unit_test(fusing_changes_nothing),
        cmocka_unit_test(relu_keeps_nan_and_stops_at_zero),
        cmocka_unit_test(fused_relu_keeps_nan),
        cmocka_unit_test(cross_entropy_at_its_edges),
        cmocka_unit_test(argmax_is_the_first_largest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
