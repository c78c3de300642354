"""The sketch of a path kernel: features of points at a few nodes of the path."""

import hashlib
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, product

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel, combined_outputs
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import ContractionCost, LayerJacobian
from epk_gp.autodiff.sketches import FeatureSum, draw_signs, hadamard_matrix, hadamard_order, seeded_generator
from epk_gp.autodiff.verification import with_plan
from epk_gp.core.checks import ComputeOptions, door, validate_count
from epk_gp.core.inputs import Points
from epk_gp.core.losses import Head
from epk_gp.core.plans import rows_per_pass, sketched_rows
from epk_gp.core.step import Step, fingerprint
from epk_gp.core.trajectory import Trajectory, flat_state, validate_trajectory
from epk_gp.gram.accumulator import GramAccumulator
from epk_gp.gram.path_kernel import require_gradients_of_rows, require_recorded
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.quadrature.rules import WeightPath, path_identity, require_integrable, straight, stretch_of
from epk_gp.work.run import Piece, Place, RunWork, Sums, run

_RULE = "none ({} nodes of a path)"  # name of the update rule of a run that consists of nodes of another run
_SHARED_NUMBERS = 1 << 20  # outputs with at most this many gradient numbers per point share a pass over the network
_BLOCK_BYTES = 16 << 20  # products on a CPU: a third of the time of 128 MB, which need new memory for every product
NUM_NODES = 20  # error of 0.2 % for an MLP's kernel (docs/theory.md, section 9)


@door
def nodes_trajectory(
    trajectory: Trajectory, nodes: int = NUM_NODES, *, is_train: bool = False, path: WeightPath = straight()
) -> Trajectory:
    """Return a run of few steps whose kernel between test copies is the path kernel by the midpoint rule.

    The path is divided into n parts of equal length sum_s eta_s / n. The weights w(c) in the middle of each part,
    interpolated between two states of the run if necessary, are the states of the returned run:

        K(x, x') = sum_s eta_s int J_st(x) J_st(x')^T dt  =  sum_j (sum_s eta_s / n) J_{w_j}(x) J_{w_j}(x')^T + error

    Evaluate it with `QuadratureRule.left_endpoint()`, which takes each step at its start; training and test copies are
    then the same. Its last state is the trained network. For a run with one state (`tangent_trajectory`), all nodes are
    that state.

    Args:
        trajectory: The run, with S steps.
        nodes: n.
        is_train: Whether to take the weights at the start of the step that contains each node, as for training copies.
        path: The weights between the states of the run: on `straight()` steps, or on `chords(every=k)`.

    Returns:
        A run of n steps with its own digest, in memory: (n + 1) states of P weights. A run that already consists of n
        nodes of another one is returned unchanged.

    Raises:
        TypeError: `trajectory` is not a recorded run, `nodes` is not an integer, or `path` is not a path.
        ValueError: `nodes` is below 1, the steps have no length, the run is a path of averaged weights, or the path has
            chords over nodes.
    """
    validate_trajectory(trajectory)
    validate_count(nodes, "nodes")
    require_integrable(path, "a kernel by nodes")
    require_recorded(trajectory)
    if trajectory.update_rule == _RULE.format(nodes):
        if path_identity(path):
            raise ValueError(f"nodes along {path!r} must be those of a recorded run: this one is {nodes} nodes.")
        return trajectory
    ends = [0.0, *accumulate(step.lr for step in trajectory.steps)]
    if not ends[-1] > 0:
        raise ValueError(
            "the steps must have a length, for the path is divided by it: their learning rates, those of the first "
            f"parameter group, sum to {ends[-1]}. Record with a group first that learns."
        )
    along = None if is_train else path
    last = flat_state(trajectory, trajectory.num_steps, trajectory.states[0])
    states = [last] * (nodes + 1)
    if not is_one_state(trajectory):
        states[:-1] = [_state_at(trajectory, ends, (j + 0.5) / nodes * ends[-1], along) for j in range(nodes)]
    name = f"{trajectory.digest} {nodes} nodes{' of training copies' if is_train else ''}"
    name += "".join(f" along {own!r}" for own in path_identity(path))
    return run_of_states(trajectory, states, ends[-1] / nodes, _RULE.format(nodes), name.encode())


