"""Replacements of torch operations during the evaluation of a network, and torch's forward-mode level.

The replaced operations: fused attention, normalisation by moving statistics, activation checkpointing.

A checkpointed function is called again in the backward pass, with the weights that its module holds then. Weights set
by `torch.func.functional_call` exist during the forward pass only, so nothing may remain to be recomputed.
"""

import math
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast, final

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from epk_gp.core.show import warn_caller

_PLACES: list[Any] = [  # torch's settings for replacing float32 inside products and convolutions, since 2.9
    place
    for backend in (torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn)
    for place in (getattr(backend, name, None) for name in ("matmul", "conv", "rnn"))
    if hasattr(place, "fp32_precision")
]


def _matmul_precision() -> str:
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:  # the user has set some of these; they are restored separately
        return "highest"


def _cudnn_tf32() -> bool:
    cudnn: Any = torch.backends.cudnn
    return bool(cudnn.conv.fp32_precision == "tf32" if _PLACES else cudnn.allow_tf32)


def _precisions() -> list[str]:
    return [place.fp32_precision for place in _PLACES]


def _set_precisions(values: Sequence[str]) -> None:
    for place, value in zip(_PLACES, values, strict=True):
        place.fp32_precision = value


# torch's switches: how to read and set each, and its value for which attention consists of plain products, numbers have
# the precision of the tensors, and the same sum has the same bytes.
_SWITCHES: tuple[tuple[Callable[[], Any], Callable[[Any], Any], Any], ...] = (
    (_matmul_precision, torch.set_float32_matmul_precision, "highest"),
    (_cudnn_tf32, partial(setattr, torch.backends.cudnn, "allow_tf32"), False),
    (_precisions, _set_precisions, ["ieee"] * len(_PLACES)),
    *(
        (partial(getattr, torch.backends.cudnn, k), partial(setattr, torch.backends.cudnn, k), k == "deterministic")
        for k in ("deterministic", "benchmark")
    ),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp, False),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp, False),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp, True),
)

_NUM_PRECISIONS = 3  # the first entries of the table


class _User:
    """One use of `disable_fused_attention` or `quiet_checkpoints`; it ends with its owner, even after an error."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


def _write_switches(values: Sequence[Any]) -> None:
    for (_, write, _), value in zip(_SWITCHES, values, strict=True):
        write(value)


# Users that have fused attention switched off, and the saved switches: they belong to the process, not the thread.
_USERS = weakref.WeakSet[_User]()
_BEFORE = list[bool]()
_LOCK = threading.RLock()


@contextmanager
def outside_autocast() -> Iterator[None]:
    """Compute in the precision of the tensors, in spite of the caller's `torch.autocast`."""
    with ExitStack() as stack:
        for kind in ("cpu", "cuda", "xpu", "mps"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def disable_fused_attention() -> Iterator[None]:
    """Restrict torch to kernels with all derivatives and the tensors' precision, without TF32 and autocast.

    The restriction lasts as long as any thread uses it.
    """
    user = _User()
    try:
        with _LOCK:
            _USERS.add(user)
            if not _BEFORE:
                _BEFORE[:] = [read() for read, _, _ in _SWITCHES]
                _write_switches([value for *_, value in _SWITCHES])
        with outside_autocast():
            yield
    finally:
        with _LOCK:
            _USERS.discard(user)
            if _BEFORE and not _USERS:
                _write_switches(_BEFORE)
                _BEFORE.clear()


@contextmanager
def kernels_of_the_loop(*, in_full: bool = True) -> Iterator[None]:
    """Let torch choose its kernels as in the user's own loop, if this thread has switched fused attention off.

    Other threads that have switched it off keep it off, and threads that are about to do so wait.

    Args:
        in_full: Also compute in the precision of the loop.
    """
    own = threading.get_ident()
    with _LOCK:
        is_alone = bool(_BEFORE) and all(user.thread == own for user in _USERS)
        try:
            if is_alone:
                own_values = [value for *_, value in _SWITCHES]
                _write_switches(_BEFORE if in_full else [*own_values[:_NUM_PRECISIONS], *_BEFORE[_NUM_PRECISIONS:]])
            yield
        finally:
            if is_alone:
                _write_switches([value for *_, value in _SWITCHES])


_NUM_COMPARED = 64  # rows that are also evaluated without gradients


def warn_unless_plain(function: Callable[[Tensor], Tensor], X: Tensor, module: nn.Module, most: int) -> None:
    """Warn if a network predicts differently without gradients, in the kernels that torch then chooses.

    Args:
        function: The explained network in evaluation mode.
        X: Inputs; a spread selection of them is compared.
        module: The network.
        most: Largest number of rows per call.
    """
    rows = X[:: math.ceil(len(X) / min(_NUM_COMPARED, most))]
    with disable_fused_attention(), suppress(RuntimeError, TypeError, ValueError):  # it may fail without gradients
        with torch.enable_grad():
            explained = function(rows).detach()
        with torch.no_grad(), kernels_of_the_loop(in_full=False):
            plain = function(rows)
        allowed = torch.finfo(explained.dtype).eps ** 0.4 * float(explained.abs().nan_to_num().max())
        if plain.shape == explained.shape and torch.allclose(plain, explained, rtol=0, atol=allowed, equal_nan=True):
            return
        nested = [name for name, part in module.named_modules() if getattr(part, "use_nested_tensor", False)]
        cause = (
            f"torch's nested-tensor path in {', '.join(map(repr, nested))}, which puts 0 where a mask pads. Build "
            "nn.TransformerEncoder(..., enable_nested_tensor=False), or set its use_nested_tensor = False"
        )
        warn_caller(
            f"your network gives {len(rows)} inputs other outputs in eval() without gradients (torch.no_grad) than "
            "with them, as it was trained and is explained. Likely cause: "
            f"{cause if nested else 'its forward() asks torch.is_grad_enabled(), or torch takes another path'}."
        )


# Functions that normalise by statistics, with the names of their arguments.
_NORMALISATIONS: dict[Any, tuple[str, ...]] = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    F.instance_norm: ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps"),
    torch.batch_norm: ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps"),
}
_DEFAULTS = {"running_mean": None, "running_var": None, "weight": None, "bias": None, "eps": 1e-5}


