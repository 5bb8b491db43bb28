/* The cpu backend's table: devices, memory, and calls that go to the operation's kind. Everything has run when a call
 * returns, so a stream holds nothing. */
#include "kernels/cpu/cpu.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "common/limits.h"
#include "kernels/cpu/op.h"

#define HUGE_PAGE_BYTES ((size_t)2 << 20)

struct kernel_stream {
    const struct cpu_level *level;
};

static bool has_avx2(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

static bool has_avx512(void)
{
    return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

static bool has_generic(void)
{
    return true;
}

/* Best first. */
static const struct {
    const struct cpu_level *level;
    bool (*available)(void);
} levels[] = {
    {&cpu_level_avx512, has_avx512},
    {&cpu_level_avx2, has_avx2},
    {&cpu_level_generic, has_generic},
};

/* NULL: *err says why. */
static const struct cpu_level *find_level(const char *isa, struct tally_error *err)
{
    for (size_t i = 0; i < sizeof levels / sizeof levels[0]; i++) {
        if (isa && strcmp(isa, levels[i].level->name) != 0)
            continue;
        if (levels[i].available())
            return levels[i].level;
        if (isa) {
            tally_fail(err, TALLY_EUNSUPPORTED, "this processor lacks the instruction set '%s'", isa);
            return NULL;
        }
    }
    tally_fail(err, TALLY_EINVAL, "unknown instruction set '%s', expected generic, avx2 or avx512", isa);
    return NULL;
}

static tally_status cpu_open(const char *isa, int device, struct kernel_backend **ret_backend, struct tally_error *err)
{
    if (device != 0)
        return tally_fail(err, TALLY_EINVAL, "the cpu backend has one device, 0, not %d", device);
    struct tally_error reason;
    const struct cpu_level *level = find_level(isa, &reason);
    if (!level)
        return tally_fail(err, reason.code, "%s", reason.message);
    struct kernel_backend *backend = malloc(sizeof *backend);
    if (!backend)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a backend");
    backend->level = level;
    *ret_backend = backend;
    return TALLY_OK;
}

static void cpu_close(struct kernel_backend *backend)
{
    free(backend);
}

static const char *cpu_isa(const struct kernel_backend *backend)
{
    return backend->level->name;
}

static tally_status cpu_alloc(struct kernel_backend *backend, size_t bytes, void **ret_memory, struct tally_error *err)
{
    (void)backend;
    const bool huge = bytes >= HUGE_PAGE_BYTES;
    const size_t alignment = huge ? HUGE_PAGE_BYTES : 64;
    void *memory = NULL;
    if (bytes <= SIZE_MAX / 2) {
        const size_t rounded = bytes ? (bytes + alignment - 1) / alignment * alignment : alignment;
        memory = aligned_alloc(alignment, rounded);
    }
    if (!memory)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a buffer of %zu bytes", bytes);
    /* Before the pages are touched. Where huge pages are off this changes nothing. */
    if (huge)
        (void)madvise(memory, bytes / HUGE_PAGE_BYTES * HUGE_PAGE_BYTES, MADV_HUGEPAGE);
    memset(memory, 0, bytes);
    *ret_memory = memory;
    return TALLY_OK;
}

static void cpu_free(struct kernel_backend *backend, void *memory)
{
    (void)backend;
    free(memory);
}

static void cpu_upload(struct kernel_stream *stream, void *device, const void *host, size_t bytes)
{
    (void)stream;
    memcpy(device, host, bytes);
}

static void cpu_download(struct kernel_stream *stream, void *host, const void *device, size_t bytes)
{
    (void)stream;
    memcpy(host, device, bytes);
}

static tally_status cpu_stream_open(struct kernel_backend *backend, struct kernel_stream **ret_stream,
                                    struct tally_error *err)
{
    struct kernel_stream *stream = malloc(sizeof *stream);
    if (!stream)
        return tally_fail(err, TALLY_ENOMEM, "no memory for a stream");
    stream->level = backend->level;
    *ret_stream = stream;
    return TALLY_OK;
}

static void cpu_stream_close(struct kernel_stream *stream)
{
    free(stream);
}

static tally_status cpu_stream_sync(struct kernel_stream *stream, struct tally_error *err)
{
    (void)stream;
    (void)err;
    return TALLY_OK;
}

/* Whole cache lines. Rows a multiple of 1 KiB apart would share a few sets of the first-level cache. */
static size_t cpu_row_stride(const struct kernel_backend *backend, size_t elements)
{
    (void)backend;
    const size_t stride = cpu_line(elements);
    return stride % 256 == 0 ? stride + 16 : stride;
}

tally_status cpu_elements(const char *what, const size_t *factors, size_t count, size_t *ret, struct tally_error *err)
{
    size_t n = 1;
    for (size_t i = 0; i < count; i++) {
        if (factors[i] == 0)
            return tally_fail(err, TALLY_EINVAL, "%s has a dimension of 0", what);
        if (factors[i] > TALLY_ELEMENTS_MAX / n)
            return tally_fail(err, TALLY_EINVAL, "%s has more than %zu elements", what, TALLY_ELEMENTS_MAX);
        n *= factors[i];
    }
    *ret = n;
    return TALLY_OK;
}

tally_status cpu_check_strides(const struct kernel_op_desc *desc, size_t x_elements, size_t y_elements,
                               struct tally_error *err)
{
    if (desc->x_stride < x_elements)
        return tally_fail(err, TALLY_EINVAL, "the input's stride %zu is below the %zu elements of a sample",
                          desc->x_stride, x_elements);
    if (desc->y_stride < y_elements)
        return tally_fail(err, TALLY_EINVAL, "the output's stride %zu is below the %zu elements of a sample",
                          desc->y_stride, y_elements);
    size_t ignored;
    tally_status status = CPU_ELEMENTS("the input", &ignored, err, desc->rows, desc->x_stride);
    if (!status && y_elements)
        status = CPU_ELEMENTS("the output", &ignored, err, desc->rows, desc->y_stride);
    return status;
}

tally_status cpu_check_window(const char *what, const struct kernel_window *window, const size_t in[2],
                              const size_t out[2], bool ceil_allowed, struct tally_error *err)
{
    for (int axis = 0; axis < 2; axis++) {
        const char *side = axis ? "width" : "height";
        if (!window->kernel[axis] || !window->stride[axis] || !window->dilation[axis])
            return tally_fail(err, TALLY_EINVAL, "%s: kernel, stride and dilation must be at least 1 (%s)", what, side);
        size_t ignored;
        tally_status status = CPU_ELEMENTS(what, &ignored, err, window->kernel[axis], window->dilation[axis]);
        if (!status)
            status = CPU_ELEMENTS(what, &ignored, err, in[axis] + window->padding[axis] + 1, 2);
        if (status)
            return status;
        const size_t reach = (window->kernel[axis] - 1) * window->dilation[axis] + 1;
        const size_t padded = in[axis] + 2 * window->padding[axis];
        const bool fits = padded >= reach;
        const size_t floor_out = fits ? (padded - reach) / window->stride[axis] + 1 : 0;
        /* ceil mode: one window more, if it begins inside the input or the padding before it (PyTorch's
         * pooling_output_shape); the only one where none fits as a whole */
        const bool part = fits ? (padded - reach) % window->stride[axis] != 0 : reach - padded < window->stride[axis];
        const bool ceil_ok =
            ceil_allowed && part && floor_out * window->stride[axis] < in[axis] + window->padding[axis];
        if (!fits && !(ceil_ok && out[axis] == 1))
            return tally_fail(err, TALLY_EINVAL,
                              "%s: a window of %zu does not fit into an input %s of %zu with its padding", what, reach,
                              side, in[axis]);
        if (out[axis] != floor_out && !(ceil_ok && out[axis] == floor_out + 1))
            return tally_fail(err, TALLY_EINVAL, "%s: the output %s is %zu, expected %zu", what, side, out[axis],
                              floor_out);
    }
    return TALLY_OK;
}

static const struct cpu_op_functions *functions_of(enum kernel_op_kind kind)
{
    switch (kind) {
    case KERNEL_LINEAR:
        return &cpu_linear;
    case KERNEL_CONV2D:
        return &cpu_conv2d;
    case KERNEL_MAX_POOL2D:
        return &cpu_max_pool2d;
    case KERNEL_AVG_POOL2D:
        return &cpu_average_pool2d;
    case KERNEL_ELEMENTWISE:
        return &cpu_elementwise;
    case KERNEL_ADD:
        return &cpu_add;
    case KERNEL_CROSS_ENTROPY:
        return &cpu_cross_entropy;
    case KERNEL_MSE:
        return &cpu_mse;
    }
    return NULL;
}

static void cpu_release(struct kernel_op *op)
{
    if (!op)
        return;
    if (op->functions->destroy)
        op->functions->destroy(op->plan);
    free(op);
}

static tally_status cpu_prepare(struct kernel_backend *backend, const struct kernel_op_desc *desc,
                                struct kernel_op **ret_op, struct tally_error *err)
{
    const struct cpu_op_functions *functions = functions_of(desc->kind);
    if (!functions)
        return tally_fail(err, TALLY_EUNSUPPORTED, "the cpu backend lacks operation %d", (int)desc->kind);
    if (desc->rows == 0)
        return tally_fail(err, TALLY_EINVAL, "an operation needs at least one row");
    if (desc->kind != KERNEL_ADD && desc->inputs > 1)
        return tally_fail(err, TALLY_EINVAL, "an operation other than add has one input, not %zu", desc->inputs);
    struct kernel_op *op = calloc(1, sizeof *op);
    if (!op)
        return tally_fail(err, TALLY_ENOMEM, "no memory for an operation");
    op->desc = *desc;
    op->level = backend->level;
    op->functions = functions;
    const tally_status status = functions->prepare(op, err);
    if (status) {
        cpu_release(op);
        return status;
    }
    *ret_op = op;
    return TALLY_OK;
}

static size_t cpu_saved_bytes(const struct kernel_op *op)
{
    return op->saved_bytes;
}

static size_t cpu_workspace_bytes(const struct kernel_op *op)
{
    return op->workspace_bytes;
}

static const char *cpu_formulation(const struct kernel_op *op)
{
    return op->formulation;
}

static void cpu_forward(struct kernel_op *op, struct kernel_stream *stream, const struct kernel_args *args)
{
    (void)stream;
    op->functions->forward(op, args);
}

static void cpu_backward_data(struct kernel_op *op, struct kernel_stream *stream, const struct kernel_args *args)
{
    (void)stream;
    op->functions->backward_data(op, args);
}

static void cpu_backward_weight(struct kernel_op *op, struct kernel_stream *stream, const struct kernel_args *args,
                                size_t row_begin, size_t row_end)
{
    (void)stream;
    if (op->functions->backward_weight && row_begin < row_end)
        op->functions->backward_weight(op, args, row_begin, row_end);
}

static void cpu_read_loss(struct kernel_stream *stream, const struct kernel_loss *device, struct kernel_loss *host)
{
    (void)stream;
    *host = *device;
}

static void cpu_sum(struct kernel_stream *stream, size_t n, float *dst, const float *a, const float *b)
{
    stream->level->pointwise->sum(n, dst, a, b);
}

static void cpu_sgd(struct kernel_stream *stream, size_t n, const struct kernel_sgd *sgd, float weight, const float *a,
                    const float *b, const float *w, const float *m, float *w_out, float *m_out)
{
    stream->level->pointwise->sgd(n, sgd, weight, a, b, w, m, w_out, m_out);
}

const struct kernels cpu_kernels = {
    .name = "cpu",
    .open = cpu_open,
    .close = cpu_close,
    .isa = cpu_isa,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .host_memory = true,
    .upload = cpu_upload,
    .download = cpu_download,
    .stream_open = cpu_stream_open,
    .stream_close = cpu_stream_close,
    .stream_sync = cpu_stream_sync,
    .row_stride = cpu_row_stride,
    .prepare = cpu_prepare,
    .release = cpu_release,
    .saved_bytes = cpu_saved_bytes,
    .workspace_bytes = cpu_workspace_bytes,
    .formulation = cpu_formulation,
    .forward = cpu_forward,
    .backward_data = cpu_backward_data,
    .backward_weight = cpu_backward_weight,
    .read_loss = cpu_read_loss,
    .sum = cpu_sum,
    .sgd = cpu_sgd,
};
