"""Sums of the terms that a pass over the run emits, along the axes that were asked for."""

import torch
from jaxtyping import Int64
from torch import Tensor

from epk_gp.kernel_machine.axes import Axis
from epk_gp.kernel_machine.terms import (
    Contribution,
    SampleContributions,
    StatisticsContribution,
    UnexplainedContribution,
    WeightDecayContribution,
    WeightsContribution,
)
from epk_gp.kernel_machine.terms import AttributionProblem


class Collector:
    """Sums contributions into one result. Combined axes of one kind are flattened to one index until the end.

    Args:
        problem: The predictions.
        axes: The axes of the result.
        parts: Which part of the network each parameter belongs to; contributions are those of parts.
        reference: The predictions at the initial weights, (n, K).
    """

    def __init__(
        self, problem: AttributionProblem, axes: tuple[Axis, ...], parts: Int64[Tensor, " L"], reference: Tensor
    ) -> None:
        self.axes = axes
        trajectory = problem.trajectory
        counts = {"step": trajectory.num_steps, "sample": trajectory.num_points}
        self.index, self.sizes = {}, {}
        for kind, count in (*counts.items(), ("parameter", len(trajectory.model.names))):
            own = [axis for axis in axes if axis.kind == kind]
            index = torch.zeros(count, dtype=torch.int64)
            for axis in own:
                index = index * len(axis.names) + axis.group.cpu()
            self.index[kind], self.sizes[kind] = index, [len(axis.names) for axis in own]
        T, U, G = (torch.Size(self.sizes[kind]).numel() for kind in ("step", "sample", "parameter"))
        self.values = reference.new_zeros(*reference.shape, T, U, G)
        self.decay = reference.new_zeros(*reference.shape, T, G)
        self.statistics = reference.new_zeros(*reference.shape, T, U)
        self.statistics_of_no_sample = reference.new_zeros(*reference.shape, T)
        self.unexplained = reference.new_zeros(*reference.shape, T, G)
        self.group_of_sample = self.index["sample"].to(reference.device)
        group_of_part = torch.zeros(int(parts.max()) + 1, dtype=torch.int64)
        group_of_part[parts] = self.index["parameter"]
        self.group_of_part = group_of_part.to(reference.device)
        self._parts_are_groups = torch.equal(group_of_part, torch.arange(G))

    @property
    def splits_samples(self) -> bool:
        """Whether samples are put into groups."""
        return bool(self.sizes["sample"])

    @property
    def sums(self) -> list[Tensor]:
        """What terms are added to."""
        return [self.values, self.decay, self.statistics, self.statistics_of_no_sample, self.unexplained]

    def add(self, term: Contribution) -> None:
        """Add one contribution, split by parts of the network."""
        t = int(self.index["step"][term.step])
        if isinstance(term, SampleContributions):
            _add_by_sample(self.values[:, :, t], term.rows, self._group(term.samples), self._by_group(term.values))
        elif isinstance(term, WeightDecayContribution):
            self.decay[term.rows, :, t] += self._by_group(term.values)
        elif isinstance(term, UnexplainedContribution):
            self.unexplained[term.rows, :, t] += self._by_group(term.values)
        elif isinstance(term, StatisticsContribution):
            self._add_statistics(term, t)

    def drop_unexplained_above(self, tolerance: float) -> None:
        """Leave what is unexplained out of the sum where it is more than rounding can be."""
        if not self.unexplained.flatten(2).sum(dim=2).abs().max() <= tolerance:
            self.unexplained.zero_()

    def _add_statistics(self, term: StatisticsContribution, t: int) -> None:
        if not self.splits_samples:
            self.statistics[term.rows, :, t, 0] += term.total
            return
        rest = term.total
        if term.samples is not None and term.values is not None:
            _add_by_sample(self.statistics[:, :, t], term.rows, self._group(term.samples), term.values)
            rest = rest - term.values.sum(dim=2)
        self.statistics_of_no_sample[term.rows, :, t] += rest

    def _group(self, samples: Tensor) -> Tensor:
        return self.group_of_sample[samples.to(self.group_of_sample.device)]

    def size_of_terms(self, *others: Tensor) -> Tensor:
        """Return the sum of the absolute values of all terms, and of others, (n, K)."""
        terms = [total.flatten(2).abs().sum(dim=2) for total in self.sums]
        return torch.stack([*terms, *(other.abs() for other in others)]).sum(dim=0)

    def _by_group(self, values: Tensor) -> Tensor:
        if self._parts_are_groups:
            return values
        grouped = values.new_zeros(*values.shape[:-1], self.values.shape[-1])
        return grouped.index_add_(values.ndim - 1, self.group_of_part, values)

    def result(self, tensor: Tensor, kinds: tuple[str, ...]) -> Tensor:
        """Unflatten the kinds and bring the axes into their order; kinds that are left out get length 1."""
        shape = [size for kind in kinds for size in self.sizes[kind]]
        tensor = tensor.reshape(*tensor.shape[:2], *shape)
        present = [number for kind in kinds for number, axis in enumerate(self.axes) if axis.kind == kind]
        order = [2 + present.index(number) for number in range(len(self.axes)) if number in present]
        tensor = tensor.permute(0, 1, *order)
        for number in range(len(self.axes)):
            if number not in present:
                tensor = tensor.unsqueeze(2 + number)
        return tensor


def _add_by_sample(total: Tensor, rows: Tensor, index: Tensor, values: Tensor) -> None:
    """Add values (N, K, B, ...) to the rows of a total (n, K, U, ...), each sample's to its group."""
    if len(rows) == len(total):
        total.index_add_(2, index, values)
    else:
        total[rows] = total[rows].index_add_(2, index, values)


class TermSizes:
    """Sums of absolute values: of the samples' contributions, and of the changes that the steps' weights made."""

    def __init__(self, reference: Tensor) -> None:
        self.of_samples, self.of_steps = torch.zeros_like(reference), torch.zeros_like(reference)

    @property
    def sums(self) -> list[Tensor]:
        """What terms are added to."""
        return [self.of_samples, self.of_steps]

    @property
    def amplification(self) -> Tensor:
        """The ratio of the two; 0 where no step changed anything."""
        return torch.where(self.of_steps > 0, self.of_samples / self.of_steps.clamp(min=1e-300), 0.0)

    def add(self, term: Contribution) -> None:
        """Add one contribution."""
        if isinstance(term, SampleContributions):
            self.of_samples[term.rows] += term.values.sum(dim=3).abs().sum(dim=2)
        elif isinstance(term, WeightsContribution):
            self.of_steps[term.rows] += term.values.abs()
