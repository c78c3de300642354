"""Features of points whose inner products are the path kernel's values in expectation, with their measured error."""

from dataclasses import dataclass
from typing import Unpack, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from epk_gp.core.checks import ComputeOptions, ComputeSettings, door, parse_options, validate_count, validate_integer
from epk_gp.core.inputs import Inputs, Points
from epk_gp.core.losses import Head, resolve_head
from epk_gp.core.trajectory import Trajectory, parse_inputs, validate_trajectory
from epk_gp.gram.path_kernel import PathKernel, require_recorded
from epk_gp.gram.sketch import NUM_NODES, PathSketch, nodes_trajectory, trace_coefficients
from epk_gp.quadrature import rules

EXPECTED_ERROR = 1.06  # times 1 / sqrt(k): measured between points with a small cosine (docs/theory.md, section 9)

# Largest number of steps for which the exact kernel takes every step; for a longer run it uses this many nodes.
MAX_PROBE_STEPS = 1000


@dataclass(frozen=True)
class SketchError:
    """Errors of the features' cosine kernel, <z, z'> / (|z| |z'|), over pairs of different points.

    Attributes:
        rms: Root mean square of the difference to the exact cosine kernel.
        max: The largest difference.
        nodes_rms: Root mean square without the sketch: the error of the nodes, with one combination of outputs at each.
        nodes_max: The largest difference without the sketch.
        expected_rms: 1.06 / sqrt(k), the expected error of a sketch of k numbers between dissimilar points.
        num_points: Number of compared points, evenly spaced among all; points with only zero gradients, which have no
            cosine, are left out.
        reference: Description of the exact kernel.
    """

    rms: float
    max: float
    nodes_rms: float
    nodes_max: float
    expected_rms: float
    num_points: int
    reference: str


def measure_sketch_error(
    sketch: PathSketch, points: Points, features: Float[Tensor, "n k"], num_probe: int, options: ComputeOptions
) -> SketchError | None:
    """Compare the cosine kernel of features with the exact one, on evenly spaced points.

    Args:
        sketch: The sketch that computed the features.
        points: The points.
        features: Their features.
        num_probe: Number of points to compare.
        options: Options of the exact kernel's computation.

    Returns:
        The errors; None if fewer than two compared points have a gradient.
    """
    count = min(num_probe, len(points))
    if count < 2:
        return None
    rows = (torch.arange(count) * len(points) // count).to(points.X.device)
    probe = Points(points.X[rows], points.mask.to(rows.device)[rows])
    kernel, reference = _reference(sketch)
    block, own = kernel.trace_block(probe, probe, memory_budget=options.memory_budget).double(), features[rows].double()
    has_cosine = (block.diagonal() > 0) & own.any(1)
    if int(has_cosine.sum()) < 2:
        return None
    exact = _cosines(block, has_cosine)
    sketched = (_cosines(own @ own.T, has_cosine) - exact).abs()
    by_nodes = (
        _cosines(sketch.products(probe, probe, ComputeOptions(options.memory_budget))[0].double(), has_cosine) - exact
    ).abs()
    return SketchError(
        rms=_rms(sketched),
        max=float(sketched.max()),
        nodes_rms=_rms(by_nodes),
        nodes_max=float(by_nodes.max()),
        expected_rms=EXPECTED_ERROR / sketch.num_features**0.5,
        num_points=int(has_cosine.sum()),
        reference=reference,
    )


def _reference(sketch: PathSketch) -> tuple[PathKernel, str]:
    """Return the kernel with which features are compared, and its description."""
    run = sketch.trajectory
    if sketch.nodes is None:
        return PathKernel(
            run, sketch.head, rules.QuadratureRule.left_endpoint()
        ), f"all {run.num_steps} steps, each at its start"
    if run.num_steps <= MAX_PROBE_STEPS:
        kernel = PathKernel(run, sketch.head, rules.gauss_legendre(2), path=sketch.path)
        along = "".join(f" along {path}" for path in rules.path_identity(sketch.path))
        return kernel, f"all {run.num_steps} steps{along}, 2 nodes each"
    many = nodes_trajectory(run, MAX_PROBE_STEPS, path=sketch.path)
    return PathKernel(many, sketch.head, rules.QuadratureRule.left_endpoint()), f"{MAX_PROBE_STEPS} nodes of the path"


def _cosines(K: Float[Tensor, "n n"], chosen: Bool[Tensor, " n"]) -> Float[Tensor, " pairs"]:
    """Return the cosines of all pairs of different points among the chosen ones."""
    K = K[chosen][:, chosen]
    length = K.diagonal().sqrt()
    i, j = torch.tril_indices(len(K), len(K), offset=-1, device=K.device)
    return (K / length / length[:, None])[i, j]


def _rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt())


