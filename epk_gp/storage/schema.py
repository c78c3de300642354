"""The content of a run's files: its header, its training data, its journal, and the dtypes and shapes of its chunks.

The journal is a log with one line per committed chunk. A chunk is committed once its line is in the journal. Each line
holds a checksum of itself and, through the checksum of the line before it, of all earlier lines.
"""

import fnmatch
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator
from torch import Tensor

from epk_gp.core.checks import is_finite
from epk_gp.core.losses import Loss, UnstatedLoss
from epk_gp.core.model import FunctionalModel
from epk_gp.core.update_law import scaled_fields
from epk_gp.optimizers.torch_rules import OptimizerGroup, fits_scale
from epk_gp.optimizers.update_rules import Clip
from epk_gp.storage import files
from epk_gp.storage.files import DAMAGED, MAX_JSON_BYTES, read_bytes, read_checked, read_checksummed_json

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


class GroupChange(Record):
    """The parameter groups from this step of a chunk on."""

    step: Count
    groups: list[GroupRecord]


class GroupChanges(Record):
    """The parameter groups of a chunk, at the steps where they change."""

    changes: list[GroupChange]


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
        data = files.load_tensors(read_checked(file, size, blake2b, where), where)
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


JOURNAL, FINISHED = "journal.jsonl", "finished.json"
MAX_CHUNKS = 100_000  # a journal of at most 51 MB can be read at once
MAX_LINE_BYTES = 512  # a line with 19-digit numbers has 356 bytes
_FINISHED_BYTES = 1024  # the closing record has about 150 bytes

# The state of each chunk's file (`_stamp`) when this process last compared its content with its checksum.
_COMPARED: dict[tuple[str, str], tuple[int, ...]] = {}


Text = Annotated[str, StringConstraints(pattern="^[ -~]*$")]  # printable ASCII


class Chunk(Record):
    """One line of the journal: a chunk with the states `first` to `first + states - 1` and the steps that led to them.

    The attributes are the entries on disk. No step leads to state 0.

    Attributes:
        file: Name of the chunk's file.
        first: Number of its first state.
        states: Number of states in it.
        bytes: Size of the file.
        blake2b: Checksum of the file's content followed by `digest`.
        digest: Digest of the run up to the chunk's last state.
        resume_bytes: Size of the file with the training state after this chunk.
        resume_blake2b: Checksum of that file's content followed by `digest`.
        line: Checksum of this line and all lines before it.
    """

    file: Text
    first: Count
    states: Count
    bytes: Count
    blake2b: Text
    digest: Text
    resume_bytes: Count
    resume_blake2b: Text
    line: Text

    @property
    def last(self) -> int:
        """Number of the chunk's last state."""
        return self.first + self.states - 1

    @property
    def first_step(self) -> int:
        """Number of its first step; state 0 has none."""
        return max(self.first - 1, 0)

    def line_after(self, before: str) -> str:
        """Return the checksum of this line, chained to the checksum of the line before it."""
        return files.checksum(before.encode(), files.checksum_json(dict(self) | {"line": ""}))


class Finished(Record):
    """The closing record of a finished run: the number of its chunks."""

    chunks: Count


@dataclass(frozen=True)
class Journal:
    """The committed part of a run.

    Attributes:
        chunks: The committed chunks.
        bytes: Length of the journal up to the end of their lines; a crash may have left part of another line.
        finished: Whether the recording was finished.
    """

    chunks: tuple[Chunk, ...]
    bytes: int
    finished: bool


def chunk_name(number: int) -> str:
    """Return the name of a chunk's file.

    Raises:
        ValueError: The run already has the largest number of chunks.
    """
    if number >= MAX_CHUNKS:
        raise ValueError(f"a run must have at most {MAX_CHUNKS} chunks: let more steps come together in each.")
    return f"chunk-{number:06d}.safetensors"


def resume_name(number: int) -> str:
    """Return the name of the file with the training state after a chunk."""
    return f"resume-{number:06d}.safetensors"


def to_json_line(chunk: Chunk) -> bytes:
    """Return the chunk's line in the journal."""
    return json.dumps(dict(chunk)).encode() + b"\n"


