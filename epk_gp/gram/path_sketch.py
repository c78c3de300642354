"""The sketch of a path kernel: k numbers for a point, whose inner products are the kernel's values in expectation."""

import warnings
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Shaped
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.autodiff.planned_model import PlannedModel
from epk_gp.autodiff.planning import with_plan
from epk_gp.autodiff.sketches import draw_signs, seeded_generator
from epk_gp.core.compute_options import ComputeOptions
from epk_gp.core.fingerprint import fingerprint
from epk_gp.core.head import Head
from epk_gp.core.points import Points
from epk_gp.core.trajectory import Trajectory, flat_state
from epk_gp.gram.hadamard import hadamard_matrix, hadamard_order
from epk_gp.gram.node_sketch import PIECE_BLOCKS, NodeSketch, compute_pieces, node_products
from epk_gp.gram.path_nodes import nodes_trajectory
from epk_gp.storage.partial_sums import PartialSums


@dataclass(frozen=True, eq=False)
class PathSketch:
    """A random map from points to K vectors of k numbers each (docs/theory.md, section 9).

        z_j(x) = sum_n sqrt(w_n) R_n J_n(x)^T v_nj,    E <z_i(x), z_j(x')> = sum_n w_n v_ni^T J_n(x) J_n(x')^T v_nj

    over the nodes n of a path of lengths w_n, with sketches R_n that are drawn from the seed and the run.

    Attributes:
        trajectory: The run.
        nodes: Nodes of its whole path; None takes each of its steps at its start.
        head: Whether f is the logits or their log-softmax.
        coefficients: v_nj, the coefficients of the C outputs in each of K sums over outputs.
        num_features: k.
        seed: The seed.
    """

    trajectory: Trajectory
    nodes: int | None
    head: Head
    coefficients: Float[Tensor, "nodes K C"]
    num_features: int
    seed: int

    @cached_property
    def run(self) -> Trajectory:
        """The run whose steps are the nodes."""
        return self.trajectory if self.nodes is None else nodes_trajectory(self.trajectory, self.nodes)

    @cached_property
    def training_run(self) -> Trajectory:
        """The same at the starts of the steps that the nodes fall into, as training copies take them."""
        if self.nodes is None:
            return self.trajectory
        return nodes_trajectory(self.trajectory, self.nodes, is_train=True)

    def with_coefficients(self, coefficients: Float[Tensor, "nodes L C"]) -> "PathSketch":
        """Return the sketch of other sums over outputs, with the same nodes and the same random numbers."""
        other = replace(self, coefficients=coefficients)
        vars(other).update({name: vars(self)[name] for name in ("run", "training_run") if name in vars(self)})
        return other

    def features(
        self, points: Points, options: ComputeOptions = ComputeOptions(), executor: Executor | None = None
    ) -> Float[Tensor, "n K k"]:
        """Compute the features of points.

        Args:
            points: n points, already checked against the run.
            options: `memory_budget`, `progress` and `checkpoint`.
            executor: Computes pieces of the points.
        """
        model = self.trajectory.model_for(points.X)
        had_dense_plan = model.cache.needs_dense_plan

        def compute(net: PlannedModel) -> Tensor:
            return self._features(net, points, options, executor)

        features = with_plan(self.trajectory, model, compute)
        if model.cache.needs_dense_plan and not had_dense_plan:
            warnings.warn(
                "These points use the network's parameters in another way than all before: features that were computed "
                "before are of another sketch. Compute them again, in this session.",
                stacklevel=3,
            )
        return features

    def input_gradients(self, points: Points, weights: Float[Tensor, "n K k"]) -> Shaped[Tensor, "n ..."]:
        """Differentiate the weighted sum of the features of points with respect to the points.

        Args:
            points: n points, of floating-point numbers.
            weights: Of their features.
        """
        model = self.trajectory.model_for(points.X)

        def compute(net: PlannedModel) -> Tensor:
            result = torch.zeros_like(points.X)
            for is_train in (True, False):
                rows = points.copies(is_train)
                if len(rows):
                    result[rows] = self._of_copy(net, is_train).input_gradients(points.X[rows], weights[rows])
            return result

        return with_plan(self.trajectory, model, compute)

    def products(
        self, a: Points, b: Points, options: ComputeOptions = ComputeOptions()
    ) -> tuple[Float[Tensor, "K n m"], Float[Tensor, "n K"], Float[Tensor, "m K"]]:
        """Compute what the inner products of features are in expectation: no sketch, but the same nodes and v_n.

        Args:
            a: n points.
            b: m points; the same object as a at half the cost.
            options: `memory_budget` and `progress`.

        Returns:
            The products, and those of each of the n and of the m points with itself.
        """
        K, model = self.coefficients.shape[1], self.trajectory.model_for(a.X)

        def compute(net: PlannedModel) -> tuple[Tensor, Tensor, Tensor]:
            spec = net.model.spec
            result = torch.empty(K, len(a), len(b), dtype=spec.dtype, device=spec.device)
            squares = [result.new_empty(len(points), K) for points in (a, b)]
            left = self._parts(net, a, options)
            right = left if a is b else self._parts(net, b, options)
            pairs = [(i, j) for i in range(len(left)) for j in range(i + 1 if a is b else len(right))]
            for i, j in tqdm(pairs, desc="tiles", disable=not options.progress):
                (own, n), (other, m) = left[i], right[j]
                X = a.X[n]
                block, squares[0][n], squares[1][m] = node_products(own, X, other, X if a is b and i == j else b.X[m])
                result[:, n[:, None], m] = block
                if a is b and i != j:
                    result[:, m[:, None], n] = block.mT
            return result, squares[0], squares[1]

        return with_plan(self.trajectory, model, compute)

    def multiplications_per_pair(self, X: Shaped[Tensor, "n ..."]) -> int:
        """Count the multiplications that a value of `products` costs: for points like these, at all nodes."""
        model = self.trajectory.model_for(X)
        return with_plan(
            self.trajectory, model, lambda net: self._of_copy(net, is_train=False).multiplications_per_pair(X)
        )

    def _parts(self, net: PlannedModel, points: Points, options: ComputeOptions) -> list[tuple[NodeSketch, Tensor]]:
        """Split points by copy, and so that the layer Jacobians of a part fit into the budget."""
        return [
            (sketch, rows)
            for is_train in (True, False)
            for indices in [points.copies(is_train)]
            if len(indices)
            for sketch in [self._of_copy(net, is_train)]
            for rows in indices.split(sketch.product_rows(points.X[:1], options.memory_budget))
        ]

    def _features(
        self, net: PlannedModel, points: Points, options: ComputeOptions, executor: Executor | None
    ) -> Tensor:
        spec, K, k = net.model.spec, self.coefficients.shape[1], self.num_features
        result = torch.empty(len(points), K, k, dtype=spec.dtype, device=spec.device)
        sums = self._open_partial_sums(net, points, options)
        with tqdm(total=len(points), desc="points", disable=not options.progress) as bar:
            for is_train in (True, False):
                rows = points.copies(is_train)
                if not len(rows):
                    continue
                sketch = self._of_copy(net, is_train)
                X = spec.cast(points.X)
                size = PIECE_BLOCKS * sketch.block_rows(X[rows[:1]])
                pieces = rows.split(size)
                names = [f"{is_train:d}-{number}" for number in range(len(pieces))]
                missing = []
                for name, piece in zip(names, pieces, strict=True):
                    stored = {} if sums is None else sums.load(name)[0]
                    if stored:
                        result[piece] = stored["features"].to(result)
                        bar.update(len(piece))
                    else:
                        missing.append((name, piece))
                ahead = max(2, options.memory_budget // (size * K * k * result.itemsize))
                computed = compute_pieces(sketch, (X[piece] for _, piece in missing), executor, ahead)
                for (name, piece), features in zip(missing, computed, strict=True):
                    if sums is not None:
                        sums.save(name, {"features": features}, 1)
                    result[piece] = features
                    bar.update(len(piece))
        return result

    def _of_copy(self, net: PlannedModel, is_train: bool) -> NodeSketch:
        run = self.training_run if is_train else self.run
        reference = torch.empty(0, dtype=net.model.spec.dtype, device=net.model.spec.device)
        states = tuple(flat_state(run, s, reference) for s in range(run.num_steps))
        coefficients = run.step_sizes.sqrt()[:, None, None] * self.coefficients
        key = (self.seed, self.run.digest)
        return NodeSketch(net, states, self.head, coefficients.to(reference), self.num_features, key)

    def _open_partial_sums(self, net: PlannedModel, points: Points, options: ComputeOptions) -> PartialSums | None:
        if options.checkpoint is None:
            return None
        identity = fingerprint(
            self.run.digest, self.head, self.coefficients, self.num_features, self.seed, net.plan,
            points.X, points.is_train,
        )  # fmt: skip
        return PartialSums(options.checkpoint, identity)


def trace_coefficients(run: Trajectory, seed: int) -> Float[Tensor, "nodes 1 C"]:
    """Return signs of the outputs at each node whose average of v v^T is I.

    They are the rows of a Hadamard matrix in turn, restricted to C columns whose signs are drawn: the average over all
    rows is I exactly, and that of any one row over all draws.
    """
    C, count = run.num_outputs, run.num_steps
    H = hadamard_matrix(hadamard_order(C, count)).to(torch.float64)
    signs = draw_signs(C, seeded_generator(seed, run.digest, "outputs"), H)
    return (H[torch.arange(count) % len(H), :C] * signs)[:, None]
