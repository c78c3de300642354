"""Files that are written atomically with checksums, and read without trusting their content.

The formats are JSON, and tensors by name (safetensors). `PartialSums` are the unfinished sums of a long computation: a
killed one resumes from its last save and gives the same bytes.
"""

import errno
import hashlib
import json
import math
import os
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import BufferedReader
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

import epk_gp
from epk_gp.core.graphs import DTYPES
from epk_gp.core.step import fingerprint_data, tensor_bytes

MAX_JSON_BYTES = 1 << 24  # 16 MiB; the header of a network with 100 000 parameter tensors has about 7 MiB
DAMAGED = "The file is damaged; restore it from a copy."

# The names of dtypes in a safetensors header.
_NAMES = ("F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL")
SAFETENSORS_DTYPES = dict(zip(DTYPES.values(), _NAMES, strict=True))

# Flags of os.open. Windows has none of the first three, and needs the last one so that line ends are not translated;
# there, `open_descriptor` tests for symbolic links itself.
_NO_FOLLOW = getattr(os, "O_NOFOLLOW", 0)
_SAFE_FLAGS = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
_CAN_SYNC_FOLDERS = os.name != "nt"


# Further dtypes that a network's buffers may have.
_OTHER_DTYPES = {torch.complex64: "C64", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16"}


def checksum(content: bytes, suffix: str = "") -> str:
    """Return the checksum (blake2b, 16 bytes, in hexadecimal) of bytes followed by a text."""
    hasher = hashlib.blake2b(content, digest_size=16)
    hasher.update(suffix.encode())
    return hasher.hexdigest()


def checksum_json(value: Any) -> str:
    """Return the checksum of a JSON value, independent of the order of its keys."""
    return checksum(json.dumps(value, sort_keys=True).encode())


def verify_file(file: Path, size: int, blake2b: str, where: str, suffix: str = "") -> None:
    """Raise if a file, followed by a text, does not have the checksum; the file is read block by block.

    Args:
        file: A regular file.
        size: The expected size of the file in bytes; a file of another size is not read.
        blake2b: The checksum.
        where: Name of the file in an error message.
        suffix: A text that is hashed after the file.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is not a regular file, or it has another size or checksum.
    """
    with open_regular(file, where, size) as stream:
        hasher = hashlib.file_digest(stream, lambda: hashlib.blake2b(digest_size=16))
    hasher.update(suffix.encode())
    if hasher.hexdigest() != blake2b:
        raise ValueError(f"{where} must have the checksum it was written with. {DAMAGED}")


def open_descriptor(file: Path, flags: int) -> int:
    """Open a file by `os.open` without following a symbolic link, without waiting for a pipe, and in binary mode.

    Raises:
        OSError: The file cannot be opened; with `errno.ELOOP` if it is a symbolic link.
    """
    if not _NO_FOLLOW and file.is_symlink():  # a link created between this test and the next line is followed
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(file))
    return os.open(file, flags | _NO_FOLLOW | _SAFE_FLAGS, 0o644)


@contextmanager
def open_regular(file: Path, where: str, size: int | None = None) -> Iterator[BufferedReader]:
    """Open a regular file for reading, and check its size if `size` is given.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is a symbolic link, a folder, a pipe or a device, or it has another size.
    """
    try:
        handle = open_descriptor(file, os.O_RDONLY)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise FileNotFoundError(f"a run must have all its files: {where} does not exist.") from error
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.ENXIO):
            raise
        kind = "symbolic link" if error.errno == errno.ELOOP else "socket"
        raise ValueError(f"{where} must be a plain file: it is a {kind}.") from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{where} must be a plain file: it is a folder, a pipe or a device.")
    with os.fdopen(handle, "rb") as stream:
        if size is not None and (actual := os.fstat(handle).st_size) != size:
            raise ValueError(f"{where} must have {size} bytes: it has {actual}. {DAMAGED}")
        yield stream


