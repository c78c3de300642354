"""Laplace approximations of trained networks, by laplace-torch itself, beside `UncertainClassifier.of` and `LogitGP`.

Usage: python benchmarks/outside/laplace.py [--out FILE] [--quick]

1. Its example "calibration with a GP": a CNN on Fashion-MNIST (`fashion_cnn.py` says what its training has of theirs).
2. Its regression example: a sine with noise, one layer of 50 units of tanh.
3. Its functional posterior is that of our `LogitGP` with the kernel of the last weights: mean and covariance.
4. What the recorded path gives beyond the last weights: the same network by `UncertainClassifier` and by its `of`.

Whatever is chosen is chosen on 2000 images that nobody was trained on. Costs are processor seconds on one thread. What
a system says of the CNN's images is stored in a folder, and is not computed again.
"""

import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from os import environ
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from fashion_cnn import PRIOR_PRECISION, SEED, fashion_cnn, train
from processes import HERE, environment
from saved import FOLDER, Seconds, row, run_library, save

import epk_gp as epk
from epk_gp.analysis.measures import calibration as quality
from epk_gp.analysis.measures import ood_metrics
from epk_gp.datasets import DATA_VARIABLE, Dataset, digits, mnist_folder
from epk_gp.gp.stacking import most_likely_temperature
from epk_gp.kernel_machine.reconstruct import tangent_trajectory
from epk_gp.provenance import Stopwatch
from epk_gp.trained.ntk import as_trajectory

# Without torchvision, which it does not import and whose wheels do not fit every build of torch.
PACKAGES = ["--no-deps", "torch==2.13.0", "laplace-torch==0.3"]
PACKAGES += ["asdfghjkl==0.1a4", "backpack-for-pytorch==1.7.1", "curvlinops-for-pytorch==3.0.1", "torchmetrics==1.9.0"]
PACKAGES += [
    "einconv",
    "einops",
    "filelock",
    "fsspec",
    "jinja2",
    "lightning-utilities",
    "linear-operator",
    "markupsafe",
]
PACKAGES += ["mpmath", "networkx", "numpy<3", "opt-einsum", "packaging", "scipy", "setuptools", "sympy", "tqdm"]
PACKAGES += ["typing-extensions", "unfoldnd"]
SEEDS = 3
HELD_OUT, VALIDATION, FEW, OUTSIDE, FEW_OUTSIDE = 5000, 2000, 300, 1000, 100  # images
METHODS = {  # of laplace-torch; its example takes 50 to 1600 points, on a GPU
    "last layer, KFAC": "kron", "functional, 50 points": 50, "last layer, diagonal": "diag",
}  # fmt: skip
OURS: dict[str, dict[str, Any]] = {
    "all weights, one combination of outputs": {"nodes": 1, "features": 4096},
    "all weights, every output, 3000 points": {"features": 2048, "points": range(3000)},
    "last layer": {"features": 2048},
}
Rows = list[dict[str, Any]]


def main(
    out: Annotated[Path, typer.Option(help="The rows.")] = FOLDER / "laplace.json",
    folder: Annotated[Path, typer.Option(help="Of the CNN's weights and of what was said.")] = FOLDER / ".laplace",
    minutes: Annotated[float, typer.Option(help="Of training, after which no further epoch begins.")] = 20.0,
    environments: Annotated[Path, typer.Option(help="Folder of the library's environment.")] = HERE / ".venvs",
    stored: Annotated[bool, typer.Option(help="Leave out what laplace-torch has not yet been asked.")] = False,
    quick: Annotated[bool, typer.Option(help="Small problems, without the library, for the tests.")] = False,
) -> None:
    """Compute all rows and write them."""
    torch.set_num_threads(1)
    timer, python = Stopwatch(), None if quick else environment(environments / "laplace-torch", PACKAGES)
    folder.mkdir(parents=True, exist_ok=True)
    rows, epochs = classification(python, folder, minutes, quick=quick, stored=stored)
    parts = {
        "sine": partial(regression, python, steps=20 if quick else 1000),
        "posteriors": partial(posteriors, python),
        "path or last": partial(path_or_last, 1 if quick else SEEDS, quick=quick),
    }
    for name, part in parts.items():
        rows += once(folder / f"{name}.pt", part)
    repeats = f"one network each: the CNN after {epochs} epochs, the sine's; path and last weights of {SEEDS} seeds"
    save(out, rows, repeats, timer, {} if quick else {"laplace-torch": "0.3"})
    typer.echo(f"written: {out}")


