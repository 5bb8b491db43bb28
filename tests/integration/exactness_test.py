"""The heart of it: the weights' bytes are the same for any number of workers and shards."""
import itertools
import os
import unittest

import tally_testing
from tally_testing import BRANCHES, Case, make_job, mlp, synthetic

WORKERS = (1, 2, 3, 4, 8)
SHARDS = (1, 2, 3)
# Under a sanitizer a run takes many times as long.
FEW = os.environ.get("TALLY_TEST_FEW") == "1"

SMALL_CNN = [
    {"name": "conv1", "conv2d": {"out_channels": 5, "kernel_size": 3, "padding": 1}},
    {"relu": {}},
    {"max_pool2d": {"kernel_size": 2}},
    {"name": "conv2", "conv2d": {"out_channels": 8, "kernel_size": [3, 2], "stride": 2, "bias": False}},
    {"gelu": {}},
    {"flatten": {}},
    {"name": "fc", "linear": {"out_features": 4}},
]


class Exactness(Case):
    def same(self, job, combinations):
        base = self.run_job(job, "--data", 1, "--shards", 1, out="base")
        self.assertTrue(base.losses)
        for workers, shards in combinations:
            with self.subTest(workers=workers, shards=shards):
                got = self.run_job(job, "--data", workers, "--shards", shards, out=f"w{workers}s{shards}")
                self.assertEqual(got.sha256, base.sha256)
                self.assertEqual(got.losses, base.losses)  # to the last bit
                self.assertEqual([e["eval"] for e in got.evals], [e["eval"] for e in base.evals])
                self.assertEqual(got.summary["mesh"]["data"], workers)
                self.assertEqual(got.summary["mesh"]["shards"], shards)

    def micro_batches(self, v):
        # 4 samples a micro-batch; 2 steps of v micro-batches, then a short one whose last micro-batch is short too
        samples = 2 * 4 * v + max(4 * v - 3, 1)
        job = make_job(mlp(16, 4), synthetic(samples), batch_size=4 * v, micro_batch_size=4, epochs=2, test=synthetic(21), seed=v)
        every = [c for c in itertools.product(WORKERS, SHARDS) if c != (1, 1)]
        self.same(job, [(2, 2), (3, 1)] if FEW else every)

    def test_one_micro_batch(self):
        self.micro_batches(1)

    def test_three_micro_batches(self):
        self.micro_batches(3)

    def test_four_micro_batches(self):
        self.micro_batches(4)

    def test_seven_micro_batches(self):
        self.micro_batches(7)

    def test_eight_micro_batches(self):
        self.micro_batches(8)

    def test_convolutions(self):
        job = make_job(SMALL_CNN, synthetic(70, shape=(2, 9, 8)), batch_size=24, micro_batch_size=5, test=synthetic(11, shape=(2, 9, 8)),
                       sgd={"lr": 0.02, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01})
        self.same(job, [(2, 2)] if FEW else [(2, 2), (3, 3), (5, 1)])

    def test_branches(self):
        job = make_job(BRANCHES, synthetic(50), batch_size=14, micro_batch_size=2, sgd={"lr": 0.1, "momentum": 0.5, "dampening": 0.1})
        self.same(job, [(3, 2)] if FEW else [(2, 3), (4, 2), (7, 1)])

    def test_values(self):
        train = {"synthetic": {"samples": 40, "shape": [6], "target_shape": [3]}}
        job = make_job([{"linear": {"out_features": 9}}, {"tanh": {}}, {"linear": {"out_features": 3}}], train, batch_size=12, micro_batch_size=3,
                       loss={"mse_loss": {}}, sgd={"lr": 0.01})
        self.same(job, [(2, 2)] if FEW else [(2, 2), (4, 1)])

    def test_many_slices(self):
        """Parameters of several slices of 1 MiB on several shards."""
        job = make_job(mlp(700, 900, 4), synthetic(64, shape=(300,)), batch_size=32, micro_batch_size=8, epochs=1)
        self.same(job, [(2, 3)] if FEW else [(1, 2), (2, 3), (3, 1), (4, 2)])

    def test_repetition(self):
        job = make_job(mlp(16, 4), synthetic(40), batch_size=16, micro_batch_size=4)
        first = self.run_job(job, out="a")
        self.assertEqual(self.run_job(job, out="b").sha256, first.sha256)
        changed = dict(job, seed=2)
        self.assertNotEqual(self.run_job(changed, out="c").sha256, first.sha256)


if __name__ == "__main__":
    tally_testing.main()