def regular_file_size(file: Path, where: str) -> int | None:
    """Return the size of a regular file in bytes, or None if it is missing.

    Raises:
        ValueError: The file is not a regular file.
    """
    try:
        status = file.lstat()
    except (FileNotFoundError, NotADirectoryError):  # NotADirectoryError: the folder is a file
        return None
    if not stat.S_ISREG(status.st_mode):
        raise ValueError(f"{where} must be a plain file: it is a symbolic link, a folder, a pipe or a device.")
    return status.st_size


def read_bytes(file: Path, limit: int, where: str) -> bytes:
    """Read a file of at most `limit` bytes.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is not a regular file, or it is larger than the limit.
    """
    with open_regular(file, where) as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > limit:
            raise ValueError(f"{where} must have at most {limit} bytes: it has more.")
        return stream.read(size)


def read_checked(file: Path, size: int, blake2b: str, where: str, suffix: str = "") -> bytes:
    """Read a file with a known size and checksum, where the checksum includes a text after the content.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is not a regular file, or it has another size or checksum.
    """
    with open_regular(file, where, size) as stream:
        content = stream.read(size)
    if checksum(content, suffix) != blake2b:
        raise ValueError(f"{where} must have the checksum it was written with. {DAMAGED}")
    return content


def parse_json(content: bytes, message: str) -> Any:
    """Parse JSON from an untrusted source.

    Args:
        content: The text.
        message: Start of the error message, which states the required form of the text.

    Raises:
        ValueError: The text is not JSON, or it is nested too deeply to be parsed.
    """
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:  # also bytes that are not text, and numbers of thousands of digits
        raise ValueError(f"{message}: {error}.") from error


def checksummed_json(record: dict[str, Any]) -> bytes:
    """Return the text of a JSON object that holds its own checksum under the key `blake2b`."""
    return json.dumps(record | {"blake2b": checksum_json(record)}, indent=1).encode()


def read_checksummed_json(content: bytes, message: str) -> dict[str, Any]:
    """Parse the text of `checksummed_json`.

    Raises:
        ValueError: The text is not JSON, or any byte of it was changed, including spaces; `message` starts the error
            message.
    """
    record = parse_json(content, message)
    with suppress(RecursionError):  # Python parses slightly deeper nesting than it writes
        if isinstance(record, dict) and record.pop("blake2b", None) and checksummed_json(record) == content:
            return record
    raise ValueError(f"{message}: its checksum is not that of its content. {DAMAGED}")


@contextmanager
def open_tensors(file: Path, where: str) -> Iterator[Any]:
    """Map a safetensors file.

    Raises:
        FileNotFoundError: The file is missing.
        ValueError: The file is not a regular file, or not a safetensors file.
    """
    with open_regular(file, where):  # a regular file, not a link or a pipe
        pass
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{where} must be a safetensors file: {error}.") from error


