"""What the files of a run hold: its header, its training data, and the dtypes and shapes of its chunks."""

import math
import os
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from epk_gp.core.losses import Loss
from epk_gp.core.model import FunctionalModel
from epk_gp.core.update_law import scaled_fields
from epk_gp.optimizers.preconditioners import fits_scale
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.optimizers.update_rules import Clip
from epk_gp.storage.atomic_files import (
    MAX_JSON_BYTES,
    checksum_file,
    load_tensors,
    parse_json,
    read_bytes,
    read_checksummed_json,
    regular_file_size,
    tensor_file_size,
)

FORMAT = "epk_gp run"
FORMAT_VERSION = 3
THINNED_VERSION = 4  # of runs that do not hold every state exactly; the others are readable by earlier versions
READABLE_VERSIONS = (2, 3, 4)
HEADER, DATA = "run.json", "data.safetensors"
COMPRESSIONS = ("none", "deltas")
# The name that a safetensors header gives to each dtype.
SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
# Entries of a header of version 3, which those of version 2 lack, as they are in a run that does not need them.
HEADER_DEFAULTS: dict[str, Any] = {
    "statistics": [],
    "statistic_shapes": [],
    "unexplained": None,
    "signature": None,
    "modules": [],
    "num_optimizers": 1,
    "groups": [],
}
# Entries that only the headers of thinned runs have, as they are in any other run.
THINNED_DEFAULTS: dict[str, Any] = {"keep_every": 1, "weights_dtype": None}
# The dtypes that weights can have, by their name in the run's header; and those in which kept states can be stored.
WEIGHT_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.float64)}
STORED_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}


@dataclass(frozen=True)
class ChunkSchema:
    """Shapes and dtypes of the tensors in the chunks of a run.

    Attributes:
        sizes: Number of weights of each of the L parameters.
        dtype: Dtype of the weights.
        num_points: Number M of training points.
        compression: "none" or "deltas".
        num_statistics: Number Q of moving statistics.
        num_modules: Number of modules of the network whose modes a forward pass holds.
        version: Version of the run's format.
        keep_every: Every so many-th state is held.
        weights_dtype: Dtype in which states after the first are held; None for that of the weights.
        scaled: Which coefficients of each parameter a preconditioner scales, and are held for one weight.
    """

    sizes: tuple[int, ...]
    dtype: torch.dtype
    num_points: int
    compression: str
    num_statistics: int = 0
    num_modules: int = 0
    version: int = FORMAT_VERSION
    keep_every: int = 1
    weights_dtype: torch.dtype | None = None
    scaled: tuple[frozenset[str], ...] = ()

    @property
    def thins(self) -> bool:
        """Whether chunks do not hold every state exactly, so that the resume file holds the last one."""
        return self.version >= THINNED_VERSION

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype in which states after the first are held."""
        return self.dtype if self.weights_dtype is None else self.weights_dtype

    def kept_between(self, first: int, last: int) -> range:
        """Return which of consecutive states are held."""
        k = self.keep_every
        return range(-(-first // k) * k, last + 1, k)

    @property
    def num_weights(self) -> int:
        """Number P of weights."""
        return sum(self.sizes)

    def row_length(self, name: str) -> int:
        """Return how many numbers a row of a tensor has: Q of the moving statistics, P of weights and coefficients."""
        return self.num_statistics if name == "statistics" else self.num_weights


def chunk_schema(header: Mapping[str, Any]) -> ChunkSchema:
    """Return the schema of the chunks of a run with this header."""
    header = HEADER_DEFAULTS | dict(header)
    return ChunkSchema(
        sizes=tuple(math.prod(shape) for shape in header["shapes"]),
        dtype=WEIGHT_DTYPES[header["dtype"]],
        num_points=header["num_points"],
        compression=header["compression"],
        num_statistics=sum(math.prod(shape) for shape in header["statistic_shapes"]),
        num_modules=len(header["modules"]),
        version=header["version"],
        **_thinning(header),
    )


def _thinning(header: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the schema of a thinned run has beside that of any other run."""
    if header["version"] < THINNED_VERSION:
        return {}
    groups = [OptimizerGroup.from_json(group) for group in header.get("groups", [])]
    stored = header["weights_dtype"]
    return {
        "keep_every": header["keep_every"],
        "weights_dtype": None if stored is None else STORED_DTYPES[stored],
        "scaled": scaled_fields(groups, header["names"]),
    }


