"""The report of a run as one HTML file: explained predictions, their certificate, and the run as a whole."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Unpack

from jaxtyping import Shaped
from torch import Tensor

from epk_gp.analysis.label_errors import LabelErrors
from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head
from epk_gp.core.options import ComputeSettings, parse_options
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernel_machine.certification import warn_if_uncertified
from epk_gp.kernel_machine.influence import Influence
from epk_gp.quadrature.paths import WeightPath, straight
from epk_gp.quadrature.rules import Rule, adaptive
from epk_gp.report.certificate import Certificate
from epk_gp.report.content import ReportContent
from epk_gp.report.divisions import divide
from epk_gp.report.inputs import Decode
from epk_gp.report.page import page
from epk_gp.report.request import ExplainedOutputs, OtherInputs, Process, ReportRequest, ReportSettings, parse_request
from epk_gp.storage.atomic_files import atomic_write

MAX_BYTES = 6_000_000  # of the file
_VIEW_BYTES = 150  # no view is shorter: the names of its entries alone take more


def write_report(
    file: str | os.PathLike[str],
    trajectory: Trajectory,
    X: Inputs,
    y: Shaped[Tensor, "n ..."] | None = None,
    *,
    title: str | None = None,
    head: Head | None = None,
    rule: Rule = adaptive(tol=1e-12),
    path: WeightPath = straight(),
    outputs: ExplainedOutputs = "predicted",
    explained: int | Sequence[int] = 6,
    class_names: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    decode: Decode | None = None,
    top: int = 10,
    by_layers: bool = True,
    influence: Influence | None = None,
    posterior: Process | None = None,
    outside: OtherInputs | None = None,
    suspects: LabelErrors | None = None,
    uncertainty_map: UncertaintyMap | None = None,
    kernel_points: int = 100,
    **options: Unpack[ComputeSettings],
) -> Path:
    """Write what a trained network's predictions are made of, and how sure they are, as one HTML file.

    The file opens in a browser from the disk and asks for nothing else. Contributions are those of `epk_gp.attribute`,
    split by training samples, layers and ranges of steps; a view names the samples with the largest ones and has the
    sum of the rest, so that what is seen adds up. They are rounded to multiples of a quantum, and rounding is a term.

    Args:
        file: The HTML file that is written; one that exists is replaced.
        trajectory: Training run with S steps on M samples.
        X: n inputs, of the structure of the training inputs.
        y: Their classes, int64 (n,); or the targets of a regression, (n,) or (n, C).
        title: Title of the page; the run's digest by default.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        rule: How each step's integral is taken.
        path: Along which the explained points are integrated, as of `epk_gp.attribute`; `layerwise()` is the fastest.
            The matrix of the path kernel and the map are along straight steps.
        outputs: Which classes of a point are explained: "predicted" (and the true one where it is another), "all", or
            the number of its most probable ones. Outputs that are no classes are all explained.
        explained: How many points are explained, the first ones, or their indices. Each output costs as much as one or
            two trainings; the overview is of all n points.
        class_names: Names of the C outputs.
        names: Names of the features, where inputs are rows of numbers.
        decode: Makes a text of one input, as of its token numbers.
        top: How many samples a view names of either sign.
        by_layers: Whether layers are told apart.
        influence: `epk_gp.influence` on the outputs of X, or of the explained points, to stand beside contributions.
        posterior: An `UncertainClassifier` or a `LogitGP` of the run, or the `LogitPosterior` of X: for probabilities
            with a band, and scores.
        outside: Inputs unlike the training data, to show how well an `UncertainClassifier` tells them.
        suspects: Suspicious labels, from `epk_gp.label_errors`.
        uncertainty_map: Uncertainty over a plane, from `epk_gp.analysis.maps.uncertainty_on_plane`.
        kernel_points: How many training samples the matrix of the path kernel shows; 0 leaves it out.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`; see `ComputeOptions`. Points are explained
            together as far as their contributions fit into the memory budget.

    Returns:
        The file.

    Raises:
        TypeError, ValueError: The network cannot take the inputs; an argument is of the wrong kind, or a result that is
            passed in is not one of this run and these points; or the file would be larger than 6 MB, whatever is left
            out.
        OSError: The file cannot be written.
    """
    parsed = parse_options("write_report", ("accumulate",), **options)
    settings = ReportSettings(
        title=title,
        head=head,
        rule=rule,
        path=path,
        outputs=outputs,
        explained=explained,
        class_names=class_names,
        names=names,
        decode=decode,
        top=top,
        by_layers=by_layers,
        influence=influence,
        posterior=posterior,
        outside=outside,
        suspects=suspects,
        uncertainty_map=uncertainty_map,
        kernel_points=kernel_points,
        options=parsed,
    )
    written = Path(file)
    warn_if_uncertified("the report", write_as_asked(written, trajectory, X, y, settings))
    return written


def write_as_asked(
    file: Path, trajectory: Trajectory, X: Inputs, y: Shaped[Tensor, "n ..."] | None, settings: ReportSettings
) -> Certificate:
    """Write a report and return its certificate, which is not looked at here; arguments as `write_report`.

    Raises:
        TypeError, ValueError, OSError: As `write_report`.
    """
    _require_place(file)
    request = parse_request(trajectory, X, y, settings)
    require_room(request, MAX_BYTES)
    content = ReportContent(request)
    atomic_write(file, document(content, MAX_BYTES).encode())
    return content.found.certificate


def document(content: ReportContent, most: int) -> str:
    """Return the page with as much detail as fits.

    Views of one layer and one range of steps are left out first; then the samples that views of one layer or one range
    name are halved, until the file is small enough.

    Args:
        content: Everything that the report can hold.
        most: Bytes that it may have.

    Raises:
        ValueError: Even the least detail is too much.
    """
    for detail in content.details():
        text = page(content.at(detail)).encode(errors="replace").decode()  # a name may hold what UTF-8 does not
        if len(text.encode()) <= most:
            return text
    raise ValueError(
        f"a report must have at most {most / 1e6:g} MB: got {len(text) / 1e6:.1f} MB with as little detail as "
        "possible. Explain fewer points or outputs, or name fewer samples (top)."
    )


def require_room(request: ReportRequest, most: int) -> None:
    """Raise if even the least detail will take more bytes, before anything is computed.

    Raises:
        ValueError: It will, with views of the shortest numbers and no text.
    """
    parts = divide(request.trajectory, by_layers=request.settings.by_layers)
    classes = 0 if request.training_labels is None else request.trajectory.num_outputs
    views = 1 + len(parts.layers) + len(parts.ranges)  # of each output: of all terms, of a layer, of a range of steps
    least = len(request.rows) * views * (_VIEW_BYTES + 2 * classes)
    if least > most:
        raise ValueError(
            f"a report must have at most {most / 1e6:g} MB: {len(request.rows)} explained outputs take at least "
            f"{least / 1e6:.1f} MB. Explain fewer points (explained=) or outputs (outputs=)."
        )


def _require_place(file: Path) -> None:
    """Raise if a file cannot be written there, before anything is computed."""
    if file.is_dir():
        raise IsADirectoryError(f"file must be the name of a file, as in report.html: {file} is a folder.")
    if not file.parent.is_dir():
        raise FileNotFoundError(f"file must lie in a folder that exists: {file.parent} does not.")
