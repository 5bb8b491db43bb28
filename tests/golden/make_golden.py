"""Reference losses and weights from PyTorch: `python3 tests/golden/make_golden.py` writes golden.json (torch >= 2, CPU, one thread).

Every case: torch.manual_seed(seed), build the model, then the loop. Data: examples/data/x10.npy and y2.npy, or the first n
training images of Fashion-MNIST ((pixel/255 - 0.2860)/0.3530). The same runs in float64 give `drift`, the relative distance
of the losses between fp32 and fp64: what rounding alone does, and so the scale of an honest tolerance.
"""
import gzip, json, os
import numpy as np, torch, torch.nn as nn
from collections import OrderedDict
from torch.utils.data import DataLoader, TensorDataset

FM = "/usr/share/datasets/fashion-mnist/"
torch.set_num_threads(1)
here = os.path.dirname(os.path.abspath(__file__))
data = os.path.join(here, "..", "..", "examples", "data")

def mlp():
    return nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 2))

def two_part():
    return nn.Sequential(OrderedDict(layer1=nn.Sequential(nn.Linear(10, 20), nn.ReLU()), layer2=nn.Sequential(nn.Linear(20, 2))))

def cnn():
    return nn.Sequential(OrderedDict(conv1=nn.Conv2d(1, 20, 5), pool1=nn.MaxPool2d(2), conv2=nn.Conv2d(20, 50, 5), pool2=nn.MaxPool2d(2),
                                     flatten=nn.Flatten(), fc1=nn.Linear(800, 500), relu=nn.ReLU(), fc2=nn.Linear(500, 10)))

def mlp784():
    return nn.Sequential(OrderedDict(flatten=nn.Flatten(), fc1=nn.Linear(784, 256), r1=nn.ReLU(), fc2=nn.Linear(256, 64), r2=nn.ReLU(), fc3=nn.Linear(64, 10)))

def x10(n):
    return torch.tensor(np.load(data + "/x10.npy")[:n]), torch.tensor(np.load(data + "/y2.npy")[:n])

def fashion(n):
    x = np.frombuffer(gzip.open(FM + "train-images-idx3-ubyte.gz").read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)[:n]
    y = np.frombuffer(gzip.open(FM + "train-labels-idx1-ubyte.gz").read(), np.uint8, offset=8)[:n]
    return torch.tensor(x).float().div(255).sub(0.2860).div(0.3530), torch.tensor(y.astype(np.int64))

def run(c, dtype):
    torch.manual_seed(c["seed"])
    m = c["model"]().to(dtype) if dtype == torch.float32 else c["model"]().double()
    x, y = c["data"]
    loader = DataLoader(TensorDataset(x.to(dtype), y), batch_size=c["batch"], shuffle=c["shuffle"])
    opt = torch.optim.SGD(m.parameters(), **c["sgd"])
    losses, norms = [], {}
    while len(losses) < c["steps"]:
        for a, b in loader:
            opt.zero_grad()
            l = nn.functional.cross_entropy(m(a), b)
            l.backward(); opt.step()
            losses.append(l.item())
            if len(losses) == c["steps"]:
                break
    for k, v in m.state_dict().items():
        norms[k] = [list(v.shape), float(v.double().sum()), float(v.double().pow(2).sum())]
    return losses, norms

cases = dict(
    seed_data_parallel=dict(model=mlp, seed=0, data=x10(64), batch=64, shuffle=False, steps=50, sgd=dict(lr=0.001)),
    seed_model_parallel=dict(model=two_part, seed=1, data=x10(64), batch=64, shuffle=False, steps=50, sgd=dict(lr=0.001)),
    # loader batches of 16, 4 accumulated: a step is 64 samples; the last window of an epoch holds 58
    seed_accumulation=dict(model=mlp, seed=2, data=x10(250), batch=64, shuffle=True, steps=40, sgd=dict(lr=0.001)),
    seed_cnn=dict(model=cnn, seed=3, data=fashion(4096), batch=64, shuffle=True, steps=64, sgd=dict(lr=0.001)),
    fashion_cnn_momentum=dict(model=cnn, seed=4, data=fashion(4000), batch=64, shuffle=True, steps=100, sgd=dict(lr=0.01, momentum=0.9, weight_decay=5e-4)),
    fashion_mlp_nesterov=dict(model=mlp784, seed=5, data=fashion(5000), batch=128, shuffle=True, steps=100, sgd=dict(lr=0.05, momentum=0.9, nesterov=True)),
)
res = {}
for name, c in cases.items():
    a, na = run(c, torch.float32); b, nb = run(c, torch.float64)
    drift = max(abs(p - q) / abs(q) for p, q in zip(a, b))
    res[name] = dict(torch=torch.__version__, seed=c["seed"], samples=len(c["data"][0]), batch_size=c["batch"], shuffle=c["shuffle"], sgd=c["sgd"],
                     losses=a, drift=drift, state={k: dict(shape=v[0], sum=v[1], sum_of_squares=v[2]) for k, v in na.items()})
    print(name, a[0], a[-1], "drift", drift)
with open(os.path.join(here, "golden.json"), "w") as f:
    json.dump(res, f, indent=1)
