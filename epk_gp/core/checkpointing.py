"""Whether a network uses activation checkpointing (torch.utils.checkpoint) in evaluation mode."""

import copy

import torch
from jaxtyping import Shaped
from torch import Tensor

from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.core.model import NUM_FINGERPRINT_POINTS, perturbed_initial
from epk_gp.core.gradients import allclose
from epk_gp.core.torch_overrides import quiet_checkpoints
from epk_gp.core.model import FunctionalModel

_HOOKS_ARE_OFF = "epk_gp: this forward pass must set no hooks."
_MUST_BE_KEPT = (
    "activation checkpointing in evaluation mode must be torch.utils.checkpoint with use_reentrant=False around "
    "torch's own functions: got {got}, which would be recomputed with other weights. {advice}, or checkpoint in "
    "training mode only (if self.training)."
)


def with_kept_activations(model: FunctionalModel, state: Tensor, X: Shaped[Tensor, "M ..."]) -> FunctionalModel:
    """Return the model, such that nothing of a forward pass is computed again in the backward pass.

    Args:
        model: The network in evaluation mode.
        state: Its initial weights, then its moving statistics.
        X: Inputs; a few are used.

    Returns:
        The same model if the network uses no activation checkpointing in evaluation mode.

    Raises:
        ValueError: It checkpoints re-entrantly, or around functions whose activations cannot be kept; or it cannot be
            differentiated.
    """
    rows = X[:NUM_FINGERPRINT_POINTS]
    weights, statistics = state.split([model.num_weights, model.num_statistics])
    state = torch.cat([perturbed_initial(weights), statistics])  # other weights than those in the module
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(_HOOKS_ARE_OFF):
            outputs, _ = _outputs(model, state, rows)
    except RuntimeError as error:
        if _HOOKS_ARE_OFF not in str(error):
            raise ValueError(
                f"the network must be differentiable in its weights: a forward pass with gradients fails: {error}"
            ) from error
        model = model.keeping_activations()
        outputs, leaves = _outputs(model, state, rows)
        if not _has_reentrant_checkpoint(outputs):
            _validate_kept(model, state, rows, outputs, leaves)
    if _has_reentrant_checkpoint(outputs):
        raise ValueError(_MUST_BE_KEPT.format(got="use_reentrant=True", advice="Pass use_reentrant=False"))
    return model


def _outputs(model: FunctionalModel, state: Tensor, rows: Tensor) -> tuple[Tensor, list[Tensor]]:
    params = {name: value.detach() for name, value in model.unflatten(state).items()}
    leaves = [params[name].requires_grad_() for name in model.names]
    with torch.enable_grad():
        return model(params, rows), leaves


def _validate_kept(model: FunctionalModel, state: Tensor, rows: Tensor, outputs: Tensor, leaves: list[Tensor]) -> None:
    """Raise if a gradient at given weights is not the one of a module that holds these weights."""
    wave = torch.arange(outputs.numel(), dtype=outputs.dtype, device=outputs.device).cos().view_as(outputs)
    module = copy.deepcopy(model.module)
    own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    with torch.no_grad():
        for name, value in model.unflatten(state).items():
            own[name].copy_(value)
    held = [own[name].requires_grad_() for name in model.names]
    signature = model.signature
    with torch.enable_grad(), quiet_checkpoints(), disable_fused_attention():
        again = signature.outputs(signature.call(module, rows, model.spec))
        expected = torch.autograd.grad(again, held, wave, allow_unused=True, materialize_grads=True)
        try:
            found = torch.autograd.grad(outputs, leaves, wave, allow_unused=True, materialize_grads=True)
            is_kept = allclose(torch.cat([g.reshape(-1) for g in found]), torch.cat([g.reshape(-1) for g in expected]))
        except RuntimeError:
            is_kept = False
    if not is_kept:
        kind = "a function of another kind (a torch.autograd.Function, or a scripted one)"
        raise ValueError(_MUST_BE_KEPT.format(got=kind, advice="Call it outside of the checkpoint"))


def _has_reentrant_checkpoint(outputs: Tensor) -> bool:
    waiting, seen = [outputs.grad_fn], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        if node.name() == "CheckpointFunctionBackward":
            return True
        seen.add(node)
        waiting.extend(parent for parent, _ in node.next_functions)
    return False
