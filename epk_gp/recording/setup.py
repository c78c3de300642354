"""The setup of a recorded training: all statements about it before its first step, checked once."""

import os
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Float64, Int64, Shaped
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.optim import Optimizer

from epk_gp.core.checks import allclose, validate_finite, validate_tensor
from epk_gp.core.graphs import ROWS_FIRST, Graph, rows_of, tensors_of
from epk_gp.core.inputs import Signature, parse_graph, parse_signature, validate_output
from epk_gp.core.losses import (
    Loss,
    PerSampleLoss,
    UnstatedLoss,
    loss_input,
    loss_terms,
    sample_weights,
    validate_loss_row_independence,
)
from epk_gp.core.model import (
    NUM_FINGERPRINT_POINTS,
    FunctionalModel,
    as_written,
    copied_module,
    functionalize,
    perturbed_initial,
    random_state_kept,
    setting_places,
    settings_of,
    with_kept_activations,
)
from epk_gp.core.step import LiveWeights, fingerprint_data
from epk_gp.core.torch_overrides import disable_fused_attention, quiet_checkpoints, with_tensors
from epk_gp.optimizers.library_rules import in_training_mode
from epk_gp.optimizers.torch_rules import Optimizers, Rules, as_optimizers, learning_rate, momentum_before, rule_for
from epk_gp.optimizers.update_rules import Clip, UpdateRule, move_by_rounding, relative_rounding, validate_unexplained
from epk_gp.recording.causes import StepMismatchError, validate_output_scale, validate_targets
from epk_gp.storage.rows import Rows, Stream, Targets, TrainingInputs, map_data
from epk_gp.storage.schema import run_header

# Outputs of two networks count as the same function's if they differ by at most this many times the change that the
# rounding of the weights alone causes: in float32, at perturbed weights, another order of operations changes the
# outputs of a ResNet-18 by more than 7.6e-6.
_ROUNDINGS = 8
_NUM_ROWS = 64  # inputs on which final outputs must equal the recorded network's
_NUM_INITIAL_ROWS = 16  # inputs on which initial outputs must be finite
_NUM_COUPLED_ROWS = 8  # rows that are evaluated together and one by one, to test whether they influence each other
_SMALL_NETWORK = 1 << 20  # largest number of weights for which frozen parameters of an optimizer are always recorded

# Exceptions of a network for inputs that it cannot take.
_CALL_ERRORS = (RuntimeError, TypeError, IndexError, AttributeError, KeyError)


def evenly_spread(X: Shaped[Tensor, "n ..."], count: int) -> Shaped[Tensor, "m ..."]:
    """Return at most `count` of the rows, evenly spread."""
    return X[torch.linspace(0, len(X) - 1, min(count, len(X)), dtype=torch.float64, device=X.device).long()]


