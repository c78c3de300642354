"""Results that were computed before the report: checked against the run and the points that they must be of."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from epk_gp.analysis.label_errors import LabelErrors
from epk_gp.analysis.maps import UncertaintyMap
from epk_gp.core.trajectory import Trajectory
from epk_gp.gp.models import LogitGP
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.uncertain_classifier import UncertainClassifier
from epk_gp.kernel_machine.influence import Influence

# An influence is of the explained outputs where its outputs are theirs to so many eps of the largest one: it may have
# been computed in other blocks of points.
_ROUNDING = 2**16


def validate_process(posterior: object, trajectory: Trajectory, count: int) -> None:
    """Raise if a process cannot say how sure the predictions at the points are.

    Raises:
        TypeError: It is no process of this package.
        ValueError: It is that of another run, or of another number of points, or it is not fitted.
    """
    if isinstance(posterior, LogitPosterior):
        if posterior.mean.shape != (count, trajectory.num_outputs):
            raise ValueError(
                f"posterior must be that of X, ({count}, {trajectory.num_outputs}): got {tuple(posterior.mean.shape)}. "
                "Compute it as gp.logit_posterior(X)."
            )
        return
    if isinstance(posterior, UncertainClassifier):
        if not posterior.__sklearn_is_fitted__():
            raise ValueError("posterior must be fitted: call fit(X, y) with validation points first.")
        _require_same_run(posterior.trajectory, trajectory, "posterior")
    elif isinstance(posterior, LogitGP):
        _require_same_run(posterior.trajectory, trajectory, "posterior")
    elif posterior is not None:
        raise TypeError(
            "posterior must be an UncertainClassifier, a LogitGP or a LogitPosterior of X: got "
            f"{type(posterior).__name__}."
        )


def validate_suspects(suspects: object, labels: Int64[Tensor, " M"] | None) -> None:
    """Raise if suspicious labels are not those of the run.

    Raises:
        TypeError: They are no result of `label_errors`.
        ValueError: The run has no class labels, or not so many.
    """
    if suspects is None:
        return
    if not isinstance(suspects, LabelErrors):
        raise TypeError(f"suspects must be a result of epk_gp.label_errors: got {type(suspects).__name__}.")
    if labels is None or int(suspects.points.max()) >= len(labels):
        raise ValueError("suspects must be labels of this run: it has fewer, or none. Pass label_errors(trajectory).")


def validate_map(m: object, trajectory: Trajectory) -> None:
    """Raise if a map is not one of the run.

    Raises:
        TypeError: It is no `UncertaintyMap`.
        ValueError: It has another number of training points.
    """
    if m is None:
        return
    if not isinstance(m, UncertaintyMap):
        raise TypeError(f"uncertainty_map must be a result of uncertainty_on_plane: got {type(m).__name__}.")
    if len(m.training) != trajectory.num_points:
        raise ValueError(
            f"uncertainty_map must be one of this run: it has {len(m.training)} training points, the run "
            f"{trajectory.num_points}."
        )
    if m.plane is None:
        raise ValueError("uncertainty_map must know its plane: make it with uncertainty_on_plane.")


def influence_on(
    influence: object,
    outputs: Float[Tensor, "n C"],
    points: Int64[Tensor, " m"],
    rows: Int64[Tensor, " k"],
    classes: Int64[Tensor, " k"],
) -> Sequence[Float[Tensor, " M"] | None]:
    """Return the influence on each explained output; None for one that it was not computed for.

    Args:
        influence: Of all points or of those explained, and of all their outputs or of the largest one of each.
        outputs: The network's outputs under the head, at all points.
        points: Indices of the explained points.
        rows: Of each explained output, which of these points it is an output of.
        classes: Its index.

    Raises:
        TypeError: It is no `Influence`.
        ValueError: It is that of other points or outputs, or not split by samples.
    """
    if influence is None:
        return (None,) * len(rows)
    if not isinstance(influence, Influence):
        raise TypeError(f"influence must be a result of epk_gp.influence: got {type(influence).__name__}.")
    is_by_sample = [axis.kind for axis in influence.axes] == ["sample"] and influence.values.ndim == 3
    if not is_by_sample or influence.values.shape[2] != len(influence.axes[0].group):
        raise ValueError("influence must be split by training samples alone: leave by= of epk_gp.influence out.")
    given = influence.outputs.detach().cpu().to(outputs)
    of_all = len(given) == len(outputs)
    f = outputs if of_all else outputs[points]
    expected = f.amax(dim=1, keepdim=True) if given.shape[1] == 1 else f
    limit = _ROUNDING * torch.finfo(outputs.dtype).eps * float(f.abs().max().clamp(min=1.0))
    if given.shape != expected.shape or not float((given - expected).abs().max()) <= limit:
        raise ValueError(
            f"influence must be on all outputs, or on the predicted one, of the {len(points)} explained points or of "
            f"all {len(outputs)}: its own outputs are others, of shape {tuple(given.shape)}. Compute it as "
            "epk_gp.influence(trajectory, X[explained]), with the report's head."
        )
    values = influence.values.detach().cpu()
    largest = f.argmax(dim=1)
    found: list[Tensor | None] = []
    for row, output in zip(rows.tolist(), classes.tolist(), strict=True):
        n = int(points[row]) if of_all else row
        if given.shape[1] > 1 or f.shape[1] == 1:
            found.append(values[n, output])
        else:
            found.append(values[n, 0] if output == int(largest[n]) else None)
    return tuple(found)


def _require_same_run(other: Trajectory, trajectory: Trajectory, name: str) -> None:
    if other.trained.digest != trajectory.trained.digest:
        raise ValueError(
            f"{name} must be of the run that is reported, {trajectory.digest[:12]}: it is of {other.digest[:12]}."
        )
