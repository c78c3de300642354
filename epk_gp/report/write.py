"""The report of a run as one HTML file: explained predictions, their certificate, and the run as a whole."""

import base64
import copy
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib import resources
from itertools import pairwise
from pathlib import Path
from typing import Any, Unpack

from jaxtyping import Shaped
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from torch import Tensor

from epk_gp.analysis.labels import LabelErrors
from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.autodiff.scalars import Function
from epk_gp.core.checks import ComputeSettings, parse_options, validate_count
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head
from epk_gp.core.trajectory import Trajectory, parse_inputs
from epk_gp.datamodels.model import Datamodel
from epk_gp.kernel_machine.axes import Axis
from epk_gp.kernel_machine.certificate import warn_unless_certified
from epk_gp.kernel_machine.influence import Influence
from epk_gp.provenance import versions
from epk_gp.quadrature import rules
from epk_gp.report.explanations import Explained, divide, explain, is_margin, shorten, significant, to_units
from epk_gp.report.overview import expected_classes, overview, reason_without_kernel
from epk_gp.report.points import Appearance, Certainty, Decode, certainty
from epk_gp.report.request import ExplainedOutputs, OtherInputs, Process, ReportRequest, parse_request, validate_results
from epk_gp.report.text import Tokenizer, WordsAsked, split_texts, words_asked
from epk_gp.storage.files import atomic_write

MAX_BYTES = 6_000_000  # size of the file
VERSION = 1  # version of the content that the page's scripts read

# The scripts in the order in which they are joined; all are parts of one function.
SCRIPTS = (
    "elements", "numbers", "sums", "state", "bars", "words", "inputs", "terms", "point_list", "steps_chart", "outputs",
    "prediction", "figures", "plane_map", "overview", "run_card", "main",
)  # fmt: skip
STYLES = ("theme", "layout", "tables", "pictures", "words", "print")

_VIEW_BYTES = 150  # every view is longer: the names of its entries alone take more
_MAX_PARAMETERS = 60  # more parameters are counted, not listed
_UNSAID = ("params", "foreach", "capturable", "differentiable", "fused", "maximize")  # options without effect

Rows = list[tuple[str, str]]