@dataclass(eq=False)
class TrainingSetup:
    """A training before its first step.

    Attributes:
        net: The user's network, which is trained.
        model: The same network as a function of its weights, in evaluation mode.
        X: All M training inputs, copied; several tensors are packed into one.
        y: Their targets, copied.
        loss: The stated loss.
        fingerprint: Outputs of the network near its initial weights, (n, C).
        update_rule: The rule by which the optimizer's step follows from the gradient.
        optimizers: The optimizers.
        clip: The gradient clipping before each step, if any.
        unexplained: Share of a step that update rule and loss need not explain; None allows rounding only.
        is_mapped: Whether X and y are mapped from files that do not grow.
        stream: The points of a stream; X and y hold those seen so far. None for other data.
        momentum: The momentum buffers at the start, second ones last; None for new optimizers.
    """

    net: nn.Module
    model: FunctionalModel
    X: Shaped[Tensor, "M ..."]
    y: Shaped[Tensor, "M ..."]
    loss: Loss
    fingerprint: Float[Tensor, "n C"]
    update_rule: UpdateRule
    optimizers: tuple[Optimizer, ...] = ()
    clip: Clip | None = None
    unexplained: float | None = None
    is_mapped: bool = False
    stream: Rows | None = None
    momentum: Float[Tensor, " B"] | None = None

    @cached_property
    def _frozen_state(self) -> dict[str, Tensor]:
        """Buffers and frozen parameters as recorded, except the batch counters of torch's normalisations."""
        state = self.model.frozen_state().items()
        return {name: value for name, value in state if not name.endswith("num_batches_tracked")}

    @cached_property
    def _settings(self) -> tuple[list[tuple[int, str]], list[tuple[dict[str, Any], str]], list[Any]]:
        """The network's plain numbers: their places, the objects that hold them, and their values."""
        places, recorded = setting_places(self.model.module), [*self.model.module.modules()]
        parts = [vars(part) for part in self.net.modules()]
        return places, [(parts[k], name) for k, name in places], [vars(recorded[k])[name] for k, name in places]

    def changed_settings(self) -> Float64[Tensor, " K"] | None:
        """Return the network's plain numbers; None if they are as when recording began."""
        places, held, recorded = self._settings
        if [own.get(name) for own, name in held] == recorded:
            return None
        present = settings_of(self.net, places)
        is_same = torch.equal(present, settings_of(self.model.module, places))
        return None if is_same or not present.isfinite().all() else present

    @cached_property
    def _modules(self) -> dict[str, nn.Module]:
        return dict(self.net.named_modules())

    @cached_property
    def _children(self) -> list[tuple[nn.Module, dict[str, nn.Module | None]]]:
        return [(part, dict(part._modules)) for part in self._modules.values()]

    def validate_modules(self) -> None:
        """Raise if the network's modules and parameters differ from those at the start of the recording.

        Raises:
            StepMismatchError: They differ; the message names the first difference.
        """
        if self.live.parameters() is not None and all(part._modules == own for part, own in self._children):
            return
        present, named = dict(self.net.named_modules()), self.live.named()
        changed = [name for name in self._modules | present if present.get(name) is not self._modules.get(name)]
        if changed := changed or [name for name in self.model.names if name not in named]:
            raise StepMismatchError(
                f"the network must keep its modules and parameters: {changed[0]!r} was added, removed or replaced. Do "
                "that before the recorder is made, or end the recording, and begin another."
            )

    @cached_property
    def live(self) -> LiveWeights:
        """The present weights of the network."""
        return LiveWeights(self.net, self.model, is_certain=self.unexplained is not None)

    def weights(self) -> Float[Tensor, " P"]:
        """Return a copy of the network's present weights."""
        return self.live.copy()

    def number(self, X: Shaped[Tensor, "n ..."], y: Tensor | None, stream: Rows) -> Int64[Tensor, " n"]:
        """Return the numbers of rows of a stream; new rows are added to X and y of the setup."""
        numbers = stream.number(X, torch.empty(len(X), 0) if y is None else y)
        if len(stream) > len(self.X):
            self.X, self.y = (column.to(self.X.device) for column in stream.mapped())
        return numbers

    def has_all_weights(self) -> bool:
        """Return whether the network has all recorded parameters."""
        return {*self.model.names} <= {name for name, _ in self.net.named_parameters()}

    def is_at(self, w: Float[Tensor, " P"]) -> bool:
        """Return whether training continues from these weights: a schedule-free optimizer in eval mode shows others."""
        if self.live.are(w):
            return True
        values = in_training_mode(self.optimizers, {id(p): p.detach() for p in self.live.named().values()})
        if values is None:
            return False
        present = self.model.flatten({name: values[id(p)] for name, p in self.live.named().items()})
        return bool((present - w).abs().max() <= 4 * torch.finfo(w.dtype).eps * w.abs().max())

    def statistics(self) -> Float[Tensor, " Q"] | None:
        """Return a copy of the network's present moving statistics; None if it has none."""
        return self.model.statistics_of(self.net) if self.model.statistics else None

    def state(self, weights: Float[Tensor, " P"]) -> Float[Tensor, " PQ"]:
        """Join weights with the network's present moving statistics."""
        return torch.cat([weights, self.model.statistics_of(self.net)])

    def header(self) -> dict[str, Any]:
        """Return the description of the run for its header."""
        return run_header(
            self.model,
            self.loss,
            self.update_rule.name,
            num_points=len(self.X),
            num_outputs=self.fingerprint.shape[1],
            data_digest=fingerprint_data(self.X, self.y, *self.model.signature.stored_tensors().values()),
            unexplained=self.unexplained,
            clip=self.clip,
            is_stream=self.stream is not None,
        )

    def base(self) -> dict[str, str]:
        """Return the header's entry for a frozen base that is not stored."""
        base = self.model.base().values()
        return {"base": fingerprint_data(*base)} if base else {}

    def data(self) -> dict[str, Tensor]:
        """Return the data of a stored run other than weights and steps, by their names on disk."""
        base = self.model.base()
        frozen_state = {f"constant.{k}": value for k, value in self.model.frozen_state().items() if k not in base}
        graph = self.model.signature.stored_tensors()
        momentum = {} if self.momentum is None else {"momentum": self.momentum}
        return {"inputs": self.X, "targets": self.y, "probe": self.fingerprint} | frozen_state | graph | momentum

    def validate_frozen_state(self, weights: Float[Tensor, " P"]) -> None:
        """Raise if a buffer or frozen parameter changed in a way that changes the outputs.

        Args:
            weights: The present weights.

        Raises:
            StepMismatchError: The outputs at the first inputs changed.
        """
        if not self._frozen_state:
            return
        present = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}
        state = self._frozen_state.items()
        changed = {name: present[name].detach() for name, value in state if not torch.equal(present[name], value)}
        if not changed:
            return
        params = self.model.unflatten(self.state(perturbed_initial(weights)))
        rows = self.X[:NUM_FINGERPRINT_POINTS]
        with torch.no_grad():
            before, after = self.model(params, rows), self.model({**params, **changed}, rows)
        if not torch.allclose(before, after, rtol=0, atol=0, equal_nan=True):
            name, value = next(iter(changed.items()))
            how = "" if value.is_floating_point() else f"make it a floating-point one ({value.dtype} cannot move), and "
            raise StepMismatchError(
                f"buffers and frozen parameters must stay as they were when recording began: {name!r} changed. If "
                f"training moves it, {how}put the network into training mode before the recorder is made."
            )

    def validate_end(self, end: Float[Tensor, " P"], statistics: Float[Tensor, " Q"] | None, num_steps: int) -> None:
        """Raise if the network at the end of the recording differs from the one after the last step.

        Args:
            end: The weights after the last recorded step.
            statistics: The moving statistics after it.
            num_steps: Number of recorded steps.

        Raises:
            StepMismatchError: Weights, buffers, frozen parameters or anything else that the outputs depend on changed.
        """
        kept = f"'with' statement. The {num_steps} recorded steps are kept."
        present = self.weights() if self.has_all_weights() else None
        if present is not None and (present.dtype, present.device) != (end.dtype, end.device):
            raise StepMismatchError(
                f"the network must end the recording as it was trained, in {end.dtype} on {end.device}: it is in "
                f"{present.dtype} on {present.device}. Convert it after the {kept}"
            )
        if present is None or not self.is_at(end):
            raise StepMismatchError(
                "the weights at the end of the recording must be those that the last step left: they are others, as of "
                f"an average (EMA, SWA) or an edit. Replace them after the {kept}"
            )
        present = self.statistics()
        if present is not None and statistics is not None and not torch.equal(present, statistics):
            raise StepMismatchError(
                "the moving statistics at the end of the recording must be those that the last step left, or a forward "
                f"pass after it that is not on disk. Evaluate in evaluation mode, or move them after the {kept}"
            )
        self.validate_frozen_state(end)
        rows = evenly_spread(self.X, _NUM_ROWS)
        # at the weights themselves, a last layer of zeros would hide everything
        if not all(self._is_recorded_function(w, rows) for w in (end, perturbed_initial(end))):
            raise StepMismatchError(
                "the network's forward function must stay as it was when recording began: its outputs at the same "
                f"weights are others now, so an attribute or a layer was changed. Change it after the {kept}"
            )

    def _is_recorded_function(self, w: Float[Tensor, " P"], rows: Shaped[Tensor, "n ..."]) -> bool:
        """Return whether the user's network has the recorded network's outputs in evaluation mode.

        The network is not copied: a network that keeps its activations cannot be copied after a backward pass.
        """
        model, net, params = self.model, self.net, self.model.unflatten(self.state(w))
        named = {**params, **{name: value.clone() for name, value in net.named_buffers()}}
        is_training = [(module, module.training) for module in net.modules()]
        net.eval()
        try:
            with as_written(net), torch.no_grad(), random_state_kept(w.device), disable_fused_attention():
                recorded = model(params, rows)
                outputs = model.signature.outputs(model.signature.call(with_tensors(net, named), rows))
        finally:
            for module, mode in is_training:
                module.training = mode
        if not isinstance(outputs, Tensor) or outputs.shape != recorded.shape:
            return False
        is_finite = recorded.isfinite()  # a network may leave its domain at perturbed weights
        difference, size = (outputs - recorded)[is_finite].abs(), recorded[is_finite].abs()
        if not len(size) or bool(difference.max() <= relative_rounding(w.dtype) * size.max()):
            return True
        with torch.no_grad(), random_state_kept(w.device):  # deep networks may amplify the rounding of first layers
            moved = model(model.unflatten(self.state(move_by_rounding(w, torch.finfo(w.dtype).eps))), rows)
        return bool(difference.max() <= _ROUNDINGS * (moved - recorded)[is_finite].abs().max())


