"""The plan of a run's network: made once, and replaced by the dense one once its inputs demand that."""

from collections.abc import Callable
from typing import TypeVar

from epk_gp.autodiff.interception import UnsupportedParameterUseError
from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.verification import build_plan, probe_rows
from epk_gp.core.torch_overrides import outside_autocast
from epk_gp.core.model import FunctionalModel
from epk_gp.core.trajectory import Trajectory, flat_state

T = TypeVar("T")


def plan_for(trajectory: Trajectory, model: FunctionalModel) -> PlannedModel:
    """Return a run's network with its plan, which is made once for each dtype and device.

    Args:
        trajectory: The run. Its training inputs and trained weights are what the plan is tried on.
        model: The network in the computation's dtype and on its device.
    """
    cache = model.cache
    with cache.lock:
        key = (model.spec, cache.needs_dense_plan)
        if key not in cache.plans:
            X = model.spec.cast(probe_rows(trajectory.inputs))
            w = flat_state(trajectory, trajectory.num_steps, X)
            cache.plans[key] = build_plan(model, w, X, all_dense=cache.needs_dense_plan)
        return PlannedModel(model, cache.plans[key])


def with_plan(trajectory: Trajectory, model: FunctionalModel, compute: Callable[[PlannedModel], T]) -> T:
    """Compute with the network's plan; with the dense one if the inputs use a parameter as the plan did not foresee.

    A network may send each row to another expert: a layer then sees some of the rows, which the rows that the plan was
    made on need not show. The model's cache keeps that finding for every later computation.

    Args:
        trajectory: The run.
        model: The network in the computation's dtype and on its device.
        compute: What to compute. It must leave nothing behind when it raises.
    """
    with outside_autocast():
        net = plan_for(trajectory, model)
        try:
            return compute(net)
        except UnsupportedParameterUseError:
            if net.plan is model.cache.plans.get((model.spec, True)):
                raise
            model.cache.needs_dense_plan = True
        except RuntimeError as error:
            if "calling .item()" not in str(error):
                raise
            raise ValueError(
                "the network must compute with tensors: forward() makes a Python number of a weight or an activation "
                "(.item(), float(), or an `if` on a tensor), through which nothing is differentiated. Compute with the "
                "tensor itself, or make the number of a buffer."
            ) from error
        return compute(plan_for(trajectory, model))
