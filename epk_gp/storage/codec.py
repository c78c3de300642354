"""Rows of weights, packed without loss: each as its difference in bits from the row before it."""

import zlib

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from numpy.typing import NDArray
from torch import Tensor

_LEVEL = 1  # zlib's fastest; the others gain two per cent at several times the cost


def pack_rows(rows: Float[Tensor, "k P"]) -> tuple[UInt8[Tensor, " n"], Int64[Tensor, " k"]]:
    """Pack rows: XOR with the row before, bytes of equal significance together, deflated.

    Returns:
        The packed rows one after another, and the bytes of each.
    """
    before, packed = None, []
    for row in rows:
        bits = _bits(row)
        delta = bits if before is None else bits ^ before
        packed.append(zlib.compress(np.ascontiguousarray(delta.T).tobytes(), _LEVEL))
        before = bits
    lengths = torch.tensor([len(part) for part in packed], dtype=torch.int64)
    return torch.frombuffer(bytearray(b"".join(packed)), dtype=torch.uint8), lengths


def unpack_row(
    packed: UInt8[Tensor, " n"], before: Float[Tensor, " P"] | None, num_weights: int
) -> Float[Tensor, " P"]:
    """Unpack one row, in memory proportional to it whatever the packed bytes say.

    Args:
        packed: Its bytes.
        before: The row before it; None if it is the first.
        num_weights: P; float32 or float64, as many bytes as there are say.

    Raises:
        ValueError: The bytes are not those of a packed row of this length.
    """
    reader = zlib.decompressobj()
    says = f"a packed row must hold {num_weights} numbers, of the dtype of the row before"
    try:
        content = reader.decompress(packed.numpy().tobytes(), 8 * num_weights + 1)
    except zlib.error as error:
        raise ValueError(f"{says}: {error}.") from error
    dtype = {4 * num_weights: torch.float32, 8 * num_weights: torch.float64}.get(len(content))
    if dtype is None or not reader.eof or reader.unused_data or (before is not None and before.dtype != dtype):
        raise ValueError(f"{says}: it does not.")
    delta = np.frombuffer(content, dtype=np.uint8).reshape(-1, num_weights).T
    bits = delta if before is None else delta ^ _bits(before)
    return torch.frombuffer(bytearray(np.ascontiguousarray(bits).tobytes()), dtype=dtype)


def _bits(row: Float[Tensor, " P"]) -> NDArray[np.uint8]:
    return row.contiguous().view(torch.uint8).numpy().reshape(len(row), -1)
