"""A path kernel while it is being evaluated: what all tiles of a Gram block share."""

from dataclasses import dataclass, field, replace
from itertools import groupby

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.autodiff.representations import ContractionCost
from epk_gp.autodiff.dense import PlannedModel
from epk_gp.core.options import ComputeOptions
from epk_gp.core.losses import Head
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.model import FunctionalModel
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.context import IntegrationCheck
from epk_gp.gram.context import KeptSums
from epk_gp.gram.context import WeightPrefetcher
from epk_gp.quadrature.paths import WeightPath, straight, stretch_of
from epk_gp.quadrature.rules import AdaptiveRule, Rule


def require_gradients_of_rows(model: FunctionalModel) -> None:
    """Raise if the gradient of a point's outputs depends on the points that are evaluated beside it.

    Raises:
        ValueError: An embedding divides gradients by how often a token occurs.
    """
    for name, module in model.module.named_modules():
        if getattr(module, "scale_grad_by_freq", False):
            raise ValueError(
                f"a kernel needs the gradients of a function: {name} divides them by how often a token occurs in the "
                "batch. Make it with scale_grad_by_freq=False."
            )


@dataclass(frozen=True, eq=False)
class ExecutionContext:
    """A path kernel while it is being evaluated.

    Attributes:
        trajectory: The run.
        net: Its network in the computation's dtype and on its device, with its plan.
        head: Whether f is the logits or their log-softmax.
        rule: Quadrature rule.
        step_weights: eta_s of each of the S steps.
        is_per_class: Only pairs of equal classes are wanted.
        options: How to compute.
        is_traced: Only the sum over pairs of equal classes is wanted; these are then pairs of equal classes, too.
        path: Along which test copies move.
        prefetcher: Reads weight states ahead of their use.
        integrations: Counts what an adaptive rule could not integrate.
        training_sums: Sums of the training side over chords that later tiles ask for again.
    """

    trajectory: Trajectory
    net: PlannedModel
    head: Head
    rule: Rule
    step_weights: tuple[float, ...]
    is_per_class: bool
    options: ComputeOptions
    is_traced: bool = False
    path: WeightPath = straight()
    prefetcher: WeightPrefetcher = field(init=False)
    integrations: IntegrationCheck = field(init=False, default_factory=IntegrationCheck)
    training_sums: KeptSums = field(init=False, default_factory=KeptSums)

    def __post_init__(self) -> None:
        """Make the reader of weight states; nothing is read yet."""
        object.__setattr__(self, "prefetcher", WeightPrefetcher(self.trajectory, self.reference))

    @property
    def reference(self) -> Float[Tensor, " 0"]:
        """An empty tensor of the computation's dtype and device."""
        return torch.empty(0, dtype=self.net.model.spec.dtype, device=self.net.model.spec.device)

    @property
    def num_outputs(self) -> int:
        """C."""
        return self.trajectory.num_outputs

    @property
    def num_output_pairs(self) -> int:
        """Pairs of outputs whose products are wanted."""
        return self.num_outputs if self.is_per_class else self.num_outputs**2

    @property
    def num_sums(self) -> int:
        """Numbers in the block for each pair of points: pairs of outputs, or one if they are summed."""
        return 1 if self.is_traced else self.num_output_pairs

    def block_shape(self, num_rows: int, num_columns: int) -> tuple[int, ...]:
        """Return the shape of a class-major block: (K, N, K, M), or (K, N, M) of equal classes, K = 1 if summed."""
        K = 1 if self.is_traced else self.num_outputs
        return (K, num_rows, num_columns) if self.is_per_class else (K, num_rows, K, num_columns)

    @property
    def steps(self) -> list[tuple[int, float]]:
        """The steps that count, (s, eta_s)."""
        return [(s, eta) for s, eta in enumerate(self.step_weights) if eta > 0]

    def stretch(self, s: int) -> range:
        """Return the steps of the stretch of the path that a step belongs to."""
        return stretch_of(self.path, s, self.trajectory.num_steps)

    def stretches(self, steps: list[tuple[int, float]]) -> list[tuple[int, list[tuple[int, float]]]]:
        """Group steps that count, in their order, by the stretch that they belong to, which its first step names."""
        return [(a, list(own)) for a, own in groupby(steps, key=lambda entry: self.stretch(entry[0]).start)]

    @property
    def cost(self) -> ContractionCost:
        """What the choice of representations depends on, between copies of one kind."""
        is_adaptive = isinstance(self.rule, AdaptiveRule)
        return ContractionCost(
            num_output_pairs=self.num_output_pairs,
            num_contractions=self.rule.num_contractions,
            cotangents_are_constant=self.head == "logits",
            all_dense=is_adaptive and not self.net.plan.supports_interpolation,
        )

    @property
    def factored_cost(self) -> ContractionCost:
        """What it depends on along chords: gradients that are written out are written out once for each chord."""
        return replace(self.cost, num_contractions=1)

    @property
    def mixed_cost(self) -> ContractionCost:
        """What it depends on between test and training copies.

        All steps of a chord meet the same test side: a layer whose gradients are not written out is multiplied for
        every node and every step of the chord.
        """
        steps = min(self.path.every, max(1, self.trajectory.num_steps))
        return replace(self.cost, num_contractions=self.rule.num_contractions * steps)

    @property
    def memory(self) -> MemoryPlan:
        """Turns the budget into block sizes."""
        return self.net.memory_plan(self.options.memory_budget)
