"""Replay of training forward passes: in the recorded modes, on the rows as seen, with the recorded random numbers.

A replay has a copy of the network of its own and writes the recorded weights and statistics into it, so that activation
checkpointing recomputes with them too. Passes that draw random numbers are replayed in the run's own dtype, because
`torch.rand` gives other numbers in another one, and by one thread at a time, because torch's source of random numbers
is shared by all threads.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn
from torch.func import functional_call

from epk_gp.core.losses import (
    CrossEntropy,
    Loss,
    NegativeLogLikelihood,
    PerSampleLoss,
    fit_targets,
    loss_input,
    loss_terms,
    per_sample_losses,
    sample_weights,
)
from epk_gp.core.model import FunctionalModel, random_state_kept
from epk_gp.core.plans import TensorSpec
from epk_gp.core.step import ForwardPass, SeenRows, Step
from epk_gp.core.torch_overrides import KeptActivations, disable_fused_attention, quiet_checkpoints

_RANDOM_NUMBERS = threading.RLock()  # torch's default source of random numbers is the process's


@dataclass(frozen=True, eq=False)
class TrainingData:
    """What a run was trained on.

    Attributes:
        inputs: X, (M, ...).
        targets: y, (M, ...).
        loss: The loss.
    """

    inputs: Shaped[Tensor, "M ..."]
    targets: Shaped[Tensor, "M ..."]
    loss: Loss


@dataclass(frozen=True, eq=False)
class PassData:
    """One forward pass of a step with the data that it used.

    Attributes:
        forward: What the pass depended on beside weights and data.
        samples: The training sample of each row, (n,).
        X: The rows as the network saw them.
        y: Their targets as recorded; rows of `forward.targets` have others.
        c: The weight of each row's loss in the loss of the step.
    """

    forward: ForwardPass
    samples: Int64[Tensor, " n"]
    X: Shaped[Tensor, "n ..."]
    y: Shaped[Tensor, "n ..."]
    c: Float[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class ReplayedPass:
    """A forward and backward pass that was computed once more.

    Attributes:
        gradient: sum_i c_i grad loss_i, (P,).
        losses: The loss of each row, not weighted, (n,).
        statistics: The moving statistics after the pass, (Q,).
    """

    gradient: Float[Tensor, " P"]
    losses: Float[Tensor, " n"]
    statistics: Float[Tensor, " Q"]


def passes_of(step: Step, data: TrainingData) -> list[PassData]:
    """Return the forward passes of a step with their data, as recorded."""
    samples = torch.arange(len(data.inputs)) if step.batch is None else step.batch
    samples = samples.to(data.inputs.device)
    y = data.targets[samples]
    weights = sample_weights(data.loss, y) if step.sample_weights is None else step.sample_weights
    c = weights.to(device=y.device, dtype=torch.float64)
    forwards = step.passes or (ForwardPass(len(samples)),)
    counts = [forward.num_rows for forward in forwards]
    parts = zip(forwards, samples.split(counts), y.split(counts), c.split(counts), strict=True)
    return [
        PassData(forward, rows, seen_inputs(data.inputs, rows, forward.inputs), targets, weight)
        for forward, rows, targets, weight in parts
    ]


def seen_inputs(
    X: Shaped[Tensor, "M ..."], rows: Int64[Tensor, " n"], seen: SeenRows | None
) -> Shaped[Tensor, "n ..."]:
    """Return rows of X as the network saw them."""
    if seen is None:
        return X[rows]
    if len(seen.index) == len(rows):
        return seen.values.to(X.device)
    values = X[rows]
    return values.index_copy(0, seen.index.to(X.device), seen.values.to(values))


class TrainingReplay:
    """Replays the forward passes of one run; to be used by one thread.

    Args:
        model: The network in the run's dtype, on the device of the computation.
        loss: The run's loss.
        spec: Dtype of passes that draw no random numbers.
    """

    def __init__(self, model: FunctionalModel, loss: Loss, spec: TensorSpec | None = None) -> None:
        self.model, self.loss = model, loss
        self.spec = model.spec if spec is None else spec
        self._modules: dict[torch.dtype, nn.Module] = {}

    def gradient(self, state: Float[Tensor, " PQ"], data: PassData, *, exact: bool = False) -> ReplayedPass:
        """Replay a forward and backward pass.

        Args:
            state: The weights at the start of the step, then the statistics.
            data: The pass.
            exact: Leave automatic mixed precision out.
        """
        model, module = self.model, self._module(data, exact=exact)
        named = model.unflatten(self._state(state, data, exact=exact))
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        leaves = [own[name] for name in model.names]
        with torch.no_grad():
            for name, value in named.items():
                own[name].copy_(value)
        for leaf in leaves:
            leaf.requires_grad_(True)
            leaf.grad = None
        try:
            with torch.enable_grad(), disable_fused_attention(), self._conditions(module, data.forward, exact=exact):
                values = self._losses(self._call(module, data, exact), data)
                after = model.flatten_statistics(dict(module.named_buffers()))  # a pass may put others in their place
                (data.c.to(values) @ values).backward()
            gradient = torch.cat([_dense(leaf).reshape(-1) for leaf in leaves])
        finally:
            for leaf in leaves:
                leaf.requires_grad_(False)
                leaf.grad = None
        return ReplayedPass(gradient.to(state), values.detach(), after)

    def losses(self, params: Mapping[str, Tensor], data: PassData, *, exact: bool = True) -> Float[Tensor, " n"]:
        """Replay a forward pass at given weights and statistics, which may carry tangents, and return the losses."""
        module = self._module(data, exact=exact)
        buffers = {name: value.clone() for name, value in module.named_buffers() if name not in params}
        keeping = KeptActivations() if torch.is_grad_enabled() else nullcontext()
        with disable_fused_attention(), self._conditions(module, data.forward, exact=exact), keeping:
            named = {**buffers, **params}
            returned = self._call(lambda *args, **kwargs: functional_call(module, named, args, kwargs), data, exact)
            return self._losses(returned, data)

    def params(self, state: Float[Tensor, " PQ"], data: PassData) -> dict[str, Tensor]:
        """Return weights and statistics at the start of a pass by name, as the network that replays it holds them."""
        module = self._module(data)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        named = self.model.unflatten(self._state(state, data))
        # in the memory order of its own: random numbers are drawn in that of what is computed from it
        return {name: torch.empty_like(own[name], dtype=value.dtype).copy_(value) for name, value in named.items()}

    def module_in_modes(self, data: PassData) -> nn.Module:
        """Return the network that replays a pass, in the pass's modes."""
        module = self._module(data)
        _set_modes(module, data.forward)
        return module

    def model_in_modes(self, data: PassData) -> FunctionalModel:
        """Return the network in a pass's modes as a function of its weights, in the dtype of the replay."""
        module = copy.deepcopy(self.module_in_modes(data))
        model = self.model
        return FunctionalModel(
            module, model.names, model.shapes, signature=model.signature, recomputes=model.recomputes
        )

    def rows(self, data: PassData, *, exact: bool = True) -> Shaped[Tensor, "n ..."]:
        """Return the rows of a pass in the dtype and the memory order in which it is replayed.

        Args:
            data: The pass.
            exact: Automatic mixed precision is left out.
        """
        X = data.X.to(self.spec.device)
        is_in_run_dtype = X.dtype == self.model.spec.dtype  # an input of another dtype is cast by the network itself
        rows = TensorSpec(self.dtype_of(data, exact=exact), self.spec.device).cast(X) if is_in_run_dtype else X
        order = data.forward.memory_order
        if order is not None:
            rows = rows.permute(order.tolist()).contiguous().permute(order.argsort().tolist())
        return rows

    @contextmanager
    def random_numbers(self, data: PassData) -> Iterator[None]:
        """Draw the random numbers that the pass drew."""
        with self._random(data.forward):
            yield

    def dtype_of(self, data: PassData, *, exact: bool = True) -> torch.dtype:
        """Return the dtype in which a pass is replayed.

        Args:
            data: The pass.
            exact: Automatic mixed precision is left out; otherwise the precision is that of the training.
        """
        forward = data.forward
        is_random = forward.random_state is not None or forward.device_random_state is not None
        return self.model.spec.dtype if is_random or not exact else self.spec.dtype

    def _module(self, data: PassData, *, exact: bool = True) -> nn.Module:
        dtype = self.dtype_of(data, exact=exact)
        if dtype not in self._modules:
            self._modules[dtype] = copy.deepcopy(self.model.module).to(dtype=dtype, device=self.spec.device)
        return self._modules[dtype]

    def _state(self, state: Tensor, data: PassData, *, exact: bool = True) -> Tensor:
        before = data.forward.statistics
        if before is not None:
            state = torch.cat([state[: self.model.num_weights], before.to(state)])
        return state.to(dtype=self.dtype_of(data, exact=exact), device=self.spec.device)

    def _call(self, function: Callable[..., Any], data: PassData, exact: bool) -> Any:
        """Call the network with the rows of a pass, and return what it returns for them."""
        spec = TensorSpec(self.dtype_of(data, exact=exact), self.spec.device)
        return self.model.signature.call(function, self.rows(data, exact=exact), spec)

    def _losses(self, returned: Any, data: PassData) -> Tensor:
        y = data.y.to(self.spec.device)
        value = loss_input(self.model.signature, self.loss, returned, y)
        if not isinstance(value, Tensor) and not isinstance(self.loss, PerSampleLoss):
            raise ValueError(
                f"{self.loss} must get a tensor: the network returns {type(returned).__name__} in training mode. Say "
                "with output= how to take the outputs from what it returns, there and in evaluation mode."
            )
        if data.forward.targets is None:
            return loss_terms(self.model.signature, self.loss, returned, y)
        return seen_losses(self.loss, value, data)

    @contextmanager
    def _conditions(self, module: nn.Module, forward: ForwardPass, *, exact: bool) -> Iterator[None]:
        _set_modes(module, forward)
        with ExitStack() as stack:
            stack.enter_context(self._random(forward))
            stack.enter_context(quiet_checkpoints())
            if forward.autocast is not None and not exact:
                stack.enter_context(torch.autocast(self.spec.device.type, dtype=forward.autocast))
            yield

    @contextmanager
    def _random(self, forward: ForwardPass) -> Iterator[None]:
        if forward.is_deterministic:
            yield
            return
        with _RANDOM_NUMBERS, random_state_kept(self.spec.device):
            if forward.random_state is not None:
                # clones: torch reads the state of a view, as one in a recorder's arena is, at another place
                torch.random.set_rng_state(forward.random_state.cpu().clone())
            if forward.device_random_state is not None:
                torch.get_device_module(self.spec.device).set_rng_state(forward.device_random_state.cpu().clone())
            yield


