/* No call of a step allocates or starts a thread. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <dirent.h>

#include "tests/kernels/rig.h"
#include "tests/support/allocations.h"

static size_t threads(void)
{
    size_t n = 0;
    DIR *tasks = opendir("/proc/self/task");
    assert_non_null(tasks);
    for (struct dirent *entry; (entry = readdir(tasks));)
        n += entry->d_name[0] != '.';
    closedir(tasks);
    return n;
}

static void check_op(const struct kernel_op_desc *desc)
{
    for (const char *const *level = rig_levels(); *level; level++) {
        struct rig *rig = rig_open(*level, desc, 1, 0);
        const unsigned long before = allocations();
        rig_forward(rig);
        rig_backward(rig, false, 0);
        rig_backward(rig, true, 2);
        rig->kernels->read_loss(rig->stream, &rig->loss, &(struct kernel_loss){0});
        const unsigned long after = allocations();
        assert_int_equal(before, after);
        rig_close(rig);
    }
    assert_int_equal(threads(), 1);
}

static void operations_do_not_allocate(void **state)
{
    (void)state;
    const struct kernel_op_desc descs[] = {
        {.kind = KERNEL_LINEAR, .inputs = 1, .rows = 64, .bias = true, .relu = true, .linear = {784, 512}},
        {.kind = KERNEL_LINEAR, .inputs = 1, .rows = 300, .bias = true, .linear = {20, 2}},
        {.kind = KERNEL_ELEMENTWISE, .inputs = 1, .rows = 3, .elementwise = {KERNEL_GELU_ERF, 100}},
        {.kind = KERNEL_ADD, .inputs = 3, .rows = 3, .add = {100}},
        {.kind = KERNEL_CROSS_ENTROPY, .inputs = 1, .rows = 30, .cross_entropy = {100, -100, 0.1f}},
        {.kind = KERNEL_MSE, .inputs = 1, .rows = 30, .mse = {10}},
    };
    for (size_t i = 0; i < sizeof descs / sizeof descs[0]; i++)
        check_op(&descs[i]);
}

static void convolutions_do_not_allocate(void **state)
{
    (void)state;
    for (int i = 0; i < 8; i++) {
        struct kernel_op_desc d = {.kind = KERNEL_CONV2D, .inputs = 1, .rows = 2, .bias = true, .relu = true};
        d.conv2d.groups = i & 4 ? 2 : 1;
        d.conv2d.in_channels = 20;
        d.conv2d.out_channels = 50;
        d.conv2d.in_height = d.conv2d.in_width = 20;
        d.conv2d.window = (struct kernel_window){{5, 5}, {1, 1}, {i & 1 ? 2 : 0, 0}, {1, 1}};
        d.conv2d.pool = i & 2;
        d.conv2d.pool_window = (struct kernel_window){{2, 2}, {2, 2}, {0, 0}, {1, 1}};
        rig_complete(&d, false);
        check_op(&d);
    }
}

static void pools_do_not_allocate(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct kernel_op_desc d = {.kind = i ? KERNEL_MAX_POOL2D : KERNEL_AVG_POOL2D, .inputs = 1, .rows = 2};
        d.pool2d.channels = 3;
        d.pool2d.in_height = d.pool2d.in_width = 20;
        d.pool2d.window = (struct kernel_window){{3, 3}, {2, 2}, {1, 1}, {1, 1}};
        rig_complete(&d, true);
        check_op(&d);
    }
}

static void sums_do_not_allocate(void **state)
{
    (void)state;
    const struct kernels *k = kernels_find("cpu");
    struct kernel_backend *backend;
    struct kernel_stream *stream;
    assert_int_equal(k->open(NULL, 0, &backend, NULL), TALLY_OK);
    assert_int_equal(k->stream_open(backend, &stream, NULL), TALLY_OK);
    void *memory;
    assert_int_equal(k->alloc(backend, 4000 * sizeof(float), &memory, NULL), TALLY_OK);
    float *a = memory, *b = a + 1000, *w = a + 2000, *m = a + 3000;
    const unsigned long before = allocations();
    k->sum(stream, 1000, a, a, b);
    k->sgd(stream, 1000, &(struct kernel_sgd){.lr = 0.1f, .momentum = 0.9f}, 64, a, b, w, m, w, m);
    const unsigned long after = allocations();
    assert_int_equal(before, after);
    k->free(backend, memory);
    k->stream_close(stream);
    k->close(backend);
    assert_int_equal(threads(), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(operations_do_not_allocate),
        cmocka_unit_test(convolutions_do_not_allocate),
        cmocka_unit_test(pools_do_not_allocate),
        cmocka_unit_test(sums_do_not_allocate),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