def make_setup(
    net: nn.Module,
    optimizer: Optimizers,
    X: TrainingInputs,
    y: Targets,
    loss: Loss,
    update_rule: Rules,
    *,
    clip: Clip | None,
    unexplained: float | None,
    trained: Collection[str],
    output: Callable[[Any], Tensor] | None,
    folder: str | os.PathLike[str] | None = None,
) -> TrainingSetup:
    """Check network, data and loss against each other, and return the setup of the training; see `Recorder`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The data, the network, the targets or the optimizer cannot be recorded; the message says why.
    """
    rule = rule_for(optimizer, update_rule)
    validate_unexplained(rule, unexplained)
    learning_rate(optimizer)
    if clip is not None and not isinstance(clip, Clip):
        raise TypeError(f"clip must be ClipNorm or ClipValue of epk_gp.optimizers.update_rules, or None: got {clip!r}.")
    if clip is not None and not 0 < clip.bound < float("inf"):
        raise ValueError(f"the bound of gradient clipping must be positive and finite: got {clip.bound}.")
    names = trained_names(net, optimizer, trained)
    rows = map_data(X, y, folder)
    stream = rows if isinstance(X, Stream) else None
    if rows is not None:
        X, y = rows.mapped()  # they stay mapped on the CPU
        y = y if y.numel() else None
    if y is None and not isinstance(loss, UnstatedLoss):
        raise TypeError("y must be the targets that the stated loss takes: got None. Pass them as y, or loss=None.")
    X, y, signature = _parse_data(X, y, output, rows, next(net.parameters(), torch.empty(0)).device)
    model = functionalize(net, names, signature=signature)
    if signature.graph is None:  # in a graph an output depends on all nodes
        validate_batch_statistics(net)
    statistics = _moving_statistics(net, signature, X)
    if statistics:
        model = functionalize(net, names, statistics, signature)
    weights = model.weights_of(net)
    for name, value in model.unflatten(weights).items():
        validate_finite(value.reshape(1, -1), f"the initial weights of {name!r}", "Initialise them again.")
    state = torch.cat([weights, model.statistics_of(net)])
    moved = torch.cat([perturbed_initial(weights), state[len(weights) :]])
    fingerprint = _validated_fingerprint(model, state, moved, X, y)
    model = with_kept_activations(model, state, X)
    _validate_loss(model, loss, moved, X, y)
    is_mapped = rows is not None and stream is None and X.device.type == "cpu"
    optimizers = as_optimizers(optimizer)
    momentum = momentum_before(optimizers, update_rule, [net.get_parameter(name) for name in model.names])
    own = fingerprint, rule, optimizers, clip, unexplained, is_mapped, stream
    return TrainingSetup(net, model, X, y, loss, *own, momentum)


