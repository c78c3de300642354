"""Values that the host must know make it wait for a GPU: none is asked for inside the loop over steps.

Seen without a GPU: torch tells a dispatch mode of every operation, also of those that would wait on one.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import epk_gp as epk
from epk_gp.gram.path_kernel import gram_block_per_class, gram_diagonal_blocks
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureRule
from helpers import NETWORKS, Case, make_case

WAITS = {
    "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::is_nonzero", "aten::equal",
    "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave.Tensor",
}  # fmt: skip
BLOCKS: dict[str, Callable[[Case, bool, QuadratureRule | AdaptiveRule], Tensor]] = {
    "gram_block": lambda case, right, rule: epk.gram_block(
        case.trajectory, epk.Points(case.test, False), epk.Points(case.trajectory.inputs, right), rule=rule,
        head=case.heads[-1],
    ),
    "gram_block_per_class": lambda case, right, rule: gram_block_per_class(
        case.trajectory, epk.Points(case.test, False), epk.Points(case.trajectory.inputs, right), rule=rule,
        head=case.heads[-1],
    ),
    "gram_diagonal_blocks": lambda case, right, rule: gram_diagonal_blocks(
        case.trajectory, epk.Points(case.test, right), rule=rule, head=case.heads[-1]
    ),
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


def waits(name: str, block: str, right: bool, rule: QuadratureRule | AdaptiveRule, steps: int) -> int:
    case = make_case(name, steps=steps)
    BLOCKS[block](case, right, rule)  # the plan is made
    with Waiting() as waiting:
        BLOCKS[block](case, right, rule)
    return waiting.count


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "block"),
    [(name, "gram_block") for name in NETWORKS]
    + [(name, block) for name in ("relu", "cnn", "attention", "one_class") for block in list(BLOCKS)[1:]],
)
def test_the_host_waits_as_often_for_many_steps_as_for_few(name: str, block: str) -> None:
    for right in (True, False):
        few, many = (waits(name, block, right, epk.gauss_legendre(2), steps) for steps in (2, 5))
        assert few == many


@pytest.mark.slow
def test_an_adaptive_rule_waits_at_every_step() -> None:
    """The negative control: it has to know where its nodes are."""
    few, many = (waits("relu", "gram_block", True, epk.adaptive(1e-8), steps) for steps in (2, 5))
    assert few < many
