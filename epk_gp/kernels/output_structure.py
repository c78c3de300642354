"""What a kernel makes of the C x C block K(x, x') of two points: all of it, its diagonal, its trace or its sum."""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from numbers import Integral
from typing import Literal, final

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

Outputs = Literal["full", "independent", "trace", "sum"] | int


@dataclass(frozen=True)
class OutputStructure(ABC):
    """What a kernel makes of the C x C block K(x, x') of two points.

    Between N and M points a kernel is K matrices of (N * R) x (M * R) numbers. Rows are point-major: row i * R + k is
    output k of point i. A structure is a value: two of them are equal if they make the same of every block.

    Attributes:
        num_outputs: C, the network's outputs.
    """

    num_outputs: int

    @property
    @abstractmethod
    def rows_per_point(self) -> int:
        """R, the rows of a matrix that belong to one point."""

    @property
    @abstractmethod
    def num_matrices(self) -> int:
        """K, the matrices between two sets of points."""

    @abstractmethod
    def evaluate(
        self, kernel: PathKernel, a: Points, b: Points, options: ComputeOptions
    ) -> Float[Tensor, "K rows cols"]:
        """Compute the matrices between N and M points, (K, N * R, M * R)."""

    @abstractmethod
    def reduce_blocks(self, blocks: Float[Tensor, "n C C"]) -> Float[Tensor, "n K R R"]:
        """Return what the structure makes of each of n blocks K(x_i, x_i)."""

    @abstractmethod
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

    @abstractmethod
    def sketch_coefficients(
        self, run: Trajectory, classes: Int64[Tensor, " U"], seed: int
    ) -> Float64[Tensor, "nodes K C"]:
        """Return the sums of outputs whose gradients are sketched, at each node.

        Args:
            run: The run whose steps are the nodes.
            classes: Those of the structure's K matrices that are wanted.
            seed: Draws the signs of the outputs, where one sum stands for all of them.
        """

    @final
    def diagonal(self, blocks: Float[Tensor, "n C C"]) -> Float[Tensor, "K rows"]:
        """Return the diagonals, (K, n * R), of the matrices between n points and themselves."""
        return diagonals(self.reduce_blocks(blocks))


@final
@dataclass(frozen=True)
class FullOutputs(OutputStructure):
    """All of the block: one matrix with C rows per point."""

    @property
    def rows_per_point(self) -> int:
        """R = C."""
        return self.num_outputs

    @property
    def num_matrices(self) -> int:
        """K = 1."""
        return 1

    def evaluate(
        self, kernel: PathKernel, a: Points, b: Points, options: ComputeOptions
    ) -> Float[Tensor, "K rows cols"]:
        """Compute the blocks and flatten them point-major."""
        K = kernel.block(a, b, options)
        return K.reshape(1, K.shape[0] * K.shape[1], K.shape[2] * K.shape[3])

    def reduce_blocks(self, blocks: Float[Tensor, "n C C"]) -> Float[Tensor, "n K R R"]:
        """Return the blocks."""
        return blocks[:, None]

    def weights_on_outputs(
        self, pairs: SetPairs, matrices: Int64[Tensor, " P"], weights: Float[Tensor, "P rows cols"]
    ) -> tuple[SetPairs, Float[Tensor, "Q K n L m"]]:
        """Weigh every pair of outputs."""
        C = self.num_outputs
        return pairs, weights.unflatten(-1, (-1, C)).unflatten(1, (-1, C)).permute(0, 2, 1, 4, 3)

    def sketch_coefficients(
        self, run: Trajectory, classes: Int64[Tensor, " U"], seed: int
    ) -> Float64[Tensor, "nodes K C"]:
        """Return every output."""
        return torch.eye(self.num_outputs, dtype=torch.float64).expand(run.num_steps, -1, -1)


@final
@dataclass(frozen=True)
class PerClassOutputs(OutputStructure):
    """The block's diagonal: one matrix per output, K(x, x')[c, c]."""

    @property
    def rows_per_point(self) -> int:
        """R = 1."""
        return 1

    @property
    def num_matrices(self) -> int:
        """K = C."""
        return self.num_outputs

    def evaluate(
        self, kernel: PathKernel, a: Points, b: Points, options: ComputeOptions
    ) -> Float[Tensor, "K rows cols"]:
        """Compute each output's kernel with itself."""
        return kernel.block_per_class(a, b, options)

    def reduce_blocks(self, blocks: Float[Tensor, "n C C"]) -> Float[Tensor, "n K R R"]:
        """Return the blocks' diagonals."""
        return blocks.diagonal(dim1=-2, dim2=-1)[..., None, None]

    def weights_on_outputs(
        self, pairs: SetPairs, matrices: Int64[Tensor, " P"], weights: Float[Tensor, "P rows cols"]
    ) -> tuple[SetPairs, Float[Tensor, "Q K n L m"]]:
        """Weigh each pair's own output."""
        return replace(pairs, classes=matrices), weights[:, None, :, None]

    def sketch_coefficients(
        self, run: Trajectory, classes: Int64[Tensor, " U"], seed: int
    ) -> Float64[Tensor, "nodes K C"]:
        """Return the outputs that are wanted."""
        return torch.eye(self.num_outputs, dtype=torch.float64)[classes.cpu()].expand(run.num_steps, -1, -1)


