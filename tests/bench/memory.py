"""Peak memory against its bound: see tests/bench/memory, which runs this.

A shard may take 5 times its parameters' bytes + 64 MiB; a worker its weights + gradients x (1 + log2 of its leaves) + activations + its data + 64 MiB.
The peak is VmHWM of /proc/PID/status, read until the process ends: what was resident at once, with the libraries that all processes share.
"""
import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time

TALLY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bazel-bin", "client", "tally")
MIB = 1 << 20
SLACK = 64 * MIB
SAMPLES = 1024


def mlp(*sizes):
    layers = []
    for size in sizes:
        layers += [{"linear": {"out_features": size}}, {"relu": {}}]
    return layers[:-1]


CNN = [{"conv2d": {"out_channels": 20, "kernel_size": 5}}, {"max_pool2d": {"kernel_size": 2}}, {"conv2d": {"out_channels": 50, "kernel_size": 5}},
       {"max_pool2d": {"kernel_size": 2}}, {"flatten": {}}, {"linear": {"out_features": 500}}, {"relu": {}}, {"linear": {"out_features": 10}}]
MODELS = {  # shape of a sample, layers
    "784-512-256-10": ([784], mlp(512, 256, 10)),
    "784-4096-4096-10": ([784], mlp(4096, 4096, 10)),
    "cnn": ([1, 28, 28], CNN),
}
CASES = [  # workers, shards, samples of a batch and of a micro-batch: 1 leaf a worker, several, and as many as do not divide
    (1, 1, 64, 64),
    (2, 1, 128, 64),
    (2, 2, 128, 16),
    (3, 2, 192, 64),
    (1, 2, 256, 32),
]


def job(name, workers, shards, batch, micro, steps):
    shape, layers = MODELS[name]
    return {
        "name": "memory",
        "model": {"layers": layers, "loss": {"cross_entropy": {}}},
        "data": {"train": {"synthetic": {"samples": SAMPLES, "classes": 10, "shape": shape}}, "test": {"synthetic": {"samples": 256, "classes": 10, "shape": shape}}},
        "train": {"batch_size": batch, "micro_batch_size": micro, "steps": steps, "optimizer": {"sgd": {"lr": 0.01, "momentum": 0.9}}},
        "parallel": {"data": workers, "shards": shards},
    }


def peak(pid):
    """VmHWM in bytes; 0 once it has ended."""
    try:
        with open(f"/proc/{pid}/status") as f:
            for line in f:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) << 10
    except OSError:
        pass
    return 0


def children(parent):
    """{name: pid}"""
    found = {}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{pid}/stat") as f:
                of = int(f.read().rsplit(")", 1)[1].split()[1])
            with open(f"/proc/{pid}/cmdline") as f:
                words = f.read().split("\0")
        except OSError:
            continue
        if of == parent and len(words) > 2:
            found[words[words.index("--name") + 1] if "--name" in words else words[1]] = int(pid)
    return found


def measure(path, out):
    """{name: peak bytes} of a run's processes."""
    with open(out + ".log", "w") as log:
        run = subprocess.Popen([TALLY, "run", path, "--out", out, "-q"], stdout=log, stderr=log)
        peaks, pids = {}, {}
        while run.poll() is None:
            pids.update(children(run.pid))
            for name, pid in [*pids.items(), ("client", run.pid)]:
                peaks[name] = max(peaks.get(name, 0), peak(pid))
            time.sleep(0.01)
    if run.returncode != 0:
        with open(out + ".log") as log:
            sys.exit(log.read())
    peaks.pop("run", None)  # a child between fork and exec
    return peaks


def bounds(path):
    """{name: (bytes, how it is made)} from the job's plan."""
    plan = json.loads(subprocess.run([TALLY, "plan", path, "-o", "json"], check=True, capture_output=True).stdout)
    parameters = sum(s["count"] for s in plan["slices"]) * 4
    sample = math.prod(plan["input"]) * 4
    found = {}
    for w in plan["workers"]:
        first, end = w["micro_batches"]
        levels = 1 + math.log2(max(end - first, 1))
        data = (SAMPLES + 256) * (sample + 4)
        found[f"w{w['rank']}"] = (parameters * (1 + levels) + w["memory"]["activations"] + data + SLACK, f"{end - first} leaves")
    for s in plan["shards"]:
        first, end = s["slices"]
        held = sum(x["count"] for x in plan["slices"][first:end]) * 4
        found[f"s{s['shard']}"] = (5 * held + SLACK, f"{held / MIB:.1f} MiB of parameters")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--steps", type=int, default=12)
    arguments = parser.parse_args()
    over = 0
    print("model             workers shards batch micro  process      peak MiB  bound MiB")
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.models.split(","):
            for workers, shards, batch, micro in CASES:
                path, out = os.path.join(folder, "job.yaml"), os.path.join(folder, "out")
                with open(path, "w") as f:
                    json.dump(job(name, workers, shards, batch, micro, arguments.steps), f)
                limits, peaks = bounds(path), measure(path, out)
                for process in sorted(peaks, key=lambda n: (n[0] not in "sw", n)):
                    limit, how = limits.get(process, (0, ""))
                    too_much = limit > 0 and peaks[process] > limit
                    over += too_much
                    print(f"{name:17} {workers:7} {shards:6} {batch:5} {micro:5}  {process:11} {peaks[process] / MIB:9.1f}  {f'{limit / MIB:9.1f}' if limit else '        -'}  {how}"
                          f"{'  EXCEEDED' if too_much else ''}", flush=True)
    print(f"{over} over their bound" if over else "all within their bounds")
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
