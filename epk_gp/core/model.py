"""The network as a function of its trained weights, and a fingerprint of that function."""

import copy
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import cached_property
from importlib import import_module
from typing import Any, final

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor, nn

from epk_gp.core.checks import allclose, validate_texts
from epk_gp.core.graphs import ROWS_FIRST
from epk_gp.core.inputs import ONE_TENSOR, Signature
from epk_gp.core.plans import ModelCache, TensorSpec
from epk_gp.core.torch_overrides import (
    CopyingResults,
    KeptActivations,
    WrittenOutNormalisation,
    disable_fused_attention,
    quiet_checkpoints,
    with_tensors,
)

# In a forward pass the batch of inputs carries this attribute, its number of rows, so that tensors computed from it
# can be told from parameters and constants of any size (`autodiff.interception`).
BATCH_MARK = "_epk_gp_batch"

# Number of frozen weights, such as a pretrained base under adapters, above which a run is stored without them.
LARGE_BASE = 1 << 20


class StopForwardError(Exception):
    """The forward pass has computed the needed value and can stop."""


@final
class FunctionalModel:
    """A network as a function of its trained weights, `model(params, X)`.

    Every call takes the parameters as a dictionary from name to tensor; `unflatten` makes one from a flat vector. All
    other tensors that the outputs depend on, frozen parameters and buffers, are the frozen state.

    Several threads may use one model at once: `torch.func.functional_call` writes the parameters into the module for
    the length of a call, so each thread evaluates its own copy of the module, which shares all tensors with the others.

    Args:
        module: The network in evaluation mode. The model owns it from now on.
        names: Names of the trained parameters, in the order of `named_parameters`.
        shapes: Their shapes.
        statistics: Names of the buffers that training-mode forward passes change (running means and variances). The
            path of a run includes them.
        cache: Known facts about the network; a new cache by default.
        signature: The network's call, and the map from its result to outputs.
        recomputes: Whether its forward function uses activation checkpointing, in evaluation mode too.

    Attributes:
        module: The network in evaluation mode.
        names: Names of the trained parameters.
        shapes: Their shapes.
        statistics: Names of the moving statistics.
        statistic_shapes: Their shapes.
        spec: Dtype and device of the trained parameters.
        cache: Rules for differentiating the network; all variants share them.
        signature: The network's call, and the map from its result to outputs.
        recomputes: Whether its forward function uses activation checkpointing; its activations are then kept.
    """

    def __init__(
        self,
        module: nn.Module,
        names: tuple[str, ...],
        shapes: tuple[torch.Size, ...],
        statistics: tuple[str, ...] = (),
        cache: ModelCache | None = None,
        signature: Signature = ONE_TENSOR,
        *,
        recomputes: bool = False,
    ) -> None:
        self.module, self.names, self.shapes, self.signature = module, names, shapes, signature
        self.recomputes = recomputes
        self.statistics = statistics
        self.statistic_shapes = tuple(module.get_buffer(name).shape for name in statistics)
        parameter = module.get_parameter(names[0])
        self.spec = TensorSpec(parameter.dtype, parameter.device)
        self.cache = ModelCache() if cache is None else cache
        self._variants: dict[TensorSpec, FunctionalModel] = {}
        self._of_thread = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        """Return the network alone; variants and copies for threads are made again when needed."""
        names = ("module", "names", "shapes", "statistics", "signature", "recomputes")
        return {name: getattr(self, name) for name in names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the network."""
        self.__init__(**state)

    @cached_property
    def output_size(self) -> float:
        """Typical size of large outputs, if the network states one, as our networks for tables do; otherwise 1."""
        return float(getattr(self.module, "epk_gp_output_size", 1.0)) if self.signature.takes_them_as_returned else 1.0

    @cached_property
    def num_weights(self) -> int:
        """Number P of trained weights."""
        return sum(self.sizes)

    @cached_property
    def num_statistics(self) -> int:
        """Number Q of moving statistics."""
        return sum(shape.numel() for shape in self.statistic_shapes)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Number of weights of each parameter."""
        return tuple(shape.numel() for shape in self.shapes)

    @cached_property
    def _layouts(self) -> list[tuple[tuple[str, ...], list[torch.Size], list[int], list[int]]]:
        """Names, shapes, sizes and places of last dimensions of 2: for weights, and for weights with statistics."""
        shapes, several = [*self.shapes, *self.statistic_shapes], (self.names, self.names + self.statistics)
        pairs, sizes = [k for k, shape in enumerate(shapes) if shape[-1:] == (2,)], [shape.numel() for shape in shapes]
        return [(own, shapes[: (n := len(own))], sizes[:n], [k for k in pairs if k < n]) for own in several]

    def __call__(self, params: Mapping[str, Tensor], X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n C"]:
        """Evaluate the network.

        Raises:
            TypeError: The outputs are not floating-point numbers.
            ValueError: The network, or the function `output` of its signature, does not return one row of outputs per
                input.
        """
        outputs = self.signature.outputs(self.returned(params, X))
        is_own = self.signature.output is None  # whether the network itself returns the outputs
        if isinstance(outputs, Tensor) and not outputs.is_floating_point():
            raise TypeError(
                f"{'the network' if is_own else 'output'} must return floating-point outputs: got {outputs.dtype}. "
                "Leave argmax, rounding and casts to integers out of forward()."
            )
        if not isinstance(outputs, Tensor) or outputs.ndim != 2 or outputs.shape[0] != X.shape[0]:
            got = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
            if not is_own:
                raise ValueError(
                    "output must map what the network returns for n inputs to a tensor of shape (n, C): got "
                    f"{got} for {X.shape[0]} inputs. What the network returns has its rows {ROWS_FIRST}."
                )
            raise ValueError(
                f"the network must map n inputs to a tensor of shape (n, C): got {got} for {X.shape[0]} inputs. "
                "Say how to take one row of outputs per input from what it returns, as in "
                f"output=lambda returned: {_output_example(outputs)}."
            )
        return outputs

    def evaluate(self, params: Mapping[str, Tensor], X: Shaped[Tensor, "..."]) -> Any:
        """Evaluate the network without checking its outputs, as under `torch.func.vmap`; errors as in `returned`."""
        return self.signature.outputs(self.returned(params, X))

    def returned(self, params: Mapping[str, Tensor], X: Shaped[Tensor, "..."]) -> Any:
        """Return the network's result; `Signature.outputs` takes the outputs from it.

        Raises:
            RuntimeError: The moving statistics are not among the parameters.
        """
        if any(name not in params for name in self.statistics):  # the module's own belong to no state of the run
            raise RuntimeError("a network with moving statistics must be called with those of a state of the run.")
        module = self._take_module_of_thread()
        keeping = KeptActivations() if self.recomputes else nullcontext()
        statistics = [params[name] for name in self.statistics]
        written_out = WrittenOutNormalisation(statistics) if statistics else nullcontext()
        try:
            # in every call, so that the bytes do not depend on other threads
            with disable_fused_attention(), quiet_checkpoints(), keeping, written_out:
                returned = self.signature.call(with_tensors(module, dict(params)), X, self.spec, _marked)
        except StopForwardError:
            self._of_thread.module = module
            raise
        self._of_thread.module = module
        return returned

    def flatten(self, params: Mapping[str, Tensor], memory: Tensor | None = None) -> Float[Tensor, " P"]:
        """Concatenate the trained parameters in the model's order, into `memory` (a buffer to overwrite) if given."""
        return flattened([params[name] for name in self.names], memory)

    def unflatten(self, flat: Float[Tensor, "*G n"]) -> dict[str, Tensor]:
        """View flat vectors of P weights, or of P weights and Q moving statistics, as named tensors."""
        names, shapes, sizes, pairs = self._layouts[flat.shape[-1] > self.num_weights]
        leading = flat.shape[:-1]
        pieces = zip(flat.split_with_sizes(sizes, -1), shapes, strict=True)
        views = [piece.view(leading + shape if leading else shape) for piece, shape in pieces]
        if pairs:  # torch makes no complex numbers of pairs at odd offsets
            is_mapped = torch._C._functorch.maybe_current_level() is not None  # strides of batches are then hidden
            for k in pairs:
                if is_mapped or any(n % 2 for n in (views[k].storage_offset(), *views[k].stride()[:-1])):
                    views[k] = views[k].clone(memory_format=torch.contiguous_format)
        return dict(zip(names, views, strict=True))

    def flatten_statistics(self, buffers: Mapping[str, Tensor]) -> Float[Tensor, " Q"]:
        """Concatenate the moving statistics in the model's order."""
        values = [buffers[name].detach().reshape(-1).to(self.spec.dtype) for name in self.statistics]
        return torch.cat(values) if values else torch.zeros(0, dtype=self.spec.dtype, device=self.spec.device)

    def weights_of(self, net: nn.Module) -> Float[Tensor, " P"]:
        """Copy the current trained parameters of a network of the same architecture, as a flat vector."""
        return self.flatten({name: net.get_parameter(name) for name in self.names})

    def statistics_of(self, net: nn.Module) -> Float[Tensor, " Q"]:
        """Copy the current moving statistics of a network of the same architecture, as a flat vector."""
        return self.flatten_statistics({name: net.get_buffer(name) for name in self.statistics})

    def frozen_state(self) -> dict[str, Tensor]:
        """Return buffers and frozen parameters by name: all inputs of f that the path does not change."""
        moving = {*self.names, *self.statistics}
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        return {name: value.detach() for name, value in tensors if name not in moving}

    def base(self) -> dict[str, Tensor]:
        """Return the frozen parameters, if they are so many that a stored run keeps only their digest."""
        frozen = {name: p.detach() for name, p in self.module.named_parameters() if name not in self.names}
        return frozen if sum(p.numel() for p in frozen.values()) > LARGE_BASE else {}

    def spec_for(self, X: Shaped[Tensor, "..."]) -> TensorSpec:
        """Return the dtype and device for a computation on X: floating inputs set both, integers only the device."""
        return TensorSpec(X.dtype if X.is_floating_point() else self.spec.dtype, X.device)

    def variant(self, spec: TensorSpec) -> "FunctionalModel":
        """Return the model with its frozen state in another dtype or on another device; each variant is made once."""
        with self.cache.lock:
            if spec not in self._variants and spec != self.spec:
                self._variants[spec] = self.converted(spec)
            return self._variants.get(spec, self)

    def converted(self, spec: TensorSpec) -> "FunctionalModel":
        """Return a `variant` of the model without keeping it."""
        module = copy.deepcopy(self.module).to(dtype=spec.dtype, device=spec.device)
        return FunctionalModel(**self.__getstate__() | {"module": module, "cache": self.cache})

    def _take_module_of_thread(self) -> nn.Module:
        """Return the thread's copy of the module; the caller gives it back after the call.

        An interrupted call does not give it back: foreign parameters may be left in it, which the next call would not
        replace.
        """
        module: nn.Module | None = self._of_thread.__dict__.pop("module", None)
        return copied_module(self.module) if module is None else module


def copied_module(module: nn.Module, *, has_own_buffers: bool = False) -> nn.Module:
    """Return a copy of a module that shares its parameters and, unless `has_own_buffers`, its buffers."""
    with CopyingResults():
        shared = (*module.parameters(), *(() if has_own_buffers else module.buffers()))
        return copy.deepcopy(module, {id(tensor): tensor for tensor in shared})


def _output_example(returned: object) -> str:
    """Return an example of a function that takes the outputs from this result."""
    if isinstance(returned, Tensor):
        return "returned.mean(dim=1)" if returned.ndim == 3 else "returned.flatten(1)"
    if isinstance(getattr(returned, "logits", None), Tensor):
        return "returned.logits"
    return f"returned[{next(iter(returned), 0)!r}]" if isinstance(returned, Mapping) else "returned[0]"


def _marked(x: Tensor) -> Tensor:
    """Return a marked view of an input; the caller's tensor keeps its attributes."""
    view = x.view_as(x)
    setattr(view, BATCH_MARK, len(view))
    return view


def device_random_state(device: torch.device) -> Tensor | None:
    """Return the state of an accelerator's random number generator; None on the CPU."""
    return None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Restore torch's random number generators of the CPU and of one device afterwards."""
    is_cpu = device.type == "cpu"  # by default torch saves the states of all GPUs
    with torch.random.fork_rng([] if is_cpu else [device.index or 0], device_type="cuda" if is_cpu else device.type):
        yield


def uncompiled(net: Any) -> Any:
    """Return the network inside `torch.compile`'s wrapper, which has the same parameters; any other value unchanged."""
    return getattr(net, "_orig_mod", net)


@contextmanager
def as_written(net: Any) -> Iterator[torch.dtype | None]:
    """Remove the autocast of Accelerate's `prepare` from a network's forward() for a while, and yield its dtype."""
    if "_original_forward" not in vars(net):
        yield None
        return
    precision = import_module("accelerate.state").AcceleratorState().mixed_precision
    patched, net.forward = net.forward, net._original_forward
    try:
        yield torch.float16 if precision == "fp16" else torch.bfloat16
    finally:
        net.forward = patched


def functionalize(
    net: nn.Module,
    names: tuple[str, ...] | None = None,
    statistics: tuple[str, ...] = (),
    signature: Signature = ONE_TENSOR,
    *,
    recomputes: bool = False,
) -> FunctionalModel:
    """Copy a network as a function of its trained weights.

    Args:
        net: The network. Its weights are not kept.
        names: The trained parameters; all parameters that require a gradient by default.
        statistics: The buffers that training-mode forward passes move.
        signature: The network's call, and the map from its result to outputs.
        recomputes: Whether its forward function uses activation checkpointing, in evaluation mode too.

    Raises:
        TypeError: `net` is not a module, or it cannot be copied.
        ValueError: There is nothing to train, or two names stand for parameters of different dtype or device.
    """
    net = uncompiled(net)
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be a torch.nn.Module: got {type(net).__name__}.")
    if any(kind.__module__.startswith("keras.") for kind in type(net).__mro__):
        raise TypeError("net must hold its weights in torch modules: got a Keras model. Write the network in torch.")
    if isinstance(net, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TypeError(f"net must be the network itself: got {type(net).__name__} around it. Pass net.module.")
    if isinstance(net, torch.jit.ScriptModule):
        raise TypeError("net must be a network in Python: got a torch.jit.ScriptModule. Pass what it was made of.")
    parameters = dict(net.named_parameters())
    if any(isinstance(p, nn.parameter.UninitializedParameter) for p in parameters.values()):
        raise ValueError("the network must be initialised: it has lazy layers. Call it once on a batch before.")
    if any(p.is_meta for p in parameters.values()):
        message = "the network must hold numbers: its parameters are on device 'meta'. Use net.to_empty(device=...)."
        raise ValueError(message)
    for name, p in parameters.items():
        is_packed = not p.is_floating_point() and type(p) is not nn.Parameter  # as of bitsandbytes
        if is_packed or (type(p.data) is not Tensor and isinstance(p, nn.Parameter)):  # as of torchao
            kind = type(p if is_packed else p.data).__name__
            raise ValueError(
                f"the network's weights must be tensors that torch differentiates through: {name!r} is quantised "
                f"({kind}, {p.dtype}), by a library whose products round. Load the base in float32, or call "
                "its dequantize(). Layers that turn integer buffers into weights by torch's operations are recorded."
            )
    if names is None:
        names = tuple(name for name, p in parameters.items() if p.requires_grad and p.numel())
    kept = (net.named_modules(), net.named_parameters(), net.named_buffers())
    validate_texts((name for pairs in kept for name, _ in pairs), "names of modules, parameters and buffers")
    missing = [name for name in names if name not in parameters]
    if missing:
        raise ValueError(
            f"the network must have the recorded weights: {missing[0]!r} is missing (it has {sorted(parameters)}). "
            "Pass the network that was trained."
        )
    if not names:
        raise ValueError("the network must have weights to train: no parameter requires a gradient.")
    kinds = {(parameters[name].dtype, parameters[name].device) for name in names}
    if len(kinds) > 1 or not next(iter(kinds))[0].is_floating_point:
        raise ValueError(f"the weights must share one floating dtype and one device: got {sorted(map(str, kinds))}.")
    try:
        with as_written(net), CopyingResults():
            module = copy.deepcopy(net)
    except (RuntimeError, TypeError, AttributeError) as error:
        raise TypeError(f"the network must be copyable by copy.deepcopy: {error}") from error
    module.requires_grad_(False).eval()
    for part in module.modules():  # their effect on the user's gradients shows in the check of the steps
        part._backward_hooks.clear()
        part._backward_pre_hooks.clear()
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False  # the same function, with gradients in the layout of its weights
        compiled: Any = part
        if uncompiled(part) is not part:  # a compiled submodule runs uncompiled
            compiled.dynamo_ctx = uncompiled
            compiled._initialize()
    shapes = tuple(parameters[name].shape for name in names)
    return FunctionalModel(module, names, shapes, statistics, signature=signature, recomputes=recomputes)


def functionalize_like(model: FunctionalModel, net: nn.Module) -> FunctionalModel:
    """Copy a network of the same architecture as a function of the same weights; errors as in `functionalize`."""
    return functionalize(net, model.names, model.statistics, model.signature, recomputes=model.recomputes)


def zero_final_layer(net: nn.Module) -> nn.Module:
    """Set the last linear layer to zero, in place, so that the initial output is constant (Remark 1, Bell et al. 2023).

    Args:
        net: Network whose last module with parameters, in order of registration, is a `torch.nn.Linear`.

    Returns:
        The same network.

    Raises:
        TypeError: `net` is not a module.
        ValueError: The last module with parameters is not a linear layer.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be a torch.nn.Module: got {type(net).__name__}.")
    holders = [module for module in net.modules() if any(True for _ in module.parameters(recurse=False))]
    if not holders or not isinstance(holders[-1], nn.Linear):
        got = type(holders[-1]).__name__ if holders else "a network without parameters"
        raise ValueError(
            f"the network's last module with parameters must be a torch.nn.Linear: got {got}. "
            "Zero its last layer by hand."
        )
    with torch.no_grad():
        for p in holders[-1].parameters(recurse=False):
            p.zero_()
    return net


NUM_FINGERPRINT_POINTS = 4  # inputs whose outputs are stored with a run (part of format version 2)


def perturbed_initial(initial: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
    """Return the initial weights moved by 0.1 sin(i), i the index of the weight.

    At the unperturbed weights, a last layer of zeros would make the outputs of all networks equal.
    """
    wave = torch.arange(initial.numel(), device=initial.device, dtype=torch.float64).sin_().to(initial.dtype)
    return wave.mul_(0.1).add_(initial)  # in place, because new memory costs more than the sums


def fingerprint_outputs(
    model: FunctionalModel,
    initial: Float[Tensor, " P"],
    inputs: Shaped[Tensor, "M ..."],
    statistics: Float[Tensor, " Q"] | None = None,
) -> Float[Tensor, "n C"]:
    """Return the network's outputs at the first n = min(4, M) inputs, with the initial weights perturbed.

    Args:
        model: The network.
        initial: Its initial weights.
        inputs: The training inputs.
        statistics: Its initial moving statistics, if any; they are not perturbed, because a variance is positive.
    """
    state = perturbed_initial(initial)
    if statistics is not None:
        state = torch.cat([state, statistics.to(state)])
    with torch.no_grad():
        return model(model.unflatten(state), inputs[:NUM_FINGERPRINT_POINTS])


def setting_places(module: nn.Module) -> list[tuple[int, str]]:
    """Return the places (module and name) of a network's plain numbers, such as dropout rates."""
    parts = enumerate(module.modules())
    return [(k, name) for k, part in parts for name, value in vars(part).items() if type(value) in (int, float)]


def settings_of(module: nn.Module, places: Sequence[tuple[int, str]]) -> Float64[Tensor, " K"]:
    """Return the numbers at some places of a network; NaN where there is no number any more."""
    parts = list(module.modules())
    values: list[Any] = [vars(parts[k]).get(name) if k < len(parts) else None for k, name in places]
    return torch.tensor([v if type(v) in (int, float) else math.nan for v in values], dtype=torch.float64)


def set_settings(module: nn.Module, places: Sequence[tuple[int, str]], values: Float64[Tensor, " K"]) -> None:
    """Write numbers to some places of a network, converted to the types that they replace."""
    parts = list(module.modules())
    for (k, name), value in zip(places, values.tolist(), strict=True):
        kind = type(vars(parts[k])[name])
        setattr(parts[k], name, kind(value) if value == int(value) else value)


def write_state(module: nn.Module, model: FunctionalModel, state: Float[Tensor, " PQ"]) -> dict[str, Tensor]:
    """Write weights, or weights and statistics, into a network, and return all of its tensors by name."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    own = [tensors[name] for name in model._layouts[len(state) > model.num_weights][0]]
    with torch.no_grad():
        torch._foreach_copy_(own, torch._C._nn.unflatten_dense_tensors(state, own))
    return tensors


def leaves_of(module: nn.Module, model: FunctionalModel, state: Float[Tensor, " PQ"]) -> list[Tensor]:
    """Write weights and statistics into a network, and return its weights, which require gradients."""
    tensors = write_state(module, model, state)
    leaves = [tensors[name].requires_grad_(True) for name in model.names]
    for leaf in leaves:
        leaf.grad = None
    return leaves


_HOOKS_ARE_OFF = "epk_gp: this forward pass must set no hooks."


def with_kept_activations(model: FunctionalModel, state: Tensor, X: Shaped[Tensor, "M ..."]) -> FunctionalModel:
    """Return the model with all activations kept, so that a backward pass recomputes nothing.

    The model is returned unchanged if the network uses no activation checkpointing in evaluation mode.

    Raises:
        ValueError: The network checkpoints re-entrantly, or around functions whose activations cannot be kept; or it
            cannot be differentiated.
    """
    rows = X[:NUM_FINGERPRINT_POINTS]
    weights, statistics = state.split([model.num_weights, model.num_statistics])
    state = torch.cat([1.1 * weights + 0.01, statistics])  # other weights than those in the module

    def evaluated(model: FunctionalModel) -> tuple[Tensor, list[Tensor]]:
        params = {name: value.detach() for name, value in model.unflatten(state).items()}
        leaves = [params[name].requires_grad_() for name in model.names]
        with torch.enable_grad():
            return model(params, rows), leaves

    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(_HOOKS_ARE_OFF):
            is_kept = not _has_reentrant_checkpoint(evaluated(model)[0])
    except RuntimeError as error:
        if _HOOKS_ARE_OFF not in str(error):
            raise ValueError(
                f"the network must be differentiable in its weights: a forward pass with gradients fails: {error}"
            ) from error
        model = FunctionalModel(**model.__getstate__() | {"recomputes": True, "cache": model.cache})
        module, signature = copy.deepcopy(model.module), model.signature
        leaves = leaves_of(module, model, state)
        try:
            with torch.enable_grad(), quiet_checkpoints(), disable_fused_attention():
                again = signature.outputs(signature.call(module, rows, model.spec))
                kept, expected = _gradient_along_a_wave(*evaluated(model)), _gradient_along_a_wave(again, leaves)
                is_kept = allclose(kept, expected)
        except RuntimeError:
            is_kept = False
    if not is_kept:
        raise ValueError(
            "activation checkpointing in evaluation mode must be torch.utils.checkpoint with use_reentrant=False "
            "around torch's own functions: others are recomputed with other weights. Pass use_reentrant=False, call a "
            "function of another kind (a torch.autograd.Function, or a scripted one) outside of the checkpoint, or "
            "checkpoint in training mode only (if self.training)."
        )
    return model


def _gradient_along_a_wave(outputs: Tensor, leaves: list[Tensor]) -> Tensor:
    wave = torch.arange(outputs.numel(), dtype=outputs.dtype, device=outputs.device).cos().view_as(outputs)
    gradients = torch.autograd.grad(outputs, leaves, wave, allow_unused=True, materialize_grads=True)
    return torch.cat([g.detach().reshape(-1) for g in gradients])


def _has_reentrant_checkpoint(outputs: Tensor) -> bool:
    waiting, seen = [outputs.grad_fn], set[object]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            if node.name() == "CheckpointFunctionBackward":
                return True
            waiting.extend(parent for parent, _ in node.next_functions)
    return False


FEW_WEIGHTS = 1 << 15  # so few are compared directly; checks of so small steps wait for others


def flattened(tensors: Sequence[Tensor], memory: Tensor | None = None) -> Float[Tensor, " P"]:
    """Return a copy of tensors as one vector, in `memory` (a buffer to overwrite) if given."""
    if memory is None and len(tensors) > 1:  # for one tensor it would be a view
        with torch.no_grad():
            flat: Tensor = torch._C._nn.flatten_dense_tensors([*tensors])  # in one call
        return flat
    return torch.cat([value.detach().reshape(-1) for value in tensors], out=memory)
