"""Values that the host must know make it wait for a GPU: none is asked for inside the loop over steps.

Seen without a GPU: torch tells a dispatch mode of every operation, also of those that would wait on one.
"""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import epk_gp as epk
from epk_gp.quadrature.rules import Rule
from helpers import NETWORKS, Case, gram_block_per_class, gram_diagonal_blocks, make_case

WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave.Tensor",
}  # fmt: skip


class Waiting(TorchDispatchMode):
    """Count the operations whose outcome the host needs."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Note it, and make it."""
        name = func._schema.name
        picks = name in {"aten::index", "aten::index_put", "aten::index_put_"}
        masked = picks and any(i is not None and i.dtype == torch.bool for i in args[1])
        self.count += name in WAITS or masked
        return func(*args, **(kwargs or {}))


def waits(case: Case, block: Any, rule: Rule, steps: int) -> int:
    """Count them in a block of test copies with both copies, of the first steps of a run."""
    b = epk.Points(case.trajectory.inputs, torch.arange(7) < 3)
    sides = (b,) if block is gram_diagonal_blocks else (epk.Points(case.test, False), b)
    settings = {"rule": rule, "head": case.heads[-1], "step_weights": (torch.arange(3) < steps).double()}
    block(case.trajectory, *sides, **settings)  # the plan is made
    with Waiting() as waiting:
        block(case.trajectory, *sides, **settings)
    return waiting.count


SAME_LAYERS = {"leaky_relu", "tanh", "gelu", "linear", "conv1d", "conv3d", "transposed", "frozen_batch_norm"}


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*NETWORKS} - SAME_LAYERS))
def test_the_host_waits_as_often_for_many_steps_as_for_few_but_with_an_adaptive_rule(name: str) -> None:
    case, others = make_case(name, steps=3), (gram_block_per_class, gram_diagonal_blocks)
    for block in (epk.gram_block, *(others if name in ("cnn", "attention") else ())):
        few, many = (waits(case, block, epk.gauss_legendre(2), steps) for steps in (1, 3))
        assert few == many
    if name == "relu":  # the negative control: it has to know where its nodes are
        assert waits(case, epk.gram_block, epk.adaptive(1e-8), 1) < waits(case, epk.gram_block, epk.adaptive(1e-8), 3)
