"""Save small results of every kind of the package, and say later which of their bytes differ.

    python benchmarks/result_bytes.py save before.safetensors
    python benchmarks/result_bytes.py compare before.safetensors  # exit status 1 if anything differs

Run both on one machine: another processor or another torch may round differently.
"""

import argparse
import atexit
import contextlib
import copy
import functools
import io
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ["MPLBACKEND"] = "Agg"  # before the package imports matplotlib

import numpy as np
import torch
from linear_operator.operators import LinearOperator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer, RMSprop
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import epk_gp as epk
from epk_gp.analysis.maps import principal_plane, uncertainty_on_plane
from epk_gp.analysis.measures import (
    calibration,
    error_detection,
    gram_spectrum,
    ood_metrics,
    reliability_bins,
    roc_curve,
)
from epk_gp.analysis.score_check import datamodeling_score, leave_one_out, random_subsets
from epk_gp.cli import main
from epk_gp.core.states import averaged_trajectory, averaging_coefficients
from epk_gp.datasets import three_gaussians
from epk_gp.estimators import EPKClassifier
from epk_gp.gp.regression import leave_one_out as process_without_one
from epk_gp.gp.stacking import conformal_sets
from epk_gp.kernel_machine.axes import Axis, by_label, by_layer, by_sample, by_step
from epk_gp.kernel_machine.reconstruct import single_machine, tangent_trajectory

FOLDER = tempfile.mkdtemp()  # for runs that are loaded again, and for what commands write
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)
POINTS, CLASSES, STEPS = 12, 3, 6
# What is taken of results that are neither numbers nor tensors, where they have it.
ATTRIBUTES = """
    lr batch momentum_lr beta one_minus_dampening grad_scale weight_decay decoupled_decay left right digest
    initial samples values decay statistics statistics_of_no_sample unexplained total network outputs amplification
    coefficients max_error max_residual total_residual max_step_mismatch residual_ratio mismatch_ratio evaluations
    worst_step error_tolerance certified adjoint_norms growth states max_difference per_point
    mean std covariance residual log_density entropy expected_entropy mutual_information standard_error quantiles
    value before after x y kernel network_class probability error out_of_distribution indices scores margin own_label
    log_probability predicted aum variance_removed misclassification accuracy ece nll count confidence auroc fpr95 aurc
    risk threshold inside outside effective_rank participation_ratio num_principal
"""


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def rows(*shape: int, n: int = POINTS, seed: int = 1) -> Tensor:
    return torch.randn(n, *shape, generator=seeded(seed), dtype=torch.float64)


def new_path(name: str = "new") -> Path:
    return Path(tempfile.mkdtemp(dir=FOLDER)) / name


class Last(nn.Module):
    def forward(self, h: Any) -> Tensor:
        return h[0][:, -1] if isinstance(h, tuple) else h.mean(dim=1)


def mlp(*extra: nn.Module, activation: type[nn.Module] = nn.ReLU) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), *extra, activation(), nn.Linear(8, CLASSES))


def conv_net() -> nn.Module:
    layers = nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, CLASSES)
    return nn.Sequential(*layers)


def transformer() -> nn.Module:
    encoder = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True, dropout=0.1)
    return nn.Sequential(nn.Embedding(10, 8), encoder, Last(), nn.Linear(8, CLASSES))


def lstm() -> nn.Module:
    return nn.Sequential(nn.LSTM(4, 5, batch_first=True), Last(), nn.Linear(5, CLASSES))


