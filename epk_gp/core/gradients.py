"""Gradients of the training loss: replayed passes, the steps that they predict, and the rounding of both.

A replay owns a copy of the network and writes the recorded weights and statistics into it, so that activation
checkpointing recomputes with them too. It uses the recorded modes, rows and random numbers. Passes that draw random
numbers are replayed in the run's own dtype, because `torch.rand` gives other numbers in another dtype, and by one
thread at a time, because all threads share torch's random number generator.
"""

import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from epk_gp.core.graphs import rows_of, select_rows
from epk_gp.core.losses import (
    ClassLoss,
    CrossEntropy,
    Loss,
    PerSampleLoss,
    loss_input,
    loss_of_targets,
    loss_terms,
    per_sample_losses,
    sample_weights,
)
from epk_gp.core.model import (
    FunctionalModel,
    copied_module,
    flattened,
    leaves_of,
    random_state_kept,
    set_settings,
    setting_places,
    settings_of,
)
from epk_gp.core.plans import TensorSpec
from epk_gp.core.step import ForwardPass, SeenRows, Step
from epk_gp.core.torch_overrides import KeptActivations, disable_fused_attention, quiet_checkpoints, with_tensors
from epk_gp.core.trajectory import aligned
from epk_gp.optimizers.update_rules import relative_rounding

# Largest allowed ratio between the difference of two computations of a gradient and its rounding error, where sums
# cancel. Measured in float32 on converged regressions with gradients accumulated over 2 to 200 batches (50 runs of
# 60 steps): at most 2.1. The rest is a margin for other orders of summation, such as on a GPU.
CANCELLATION_FACTOR = 32

# Number of inputs in one backward pass of a batch gradient, so that memory stays bounded for any batch size:
# 32 MiB of float64 inputs.
BATCH_GRADIENT_ELEMENTS = 1 << 22

_RANDOM_NUMBERS = threading.RLock()  # torch's default generator belongs to the process


@dataclass(frozen=True, eq=False)
class PassData:
    """One forward pass of a step with the data that it used.

    Attributes:
        forward: The recorded pass: modes, random numbers, settings, rows and statistics.
        samples: The training sample of each row, (n,).
        X: The rows as the network saw them.
        y: Their recorded targets; `forward.targets` holds the rows that had others.
        c: The weight of each row's loss in the loss of the step.
    """

    forward: ForwardPass
    samples: Int64[Tensor, " n"]
    X: Shaped[Tensor, "n ..."]
    y: Shaped[Tensor, "n ..."]
    c: Float[Tensor, " n"]


@dataclass(frozen=True, eq=False)
class ReplayedPass:
    """A replayed pass: sum_i c_i grad loss_i, the losses themselves, and the moving statistics after the pass."""

    gradient: Float[Tensor, " P"]
    losses: Float[Tensor, " n"]
    statistics: Float[Tensor, " Q"]


def passes_of(step: Step, X: Shaped[Tensor, "M ..."], targets: Shaped[Tensor, "M ..."], loss: Loss) -> list[PassData]:
    """Return the recorded forward passes of a step with their data, for a run trained on X and targets."""
    samples = (torch.arange(len(X)) if step.batch is None else step.batch).to(X.device)
    y = targets[samples]
    weights = sample_weights(loss, y) if step.sample_weights is None else step.sample_weights
    c = weights.to(device=y.device, dtype=torch.float64)
    forwards = tuple(step.passes) or (ForwardPass(len(samples)),)  # each pass of a run on disk is read once
    counts = [forward.num_rows for forward in forwards]
    parts = zip(forwards, samples.split(counts), y.split(counts), c.split(counts), strict=True)
    return [
        PassData(forward, rows, _seen_inputs(X, rows, forward.inputs), _seen_labels(own, forward.targets), weight)
        for forward, rows, own, weight in parts
    ]