def seen_losses(loss: Loss, outputs: Float[Tensor, "n ..."], data: PassData) -> Float[Tensor, " n"]:
    """Return the loss of each row of a pass as a function of the outputs, with the targets as seen.

    For class labels the targets as seen are vectors q, and the loss of such a row is -<q, log softmax(outputs)>; labels
    of several positions, tokens or pixels, are labels.
    """
    seen, y = data.forward.targets, data.y.to(outputs.device)
    if seen is None:
        return per_sample_losses(loss, outputs, y)
    index, values = seen.index.to(outputs.device), seen.values.to(outputs.device)
    if not values.is_floating_point():  # labels of several positions
        return per_sample_losses(loss, outputs, y.index_copy(0, index, values.to(y.dtype)))
    values = values.to(outputs)
    if not isinstance(loss, CrossEntropy | NegativeLogLikelihood):
        return per_sample_losses(loss, outputs, fit_targets(y.to(outputs.dtype), outputs).index_copy(0, index, values))
    q = torch.zeros(outputs.shape, dtype=outputs.dtype, device=outputs.device).index_copy(0, index, values)
    is_seen = torch.zeros(len(y), dtype=torch.bool, device=outputs.device).index_fill(0, index, True)
    log_p = outputs.log_softmax(dim=1) if isinstance(loss, CrossEntropy) else outputs
    return torch.where(is_seen, -(q * log_p).sum(dim=1), per_sample_losses(loss, outputs, y))


def _set_modes(module: nn.Module, forward: ForwardPass) -> None:
    if forward.modes is None:
        module.eval()
        return
    for part, mode in zip(module.modules(), forward.modes.tolist(), strict=True):
        part.training = mode


def _dense(leaf: Tensor) -> Tensor:
    if leaf.grad is None:
        return torch.zeros_like(leaf)
    return leaf.grad.to_dense() if leaf.grad.is_sparse else leaf.grad