def normalise_by_statistics(
    x: Float[Tensor, "E G ..."],
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Float[Tensor, "E G ..."]:
    """Compute (x - mean) / sqrt(variance + eps) * weight + bias.

    Args:
        x: E inputs of G channels.
        mean: One number per channel, (G,), or one per row and channel, (E, G); the same for `variance`, `weight`,
            `bias`.
        variance: The variance.
        weight: The scale.
        bias: The shift.
        eps: Number added to the variance.
    """
    tensors = tuple(value for value in (x, mean, variance, weight, bias) if value is not None)
    if has_torch_function(tensors):  # one call for modes that intercept a forward pass
        result: Tensor = handle_torch_function(normalise_by_statistics, tensors, x, mean, variance, weight, bias, eps)
        return result
    places = [1] * (x.ndim - 2)
    scale = torch.rsqrt(variance + eps)
    if weight is not None:
        scale = scale * weight
    centred, scale = x - mean.reshape(*mean.shape, *places), scale.reshape(*scale.shape, *places)
    return centred * scale if bias is None else torch.addcmul(bias.reshape(*bias.shape, *places), centred, scale)


@final
class WrittenOutNormalisation(TorchFunctionMode):
    """Replace batch and instance normalisation in evaluation mode by `normalise_by_statistics`.

    Weight normalisation is also written out, because torch's second derivative of it (2.13) treats the norm as
    constant.

    Args:
        statistics: The moving statistics; normalisation by other tensors is left to torch.
    """

    def __init__(self, statistics: Iterable[Tensor]) -> None:
        super().__init__()
        self.statistics = {id(value) for value in statistics}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call."""
        kwargs = kwargs or {}
        if func is torch._weight_norm:
            v, g, dim = (*args, *kwargs.values(), 0)[:3]
            return v * (g / torch.norm_except_dim(v, 2, dim))
        if func in _NORMALISATIONS:
            named = {**_DEFAULTS, **dict(zip(_NORMALISATIONS[func], args, strict=False)), **kwargs}
            mean, var = named["running_mean"], named["running_var"]
            uses_batch = named.get("use_input_stats", func is F.instance_norm) or named.get("training", False)
            if not uses_batch and {id(mean), id(var)} & self.statistics:
                return normalise_by_statistics(named["input"], mean, var, named["weight"], named["bias"], named["eps"])
        return func(*args, **kwargs)


@final
class KeptActivations(TorchFunctionMode):
    """Keep the tensors that a function saves for its backward pass, in spite of a checkpoint's hooks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call."""
        if not torch.is_grad_enabled():  # nothing is saved, and a checkpoint sets no hooks
            return func(*args, **(kwargs or {}))
        with saved_tensors_hooks(_pack, _unpack):  # torch calls the innermost hooks
            return func(*args, **(kwargs or {}))


def _pack(x: Tensor) -> tuple[Tensor, int]:
    return x.detach(), x._version  # an output that refers to itself would never be freed


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    x, version = packed
    if x._version != version:  # torch checks this itself only without hooks
        raise RuntimeError("a tensor that a gradient needs was changed in place after it had been used.")
    return x


class _Thread(threading.local):
    depth = 0  # number of times that the thread holds torch's forward-mode level

    def __init__(self) -> None:
        self.users = weakref.WeakSet[_User]()


_THREAD = _Thread()


class _QuietCategory(type):
    """Metaclass of a warning category that matches the warnings of a thread while it is quiet."""

    def __subclasscheck__(cls, category: Any) -> bool:
        return bool(_THREAD.users)


_QUIET: Any = _QuietCategory("QuietWarning", (Warning,), {})


@contextmanager
def quiet_checkpoints() -> Iterator[None]:
    """Silence this thread's warnings about re-entrant checkpoints without gradients and about nested tensors."""
    # One permanent entry in the process's list of filters: each change of the list would make Python forget the
    # warnings that it has shown, and repeat those of the user's own loop.
    if [category for _, _, category, *_ in warnings.filters[:1]] != [_QUIET]:
        said = "None of the inputs have requires_grad=True|The PyTorch API of nested tensors is in prototype"
        warnings.filterwarnings("ignore", said, _QUIET)
    user = _User()
    try:
        _THREAD.users.add(user)
        yield
    finally:
        _THREAD.users.discard(user)


# torch has one forward-mode level per process: a second thread would fail, or end the first one's.
_FORWARD_MODE = threading.RLock()
_interrupted = threading.Event()  # a computation may have left the level open; read and set under the lock


@contextmanager
def exclusive_forward_mode() -> Iterator[None]:
    """Let one thread at a time use torch's forward-mode level, which the caller enters itself.

    A computation that is interrupted while torch enters or leaves the level can leave it open. The next computation
    could not enter it, so it closes the level first.
    """
    with _FORWARD_MODE:
        if _interrupted.is_set():
            with suppress(RuntimeError, AttributeError):  # only its number remains, or this torch has other names
                torch._C._exit_dual_level(level=0)
            cast(Any, fwAD)._current_level = -1
        _interrupted.set()
        depth = _THREAD.depth
        try:
            _THREAD.depth = depth + 1
            yield
        except Exception:
            _interrupted.clear()  # after an error, the level is closed
            raise
        finally:
            _THREAD.depth = depth
        _interrupted.clear()


@contextmanager
def forward_mode() -> Iterator[None]:
    """Enter torch's level of forward-mode derivatives, one thread at a time."""
    with exclusive_forward_mode(), fwAD.dual_level():
        yield


def split_dual(value: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return a tensor's value and its tangent; None if it has no tangent.

    While another thread is at torch's level, torch would make a view of a tensor without a tangent. Gradients through
    the view are added in another order, and would have other bytes.
    """
    if not _THREAD.depth:
        return value, None
    primal, tangent = fwAD.unpack_dual(value)
    return primal, tangent


class FlopCount(TorchDispatchMode):
    """Counts the floating-point operations of matrix products and convolutions in this thread.

    `torch.utils.flop_counter.FlopCounterMode` hooks all modules of the process, including those of other threads.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if (count := flop_registry.get(func._overloadpacket)) is not None:
            self.total += count(*args, **(kwargs or {}), out_val=result)
        return result


@final
class CopyingResults(TorchFunctionMode):
    """Let `copy.deepcopy` copy results of operations that modules keep: activations, weights that hooks compute."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # torch's protocol
        """Make the call."""
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


@contextmanager
def watching_normalisations(module: nn.Module, look: Callable[[str, nn.Module, Tensor], None]) -> Iterator[None]:
    """Call a function with name, layer and input of each normalisation by moving statistics in a forward pass."""
    handles = [
        layer.register_forward_pre_hook(lambda layer, args, name=name: look(name, layer, args[0]))
        for name, layer in module.named_modules()
        if isinstance(layer, nn.modules.batchnorm._NormBase) and layer.running_mean is not None
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def with_tensors(module: nn.Module, named: dict[str, Tensor]) -> Callable[..., Any]:
    """Return a function that calls a module with other tensors; buffers that the module changes are updated in `named`.

    The module's own tensors are restored: `functional_call` leaves tensors of `named` in a module that has two names. A
    tensor that the module replaced itself stays, and so do its other notes about it.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        given = {id(tensor) for tensor in named.values()}
        parts = [part for part in module.modules() if not isinstance(part, torch.jit.ScriptModule)]
        kept: list[Any] = [(own, own.copy()) for part in parts for own in (part._parameters, part._buffers)]
        try:
            return functional_call(module, named, args, kwargs)
        finally:
            for own, tensors in kept:
                own.update({name: tensor for name, tensor in tensors.items() if id(own.get(name)) in given})

    return call


@contextmanager
def filter_own_warnings(action: Literal["error", "ignore"], kind: type[Warning]) -> Iterator[None]:
    """Turn this thread's warnings into errors, or ignore them; warnings of other threads are unchanged.

    `warnings.catch_warnings` replaces the process's list of filters: another thread would get errors in the middle of
    its work, and two threads that overlap would keep the filters of one for good. Here one more filter is in that list
    for a while. It matches nothing in other threads, and nothing later, even if another thread's `catch_warnings` has
    copied it.

    Args:
        action: "error" or "ignore".
        kind: Category of the warnings, with all its subclasses.
    """
    thread, is_active = threading.get_ident(), True

    class OwnCategory(type):
        """Warning category that matches this thread's warnings while it is active."""

        def __subclasscheck__(cls, category: Any) -> bool:
            return is_active and threading.get_ident() == thread and issubclass(category, kind)

    category = cast(Any, OwnCategory("OwnWarning", (Warning,), {}))
    warnings.simplefilter(action, category)
    try:
        yield
    finally:
        is_active = False
        for entry in [entry for entry in warnings.filters if entry[2] is category]:
            with suppress(ValueError):  # another thread has replaced the list
                cast(Any, warnings.filters).remove(entry)


# Relative difference between values computed alone and together with others that counts as rounding.
_ROUNDING = {torch.float64: 1e-9, torch.float32: 1e-3}


@dataclass
class MappedRows:
    """Computes rows together if torch maps the computation and the result equals that of a single row.

    Attributes:
        works: Whether this holds; None while it is unknown.
        least: For each value, the least size to which its difference is compared; 0 by default.
    """

    works: bool | None = None
    least: Sequence[float] = ()

    def __call__(
        self,
        count: int,
        mapped: Callable[[], Sequence[Tensor]],
        single: Callable[[int], Sequence[Tensor]],
        *,
        compares: bool = False,
    ) -> Sequence[Tensor]:
        """Return the values of some rows, computed together or one after another.

        Args:
            count: Number of rows.
            mapped: Computes all rows together.
            single: Computes one row.
            compares: Whether to compare the last row in every call, not only in the first.
        """
        if self.works is not False and count > 1:
            try:
                found = mapped()
            except (RuntimeError, TypeError, ValueError, LookupError, AttributeError, Warning):
                self.works = False
            else:
                if self.works is None or compares:
                    least = self.least or [0.0] * len(found)
                    pairs = zip(found, single(count - 1), least, strict=True)  # the first row may be special
                    self.works = all(_differ_by_rounding(a[-1], b, size) for a, b, size in pairs)
                if self.works:
                    return found
        return [torch.stack(values) for values in zip(*map(single, range(count)), strict=True)]


def _differ_by_rounding(a: Tensor, b: Tensor, least: float) -> bool:
    rounding = _ROUNDING.get(b.dtype, 1e-2)
    return not b.numel() or float((a - b).abs().max()) <= rounding * max(least, float(b.abs().max()))
