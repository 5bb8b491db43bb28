"""Random jobs against PyTorch: the same model, data and optimizer in both, from the same seed.

Losses, evaluations, the weights, and their names, order and shapes are compared. The bound is float32's rounding as this very model amplifies it: PyTorch is run
in float64 too, and Tally may be some times as far from PyTorch's float32 as PyTorch's float64 is. Where PyTorch refuses a model, Tally has to refuse it.

TALLY_RANDOM_SEED chooses other jobs, TALLY_RANDOM_SECONDS how long (default 40 s). A failure prints the seed of its job:
    TALLY_RANDOM_JOB=17 random_models_test.py    runs that one alone
"""
import copy
import gzip
import itertools
import json
import math
import os
import random
import struct
import time

import numpy as np
import tally_testing
from tally_testing import Case, Result, load_safetensors, tally

try:
    import torch
    from torch import nn
except ImportError as missing:  # pragma: no cover
    raise SystemExit(f"{missing}: run tests/run.sh, which installs what the tests need")

torch.set_num_threads(1)
ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh, "sigmoid": nn.Sigmoid}


# ---- models ----


class Graph(nn.Module):
    """A job file's layers as a module. A dot in a layer's name is a module inside a module, as anywhere in PyTorch."""

    def __init__(self):
        super().__init__()
        self.steps = []  # (name, the names it reads, module or None for a sum)

    def append(self, name, reads, module):
        self.steps.append((name, reads, module))
        if module is None:
            return
        *path, last = name.split(".")
        holder = self
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder._modules[part]
        holder.add_module(last, module)

    def forward(self, x):
        outputs = {"input": x}
        for name, reads, module in self.steps:
            if module is None:
                total = outputs[reads[0]]
                for other in reads[1:]:
                    total = total + outputs[other]
                outputs[name] = total
            else:
                outputs[name] = module(outputs[reads[0]])
        return outputs[name]


class Refused(Exception):
    """PyTorch does not take the model."""


