"""The report of a run as one HTML file: explained predictions, their certificate, and the run as a whole."""

import base64
import hashlib
import json
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Unpack

from jaxtyping import Shaped
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from torch import Tensor

from epk_gp.analysis.labels import LabelErrors
from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.core.checks import validate_count
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head
from epk_gp.core.options import ComputeSettings, parse_options
from epk_gp.core.show import count
from epk_gp.core.trajectory import Trajectory, parse_inputs
from epk_gp.kernel_machine.certificate import warn_unless_certified
from epk_gp.kernel_machine.influence import Influence
from epk_gp.quadrature.rules import (
    ChordPath,
    LayerwisePath,
    Rule,
    StraightPath,
    WeightPath,
    adaptive,
    straight,
    validate_path,
    validate_rule,
)
from epk_gp.report.content import lessen, report_content
from epk_gp.report.explanations import divide, explain
from epk_gp.report.overview import overview, reason_without_kernel
from epk_gp.report.points import Decode, appearance, certainty
from epk_gp.report.request import (
    ExplainedOutputs,
    OtherInputs,
    Process,
    ReportRequest,
    influence_on,
    parse_request,
    validate_results,
)
from epk_gp.storage.files import atomic_write

MAX_BYTES = 6_000_000  # of the file

# The scripts in the order in which they are joined; all are parts of one function.
SCRIPTS = (
    "elements", "numbers", "sums", "state", "inputs", "bars", "terms", "point_list", "steps_chart", "outputs",
    "prediction", "figures", "plane_map", "overview", "run_card", "main",
)  # fmt: skip
STYLES = ("theme", "layout", "tables", "pictures", "print")

_VIEW_BYTES = 150  # no view is shorter: the names of its entries alone take more
_PATHS = {
    StraightPath: "straight steps",
    ChordPath: "straight lines, each over {steps}",
    LayerwisePath: "derivatives averaged operation by operation, each over {steps}",
}


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
    parsed, place = parse_options("write_report", ("accumulate",), **options), Path(file)
    if place.is_dir():
        raise IsADirectoryError(f"file must be the name of a file, as in report.html: {place} is a folder.")
    if not place.parent.is_dir():
        raise FileNotFoundError(f"file must lie in a folder that exists: {place.parent} does not.")
    validate_rule(rule)
    validate_path(path)
    validate_count(top, "top")
    validate_count(kernel_points, "kernel_points", minimum=0)
    request = parse_request(trajectory, X, y, head=head, outputs=outputs, explained=explained, class_names=class_names)
    outside = None if outside is None else parse_inputs(trajectory, outside, "outside")
    validate_results(request, posterior, outside, suspects, uncertainty_map)
    look, divisions = appearance(trajectory, names, decode), divide(trajectory, by_layers=by_layers)
    effects = influence_on(request, influence)
    require_room(request, 1 + len(divisions.layers) + len(divisions.ranges), MAX_BYTES)

    found = explain(request, divisions, effects, rule=rule, path=path, top=top, options=parsed)
    sure = certainty(request, posterior)
    of_all = overview(
        request,
        sure,
        posterior=posterior,
        outside=outside,
        suspects=suspects,
        uncertainty_map=uncertainty_map,
        kernel_points=kernel_points,
        options=parsed,
    )
    number = f"{len(request.points)} of {len(request.X)} points, {len(found.outputs)} outputs"
    how = [
        ("explained", number),
        ("outputs explained", _describe_outputs(outputs, request)),
        ("head", request.head),
        ("path of integration", _PATHS[type(path)].format(steps=count(path.every, "step"))),
        ("quadrature", rule.name),
        ("gradient evaluations", f"{found.certificate.evaluations:.1f} for each point and step, to choose nodes"),
        ("numbers", f"whole multiples of {found.quantum:g}; what they leave is a term of its own, rounding"),
        ("samples named", f"the {top} that raised and the {top} that lowered an output most"),
    ]
    missing, cut = reason_without_kernel(request, kernel_points), look.describe_cut()
    how += [] if missing is None else [("matrix of the path kernel", f"left out: {missing}")]
    how += [] if cut is None else [("shown of an input", cut)]
    content = report_content(
        request, title, divisions, found, sure, look, overview=of_all, influence=influence, suspects=suspects, how=how
    )
    atomic_write(place, document(content, top, MAX_BYTES).encode())
    warn_unless_certified("the report", found.certificate.findings)
    return place


def require_room(request: ReportRequest, views: int, most: int) -> None:
    """Raise if even the least detail will take more bytes, before anything is computed.

    Args:
        request: The explained outputs.
        views: Views of each of them: of all terms, of a layer, and of a range of steps.
        most: Bytes that the report may have.

    Raises:
        ValueError: It will take more, with views of the shortest numbers and no text.
    """
    classes = 0 if request.training_labels is None else request.trajectory.num_outputs
    least = len(request.rows) * views * (_VIEW_BYTES + 2 * classes)
    if least > most:
        raise ValueError(
            f"a report must have at most {most / 1e6:g} MB: {len(request.rows)} explained outputs take at least "
            f"{least / 1e6:.1f} MB. Explain fewer points (explained=) or outputs (outputs=)."
        )


def document(content: dict[str, Any], top: int, most: int) -> str:
    """Return the page with as much detail as fits.

    Views of one layer and one range of steps are left out first; then the samples that views of one layer or one range
    name are halved, until the file is small enough.

    Args:
        content: Everything that the report can hold.
        top: Number of samples that its views name of either sign.
        most: Bytes that the page may have.

    Raises:
        ValueError: Even the least detail is too much.
    """
    named, held = top, content
    while True:
        text = page(held).encode(errors="replace").decode()  # a name may hold what UTF-8 does not
        if len(text.encode()) <= most:
            return text
        if named == 0:
            break
        held = lessen(content, named, top)
        named //= 2
    raise ValueError(
        f"a report must have at most {most / 1e6:g} MB: got {len(text) / 1e6:.1f} MB with as little detail as "
        "possible. Explain fewer points or outputs, or name fewer samples (top)."
    )


def page(content: dict[str, Any]) -> str:
    """Return the document that shows the content of a report.

    The document holds its styles, one script and the content as JSON. Its content security policy allows this script by
    its hash and images that are part of the document, and nothing else, so that a browser loads nothing from anywhere.
    The same content gives the same bytes.

    Raises:
        ValueError: The content has a number that JSON does not have.
    """
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise ValueError(
            "numbers of the content must be finite, since JSON has no others: got NaN or infinity. Write None there."
        ) from error
    text = text.replace("</", "<\\/").replace("<!--", "\\u003c!--")  # no text ends the script element, or is a comment
    script = "(function () {\n'use strict';\n" + "".join(_asset(f"{name}.js") for name in SCRIPTS) + "}());\n"
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(_asset("report.html.jinja")).render(
        title=content["title"],
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup("".join(_asset(f"{name}.css") for name in STYLES)),  # files of this package, as the script is
        script=Markup(script),
        content=Markup(text),
    )


def _asset(name: str) -> str:
    """Return the text of a file of this package."""
    return (resources.files("epk_gp.report") / "assets" / name).read_text(encoding="utf-8")


def _describe_outputs(outputs: ExplainedOutputs, request: ReportRequest) -> str:
    if not request.is_classifier or outputs == "all":
        return "all"
    if outputs == "predicted":
        true = "" if request.y is None else ", and the true one where it differs"
        return f"the network's class of each point{true}"
    return f"the {outputs} most probable classes of each point"
