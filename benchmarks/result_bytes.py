"""Save small results of every kind of the package, and say later which of their bytes differ.

    python benchmarks/result_bytes.py save before.safetensors
    python benchmarks/result_bytes.py compare before.safetensors  # exit status 1 if anything differs
    python benchmarks/result_bytes.py list                        # name, shape and checksum of each

Run both on one machine: another processor or another torch may round differently.
"""

import argparse
import contextlib
import copy
import functools
import hashlib
import io
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["MPLBACKEND"] = "Agg"  # before the package imports matplotlib

import gpytorch
import numpy as np
import torch
from linear_operator.operators import LinearOperator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import epk_gp as epk
from epk_gp.analysis.calibration import calibration, reliability_bins
from epk_gp.analysis.counterfactual import datamodeling_score, leave_one_out, random_subsets
from epk_gp.analysis.detection import error_detection, ood_metrics, precision_at_k, roc_curve
from epk_gp.analysis.explainer import Explainer
from epk_gp.analysis.maps import uncertainty_on_plane
from epk_gp.analysis.planes import principal_plane
from epk_gp.analysis.spectrum import gram_spectrum
from epk_gp.classifier import EPKClassifier
from epk_gp.cli import main
from epk_gp.core.averaging import averaged_trajectory, averaging_coefficients
from epk_gp.datasets import three_gaussians
from epk_gp.gp.calibration import calibrated_temperature
from epk_gp.gp.conformal import conformal_sets, conformity_scores
from epk_gp.gp.leave_one_out import leave_one_out as process_without_one
from epk_gp.gp.sampling import QuasiMonteCarlo, sample_functions
from epk_gp.gram.ntk import tangent_trajectory
from epk_gp.gram.path_kernel import gram_block_per_class, gram_diagonal_blocks
from epk_gp.gram.random_fourier import rbf_features, tensor_sketch
from epk_gp.kernel_machine.attribute import attribute_by, attribute_many
from epk_gp.kernel_machine.axes import by_label, by_layer, by_sample, by_step
from epk_gp.kernel_machine.baselines import chen_machine, domingos_machine
from epk_gp.kernel_machine.single_machine import single_machine
from epk_gp.kernels.hidden_features import HiddenFeaturesKernel
from epk_gp.kernels.infinite_width import ArcCosineKernel, ErfKernel
from epk_gp.kernels.precomputed import epk_gram
from epk_gp.storage.export import export_run

FOLDER = tempfile.TemporaryDirectory()  # runs that are recorded here and loaded again
POINTS, CLASSES, STEPS = 12, 3, 6
CERTIFICATE = "max_error max_residual max_step_mismatch residual_ratio mismatch_ratio evaluations worst_step certified"


def seeded(seed: int = 0) -> torch.Generator:
    """Return a generator of random numbers that are always the same."""
    return torch.Generator().manual_seed(seed)


def rows(*shape: int, n: int = POINTS, seed: int = 1) -> Tensor:
    """Return n random inputs."""
    return torch.randn(n, *shape, generator=seeded(seed), dtype=torch.float64)


def pick(result: object, names: str) -> dict[str, Any]:
    """Return some attributes of a result by name."""
    return {name: getattr(result, name) for name in names.split()}