def module_names(net: nn.Module) -> list[str]:
    """Return the names of a network's modules in the order of `modules()`, in which a pass holds their modes."""
    return [name for name, _ in net.named_modules()]


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
) -> dict[str, Any]:
    """Describe a run for its header: everything but the weights.

    The digest of a run covers the text of this dictionary, so its keys and their order are part of the format. Entries
    of `HEADER_DEFAULTS` are left out where they have their default: so runs that do without have the digests that they
    had in version 2.

    Args:
        model: The network.
        loss: The loss.
        update_rule: Name of the update rule.
        num_points: M.
        num_outputs: C.
        data_digest: Digest of the training data.
        unexplained: Share of a step that update rule and loss need not explain; None for rounding only.
        clip: The stated gradient clipping.
    """
    of_version_3 = {
        "statistics": list(model.statistics),
        "statistic_shapes": [list(shape) for shape in model.statistic_shapes],
        "unexplained": unexplained,
        "signature": model.signature.to_json(),
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
        **{key: value for key, value in of_version_3.items() if value != HEADER_DEFAULTS[key]},
        **({} if clip is None else {"clip": [float(value) for value in astuple(clip)]}),
    }


def describe_loss(loss: Loss) -> dict[str, Any]:
    """Describe a loss for a run's header; the name of a `PerSampleLoss` stands for its functions."""
    options = {name: value for name, value in vars(loss).items() if name not in ("function", "counts")}
    return {
        "kind": type(loss).__name__,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
    }


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the header of a run; one of version 2 gets the entries that it lacks.

    Raises:
        TypeError: The path is not a path.
        FileNotFoundError: The folder holds no run.
        ValueError: The header is not that of a run of this format and version, or it is damaged.
    """
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"folder must be that of a run: got {path!r}.")
    file = Path(path) / HEADER
    if regular_file_size(file, str(file)) is None:
        raise FileNotFoundError(f"folder must hold a recorded run: {file} does not exist.")
    content = read_bytes(file, MAX_JSON_BYTES, str(file))
    header = parse_json(content, f"{file} must be the JSON header of a run")
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{file} must be the header of an epk_gp run: its 'format' is not {FORMAT!r}.")
    if type(header.get("version")) is not int or header["version"] not in READABLE_VERSIONS:
        *others, last = map(str, READABLE_VERSIONS)
        raise ValueError(
            f"run format version must be {', '.join(others)} or {last}: {file} has {header.get('version')!r}. "
            "Open it with the version of epk_gp that recorded it."
        )
    header = read_checksummed_json(content, str(file))
    if header is None:
        raise ValueError(f"{file} must have the checksum it was written with: it is damaged. Restore it from a copy.")
    if header["version"] < 3:  # entries of other versions say nothing
        header |= HEADER_DEFAULTS
    if not is_header(header):
        raise ValueError(
            f"{file} must describe weights, data, loss and update rule: an entry is missing, or of another type."
        )
    return header


def read_data(path: str | os.PathLike[str], header: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read inputs, targets, frozen state and fingerprint outputs of a run, checked against the header's checksum.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is damaged, or does not hold the tensors that the header describes.
    """
    file = Path(path) / DATA
    where = str(file)
    size = data_size(path, header)
    if checksum_file(file, size, where) != header["data_blake2b"]:
        raise ValueError(f"{where} must have the checksum it was written with: it is damaged. Restore it from a copy.")
    data = load_tensors(read_bytes(file, size, where), where)
    for name in ("inputs", "targets", "probe"):
        if name not in data or (name != "probe" and data[name].shape[:1] != (header["num_points"],)):
            raise ValueError(f"{where} must hold {name!r} of {header['num_points']} points: it does not.")
    for name, value in data.items():
        if value.is_floating_point() and not name.startswith("constant.") and not torch.isfinite(value).all():
            raise ValueError(f"{where} must hold finite numbers: {name!r} holds NaN or infinity.")
    return data


