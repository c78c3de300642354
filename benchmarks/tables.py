"""The estimators on tables, beside a straight line, scikit-learn's MLP, a Gaussian process or SVC, and boosted trees.

Usage: python benchmarks/tables.py [--group reported] [--seeds 5] [TABLE ...]

Each table is divided anew for each seed: some rows train, the others test, at most 2000 of them. Every estimator gets
the same raw rows; scikit-learn's stand behind a StandardScaler, and targets are standardised for them too. The recipe
was chosen on the tables of the group `choice`, and its numbers are those of the group `reported`.

* R2 or log-loss of the test rows.
* inside, 2 x, 4 x: share of observations in 90 % bars, of test rows and of rows two and four times as far from the
  middle of the training rows; only for tables whose rows can be made anywhere.
* width: mean width of these bars inside, in standard deviations of the targets.
* seconds of the processor, on one thread.
"""

import json
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from sklearn import datasets
from sklearn.base import BaseEstimator
from sklearn.compose import TransformedTargetRegressor
from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import log_loss
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import SVC

import epk_gp as epk

HERE = Path(__file__).parent
MOST_TEST_ROWS = 2000
app = typer.Typer(help=__doc__)
Function = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class Made:
    """A table of values at uniform rows, with normal noise.

    Attributes:
        function: Maps (n, D) rows in (0, 1) to n values.
        features: D.
        rows: That train.
        noise: Standard deviation of the noise at (n, D) rows.
    """

    function: Function
    features: int
    rows: int
    noise: Function

    def draw(self, seed: int) -> dict[str, Any]:
        """Return training and test rows, and test rows farther out."""
        rng = np.random.default_rng(seed)
        X = rng.uniform(size=(self.rows + MOST_TEST_ROWS, self.features))
        far = {f"{factor} x": 0.5 + factor * (X[self.rows :] - 0.5) for factor in (2, 4)}
        y, *targets = (self.function(Z) + self.noise(Z) * rng.normal(size=len(Z)) for Z in (X, *far.values()))
        train, test = slice(self.rows), slice(self.rows, None)
        outside = {name: (Z, z) for (name, Z), z in zip(far.items(), targets, strict=True)}
        return {"train": (X[train], y[train]), "test": (X[test], y[test]), "far": outside}


@dataclass(frozen=True)
class Given:
    """A table of rows that are all there are.

    Attributes:
        load: Returns all rows and targets, for a seed.
        rows: That train.
    """

    load: Callable[[int], tuple[np.ndarray, np.ndarray]]
    rows: int

    def draw(self, seed: int) -> dict[str, Any]:
        """Return training and test rows."""
        X, y = self.load(seed)
        order = np.random.default_rng(seed).permutation(len(X))
        train, test = order[: self.rows], order[self.rows :][:MOST_TEST_ROWS]
        return {"train": (X[train], y[train]), "test": (X[test], y[test]), "far": {}}


def constant(std: float) -> Function:
    """Return the same noise for all rows."""
    return lambda X: np.full(len(X), std)


def friedman1(X: np.ndarray) -> np.ndarray:
    """Friedman's first function (scikit-learn's `make_friedman1`), of ten columns, five of which do nothing."""
    return 10 * np.sin(np.pi * X[:, 0] * X[:, 1]) + 20 * (X[:, 2] - 0.5) ** 2 + 10 * X[:, 3] + 5 * X[:, 4]


def friedman2(X: np.ndarray) -> np.ndarray:
    """Friedman's second function, divided by 100."""
    a, b, c, d = (X * np.array([100, 520 * np.pi, 1, 10]) + np.array([0, 40 * np.pi, 0, 1])).T
    return (a**2 + (b * c - 1 / (b * d + 1e-6)) ** 2) ** 0.5 / 100


def of_loader(loader: Callable[..., Any], column: int | None = None) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Return the rows of one of scikit-learn's tables; a column that is given is the target, in place of classes."""

    def load(seed: int) -> tuple[np.ndarray, np.ndarray]:
        X, y = loader(return_X_y=True)
        return (X, y) if column is None else (np.delete(X, column, axis=1), X[:, column])

    return load


def of_maker(maker: Callable[..., Any], **settings: Any) -> Callable[[int], tuple[np.ndarray, np.ndarray]]:
    """Return rows that a maker of scikit-learn draws."""

    def load(seed: int) -> tuple[np.ndarray, np.ndarray]:
        X, y, *_ = maker(random_state=seed, **settings)
        return X, y

    return load


