/*
 * Which bits may change and which may not: the same description and inputs give the same bits, whatever the alignment,
 * what stands between the rows, the parts of a weight's gradient or the other rows.
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

static uint64_t run(const char *level, const struct kernel_op_desc *desc, size_t misalign, size_t part_rows, int times)
{
    struct rig *rig = rig_open(level, desc, 7, misalign);
    uint64_t digest = 0;
    for (int i = 0; i < times; i++) {
        /* What an earlier call left behind must not matter. */
        memset(rig->args.workspace, i ? 0xff : 0x55, rig->kernels->workspace_bytes(rig->op));
        memset(rig->args.saved, 0x55, rig->kernels->saved_bytes(rig->op));
        rig_forward(rig);
        rig_backward(rig, false, part_rows);
        const uint64_t d = rig_digest(rig);
        assert_true(i == 0 || d == digest);
        digest = d;
    }
    rig_check_margins(rig);
    rig_close(rig);
    return digest;
}

static size_t descriptions(struct kernel_op_desc *d)
{
    size_t n = 0;
    d[n++] =
        (struct kernel_op_desc){.kind = KERNEL_LINEAR, .rows = 64, .bias = true, .relu = true, .linear = {300, 70}};
    d[n++] = (struct kernel_op_desc){.kind = KERNEL_LINEAR, .rows = 5, .linear = {17, 33}};
    d[n++] = (struct kernel_op_desc){.kind = KERNEL_ELEMENTWISE, .rows = 3, .elementwise = {KERNEL_TANH, 77}};
    d[n++] = (struct kernel_op_desc){.kind = KERNEL_CROSS_ENTROPY, .rows = 9, .cross_entropy = {37, -100, 0.1f}};
    d[n++] = (struct kernel_op_desc){.kind = KERNEL_CROSS_ENTROPY, .rows = 37, .cross_entropy = {9, -100, 0.1f}};
    d[n++] = (struct kernel_op_desc){.kind = KERNEL_MSE, .rows = 9, .mse = {37}};
    for (size_t i = 0; i < 6; i++) {
        struct kernel_op_desc c = {.kind = KERNEL_CONV2D, .rows = 5, .bias = true, .relu = i % 2};
        c.conv2d.groups = i == 4 ? 2 : 1;
        c.conv2d.in_channels = i == 5 ? 1 : 6;
        c.conv2d.out_channels = 10;
        c.conv2d.in_height = 14;
        c.conv2d.in_width = 17;
        c.conv2d.window = (struct kernel_window){{5, 5}, {i == 3 ? 2 : 1, 1}, {i % 3, 1}, {1, 1}};
        c.conv2d.pool = i >= 2;
        c.conv2d.pool_window = (struct kernel_window){{2, 2}, {2, 2}, {0, 0}, {1, 1}};
        rig_complete(&c, false);
        d[n++] = c;
    }
    return n;
}

static void the_same_call_gives_the_same_bits(void **state)
{
    (void)state;
    struct kernel_op_desc d[16];
    const size_t n = descriptions(d);
    for (size_t i = 0; i < n; i++)
        for (const char *const *level = rig_levels(); *level; level++) {
            const uint64_t first = run(*level, &d[i], 0, 0, 2);
            for (size_t misalign = 1; misalign < 16; misalign += 5)
                assert_true(run(*level, &d[i], misalign, 0, 1) == first);
            d[i].x_stride = reference_x_elements(&d[i]); /* nothing between the rows */
            d[i].y_stride = reference_y_elements(&d[i]);
            assert_true(run(*level, &d[i], 0, 0, 1) == first);
            d[i].x_stride = d[i].y_stride = 0;
        }
}

static void parts_give_the_bits_of_the_whole(void **state)
{
    (void)state;
    struct kernel_op_desc d[16];
    const size_t n = descriptions(d);
    for (size_t i = 0; i < n; i++)
        for (const char *const *level = rig_levels(); *level; level++) {
            const uint64_t whole = run(*level, &d[i], 0, 0, 1);
            for (size_t part = 1; part < 9; part += 3)
                assert_true(run(*level, &d[i], 0, part, 1) == whole);
        }
}

/* A sample's output and input gradient do not depend on which samples stand beside it: neither on their number. */
static void a_row_does_not_see_the_others(void **state)
{
    (void)state;
    struct kernel_op_desc d[16];
    const size_t n = descriptions(d);
    for (size_t i = 0; i < n; i++)
        for (const char *const *level = rig_levels(); *level; level++) {
            if (d[i].kind == KERNEL_CROSS_ENTROPY || d[i].kind == KERNEL_MSE)
                continue;
            struct rig *all = rig_open(*level, &d[i], 7, 0);
            struct kernel_op_desc one_row = all->desc;
            one_row.rows = 1;
            struct rig *one = rig_open(*level, &one_row, 8, 0);
            rig_forward(all);
            rig_backward(all, false, 0);
            if (all->weight_elements)
                memcpy((float *)(uintptr_t)one->args.weight, all->args.weight, all->weight_elements * sizeof(float));
            if (all->bias_elements)
                memcpy((float *)(uintptr_t)one->args.bias, all->args.bias, all->bias_elements * sizeof(float));
            const size_t last = d[i].rows - 1;
            memcpy((float *)(uintptr_t)one->args.x[0], all->args.x[0] + last * all->desc.x_stride,
                   all->x_elements * sizeof(float));
            memcpy(one->dy_kept, all->dy_kept + last * all->desc.y_stride, all->y_elements * sizeof(float));
            rig_forward(one);
            rig_backward(one, false, 0);
            assert_memory_equal(one->args.y, all->args.y + last * all->desc.y_stride, all->y_elements * sizeof(float));
            assert_memory_equal(one->args.dx[0], all->args.dx[0] + last * all->desc.x_stride,
                                all->x_elements * sizeof(float));
            rig_close(one);
            rig_close(all);
        }
}

