/* The table itself: opening, memory, refusals, sums and SGD over every length and overlap. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include <math.h>

#include "tests/kernels/rig.h"

static void backends_are_found_by_name(void **state)
{
    (void)state;
    const struct kernels *k = kernels_find("cpu");
    assert_non_null(k);
    assert_string_equal(k->name, "cpu");
    assert_true(k->host_memory);
    assert_null(kernels_find("tpu"));
}

static void instruction_sets_are_opened_by_name(void **state)
{
    (void)state;
    const struct kernels *k = kernels_find("cpu");
    struct kernel_backend *backend = NULL;
    struct tally_error err;
    for (const char *const *level = rig_levels(); *level; level++) {
        assert_int_equal(k->open(*level, 0, &backend, &err), TALLY_OK);
        assert_string_equal(k->isa(backend), *level);
        k->close(backend);
    }
    assert_int_equal(k->open(NULL, 0, &backend, &err), TALLY_OK);
    assert_string_equal(k->isa(backend), rig_levels()[0]);
    k->close(backend);
    backend = NULL;
    assert_int_equal(k->open("sse9", 0, &backend, &err), TALLY_EINVAL);
    assert_non_null(strstr(err.message, "sse9"));
    assert_int_equal(k->open(NULL, 1, &backend, &err), TALLY_EINVAL);
    assert_null(backend);
    k->close(NULL);
}

static void memory_is_zeroed_and_aligned(void **state)
{
    (void)state;
    const struct kernels *k = kernels_find("cpu");
    struct kernel_backend *backend;
    struct tally_error err;
    assert_int_equal(k->open(NULL, 0, &backend, NULL), TALLY_OK);
    static const size_t sizes[] = {0, 1, 100, 1 << 20, (5 << 20) + 12};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        void *p;
        assert_int_equal(k->alloc(backend, sizes[i], &p, NULL), TALLY_OK);
        assert_int_equal((uintptr_t)p % 64, 0);
        for (size_t b = 0; b < sizes[i]; b++)
            assert_int_equal(((unsigned char *)p)[b], 0);
        k->free(backend, p);
    }
    k->free(backend, NULL);
    void *untouched = backend;
    assert_int_equal(k->alloc(backend, SIZE_MAX, &untouched, &err), TALLY_ENOMEM);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)
    assert_int_equal(k->alloc(backend, (size_t)1 << 60, &untouched, &err), TALLY_ENOMEM);
#endif
    assert_ptr_equal(untouched, backend);
    k->close(backend);
}

static void refused(const struct kernel_op_desc *desc, tally_status status, const char *part)
{
    const struct kernels *k = kernels_find("cpu");
    struct kernel_backend *backend;
    struct kernel_op *op = NULL;
    struct tally_error err = {0};
    assert_int_equal(k->open(NULL, 0, &backend, NULL), TALLY_OK);
    assert_int_equal(k->prepare(backend, desc, &op, &err), status);
    assert_null(op);
    if (!strstr(err.message, part))
        fail_msg("'%s' does not say '%s'", err.message, part);
    k->close(backend);
}

static struct kernel_op_desc good_conv(void)
{
    struct kernel_op_desc d = {.kind = KERNEL_CONV2D, .rows = 1, .x_stride = 1000, .y_stride = 1000};
    d.conv2d.in_channels = d.conv2d.out_channels = 2;
    d.conv2d.groups = 1;
    d.conv2d.in_height = d.conv2d.in_width = 8;
    d.conv2d.window = (struct kernel_window){{3, 3}, {1, 1}, {0, 0}, {1, 1}};
    d.conv2d.pool_window = (struct kernel_window){{2, 2}, {2, 2}, {0, 0}, {1, 1}};
    rig_complete(&d, false);
    return d;
}

static void bad_descriptions_are_refused(void **state)
{
    (void)state;
    refused(&(struct kernel_op_desc){.kind = KERNEL_LINEAR, .linear = {1, 1}}, TALLY_EINVAL, "row");
    refused(&(struct kernel_op_desc){.kind = KERNEL_LINEAR, .rows = 1, .x_stride = 1, .y_stride = 1, .linear = {0, 1}},
            TALLY_EINVAL, "weight");
    refused(&(struct kernel_op_desc){.kind = KERNEL_LINEAR, .rows = 1, .x_stride = 3, .y_stride = 9, .linear = {4, 9}},
            TALLY_EINVAL, "input's stride 3");
    refused(&(struct kernel_op_desc){.kind = KERNEL_LINEAR, .rows = 1, .x_stride = 4, .y_stride = 8, .linear = {4, 9}},
            TALLY_EINVAL, "output's stride 8");
    refused(
        &(struct kernel_op_desc){
            .kind = KERNEL_LINEAR, .rows = 1, .x_stride = SIZE_MAX, .y_stride = 8, .linear = {SIZE_MAX / 2, 9}},
        TALLY_EINVAL, "elements");
    refused(
        &(struct kernel_op_desc){
            .kind = KERNEL_LINEAR, .rows = SIZE_MAX / 8, .x_stride = 16, .y_stride = 16, .linear = {4, 9}},
        TALLY_EINVAL, "elements");
    refused(
        &(struct kernel_op_desc){
            .kind = KERNEL_LINEAR, .inputs = 2, .rows = 1, .x_stride = 4, .y_stride = 9, .linear = {4, 9}},
        TALLY_EINVAL, "one input");
    refused(&(struct kernel_op_desc){.kind = (enum kernel_op_kind)77, .rows = 1}, TALLY_EUNSUPPORTED, "77");
    refused(&(struct kernel_op_desc){.kind = KERNEL_ELEMENTWISE,
                                     .rows = 1,
                                     .x_stride = 9,
                                     .y_stride = 9,
                                     .elementwise = {(enum kernel_function)9, 9}},
            TALLY_EUNSUPPORTED, "function");
    refused(
        &(struct kernel_op_desc){.kind = KERNEL_ADD, .inputs = 1, .rows = 1, .x_stride = 9, .y_stride = 9, .add = {9}},
        TALLY_EINVAL, "2 to");
    refused(
        &(struct kernel_op_desc){.kind = KERNEL_CROSS_ENTROPY, .rows = 1, .x_stride = 9, .cross_entropy = {9, 0, 1.5f}},
        TALLY_EINVAL, "smoothing");
    refused(&(struct kernel_op_desc){.kind = KERNEL_CROSS_ENTROPY, .rows = 1, .x_stride = 9}, TALLY_EINVAL, "class");

    struct kernel_op_desc d = good_conv();
    d.conv2d.groups = 3;
    refused(&d, TALLY_EINVAL, "3 groups");
    d = good_conv();
    d.conv2d.out_height = 5;
    refused(&d, TALLY_EINVAL, "output height is 5, expected 6");
    d = good_conv();
    d.conv2d.window.stride[1] = 0;
    refused(&d, TALLY_EINVAL, "stride");
    d = good_conv();
    d.conv2d.window.kernel[0] = 9;
    refused(&d, TALLY_EINVAL, "window of 9");
    d = good_conv();
    d.conv2d.window.padding[0] = SIZE_MAX - 4;
    refused(&d, TALLY_EINVAL, "conv2d");
    d = good_conv();
    d.conv2d.pool = true;
    d.conv2d.pool_height = d.conv2d.pool_width = 4;
    refused(&d, TALLY_EINVAL, "pool");
    d.conv2d.pool_window.padding[0] = 1;
    refused(&d, TALLY_EUNSUPPORTED, "padding");

    d = (struct kernel_op_desc){.kind = KERNEL_MAX_POOL2D, .rows = 1, .x_stride = 100, .y_stride = 100};
    d.pool2d.channels = 1;
    d.pool2d.in_height = d.pool2d.in_width = 2;
    d.pool2d.window = (struct kernel_window){{2, 2}, {1, 1}, {1, 1}, {3, 3}}; /* at -1 and 2: both outside */
    d.pool2d.out_height = d.pool2d.out_width = 1;
    refused(&d, TALLY_EINVAL, "padding alone");
    d.kind = KERNEL_AVG_POOL2D;
    d.pool2d.in_height = d.pool2d.in_width = 4;
    d.pool2d.out_height = d.pool2d.out_width = 3;
    refused(&d, TALLY_EINVAL, "dilation");
}