class ModelMaker:
    """Draws layers, each as a job file's entry and as a module, and follows the shapes by running them."""

    def __init__(self, rng, shape):
        self.rng, self.graph, self.layers = rng, Graph(), []
        self.values = {"input": torch.zeros(1, *shape)}
        self.last = "input"
        self.dotted = rng.random() < 0.2

    def shape(self, name=None):
        return tuple(self.values[name or self.last].shape[1:])

    def name(self):
        index = len(self.layers)
        style = self.rng.random()
        if style < 0.5:
            return str(index), False
        if self.dotted:
            return f"{self.rng.choice(['encoder', 'head.x', 'a-b_c'])}.{index}", True
        return self.rng.choice(["layer", "fc-", "Conv_"]) + str(index), True

    def add(self, kind, fields, module, reads=None):
        name, given = self.name()
        reads_of = reads or [self.last]
        try:
            if module is None:
                value = sum(self.values[r] for r in reads_of)
            else:
                with torch.no_grad():
                    value = module(self.values[reads_of[0]])
        except RuntimeError as refusal:
            value, error = None, refusal
        entry = {kind: fields}
        if given:
            entry["name"] = name
        if reads or self.rng.random() < 0.1:
            entry["from"] = reads_of if len(reads_of) > 1 or self.rng.random() < 0.5 else reads_of[0]
        self.layers.append(entry)
        if value is None:
            raise Refused(str(error))
        self.graph.append(name, reads_of, module)
        self.values[name], self.last = value, name
        return name

    def pair(self, low, high):
        return self.rng.randint(low, high) if self.rng.random() < 0.6 else [self.rng.randint(low, high), self.rng.randint(low, high)]

    def window(self, options):
        """Some of the options: fields as written, and as PyTorch takes them."""
        fields = {key: self.pair(*bounds) for key, (chance, *bounds) in options.items() if self.rng.random() < chance}
        return fields, {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}

    def linear(self, out=None, reads=None):
        features, out = self.shape(reads and reads[0])[-1], out or self.rng.choice([1, 2, 3, 5, 8, 16, 17, 31, 64, 100, 130])
        fields, bias = {"out_features": out}, self.rng.random() < 0.75
        if self.rng.random() < 0.2:
            fields["in_features"] = features
        if not bias or self.rng.random() < 0.2:
            fields["bias"] = bias
        return self.add("linear", fields, nn.Linear(features, out, bias=bias), reads)

    def conv2d(self, reads=None, same=False):
        channels = self.shape(reads and reads[0])[0]
        groups = self.rng.choice([g for g in range(1, channels + 1) if channels % g == 0]) if self.rng.random() < 0.3 else 1
        out = groups * self.rng.choice([1, 1, 2, 3, 4, 5, 8, 16, 33 if groups == 1 else 2, 64 if groups == 1 else 3])
        if same:
            out = channels
            groups = groups if channels % groups == 0 else 1
            kernel = self.rng.choice([1, 3])
            fields, options = {"kernel_size": kernel, "padding": kernel // 2}, {"kernel_size": kernel, "padding": kernel // 2}
        else:
            fields, options = self.window({"kernel_size": (1.0, 1, 5), "stride": (0.4, 1, 3), "padding": (0.5, 0, 3), "dilation": (0.3, 1, 3)})
        bias = self.rng.random() < 0.75
        if not bias or self.rng.random() < 0.2:
            fields["bias"] = bias
        if groups > 1 or self.rng.random() < 0.2:
            fields["groups"] = groups
        if self.rng.random() < 0.2:
            fields["in_channels"] = channels
        return self.add("conv2d", {"out_channels": out, **fields}, nn.Conv2d(channels, out, bias=bias, groups=groups, **options), reads)

    def max_pool2d(self):
        fields, options = self.window({"kernel_size": (1.0, 1, 4), "stride": (0.6, 1, 4), "padding": (0.4, 0, 2), "dilation": (0.2, 1, 2)})
        if self.rng.random() < 0.4:
            fields["ceil_mode"] = options["ceil_mode"] = self.rng.random() < 0.7
        return self.add("max_pool2d", fields, nn.MaxPool2d(**options))

    def avg_pool2d(self):
        fields, options = self.window({"kernel_size": (1.0, 1, 4), "stride": (0.6, 1, 4), "padding": (0.4, 0, 2)})
        for key in ("ceil_mode", "count_include_pad"):
            if self.rng.random() < 0.4:
                fields[key] = options[key] = self.rng.random() < 0.5
        if self.rng.random() < 0.15:
            fields["divisor_override"] = options["divisor_override"] = self.rng.randint(1, 6)
        return self.add("avg_pool2d", fields, nn.AvgPool2d(**options))

    def activation(self):
        kind = self.rng.choice(["relu", "relu", "tanh", "sigmoid", "gelu"])
        if kind == "gelu":
            approximate = self.rng.choice(["none", "tanh"])
            return self.add("gelu", {"approximate": approximate} if approximate == "tanh" or self.rng.random() < 0.5 else {}, nn.GELU(approximate=approximate))
        return self.add(kind, {}, ACTIVATIONS[kind]())

    def flatten(self, whole):
        dims = len(self.shape()) + 1
        start, end = (1, dims - 1) if whole else sorted(self.rng.choices(range(1, dims), k=2))
        fields = {"start_dim": start if self.rng.random() < 0.5 else start - dims, "end_dim": end if self.rng.random() < 0.5 else end - dims}
        if whole:
            fields = {key: value for key, value in fields.items() if self.rng.random() < 0.3}
        return self.add("flatten", fields, nn.Flatten(**fields))

    def branch(self):
        """A residual: what lies between is a few layers that keep the shape; or the sum of a layer with itself and the input."""
        start, image = self.last, len(self.shape()) == 3
        for _ in range(self.rng.randint(1, 2)):
            if image and self.rng.random() < 0.7:
                self.conv2d([start] if self.last == start and start != "input" else None, same=True)
            elif not image and self.rng.random() < 0.7:
                self.linear(self.shape()[-1])
            else:
                self.activation()
        parts = [self.last, start]
        if self.rng.random() < 0.3:
            parts.append(self.rng.choice(parts))
        self.rng.shuffle(parts)
        return self.add("add", {}, None, parts)

    def body(self):
        for _ in range(self.rng.randint(0, 5)):
            shape = self.shape()
            if math.prod(shape) > 6000:
                self.max_pool2d() if len(shape) == 3 else self.linear(16)
                continue
            kinds = [(self.activation, 3), (self.branch, 1.5), (self.linear, 1 if len(shape) > 1 else 4), (lambda: self.flatten(False), 0.4)]
            if len(shape) == 3:
                kinds += [(self.conv2d, 6), (self.max_pool2d, 2), (self.avg_pool2d, 1.5)]
            self.rng.choices([k for k, _ in kinds], [w for _, w in kinds])[0]()

    def head(self, classes):
        if len(self.shape()) > 1 or self.rng.random() < 0.1:
            self.flatten(True)
        if self.rng.random() < 0.3:
            self.linear()
            self.activation()
        self.linear(classes)
        if self.rng.random() < 0.1:
            self.activation()


# ---- data ----


class DataMaker:
    """Samples as PyTorch sees them (x float32, y), and the files that hold them."""

    def __init__(self, rng, folder, classes, values):
        self.rng, self.np, self.folder = rng, np.random.default_rng(rng.getrandbits(32)), folder
        self.classes, self.values = classes, values
        self.kind = rng.choice(["npy", "npy", "idx", "csv"])
        if values is not None and self.kind == "idx" or values not in (None, (), (1,)) and self.kind == "csv":
            self.kind = "npy"
        if self.kind == "csv":
            self.shape, self.dtype = (rng.choice([1, 2, 7, 12, 40]),), "f4"
        elif self.kind == "idx":
            self.image = (rng.randint(4, 14), rng.randint(4, 14))
            self.shape, self.dtype = (1, *self.image), "u1"
        else:
            self.shape = rng.choice([(rng.choice([1, 3, 10, 33, 70]),), (rng.randint(1, 6), rng.randint(1, 12)), (rng.choice([1, 2, 3, 4, 6, 8, 17]), rng.randint(5, 14), rng.randint(5, 14))])
            self.dtype = rng.choice(["f4", "f4", "f4", "f8", "u1", "i1", ">f4", "<i2"])
        self.header, self.target_first, self.gz = rng.random() < 0.5, rng.random() < 0.3, rng.random() < 0.5
        channels = self.shape[0]
        self.normalize = None
        if rng.random() < 0.5:
            count = rng.choice([1, channels])
            self.normalize = {"mean": [round(rng.uniform(-0.5, 0.5), 3) for _ in range(count)],
                              "std": [round(rng.uniform(0.3, 2), 3) for _ in range(rng.choice([1, channels]))]}

    def make(self, part, samples):
        rng = self.np
        limit = None if rng.random() < 0.7 else samples
        written = samples if limit is None else samples + int(rng.integers(0, 9))
        if self.dtype == "u1":
            x = rng.integers(0, 256, (written, *self.shape)).astype("u1")
        elif self.dtype in ("i1", "<i2"):
            x = rng.integers(-3, 4, (written, *self.shape)).astype(self.dtype)
        else:
            x = rng.standard_normal((written, *self.shape)).astype(self.dtype)
        if self.values is None:
            y = rng.integers(0, self.classes, written)
            y[rng.random(written) < 0.1] = 0
        else:
            y = rng.standard_normal((written, *self.values)).astype("f4")
        source = getattr(self, "write_" + self.kind)(part, x, y)
        if limit is not None:
            source[self.kind]["limit"] = limit
        return source, self.as_torch(x[:samples]), torch.from_numpy(np.ascontiguousarray(y[:samples]))

    def as_torch(self, x):
        value = torch.from_numpy(x.astype("f4"))
        if self.dtype == "u1":
            value = value / 255
        if self.normalize:
            shape = (1, -1, *[1] * (len(self.shape) - 1))
            value = (value - torch.tensor(self.normalize["mean"]).reshape(shape)) / torch.tensor(self.normalize["std"]).reshape(shape)
        return value

    def path(self, part, name):
        return os.path.join(self.folder, f"{part}-{name}")

    def write_npy(self, part, x, y):
        np.save(self.path(part, "x.npy"), x)
        if self.values is None:
            y = y.astype(str(self.np.choice(["i8", "i4", "u1", "<u2", ">i4"])))
        elif self.np.random() < 0.3:
            y = y.astype("f8")
        np.save(self.path(part, "y.npy"), y)
        return {"npy": {"inputs": f"{part}-x.npy", "targets": f"{part}-y.npy"}}

    def write_idx(self, part, x, y):
        end = ".gz" if self.gz else ""
        for name, a in (("x", x.reshape(len(x), *self.image)), ("y", y.astype("u1"))):
            raw = struct.pack(f">BBBB{a.ndim}I", 0, 0, 8, a.ndim, *a.shape) + a.tobytes()
            with (gzip.open if self.gz else open)(self.path(part, name + end), "wb") as f:
                f.write(raw)
        return {"idx": {"inputs": f"{part}-x{end}", "targets": f"{part}-y{end}"}}

    def write_csv(self, part, x, y):
        columns = [f"c{i}" for i in range(x.shape[1])]
        place = 0 if self.target_first else len(columns)
        with open(self.path(part, "d.csv"), "w") as f:
            if self.header:
                f.write(",".join(columns[:place] + ["the target"] + columns[place:]) + "\n")
            for row, target in zip(x, y.reshape(len(y))):
                cells = [repr(float(v)) for v in row]
                f.write(",".join(cells[:place] + [str(int(target)) if self.values is None else repr(float(target))] + cells[place:]) + "\n")
        target = "the target" if self.header and self.np.random() < 0.5 else str(place) if self.target_first else self.np.choice(["-1", str(place)])
        return {"csv": {"path": f"{part}-d.csv", "target": str(target), **({} if self.header and self.np.random() < 0.5 else {"header": self.header})}}


# ---- one job ----


class RandomJob:
    def __init__(self, number, folder):
        self.number = number
        rng = self.rng = random.Random(number)
        torch.manual_seed(number)
        self.mse = rng.random() < 0.25
        self.classes = rng.choice([1, 2, 2, 3, 5, 10, 37]) if not self.mse else None
        values = None if not self.mse else rng.choice([(), (1,), (3,), (rng.randint(1, 9),)])
        self.data = DataMaker(rng, folder, self.classes, values)
        self.refusal = None
        maker = ModelMaker(rng, self.data.shape)
        try:
            maker.body()
            maker.head(self.classes if not self.mse else (values or (1,))[0])
        except Refused as refusal:
            self.refusal = str(refusal)
        self.maker = maker
        self.samples, self.tests = rng.randint(3, 60), rng.choice([0, rng.randint(1, 40)])
        self.batch = rng.randint(1, self.samples + (4 if rng.random() < 0.2 else 0))
        self.drop_last = rng.random() < 0.3 and self.batch <= self.samples
        self.shuffle, self.seed = rng.random() < 0.6, rng.choice([0, rng.randint(1, 99), 2**32 - 1 - rng.randint(0, 9)])
        self.sgd = self.draw_sgd()
        self.loss, self.loss_of = self.draw_loss()
        train, self.x, self.y = self.data.make("train", self.samples)
        test = None
        if self.tests:
            test, self.test_x, self.test_y = self.data.make("test", self.tests)
        steps_an_epoch = self.samples // self.batch if self.drop_last else -(-self.samples // self.batch)
        self.epochs, self.steps = rng.choice([(1, None), (2, None), (None, rng.randint(1, 9)), (2, rng.randint(1, 9))])
        if self.epochs and self.epochs * steps_an_epoch > 40:
            self.steps = min(self.steps or 40, rng.randint(1, 12))
        self.job = self.draw_job(train, test)

    def draw_sgd(self):
        rng = self.rng
        sgd = {"lr": rng.choice([0.001, 0.01, 0.05, 0.1])}
        if rng.random() < 0.6:
            sgd["momentum"] = rng.choice([0.5, 0.9])
            if rng.random() < 0.4:
                sgd["nesterov"] = True
            elif rng.random() < 0.4:
                sgd["dampening"] = rng.choice([0.1, 0.5])
        elif rng.random() < 0.2:
            sgd["dampening"] = 0.3
        if rng.random() < 0.4:
            sgd["weight_decay"] = rng.choice([0.0001, 0.01, 0.1])
        if rng.random() < 0.1:
            sgd["maximize"] = True
        return sgd

    def draw_loss(self):
        if self.mse:
            return {"mse_loss": {}}, nn.MSELoss()
        fields, rng = {}, self.rng
        if rng.random() < 0.25:
            fields["label_smoothing"] = rng.choice([0.05, 0.1, 0.5])
        if rng.random() < 0.25 and self.classes > 1:
            fields["ignore_index"] = rng.randrange(self.classes)
        return {"cross_entropy": fields}, nn.CrossEntropyLoss(**fields)

    def draw_job(self, train, test):
        rng = self.rng
        job = {"model": {"layers": self.maker.layers, "loss": self.loss}, "data": {"train": train}, "train": {"batch_size": self.batch, "optimizer": {"sgd": self.sgd}}}
        if self.seed or rng.random() < 0.5:
            job["seed"] = self.seed
        if test:
            job["data"]["test"] = test
        if self.data.normalize:
            job["data"]["normalize"] = self.data.normalize
        if not self.shuffle or rng.random() < 0.5:
            job["data"]["shuffle"] = self.shuffle
        if self.drop_last:
            job["data"]["drop_last"] = True
        if self.epochs:
            job["train"]["epochs"] = self.epochs
        if self.steps:
            job["train"]["steps"] = self.steps
        if rng.random() < 0.6:
            job["train"]["micro_batch_size"] = rng.randint(1, self.batch)
        self.arguments = ["--data", str(rng.choice([1, 1, 2, 2, 3, 5])), "--shards", str(rng.choice([1, 1, 2, 3]))]
        return job

    def model(self):
        """A new model with the weights that PyTorch draws for the job's seed."""
        model = copy.deepcopy(self.maker.graph)
        torch.manual_seed(self.seed)
        for _, _, module in model.steps:
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
        return model

    def train(self, double=False):
        """(losses, samples, evaluations as (step, loss, accuracy), weights) as PyTorch has them."""
        model = self.model()
        generator_state = torch.get_rng_state()
        if double:
            model = model.double()
        x, y = self.cast(self.x, double), self.target(self.y, double)
        torch.set_rng_state(generator_state)
        loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=self.batch, shuffle=self.shuffle, drop_last=self.drop_last)
        optimizer = torch.optim.SGD(model.parameters(), **self.sgd)
        losses, samples, evals, step = [], [], [], 0
        for epoch in itertools.count(1):
            for a, b in loader:
                optimizer.zero_grad()
                loss = self.loss_of(model(a), b)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
                samples.append(len(a))
                step += 1
                if step == self.steps:
                    break
            if self.tests:
                evals.append((step, epoch, *self.evaluate(model, double)))
            if step == self.steps or epoch == self.epochs:
                return losses, samples, evals, {name: value.detach().numpy() for name, value in model.state_dict().items()}

    def cast(self, x, double):
        return x.double() if double else x

    def target(self, y, double):
        if not self.mse:
            return y
        y = y.reshape(len(y), -1)
        return y.double() if double else y

    def evaluate(self, model, double):
        with torch.no_grad():
            out, y = model(self.cast(self.test_x, double)), self.target(self.test_y, double)
            loss = self.loss_of(out, y).item()
            if self.mse:
                return loss, None
            counted = y != self.loss_of.ignore_index
            top = out.topk(2, dim=1).values if out.shape[1] > 1 else None
            clear = top is None or bool((top[:, 0] - top[:, 1] > 1e-4).all())
            return loss, (out.argmax(1) == y)[counted].double().mean().item() if clear else None


