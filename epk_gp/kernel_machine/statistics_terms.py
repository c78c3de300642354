"""What each row of a training forward pass adds to the moving statistics (docs/theory.md, section 7).

A normalisation in training mode moves its statistics by b' - b = m (stat - b), and its batch's statistics are sums over
the rows: stat = sum_i stat_i. Row i adds m (stat_i - b / n), centred, so that nothing remains.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from epk_gp.core.replay import PassData, TrainingReplay


def statistics_increments(replay: TrainingReplay, state: Float[Tensor, " PQ"], data: PassData) -> Float[Tensor, "n Q"]:
    """Replay a forward pass and return what each of its rows adds to the moving statistics.

    Statistics that are no normalisation's, and those of a layer that sees other rows than those of the batch, get zero:
    what they add belongs to no row.

    Args:
        replay: Replays the run's forward passes.
        state: Weights and statistics at the start of the step.
        data: The pass.
    """
    model, n = replay.model, len(data.X)
    sizes = [shape.numel() for shape in model.statistic_shapes]
    firsts = torch.tensor([0, *sizes]).cumsum(0).tolist()
    named = zip(model.statistics, firsts, sizes, strict=False)
    place = {name: slice(first, first + size) for name, first, size in named}
    increments = torch.zeros(n, sum(sizes), dtype=state.dtype, device=state.device)

    def add(name: str, values: Tensor) -> None:
        if name in place:
            increments[:, place[name]] += values.to(increments)

    def hook(prefix: str) -> Any:
        def before(module: Any, args: tuple[Any, ...]) -> None:
            parts = _row_statistics(module, args[0], n)
            if parts is not None:
                momentum = module.momentum
                if momentum is None:
                    momentum = 1.0 / (float(module.num_batches_tracked) + 1)
                for buffer, part in zip(("running_mean", "running_var"), parts, strict=True):
                    b = getattr(module, buffer)
                    add(f"{prefix}{buffer}", momentum * (part - b / n))

        return before

    handles = [
        module.register_forward_pre_hook(hook(f"{name}." if name else ""))
        for name, module in replay.module_in_modes(data).named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training and module.running_mean is not None
    ]
    try:
        with torch.no_grad():
            replay.losses(replay.params(state, data), data)
    finally:
        for handle in handles:
            handle.remove()
    return increments


def _row_statistics(module: nn.Module, a: Tensor, num_rows: int) -> tuple[Tensor, Tensor] | None:
    """Return each row's part of the batch's mean and unbiased variance, (n, channels) each; None if rows are mixed."""
    if a.ndim < 2 or len(a) % num_rows or a.numel() // a.shape[1] < 2:
        return None
    by_row = a.detach().unflatten(0, (num_rows, -1)).movedim(2, 1).flatten(2)  # n channels positions
    count = by_row.shape[0] * by_row.shape[2]
    mean = by_row.mean(dim=(0, 2))
    variance = (by_row - mean[None, :, None]).square().sum(dim=2) / (count - 1)
    return by_row.sum(dim=2) / count, variance