static void formulations_follow_the_shape(void **state)
{
    (void)state;
    struct kernel_op_desc d = good_conv();
    d.relu = true;
    struct rig *rig = rig_open(NULL, &d, 0, 0);
    assert_non_null(strstr(rig->kernels->formulation(rig->op), "relu"));
    assert_null(strstr(rig->kernels->formulation(rig->op), "winners"));
    rig_close(rig);
    d = good_conv();
    d.conv2d.in_channels = 16;
    d.conv2d.pool = true;
    d.x_stride = d.y_stride = 0;
    rig_complete(&d, false);
    rig = rig_open(NULL, &d, 0, 0);
    assert_non_null(strstr(rig->kernels->formulation(rig->op), "winners"));
    rig_close(rig);
    const struct kernels *k = kernels_find("cpu");
    struct kernel_backend *backend;
    assert_int_equal(k->open(NULL, 0, &backend, NULL), TALLY_OK);
    for (size_t n = 1; n < 5000; n += 7) {
        const size_t stride = k->row_stride(backend, n);
        assert_true(stride >= n && stride < n + 32 && stride % 16 == 0 && stride % 256 != 0);
    }
    k->close(backend);
}

struct open_stream {
    const struct kernels *k;
    struct kernel_backend *backend;
    struct kernel_stream *stream;
};

