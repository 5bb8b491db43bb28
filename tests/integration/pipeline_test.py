"""Pipelines over real processes: wherever the layers are and whatever the schedule, the bytes of the run on one worker."""
import json
import os
import signal
import subprocess
import time

import tally_testing
from tally_testing import BRANCHES, CNN, TALLY, Case, Result, children, fashion, load_safetensors, logs, make_job, mlp, repository, synthetic, wait_for

FEW = os.environ.get("TALLY_TEST_FEW") == "1"
GOLDEN = os.path.join(repository(), "tests", "golden", "golden.json")
EXAMPLES = os.path.join(repository(), "examples")

SCHEDULES = ("gpipe", "1f1b", "interleaved")
SEED_PLACEMENT = [["conv1", "fc1"], ["conv2", "fc2"]]  # activations cross 0 -> 1 -> 0 -> 1
FASHION_SCALE = {"normalize": {"mean": [0.2860], "std": [0.3530]}}
SMALL_CNN = [
    {"name": "conv1", "conv2d": {"out_channels": 6, "kernel_size": 3}},
    {"name": "pool", "max_pool2d": {"kernel_size": 2}},
    {"name": "conv2", "conv2d": {"out_channels": 9, "kernel_size": 3}},
    {"flatten": {}},
    {"name": "fc1", "linear": {"out_features": 21}},
    {"relu": {}},
    {"name": "fc2", "linear": {"out_features": 4}},
]


