"""Scores of training samples in the interfaces of captum and dattri; batches of loaders as inputs and targets."""

from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor
from torch.utils.data import RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from epk_gp.autodiff.scalars import RowFunction
from epk_gp.core.checks import validate_count
from epk_gp.core.graphs import tensors_of
from epk_gp.core.inputs import Inputs
from epk_gp.core.step import fingerprint_data
from epk_gp.core.trajectory import Trajectory, parse_inputs, validate_trajectory
from epk_gp.kernel_machine.attribute import attribute
from epk_gp.kernel_machine.influence import influence

Scores = Literal["influence", "contributions"]
_SHUFFLING = RandomSampler, SubsetRandomSampler, WeightedRandomSampler


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


def ordered(batches: Iterable[Any], name: str) -> tuple[Inputs, Shaped[Tensor, "n ..."]]:
    """Return the result of `gathered` for batches with a fixed order.

    Raises:
        TypeError, ValueError: As in `gathered`; or the order of the batches is unknown.
    """
    found, places = gathered(batches), (batches, getattr(batches, "batch_sampler", None))
    is_shuffled = any(isinstance(getattr(place, "sampler", None), _SHUFFLING) for place in places)
    again = found if isinstance(batches, Iterator) else gathered(batches)
    if is_shuffled or fingerprint_data(*tensors_of(found)) != fingerprint_data(*tensors_of(again)):
        raise ValueError(
            f"{name} must give its rows in one order: it shuffles them, so that scores cannot be assigned to rows. "
            "Pass a loader with shuffle=False."
        )
    return found


def gathered(batches: Iterable[Any]) -> tuple[Inputs, Shaped[Tensor, "n ..."]]:
    """Return inputs and targets of all batches, or of a single one: (inputs, ..., targets), or a dict with "labels".

    Raises:
        TypeError: A batch has another form.
        ValueError: There is no batch.
    """
    is_single = isinstance(batches, tuple | list) and any(isinstance(part, Tensor) for part in batches)
    found = list[dict[Any, Tensor]]()
    for i, batch in enumerate([batches] if is_single else batches):
        form = batch if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, tuple | list) else {}
        found.append(dict(form))
        target = "labels" if form is batch else len(found[0]) - 1
        are_tensors = all(isinstance(part, Tensor) for part in found[i].values())
        if not are_tensors or not {target} < found[i].keys() == found[0].keys():
            kinds = {name: type(part).__name__ for name, part in found[i].items()}
            raise TypeError(f"batches must be alike, (inputs, ..., targets) or dicts with 'labels': {i} holds {kinds}.")
    if not found:
        raise ValueError("there must be a batch of inputs and targets: got none.")
    joined = {name: torch.cat([parts[name] for parts in found]) for name in found[0]}
    y = joined.pop(target)
    return joined if target == "labels" else joined[0] if target == 1 else tuple(joined.values()), y


class MostInfluential(NamedTuple):
    """The training samples with the highest or lowest scores, like captum's `KMostInfluentialResults`.

    Attributes:
        indices: Samples, (n, k), the most extreme one first.
        influence_scores: Their scores, (n, k).
    """

    indices: Int64[Tensor, "n k"]
    influence_scores: Float[Tensor, "n k"]