static struct open_stream open_stream(const char *level)
{
    struct open_stream s = {.k = kernels_find("cpu")};
    assert_int_equal(s.k->open(level, 0, &s.backend, NULL), TALLY_OK);
    assert_int_equal(s.k->stream_open(s.backend, &s.stream, NULL), TALLY_OK);
    return s;
}

static void close_stream(struct open_stream *s)
{
    assert_int_equal(s->k->stream_sync(s->stream, NULL), TALLY_OK);
    s->k->stream_close(s->stream);
    s->k->close(s->backend);
}

static void sums_add_in_place_too(void **state)
{
    (void)state;
    enum { N = 200 };
    for (const char *const *level = rig_levels(); *level; level++) {
        struct open_stream s = open_stream(*level);
        for (size_t n = 0; n < N; n++) {
            float a[N + 1], b[N + 1], c[N + 1], expected[N + 1];
            uint64_t random = n;
            for (size_t i = 0; i <= N; i++) {
                a[i] = rig_uniform(&random);
                b[i] = rig_uniform(&random);
                c[i] = 7;
                expected[i] = i < n ? a[i] + b[i] : 7;
            }
            s.k->sum(s.stream, n, c, a, b);
            assert_memory_equal(c, expected, sizeof c);
            s.k->sum(s.stream, n, a, a, b);
            assert_memory_equal(a, expected, n * sizeof *a);
        }
        close_stream(&s);
    }
}

static void sgd_with_every_option(void **state)
{
    (void)state;
    enum { N = 150 };
    for (const char *const *level = rig_levels(); *level; level++) {
        struct open_stream s = open_stream(*level);
        for (size_t o = 0; o < 128; o++) {
            const struct kernel_sgd sgd = {.lr = 0.1f,
                                           .momentum = o & 1 ? 0.9f : 0,
                                           .dampening = o & 2 ? 0.3 : 0,
                                           .weight_decay = o & 4 ? 0.05f : 0,
                                           .nesterov = o & 8,
                                           .maximize = o & 16,
                                           .first = o & 32};
            float a[N], b[N], w[N], m[N], w_out[N], m_out[N];
            uint64_t random = o;
            for (size_t i = 0; i < N; i++) {
                a[i] = rig_uniform(&random);
                b[i] = rig_uniform(&random);
                w[i] = rig_uniform(&random);
                m[i] = sgd.first ? NAN : rig_uniform(&random); /* not read on the first step */
            }
            const bool two = o & 64, kept = sgd.momentum != 0;
            s.k->sgd(s.stream, N, &sgd, 3, a, two ? b : NULL, w, kept ? m : NULL, w_out, kept ? m_out : NULL);
            for (size_t i = 0; i < N; i++) {
                double d = ((double)a[i] + (two ? (double)b[i] : 0)) / 3 * (sgd.maximize ? -1 : 1) +
                           (double)sgd.weight_decay * (double)w[i];
                if (kept) {
                    const double buffer = sgd.first ? d : (double)sgd.momentum * (double)m[i] + (1 - sgd.dampening) * d;
                    assert_true(fabs((double)m_out[i] - buffer) < 1e-6);
                    d = sgd.nesterov ? d + (double)sgd.momentum * buffer : buffer;
                }
                assert_true(fabs((double)w_out[i] - ((double)w[i] - (double)sgd.lr * d)) < 1e-6);
            }
            s.k->sgd(s.stream, N, &sgd, 3, a, two ? b : NULL, w, kept ? m : NULL, w,
                     kept ? m : NULL); /* in place: the same bits */
            assert_memory_equal(w, w_out, sizeof w);
            if (kept)
                assert_memory_equal(m, m_out, sizeof m);
        }
        close_stream(&s);
    }
}

/* As PyTorch, which takes 1 - dampening in double: 1 - 0.9f is not 0.1f. */
static void dampening_is_rounded_once(void **state)
{
    (void)state;
    const struct kernel_sgd sgd = {.lr = 1, .momentum = 1, .dampening = 0.9};
    for (const char *const *level = rig_levels(); *level; level++) {
        struct open_stream s = open_stream(*level);
        const float gradient = 1;
        float w = 0, m = 0;
        s.k->sgd(s.stream, 1, &sgd, 1, &gradient, NULL, &w, &m, &w, &m);
        assert_true(m == 0.1f && w == -0.1f);
        close_stream(&s);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(backends_are_found_by_name),    cmocka_unit_test(instruction_sets_are_opened_by_name),
        cmocka_unit_test(memory_is_zeroed_and_aligned),  cmocka_unit_test(bad_descriptions_are_refused),
        cmocka_unit_test(formulations_follow_the_shape), cmocka_unit_test(sums_add_in_place_too),
        cmocka_unit_test(sgd_with_every_option),         cmocka_unit_test(dampening_is_rounded_once),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
