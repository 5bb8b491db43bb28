"""The CLI's contract: exit statuses, refusals with their place, what a run leaves, and that it can be run again from it."""
import json
import math
import os
import re
import struct

import numpy as np
import tally_testing
from tally_testing import CNN, Case, fashion, load_safetensors, make_job, mlp, repository, save_safetensors, synthetic, tally

TEXT = """name: refused
model:
  layers:
    - {name: fc1, linear: {out_features: 8}}
    - {relu: {}}
    - {name: fc2, linear: {out_features: 4}}
  loss: {cross_entropy: {}}
data:
  train: {synthetic: {samples: 64, classes: 4, shape: [6]}}
train:
  batch_size: 16
  epochs: 1
  optimizer: {sgd: {lr: 0.1}}
"""


class Cli(Case):
    def refused(self, text, line, *words):
        """The text is refused at this line (of the file), in these words."""
        path = self.write_job(text)
        for command in ("validate", "plan", "run"):
            done = tally(command, path, *(["--out", self.path("out")] if command == "run" else []))
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)
            match = re.match(re.escape("tally: " + path) + r":(\d+):(\d+): ", done.stderr)
            self.assertTrue(match, done.stderr)
            self.assertEqual(int(match[1]), line, done.stderr)
            for word in words:
                self.assertIn(word, done.stderr)
            self.assertFalse(os.path.exists(self.path("out")))

    def test_usage(self):
        for arguments, word in (([], "usage"), (["rum"], "run"), (["run"], "JOB"), (["run", "a", "b"], "`b`"), (["run", "a", "--nope"], "--nope"),
                                (["run", "a", "--data", "0"], "--data"), (["run", "a", "--shards", "257"], "1 to 256"), (["run", "a", "--data"], "--data"), (["plan", "a", "-o", "xml"], "xml")):
            done = tally(*arguments)
            self.assertEqual(done.returncode, 2, arguments)
            self.assertIn(word, done.stderr)
            self.assertEqual(done.stdout, "")

    def test_help(self):
        self.assertEqual(tally("--help").returncode, 0)
        for command in ("run", "validate", "plan", "schema"):
            done = tally(command, "--help")
            self.assertEqual(done.returncode, 0)
            self.assertIn("example:", done.stdout)

    def test_missing_file(self):
        done = tally("run", self.path("none.yaml"))
        self.assertEqual(done.returncode, 2)
        self.assertIn("No such file", done.stderr)

    def test_refusals(self):
        self.refused(TEXT.replace("batch_size", "batchsize"), 11, "train.batchsize", "batch_size")
        self.refused(TEXT.replace("  epochs: 1\n", "  epochs: 1\n  epochs: 2\n"), 13, "train.epochs")
        self.refused(TEXT.replace("batch_size: 16", "batch_size: many"), 11, "train.batch_size", "many")
        self.refused(TEXT.replace("batch_size: 16", "batch_size: 0"), 11, "train.batch_size", "0")
        self.refused(TEXT.replace("lr: 0.1", "lr: -1"), 13, "train.optimizer.sgd.lr", "-1")
        self.refused(TEXT.replace("linear: {out_features: 4}", "linear: {in_features: 9, out_features: 4}"), 6, "in_features", "9", "8")
        self.refused(TEXT.replace("{relu: {}}", "{relu: {}, tanh: {}}"), 5, "layers[1]")
        self.refused(TEXT.replace("{relu: {}}", "{relu: {}, from: fc}"), 5, "from", "fc1")
        self.refused(TEXT.replace("{relu: {}}", "{conv2d: {out_channels: 3, kernel_size: 3}}"), 5, "conv2d")
        self.refused(TEXT.replace("name: fc2", "name: fc1"), 6, "fc1")
        self.refused(TEXT.replace("  epochs: 1\n", ""), 11, "train", "epochs", "steps")
        self.refused(TEXT.replace("classes: 4", "classes: 5"), 9, "5", "4")
        self.refused(TEXT + "parallel: {pipeline: {placement: [[fc1], [fc3]]}}\n", 14, "fc3", "fc1")
        self.refused(TEXT.replace("name: refused", "name: refused: again"), 1, "YAML")
        self.refused(TEXT.replace("{lr: 0.1}", "{lr: 0.1, nesterov: true}"), 13, "nesterov", "momentum")

    def test_set(self):
        path = self.write_job(TEXT)
        done = tally("validate", path, "--set", "train.optimizer.sgd.lr=0.5", "--set", "model.layers[fc1].linear.out_features=3", "-o", "json")
        self.assertEqual(done.returncode, 0, done.stderr)
        spec = json.loads(done.stdout)
        self.assertEqual(spec["train"]["optimizer"]["sgd"]["lr"], 0.5)
        self.assertEqual(spec["model"]["layers"][0]["linear"]["out_features"], 3)
        done = tally("validate", path, "--set", "train.epoch=3")
        self.assertEqual(done.returncode, 2)
        self.assertIn("--set", done.stderr)
        self.assertIn("epochs", done.stderr)

    def test_schema(self):
        done = tally("schema")
        self.assertEqual(done.returncode, 0)
        for key in ("train.batch_size", "momentum", "kernel_size", "schedule", "1f1b"):
            self.assertIn(key, done.stdout)
        one = tally("schema", "train.optimizer.sgd.lr")
        self.assertEqual(one.returncode, 0)
        self.assertIn("0.001", one.stdout)
        self.assertNotIn("batch_size", one.stdout)
        fields = json.loads(tally("schema", "-o", "json").stdout)
        self.assertTrue(any(f["key"].endswith("batch_size") for f in fields))

    def test_plan(self):
        path = self.write_job(make_job(CNN, fashion("train", 512), batch_size=64, micro_batch_size=16))
        done = tally("plan", path, "--data", 2, "--shards", 2)
        self.assertEqual(done.returncode, 0, done.stderr)
        for word in ("conv1", "20x24x24", "fc1", "431080", "w0", "w1", "s0", "s1"):
            self.assertIn(word, done.stdout.replace(",", ""))

    def test_what_a_run_leaves(self):
        job = make_job(CNN, fashion("train", 200), batch_size=64, micro_batch_size=16, test=fashion("test", 100), epochs=2, name="leaves",
                       data={"normalize": {"mean": 0.286, "std": 0.353}})
        got = self.run_job(job, "--data", 2, "-o", "json")
        self.assertEqual(json.loads(got.done.stdout), got.summary)
        self.assertEqual(got.summary["state"], "SUCCEEDED")
        self.assertEqual(got.summary["steps"], 8)  # 64 + 64 + 64 + 8, twice
        self.assertEqual([s["samples"] for s in got.steps], [64, 64, 64, 8] * 2)
        self.assertEqual([s["step"] for s in got.steps], list(range(1, 9)))
        self.assertEqual([s["epoch"] for s in got.steps], [1] * 4 + [2] * 4)
        self.assertTrue(all(s["lr"] == 0.05 and math.isfinite(s["loss"]) and s["time"] > 1.7e9 for s in got.steps))
        self.assertEqual([(e["step"], e["epoch"]) for e in got.evals], [(4, 1), (8, 2)])
        self.assertTrue(all(0 <= e["eval"]["accuracy"] <= 1 for e in got.evals))
        tensors, metadata = load_safetensors(self.path("out", "model.safetensors"))
        self.assertEqual(list(tensors), [f"{layer}.{part}" for layer in ("conv1", "conv2", "fc1", "fc2") for part in ("weight", "bias")])
        self.assertEqual(metadata, {"job": "leaves", "step": "8", "seed": "1"})
        import hashlib

        digest = hashlib.sha256(b"".join(t.tobytes() for t in tensors.values())).hexdigest()
        self.assertEqual(digest, got.sha256)
        # job.yaml is accepted again, and gives the same bytes.
        again = self.run_job(self.path("out", "job.yaml"), out="again")
        self.assertEqual(again.sha256, got.sha256)
        self.assertEqual(again.losses, got.losses)

    def test_targets_that_are_no_classes(self):
        """A wrong class index is a refused job file, before anything runs; one to ignore is not wrong."""
        x, y = np.zeros((30, 6), "f4"), np.arange(30) % 4
        y[17] = 4
        np.save(self.path("x.npy"), x)
        np.save(self.path("y.npy"), y)
        with open(self.path("d.csv"), "w") as f:
            f.write("label,a,b,c,d,e,f\n" + "".join(f"{t},0,0,0,0,0,0\n" for t in y))
        with open(self.path("x.idx"), "wb") as f:
            f.write(struct.pack(">4B2I", 0, 0, 8, 2, *x.shape) + x.astype("u1").tobytes())
        with open(self.path("y.idx"), "wb") as f:
            f.write(struct.pack(">4BI", 0, 0, 8, 1, len(y)) + y.astype("u1").tobytes())
        for train in ({"npy": {"inputs": "x.npy", "targets": "y.npy"}}, {"csv": {"path": "d.csv", "target": "label"}}, {"idx": {"inputs": "x.idx", "targets": "y.idx"}}):
            (kind, source), = train.items()
            path = self.write_job(make_job(mlp(8, 4), train, steps=2))
            done = tally("run", path, "--out", self.path("x"))
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertRegex(done.stderr, f"data.train.{kind}.targets?: the target of sample 17 is 4, but the model has classes 0 to 3$")
            self.assertEqual(tally("validate", path, "--set", "model.loss.cross_entropy.ignore_index=4").returncode, 0)
            self.assertEqual(tally("validate", path, "--set", f"data.train.{kind}.limit=17").returncode, 0)
            path = self.write_job(make_job(mlp(8, 4), synthetic(32, shape=(6,)), steps=2, test=train))
            self.assertIn(f"data.test.{kind}.target", tally("validate", path).stderr)

    def test_a_loss_that_is_no_number(self):
        job = make_job(mlp(8, 4), {"npy": {"inputs": "x.npy", "targets": "y.npy"}}, steps=2)
        np.save(self.path("x.npy"), np.zeros((30, 6), "f4"))
        np.save(self.path("y.npy"), np.full(30, -100))  # all to be ignored: 0 / 0
        got = self.run_job(job)
        self.assertRegex(got.done.stdout, r"training loss +nan\n")
        self.assertEqual(got.losses, [None, None])
        self.assertIsNone(got.summary["loss"])

    def test_start_from_a_file(self):
        job = make_job(mlp(8, 4), synthetic(64, shape=(6,)), steps=3)
        first = self.run_job(job, out="first")
        weights = {name: value.copy() for name, value in first.weights().items()}
        job["model"]["init"] = {"safetensors": {"path": "start.safetensors"}}
        job["train"]["optimizer"]["sgd"] = {"lr": 0}
        save_safetensors(self.path("start.safetensors"), weights)
        self.assertEqual(self.run_job(job, "--data", 2, "--shards", 2, out="kept").sha256, first.sha256)
        # Results that a job starts from are not overwritten by its own.
        job["model"]["init"] = {"safetensors": {"path": "first/model.safetensors"}}
        done = tally("run", self.write_job(job), "--out", self.path("first"))
        self.assertEqual(done.returncode, 2, done.stderr)
        self.assertIn("model.init", done.stderr)
        self.assertTrue(os.path.exists(self.path("first", "summary.json")))
        job["model"]["init"] = {"safetensors": {"path": "start.safetensors"}}
        for name, change in (("a missing tensor", lambda w: w.pop("2.bias")), ("an extra tensor", lambda w: w.update(extra=weights["0.bias"])),
                             ("another shape", lambda w: w.update({"0.weight": weights["0.weight"].T}))):
            with self.subTest(name):
                changed = dict(weights)
                change(changed)
                save_safetensors(self.path("start.safetensors"), changed)
                done = tally("run", self.write_job(job), "--out", self.path("x"))
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn("start.safetensors", done.stderr)
        for name, raw in (("length", struct.pack("<Q", 1 << 40) + b"{}"), ("header", struct.pack("<Q", 2) + b"{]"), ("empty", b"")):
            with self.subTest(name):
                with open(self.path("start.safetensors"), "wb") as f:
                    f.write(raw)
                done = tally("run", self.write_job(job), "--out", self.path("x"))
                self.assertEqual(done.returncode, 2, done.stderr)
                self.assertIn("start.safetensors", done.stderr)

    def test_default_out(self):
        path = self.write_job(make_job(mlp(8, 4), synthetic(32, shape=(6,)), steps=2, name="numbered"))
        for n in (1, 2):
            done = tally("run", path, "-o", "name", cwd=self.dir)
            self.assertEqual(done.returncode, 0, done.stderr)
            self.assertEqual(done.stdout.strip(), f"runs/numbered-{n}")
            self.assertTrue(os.path.exists(self.path("runs", f"numbered-{n}", "model.safetensors")))

    def test_evaluation_leaves_training_alone(self):
        job = make_job(mlp(8, 4), synthetic(40, shape=(6,)), batch_size=12, micro_batch_size=5, epochs=3)
        plain = self.run_job(job, out="plain")
        job["data"]["test"] = synthetic(17, shape=(6,))
        tested = self.run_job(job, "--data", 2, out="tested")
        self.assertEqual(plain.sha256, tested.sha256)
        self.assertEqual(plain.losses, tested.losses)
        self.assertEqual(len(tested.evals), 3)

    def test_drop_last_and_steps(self):
        job = make_job(mlp(8, 4), synthetic(40, shape=(6,)), batch_size=12, epochs=2, data={"drop_last": True})
        self.assertEqual([s["samples"] for s in self.run_job(job, out="a").steps], [12] * 6)
        job["train"]["steps"] = 4
        self.assertEqual(len(self.run_job(job, out="b").steps), 4)

    def test_examples(self):
        folder = os.path.join(repository(), "examples")
        names = [n for n in os.listdir(folder) if n.endswith(".yaml")]
        self.assertGreaterEqual(len(names), 4)
        for name in names:
            done = tally("validate", os.path.join(folder, name))
            self.assertEqual(done.returncode, 0, done.stderr)

    def test_numbers_read_back(self):
        """`normalize` and `lr` keep their bits on the way into job.yaml."""
        job = make_job(mlp(8, 4), synthetic(32, shape=(6,)), steps=1, sgd={"lr": 0.1 + 0.2, "momentum": 1 / 3})
        self.run_job(job)
        done = tally("validate", self.path("out", "job.yaml"), "-o", "json")
        sgd = json.loads(done.stdout)["train"]["optimizer"]["sgd"]
        self.assertEqual((sgd["lr"], sgd["momentum"]), (0.1 + 0.2, 1 / 3))


if __name__ == "__main__":
    tally_testing.main()
