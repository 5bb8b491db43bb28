"""PyTorch's losses for the same programs (tests/golden), on one and two workers, each within its stated bound."""
import json
import os

import tally_testing
from tally_testing import CNN, Case, fashion, make_job, mlp, repository

GOLDEN = os.path.join(repository(), "tests", "golden", "golden.json")
DATA = os.path.join(repository(), "examples", "data")

MLP = mlp(20, 2)
TWO_PARTS = [
    {"name": "layer1.0", "linear": {"out_features": 20}},
    {"name": "layer1.1", "relu": {}},
    {"name": "layer2.0", "linear": {"out_features": 2}},
]
MLP784 = [
    {"flatten": {}},
    {"name": "fc1", "linear": {"out_features": 256}},
    {"relu": {}},
    {"name": "fc2", "linear": {"out_features": 64}},
    {"relu": {}},
    {"name": "fc3", "linear": {"out_features": 10}},
]
FASHION_SCALE = {"normalize": {"mean": [0.2860], "std": [0.3530]}}


def npy(limit):
    return {"npy": {"inputs": os.path.realpath(f"{DATA}/x10.npy"), "targets": os.path.realpath(f"{DATA}/y2.npy"), "limit": limit}}


class Golden(Case):
    def check(self, name, layers, train, data=None, micro=None):
        with open(GOLDEN) as f:
            case = json.load(f)[name]
        bound = max(2e-6, 10 * case["drift"])
        job = make_job(layers, train, batch_size=case["batch_size"], micro_batch_size=micro, seed=case["seed"], sgd=case["sgd"],
                       data={"shuffle": case["shuffle"], **(data or {})}, steps=len(case["losses"]), name=name.replace("_", "-"))
        for workers in (1, 2):
            with self.subTest(workers=workers):
                got = self.run_job(job, "--data", workers, out=f"w{workers}")
                self.assertEqual(len(got.losses), len(case["losses"]))
                worst = max(abs(a - b) / abs(b) for a, b in zip(got.losses, case["losses"]))
                self.assertLessEqual(worst, bound)
                weights = got.weights()
                self.assertEqual([[n, list(w.shape)] for n, w in weights.items()], [[n, s["shape"]] for n, s in case["state"].items()])
                for n, w in weights.items():
                    squares, expected = float((w.astype("f8") ** 2).sum()), case["state"][n]["sum_of_squares"]
                    self.assertAlmostEqual(squares / expected, 1, delta=max(1e-5, 10 * bound), msg=n)

    def test_seed_data_parallel(self):
        self.check("seed_data_parallel", MLP, npy(64))

    def test_seed_model_parallel_as_one_stage(self):
        self.check("seed_model_parallel", TWO_PARTS, npy(64))

    def test_seed_accumulation(self):
        self.check("seed_accumulation", MLP, npy(250), micro=16)

    def test_seed_cnn(self):
        self.check("seed_cnn", CNN, fashion("train", 4096), FASHION_SCALE)

    def test_fashion_cnn_momentum(self):
        self.check("fashion_cnn_momentum", CNN, fashion("train", 4000), FASHION_SCALE)

    def test_fashion_mlp_nesterov(self):
        self.check("fashion_mlp_nesterov", MLP784, fashion("train", 5000), FASHION_SCALE)


if __name__ == "__main__":
    tally_testing.main()
