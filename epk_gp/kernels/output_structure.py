"""What a kernel makes of the C x C block K(x, x') of two points: all of it, its diagonal, its trace or its sum."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from epk_gp.core.inputs import Points
from epk_gp.core.options import ComputeOptions
from epk_gp.core.plans import summed_block_points
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.pairs import SetPairs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.sketch import trace_coefficients

Kind = Literal["full", "independent", "trace", "sum"]
Outputs = Kind | int

# What is made of each of n blocks K(x_i, x_i), as an equation of `torch.einsum`.
_EQUATIONS: dict[str, str] = {"full": "ncd->ncd", "independent": "ncc->nc", "trace": "ncc->n", "sum": "ncd->n"}


@dataclass(frozen=True)
class OutputStructure:
    """What a kernel makes of the C x C block K(x, x') of two points.

    Between N and M points a kernel is K matrices of (N * R) x (M * R) numbers. Rows are point-major: row i * R + k is
    output k of point i.

    Attributes:
        kind: "full" - all of the block, one matrix with C rows per point; "independent" - its diagonal, one matrix per
            output; "trace" - one scalar kernel, sum_c K(x, x')[c, c]; "sum" - the scalar kernel of the sum of the
            outputs, sum_{c, d} K(x, x')[c, d].
        num_outputs: C, the network's outputs.
    """

    kind: Kind
    num_outputs: int

    @property
    def rows_per_point(self) -> int:
        """R, the rows of a matrix that belong to one point."""
        return self.num_outputs if self.kind == "full" else 1

    @property
    def num_matrices(self) -> int:
        """K, the matrices between two sets of points."""
        return self.num_outputs if self.kind == "independent" else 1

    def evaluate(
        self, kernel: PathKernel, a: Points, b: Points, options: ComputeOptions
    ) -> Float[Tensor, "K rows cols"]:
        """Compute the matrices between N and M points, (K, N * R, M * R)."""
        if self.kind == "independent":
            return kernel.block_per_class(a, b, options)
        if self.kind == "trace":
            return kernel.trace_block(a, b, options)[None]
        if self.kind == "full":
            block = kernel.block(a, b, options)
            return block.reshape(1, block.shape[0] * block.shape[1], -1)
        size = summed_block_points(options.memory_budget, self.num_outputs, len(b))
        return torch.cat([kernel.block(rows, b, options).sum((1, 3)) for rows in _split_rows(a, size)])[None]

    def reduce_blocks(self, blocks: Float[Tensor, "n C C"]) -> Float[Tensor, "n K R R"]:
        """Return what the structure makes of each of n blocks K(x_i, x_i)."""
        R = self.rows_per_point
        return torch.einsum(_EQUATIONS[self.kind], blocks).reshape(len(blocks), self.num_matrices, R, R)

    def weights_on_outputs(
        self, pairs: SetPairs, matrices: Int64[Tensor, " P"], weights: Float[Tensor, "P rows cols"]
    ) -> tuple[SetPairs, Float[Tensor, "Q K n L m"]]:
        """Turn a sum over the structure's matrices into one over outputs of points.

        Args:
            pairs: Pairs of sets.
            matrices: Which of the K matrices each pair has.
            weights: Of the entries of that matrix.

        Returns:
            Pairs with their outputs, and the weights of these (`PathKernel.pairs_input_gradients`).
        """
        R, classes = self.rows_per_point, matrices if self.kind == "independent" else None
        pairs = replace(pairs, classes=classes, is_summed=self.kind == "sum", is_traced=self.kind == "trace")
        return pairs, weights.unflatten(-1, (-1, R)).unflatten(1, (-1, R)).permute(0, 2, 1, 4, 3)

    def sketch_coefficients(
        self, run: Trajectory, classes: Int64[Tensor, " U"], seed: int
    ) -> Float64[Tensor, "nodes K C"]:
        """Return the sums of outputs whose gradients are sketched, at each node.

        Args:
            run: The run whose steps are the nodes.
            classes: Those of the structure's K matrices that are wanted.
            seed: Draws signs of the outputs, whose average over nodes gives the trace.
        """
        if self.kind == "trace":
            return trace_coefficients(run, seed)
        every = torch.eye(self.num_outputs, dtype=torch.float64)
        rows = {"full": every, "independent": every[classes.cpu()], "sum": torch.ones_like(every[:1])}[self.kind]
        return rows.expand(run.num_steps, -1, -1)

    def diagonal(self, blocks: Float[Tensor, "n C C"]) -> Float[Tensor, "K rows"]:
        """Return the diagonals, (K, n * R), of the matrices between n points and themselves."""
        return diagonals(self.reduce_blocks(blocks))


def parse_outputs(outputs: Outputs, num_outputs: int) -> tuple[OutputStructure, Int[Tensor, "*batch"]]:
    """Return the structure that a kernel's argument `outputs` asks for, and the matrices that the kernel takes of it.

    Args:
        outputs: "full", "independent", "trace", "sum" or a class index; see `EPKKernel`.
        num_outputs: C.

    Returns:
        The structure, and the index of a matrix for every element of the kernel's batch: 0 .. C - 1 for "independent"
        (batch shape [C]), the class index or 0 else (batch shape []).

    Raises:
        TypeError: `outputs` is neither a string nor an integer.
        ValueError: `outputs` is an unknown string, or no class of the network has that index.
    """
    given: object = outputs  # NumPy's integers count too
    message = f"outputs must be one of {list(_EQUATIONS)} or a class index: got {outputs!r}."
    if isinstance(given, bool) or not isinstance(given, Integral | str):
        raise TypeError(message)
    if isinstance(outputs, str):
        if outputs not in _EQUATIONS:
            raise ValueError(message)
        matrices = torch.arange(num_outputs) if outputs == "independent" else torch.tensor(0)
        return OutputStructure(outputs, num_outputs), matrices
    if not 0 <= outputs < num_outputs:
        raise ValueError(f"a class index must lie in 0..{num_outputs - 1} (the network's outputs): got {outputs}.")
    return OutputStructure("independent", num_outputs), torch.tensor(int(outputs))


def diagonals(blocks: Float[Tensor, "n K R R"]) -> Float[Tensor, "K rows"]:
    """Join the diagonals of R x R blocks, one per point and matrix, to the diagonals of the K matrices, (K, n * R)."""
    return blocks.diagonal(dim1=-2, dim2=-1).movedim(1, 0).flatten(1)


def _split_rows(a: Points, size: int) -> Iterator[Points]:
    if size >= len(a):
        yield a  # the same object: a block of points with themselves is computed at half the cost
        return
    for start in range(0, len(a), size):
        rows = slice(start, start + size)
        yield Points(a.X[rows], a.is_train if isinstance(a.is_train, bool) else a.is_train[rows])
