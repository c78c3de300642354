"""The observer of a training loop: its forward passes, the batches it announces, and the steps of its optimizers."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.core.checks import is_finite
from epk_gp.core.inputs import RecordedGraph
from epk_gp.core.losses import Loss, loss_input, sample_weights
from epk_gp.core.model import FunctionalModel
from epk_gp.core.signature import arguments_of_call
from epk_gp.core.step import ForwardPass, Step
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.optimizer import GroupWatch, OptimizerPart, StatesBefore, optimizer_part, states_before
from epk_gp.recording.setup import TrainingSetup

# Forward passes that are kept until a batch is announced: those of an attack on the inputs, or of an evaluation with
# gradients switched on, are dropped in favour of later ones.
_MAX_WAITING = 16


@dataclass(eq=False)
class CapturedForward:
    """One forward pass of the user's network, as the hooks saw it.

    Attributes:
        inputs: The rows that the network was called with, packed.
        modes: Which modules were in training mode.
        random_state: State of the random numbers on the CPU before the pass; None if it is the same after it.
        device_random_state: The same of the accelerator.
        statistics: The moving statistics before the pass.
        statistics_after: Those after it.
        autocast: The dtype of automatic mixed precision; None without it.
        outputs: What the loss takes, (n, C), detached; None if it is not a tensor that the network returned.
        output_gradient: The gradient of the loop's loss in the outputs; None before the backward pass.
        position: Number of the pass since the recording began.
        memory_order: The dimensions of the one input from the slowest to the fastest in memory; None if that is their
            own order.
        difference: In words, how the pass differs from one of the recorded graph; None where it does not, and for a
            network that takes no graph.
    """

    inputs: Shaped[Tensor, "n ..."]
    modes: Bool[Tensor, " modules"]
    random_state: Tensor | None
    device_random_state: Tensor | None
    statistics: Float[Tensor, " Q"]
    statistics_after: Float[Tensor, " Q"]
    autocast: torch.dtype | None
    outputs: Tensor | None = None
    output_gradient: Tensor | None = None
    position: int = 0
    memory_order: Tensor | None = None
    difference: str | None = None


@dataclass(eq=False)
class _Before:
    """The state in which a forward pass began."""

    inputs: Tensor
    random_state: Tensor
    device_random_state: Tensor | None
    statistics: Tensor
    difference: str | None


@dataclass(eq=False)
class ForwardCapture:
    """Hooks at a network's forward that keep what each pass depended on.

    Attributes:
        net: The user's network.
        model: The recorded network.
        pack: Packs what the network was called with into rows; None if it was called otherwise than on X.
        difference: Says how a call differs from one with the recorded graph; None where it does not.
        loss_input: What the loss takes of that which the network returned for a number of rows.
        on_forward: Called when a pass with gradients begins.
        waiting: Passes with gradients that no announced batch has taken.
        count: Number of passes so far.
        statistics: The moving statistics after the last pass; they may move in no other way.
        unfit: Shapes of the last call with gradients that was no call on rows of X; None if there was none.
    """

    net: nn.Module
    model: FunctionalModel
    pack: Callable[[tuple[Any, ...], dict[str, Any]], Tensor | None]
    difference: Callable[[tuple[Any, ...], dict[str, Any]], str | None]
    loss_input: Callable[[Any, int], Any]
    on_forward: Callable[[], None]
    waiting: list[CapturedForward] = field(default_factory=list)
    count: int = 0
    statistics: Tensor | None = None
    unfit: str | None = None
    _begun: list[_Before | None] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list)

    def start(self) -> None:
        """Register the hooks."""
        before, after = torch.compiler.disable(self._before), torch.compiler.disable(self._after)
        self._hooks = [
            self.net.register_forward_pre_hook(before, with_kwargs=True),
            self.net.register_forward_hook(after, with_kwargs=True),
        ]
        self.statistics = self.model.statistics_of(self.net)

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []  # the passes that wait are kept: the last step may not be complete yet

    def statistics_now(self, index: int) -> Float[Tensor, " Q"] | None:
        """Return the present moving statistics; None for a network without them.

        Args:
            index: Number of the step, for the error message.

        Raises:
            StepMismatchError: They were changed in another way than by a forward pass.
        """
        if not self.model.statistics:
            return None
        present = self.model.statistics_of(self.net)
        if self.statistics is None or not torch.equal(present, self.statistics):
            raise StepMismatchError(
                f"step {index}: moving statistics must be moved by the network's forward passes alone: they were "
                "changed in another way. Leave them as they are, and call the network itself, net(X), not its parts or "
                "net.forward(X), which is not seen; a normalisation inside torch.utils.checkpoint moves "
                "them once more in the backward pass: take it out of the checkpoint, or put it in evaluation mode."
            )
        return present

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.is_grad_enabled():
            self.on_forward()
        rows = self.pack(args, kwargs)
        if rows is None:
            values = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            self.unfit = " and ".join(str(tuple(value.shape)) for value in values) if torch.is_grad_enabled() else None
            self._begun.append(None)
            return
        device = self.model.spec.device
        self._begun.append(
            _Before(
                inputs=rows.detach().clone() if torch.is_grad_enabled() else rows[:0],
                random_state=torch.random.get_rng_state(),
                device_random_state=_device_random_state(device),
                statistics=self.model.statistics_of(self.net),
                difference=self.difference(args, kwargs) if torch.is_grad_enabled() else None,
            )
        )

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> None:
        self.count += 1
        before = self._begun.pop() if self._begun else None
        self.statistics = self.model.statistics_of(self.net)
        if before is None or not torch.is_grad_enabled():
            return
        device = self.model.spec.device
        drew = not torch.equal(before.random_state, torch.random.get_rng_state())
        on_device = _device_random_state(device)
        drew_on_device = (
            on_device is not None
            and before.device_random_state is not None
            and (not torch.equal(on_device, before.device_random_state))
        )
        forward = CapturedForward(
            inputs=before.inputs,
            modes=torch.tensor([part.training for part in self.net.modules()]),
            random_state=before.random_state if drew else None,
            device_random_state=before.device_random_state if drew_on_device else None,
            statistics=before.statistics,
            statistics_after=self.statistics,
            autocast=torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else None,
            position=self.count,
            memory_order=_memory_order(before.inputs) if self.model.signature.layout is None else None,
            difference=before.difference,
        )
        self.waiting = [*self.waiting[-_MAX_WAITING + 1 :], forward]
        value = self.loss_input(returned, len(before.inputs))
        # one value per row is (n, 1) to the loss, but the loop goes on with the tensor that the network returned
        source = returned if isinstance(returned, Tensor) and returned.ndim == 1 else value
        if isinstance(value, Tensor) and isinstance(source, Tensor) and source.requires_grad:
            forward.outputs = value.detach()
            source.register_hook(lambda gradient: _add_gradient(forward, gradient))


def _add_gradient(forward: CapturedForward, gradient: Tensor) -> None:
    """Keep the gradient that a backward pass brought to the outputs; several passes add up."""
    gradient = gradient.detach()
    gradient = gradient if forward.outputs is None else gradient.reshape(forward.outputs.shape)
    known = forward.output_gradient
    forward.output_gradient = gradient.clone() if known is None else known + gradient


def _memory_order(x: Tensor) -> Tensor | None:
    """Return the dimensions of a dense tensor by their strides, largest first; None if that is their own order."""
    if x.is_contiguous() or x.ndim < 2:
        return None
    strides = list(x.stride())
    order = sorted(range(x.ndim), key=lambda dim: (-strides[dim], dim))
    return torch.tensor(order) if order != list(range(x.ndim)) else None


def _device_random_state(device: torch.device) -> Tensor | None:
    return None if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


@dataclass(eq=False)
class GraphCalls:
    """Compares what a network is called with with the recorded graph.

    A tensor that was compared before is not compared again as long as torch counts no change of it. An edit past that
    count shows in the check of the step, for which the recorded graph is used.

    Attributes:
        graph: The recorded graph.
        forward: The network's forward function.
    """

    graph: RecordedGraph
    forward: Callable[..., Any]
    _known: dict[int | str, tuple[Tensor, int]] = field(default_factory=dict)

    def difference(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
        """Return in words how a call differs from one with the recorded graph; None if it is one."""
        keys = list(self.graph.tensors)
        values = arguments_of_call(keys, args, kwargs, self.forward)
        if values is None:
            return "it was called with other arguments"
        given = dict(zip(keys, values, strict=True))
        if all(self._is_known(key, value) for key, value in given.items()):
            return None
        difference = self.graph.difference(given)
        if difference is None:
            self._known = {key: (v, v._version) for key, v in given.items() if not v.is_inference()}
        return difference

    def _is_known(self, key: int | str, value: object) -> bool:
        tensor, version = self._known.get(key, (None, 0))
        return isinstance(value, Tensor) and value is tensor and value._version == version


def of_nodes(index: int, forward: CapturedForward, nodes: Int64[Tensor, " B"]) -> CapturedForward:
    """Return what a pass of the whole graph holds of a batch's nodes.

    Args:
        index: Number of the step, for the error message.
        forward: The pass.
        nodes: The nodes, each as often as it occurs; such a node's gradient is split evenly.

    Raises:
        StepMismatchError: The pass saw another graph, or the loss read nodes that are not in the batch.
    """
    if forward.difference is not None:
        raise StepMismatchError(
            f"step {index}: the network must be called with the recorded graph: {forward.difference}. Change features "
            "and edges (DropEdge, masked features) inside the network's forward()."
        )
    rows = nodes.to(forward.inputs.device)
    outputs, gradient = forward.outputs, forward.output_gradient
    if outputs is not None and gradient is not None and len(gradient) == len(forward.inputs):
        is_outside = torch.ones(len(gradient), dtype=torch.bool, device=rows.device).index_fill(0, rows, False)
        read = (is_outside & gradient.flatten(1).any(dim=1)).nonzero().squeeze(1)
        if len(read):
            raise StepMismatchError(
                f"step {index}: recorder.batch() must get all nodes whose outputs the loss reads: it reads node "
                f"{int(read[0])} ({len(read)} nodes in all), which the batch does not hold. A loss over several sets "
                "of nodes is one batch: recorder.batch(torch.cat(sets), weight=...) with a weight per row."
            )
        counts = rows.bincount(minlength=len(gradient))[rows].to(gradient.dtype)
        gradient = gradient[rows] / counts.view(-1, *[1] * (gradient.ndim - 1))
        outputs = outputs[rows]
    return replace(forward, inputs=forward.inputs[rows], outputs=outputs, output_gradient=gradient)


@dataclass(eq=False)
class AnnouncedBatch:
    """A batch whose gradient the next step of the optimizer uses.

    Attributes:
        indices: Rows of the training data, or None for all of them in order.
        weight: Factor that the loop puts in front of the batch's loss, or of each row's.
        position: Number of forward passes before the announcement.
        forwards: The forward passes that computed the batch, in the order of its rows; empty if none was seen.
    """

    indices: Int64[Tensor, " B"] | None
    weight: float | Tensor
    position: int = 0
    forwards: list[CapturedForward] = field(default_factory=list)

    def samples(self, num_points: int) -> Int64[Tensor, " B"]:
        """Return the sample of each row."""
        return torch.arange(num_points) if self.indices is None else self.indices.cpu()

    @property
    def is_plain(self) -> bool:
        """Whether the loss of the batch stands for itself, not multiplied by anything."""
        return not isinstance(self.weight, Tensor) and self.weight == 1


def assign_forwards(
    announced: Sequence[AnnouncedBatch], waiting: list[CapturedForward], num_points: int, *, whole_graph: bool = False
) -> None:
    """Find the forward passes of each announced batch.

    A batch is announced after its backward pass, so its pass is the last one before the announcement that saw as many
    rows; or the last ones that saw as many rows together. Several batches that are announced together take the last
    passes in their order. A batch that is announced before its forward pass takes the first one that fits.

    Args:
        announced: The batches since the last step.
        waiting: The forward passes since then; those that are taken are removed, with all before them.
        num_points: M.
        whole_graph: Every pass has a row for each node of a graph, whatever nodes a batch holds.
    """
    for number in range(len(announced) - 1, -1, -1):
        batch = announced[number]
        if batch.forwards:
            continue
        earlier = [forward for forward in waiting if forward.position <= batch.position]
        rows = num_points if whole_graph else len(batch.samples(num_points))
        found = _last_with_rows(earlier, rows) or _last_with_rows(list(reversed(waiting)), rows)[::-1]
        for forward in found:
            waiting.remove(forward)
        batch.forwards = found


def _last_with_rows(forwards: list[CapturedForward], num_rows: int) -> list[CapturedForward]:
    """Return the last pass of some rows, or the last passes that have as many rows together; empty if none do."""
    for forward in reversed(forwards):
        if len(forward.inputs) == num_rows and forward.output_gradient is not None:
            return [forward]
    for forward in reversed(forwards):
        if len(forward.inputs) == num_rows:
            return [forward]
    taken: list[CapturedForward] = []
    rows = 0
    for forward in reversed(forwards):
        taken.insert(0, forward)
        rows += len(forward.inputs)
        if rows >= num_rows:
            break
    return taken if rows == num_rows else []


def stated_weights(batch: AnnouncedBatch, loss: Loss, y: Shaped[Tensor, "M ..."]) -> Tensor:
    """Return the weights of a batch's rows in the loss of the step, as the loss and the loop state them.

    Raises:
        ValueError: All samples of the batch are ignored by the loss.
    """
    return batch.weight * sample_weights(loss, y[batch.samples(len(y)).to(y.device)]).cpu()


def join_batches(
    index: int,
    lr: float,
    announced: Sequence[AnnouncedBatch],
    weights: Sequence[Tensor] | None,
    passes: Sequence[ForwardPass],
    num_points: int,
) -> Step:
    """Return the step that the announced batches make together: their samples, each with its weight in the loss.

    Args:
        index: Number of the step.
        lr: Its learning rate.
        announced: The batches; several where gradients are accumulated.
        weights: The weights of each batch's rows in the loss; None for one batch with the weights that the loss gives.
        passes: The forward passes; empty if the network in evaluation mode on the recorded data computes the same.
        num_points: M.
    """
    if len(announced) == 1 and weights is None:
        return Step(index, lr, announced[0].indices, None, tuple(passes))
    batches = [batch.samples(num_points) for batch in announced]
    return Step(index, lr, torch.cat(batches), torch.cat(list(weights or ())).cpu().double(), tuple(passes))


@dataclass(frozen=True, eq=False)
class MadeStep:
    """A step that the optimizers of a loop have made together.

    Attributes:
        parts: What each optimizer that took part did, in their order.
        announced: The batches that were announced for it, with their forward passes.
        groups: The parameter groups of all optimizers; None where they are those of the step before.
        unseen: Why no forward pass was found for them, as far as it can be told, as a clause.
    """

    parts: Sequence[OptimizerPart]
    announced: Sequence[AnnouncedBatch]
    groups: tuple[OptimizerGroup, ...] | None
    unseen: str | None = None


@dataclass(eq=False)
class StepObserver:
    """Watches a loop through hooks, and reports each step once all its parts are made.

    Several optimizers make one step together: the gradients of all are taken before the first of them moves. The step
    is complete when all have stepped, or when the loop begins something new.

    Attributes:
        setup: The training.
        optimizers: Its optimizers.
        weights: Returns the weights before the next step.
        report: Called with each step.
        watch: Reads the parameter groups.
    """

    setup: TrainingSetup
    optimizers: Sequence[Optimizer]
    weights: Callable[[], Tensor]
    report: Callable[[MadeStep], None]
    watch: GroupWatch
    _announced: list[AnnouncedBatch] = field(default_factory=list)
    _parts: list[OptimizerPart] = field(default_factory=list)
    _before: StatesBefore = field(default_factory=dict)
    _hooks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        setup, graph = self.setup, self.setup.model.signature.graph
        self._calls = None if graph is None else GraphCalls(graph, setup.net.forward)
        self._capture = ForwardCapture(
            setup.net, setup.model, self._pack, self._difference, self._loss_input, self._on_forward
        )

    @property
    def num_announced(self) -> int:
        """Number of batches that wait for their step; not those whose gradients are not finite, which have none."""
        gradients = (p.grad for p in self._parameters() if p.grad is not None)
        values = (g.coalesce().values() if g.is_sparse else g for g in gradients)
        if not all(is_finite(g) for g in values):
            return 0  # a GradScaler skips such a step
        return len(self._announced)

    def start(self) -> None:
        """Register the hooks."""
        self._hooks = [
            hook
            for optimizer in self.optimizers
            for hook in (
                optimizer.register_step_pre_hook(self._before_step),
                optimizer.register_step_post_hook(self._after_step),
            )
        ]
        self._capture.start()

    def stop(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._capture.stop()

    def announce(self, indices: Tensor | None, weight: float | Tensor) -> None:
        """Add a batch to the next step."""
        self._announced.append(AnnouncedBatch(indices, weight, self._capture.count))

    def complete(self) -> None:
        """Report the step that the optimizers have made together, if they have made one."""
        parts, self._parts = self._parts, []
        if not parts:
            return
        self._assign_forwards()
        announced, self._announced = self._announced, []
        unseen = self._unseen(announced)
        self._capture.waiting.clear()
        self.report(MadeStep(parts, announced, self.watch.changed(), unseen))

    def _unseen(self, announced: Sequence[AnnouncedBatch]) -> str | None:
        unfit, self._capture.unfit = self._capture.unfit, None
        rows = [len(forward.inputs) for forward in self._capture.waiting]
        if rows:
            held = sum(len(batch.samples(len(self.setup.X))) for batch in announced if not batch.forwards)
            return (
                f"its calls saw {' and '.join(map(str, rows))} rows, the batch says {held}: announce the rows that "
                "this network saw (rows gathered from several processes were seen by the networks of the others)"
            )
        if unfit:
            return (
                f"its call had inputs of other shapes or kinds than X, {unfit}: call it with rows as X holds them (pad "
                "them to the length of X, not to the longest of the batch)"
            )
        return None

    def statistics(self, index: int) -> Tensor | None:
        """Return the present moving statistics, which forward passes alone may have moved; None if there are none.

        Args:
            index: Number of the step, for the error message.

        Raises:
            StepMismatchError: They were changed in another way.
        """
        return self._capture.statistics_now(index)

    def _assign_forwards(self) -> None:
        assign_forwards(self._announced, self._capture.waiting, len(self.setup.X), whole_graph=self._calls is not None)

    def _difference(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        return None if self._calls is None else self._calls.difference(args, kwargs)

    def _pack(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        if self._calls is not None:  # a pass of the whole graph has a row for every node
            return self.setup.X
        return self.setup.model.signature.pack_call(args, kwargs, self.setup.net.forward)

    def _loss_input(self, returned: Any, num_rows: int) -> Any:
        y = self.setup.y
        targets = y.new_empty(num_rows, *y.shape[1:])  # only their shape matters
        return loss_input(self.setup.model.signature, self.setup.loss, returned, targets)

    def _parameters(self) -> list[nn.Parameter]:
        return [p for optimizer in self.optimizers for group in optimizer.param_groups for p in group["params"]]

    def _on_forward(self) -> None:
        """Find the passes of the batches announced so far, before the next pass begins."""
        self.complete()
        self._assign_forwards()
        if self._announced and all(p.grad is None for p in self._parameters()):
            # gradients were cleared without a step: a GradScaler skipped it
            self._announced = [batch for batch in self._announced if not batch.forwards]

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # torch's hook signature
        if any(part.optimizer is optimizer for part in self._parts):
            self.complete()
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        parameters = ((name, self.setup.net.get_parameter(name)) for name in self.setup.model.names)
        own = {name: parameter for name, parameter in parameters if id(parameter) in held}
        self._before = states_before(optimizer, own, self.setup.rules.update_rule.needs_before)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # torch's hook signature
        several = len(self.optimizers) > 1
        self.watch.read(optimizer)
        self._parts.append(optimizer_part(self.setup, optimizer, self.weights(), self._before, copies=several))
        if len(self._parts) == len(self.optimizers):
            self.complete()
