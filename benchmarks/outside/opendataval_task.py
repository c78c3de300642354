"""OpenDataVal's task of noisy labels, in an environment of its own: data, its own evaluators, its judgement of all.

Usage: python opendataval_task.py make TABLE COUNT SEED OUT.npz
       python opendataval_task.py judge TABLE COUNT SEED MODELS GIVEN.npz OUT.json

`judge` makes the same data again. GIVEN.npz holds values of training points from elsewhere, by name.
"""

import json
import sys
import time
from importlib.metadata import version

import numpy as np
import torch
from opendataval.dataloader import DataFetcher, mix_labels
from opendataval.dataval import (
    DataEvaluator,
    DataOob,
    InfluenceFunction,
    InfluenceSubsample,
    KNNShapley,
    LeaveOneOut,
    RandomEvaluator,
)  # fmt: skip
from opendataval.experiment.exper_methods import noisy_detection
from opendataval.model import ModelFactory
from sklearn.metrics import roc_auc_score

NOISE_RATE = 0.2  # of training and of validation labels, OpenDataVal's default
VALIDATION = 4  # training points per validation point


class Given(DataEvaluator):
    """Values that were computed elsewhere."""

    def __init__(self, values: np.ndarray) -> None:
        """Take the values."""
        self.values = values

    def train_data_values(self, *_: object, **__: object) -> "Given":
        """Do nothing."""
        return self

    def evaluate_data_values(self) -> np.ndarray:
        """Return the values."""
        return self.values


def fetched(table: str, count: int, seed: int) -> DataFetcher:
    """Return training and validation points of a table, with wrong labels in both."""
    held_out = count // VALIDATION
    noise = {"noise_rate": NOISE_RATE}
    return DataFetcher.setup(table, None, False, seed, count, held_out, 0, mix_labels, noise)


def evaluators(num_valid: int, models: int, seed: int) -> dict[str, tuple[DataEvaluator, str | None, dict]]:
    """Return its evaluators with the model of each, and the settings of that model's training."""
    gradient = {"epochs": 100, "batch_size": 32, "lr": 0.01}  # of the one that needs gradients, in place of one epoch
    return {
        "random": (RandomEvaluator(seed), None, {}),
        "LOO": (LeaveOneOut(seed), "sklogreg", {}),
        "KNNShapley": (KNNShapley(num_valid, random_state=seed), None, {}),
        "influence function": (InfluenceFunction(), "logisticregression", gradient),
        "influence by subsets": (InfluenceSubsample(models, random_state=seed), "sklogreg", {}),
        "Data-OOB": (DataOob(models, random_state=seed), "sklogreg", {}),
    }


def judged(values: DataEvaluator, wrong: np.ndarray, count: int) -> dict[str, float]:
    """Return its F1 score, and the area under the ROC curve, of finding the wrong labels at low values."""
    is_wrong = np.isin(np.arange(count), wrong)
    area = roc_auc_score(is_wrong, -np.asarray(values.data_values).ravel())
    return {"F1": float(noisy_detection(values, indices=wrong.tolist())["kmeans_f1"]), "AUROC": float(area)}


def judge(fetcher: DataFetcher, count: int, seed: int, models: int, given: dict[str, np.ndarray]) -> dict[str, dict]:
    """Run its evaluators, and judge them and the given values."""
    wrong = fetcher.noisy_train_indices
    found = {name: judged(Given(values), wrong, count) for name, values in given.items()}
    for name, (evaluator, model, settings) in evaluators(count // VALIDATION, models, seed).items():
        torch.manual_seed(seed)
        start = time.process_time()
        evaluator.train(fetcher, model and ModelFactory(model, fetcher), None, **settings)
        _ = evaluator.data_values
        seconds = time.process_time() - start
        found[name] = {**judged(evaluator, wrong, count), "seconds": seconds}
    return found


def main() -> None:
    """Do what is asked for."""
    torch.set_num_threads(1)
    action, table, count, seed, *rest = sys.argv[1:]
    fetcher = fetched(table, int(count), int(seed))
    X, y = fetcher.datapoints[:2]
    if action == "make":
        np.savez(rest[0], X=X.numpy(), y=y.argmax(1).numpy())
        return
    models, given, out = rest
    with np.load(given) as values:
        found = judge(fetcher, int(count), int(seed), int(models), dict(values))
    with open(out, "w") as file:
        json.dump({"found": found, "versions": {"opendataval": version("opendataval")}}, file)


if __name__ == "__main__":
    main()
