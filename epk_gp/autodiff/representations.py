"""The forms that a layer's gradients take: factored (a x delta), written out, or averaged; and what each costs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True, eq=False)
class OuterProductJacobian:
    """A layer's gradients as sums of outer products: delta[k, e, l] (x) (a[e, l], 1 if bias).

    Attributes:
        a: Layer inputs, (E, L, n_in).
        delta: Gradients with respect to the layer's outputs, (K, E, L, n_out).
        bias: A trained bias rides along: the inputs have one more entry, 1.
        fixed_input: `a` depends on neither weights nor step.
        fixed_delta: `delta` does not depend on the weights.
    """

    a: Float[Tensor, "E L n_in"]
    delta: Float[Tensor, "K E L n_out"]
    bias: bool
    fixed_input: bool
    fixed_delta: bool


@dataclass(frozen=True, eq=False)
class DenseJacobian:
    """A layer's gradients, or those of several weights, written out: (K, E, P_layer)."""

    values: Float[Tensor, "K E P_layer"]


@dataclass(frozen=True, eq=False)
class LastLayerFactors(OuterProductJacobian):
    """The last layer's gradients of all outputs: delta[k, e] = e_k - p_e.

    Attributes:
        p: Softmax probabilities, (E, C); None, for zero, under the logits head.
    """

    p: Float[Tensor, "E C"] | None

    @property
    def inputs(self) -> Float[Tensor, "E n"]:
        """The layer's inputs, with the 1 of a bias."""
        a = self.a[:, 0]
        return append_bias_column(a) if self.bias else a


@dataclass(frozen=True, eq=False)
class SoftmaxLastLayerAverage:
    """Averages over t of `LastLayerFactors`: of a, and of p_c (x) a for every output c; (1 + C, N, n)."""

    values: Float[Tensor, "rows N n"]


Feature = OuterProductJacobian | DenseJacobian
Average = Feature | SoftmaxLastLayerAverage


@dataclass(frozen=True)
class ContractionCost:
    """What the cost of a layer's form depends on, beside its shape.

    Attributes:
        pairs: K K', pairs of outputs in the block.
        products: Inner products a step costs if the layer is factored and cannot be averaged over t: Q or 1.
        fixed_head: The test side's cotangents do not depend on the weights (the logits head).
        dense: Write everything out (for networks that cannot be evaluated on a line).
    """

    pairs: int
    products: int
    fixed_head: bool = False
    dense: bool = False


def factored_is_cheaper(form: ContractionCost, length: int, n_in: int, n_out: int, averaged: bool) -> bool:
    """Compare factored with written-out inner products, per pair of points and outputs (fitted costs of engine.md)."""
    products = 1 if averaged else form.products
    return products * length**2 * (n_in / form.pairs + n_out + 64) < n_in * n_out + 32


def factored_last_layer_is_cheaper(form: ContractionCost, shape: torch.Size, head: str) -> bool:
    """Compare the last layer as `LastLayerFactors` with its gradients written out, as `factored_is_cheaper` does."""
    n_out, n_in = shape[0], shape[1:].numel()
    if head == "logits":
        return n_in / form.pairs < n_in * n_out + 32
    return (n_out + 1) * n_in / form.pairs + 128 < n_in * n_out + 32


def to_dense(feature: Feature) -> Float[Tensor, "K E P_layer"]:
    """Write a layer's gradients out: weight row by row, each followed by its bias if it has one."""
    if isinstance(feature, DenseJacobian):
        return feature.values
    a = append_bias_column(feature.a) if feature.bias else feature.a
    return sum_outer_products(a.unsqueeze(2), feature.delta.unsqueeze(3))


def joined(parts: Sequence[Feature]) -> Feature:
    """Join one layer's features of several blocks of rows."""
    factors = [part for part in parts if isinstance(part, OuterProductJacobian)]
    if not factors:
        return DenseJacobian(torch.cat([part.values for part in parts if isinstance(part, DenseJacobian)], dim=1))
    a, delta = torch.cat([part.a for part in factors]), torch.cat([part.delta for part in factors], dim=1)
    first, heads = factors[0], [part.p for part in factors if isinstance(part, LastLayerFactors) and part.p is not None]
    if isinstance(first, LastLayerFactors):
        return replace(first, a=a, delta=delta, p=torch.cat(heads) if heads else None)
    return replace(first, a=a, delta=delta)


def rows_of(feature: Feature, rows: slice) -> Feature:
    """Take some rows of one layer's features."""
    if isinstance(feature, DenseJacobian):
        return DenseJacobian(feature.values[:, rows])
    a, delta = feature.a[rows], feature.delta[:, rows]
    if isinstance(feature, LastLayerFactors):
        return replace(feature, a=a, delta=delta, p=None if feature.p is None else feature.p[rows])
    return replace(feature, a=a, delta=delta)


def feature_bytes(features: list[Feature]) -> int:
    """Count the bytes that features take."""
    return sum(f.values.nbytes if isinstance(f, DenseJacobian) else f.a.nbytes + f.delta.nbytes for f in features)


def append_bias_column(a: Float[Tensor, "*rows n"]) -> Float[Tensor, "*rows n_and_1"]:
    """Add the 1 that a bias is multiplied by."""
    return torch.cat([a, a.new_ones(*a.shape[:-1], 1)], dim=-1)


def sum_outer_products(a: Float[Tensor, "E L G n_in"], delta: Float[Tensor, "K E L G n_out"]) -> Float[Tensor, "K E P"]:
    """Write a call's gradients out, summed over its L positions; G groups."""
    if a.shape[1] == 1:
        return (delta[:, :, 0, :, :, None] * a[:, 0, :, None]).flatten(2)
    # one batched product per point and group: (K n_out, L) x (L, n_in)
    left = delta.permute(1, 3, 0, 4, 2).flatten(2, 3)  # E G (K n_out) L
    product = left @ a.transpose(1, 2)  # E G (K n_out) n_in
    rows: Tensor = product.unflatten(2, (len(delta), -1)).permute(2, 0, 1, 3, 4)  # K E G n_out n_in
    return rows.flatten(2)
