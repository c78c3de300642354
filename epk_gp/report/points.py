"""The content of a report about a point: its appearance, and the certainty of its prediction."""

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Any

import torch
from jaxtyping import Float, Shaped
from PIL import Image
from torch import Tensor

from epk_gp.core.graphs import Ragged, map_tensors
from epk_gp.core.losses import CrossEntropy, NegativeLogLikelihood
from epk_gp.core.trajectory import Trajectory
from epk_gp.gp.posterior import LogitPosterior, SoftmaxUncertainty
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.plots.style import as_images
from epk_gp.report.explanations import significant
from epk_gp.report.request import ReportRequest
from epk_gp.report.text import Text, Tokenizer

Decode = Callable[[Any], str]

_MAX_SIDE = 64  # pixels of a picture; larger images are scaled down
_GREYS, _COLOURS = 16, 64  # shades of a picture
_MAX_TEXT = 400  # characters of a text
_MAX_VALUES = 60  # numbers of an explained point
_MAX_VALUES_OF_SAMPLE = 16  # numbers of a training sample; a report shows thousands of samples

_BAND = (0.05, 0.95)  # quantiles of a class's probability
_NUM_SAMPLES = 1024
_STD = "of the predicted class's probability under the process"
_ENTROPY = "of the class probabilities, in nats: all uncertainty about the class"
_OWN = "of its class, by the softmax of its outputs, without the process"
_OF_CLASSIFIER = (
    ("error score", "error", "probability that the network's class is wrong"),
    ("out-of-distribution score", "out_of_distribution", "from 0 at a training sample to 1 far from all of them"),
    ("entropy", "entropy", _ENTROPY),
    ("mutual information", "mutual_information", "the part of the entropy that more training data would remove"),
    ("standard deviation", "std", _STD),
)


class Appearance:
    """The display of the points of a run.

    Args:
        run: The run. The smallest entry of its images is white, the largest one black.
        names: Names of the features of rows; None for x1, x2, ...
        decode: Turns one input into a text: a tensor, or the tuple or dictionary that the network takes.
        tokenizer: Turns token ids into words.

    Raises:
        TypeError: `decode` is not a function, or the tokenizer is invalid.
        ValueError: There is not one name per feature, or points are not rows of features, or not token ids.
    """

    def __init__(
        self,
        run: Trajectory,
        names: Sequence[str] | None = None,
        decode: Decode | None = None,
        tokenizer: Tokenizer | None = None,
    ) -> None:
        X = run.inputs
        if decode is not None and tokenizer is not None:
            raise ValueError("decode makes a text of an input, and tokenizer makes its words: pass one of them.")
        if decode is not None and not callable(decode):
            raise TypeError(f"decode must be a function that makes a text of one input: got {decode!r}.")
        if names is not None and (X.ndim != 2 or run.model.signature.layout is not None):
            raise ValueError(f"names are those of the features of rows: the run's inputs have shape {tuple(X.shape)}.")
        if names is not None and len(names) != X.shape[1]:
            raise ValueError(f"names must name each of the {X.shape[1]} features: got {len(names)} names.")
        images = as_images(X) if X.is_floating_point() else None
        self.run, self.decode, self.names = run, decode, None if names is None else list(map(str, names))
        self.text = None if tokenizer is None else Text(run, tokenizer)
        self.low, self.high = (0.0, 1.0) if images is None else (float(images.min()), float(images.max()))

    def show(
        self, row: Shaped[Tensor, "..."], targets: Shaped[Tensor, "..."] | None = None, *, is_sample: bool = False
    ) -> dict[str, Any]:
        """Return one packed input in the report's form; a training sample shows fewer numbers than other points.

        Args:
            row: The input.
            targets: Its targets, which are also words if they are token ids.
            is_sample: Whether it is a training sample.
        """
        if self.text is not None:
            return {"words": self.text.passage(row, targets).words}
        inputs = self.run.unpack(row[None].detach().cpu())
        one = inputs.rows[0] if isinstance(inputs, Ragged) else map_tensors(inputs, lambda value: value[0])
        if self.decode is not None:
            return {"text": _cut(str(self.decode(one)))}
        if not isinstance(one, Tensor):
            named = one.items() if isinstance(one, Mapping) else enumerate(one)
            return {"text": _cut("; ".join(f"{name}: {_numbers(value)}" for name, value in named))}
        if not one.is_floating_point():
            return {"text": _cut(f"node {int(one)}" if one.ndim == 0 else _numbers(one))}
        images = as_images(one[None])
        if images is not None:
            return {"image": _picture(images[0], self.low, self.high)}
        entries = [significant(value, 4) for value in one.double().flatten().tolist()]
        if one.ndim == 1 and len(entries) == 2 and self.names is None:
            return {"position": entries}
        names = self.names or [f"x{k + 1}" for k in range(len(entries))]
        most = _MAX_VALUES_OF_SAMPLE if is_sample else _MAX_VALUES
        return {"values": [[name, value] for name, value in zip(names[:most], entries[:most], strict=True)]}

    def describe_cut(self) -> str | None:
        """Describe the numbers of a point that a report leaves out; None if it shows all."""
        row, most = self.run.inputs[0], _MAX_VALUES_OF_SAMPLE
        if row.numel() <= most or "values" not in self.show(row):
            return None
        explained = f"the first {min(row.numel(), _MAX_VALUES)} of {row.numel()} numbers of an explained point"
        return f"{explained}, and the first {most} of a training sample"