def ask_library(python: Path | None, job: dict[str, Any]) -> dict[str, Any]:
    """Return what laplace-torch says; nothing without it."""
    if python is None:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        asked, answer = Path(folder) / "job.pt", Path(folder) / "answer.pt"
        torch.save(job, asked)
        run_library(python, "peers/laplace_torch.py", asked, answer)
        found: dict[str, Any] = torch.load(answer, weights_only=False)
        return found


def once(file: Path, compute: Callable[[], Any]) -> Any:
    """Return what is stored in a file, or compute and store it."""
    if not file.exists():
        torch.save(compute(), file)
    return torch.load(file, weights_only=False)


def classification(python: Path | None, folder: Path, minutes: float, *, quick: bool, stored: bool) -> tuple[Rows, int]:
    """Return the rows of the CNN, or of a small network on digits, and the epochs of its training."""
    torch.manual_seed(SEED)
    if quick:
        data = digits(dtype=torch.float32)
        net: nn.Module = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))
        test, rest = data[:400], data[400:]
        held_out, known = rest[:200], rest[200:]
        outside = {"noise": torch.rand(100, 1, 8, 8)}
        epochs = train(net, known.inputs, known.labels, 10)
    else:
        data, test = (fashion("fashion-mnist", split) for split in ("train", "test"))
        order = torch.randperm(len(data), generator=torch.Generator().manual_seed(0))
        held_out, known = data[order[-VALIDATION:]], data[order[:-HELD_OUT]]
        outside = {name: fashion(name, "test").inputs[:OUTSIDE] for name in ("mnist", "kmnist")}
        net, network = fashion_cnn(), folder / "cnn.pt"
        if not network.exists():
            train(net, known.inputs, known.labels, 500, network, minutes)
        weights = torch.load(network)
        net.load_state_dict(weights["state"])
        epochs = weights["epochs"]
    net.eval()
    sets = {"test": test.inputs, **outside}
    few = {name: X[: FEW if name == "test" else FEW_OUTSIDE] for name, X in sets.items()}
    job = {
        "problem": "calibration",
        "net": net,
        "train": (known.inputs, known.labels),
        "validation": (held_out.inputs, held_out.labels),
        "prior_precision": PRIOR_PRECISION,
    }
    judged = network_alone(net, held_out, sets)
    for name, settings in OURS.items():
        asked = few if "every" in name else sets
        compute = partial(ours, net, name, settings, known, held_out, asked, quick=quick)
        judged[f"epk_gp of, {name}"] = compute() if quick else once(folder / f"{name}.pt", compute)
    for name, method in METHODS.items() if python else ():
        if stored and not (folder / f"{name}.pt").exists():
            continue
        asked = job | {"method": method, "sets": few if isinstance(method, int) else sets}
        judged[f"laplace-torch, {name}"] = once(folder / f"{name}.pt", partial(ask_library, python, asked))
    return [own for name, found in judged.items() for own in judged_rows(name, found, test)], epochs


def fashion(name: str, split: Any) -> Dataset:
    """Read a data set in MNIST's format from the folder of the experiments' data."""
    return mnist_folder(Path(environ[DATA_VARIABLE], name), split=split, dtype=torch.float32)


def network_alone(net: nn.Module, held_out: Dataset, sets: dict[str, Tensor]) -> dict[str, Any]:
    """Return the probabilities of the network (MAP), and with the temperature that the validation images choose."""
    with torch.no_grad(), Seconds() as choosing:
        factor = most_likely_temperature(torch.cat([net(x) for x in held_out.inputs.split(500)]), held_out.labels)
    with torch.no_grad(), Seconds() as predicting:
        logits = {name: torch.cat([net(x) for x in X.split(500)]) for name, X in sets.items()}
    found = {}
    for name, scale, fitting in (("network (MAP)", 1.0, 0.0), ("temperature scaling", factor, choosing.value)):
        p = {key: torch.softmax(scale * z, dim=1) for key, z in logits.items()}
        found[name] = {"probabilities": p, "fit": fitting, "predict": predicting.value}
    return found


