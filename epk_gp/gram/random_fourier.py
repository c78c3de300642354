"""Features of products of kernels: random Fourier features of an RBF, and their joint sketch with other features."""

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.autodiff.sketches import FeatureSum, seeded_generator
from epk_gp.core.checks import validate_count, validate_finite, validate_integer, validate_positive, validate_tensor

# Rows whose features are computed at a time; the same for all calls, so that bytes do not depend on their number.
_ROWS = 256

# Of an RBF that is joined with a cosine path kernel in 4096 numbers. Measured on 400 MNIST images, 4 seeds: the root
# mean square error of the product is 1.59, 1.43, 1.17, 1.14, 1.24 and 1.15 times 1 / 64 with 256, 512, 1024, 2048, 4096
# and 8192 features of the RBF.
RBF_FEATURES = 2048


def rbf_features(
    X: Float[Tensor, "n ..."], lengthscale: float, num_features: int = RBF_FEATURES, *, seed: int = 0
) -> Float[Tensor, "n k"]:
    """Return orthogonal random Fourier features of an RBF kernel (Yu et al. 2016).

        <phi(x), phi(x')> = exp(-|x - x'|^2 / (2 l^2)) on average,    |phi(x)| = 1 exactly

    Frequencies are rows of random orthogonal matrices with the lengths of Gaussian vectors, each with its cosine and
    sine.

    Args:
        X: n inputs of any shape, which are flattened.
        lengthscale: l.
        num_features: k, even.
        seed: Draws the frequencies.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A number is too small or odd, an input is not finite, or X has no dimension of points and one of
            values.
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
        z: Features of one kernel, as `path_features` returns them; of length 1 for its cosine.
        phi: Features of the other kernel, as `rbf_features` returns them.
        num_features: k.
        seed: Draws the sketch; another one than that of `rbf_features` is not needed.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The features have other numbers of rows, or `num_features` is too small.
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
    for _ in range(-(-count // D)):
        Q, R = torch.linalg.qr(torch.randn(D, D, generator=generator, dtype=torch.float64))
        lengths = torch.randn(D, D, generator=generator, dtype=torch.float64).norm(dim=0)
        blocks.append(Q * R.diagonal().sign() * lengths)
    return torch.cat(blocks, dim=1)[:, :count]
