"""Features of points whose inner products are the path kernel's values in expectation, with their error."""

from typing import Unpack, final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from epk_gp.core.options import ComputeSettings, parse_options
from epk_gp.core.losses import Head, resolve_head
from epk_gp.core.inputs import Inputs
from epk_gp.core.inputs import Points
from epk_gp.core.trajectory import Trajectory, parse_inputs, validate_trajectory
from epk_gp.core.checks import validate_count, validate_integer
from epk_gp.gram.sketch import NUM_NODES, nodes_trajectory, validate_path_of_nodes
from epk_gp.gram.sketch import PathSketch, trace_coefficients
from epk_gp.gram.path_features import SketchError, measure_sketch_error
from epk_gp.quadrature.paths import WeightPath, path_identity, straight

NUM_FEATURES = 4096
NUM_PROBE = 100


@final
class PathFeatures(Tensor):
    """Features with their measured error; whatever is computed from them is a plain tensor.

    Attributes:
        error: The error; None if it was not measured.
    """

    error: SketchError | None
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


def path_features(
    trajectory: Trajectory,
    X: Inputs,
    num_features: int = NUM_FEATURES,
    *,
    nodes: int | None = NUM_NODES,
    seed: int = 0,
    head: Head | None = None,
    is_train: bool | Bool[Tensor, " n"] = False,
    path: WeightPath = straight(),
    num_probe: int = NUM_PROBE,
    **options: Unpack[ComputeSettings],
) -> Float[Tensor, "n k"]:
    """Sketch the path kernel: k numbers for each point, whatever the number of steps, outputs and weights.

        z(x) = sum_n sqrt(w_n) R_n J_n(x)^T v_n / sqrt(C),    E <z(x), z(x')> = tr K(x, x') / C

    The sum goes over n nodes of the whole path (`nodes_trajectory`), with one backward pass at each. The v_n are the
    rows of a Hadamard matrix in turn, whose order divides the number of nodes if it can (20 nodes serve up to 20
    outputs exactly), and the R_n independent random sketches. The root mean square error of the cosine kernel is some
    1.06 / sqrt(k) at most (docs/theory.md, section 9).

    The features of a point are the same in every call with the same run, k, nodes, seed and head: sketches are drawn
    from these alone. Features are computed in blocks of points that depend on the network alone, so that the bytes do
    not depend on the budget, on a checkpoint or on an executor; another place of a point within its block, or another
    number of threads, may change rounding.

    Args:
        trajectory: The run.
        X: n inputs.
        num_features: k.
        nodes: Nodes of the whole path. None takes each step of the run at its start, for a run that `nodes_trajectory`
            returned.
        seed: Draws the sketches.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        is_train: Which points are training copies; one for all, or (n,). Those are taken at the start of the step that
            a node falls into.
        path: Which the nodes of test copies lie on: `straight()` steps, or `chords(every=k)`. It does not change the
            cost.
        num_probe: Points, evenly spaced among all, whose cosine kernel is compared with the exact one; 0 compares none.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`, see `ComputeOptions`. A checkpoint holds
            finished pieces.

    Returns:
        The features, in the dtype of X (of the weights, for integers). Their attribute `error` holds a `SketchError`;
        any operation on them returns a plain tensor without it, so keep the features themselves, or their error.

    Raises:
        TypeError: The network cannot take X, or an argument is of the wrong kind.
        ValueError: A number is too small, the head is unknown, the run is a path of averaged weights, or the path is a
            Manhattan path, or one of chords without nodes.
    """
    parsed = parse_options("path_features", ("accumulate",), **options)
    validate_count(num_probe, "num_probe", minimum=0)
    sketch = trace_sketch(trajectory, num_features, nodes=nodes, seed=seed, head=head, path=path)
    points = Points(parse_inputs(trajectory, X), is_train)
    features = sketch.features(points, parsed)[:, 0]
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
    path: WeightPath = straight(),
) -> PathSketch:
    """Return the sketch of tr K(x, x') / C.

    Arguments, errors: as `path_features`.
    """
    validate_trajectory(trajectory)
    validate_count(num_features, "num_features")
    validate_integer(seed, "seed")
    chosen = resolve_head(head, trajectory.loss, trajectory.num_outputs)
    if nodes is None and trajectory.average is not None:
        raise ValueError(
            "features must be those of a recorded run: this one is the path of its averaged weights. Take "
            "trajectory.trained."
        )
    validate_path_of_nodes(path)
    if nodes is None and path_identity(path):
        raise ValueError(
            f"nodes must be a number with path={path!r}, along which they are spread: got None, each step at its start."
        )
    run = trajectory if nodes is None else nodes_trajectory(trajectory, nodes, path=path)
    coefficients = trace_coefficients(run, int(seed)) / run.num_outputs**0.5
    sketch = PathSketch(trajectory, nodes, chosen, coefficients, int(num_features), int(seed), path)
    vars(sketch)["run"] = run
    return sketch