def data_size(path: str | os.PathLike[str], header: Mapping[str, Any]) -> int:
    """Return the size in bytes that the data of a run must have: by the run's header, or by the file's own.

    Raises:
        FileNotFoundError: The header does not say it, and the file is missing.
        ValueError: The header does not say it, and the file is not a safetensors file.
    """
    if "data_bytes" in header:  # runs of version 0.1 have no such entry
        size: int = header["data_bytes"]
        return size
    file = Path(path) / DATA
    return tensor_file_size(file, str(file))


def is_header(header: Mapping[str, Any]) -> bool:
    """Return whether a header of a known version has all entries, each of its type."""
    loss, update_rule = header.get("loss"), header.get("law")
    return (
        _is_layout(header.get("names"), header.get("shapes"))
        and sum(math.prod(shape) for shape in header["shapes"]) > 0
        and _is_layout(header.get("statistics"), header.get("statistic_shapes"))
        and _is_names(header.get("modules"))
        and _is_share(header.get("unexplained", False))
        and "signature" in header
        and _is_count(header.get("num_optimizers"), 1)
        and is_groups(header.get("groups", []))
        and ("clip" not in header or _is_clip(header["clip"]))
        and header.get("dtype") in list(WEIGHT_DTYPES)  # a list compares, where a dictionary would hash
        and _is_count(header.get("num_outputs"), 1)
        and _is_count(header.get("num_points"), 1)
        and header.get("compression") in COMPRESSIONS
        and isinstance(loss, dict)
        and isinstance(loss.get("kind"), str)
        and isinstance(update_rule, dict)
        and isinstance(update_rule.get("name"), str)
        and isinstance(header.get("data_digest"), str)
        and isinstance(header.get("data_blake2b"), str)
        and _is_count(header.get("data_bytes", 0), 0)
        and isinstance(header.get("optimizer"), list)
        and (header["version"] < THINNED_VERSION or _is_thinned(header))
    )


def _is_thinned(header: Mapping[str, Any]) -> bool:
    stored = header.get("weights_dtype", False)
    return (
        _is_count(header.get("keep_every"), 1)
        and (stored is None or (isinstance(stored, str) and stored in STORED_DTYPES))
        and header["compression"] == "none"
    )


def _is_layout(names: object, shapes: object) -> bool:
    return (
        _is_names(names)
        and isinstance(names, list)
        and isinstance(shapes, list)
        and len(set(names)) == len(names) == len(shapes)
        and all(isinstance(shape, list) and all(_is_count(n, 0) for n in shape) for shape in shapes)
    )


def _is_clip(stated: object) -> bool:
    """Return whether an entry is the bound of a gradient clipping, with the p of its norm or without."""
    numbers = stated if isinstance(stated, list) else ()
    return len(numbers) in (1, 2) and all(type(value) is float and value > 0 for value in numbers)


def is_groups(groups: object) -> bool:
    """Return whether an entry holds rule, parameters and options of each parameter group."""
    return isinstance(groups, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("rule"), str)
        and _is_names(group.get("names"))
        and isinstance(group.get("options"), dict)
        and fits_scale(group["rule"], group["options"])
        for group in groups
    )


def _is_names(names: object) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _is_share(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and type(value) is not bool and 0 <= value < math.inf)


def _is_count(value: object, minimum: int) -> bool:
    return type(value) is int and minimum <= value < 1 << 62  # 62 bits: sums of two counts still fit into int64
