"""A network together with how to differentiate it."""

from dataclasses import dataclass

import torch
from jaxtyping import Int64
from torch import Tensor

from epk_gp.core.plans import DifferentiationPlan
from epk_gp.core.plans import MemoryPlan
from epk_gp.core.model import FunctionalModel


@dataclass(frozen=True, eq=False)
class PlannedModel:
    """A network in the computation's dtype and on its device, with its plan.

    Attributes:
        model: The network as a function of its weights.
        plan: How to differentiate it.
    """

    model: FunctionalModel
    plan: DifferentiationPlan

    def memory_plan(self, budget: int) -> MemoryPlan:
        """Return what turns a budget of bytes into block sizes for this network."""
        return MemoryPlan(budget, self.itemsize, self.plan, self.model.num_weights)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.model.spec.dtype.itemsize


def flat_columns(net: PlannedModel, *, all_dense: bool) -> Int64[Tensor, " P"]:
    """Return the place in the flat weights of each entry of dense layer Jacobians, in their order.

    Args:
        net: The network.
        all_dense: There is one dense Jacobian of all weights (`ContractionCost.all_dense`).
    """
    model, plan = net.model, net.plan
    if all_dense:
        return torch.arange(model.num_weights)
    places = dict(zip(model.names, torch.arange(model.num_weights).split(list(model.sizes)), strict=True))
    columns = []
    for name, bias in plan.bias_of.items():
        if bias is None:
            columns.append(places[name])
        else:
            weight = places[name].view(len(places[bias]), -1)
            columns.append(torch.cat([weight, places[bias][:, None]], dim=1).flatten())
    return torch.cat([*columns, *(places[name] for name in plan.dense_params)])