@final
@dataclass(frozen=True)
class TraceOutputs(OutputStructure):
    """The block's trace: one scalar kernel, sum_c K(x, x')[c, c]."""

    @property
    def rows_per_point(self) -> int:
        """R = 1."""
        return 1

    @property
    def num_matrices(self) -> int:
        """K = 1."""
        return 1

    def evaluate(
        self, kernel: PathKernel, a: Points, b: Points, options: ComputeOptions
    ) -> Float[Tensor, "K rows cols"]:
        """Compute the blocks' traces."""
        return kernel.trace_block(a, b, options)[None]

    def reduce_blocks(self, blocks: Float[Tensor, "n C C"]) -> Float[Tensor, "n K R R"]:
        """Return the blocks' traces."""
        return blocks.diagonal(dim1=-2, dim2=-1).sum(-1)[:, None, None, None]

    def weights_on_outputs(
        self, pairs: SetPairs, matrices: Int64[Tensor, " P"], weights: Float[Tensor, "P rows cols"]
    ) -> tuple[SetPairs, Float[Tensor, "Q K n L m"]]:
        """Weigh the trace, whose terms are differentiated together."""
        return replace(pairs, is_traced=True), weights[:, None, :, None]

    def sketch_coefficients(
        self, run: Trajectory, classes: Int64[Tensor, " U"], seed: int
    ) -> Float64[Tensor, "nodes K C"]:
        """Return signs whose average over nodes gives the trace."""
        return trace_coefficients(run, seed)


@final
@dataclass(frozen=True)
class SumOutputs(OutputStructure):
    """The block's sum, sum_{c, d} K(x, x')[c, d]: the scalar kernel of the sum of the outputs."""

    @property
    def rows_per_point(self) -> int:
        """R = 1."""
        return 1

    @property
    def num_matrices(self) -> int:
        """K = 1."""
        return 1

    def evaluate(
        self, kernel: PathKernel, a: Points, b: Points, options: ComputeOptions
    ) -> Float[Tensor, "K rows cols"]:
        """Compute the blocks of some rows at a time, and keep only their sums over outputs."""
        size = summed_block_points(options.memory_budget, self.num_outputs, len(b))
        sums = [kernel.block(rows, b, options).sum((1, 3)) for rows in _split_rows(a, size)]
        return torch.cat(sums)[None]

    def reduce_blocks(self, blocks: Float[Tensor, "n C C"]) -> Float[Tensor, "n K R R"]:
        """Return the blocks' sums."""
        return blocks.sum((-2, -1))[:, None, None, None]

    def weights_on_outputs(
        self, pairs: SetPairs, matrices: Int64[Tensor, " P"], weights: Float[Tensor, "P rows cols"]
    ) -> tuple[SetPairs, Float[Tensor, "Q K n L m"]]:
        """Weigh the sum of the outputs, which is differentiated as one output."""
        return replace(pairs, is_summed=True), weights[:, None, :, None]

    def sketch_coefficients(
        self, run: Trajectory, classes: Int64[Tensor, " U"], seed: int
    ) -> Float64[Tensor, "nodes K C"]:
        """Return the sum of all outputs."""
        return torch.ones(run.num_steps, 1, self.num_outputs, dtype=torch.float64)


_STRUCTURES: dict[str, type[OutputStructure]] = {
    "full": FullOutputs,
    "independent": PerClassOutputs,
    "trace": TraceOutputs,
    "sum": SumOutputs,
}


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
    if isinstance(given, bool) or not isinstance(given, Integral | str):
        raise TypeError(f"outputs must be one of {list(_STRUCTURES)} or a class index: got {outputs!r}.")
    if not isinstance(outputs, str):
        if not 0 <= outputs < num_outputs:
            raise ValueError(f"a class index must lie in 0..{num_outputs - 1} (the network's outputs): got {outputs}.")
        return PerClassOutputs(num_outputs), torch.tensor(int(outputs))
    if outputs not in _STRUCTURES:
        raise ValueError(f"outputs must be one of {list(_STRUCTURES)} or a class index: got {outputs!r}.")
    structure = _STRUCTURES[outputs](num_outputs)
    return structure, torch.arange(num_outputs) if outputs == "independent" else torch.tensor(0)


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
