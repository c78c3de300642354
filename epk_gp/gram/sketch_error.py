"""How far sketched features are from the exact path kernel: measured on some of the points."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from epk_gp.core.options import ComputeOptions
from epk_gp.core.inputs import Points
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.sketch import nodes_trajectory
from epk_gp.gram.sketch import PathSketch
from epk_gp.quadrature.paths import path_identity
from epk_gp.quadrature.rules import gauss_legendre, left_endpoint

EXPECTED_ERROR = 1.06  # times 1 / sqrt(k): measured, between points whose cosine is small (docs/theory.md, section 9)

# Steps of a run up to which the exact kernel takes every step; a longer run is replaced by so many nodes of its path.
MAX_PROBE_STEPS = 1000


@dataclass(frozen=True)
class SketchError:
    """Errors of the cosine kernel that features give, <z, z'> / (|z| |z'|), over pairs of different points.

    Attributes:
        rms: Root mean square of the difference to the exact cosine kernel.
        max: The largest difference.
        nodes_rms: The same without the sketch: what the nodes, and one combination of the outputs at each, leave.
        nodes_max: The largest of these.
        expected_rms: 1.06 / sqrt(k), what a sketch of k numbers is expected to leave between unlike points.
        num_points: Points that were compared, evenly spaced among all; those whose gradients are all zero, which have
            no cosine, are left out.
        reference: What they were compared with.
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
        sketch: What computed the features.
        points: The points.
        features: Their features.
        num_probe: Points to compare.
        options: How the exact kernel is computed.

    Returns:
        The errors; None without two points to compare that have a gradient.
    """
    count = min(num_probe, len(points))
    if count < 2:
        return None
    rows = (torch.arange(count) * len(points) // count).to(points.X.device)
    mask = points.is_train if isinstance(points.is_train, bool) else points.is_train.to(rows.device)[rows]
    probe = Points(points.X[rows], mask)
    chosen = ComputeOptions(memory_budget=options.memory_budget)
    kernel, reference = _reference(sketch, probe)
    block, own = kernel.trace_block(probe, probe, chosen).double(), features[rows].double()
    has_cosine = (block.diagonal() > 0) & own.any(1)
    if int(has_cosine.sum()) < 2:
        return None
    exact = _cosines(block, has_cosine)
    sketched = (_cosines(own @ own.T, has_cosine) - exact).abs()
    by_nodes = (_cosines(sketch.products(probe, probe, chosen)[0][0].double(), has_cosine) - exact).abs()
    return SketchError(
        rms=_rms(sketched),
        max=float(sketched.max()),
        nodes_rms=_rms(by_nodes),
        nodes_max=float(by_nodes.max()),
        expected_rms=EXPECTED_ERROR / sketch.num_features**0.5,
        num_points=int(has_cosine.sum()),
        reference=reference,
    )


def _reference(sketch: PathSketch, probe: Points) -> tuple[PathKernel, str]:
    """Return the kernel that features are compared with, and its description."""
    run = sketch.trajectory
    if sketch.nodes is None:
        return PathKernel(run, sketch.head, left_endpoint()), f"all {run.num_steps} steps, each at its start"
    if run.num_steps <= MAX_PROBE_STEPS:
        kernel = PathKernel(run, sketch.head, gauss_legendre(2), path=sketch.path)
        along = "".join(f" along {path}" for path in path_identity(sketch.path))
        return kernel, f"all {run.num_steps} steps{along}, 2 nodes each"
    many = nodes_trajectory(run, MAX_PROBE_STEPS, path=sketch.path)
    return PathKernel(many, sketch.head, left_endpoint()), f"{MAX_PROBE_STEPS} nodes of the path"


def _cosines(K: Float[Tensor, "n n"], chosen: Bool[Tensor, " n"]) -> Float[Tensor, " pairs"]:
    """Return the cosines of all pairs of different points among those that are chosen."""
    K = K[chosen][:, chosen]
    length = K.diagonal().sqrt()
    i, j = torch.tril_indices(len(K), len(K), offset=-1, device=K.device)
    return (K / length / length[:, None])[i, j]


def _rms(error: Tensor) -> float:
    return float(error.square().mean().sqrt())