def record(
    build: Callable[[], nn.Module],
    optimizer: Callable[..., Optimizer] = SGD,
    X: Tensor | None = None,
    *,
    batch: int = 5,
    accumulate: int = 1,
    clip: float | None = None,
    noise: float = 0.0,
    gamma: float = 1.0,
    keep_every: int = 1,
    ema: float | None = None,
    dtype: torch.dtype = torch.float64,
    **options: float,
) -> epk.Trajectory:
    """Record a small training on disk, and load the run."""
    draw, X, y = seeded(2), rows(4).to(dtype) if X is None else X, torch.arange(POINTS) % CLASSES
    torch.manual_seed(0)
    net = build().to(dtype)
    fresh, steps = copy.deepcopy(net), optimizer(net.parameters(), **{"lr": 0.2} | options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(steps, gamma)
    average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(ema or 0.0))
    storage = epk.Storage(keep_every=keep_every)
    with epk.Recorder(net, steps, X, y, folder=(folder := new_path()), storage=storage) as recorder:
        for _ in range(STEPS):
            steps.zero_grad()
            for index in torch.randperm(POINTS, generator=draw)[: batch * accumulate].split(batch):
                x = X[index] + noise * rows(4, n=batch, seed=int(index[0])) if noise else X[index]
                (nn.functional.cross_entropy(net(x), y[index]) / accumulate).backward()
                recorder.batch(index, weight=1 / accumulate)
            if clip:
                nn.utils.clip_grad_norm_(net.parameters(), clip)
            steps.step()
            schedule.step()
            average.update_parameters(net)
    run = epk.load_trajectory(folder, fresh)
    return averaged_trajectory(run, averaging_coefficients(STEPS, decay=ema), network=average) if ema else run


RUNS: dict[str, Callable[[], epk.Trajectory]] = {
    "plain": lambda: record(mlp, batch=POINTS),
    "minibatches": lambda: record(mlp),
    "tanh": lambda: record(lambda: mlp(activation=nn.Tanh)),
    "momentum": lambda: record(mlp, momentum=0.9, dampening=0.1),
    "nesterov": lambda: record(mlp, momentum=0.9, nesterov=True),
    "weight decay": lambda: record(mlp, momentum=0.5, weight_decay=0.01),
    "Adam": lambda: record(mlp, Adam, lr=0.02),
    "AdamW, dropout": lambda: record(lambda: mlp(nn.Dropout(0.3)), AdamW, lr=0.02, weight_decay=0.1),
    "RMSprop": lambda: record(mlp, RMSprop, lr=0.01, momentum=0.5, centered=True),
    "clipping": lambda: record(mlp, clip=0.25, momentum=0.9),
    "averaged weights": lambda: record(mlp, Adam, lr=0.02, ema=0.7),
    "accumulation": lambda: record(mlp, batch=3, accumulate=3),
    "schedule": lambda: record(mlp, gamma=0.8),
    "augmentation": lambda: record(mlp, noise=0.1, momentum=0.9),
    "BatchNorm": lambda: record(lambda: mlp(nn.BatchNorm1d(8)), momentum=0.9, lr=0.1),
    "few states": lambda: record(mlp, AdamW, lr=0.02, keep_every=3),
    "LSTM": lambda: record(lstm, Adam, rows(3, 4), lr=0.02),
    "transformer": lambda: record(transformer, AdamW, torch.randint(10, (POINTS, 5), generator=seeded()), lr=0.02),
    "conv net": lambda: record(conv_net, SGD, rows(2, 4, 4), momentum=0.9),
    "float32": lambda: record(mlp, momentum=0.9, dtype=torch.float32),
}


@functools.cache
def recorded(name: str) -> epk.Trajectory:
    with torch.random.fork_rng():
        return RUNS[name]()


def inputs_of(run: epk.Trajectory) -> Tensor:
    """Return test points that are like a run's inputs."""
    X = run.inputs[:4]
    return X + (0.3 * rows(*X.shape[1:], n=4, seed=3)).to(X.dtype) if X.is_floating_point() else (X + 1) % 10


def on(compute: Callable[..., object], name: str, *arguments: object, **options: object) -> object:
    """Compute something at test points of a recorded run."""
    return compute(recorded(name), inputs_of(recorded(name)), *arguments, **options)