def ours(
    net: nn.Module,
    name: str,
    settings: dict[str, Any],
    known: Dataset,
    held_out: Dataset,
    sets: dict[str, Tensor],
    *,
    quick: bool,
) -> dict[str, Any]:
    """Return what a process on the labels says, weighed against the network on the validation images."""
    parameters = [*net.parameters()]
    for p in parameters[: -2 if name == "last layer" else 0]:
        p.requires_grad_(False)
    if quick:
        settings = settings | {"features": 64} | ({"points": range(500)} if "points" in settings else {})
    with Seconds() as fitting:
        judge = epk.UncertainClassifier.of(net, known.inputs, known.labels, **settings)
        judge.fit(held_out.inputs, held_out.labels)
    with Seconds() as predicting:
        probabilities = {key: judge.predict_proba(X) for key, X in sets.items()}
        scores = {key: judge.uncertainty(X, num_samples=2).out_of_distribution for key, X in sets.items()}
    for p in parameters:
        p.requires_grad_(True)
    return {"probabilities": probabilities, "variances": scores, "fit": fitting.value, "predict": predicting.value}


def judged_rows(system: str, found: dict[str, Any], test: Dataset) -> Rows:
    """Return the rows of a system: calibration, detection by entropy and by its variance, and its cost."""
    p, seconds, rows = found["probabilities"], [found["fit"] + found["predict"]], Rows()
    numbers = len(p["test"])
    note = f"fit {found['fit']:.0f} s, prediction {found['predict']:.0f} s"
    note += f", prior precision {found['prior precision']:.3g}" if "prior precision" in found else ""
    for count in sorted({min(numbers, FEW), numbers}):
        data = f"{test.name}, {count} test images"
        of_test = quality(p["test"][:count], test.labels[:count])
        for unit, value in vars(of_test).items():
            rows.append(row(system, "laplace-torch's example", data, [value], unit, seconds, note))
        share = OUTSIDE if count > FEW else FEW_OUTSIDE
        for name in p.keys() - {"test"}:
            for kind, values in (("entropy", {key: torch.special.entr(q).sum(1) for key, q in p.items()}),
                                 ("variance", found.get("variances"))):  # fmt: skip
                if values is not None:
                    number, unit = auroc(values["test"][:count], values[name][:share]), f"AUROC by {kind}"
                    rows.append(row(system, "out of distribution", f"{data} and {name}", [number], unit, seconds, note))
    return rows