def run_of_states(
    trajectory: Trajectory, states: Sequence[Float[Tensor, " PQ"]], lr: float, update_rule: str, identity: bytes
) -> Trajectory:
    """Return a run whose steps go from state to state of the weights, each with the same length and on all points."""
    sizes, P, S = trajectory.model.sizes, trajectory.num_weights, len(states) - 1
    cut = {id(state): (state[:P], state[P:]) for state in states}  # a repeated state stays one tensor
    weights, statistics = zip(*(cut[id(state)] for state in states), strict=True)
    return replace(
        trajectory,
        states=weights,
        statistics=None if trajectory.statistics is None else statistics,
        updates=(stack_coefficients([LinearStep(lr=lr)] * len(sizes), sizes),) * S,
        steps=tuple(Step(index=j, lr=lr, batch=None) for j in range(S)),
        update_rule=update_rule,
        digest=hashlib.blake2b(identity, digest_size=16).hexdigest(),
        digests=(),
        live=None,
    )


def is_one_state(trajectory: Trajectory) -> bool:
    """Return whether a run stays at one state of the weights, like the run of a network that was not recorded."""
    states = trajectory.states
    return isinstance(states, tuple) and all(state is states[0] for state in states)


def _state_at(trajectory: Trajectory, ends: list[float], length: float, path: WeightPath | None) -> Tensor:
    """Return the weights, followed by statistics, at a given length along a path, or at the start of that step."""
    S = trajectory.num_steps
    s = min(bisect_right(ends, length), S) - 1
    if path is None:
        return flat_state(trajectory, s, trajectory.states[0])
    stretch = stretch_of(path, s, S)
    first, last = stretch.start, stretch.stop
    start, end = (flat_state(trajectory, state, trajectory.states[0]) for state in (first, last))
    return torch.lerp(start, end, (length - ends[first]) / (ends[last] - ends[first]))


_PRODUCTS = ContractionCost(1, 1)

PIECE_BLOCKS = 4  # blocks of points in one piece for workers and checkpoints