class Recurrent(nn.Module):
    """An LSTM with a linear layer on its last state."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 5, batch_first=True), nn.Linear(5, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of sequences."""
        return self.out(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    """Embedded tokens, one encoder layer, and the mean over positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(10, 8), nn.Linear(8, CLASSES)
        self.encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits of token numbers."""
        return self.out(self.encoder(self.embed(x)).mean(dim=1))


def mlp(*extra: nn.Module, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    """Return a small network, with layers that are put before its activation."""
    return nn.Sequential(nn.Linear(4, 8), *extra, activation(), nn.Linear(8, CLASSES))


def conv() -> nn.Module:
    """Return a small network for images."""
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, CLASSES)
    return nn.Sequential(*layers)


def record(
    build: Callable[[], nn.Module],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD,
    X: Tensor | None = None,
    *,
    batch: int = 5,
    accumulate: int = 1,
    clip: float | None = None,
    noise: float = 0.0,
    gamma: float = 1.0,
    storage: epk.Storage = epk.Storage(),
    ema: float | None = None,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> epk.Trajectory:
    """Record a small training on disk, and load the run."""
    draw, X = seeded(2), (rows(4) if X is None else X)
    X = X.to(dtype) if X.is_floating_point() else X
    y = torch.arange(POINTS) % CLASSES
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = build().to(dtype)
        fresh = copy.deepcopy(net)
        how = optimizer(net.parameters(), **({"lr": 0.2} | options))
        schedule = torch.optim.lr_scheduler.ExponentialLR(how, gamma)
        average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(ema)) if ema else None
        folder = Path(tempfile.mkdtemp(dir=FOLDER.name)) / "run"
        with epk.Recorder(net, how, X, y, folder=folder, storage=storage) as recorder:
            for _ in range(STEPS):
                how.zero_grad()
                for index in torch.randperm(POINTS, generator=draw)[: batch * accumulate].split(batch):
                    x = X[index]
                    if noise:
                        x = x + noise * torch.randn(x.shape, generator=draw, dtype=x.dtype)
                    (nn.functional.cross_entropy(net(x), y[index]) / accumulate).backward()
                    recorder.batch(index, weight=1 / accumulate)
                if clip:
                    nn.utils.clip_grad_norm_(net.parameters(), clip)
                how.step()
                schedule.step()
                if average:
                    average.update_parameters(net)
        run = epk.load_trajectory(folder, fresh)
        if average is None:
            return run
        return averaged_trajectory(run, averaging_coefficients(STEPS, decay=ema), network=average)


tokens = functools.partial(torch.randint, 0, 10, (POINTS, 5))
SGD, Adam, AdamW = torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW
RUNS: dict[str, Callable[[], epk.Trajectory]] = {
    "plain": lambda: record(mlp, batch=POINTS),
    "minibatches": lambda: record(mlp),
    "tanh": lambda: record(functools.partial(mlp, activation=nn.Tanh)),
    "momentum": lambda: record(mlp, momentum=0.9, dampening=0.1),
    "nesterov": lambda: record(mlp, momentum=0.9, nesterov=True),
    "weight decay": lambda: record(mlp, momentum=0.5, weight_decay=0.01),
    "Adam": lambda: record(mlp, Adam, lr=0.02),
    "AdamW, dropout": lambda: record(lambda: mlp(nn.Dropout(0.3)), AdamW, lr=0.02, weight_decay=0.1),
    "RMSprop": lambda: record(mlp, torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "clipping": lambda: record(mlp, clip=0.25, momentum=0.9),
    "averaged weights": lambda: record(mlp, Adam, lr=0.02, ema=0.7),
    "accumulation": lambda: record(mlp, batch=3, accumulate=3),
    "schedule": lambda: record(mlp, gamma=0.8),
    "augmentation": lambda: record(mlp, noise=0.1, momentum=0.9),
    "BatchNorm": lambda: record(lambda: mlp(nn.BatchNorm1d(8)), momentum=0.9, lr=0.1),
    "few states": lambda: record(mlp, AdamW, lr=0.02, storage=epk.Storage(keep_every=3)),
    "LSTM": lambda: record(Recurrent, Adam, rows(3, 4), lr=0.02),
    "transformer": lambda: record(Transformer, AdamW, tokens(generator=seeded()), lr=0.02),
    "conv net": lambda: record(conv, SGD, rows(2, 4, 4), momentum=0.9),
    "float32": lambda: record(mlp, momentum=0.9, dtype=torch.float32),
}
recorded = functools.cache(lambda name: RUNS[name]())


def inputs_of(run: epk.Trajectory, n: int = 4) -> Tensor:
    """Return test points of a run."""
    X = run.inputs
    if not X.is_floating_point():
        return (X[:n] + 1) % 10
    return (X[:n] + 0.3 * rows(*X.shape[1:], n=n, seed=3)).to(X.dtype)


def two_sets(run: epk.Trajectory) -> tuple[epk.Points, epk.Points]:
    """Return test copies, and training copies of some training points."""
    return epk.Points(inputs_of(run), is_train=False), epk.Points(run.inputs[:7], is_train=True)


def what_was_recorded(run: epk.Trajectory) -> object:
    """Return weights, learning rates, batches, coefficients and moving statistics of a run."""
    states = [torch.cat([w.flatten() for w in run.weights(s).values()]) for s in range(run.num_steps + 1)]
    names = "lr momentum_lr beta one_minus_dampening grad_scale weight_decay decoupled_decay left right"
    rates = torch.tensor([step.lr for step in run.steps], dtype=torch.float64)
    updates = None if run.average else [pick(run.updates[s], names) for s in range(run.num_steps)]
    statistics = None if run.statistics is None else list(run.statistics)
    return [states, rates, updates, statistics, [step.batch for step in run.steps], run.digest]


def block(run: str, sides: str = "ab", **options: Any) -> Tensor:
    """Return a kernel block of a run between test copies (a) and training copies (b)."""
    a, b = two_sets(recorded(run))
    points = {"a": a, "b": b}
    return epk.gram_block(recorded(run), points[sides[0]], points[sides[1]], **options)


def by_threads() -> Tensor:
    """Return a block that two workers computed."""
    with ThreadPoolExecutor(2) as executor:
        return block("momentum", executor=executor)


def kernel(training: bool = True, **options: Any) -> object:
    """Return a GPyTorch kernel between both copies, its diagonal, and the derivative in the points."""
    run = recorded("tanh")
    covariance = epk.EPKKernel(run, **options).train(training)
    a, b = epk.test_copy(inputs_of(run)).requires_grad_(), epk.train_copy(run.inputs[:5])
    cross = covariance(a, b).to_dense()
    (slope,) = torch.autograd.grad((cross * torch.linspace(1, 2, cross.numel()).view_as(cross)).sum(), a)
    return [cross.detach(), slope, covariance(b).to_dense(), covariance(b, diag=True)]


def attributed(run: str, **options: Any) -> object:
    """Return all terms of an attribution and the numbers of its certificate."""
    parts = epk.attribute(recorded(run), inputs_of(recorded(run), 3), **options)
    terms = "initial samples decay statistics unexplained total network amplification "
    return pick(parts, terms + CERTIFICATE)


def attributed_by(run: str, *axes: Callable[[epk.Trajectory], Any], **options: Any) -> object:
    """Return contributions that are summed along axes."""
    parts = attribute_by(recorded(run), inputs_of(recorded(run), 3), [axis(recorded(run)) for axis in axes], **options)
    return pick(parts, "values decay statistics statistics_of_no_sample unexplained " + CERTIFICATE)


def reconstructed(run: str, **options: Any) -> object:
    """Return a kernel machine's outputs and certificate."""
    result = epk.reconstruct(recorded(run), inputs_of(recorded(run)), **options)
    return pick(result, "outputs network initial total_residual error_tolerance " + CERTIFICATE)


def influenced(run: str, **options: Any) -> object:
    """Return derivatives in the points' weights."""
    effect = epk.influence(recorded(run), inputs_of(recorded(run), 3), **options)
    names = "values outputs adjoint_norms growth max_step_mismatch certified"
    return pick(effect, names if "by" in options or "function" in options else names + " std")


def retrained(run: str) -> object:
    """Return networks that were trained again without some points."""
    trained = epk.retrain(recorded(run), random_subsets(POINTS, 3, share=0.8))
    outputs = trained.outputs(inputs_of(recorded(run)))
    return [outputs, trained.states, trained.max_difference, epk.attribute(trained.run(0), rows(4, n=2)).samples]


@functools.cache
def wider() -> tuple[epk.Trajectory, Tensor, Tensor, Tensor]:
    """Return a run on three Gaussians, validation points with labels, and test points."""
    data = three_gaussians(40, dim=4, generator=seeded())
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = mlp().double()
        how = SGD(net.parameters(), lr=0.2)
        run = epk.train(net, data.inputs[:60], data.labels[:60], optimizer=how, steps=10)
    return run, data.inputs[60:100], data.labels[60:100], data.inputs[100:]


def process(outputs: Any = "full", mean: Any = "initial", targets: Any = "network", **options: Any) -> epk.LogitGP:
    """Return a fitted Gaussian process on logits."""
    gp = epk.LogitGP(wider()[0], outputs, mean, targets, points=range(20), **options)
    gp.losses = gp.fit(steps=5)
    return gp


def posterior(*mode: Any, **options: Any) -> object:
    """Return losses of a fit, a posterior, and the leave-one-out posterior."""
    gp = process(*mode, **options)
    without = process_without_one(gp)
    return [gp.losses, pick(gp.logit_posterior(wider()[3]), "mean covariance"), without.residual, without.log_density]


def sampled() -> object:
    """Return moments of a softmax, a temperature, and sampled functions."""
    gp, (_, X, y, test) = process(), wider()
    names = "mean std entropy expected_entropy mutual_information standard_error quantiles"
    judged = gp.logit_posterior(test)
    return [
        pick(epk.softmax_uncertainty(judged, 64, seeded(), quantiles=(0.1, 0.9)), names),
        pick(epk.softmax_uncertainty(judged, 64, seeded(), method=QuasiMonteCarlo(4)), names),
        pick(calibrated_temperature(gp.logit_posterior(X), y, 64, seeded()), "value before after"),
        sample_functions(gp, test, 2, seeded()),
    ]


@functools.cache
def judge(**options: Any) -> epk.UncertainClassifier:
    """Return a fitted process on labels."""
    run, X, y, _ = wider()
    return epk.UncertainClassifier(run, **options).fit(X, y)


def judged(model: epk.UncertainClassifier) -> object:
    """Return probabilities, scores and sets of a process on labels."""
    test = wider()[3]
    scores = pick(model.uncertainty(test), "error out_of_distribution entropy mutual_information std")
    return [model.predict_proba(test), model.predict(test), model.predict_set(test, alpha=0.1), scores]


def saved_and_loaded() -> object:
    """Return what a stored classifier says once it is loaded, and its arrays."""
    folder = Path(tempfile.mkdtemp(dir=FOLDER.name)) / "model"
    judge().save(folder)
    return judged(epk.UncertainClassifier.load(folder, mlp().double()))


def scikit_learn() -> object:
    """Return what the classifier with scikit-learn's face predicts."""
    _, X, y, test = wider()
    model = EPKClassifier(steps=10, gp_steps=5, num_condition=15, random_state=0).fit(X.numpy(), y.numpy())
    later = model.predict_uncertainty(test.numpy(), 64)
    return [model.predict_proba(test.numpy()), model.decision_function(test.numpy()), later.mean, later.std]


def scores_of_scores() -> object:
    """Return calibration, detection and conformal numbers of the validation points."""
    run, X, y, test = wider()
    p = epk.network_outputs(run, X, head="log_softmax").exp()
    doubt, wrong = 1 - p.amax(1), torch.arange(len(y)) % 5 == 0
    curve, kept = roc_curve(doubt[:20], doubt[20:]), error_detection(doubt, wrong)
    return [
        pick(calibration(p, y), "accuracy ece nll"),
        pick(reliability_bins(p, y), "count confidence accuracy"),
        pick(ood_metrics(doubt[:20], doubt[20:]), "auroc fpr95"),
        [curve.threshold, curve.inside, curve.outside],
        [kept.auroc, kept.aurc, kept.risk, precision_at_k(doubt, wrong, 5)],
        conformal_sets(epk.network_outputs(run, test).softmax(1), conformity_scores(p, y), 0.1),
    ]


def mapped() -> object:
    """Return a map of uncertainty over a plane."""
    run = wider()[0]
    drawn = uncertainty_on_plane(process(), principal_plane(run.inputs), size=4, num_samples=32, generator=seeded())
    return pick(drawn, "x y kernel network_class probability std entropy mutual_information standard_error")


def counterfactual() -> object:
    """Return leave-one-out effects and the score of a datamodel."""
    run, subsets = recorded("tanh"), random_subsets(POINTS, 6)
    X = inputs_of(run)
    outcomes, scores = epk.retrain(run, subsets).outputs(X)[:, :, 0], epk.influence(run, X).values[:, 0]
    return [leave_one_out(run, X), datamodeling_score(scores, subsets, outcomes).per_point]


def exported() -> object:
    """Return the arrays of a run as one file."""
    folder = Path(tempfile.mkdtemp(dir=FOLDER.name))
    how = SGD((net := mlp().double()).parameters(), lr=0.1, momentum=0.9)
    epk.train(net, rows(4), torch.arange(POINTS) % CLASSES, optimizer=how, steps=3, folder=folder / "run")
    export_run(folder / "run", folder / "run.safetensors")
    return load_file(folder / "run.safetensors")


@functools.cache
def command_run() -> Path:
    """Return the folder of a run that a command recorded."""
    small = "--num-train 40 --num-test 60 --width 5 --steps 5 --seed 0"
    return command("record", small)


def command(asked: str, options: str = "") -> Path:
    """Run a command of epk-gp, and return the folder that it wrote."""
    out = Path(tempfile.mkdtemp(dir=FOLDER.name)) / "out"
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            main([*asked.split(), "--out", str(out), *options.split(), "--quiet"])
    except SystemExit as end:
        if end.code:
            raise RuntimeError(f"epk-gp {asked} ended with status {end.code}") from end
    return out


def arrays(asked: str, options: str = "") -> object:
    """Return all arrays that a command on a run writes."""
    out = command(f"{asked} {command_run()}", options)
    tables = {file.name: load_file(file) for file in sorted(out.glob("*.safetensors"))}
    return tables | {file.name: dict(np.load(file)) for file in sorted(out.glob("*.npz"))}


INFLUENCED = ("plain", "momentum", "AdamW, dropout", "BatchNorm", "clipping", "accumulation", "LSTM", "transformer", "conv net")
MINI = "--num-points 2 --outputs all"
RESULTS: dict[str, Callable[[], object]] = {
    **{f"run, {name}": functools.partial(lambda name: what_was_recorded(recorded(name)), name) for name in RUNS},
    "network_outputs": lambda: [
        epk.network_outputs(recorded("plain"), rows(4, n=3), state=state, head=head)
        for state in (0, 2, -1)
        for head in ("logits", "log_softmax")
    ],
    "block": lambda: block("plain"),
    "block, both training copies": lambda: block("minibatches", "bb"),
    "block, both test copies": lambda: block("momentum", "aa"),
    "block, logits": lambda: block("plain", head="logits"),
    "block, Gauss 2": lambda: block("plain", rule=epk.gauss_legendre(2)),
    "block, left": lambda: block("plain", rule=epk.left_endpoint()),
    "block, Riemann": lambda: block("plain", rule=epk.left_riemann(3)),
    "block, midpoint": lambda: block("plain", rule=epk.midpoint(2)),
    "block, adaptive": lambda: block("minibatches", rule=epk.adaptive(1e-8)),
    "block, adaptive, test copies": lambda: block("tanh", "aa", rule=epk.adaptive(1e-8)),
    "block, chords": lambda: block("minibatches", path=epk.chords(every=3)),
    "block, chords, adaptive": lambda: block("tanh", path=epk.chords(every=2), rule=epk.adaptive(1e-8)),
    "block, step weights": lambda: block("plain", step_weights=torch.linspace(0, 1, STEPS, dtype=torch.float64)),
    "block, small memory": lambda: block("conv net", memory_budget=1 << 20),
    "block, checkpoint": lambda: block("Adam", checkpoint=Path(tempfile.mkdtemp(dir=FOLDER.name)) / "sums"),
    "block, executor": by_threads,
    "block, float32": lambda: block("float32"),
    "block, float32 in float64": lambda: block("float32", accumulate=torch.float64),
    **{f"block, {name}": functools.partial(block, name) for name in ("LSTM", "transformer", "BatchNorm", "few states")},
    "block per class": lambda: gram_block_per_class(recorded("plain"), *two_sets(recorded("plain"))),
    "diagonal": lambda: [gram_diagonal_blocks(recorded("tanh"), points) for points in two_sets(recorded("tanh"))],
    "trace block": lambda: epk.PathKernel(recorded("conv net")).trace_block(*two_sets(recorded("conv net"))),
    "NTK": lambda: [
        epk.gram_block(tangent_trajectory(recorded(name)), *two_sets(recorded(name)), rule=epk.left_endpoint())
        for name in ("tanh", "conv net")
    ],
    "path features": lambda: epk.path_features(recorded("tanh"), rows(4), 16, nodes=5),
    "features, product": lambda: tensor_sketch(rows(6), rbf_features(rows(4), 1.5, 16), 32),
    "matrix": lambda: epk_gram(recorded("tanh"), *two_sets(recorded("tanh"))),
    "kernel, full": kernel,
    "kernel, evaluated": lambda: kernel(training=False),
    "kernel, independent": lambda: kernel(outputs="independent"),
    "kernel, trace, cosine": lambda: kernel(outputs="trace", normalize="cosine"),
    "kernel, full, cosine, evaluated": lambda: kernel(training=False, normalize="cosine"),
    "kernel, sum, mean diagonal": lambda: kernel(outputs="sum", normalize="mean_diagonal"),
    "kernel, one class, logits": lambda: kernel(outputs=1, head="logits"),
    "kernel, chords": lambda: kernel(outputs="trace", path=epk.chords(every=2)),
    "kernel, sketched": lambda: kernel(outputs="trace", features=32, nodes=5),
    "kernel, sketched, cosine": lambda: kernel(training=False, outputs="trace", features=32, normalize="cosine"),
    "kernel, infinite width": lambda: [
        k.double()(rows(4), rows(4, n=3)).to_dense() for k in (ErfKernel(2), ArcCosineKernel(1, 2))
    ],
    "kernel, hidden features": lambda: HiddenFeaturesKernel(
        recorded("tanh"), gpytorch.kernels.RBFKernel().double()
    )(rows(4)).to_dense(),
    **{f"attribute, {name}": functools.partial(attributed, name) for name in RUNS},
    "attribute, logits": lambda: attributed("plain", head="logits"),
    "attribute, one class": lambda: attributed("Adam", classes=torch.arange(3)),
    "attribute, fixed rule": lambda: attributed("momentum", rule=epk.gauss_legendre(2)),
    "attribute, chords": lambda: attributed("momentum", path=epk.chords(every=3)),
    "attribute, layerwise": lambda: attributed("plain", path=epk.layerwise()),
    "attribute, layerwise, AdamW": lambda: attributed("AdamW, dropout", path=epk.layerwise(every=2)),
    "attribute, layerwise, conv net": lambda: attributed("conv net", path=epk.layerwise()),
    "attribute by step": lambda: attributed_by("plain", by_step),
    "attribute by label and layer": lambda: attributed_by("weight decay", by_label, by_layer),
    "attribute by sample and step": lambda: attributed_by("BatchNorm", by_sample, by_step, path=epk.layerwise()),
    "attribute, two questions": lambda: [
        parts.values
        for parts in attribute_many(
            recorded("Adam"), rows(4, n=2), [[by_label(recorded("Adam"))], [by_step(recorded("Adam"))]]
        )
    ],
    **{f"reconstruct, {name}": functools.partial(reconstructed, name) for name in RUNS},
    "reconstruct, fixed rule": lambda: reconstructed("plain", rule=epk.left_riemann(4)),
    "reconstruct, chords": lambda: reconstructed("plain", path=epk.chords(every=2)),
    "single machine": lambda: pick(single_machine(recorded("plain"), rows(4, n=3)), "outputs coefficients max_error"),
    "other machines": lambda: [
        pick(machine(recorded("plain"), rows(4, n=3)), "block coefficients outputs")
        for machine in (chen_machine, domingos_machine)
    ],
    **{f"influence, {name}": functools.partial(influenced, name) for name in INFLUENCED},
    "influence, one class": lambda: influenced("Adam", classes=torch.arange(3)),
    "influence, sums": lambda: influenced("tanh", by=[by_label(recorded("tanh")), by_step(recorded("tanh"))]),
    "influence, smoothed": lambda: influenced("tanh", smoothing=epk.Smoothing(3, seed=1)),
    "influence, truncated": lambda: influenced("momentum", truncate=2),
    "influence, function": lambda: influenced("tanh", function=lambda f: (f**2).sum()),
    "self-influence": lambda: [epk.self_influence(recorded(name)) for name in ("tanh", "AdamW, dropout")],
    **{f"retrain, {name}": functools.partial(retrained, name) for name in ("tanh", "AdamW, dropout", "clipping")},
    "counterfactual": counterfactual,
    "explainer": lambda: Explainer(trajectory=recorded("tanh")).explain(rows(4, n=3), torch.arange(3)),
    "process": posterior,
    "process, independent, Dirichlet": lambda: posterior("independent", "constant", "dirichlet"),
    "process, trace, labels, cosine": lambda: posterior("trace", "zero", "labels", normalize="cosine"),
    "process, network's mean, chords": lambda: posterior("full", "network", "labels", path=epk.chords(every=5)),
    "process, nodes": lambda: posterior("trace", "zero", "labels", nodes=5),
    "softmax": sampled,
    "map": mapped,
    "label process": lambda: judged(judge()),
    "label process, features": lambda: judged(judge(features=64, nodes=5)),
    "label process, saved": saved_and_loaded,
    "label errors": lambda: pick(
        epk.label_errors(wider()[0]), "indices scores margin own_label log_probability predicted aum"
    ),
    "next to label": lambda: pick(epk.next_to_label(judge(), wider()[3], 4), "indices scores variance_removed"),
    "classifier": scikit_learn,
    "scores": scores_of_scores,
    "spectrum": lambda: pick(
        gram_spectrum(epk.EPKKernel(recorded("plain"), "trace")(epk.train_copy(rows(4))).to_dense()),
        "values effective_rank participation_ratio num_principal",
    ),
    "exported run": exported,
    "command record": lambda: load_file(command_run() / "data.safetensors"),
    "command verify": lambda: json.loads((command(f"verify {command_run()}") / "verify.json").read_text())["results"],
    "command gram": lambda: arrays("gram", "--num-rows 5 --num-columns 4"),
    "command attribute": lambda: arrays("attribute", MINI),
    "command influence": lambda: arrays("influence", MINI),
    "command uncertainty": lambda: arrays("uncertainty", "--validation held-out"),
    "command uncertainty, map": lambda: arrays("uncertainty", "--num-condition 9 --grid 3 --num-samples 16"),
}  # fmt: skip


def flat(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Divide a result into named tensors; text becomes its bytes, and None is left out."""
    if isinstance(value, LinearOperator):
        value = value.to_dense()
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from flat(f"{name} | {key}", part)
    elif isinstance(value, list | tuple):
        for number, part in enumerate(value):
            yield from flat(f"{name} | {number}", part)
    elif isinstance(value, str):
        yield name, torch.tensor(list(value.encode()), dtype=torch.uint8)
    elif value is not None:
        numbers = torch.tensor(value, dtype=torch.float64) if isinstance(value, float) else torch.as_tensor(value)
        yield name, numbers.detach().clone(memory_format=torch.contiguous_format)


def compute(words: str) -> dict[str, Tensor]:
    """Compute all results whose names hold some words; one that fails is the text of its error."""
    torch.set_num_threads(1)
    tensors: dict[str, Tensor] = {}
    for name, result in RESULTS.items():
        if words in name:
            torch.manual_seed(0)
            try:
                tensors |= flat(name, result())
            except Exception as error:
                message = f"{type(error).__name__}: {error}"
                print(f"{name} failed: {message}", file=sys.stderr)
                tensors |= flat(f"{name} | error", message)
    return tensors


def differences(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Iterator[str]:
    """Say which tensors are only on one side, or differ in a byte, and by how much."""
    for name in sorted({*before, *now}):
        if name not in now or name not in before:
            yield f"{name}: only {'before' if name in before else 'now'}"
            continue
        a, b = before[name], now[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{name}: {tuple(a.shape)} {a.dtype} before, {tuple(b.shape)} {b.dtype} now"
        elif a.numpy().tobytes() != b.numpy().tobytes():
            size, gap = a.double().abs().max(), (a.double() - b.double()).abs().max()
            yield f"{name}: differs by {gap:.2e} at most (largest value {size:.2e})"


def run(argv: list[str] | None = None) -> None:
    """Save, compare or list."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("save", "compare", "list"))
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--only", default="", help="compute the results whose names hold these words")
    options = parser.parse_args(argv)
    if options.file is None and options.what != "list":
        parser.error(f"{options.what} needs a file")
    warnings.simplefilter("ignore")  # some results are not certified, which is part of them
    now = compute(options.only)
    if options.what == "save":
        save_file(now, options.file)
    elif options.what == "list":
        for name, tensor in now.items():
            print(f"{name}  {tuple(tensor.shape)}  {hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]}")
    else:
        before = {name: tensor for name, tensor in load_file(options.file).items() if options.only in name.split(" | ")[0]}
        lines = list(differences(before, now))
        print("\n".join(lines) or f"all {len(now)} tensors of {len(RESULTS)} results are equal")
        sys.exit(bool(lines))


if __name__ == "__main__":
    run()
