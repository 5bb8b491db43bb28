"""Prints tests/model/order_reference.h: the orders of PyTorch's shuffling DataLoader behind a model's initialisation.

    python3 tests/reference/order_reference.py > tests/model/order_reference.h
    clang-format -i tests/model/order_reference.h

Every case is a whole program: manual_seed, the model, a loop over a loader for some epochs.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

CASES = [
    # seed, samples, batch size, epochs, layers
    (0, 10, 3, 3, []),
    (3, 250, 16, 3, [nn.Linear, (10, 20), nn.Linear, (20, 2)]),
    (2**32 - 1, 64, 64, 2, [nn.Conv2d, (1, 20, 5), nn.Conv2d, (20, 50, 5), nn.Linear, (800, 500), nn.Linear, (500, 10)]),
    (12345, 1000, 7, 4, [nn.Conv2d, (4, 6, 3, 1, 0, 1, 2), nn.Linear, (6, 5)]),
    (7, 1, 1, 2, [nn.Linear, (3, 1)]),
    (7, 2, 2, 3, [nn.Linear, (3, 1)]),
]


def fnv(values):
    """FNV-1a over the little-endian bytes of 32-bit numbers."""
    h = 0xCBF29CE484222325
    for v in values:
        for b in int(v).to_bytes(4, "little"):
            h = ((h ^ b) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return h


print("/* Made by tests/reference/order_reference.py with torch %s. */" % torch.__version__.split("+")[0])
print("""#include <stdint.h>

static const struct {
    uint64_t seed, samples, init_draws, epoch;
    uint32_t first[8]; /* the order's beginning */
    uint64_t fnv;      /* FNV-1a over all of it */
} order_reference[] = {""")
for seed, samples, batch_size, epochs, layers in CASES:
    torch.manual_seed(seed)
    model = [layers[i](*layers[i + 1]) for i in range(0, len(layers), 2)]
    draws = sum(p.numel() for layer in model for p in layer.parameters())
    loader = DataLoader(TensorDataset(torch.arange(samples)), batch_size=batch_size, shuffle=True)
    for epoch in range(1, epochs + 1):
        order = [int(i) for (batch,) in loader for i in batch]
        first = (order + [0] * 8)[:8]
        print("    {%d, %d, %d, %d, {%s}, UINT64_C(0x%016x)}," % (
            seed, samples, draws, epoch, ", ".join(map(str, first)), fnv(order)))
print("};")