def _seen_inputs(X: Tensor, rows: Tensor, seen: SeenRows | None) -> Shaped[Tensor, "n ..."]:
    """Return rows of X as the network saw them."""
    if seen is None:
        return X[rows]
    if len(seen.index) == len(rows):
        return aligned(seen.values.to(X.device))  # stored rows may lie on any device
    values = X[rows]
    return values.index_copy(0, seen.index.to(X.device), seen.values.to(values))


def _seen_labels(y: Tensor, seen: SeenRows | None) -> Shaped[Tensor, "n ..."]:
    """Return recorded targets, or the labels of a pass that had another number of positions."""
    if seen is None or seen.values.is_floating_point() or not seen.values.ndim == y.ndim == 2:
        return y
    return seen.values.to(y) if seen.values.shape[1] != y.shape[1] else y


def blocks_of(model: FunctionalModel, data: PassData, most: int) -> Iterator[PassData]:
    """Split a pass with independent rows into passes of at most `most` rows; yield any other pass unchanged."""
    if len(data.X) <= most or not data.forward.is_plain or model.signature.graph is not None:
        yield data
        return
    for rows in (slice(first, first + most) for first in range(0, len(data.X), most)):
        parts = [value[rows] for value in (data.samples, data.X, data.y, data.c)]
        yield PassData(replace(data.forward, num_rows=len(parts[0])), *parts)


