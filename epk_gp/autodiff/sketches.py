"""Random sketches of layer gradients: k numbers whose inner products are those of the gradients in expectation.

docs/theory.md, section 9, derives what each sketch is and its variance.
"""

import hashlib
from collections.abc import Iterator
from typing import final

import torch
from jaxtyping import Float, Int64
from torch import Tensor

# Rows that are transformed at a time, for k = 4096; so many numbers stay in the CPU's cache. Measured on one thread,
# float32: 2.8 to 3.2 microseconds a transform of 4096 numbers, 16 to 256 rows at a time.
_TRANSFORM_ELEMENTS = 1 << 18


@final
class FeatureSum:
    """A sum of sketches of the gradients of K outputs at E points, over layers and nodes: (K, E, k).

    * A gradient that is written out is cut into pieces of k numbers. Each number gets a random sign, each piece is
      rotated by a random number of places, and all pieces are added: a count-sketch in which the numbers of one piece
      never collide.
    * An outer product delta (x) a is sketched by its factors (TensorSketch): the numbers of a in pieces, as above; each
      number of delta with a random sign in a place of its own. The sketch of the product is their circular convolution,
      so their Fourier transforms are multiplied, and the sum is transformed back once.

    Args:
        num_outputs: K.
        num_points: E.
        num_features: k.
        reference: Gives dtype and device.
    """

    def __init__(self, num_outputs: int, num_points: int, num_features: int, reference: Float[Tensor, "..."]) -> None:
        self.shape = (num_outputs, num_points, num_features)
        self.reference = reference
        self._sum: Tensor | None = None  # (K, E, 2 k): what lies behind k numbers is added to the first k at the end
        self._spectrum: Tensor | None = None  # (K, E, k // 2 + 1)

    def add_dense(self, values: Float[Tensor, "K E P_layer"], weight: float, generator: torch.Generator) -> None:
        """Add a layer's gradients, written out.

        Args:
            values: The gradients.
            weight: Factor.
            generator: Draws the sketch.
        """
        k = self.shape[2]
        if self._sum is None:
            self._sum = self.reference.new_zeros(*self.shape[:2], 2 * k)
        signed = values * draw_signs(values.shape[2], generator, self.reference).mul_(weight)
        for shift, piece in zip(_draw_shifts(values.shape[2], k, generator), signed.split(k, dim=2), strict=True):
            self._sum[:, :, shift : shift + piece.shape[2]].add_(piece)

    def add_outer_products(
        self,
        inputs: Float[Tensor, "E n_in"],
        output_grads: Float[Tensor, "K E n_out"],
        weight: float,
        generator: torch.Generator,
    ) -> None:
        """Add a layer's gradients, given as outer products.

        Args:
            inputs: The layer's inputs a, with the 1 of a bias.
            output_grads: The gradients delta in its outputs.
            weight: Factor.
            generator: Draws the sketch.
        """
        K, E, k = self.shape
        if self._spectrum is None:
            complex_zero = torch.zeros((), dtype=self.reference.dtype, device=self.reference.device).to(
                self.reference.dtype.to_complex()
            )
            self._spectrum = complex_zero.new_zeros(K, E, k // 2 + 1)
        signs = draw_signs(inputs.shape[1], generator, self.reference)
        shifts = _draw_shifts(inputs.shape[1], k, generator)
        grad_signs = draw_signs(output_grads.shape[2], generator, self.reference).mul_(weight)
        places = _draw_places(output_grads.shape[2], k, generator).to(self.reference.device)
        size = max(1, _TRANSFORM_ELEMENTS // k)
        for rows in (slice(first, first + size) for first in range(0, E, size)):
            a = torch.fft.rfft(_rotated_pieces(inputs[rows] * signs, shifts, k), n=k)
            delta = torch.fft.rfft(_placed(output_grads[:, rows] * grad_signs, places, k))
            self._spectrum[:, rows].addcmul_(a.expand_as(delta), delta)

    def result(self) -> Float[Tensor, "K E k"]:
        """Return the sum."""
        k = self.shape[2]
        total = None if self._sum is None else self._sum[:, :, :k] + self._sum[:, :, k:]
        if self._spectrum is None:
            return self.reference.new_zeros(self.shape) if total is None else total
        convolved = torch.fft.irfft(self._spectrum, n=k)
        return convolved if total is None else total.add_(convolved)


def seeded_generator(*parts: object) -> torch.Generator:
    """Return a generator whose numbers depend on the given values alone, whatever was drawn before."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def draw_signs(count: int, generator: torch.Generator, reference: Float[Tensor, "..."]) -> Float[Tensor, " count"]:
    """Draw random signs, in the dtype and on the device of `reference`."""
    bits = torch.randint(0, 2, (count,), dtype=torch.int8, generator=generator)
    return bits.mul_(2).sub_(1).to(reference)


def _draw_shifts(count: int, k: int, generator: torch.Generator) -> list[int]:
    """Draw by how many places each piece of k numbers is rotated."""
    shifts: list[int] = torch.randint(0, k, (-(-count // k),), generator=generator).tolist()
    return shifts


def _draw_places(count: int, k: int, generator: torch.Generator) -> Int64[Tensor, " count"]:
    """Draw a place in 0 .. k - 1 for each number; the numbers of one piece of k have different ones."""
    pieces = [torch.randperm(k, generator=generator) for _ in range(-(-count // k))]
    return torch.cat(pieces)[:count]


def _rotated_pieces(signed: Float[Tensor, "E n"], shifts: list[int], k: int) -> Float[Tensor, "E m"]:
    """Add pieces of k numbers, each rotated by its shift; one piece alone is left where it is, with m <= k numbers.

    A rotation of one piece alone changes nothing: the places of the other factor are uniform.
    """
    if len(shifts) == 1:
        return signed
    total = signed.new_zeros(len(signed), 2 * k)
    for shift, piece in zip(shifts, signed.split(k, dim=1), strict=True):
        total[:, shift : shift + piece.shape[1]].add_(piece)
    return total[:, :k] + total[:, k:]


def _placed(signed: Float[Tensor, "K E n"], places: Int64[Tensor, " n"], k: int) -> Float[Tensor, "K E k"]:
    """Add each number to its place."""
    return _sum(
        signed.new_zeros(*signed.shape[:2], k).index_copy_(2, places[part], signed[:, :, part])
        for part in (slice(first, first + k) for first in range(0, signed.shape[2], k))
    )


def _sum(parts: Iterator[Tensor]) -> Tensor:
    total = next(parts)
    for part in parts:
        total = total + part
    return total
