"""The sketch of a path kernel: k numbers for a point, whose inner products are the kernel's values in expectation."""

import warnings
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.verification import with_plan
from epk_gp.autodiff.sketches import draw_signs, seeded_generator
from epk_gp.core.options import ComputeOptions
from epk_gp.core.step import fingerprint
from epk_gp.core.losses import Head
from epk_gp.core.inputs import Points
from epk_gp.core.show import progress_bar, tracked
from epk_gp.core.trajectory import Trajectory, flat_state
from epk_gp.distributed.job import Place
from epk_gp.distributed.planned_pieces import PlannedPieces
from epk_gp.gram.context import require_gradients_of_rows
from epk_gp.autodiff.sketches import hadamard_matrix, hadamard_order
from epk_gp.gram.sketch import PIECE_BLOCKS, NodeSketch, node_products
from epk_gp.gram.sketch import nodes_trajectory
from epk_gp.quadrature.paths import WeightPath, straight


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
        path: Which the nodes of test copies lie on, where there are any.
    """

    trajectory: Trajectory
    nodes: int | None
    head: Head
    coefficients: Float[Tensor, "nodes K C"]
    num_features: int
    seed: int
    path: WeightPath = straight()

    @cached_property
    def run(self) -> Trajectory:
        """The run whose steps are the nodes."""
        if self.nodes is None:
            return self.trajectory
        return nodes_trajectory(self.trajectory, self.nodes, path=self.path)

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

    def features(self, points: Points, options: ComputeOptions = ComputeOptions()) -> Float[Tensor, "n K k"]:
        """Compute the features of points.

        Args:
            points: n points, already checked against the run.
            options: `memory_budget`, `progress`, `checkpoint` and `executor`.
        """
        model = self.trajectory.model_for(points.X)
        require_gradients_of_rows(model)
        had_dense_plan = model.cache.needs_dense_plan

        def compute(net: PlannedModel) -> Tensor:
            return self._features(net, points, options)

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
        model = self.trajectory.model_for(a.X)
        return with_plan(self.trajectory, model, lambda net: self._products(net, a, b, options))

    def multiplications_per_pair(self, X: Shaped[Tensor, "n ..."]) -> int:
        """Count the multiplications that a value of `products` costs: for points like these, at all nodes."""
        model = self.trajectory.model_for(X)
        return with_plan(
            self.trajectory, model, lambda net: self._of_copy(net, is_train=False).multiplications_per_pair(X)
        )

    def _products(
        self, net: PlannedModel, a: Points, b: Points, options: ComputeOptions
    ) -> tuple[Tensor, Tensor, Tensor]:
        K, spec, same = self.coefficients.shape[1], net.model.spec, a is b
        result = torch.empty(K, len(a), len(b), dtype=spec.dtype, device=spec.device)
        of_a, of_b = (result.new_empty(len(points), K) for points in (a, b))
        pieces = ProductPieces(self, a, b, options.memory_budget, plan=net.plan)
        largest = max((len(rows) for rows in (*pieces.rows, *pieces.columns)), default=0)
        computed = self._computed(pieces, options, largest**2 * K * net.itemsize)
        bar = tracked(pieces.places, "kernel", unit="tile", shown=options.progress)
        with closing(computed):
            for (i, j), found in zip(bar, computed, strict=True):
                (n, m), block = (pieces.rows[i], pieces.columns[j]), found["block"].to(result)
                result[:, n[:, None], m] = block
                of_a[n], of_b[m] = found["left"].to(result), found["right"].to(result)
                if same and i != j:
                    result[:, m[:, None], n] = block.mT
        return result, of_a, of_b

    def _features(self, net: PlannedModel, points: Points, options: ComputeOptions) -> Tensor:
        spec, K, k = net.model.spec, self.coefficients.shape[1], self.num_features
        result = torch.empty(len(points), K, k, dtype=spec.dtype, device=spec.device)
        pieces = FeaturePieces(self, points, plan=net.plan)
        num_bytes = max(map(len, pieces.rows.values()), default=0) * K * k * net.itemsize
        computed = self._computed(pieces, options, num_bytes)
        with closing(computed), progress_bar(len(points), "features", unit="point", shown=options.progress) as bar:
            for rows, found in zip(pieces.rows.values(), computed, strict=True):
                result[rows] = found["features"].to(result)
                bar.update(len(rows))
        return result

    def _computed(
        self, pieces: "FeaturePieces | ProductPieces", options: ComputeOptions, num_bytes: int
    ) -> Generator[dict[str, Tensor], None, None]:
        """Compute pieces here or by workers, and give them in their order."""
        return pieces.results("points", pieces.places, options, lambda: self._identity(pieces), num_bytes)

    def _of_copy(self, net: PlannedModel, is_train: bool) -> NodeSketch:
        run = self.training_run if is_train else self.run
        reference = torch.empty(0, dtype=net.model.spec.dtype, device=net.model.spec.device)
        states = tuple(flat_state(run, s, reference) for s in range(run.num_steps))
        coefficients = run.step_sizes.sqrt()[:, None, None] * self.coefficients
        key = (self.seed, self.run.digest)
        return NodeSketch(net, states, self.head, coefficients.to(reference), self.num_features, key)

    def _identity(self, pieces: "FeaturePieces | ProductPieces") -> str:
        return fingerprint(
            self.run.digest, self.head, self.coefficients, self.num_features, self.seed, *pieces.identity
        )


@dataclass(frozen=True, eq=False)
class FeaturePieces(PlannedPieces):
    """Features as pieces for workers: some blocks of points, of one copy.

    Attributes:
        sketch: What is computed.
        points: The points.
    """

    sketch: PathSketch
    points: Points

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs that go through its network."""
        return self.sketch.trajectory, self.points.X

    def piece(self, place: Place) -> dict[str, Tensor]:
        """Compute the features of the points of a piece."""
        X = self.net.model.spec.cast(self.points.X[self.rows[place]])
        return {"features": self._sketches[bool(place[0])].piece(X)}

    @property
    def identity(self) -> list[object]:
        """What tells the points from others."""
        return [self.points.X, self.points.is_train]

    @property
    def places(self) -> list[Place]:
        """The pieces in their order."""
        return list(self.rows)

    @cached_property
    def rows(self) -> dict[Place, Int64[Tensor, " rows"]]:
        """Which points each piece has: of training copies first."""
        found: dict[Place, Tensor] = {}
        for is_train, sketch in self._sketches.items():
            rows = self.points.copies(is_train)
            size = PIECE_BLOCKS * sketch.block_rows(self.net.model.spec.cast(self.points.X[rows[:1]]))
            found |= {(int(is_train), number): part for number, part in enumerate(rows.split(size))}
        return found

    @cached_property
    def _sketches(self) -> dict[bool, NodeSketch]:
        copies = (is_train for is_train in (True, False) if len(self.points.copies(is_train)))
        return {is_train: self.sketch._of_copy(self.net, is_train) for is_train in copies}


