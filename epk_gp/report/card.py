"""The run card: what was trained, on what, and how, as names with text."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from epk_gp.core.trajectory import Trajectory
from epk_gp.provenance import versions

Section = dict[str, Any]
_MAX_PARAMETERS = 60  # more are counted, not listed
_UNSAID = ("params", "foreach", "capturable", "differentiable", "fused", "maximize")  # options that are no arithmetic


def run_card(trajectory: Trajectory, report: Sequence[tuple[str, str]]) -> list[Section]:
    """Return the sections of the card.

    Args:
        trajectory: The run.
        report: Names and texts that say how the report itself was made.
    """
    return [
        _section("Network", _network(trajectory)),
        _section("Data", _data(trajectory)),
        _section("Training", _training(trajectory)),
        _section("Identity", _identity(trajectory)),
        _section("This report", report),
    ]


def _network(trajectory: Trajectory) -> list[tuple[str, str]]:
    model = trajectory.model
    rows = [("network", type(model.module).__name__), ("weights", f"{trajectory.num_weights:,}")]
    if model.statistics:
        rows.append(("moving statistics", f"{model.num_statistics:,} in {len(model.statistics)} tensors"))
    rows.append(("outputs", str(trajectory.num_outputs)))
    parameters = list(zip(model.names, model.shapes, model.sizes, strict=True))
    rows += [
        (name, f"{' × '.join(map(str, shape)) or 'one number'}, {size:,} weights")
        for name, shape, size in parameters[:_MAX_PARAMETERS]
    ]
    if rest := parameters[_MAX_PARAMETERS:]:
        rows.append((f"{len(rest)} more tensors", f"{sum(size for _, _, size in rest):,} weights"))
    frozen = [p.numel() for name, p in model.module.named_parameters() if name not in model.names]
    if frozen:
        rows.append(("frozen, not trained", f"{sum(frozen):,} weights in {len(frozen)} tensors"))
    return rows


def _data(trajectory: Trajectory) -> list[tuple[str, str]]:
    layout = trajectory.model.signature.layout
    rows = [("training samples", f"{trajectory.num_points:,}")]
    if layout is None:
        rows.append(("input", f"shape {_shape(trajectory.inputs)}, {_dtype(trajectory.inputs)}"))
    else:
        rows += [(f"input {t.key}", f"shape {t.shape}, {str(t.dtype).removeprefix('torch.')}") for t in layout.tensors]
    targets = trajectory.targets
    rows.append(("target", f"shape {_shape(targets)}, {_dtype(targets)}"))
    if targets.ndim == 1 and not targets.is_floating_point():
        classes, counts = targets.unique(return_counts=True)
        rows.append(("classes", f"{len(classes)}, with {int(counts.min())} to {int(counts.max())} samples each"))
    return rows


def _training(trajectory: Trajectory) -> list[tuple[str, str]]:
    run, M = trajectory.trained, trajectory.num_points
    sizes = [M if step.batch is None else len(step.batch) for step in run.steps]
    rows = [("loss", str(run.loss)), ("update rule", run.update_rule)]
    for number, group in enumerate(run.optimizer_groups):
        name = "optimizer" if len(run.optimizer_groups) == 1 else f"optimizer, group {number + 1}"
        options = ", ".join(
            f"{key}={value}"
            for key, value in group.options.items()
            if key not in _UNSAID and value is not None and value is not False
        )
        rows.append((name, f"{group.rule or 'update rule of one’s own'}: {options}"))
    rows += [("steps", f"{run.num_steps:,}"), ("samples per step", _range(sizes))]
    rows.append(("learning rate", _range([step.lr for step in run.steps])))
    passes = [forward for step in run.steps for forward in step.passes]
    if passes:
        drew = sum(forward.random_state is not None or forward.device_random_state is not None for forward in passes)
        seen = sum(forward.inputs is not None for forward in passes)
        words = f"{len(passes):,}; {drew:,} drew random numbers, {seen:,} saw other rows than the data's"
        rows.append(("recorded forward passes", words))
    if trajectory.average is not None:
        rows.append(("explained weights", "an average of the weights over the run"))
    if run.unexplained is not None:
        rows.append(("unexplained", f"up to {run.unexplained:g} of a step is accepted as unexplained"))
    return rows


def _identity(trajectory: Trajectory) -> list[tuple[str, str]]:
    rows = [("digest of the run", trajectory.digest), ("digest of the data", trajectory.data_digest)]
    rows.append(("type of the weights", str(trajectory.dtype).removeprefix("torch.")))
    return rows + [(name, number) for name, number in versions().items()]


def _section(title: str, rows: Sequence[tuple[str, str]]) -> Section:
    return {"title": title, "rows": [list(row) for row in rows]}


def _shape(values: Tensor) -> str:
    return " × ".join(map(str, values.shape[1:])) or "one number"


def _dtype(values: Tensor) -> str:
    return str(values.dtype).removeprefix("torch.")


def _range(values: Sequence[int] | Sequence[float]) -> str:
    low, high = min(values, default=math.nan), max(values, default=math.nan)
    if math.isnan(low):
        return "none"
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"