def axes(name: str, *kinds: Callable[[epk.Trajectory], Axis]) -> list[Axis]:
    return [kind(recorded(name)) for kind in kinds]


def what_was_recorded(name: str) -> object:
    run = recorded(name)
    states = [list(run.weights(s).values()) for s in range(run.num_steps + 1)]
    updates = None if run.average else [run.updates[s] for s in range(run.num_steps)]
    return [states, updates, list(run.statistics or []), run.steps, run.digest]


def two_sets(name: str) -> tuple[epk.Points, epk.Points]:
    """Return test copies, and training copies of some training points."""
    return epk.Points(inputs_of(recorded(name)), is_train=False), epk.Points(recorded(name).inputs[:7], is_train=True)


def block(name: str, a: int = 0, b: int = 1, compute: Any = epk.gram_block, **options: Any) -> Tensor:
    """Return a kernel block of a run between test copies (0) and training copies (1)."""
    return compute(recorded(name), two_sets(name)[a], two_sets(name)[b], **options)


def per_class(run: epk.Trajectory, a: epk.Points, b: epk.Points) -> Tensor:
    return epk.PathKernel(run).block_per_class(a, b)


def by_threads() -> Tensor:
    with ThreadPoolExecutor(2) as executor:
        return block("momentum", executor=executor)


def kernel(training: bool = True, **options: Any) -> object:
    """Return a GPyTorch kernel between both copies, its derivative in the points, and its diagonal."""
    run = recorded("tanh")
    covariance = epk.EPKKernel(run, **options).train(training)
    a, b = epk.test_copy(inputs_of(run)).requires_grad_(), epk.train_copy(run.inputs[:5])
    cross = covariance(a, b).to_dense()
    (slope,) = torch.autograd.grad((cross * torch.linspace(1, 2, cross.numel()).view_as(cross)).sum(), a)
    return [cross, slope, covariance(b), covariance(b, diag=True)]


def retrained(name: str) -> object:
    trained = epk.retrain(recorded(name), random_subsets(POINTS, 3, share=0.8))
    return [trained, trained.outputs(rows(4, n=3)), epk.attribute(trained.run(0), rows(4, n=2))]


def counterfactual() -> object:
    run, subsets, X = recorded("tanh"), random_subsets(POINTS, 6), rows(4, n=3)
    outcomes, scores = epk.retrain(run, subsets).outputs(X)[:, :, 0], epk.influence(run, X).values[:, 0]
    return [leave_one_out(run, X), datamodeling_score(scores, subsets, outcomes)]


@functools.cache
def wider() -> tuple[epk.Trajectory, Tensor, Tensor, Tensor]:
    """Return a run on three Gaussians, validation points with labels, and test points."""
    data = three_gaussians(40, dim=4, generator=seeded())
    torch.manual_seed(0)
    optimizer = SGD((net := mlp().double()).parameters(), lr=0.2)
    run = epk.train(net, data.inputs[:60], data.labels[:60], optimizer=optimizer, steps=10)
    return run, data.inputs[60:100], data.labels[60:100], data.inputs[100:]


def process(*mode: Any, **options: Any) -> epk.LogitGP:
    gp = epk.LogitGP(wider()[0], *mode, points=range(20), **options)
    gp.fit(steps=5)
    return gp


def posterior(*mode: Any, **options: Any) -> object:
    gp = process(*mode, **options)
    return [dict(gp.named_parameters()), gp.logit_posterior(wider()[3]), process_without_one(gp)]


def sampled() -> object:
    gp, test = process(), wider()[3]
    predicted = gp.logit_posterior(test)
    return [predicted.softmax_uncertainty(64, seeded(), quantiles=(0.1, 0.9))]


def mapped() -> object:
    plane = principal_plane(wider()[0].inputs)
    return uncertainty_on_plane(process(), plane, size=4, num_samples=32, generator=seeded())


