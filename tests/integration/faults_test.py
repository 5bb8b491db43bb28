"""Signals, kills and closed descriptors at any moment: the run ends soon, says who it was, and leaves no process and no folder."""
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import time

import tally_testing
from tally_testing import TALLY, Case, Result, binary, children, logs, make_job, mlp, processes, synthetic, wait_for

ENDLESS = {"epochs": 1000000}
# A stopped process is noticed by its lease of 10 s; a machine that does other things as well may be late.
LEASE = 30


class Faults(Case):
    def setUp(self):
        super().setUp()
        os.mkdir(self.path("tmp"))
        self.env = dict(os.environ, TMPDIR=self.path("tmp"))

    def job(self, **limits):
        return make_job(mlp(64, 4), synthetic(640, shape=(32,)), batch_size=64, micro_batch_size=16, test=synthetic(64, shape=(32,)), **(limits or ENDLESS))

    def start(self, job, *arguments, out="out", **how):
        path = self.write_job(job, out + ".yaml")
        shutil.rmtree(self.path(out), ignore_errors=True)
        how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": self.env, **how}
        run = subprocess.Popen([TALLY, "run", path, "--out", self.path(out), *map(str, arguments)], **how)
        self.addCleanup(self.end, run)
        return run

    def end(self, run):
        if run.poll() is None:
            run.kill()
            run.communicate()

    def training(self, run):
        wait_for(lambda: run.poll() is not None or (os.path.exists(self.path("out", "metrics.jsonl")) and os.path.getsize(self.path("out", "metrics.jsonl"))), 60, "steps")
        self.assertIsNone(run.poll())

    def finish(self, run, seconds=LEASE + 30):
        _, errors = run.communicate(timeout=seconds)
        self.nothing_left(1)
        return errors

    def nothing_left(self, seconds):
        wait_for(lambda: not processes(self.path("tmp")), seconds, f"the processes to end: {processes(self.path('tmp'))}")
        self.assertEqual(os.listdir(self.path("tmp")), [])

    def last_line(self, errors, *words):
        last = (errors.strip().splitlines() or [""])[-1]
        self.assertTrue(last.startswith("tally: "), errors)
        for word in words:
            self.assertIn(word, last, errors + logs(self.path("out")))

    def test_terminal_closed(self):
        run = self.start(self.job(), "--data", 2)
        self.training(run)
        run.send_signal(signal.SIGHUP)
        errors = self.finish(run)
        self.assertEqual(run.returncode, 4, errors)
        self.assertTrue(Result(self.path("out")).sha256)

    def test_terminal_closed_under_nohup(self):
        run = self.start(self.job(), preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN))
        self.training(run)
        run.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        self.assertIsNone(run.poll())
        run.send_signal(signal.SIGINT)
        self.assertEqual(self.finish(run) and run.returncode, 4)

    def test_interrupted_at_any_moment(self):
        dice = random.Random(5)
        for number in [signal.SIGINT, signal.SIGTERM, signal.SIGHUP] * 4:
            wait = dice.uniform(0.05, 0.6)
            with self.subTest(signal=number, seconds=wait):
                run = self.start(self.job(epochs=20), "--data", 2, "--shards", 2)
                time.sleep(wait)
                run.send_signal(number)
                errors = self.finish(run)
                if run.returncode == -number:  # it had not come to main() yet: nothing has begun
                    self.assertFalse(os.path.exists(self.path("out")))
                    continue
                self.assertIn(run.returncode, (0, 4), errors)
                state = {0: "SUCCEEDED", 4: "STOPPED"}[run.returncode]
                if os.path.exists(self.path("out", "summary.json")):
                    self.assertEqual(Result(self.path("out")).summary["state"], state)
                if run.returncode == 4:
                    self.last_line(errors, "interrupted")

    def test_client_killed_at_any_moment(self):
        dice = random.Random(6)
        for _ in range(8):
            wait = dice.uniform(0.1, 0.5)
            with self.subTest(seconds=wait):
                run = self.start(self.job(epochs=20), "--data", 2)
                time.sleep(wait)
                run.kill()
                run.communicate()
                self.nothing_left(15)

    def test_node_killed_at_any_moment(self):
        dice = random.Random(7)
        for _ in range(10):
            wait, name = dice.uniform(0.05, 0.5), dice.choice(["coordinator", "s0", "s1", "w0", "w1"])
            with self.subTest(name=name, seconds=wait):
                run = self.start(self.job(epochs=20), "--data", 2, "--shards", 2)
                time.sleep(wait)
                pid = children(run.pid).get(name)
                if pid:
                    try:
                        os.kill(pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pid = None
                began = time.monotonic()
                errors = self.finish(run)
                self.assertLess(time.monotonic() - began, 25)
                self.assertIn(run.returncode, (0, 3) if pid else (0,), errors)
                if run.returncode == 3:
                    self.last_line(errors, name)

    def test_stopped_coordinator(self):
        run = self.start(self.job(), "--data", 2)
        self.training(run)
        os.kill(children(run.pid)["coordinator"], signal.SIGSTOP)
        errors = self.finish(run)
        self.assertEqual(run.returncode, 3, errors)
        self.last_line(errors, "the coordinator does not answer")

    def test_stopped_nodes(self):
        for name in ("w1", "s1"):
            with self.subTest(name):
                run = self.start(self.job(), "--data", 2, "--shards", 2)
                self.training(run)
                os.kill(children(run.pid)[name], signal.SIGSTOP)
                errors = self.finish(run)
                self.assertEqual(run.returncode, 3, errors)
                self.last_line(errors, name, "no heartbeat")

    def test_worker_that_never_joins(self):
        run = self.start(self.job(), "--data", 2)
        os.kill(wait_for(lambda: children(run.pid).get("w0"), 20, "w0 to be started"), signal.SIGSTOP)
        errors = self.finish(run, 90)
        self.assertEqual(run.returncode, 3, errors)
        self.last_line(errors, "worker w0")

    def test_little_room(self):
        """A small file system for the cluster's folder, then for the results: it fills while steps run."""
        os.mkdir(self.path("small"))
        for variable, out in ((self.path("small"), "out"), (self.path("tmp"), "small/out")):
            with self.subTest(out=out):
                done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", self.path("small")], capture_output=True)
                if done.returncode != 0:
                    self.skipTest("this user may not mount a small file system")
                try:
                    path = self.write_job(self.job())
                    done = subprocess.run([TALLY, "run", path, "--out", self.path(out)], capture_output=True, text=True, timeout=60, env=dict(self.env, TMPDIR=variable))
                    left = [name for name in os.listdir(self.path("small")) if name.startswith("tally-")]
                finally:
                    subprocess.run(["umount", self.path("small")], check=True)
                self.assertEqual(done.returncode, 3, done.stderr)
                self.last_line(done.stderr, self.path("small"), "o space left")
                self.assertEqual(left, [])

    def test_no_folder_for_sockets(self):
        done = subprocess.run([TALLY, "run", self.write_job(self.job()), "--out", self.path("out")], capture_output=True, text=True, timeout=60, env=dict(self.env, TMPDIR=self.path("none")))
        self.assertEqual(done.returncode, 3, done.stderr)
        self.last_line(done.stderr, self.path("none"), "No such file")

    def test_little_memory(self):
        """At every limit of memory it ends, with a reason."""
        limit = lambda megabytes: resource.setrlimit(resource.RLIMIT_AS, (megabytes << 20, megabytes << 20))
        if subprocess.run([TALLY, "--version"], capture_output=True, preexec_fn=lambda: limit(4000)).returncode != 0:
            self.skipTest("a sanitizer needs all of the address space")
        for megabytes in (30, 60, 100, 140, 4000):
            with self.subTest(megabytes):
                run = self.start(self.job(epochs=1), preexec_fn=lambda: limit(megabytes))
                errors = self.finish(run, 90)
                self.assertIn(run.returncode, (0,) if megabytes == 4000 else (0, 3), errors)
                if run.returncode:
                    self.last_line(errors)

    def test_closed_descriptors(self):
        """What is opened next takes the number of a closed descriptor: nothing may be printed into it."""
        run = self.start(self.job(epochs=1), preexec_fn=lambda: (os.close(0), os.close(1)))
        self.last_line(self.finish(run), "stdout")
        self.assertEqual(run.returncode, 1)
        self.assertEqual(len(Result(self.path("out")).steps), 10)
        run = self.start(self.job(epochs=1), preexec_fn=lambda: os.close(2))
        self.finish(run)
        self.assertEqual(run.returncode, 0)
        self.assertEqual(len(Result(self.path("out")).steps), 10)

    def test_closed_pipe(self):
        reader, writer = os.pipe()
        os.close(reader)
        run = self.start(self.job(epochs=1), stdout=writer)
        os.close(writer)
        self.last_line(self.finish(run), "stdout: Broken pipe")
        self.assertEqual(run.returncode, 1)
        self.assertEqual(Result(self.path("out")).summary["state"], "SUCCEEDED")

    def test_daemon_without_descriptors(self):
        def close():
            for fd in range(3):
                os.close(fd)

        server = subprocess.Popen([binary("server/tally-server"), "coordinator", "--listen", "unix:" + self.path("c.sock"), "--state", self.path("state")], preexec_fn=close)
        self.addCleanup(server.kill)
        wait_for(lambda: os.path.exists(self.path("c.sock")), 20, "the coordinator to listen")
        server.send_signal(signal.SIGTERM)
        self.assertEqual(server.wait(10), 0)
        with sqlite3.connect(self.path("state", "jobs.sqlite")) as store:
            self.assertEqual(store.execute("PRAGMA integrity_check").fetchone(), ("ok",))
        self.assertFalse(os.path.exists(self.path("c.sock")))

    def test_private_folder_must_hold_the_state(self):
        os.mkdir(self.path("precious"))
        for state in ("state", "precious/../state", "precious"):
            done = subprocess.run([binary("server/tally-server"), "coordinator", "--listen", "unix:" + self.path("c.sock"), "--state", self.path(state), "--private", self.path("precious")],
                                  capture_output=True, text=True, timeout=20)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertTrue(os.path.isdir(self.path("precious")))

    def test_first_process_of_a_container(self):
        """Process 1 is the parent of orphans, and here of the cluster."""
        space = ["unshare", "--pid", "--fork", "--mount-proc"]
        try:
            subprocess.run([*space, "true"], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as why:
            self.skipTest(f"no PID namespaces here: {why}")
        done = subprocess.run([*space, TALLY, "run", self.write_job(self.job(epochs=1)), "--out", self.path("out")], capture_output=True, text=True, timeout=60, env=self.env)
        self.assertEqual(done.returncode, 0, done.stderr)


if __name__ == "__main__":
    tally_testing.main()