@dataclass(frozen=True, eq=False)
class NodeSketch:
    """The sum over nodes of a path of sketched gradients, for one copy of the points, dtype and device.

    The features of a point depend on its block of points by rounding, so blocks depend on the network alone.

    Attributes:
        net: The network with its plan.
        states: The weights at the n nodes, followed by statistics; one for all nodes of a run with one state.
        head: Whether f is the logits or their log-softmax.
        coefficients: Coefficients of the outputs in the gradients at each state.
        num_features: k.
        key: The values that determine the random sketches.
    """

    net: PlannedModel
    states: tuple[Float[Tensor, " PQ"], ...]
    head: Head
    coefficients: Float[Tensor, "states K C"]
    num_features: int
    key: tuple[object, ...]

    def piece(self, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n k"]:
        """Compute the features of several blocks of points."""
        parts = []
        for rows in X.split(self.block_rows(X)):
            total, node = FeatureSum(1, len(rows), self.num_features, self.states[0]), 0
            for K, jacobians in self.jacobians(rows, self._sketching):
                for k, (layer, jacobian) in product(range(K), enumerate(jacobians)):
                    generator = seeded_generator(*self.key, self.num_features, layer, node + k)
                    jacobian.of_output(k).sketch(total, 1.0, generator)
                node += K
            parts.append(total.result()[0])
        return torch.cat(parts)

    def block_rows(self, X: Shaped[Tensor, "n ..."]) -> int:
        """Return the number of points of a block, which depends only on the network."""
        _, jacobians = next(self.jacobians(X[:1], self._sketching))
        per_point = sum(jacobian.nbytes for jacobian in jacobians) + 2 * max(jacobian.nbytes for jacobian in jacobians)
        return min(sketched_rows(per_point), rows_per_pass(self.net.plan, self.net.itemsize, 1))

    def product_rows(self, X: Shaped[Tensor, "n ..."], budget: int) -> int:
        """Return the number of points whose layer Jacobians at a node take an eighth of a budget of bytes."""
        _, jacobians = next(self.jacobians(X[:1], _PRODUCTS))
        by_points = budget // (8 * sum(jacobian.nbytes for jacobian in jacobians))
        bytes_of_block = budget / 2 / 3  # three blocks, in half of the budget
        if X.device.type == "cpu":
            bytes_of_block = min(bytes_of_block, _BLOCK_BYTES)
        by_pairs = (bytes_of_block / self.net.itemsize) ** 0.5
        return max(1, min(by_points, int(by_pairs)))

    def jacobians(self, X: Shaped[Tensor, "E ..."], cost: ContractionCost) -> Iterator[tuple[int, list[LayerJacobian]]]:
        """Compute the layer Jacobians of the combined outputs, node by node, times the root of the node's length.

        Yields the number K of nodes that share a state and a pass, and their Jacobians, in the form for K outputs.
        """
        size = max(1, _SHARED_NUMBERS // self.net.model.num_weights)
        for state, nodes in zip(self.states, self.coefficients, strict=True):
            for V in nodes.split(size):
                at = WeightLocation(state)
                yield len(V), layer_jacobians(self.net, at, X, combined_outputs(self.head, V), cost)

    @property
    def _sketching(self) -> ContractionCost:
        return ContractionCost(1, 1, num_features=self.num_features)


Parts = list[tuple[NodeSketch, Int64[Tensor, " _"]]]  # groups of points of one copy, and their sketch


def _square_lengths(jacobians: list[LayerJacobian]) -> Float[Tensor, " n"]:
    products = (jacobian.pointwise_products(jacobian) for jacobian in jacobians)
    return torch.stack([own.diagonal(dim1=1, dim2=2).sum(1) for own in products]).sum(0)


@door
@dataclass(frozen=True, eq=False)
class PathSketch:
    """A random map from points to k numbers each (docs/theory.md, section 9).

        z(x) = sum_n sqrt(w_n) R_n J_n(x)^T v_n,    E <z(x), z(x')> = sum_n w_n v_n^T J_n(x) J_n(x')^T v_n

    over the nodes n of a path of lengths w_n, with sketches R_n that are drawn from the seed and the run.

    Attributes:
        trajectory: The run.
        nodes: Number of nodes of its whole path; None takes each of its steps at its start.
        head: Whether f is the logits or their log-softmax.
        coefficients: v_n, the coefficients of the C outputs at each node.
        num_features: k.
        seed: The seed.
        path: The path of the nodes of test copies, if there are nodes.
        run: The run whose steps are the nodes.
    """

    trajectory: Trajectory
    nodes: int | None
    head: Head
    coefficients: Float[Tensor, "nodes C"]
    num_features: int
    seed: int
    path: WeightPath
    run: Trajectory

    @cached_property
    def training_run(self) -> Trajectory:
        """The run of the starts of the steps that contain the nodes, for training copies."""
        if self.nodes is None:
            return self.trajectory
        return nodes_trajectory(self.trajectory, self.nodes, is_train=True)

    def features(self, points: Points, options: ComputeOptions = ComputeOptions()) -> Float[Tensor, "n k"]:
        """Compute the features of points.

        Args:
            points: n points, already checked against the run.
            options: `memory_budget`, `progress`, `checkpoint` and `executor`.
        """
        cache = self.trajectory.model.cache
        require_gradients_of_rows(self.trajectory.model)
        had_dense_plan = cache.needs_dense_plan

        def compute(net: PlannedModel) -> Tensor:
            work = FeatureWork(self, points, plan=net.plan)
            features = _reference(net).new_empty(len(points), self.num_features)
            for piece, sums in run(work, options, "features"):
                features[work.parts[piece.place[0]][1]] = sums.added["features"]
            return features

        features = with_plan(compute, points.X, self.trajectory)
        if cache.needs_dense_plan and not had_dense_plan:
            warnings.warn(
                "These points use the network's parameters in another way than all before: features that were computed "
                "before are of another sketch. Compute them again, in this session.",
                stacklevel=3,
            )
        return features

    def products(
        self, a: Points, b: Points, options: ComputeOptions = ComputeOptions()
    ) -> tuple[Float[Tensor, "n m"], Float[Tensor, " n"], Float[Tensor, " m"]]:
        """Compute the expected inner products of features: no sketch, but the same nodes and v_n.

        Args:
            a: n points.
            b: m points; if they are the same object as a, the cost is half.
            options: `memory_budget` and `progress`.

        Returns:
            The products, and the product of each of the n and of the m points with itself.
        """

        def compute(net: PlannedModel) -> tuple[Tensor, Tensor, Tensor]:
            result = _reference(net).new_empty(len(a), len(b))
            of_a, of_b = (result.new_empty(len(points)) for points in (a, b))
            work = ProductWork(self, a, b, options.memory_budget, plan=net.plan)
            for piece, sums in run(work, options, "kernel"):
                i, j = piece.place
                (_, n), (_, m), block = work.sides[0][i], work.sides[1][j], sums.added["block"]
                result[n[:, None], m] = block
                of_a[n], of_b[m] = sums.added["left"], sums.added["right"]
                if a is b and i != j:
                    result[m[:, None], n] = block.T
            return result, of_a, of_b

        return with_plan(compute, a.X, self.trajectory)

    def multiplications_per_pair(self, X: Shaped[Tensor, "n ..."]) -> int:
        """Count the multiplications for a value of `products`, at all nodes, for points like these."""

        def compute(net: PlannedModel) -> int:
            _, jacobians = next(self._of_copy(net, is_train=False).jacobians(X[:1], _PRODUCTS))
            return len(self.coefficients) * sum(own.multiplications_per_pair for own in jacobians)

        return with_plan(compute, X, self.trajectory)

    def _of_copy(self, net: PlannedModel, is_train: bool) -> NodeSketch:
        run = self.training_run if is_train else self.run
        reference = _reference(net)
        states = tuple(flat_state(run, s, reference) for s in range(1 if is_one_state(run) else run.num_steps))
        coefficients = (run.step_sizes.sqrt()[:, None] * self.coefficients).to(reference)
        coefficients = coefficients.view(len(states), -1, run.num_outputs)
        return NodeSketch(net, states, self.head, coefficients, self.num_features, (self.seed, self.run.digest))

    def parts(self, net: PlannedModel, points: Points, size: Callable[[NodeSketch, Tensor], int]) -> Parts:
        """Split points by copy, and into groups of at most the size that `size` returns for a sketch and points."""
        found = []
        for is_train in (True, False):
            if len(indices := points.copies(is_train)):
                sketch = self._of_copy(net, is_train)
                like = net.model.spec.cast(points.X[indices[:1]])
                found += [(sketch, rows) for rows in indices.split(size(sketch, like))]
        return found

    def identity(self, *of_points: object) -> str:
        """Return a fingerprint of the computation for some points."""
        return fingerprint(self.run.digest, self.head, self.coefficients, self.num_features, self.seed, *of_points)


def _reference(net: PlannedModel) -> Float[Tensor, " 0"]:
    """Return an empty tensor of the computation's dtype and device."""
    return torch.empty(0, dtype=net.model.spec.dtype, device=net.model.spec.device)


@dataclass(frozen=True, eq=False)
class FeatureWork(RunWork):
    """Features as pieces for workers: some blocks of points, of one copy.

    Attributes:
        sketch: The sketch.
        points: The points.
    """

    sketch: PathSketch
    points: Points

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs for its network."""
        return self.sketch.trajectory, self.points.X

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Compute the features of the points of a piece."""
        sketch, rows = self.parts[place[0]]
        X = self.net.model.spec.cast(self.points.X[rows])
        yield Sums({"features": sketch.piece(X)}, steps=len(X))

    def identity(self) -> str:
        """Fingerprint of everything on which the features depend."""
        return self.sketch.identity(self.points.X, self.points.is_train)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces in order; their steps are points."""
        name = self.named("points")
        return [Piece(f"{name}-{n}", (n,), len(rows)) for n, (_, rows) in enumerate(self.parts)]

    @property
    def piece_bytes(self) -> int:
        """Bytes of the features of the largest piece."""
        largest = max((len(rows) for _, rows in self.parts), default=0)
        return largest * self.sketch.num_features * self.net.itemsize

    @cached_property
    def parts(self) -> Parts:
        """The points of each piece, and the sketch of their copy."""
        return self.sketch.parts(self.net, self.points, lambda sketch, X: PIECE_BLOCKS * sketch.block_rows(X))


@dataclass(frozen=True, eq=False)
class ProductWork(RunWork):
    """Products as pieces for workers: some points of one copy on each side.

    Attributes:
        sketch: The sketch.
        a: The points on the left.
        b: The points on the right; the same object as a for a symmetric block.
        memory_budget: Bytes for the layer Jacobians and products of a piece.
    """

    sketch: PathSketch
    a: Points
    b: Points
    memory_budget: int

    @property
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs for its network."""
        return self.sketch.trajectory, self.a.X

    def compute(self, place: Place, saved: Sums) -> Iterator[Sums]:
        """Compute the products of the points of a piece, and of each point with itself."""
        (left, n), (right, m) = (side[number] for side, number in zip(self.sides, place, strict=True))
        is_symmetric, X = self.a is self.b and place[0] == place[1], self.a.X[n]
        Y = X if is_symmetric else self.b.X[m]
        K = left.coefficients.shape[1]
        total = GramAccumulator((1, len(X), len(Y)), left.states[0], is_symmetric, K if K > 1 else 0)
        left_squares, right_squares = left.states[0].new_zeros(len(X)), left.states[0].new_zeros(len(Y))
        others = None if is_symmetric else right.jacobians(Y, _PRODUCTS)
        for _, of_x in left.jacobians(X, _PRODUCTS):
            of_y = of_x if others is None else next(others)[1]
            total.add_steps([of_x], [of_y], [1.0])
            left_squares += _square_lengths(of_x)
            if not is_symmetric:
                right_squares += _square_lengths(of_y)
        right_squares = left_squares.clone() if is_symmetric else right_squares
        yield Sums({"block": total.result()[0], "left": left_squares, "right": right_squares}, steps=1)

    def identity(self) -> str:
        """Fingerprint of everything on which the products depend."""
        a, b = self.a, self.b
        return self.sketch.identity("products", self.memory_budget, a is b, a.X, b.X, a.is_train, b.is_train)

    @property
    def pieces(self) -> list[Piece]:
        """The pieces in order; for a symmetric block, those on and above the diagonal."""
        same, name, (rows, columns) = self.a is self.b, self.named("points"), map(len, self.sides)
        return [Piece(f"{name}-{i}-{j}", (i, j)) for i in range(rows) for j in range(i if same else 0, columns)]

    @property
    def piece_bytes(self) -> int:
        """Bytes of the largest piece."""
        largest = max((len(rows) for side in self.sides for _, rows in side), default=0)
        return largest**2 * self.net.itemsize

    @cached_property
    def sides(self) -> tuple[Parts, Parts]:
        """The groups of points on the left and on the right, whose layer Jacobians fit into the budget."""

        def parts(points: Points) -> Parts:
            return self.sketch.parts(self.net, points, lambda sketch, X: sketch.product_rows(X, self.memory_budget))

        left = parts(self.a)
        return left, left if self.a is self.b else parts(self.b)


def trace_coefficients(run: Trajectory, seed: int) -> Float[Tensor, "nodes C"]:
    """Return coefficients of the outputs at each node, usually signs, such that the average of v v^T is I.

    They are the rows of a Hadamard matrix in turn, restricted to C columns with random signs: the average over all rows
    is exactly I, and so is the average of any row over all random signs.
    """
    C, count = run.num_outputs, run.num_steps
    if count == C and is_one_state(run):  # one node for each output
        return torch.eye(C, dtype=torch.float64).mul_(C**0.5)
    H = hadamard_matrix(hadamard_order(C, count)).to(torch.float64)
    signs = draw_signs(C, seeded_generator(seed, run.digest, "outputs"), H)
    return H[torch.arange(count) % len(H), :C] * signs
