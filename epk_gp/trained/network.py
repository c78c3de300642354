"""A network that was not recorded, as a run without steps, the form that all functions on runs take."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from epk_gp.autodiff.scalars import dim_of_loss
from epk_gp.core.graphs import Graph, tensors_of
from epk_gp.core.losses import Loss
from epk_gp.core.trajectory import Trajectory
from epk_gp.recording.recorder import Recorder
from epk_gp.storage.rows import Targets, TrainingInputs


def as_trajectory(
    net: nn.Module,
    X: TrainingInputs,
    y: Targets = None,
    *,
    loss: Loss | nn.Module | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Trajectory:
    """Return the run without steps of a network in evaluation mode, at its present weights that require gradients.

    The network is copied, and its modes do not change. Its moving statistics are constants, like all of its buffers.

    Args:
        net: The network.
        X: n inputs, as `Recorder` takes them; they replace the training inputs.
        y: Their targets, if a loss is stated.
        loss: The loss of the targets; None states none.
        output: Maps the network's result to outputs (n, C), if it has another form.

    Raises:
        TypeError, ValueError: Network, inputs, targets and loss do not fit, or no weight requires a gradient.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"the network must be a torch.nn.Module: got {type(net).__name__}.")
    if not any(p.requires_grad for p in net.parameters()):
        raise ValueError(
            "the network must have weights that require gradients, with respect to which it is differentiated: it has "
            "none. Call net.requires_grad_(True), or requires_grad_(True) of the parameters to differentiate in."
        )
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        if isinstance(X, Graph) and y is None:  # one row per node
            z = next(tensors_of(net(*X.args, **X.kwargs)))
            y = z.new_zeros(len(z))
        run = Recorder(net, None, X, y, loss=loss, output=output).trajectory
        dim_of_loss(run)  # no step will check it
    finally:
        for module, mode in modes:
            module.training = mode
    return replace(run, live=None)
