#!/usr/bin/env python3
"""Writes tests/model/shapes_reference.h: the shapes that PyTorch's own layers give, or that they refuse.

usage: shapes_reference.py > tests/model/shapes_reference.h    (needs torch; any version from 1.13)
"""
import random

import torch

random.seed(1)


def pair(low, high):
    """A number, or two of them: as a job file writes them and as torch takes them."""
    if random.random() < 0.5:
        return random.randint(low, high)
    return (random.randint(low, high), random.randint(low, high))


def text(value):
    if isinstance(value, bool):
        return "true" if value else "false"
    return "[%d, %d]" % value if isinstance(value, tuple) else str(value)


def yaml(kind, fields):
    return "%s: {%s}" % (kind, ", ".join("%s: %s" % (k, text(v)) for k, v in fields.items()))


def maybe(fields, name, value, chance=0.6):
    if random.random() < chance:
        fields[name] = value


def conv2d():
    groups = random.choice([1, 1, 1, 2, 3])
    shape = (groups * random.randint(1, 4), random.randint(1, 20), random.randint(1, 20))
    fields = {"out_channels": groups * random.randint(1, 5), "kernel_size": pair(1, 6)}
    maybe(fields, "stride", pair(1, 4))
    maybe(fields, "padding", pair(0, 4))
    maybe(fields, "dilation", pair(1, 3), 0.4)
    maybe(fields, "bias", random.random() < 0.5, 0.3)
    if groups > 1 or random.random() < 0.1:
        fields["groups"] = groups if random.random() < 0.9 else groups + 1
    return "conv2d", shape, fields, lambda: torch.nn.Conv2d(shape[0], **fields)


def max_pool2d():
    shape = (random.randint(1, 3), random.randint(1, 20), random.randint(1, 20))
    fields = {"kernel_size": pair(1, 6)}
    maybe(fields, "stride", pair(1, 5))
    maybe(fields, "padding", pair(0, 2))
    maybe(fields, "dilation", pair(1, 4), 0.4)
    maybe(fields, "ceil_mode", random.random() < 0.7)
    return "max_pool2d", shape, fields, lambda: torch.nn.MaxPool2d(**fields)


def avg_pool2d():
    shape = (random.randint(1, 3), random.randint(1, 20), random.randint(1, 20))
    fields = {"kernel_size": pair(1, 6)}
    maybe(fields, "stride", pair(1, 5))
    maybe(fields, "padding", pair(0, 2))
    maybe(fields, "ceil_mode", random.random() < 0.7)
    maybe(fields, "count_include_pad", random.random() < 0.5)
    maybe(fields, "divisor_override", random.randint(1, 9), 0.3)
    return "avg_pool2d", shape, fields, lambda: torch.nn.AvgPool2d(**fields)


def any_shape():
    return tuple(random.randint(1, 9) for _ in range(random.randint(1, 3)))


def linear():
    shape = any_shape()
    fields = {"out_features": random.randint(1, 12)}
    maybe(fields, "bias", random.random() < 0.5, 0.3)
    given = shape[-1] + (random.random() < 0.3)
    maybe(fields, "in_features", given, 0.3)
    in_features = fields.get("in_features", shape[-1])
    rest = {k: v for k, v in fields.items() if k != "in_features"}
    return "linear", shape, fields, lambda: torch.nn.Linear(in_features, **rest)


def flatten():
    shape = any_shape()
    fields = {}
    maybe(fields, "start_dim", random.choice([1, 1, 2, 3, -1, -2, -3]))
    maybe(fields, "end_dim", random.choice([1, 2, 3, -1, -1, -2, 4]))
    return "flatten", shape, fields, lambda: torch.nn.Flatten(**fields)


def run(make, shape):
    """(output shape, {parameter: shape}), or None where torch refuses, or where a window sees nothing but padding."""
    try:
        layer = make()
        out = layer(torch.randn(2, *shape))
    except (RuntimeError, ValueError, IndexError):
        return None
    if out.shape[0] != 2 or 0 in out.shape or torch.isinf(out).any():
        return None
    return tuple(out.shape[1:]), {name: tuple(p.shape) for name, p in layer.named_parameters()}


def dims(shape):
    return "{%s}" % ", ".join(str(d) for d in shape) if shape else "{0}"


def main():
    print("/* Written by tests/reference/shapes_reference.py with torch %s. */" % torch.__version__.split("+")[0])
    print("/* clang-format off */")
    print("static const struct shape_case shape_cases[] = {")
    for make_case, count in ((conv2d, 90), (max_pool2d, 120), (avg_pool2d, 90), (linear, 40), (flatten, 50)):
        for _ in range(count):
            kind, shape, fields, make = make_case()
            result = run(make, shape)
            out, params = result if result else ((), {})
            print('    {"%s", %d, %s, %d, %s, %d, %s, %d},' % (
                yaml(kind, fields), len(shape), dims(shape), len(out), dims(out),
                len(params.get("weight", ())), dims(params.get("weight", ())), "bias" in params))
    print("};")


main()