def write_report(
    file: str | os.PathLike[str],
    trajectory: Trajectory,
    X: Inputs,
    y: Shaped[Tensor, "n ..."] | None = None,
    *,
    title: str | None = None,
    head: Head | None = None,
    rule: rules.Rule = rules.adaptive(tol=1e-12),
    path: rules.WeightPath | None = None,
    outputs: ExplainedOutputs = "predicted",
    explained: int | Sequence[int] | None = None,
    class_names: Sequence[str] | None = None,
    names: Sequence[str] | None = None,
    decode: Decode | None = None,
    tokenizer: Tokenizer | None = None,
    function: Function | None = None,
    top: int = 10,
    influence: Influence | None = None,
    datamodel: Datamodel | None = None,
    posterior: Process | None = None,
    outside: OtherInputs | None = None,
    suspects: LabelErrors | None = None,
    uncertainty_map: UncertaintyMap | None = None,
    kernel_points: int = 100,
    **options: Unpack[ComputeSettings],
) -> Path:
    """Write a trained network's predictions, their contributions and their certainty as one HTML file.

    The file opens in a browser from the disk and loads nothing else. Contributions are those of `epk_gp.attribute`,
    split by training samples, layers and ranges of steps; a view names the samples with the largest contributions and
    has the sum of the rest, so that the visible numbers add up. They are rounded to multiples of a quantum, and
    rounding is a term.

    Args:
        file: The HTML file; an existing file is replaced.
        trajectory: Training run with S steps on M samples.
        X: n inputs, with the structure of the training inputs.
        y: Their classes, int64 (n,); or the targets of a regression, (n,) or (n, C).
        title: Title of the page; the run's digest by default.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, otherwise "logits".
        rule: Quadrature rule for the integral of each step.
        path: The path along which the explained points are integrated, as in `epk_gp.attribute`; `layerwise()` is the
            fastest, and None takes it for large networks. The matrix of the path kernel and the map use straight steps.
        outputs: The classes of a point to explain: "predicted" (and the true one if it differs), "all", or the number
            of its most probable classes. Outputs that are not classes are all explained.
        explained: Number of points to explain, the first ones, or their indices; None for 6, or all for a function.
            Each output costs as much as one or two trainings; the overview covers all n points.
        class_names: Names of the C outputs.
        names: Names of the features, if inputs are rows of numbers.
        decode: Turns one input, such as its token ids, into a text.
        tokenizer: Turns inputs that are token ids into words: an object with `decode(ids) -> str`, as in `transformers`
            and `tokenizers`, or this function; or a function that returns one string per id; or strings by id.
        function: The function to explain instead of the outputs, as in `epk_gp.attribute`; for `log_probability`, the
            change by training is shown word by word. It replaces y, head and outputs.
        top: Number of samples named in a view for each sign.
        influence: `epk_gp.influence` on the outputs of the explained points, shown next to contributions.
        datamodel: `epk_gp.datamodel` of the explained points, for the samples whose absence would change them most.
        posterior: An `UncertainClassifier` or a `LogitGP` of the run, or the `LogitPosterior` of X: for probabilities
            with a band, and scores.
        outside: Inputs unlike the training data, to show how well an `UncertainClassifier` detects them.
        suspects: Suspicious labels, from `epk_gp.label_errors`.
        uncertainty_map: Uncertainty over a plane, from `epk_gp.analysis.maps.uncertainty_on_plane`.
        kernel_points: Number of training samples in the matrix of the path kernel; 0 leaves it out.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`; see `ComputeOptions`. Points are explained
            together if their contributions fit into the memory budget.

    Returns:
        The path of the file.

    Raises:
        TypeError, ValueError: The network cannot take the inputs; an argument has a wrong type, or a result in an
            argument does not belong to this run and these points; or the file would be larger than 6 MB with the least
            detail.
        OSError: The file cannot be written.
    """
    parsed, place = parse_options("write_report", ("accumulate",), **options), Path(file)
    if place.is_dir():
        raise IsADirectoryError(f"file must be the name of a file, as in report.html: {place} is a folder.")
    if not place.parent.is_dir():
        raise FileNotFoundError(f"file must lie in a folder that exists: {place.parent} does not.")
    rules.validate_rule(rule)
    rules.validate_path(rules.straight() if path is None else path)
    validate_count(top, "top")
    validate_count(kernel_points, "kernel_points", minimum=0)
    request = replace(
        parse_request(trajectory, X, y, head=head, outputs=outputs, explained=explained, class_names=class_names,
                      function=function),
        influence=influence, datamodel=datamodel, posterior=posterior, suspects=suspects,
        uncertainty_map=uncertainty_map,
        outside=None if outside is None else parse_inputs(trajectory, outside, "outside"),
        kernel_points=kernel_points, options=parsed,
    )  # fmt: skip
    validate_results(request)
    look, axes = Appearance(trajectory, names, decode, tokenizer), divide(trajectory)
    require_room(request, axes, MAX_BYTES)

    found = explain(request, axes, rule, path, top)
    of_words, unsplit = ((), "") if look.text is None else split_texts(request, found, look.text, rule, path)
    found = found._replace(findings=[*found.findings, *of_words])
    missing, cut = reason_without_kernel(request), look.describe_cut()
    how = [
        ("network explained", trajectory.explained),
        ("explained", f"{len(request.points)} of {len(request.X)} points, {len(found.outputs)} outputs"),
        ("outputs explained", _describe_outputs(outputs, request)),
        ("head", request.head) if function is None else ("function", request.name),
        ("path of integration", found.certificate.path),
        ("quadrature", rule.name),
        ("gradient evaluations", f"{found.certificate.evaluations:.1f} for each point and step, to choose nodes"),
        ("numbers", f"whole multiples of {found.quantum:g}; what they leave is a term of its own, rounding"),
        ("samples named", f"the {top} that raised and the {top} that lowered an output most"),
        *([] if missing is None else [("matrix of the path kernel", f"left out: {missing}")]),
        *([("shares of words", f"left out: {unsplit}")] if unsplit else []),
        *([] if cut is None else [("shown of an input", cut)]),
    ]
    content = _content(request, axes, found, look, how) | ({"title": title} if title else {})
    atomic_write(place, document(content, top, MAX_BYTES).encode())
    warn_unless_certified("the report", found.findings)
    return place


