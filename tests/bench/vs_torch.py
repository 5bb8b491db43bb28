"""Tally against PyTorch: see tests/bench/vs_torch, which runs this. Every figure comes from this run; rounds alternate, and medians are compared."""
import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

ROWS = 64
TALLY = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "bazel-bin", "client", "tally")
MODELS = {
    "10-20-2": ([10], [20, 2]),
    "784-512-256-10": ([784], [512, 256, 10]),
    "784-4096-4096-10": ([784], [4096, 4096, 10]),
    "cnn": ([1, 28, 28], None),
}
GUESS = {"10-20-2": 300000, "784-512-256-10": 25000, "784-4096-4096-10": 450, "cnn": 4000}  # samples/s, to choose the number of steps


# ---- PyTorch ----


def torch_model(name):
    from torch import nn

    shape, sizes = MODELS[name]
    if sizes is None:
        return nn.Sequential(nn.Conv2d(1, 20, 5), nn.MaxPool2d(2), nn.Conv2d(20, 50, 5), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(800, 500), nn.ReLU(),
                             nn.Linear(500, 10))
    layers, width = [], shape[0]
    for size in sizes:
        layers += [nn.Linear(width, size), nn.ReLU()]
        width = size
    return nn.Sequential(*layers[:-1])


def torch_loop(name, tuned, seconds, rank=0, world=1, port=0):
    """Trains for so long; returns samples per second of this process."""
    import torch
    from torch import nn

    torch.set_num_threads(1)
    torch.manual_seed(1)
    model = torch_model(name)
    classes = MODELS[name][1][-1] if MODELS[name][1] else 10
    batches = [(torch.randn(ROWS, *MODELS[name][0]), torch.randint(0, classes, (ROWS,))) for _ in range(16)]
    if tuned and name == "cnn":
        model = model.to(memory_format=torch.channels_last)
        batches = [(x.to(memory_format=torch.channels_last), y) for x, y in batches]
    if world > 1:
        torch.distributed.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9, **({"fused": True} if tuned else {}))
    loss_of = nn.CrossEntropyLoss()

    def steps(n):
        for i in range(n):
            x, y = batches[i % len(batches)]
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            optimizer.step()

    steps(5)
    count = max(10, int(seconds * GUESS[name] / ROWS))
    if world > 1:
        torch.distributed.barrier()
    began = time.perf_counter()
    steps(count)
    rate = count * ROWS / (time.perf_counter() - began)
    if world > 1:
        torch.distributed.destroy_process_group()
    return rate


def torch_rate(name, tuned, seconds, world):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = dict(os.environ, OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    if tuned:  # keep freed pages: a fresh large gradient each step costs page faults otherwise
        env.update(MALLOC_TRIM_THRESHOLD_="4294967296", MALLOC_MMAP_THRESHOLD_="4294967296", MALLOC_TOP_PAD_="268435456")
    processes = [subprocess.Popen([sys.executable, os.path.abspath(__file__), "--torch-child", name, str(int(tuned)), str(seconds), str(rank), str(world), str(port)],
                                  stdout=subprocess.PIPE, env=env) for rank in range(world)]
    outputs = [p.communicate(timeout=600)[0] for p in processes]
    assert all(p.returncode == 0 for p in processes), "PyTorch failed"
    return sum(float(o) for o in outputs)


# ---- Tally ----


def tally_job(name, seconds, workers):
    shape, sizes = MODELS[name]
    if sizes is None:
        layers = [{"conv2d": {"out_channels": 20, "kernel_size": 5}}, {"max_pool2d": {"kernel_size": 2}}, {"conv2d": {"out_channels": 50, "kernel_size": 5}},
                  {"max_pool2d": {"kernel_size": 2}}, {"flatten": {}}, {"linear": {"out_features": 500}}, {"relu": {}}, {"linear": {"out_features": 10}}]
        classes = 10
    else:
        layers = [layer for size in sizes for layer in ({"linear": {"out_features": size}}, {"relu": {}})][:-1]
        classes = sizes[-1]
    return {
        "name": "bench",
        "model": {"layers": layers, "loss": {"cross_entropy": {}}},
        "data": {"train": {"synthetic": {"samples": 16 * ROWS * workers, "classes": classes, "shape": shape}}},
        "train": {"batch_size": ROWS * workers, "micro_batch_size": ROWS, "steps": max(20, int(seconds * GUESS[name] / ROWS)),
                  "optimizer": {"sgd": {"lr": 0.001, "momentum": 0.9}}},
        "parallel": {"data": workers},
    }


def tally_rate(name, seconds, workers):
    with tempfile.TemporaryDirectory() as folder:
        job = os.path.join(folder, "job.yaml")
        with open(job, "w") as f:
            json.dump(tally_job(name, seconds, workers), f)
        done = subprocess.run([TALLY, "run", job, "--out", os.path.join(folder, "out"), "-o", "json", "-q"], capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)["samples_per_second"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=4, help="of training, about, a measurement")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--json")
    a = parser.parse_args()
    results = {}
    print("samples/s, medians of %d rounds; ratios: Tally / PyTorch as written (and best-tuned)" % a.rounds)
    print("%-18s %-9s %12s %12s %12s %9s %9s" % ("model", "processes", "tally", "torch", "tuned", "ratio", "(tuned)"))
    for name in a.models.split(","):
        for world in (1, 2):
            rates = {"tally": [], "torch": [], "tuned": []}
            for _ in range(a.rounds):
                rates["tally"].append(tally_rate(name, a.seconds, world))
                rates["torch"].append(torch_rate(name, False, a.seconds, world))
                rates["tuned"].append(torch_rate(name, True, a.seconds, world))
            m = {k: statistics.median(v) for k, v in rates.items()}
            results[f"{name}/{world}"] = rates
            print("%-18s %-9d %12.0f %12.0f %12.0f %9.2f %9.2f" % (name, world, m["tally"], m["torch"], m["tuned"], m["tally"] / m["torch"], m["tally"] / m["tuned"]),
                  flush=True)
    if a.json:
        with open(a.json, "w") as f:
            json.dump(results, f, indent=1)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--torch-child":
        name, tuned, seconds, rank, world, port = sys.argv[2:]
        print(torch_loop(name, tuned == "1", float(seconds), int(rank), int(world), int(port)))
    else:
        main()