def regression(python: Path | None, steps: int) -> Rows:
    """Return the rows of the sine: how likely new observations are, and how many lie within two error bars."""
    torch.manual_seed(711)
    X = torch.rand(150, 1) * 8
    y = X.sin() + 0.3 * torch.randn_like(X)
    inside = torch.linspace(0, 8, 400)[:, None]
    outside = torch.cat([torch.linspace(-3, 0, 200), torch.linspace(8, 11, 200)])[:, None]
    torch.manual_seed(711)
    net = nn.Sequential(nn.Linear(1, 50), nn.Tanh(), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.mse_loss(net(X), y).backward()
        optimizer.step()
    points = torch.cat([inside, outside])
    found = {"network, the noise of its residuals": plain_network(net, X, y, points)}
    found["epk_gp LogitGP, fitted around the network"] = our_regression(net, X, y, points, "network")
    found["epk_gp LogitGP, fitted around 0"] = our_regression(net, X, y, points, "zero")
    job = {"problem": "regression", "net": net, "train": (X, y), "X": points, "steps": steps}
    if python is not None:
        found["laplace-torch, full"] = ask_library(python, job)
    observed = points.sin() + 0.3 * torch.randn(points.shape, generator=torch.Generator().manual_seed(1))
    rows = Rows()
    for system, own in found.items():
        std = (own["variance"].reshape(-1) + own["sigma"] ** 2).sqrt()
        error = (observed - own["mean"].reshape(-1, 1))[:, 0]
        likely = 0.5 * (2 * torch.pi * std**2).log() + 0.5 * (error / std) ** 2
        note = f"noise {own['sigma']:.3f}, the true one is 0.3"
        for where, part in (("between the data", slice(0, 400)), ("within 3 of the data", slice(400, None))):
            data = f"sine, 150 points, 400 new observations {where}"
            near = (error.abs() < 2 * std)[part].float().mean()
            for unit, value in (("NLL", likely[part].mean()), ("share within 2 error bars", near)):
                rows.append(row(system, "laplace-torch's example", data, [float(value)], unit, [own["seconds"]], note))
    return rows


def plain_network(net: nn.Module, X: Tensor, y: Tensor, points: Tensor) -> dict[str, Any]:
    """Return the network with one noise everywhere."""
    with torch.no_grad(), Seconds() as taken:
        sigma, mean = float((net(X) - y).square().mean().sqrt()), net(points)
    return {"mean": mean, "variance": torch.zeros(len(points)), "sigma": sigma, "seconds": taken.value}


def our_regression(net: nn.Module, X: Tensor, y: Tensor, points: Tensor, mean: Any) -> dict[str, Any]:
    """Return the posterior of a process around the network, conditioned on what the network leaves of the targets.

    Its scale and noise are the most likely ones of a process with this prior mean.
    """
    with Seconds() as taken:
        run = tangent_trajectory(as_trajectory(net, X, y, loss=epk.MeanSquaredError()))
        fitted = epk.LogitGP(run, mean=mean, targets="labels", rule=epk.QuadratureRule.left_endpoint())
        fitted.fit(steps=200)
        gp = epk.LogitGP(run, mean="network", targets="labels", rule=epk.QuadratureRule.left_endpoint())
        gp.covar_module.load_state_dict(fitted.covar_module.state_dict())
        gp.likelihood.load_state_dict(fitted.likelihood.state_dict())
        posterior = gp.logit_posterior(points)
        noise = float(gp.likelihood.noise.detach())
    values = {"mean": posterior.mean.float(), "variance": posterior.covariance[:, 0, 0].float()}
    return values | {"sigma": noise**0.5, "seconds": taken.value}


def posteriors(python: Path | None) -> Rows:
    """Return how far the functional posterior of laplace-torch is from ours, which has its prior and its noise."""
    torch.manual_seed(3)
    X = torch.randn(40, 3, dtype=torch.float64)
    labels = (X[:, 0] > 0).long() + (X[:, 1] > 0.5).long()
    targets = torch.stack([X.sin().sum(1), X.cos().prod(1)], dim=1)
    points, prior, sigma, subset = torch.randn(15, 3, dtype=torch.float64), 2.5, 0.4, 21
    rows = Rows()
    for likelihood, y, independent, backpack in (
        ("regression", targets, False, True), ("regression", targets, True, False),
        ("classification", labels, True, True), ("classification", labels, False, False),
    ):  # fmt: skip
        net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2 if likelihood == "regression" else 3)).double()
        job = {
            "problem": "posteriors", "net": net, "likelihood": likelihood, "independent": independent, "sigma": sigma,
            "backpack": backpack, "train": (X, y), "X": points, "subset": subset, "prior_precision": prior,
        }  # fmt: skip
        theirs = ask_library(python, job)
        where = [int((x == X).all(1).nonzero()[0]) for x in theirs.get("points", X[:subset])]
        mean, covariance = functional_posterior(net, X, y, where, points, prior, sigma, independent=independent)
        if theirs:
            outputs = "independent outputs" if independent else "outputs that covary"
            for unit, own, other in (("mean", mean, theirs["mean"]), ("covariance", covariance, theirs["covariance"])):
                error = float((own - other).abs().max() / other.abs().max())
                data = f"{likelihood}, {outputs}, {subset} of 40 points, float64"
                unit = f"largest difference of the {unit}"
                rows.append(row("LogitGP and FunctionalLaplace", "laplace-torch", data, [error], unit, [0.0]))
    return rows


