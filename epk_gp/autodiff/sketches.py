"""Random sketches and signs: few numbers whose inner products equal those of the gradients in expectation.

docs/theory.md, section 9, derives each sketch and its variance.
"""

import hashlib
import math
from typing import final

import torch
from jaxtyping import Float, Int8, Int64
from torch import Tensor

from epk_gp.core.checks import validate_count, validate_finite, validate_integer, validate_positive, validate_tensor

# Rows that are transformed at a time, for k = 4096; these numbers stay in the CPU's cache. Measured on one thread,
# float32: 2.8 to 3.2 microseconds per transform of 4096 numbers, 16 to 256 rows at a time.
_TRANSFORM_ELEMENTS = 1 << 18


@final
class FeatureSum:
    """A sum of sketches of the gradients of K outputs at E points, over layers and nodes: (K, E, k).

    * A dense gradient is cut into pieces of k numbers. Each number gets a random sign, each piece is rotated by a
    random number of positions, and all pieces are added: a count-sketch in which the numbers of one piece never
    collide.
    * An outer product delta (x) a is sketched by its factors (TensorSketch): the numbers of a in pieces, as above; each
      number of delta with a random sign at its own position. The sketch of the product is their circular convolution,
      so their Fourier transforms are multiplied, and the sum is transformed back once.

    Args:
        num_outputs: K.
        num_points: E.
        num_features: k.
        reference: Tensor that sets dtype and device.
    """

    def __init__(self, num_outputs: int, num_points: int, num_features: int, reference: Float[Tensor, "..."]) -> None:
        self.shape = (num_outputs, num_points, num_features)
        self.reference = reference
        self._sum: Tensor | None = None  # (K, E, 2 k): the second half is added to the first at the end
        self._spectrum: Tensor | None = None  # (K, E, k // 2 + 1)

    def add_dense(self, values: Float[Tensor, "K E P_layer"], weight: float, generator: torch.Generator) -> None:
        """Add a layer's dense gradients.

        Args:
            values: The gradients.
            weight: Factor.
            generator: Source of the random numbers of the sketch.
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
            generator: Source of the random numbers of the sketch.
        """
        K, E, k = self.shape
        if self._spectrum is None:
            self._spectrum = self.reference.new_zeros(K, E, k // 2 + 1, dtype=self.reference.dtype.to_complex())
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
    """Return a generator whose numbers depend only on the given values, not on earlier draws."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)


def draw_signs(count: int, generator: torch.Generator, reference: Float[Tensor, "..."]) -> Float[Tensor, " count"]:
    """Draw random signs, in the dtype and on the device of `reference`."""
    bits = torch.randint(0, 2, (count,), dtype=torch.int8, generator=generator)
    return bits.mul_(2).sub_(1).to(reference)


def _draw_shifts(count: int, k: int, generator: torch.Generator) -> list[int]:
    """Draw the number of positions by which each piece of k numbers is rotated."""
    return list(torch.randint(0, k, (math.ceil(count / k),), generator=generator).tolist())


def _draw_places(count: int, k: int, generator: torch.Generator) -> Int64[Tensor, " count"]:
    """Draw a position in 0 .. k - 1 for each number; the numbers of one piece of k have different positions."""
    pieces = [torch.randperm(k, generator=generator) for _ in range(math.ceil(count / k))]
    return torch.cat(pieces)[:count]


def _rotated_pieces(signed: Float[Tensor, "E n"], shifts: list[int], k: int) -> Float[Tensor, "E m"]:
    """Add pieces of k numbers, each rotated by its shift; a single piece is not rotated, with m <= k numbers.

    A rotation of a single piece changes nothing: the positions of the other factor are uniform.
    """
    if len(shifts) == 1:
        return signed
    total = signed.new_zeros(len(signed), 2 * k)
    for shift, piece in zip(shifts, signed.split(k, dim=1), strict=True):
        total[:, shift : shift + piece.shape[1]].add_(piece)
    return total[:, :k] + total[:, k:]


def _placed(signed: Float[Tensor, "K E n"], places: Int64[Tensor, " n"], k: int) -> Float[Tensor, "K E k"]:
    """Add each number at its position."""
    total = signed.new_zeros(*signed.shape[:2], k).index_copy_(2, places[:k], signed[:, :, :k])
    for part in (slice(first, first + k) for first in range(k, signed.shape[2], k)):
        total = total + torch.zeros_like(total).index_copy_(2, places[part], signed[:, :, part])
    return total


def hadamard_order(num_outputs: int, num_nodes: int) -> int:
    """Return the order of the Hadamard matrix whose rows are used in turn at the nodes of a path.

    Args:
        num_outputs: C.
        num_nodes: n.

    Returns:
        The smallest order of at least C that divides n; the smallest order of at least C if none does.
    """
    orders = [order for order in range(num_outputs, max(4 * num_outputs, num_nodes) + 1) if _base_order(order)]
    return next((order for order in orders if num_nodes % order == 0), orders[0])


def covering_order(num_outputs: int, at_least: int, at_most: int) -> int:
    """Return a number of nodes at which the rows of a Hadamard matrix represent all outputs exactly.

    Args:
        num_outputs: C.
        at_least: The result if an order of at least C divides it.
        at_most: The result if no order of at least C does up to it.
    """
    if at_least % hadamard_order(num_outputs, at_least) == 0:
        return at_least
    return next((order for order in range(max(num_outputs, at_least), at_most) if _base_order(order)), at_most)


def hadamard_matrix(order: int) -> Int8[Tensor, "order order"]:
    """Return a Hadamard matrix: entries 1 and -1, orthogonal rows and columns.

    Matrices of order 1, 2 and q + 1 for primes q = 3 mod 4 (Paley) are doubled repeatedly (Sylvester).

    Args:
        order: Number of rows and columns, from `hadamard_order`.
    """
    base = _base_order(order)
    H = torch.ones(1, 1, dtype=torch.int8) if base == 1 else _paley(base - 1)
    while len(H) < order:
        H = torch.cat([torch.cat([H, H], dim=1), torch.cat([H, -H], dim=1)])
    return H


def _base_order(order: int) -> int:
    """Return the order of the matrix to double up to another, with the fewest doublings; 0 if none exists."""
    while order > 1 and (order % 4 or any((order - 1) % divisor == 0 for divisor in range(2, math.isqrt(order) + 1))):
        order = 0 if order % 2 else order // 2
    return order


def _paley(q: int) -> Tensor:
    """Return Paley's first matrix, of order q + 1: I + S with the skew matrix S of quadratic residues."""
    residues = torch.full((q,), -1, dtype=torch.int8)
    residues[torch.arange(1, q) ** 2 % q] = 1
    residues[0] = 0
    index = torch.arange(q)
    S = torch.zeros(q + 1, q + 1, dtype=torch.int8)
    S[0, 1:], S[1:, 0] = 1, -1
    S[1:, 1:] = residues[(index[:, None] - index) % q]
    return S + torch.eye(q + 1, dtype=torch.int8)


# Rows whose features are computed at a time; the same for all calls, so that bytes do not depend on their number.
_ROWS = 256

# Features of an RBF that is joined with a cosine path kernel in 4096 numbers. Measured on 400 MNIST images, 4 seeds:
# the root mean square error of the product is 1.59, 1.43, 1.17, 1.14, 1.24 and 1.15 times 1 / 64 with 256, 512, 1024,
# 2048, 4096 and 8192 features of the RBF.
RBF_FEATURES = 2048


def rbf_features(
    X: Float[Tensor, "n ..."], lengthscale: float, num_features: int = RBF_FEATURES, *, seed: int = 0
) -> Float[Tensor, "n k"]:
    """Return orthogonal random Fourier features of an RBF kernel (Yu et al. 2016).

        <phi(x), phi(x')> = exp(-|x - x'|^2 / (2 l^2)) on average,    |phi(x)| = 1 exactly

    Frequencies are rows of random orthogonal matrices with the lengths of Gaussian vectors, each with its cosine and
    sine.

    Args:
        X: n inputs of any shape; they are flattened.
        lengthscale: l.
        num_features: k, even.
        seed: Seed of the frequencies.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: A number is too small or odd, an input is not finite, or X is not of shape (n, ...) with values.
    """
    validate_tensor(X, "X", floating=True)
    if X.ndim < 2 or not X[0:1].numel():
        raise ValueError(f"X must have shape (n, ...) with values in every row: got {tuple(X.shape)}.")
    validate_finite(X, "X")
    validate_positive(lengthscale, "lengthscale")
    validate_count(num_features, "num_features", minimum=2)
    validate_integer(seed, "seed")
    if num_features % 2:
        raise ValueError(f"num_features must be even, a cosine and a sine for each frequency: got {num_features}.")
    flat, count = X.flatten(1), num_features // 2
    W = (_orthogonal_frequencies(flat.shape[1], count, int(seed)) / lengthscale).to(flat)
    parts = []
    for rows in flat.split(_ROWS):
        angles = rows @ W
        parts.append(torch.cat([angles.cos(), angles.sin()], dim=1))
    return torch.cat(parts).div_(count**0.5) if not X.requires_grad else torch.cat(parts) / count**0.5


def tensor_sketch(
    z: Float[Tensor, "n p"], phi: Float[Tensor, "n q"], num_features: int, *, seed: int = 0
) -> Float[Tensor, "n k"]:
    """Sketch the products of two kernels' features: the features of the product of the kernels (Pham and Pagh 2013).

        <s(x), s(x')> = <z(x), z(x')> <phi(x), phi(x')> on average

    Args:
        z: Features of one kernel, from `path_features`; with length 1 for its cosine.
        phi: Features of the other kernel, from `rbf_features`.
        num_features: k.
        seed: Seed of the sketch; it may be the same as in `rbf_features`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The features have different numbers of rows, or `num_features` is too small.
    """
    for name, value in (("z", z), ("phi", phi)):
        validate_tensor(value, name, ndim=2, floating=True)
    if len(z) != len(phi) or z.dtype != phi.dtype:
        raise ValueError(
            "both features must be of the same points and dtype: got "
            f"{tuple(z.shape)} in {z.dtype} and {tuple(phi.shape)} in {phi.dtype}."
        )
    validate_count(num_features, "num_features")
    validate_integer(seed, "seed")
    parts = []
    for left, right in zip(z.split(_ROWS), phi.split(_ROWS), strict=True):
        total = FeatureSum(1, len(left), int(num_features), left)
        total.add_outer_products(left, right[None], 1.0, seeded_generator("product", int(seed)))
        parts.append(total.result()[0])
    return torch.cat(parts)


def _orthogonal_frequencies(D: int, count: int, seed: int) -> Float[Tensor, "D count"]:
    """Draw frequencies in blocks of D orthogonal ones, in float64."""
    generator = seeded_generator("frequencies", seed)
    blocks = []
    for _ in range(math.ceil(count / D)):
        Q, R = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64))
        lengths = torch.randn(D, D, generator=generator, dtype=torch.float64).norm(dim=0)
        blocks.append(Q * R.diagonal().sign() * lengths)
    return torch.cat(blocks, dim=1)[:, :count]
