"""Prints tests/model/normalize_reference.h: what torchvision's ToTensor and Normalize make of bytes and floats.

    python3 tests/reference/normalize_reference.py > tests/model/normalize_reference.h
    clang-format -i tests/model/normalize_reference.h

Their operations are written out (torchvision/transforms/_functional_tensor.py): byte.to(float32).div(255), sub_(mean).div_(std)
with float32 tensors of means and deviations.
"""

import struct

import torch


def fnv(tensor):
    """FNV-1a over the little-endian bytes."""
    h = 0xCBF29CE484222325
    for b in tensor.contiguous().numpy().tobytes():
        h = ((h ^ b) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


def bits(x):
    return struct.unpack("<I", struct.pack("<f", x))[0]


def normalize(x, mean, std):
    mean, std = (torch.tensor(v, dtype=torch.float32).view(-1, 1, 1) for v in (mean, std))
    return x.clone().sub_(mean).div_(std)


print("/* Made by tests/reference/normalize_reference.py with torch %s. */" % torch.__version__.split("+")[0])
print("#include <stdint.h>\n")
print("""/* Bytes 0, 1 ... 255 in each of `channels` channels of 16 x 16; floats[i] = i / 7 - 50 in float32, alike. */
static const struct {
    int channels, means, stds; /* means, stds: how many are given; 0: no normalisation */
    float mean[3], std[3];
    uint32_t last_byte, last_float; /* bits of the last element */
    uint64_t fnv_bytes, fnv_floats; /* FNV-1a over all */
} normalize_reference[] = {""")
for channels, mean, std in [
    (1, [], []),
    (1, [0.2860], [0.3530]),
    (1, [0.1307], [0.3081]),
    (3, [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
    (3, [0.5], [0.229, 0.224, 0.225]),
    (3, [0.485, 0.456, 0.406], [0.5]),
]:
    byte = torch.arange(256, dtype=torch.uint8).view(1, 16, 16).repeat(channels, 1, 1).to(torch.float32).div(255)
    floats = (torch.arange(256 * channels, dtype=torch.float32).view(channels, 16, 16) / 7) - 50
    if mean:
        byte, floats = normalize(byte, mean, std), normalize(floats, mean, std)
    pad = lambda v: ", ".join(repr(x) + "f" for x in (v + [0.0] * 3)[:3])
    print("    {%d, %d, %d, {%s}, {%s}, 0x%08x, 0x%08x, UINT64_C(0x%016x), UINT64_C(0x%016x)}," % (
        channels, len(mean), len(std), pad(mean), pad(std), bits(byte.flatten()[-1].item()), bits(floats.flatten()[-1].item()),
        fnv(byte), fnv(floats)))
print("};")
