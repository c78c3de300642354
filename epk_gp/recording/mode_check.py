"""What a network does in training mode: whether it draws, or computes something else, and which statistics it moves."""

import copy
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, final

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from epk_gp.core.model import FunctionalModel, perturbed_initial, random_state_kept
from epk_gp.core.torch_overrides import disable_fused_attention, quiet_checkpoints

# torch notes in a global variable that a mode is entered, and puts it back as it was: one thread at a time.
_ENTERED = threading.RLock()


@contextmanager
def draw_from(generator: torch.Generator) -> Iterator[None]:
    """Let everything random in this thread draw from a generator, and nothing from torch's global one.

    The numbers are those that the global generator would give with the same seed. Seeding that one instead would
    disturb every other thread that draws from it, and be disturbed by them.

    Args:
        generator: A generator on the CPU.
    """
    with _ENTERED, _Redirection(generator):
        yield


def draws_random_numbers(call: Callable[[], object]) -> bool:
    """Return whether a call draws random numbers of torch in this thread, whatever other threads draw meanwhile.

    It is stopped before it draws any. Where that cannot be seen, the answer is yes: for an operation that is none of
    torch's own, and for a call that fails.
    """
    observer = _Observer()
    try:
        with _ENTERED, observer:
            call()
    except Exception:
        return True
    return observer.has_drawn  # the call may have caught the error


class _DrawError(Exception):
    """Stops a call that is about to draw a random number."""


@final
class _Observer(TorchDispatchMode):
    """Stop at the first operation that draws a random number, or may do so."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call, or stop."""
        if torch.Tag.nondeterministic_seeded in func.tags or func.namespace != "aten":
            self.has_drawn = True
            raise _DrawError
        return func(*args, **(kwargs or {}))


@final
class _Redirection(TorchDispatchMode):
    """Pass a generator to every operation that takes one and got none."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call, by the form of the operation that takes a generator if there is one."""
        kwargs = dict(kwargs or {})
        if torch.Tag.nondeterministic_seeded in func.tags and kwargs.get("generator") is None:
            form = _form_with_generator(func)
            if form is not None:
                return form(*args, **{**kwargs, "generator": self.generator})
            if not _has_argument_names(func):  # another torch, which finds the form itself, or says that there is none
                with suppress(RuntimeError, TypeError):
                    return func.overloadpacket(*args, **{**kwargs, "generator": self.generator})
        return func(*args, **kwargs)


def _form_with_generator(func: Any) -> Any:
    """Return an operation's form with the same arguments and a generator; None if there is none."""
    if not _has_argument_names(func):
        return None
    names = _argument_names(func) | {"generator"}
    own = getattr(func, "_overloadname", None)  # the first to try
    others = [name for name in func.overloadpacket.overloads() if name != own]
    forms = (getattr(func.overloadpacket, name) for name in ([] if own is None else [own]) + others)
    return next((form for form in forms if _argument_names(form) == names), None)


def _has_argument_names(func: Any) -> bool:
    return hasattr(func, "_schema")  # a private name of torch's


def _argument_names(func: Any) -> set[str]:
    return {argument.name for argument in func._schema.arguments}


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
