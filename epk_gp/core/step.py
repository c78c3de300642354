"""One recorded training step, with what its forward passes depended on."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Float64, Int64, Shaped, UInt8
from torch import Tensor

from epk_gp.optimizers.torch_rules import OptimizerGroup


@dataclass(frozen=True, eq=False)
class SeenRows:
    """Rows of a forward pass that are unlike the recorded data, as the network or the loss saw them.

    Attributes:
        index: Which k rows of the pass.
        values: The rows.
    """

    index: Int64[Tensor, " k"]
    values: Shaped[Tensor, "k ..."]


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """One training forward pass whose gradient a step uses; everything that the weights and the data do not say.

    Attributes:
        num_rows: Number of rows of the batch that the pass saw; the passes of a step follow one another in
            `Step.batch`.
        modes: Which modules of the network, in the order of `modules()`, were in training mode. None where the network
            in evaluation mode computes the same.
        inputs: Rows of the input that are unlike X[batch] (augmented, mixed, adversarial), packed as X is.
        targets: Rows of the loss's target that are unlike y[batch]. For class labels they are vectors q such that the
            loss of a row is -<q, log softmax(outputs)>; labels of several positions are labels, where the loop left out
            positions.
        random_state: State of torch's random numbers on the CPU when the pass began; None if it drew none.
        device_random_state: The same of the network's accelerator.
        statistics: The moving statistics when the pass began, (Q,); None if they are those at the start of the step.
        statistics_after: Those when it ended; None if they are those at the end of the step.
        autocast: The dtype of automatic mixed precision; None without it.
        memory_order: The dimensions of the input in the order in which they lay in memory, from the slowest to the
            fastest: random numbers are drawn in that order. None if it is their own.
    """

    num_rows: int
    modes: Bool[Tensor, " modules"] | None = None
    inputs: SeenRows | None = None
    targets: SeenRows | None = None
    random_state: UInt8[Tensor, " bytes"] | None = None
    device_random_state: UInt8[Tensor, " device_bytes"] | None = None
    statistics: Float[Tensor, " Q"] | None = None
    statistics_after: Float[Tensor, " Q"] | None = None
    autocast: torch.dtype | None = None
    memory_order: Int64[Tensor, " dimensions"] | None = None

    @property
    def is_plain(self) -> bool:
        """Whether everything that the pass depended on follows from weights, data and batch."""
        return all(value is None for name, value in vars(self).items() if name != "num_rows")

    @property
    def is_deterministic(self) -> bool:
        """Whether the network in evaluation mode, on the rows as seen, computes what the pass computed."""
        return self.modes is None and self.random_state is None and self.device_random_state is None


@runtime_checkable
class Passes(Protocol):
    """The forward passes of a step: a tuple, or what unpacks them when they are indexed."""

    def __len__(self) -> int:
        """Count the passes."""

    def __getitem__(self, number: int, /) -> ForwardPass:
        """Return one pass."""

    def __iter__(self) -> Iterator[ForwardPass]:
        """Return the passes in their order."""


@dataclass(frozen=True, eq=False)
class Step:
    """Learning rate and batch of the step from the weights w_s to the weights w_{s+1}.

    Attributes:
        index: The number s of the step, counted from 0.
        lr: The learning rate eps_s, that of the optimizer's first parameter group.
        batch: Indices into the training data, or None for all points in order.
        sample_weights: The weights c of the batch's samples in the loss. None stands for the weights that the loss
            gives to a single batch; other weights come from accumulated gradients or weighted samples.
        passes: The forward passes on consecutive rows of the batch: a tuple, or unpacked when they are indexed. Empty
            if the network in evaluation mode, on X and y as recorded, computes the same.
        groups: The optimizers' parameter groups from this step on, with the options that preconditioners depend on;
            None where they are those of the step before.
    """

    index: int
    lr: float
    batch: Int64[Tensor, " B"] | None
    sample_weights: Float64[Tensor, " B"] | None = None
    passes: Passes = ()
    groups: tuple[OptimizerGroup, ...] | None = None


def describe_steps(steps: Sequence[Step], num_points: int) -> tuple[str, str]:
    """Return how many steps there are, and in words their batches and learning rates.

    Args:
        steps: The steps.
        num_points: M, the size of a batch that is all of the data.
    """
    if not steps:
        return "0", ""
    sizes = [num_points if step.batch is None else len(step.batch) for step in steps]
    rates = [step.lr for step in steps]
    lr = f"{rates[0]:.4g}" if min(rates) == max(rates) else f"{min(rates):.4g} to {max(rates):.4g}"
    rows = f"{sizes[0]:,}" if min(sizes) == max(sizes) else f"{min(sizes):,} to {max(sizes):,}"
    return f"{len(steps):,}", f"batches of {rows}, learning rate {lr}"
