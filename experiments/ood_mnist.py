"""Out-of-distribution detection: path-kernel scores on MNIST against other images, beside the usual baselines."""

from dataclasses import dataclass, field, replace
from importlib.util import find_spec

import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

import epk_gp as epk
from epk_gp.analysis.calibration import calibration
from epk_gp.analysis.detection import ood_metrics
from epk_gp.core.trajectory import network_outputs
from epk_gp.datasets import Dataset
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gram.ntk import tangent_trajectory
from epk_gp.plots import PALETTE
from harness import Experiment, main
from problems import Images, build, images, record_images

LAPLACE = find_spec("laplace") is not None  # an optional peer: pip install laplace-torch


@dataclass(frozen=True)
class Config:
    """Sizes; every Gaussian process is conditioned on the same `num_condition` training images."""

    images: Images = field(
        default_factory=lambda: Images(
            network="mlp", num_train=2000, num_test=300, batch_size=100, lr=0.3, steps=400, width=64
        )
    )
    outside: tuple[str, ...] = ("fashion-mnist", "kmnist")
    seeds: tuple[int, ...] = (0, 1, 2)
    num_condition: int = 300
    fit_steps: int = 100
    num_samples: int = 512


@dataclass(frozen=True)
class Result:
    """Mean and standard deviation over seeds.

    Attributes:
        num_seeds: Number of seeds.
        outside: Names of the other data.
        detection: One row per score: its name, then per other data set AUROC and FPR at 95 %, each as [mean, std].
        calibration: One row per model: its name, then accuracy, calibration error and NLL, each as [mean, std].
        every: The numbers of every seed.
        left_out: Models that could not be run, and why.
    """

    num_seeds: int
    outside: list[str]
    detection: list[dict]
    calibration: list[dict]
    every: list[dict]
    left_out: list[str]


@dataclass(frozen=True)
class Model:
    """Predictions of a model: class probabilities, and scores that should be larger out of distribution."""

    probability: Tensor
    scores: dict[str, Tensor]


def run(config: Config) -> Result:
    """Record a network per seed, and judge all scores on it."""
    every = [_one_seed(config, seed) for seed in config.seeds]
    left_out = [] if LAPLACE else ["laplace-torch: not installed"]
    return Result(
        num_seeds=len(config.seeds),
        outside=list(config.outside),
        detection=_summary([entry["detection"] for entry in every]),
        calibration=_summary([entry["calibration"] for entry in every]),
        every=every,
        left_out=left_out,
    )


def _one_seed(config: Config, seed: int) -> dict:
    trajectory, inside = record_images(replace(config.images, seed=seed))
    sets = [inside, *(_draw_images(name, len(inside), seed) for name in config.outside)]
    X = torch.cat([data.inputs for data in sets])
    models = _models(config, seed, trajectory, X)
    detection, calibrations = {}, {}
    for name, model in models.items():
        if name != "path kernel":
            measured = calibration(model.probability[: len(inside)], inside.labels)
            calibrations[name] = {"accuracy": measured.accuracy, "ECE": measured.ece, "NLL": measured.nll}
        for score, values in model.scores.items():
            parts = values.split([len(data) for data in sets])
            row = {}
            for other, part in zip(config.outside, parts[1:], strict=True):
                metrics = ood_metrics(parts[0], part)
                row |= {f"{other} AUROC": metrics.auroc, f"{other} FPR95": metrics.fpr95}
            detection[f"{name}: {score}"] = row
    return {"seed": seed, "detection": detection, "calibration": calibrations}


def _draw_images(name: str, count: int, seed: int) -> Dataset:
    """Draw images of another data set; "inverted digits" replace it where only scikit-learn's digits are available."""
    if name == "inverted digits":
        data = images("digits", "test")
        return Dataset(1 - data.inputs[:count], data.labels[:count], data.num_classes, name)
    data = images(name, "test")
    return data[torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))[:count]]


def _models(config: Config, seed: int, trajectory: epk.Trajectory, X: Tensor) -> dict[str, Model]:
    p = network_outputs(trajectory, X).softmax(1)
    models = {
        "network": Model(p, {"1 - largest probability": 1 - p.amax(1), "entropy": torch.special.entr(p).sum(1)}),
        "path kernel": Model(p, _kernel_scores(config, trajectory, X)),
        "EPK-GP": _gaussian_process(config, seed, trajectory, X),
        "NTK-GP, last step": _gaussian_process(config, seed, tangent_trajectory(trajectory), X),
        "RBF-GP": _rbf(config, seed, trajectory, X),
    }
    if LAPLACE:
        models["Laplace"] = _laplace(config, seed, trajectory, X)
    return models


def _kernel_scores(config: Config, trajectory: epk.Trajectory, X: Tensor) -> dict[str, Tensor]:
    """Score by the kernel alone: how large k(x, x) is, and how far x is from its most similar training image."""
    kernel = epk.EPKKernel(trajectory, outputs="trace", head="logits", rule=epk.gauss_legendre(2))
    training = trajectory.inputs[: config.num_condition]
    cross = kernel(epk.test_copy(X), epk.train_copy(training)).to_dense()
    own, other = kernel(epk.test_copy(X), diag=True), kernel(epk.train_copy(training), diag=True)
    cosine = cross / (own[:, None] * other).sqrt()
    return {"k(x, x)": own, "1 - largest cosine": 1 - cosine.amax(1)}


def _gaussian_process(config: Config, seed: int, trajectory: epk.Trajectory, X: Tensor) -> Model:
    """Regress to the network's logits; two nodes are exact between kinks, one node is exact for the NTK."""
    rule = epk.gauss_legendre(2) if trajectory.num_steps > 1 else epk.left_endpoint()
    gp = epk.LogitGP(trajectory, "independent", mean="zero", points=range(config.num_condition), rule=rule)
    gp.fit(config.fit_steps)
    return _pushed_through(config, seed, gp.logit_posterior(X))


