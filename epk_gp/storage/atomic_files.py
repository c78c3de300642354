"""Files of a run: written durably, and read without trusting what stands in them."""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

MAX_JSON_BYTES = 1 << 24
MAX_TENSOR_HEADER_BYTES = 1 << 24
_BLOCK = 1 << 20


def checksum(content: bytes, *more: str) -> str:
    """Hash bytes, and words that belong to them (blake2b, 16 bytes, in hex)."""
    hasher = hashlib.blake2b(content, digest_size=16)
    for word in more:
        hasher.update(word.encode())
    return hasher.hexdigest()


def checksum_json(value: Any) -> str:
    """Hash a JSON value, whatever the order of its keys."""
    return checksum(json.dumps(value, sort_keys=True).encode())


def checksum_file(file: Path, size: int | None, where: str, *more: str) -> str:
    """Hash a file block by block.

    Args:
        file: A plain file.
        size: Its size in bytes, if it is known; a file of another size is refused.
        where: What to call it in an error.
        more: Words that belong to it.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It is no plain file, or of another size.
    """
    hasher = hashlib.blake2b(digest_size=16)
    with open_regular(file, where) as stream:
        found = os.fstat(stream.fileno()).st_size
        if size is not None and found != size:
            raise ValueError(f"{where} must have {size} bytes: it has {found}. {_RESTORE}")
        while block := stream.read(_BLOCK):
            hasher.update(block)
    for word in more:
        hasher.update(word.encode())
    return hasher.hexdigest()


_RESTORE = "The file is damaged; restore it from a copy."


@contextmanager
def open_regular(file: Path, where: str) -> Iterator[BinaryIO]:
    """Open a file for reading, but no symbolic link, pipe or device.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It is no plain file.
    """
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"a run must have all its files: {where} does not exist.") from error
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(
            f"{where} must be a plain file: it is a symbolic link. Put the file itself in its place."
        ) from error
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{where} must be a plain file: it is a folder, a pipe or a device.")
    with os.fdopen(handle, "rb") as stream:
        yield stream


def regular_file_size(file: Path, where: str) -> int | None:
    """Give a file's size; None if it is missing.

    Raises:
        ValueError: It is no plain file.
    """
    try:
        found = file.lstat()
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(found.st_mode):
        raise ValueError(f"{where} must be a plain file: it is a symbolic link, a folder, a pipe or a device.")
    return found.st_size


def read_bytes(file: Path, limit: int, where: str) -> bytes:
    """Read a file of bounded size.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It is no plain file, or larger than the limit.
    """
    content = bytearray()
    with open_regular(file, where) as stream:
        if os.fstat(stream.fileno()).st_size <= limit:
            while len(content) <= limit and (block := stream.read(_BLOCK)):
                content += block
            if len(content) <= limit:
                return bytes(content)
    raise ValueError(f"{where} must have at most {limit} bytes: it has more.")


def parse_json(content: bytes, what: str) -> Any:
    """Parse JSON that somebody else wrote.

    Raises:
        ValueError: It is none, or nested without measure.
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError(f"{what}: it is nested too deeply.") from error
    except ValueError as error:  # also of bytes that are no text, and of numbers with thousands of digits
        raise ValueError(f"{what}: {error}.") from error


def checksummed_json(record: dict[str, Any]) -> bytes:
    """Write a JSON object with its own checksum in it."""
    return json.dumps(record | {"blake2b": checksum_json(record)}, indent=1).encode()


def read_checksummed_json(content: bytes, what: str) -> dict[str, Any] | None:
    """Read what `checksummed_json` wrote; None if a byte of it is another one, of the spaces, too.

    Raises:
        ValueError: It is no JSON.
    """
    record = parse_json(content, what)
    if not isinstance(record, dict) or "blake2b" not in record:
        return None
    del record["blake2b"]
    try:
        return record if checksummed_json(record) == content else None
    except RecursionError:  # nested as deeply as can be read, but not written
        return None


@contextmanager
def open_tensors(file: Path, where: str) -> Iterator[Any]:
    """Map a safetensors file, after a look at the length of its header.

    Raises:
        FileNotFoundError: It is missing.
        ValueError: It is no plain file, or no safetensors file.
    """
    with open_regular(file, where) as stream:
        size = os.fstat(stream.fileno()).st_size
        _check_header_length(stream.read(8), size, where)
    try:
        with safe_open(file, framework="pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{where} must be a safetensors file: {error}.") from error


def load_tensors(content: bytes, where: str) -> dict[str, Tensor]:
    """Read tensors from the bytes of a safetensors file.

    Raises:
        ValueError: It is none.
    """
    _check_header_length(content[:8], len(content), where)
    try:
        return load(content)
    except (SafetensorError, KeyError, RuntimeError) as error:  # the latter two: a dtype that torch does not have
        raise ValueError(f"{where} must be a safetensors file: {error}.") from error


def _check_header_length(start: bytes, size: int, where: str) -> None:
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(size - 8, MAX_TENSOR_HEADER_BYTES):
        raise ValueError(
            f"{where} must be a safetensors file: its header claims {length} bytes of the file's {size} "
            f"(at most {MAX_TENSOR_HEADER_BYTES} are read)."
        )


def atomic_write(file: Path, content: bytes, *, sync: bool = True) -> None:
    """Write a file so that it is there in full or not at all, whatever happens.

    Args:
        file: Where.
        content: What.
        sync: Make its name last, too; False where a `sync_folder` of the caller's follows.
    """
    partial = file.with_name(file.name + ".part")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(file)
    except OSError:
        with suppress(OSError):
            partial.unlink()  # gives the space back
        raise
    if sync:
        sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Make names that were added, renamed or removed last."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