@functools.cache
def label_process(**options: Any) -> epk.UncertainClassifier:
    run, X, y, _ = wider()
    return epk.UncertainClassifier(run, **options).fit(X, y)


def judged(model: epk.UncertainClassifier) -> object:
    test = wider()[3]
    return [model.predict_proba(test), model.predict_set(test, alpha=0.1), model.uncertainty(test)]


def saved_and_loaded() -> object:
    label_process().save(folder := new_path())
    return judged(epk.UncertainClassifier.load(folder, mlp().double()))


def scikit_learn() -> object:
    X, y, test = (part.numpy() for part in wider()[1:])
    model = EPKClassifier(steps=10, random_state=0).fit(X, y)
    return [model.predict_proba(test), model.decision_function(test)]


def scores() -> object:
    run, X, y, test = wider()
    p = epk.network_outputs(run, X, head="log_softmax").exp()
    doubt, wrong = 1 - p.amax(1), torch.arange(len(y)) % 5 == 0
    curves = ood_metrics(doubt[:20], doubt[20:]), roc_curve(doubt[:20], doubt[20:]), error_detection(doubt, wrong)
    sets = conformal_sets(
        epk.network_outputs(run, test).softmax(1), (1 - p.gather(1, y[:, None])[:, 0]).sort().values, 0.1
    )
    return [calibration(p, y), reliability_bins(p, y), curves, sets]


def command(words: str, out: Path) -> Path:
    """Run a command of epk-gp, and return what it wrote."""
    with contextlib.redirect_stdout(io.StringIO()):
        main([*words.split(), "--out", str(out)])
    return out


@functools.cache
def command_run() -> Path:
    return command("record --num-train 40 --num-test 60 --width 5 --steps 5", new_path())


def written(words: str) -> object:
    """Return all arrays and numbers that a command on a run writes."""
    name, *options = words.split()
    out = command(" ".join([name, str(command_run()), *options]), new_path())
    arrays = {file.name: load_file(file) for file in sorted(out.glob("*.safetensors"))}
    arrays |= {file.name: dict(np.load(file)) for file in sorted(out.glob("*.npz"))}
    return [arrays, *(json.loads(file.read_text())["results"] for file in out.glob("verify.json"))]


Cases = Mapping[str, Callable[[], object]]


def each(kind: str, compute: Callable[[str], object], names: Iterable[str]) -> Cases:
    """Return the results of one kind for some recorded runs."""
    return {f"{kind}, {name}": functools.partial(compute, name) for name in names}


