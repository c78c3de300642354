"""A run on disk, read: safetensors chunks of weights, and a journal that says which of them are committed.

A folder holds `run.json` (format, network layout, loss, step law), `data.safetensors` (inputs, targets, constants,
probe outputs), `chunk-NNNNNN.safetensors` (consecutive weight states and the steps that led to them),
`resume-NNNNNN.safetensors` (what the run goes on from), `journal.jsonl` and, at the end, `finished.json`.
Nothing is pickled, opening a run executes nothing, and nothing in it is believed before it is checked.
"""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.recording.chunks import Layout, Step, read_steps
from epk_gp.recording.files import (
    MAX_JSON_BYTES,
    checksum,
    checksum_file,
    load_tensors,
    parse_json,
    plain_size,
    read_bytes,
    read_signed_json,
)
from epk_gp.recording.journal import Chunk, read_journal, resume_name

FORMAT = "epk_gp run"
FORMAT_VERSION = 2
HEADER, DATA = "run.json", "data.safetensors"
COMPRESSIONS = ("none", "deltas")
DTYPES = {"torch.float32": torch.float32, "torch.float64": torch.float64}


def layout_of(header: Mapping[str, Any]) -> Layout:
    """Read from a header what the chunks look like."""
    sizes = tuple(math.prod(shape) for shape in header["shapes"])
    return Layout(sizes, DTYPES[header["dtype"]], header["num_points"], header["compression"])


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read what a run says of itself.

    Raises:
        FileNotFoundError: No run there.
        ValueError: Not a run of this format and version.
    """
    file = Path(path) / HEADER
    if plain_size(file, str(file)) is None:
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
    header = read_signed_json(content, str(file))
    if header is None:
        raise ValueError(f"{file} must have the checksum it was written with: it is damaged. Restore it from a copy.")
    if not _is_header(header):
        raise ValueError(f"{file} must describe weights, data, loss and step law: it lacks or mistakes some of them.")
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


@dataclass(frozen=True)
class RunSummary:
    """What a run holds, after every one of its files was checked.

    Attributes:
        header: What it says of itself.
        chunks: Its committed chunks.
        finished: Whether recording came to its end.
        sizes: The steps' learning rates.
        batch_sizes: Points of each step.
        data_shapes: Shapes of inputs, targets, constants and probe.
        files: Number of files that were checked.
        bytes: Their size.
    """

    header: dict[str, Any]
    chunks: tuple[Chunk, ...]
    finished: bool
    sizes: tuple[float, ...]
    batch_sizes: tuple[int, ...]
    data_shapes: dict[str, tuple[int, ...]]
    files: int
    bytes: int

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.sizes)


def check_run(path: str | os.PathLike[str], *, progress: bool = False) -> RunSummary:
    """Read every file of a run and check it against what was committed.

    Raises:
        FileNotFoundError: No run there, or a file is missing.
        ValueError: A damaged file; the message names it and the states it held.
    """
    folder = Path(path)
    header = read_header(path)
    layout = layout_of(header)
    data = read_data(path, header)
    journal = read_journal(path)
    steps: list[Step] = []
    for chunk in tqdm(journal.chunks, desc="chunks", disable=not progress):
        steps.extend(read_steps(path, layout, chunk))
    number, chunk = len(journal.chunks) - 1, journal.chunks[-1]
    try:
        read_resume(path, number, chunk)
    except FileNotFoundError:
        if read_journal(path).bytes == journal.bytes:  # nobody committed a newer one
            raise
    names = [HEADER, DATA, "journal.jsonl", resume_name(number), *(chunk.file for chunk in journal.chunks)]
    names += ["finished.json"] if journal.finished else []
    found = [plain_size(folder / name, name) for name in names]
    return RunSummary(
        header=header,
        chunks=journal.chunks,
        finished=journal.finished,
        sizes=tuple(step.size for step in steps),
        batch_sizes=tuple(layout.num_points if step.batch is None else len(step.batch) for step in steps),
        data_shapes={name: tuple(value.shape) for name, value in data.items()},
        files=len(names),
        bytes=sum(size or 0 for size in found),
    )


def read_resume(path: str | os.PathLike[str], number: int, chunk: Chunk) -> dict[str, Tensor]:
    """Read what a run goes on from after a chunk.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is damaged.
    """
    file = Path(path) / resume_name(number)
    where = f"{file} (at state {chunk.last})"
    if (plain_size(file, where) or chunk.resume_bytes) == chunk.resume_bytes:
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
