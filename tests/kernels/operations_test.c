/* Every operation at every instruction set of this machine against the double reference, over many shapes. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include "tests/kernels/rig.h"

/* A sanitized build is slow: fewer shapes there. */
#if defined(__SANITIZE_THREAD__)
#define SHAPES 8
#elif defined(__SANITIZE_ADDRESS__)
#define SHAPES 40
#else
#define SHAPES 300
#endif

/* Forward, backward with and without accumulation, in one part and in several. */
static void check_op(const struct kernel_op_desc *desc, uint64_t seed, double tolerance)
{
    for (const char *const *level = rig_levels(); *level; level++) {
        struct rig *rig = rig_open(*level, desc, seed, seed % 3);
        rig_forward(rig);
        rig_check_forward(rig, tolerance);
        rig_backward(rig, false, 0);
        rig_check_backward(rig, tolerance, false);
        rig_backward(rig, true, 1 + seed % 5);
        rig_check_backward(rig, tolerance, true);
        rig_close(rig);
    }
}

static void linear_gives_the_reference(void **state)
{
    (void)state;
    static const size_t sizes[][3] = {{1, 1, 1},     {1, 300, 7},  {64, 10, 20},  {64, 20, 2}, {64, 784, 130},
                                      {130, 33, 65}, {257, 16, 5}, {3, 128, 256}, {17, 5, 700}};
    uint64_t random = 1;
    for (size_t i = 0; i < SHAPES; i++) {
        const size_t known = sizeof sizes / sizeof sizes[0];
        const struct kernel_op_desc desc = {.kind = KERNEL_LINEAR,
                                            .rows = i < known ? sizes[i][0] : rig_between(&random, 1, 80),
                                            .inputs = 1,
                                            .bias = rig_random(&random) % 2,
                                            .relu = rig_random(&random) % 2,
                                            .linear = {.in = i < known ? sizes[i][1] : rig_between(&random, 1, 150),
                                                       .out = i < known ? sizes[i][2] : rig_between(&random, 1, 70)}};
        check_op(&desc, i, 3e-5);
    }
}

static struct kernel_window random_window(uint64_t *random, const size_t in[2], bool simple)
{
    struct kernel_window w;
    for (int axis = 0; axis < 2; axis++) {
        w.dilation[axis] = simple || rig_random(random) % 3 ? 1 : rig_between(random, 1, 2);
        w.stride[axis] = rig_random(random) % 2 ? 1 : rig_between(random, 1, 3);
        const size_t most = (in[axis] - 1) / w.dilation[axis] + 1;
        w.kernel[axis] = rig_between(random, 1, most < 5 ? most : 5);
        w.padding[axis] = simple || rig_random(random) % 2 ? 0 : rig_between(random, 0, w.kernel[axis]);
    }
    return w;
}

static struct kernel_op_desc random_conv(uint64_t *random)
{
    struct kernel_op_desc d = {.kind = KERNEL_CONV2D,
                               .inputs = 1,
                               .rows = rig_between(random, 1, 5),
                               .bias = rig_random(random) % 2,
                               .relu = rig_random(random) % 2};
    d.conv2d.groups = rig_random(random) % 4 ? 1 : rig_between(random, 1, 3);
    d.conv2d.in_channels = d.conv2d.groups * rig_between(random, 1, 6);
    d.conv2d.out_channels = d.conv2d.groups * rig_between(random, 1, 9);
    d.conv2d.in_height = rig_between(random, 1, 20);
    d.conv2d.in_width = rig_between(random, 1, 30);
    d.conv2d.window =
        random_window(random, (const size_t[2]){d.conv2d.in_height, d.conv2d.in_width}, rig_random(random) % 2);
    d.conv2d.pool = rig_random(random) % 2;
    const bool pool = d.conv2d.pool;
    d.conv2d.pool = false;
    rig_complete(&d, false);
    d.conv2d.pool = pool;
    if (pool) {
        const size_t out[2] = {d.conv2d.out_height, d.conv2d.out_width};
        for (int axis = 0; axis < 2; axis++) {
            const size_t most = out[axis] < 3 ? out[axis] : 3;
            d.conv2d.pool_window.kernel[axis] = rig_random(random) % 2 && most >= 2 ? 2 : rig_between(random, 1, most);
            d.conv2d.pool_window.stride[axis] =
                rig_random(random) % 3 ? d.conv2d.pool_window.kernel[axis] : rig_between(random, 1, 3);
            d.conv2d.pool_window.dilation[axis] = 1;
        }
        rig_complete(&d, false);
    }
    return d;
}

static void conv2d_gives_the_reference(void **state)
{
    (void)state;
    uint64_t random = 2;
    for (size_t i = 0; i < 2 * SHAPES; i++) {
        const struct kernel_op_desc desc = random_conv(&random);
        check_op(&desc, i, 3e-5);
    }
}