def functional_posterior(
    net: nn.Module,
    X: Tensor,
    y: Tensor,
    where: list[int],
    points: Tensor,
    prior_precision: float,
    sigma: float,
    *,
    independent: bool,
) -> tuple[Tensor, Tensor]:
    """Return laplace-torch's functional posterior by `LogitGP`: mean (n, C) and covariance (n, C, C).

    Its prior is M / (N delta) J J^T around the network, with M of N points and the prior precision delta. Of regression
    the noise is sigma^2. Of classification each logit has the noise 1 / (p (1 - p)), the inverse of the diagonal of
    diag(p) - p p^T. The data move the covariance alone: the mean stays the network.
    """
    is_class = not y.is_floating_point()
    loss = epk.CrossEntropy() if is_class else epk.MeanSquaredError()
    run = tangent_trajectory(as_trajectory(net, X, y, loss=loss))
    gp = epk.LogitGP(
        run, "independent" if independent else "full", "network", "dirichlet" if is_class else "network", where,
        rule=epk.QuadratureRule.left_endpoint(),
    )  # fmt: skip
    scale = len(where) / (len(X) * prior_precision)
    gp.covar_module.outputscale = torch.ones_like(gp.covar_module.outputscale) * gp.kernel.scale * scale
    outputs = net(X[where]).detach()
    gp.set_train_data(targets=gp.coupling.to_gpytorch(outputs), strict=False)
    if is_class:
        p = outputs.softmax(1)
        gp.likelihood.noise = gp.coupling.to_gpytorch(1 / (p * (1 - p))).reshape(gp.likelihood.noise.shape)
    else:
        gp.likelihood.noise = torch.full_like(gp.likelihood.noise, sigma**2)
    posterior = gp.logit_posterior(points)
    return posterior.mean, posterior.covariance


def path_or_last(seeds: int, *, quick: bool) -> Rows:
    """Return the rows of recorded networks on MNIST, or digits, judged with the kernel of the path and of the end."""
    if quick:
        train_data = test = digits(dtype=torch.float32)
        outside, count = {"noise": torch.rand(100, 1, 8, 8)}, 200
    else:
        train_data, test = (fashion("mnist", split) for split in ("train", "test"))
        outside = {name: fashion(name, "test").inputs[:1000] for name in ("fashion-mnist", "kmnist")}
        count = 1000
    test, inputs = test[-2000:], train_data.inputs[0].numel()
    found: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for seed in range(seeds):
        draws = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(train_data), generator=draws)
        known, held_out = train_data[order[:count]], train_data[order[count : count + 500]]
        wrong = torch.rand(count, generator=draws) < 0.1
        noisy = torch.where(wrong, (known.labels + torch.randint(1, 10, (count,), generator=draws)) % 10, known.labels)
        for labels in (known.labels, noisy):
            torch.manual_seed(seed)
            net = nn.Sequential(nn.Flatten(), nn.Linear(inputs, 64), nn.Tanh(), nn.Linear(64, 10))
            optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
            run = epk.train(net, known.inputs, labels, optimizer=optimizer, steps=200, batch_size=min(count, 200))
            of = partial(epk.UncertainClassifier.of, net, known.inputs, labels)
            makers = {"recorded path": partial(epk.UncertainClassifier, run), "last weights": of}
            makers["last weights, one combination of outputs"] = partial(of, nodes=1)
            for name, make in makers.items():
                with Seconds() as taken:
                    judge = make()
                    if labels is noisy:
                        errors = epk.label_errors(judge.trajectory, nodes=judge.nodes)
                        values = {"AUROC of wrong labels": auroc(errors.scores[~wrong], errors.scores[wrong])}
                    else:
                        judge.fit(held_out.inputs, held_out.labels)
                        values = scores_of(judge, net, test, outside)
                for unit, value in values.items():
                    found[name, unit].append((value, taken.value))
    rows, data = Rows(), f"{train_data.name}, {count} training points, an MLP"
    for (name, unit), values in found.items():
        numbers, seconds = zip(*values, strict=True)
        rows.append(row(f"epk_gp, {name}", "last weights or path", data, numbers, unit, seconds))
    return rows


def scores_of(
    judge: epk.UncertainClassifier, net: nn.Module, test: Dataset, outside: dict[str, Tensor]
) -> dict[str, float]:
    """Return how likely test labels are, and how well errors and other data are found."""
    scores, p = judge.uncertainty(test.inputs, num_samples=2), judge.predict_proba(test.inputs)
    with torch.no_grad():
        mistaken = net(test.inputs).argmax(1) != test.labels
    values = {
        "nll": quality(p, test.labels).nll,
        "AUROC of errors": auroc(scores.error[~mistaken], scores.error[mistaken]),
    }
    for name, X in outside.items():
        other = judge.uncertainty(X, num_samples=2).out_of_distribution
        values[f"AUROC of {name}"] = auroc(scores.out_of_distribution, other)
    return values


def auroc(inside: Tensor, outside: Tensor) -> float:
    """Return the area under the ROC curve of a score that is larger outside."""
    return ood_metrics(inside, outside).auroc


if __name__ == "__main__":
    typer.run(main)
