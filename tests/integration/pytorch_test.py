"""PyTorch itself as the judge: the same programs written in it give the same losses, and take our weights by load_state_dict.

Each model here is built twice, as a job file and as an nn.Module of the same names. tests/run.sh installs Debian's PyTorch, and safetensors from PyPI.
"""
import unittest

import numpy as np
import tally_testing
from tally_testing import CNN, FASHION, Case, fashion, make_job

try:
    import torch
    from safetensors.torch import load_file
    from torch import nn
except ImportError as missing:  # pragma: no cover
    raise SystemExit(f"{missing}: run tests/run.sh, which installs what the tests need")

torch.set_num_threads(1)
STEPS = 12


class Residual(nn.Module):
    """fc1 -> tanh -> (fc2 + tanh) -> fc3, with the names of the job below."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.fc3 = nn.Linear(12, 16), nn.Linear(16, 16), nn.Linear(16, 5)

    def forward(self, x):
        a = torch.tanh(self.fc1(x))
        return self.fc3(self.fc2(a) + a)


RESIDUAL = [
    {"name": "fc1", "linear": {"out_features": 16}},
    {"name": "a", "tanh": {}},
    {"name": "fc2", "linear": {"out_features": 16}},
    {"name": "sum", "add": {}, "from": ["fc2", "a"]},
    {"name": "fc3", "linear": {"out_features": 5}},
]


def sequential_cnn():
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1), nn.Conv2d(8, 12, (3, 2), stride=(1, 2), groups=4),
                         nn.GELU(), nn.AvgPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(72, 6))


SEQUENTIAL_CNN = [
    {"conv2d": {"out_channels": 8, "kernel_size": 3, "padding": 1, "bias": False}},
    {"relu": {}},
    {"max_pool2d": {"kernel_size": 3, "stride": 2, "padding": 1}},
    {"conv2d": {"out_channels": 12, "kernel_size": [3, 2], "stride": [1, 2], "groups": 4}},
    {"gelu": {}},
    {"avg_pool2d": {"kernel_size": 2, "ceil_mode": True}},
    {"flatten": {}},
    {"linear": {"out_features": 6}},
]


def dilated():
    return nn.Sequential(nn.Conv2d(2, 6, 3, dilation=2, padding=2), nn.Sigmoid(), nn.Conv2d(6, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Flatten(), nn.Linear(64 * 25, 4))


DILATED = [
    {"conv2d": {"out_channels": 6, "kernel_size": 3, "dilation": 2, "padding": 2}},
    {"sigmoid": {}},
    {"conv2d": {"out_channels": 64, "kernel_size": 3}},
    {"relu": {}},
    {"conv2d": {"out_channels": 64, "kernel_size": 3, "padding": 1}},
    {"relu": {}},
    {"max_pool2d": {"kernel_size": 2}},
    {"flatten": {}},
    {"linear": {"out_features": 4}},
]


def gelu_mlp():
    return nn.Sequential(nn.Linear(9, 33), nn.GELU(approximate="tanh"), nn.Linear(33, 17, bias=False), nn.ReLU(), nn.Linear(17, 3))


GELU_MLP = [
    {"linear": {"out_features": 33}},
    {"gelu": {"approximate": "tanh"}},
    {"linear": {"out_features": 17, "bias": False}},
    {"relu": {}},
    {"linear": {"out_features": 3}},
]


class PyTorch(Case):
    def parity(self, layers, make_model, shape, classes, sgd, loss=None, loss_of=None, batch=20, samples=90, values=None, micro=None, workers=2, seed=11):
        rng = np.random.default_rng(7)
        x = rng.standard_normal((samples, *shape)).astype("f4")
        y = rng.standard_normal((samples, *values)).astype("f4") if values else rng.integers(0, classes, samples)
        np.save(self.path("x.npy"), x)
        np.save(self.path("y.npy"), y)
        job = make_job(layers, {"npy": {"inputs": self.path("x.npy"), "targets": self.path("y.npy")}}, batch_size=batch, micro_batch_size=micro, sgd=sgd, seed=seed,
                       loss=loss, steps=STEPS)
        got = self.run_job(job, "--data", workers, "--shards", 2)
        torch.manual_seed(seed)
        model = make_model()
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.from_numpy(x), torch.from_numpy(y)), batch_size=batch, shuffle=True)
        optimizer = torch.optim.SGD(model.parameters(), **sgd)
        loss_of = loss_of or nn.CrossEntropyLoss()
        losses = []
        while len(losses) < STEPS:
            for a, b in loader:
                optimizer.zero_grad()
                value = loss_of(model(a), b)
                value.backward()
                optimizer.step()
                losses.append(value.item())
                if len(losses) == STEPS:
                    break
        np.testing.assert_allclose(got.losses, losses, rtol=2e-5)
        state = load_file(self.path("out", "model.safetensors"))
        for name, value in model.state_dict().items():
            np.testing.assert_allclose(state[name].numpy(), value.numpy(), rtol=1e-3, atol=2e-5, err_msg=name)
        make_model().load_state_dict(state, strict=True)

    def test_residual(self):
        self.parity(RESIDUAL, Residual, (12,), 5, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01})

    def test_sequential_cnn(self):
        self.parity(SEQUENTIAL_CNN, sequential_cnn, (3, 14, 13), 6, {"lr": 0.05, "momentum": 0.8, "dampening": 0.3}, micro=3, workers=3)

    def test_dilated_and_wide(self):
        self.parity(DILATED, dilated, (2, 12, 12), 4, {"lr": 0.02}, micro=7)

    def test_gelu_tanh(self):
        self.parity(GELU_MLP, gelu_mlp, (9,), 3, {"lr": 0.2, "maximize": True}, samples=83, batch=32, micro=8)

    def test_mse(self):
        self.parity([{"linear": {"out_features": 7}}, {"tanh": {}}, {"linear": {"out_features": 2}}], lambda: nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 2)),
                    (4,), None, {"lr": 0.1}, loss={"mse_loss": {}}, loss_of=nn.MSELoss(), values=(2,), samples=50, batch=16, micro=5)

    def test_label_smoothing(self):
        self.parity([{"linear": {"out_features": 6}}], lambda: nn.Sequential(nn.Linear(5, 6)), (5,), 6, {"lr": 0.3},
                    loss={"cross_entropy": {"label_smoothing": 0.1}}, loss_of=nn.CrossEntropyLoss(label_smoothing=0.1))

    def test_ignored_targets(self):
        """Micro-batches whose weights differ: the step divides by what is counted in all of them."""
        self.parity([{"linear": {"out_features": 4}}], lambda: nn.Sequential(nn.Linear(5, 4)), (5,), 4, {"lr": 0.3}, micro=4,
                    loss={"cross_entropy": {"ignore_index": 1}}, loss_of=nn.CrossEntropyLoss(ignore_index=1))

    def test_evaluation(self):
        """The last evaluation is what PyTorch computes with the weights that were left."""
        import gzip

        scale = {"normalize": {"mean": 0.286, "std": 0.353}}
        got = self.run_job(make_job(CNN, fashion("train", 2000), batch_size=64, sgd={"lr": 0.05, "momentum": 0.9}, test=fashion("test", 1000), data=scale, epochs=1), "--data", 2)
        model = nn.Sequential()
        for name, module in (("conv1", nn.Conv2d(1, 20, 5)), ("p1", nn.MaxPool2d(2)), ("conv2", nn.Conv2d(20, 50, 5)), ("p2", nn.MaxPool2d(2)), ("f", nn.Flatten()),
                             ("fc1", nn.Linear(800, 500)), ("r", nn.ReLU()), ("fc2", nn.Linear(500, 10))):
            model.add_module(name, module)
        model.load_state_dict(load_file(self.path("out", "model.safetensors")), strict=True)
        x = np.frombuffer(gzip.open(FASHION + "/t10k-images-idx3-ubyte.gz").read(), np.uint8, offset=16).reshape(-1, 1, 28, 28)[:1000]
        y = np.frombuffer(gzip.open(FASHION + "/t10k-labels-idx1-ubyte.gz").read(), np.uint8, offset=8)[:1000].astype("i8")
        with torch.no_grad():
            out = model(torch.tensor(x).float().div(255).sub(0.286).div(0.353))
            loss = nn.functional.cross_entropy(out, torch.tensor(y)).item()
            accuracy = (out.argmax(1) == torch.tensor(y)).float().mean().item()
        self.assertAlmostEqual(got.evals[-1]["eval"]["loss"], loss, delta=1e-5 * loss)
        self.assertAlmostEqual(got.evals[-1]["eval"]["accuracy"], accuracy, delta=1e-9 + 1e-6)


if __name__ == "__main__":
    tally_testing.main()
