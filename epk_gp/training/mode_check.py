"""What a network does in training mode: whether it draws, or computes something else, and which statistics it moves."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.func import functional_call

from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.core.model import perturbed_initial
from epk_gp.core.torch_overrides import quiet_checkpoints
from epk_gp.core.model import FunctionalModel, random_state_kept
from epk_gp.recording.mode_check import draws_random_numbers

# What a network raises on inputs that it cannot take; the validation of its outputs reports that.
_FORWARD_ERRORS = (RuntimeError, ValueError, TypeError, IndexError, AttributeError, KeyError)

_NUM_ROWS = 8  # rows on which the modes are compared


class ModeCheck:
    """Compares a network in the modes of a training forward pass with the network in evaluation mode.

    Args:
        model: The recorded network, in evaluation mode.
        state: Weights, and moving statistics, to compare at.
        X: Inputs to compare on.
    """

    def __init__(self, model: FunctionalModel, state: Tensor, X: Shaped[Tensor, "M ..."]) -> None:
        rows = X if model.signature.graph is not None else X[:_NUM_ROWS]  # dropout may leave a few nodes as they are
        self._model, self._state, self._X = model, state, rows.clone()
        self._found: dict[bytes, bool] = {}
        self._drawing: set[bytes] = set()  # modes in which a pass drew random numbers

    def draw(self, modes: Bool[Tensor, " modules"], state: Float[Tensor, " PQ"], X: Shaped[Tensor, "n ..."]) -> bool:
        """Return whether the network draws random numbers in these modes, once it has: in this or an earlier pass.

        That torch's generator has moved during a pass does not say so: another thread may have drawn.

        Args:
            modes: The modes of a pass.
            state: The weights and moving statistics at its start.
            X: Its inputs.
        """
        key = modes.numpy().tobytes()
        if key in self._drawing:
            return True
        model, module = self._model, self._module(modes)
        params = model.unflatten(state.clone())  # a pass may move the statistics
        call = _call_with(module, {**_other_buffers(module, params), **params})
        with torch.enable_grad(), disable_fused_attention(), quiet_checkpoints():
            if not draws_random_numbers(lambda: model.signature.call(call, X)):
                return False
        self._drawing.add(key)
        return True

    def matter(self, modes: Bool[Tensor, " modules"]) -> bool:
        """Return whether the network computes something else in these modes than in evaluation mode."""
        if not modes.any():
            return False
        key = modes.numpy().tobytes()
        if key not in self._found:
            self._found[key] = self._differs(modes)
        return self._found[key]

    def _differs(self, modes: Tensor) -> bool:
        model, P = self._model, self._model.num_weights
        module = self._module(modes)
        for w in (self._state[:P], perturbed_initial(self._state[:P])):
            params = model.unflatten(torch.cat([w, self._state[P:]]))
            moving = {name: value.clone() for name, value in params.items()}
            call = _call_with(module, {**_other_buffers(module, params), **moving})
            with torch.no_grad(), random_state_kept(model.spec.device), disable_fused_attention(), quiet_checkpoints():
                try:
                    returned = model.signature.call(call, self._X)
                except (RuntimeError, ValueError):  # such as one value per channel in training mode
                    return True
                expected = model.returned(params, self._X)
            if _differ(returned, expected) or any(not torch.equal(moving[n], params[n]) for n in model.statistics):
                return True
        return False

    def _module(self, modes: Tensor) -> nn.Module:
        """Return a copy of the network in some modes."""
        module = copy.deepcopy(self._model.module)
        for part, mode in zip(module.modules(), modes.tolist(), strict=True):
            part.training = mode
        return module


def _call_with(module: nn.Module, named: dict[str, Tensor]) -> Callable[..., Any]:
    return lambda *args, **kwargs: functional_call(module, named, args, kwargs)


def _other_buffers(module: nn.Module, params: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of the buffers that are not among the parameters and statistics."""
    return {name: value.clone() for name, value in module.named_buffers() if name not in params}


def moving_statistics(net: nn.Module, model: FunctionalModel, X: Shaped[Tensor, "M ..."]) -> tuple[str, ...]:
    """Return the names of the buffers that a training forward pass of the network in its present modes moves.

    The counters of batches are among them where the statistics are averages over all batches (momentum None).

    Args:
        net: The user's network; it is not changed.
        model: The same network as a function, which says how it is called.
        X: Inputs.
    """
    if not any(module.training for module in net.modules()):
        return ()
    try:
        module = copy.deepcopy(net)
    except (RuntimeError, TypeError, AttributeError):
        return ()
    names = [name for name, value in module.named_buffers() if value.is_floating_point()]
    names += [
        f"{name}.num_batches_tracked" if name else "num_batches_tracked"
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.momentum is None and part.track_running_stats
    ]
    before = {name: value.clone() for name, value in module.named_buffers()}
    moved: set[str] = set()
    with torch.no_grad(), random_state_kept(model.spec.device), disable_fused_attention(), quiet_checkpoints():
        try:
            model.signature.call(module, X[:_NUM_ROWS].clone())
        except _FORWARD_ERRORS:  # such as one value per channel; see `_FORWARD_ERRORS`
            moved = _of_normalisations(module)
    after = dict(module.named_buffers())
    moved |= {name for name in names if name in before and not torch.equal(before[name], after[name])}
    return tuple(name for name, _ in module.named_buffers() if name in moved and name in names)


def _of_normalisations(module: nn.Module) -> set[str]:
    """Return the names of the buffers of normalisations in training mode."""
    return {
        f"{name}.{buffer}" if name else buffer
        for name, part in module.named_modules()
        if isinstance(part, nn.modules.batchnorm._NormBase) and part.training
        for buffer, _ in part.named_buffers(recurse=False)
    }


def _differ(a: object, b: object) -> bool:
    """Return whether two returned values differ, in any of their tensors."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape != b.shape or not torch.allclose(a, b, rtol=1e-6, atol=1e-9, equal_nan=True)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) != len(b) or any(_differ(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() != b.keys() or any(_differ(a[key], b[key]) for key in a)
    if hasattr(a, "__dict__") and type(a) is type(b):
        return _differ(vars(a), vars(b))
    return type(a) is not type(b)