REGRESSION: dict[str, dict[str, Made | Given]] = {
    "choice": {
        "friedman2": Made(friedman2, 4, 300, constant(1.0)),
        "line": Made(lambda X: X @ np.r_[3, -2, 1, np.zeros(5)], 8, 200, constant(0.5)),
        "product": Made(lambda X: 4 * (X[:, 0] - 0.5) * (X[:, 1] - 0.5), 3, 300, constant(0.1)),
        "wave": Made(lambda X: np.sin(12 * X[:, 0]), 1, 100, constant(0.2)),
        "weak": Made(lambda X: np.tanh(6 * X[:, 0] - 3), 6, 150, constant(1.5)),
        "many columns": Made(lambda X: X @ np.r_[3, 2, -2, 1, 1, -1, np.zeros(24)], 30, 100, constant(0.6)),
        "bump": Made(lambda X: np.exp(-20 * ((X[:, :2] - 0.5) ** 2).sum(1)), 4, 250, constant(0.1)),
        "kink": Made(lambda X: np.maximum(X[:, 0], X[:, 1]) * 3 - X[:, 2], 3, 120, constant(0.2)),
        "square": Made(lambda X: 4 * (X[:, 0] - 0.5) ** 2 + X[:, 1], 2, 80, constant(0.1)),
        "growing noise": Made(lambda X: 3 * X[:, 0] - X[:, 1], 2, 300, lambda X: 0.05 + 0.6 * X[:, 1] ** 2),
        "two noises": Made(lambda X: np.sin(6 * X[:, 0]), 3, 150, lambda X: 0.1 + 0.5 * (X[:, 0] > 0.5)),
        "cancer's area": Given(of_loader(datasets.load_breast_cancer, 3), 280),
    },
    "reported": {
        "friedman1": Made(friedman1, 10, 800, constant(1.0)),
        "interactions": Made(lambda X: (X[:, ::2] - 0.5).prod(1) * 40 + 4 * X[:, 1] * X[:, 3], 4, 400, constant(0.3)),
        "sine": Made(lambda X: np.sin(2 * np.pi * X[:, 0]) + 0.5 * np.cos(9 * X[:, 0]), 1, 60, constant(0.25)),
        "diabetes": Given(of_loader(datasets.load_diabetes), 300),
        "alcohol": Given(of_loader(datasets.load_wine, 0), 110),
        "steps": Made(lambda X: np.floor(3 * X[:, 0]) + 2 * (X[:, 1] > X[:, 2]), 5, 500, constant(0.3)),
        "uneven noise": Made(lambda X: 3 * X[:, 0], 2, 300, lambda X: 0.1 + np.abs(X[:, 1] - 0.5)),
    },
}
CLASSES: dict[str, dict[str, Given]] = {
    "choice": {
        "iris": Given(of_loader(datasets.load_iris), 75),
        "cancer": Given(of_loader(datasets.load_breast_cancer), 280),
        "circles": Given(of_maker(datasets.make_circles, n_samples=2200, noise=0.2, factor=0.5), 200),
        "quantiles": Given(of_maker(datasets.make_gaussian_quantiles, n_samples=2400, n_features=5, n_classes=4), 400),
        "hastie": Given(of_maker(datasets.make_hastie_10_2, n_samples=2800), 800),
    },
    "reported": {
        "digits": Given(of_loader(datasets.load_digits), 1200),
        "moons": Given(of_maker(datasets.make_moons, n_samples=2100, noise=0.3), 100),
        "imbalanced": Given(
            of_maker(datasets.make_classification, n_samples=2500, n_informative=5, weights=[0.93], flip_y=0.03), 500
        ),
        "made": Given(
            of_maker(
                datasets.make_classification, n_samples=3000, n_features=15, n_informative=8, n_classes=5, flip_y=0.05
            ),
            1000,
        ),
        "wine": Given(of_loader(datasets.load_wine), 90),
    },
}


def contenders(is_class: bool, features: int, seed: int) -> dict[str, Callable[[], BaseEstimator]]:
    """Return what makes each estimator."""
    if is_class:
        return {
            "epk_gp": lambda: epk.EPKClassifier(random_state=seed),
            "line": lambda: make_pipeline(StandardScaler(), LogisticRegression(max_iter=5000)),
            "MLP": lambda: make_pipeline(StandardScaler(), MLPClassifier(max_iter=1000, random_state=seed)),
            "GP or SVC": lambda: make_pipeline(StandardScaler(), SVC(probability=True, random_state=seed)),
            "HGB": lambda: HistGradientBoostingClassifier(random_state=seed),
        }
    kernel = ConstantKernel() * RBF(np.sqrt(features)) + WhiteKernel(0.1)
    process = GaussianProcessRegressor(kernel, normalize_y=True, random_state=seed)

    def scaled(model: BaseEstimator) -> BaseEstimator:
        return TransformedTargetRegressor(make_pipeline(StandardScaler(), model), transformer=StandardScaler())

    return {
        "epk_gp": lambda: epk.EPKRegressor(random_state=seed),
        "line": LinearRegression,
        "MLP": lambda: scaled(MLPRegressor(max_iter=1000, random_state=seed)),
        "GP or SVC": lambda: make_pipeline(StandardScaler(), process),
        "HGB": lambda: HistGradientBoostingRegressor(random_state=seed),
    }


