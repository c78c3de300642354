"""Where kernel values come from, and how GPyTorch's rows become the engine's points."""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Shaped
from torch import Tensor

from epk_gp.core.head import Head
from epk_gp.core.points import Points
from epk_gp.core.trajectory import Trajectory
from epk_gp.kernels.cache import BlockCache
from epk_gp.kernels.tagging import split_copy
from epk_gp.quadrature.rules import QuadratureRule

Reduction = Literal["full", "per_class", "trace", "sum"]


@dataclass(frozen=True, eq=False)
class KernelConfig:
    """Where blocks come from. All copies of a kernel share it: it is never changed, and the cache only saves time.

    Attributes:
        trajectory: The run.
        reduction: What to do with the C x C block of two points: keep it ("full"), keep its diagonal ("per_class"), or
            add up its diagonal ("trace") or all of it ("sum").
        head: "logits" or "log_softmax".
        rule: Quadrature rule.
        memory_budget: Bytes that a computation may use beside its result.
        cache: Blocks computed so far.
    """

    trajectory: Trajectory
    reduction: Reduction
    head: Head
    rule: QuadratureRule
    memory_budget: int
    cache: BlockCache

    def __deepcopy__(self, memo: dict[int, object]) -> "KernelConfig":
        return self

    @property
    def num_rows(self) -> int:
        """Rows of a matrix per point: C for "full", else 1."""
        return self.trajectory.num_outputs if self.reduction == "full" else 1

    @property
    def num_matrices(self) -> int:
        """Matrices per block: C for "per_class", else 1."""
        return self.trajectory.num_outputs if self.reduction == "per_class" else 1


def validate_points(trajectory: Trajectory, x: Shaped[Tensor, "*n columns"]) -> None:
    """Refuse points that the kernel cannot take.

    Raises:
        TypeError: Complex or Boolean entries.
        ValueError: Wrong width, a copy column that is not 0 or 1, a value that is not finite, or a gradient with
            respect to integers is asked for.
    """
    if not isinstance(x, Tensor):
        raise TypeError(
            f"points must be a torch.Tensor: got {type(x).__name__}. Make them with train_copy or test_copy."
        )
    width = torch.Size(trajectory.input_shape).numel() + 1
    if x.ndim < 2 or x.shape[-1] != width:
        raise ValueError(
            f"points must have shape (..., n, {width}), flattened inputs {trajectory.input_shape} and the copy column: "
            f"got {tuple(x.shape)}. Make them with train_copy or test_copy."
        )
    if not x.shape[-2]:
        raise ValueError(f"there must be at least one point: got shape {tuple(x.shape)}.")
    if not trajectory.inputs.is_floating_point() and needs_graph(x):
        raise ValueError(
            f"points must not require gradients where the network takes integers ({trajectory.inputs.dtype}): got "
            "requires_grad=True. Pass x.detach(), or work under torch.no_grad()."
        )
    split_copy(x)


def as_points(trajectory: Trajectory, x: Shaped[Tensor, "n columns"]) -> Points:
    """Translate GPyTorch's rows into the engine's points.

    Args:
        trajectory: The run, which knows the shape and the kind of its inputs.
        x: (n, D + 1).

    Raises:
        ValueError: A fraction where the network takes integers.
    """
    X, is_train = split_copy(x)
    X = X.reshape(-1, *trajectory.input_shape)
    if not trajectory.inputs.is_floating_point() and X.is_floating_point():
        whole = X.to(trajectory.inputs.dtype)
        if not torch.equal(whole.to(X.dtype), X):
            raise ValueError(
                f"inputs must be whole numbers, as the run was trained on {trajectory.inputs.dtype}: got a fraction. "
                "Round them."
            )
        X = whole
    same = bool((is_train == is_train[:1]).all())
    return Points(X, bool(is_train[0]) if same and len(is_train) else is_train)


def needs_graph(x: Shaped[Tensor, "*n"]) -> bool:
    """Say whether derivatives with respect to x are wanted."""
    return x.requires_grad and torch.is_grad_enabled()


def same_points(x: Shaped[Tensor, "*n"], y: Shaped[Tensor, "*m"]) -> bool:
    """Say whether two sets of points are equal in value and shape."""
    return x is y or (x.dtype == y.dtype and torch.equal(x, y))