def trained_names(net: nn.Module, optimizers: Optimizers, trained: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the parameters that one or several optimizers train.

    Frozen parameters of an optimizer may be trained later: they are included, unless they are many, because every
    recorded parameter is stored with every state.

    Args:
        net: The network.
        optimizers: Its optimizers.
        trained: Names of further parameters that will be trained later in the run, which no optimizer holds yet.

    Raises:
        TypeError: `net` is not a module, or an optimizer is of another type.
        ValueError: An optimizer trains a tensor that is not a parameter of the network, or a stated name does not
            exist.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be a torch.nn.Module: got {type(net).__name__}.")
    names = {id(p): name for name, p in net.named_parameters()}
    held = [p for optimizer in as_optimizers(optimizers) for group in optimizer.param_groups for p in group["params"]]
    moving = [p for p in held if p.requires_grad]
    size, moving_size = sum(p.numel() for p in held), sum(p.numel() for p in moving)
    present = held if moving_size and size <= max(2 * moving_size, _SMALL_NETWORK) else moving
    if any(id(p) not in names for p in present):
        raise ValueError("the optimizer must train the network's parameters only: it holds another tensor.")
    if unknown := sorted(set(trained) - set(names.values())):
        raise ValueError(f"trained must hold names of the network's parameters: got {', '.join(map(repr, unknown))}.")
    trained_ids = {id(p) for p in present if p.numel()}  # a parameter without numbers has nothing to train
    return tuple(name for name, p in net.named_parameters() if id(p) in trained_ids or name in trained)


def _parse_data(
    X: Any, y: Any, output: Callable[[Any], Tensor] | None, rows: Rows | None, device: torch.device
) -> tuple[Tensor, Tensor, Signature]:
    """Return copies of the training inputs, packed into one tensor, and of the targets, with the network's signature.

    They are on the network's device; data that are mapped from files are not copied.

    Raises:
        TypeError: The inputs or targets are not tensors, or `output` is not a function.
        ValueError: The input tensors do not fit together; the inputs do not have one row per point, or are not finite.
    """
    validate_output(output)
    if isinstance(X, Graph):
        validate_tensor(y, "y")
        if y.ndim == 0 or len(y) == 0:
            raise ValueError(f"y must have one row per node of the graph: got shape {tuple(y.shape)}.")
        nodes, signature = parse_graph(X, len(y), output)
        return nodes, y.detach().to(device, copy=True), signature
    inputs, signature = parse_signature(X, output) if rows is None else (X, Signature(rows.layout, output))
    validate_tensor(inputs, "X")
    y = torch.empty(*inputs.shape[:1], 0, device=inputs.device) if y is None else y
    validate_tensor(y, "y")
    is_integer = not inputs.is_floating_point() and not inputs.is_complex() and inputs.dtype != torch.bool
    if inputs.ndim < (1 if is_integer else 2) or len(inputs) == 0:
        advice = " Points of one number each are X[:, None]." if inputs.ndim == 1 and len(inputs) else ""
        raise ValueError(
            "X must have shape (M, ...), where (M,) is for integers alone, with at least one point: got "
            f"{tuple(inputs.shape)}.{advice}"
        )
    validate_finite(inputs, "X")
    inputs, y = (value.detach().to(device, copy=rows is None) for value in (inputs, y))
    return inputs, y, signature


def _moving_statistics(net: nn.Module, signature: Signature, X: Tensor) -> tuple[str, ...]:
    """Return the names of the buffers that a training forward pass of the network changes in its present modes.

    Batch counters are included if the statistics are averages over all batches (momentum None).
    """
    if not any(module.training for module in net.modules()) or not any(b.is_floating_point() for b in net.buffers()):
        return ()
    module = copied_module(net, has_own_buffers=True)
    before = {name: value.clone() for name, value in module.named_buffers()}
    norms = [name for name, part in module.named_modules() if isinstance(part, _NormBase) and part.momentum is None]
    counters = {f"{name}.num_batches_tracked".lstrip(".") for name in norms}
    rows = X[:_NUM_COUPLED_ROWS].clone()
    reported_later = suppress(*_CALL_ERRORS, ValueError)
    with reported_later, torch.no_grad(), random_state_kept(X.device), disable_fused_attention(), quiet_checkpoints():
        signature.call(module, rows)
    moved = (name for name, value in module.named_buffers() if name in before and not torch.equal(before[name], value))
    return tuple(name for name in moved if before[name].is_floating_point() or name in counters)


def _validated_fingerprint(model: FunctionalModel, state: Tensor, moved: Tensor, X: Tensor, y: Tensor) -> Tensor:
    """Return the fingerprint outputs of a network, after checking that it can be recorded.

    Raises:
        TypeError: The weights are neither float32 nor float64, the inputs have another dtype than the weights, or the
            network does not take them.
        ValueError: A graph is on another device; the network cannot take the inputs or changes them; or its outputs are
            not finite, are random, or depend on other inputs of the batch.
    """
    start, graph = state, model.signature.graph
    if start.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"the weights must be float32 or float64: got {start.dtype}. Convert them with net.float().")
    inputs = {"X": X} if graph is None else {f"tensor {k!r} of the graph": v for k, v in graph.tensors.items()}
    for name, x in inputs.items():
        if x.is_floating_point() and x.dtype != start.dtype:
            raise TypeError(f"{name} must have the weights' dtype {start.dtype}: got {x.dtype}. Convert one of them.")
        if x.device != start.device:  # a graph's tensors belong to the user
            raise ValueError(f"{name} must be on the network's device {start.device}: got {x.device}.")
    rows = X[:NUM_FINGERPRINT_POINTS].clone() if graph is None else graph.nodes
    before = {} if graph is None else {key: value.clone() for key, value in graph.tensors.items()}
    perturbed = {name: value.clone() for name, value in model.unflatten(moved).items()}
    with torch.no_grad():
        try:
            returned = model.returned(perturbed, rows)
        except _CALL_ERRORS as error:
            kinds = ", ".join(f"{name} {tuple(value.shape)} {value.dtype}" for name, value in inputs.items())
            raise ValueError(
                f"the network must accept {kinds}: it fails with {type(error).__name__}: {error}. Several inputs are a "
                "tuple or dict of tensors; a network that takes all rows together, as of a graph, takes epk.Graph(X). "
                "Bytes that the loop converts must be converted in X too (a Dataset), or in forward()."
            ) from error
        change = graph.difference(before) if graph is not None else None
        change = next((repr(name) for name in model.names if perturbed[name]._version), change)
        if change is not None or (graph is None and not torch.equal(rows, X[:NUM_FINGERPRINT_POINTS])):
            raise ValueError(
                "the network must leave its weights and leave its inputs as they are: forward() changes them in place "
                f"({change or 'X'}). Use operations that make a new tensor: on the input ReLU(inplace=False), for "
                "Embedding(max_norm=...) a product with a factor of each row."
            )
        counts = [len(z) for z in tensors_of(returned) if z.ndim]
        if graph is not None and graph.num_nodes not in counts:
            raise ValueError(
                f"the network must return one row per node, as y holds one per node, {graph.num_nodes}: got "
                f"{' and '.join(map(str, counts)) or 'no'} rows. Nodes without a label need a row of y too."
            )
        if model.signature.output is not None:
            try:
                model.signature.outputs(returned)
            except Exception as error:
                raise ValueError(
                    f"output must accept what the network returns, {type(returned).__name__}: it fails with "
                    f"{type(error).__name__}: {error}"
                ) from error
        outputs = model(perturbed, rows[:NUM_FINGERPRINT_POINTS])  # as in `fingerprint_outputs`
        initial = model(model.unflatten(state), evenly_spread(X, _NUM_INITIAL_ROWS))
    advice = "Repair its forward() or its initial weights."
    validate_finite(initial, "the network's outputs at its initial weights", advice)
    validate_row_independence(model, perturbed, X)
    return outputs


