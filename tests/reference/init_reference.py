"""Prints tests/model/init_reference.h: the first weights of PyTorch's Linear and Conv2d, as bits.

    python3 tests/reference/init_reference.py > tests/model/init_reference.h
    clang-format -i tests/model/init_reference.h

Needs torch with AVX2 or AVX-512: see rng_reference.py.
"""

import struct

import torch
from torch import nn

CASES = {
    "mlp": (3, lambda: [nn.Linear(10, 20), nn.Linear(20, 2)]),
    "cnn": (2**32 - 1, lambda: [nn.Conv2d(1, 20, 5), nn.Conv2d(20, 50, 5), nn.Linear(800, 500), nn.Linear(500, 10)]),
    "groups": (12345, lambda: [
        nn.Conv2d(6, 9, (3, 2), groups=3), nn.Conv2d(9, 9, 1, groups=9, bias=False), nn.Linear(7, 5, bias=False), nn.Linear(1, 3)]),
}
# Every fan_in of a layer without a bias, one weight each: the bounds differ from 1/sqrt(fan_in) in the last bit for some.
FAN_INS = 300


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def fnv(tensor):
    """FNV-1a over the little-endian bytes."""
    h = 0xCBF29CE484222325
    for b in tensor.contiguous().numpy().tobytes():
        h = ((h ^ b) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


print("/* Made by tests/reference/init_reference.py with torch %s, %s. */" % (
    torch.__version__.split("+")[0], torch.backends.cpu.get_cpu_capability()))
print("""#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct param_reference {
    const char *name;
    bool is_bias;
    size_t ndim, dim[4], fan_in;
    uint32_t first[2], last; /* bits of the first two elements (one twice) and the last */
    uint64_t fnv;            /* FNV-1a over all of them */
};
""")
for name, (seed, build) in CASES.items():
    torch.manual_seed(seed)
    layers = build()
    print("static const struct param_reference %s_reference[] = {" % name)
    for i, layer in enumerate(layers):
        for key, p in layer.named_parameters():
            fan_in = layer.weight[0].numel()
            flat = p.detach().flatten().tolist()
            dims = ", ".join(str(d) for d in list(p.shape) + [1] * (4 - p.dim()))
            print('    {"%d.%s", %s, %d, {%s}, %d, {0x%08x, 0x%08x}, 0x%08x, UINT64_C(0x%016x)},' % (
                i, key, "true" if key == "bias" else "false", p.dim(), dims, fan_in,
                bits(flat[0]), bits(flat[min(1, len(flat) - 1)]), bits(flat[-1]), fnv(p.detach())))
    print("};\n")

torch.manual_seed(1)
weights = [nn.Linear(f, 1) for f in range(1, FAN_INS + 1)]
print("#define FAN_INS %d" % FAN_INS)
print("/* Linear(f, 1) for f = 1 to FAN_INS, in this order after manual_seed(1): FNV-1a over each weight, then its bias. */")
print("static const uint64_t fan_in_reference[FAN_INS][2] = {")
for layer in weights:
    print("    {UINT64_C(0x%016x), UINT64_C(0x%016x)}," % (fnv(layer.weight.detach()), fnv(layer.bias.detach())))
print("};")
