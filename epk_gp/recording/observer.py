"""The observer of a training loop: its forward passes, the batches it announces, and the steps of its optimizers."""

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from operator import is_
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from epk_gp.core.checks import is_finite, parse_batch, parse_weight
from epk_gp.core.graphs import has_rows, tensors_of
from epk_gp.core.inputs import arguments_of_call, memory_order
from epk_gp.core.losses import UnstatedLoss, loss_input, targets_like
from epk_gp.core.model import FEW_WEIGHTS, as_written, device_random_state, flattened
from epk_gp.core.step import ForwardPass
from epk_gp.optimizers.library_rules import NoOptimizer
from epk_gp.optimizers.torch_rules import GivenRules, OptimizerGroup, groups_of, state_of, states_before
from epk_gp.optimizers.update_rules import GRADIENT, NO_UPDATE, WEIGHTS, LinearStep
from epk_gp.recording.causes import StepMismatchError, parse_batch_targets
from epk_gp.recording.gradient_fit import ArrivedGradient
from epk_gp.recording.seen import AnnouncedBatch, CapturedForward, MadeStep, StepInProgress
from epk_gp.recording.setup import TrainingSetup

# Number of forward passes kept until a batch is announced; passes of an attack on the inputs are dropped.
_MAX_WAITING = 16
_UNKNOWN = ForwardPass(0)  # the record of an unfinished pass
_FEW_ENOUGH = 1 << 21  # largest number of weights whose optimizer state is joined; above, joining costs more
# Observers that receive every optimizer's steps through one permanent hook: torch iterates over the hooks of all
# optimizers while other threads step, and fails if one is registered or removed meanwhile.
_LISTENERS = list["StepObserver"]()
_LISTENING, _LOCK = list[Any](), threading.Lock()