def validate_row_independence(
    model: FunctionalModel, weights: Mapping[str, Tensor], X: Shaped[Tensor, "n ..."]
) -> None:
    """Raise if a forward function is random, or mixes the rows of a batch in any layer.

    Args:
        model: The network in evaluation mode.
        weights: Weights for the evaluation; with a last layer of zeros the test would be blind.
        X: Inputs for the evaluation; 8 of them are used, evenly spread.

    Raises:
        ValueError: Two evaluations differ, or 8 inputs evaluated together give other outputs than some of them alone.
    """
    rows = evenly_spread(X, _NUM_COUPLED_ROWS)
    with torch.no_grad():
        together, again = model(weights, rows), model(weights, rows)
        rounding = torch.finfo(together.dtype).eps ** 0.5 * together.abs().max()
        if (again - together).abs().max() > rounding:
            raise ValueError(
                "training steps must be gradients of a deterministic network: two evaluations of the same inputs "
                "differ, also in evaluation mode (dropout, or noise of its own). Switch the randomness off."
            )
        each = [model(weights, row[None]) for row in rows[::2]]
    if any(z.shape != together[:1].shape for z in each):
        raise ValueError(
            f"the number C of outputs must not depend on the batch: got {together.shape[1]} for {len(rows)} inputs "
            f"and {each[0].shape[1]} for one."
        )
    difference = (torch.cat(each) - together[::2]).abs().max()
    if difference > rounding:
        raise ValueError(
            f"an output must depend on its own input alone: evaluated together, {len(rows)} inputs give outputs that "
            f"differ by {float(difference):.2e} from those of each alone. Have rows {ROWS_FIRST}, remove batch "
            "statistics from forward(), and compute in the precision of the weights."
        )


