"""Lossless packing of a single tensor: as it is, deflated, or in bits, whichever takes the fewest bytes."""

import math
import zlib
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Shaped
from torch import Tensor

from epk_gp.core.step import tensor_bytes

# The dtypes that a packed tensor can have; their place is their number on disk.
DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)
# How a tensor is packed. A positive number: deflated, after the bytes of groups of so many were sorted by their place
# in the group, so that the like bytes of numbers stand together.
RAW, BITS, SORTED = 0, -1, (1, 2, 4, 8)
_LEVEL = 1  # zlib's fastest, as for weights (codec.py)
_PROBE = 1 << 15  # first bytes of a large tensor, which decide whether and how it is deflated
# Part of its size that a deflated tensor may have at most, else it is stored as it is: noise in float32 would lose 14 %
# of its size for 38 ms per 0.8 MB, images rotated by interpolation lose 67 % for 5 ms per 0.2 MB.
_WORTH = 0.75
# A deflated tensor is at most so many times as large as its bytes, plus `_SLACK`: larger ones are stored as they are,
# so that a reader can refuse a few bytes that claim to be a tensor without measure.
_MAX_RATIO, _SLACK = 256, 1 << 16


class Packed(NamedTuple):
    """A packed tensor.

    Attributes:
        dtype: Its dtype.
        shape: Its shape.
        encoding: `RAW`, `BITS`, or one of `SORTED`.
        content: The packed bytes.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    encoding: int
    content: bytes


def pack_tensor(value: Shaped[Tensor, "..."]) -> Packed:
    """Pack a tensor, from whatever device.

    Raises:
        TypeError: Tensors of this dtype cannot be packed.
    """
    if value.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"a recorded tensor must be of one of the dtypes {names}: got {value.dtype}.")
    shape = tuple(value.shape)
    content = bytes(tensor_bytes(value))
    if value.dtype == torch.bool:
        return Packed(value.dtype, shape, BITS, np.packbits(np.frombuffer(content, dtype=np.bool_)).tobytes())
    width = value.dtype.itemsize if value.dtype.itemsize > 1 or len(content) % 8 else 8  # random states: 8-byte words
    head = content[:_PROBE]
    probes = {encoding: _deflate(head, encoding) for encoding in {1, width}}
    best = min(probes, key=lambda encoding: (len(probes[encoding]), encoding))
    if len(probes[best]) <= _WORTH * len(head):
        packed = probes[best] if len(head) == len(content) else _deflate(content, best)
        if len(packed) <= _WORTH * len(content) <= _WORTH * max_size(len(packed)):
            return Packed(value.dtype, shape, best, packed)
    return Packed(value.dtype, shape, RAW, content)


def max_size(num_bytes: int) -> int:
    """Return the largest size in bytes of a deflated tensor of so many packed bytes."""
    return _MAX_RATIO * num_bytes + _SLACK


def fits(dtype: torch.dtype, shape: tuple[int, ...], encoding: int, num_bytes: int) -> bool:
    """Return whether so many packed bytes can be a tensor of this dtype and shape."""
    count = math.prod(shape)
    size = count * dtype.itemsize
    if encoding == BITS:
        return dtype == torch.bool and num_bytes == (count + 7) // 8
    if encoding == RAW:
        return num_bytes == size
    return encoding in SORTED and size % encoding == 0 and size <= max_size(num_bytes)


def unpack_tensor(packed: Packed) -> Shaped[Tensor, "..."]:
    """Unpack a tensor, in memory proportional to it whatever the packed bytes are.

    Raises:
        ValueError: The bytes are not those of such a tensor.
    """
    dtype, shape, encoding, content = packed
    size = math.prod(shape) * dtype.itemsize
    message = f"a packed tensor must hold {size} bytes for its shape {shape} of {dtype}"
    if not fits(dtype, shape, encoding, len(content)):
        raise ValueError(f"{message}: it does not.")
    if encoding == BITS:
        bits = np.unpackbits(np.frombuffer(content, dtype=np.uint8), count=math.prod(shape))
        return torch.from_numpy(bits.astype(np.bool_)).reshape(shape)
    if encoding != RAW:
        inflater = zlib.decompressobj()
        try:
            content = inflater.decompress(content, size + 1)
        except zlib.error as error:
            raise ValueError(f"{message}: {error}.") from error
        if len(content) != size or not inflater.eof or inflater.unused_data:
            raise ValueError(f"{message}: it does not.")
        content = np.ascontiguousarray(np.frombuffer(content, dtype=np.uint8).reshape(encoding, -1).T).tobytes()
    if not size:
        return torch.zeros(shape, dtype=dtype)
    value = torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)
    if dtype == torch.bool and bool((value.view(torch.uint8) > 1).any()):
        raise ValueError(f"{message}: it holds other values than true and false.")
    return value


def _deflate(content: bytes, width: int) -> bytes:
    columns = np.frombuffer(content, dtype=np.uint8).reshape(-1, width)
    return zlib.compress(np.ascontiguousarray(columns.T).tobytes(), _LEVEL)
