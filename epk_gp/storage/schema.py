"""The content of a run's files: its header, its training data, and the dtypes and shapes of its chunks."""

import math
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from torch import Tensor

from epk_gp.core.checks import is_finite
from epk_gp.core.losses import Loss, UnstatedLoss
from epk_gp.core.model import FunctionalModel
from epk_gp.core.update_law import scaled_fields
from epk_gp.optimizers.torch_rules import OptimizerGroup, fits_scale
from epk_gp.optimizers.update_rules import Clip
from epk_gp.storage import files
from epk_gp.storage.files import MAX_JSON_BYTES, load_tensors, read_bytes, read_checked, read_checksummed_json

FORMAT = {"format": "epk_gp run", "version": 1}
HEADER, DATA = "run.json", "data.safetensors"
INPUTS, TARGETS = "rows.inputs", "rows.targets"  # new points of a stream in the steps of a chunk
_IN_MEMORY = 1 << 26  # smaller data are read into memory, where changes of the file cannot reach them
# The dtypes of weights, by their name in the run's header.
WEIGHT_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64)}

Count = Annotated[int, Field(ge=0, lt=1 << 62)]  # 62 bits: sums of two counts still fit into int64
Positive = Annotated[int, Field(ge=1, lt=1 << 62)]


class Record(BaseModel):
    """An object of a JSON file with typed entries; unknown entries are refused."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class GroupRecord(Record):
    """A parameter group (`OptimizerGroup.to_json`)."""

    names: list[str]
    rule: str
    options: dict[str, Any]

    @model_validator(mode="after")
    def _has_options_of_its_rule(self) -> "GroupRecord":
        if not fits_scale(self.rule, self.options):
            raise ValueError(f"options must be those of {self.rule!r}")
        return self


class RunDescription(Record):
    """The result of `run_header`: `loss` has a `kind` and its options, `law` is the update rule."""

    names: list[str]
    shapes: list[list[Count]]
    dtype: Literal["torch.float32", "torch.float64"]
    num_outputs: Positive
    num_points: Positive
    loss: dict[str, Any]
    law: Annotated[dict[Literal["name"], str], Field(min_length=1)]
    data_digest: str
    statistics: list[str] = []
    statistic_shapes: list[list[Count]] = []
    unexplained: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    signature: Any = None  # checked by `signature_from_json`
    clip: Annotated[list[Annotated[float, Field(gt=0)]], Field(min_length=1, max_length=2)] | None = None
    is_stream: bool = False

    @model_validator(mode="after")
    def _has_weights_and_loss(self) -> "RunDescription":
        for names, shapes in ((self.names, self.shapes), (self.statistics, self.statistic_shapes)):
            if not len(set(names)) == len(names) == len(shapes):
                raise ValueError(f"names must be different ones, with a shape for each: got {len(names)} names")
        if not sum(map(math.prod, self.shapes)):
            raise ValueError("there must be weights")
        if not isinstance(self.loss.get("kind"), str):
            raise ValueError("loss must have a kind")
        return self


class RunHeader(RunDescription):
    """The header of a run, which `docs/format.md` describes."""

    format: Literal["epk_gp run"]
    version: Literal[1]
    data_blake2b: str
    data_bytes: Count
    optimizer: list[Any]
    num_optimizers: Positive = 1
    groups: list[GroupRecord] = []
    modules: list[str] = []
    base: str | None = None
    check_every: Positive | None = None
    keep_every: Positive = 1


RecordType = TypeVar("RecordType", bound=Record)


def validated(model: type[RecordType], entries: object, message: str) -> RecordType:
    """Return the record built from entries of an untrusted file.

    Args:
        model: The class of the record.
        entries: The content of the file.
        message: Start of the error message, which states the required content of the file.

    Raises:
        ValueError: An entry is missing, superfluous, or has a wrong type; the message names it.
    """
    try:
        return model.model_validate(entries)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{message}: {place[:80]!r}: {first['msg'][:200]}.") from error


def read_record(model: type[RecordType], file: Path, message: str, limit: int = MAX_JSON_BYTES) -> RecordType | None:
    """Return the record in a JSON file with a checksum; None if the file does not exist.

    Raises:
        ValueError: The file is damaged, too large or not a regular file, or has other content.
    """
    try:
        content = read_bytes(file, limit, str(file))
    except FileNotFoundError:
        return None
    return validated(model, read_checksummed_json(content, message), message)


@dataclass(frozen=True)
class ChunkSchema:
    """Shapes and dtypes of the tensors in the chunks of a run.

    Attributes:
        sizes: Number of weights of each of the L parameters.
        dtype: Dtype of the weights.
        num_points: Number M of training points.
        num_statistics: Number Q of moving statistics.
        num_modules: Number of modules of the network, one mode each in a forward pass.
        keep_every: Spacing k of the stored states: every k-th is stored.
        scaled: The coefficients of each parameter that a preconditioner scales: if not every state is stored, they are
            stored for one weight.
        least_index: The smallest index of a batch: -1 if rows may be outside the training data.
        is_stream: Whether chunks hold additional training points.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    num_points: int
    num_statistics: int = 0
    num_modules: int = 0
    keep_every: int = 1
    scaled: tuple[frozenset[str], ...] = ()
    least_index: int = 0
    is_stream: bool = False

    @property
    def thins(self) -> bool:
        """Whether chunks hold only some of the states."""
        return self.keep_every > 1

    def held_between(self, first: int, last: int) -> list[int]:
        """Return the consecutive states that a chunk holds: every k-th, and the last one for resuming."""
        k = self.keep_every
        return sorted({*range(math.ceil(first / k) * k, last + 1, k), last})

    @property
    def num_weights(self) -> int:
        """Number P of weights."""
        return sum(self.sizes)


