"""The observer of a training loop: its forward passes, the batches it announces, and the steps of its optimizers."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int64, Shaped
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from epk_gp.core.checks import is_finite, parse_batch, parse_weight
from epk_gp.core.graphs import has_rows, map_tensors, rows_of, tensors_of
from epk_gp.core.inputs import arguments_of_call, memory_order
from epk_gp.core.losses import UnstatedLoss, loss_input, targets_like
from epk_gp.core.model import as_written, device_random_state
from epk_gp.core.step import ForwardPass
from epk_gp.optimizers.library_rules import NoOptimizer
from epk_gp.optimizers.torch_rules import GivenRules, OptimizerGroup, groups_of, learning_rate, state_of, states_before
from epk_gp.optimizers.update_rules import (
    GRADIENT,
    NO_UPDATE,
    WEIGHTS,
    LinearStep,
    Options,
    UpdateCoefficients,
    stack_coefficients,
)
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.gradient_fit import ArrivedGradient
from epk_gp.recording.setup import TrainingSetup

# Forward passes that are kept until a batch is announced: those of an attack on the inputs are dropped for later ones.
_MAX_WAITING = 16


@dataclass(eq=False)
class CapturedForward:
    """One forward pass of the user's network, as the hooks saw it.

    Attributes:
        inputs: The rows that the network was called with, packed.
        modes: Which modules were in training mode.
        statistics: The moving statistics before the pass.
        statistics_after: Those after it.
        record: Its precision, random numbers, memory order, weights and settings.
        difference: In words, how the call differs from one with the recorded graph; None if it does not.
        random_states_after: The random numbers on the CPU and of the accelerator after it.
        position: Its number since the recording began.
        outputs: What the loss takes, (n, C), detached, or all that was returned; None if it is no returned tensor.
        output_gradient: The gradient of the loop's loss in the outputs; None before the backward pass.
        num_backwards: Number of backward passes that brought a gradient to the outputs.
        num_arguments: Number of arguments of the call.
        stray: Shape of a returned tensor without rows that got a gradient; None if there is none.
    """

    inputs: Shaped[Tensor, "n ..."]
    modes: Bool[Tensor, " modules"]
    statistics: Float[Tensor, " Q"]
    statistics_after: Float[Tensor, " Q"]
    record: ForwardPass
    difference: str | None = None
    position: int = 0
    random_states_after: tuple[Tensor | None, Tensor | None] = None, None
    outputs: Tensor | None = None
    output_gradient: Tensor | None = None
    num_backwards: int = 0
    num_arguments: int = 1
    stray: tuple[int, ...] | None = None

    def watch(self, returned: Any, num_rows: int, counts: Callable[[], bool]) -> Any:
        """Return what the network returned, with each tensor that a gradient can come into as an alias.

        The gradient of an alias is what the loop itself sends into this tensor; that of the tensor would hold what
        comes through others of those that it returned too. `counts` returns whether what comes is part of the step.
        """
        columns, own = [0], [z for z in tensors_of(returned) if has_rows(z, num_rows)]
        # through one tensor alone everything goes that the network computed of it too, such as the loss itself
        is_only = sum(z.requires_grad for z in own) == 1
        if own:
            self.outputs = rows_of(returned, num_rows).detach()

        def watched(z: Tensor) -> Tensor:
            first = columns[-1]
            if is_row := has_rows(z, num_rows):
                columns.append(first + z.shape[1:].numel())
            if not z.requires_grad:
                return z

            def add(gradient: Tensor) -> None:
                if not counts():
                    return
                if not is_row:
                    self.stray = tuple(z.shape) if bool(gradient.any()) and not is_only else self.stray
                elif self.outputs is not None:
                    if self.output_gradient is None:
                        self.output_gradient = torch.zeros_like(self.outputs)
                    size = z.shape[1:].numel()
                    self.output_gradient[:, first : first + size] += gradient.detach().reshape(num_rows, size)

            # no view: hooks of a view are lost where the loop changes it in place
            alias = z if is_only else z.clone()
            alias.register_hook(add)
            return alias

        return map_tensors(returned, watched)

    def add_gradient(self, gradient: Tensor) -> None:
        """Keep the gradient that a backward pass brought to the outputs; several passes add up."""
        self.num_backwards += 1
        gradient = gradient.detach().reshape(gradient.shape if self.outputs is None else self.outputs.shape)
        self.output_gradient = gradient.clone() if self.output_gradient is None else self.output_gradient + gradient

    def watch_original(self, node: Any, counts: Callable[[], bool]) -> None:
        """Keep the original's gradient where outputs are a copy in another precision that gets none (Accelerate)."""

        def add(gradients: tuple[Tensor | None, ...]) -> None:
            if counts() and self.output_gradient is None and self.outputs is not None and gradients[0] is not None:
                self.outputs = self.outputs.to(gradients[0].dtype)
                self.add_gradient(gradients[0])

        if node is not None and node.name().startswith("ToCopyBackward"):
            node.next_functions[0][0].register_prehook(add)


