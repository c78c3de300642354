"""The observer of a training loop: its forward passes, the batches it announces, and the steps of its optimizers."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from epk_gp.core.checks import is_finite, parse_batch, parse_weight
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
from epk_gp.recording.captured import CapturedForward
from epk_gp.recording.causes import StepMismatchError
from epk_gp.recording.setup import TrainingSetup

# Forward passes that are kept until a batch is announced: those of an attack on the inputs are dropped for later ones.
_MAX_WAITING = 16


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

    Several optimizers make one step together: the gradients of all are taken before the first of them moves. The step
    is complete when all have stepped, or when the loop begins something new.
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
        self._last_backward = -1  # torch's number of the last one that was looked at
        self._modules = dict(setup.net.named_modules())
        self.other_optimizer = ""  # that another one than these has stepped since they have
        self._statistics = setup.model.statistics_of(setup.net)  # after the last pass; they may move in no other way
        with as_written(setup.net) as self._autocast:  # which begins inside of a pass
            pass

    @property
    def num_announced(self) -> int:
        """Number of batches that wait for their step; not those whose gradients are not finite, which have none."""
        if not all(map(is_finite, self._present_gradients())):
            return 0  # a GradScaler skips such a step
        return sum(not batch.is_void for batch in self._announced)

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
        if not len(samples) and (may_be_outside or setup.stream is not None):
            raise ValueError(
                f"step {index}: without rows there is nothing to announce: leave out recorder.batch(), and "
                "optimizer.step() too where no other batch of the step has rows."
            )
        factor = None if weight is None else parse_weight(weight, len(samples), index)
        self._announced.append(AnnouncedBatch(batch, samples, factor, self.num_passes, targets=targets))
        if isinstance(self._optimizers[0], NoOptimizer):
            self._before = self._optimizers[0].keep(dict(setup.net.named_parameters()))

    def _num_waiting_rows(self) -> int:
        """Count the rows of a stream that no batch has taken, of passes that had a backward pass.

        Raises:
            ValueError: There are none, or the loss needs their targets.
        """
        self._assign_forwards()
        count = sum(len(f.inputs) for f in self._reached())
        if not isinstance(self.setup.loss, UnstatedLoss) or not count:
            raise ValueError(
                "recorder.batch(targets=y) of a Stream must get the targets of the rows, after backward(): got none."
            )
        return count

    def _reached(self) -> list[CapturedForward]:
        """Return the waiting passes that a backward pass went through, of those that add to gradients if any does."""
        adds = any(forward.num_backwards for forward in self._passes)
        return [f for f in self._waiting if (f.num_backwards if adds else f.output_gradient is not None)]

    def complete(self) -> None:
        """Report the step that the optimizers have made together, if they have made one."""
        first = self._optimizers[0]
        if self._announced and not self._stepped and isinstance(first, NoOptimizer) and first.has_moved():
            self._after_step(first, (), {})
        if not self._stepped:
            return
        self.other_optimizer = ""
        if not self._announced and not self._gradients:  # no weight had a gradient: none was moved
            self._stepped = []
            return
        self._assign_forwards()
        for batch in self._announced:  # the gradient is that of a pass at other weights inside of step(closure)
            later = [f for f in self._waiting if f.record.weights is not None and f.position > batch.position]
            if later := self._last_with_rows(later, batch, sum(len(f.inputs) for f in batch.forwards)):
                batch.forwards, batch.is_void = later, False
        self._announced = [batch for batch in self._announced if not batch.is_void]
        if self._announced and not any(len(batch.samples) for batch in self._announced):
            row = torch.zeros(1, dtype=torch.int64)
            self._announced = [AnnouncedBatch(row, row, 0.0)]  # no rows: one without weight stands for them
        self._announced = [batch for batch in self._announced if len(batch.samples)]
        model, stream, (unseen, is_enough) = self.setup.model, self.setup.stream, self._unseen_calls()
        if stream is not None and is_enough:
            for batch in self._announced:
                rows = torch.cat([forward.inputs for forward in batch.forwards])
                batch.indices = batch.samples = self.setup.number(rows, batch.targets, stream)
        named = model.unflatten(self._weights()).items()
        zeros = {name: torch.zeros_like(weight) for name, weight in named if name not in self._gradients}
        present = [group for groups in self._groups.values() for group in groups]
        before, self._last_groups = self._last_groups, tuple(group.of_scale() for group in present)
        memory, self._spare = self._spare, None
        made = MadeStep(
            lr=self._lr,
            announced=self._announced,
            gradient=model.flatten({**zeros, **self._gradients}, memory),
            without_gradient={*model.names} - self._gradients.keys(),
            update=stack_coefficients([self._coefficients.get(n, NO_UPDATE) for n in model.names], model.sizes),
            groups=None if before == self._last_groups else self._last_groups,
            options=[group.options for group in present],
            unseen=unseen,
            is_seen_enough=is_enough,
            others=self._reached(),
            has_left_over=self._has_left_over,
        )
        self._announced, self._stepped, self._waiting, self._calls = [], [], [], []
        self._coefficients, self._gradients, self._has_left_over = {}, {}, False
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

        A batch is announced after its backward pass, so its pass is the last one before the announcement that saw as
        many rows, or the last ones that saw as many together; where there are more passes than batches, of those that
        saw its own rows. One announced before takes the first that fits. A pass of a graph has a row for each node.
        """
        for batch in reversed([batch for batch in self._announced if not batch.forwards]):
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
        reached = [forward for forward in whole if forward.output_gradient is not None]
        if whole := [forward for forward in reached if forward.num_backwards] or reached or whole:
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
        self._has_left_over |= is_backward and has_gradient and not any(f.num_backwards for f in self._passes)
        for batch in () if has_gradient else self._announced:
            batch.is_void |= any(forward.has_sent for forward in batch.forwards)
        for forward in () if has_gradient or not is_backward else self._passes:
            if forward.num_backwards and forward.has_sent:  # backward() that looked only, as of ghost clipping
                forward.output_gradient, forward.num_backwards = None, 0

    def _begin_backward(self) -> bool:
        """Return whether the backward pass that the loop is in adds to gradients of weights; if so, look at them."""
        weights = (p for o in self._optimizers for group in o.param_groups for p in group["params"] if p.requires_grad)
        try:
            adds = any(torch._C._will_engine_execute_node(get_gradient_edge(p).node) for p in weights)
        except RuntimeError:  # `torch.autograd.grad` returns the gradients of weights
            return False
        if adds and (number := torch._C._current_graph_task_id()) > self._last_backward:
            self._last_backward = number
            self._look_at_gradients()
        return adds

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
            difference = "it was called with other arguments"
            if values is not None:
                difference = graph.difference(dict(zip(graph.tensors, values, strict=True)))
        rows = model.signature.pack_call(args, kwargs, setup.net.forward) if graph is None else setup.X
        tensors = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        self._calls = [*self._calls[-2:], f"one on inputs of shape {', '.join(str(tuple(v.shape)) for v in tensors)}"]
        if rows is None:
            self._begun.append(None)
            return
        inputs, statistics, parts = rows.detach().clone(), model.statistics_of(setup.net), [*setup.net.modules()]
        other_module = None
        if parts != [*self._modules.values()]:
            present = dict(setup.net.named_modules())
            names = [*self._modules, *present]
            other_module = next(name for name in names if present.get(name) is not self._modules.get(name))
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
        modes = torch.tensor([part.training for part in parts])
        own = inputs, modes, statistics, statistics, record, difference
        given = len(args) + len(kwargs)
        self._begun.append(CapturedForward(*own, num_arguments=given, other_module=other_module))

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
            return forward.watch(returned, len(forward.inputs), self._begin_backward)
        targets = setup.y.new_empty(len(forward.inputs), *setup.y.shape[1:])  # only their shape matters
        targets = targets_like(setup.model.signature, setup.loss, setup.X, forward.inputs, targets)[0]
        value = loss_input(setup.model.signature, setup.loss, returned, targets)
        # one value per row is (n, 1) to the loss, but the loop goes on with the tensor that the network returned
        source = returned if isinstance(returned, Tensor) and returned.ndim == 1 else value
        if isinstance(value, Tensor) and isinstance(source, Tensor) and source.requires_grad:
            forward.outputs = value.detach()
            source.register_hook(lambda gradient: forward.add_gradient(gradient, adds=self._begin_backward()))
            forward.watch_original(source.grad_fn, self._begin_backward)
        return None

    def _after_other_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # torch's hook signature
        """Note the step of an optimizer that nobody told of, if it holds weights that are recorded."""
        held = {self._names.get(id(p)) for group in optimizer.param_groups for p in group["params"]}
        if not self._stepped and id(optimizer) not in self._rules and not held.isdisjoint(self.setup.model.names):
            self.other_optimizer = (
                f"Another {type(optimizer).__name__} than the recorder's has stepped: pass the recorder all of them; "
                "to go on with a new one, end the recording, and begin another."
            )

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
            state = state_of(optimizer, parameter)
            linear = rule.coefficients(parameter, groups[id(parameter)], before, state)
            if parameter.requires_grad or bool(g.any()):
                self._gradients[name] = g.clone() if len(self._optimizers) > 1 else g
            else:
                linear = replace(linear, grad_scale=0.0)
            self._coefficients[name] = linear
        self._lr = self._lr if self._stepped else learning_rate(optimizer)
        self._stepped.append(optimizer)
        if len(self._stepped) == len(self._optimizers):
            self.complete()
