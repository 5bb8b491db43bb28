/* Several threads, each with its own backend, side by side: the same bits as alone, and no thread but theirs. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

#include <cmocka.h>

#include <pthread.h>

#include "tests/kernels/rig.h"

#define THREADS 4
#define TIMES 5

static struct kernel_op_desc description(size_t i)
{
    if (i % 2 == 0)
        return (struct kernel_op_desc){
            .kind = KERNEL_LINEAR, .rows = 33, .bias = true, .relu = true, .linear = {130, 70}};
    struct kernel_op_desc d = {.kind = KERNEL_CONV2D, .rows = 3, .bias = true, .relu = true};
    d.conv2d.groups = 1;
    d.conv2d.in_channels = 4;
    d.conv2d.out_channels = 9;
    d.conv2d.in_height = d.conv2d.in_width = 12;
    d.conv2d.window = (struct kernel_window){{5, 5}, {1, 1}, {1, 1}, {1, 1}};
    d.conv2d.pool = i % 4 == 1;
    d.conv2d.pool_window = (struct kernel_window){{2, 2}, {2, 2}, {0, 0}, {1, 1}};
    rig_complete(&d, false);
    return d;
}

struct job {
    pthread_t thread;
    struct rig *rig;
    uint64_t digest[TIMES];
};

static void *work(void *argument)
{
    struct job *job = argument;
    for (int i = 0; i < TIMES; i++) {
        rig_forward(job->rig);
        rig_backward(job->rig, false, 4);
        job->digest[i] = rig_digest(job->rig);
    }
    return NULL;
}

static void threads_do_not_see_each_other(void **state)
{
    (void)state;
    struct job jobs[THREADS], alone[THREADS];
    for (size_t i = 0; i < THREADS; i++) {
        const struct kernel_op_desc d = description(i);
        jobs[i].rig = rig_open(NULL, &d, 5, 0);
        alone[i].rig = rig_open(NULL, &d, 5, 0);
        work(&alone[i]);
    }
    for (size_t i = 0; i < THREADS; i++)
        assert_int_equal(pthread_create(&jobs[i].thread, NULL, work, &jobs[i]), 0);
    for (size_t i = 0; i < THREADS; i++)
        pthread_join(jobs[i].thread, NULL);
    for (size_t i = 0; i < THREADS; i++) {
        for (int t = 0; t < TIMES; t++)
            assert_true(jobs[i].digest[t] == alone[i].digest[0]);
        rig_close(jobs[i].rig);
        rig_close(alone[i].rig);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(threads_do_not_see_each_other)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