@dataclass(eq=False)
class AnnouncedBatch:
    """A batch whose gradient the next step of the optimizer uses.

    Attributes:
        indices: Rows of the training data, or None for all of them in order.
        samples: The sample of each row.
        weight: Factor that the loop puts in front of the batch's loss, or of each row's; None: it is read.
        position: Number of forward passes before the announcement.
        forwards: The forward passes that computed the batch, in the order of its rows; empty if none was seen.
        targets: The rows' targets, of a stream, whose samples are known when the forward passes are.
        is_void: Whether its gradient was cleared before a step, as by SAM, and where a GradScaler skips a step.
    """

    indices: Int64[Tensor, " B"] | None
    samples: Int64[Tensor, " B"]
    weight: float | Tensor | None
    position: int = 0
    forwards: list[CapturedForward] = field(default_factory=list)
    targets: Tensor | None = None
    is_void: bool = False


@dataclass(eq=False)
class MadeStep:
    """A step that the optimizers of a loop have made together.

    Attributes:
        lr: The learning rate of the first optimizer that took part.
        announced: The batches that were announced for it, with their forward passes.
        gradient: The gradient that the optimizers used; zero for a parameter without one.
        arrived: The gradient as backward() left it: `gradient` itself where nothing changed it, None if not seen.
        without_gradient: Names of the parameters without a gradient, which torch neither clips nor moves.
        update: The coefficients of the step, read from the optimizers, without gradient clipping.
        groups: The parameter groups of all optimizers; None where they are those of the step before.
        options: All options of each group.
        unseen, is_seen_enough: As `StepObserver._unseen_calls` returns them.
        doubt: Why the loss is not the stated one, as a clause, where a pass shows that; such a step is checked.
        others: Forward passes with a gradient in their outputs that are no announced batch's.
        is_doubtful: Whether a pass shows another loss than the stated one, or no common factor that is read.
        has_left_over: Whether parameters had a gradient already when the first backward pass began.
    """

    lr: float
    announced: Sequence[AnnouncedBatch]
    gradient: Float[Tensor, " P"]
    arrived: Float[Tensor, " P"] | None
    without_gradient: Set[str]
    update: UpdateCoefficients
    groups: tuple[OptimizerGroup, ...] | None
    options: Sequence[Options]
    unseen: str | None
    is_seen_enough: bool
    others: Sequence[CapturedForward]
    has_left_over: bool
    doubt: str | None = None
    is_doubtful: bool = False


