"""Inner products of layer Jacobians between the sets of many pairs; they can be differentiated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.autodiff.representations import LayerJacobian
from epk_gp.autodiff.representations import OuterProductJacobian


@dataclass(frozen=True, eq=False)
class SetFactors:
    """One layer's Jacobian at U sets of n points and at L weight states, for K outputs of each point.

    The gradients are `output_grads`, or their outer products with `inputs`.

    Attributes:
        output_grads: (L, K, U, n, d).
        inputs: (L, U, n, n_in), or None.
        has_bias: The inputs have one more entry, 1, which is not stored.
    """

    output_grads: Float[Tensor, "L K U n d"]
    inputs: Float[Tensor, "L U n n_in"] | None = None
    has_bias: bool = False

    def traced(self) -> "SetFactors":
        """Join the outputs to one, whose inner products are the sums over the outputs."""
        return replace(self, output_grads=self.output_grads.permute(0, 2, 3, 1, 4).flatten(3)[:, None])

    def with_states(self, others: Sequence["SetFactors"]) -> "SetFactors":
        """Append other weight states."""
        parts = [self, *others]
        inputs = [part.inputs for part in parts if part.inputs is not None]
        return replace(
            self,
            output_grads=torch.cat([part.output_grads for part in parts]),
            inputs=torch.cat(inputs) if inputs else None,
        )


@dataclass(frozen=True, eq=False)
class PairSide:
    """Where the pairs find their factors on one side.

    Attributes:
        sets: The set of each pair.
        outputs: The output of each pair among the K outputs; None if a pair has all of them.
    """

    sets: Int64[Tensor, " P"]
    outputs: Int64[Tensor, " P"] | None


def set_factors(jacobian: LayerJacobian, num_states: int, num_sets: int) -> SetFactors:
    """Arrange a layer's Jacobian by weight states, sets and points, in this order of its rows."""
    if not isinstance(jacobian, OuterProductJacobian):
        values = jacobian.to_dense()
        return SetFactors(values.unflatten(1, (num_states, num_sets, -1)).movedim(0, 1))
    inputs = jacobian.inputs[:, 0].unflatten(0, (num_states, num_sets, -1))
    grads = jacobian.output_grads[:, :, 0].unflatten(1, (num_states, num_sets, -1)).movedim(0, 1)
    return SetFactors(grads, inputs, jacobian.has_bias)


def pair_products(
    left: SetFactors, right: SetFactors, x: PairSide, y: PairSide, num_steps: int
) -> Float[Tensor, "S Q P K n J m"]:
    """Multiply the layer's gradients of both sides of every pair, at every node.

    Args:
        left: At S steps times the nodes of the left side, or one.
        right: At S steps times the nodes of the right side, or one; the other side's one belongs to all of them.
        x: Which factors on the left.
        y: Which factors on the right.
        num_steps: S.
    """
    a, i = arrange_by_pairs(left.output_grads, x)
    b, j = arrange_by_pairs(right.output_grads, y)
    n, m = left.output_grads.shape[3], right.output_grads.shape[3]
    products = products_of_pairs(arrange_by_steps(a, num_steps), arrange_by_steps(b, num_steps), i, j)
    products = torch.unflatten(torch.unflatten(products, -1, (-1, m)), -3, (-1, n))
    if left.inputs is None or right.inputs is None:
        return products
    own, other = arrange_by_steps(left.inputs, num_steps), arrange_by_steps(right.inputs, num_steps)
    inputs = products_of_pairs(own, other, x.sets, y.sets)
    if left.has_bias:
        inputs = inputs + 1
    return products * inputs[..., None, :, None, :]


def arrange_by_pairs(
    output_grads: Float[Tensor, "L K U n d"], side: PairSide
) -> tuple[Float[Tensor, "L sets rows d"], Int64[Tensor, " P"]]:
    """Arrange output gradients so that each pair has one matrix of rows, and return which one it is."""
    _, _, num_sets, _, _ = output_grads.shape
    if side.outputs is None:
        return output_grads.transpose(1, 2).flatten(2, 3), side.sets
    return output_grads.flatten(1, 2), side.outputs * num_sets + side.sets


def arrange_by_steps(factors: Float[Tensor, "L ..."], num_steps: int) -> Float[Tensor, "S Q ..."]:
    """Split weight states into steps and their nodes."""
    return torch.unflatten(factors, 0, (num_steps, -1))


def products_of_pairs(
    x: Float[Tensor, "S Qx U rows d"],
    y: Float[Tensor, "S Qy V columns d"],
    i: Int64[Tensor, " P"],
    j: Int64[Tensor, " P"],
) -> Float[Tensor, "S Q pairs rows columns"]:
    """Multiply the rows of set i_p on the left with those of set j_p on the right; once if all pairs are the same."""
    if y.shape[2] == 1:  # one matrix product instead of one for each pair
        joint = torch.unflatten(x.flatten(2, 3) @ y[:, :, 0].mT, 2, (x.shape[2], -1))
        return joint if x.shape[2] == 1 else factors_of_pairs(joint, i)
    if x.shape[2] == 1:
        return products_of_pairs(y, x, j, i).mT
    return factors_of_pairs(x, i) @ factors_of_pairs(y, j).mT


def factors_of_pairs(factors: Float[Tensor, "S Q sets ..."], index: Int64[Tensor, " P"]) -> Float[Tensor, "S Q P ..."]:
    """Select each pair's factors; they are the same tensor where each pair has its own, in order."""
    if len(index) == factors.shape[2] and torch.equal(index, torch.arange(len(index), device=index.device)):
        return factors
    return factors.index_select(2, index)