/* The convolutions of the models that are trained most, and wider ones. */
static void conv2d_of_models(void **state)
{
    (void)state;
    static const struct {
        size_t in, out, size, kernel, padding, stride;
        bool pool;
    } cases[] = {{1, 20, 28, 5, 0, 1, true},   {20, 50, 12, 5, 0, 1, true}, {1, 20, 28, 5, 0, 1, false},
                 {20, 50, 12, 5, 0, 1, false}, {3, 16, 32, 3, 1, 1, true},  {64, 64, 14, 3, 1, 1, false},
                 {64, 130, 9, 3, 1, 2, false}, {70, 20, 8, 1, 0, 1, false}, {33, 40, 10, 3, 1, 1, true}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        struct kernel_op_desc d = {.kind = KERNEL_CONV2D, .inputs = 1, .rows = 3, .bias = true, .relu = i % 2 == 0};
        d.conv2d.groups = 1;
        d.conv2d.in_channels = cases[i].in;
        d.conv2d.out_channels = cases[i].out;
        d.conv2d.in_height = d.conv2d.in_width = cases[i].size;
        d.conv2d.window = (struct kernel_window){{cases[i].kernel, cases[i].kernel},
                                                 {cases[i].stride, cases[i].stride},
                                                 {cases[i].padding, cases[i].padding},
                                                 {1, 1}};
        d.conv2d.pool = cases[i].pool;
        d.conv2d.pool_window = (struct kernel_window){{2, 2}, {2, 2}, {0, 0}, {1, 1}};
        rig_complete(&d, false);
        check_op(&d, i, 3e-5);
    }
}

static void pools_give_the_reference(void **state)
{
    (void)state;
    uint64_t random = 3;
    for (size_t i = 0; i < 2 * SHAPES; i++) {
        struct kernel_op_desc d = {.kind = rig_random(&random) % 2 ? KERNEL_MAX_POOL2D : KERNEL_AVG_POOL2D,
                                   .inputs = 1,
                                   .rows = rig_between(&random, 1, 3)};
        d.pool2d.channels = rig_between(&random, 1, 4);
        d.pool2d.in_height = rig_between(&random, 1, 20);
        d.pool2d.in_width = rig_between(&random, 1, 70);
        const size_t in[2] = {d.pool2d.in_height, d.pool2d.in_width};
        d.pool2d.window = random_window(&random, in, d.kind == KERNEL_AVG_POOL2D);
        for (int axis = 0; axis < 2; axis++) {
            struct kernel_window *w = &d.pool2d.window;
            if (rig_random(&random) % 2 && in[axis] >= 2)
                w->kernel[axis] = 2, w->stride[axis] = 2, w->dilation[axis] = 1;
            /* PyTorch's bound; and with dilation a window might miss the input */
            w->padding[axis] = w->dilation[axis] == 1 ? rig_between(&random, 0, w->kernel[axis] / 2) : 0;
        }
        d.pool2d.count_include_pad = rig_random(&random) % 2;
        d.pool2d.divisor_override = rig_random(&random) % 4 ? 0 : rig_between(&random, 1, 9);
        rig_complete(&d, rig_random(&random) % 2);
        check_op(&d, i, 1e-6);
    }
}

static void elementwise_gives_the_reference(void **state)
{
    (void)state;
    uint64_t random = 4;
    for (size_t i = 0; i < SHAPES; i++) {
        const struct kernel_op_desc desc = {
            .kind = KERNEL_ELEMENTWISE,
            .inputs = 1,
            .rows = rig_between(&random, 1, 9),
            .elementwise = {.function = (enum kernel_function)(i % 5), .elements = rig_between(&random, 1, 100)}};
        check_op(&desc, i, 1e-6);
    }
}

static void add_gives_the_reference(void **state)
{
    (void)state;
    uint64_t random = 5;
    for (size_t i = 0; i < SHAPES / 4; i++) {
        const struct kernel_op_desc desc = {.kind = KERNEL_ADD,
                                            .inputs = i ? rig_between(&random, 2, 5) : KERNEL_INPUTS_MAX,
                                            .rows = rig_between(&random, 1, 9),
                                            .add = {.elements = rig_between(&random, 1, 100)}};
        check_op(&desc, i, 1e-5);
    }
}

static void losses_give_the_reference(void **state)
{
    (void)state;
    uint64_t random = 6;
    for (size_t i = 0; i < SHAPES; i++) {
        struct kernel_op_desc desc = {
            .kind = i % 2 ? KERNEL_CROSS_ENTROPY : KERNEL_MSE, .inputs = 1, .rows = rig_between(&random, 1, 70)};
        if (i % 2) {
            desc.cross_entropy.classes = rig_between(&random, 1, i % 4 == 1 ? 17 : 300);
            desc.cross_entropy.ignore_index = rig_random(&random) % 2 ? -100 : 0;
            desc.cross_entropy.label_smoothing = rig_random(&random) % 2 ? 0.0f : 0.1f;
        } else {
            desc.mse.elements = rig_between(&random, 1, 50);
        }
        check_op(&desc, i, 3e-6);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(linear_gives_the_reference),
        cmocka_unit_test(conv2d_gives_the_reference),
        cmocka_unit_test(conv2d_of_models),
        cmocka_unit_test(pools_give_the_reference),
        cmocka_unit_test(elementwise_gives_the_reference),
        cmocka_unit_test(add_gives_the_reference),
        cmocka_unit_test(losses_give_the_reference),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