class TrainingReplay:
    """Replays the forward passes of one run; used by one thread only.

    Args:
        model: The network in the run's dtype, on the device of the computation.
        loss: The run's loss.
        spec: Dtype for passes that draw no random numbers.
    """

    def __init__(self, model: FunctionalModel, loss: Loss, spec: TensorSpec) -> None:
        self.model, self.loss, self.spec = model, loss, spec
        self._modules: dict[torch.dtype, nn.Module] = {}
        self._places = setting_places(model.module)
        self._settings, self._has_other_settings = settings_of(model.module, self._places), False

    def gradient(self, state: Float[Tensor, " PQ"], data: PassData, *, exact: bool = False) -> ReplayedPass:
        """Replay a forward and backward pass at the state before the step; `exact` turns mixed precision off."""
        model, module = self.model, self._module(data, exact=exact)
        leaves, values = leaves_of(module, model, self.state(state, data, exact=exact)), list[Tensor]()
        rows = max(1, BATCH_GRADIENT_ELEMENTS // max(1, data.X[:1].numel()))
        try:
            with torch.enable_grad(), disable_fused_attention(), self.conditions(module, data, exact=exact):
                for part in blocks_of(model, data, rows):
                    losses = self.losses_of(self.call(module, part, exact=exact), part)
                    after = model.flatten_statistics(dict(module.named_buffers()))  # a pass may replace them
                    (part.c.to(losses) @ losses).backward()
                    values.append(losses.detach())
            gradients = [torch.zeros_like(leaf) if (g := leaf.grad) is None else g for leaf in leaves]
            gradient = flattened([g.to_dense() if g.is_sparse else g for g in gradients]).to(state)
        finally:
            for leaf in leaves:
                leaf.requires_grad_(False)
                leaf.grad = None
        return ReplayedPass(gradient, values[0] if len(values) == 1 else torch.cat(values), after)

    def step_gradient(
        self,
        state: Float[Tensor, " PQ"],
        passes: Sequence[PassData],
        end: Float[Tensor, " Q"],
        unexplained: float | None,
        *,
        exact: bool = False,
    ) -> tuple[Float[Tensor, " P"], float]:
        """Return the gradient of a step's passes, and the error of the moving statistics compared with `end`."""
        total, error = torch.zeros_like(state[: self.model.num_weights]), 0.0
        for data in passes:
            replayed, after = self.gradient(state, data, exact=exact), data.forward.statistics_after
            total += replayed.gradient
            after, dtypes = end if after is None else after, (self.model.spec.dtype, state.dtype)
            coarser = max(dtypes, key=lambda dtype: torch.finfo(dtype).eps)  # a state may be read in float32
            error = max(error, statistics_error(replayed.statistics, after, coarser, unexplained))
        return total, error

    def leaves_and_losses(
        self, state: Float[Tensor, " PQ"], data: PassData
    ) -> tuple[list[Tensor], Float[Tensor, " n"]]:
        """Replay a forward pass in the network itself, and return its weights, which require gradients, and the losses.

        The caller has turned fused attention off.
        """
        module = self._module(data)
        leaves = leaves_of(module, self.model, self.state(state, data))
        with self.conditions(module, data, exact=True):
            return leaves, self.losses_of(self.call(module, data, exact=True), data)

    def losses(
        self, params: Mapping[str, Tensor], data: PassData, *, by_target: bool = False
    ) -> Float[Tensor, "n *positions"]:
        """Replay a forward pass at given weights and statistics, which may carry tangents, and return the losses.

        Args:
            params: Weights and statistics by name.
            data: The pass.
            by_target: Return the loss of each target, (n, T), for rows that have several.
        """
        module = self._module(data)
        buffers = {name: value.clone() for name, value in module.named_buffers() if name not in params}
        keeping = KeptActivations() if torch.is_grad_enabled() else nullcontext()
        with disable_fused_attention(), self.conditions(module, data, exact=True), keeping:
            returned = self.call(with_tensors(module, {**buffers, **params}), data, exact=True)
            return self.losses_of(returned, data, by_target=by_target)

    def params(self, state: Float[Tensor, " PQ"], data: PassData) -> dict[str, Tensor]:
        """Return a pass's first weights and statistics by name, in the memory layout of the replaying network."""
        module = self._module(data)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        named = self.model.unflatten(self.state(state, data))
        # in the network's own memory order: random numbers are drawn in the order of the tensors computed from it
        return {name: torch.empty_like(tensors[name], dtype=value.dtype).copy_(value) for name, value in named.items()}

    def module_in_modes(self, data: PassData) -> nn.Module:
        """Return the replaying network in the pass's modes."""
        module = self._module(data)
        self._set_modes(module, data.forward)
        return module

    def model_in_modes(self, data: PassData) -> FunctionalModel:
        """Return the network in a pass's modes as a function of its weights, in the replay's dtype."""
        module = copied_module(self.module_in_modes(data), has_own_buffers=True)
        return FunctionalModel(**self.model.__getstate__() | {"module": module, "statistics": ()})

    def rows(self, data: PassData, *, exact: bool = True) -> Shaped[Tensor, "n ..."]:
        """Return the rows of a pass in the dtype and the memory order of its replay."""
        X = data.X.to(self.spec.device)
        is_in_run_dtype = X.dtype == self.model.spec.dtype  # the network itself casts an input of another dtype
        rows = TensorSpec(self.dtype_of(data, exact=exact), self.spec.device).cast(X) if is_in_run_dtype else X
        order = data.forward.memory_order
        if order is not None:
            rows = rows.permute(order.tolist()).contiguous().permute(order.argsort().tolist())
        return rows

    @contextmanager
    def random_numbers(self, data: PassData) -> Iterator[None]:
        """Draw the same random numbers as the recorded pass."""
        forward = data.forward
        if forward.is_deterministic:
            yield
            return
        with _RANDOM_NUMBERS, random_state_kept(self.spec.device):
            if forward.random_state is not None:
                # clones: torch reads a state that is a view (as in a recorder's arena) at a wrong offset
                torch.random.set_rng_state(forward.random_state.cpu().clone())
            if forward.device_random_state is not None:
                torch.get_device_module(self.spec.device).set_rng_state(forward.device_random_state.cpu().clone())
            yield

    def dtype_of(self, data: PassData, *, exact: bool = True) -> torch.dtype:
        """Return the dtype of a pass's replay: the dtype of the training unless `exact`."""
        forward = data.forward
        is_random = forward.random_state is not None or forward.device_random_state is not None
        return self.model.spec.dtype if is_random or not exact else self.spec.dtype

    def _module(self, data: PassData, *, exact: bool = True) -> nn.Module:
        dtype = self.dtype_of(data, exact=exact)
        if dtype not in self._modules:
            spec, frozen = TensorSpec(dtype, self.spec.device), {}
            if spec == self.model.spec:  # frozen tensors are shared
                named = self.model.module.named_parameters()
                frozen = {id(value): value for name, value in named if name not in self.model.names}
            module = copy.deepcopy(self.model.module, frozen)
            self._modules[dtype] = module.to(dtype=spec.dtype, device=spec.device)
        return self._modules[dtype]

    def state(self, state: Float[Tensor, " PQ"], data: PassData, *, exact: bool = True) -> Float[Tensor, " PQ"]:
        """Return weights and statistics at the start of a pass, given those at the start of its step."""
        before, weights, P = data.forward.statistics, data.forward.weights, self.model.num_weights
        if before is not None or weights is not None:
            w, statistics = (state[:P] if weights is None else weights), (state[P:] if before is None else before)
            state = torch.cat([w.to(state), statistics.to(state)])
        return state.to(dtype=self.dtype_of(data, exact=exact), device=self.spec.device)

    def call(self, function: Callable[..., Any], data: PassData, *, exact: bool) -> Any:
        """Call the network on the rows of a pass, and return its result."""
        spec = TensorSpec(self.dtype_of(data, exact=exact), self.spec.device)
        return self.model.signature.call(function, self.rows(data, exact=exact), spec)

    def losses_of(self, returned: Any, data: PassData, *, by_target: bool = False) -> Float[Tensor, "n *positions"]:
        """Return the losses of the rows of a pass, or of all of their targets, given the network's result."""
        if (stored := data.forward.cotangents) is not None:
            n = len(data.X)
            if by_target:
                raise ValueError(
                    f"the loss must be a sum over targets, as the stated one is: {len(stored.index)} of {n} rows of a "
                    "pass do not follow it. epk_gp.attribute explains the run."
                )

            def rest(rows: Tensor) -> Tensor:
                return self.losses_of(select_rows(returned, rows, n), some_rows(data, rows))

            return _with_stored(stored, rows_of(returned, n), rest)
        y = data.y.to(self.spec.device)
        value = loss_input(self.model.signature, self.loss, returned, y)
        if not isinstance(value, Tensor) and not isinstance(self.loss, PerSampleLoss):
            raise ValueError(
                f"{self.loss} must get a tensor: the network returns {type(returned).__name__} in training mode. Say "
                "with output= how to take the outputs from what it returns, there and in evaluation mode."
            )
        if by_target and isinstance(self.loss, ClassLoss):
            return loss_of_targets(self.loss, value, seen_targets(y, data.forward.targets))
        is_as_recorded = data.forward.targets is None
        return per_sample_losses(self.loss, value, y) if is_as_recorded else seen_losses(self.loss, value, data)

    @contextmanager
    def conditions(self, module: nn.Module, data: PassData, *, exact: bool) -> Iterator[None]:
        """Give a network the modes, settings, random numbers and precision of a pass."""
        self._set_modes(module, data.forward)
        autocast = None if exact else data.forward.autocast
        if autocast is None and data.forward.is_deterministic:
            with quiet_checkpoints():
                yield
            return
        mixed = nullcontext() if autocast is None else torch.autocast(self.spec.device.type, dtype=autocast)
        with self.random_numbers(data), quiet_checkpoints(), mixed:
            yield

    def _set_modes(self, module: nn.Module, forward: ForwardPass) -> None:
        if forward.settings is not None or self._has_other_settings:
            settings = self._settings if forward.settings is None else forward.settings
            set_settings(module, self._places, settings)
            self._has_other_settings = True
        if forward.modes is None:
            if any(part.training for part in module.modules()):
                module.eval()
            return
        for part, mode in zip(module.modules(), forward.modes.tolist(), strict=True):
            part.training = mode


def seen_losses(loss: Loss, outputs: Float[Tensor, "n ..."], data: PassData) -> Float[Tensor, " n"]:
    """Return the loss of each row of a pass as a function of the outputs, with the targets that the pass saw.

    Class targets become vectors q with loss -<q, log softmax(outputs)>; targets of several positions stay labels.
    """
    if (stored := data.forward.cotangents) is not None:
        return _with_stored(stored, outputs, lambda rows: seen_losses(loss, outputs[rows], some_rows(data, rows)))
    seen, y = data.forward.targets, data.y.to(outputs.device)
    if seen is None:
        return per_sample_losses(loss, outputs, y)
    if not isinstance(loss, ClassLoss) or not seen.values.is_floating_point():
        return per_sample_losses(loss, outputs, seen_targets(y, seen))
    index, values = seen.index.to(outputs.device), seen.values.to(outputs)
    q = torch.zeros(outputs.shape, dtype=outputs.dtype, device=outputs.device).index_copy(0, index, values)
    is_seen = torch.zeros(len(y), dtype=torch.bool, device=outputs.device).index_fill(0, index, True)
    log_p = outputs.log_softmax(dim=1) if isinstance(loss, CrossEntropy) else outputs
    return torch.where(is_seen, -(q * log_p).sum(dim=1), per_sample_losses(loss, outputs, y))


def _with_stored(stored: SeenRows, z: Float[Tensor, "n D"], losses: Callable[[Tensor], Tensor]) -> Float[Tensor, " n"]:
    """Return the losses of all rows: linear losses for rows with stored output gradients, `losses` for the others."""
    index, is_other = stored.index.to(z.device), torch.ones(len(z), dtype=torch.bool, device=z.device)
    others = is_other.index_fill(0, index, False).nonzero().squeeze(1)
    values = (aligned(stored.values.to(z)) * z[index]).sum(dim=1)
    if not len(others):
        return values
    rest = losses(others)
    return rest.new_zeros(len(z)).index_copy(0, others, rest).index_copy(0, index, values.to(rest))


def seen_targets(y: Shaped[Tensor, "n ..."], seen: SeenRows | None) -> Shaped[Tensor, "n ..."]:
    """Return recorded targets, with the rows that a pass saw differently replaced."""
    if seen is None:
        return y
    values = seen.values.to(y.device).reshape(len(seen.index), *y.shape[1:])
    y = y.to(values.dtype) if values.is_floating_point() else y
    return y.index_copy(0, seen.index.to(y.device), values.to(y.dtype))


def some_rows(data: PassData, rows: Int64[Tensor, " b"]) -> PassData:
    """Return some rows of a pass with independent rows; a row may occur more than once."""
    forward, n, rows = data.forward, len(data.X), rows.to(data.X.device)

    def own(seen: SeenRows | None) -> SeenRows | None:  # restricted to these rows
        if seen is None:
            return None
        index, number = seen.index.to(rows.device), torch.arange(len(seen.index), device=rows.device)
        found = torch.full((n,), -1, device=rows.device).index_copy(0, index, number)[rows]
        places = (found >= 0).nonzero().squeeze(1)
        return SeenRows(places, seen.values.to(rows.device)[found[places]]) if len(places) else None

    forward = replace(
        forward, num_rows=len(rows), inputs=None, targets=own(forward.targets), cotangents=own(forward.cotangents)
    )
    return PassData(forward, data.samples[rows], data.X[rows], data.y[rows], data.c[rows])


def joined_passes(passes: Sequence[PassData], num_rows: int) -> PassData:
    """Join passes with independent rows into one, with `num_rows` rows each; repeated rows have weight 0."""
    parts, seen = list[PassData](), dict[str, Any]()
    for data in passes:
        rows = torch.arange(num_rows, device=data.X.device)
        own = data if len(data.X) == num_rows else some_rows(data, rows.clamp(max=len(data.X) - 1))
        parts.append(replace(own, c=own.c * (rows < len(data.X)).to(own.c)))
    for name in ("targets", "cotangents"):
        held = [
            (k * num_rows, value) for k, own in enumerate(parts) if (value := getattr(own.forward, name)) is not None
        ]
        index = [first + value.index for first, value in held]
        seen[name] = SeenRows(torch.cat(index), torch.cat([value.values for _, value in held])) if held else None
    forward = replace(
        parts[0].forward, num_rows=num_rows * len(parts), inputs=None, statistics=None, weights=None, **seen
    )
    samples, X, y, c = (torch.cat([getattr(own, name) for own in parts]) for name in ("samples", "X", "y", "c"))
    return PassData(forward, samples, X, y, c)


def statistics_error(
    replayed: Float[Tensor, " Q"], recorded: Float[Tensor, " Q"], dtype: torch.dtype, unexplained: float | None = None
) -> float:
    """Return the largest error of the moving statistics, in units of the expected rounding.

    A running variance adds a share of a batch's variance, whose relative rounding is that of a sum. Where float32 steps
    may have an unexplained share, as with TF32, statistics may have the same error, but at most 1 %.
    """
    if not len(recorded):
        return 0.0
    coarse = 0.0 if unexplained is None or dtype == torch.float64 else min(unexplained, 0.01)
    allowed = max(relative_rounding(dtype), coarse) * recorded.abs().max().double() + torch.finfo(dtype).tiny
    return float((replayed.double() - recorded.to(replayed.device).double()).abs().max() / allowed)


def batch_gradient(
    model: FunctionalModel,
    state: Float[Tensor, " PQ"],
    X: Shaped[Tensor, "B ..."],
    y: Shaped[Tensor, "B ..."],
    loss: Loss,
    c: Float[Tensor, " B"],
    *,
    in_statistics: bool = False,
) -> Float[Tensor, " P"]:
    """Return the gradient of a batch's loss, sum_i c_i grad loss_i, of the network in evaluation mode.

    Args:
        model: The network.
        state: Its weights, and its moving statistics if it has any.
        X: Inputs of the batch.
        y: Their targets.
        loss: The loss of a sample.
        c: Weight of each sample in the batch's loss.
        in_statistics: Differentiate in the moving statistics too, as functions of the weights: the result is (P + Q,).
    """
    weights = {name: value.detach() for name, value in model.unflatten(state).items()}
    names = (*model.names, *model.statistics) if in_statistics else model.names
    leaves = [weights[name].requires_grad_() for name in names]
    rows = max(1, BATCH_GRADIENT_ELEMENTS // max(1, X[0].numel()))
    total = torch.zeros_like(state if in_statistics else state[: model.num_weights])
    with torch.enable_grad():
        for X_block, y_block, c_block in zip(X.split(rows), y.split(rows), c.to(state).split(rows), strict=True):
            value = c_block @ loss_terms(model.signature, loss, model.returned(weights, X_block), y_block)
            gradients = torch.autograd.grad(value, leaves, allow_unused=True, materialize_grads=True)
            total += torch.cat([g.detach().reshape(-1) for g in gradients])
    return total


def stacked_gradients(
    model: FunctionalModel,
    states: Float[Tensor, "K PQ"],
    X: Shaped[Tensor, "K B ..."],
    y: Shaped[Tensor, "K B ..."],
    loss: Loss,
    c: Float[Tensor, "K B"],
) -> Float[Tensor, "K P"]:
    """Return `batch_gradient` at several states, each with its own batch, computed in one pass."""
    leaves = states.detach()[:, : model.num_weights].requires_grad_()

    def losses(params: dict[str, Tensor], rows: Tensor, targets: Tensor) -> Tensor:
        return loss_terms(model.signature, loss, model.returned(params, rows), targets)

    with torch.enable_grad():
        named = model.unflatten(torch.cat([leaves, states[:, model.num_weights :]], dim=1))
        values = torch.vmap(losses)(named, X, y)
        return torch.autograd.grad((c.to(values) * values).sum(), leaves)[0]