@dataclass(frozen=True, eq=False)
class ProductPieces(PlannedPieces):
    """Products as pieces for workers: some points of one copy on either side.

    Attributes:
        sketch: What is computed.
        a: The points on the left.
        b: Those on the right; the same object as a for a symmetric block.
        memory_budget: Bytes for the layer Jacobians and products of a piece.
    """

    sketch: PathSketch
    a: Points
    b: Points
    memory_budget: int

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs that go through its network."""
        return self.sketch.trajectory, self.a.X

    def piece(self, place: Place) -> dict[str, Tensor]:
        """Compute the products of the points of a piece, and those of each point with itself."""
        i, j = place
        (own, n), (other, m) = self._left[i], self._right[j]
        X = self.a.X[n]
        Y = X if self.a is self.b and i == j else self.b.X[m]
        block, left, right = node_products(own, X, other, Y)
        return {"block": block, "left": left, "right": right.clone() if right is left else right}

    @property
    def identity(self) -> list[object]:
        """What tells the points from others."""
        a, b = self.a, self.b
        return ["products", self.memory_budget, a is b, a.X, b.X, a.is_train, b.is_train]

    @cached_property
    def places(self) -> list[Place]:
        """The pieces in their order; of a symmetric block, those on and above the diagonal."""
        same = self.a is self.b
        return [(i, j) for i in range(len(self.rows)) for j in range(i if same else 0, len(self.columns))]

    @cached_property
    def rows(self) -> list[Int64[Tensor, " rows"]]:
        """The points of each part on the left."""
        return [rows for _, rows in self._left]

    @cached_property
    def columns(self) -> list[Int64[Tensor, " columns"]]:
        """The points of each part on the right."""
        return [rows for _, rows in self._right]

    @cached_property
    def _left(self) -> list[tuple[NodeSketch, Tensor]]:
        return self._parts(self.a)

    @cached_property
    def _right(self) -> list[tuple[NodeSketch, Tensor]]:
        return self._left if self.a is self.b else self._parts(self.b)

    def _parts(self, points: Points) -> list[tuple[NodeSketch, Tensor]]:
        """Split points by copy, and so that the layer Jacobians of a part fit into the budget."""
        return [
            (sketch, rows)
            for is_train in (True, False)
            for indices in [points.copies(is_train)]
            if len(indices)
            for sketch in [self.sketch._of_copy(self.net, is_train)]
            for rows in indices.split(sketch.product_rows(points.X[:1], self.memory_budget))
        ]


def trace_coefficients(run: Trajectory, seed: int) -> Float[Tensor, "nodes 1 C"]:
    """Return signs of the outputs at each node whose average of v v^T is I.

    They are the rows of a Hadamard matrix in turn, restricted to C columns whose signs are drawn: the average over all
    rows is I exactly, and that of any one row over all draws.
    """
    C, count = run.num_outputs, run.num_steps
    H = hadamard_matrix(hadamard_order(C, count)).to(torch.float64)
    signs = draw_signs(C, seeded_generator(seed, run.digest, "outputs"), H)
    return (H[torch.arange(count) % len(H), :C] * signs)[:, None]