RULES = (
    epk.gauss_legendre(2),
    epk.QuadratureRule.left_endpoint(),
    epk.QuadratureRule.left_riemann(3),
    epk.QuadratureRule.midpoint(2),
)
INFLUENCED = "plain", "momentum", "AdamW, dropout", "BatchNorm", "clipping", "accumulation", "LSTM", "transformer"
RESULTS: Cases = {
    **each("run", what_was_recorded, RUNS),
    **each("outputs", lambda name: [on(epk.network_outputs, name, state=s) for s in (0, -1)], RUNS),
    **each("block", block, [name for name in RUNS if name != "averaged weights"]),
    "block, one copy": lambda: [block("minibatches", 1, 1), block("momentum", 0, 0)],
    "block, logits": lambda: block("plain", head="logits"),
    "block, rules": lambda: [block("minibatches", rule=rule) for rule in RULES],
    "block, adaptive": lambda: [block("tanh", 0, b, rule=epk.adaptive(1e-8)) for b in (0, 1)],
    "block, chords": lambda: block("minibatches", path=epk.chords(every=3)),
    "block, chords, adaptive": lambda: block("tanh", path=epk.chords(every=2), rule=epk.adaptive(1e-8)),
    "block, step weights": lambda: block("plain", step_weights=rows()[:STEPS].abs()),
    "block, small memory": lambda: block("conv net", memory_budget=1 << 20),
    "block, checkpoint": lambda: block("Adam", checkpoint=new_path()),
    "block, executor": by_threads,
    "block, float32 in float64": lambda: block("float32", accumulate=torch.float64),
    "block per class": lambda: block("plain", compute=per_class),
    "diagonal": lambda: [epk.PathKernel(recorded("tanh")).diagonal_blocks(points) for points in two_sets("tanh")],
    "trace block": lambda: epk.PathKernel(recorded("conv net")).trace_block(*two_sets("conv net")),
    "NTK": lambda: epk.gram_block(
        tangent_trajectory(recorded("tanh")), *two_sets("tanh"), rule=epk.QuadratureRule.left_endpoint()
    ),
    "path features": lambda: on(epk.path_features, "tanh", 16, nodes=5),
    "kernel, full": kernel,
    "kernel, evaluated": lambda: kernel(training=False),
    "kernel, independent": lambda: kernel(outputs="independent"),
    "kernel, trace, cosine": lambda: kernel(outputs="trace", normalize="cosine"),
    "kernel, full, cosine, evaluated": lambda: kernel(training=False, normalize="cosine"),
    "kernel, one class, logits": lambda: kernel(outputs=1, head="logits"),
    "kernel, chords": lambda: kernel(outputs="trace", path=epk.chords(every=2)),
    **each("attribute", lambda name: on(epk.attribute, name), RUNS),
    "attribute, logits": lambda: on(epk.attribute, "plain", head="logits"),
    "attribute, one class": lambda: on(epk.attribute, "Adam", classes=torch.tensor([0, 1, 2, 0])),
    "attribute, fixed rule": lambda: on(epk.attribute, "momentum", rule=epk.gauss_legendre(2)),
    "attribute, chords": lambda: on(epk.attribute, "momentum", path=epk.chords(every=3)),
    "attribute, layerwise": lambda: on(epk.attribute, "plain", path=epk.layerwise()),
    "attribute, layerwise, AdamW": lambda: on(epk.attribute, "AdamW, dropout", path=epk.layerwise(every=2)),
    "attribute, layerwise, conv net": lambda: on(epk.attribute, "conv net", path=epk.layerwise()),
    "attribute by step": lambda: on(epk.attribute, "plain", by=axes("plain", by_step)),
    "attribute by label and layer": lambda: on(
        epk.attribute, "weight decay", by=axes("weight decay", by_label, by_layer)
    ),
    "attribute by sample and step": lambda: on(epk.attribute, "BatchNorm", by=axes("BatchNorm", by_sample, by_step)),
    "attribute, two questions": lambda: on(epk.attribute, "Adam", by=[axes("Adam", by_label), axes("Adam", by_step)]),
    **each("reconstruct", lambda name: on(epk.reconstruct, name), RUNS),
    "reconstruct, fixed rule": lambda: on(epk.reconstruct, "plain", rule=epk.QuadratureRule.left_riemann(4)),
    "reconstruct, chords": lambda: on(epk.reconstruct, "plain", path=epk.chords(every=2)),
    "single machine": lambda: on(single_machine, "plain"),
    **each("influence", lambda name: on(epk.influence, name), INFLUENCED),
    "influence, one class": lambda: on(epk.influence, "Adam", classes=torch.tensor([0, 1, 2, 0])),
    "influence, sums": lambda: on(epk.influence, "tanh", by=axes("tanh", by_label, by_step)).values,
    "influence, smoothed": lambda: on(epk.influence, "tanh", smoothing=epk.Smoothing(3, seed=1)),
    "influence, truncated": lambda: on(epk.influence, "momentum", truncate=2),
    "influence, function": lambda: on(epk.influence, "tanh", function=lambda z: (z.log_softmax(1) ** 2).sum()),
    **each("self-influence", lambda name: epk.influence(recorded(name), own=True).values[:, 0, 0], INFLUENCED),
    **each("retrain", retrained, ("tanh", "AdamW, dropout", "clipping")),
    "counterfactual": counterfactual,
    "process": posterior,
    "process, independent, Dirichlet": lambda: posterior("independent", "constant", "dirichlet"),
    "process, trace, labels, cosine": lambda: posterior("trace", "zero", "labels", normalize="cosine"),
    "process, network's mean, chords": lambda: posterior("full", "network", "labels", path=epk.chords(every=5)),
    "process, nodes": lambda: posterior("trace", "zero", "labels", nodes=5),
    "softmax": sampled,
    "map": mapped,
    "label process": lambda: judged(label_process()),
    "label process, features": lambda: judged(label_process(features=64, nodes=5)),
    "label process, saved": saved_and_loaded,
    "label errors": lambda: epk.label_errors(wider()[0]),
    "next to label": lambda: epk.next_to_label(label_process(), wider()[3], 4),
    "classifier": scikit_learn,
    "scores": scores,
    "spectrum": lambda: gram_spectrum(block("plain", 1, 1, compute=per_class)[0]),
    "command verify": lambda: written("verify"),
    "command attribute": lambda: written("attribute --num-points 2 --outputs all"),
    "command uncertainty": lambda: written("uncertainty"),
    "command uncertainty, map": lambda: written("uncertainty --map --grid 3"),
}