def distance(a, b):
    return float(np.max(np.abs(np.asarray(a, "f8") - np.asarray(b, "f8")), initial=0))


class RandomModels(Case):
    def check(self, number):
        folder = self.path(str(number))
        os.mkdir(folder)
        job = RandomJob(number, folder)
        path = os.path.join(folder, "job.yaml")
        with open(path, "w") as f:
            json.dump(job.job, f)
        out = os.path.join(folder, "out")
        if job.refusal:
            done = tally("validate", path)
            self.assertEqual(done.returncode, 2, f"PyTorch refuses it: {job.refusal}; tally: {done.stdout}{done.stderr}")
            return "refused by both"
        single, double = job.train(), job.train(double=True)
        done = tally("run", path, "--out", out, *job.arguments)
        self.assertEqual(done.returncode, 0, done.stderr)
        got = Result(out, done)
        self.assertEqual([s["samples"] for s in got.steps], single[1])
        self.assertEqual([(e["step"], e["epoch"]) for e in got.evals], [e[:2] for e in single[2]])
        if not all(map(math.isfinite, single[0])) or max(map(abs, single[0])) > 1e6 or distance(single[0], double[0]) > 1e-3:
            return "too sensitive to compare"
        self.compare(job, got, load_safetensors(os.path.join(out, "model.safetensors"))[0], single, double)
        return "same"

    def compare(self, job, got, weights, single, double):
        drift = np.maximum.accumulate(np.abs(np.asarray(single[0]) - np.asarray(double[0])))
        bound = 1e-5 * np.abs(single[0]) + 10 * drift + 1e-7
        self.assertTrue(np.all(np.abs(np.asarray(got.losses) - single[0]) <= bound), f"losses {got.losses}\npytorch {single[0]}\nfloat64 {double[0]}")
        names = [f"{name}.{part}" for name, _, module in job.maker.graph.steps if isinstance(module, (nn.Linear, nn.Conv2d))
                 for part in ("weight", "bias") if part == "weight" or module.bias is not None]
        self.assertEqual(list(weights), names)
        self.assertEqual(set(weights), set(single[3]))
        for name, value in single[3].items():
            self.assertEqual(weights[name].shape, value.shape, name)
            bound = 1e-6 + 1e-5 * float(np.max(np.abs(value))) + 10 * distance(value, double[3][name])
            self.assertLessEqual(distance(weights[name], value), bound, f"{name}: {distance(value, double[3][name])} between PyTorch's float32 and float64")
        for mine, theirs, exact in zip(got.evals, single[2], double[2]):
            if math.isnan(theirs[2]):  # every target is to be ignored
                self.assertEqual(mine["eval"], {"loss": None})
                continue
            self.assertLessEqual(abs(mine["eval"]["loss"] - theirs[2]), 2e-5 * abs(theirs[2]) + 10 * abs(theirs[2] - exact[2]) + 1e-7, (mine, theirs))
            if job.mse:
                self.assertNotIn("accuracy", mine["eval"])
            elif theirs[3] is not None and math.isfinite(theirs[3]):
                self.assertAlmostEqual(mine["eval"]["accuracy"], theirs[3], delta=1e-9, msg=str((mine, theirs)))

    def test_random_jobs(self):
        if "TALLY_RANDOM_JOB" in os.environ:
            print(self.check(int(os.environ["TALLY_RANDOM_JOB"])))
            return
        first, seconds = int(os.environ.get("TALLY_RANDOM_SEED", "1")), float(os.environ.get("TALLY_RANDOM_SECONDS", "40"))
        counts, failures, deadline = {}, 0, time.monotonic() + seconds
        for number in itertools.count(first):
            if time.monotonic() > deadline or failures == 10:
                break
            with self.subTest(TALLY_RANDOM_JOB=number):
                failures += 1
                result = self.check(number)
                failures -= 1
                counts[result] = counts.get(result, 0) + 1
        print(f"random jobs {first} to {number - 1}: {counts}, {failures} failed")
        self.assertGreater(counts.get("same", 0), 3)


if __name__ == "__main__":
    tally_testing.main()