NUM_FEATURES = 4096
NUM_PROBE = 100


@final
class PathFeatures(Tensor):
    """Features with their measured error; results of computations with them are plain tensors.

    Attributes:
        error: The error; None if it was not measured.
    """

    error: SketchError | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


@door
def path_features(
    trajectory: Trajectory,
    X: Inputs,
    num_features: int = NUM_FEATURES,
    *,
    nodes: int | None = NUM_NODES,
    seed: int = 0,
    head: Head | None = None,
    is_train: bool | Bool[Tensor, " n"] = False,
    path: rules.WeightPath = rules.straight(),
    num_probe: int = NUM_PROBE,
    **options: Unpack[ComputeSettings],
) -> Float[Tensor, "n k"]:
    """Sketch the path kernel: k numbers per point, for any number of steps, outputs and weights.

        z(x) = sum_n sqrt(w_n) R_n J_n(x)^T v_n / sqrt(C),    E <z(x), z(x')> = tr K(x, x') / C

    The sum goes over n nodes of the whole path (`nodes_trajectory`), with one backward pass at each. The v_n are the
    rows of a Hadamard matrix in turn, whose order divides the number of nodes if possible (20 nodes serve up to 20
    outputs exactly), and the R_n are independent random sketches. The root mean square error of the cosine kernel is at
    most about 1.06 / sqrt(k) (docs/theory.md, section 9).

    The features of a point are the same in every call with the same run, k, nodes, seed and head: the sketches depend
    only on these. Features are computed in blocks of points that depend on the network only, so the bytes do not depend
    on the budget, a checkpoint or an executor; another position of a point within its block, or another number of
    threads, may change rounding.

    Args:
        trajectory: The run.
        X: n inputs.
        num_features: k.
        nodes: Number of nodes of the whole path. None takes each step of the run at its start, for a run from
            `nodes_trajectory`.
        seed: Seed of the sketches.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, otherwise "logits".
        is_train: Whether each point is a training copy; one value for all points, or (n,). Training copies are
            evaluated at the start of the step that contains the node.
        path: The path of the nodes of test copies: `straight()` steps, or `chords(every=k)`. It does not change the
            cost.
        num_probe: Number of points, evenly spaced, whose cosine kernel is compared with the exact one; 0 for none.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`, see `ComputeOptions`. A checkpoint holds
            finished pieces.

    Returns:
        The features, in the dtype of X (of the weights, for integers). Their attribute `error` holds a `SketchError`;
        any operation on them returns a plain tensor without it, so keep the features themselves, or their error.

    Raises:
        TypeError: The network cannot take X, or an argument has a wrong type.
        ValueError: A number is too small, the head is unknown, the run is a path of averaged weights, or the path
            consists of chords and `nodes` is None.
    """
    parsed = parse_options("path_features", ("accumulate",), **options)
    validate_count(num_probe, "num_probe", minimum=0)
    sketch = trace_sketch(trajectory, num_features, nodes=nodes, seed=seed, head=head, path=path)
    points = Points(parse_inputs(trajectory, X), is_train)
    features = sketch.features(points, parsed)
    error = measure_sketch_error(sketch, points, features, num_probe, parsed)
    result = features.as_subclass(PathFeatures)
    result.error = error
    return result


def trace_sketch(
    trajectory: Trajectory,
    num_features: int,
    *,
    nodes: int | None,
    seed: int,
    head: Head | None,
    path: rules.WeightPath = rules.straight(),
) -> PathSketch:
    """Return the sketch of tr K(x, x') / C.

    Arguments and errors: as in `path_features`.
    """
    validate_trajectory(trajectory)
    validate_count(num_features, "num_features")
    validate_integer(seed, "seed")
    chosen = resolve_head(head, trajectory.loss, trajectory.num_outputs)
    require_recorded(trajectory)
    rules.require_integrable(path, "path_features")
    if nodes is None and rules.path_identity(path):
        raise ValueError(f"nodes must be a number with path={path!r}, which they are spread along: got None.")
    run = trajectory if nodes is None else nodes_trajectory(trajectory, nodes, path=path)
    coefficients = trace_coefficients(run, int(seed)) / run.num_outputs**0.5
    return PathSketch(trajectory, nodes, chosen, coefficients, int(num_features), int(seed), path, run)