def flat(name: str, value: object) -> Iterator[tuple[str, Tensor]]:
    """Divide a result into named tensors; text becomes its bytes, and None is left out."""
    if isinstance(value, LinearOperator):
        value = value.to_dense()
    if isinstance(value, str):
        value = np.frombuffer(value.encode(), np.uint8).copy()
    if isinstance(value, Tensor | np.ndarray | np.generic | int | float):
        yield name, torch.as_tensor(value).detach().clone(memory_format=torch.contiguous_format)
    elif value is not None:
        parts = dict(enumerate(value)) if isinstance(value, list | tuple) else value
        if not isinstance(parts, Mapping):
            parts = {attribute: getattr(value, attribute, None) for attribute in ATTRIBUTES.split()}
        for key, part in parts.items():
            yield from flat(f"{name} | {key}", part)


def compute(words: str) -> dict[str, Tensor]:
    """Compute the results whose names hold some words; of one that fails the error is kept."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # some results are not certified, which is a part of them
    tensors: dict[str, Tensor] = {}
    for name in (name for name in RESULTS if words in name):
        torch.manual_seed(0)
        try:
            tensors |= flat(name, RESULTS[name]())
        except (Exception, SystemExit) as error:
            print(f"{name} failed: {error!r}", file=sys.stderr)
            tensors |= flat(f"{name} | error", repr(error))
    return tensors


def differences(before: Mapping[str, Tensor], now: Mapping[str, Tensor]) -> Iterator[str]:
    """Say which tensors are on one side only, or differ in a byte, and by how much."""
    for name in sorted({*before, *now}):
        if name not in now or name not in before:
            yield f"{name}: only {'before' if name in before else 'now'}"
            continue
        a, b = before[name], now[name]
        if a.shape != b.shape or a.dtype != b.dtype:
            yield f"{name}: {tuple(a.shape)} {a.dtype} before, {tuple(b.shape)} {b.dtype} now"
        elif a.numpy().tobytes() != b.numpy().tobytes():
            gap = (a.double() - b.double()).abs().max()
            yield f"{name}: differs by at most {gap:.2e}; the largest value is {a.double().abs().max():.2e}"


def run(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("save", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="of the results whose names hold these words")
    options = parser.parse_args(argv)
    now = compute(options.only)
    if options.what == "save":
        save_file(now, options.file)
        return
    before = {name: part for name, part in load_file(options.file).items() if options.only in name.partition(" | ")[0]}
    lines = list(differences(before, now))
    print("\n".join([*lines, f"{len(now)} tensors, {len(lines)} differences"]))
    sys.exit(bool(lines))


if __name__ == "__main__":
    run()