def read_journal(path: str | os.PathLike[str]) -> Journal:
    """Read the committed chunks of a run. A last line without its newline is not committed.

    A run may be read while it is written: the result is the committed part at one moment.

    Raises:
        FileNotFoundError: The journal is missing.
        ValueError: The journal is damaged or lost lines, or a chunk is missing or has another size.
    """
    folder = Path(path)
    # Listed before the journal is read, so that each listed file belongs to a line that is read. os.listdir, because
    # Path.glob treats an unreadable folder as empty.
    names = fnmatch.filter(os.listdir(folder), f"resume-{'[0-9]' * 6}.safetensors")
    numbers = [int(name[7:13]) for name in names]
    file = folder / FINISHED
    finished = read_record(Finished, file, f"{file} must be the closing record of a run", _FINISHED_BYTES)
    where = f"{folder / JOURNAL}"
    content = read_bytes(folder / JOURNAL, MAX_CHUNKS * MAX_LINE_BYTES, where)
    chunks, used = _parse_lines(content, where)
    if not chunks:
        raise ValueError(f"a run must hold at least its initial weights: {folder / JOURNAL} has no committed chunk.")
    if finished is not None and finished.chunks > len(chunks):  # fewer chunks: a writer has just resumed the run
        raise ValueError(f"{where} must be as when the run was finished, with {finished.chunks} chunks. {DAMAGED}")
    if numbers and len(chunks) <= max(numbers) and max(numbers) - 1 not in numbers:
        # A writer removes resume file N - 1 only after it committed line N.
        raise ValueError(f"{where} must have {max(numbers) + 1} lines: it ends after {len(chunks)}. {DAMAGED}")
    for chunk in chunks:
        name, chunk_where = chunk_file(folder, chunk)
        if (size := files.regular_file_size(name, chunk_where)) != chunk.bytes:
            got = "it is missing" if size is None else f"it has {size}"
            raise ValueError(f"{chunk_where} must have {chunk.bytes} bytes: {got}. {DAMAGED}")
    return Journal(tuple(chunks), used, finished == Finished(chunks=len(chunks)))


def chunk_file(path: str | os.PathLike[str], chunk: Chunk) -> tuple[Path, str]:
    """Return the file of a chunk, and its name in error messages."""
    file = Path(path) / chunk.file
    return file, f"{file} (states {chunk.first}..{chunk.last})"


def _verify_chunk(path: str | os.PathLike[str], chunk: Chunk) -> None:
    """Compare the file of a chunk with its committed checksum.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: It is not a regular file, or has another size or checksum.
    """
    file, where = chunk_file(path, chunk)
    stamp = _stamp(file)  # taken before reading
    files.verify_file(file, chunk.bytes, chunk.blake2b, where, chunk.digest)
    _COMPARED[str(file), chunk.blake2b] = stamp


@contextmanager
def opened_chunk(path: str | os.PathLike[str], chunk: Chunk, *, verify: bool = False) -> Iterator[Any]:
    """Map the file of a chunk that was verified when the run was opened, and has not changed since.

    A file that this process has not compared with its checksum, or that changed since, is compared once; with `verify`,
    as when the run is opened, any file is compared.

    Raises:
        FileNotFoundError: The file was removed since the run was opened.
        ValueError: It was replaced or damaged since the run was opened.
    """
    (_verify_chunk if verify else _require_unchanged)(path, chunk)
    with files.open_tensors(*chunk_file(path, chunk)) as tensors:
        _require_unchanged(path, chunk)  # again, because it may have been replaced before it was mapped
        yield tensors


def _require_unchanged(path: str | os.PathLike[str], chunk: Chunk) -> None:
    file = chunk_file(path, chunk)[0]
    if _COMPARED.get((str(file), chunk.blake2b)) == _stamp(file):
        return
    try:
        _verify_chunk(path, chunk)
    except ValueError as error:
        raise ValueError(f"{error} Or another run was recorded there: load it again.") from error


def _stamp(file: Path) -> tuple[int, ...]:
    """Return numbers of which at least one changes when a file is replaced or written again."""
    with suppress(OSError):
        status = file.lstat()
        return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return ()


def _parse_lines(content: bytes, where: str) -> tuple[list[Chunk], int]:
    if (count := content.count(b"\n")) > MAX_CHUNKS:
        raise ValueError(f"{where} must have at most {MAX_CHUNKS} lines: it has {count}.")
    chunks: list[Chunk] = []
    used = content.rfind(b"\n") + 1
    for number, line in enumerate(content[:used].split(b"\n")[:-1]):
        name = f"line {number + 1} of {where}"
        message = f"{name} must describe a chunk: it is damaged, restore it from a copy"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"{message}: it has {len(line)} bytes.")
        chunk = validated(Chunk, files.parse_json(line, message), message)
        if chunk.line != chunk.line_after(chunks[-1].line if chunks else "") or to_json_line(chunk) != line + b"\n":
            raise ValueError(f"{name} must have its checksum: it is damaged, or a line before it is lost.")
        expected = chunks[-1].last + 1 if chunks else 0
        if chunk.first != expected or chunk.file != chunk_name(number) or chunk.states < 1:
            raise ValueError(f"{name} must continue at state {expected}: it does not.")
        chunks.append(chunk)
    return chunks, used