def _describe_outputs(outputs: ExplainedOutputs, request: ReportRequest) -> str:
    if not request.is_classifier or outputs == "all":
        return "all"
    if outputs == "predicted":
        true = "" if request.y is None else ", and the true one where it differs"
        return f"the network's class of each point{true}"
    return f"the {outputs} most probable classes of each point"


def require_room(request: ReportRequest, axes: tuple[Axis, Axis, Axis], most: int) -> None:
    """Raise if even the least detail, views of the shortest numbers, takes more than this many bytes.

    Raises:
        ValueError: It takes more.
    """
    classes = 0 if request.training_labels is None else request.trajectory.num_outputs
    views = 1 + len(axes[1].names) + len(axes[2].names)
    least = len(request.rows) * views * (_VIEW_BYTES + 2 * classes)
    if least > most:
        raise ValueError(
            f"a report must have at most {most / 1e6:g} MB: {len(request.rows)} explained outputs take at least "
            f"{least / 1e6:.1f} MB. Explain fewer points (explained=) or outputs (outputs=)."
        )


def _content(
    request: ReportRequest, axes: tuple[Axis, Axis, Axis], found: Explained, look: Appearance, how: Rows
) -> dict[str, Any]:
    """Return all content of a report; `how` describes how it was made."""
    sure, run, (_, layers, steps) = certainty(request), request.trajectory, axes
    asked = None if look.text is None else words_asked(request, look.text)
    outputs: dict[str, Any] = {"head": request.head, "name": request.name, "classes": list(request.class_names)}
    outputs |= {"are_classes": request.is_classifier, "are_asked": request.function is not None}
    content: dict[str, Any] = {
        "version": VERSION,
        "title": f"Report of run {run.digest[:12]}",
        "quantum": found.quantum,
        "outputs": outputs | {"probabilities_of": sure.source},
        "layers": list(layers.names),
        "ranges": list(pairwise([0, *steps.group.bincount().cumsum(dim=0).tolist()])),
        "card": _run_card(run, how),
        "certificate": _describe_certificate(request, found),
        "samples": {"count": run.num_points},
        "points": [_point(request, number, found, sure, look, asked) for number in range(len(request.points))],
        "overview": overview(request, sure),
    }
    expected, named = expected_classes(request.suspects), sorted(_named(content))
    content["samples"]["shown"] = {str(index): _sample(request, look, index, expected) for index in named}
    return content


def _describe_certificate(request: ReportRequest, found: Explained) -> dict[str, Any]:
    """Return the content about the certificate of all explained outputs, and about the influence next to them."""
    (outputs, quantum, certificate, findings), influence = found, request.influence
    explained = "the explained output" if len(outputs) == 1 else f"each of the {len(outputs)} explained outputs"
    if findings:
        sentences = [
            f"NOT CERTIFIED. Do not rely on the terms of {explained}: they are not shown to be what training added.",
            *(f"{finding[0].upper()}{finding[1:]}." for finding in findings),
            "Check the run with epk-gp verify, or explain it with the adaptive rule.",
        ]
    else:
        sentences = [
            f"Certified: the terms of {explained}, added to its value before training, give the trained network's "
            f"output up to {certificate.max_error:.1e}. Rounding and quadrature allow "
            f"{certificate.error_tolerance:.1e}.",
            "Every recorded step was computed again from the training data: the largest difference of a weight is "
            f"{certificate.max_step_mismatch:.1e}, {certificate.mismatch_ratio:.2g} times what rounding explains"
            + (f" (in step {certificate.worst_step})." if certificate.worst_step >= 0 else "."),
        ]
    sentences.append(
        "The certificate concerns the sums. A contribution says what a sample added during this training; it does not "
        "say what training without the sample would give."
    )
    if influence is not None:
        words = "certified" if influence.certified else f"NOT CERTIFIED: {'; '.join(influence.findings)}"
        sentences.append(f"The influence beside the contributions is {words}.")
    rows = (
        ("sum of all terms against the network's output", certificate.max_error, certificate.error_tolerance),
        ("recorded steps against steps from the training data, relative to rounding", certificate.mismatch_ratio, 1),
        ("quadrature of a step, relative to tolerance and rounding", certificate.residual_ratio, 1),
    )
    texts = [[name, f"{value:.2g}", f"{limit:.2g}"] for name, value, limit in rows]
    views = ((key, view) for content in outputs.values() for key, view in content["views"].items())
    rounding = quantum * max(abs(view["rounding"]) for key, view in views if is_margin(key))
    texts.append(["largest term of rounding that is shown", f"{rounding:.2g}", "shown as a term of its own"])
    return {"certified": not findings, "sentences": sentences, "rows": texts}


