#!/usr/bin/env python3
"""Writes tests/kernels/torch_reference.h: what PyTorch gives for small operations, for tests/kernels/torch_test.c.

    python kernels_reference.py > ../kernels/torch_reference.h        (any PyTorch with CPU support; 2.15 wrote the stored file)

Inputs are a formula of (case, tensor, index) that both sides compute exactly, so only results are stored.
"""
import sys

import torch
import torch.nn.functional as F


def values(case, tensor, shape):
    """((index * 2654435761 + tensor * 40503 + case * 97) mod 2^32 >> 8) / 2^23 - 1: exact in float32."""
    n = 1
    for s in shape:
        n *= s
    i = torch.arange(n, dtype=torch.int64)
    bits = ((i * 2654435761 + tensor * 40503 + case * 97) % (1 << 32)) >> 8
    return (bits.double() / (1 << 23) - 1).float().reshape(shape)


X, WEIGHT, BIAS, DY, TARGET, X2 = range(6)
RESULTS = []


def record(name, *tensors):
    """The results of one case, as they follow each other in the test."""
    flat = torch.cat([t.detach().reshape(-1).float() for t in tensors])
    RESULTS.append((name, flat))


def leaf(*args):
    return values(*args).requires_grad_()


def linear(case, rows, inputs, outputs, relu):
    x, w, b = leaf(case, X, (rows, inputs)), leaf(case, WEIGHT, (outputs, inputs)), leaf(case, BIAS, (outputs,))
    y = F.linear(x, w, b)
    y = F.relu(y) if relu else y
    y.backward(values(case, DY, y.shape))
    record("linear", y, x.grad, w.grad, b.grad)


def conv(case, rows, channels, out, size, kernel, stride, padding, dilation, groups, relu, pool):
    x = leaf(case, X, (rows, channels) + size)
    w = leaf(case, WEIGHT, (out, channels // groups) + kernel)
    b = leaf(case, BIAS, (out,))
    y = F.conv2d(x, w, b, stride, padding, dilation, groups)
    y = F.relu(y) if relu else y
    y = F.max_pool2d(y, pool[0], pool[1]) if pool else y
    y.backward(values(case, DY, y.shape))
    record("conv", y, x.grad, w.grad, b.grad)


def pool(case, rows, channels, size, function):
    x = leaf(case, X, (rows, channels) + size)
    y = function(x)
    y.backward(values(case, DY, y.shape))
    record("pool", y, x.grad)


def elementwise(case, function):
    x = leaf(case, X, (2, 9))
    y = function(x * 4)
    y.backward(values(case, DY, y.shape))
    record("elementwise", y, x.grad / 4)


def cross_entropy(case, rows, classes, smoothing):
    x = leaf(case, X, (rows, classes))
    t = torch.tensor([-100 if r % 4 == 3 else r * 3 % classes for r in range(rows)])
    loss = F.cross_entropy(x, t, reduction="sum", label_smoothing=smoothing)
    loss.backward()
    counted = t != -100
    correct = (x.argmax(1) == t)[counted].sum()
    record("cross_entropy", loss, correct, x.grad)


def mse(case, rows, elements):
    x, t = leaf(case, X, (rows, elements)), values(case, TARGET, (rows, elements))
    loss = F.mse_loss(x, t, reduction="sum")
    loss.backward()
    record("mse", loss, x.grad)


def sgd(case, **options):
    w = leaf(case, WEIGHT, (7,))
    optimizer = torch.optim.SGD([w], **options)
    for step in range(3):
        w.grad = values(case, 10 + step, (7,)) / 3
        optimizer.step()
    record("sgd", w)


def main():
    torch.manual_seed(0)
    linear(0, 3, 5, 4, False)
    linear(1, 4, 6, 3, True)
    conv(2, 2, 2, 3, (6, 7), (3, 3), 1, 0, 1, 1, False, None)
    conv(3, 2, 2, 4, (7, 8), (3, 2), (2, 1), (1, 0), (1, 2), 2, True, None)
    conv(4, 2, 1, 3, (10, 10), (5, 5), 1, 0, 1, 1, True, (2, 2))
    conv(5, 1, 4, 5, (9, 11), (3, 3), 1, 1, 1, 1, True, ((3, 2), (2, 2)))
    pool(6, 1, 2, (7, 9), lambda x: F.max_pool2d(x, 3, 2, 1))
    pool(7, 1, 1, (8, 9), lambda x: F.max_pool2d(x, (2, 3), (2, 2), (0, 1), (2, 1), ceil_mode=True))
    pool(8, 1, 2, (7, 9), lambda x: F.avg_pool2d(x, 3, 2, 1))
    pool(9, 1, 1, (8, 9), lambda x: F.avg_pool2d(x, (2, 3), 2, (1, 1), ceil_mode=True, count_include_pad=False))
    pool(10, 1, 1, (8, 9), lambda x: F.avg_pool2d(x, 3, 2, 1, ceil_mode=True))
    pool(11, 1, 1, (8, 9), lambda x: F.avg_pool2d(x, 3, 2, 1, divisor_override=5))
    for i, f in enumerate((F.relu, torch.tanh, torch.sigmoid, F.gelu, lambda x: F.gelu(x, approximate="tanh"))):
        elementwise(12 + i, f)
    cross_entropy(17, 7, 5, 0.0)
    cross_entropy(18, 6, 19, 0.1)
    mse(19, 4, 5)
    sgd(20, lr=0.1)
    sgd(21, lr=0.1, momentum=0.9, weight_decay=0.05)
    sgd(22, lr=0.1, momentum=0.9, nesterov=True)
    sgd(23, lr=0.1, momentum=0.8, dampening=0.3, maximize=True, weight_decay=0.01)

    out = sys.stdout
    out.write("/* Written by tests/reference/kernels_reference.py with PyTorch %s. */\n" % torch.__version__)
    for case, (name, flat) in enumerate(RESULTS):
        out.write("static const float torch_%d[] = { /* %s */\n" % (case, name))
        texts = [("%.9g" % v) for v in flat.tolist()]
        texts = [(t if any(c in t for c in ".en") else t + ".0") + "f" for t in texts]
        for i in range(0, len(texts), 10):
            out.write("    " + ", ".join(texts[i:i + 10]) + ",\n")
        out.write("};\n")
    out.write("static const struct {\n    const float *values;\n    size_t count;\n} torch_cases[] = {\n")
    for case in range(len(RESULTS)):
        out.write("    {torch_%d, sizeof torch_%d / sizeof(float)},\n" % (case, case))
    out.write("};\n")


if __name__ == "__main__":
    main()
