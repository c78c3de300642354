"""What a run takes on disk, before it is recorded, and how many states it may keep in a given space."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epk_gp.core.model import FunctionalModel
from epk_gp.core.update_law import scaled_fields
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.optimizers.update_rules import FIELDS
from epk_gp.storage.writer import Storage

# Bytes of a chunk's and a resume file's headers, of a line of the journal, and of a state of torch's random numbers,
# which is in every resume file. Upper bounds, not worth counting.
_COMMIT, _RESUME, _FIXED = 4096, 8192, 16384

# Which of the coefficients that a scale multiplies are not zero; of the other rules those of the momentum.
_NOT_ZERO = {"NAdam": {"lr", "momentum_lr"}, "Adagrad": {"lr"}, "Adadelta": {"lr"}, "Adafactor": {"lr"}}


@dataclass(frozen=True)
class RunDimensions:
    """What the size of a run on disk follows from.

    Attributes:
        num_steps: S.
        sizes: Number of weights of each of the L parameters.
        dtype: Of the weights.
        batch_size: Points per step.
        data_bytes: Bytes of inputs and targets.
        num_statistics: Q.
        num_scaled: Coefficients that are one number per weight, over all weights: P for Adam, 0 for SGD.
        optimizer_bytes: What the optimizer keeps.
    """

    num_steps: int
    sizes: tuple[int, ...]
    dtype: torch.dtype
    batch_size: int
    data_bytes: int
    num_statistics: int
    num_scaled: int
    optimizer_bytes: int


def run_dimensions(
    model: FunctionalModel, groups: Sequence[OptimizerGroup], data: Mapping[str, Tensor], steps: int, batch_size: int
) -> RunDimensions:
    """Return what the size of a run follows from, for an optimizer of torch.

    Args:
        model: The network.
        groups: The optimizers' parameter groups.
        data: Inputs and targets.
        steps: S.
        batch_size: Points per step.
    """
    scaled: set[str] = set()
    for group in groups:
        fields = {name for own in scaled_fields([group], model.names) for name in own}
        scaled |= fields & _NOT_ZERO.get(group.rule, {"momentum_lr"}) if len(fields) > 1 else fields
    P, itemsize = model.num_weights, model.spec.dtype.itemsize
    return RunDimensions(
        num_steps=steps,
        sizes=model.sizes,
        dtype=model.spec.dtype,
        batch_size=batch_size,
        data_bytes=sum(value.nbytes for value in data.values()),
        num_statistics=sum(b.numel() for b in model.module.buffers() if b.is_floating_point()),
        num_scaled=len(scaled) * P,
        optimizer_bytes=(2 if scaled else 1) * P * itemsize,
    )


def run_bytes(run: RunDimensions, storage: Storage) -> int:
    """Return about how many bytes a run takes on disk, without recorded rows and random numbers of its forward passes.

    Args:
        run: The run.
        storage: Which states it keeps, and how. Deflated differences are counted in full.
    """
    S, P, itemsize, L = run.num_steps, sum(run.sizes), run.dtype.itemsize, len(run.sizes)
    stored = itemsize if storage.weights_dtype is None else storage.weights_dtype.itemsize
    states = P * itemsize + S // storage.keep_every * P * stored
    of_step = len(FIELDS) * L * 8 + run.batch_size * 8 + 32 + run.num_statistics * itemsize
    of_step += L * 8 * len(FIELDS) if storage.thins else run.num_scaled * itemsize
    # the recorder's momentum lies beside the optimizer's, and the last state of a thinned run
    resume = run.optimizer_bytes + P * itemsize * (2 if storage.thins else 1)
    commits = 2 + states // storage.chunk_bytes
    return run.data_bytes + states + S * of_step + resume + commits * _COMMIT + _RESUME + _FIXED


def fitting_keep_every(run: RunDimensions, storage: Storage, room: int) -> int:
    """Return the smallest number of steps between kept states with which a run fits into a space.

    Args:
        run: The run.
        storage: How its states are kept.
        room: Bytes.

    Raises:
        ValueError: The run does not fit with its first and last state alone.
    """
    if run_bytes(run, replace(storage, keep_every=1)) <= room:
        return 1
    most = max(2, run.num_steps)
    if (least := run_bytes(run, replace(storage, keep_every=most, compression="none"))) > room:
        raise ValueError(
            f"the run must fit on disk: with its first and last weight state it takes {least / 1e6:.1f} MB, "
            f"more than {room / 1e6:.1f} MB. Give more space, or record fewer steps."
        )
    low, high = 1, most  # does not fit, fits: the size falls with every step between kept states
    while high - low > 1:
        middle = (low + high) // 2
        fits = run_bytes(run, replace(storage, keep_every=middle, compression="none")) <= room
        low, high = (low, middle) if fits else (middle, high)
    return high
