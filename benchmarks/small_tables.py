"""Error bars of `UncertainClassifier` on small tables: do they hold what they say, and does the mixture cost anything?

    python benchmarks/small_tables.py [--splits 10] [--first 100] [TABLE ...]

Each table is divided into training (half), validation and test points (a quarter each; where points can be made, and of
a table of which only a part is used, the test points are the others). Small networks are trained and recorded. Printed
for each table, over all splits:

* NLL: of test labels, by the network, by the process alone (softmax of b m), by the mixture of both, and by the mixture
  without a prior and a floor (`plain`).
* covers: share of test points whose true probability of the predicted class lies within two `std`, where it is known.
* bins: of five bins of test points by predicted probability, how many have a share of right ones within two mean `std`.
* least std: the smallest at a predicted probability below 0.9; in brackets what it is without prior and floor.
* worse: splits where the mixture is worse than the network on the validation labels that weigh both, and the label of
  unknown class beside them, by more than two standard errors of the mean difference.
* far error: the smallest error score at 20 points thirty times as far from the mean as training points.
"""

import argparse
from collections.abc import Callable

import numpy as np
import torch
from sklearn import datasets
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

import epk_gp as epk
from epk_gp.gp.softmax import isotropic_softmax_uncertainty
from epk_gp.gp.stacking import stack_logits

MADE = 1000  # test points of tables that can be made
REAL = {
    "cancer": datasets.load_breast_cancer,
    "wine": datasets.load_wine,
    "iris": datasets.load_iris,
    "digits": datasets.load_digits,
}
SIZES = {  # training and validation points together are three quarters
    "cancer": 569,
    "wine": 178,
    "iris": 150,
    "digits": 600,
    "classification": 400,
    "moons": 300,
    "circles": 300,
    "blobs": 300,
    "moons of 80": 80,
    "cancer of 80": 80,
    "digits of 100": 100,
}


def ratio(X: np.ndarray, curves: list[np.ndarray], noise: float) -> np.ndarray:
    """Return the true probabilities of classes whose points lie on curves, with normal noise."""
    density = [np.exp(-((X[:, None] - curve) ** 2).sum(2) / (2 * noise**2)).mean(1) for curve in curves]
    p = np.stack(density, 1) + 1e-300
    return p / p.sum(1, keepdims=True)