def chunk_schema(header: Mapping[str, Any]) -> ChunkSchema:
    """Return the schema of the chunks of a run with this header."""
    groups = [OptimizerGroup.from_json(group) for group in header["groups"]]
    return ChunkSchema(
        sizes=tuple(math.prod(shape) for shape in header["shapes"]),
        dtype=WEIGHT_DTYPES[header["dtype"]],
        num_points=header["num_points"],
        num_statistics=sum(math.prod(shape) for shape in header["statistic_shapes"]),
        num_modules=len(header["modules"]),
        keep_every=header["keep_every"],
        scaled=scaled_fields(groups, header["names"]) if header["keep_every"] > 1 else (),
        least_index=-1 if header["loss"]["kind"] == UnstatedLoss.__name__ else 0,
        is_stream=header["is_stream"],
    )


def run_header(
    model: FunctionalModel,
    loss: Loss,
    update_rule: str,
    *,
    num_points: int,
    num_outputs: int,
    data_digest: str,
    unexplained: float | None = None,
    clip: Clip | None = None,
    is_stream: bool = False,
) -> dict[str, Any]:
    """Describe a run for its header: everything except the weights.

    The digest of a run covers the text of this dictionary, so its keys and their order are part of the format. Entries
    without content are left out.

    Args:
        model: The network.
        loss: The loss.
        update_rule: Name of the update rule.
        num_points: M.
        num_outputs: C.
        data_digest: Digest of the training data.
        unexplained: Share of a step that update rule and loss need not explain; None allows rounding only.
        clip: The stated gradient clipping.
        is_stream: Whether steps add training points to those in the header.
    """
    optional = {
        "statistics": list(model.statistics),
        "statistic_shapes": [list(shape) for shape in model.statistic_shapes],
        "unexplained": unexplained,
        "signature": model.signature.to_json(),
        "clip": None if clip is None else [float(value) for value in astuple(clip)],
        "is_stream": is_stream or None,
    }
    return {
        "names": list(model.names),
        "shapes": [list(shape) for shape in model.shapes],
        "dtype": str(next(p for n, p in model.module.named_parameters() if n in model.names).dtype),
        "num_outputs": num_outputs,
        "num_points": num_points,
        "loss": describe_loss(loss),
        "law": {"name": update_rule},
        "data_digest": data_digest,
        **{key: value for key, value in optional.items() if value is not None and value != []},
    }


def describe_loss(loss: Loss) -> dict[str, Any]:
    """Describe a loss for a run's header; the name of a `PerSampleLoss` stands for its functions."""
    left_out = ("function", "counts", "dim" if getattr(loss, "dim", None) is None else "")  # as before `dim` existed
    options = {name: value for name, value in vars(loss).items() if name not in left_out}
    plain = {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}
    return {"kind": type(loss).__name__, **plain}


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the header of a run (`RunHeader`) as a dictionary of all its entries, including defaults.

    Raises:
        TypeError: The path is not a path.
        FileNotFoundError: The folder holds no run.
        ValueError: The header does not belong to a run of this format and version, or it is damaged.
    """
    file = Path(path) / HEADER
    header = read_record(RunHeader, file, f"{file} must be the header of an epk_gp run of version 1")
    if header is None:
        raise FileNotFoundError(f"folder must hold a recorded run: {file} does not exist.")
    return header.model_dump()


def read_data(path: str | os.PathLike[str], header: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read inputs, targets, frozen state and fingerprint outputs of a run, checked against the header's checksum.

    A file of more than 64 MiB is mapped after its checksum was computed block by block.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is damaged, or does not hold the tensors that the header describes.
    """
    file = Path(path) / DATA
    where, size, blake2b = str(file), header["data_bytes"], header["data_blake2b"]
    if size <= _IN_MEMORY:
        data = load_tensors(read_checked(file, size, blake2b, where), where)
    else:
        files.verify_file(file, size, blake2b, where)
        data = files.map_tensors(file)
    for name in ("inputs", "targets", "probe"):
        if name not in data or (name != "probe" and data[name].shape[:1] != (header["num_points"],)):
            raise ValueError(f"{where} must hold {name!r} of {header['num_points']} points: it does not.")
    num_weights = sum(map(math.prod, header["shapes"]))
    if "momentum" in data and data["momentum"].shape not in ((num_weights,), (2 * num_weights,)):
        raise ValueError(f"{where} must hold 'momentum' of one or two numbers per weight: it does not.")
    for name, value in data.items():
        if value.is_floating_point() and not name.startswith("constant.") and not is_finite(value):
            raise ValueError(f"{where} must hold finite numbers: {name!r} holds NaN or infinity.")
    return data