class EPKInfluence(SampleScorer):
    """Scores of training samples in the interface of captum's `TracInCPBase`, without subclassing it.

    Like captum's scores, they are positive for proponents, the samples that lower the loss of an input. By default they
    are the exact values that TracIn approximates, the decrease of the loss by each sample along the run: TracInCP with
    a checkpoint of every step is `rule=epk_gp.QuadratureRule.left_endpoint()`.

    Args:
        trajectory: The recorded run.
        scores: "contributions" or "influence"; see `SampleScorer`.
        options: Further arguments of `epk_gp.attribute` or `epk_gp.influence`.
    """

    def __init__(self, trajectory: Trajectory, *, scores: Scores = "contributions", **options: Any) -> None:
        """Take a recorded run; errors as in `SampleScorer`."""
        super().__init__(trajectory, scores=scores, **options)

    def influence(
        self,
        inputs: Iterable[Any],
        k: int | None = None,
        proponents: bool = True,
        aggregate: bool = False,
        show_progress: bool = False,
    ) -> Float[Tensor, "n M"] | MostInfluential:
        """Score all training samples for n inputs.

        Args:
            inputs: A tuple (input, ..., targets), or a loader or list of such tuples.
            k: Number of samples to return for each input; None returns the scores of all samples.
            proponents: Whether to return the samples with the highest scores, or those with the lowest.
            aggregate: Whether to sum the scores of all inputs to one row.
            show_progress: Not used: pass `progress=True` to the class.

        Raises:
            TypeError, ValueError: As in `epk_gp.attribute`; or k is not in 1 .. M.
        """
        scores = self.scores_of(*ordered(inputs, "inputs"))
        scores = scores.sum(dim=0, keepdim=True) if aggregate else scores
        if k is None:
            return scores
        validate_count(k, "k")
        if k > scores.shape[1]:
            raise ValueError(f"k must be at most {scores.shape[1]}, the number of training samples: got {k}.")
        found = scores.topk(k, dim=1, largest=proponents)
        return MostInfluential(found.indices, found.values)

    def self_influence(self, inputs: Iterable[Any] | None = None, show_progress: bool = False) -> Float[Tensor, " m"]:
        """Score training samples for their own losses.

        Args:
            inputs: A tuple or loader of training samples with their targets; all by default.
            show_progress: Not used, as in `influence`.

        Raises:
            ValueError: An input is not a training sample.
        """
        every = torch.arange(self.trajectory.num_points, device=self.trajectory.device)
        return self.self_scores(every if inputs is None else self.rows_of(inputs, "inputs"))


class EPKAttributor(SampleScorer):
    """Scores of training samples in the interface of `dattri.algorithm.base.BaseAttributor`, without subclassing it.

    Like dattri's own scores for a task whose target is the loss, they are larger for samples that lower the test loss:
    `dattri.metric.lds` compares their sums with the negative loss, and `loo_corr` compares them with the loss without a
    sample. They are in units of the loss, not multiplied by the number of samples.

    Args:
        trajectory: The recorded run.
        scores: "influence" or "contributions"; see `SampleScorer`.
        options: Further arguments of `epk_gp.influence` or `epk_gp.attribute`.
    """

    def cache(self, full_train_dataloader: Iterable[Any]) -> None:
        """Check that a loader contains the run's training samples in order; nothing needs to be computed.

        Raises:
            ValueError: It contains other samples.
        """
        rows = self.rows_of(full_train_dataloader, "full_train_dataloader")
        if not torch.equal(rows.cpu(), torch.arange(self.trajectory.num_points)):
            raise ValueError("full_train_dataloader must hold all samples of the run in their order: got another one.")

    def attribute(self, train_dataloader: Iterable[Any], test_dataloader: Iterable[Any]) -> Float[Tensor, "m n"]:
        """Score m training samples for the losses of n test points.

        Args:
            train_dataloader: Training samples of the run, all or some, in any order, with their targets.
            test_dataloader: Test points with their targets.

        Raises:
            TypeError, ValueError: As in `epk_gp.influence`; or a row is not a training sample, or a loader shuffles.
        """
        rows = self.rows_of(train_dataloader, "train_dataloader")
        return self.scores_of(*ordered(test_dataloader, "test_dataloader")).T[rows]

    def self_attribute(self, train_dataloader: Iterable[Any]) -> Float[Tensor, " m"]:
        """Score training samples for their own losses, for `dattri.metric.mislabel_detection_auc`.

        Raises:
            ValueError: A row is not a training sample.
        """
        return self.self_scores(self.rows_of(train_dataloader, "train_dataloader"))