class StepObserver:
    """Watches a loop through hooks, and reports each step once all optimizers have made theirs.

    Several optimizers make one step together: gradients are read before the first of them moves. The step is complete
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
        """Prepare the observer; it watches nothing before `start`.

        Args:
            setup: The training.
            rules: The optimizers, each with the update rule given for it.
            groups: Their parameter groups at the last recorded step.
            weights: Returns the weights before the next step.
            report: Called with each step.
            called: The object that the loop calls: the network, or its version from `torch.compile`.
        """
        self.setup, self.num_passes, self._called = setup, 0, called
        setup.validate_modules()  # from now on
        self._weights, self._report, self._last_groups = weights, report, groups
        self._present = list[OptimizerGroup]()  # all groups in the last step
        self._rules, self._optimizers = {id(own): rule for rule, own in rules}, [own for _, own in rules]
        self._names = {id(p): name for name, p in setup.net.named_parameters()}
        self._groups = {id(own): groups_of(own, rule, self._names) for rule, own in rules}
        self._hooks: list[Any] = []
        self._step = StepInProgress()
        self._inside: list[Optimizer] = []  # optimizers inside whose step() the loop is
        self._last_gradient: Tensor | None = None  # gradient of the step before, which the last check may need
        self._spare: Tensor | None = None  # the gradient before that, to overwrite, because new memory costs more
        # passes that the loop is inside of, each with the parts of its record
        self._begun: list[tuple[CapturedForward, dict[str, Any]] | None] = []
        self._shapes = dict[torch.Size, Tensor]()  # shapes of the targets of the last passes, by the rows' shapes
        self._versions = list[int]()  # write counts when a pass last found the last step's weights
        self._parts, self._modes = [*setup.net.modules()], (list[bool](), torch.empty(0, dtype=torch.bool))
        self._arrived = ArrivedGradient(setup.model, setup.live.parameters)
        self.other_optimizer = ""  # description of another optimizer that stepped
        self._statistics = setup.model.statistics_of(setup.net)  # after the last pass; only passes may change them
        with as_written(setup.net) as self._autocast:  # it begins inside a pass
            pass

    @property
    def num_announced(self) -> int:
        """Number of batches that wait for their step, without those with infinite gradients, which have no step."""
        if not all(map(is_finite, self._present_gradients())):
            return 0  # a GradScaler skips such a step
        return sum(not batch.is_void for batch in self._step.announced)

    @property
    def _passes(self) -> list[CapturedForward]:
        """The passes since the last step, in their order."""
        taken = (forward for batch in self._step.announced for forward in batch.forwards)
        return sorted([*taken, *self._step.waiting], key=lambda forward: forward.position)

    @property
    def is_unmoved(self) -> bool:
        """Whether a pass since the last step found that step's weights, and torch has not written to them since."""
        return bool(self._step.waiting) and self._versions == self.setup.live.versions()

    @property
    def has_moved_between_passes(self) -> bool:
        """Whether passes since the last step saw different weights, as in a step of SAM."""
        return len({forward.record.weights is None for forward in self._passes}) == 2

    def first_state(self) -> tuple[Float[Tensor, " P"], Float[Tensor, " Q"] | None]:
        """Return weights and moving statistics that the first pass since the last step found, or the present ones."""
        setup, first = self.setup, next(iter(self._passes), None)
        if first is None:
            return setup.weights(), setup.statistics()
        return self._weights() if first.record.weights is None else first.record.weights, first.statistics

    def take_up(self, w: Float[Tensor, " P"], statistics: Float[Tensor, " Q"] | None) -> None:
        """Accept weights and statistics that the loop moved without a gradient as those of the last step."""
        for forward in self._step.waiting:
            if forward.record.weights is not None and torch.equal(forward.record.weights, w):
                forward.record = replace(forward.record, weights=None)
        if not self._step.waiting and statistics is not None:
            self._statistics = statistics

    def start(self) -> None:
        """Register the hooks."""
        net = self.setup.net
        hidden: Any = torch.compiler.disable  # hidden from a compiled loop, network or step
        for optimizer in self._optimizers:
            self._hooks.append(optimizer.register_step_pre_hook(hidden(self._before_step)))
            self._hooks.append(optimizer.register_step_post_hook(hidden(self._after_step)))
        self._hooks.append(self._called.register_forward_pre_hook(hidden(self._before_forward), with_kwargs=True))
        self._hooks.append(self._called.register_forward_hook(hidden(self._after_forward), with_kwargs=True))
        with _LOCK:
            if not _LISTENING:
                _LISTENING.append(register_optimizer_step_post_hook(hidden(_tell_listeners)))
        _LISTENERS.append(self)
        self._statistics = self.setup.model.statistics_of(net)

    def _present_statistics(self) -> Float[Tensor, " Q"]:
        model = self.setup.model
        return model.statistics_of(self.setup.net) if model.statistics else self._statistics

    def stop(self) -> None:
        """Remove the hooks; observations are kept, because the last step may not be complete yet."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self in _LISTENERS:
            _LISTENERS.remove(self)

    def announce(self, indices: object, weight: object, index: int, targets: Tensor | None = None) -> None:
        """Add a batch to the next step, whose number is `index`; see `Recorder.batch`.

        Raises:
            TypeError: The indices are not integers, or the weight is neither a number nor a tensor.
            ValueError: The batch is empty, an index is out of range, or the weight does not fit or is not finite.
        """
        setup, may_be_outside = self.setup, isinstance(self.setup.loss, UnstatedLoss)
        if indices is not None and setup.stream is not None:
            raise ValueError("recorder.batch(targets=y) of a Stream, whose rows number themselves, gets no indices.")
        num_points = len(setup.X)
        batch = None if indices is None else parse_batch(indices, num_points, index, -1 if may_be_outside else 0)
        if setup.stream is not None:
            num_points = self._num_waiting_rows() if targets is None else len(targets)
        samples = torch.arange(num_points) if batch is None else batch.cpu()
        factor = None if weight is None else parse_weight(weight, len(samples), index)
        if targets is not None and setup.stream is None:
            targets = parse_batch_targets(setup.loss, targets, setup.y, len(samples), setup.fingerprint.shape[1])
        self._step.announced.append(AnnouncedBatch(batch, samples, factor, self.num_passes, targets=targets))
        if not len(samples):  # a Poisson sampler may draw none: one row without weight and pass replaces them
            row = torch.zeros(1, dtype=torch.int64)
            self._step.announced[-1] = AnnouncedBatch(row, row, 0.0, -1)
        if isinstance(self._optimizers[0], NoOptimizer):
            self._step.before = self._optimizers[0].keep(dict(setup.net.named_parameters()))

    def _num_waiting_rows(self) -> int:
        """Count the rows of a stream, in passes with a backward pass, that no batch has taken.

        Raises:
            ValueError: There are none, or the loss needs their targets.
        """
        self._assign_forwards()
        count = sum(len(f.inputs) for f in self._step.waiting if f.sent)
        if not isinstance(self.setup.loss, UnstatedLoss) or not count:
            raise ValueError(
                "recorder.batch(targets=y) of a Stream must get the targets of the rows, after backward(): got none."
            )
        return count

    def complete(self) -> None:
        """Report the optimizers' joint step, if they have made one."""
        first = self._optimizers[0]
        if self._step.announced and not self._step.stepped and isinstance(first, NoOptimizer) and first.has_moved():
            self._after_step(first, (), {})
        if not self._step.announced and not self._step.gradients:  # no weight had a gradient: no step was made
            self._step.stepped = []
        if not self._step.stepped:
            return
        self.other_optimizer = ""
        self._assign_forwards()
        for batch in self._step.announced:  # inside step(closure) the gradient belongs to a pass at other weights
            later = [f for f in self._step.waiting if f.record.weights is not None and f.position > batch.position]
            if later := self._last_with_rows(later, batch, sum(len(f.inputs) for f in batch.forwards)):
                batch.forwards, batch.is_void = later, False
        self._step.announced = [batch for batch in self._step.announced if not batch.is_void]
        model, stream, (unseen, is_enough) = self.setup.model, self.setup.stream, self._unseen_calls()
        if stream is not None and is_enough:
            for batch in self._step.announced:
                rows = torch.cat([forward.inputs for forward in batch.forwards])
                batch.indices = batch.samples = self.setup.number(rows, batch.targets, stream)
        zeros = dict[str, Tensor]()
        if len(self._step.gradients) < len(model.names):
            named = model.unflatten(self._weights()).items()
            zeros = {name: torch.zeros_like(weight) for name, weight in named if name not in self._step.gradients}
        present, before = [group for groups in self._groups.values() for group in groups], self._last_groups
        if present != self._present:
            self._present, self._last_groups = present, tuple(group.of_scale() for group in present)
        memory, self._spare = (None if model.num_weights <= FEW_WEIGHTS else self._spare), None
        gradient = model.flatten({**zeros, **self._step.gradients}, memory)
        made = MadeStep(
            rates=self._step.rates,
            announced=self._step.announced,
            gradient=gradient,
            arrived=self._arrived.take(gradient, zeros.keys()),
            without_gradient={*model.names} - self._step.gradients.keys(),
            linear=self._step.joint or [self._step.coefficients.get(name, NO_UPDATE) for name in model.names],
            sizes=model.sizes,
            groups=None if before is self._last_groups or before == self._last_groups else self._last_groups,
            options=[group.options for group in present],
            unseen=unseen,
            is_seen_enough=is_enough,
            others=[forward for forward in self._step.waiting if forward.sent],
            has_left_over=self._step.has_left_over,
        )
        self._step = StepInProgress()
        self._report(made)
        self._spare, self._last_gradient = self._last_gradient, made.gradient

    def _unseen_calls(self) -> tuple[str | None, bool]:
        """Describe the calls that were seen if a batch has no pass, and return whether the step can do without."""
        missing = next((batch for batch in self._step.announced if not batch.forwards), None)
        if missing is None:
            return None, True
        others = [batch.samples for batch in self._step.announced if batch.forwards and self.setup.stream is None]
        if any(torch.equal(samples, missing.samples) for samples in others):
            return "recorder.batch() was called twice for one forward pass, and must be called once for each", False
        calls = [f"one on inputs of shape {', '.join(map(str, shapes))}" for shapes in self._step.calls]
        unseen = (
            f"no call of the network on the batch's rows was seen, but {' and '.join(calls) or 'none'}: call "
            "the network itself, net(X), not its parts or net.forward(X), on rows as X holds them (padded like X), "
            "and announce the rows that it saw (IndexedDataset gives those of a DataLoader; None means all of X)"
        )
        if self.setup.stream is not None or isinstance(self.setup.loss, UnstatedLoss):
            return f"rows of a stream or without a stated loss must be seen: {unseen}", False
        return unseen, True

    def statistics(self) -> Float[Tensor, " Q"]:
        """Return the present moving statistics.

        Raises:
            StepMismatchError: They were changed by something other than a forward pass.
        """
        present = self._present_statistics()
        if present is not self._statistics and not torch.equal(present, self._statistics):
            raise StepMismatchError(
                "moving statistics must be moved by the network's forward passes alone: they were changed in another "
                "way. Leave them as they are, and call the network itself, net(X), not its parts or net.forward(X), "
                "which is not seen; a normalisation inside torch.utils.checkpoint moves them once more in the backward "
                "pass: take it out of the checkpoint, or put it in evaluation mode."
            )
        return present

    def _assign_forwards(self) -> None:
        """Find the forward passes of each announced batch, and remove them from the waiting ones.

        A batch is announced after its backward pass, so its pass is the last one before the announcement with as many
        rows, or the last ones that have as many rows together; if there are more passes than batches, among those with
        its own rows. A batch that is announced before its pass takes the first that fits. A pass of a graph has one row
        per node.
        """
        for batch in reversed([batch for batch in self._step.announced if not batch.forwards and batch.position >= 0]):
            rows = (self.setup.X if self.setup.model.signature.graph is not None else batch.samples).shape[0]
            earlier = [forward for forward in self._step.waiting if forward.position <= batch.position]
            batch.forwards = self._last_with_rows(earlier, batch, rows)
            if not batch.forwards:
                batch.forwards = self._last_with_rows(self._step.waiting[::-1], batch, rows)[::-1]
            self._step.waiting = [forward for forward in self._step.waiting if forward not in batch.forwards]

    def _last_with_rows(
        self, forwards: list[CapturedForward], batch: AnnouncedBatch, num_rows: int
    ) -> list[CapturedForward]:
        """Return the last pass of a batch's rows, or the last passes with as many rows together; else nothing."""
        whole = [forward for forward in forwards if forward.inputs.shape[0] == num_rows]
        if whole := [forward for forward in whole if forward.sent] or whole:
            own = sum(not b.forwards and b.samples.numel() == batch.samples.numel() for b in self._step.announced)
            if len(whole) > max(own, 1) and self.setup.stream is None:  # more passes than batches
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
        """Find out whether gradients were cleared since a batch was announced, or left over from an earlier step."""
        has_gradient = any(bool(g.any()) for g in self._present_gradients())
        if not has_gradient and not self._step.announced and not any(f.sent for f in self._step.waiting):
            return
        self._step.has_left_over |= is_backward and has_gradient and not self._step.has_added
        # the sent gradient has been cleared; if none was sent, the loss is 0
        seen = [] if has_gradient else self._passes
        cleared = [f for f in seen if f.returned is None or any(bool(g.any()) for g in f.sent.values())]
        for batch in self._step.announced:
            batch.is_void |= any(forward in cleared for forward in batch.forwards)
        for forward in self._passes if is_backward else ():
            if forward in cleared or not self._step.has_added:
                forward.sent, forward.stray = {}, None

    def _counts(self) -> bool:
        """Return whether a backward pass adds to the weights' gradients, or none in this step does, as by hand."""
        if self._step.has_added and torch._C._current_graph_task_id() == self._step.last_backward:
            return True
        held = (p for o in self._optimizers for group in o.param_groups for p in group["params"] if p.requires_grad)
        nodes, adds = (torch.autograd.graph.get_gradient_edge(p).node for p in held), False
        with suppress(RuntimeError):  # from `torch.autograd.grad`, which returns the weights' gradients
            adds = any(map(torch._C._will_engine_execute_node, nodes))
        if adds and (number := torch._C._current_graph_task_id()) > self._step.last_backward:
            self._look_at_gradients()
            self._step.has_added, self._step.last_backward = True, number
            self._arrived.keep_after_backward(self._step.gradients)
        return adds or not self._step.has_added

    def _present_gradients(self) -> Iterator[Tensor]:
        held = (p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"])
        gradients = (p.grad for p in held if p.grad is not None)
        return (g.coalesce().values() if g.is_sparse else g for g in gradients)

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not torch.is_grad_enabled() or self.setup.live.parameters() is None:
            # functional_call replaces them by others
            self._begun.append(None)
            return
        self.complete()
        self._assign_forwards()
        self._look_at_gradients(is_backward=False)
        weights = None if self.setup.live.are(self._weights()) else self.setup.weights()
        self._versions = self.setup.live.versions() if weights is None else []
        setup, model, device = self.setup, self.setup.model, self.setup.model.spec.device
        graph, difference = model.signature.graph, None
        if graph is not None:
            values = arguments_of_call(list(graph.tensors), args, kwargs, setup.net.forward)
            difference = "it was called with other arguments"
            if values is not None:
                difference = graph.difference(dict(zip(graph.tensors, values, strict=True)))
        rows = model.signature.pack_call(args, kwargs, setup.net.forward) if graph is None else setup.X
        shapes = [tuple(value.shape) for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        self._step.calls = [*self._step.calls[-2:], shapes]
        if rows is None:
            self._begun.append(None)
            return
        inputs, statistics = rows.detach().clone(), self._present_statistics()
        is_mixed = torch.is_autocast_enabled(device.type)
        record = {
            "num_rows": inputs.shape[0],
            "random_state": torch.random.get_rng_state(),
            "device_random_state": device_random_state(device),
            "autocast": torch.get_autocast_dtype(device.type) if is_mixed else self._autocast,
            "memory_order": memory_order(inputs) if model.signature.layout is None else None,
            "weights": weights,
            "settings": setup.changed_settings(),
        }
        modes = [part.training for part in self._parts]
        if modes != self._modes[0]:
            self._modes = modes, torch.tensor(modes)
        own = inputs, self._modes[1], statistics, statistics, _UNKNOWN, difference
        self._begun.append((CapturedForward(*own, num_arguments=len(args) + len(kwargs)), record))

    def _after_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], returned: Any) -> Any:
        """Take the result of a pass; the loop continues with aliases if the result has several tensors of rows."""
        setup = self.setup
        self.num_passes += 1
        self._statistics = self._present_statistics()
        begun = self._begun.pop() if self._begun else None
        if begun is None:
            return None
        forward, record = begun
        forward.statistics_after, forward.position = self._statistics, self.num_passes
        forward.random_states_after = torch.random.get_rng_state(), device_random_state(setup.model.spec.device)
        for name, after in zip(("random_state", "device_random_state"), forward.random_states_after, strict=True):
            if after is not None and torch.equal(record[name], after):  # the pass drew no random numbers
                record[name] = None
        forward.record = ForwardPass(**record)
        self._step.waiting = [*self._step.waiting[-_MAX_WAITING + 1 :], forward]
        if not isinstance(setup.loss, UnstatedLoss):
            value = loss_input(setup.model.signature, setup.loss, returned, self._targets_of(forward.inputs))
            # one value per row is (n, 1) for the loss, but the loop continues with the tensor that the network returned
            source = returned if isinstance(returned, Tensor) and returned.ndim == 1 else value
            places = [z is source and has_rows(z, forward.inputs.shape[0]) for z in tensors_of(returned)]
            if any(places):
                forward.outputs, forward.place = value.detach(), places.index(True)
        return forward.watch(returned, self._counts)

    def _targets_of(self, inputs: Shaped[Tensor, "n ..."]) -> Shaped[Tensor, "n ..."]:
        """Return a tensor with the shape of possible targets of the rows; its entries have no meaning."""
        if inputs.shape not in self._shapes:
            setup, targets = self.setup, self.setup.y.new_empty(len(inputs), *self.setup.y.shape[1:])
            self._shapes = {inputs.shape: targets_like(setup.model.signature, setup.loss, setup.X, inputs, targets)[0]}
        return self._shapes[inputs.shape]

    def note_step(self, optimizer: Optimizer) -> None:
        """Note the step of an optimizer unknown to the recorder, if it holds recorded weights."""
        held = (self._names.get(id(p)) for group in optimizer.param_groups for p in group["params"])
        is_other = not self._step.stepped and id(optimizer) not in self._rules
        if is_other and not {*self.setup.model.names}.isdisjoint(held):
            kind = type(optimizer).__name__
            self.other_optimizer = f"Another {kind} stepped: pass the recorder both, or end it and record the new one."

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:  # torch's hook signature
        """Read an optimizer's state before its step, and again when its closure has computed the gradient."""
        self._inside.append(optimizer)
        if sum(each is optimizer for each in self._inside) > 1:
            return None  # a class may call its parent's step()
        if any(stepped is optimizer for stepped in self._step.stepped):
            self.complete()
        needs_before = self.setup.update_rule.needs_before
        held = [p for group in optimizer.param_groups for p in group["params"]]
        own = {self._names[id(p)]: p for p in held if id(p) in self._names}
        self._step.before = states_before(optimizer, own, needs_before)
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is None or GRADIENT not in needs_before:
            return None

        def watched() -> Any:
            value = closure()
            self._step.before = states_before(optimizer, own, needs_before)
            return value

        return ((args[0], watched, *args[2:]), kwargs) if len(args) > 1 else (args, {**kwargs, "closure": watched})

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # torch's hook signature
        """Read gradients and coefficients from an optimizer, right after it has stepped.

        Its groups are read now, because its options may change before others step.
        """
        del self._inside[-1:]
        if any(each is optimizer for each in self._inside):
            return
        self._groups[id(optimizer)] = groups_of(optimizer, self._rules[id(optimizer)], self._names)
        if (joint := self._joint_coefficients(optimizer)) is not None:
            params = optimizer.param_groups[0]["params"]
            self._step.joint = joint
            self._step.gradients = dict(zip(self.setup.model.names, [p.grad for p in params], strict=True))
        else:
            self._read_parameters(optimizer)
        rates = (group.get("lr") for group in optimizer.param_groups)
        self._step.rates += [math.nan if rate is None else float(rate) for rate in rates]
        self._step.stepped.append(optimizer)
        if len(self._step.stepped) == len(self._optimizers):
            self.complete()

    def _joint_coefficients(self, optimizer: Optimizer) -> LinearStep | None:
        """Return the coefficients of all weights together, if one group holds them all and a rule reads entries."""
        rule, params, before = self.setup.update_rule, optimizer.param_groups[0]["params"], self._step.before
        if rule.of_entries is None or not self._are_all(optimizer) or self.setup.model.num_weights > _FEW_ENOUGH:
            return None
        states, first = [optimizer.state.get(p, {}) for p in params], next(iter(before.values()))
        is_alike = all(own.keys() == states[0].keys() for own in states)
        is_alike = is_alike and [*before.values()].count(first) == len(params)
        if not is_alike or any(p.grad is None or p.grad.is_sparse or not p.requires_grad for p in params):
            return None
        state: dict[str, Any] = dict.fromkeys(states[0])
        for name in state:
            values = [own[name] for own in states]
            if name in rule.of_entries:
                state[name] = flattened(values)
            elif all(not isinstance(value, Tensor) or not value.ndim for value in values):
                state[name] = values[0]
                if any(value != values[0] for value in values):
                    return None
        return rule.coefficients(params[0], optimizer.param_groups[0], first, state)

    def _are_all(self, optimizer: Optimizer) -> bool:
        """Return whether the only group of the only optimizer holds the recorded parameters, in their order."""
        params, present = optimizer.param_groups[0]["params"], self.setup.live.parameters()
        is_only = len(self._optimizers) == len(optimizer.param_groups) == 1
        return is_only and present is not None and 1 < len(params) == len(present) and all(map(is_, params, present))

    def _read_parameters(self, optimizer: Optimizer) -> None:
        """Read gradients and coefficients of an optimizer's parameters one by one."""
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        if groups.keys() - self._names.keys():  # parameters of another network, or new ones
            self._names = {id(p): name for name, p in self.setup.net.named_parameters()}
        model, rule = self.setup.model, self.setup.update_rule
        weights = model.unflatten(self._weights()) if WEIGHTS in rule.needs_before else {}
        for parameter in (p for group in optimizer.param_groups for p in group["params"] if id(p) in self._names):
            name = self._names[id(parameter)]
            before = dict(self._step.before.get(name, {}))
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
                self._step.gradients[name] = g.clone() if len(self._optimizers) > 1 else g
            else:
                linear = replace(linear, grad_scale=0.0)
            self._step.coefficients[name] = linear


def _tell_listeners(optimizer: Optimizer, args: Any, kwargs: Any) -> None:  # torch's hook signature
    """Tell all observers of an optimizer's step."""
    for own in [*_LISTENERS]:
        own.note_step(optimizer)
