"""Every failure that a person can cause ends with one clear sentence, the right exit status, and no process or socket left."""
import os
import resource
import signal
import subprocess
import time

import tally_testing
from tally_testing import TALLY, Case, Result, binary, children, fashion, load_safetensors, logs, make_job, mlp, synthetic, tally, wait_for

LONG = {"epochs": 1000000}


class Failures(Case):
    def start(self, job, *arguments, out="out"):
        path = self.write_job(job, out + ".yaml")
        os.makedirs(self.path("tmp"), exist_ok=True)  # where the cluster's sockets are
        run = subprocess.Popen([TALLY, "run", path, "--out", self.path(out), *map(str, arguments)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                               env=dict(os.environ, TMPDIR=self.path("tmp")))
        self.addCleanup(self.end, run)
        return run

    def end(self, run):
        if run.poll() is None:
            run.kill()
            run.communicate()

    def training(self, run, out="out", steps=3):
        """Waits until some steps are in the metrics."""
        path = self.path(out, "metrics.jsonl")

        def ready():
            self.assertIsNone(run.poll(), run.communicate() if run.poll() is not None else "")
            return os.path.exists(path) and self.lines(path) >= steps

        wait_for(ready, 60, "steps in metrics.jsonl")

    def lines(self, path):
        with open(path) as f:
            return sum(1 for _ in f)

    def finish(self, run, seconds=60):
        kids = children(run.pid)
        output, errors = run.communicate(timeout=seconds)
        left = [pid for pid in kids.values() if os.path.exists(f"/proc/{pid}") and "Z" not in open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[0]]
        self.assertEqual(left, [], "processes are left")
        return output, errors

    def one_sentence(self, errors, *words):
        """The last line of stderr is the reason, and names what it should."""
        last = errors.strip().splitlines()[-1]
        self.assertTrue(last.startswith("tally: "), errors)
        for word in words:
            self.assertIn(word, last, errors)

    def job(self, **more):
        return make_job(mlp(64, 4), synthetic(4096, shape=(32,)), batch_size=64, micro_batch_size=16, **(more or LONG))

    def test_interrupt_keeps_the_weights(self):
        run = self.start(self.job(), "--data", 2, "--shards", 2)
        self.training(run)
        run.send_signal(signal.SIGINT)
        _, errors = self.finish(run)
        self.assertEqual(run.returncode, 4, errors + logs(self.path("out")))
        self.one_sentence(errors, "stopped")
        got = Result(self.path("out"))
        self.assertEqual(got.summary["state"], "STOPPED")
        tensors, metadata = load_safetensors(self.path("out", "model.safetensors"))
        self.assertEqual(sorted(tensors), ["0.bias", "0.weight", "2.bias", "2.weight"])
        # The bytes are those of the step that the file names: a run of so many steps ends with the same.
        step = int(metadata["step"])
        self.assertGreaterEqual(step, len(got.steps))
        again = self.run_job(self.job(steps=step), "--data", 1, out="again")
        self.assertEqual(again.sha256, got.sha256)
        self.assertEqual(os.listdir(self.path("tmp")), [], "sockets are left")

    def test_second_interrupt_ends_at_once(self):
        run = self.start(self.job(), "--data", 1)
        self.training(run)
        for kid in children(run.pid).values():  # a cluster that cannot answer
            os.kill(kid, signal.SIGSTOP)
        run.send_signal(signal.SIGINT)
        time.sleep(0.3)
        self.assertIsNone(run.poll())
        run.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = self.finish(run, 30)
        self.assertLess(time.monotonic() - began, 15)
        self.assertEqual(run.returncode, 4, errors)

    def test_interrupt_before_the_coordinator_answers(self):
        run = self.start(self.job(), "--data", 1)
        coordinator = wait_for(lambda: children(run.pid).get("coordinator"), 10, "the coordinator")
        while not any("coordinator.sock" in files for _, _, files in os.walk(self.path("tmp"))):
            self.assertIsNone(run.poll())
        os.kill(coordinator, signal.SIGSTOP)  # the job is about to be submitted
        time.sleep(1)
        run.send_signal(signal.SIGINT)
        began = time.monotonic()
        _, errors = self.finish(run, 30)
        self.assertLess(time.monotonic() - began, 10)
        self.assertEqual(run.returncode, 4, errors)

    def killed(self, name, number=signal.SIGKILL):
        run = self.start(self.job(), "--data", 2, "--shards", 2)
        self.training(run)
        os.kill(children(run.pid)[name], number)
        _, errors = self.finish(run)
        self.assertEqual(run.returncode, 3, errors + logs(self.path("out")))
        self.assertEqual(Result(self.path("out")).summary["state"], "FAILED")
        self.assertEqual(os.listdir(self.path("tmp")), [], "sockets are left")
        return errors

    def test_worker_killed(self):
        self.one_sentence(self.killed("w1"), "w1")

    def test_shard_killed(self):
        self.one_sentence(self.killed("s1"), "s1")

    def test_coordinator_killed(self):
        self.one_sentence(self.killed("coordinator"), "coordinator")

    def test_client_killed_takes_its_cluster_along(self):
        run = self.start(self.job(), "--data", 2, "--shards", 2)
        self.training(run)
        kids = children(run.pid)
        self.assertEqual(sorted(kids), ["coordinator", "s0", "s1", "w0", "w1"])
        run.kill()
        run.communicate()
        wait_for(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in kids.values()), 15, "the cluster's processes to end")

    def test_data_that_is_not_there(self):
        job = self.job(epochs=1)
        job["data"]["train"] = {"idx": {"inputs": "nowhere-images.gz", "targets": "nowhere-labels.gz"}}
        done = tally("run", self.write_job(job), "--out", self.path("out"))
        self.assertEqual(done.returncode, 2)
        self.one_sentence(done.stderr, "data.train.idx.inputs", "nowhere-images.gz", "No such file")

    def test_data_that_is_damaged(self):
        """A gzip file whose header is right and whose end is missing: only reading it through can tell."""
        with open(fashion("train")["idx"]["inputs"], "rb") as f:
            whole = f.read()
        with open(self.path("cut.gz"), "wb") as f:
            f.write(whole[: len(whole) // 2])
        job = make_job([{"flatten": {}}, {"linear": {"out_features": 10}}], {"idx": {"inputs": "cut.gz", "targets": fashion("train")["idx"]["targets"]}})
        done = tally("run", self.write_job(job), "--out", self.path("out"))
        self.assertIn(done.returncode, (2, 3))
        self.one_sentence(done.stderr, "cut.gz")

    def test_targets_out_of_range(self):
        job = make_job([{"flatten": {}}, {"linear": {"out_features": 9}}], fashion("train", 1000), epochs=1)
        done = tally("run", self.write_job(job), "--out", self.path("out"))
        self.assertIn(done.returncode, (2, 3))
        self.one_sentence(done.stderr, "9")

    def test_out_that_cannot_be_made(self):
        with open(self.path("file"), "w") as f:
            f.write("not a folder")
        done = tally("run", self.write_job(self.job(epochs=1)), "--out", self.path("file", "out"))
        self.assertNotEqual(done.returncode, 0)
        self.one_sentence(done.stderr, self.path("file"), "a file of this name is there")

    def test_disk_full(self):
        """A limit on the size of files stands for a full disk: the weights do not fit."""
        job = make_job(mlp(2048, 4), synthetic(64, shape=(512,)), batch_size=64, epochs=1)
        path = self.write_job(job)

        def limit():
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))

        done = subprocess.run([TALLY, "run", path, "--out", self.path("out")], capture_output=True, text=True, timeout=60, preexec_fn=limit)
        self.assertEqual(done.returncode, 3, done.stderr + logs(self.path("out")))
        self.one_sentence(done.stderr, "File too large")
        self.assertFalse(os.path.exists(self.path("out", "model.safetensors")))

    def test_port_taken(self):
        import socket

        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            address = "127.0.0.1:%d" % taken.getsockname()[1]
            server = binary("server/tally-server")
            for command in (
                [server, "coordinator", "--listen", address, "--state", self.path("state")],
                [server, "shard", "--name", "s0", "--listen", address, "--coordinator", "127.0.0.1:1"],
                [binary("worker/tally-worker"), "--name", "w0", "--listen", address, "--coordinator", "127.0.0.1:1"],
            ):
                with self.subTest(command=command[0]):
                    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
                    self.assertEqual(done.returncode, 1)
                    self.assertIn(address.split(":")[1], done.stderr)
                    self.assertIn("somebody listens there already", done.stderr)
                    self.assertEqual(len(done.stderr.strip().splitlines()), 1, done.stderr)

    def test_a_worker_that_cannot_start(self):
        """A binary that does not run, beside a client that looks for it there."""
        import shutil

        folder = self.path("bin")
        os.makedirs(folder)
        for name in ("client/tally", "server/tally-server"):
            shutil.copy(binary(name), folder)
        worker = os.path.join(folder, "tally-worker")
        with open(worker, "w") as f:
            f.write("#!/bin/sh\necho 'no such device' >&2\nexit 1\n")
        os.chmod(worker, 0o755)
        done = subprocess.run([os.path.join(folder, "tally"), "run", self.write_job(self.job(epochs=1)), "--out", self.path("out")],
                              capture_output=True, text=True, timeout=60)
        self.assertEqual(done.returncode, 3, done.stderr)
        self.one_sentence(done.stderr, "w0", "no such device")
        os.unlink(worker)
        done = subprocess.run([os.path.join(folder, "tally"), "run", self.write_job(self.job(epochs=1)), "--out", self.path("out")],
                              capture_output=True, text=True, timeout=60)
        self.assertNotEqual(done.returncode, 0)
        self.one_sentence(done.stderr, "tally-worker is not beside")


if __name__ == "__main__":
    tally_testing.main()