class Pipelines(Case):
    def same(self, job, meshes, **more):
        """meshes: {name: parallel}. Runs each, and compares with one worker."""
        base = self.run_job(dict(job, parallel={"data": 1}), out="base")
        self.assertTrue(base.losses)
        for name, parallel in meshes.items():
            with self.subTest(mesh=name):
                got = self.run_job(dict(job, parallel=parallel), out=name)
                self.assertEqual(got.sha256, base.sha256)
                self.assertEqual(got.losses, base.losses)  # to the last bit
                self.assertEqual([e["eval"] for e in got.evals], [e["eval"] for e in base.evals])
                self.assertEqual(got.summary["mesh"]["pipeline"], len(parallel["pipeline"].get("placement", [])) or parallel["pipeline"]["stages"])
        return base

    def golden(self, name, layers, train, placement, data=None):
        with open(GOLDEN) as f:
            case = json.load(f)[name]
        job = make_job(layers, train, batch_size=case["batch_size"], micro_batch_size=-(-case["batch_size"] // 4), seed=case["seed"], sgd=case["sgd"],
                       data={"shuffle": case["shuffle"], **(data or {})}, steps=len(case["losses"]), name=name.replace("_", "-"))
        base = self.same(job, {s: {"pipeline": {"placement": placement, "schedule": s}} for s in SCHEDULES})
        worst = max(abs(a - b) / abs(b) for a, b in zip(base.losses, case["losses"]))
        self.assertLessEqual(worst, max(2e-6, 10 * case["drift"]))

    def test_golden_model_parallel(self):
        layers = [
            {"name": "layer1.0", "linear": {"out_features": 20}},
            {"name": "layer1.1", "relu": {}},
            {"name": "layer2.0", "linear": {"out_features": 2}},
        ]
        npy = {"npy": {"inputs": os.path.realpath(f"{EXAMPLES}/data/x10.npy"), "targets": os.path.realpath(f"{EXAMPLES}/data/y2.npy"), "limit": 64}}
        self.golden("seed_model_parallel", layers, npy, [["layer1.0", "layer1.1"], ["layer2.0"]])

    def test_golden_cnn(self):
        self.golden("seed_cnn", CNN, fashion("train", 4096), SEED_PLACEMENT, FASHION_SCALE)

    def cnn_job(self, **more):
        return make_job(SMALL_CNN, synthetic(70, shape=(2, 12, 11)), batch_size=24, micro_batch_size=5, test=synthetic(23, shape=(2, 12, 11)),
                        sgd={"lr": 0.02, "momentum": 0.9, "weight_decay": 0.01}, **more)

    def test_stages_schedules_and_replicas(self):
        """Short last batches and micro-batches, two epochs with evaluations, accumulation inside every replica."""
        meshes = {}
        for schedule in SCHEDULES:
            meshes["seed-" + schedule] = {"pipeline": {"placement": SEED_PLACEMENT, "schedule": schedule}}
            meshes["three-" + schedule] = {"pipeline": {"stages": 3, "schedule": schedule}, "shards": 2}
        meshes["four"] = {"pipeline": {"stages": 4}}
        meshes["chunks"] = {"pipeline": {"stages": 2, "chunks": 2, "schedule": "interleaved"}}
        meshes["mesh"] = {"data": 2, "pipeline": {"placement": SEED_PLACEMENT, "schedule": "1f1b"}, "shards": 3}
        meshes["wide"] = {"data": 3, "pipeline": {"stages": 2}, "shards": 2}
        if FEW:
            meshes = {k: meshes[k] for k in ("seed-1f1b", "chunks", "mesh")}
        self.same(self.cnn_job(), meshes)

    def test_branches_over_stages(self):
        """What a layer makes goes to several stages, and their gradients come together again in the same order."""
        job = make_job(BRANCHES, synthetic(50), batch_size=14, micro_batch_size=2, test=synthetic(9), sgd={"lr": 0.1, "momentum": 0.5, "dampening": 0.1})
        self.same(job, {
            "three": {"pipeline": {"placement": [["a", "sum"], ["b", "d"], ["c", "e"]], "schedule": "1f1b"}},
            "two": {"data": 2, "pipeline": {"placement": [["b", "e"], ["a", "c", "sum"]]}},
        })

    def test_evaluation_needs_more_room_than_training(self):
        """A value that is read again two segments later: several are kept in an evaluation, one in a step of one micro-batch."""
        job = make_job(BRANCHES, synthetic(48), batch_size=8, micro_batch_size=8, test=synthetic(60), epochs=2)
        self.same(job, {"two": {"pipeline": {"placement": [["a", "sum"], ["b", "c", "e"]]}}})

    def test_values(self):
        train = {"synthetic": {"samples": 40, "shape": [6], "target_shape": [3]}}
        job = make_job([{"linear": {"out_features": 9}}, {"tanh": {}}, {"linear": {"out_features": 3}}], train, batch_size=12, micro_batch_size=3,
                       loss={"mse_loss": {}}, sgd={"lr": 0.01})
        self.same(job, {"two": {"pipeline": {"stages": 2}}})

    def test_large_tensors_and_many_slices(self):
        """Activations of several messages each, on the workers' own threads; parameters of several slices on three shards."""
        job = make_job(mlp(1500, 1300, 900, 4), synthetic(900, shape=(200,)), batch_size=600, micro_batch_size=300, epochs=2, sgd={"lr": 0.01})
        self.same(job, {"three": {"pipeline": {"stages": 3, "schedule": "1f1b"}, "shards": 3}})

    def test_replicas_whose_gradients_wait_for_each_other(self):
        """More gradients than a shard holds before it makes workers wait: a stage that is held back must not stop the one that is behind."""
        job = make_job(mlp(2000, 2000, 4), synthetic(64, shape=(64,)), batch_size=64, micro_batch_size=8, steps=2, sgd={"lr": 0.01, "momentum": 0.9})
        self.same(job, {"three replicas": {"data": 3, "pipeline": {"stages": 2, "schedule": "1f1b"}}})

    def test_examples(self):
        for name, stages in (("model_parallel.yaml", 2), ("model_parallel_cnn.yaml", 2)):
            with self.subTest(name=name):
                path = os.path.join(EXAMPLES, name)
                few = ["--set", "train.steps=8"] if name != "model_parallel.yaml" else []
                got = self.run_job(path, *few, out=name)
                self.assertEqual(got.summary["mesh"]["pipeline"], stages)
                if name == "model_parallel.yaml":
                    self.assertEqual(sorted(got.weights()), ["layer1.0.bias", "layer1.0.weight", "layer2.0.bias", "layer2.0.weight"])


class Failures(Case):
    def start(self, job, out="out", *arguments):
        path = self.write_job(job, out + ".yaml")
        os.makedirs(self.path("tmp"), exist_ok=True)  # where the cluster's sockets are
        run = subprocess.Popen([TALLY, "run", path, "--out", self.path(out), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=dict(os.environ, TMPDIR=self.path("tmp")))
        self.addCleanup(self.end, run)
        metrics = self.path(out, "metrics.jsonl")

        def training():
            self.assertIsNone(run.poll(), run.communicate() if run.poll() is not None else "")
            if not os.path.exists(metrics):
                return False
            with open(metrics) as f:
                return sum(1 for _ in f) >= 3

        wait_for(training, 60, "steps in metrics.jsonl")
        return run

    def end(self, run):
        if run.poll() is None:
            run.kill()
            run.communicate()

    def long_job(self):
        return make_job(mlp(64, 48, 32, 4), synthetic(4096, shape=(32,)), batch_size=64, micro_batch_size=16, epochs=1000000,
                        parallel={"pipeline": {"stages": 3, "schedule": "1f1b"}, "shards": 2})

    def finish(self, run, code, seconds=60):
        kids = children(run.pid)
        _, errors = run.communicate(timeout=seconds)
        self.assertEqual(run.returncode, code, errors + logs(self.path("out")))
        left = [pid for pid in kids.values() if os.path.exists(f"/proc/{pid}")]
        self.assertEqual(left, [], "processes are left")
        self.assertEqual(os.listdir(self.path("tmp")), [], "sockets are left")
        last = errors.strip().splitlines()[-1]
        self.assertTrue(last.startswith("tally: "), errors)
        return last

    def test_a_stage_is_killed(self):
        run = self.start(self.long_job())
        os.kill(children(run.pid)["w1"], signal.SIGKILL)
        began = time.monotonic()
        last = self.finish(run, 3)
        self.assertLess(time.monotonic() - began, 10)
        self.assertIn("worker w1 (stage 1) was lost", last)
        self.assertEqual(Result(self.path("out")).summary["state"], "FAILED")

    def test_a_stage_stands_still(self):
        run = self.start(self.long_job())
        stopped = children(run.pid)["w1"]
        os.kill(stopped, signal.SIGSTOP)
        began = time.monotonic()
        last = self.finish(run, 3)
        self.assertLess(time.monotonic() - began, 25)
        # Who waited, how long, for which micro-batch's activation or gradient of which step, and from whom.
        self.assertRegex(last, r"worker w1 \(stage 1\) was lost: no heartbeat for 10 s")
        self.assertRegex(last, r"worker w[02] \(stage [02]\): .*has waited [0-9.]+ s for (activation|gradient) \d of step \d+ from w1 \(stage 1\)|for room for")

    def test_an_interrupt_keeps_the_weights(self):
        run = self.start(self.long_job())
        run.send_signal(signal.SIGINT)
        last = self.finish(run, 4)
        self.assertIn("stopped", last)
        _, metadata = load_safetensors(self.path("out", "model.safetensors"))
        job = self.long_job()
        job["train"].pop("epochs")
        job["train"]["steps"] = int(metadata["step"])
        again = self.run_job(dict(job, parallel={"data": 1}), out="again")
        self.assertEqual(again.sha256, Result(self.path("out")).sha256)


if __name__ == "__main__":
    tally_testing.main()