def judge(table: Made | Given, name: str, seed: int, is_class: bool) -> dict[str, Any]:
    """Train and test one estimator on one division of a table."""
    drawn = table.draw(seed)
    (X, y), (X_new, y_new) = drawn["train"], drawn["test"]
    start = time.process_time()
    model = contenders(is_class, X.shape[1], seed)[name]().fit(X, y)
    row: dict[str, Any] = {"seconds": time.process_time() - start}
    if is_class:
        row["log-loss"] = log_loss(y_new, model.predict_proba(X_new), labels=model.classes_)
        return row
    row["R2"] = model.score(X_new, y_new)
    if name in ("epk_gp", "GP or SVC"):
        for where, (Z, z) in {"inside": (X_new, y_new), **drawn["far"]}.items():
            mean, std = model.predict(Z, return_std=True)
            row[where] = float((np.abs(z - mean) <= 1.645 * std).mean())
            if where == "inside":
                row["width"] = float(2 * 1.645 * std.mean() / y.std())
    return row


def markdown(rows: list[dict[str, Any]]) -> str:
    """Return the tables of the numbers."""
    parts = []
    for score, best, digits in (("R2", max, 3), ("log-loss", min, 3)):
        own = [row for row in rows if score in row]
        if not own:
            continue
        names = list(dict.fromkeys(row["contender"] for row in own))
        lines, lags, seconds = [], dict[str, list[float]](), dict[str, list[float]]()
        for table in dict.fromkeys(row["table"] for row in own):
            found = {row["contender"]: row for row in own if row["table"] == table}
            first = best(row[score] for row in found.values())
            cells = [f"{found[n][score]:.{digits}f}" for n in names]
            shown = [f"**{cell}**" if cell == f"{first:.{digits}f}" else cell for cell in cells]
            lines.append(f"| {table} | {' | '.join(shown)} |")
            for n in names:
                lags.setdefault(n, []).append(abs(found[n][score] - first))
                seconds.setdefault(n, []).append(found[n]["seconds"])
        for words, values in (("mean distance to the best", lags), ("mean seconds", seconds)):
            lines.append(f"| *{words}* | {' | '.join(f'{np.mean(values[n]):.3f}' for n in names)} |")
        head = f"| {'R²' if score == 'R2' else score} | {' | '.join(names)} |"
        parts.append("\n".join([head, "| --- |" + " --- |" * len(names), *lines]))
    bars = [row for row in rows if "4 x" in row]
    for name in dict.fromkeys(row["contender"] for row in bars):
        own = [row for row in bars if row["contender"] == name]
        keys = ("inside", "2 x", "4 x", "width")
        lines = [f"| {row['table']} | {' | '.join(f'{row[k]:.2f}' for k in keys)} |" for row in own]
        lines.append(f"| *mean* | {' | '.join(f'{np.mean([row[k] for row in own]):.2f}' for k in keys)} |")
        head = f"| 90 % bars of {name} | inside | 2 × as far out | 4 × as far out | width inside |"
        parts.append("\n".join([head, "| --- | --- | --- | --- | --- |", *lines]))
    return "\n\n".join(parts) + "\n"


@app.command()
def run(
    tables: Annotated[list[str] | None, typer.Argument(help="All by default.")] = None,
    group: Annotated[str, typer.Option(help="choice or reported")] = "reported",
    seeds: Annotated[int, typer.Option(help="Divisions of each table.")] = 5,
    only: Annotated[str, typer.Option(help="One contender.")] = "",
    out: Annotated[Path, typer.Option(help="Path of the numbers and the table, without a suffix.")] = HERE / "tables",
) -> None:
    """Judge all contenders, and write the numbers and their tables."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    for is_class, kind in ((False, REGRESSION), (True, CLASSES)):
        for name, table in kind[group].items():
            for contender in contenders(is_class, 1, 0):
                if (tables and name not in tables) or (only and contender != only):
                    continue
                found = [judge(table, contender, seed, is_class) for seed in range(seeds)]
                mean = {key: float(np.mean([row[key] for row in found])) for key in found[0]}
                rows.append({"table": name, "contender": contender, "seeds": seeds, **mean})
                typer.echo(json.dumps(rows[-1]))
    out.with_suffix(".json").write_text(json.dumps(rows, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(rows))


if __name__ == "__main__":
    app()
