"""Kernel matrices as arrays, for libraries that take a precomputed kernel."""

from typing import Literal, Unpack

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.core.inputs import Points
from epk_gp.core.losses import Head
from epk_gp.core.options import ComputeSettings, parse_options
from epk_gp.core.trajectory import Trajectory, parse_inputs, validate_points_layout
from epk_gp.kernels.epk import UNSUPPORTED_OPTIONS, EPKKernel
from epk_gp.kernels.normalization import Normalization
from epk_gp.quadrature.rules import QuadratureRule, gauss_legendre


def epk_gram(
    trajectory: Trajectory,
    a: Points,
    b: Points | None = None,
    *,
    outputs: Literal["trace", "sum"] | int = "trace",
    head: Head | None = None,
    rule: QuadratureRule = gauss_legendre(4),
    normalize: Normalization = None,
    **options: Unpack[ComputeSettings],
) -> Float[np.ndarray, "N M"]:
    """Evaluate the exact path kernel as one number per pair of points.

    For scikit-learn's `SVC(kernel="precomputed")`, which is fitted with the matrix of the training points and predicts
    from the matrix between test and training points:

        train, test = Points(X, is_train=True), Points(X_test, is_train=False)
        svc.fit(epk_gram(trajectory, train), y)
        svc.predict(epk_gram(trajectory, test, train))

    Args:
        trajectory: Training run with C outputs.
        a: N points.
        b: M points; a by default.
        outputs: "trace", "sum" or a class index, as in `EPKKernel`.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        rule: Quadrature rule.
        normalize: As in `EPKKernel`.
        options: `memory_budget`, see `ComputeOptions`.

    Returns:
        An array in the dtype of the points.

    Raises:
        TypeError: The points are of a kind that the network cannot take, or an option is not known.
        ValueError: The points have a shape or values that the network cannot take, or `outputs` gives more than one
            number per pair.
    """
    if outputs in ("full", "independent"):
        raise ValueError(f"outputs must be 'trace', 'sum' or a class index, one number per pair: got {outputs!r}.")
    for name, points in (("a", a), ("b", a if b is None else b)):
        if not isinstance(points, Points):
            raise TypeError(f"{name} must be epk_gp.Points(X, is_train=...): got {type(points).__name__}.")
    for name, points in (("a.X", a), ("b.X", a if b is None else b)):
        validate_points_layout(trajectory, points, name)
        parse_inputs(trajectory, points.X, name)
    parse_options("epk_gram", UNSUPPORTED_OPTIONS, **options)
    kernel = EPKKernel(trajectory, outputs, head, rule, normalize, cache_bytes=0, **options)
    x = _rows(a)
    with torch.no_grad():
        values: Tensor = kernel.forward(x, x if b is None else _rows(b))
    return values.cpu().numpy()


def _rows(points: Points) -> Tensor:
    X = points.X.reshape(len(points), -1)
    X = X if X.is_floating_point() else X.double()
    column = torch.as_tensor(points.is_train, device=X.device).to(X).expand(len(X))
    return torch.cat([X, column[:, None]], dim=1)