def made(name: str, n: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Make a table, and the true probabilities where they are known."""
    t = np.linspace(0, np.pi, 400)
    if name == "moons":
        X, y = datasets.make_moons(n, noise=0.3, random_state=seed)
        upper = np.stack([np.cos(t), np.sin(t)], 1)
        return X, y, ratio(X, [upper, np.array([1, 0.5]) - upper], 0.3)
    if name == "circles":
        X, y = datasets.make_circles(n, noise=0.2, factor=0.5, random_state=seed)
        circle = np.stack([np.cos(2 * t), np.sin(2 * t)], 1)
        return X, y, ratio(X, [circle, circle / 2], 0.2)
    if name == "blobs":
        centres = np.array([[0.0, 0], [2, 0], [0, 2]])
        X, y = datasets.make_blobs(n, centers=centres, random_state=seed)
        return X, y, ratio(X, [centre[None] for centre in centres], 1.0)
    return *datasets.make_classification(
        n, 10, n_informative=4, n_classes=3, n_clusters_per_class=1, flip_y=0.05, random_state=seed
    ), None


def nll(logits: Tensor, y: Tensor) -> Tensor:
    """Return the negative log probability of each label."""
    return nn.functional.cross_entropy(logits, y, reduction="none")


def split(name: str, seed: int) -> dict:
    """Train, fit and judge one split of a table."""
    size, base = SIZES[name], name.split(" of ")[0]
    if base in REAL:
        (X, y), P = REAL[base](return_X_y=True), None
    else:
        X, y, P = made(base, size + MADE, seed)
    order = np.random.RandomState(seed).permutation(len(X))
    X, y, P = X[order], y[order], None if P is None else P[order]
    train, held_out = slice(0, size // 2), slice(size // 2, size // 2 + size // 4)
    test = slice(size // 2 + size // 4, None) if base in REAL else slice(size, None)
    X = torch.tensor(StandardScaler().fit(X[train]).transform(X))
    y = torch.tensor(y)
    C = int(y.max()) + 1
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(X.shape[1], 16), nn.ReLU(), nn.Linear(16, C)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    run = epk.train(net, X[train], y[train], optimizer=optimizer, steps=150)
    model = epk.UncertainClassifier(run, seed=seed).fit(X[held_out], y[held_out])
    process, stacking = model.process_, model.stacking_

    def judged(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (epk.network_outputs(run, points), *process.predict(points))

    f, m, v = judged(X[test])
    first = torch.randperm(len(y[held_out]), generator=torch.Generator().manual_seed(seed)).tensor_split(2)[0]
    f_val, m_val, _ = judged(X[held_out][first])
    y_val = y[held_out][first]
    plain = stack_logits(f_val, m_val, y_val)
    both = model.predict_proba(X[held_out][first]).log()
    unknown = (f_val.log_softmax(1).mean() - both.mean())[None]
    difference = torch.cat([nll(both, y_val) - nll(f_val, y_val), unknown])
    p, u = model.predict_proba(X[test]), model.uncertainty(X[test])
    largest, predicted = p.max(1)
    z = plain.logits(f, m)
    bars = isotropic_softmax_uncertainty(z, plain.process**2 * process.outputscale * v).std
    plain_std = bars.gather(1, z.argmax(1)[:, None])[:, 0][z.softmax(1).amax(1) < 0.9]
    true = None if P is None else torch.tensor(P[test]).gather(1, predicted[:, None])[:, 0]
    return {
        "network": nll(f, y[test]).mean(),
        "process": nll(stacking.alone * m, y[test]).mean(),
        "mixture": nll(p.log(), y[test]).mean(),
        "plain": nll(z, y[test]).mean(),
        "covers": None if true is None else ((largest - true).abs() <= 2 * u.std).double().mean(),
        "points": torch.stack([largest, u.std, (predicted == y[test]).double()], 1),
        "least": u.std[largest < 0.9].min() if (largest < 0.9).any() else torch.tensor(1.0),
        "least_plain": plain_std.min() if len(plain_std) else torch.tensor(1.0),
        "worse": difference.mean() > 2 * difference.std() / len(difference) ** 0.5,
        "far": model.uncertainty(30 * X[train][:20]).error.min(),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Error bars on small tables.")
    parser.add_argument("tables", nargs="*", default=list(SIZES), help="tables; all by default")
    parser.add_argument("--splits", type=int, default=10)
    parser.add_argument("--first", type=int, default=100, help="seed of the first split; seeds 0 to 9 chose the rule")
    options = parser.parse_args()
    print("| table | network | process | mixture | plain | covers | bins | least std | worse | far error |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in options.tables:
        rows = [split(name, seed) for seed in range(options.first, options.first + options.splits)]

        def over(key: str, how: Callable[[Tensor], Tensor], rows: list[dict] = rows) -> float:
            return float(how(torch.stack([row[key] for row in rows]).double()))

        points = torch.cat([row["points"] for row in rows])
        bins = points[points[:, 0].argsort()].tensor_split(5)
        held = sum(abs(float(b[:, 2].mean() - b[:, 0].mean())) <= 2 * float(b[:, 1].mean()) for b in bins)
        covers = "" if rows[0]["covers"] is None else f"{over('covers', torch.mean):.2f}"
        losses = " | ".join(f"{over(key, torch.mean):.3f}" for key in ("network", "process", "mixture", "plain"))
        least = f"{over('least', torch.min):.3f} ({over('least_plain', torch.min):.1e})"
        worse = f"{over('worse', torch.sum):.0f} of {len(rows)}"
        far = over("far", torch.min)
        print(f"| {name} | {losses} | {covers} | {held} of 5 | {least} | {worse} | {far:.4f} |", flush=True)


if __name__ == "__main__":
    main()
