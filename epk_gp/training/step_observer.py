"""The observer of a training loop: its forward passes, the batches it announces, and the steps of its optimizers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from epk_gp.core.losses import loss_input
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.core.checks import is_finite
from epk_gp.recording.observer import AnnouncedBatch, assign_forwards
from epk_gp.recording.observer import ForwardCapture
from epk_gp.recording.observer import GraphCalls
from epk_gp.recording.optimizer import OptimizerPart, optimizer_part
from epk_gp.recording.optimizer import GroupWatch, StatesBefore, states_before
from epk_gp.recording.setup import TrainingSetup


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
