"""A shard's memory stays within its bound however many workers run ahead of each other, and holding them back changes no bit."""
import json
import subprocess
import time

import tally_testing
from tally_testing import TALLY, Case, Result, children, make_job, mlp, synthetic

MIB = 1 << 20


def peak(pid):
    """VmHWM in bytes; 0 once the process has ended."""
    try:
        with open(f"/proc/{pid}/status") as f:
            return sum(int(line.split()[1]) << 10 for line in f if line.startswith("VmHWM:"))
    except OSError:
        return 0


class Memory(Case):
    def run_measured(self, job, workers):
        path, out = self.write_job(job), self.path(f"out{workers}")
        run = subprocess.Popen([TALLY, "run", path, "--out", out, "--data", str(workers), "-q"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        peaks, shard = 0, None
        while run.poll() is None:
            shard = shard or children(run.pid).get("s0")
            peaks = max(peaks, peak(shard) if shard else 0)
            time.sleep(0.01)
        self.assertEqual(run.returncode, 0, run.communicate()[1])
        return Result(out), peaks

    def test_shard(self):
        job = make_job(mlp(2048, 2048, 10), synthetic(256, classes=10, shape=(784,)), batch_size=64, micro_batch_size=8, steps=5)
        parameters = sum(int(p["count"]) for p in json.loads(tally_testing.tally("plan", self.write_job(job), "-o", "json").stdout)["slices"]) * 4
        one, _ = self.run_measured(job, 1)
        with open(TALLY, "rb") as f:
            sanitized = b"__asan_init" in f.read()
        for workers in (2, 8):
            with self.subTest(workers=workers):
                result, peaks = self.run_measured(job, workers)
                self.assertEqual(result.sha256, one.sha256)
                self.assertEqual(result.losses, one.losses)
                self.assertGreater(peaks, 4 * parameters)
                if not sanitized:
                    self.assertLess(peaks / MIB, (5 * parameters + 64 * MIB) / MIB)


if __name__ == "__main__":
    tally_testing.main()