def map_tensors(file: Path) -> dict[str, Tensor]:
    """Map all tensors of a safetensors file that was already checked.

    Raises:
        ValueError: It is not a safetensors file.
    """
    with open_tensors(file, str(file)) as tensors:
        return {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118  # not a mapping


def load_tensors(content: bytes, where: str) -> dict[str, Tensor]:
    """Read the tensors of a safetensors file from its bytes.

    Raises:
        ValueError: The bytes are not those of a safetensors file.
    """
    try:
        return load(content)
    except (SafetensorError, KeyError, RuntimeError) as error:  # KeyError and RuntimeError: a dtype unknown to torch
        raise ValueError(f"{where} must be a safetensors file: {error}.") from error


def pack(name: str, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return two tensors that hold tensors by name for each row: small tensors of any shapes, read row by row.

    `name` holds the rows as consecutive safetensors files, equal rows only once; `name.at` (n, 2) holds the start and
    the number of bytes of each row.
    """
    starts, end, at = dict[bytes, int](), 0, []
    for row in rows:
        content = b"".join(tensor_file(row, {}))
        if content not in starts:
            starts[content], end = end, end + len(content)
        at.append((starts[content], len(content)))
    stream = torch.frombuffer(bytearray(b"".join(starts)), dtype=torch.uint8)
    return {name: stream, f"{name}.at": torch.tensor(at, dtype=torch.int64)}


def validate_places(at: Tensor, size: int, name: str, where: str) -> None:
    """Raise if rows of packed tensors lie outside the `size` bytes that hold them."""
    start, length = at.unbind(1)
    if (start < 0).any() or (length < 0).any() or (length > size - start).any():
        raise ValueError(f"{where} must hold {name!r} where `{name}.at` says: a row lies outside.")


def unpack(tensors: Any, name: str, row: int, where: str) -> dict[str, Tensor]:
    """Read the tensors of one row that `pack` stored in an open safetensors file.

    Raises:
        ValueError: They do not have the form that `pack` creates.
    """
    start, length = tensors.get_slice(f"{name}.at")[row].tolist()
    content = tensors.get_slice(name)[start : start + length]
    return load_tensors(bytes(tensor_bytes(content)), where)


def atomic_write(
    file: Path,
    content: bytes | Iterable[bytes | memoryview],
    *,
    sync: bool = True,
    writer: str = "",
    is_durable: bool = True,
    is_private: bool = False,
) -> None:
    """Write a file so that it exists either with its full content or not at all, even if the write is interrupted.

    The content is written under another name (`.part`), synchronised, and renamed.

    Args:
        file: The file.
        content: Its bytes, or several parts of them.
        sync: Also synchronise the folder, which makes the new name durable; False if the caller does this later.
        is_durable: Whether the file must survive a power failure; otherwise it is not synchronised.
        writer: Name of the writer, if several may write the same file at once: it becomes part of the temporary name.
        is_private: Whether only the user may read the file, from its creation on.
    """
    partial = file.with_name(f"{file.name}{writer and '.'}{writer}.part")

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | os.O_EXCL, 0o600) if is_private else os.open(name, flags, 0o666)

    try:
        if is_private:  # an existing file would keep its rights
            partial.unlink(missing_ok=True)
        with open(partial, "wb", opener=opener) as stream:
            stream.writelines([content] if isinstance(content, bytes) else content)
            stream.flush()
            if is_durable:
                os.fsync(stream.fileno())
        partial.replace(file)
    except BaseException:
        with suppress(OSError):
            partial.unlink()  # this frees the space on a full disk
        raise
    if sync and is_durable:
        sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make names that were added, renamed or removed in a folder durable.

    Windows cannot open a folder, so this does nothing there: NTFS has its own journal of names, and after a power
    failure the last names may be missing, as after a crash just before the commit.
    """
    if not _CAN_SYNC_FOLDERS:
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Yield the content of a safetensors file in pieces; equal tensors and metadata give equal bytes.

    A large tensor is not copied, and the order of the metadata is fixed, unlike in safetensors' own writer.

    Args:
        tensors: The tensors by their names.
        metadata: Texts by their names.
    """
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    names, end = sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name)), 0  # items are aligned
    for name in names:
        value, start = tensors[name], end
        end = start + math.prod(value.shape) * value.dtype.itemsize
        dtype = (SAFETENSORS_DTYPES | _OTHER_DTYPES)[value.dtype]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensor_bytes(tensors[name])


SECONDS = 30.0  # between saves of an unfinished sum: a kill loses at most this, and a save takes far less
_MANIFEST = "checkpoint.json"


class PartialSums:
    """A folder with the partial sums of one computation, each with its number of terms."""

    def __init__(self, folder: str | os.PathLike[str], fingerprint: str, *, is_durable: bool = True) -> None:
        """Open a new folder, or one with partial sums of the same computation.

        Args:
            folder: The folder; it is created if it does not exist.
            fingerprint: Fingerprint of everything that the result depends on.
            is_durable: Whether sums must survive a power failure; not needed if the folder is always removed.

        Raises:
            ValueError: The folder holds partial sums of another computation, or other files.
        """
        self.folder, self.identity, self.is_durable = Path(folder), fingerprint, is_durable
        self.folder.mkdir(parents=True, exist_ok=True)
        manifest, content = self.folder / _MANIFEST, json.dumps({"identity": fingerprint}).encode()
        if manifest.is_file():
            if manifest.stat().st_size != len(content) or manifest.read_bytes() != content:
                raise ValueError(f"checkpoint {folder} must be of this very computation: it is of another.")
        elif any(self.folder.iterdir()):
            raise ValueError(f"checkpoint must be a new or empty folder: {self.folder} holds something.")
        else:
            atomic_write(manifest, content)
        self._last_save = time.monotonic()

    @property
    def should_save(self) -> bool:
        """Whether `SECONDS` have passed since the last save, so that an unfinished sum should be saved."""
        return time.monotonic() - self._last_save >= SECONDS

    def has(self, name: str) -> bool:
        """Return whether a partial sum was saved."""
        return self._file(name).is_file()

    def remove(self, names: Iterable[str]) -> None:
        """Delete partial sums if they exist."""
        for name in names:
            self._file(name).unlink(missing_ok=True)

    def remove_torn(self) -> None:
        """Delete incomplete files of killed writers."""
        for file in self.folder.glob("*.part"):
            file.unlink(missing_ok=True)

    def count(self, name: str) -> int:
        """Return the number of terms of a partial sum without reading its content; 0 if it was never saved.

        Raises:
            ValueError: The file is damaged.
        """
        if not self.has(name):
            return 0
        with self._opened(name) as stored:
            return int(stored.metadata()["count"])

    def load(self, name: str) -> tuple[dict[str, Tensor], int]:
        """Return a partial sum and its number of terms; no tensors and 0 if it was never saved.

        Raises:
            ValueError: The file is damaged.
        """
        if not self.has(name):
            return {}, 0
        with self._opened(name) as stored:
            metadata = stored.metadata()
            # Copies: the next save replaces the file, which Windows refuses while tensors are mapped from it.
            tensors = {key: stored.get_tensor(key).clone() for key in stored.keys()}  # noqa: SIM118
            if metadata["checksum"] != _sum_checksum(tensors, metadata["count"]):
                raise ValueError("its content does not have the checksum that it was saved with")
            return tensors, int(metadata["count"])

    def save(self, name: str, tensors: dict[str, Tensor], count: int) -> None:
        """Replace a partial sum and its number of terms, atomically."""
        values = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        metadata = {"count": str(count), "checksum": _sum_checksum(values, str(count)), "of": self._owner(name)}
        # a worker that was believed dead may still write the same sum
        writer = uuid4().hex[:8]
        atomic_write(self._file(name), tensor_file(values, metadata), writer=writer, is_durable=self.is_durable)
        self._last_save = time.monotonic()

    @contextmanager
    def _opened(self, name: str) -> Iterator[Any]:
        file = self._file(name)
        try:
            with open_tensors(file, str(file)) as stored:
                if stored.metadata()["of"] != self._owner(name):
                    raise ValueError("it is that of another computation or piece, or of another version")
                yield stored
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{file} must be a partial sum of this version: delete it ({error}).") from error

    def _owner(self, name: str) -> str:
        """Return the key that ties a file to its computation, its piece and the version of the package."""
        return checksum(self.identity.encode(), f" {name} {epk_gp.__version__}")

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def _sum_checksum(tensors: dict[str, Tensor], count: str) -> str:
    """Return the checksum of a partial sum: of its names, its tensors and its number of terms."""
    return checksum(
        fingerprint_data(*(tensors[name] for name in sorted(tensors))).encode(), f"{sorted(tensors)} {count}"
    )
