"""safetensors files, written from where tensors lie: safetensors itself copies each of them twice."""

import json
from collections.abc import Iterator, Mapping

from torch import Tensor

from epk_gp.core.step import tensor_bytes
from epk_gp.storage.schema import SAFETENSORS_DTYPES


def tensor_file(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[bytes | memoryview]:
    """Give the content of a safetensors file, part by part: the same bytes whenever tensors and metadata are the same.

    A large tensor needs its own memory only once, and metadata are not in a random order, as safetensors writes them.

    Args:
        tensors: The tensors by their names.
        metadata: Texts by their names.
    """
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    names, end = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)), 0  # each at a multiple of its items
    for name in names:
        value, start = tensors[name], end
        end = start + value.numel() * value.itemsize
        dtype = SAFETENSORS_DTYPES[value.dtype]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for name in names:
        yield tensor_bytes(tensors[name])