def _point(
    request: ReportRequest, number: int, found: Explained, sure: Certainty, look: Appearance, asked: WordsAsked | None
) -> dict[str, Any]:
    n = int(request.points[number])
    explanations = {str(c): content for (row, c), content in found.outputs.items() if row == number}
    answers = None if asked is None else asked.words[number]
    if look.text is not None and asked is not None:
        changes = to_units(asked.changes[number], found.quantum).tolist()
        for explanation in explanations.values():
            whole = explanation["network"] - explanation["initial"]
            explanation["words"] = look.text.passage(request.X[n], answers).part(changes, whole)
    values = None
    if not request.is_classifier and request.function is None:  # predictions, targets and differences
        f, y = request.network[n].double(), request.y
        columns = (f,) if y is None else (f, y[n].double(), f - y[n].double())
        values = [[significant(float(value)) for value in row] for row in zip(*columns, strict=True)]
    return {
        "name": f"{'point' if look.text is None else 'text'} {n}",
        "label": None if request.true_classes is None else int(request.true_classes[n]),
        "predicted": int(request.network[n].argmax()) if request.is_classifier else 0,
        "values": values,
        "input": look.show(request.X[n], answers),
        "probabilities": None if sure.probabilities is None else list(map(significant, sure.probabilities[n].tolist())),
        "band": None if sure.band is None else [list(map(significant, b)) for b in sure.band[:, number].T.tolist()],
        "scores": [[name, significant(float(scores[n])), text] for name, scores, text in sure.scores],
        "explanations": explanations,
    }


def _sample(request: ReportRequest, look: Appearance, index: int, expected: dict[int, int]) -> dict[str, Any]:
    run, labels, C = request.trajectory, request.training_labels, request.trajectory.num_outputs
    label = None if labels is None else int(labels[index])
    is_output = not request.is_classifier and request.function is None and look.text is None
    has_targets = is_output and run.targets.numel() == run.num_points * C
    suspected = expected.get(index, label)
    return look.show(run.inputs[index], run.targets[index], is_sample=True) | {
        "label": label if label is not None and 0 <= label < C else None,  # ignored labels such as -100 are left out
        "target": [significant(v, 4) for v in run.targets[index].double().flatten().tolist()] if has_targets else None,
        "suspected": None if suspected == label else suspected,
    }


def lessen(content: dict[str, Any], top: int, most: int) -> dict[str, Any]:
    """Return a content without the views of one layer and one range, with a note about it in its card.

    Args:
        content: All content of a report.
        top: Number of samples named for each sign, in all views except those of all layers and steps.
        most: The present number of named samples.
    """
    left = "the views of one layer and one range of steps are left out"
    if top < most:
        left += f", and the views of one layer or one range name {top} samples of either sign, or split so many texts"
    less = copy.deepcopy(content)
    less["card"][-1]["rows"].append(["left out to keep the file small", f"{left}; the sums of the rest still add up"])
    for explanation in _explanations(less):
        whole, margins = explanation["views"]["*|*"], filter(is_margin, explanation["views"])
        explanation["views"] = {key: shorten(explanation["views"][key], top) for key in margins} | {"*|*": whole}
        if "tokens" in explanation:
            largest = [str(row[0]) for side in ("raised", "lowered") for row in whole[side][:top]]
            explanation["tokens"] = {index: explanation["tokens"][index] for index in largest}
    named, shown = _named(less), less["samples"]["shown"]
    less["samples"]["shown"] = {index: sample for index, sample in shown.items() if int(index) in named}
    return less


def _explanations(content: dict[str, Any]) -> Iterator[dict[str, Any]]:
    return (explanation for point in content["points"] for explanation in point["explanations"].values())


