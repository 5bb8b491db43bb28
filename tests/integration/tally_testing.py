"""What the integration tests share: the CLI that was built, job files, and readers for what a run leaves. Standard library and NumPy alone."""
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import time
import unittest

import numpy as np

FASHION = "/usr/share/datasets/fashion-mnist"
TIMEOUT = float(os.environ.get("TALLY_TEST_TIMEOUT", "120"))


def repository():
    """The folder that holds tests/ and the built programs: Bazel's runfiles, or the checkout."""
    return os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


def binary(path):
    for place in (os.environ.get("TEST_SRCDIR", "") + "/tally/" + path, os.path.join(repository(), "bazel-bin", path)):
        if os.path.exists(place):
            return os.path.realpath(place)
    raise FileNotFoundError(path)


TALLY = binary("client/tally")


def tally(*arguments, cwd=None, timeout=TIMEOUT, env=None):
    """Runs the CLI to its end. A run that hangs is killed and fails the test."""
    return subprocess.run([TALLY, *map(str, arguments)], capture_output=True, text=True, cwd=cwd, timeout=timeout, env=env)


class Case(unittest.TestCase):
    """A test with a folder of its own."""

    def setUp(self):
        self._folder = tempfile.TemporaryDirectory(prefix="tally-test-", dir="/tmp")
        self.dir = self._folder.name

    def tearDown(self):
        self._folder.cleanup()

    def path(self, *names):
        return os.path.join(self.dir, *names)

    def write_job(self, job, name="job.yaml"):
        """job: a dict (JSON is YAML) or text."""
        path = self.path(name)
        with open(path, "w") as out:
            out.write(job if isinstance(job, str) else json.dumps(job))
        return path

    def run_job(self, job, *arguments, out="out", code=0):
        """`tally run`; returns the Result. job: a dict, or the path of a file."""
        path = job if isinstance(job, str) else self.write_job(job, out + ".yaml")
        done = tally("run", path, "--out", self.path(out), *arguments)
        self.assertEqual(done.returncode, code, f"{' '.join(map(str, arguments))}\n{done.stdout}\n{done.stderr}\n{logs(self.path(out))}")
        return Result(self.path(out), done)


class Result:
    def __init__(self, out, done=None):
        self.out, self.done = out, done
        with open(os.path.join(out, "summary.json")) as f:
            self.summary = json.load(f)
        with open(os.path.join(out, "metrics.jsonl")) as f:
            lines = [json.loads(line) for line in f]
        self.steps = [m for m in lines if "eval" not in m]
        self.evals = [m for m in lines if "eval" in m]
        self.losses = [m["loss"] for m in self.steps]

    @property
    def sha256(self):
        return self.summary["sha256"]

    def weights(self):
        return load_safetensors(os.path.join(self.out, "model.safetensors"))[0]


def load_safetensors(path):
    """(tensors in the file's order, metadata)."""
    with open(path, "rb") as f:
        raw = f.read()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    data = raw[8 + length :]
    tensors = {}
    for name, t in header.items():
        assert t["dtype"] == "F32", t
        begin, end = t["data_offsets"]
        tensors[name] = np.frombuffer(data[begin:end], "<f4").reshape(t["shape"])
    return tensors, metadata


def save_safetensors(path, tensors):
    header, blobs, at = {}, [], 0
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value, "<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [at, at + len(raw)]}
        blobs.append(raw)
        at += len(raw)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def logs(out):
    """The processes' logs, for a failure's message."""
    text, folder = "", os.path.join(out, "logs")
    for name in sorted(os.listdir(folder)) if os.path.isdir(folder) else []:
        with open(os.path.join(folder, name), errors="replace") as f:
            text += f"--- {name}\n" + f.read()[-1500:]
    return text


def synthetic(samples=96, classes=4, shape=(10,)):
    return {"synthetic": {"samples": samples, "classes": classes, "shape": list(shape)}}


def fashion(part, limit=None):
    prefix = "train" if part == "train" else "t10k"
    idx = {"inputs": f"{FASHION}/{prefix}-images-idx3-ubyte.gz", "targets": f"{FASHION}/{prefix}-labels-idx1-ubyte.gz"}
    if limit:
        idx["limit"] = limit
    return {"idx": idx}


def mlp(*sizes):
    layers = []
    for size in sizes:
        layers += [{"linear": {"out_features": size}}, {"relu": {}}]
    return layers[:-1]


CNN = [
    {"name": "conv1", "conv2d": {"out_channels": 20, "kernel_size": 5}},
    {"max_pool2d": {"kernel_size": 2}},
    {"name": "conv2", "conv2d": {"out_channels": 50, "kernel_size": 5}},
    {"max_pool2d": {"kernel_size": 2}},
    {"flatten": {}},
    {"name": "fc1", "linear": {"out_features": 500}},
    {"relu": {}},
    {"name": "fc2", "linear": {"out_features": 10}},
]

BRANCHES = [
    {"name": "a", "linear": {"out_features": 12}},
    {"name": "b", "tanh": {}},
    {"name": "c", "linear": {"out_features": 12}, "from": "a"},
    {"name": "sum", "add": {}, "from": ["b", "c", "a"]},
    {"name": "d", "sigmoid": {}},
    {"name": "e", "linear": {"out_features": 4}},
]


def make_job(layers, train, batch_size=16, micro_batch_size=None, sgd=None, seed=1, name="test", loss=None, test=None, data=None, parallel=None, **limits):
    job = {
        "name": name,
        "seed": seed,
        "model": {"layers": layers, "loss": loss or {"cross_entropy": {}}},
        "data": {"train": train, **(data or {})},
        "train": {"batch_size": batch_size, "optimizer": {"sgd": sgd or {"lr": 0.05, "momentum": 0.9}}, **(limits or {"epochs": 2})},
    }
    if micro_batch_size:
        job["train"]["micro_batch_size"] = micro_batch_size
    if test:
        job["data"]["test"] = test
    if parallel:
        job["parallel"] = parallel
    return job


def processes(marker):
    """Running processes whose command line holds marker: {pid: command line}."""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as f:
                line = f.read().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if marker in line and int(pid) != os.getpid():
            found[int(pid)] = line
    return found


def children(pid):
    """{name: pid} of a running `tally run`'s processes."""
    found = {}
    for child in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{child}/stat") as f:
                parent = int(f.read().rsplit(")", 1)[1].split()[1])
            with open(f"/proc/{child}/cmdline", "rb") as f:
                words = f.read().decode(errors="replace").split("\0")
        except (OSError, IndexError, ValueError):
            continue
        if parent == pid:
            name = words[words.index("--name") + 1] if "--name" in words else "coordinator" if "coordinator" in words else words[0]
            found[name] = int(child)
    return found


def wait_for(condition, seconds, what):
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > deadline:
            raise AssertionError(f"waited {seconds} s for {what}")
        time.sleep(0.01)


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    unittest.main(verbosity=1)