def _numbers(values: Tensor) -> str:
    flat = values.flatten()[:_MAX_TEXT].tolist()
    return " ".join(f"{value:.4g}" if values.is_floating_point() else str(int(value)) for value in flat)


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else text[: _MAX_TEXT - 1] + "…"


def _picture(image: Float[Tensor, "H W *rgb"], low: float, high: float) -> str:
    """Return an image as a data URL of a small PNG: grey ones dark on white, as in figures."""
    shares = ((image.double() - low) / ((high - low) or 1.0)).clamp(0, 1)
    is_grey = image.ndim == 2
    pixels = (255 * (1 - shares if is_grey else shares)).round().to(torch.uint8).numpy()
    picture = Image.fromarray(pixels)
    if max(picture.size) > _MAX_SIDE:
        picture.thumbnail((_MAX_SIDE, _MAX_SIDE), Image.Resampling.BOX)
    picture = picture.quantize(_GREYS if is_grey else _COLOURS, dither=Image.Dither.NONE)
    buffer = BytesIO()
    picture.save(buffer, format="PNG", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode('ascii')}"


@dataclass(frozen=True, eq=False)
class Certainty:
    """The certainty of the predictions at n points.

    Attributes:
        source: Source of the probabilities: "network", "process" or "network and process"; empty without any.
        probabilities: (n, C); None if outputs do not represent probabilities.
        scores: Name, values and meaning of each score.
        band: Quantiles of the probabilities of the m explained points under a process; None without one.
    """

    source: str = ""
    probabilities: Float[Tensor, "n C"] | None = None
    scores: tuple[tuple[str, Float[Tensor, " n"], str], ...] = ()
    band: Float[Tensor, "2 m C"] | None = None


def certainty(request: ReportRequest) -> Certainty:
    """Return the certainty of the predictions at all points of a report, by a process or by the network alone."""
    process, X, p = request.posterior, request.X, request.network.double().softmax(dim=1)
    if process is None:
        if not request.is_classifier or not isinstance(request.trajectory.loss, CrossEntropy | NegativeLogLikelihood):
            return Certainty()
        entropy = ("entropy", torch.special.entr(p).sum(dim=1), "of the network's own class probabilities, in nats")
        return Certainty("network", p, (entropy,))
    own = ("network's own probability", p.amax(dim=1), _OWN)
    if isinstance(process, UncertainClassifier):
        u = process.uncertainty(X, _NUM_SAMPLES)
        scores = [(name, torch.as_tensor(getattr(u, field)).cpu(), text) for name, field, text in _OF_CLASSIFIER]
        probabilities = torch.as_tensor(process.predict_proba(X)).cpu()
        band = _sampled(process.logit_posterior(request.explained)).quantiles.cpu() if request.is_classifier else None
        return Certainty("network and process", probabilities, (*scores, own), band)
    posterior = process if isinstance(process, LogitPosterior) else process.logit_posterior(X)
    if not request.is_classifier:
        stds = posterior.covariance.diagonal(dim1=1, dim2=2).clamp(min=0).sqrt().cpu().T
        named = zip(request.class_names, stds, strict=True)
        of_outputs = tuple((f"standard deviation of {name}", std, "of the process") for name, std in named)
        return Certainty("process", None, of_outputs)
    sampled = _sampled(posterior)
    std = sampled.std.gather(1, sampled.mean.argmax(dim=1, keepdim=True))[:, 0]
    caused = "the part that the process's uncertainty causes"
    of_process = (
        ("entropy", sampled.entropy.cpu(), _ENTROPY),
        ("mutual information", sampled.mutual_information.cpu(), caused),
        ("standard deviation", std.cpu(), _STD),
    )
    return Certainty("process", sampled.mean.cpu(), (*of_process, own), sampled.quantiles[:, request.points].cpu())


def _sampled(posterior: LogitPosterior) -> SoftmaxUncertainty:
    generator = torch.Generator(posterior.mean.device).manual_seed(0)
    return posterior.softmax_uncertainty(_NUM_SAMPLES, generator, quantiles=_BAND)
