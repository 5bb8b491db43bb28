#ifndef KERNELS_CPU_WINDOW_H
#define KERNELS_CPU_WINDOW_H
/* Where a window of a pool meets its input. */
#include "kernels/kernels.h"

/* The rows (axis 0) or columns (axis 1) of a window that lie inside the input: first, first + dilation, ... below end.
 * Empty: first >= end. */
struct window_span {
    size_t first, end;
};

static inline struct window_span window_span_of(const struct kernel_window *window, int axis, size_t out, size_t in)
{
    const size_t step = window->dilation[axis], padding = window->padding[axis];
    const size_t start = out * window->stride[axis]; /* counted from the padding's edge */
    const size_t end = start + (window->kernel[axis] - 1) * step + 1;
    const size_t skipped = start < padding ? (padding - start + step - 1) / step * step : 0;
    const size_t last = end > padding ? end - padding : 0;
    return (struct window_span){start + skipped - padding, last < in ? last : in};
}
#endif
