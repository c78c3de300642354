"""Dimension of the training signal: the principal directions of input space that move a prediction."""

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.checks import validate_finite, validate_integer, validate_tensor
from epk_gp.core.losses import Head, loss_terms, resolve_head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.show import tracked
from epk_gp.core.trajectory import Trajectory, batch_of, flat_state, parse_inputs
from epk_gp.kernel_machine.descent import vanilla_lr
from epk_gp.quadrature.rules import QuadratureRule, gauss_legendre, validate_rule
from quantities.alignment import output_gradients


def input_gradients(
    trajectory: Trajectory,
    x: Shaped[Tensor, "1 ..."],
    output: int,
    *,
    head: Head | None = None,
    rule: QuadratureRule = gauss_legendre(4),
    progress: bool = False,
) -> Float[Tensor, "M D"]:
    """Differentiate every training point's contribution to one prediction with respect to that training point.

        G[i] = d/dx_i sum_s <Phi_s(x), -eps_s c_{s,i} grad_w loss(w_s; x_i, y_i)>

    The path of the weights is held fixed as recorded. The principal directions of the rows of G are the directions of
    input space in which a change of the training data moves the prediction.

    Args:
        trajectory: A run of plain gradient descent on M points of floating-point entries.
        x: One test point.
        output: Index of the output.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, else "logits".
        rule: A fixed quadrature rule.
        progress: Show a progress bar.

    Returns:
        (M, D), with flattened inputs.

    Raises:
        TypeError: The point is of a kind that the network cannot take, `output` is not a whole number, or the training
            inputs are not floating-point numbers.
        ValueError: The point has another shape than the training inputs, or the output does not exist, or the run is
            not plain gradient descent.
    """
    x = parse_inputs(trajectory, x)
    head = resolve_head(head, trajectory.loss, trajectory.num_outputs)
    validate_rule(rule)
    if not trajectory.inputs.is_floating_point():
        raise TypeError(f"input gradients need floating-point inputs: got {trajectory.inputs.dtype}.")
    if not trajectory.is_vanilla_gd:
        raise ValueError(
            "input gradients must have steps of plain gradient descent, -eps_s times the batch gradient of the network "
            f"in evaluation mode on the recorded data: the run was made by {trajectory.update_rule}."
        )
    validate_integer(output, "output")
    output = int(output)
    if x.shape[0] != 1:
        raise ValueError(f"x must be one point, of shape (1, ...): got {tuple(x.shape)}.")
    if not 0 <= output < trajectory.num_outputs:
        raise ValueError(f"output must lie in 0..{trajectory.num_outputs - 1}: got {output}.")
    model = trajectory.model_for(x)
    chosen = torch.tensor([output], device=x.device)
    total = torch.zeros_like(trajectory.inputs.to(x))
    for step in tracked(trajectory.steps, "input gradients", unit="step", shown=progress):
        w, end = (flat_state(trajectory, s, x) for s in (step.index, step.index + 1))
        direction = torch.zeros_like(w[: model.num_weights])
        for t, weight in rule:
            direction += weight * output_gradients(model, w + t * (end - w), x, chosen, head)[0]
        X, y, c = batch_of(trajectory, step, w)
        rows = torch.arange(len(X)) if step.batch is None else step.batch
        gradients = _directional_loss_input_gradients(trajectory, model, w, direction, X, y)
        weights = c.view(-1, *[1] * (gradients.ndim - 1))
        total.index_add_(0, rows.to(x.device), weights * gradients, alpha=-vanilla_lr(trajectory, step))
    return total.flatten(1)


def signal_energies(gradients: Float[Tensor, "M D"]) -> Float[Tensor, " k"]:
    """Return the squared singular values, largest first. `spectrum.principal_directions` counts the large ones.

    Raises:
        TypeError: The gradients are not a tensor of float32 or float64.
        ValueError: They are not a matrix of finite numbers.
    """
    validate_tensor(gradients, "gradients", ndim=2, floating=True)
    validate_finite(gradients, "gradients", "Remove that row.")
    energies: Tensor = torch.linalg.svdvals(gradients).square()
    return energies


def _directional_loss_input_gradients(
    trajectory: Trajectory, model: FunctionalModel, w: Tensor, v: Tensor, X: Tensor, y: Int64[Tensor, " B"] | Tensor
) -> Tensor:
    """Differentiate <v, grad_w loss_i> with respect to x_i, for all points at once: loss_i depends on x_i only."""
    with torch.enable_grad():
        leaves = {name: value.detach().requires_grad_() for name, value in model.unflatten(w).items()}
        inputs = X.detach().requires_grad_()
        losses = loss_terms(model.signature, trajectory.loss, model.returned(leaves, inputs), y).sum()
        ordered = [leaves[name] for name in model.names]
        gradients = torch.autograd.grad(losses, ordered, create_graph=True, allow_unused=True, materialize_grads=True)
        directional = torch.cat([g.reshape(-1) for g in gradients]) @ v
        (gradient,) = torch.autograd.grad(directional, inputs, allow_unused=True, materialize_grads=True)
    return gradient