def _named(content: dict[str, Any]) -> set[int]:
    """Return every training sample that a view or the overview names."""
    views = (view for explanation in _explanations(content) for view in explanation["views"].values())
    named = {entry[0] for view in views for side in ("raised", "lowered") for entry in view[side]}
    plane, parts = content["overview"]["map"], (content["overview"][name] for name in ("suspects", "datamodel"))
    named |= {row[0] for part in parts if part for row in part["rows"]}
    return named | {index for cell in plane["behind"] for index in cell} if plane else named


def _run_card(run: Trajectory, how: Rows) -> list[dict[str, Any]]:
    """Return the run card: network, data and training, and the making of the report, as names with text."""
    entries = [entry for entry in run._summary().entries if entry.name != "states"]  # "states" may name a folder
    sections = {
        "Run": [(entry.name, entry.value + (f" ({entry.note})" if entry.note else "")) for entry in entries],
        "Network": _network(run),
        "Training": _training(run),
        "Identity": [("digest of the data", run.data_digest), *versions().items()],
        "This report": how,
    }
    return [{"title": title, "rows": [list(row) for row in rows]} for title, rows in sections.items()]


def _network(run: Trajectory) -> Rows:
    model = run.model
    parameters = list(zip(model.names, model.shapes, model.sizes, strict=True))
    rows = [
        (name, f"{' × '.join(map(str, shape)) or 'one number'}, {size:,} weights")
        for name, shape, size in parameters[:_MAX_PARAMETERS]
    ]
    if rest := [size for _, _, size in parameters[_MAX_PARAMETERS:]]:
        rows.append((f"{len(rest)} more tensors", f"{sum(rest):,} weights"))
    return rows


def _training(run: Trajectory) -> Rows:
    rows: Rows = []
    targets, groups = run.targets, run.trained.optimizer_groups
    if targets.ndim == 1 and not targets.is_floating_point():
        classes, counts = targets.unique(return_counts=True)
        rows.append(("classes", f"{len(classes)}, with {int(counts.min())} to {int(counts.max())} samples each"))
    for number, group in enumerate(groups, start=1):
        said = {key: v for key, v in group.options.items() if key not in _UNSAID and v is not None and v is not False}
        options = ", ".join(f"{key}={value}" for key, value in said.items())
        name = "optimizer" if len(groups) == 1 else f"optimizer, group {number}"
        rows.append((name, f"{group.rule or 'update rule of one’s own'}: {options}"))
    return rows


def document(content: dict[str, Any], top: int, most: int) -> str:
    """Return the page with as much detail as fits.

    Views of one layer and one range of steps are left out first; then the number of named samples in views of one layer
    or one range is halved, until the file is small enough.

    Args:
        content: All content of the report.
        top: Number of samples named in its views for each sign.
        most: Largest number of bytes of the page.

    Raises:
        ValueError: Even the least detail is too large.
    """
    named, held = top, content
    while True:
        text = page(held).encode(errors="replace").decode()  # a name may contain characters that UTF-8 lacks
        if len(text.encode()) <= most:
            return text
        if named == 0:
            raise ValueError(
                f"a report must have at most {most / 1e6:g} MB: got {len(text) / 1e6:.1f} MB with as little detail as "
                "possible. Explain fewer points or outputs, or name fewer samples (top)."
            )
        held = lessen(content, named, top)
        named //= 2


def page(content: dict[str, Any]) -> str:
    """Return the document that shows the content of a report.

    The document contains its styles, one script and the content as JSON. Its content security policy allows only this
    script, by its hash, and images inside the document, so that a browser loads nothing from elsewhere. The same
    content gives the same bytes.

    Raises:
        ValueError: The content has a number that JSON cannot represent.
    """
    try:
        text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except ValueError as error:
        raise ValueError("numbers of the content must be finite, as JSON has no others. Write None there.") from error
    text = text.replace("</", "<\\/").replace("<!--", "\\u003c!--")  # no text ends the script, or is a comment
    script = "(function () {\n'use strict';\n" + "".join(_asset(f"{name}.js") for name in SCRIPTS) + "}());\n"
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return template.from_string(_asset("report.html.jinja")).render(
        title=content["title"],
        digest=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        style=Markup("".join(_asset(f"{name}.css") for name in STYLES)),  # files of this package, like the script
        script=Markup(script),
        content=Markup(text),
    )


def _asset(name: str) -> str:
    """Return the text of a file of this package."""
    return (resources.files("epk_gp.report") / "assets" / name).read_text(encoding="utf-8")