class StepObserver:
    """Watches a loop through hooks, and reports each step once all optimizers have made theirs.

    Several optimizers make one step together: gradients are taken before the first of them moves. The step is complete
    when all have stepped, or when the loop begins something new.
    """

    def __init__(
        self,
        setup: TrainingSetup,
        rules: GivenRules,
        groups: tuple[OptimizerGroup, ...],
        weights: Callable[[], Tensor],
        report: Callable[[MadeStep], None],
        called: nn.Module,
    ) -> None:
        """Prepare; nothing is watched before `start`.

        Args:
            setup: The training.
            rules: The optimizers, each with the update rule given for it.
            groups: Their parameter groups at the last recorded step.
            weights: Returns the weights before the next step.
            report: Called with each step.
            called: What the loop calls: the network, or what `torch.compile` made of it.
        """
        self.setup, self.num_passes, self._called = setup, 0, called
        setup.validate_modules()  # from here on
        self._weights, self._report, self._last_groups = weights, report, groups
        self._rules, self._optimizers = {id(own): rule for rule, own in rules}, [own for _, own in rules]
        self._names = {id(p): name for name, p in setup.net.named_parameters()}
        self._groups = {id(own): groups_of(own, rule, self._names) for rule, own in rules}
        self._hooks: list[Any] = []
        self._announced: list[AnnouncedBatch] = []
        self._inside: list[Optimizer] = []  # whose step() the loop is in
        self._stepped: list[Optimizer] = []  # that have made their part of the present step
        self._coefficients: dict[str, LinearStep] = {}  # of the present step, by parameter
        self._gradients: dict[str, Tensor] = {}
        self._lr, self._has_left_over = 0.0, False
        self._last_gradient: Tensor | None = None  # of the step before, which the last check may need
        self._spare: Tensor | None = None  # the one before that, which is written anew: new memory costs more
        self._before: Mapping[str, Any] = {}
        self._begun: list[CapturedForward | None] = []  # passes inside of which the loop is
        self._waiting: list[CapturedForward] = []  # that no announced batch has taken
        self._calls: list[str] = []  # shapes of what the network was called with
        self._has_added, self._last_backward = False, -1  # to gradients of weights; torch's number of the last that did
        self._arrived = ArrivedGradient(setup.model, setup.live.named if hasattr(called, "parameters") else dict)
        self.other_optimizer = ""  # in words, which one stepped that is none of these
        self._statistics = setup.model.statistics_of(setup.net)  # after the last pass; they may move in no other way
        with as_written(setup.net) as self._autocast:  # which begins inside of a pass
            pass

    @property
    def num_announced(self) -> int:
        """Number of batches that wait for their step; not those whose gradients are not finite, which have none."""
        is_skipped = not all(map(is_finite, self._present_gradients()))  # by a GradScaler
        return 0 if is_skipped else sum(not batch.is_void for batch in self._announced)

    @property
    def _passes(self) -> list[CapturedForward]:
        """The passes since the last step, in their order."""
        taken = (forward for batch in self._announced for forward in batch.forwards)
        return sorted([*taken, *self._waiting], key=lambda forward: forward.position)

    @property
    def has_moved_between_passes(self) -> bool:
        """Whether a pass since the last step saw its weights, and a later one others, as in a step of SAM."""
        return len({forward.record.weights is None for forward in self._passes}) == 2

    def first_state(self) -> tuple[Float[Tensor, " P"], Float[Tensor, " Q"] | None]:
        """Return weights and moving statistics as the first pass since the last step found them, or as they are."""
        setup, first = self.setup, next(iter(self._passes), None)
        if first is None:
            return setup.weights(), setup.statistics()
        return self._weights() if first.record.weights is None else first.record.weights, first.statistics

    def take_up(self, w: Float[Tensor, " P"], statistics: Float[Tensor, " Q"] | None) -> None:
        """Take weights and moving statistics, which the loop moved without a gradient, as those of the last step."""
        for forward in self._waiting:
            if forward.record.weights is not None and torch.equal(forward.record.weights, w):
                forward.record = replace(forward.record, weights=None)
        if not self._waiting and statistics is not None:
            self._statistics = statistics

    def start(self) -> None:
        """Register the hooks."""
        net = self.setup.net
        hidden: Any = torch.compiler.disable  # from a compiled loop, network or step
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(hidden(self._before_step)))
            self._hooks.append(optimizer.register_step_post_hook(hidden(self._after_step)))
        self._hooks.append(self._called.register_forward_pre_hook(hidden(self._before_forward), with_kwargs=True))
        self._hooks.append(self._called.register_forward_hook(hidden(self._after_forward), with_kwargs=True))
        self._hooks.append(register_optimizer_step_post_hook(hidden(self._after_other_step)))
        self._statistics = self.setup.model.statistics_of(net)

    def stop(self) -> None:
        """Remove the hooks; what was seen is kept, for the last step may not be complete yet."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def announce(self, indices: object, weight: object, index: int, targets: Tensor | None = None) -> None:
        """Add a batch to the next step, whose number is `index`; see `Recorder.batch`.

        Raises:
            TypeError: The indices are not integers, or the weight is no number and no tensor.
            ValueError: The batch is empty, an index is out of range, or the weight does not fit or is not finite.
        """
        setup, may_be_outside = self.setup, isinstance(self.setup.loss, UnstatedLoss)
        if (indices if setup.stream is not None else targets) is not None:
            raise ValueError(
                "recorder.batch() must get indices into X, or, of a Stream, whose rows number themselves, the targets "
                "of the rows: recorder.batch(targets=y)."
            )
        num_points = len(setup.X)
        batch = None if indices is None else parse_batch(indices, num_points, index, -1 if may_be_outside else 0)
        if setup.stream is not None:
            num_points = self._num_waiting_rows() if targets is None else len(targets)
        samples = torch.arange(num_points) if batch is None else batch.cpu()
        factor = None if weight is None else parse_weight(weight, len(samples), index)
        self._announced.append(AnnouncedBatch(batch, samples, factor, self.num_passes, targets=targets))
        if not len(samples):  # as a Poisson sampler may draw: a row without weight and pass stands for them
            row = torch.zeros(1, dtype=torch.int64)
            self._announced[-1] = AnnouncedBatch(row, row, 0.0, -1)
        if isinstance(self._optimizers[0], NoOptimizer):
            self._before = self._optimizers[0].keep(dict(setup.net.named_parameters()))

    def _num_waiting_rows(self) -> int:
        """Count the rows of a stream that no batch has taken, of passes that had a backward pass.

        Raises:
            ValueError: There are none, or the loss needs their targets.
        """
        self._assign_forwards()
        count = sum(len(f.inputs) for f in self._waiting if f.output_gradient is not None)
        if not isinstance(self.setup.loss, UnstatedLoss) or not count:
            raise ValueError(
                "recorder.batch(targets=y) of a Stream must get the targets of the rows, after backward(): got none."
            )
        return count

    def complete(self) -> None:
        """Report the step that the optimizers have made together, if they have made one."""
        first = self._optimizers[0]
        if self._announced and not self._stepped and isinstance(first, NoOptimizer) and first.has_moved():
            self._after_step(first, (), {})
        if not self._announced and not self._gradients:  # no weight had a gradient: no step was made
            self._stepped = []
        if not self._stepped:
            return
        self.other_optimizer = ""
        self._assign_forwards()
        for batch in self._announced:  # the gradient is that of a pass at other weights inside of step(closure)
            later = [f for f in self._waiting if f.record.weights is not None and f.position > batch.position]
            if later := self._last_with_rows(later, batch, sum(len(f.inputs) for f in batch.forwards)):
                batch.forwards, batch.is_void = later, False
        self._announced = [batch for batch in self._announced if not batch.is_void]
        model, stream, (unseen, is_enough) = self.setup.model, self.setup.stream, self._unseen_calls()
        if stream is not None and is_enough:
            for batch in self._announced:
                rows = torch.cat([forward.inputs for forward in batch.forwards])
                batch.indices = batch.samples = self.setup.number(rows, batch.targets, stream)
        named = model.unflatten(self._weights()).items()
        zeros = {name: torch.zeros_like(weight) for name, weight in named if name not in self._gradients}
        present = [group for groups in self._groups.values() for group in groups]
        before, self._last_groups = self._last_groups, tuple(group.of_scale() for group in present)
        made = MadeStep(
            lr=self._lr,
            announced=self._announced,
            gradient=(gradient := model.flatten({**zeros, **self._gradients}, self._spare)),
            arrived=self._arrived.take(gradient, zeros.keys()),
            without_gradient={*model.names} - self._gradients.keys(),
            update=stack_coefficients([self._coefficients.get(n, NO_UPDATE) for n in model.names], model.sizes),
            groups=None if before == self._last_groups else self._last_groups,
            options=[group.options for group in present],
            unseen=unseen,
            is_seen_enough=is_enough,
            others=[forward for forward in self._waiting if forward.output_gradient is not None],
            has_left_over=self._has_left_over,
        )
        self._announced, self._stepped, self._waiting, self._calls, self._spare = [], [], [], [], None
        self._coefficients, self._gradients, self._has_left_over, self._has_added = {}, {}, False, False
        self._report(made)
        self._spare, self._last_gradient = self._last_gradient, made.gradient

    def _unseen_calls(self) -> tuple[str | None, bool]:
        """Say, as a clause, which calls were seen where a batch has none, and whether the step can do without."""
        missing = next((batch for batch in self._announced if not batch.forwards), None)
        if missing is None:
            return None, True
        others = [batch.samples for batch in self._announced if batch.forwards and batch.targets is None]
        if any(torch.equal(samples, missing.samples) for samples in others):
            return "recorder.batch() was called twice for one forward pass, and must be called once for each", False
        unseen = (
            f"no call of the network on the batch's rows was seen, but {' and '.join(self._calls) or 'none'}: call "
            "the network itself, net(X), not its parts or net.forward(X), on rows as X holds them (padded like X), "
            "and announce the rows that it saw (IndexedDataset gives those of a DataLoader; None means all of X)"
        )
        if self.setup.stream is not None or isinstance(self.setup.loss, UnstatedLoss):
            return f"rows of a stream or without a stated loss must be seen: {unseen}", False
        return unseen, True

    def statistics(self) -> Float[Tensor, " Q"]:
        """Return the present moving statistics.

        Raises:
            StepMismatchError: They were changed in another way than by a forward pass.
        """
        present = self.setup.model.statistics_of(self.setup.net)
        if not torch.equal(present, self._statistics):
            raise StepMismatchError(
                "moving statistics must be moved by the network's forward passes alone: they were changed in another "
                "way. Leave them as they are, and call the network itself, net(X), not its parts or net.forward(X), "
                "which is not seen; a normalisation inside torch.utils.checkpoint moves them once more in the backward "
                "pass: take it out of the checkpoint, or put it in evaluation mode."
            )
        return present

    def _assign_forwards(self) -> None:
        """Find the forward passes of each announced batch, and take them from those that wait.

        A batch is announced after its backward pass, so its pass is the last one before it that saw as many rows, or
        the last ones that did together; of more passes than batches one that saw its own rows. One announced before
        takes the first that fits. A pass of a graph has a row for each node.
        """
        for batch in reversed([batch for batch in self._announced if not batch.forwards and batch.position >= 0]):
            rows = len(self.setup.X if self.setup.model.signature.graph is not None else batch.samples)
            earlier = [forward for forward in self._waiting if forward.position <= batch.position]
            later = self._last_with_rows(self._waiting[::-1], batch, rows)[::-1]
            batch.forwards = self._last_with_rows(earlier, batch, rows) or later
            self._waiting = [forward for forward in self._waiting if forward not in batch.forwards]

    def _last_with_rows(
        self, forwards: list[CapturedForward], batch: AnnouncedBatch, num_rows: int
    ) -> list[CapturedForward]:
        """Return the last pass of a batch's rows, or the last passes that have as many together; empty if none do."""
        whole = [forward for forward in forwards if len(forward.inputs) == num_rows]
        if whole := [forward for forward in whole if forward.output_gradient is not None] or whole:
            own = sum(not b.forwards and len(b.samples) == len(batch.samples) for b in self._announced)
            if len(whole) > max(own, 1) and batch.targets is None:  # more passes than batches; no rows of a stream
                X = self.setup.X[batch.samples.to(self.setup.X.device)]
                whole = [f for f in whole if f.inputs.shape == X.shape and torch.equal(f.inputs, X)] or whole
            return whole[-1:]
        rows = 0
        for first in range(len(forwards) - 1, -1, -1):
            rows += len(forwards[first].inputs)
            if rows >= num_rows:
                return forwards[first:] if rows == num_rows else []
        return []

    def _look_at_gradients(self, *, is_backward: bool = True) -> None:
        """Find out whether gradients were cleared since a batch was announced, or left over from before the step."""
        if not hasattr(self._called, "parameters"):
            return  # ranks hold parts of the gradients, which are gathered at the step
        has_gradient = any(bool(g.any()) for g in self._present_gradients())
        self._has_left_over |= is_backward and has_gradient and not self._has_added
        # what was sent has been cleared; where nothing was, the loss is 0
        seen = ((f, f.outputs is None, f.output_gradient) for f in self._passes if not has_gradient)
        cleared = [f for f, is_hidden, sent in seen if is_hidden or (sent is not None and bool(sent.any()))]
        for batch in self._announced:
            batch.is_void |= any(forward in cleared for forward in batch.forwards)
        for forward in self._passes if is_backward else ():
            if forward in cleared or not self._has_added:
                forward.output_gradient, forward.num_backwards, forward.stray = None, 0, None

    def _counts(self) -> bool:
        """Return whether a backward pass adds to gradients of weights, or none of the step does, as by hand."""
        held = (p for o in self._optimizers for group in o.param_groups for p in group["params"] if p.requires_grad)
        nodes, adds = (torch.autograd.graph.get_gradient_edge(p).node for p in held), False
        with suppress(RuntimeError):  # of `torch.autograd.grad`, which returns the gradients of weights
            adds = any(map(torch._C._will_engine_execute_node, nodes))
        if adds and (number := torch._C._current_graph_task_id()) > self._last_backward:
            self._look_at_gradients()
            self._has_added, self._last_backward = True, number
            self._arrived.keep_after_backward(self._gradients)
        return adds or not self._has_added

    def _present_gradients(self) -> Iterator[Tensor]:
        held = (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])
        gradients = (p.grad for p in held if p.grad is not None)
        return (g.coalesce().values() if g.is_sparse else g for g in gradients)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or len(self.setup.live.named()) < len(self.setup.model.names):
            # functional_call puts others in their place
            self._begun.append(None)
            return
        self.complete()
        self._assign_forwards()
        self._look_at_gradients(is_backward=False)
        weights = None if self.setup.live.are(self._weights()) else self.setup.weights()
        setup, model, device = self.setup, self.setup.model, self.setup.model.spec.device
        graph, difference = model.signature.graph, None
        if graph is not None:
            values = arguments_of_call(list(graph.tensors), args, kwargs, setup.net.forward)
            named = {} if values is None else dict(zip(graph.tensors, values, strict=True))
            difference = graph.difference(named) if named else "it was called with other arguments"
        rows = model.signature.pack_call(args, kwargs, setup.net.forward) if graph is None else setup.X
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self._calls = [*self._calls[-2:], f"one on inputs of shape {', '.join(str(tuple(v.shape)) for v in tensors)}"]
        if rows is None:
            self._begun.append(None)
            return
        inputs, statistics = rows.detach().clone(), model.statistics_of(setup.net)
        dtype = torch.get_autocast_dtype(device.type)
        record = ForwardPass(
            num_rows=len(inputs),
            random_state=torch.random.get_rng_state(),
            device_random_state=device_random_state(device),
            autocast=dtype if torch.is_autocast_enabled(device.type) else self._autocast,
            memory_order=memory_order(inputs) if model.signature.layout is None else None,
            weights=weights,
            settings=setup.changed_settings(),
        )
        modes = torch.tensor([part.training for part in setup.net.modules()])
        own = inputs, modes, statistics, statistics, record, difference
        self._begun.append(CapturedForward(*own, num_arguments=len(args) + len(kwargs)))

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> Any:
        """Take what a pass returned; of a loss that is not stated the loop goes on with aliases of it."""
        setup = self.setup
        self.num_passes += 1
        self._statistics = setup.model.statistics_of(setup.net)
        forward = self._begun.pop() if self._begun else None
        if forward is None:
            return None
        forward.statistics_after, forward.position, begun = self._statistics, self.num_passes, forward.record
        forward.random_states_after = torch.random.get_rng_state(), device_random_state(setup.model.spec.device)
        pairs = zip((begun.random_state, begun.device_random_state), forward.random_states_after, strict=True)
        cpu, device = (None if a is None or b is None or torch.equal(a, b) else a for a, b in pairs)  # None: no draws
        forward.record = replace(begun, random_state=cpu, device_random_state=device)
        self._waiting = [*self._waiting[-_MAX_WAITING + 1 :], forward]
        if isinstance(setup.loss, UnstatedLoss):
            return forward.watch(returned, len(forward.inputs), self._counts)
        targets = setup.y.new_empty(len(forward.inputs), *setup.y.shape[1:])  # only their shape matters
        targets = targets_like(setup.model.signature, setup.loss, setup.X, forward.inputs, targets)[0]
        value = loss_input(setup.model.signature, setup.loss, returned, targets)
        # one value per row is (n, 1) to the loss, but the loop goes on with the tensor that the network returned
        source = returned if isinstance(returned, Tensor) and returned.ndim == 1 else value
        if isinstance(value, Tensor) and isinstance(source, Tensor) and source.requires_grad:
            forward.outputs = value.detach()
            source.register_hook(lambda gradient: forward.add_gradient(gradient) if self._counts() else None)
            forward.watch_original(source.grad_fn, self._counts)
        return None

    def _after_other_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # torch's hook signature
        """Note the step of an optimizer that the recorder did not get, if it holds weights that are recorded."""
        held = (self._names.get(id(p)) for group in optimizer.param_groups for p in group["params"])
        if not self._stepped and id(optimizer) not in self._rules and not {*self.setup.model.names}.isdisjoint(held):
            kind = type(optimizer).__name__
            self.other_optimizer = f"Another {kind} stepped: pass the recorder both, or end it and record the new one."

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:  # torch's hook signature
        """Read what an optimizer holds before its step, and again when its closure has made the gradient."""
        self._inside.append(optimizer)
        if sum(each is optimizer for each in self._inside) > 1:
            return None  # a class that calls its parent's step()
        if any(stepped is optimizer for stepped in self._stepped):
            self.complete()
        held = [p for group in optimizer.param_groups for p in group["params"]]
        own = {self._names[id(p)]: p for p in held if id(p) in self._names}
        self._before = states_before(optimizer, own, self.setup.update_rule.needs_before)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None or GRADIENT not in self.setup.update_rule.needs_before:
            return None

        def watched() -> Any:
            value = closure()
            self._before = states_before(optimizer, own, self.setup.update_rule.needs_before)
            return value

        return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": watched})

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # torch's hook signature
        """Read gradients and coefficients from an optimizer, right after it has stepped.

        Its groups are read now, for its options may change before others step.
        """
        del self._inside[-1:]
        if any(each is optimizer for each in self._inside):
            return
        model, rule = self.setup.model, self.setup.update_rule
        self._groups[id(optimizer)] = groups_of(optimizer, self._rules[id(optimizer)], self._names)
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        weights = model.unflatten(self._weights())
        if groups.keys() - self._names.keys():  # of another network, or a new one
            self._names = {id(p): name for name, p in self.setup.net.named_parameters()}
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names):
            name = self._names[id(parameter)]
            before = dict(self._before.get(name, {}))
            g = before.get(GRADIENT, parameter.grad)
            if g is None:
                continue
            if name not in model.names:
                if parameter.numel():
                    raise StepMismatchError(
                        "a parameter that is in no optimizer when recording begins must stay untrained: "
                        f"{name!r} is trained now. Tell the recorder that it will be, with trained=[{name!r}]."
                    )
                continue
            g = g.to_dense() if g.is_sparse else g
            if WEIGHTS in rule.needs_before:
                before[WEIGHTS] = weights[name]
            linear = rule.coefficients(parameter, groups[id(parameter)], before, state_of(optimizer, parameter))
            if parameter.requires_grad or bool(g.any()):
                self._gradients[name] = g.clone() if len(self._optimizers) > 1 else g
            else:
                linear = replace(linear, grad_scale=0.0)
            self._coefficients[name] = linear
        self._lr = self._lr if self._stepped else learning_rate(optimizer)
        self._stepped.append(optimizer)
        if len(self._stepped) == len(self._optimizers):
            self.complete()
