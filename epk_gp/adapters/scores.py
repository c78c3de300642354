"""Scores of training samples for dattri and captum, larger for samples that help."""

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.adapters.batches import ordered
from epk_gp.autodiff.scalars import RowFunction
from epk_gp.core.inputs import Inputs
from epk_gp.core.trajectory import Trajectory, parse_inputs, validate_trajectory
from epk_gp.kernel_machine.attribute import attribute
from epk_gp.kernel_machine.influence import influence

Scores = Literal["influence", "contributions"]


class SampleScorer:
    """Scores of the training samples of a run for the losses of inputs: larger for samples that lower the loss.

    Attributes:
        trajectory: The recorded run with M samples.
        scores: "influence" - the rise of the loss without the sample, to first order (`epk_gp.influence`);
            "contributions" - the decrease of the loss by the sample along the run, exactly (`epk_gp.attribute`).
        options: Further arguments of these functions, including `smoothing`; with it, scores of samples for themselves
            cost as much as scores of all samples for them.
    """

    def __init__(self, trajectory: Trajectory, *, scores: Scores = "influence", **options: Any) -> None:
        """Take a recorded run.

        Raises:
            TypeError: `trajectory` is not a recorded run.
            ValueError: `scores` is unknown.
        """
        validate_trajectory(trajectory)
        if scores not in ("influence", "contributions"):
            raise ValueError(f"scores must be 'influence' or 'contributions': got {scores!r}.")
        self.trajectory, self.scores, self.options = trajectory, scores, options

    def scores_of(self, X: Inputs, y: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n M"]:
        """Score all samples for the losses of n inputs with their targets, in the dtype of the run."""
        run = self.trajectory
        asked = {"function": RowFunction.loss_value(y, run.loss), **self.options}
        X = parse_inputs(run, X).to(run.device, run.inputs.dtype)
        if self.scores == "influence":
            return -influence(run, X, **asked).values[:, 0]
        return -attribute(run, X, by=None, **asked).samples[:, 0]

    def self_scores(self, rows: Int64[Tensor, " m"]) -> Float[Tensor, " m"]:
        """Score samples for their own losses."""
        if self.scores == "influence" and "smoothing" not in self.options:
            return -influence(self.trajectory, own=rows, **self.options).values[:, 0, 0]
        own = self.scores_of(self.trajectory.inputs[rows], self.trajectory.targets[rows])
        return own.gather(1, rows.to(own.device)[:, None])[:, 0]

    def rows_of(self, batches: Iterable[Any], name: str) -> Int64[Tensor, " m"]:
        """Return the indices of the samples in batches, by their inputs and targets.

        Raises:
            ValueError: Batches are shuffled, a row is not a sample of the run, or only some of several equal samples
                occur.
        """
        run, (X, y) = self.trajectory, ordered(batches, name)
        given, own = parse_inputs(run, X), run.inputs[torch.arange(run.num_points, device=run.device)]
        y = y if y.is_floating_point() else y.to(run.targets)
        kind, of_y = (min(a.dtype, b.dtype, key=lambda d: d.itemsize) for a, b in ((given, own), (y, run.targets)))
        places = dict[bytes, list[int]]()
        for i, key in enumerate(_contents(own.to(kind), run.targets.to(of_y))):
            places.setdefault(key, []).append(i)
        keys, rows = [*_contents(given.to(kind), y.to(of_y))], list[int]()
        for row, key in enumerate(keys):
            if not places.get(key):
                raise ValueError(f"{name} must hold samples of the run with their targets: row {row} is none of them.")
            rows.append(places[key].pop(0))
        if any(places[key] for key in keys):
            raise ValueError(f"{name} must hold all of the run's equal samples, or none: it holds some of them.")
        return torch.tensor(rows, device=run.inputs.device)


def _contents(X: Shaped[Tensor, "n ..."], y: Shaped[Tensor, "n ..."]) -> Iterator[bytes]:
    rows = zip(X.cpu().numpy(), y.cpu().numpy(), strict=True)
    return (blake2b(inputs.tobytes() + target.tobytes()).digest() for inputs, target in rows)
