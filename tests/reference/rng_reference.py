"""Prints tests/common/rng_reference.h: values of PyTorch's CPU generator, as bits.

    python3 tests/reference/rng_reference.py > tests/common/rng_reference.h

Needs torch with AVX2 or AVX-512 (torch.backends.cpu.get_cpu_capability()); the "DEFAULT" build does not fuse the multiply and add.
"""

import struct

import torch
from torch.utils.data import DataLoader, TensorDataset


def bits(x):
    return "0x%08xu" % struct.unpack("<I", struct.pack("<f", x))[0]


def array(kind, name, values):
    print("static const %s %s[] = {" % (kind, name))
    for i in range(0, len(values), 8):
        print("    " + ", ".join(values[i:i + 8]) + ",")
    print("};\n")


def floats(name, tensor):
    array("uint32_t", name, [bits(x) for x in tensor.flatten().tolist()])


def ints(name, values):
    array("uint32_t", name, ["%du" % v for v in values])


def fnv(tensor):
    """FNV-1a over the little-endian bytes: a whole tensor in one number."""
    h = 0xCBF29CE484222325
    for b in tensor.contiguous().numpy().tobytes():
        h = ((h ^ b) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return "UINT64_C(0x%016x)" % h


def model():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 20, 5), torch.nn.Conv2d(20, 50, 5), torch.nn.Linear(800, 500), torch.nn.Linear(500, 10))


def loader_orders(epochs, drawn):
    """The order of every epoch of a shuffling loader after the model was built; `drawn` uses the generator between them."""
    model()
    loader = DataLoader(TensorDataset(torch.arange(100)), batch_size=7, shuffle=True)
    orders = []
    for _ in range(epochs):
        orders.append([int(i) for batch in loader for i in batch[0]])
        if drawn:
            torch.rand(3)
    return orders


print("/* Made by tests/reference/rng_reference.py with torch %s, %s. */" % (
    torch.__version__.split("+")[0], torch.backends.cpu.get_cpu_capability()))
print("#include <stdint.h>\n")
for seed in (0, 3, 4294967295):
    torch.manual_seed(seed)
    # A float's 24 bits show only the low ones of a draw; int32's random_ over its whole range shows 31 of them.
    array("uint32_t", "torch_u31_seed_%d" % seed,
          ["%du" % v for v in torch.empty(16, dtype=torch.int32).random_().tolist()])
torch.manual_seed(2**32 + 5)
ints("torch_u31_seed_low_bits_5", torch.empty(4, dtype=torch.int32).random_().tolist())
torch.manual_seed(3)
array("uint64_t", "torch_u63_seed_3",
      ["UINT64_C(%d)" % v for v in torch.empty(8, dtype=torch.int64).random_().tolist()])
torch.manual_seed(3)
floats("torch_uniform_seed_3", torch.empty(16).uniform_(-0.2, 0.2))
torch.manual_seed(3)
floats("torch_uniform_odd_bounds", torch.empty(16).uniform_(-1 / 3, 7.1))
for p, name in zip(model().parameters(), ("w1", "b1", "w2", "b2", "w3", "b3", "w4", "b4")):
    print("#define TORCH_MODEL_%s %s" % (name.upper(), fnv(p.detach())))
print()
for i, order in enumerate(loader_orders(3, False)):
    ints("torch_loader_epoch_%d" % (i + 1), order)
ints("torch_loader_epoch_2_after_rand_3", loader_orders(2, True)[1])
torch.manual_seed(11)
ints("torch_randperm_13_seed_11", torch.randperm(13).tolist())
torch.manual_seed(11)
print("#define TORCH_RANDPERM_60000 %s\n" % fnv(torch.randperm(60000).to(torch.int32)))
for n in (1, 5, 15, 16, 32, 35):
    torch.manual_seed(3)
    floats("torch_normal_%d" % n, torch.empty(n).normal_(0.5, 2.0))
torch.manual_seed(3)
first = torch.empty(3).normal_()
floats("torch_normal_3_then_4", torch.cat([first, torch.empty(4).normal_()]))
