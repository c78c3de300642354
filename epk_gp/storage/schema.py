"""A run on disk, read: safetensors chunks of weights, and a journal that says which of them are committed.

A folder holds `run.json` (format, network layout, loss, update rule), `data.safetensors` (inputs, targets, constants,
probe outputs), `chunk-NNNNNN.safetensors` (consecutive weight states and the steps that led to them),
`resume-NNNNNN.safetensors` (what the run goes on from), `journal.jsonl` and, at the end, `finished.json`.
Nothing is pickled, opening a run executes nothing, and nothing in it is believed before it is checked.
"""

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epk_gp.core.losses import Loss
from epk_gp.core.model import FunctionalModel
from epk_gp.storage.atomic_files import (
    MAX_JSON_BYTES,
    checksum,
    checksum_file,
    load_tensors,
    parse_json,
    read_bytes,
    read_checksummed_json,
    regular_file_size,
)
from epk_gp.storage.chunks import ChunkSchema
from epk_gp.storage.index import Chunk, resume_name

FORMAT = "epk_gp run"
FORMAT_VERSION = 2
HEADER, DATA = "run.json", "data.safetensors"
COMPRESSIONS = ("none", "deltas")
DTYPES = {"torch.float32": torch.float32, "torch.float64": torch.float64}


def schema_of(header: Mapping[str, Any]) -> ChunkSchema:
    """Read from a header what the chunks look like."""
    sizes = tuple(math.prod(shape) for shape in header["shapes"])
    return ChunkSchema(sizes, DTYPES[header["dtype"]], header["num_points"], header["compression"])


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what a run says of itself.

    Raises:
        FileNotFoundError: No run there.
        ValueError: Not a run of this format and version.
    """
    file = Path(path) / HEADER
    if regular_file_size(file, str(file)) is None:
        raise FileNotFoundError(f"path must hold a recorded run: {file} does not exist.")
    content = read_bytes(file, MAX_JSON_BYTES, str(file))
    header = parse_json(content, f"{file} must be the JSON header of a run")
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        raise ValueError(f"{file} must be the header of an epk_gp run: its 'format' is not {FORMAT!r}.")
    if header.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"run format version must be {FORMAT_VERSION}: {path} has {header.get('version')!r}. "
            "Open it with the version of epk_gp that recorded it."
        )
    header = read_checksummed_json(content, str(file))
    if header is None:
        raise ValueError(f"{file} must have the checksum it was written with: it is damaged. Restore it from a copy.")
    if not _is_header(header):
        raise ValueError(
            f"{file} must describe weights, data, loss and update rule: it lacks or mistakes some of them."
        )
    return header


def read_data(path: str | os.PathLike[str], header: Mapping[str, Any]) -> dict[str, Tensor]:
    """Read inputs, targets, constants and probe outputs, checked against the header's checksum.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is damaged, or does not hold what the header says.
    """
    file = Path(path) / DATA
    where = str(file)
    if checksum_file(file, None, where) != header["data_blake2b"]:
        raise ValueError(f"{where} must have the checksum it was written with: it is damaged. Restore it from a copy.")
    data = load_tensors(read_bytes(file, file.stat().st_size, where), where)
    for name in ("inputs", "targets", "probe"):
        if name not in data or (name != "probe" and data[name].shape[:1] != (header["num_points"],)):
            raise ValueError(f"{where} must hold {name!r} of {header['num_points']} points: it does not.")
    for name, value in data.items():
        if value.is_floating_point() and not name.startswith("constant.") and not torch.isfinite(value).all():
            raise ValueError(f"{where} must hold finite numbers: {name!r} holds NaN or infinity.")
    return data


def read_resume(path: str | os.PathLike[str], number: int, chunk: Chunk) -> dict[str, Tensor]:
    """Read what a run goes on from after a chunk.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is damaged.
    """
    file = Path(path) / resume_name(number)
    where = f"{file} (at state {chunk.last})"
    if (regular_file_size(file, where) or chunk.resume_bytes) == chunk.resume_bytes:
        content = read_bytes(file, chunk.resume_bytes, where)
        if checksum(content, chunk.digest) == chunk.resume_blake2b:
            return load_tensors(content, where)
    raise ValueError(f"{where} must have the checksum it was committed with: it is damaged. Restore it from a copy.")


def _is_header(header: dict[str, Any]) -> bool:
    names, shapes = header.get("names"), header.get("shapes")
    loss, law = header.get("loss"), header.get("law")
    return (
        isinstance(names, list)
        and isinstance(shapes, list)
        and len(names) == len(shapes) > 0
        and all(isinstance(name, str) for name in names)
        and all(isinstance(shape, list) and all(_is_count(n, 0) for n in shape) for shape in shapes)
        and sum(math.prod(shape) for shape in shapes) > 0
        and header.get("dtype") in DTYPES
        and _is_count(header.get("num_outputs"), 1)
        and _is_count(header.get("num_points"), 1)
        and header.get("compression") in COMPRESSIONS
        and isinstance(loss, dict)
        and isinstance(loss.get("kind"), str)
        and isinstance(law, dict)
        and isinstance(law.get("name"), str)
        and isinstance(header.get("data_digest"), str)
        and isinstance(header.get("data_blake2b"), str)
        and isinstance(header.get("optimizer"), list)
    )


def _is_count(value: object, minimum: int) -> bool:
    return type(value) is int and minimum <= value < 1 << 62


def describe_loss(loss: Loss) -> dict[str, Any]:
    """Describe a loss for a run's header; of a user's own, its name stands for its function."""
    options = {name: value for name, value in vars(loss).items() if name != "function"}
    return {
        "kind": type(loss).__name__,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in options.items()},
    }


def header_of(
    model: FunctionalModel, loss: Loss, law: str, num_points: int, data_digest: str, num_outputs: int
) -> dict[str, Any]:
    """Describe a run for its header: everything but the weights."""
    return {
        "names": list(model.names),
        "shapes": [list(shape) for shape in model.shapes],
        "dtype": str(next(p for n, p in model.module.named_parameters() if n in model.names).dtype),
        "num_outputs": num_outputs,
        "num_points": num_points,
        "loss": describe_loss(loss),
        "law": {"name": law},
        "data_digest": data_digest,
    }