def validate_batch_statistics(net: nn.Module) -> None:
    """Raise if a layer uses the statistics of the batch even in evaluation mode.

    Raises:
        ValueError: A normalisation keeps no running statistics. The message names the module.
    """
    for name, module in net.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"an output must depend on its own input alone: module {name!r} ({type(module).__name__}) uses the "
                "statistics of the batch, in evaluation mode too. Let it keep some, track_running_stats=True."
            )


def _validate_loss(model: FunctionalModel, loss: Loss, moved: Tensor, X: Tensor, y: Tensor) -> None:
    """Raise if the loss cannot take the network's result and the targets, or mixes the samples of a batch.

    Raises:
        TypeError, ValueError: The targets do not fit, or the losses of a few samples differ from those of each alone.
    """
    params = model.unflatten(moved)
    n, signature = NUM_FINGERPRINT_POINTS, model.signature
    if isinstance(loss, UnstatedLoss):
        with torch.no_grad():
            together = rows_of(model.returned(params, X[:n]), len(X[:n]))
            each = [rows_of(model.returned(params, x), 1) for x in X[:n].split(1)]
        if any(z.shape != together[:1].shape for z in each) or not allclose(torch.cat(each), together):
            raise ValueError(
                "with loss=None, all floating-point tensors that the network returns must have one row per input, "
                "which depends on this input alone: they do not. Leave out others in forward(), or state the loss."
            )
        return
    with torch.no_grad():
        returned = model.returned(params, X[:n])
        value = loss_input(signature, loss, returned, y[:n] if y.ndim else y)
        is_tensor = isinstance(value, Tensor)
        if is_tensor:
            rows_of(loss_input(signature, loss, model.returned(params, X[:1]), y[:1] if y.ndim else y), 1)
        C = signature.outputs(returned).shape[1]
        validate_targets(loss, y, len(X), C, tuple(value.shape[1:]) if is_tensor else None)
        if is_tensor:
            validate_output_scale(loss, value, y[:n])
        if isinstance(loss, PerSampleLoss) and loss.counts is not None:
            sample_weights(loss, y)
        alone = None
        if signature.output is not None:
            rows = zip(X[:n].split(1), y[:n].split(1), strict=True)
            try:
                alone = torch.cat([loss_terms(signature, loss, model.returned(params, x), q) for x, q in rows])
            except _CALL_ERRORS as error:
                raise ValueError(
                    f"the loss must accept what the network returns, {type(returned).__name__}, and the targets: it "
                    f"fails on one sample, with {type(error).__name__}: {error}"
                ) from error
        validate_loss_row_independence(loss, value, y[:n], alone)