/* Element-wise operations, losses, sums and SGD have the same bits at every instruction set. */
static void levels_agree_on_elements(void **state)
{
    (void)state;
    for (size_t classes = 2; classes < 40; classes += 9) {
        const struct kernel_op_desc d = {
            .kind = KERNEL_CROSS_ENTROPY, .rows = 37, .cross_entropy = {classes, -100, 0.1f}};
        const uint64_t first = run("generic", &d, 0, 0, 1);
        for (const char *const *level = rig_levels(); *level; level++)
            assert_true(run(*level, &d, 0, 0, 1) == first);
    }
    for (int f = KERNEL_RELU; f <= KERNEL_GELU_TANH; f++) {
        const struct kernel_op_desc d = {
            .kind = KERNEL_ELEMENTWISE, .rows = 3, .elementwise = {(enum kernel_function)f, 1001}};
        const uint64_t first = run("generic", &d, 0, 0, 1);
        for (const char *const *level = rig_levels(); *level; level++)
            assert_true(run(*level, &d, 1, 0, 1) == first);
    }
    const struct kernels *k = kernels_find("cpu");
    enum { N = 1037 };
    float expected[3][N];
    for (const char *const *level = rig_levels(); *level; level++) {
        struct kernel_backend *backend;
        struct kernel_stream *stream;
        float a[N], b[N], w[N], m[N], sum[N];
        uint64_t random = 3;
        for (size_t i = 0; i < N; i++) {
            a[i] = rig_uniform(&random);
            b[i] = rig_uniform(&random);
            w[i] = rig_uniform(&random);
            m[i] = rig_uniform(&random);
        }
        assert_int_equal(k->open(*level, 0, &backend, NULL), TALLY_OK);
        assert_int_equal(k->stream_open(backend, &stream, NULL), TALLY_OK);
        k->sum(stream, N, sum, a, b);
        k->sgd(stream, N, &(struct kernel_sgd){.lr = 0.1f, .momentum = 0.9f, .weight_decay = 0.01f, .nesterov = true},
               3, a, b, w, m, w, m);
        float *const got[3] = {sum, w, m};
        for (int i = 0; i < 3; i++) {
            if (level == rig_levels())
                memcpy(expected[i], got[i], sizeof expected[i]);
            assert_memory_equal(got[i], expected[i], sizeof expected[i]);
        }
        k->stream_close(stream);
        k->close(backend);
    }
}

/* Whole, or in pieces that begin anywhere, to buffers of any alignment: the same bits, and nothing beside them. */
static void sgd_may_be_cut_anywhere(void **state)
{
    (void)state;
    const struct kernels *k = kernels_find("cpu");
    enum { N = 501, ROOM = N + 32 };
    for (const char *const *level = rig_levels(); *level; level++) {
        struct kernel_backend *backend;
        struct kernel_stream *stream;
        float g[N], w[N], m[N], expected[2][N];
        uint64_t random = 5;
        for (size_t i = 0; i < N; i++) {
            g[i] = rig_uniform(&random);
            w[i] = rig_uniform(&random);
            m[i] = rig_uniform(&random);
        }
        assert_int_equal(k->open(*level, 0, &backend, NULL), TALLY_OK);
        assert_int_equal(k->stream_open(backend, &stream, NULL), TALLY_OK);
        const struct kernel_sgd options = {.lr = 0.1f, .momentum = 0.9f, .weight_decay = 0.01f};
        k->sgd(stream, N, &options, 3, g, NULL, w, m, expected[0], expected[1]);
        for (size_t shift = 0; shift < 17; shift++) {
            float new_w[ROOM], new_m[ROOM];
            for (size_t i = 0; i < ROOM; i++)
                new_w[i] = new_m[i] = 77;
            for (size_t done = 0, n; done < N; done += n) {
                n = rig_between(&random, 1, 200);
                n = n < N - done ? n : N - done;
                k->sgd(stream, n, &options, 3, g + done, NULL, w + done, m + done, new_w + 16 - shift % 3 + done,
                       new_m + shift + done);
            }
            assert_memory_equal(new_w + 16 - shift % 3, expected[0], sizeof expected[0]);
            assert_memory_equal(new_m + shift, expected[1], sizeof expected[1]);
            for (size_t i = 0; i < ROOM; i++)
                assert_true((i >= shift && i < shift + N) || new_m[i] == 77);
        }
        k->stream_close(stream);
        k->close(backend);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_same_call_gives_the_same_bits), cmocka_unit_test(parts_give_the_bits_of_the_whole),
        cmocka_unit_test(a_row_does_not_see_the_others),     cmocka_unit_test(levels_agree_on_elements),
        cmocka_unit_test(sgd_may_be_cut_anywhere),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
