/* The double reference's gradients against finite differences of its own forward pass: what every backend is compared
 * with is itself right. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <math.h>

#include "tests/kernels/rig.h"

/* sum of y * dy (or the loss): its gradient is what backward gives. */
static double objective(const struct rig *rig, struct reference *r)
{
    reference_forward(&rig->desc, r);
    double s = rig->y_elements ? 0 : r->loss_sum;
    for (size_t i = 0; i < rig->desc.rows * rig->y_elements; i++)
        s += r->y[i] * r->dy[i];
    return s;
}

static void check_gradient(struct rig *rig, double *values, const double *gradient, size_t n)
{
    const double h = 1e-5;
    for (size_t i = 0; i < n; i++) {
        const double kept = values[i];
        values[i] = kept + h;
        const double up = objective(rig, &rig->ref);
        values[i] = kept - h;
        const double down = objective(rig, &rig->ref);
        values[i] = kept;
        const double slope = (up - down) / (2 * h);
        if (!(fabs(slope - gradient[i]) < 1e-6 * (1 + fabs(slope))))
            fail_msg("kind %d: gradient %zu is %.9g, differences give %.9g", (int)rig->desc.kind, i, gradient[i],
                     slope);
    }
}

static void check(struct kernel_op_desc desc, uint64_t seed)
{
    struct rig *rig = rig_open("generic", &desc, seed, 0);
    reference_forward(&rig->desc, &rig->ref);
    reference_backward(&rig->desc, &rig->ref);
    for (size_t k = 0; k < (desc.kind == KERNEL_ADD ? desc.inputs : 1); k++)
        check_gradient(rig, rig->ref.x[k], rig->ref.dx[k], desc.rows * rig->x_elements);
    check_gradient(rig, rig->ref.weight, rig->ref.dweight, rig->weight_elements);
    check_gradient(rig, rig->ref.bias, rig->ref.dbias, rig->bias_elements);
    rig_close(rig);
}

static void gradients_are_those_of_finite_differences(void **state)
{
    (void)state;
    for (uint64_t seed = 0; seed < 3; seed++) {
        check(
            (struct kernel_op_desc){.kind = KERNEL_LINEAR, .rows = 3, .bias = true, .relu = seed & 1, .linear = {5, 7}},
            seed);
        check((struct kernel_op_desc){.kind = KERNEL_ADD, .rows = 2, .inputs = 3, .add = {5}}, seed);
        check(
            (struct kernel_op_desc){.kind = KERNEL_CROSS_ENTROPY, .rows = 9, .cross_entropy = {5, 2, seed ? 0.1f : 0}},
            seed);
        check((struct kernel_op_desc){.kind = KERNEL_MSE, .rows = 3, .mse = {5}}, seed);
        for (int f = KERNEL_RELU; f <= KERNEL_GELU_TANH; f++)
            check((struct kernel_op_desc){.kind = KERNEL_ELEMENTWISE,
                                          .rows = 2,
                                          .elementwise = {(enum kernel_function)f, 11}},
                  seed);
        for (int i = 0; i < 8; i++) {
            struct kernel_op_desc d = {.kind = KERNEL_CONV2D, .rows = 2, .bias = true, .relu = i & 1};
            d.conv2d.groups = i & 4 ? 2 : 1;
            d.conv2d.in_channels = 2;
            d.conv2d.out_channels = 4;
            d.conv2d.in_height = 8;
            d.conv2d.in_width = 7;
            d.conv2d.window = (struct kernel_window){{3, 2}, {1, 1 + seed % 2}, {1, 0}, {1 + seed % 2, 1}};
            d.conv2d.pool = i & 2;
            d.conv2d.pool_window = (struct kernel_window){{2, 2}, {seed ? 2 : 1, 1}, {0, 0}, {1, 1}};
            rig_complete(&d, false);
            check(d, seed);
            struct kernel_op_desc p = {.kind = i & 1 ? KERNEL_MAX_POOL2D : KERNEL_AVG_POOL2D, .rows = 2};
            p.pool2d.channels = 2;
            p.pool2d.in_height = 6;
            p.pool2d.in_width = 7;
            p.pool2d.window = (struct kernel_window){{3, 2}, {2, 1 + seed % 2}, {1, 1}, {1, 1}};
            p.pool2d.count_include_pad = i & 2;
            p.pool2d.divisor_override = i & 4 ? 5 : 0;
            rig_complete(&p, seed == 2);
            check(p, seed);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(gradients_are_those_of_finite_differences)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