def _rbf(config: Config, seed: int, trajectory: epk.Trajectory, X: Tensor) -> Model:
    """Regress to the network's logits with scikit-learn, all classes sharing scale and length."""
    training = trajectory.inputs[: config.num_condition]
    targets = network_outputs(trajectory, training)
    scale = float(targets.var())
    kernel = ConstantKernel(scale, (1e-4 * scale, 1e6 * scale)) * RBF(10.0, (1e-2, 1e5))
    # The logits are a function of the images, without noise: learned noise runs to 0. This one is for rounding.
    process = GaussianProcessRegressor(kernel, alpha=1e-6 * scale)
    process.fit(training.flatten(1).numpy(), targets.numpy())
    mean, std = process.predict(X.flatten(1).numpy(), return_std=True)
    variance = torch.from_numpy(std).square()
    return _pushed_through(config, seed, LogitPosterior(torch.from_numpy(mean), torch.diag_embed(variance)))


def _pushed_through(config: Config, seed: int, posterior: LogitPosterior) -> Model:
    u = epk.softmax_uncertainty(posterior, config.num_samples, torch.Generator().manual_seed(seed))
    variance = posterior.covariance.diagonal(dim1=1, dim2=2).sum(1)
    scores = {"entropy": u.entropy, "mutual information": u.mutual_information, "logit variance": variance}
    return Model(u.mean, scores)


def _laplace(config: Config, seed: int, trajectory: epk.Trajectory, X: Tensor) -> Model:
    """Kronecker-factored Laplace over the last layer (laplace-torch's default), with the whole training set."""
    from laplace import Laplace  # noqa: PLC0415  an optional peer

    net = build(config.images.network, trajectory.input_shape, trajectory.num_outputs, config.images.width).double()
    net.load_state_dict(trajectory.weights(-1))
    data = DataLoader(TensorDataset(trajectory.inputs, trajectory.targets), batch_size=100)
    torch.manual_seed(seed)
    model = Laplace(net, "classification", subset_of_weights="last_layer", hessian_structure="kron")
    model.fit(data)
    model.optimize_prior_precision(pred_type="glm", method="marglik", link_approx="mc")
    draws = [model.predictive_samples(part, pred_type="glm", n_samples=config.num_samples) for part in X.split(100)]
    p = torch.cat(draws, dim=1).detach()  # (samples, n, C)
    entropy = torch.special.entr(p.mean(0)).sum(1)
    information = entropy - torch.special.entr(p).sum(2).mean(0)
    return Model(p.mean(0), {"entropy": entropy, "mutual information": information})


def _summary(tables: list[dict[str, dict[str, float]]]) -> list[dict]:
    """Average tables of equal shape over seeds."""
    rows = []
    for name in tables[0]:
        columns = tables[0][name]
        values = {key: torch.tensor([table[name][key] for table in tables], dtype=torch.float64) for key in columns}
        rows.append({"name": name} | {key: [float(v.mean()), float(v.std())] for key, v in values.items()})
    return rows


def draw(result: Result) -> Figure:
    """Draw AUROC per score with its spread over seeds, and calibration per model."""
    figure = Figure(figsize=(11.5, 0.8 + 0.36 * len(result.detection)), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
    rows = range(len(result.detection))
    for k, other in enumerate(result.outside):
        means, spreads = zip(*(row[f"{other} AUROC"] for row in result.detection), strict=True)
        places = [row + 0.14 * (2 * k - 1) for row in rows]
        left.errorbar(means, places, xerr=spreads, fmt="os"[k], color=PALETTE[k], markersize=5, capsize=2, label=other)
    left.axvline(0.5, color="black", linewidth=0.8, linestyle=":")
    left.set_yticks(rows, [row["name"] for row in result.detection], fontsize="small")
    left.invert_yaxis()
    left.set(xlabel=f"AUROC, mean ± standard deviation of {result.num_seeds} seeds", title="telling other images apart")
    left.legend(fontsize="small", loc="upper left", framealpha=0.9)
    models = range(len(result.calibration))
    for k, (key, scale) in enumerate((("ECE", 1.0), ("NLL", 1.0))):
        means, spreads = zip(*(row[key] for row in result.calibration), strict=True)
        places = [row + 0.14 * (2 * k - 1) for row in models]
        right.errorbar(
            [scale * m for m in means], places, xerr=spreads, fmt="D^"[k], color=PALETTE[k + 2], markersize=5,
            capsize=2, label={"ECE": "calibration error", "NLL": "NLL, nats"}[key],
        )  # fmt: skip
    right.set_yticks(models, [row["name"] for row in result.calibration], fontsize="small")
    right.invert_yaxis()
    right.set(xscale="log", xlabel="mean ± standard deviation; smaller is better", title="in distribution")
    right.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    right.xaxis.set_minor_formatter(NullFormatter())
    right.legend(fontsize="small", framealpha=0.9)
    for ax in (left, right):
        ax.grid(visible=True, axis="x", color="#dddddd", linewidth=0.7)
        ax.set_axisbelow(True)
    return figure


EXPERIMENT = Experiment(
    "ood_mnist",
    Config(),
    Config(
        Images("digits", "mlp", width=8, num_train=40, num_test=20, batch_size=10, lr=0.3, steps=10),
        ("inverted digits",),
        (0, 1),
        num_condition=20,
        fit_steps=3,
        num_samples=32,
    ),
    Result,
    run,
    draw,
)

if __name__ == "__main__":
    main(EXPERIMENT)
