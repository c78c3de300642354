"""The trajectory: a read-only view of a recorded run."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property, partial
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from epk_gp.core import losses
from epk_gp.core.checks import validate_count, validate_finite, validate_has_values, validate_integer
from epk_gp.core.inputs import Inputs, validate_packed
from epk_gp.core.losses import Head, Loss, PerSampleLoss, UnstatedLoss, apply_head, own_input, resolve_head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import TensorSpec
from epk_gp.core.row_identity import RowIdentity
from epk_gp.core.show import Displayed, Entry, Summary, count, kind_of, warn_caller
from epk_gp.core.step import BEFORE, NOT_OF_DATA, LiveNetwork, Move, Step, not_following
from epk_gp.core.torch_overrides import disable_fused_attention, warn_unless_plain
from epk_gp.optimizers.torch_rules import OptimizerGroup
from epk_gp.optimizers.update_rules import Clip, UpdateCoefficients, relative_rounding

_NUM_COMPARED = 16  # training points whose outputs are compared with those of the user's network
BYTES = 64  # a cache line, and the widest register; torch allocates at multiples of it


def aligned(x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
    """Return a tensor whose memory begins at a multiple of 64 bytes: the given one, or a copy.

    Tensors made by other libraries, or views of rows of larger ones, begin at any address; their copies in another
    process begin at another one. Measured with MKL on AMD EPYC: 1,474 of 9 million entries of a Gram block differ in
    the last bit.
    """
    return x.clone() if x.device.type == "cpu" and x.data_ptr() % BYTES else x


@runtime_checkable
class States(Protocol):
    """Weight states w_0 .. w_S, each flat, (P,)."""

    def __len__(self) -> int:
        """Count the states, S + 1."""

    def __getitem__(self, state: int, /) -> Float[Tensor, " P"]:
        """Read one state."""


@runtime_checkable
class Updates(Protocol):
    """The update rule's coefficients of each step."""

    def __len__(self) -> int:
        """Count the steps, S."""

    def __getitem__(self, step: int, /) -> UpdateCoefficients:
        """Read one step's coefficients."""


def read_state(states: States, state: int, spec: TensorSpec) -> Float[Tensor, " P"]:
    """Read a state for a computation; states that depend on its dtype also have a method `at`."""
    read: Callable[[int, TensorSpec], Tensor] | None = getattr(states, "at", None)
    return states[state] if read is None else read(state, spec)


@dataclass(frozen=True, eq=False)
class FirstOf:
    """The first states, coefficients or digests of a run; other attributes are those of the whole sequence.

    Attributes:
        whole: The whole sequence.
        count: Length of this part.
        numbers: Numbers of the kept states, for a run that does not keep all.
    """

    whole: Any
    count: int
    numbers: tuple[int, ...] = ()

    def __len__(self) -> int:
        """Return the length."""
        return self.count

    def __getitem__(self, place: int) -> Any:
        """Read one item.

        Raises:
            IndexError: The run has no such state or step.
        """
        if not 0 <= place < self.count:
            raise IndexError(f"state or step must lie in 0..{self.count - 1}: got {place}.")
        return self.whole[place]

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the whole, such as its folder."""
        if name.startswith("__") or name == "whole":
            raise AttributeError(name)
        return getattr(self.whole, name)


@dataclass(frozen=True, eq=False)
class WeightAverage:
    """The relation of a trajectory to another one: its path is the average of the other's weights.

    Attributes:
        run: The recorded run, at whose weights the training gradients were taken.
        coefficients: The share a_s in [0, 1] of w_{s+1} in the average after step s.
        lead: The difference of the weights from the average when recording began; None if they were equal.
    """

    run: "Trajectory"
    coefficients: Float64[Tensor, " S"]
    lead: Float64[Tensor, " P"] | None = None


@dataclass(frozen=True, eq=False)
class Trajectory(Displayed):
    """A recorded training run w_0, .., w_S with its data, loss and update rule.

    Several threads may use one trajectory at once, and several processes may use one on disk: every call returns the
    same bytes as alone. Forward-mode derivatives (adaptive rules) are computed by one thread at a time.

    Attributes:
        model: The network as a function of its weights.
        inputs: Training inputs, (M, *input_shape). Several tensors are packed into one, (M, D): `pack` and `unpack`.
        targets: Training targets.
        loss: The loss whose gradients made the steps.
        update_rule: Name of the rule by which a step follows from the batch gradients.
        states: Flat weights of all S + 1 states.
        updates: The rule's coefficients of each of the S steps.
        steps: Learning rate and batch of each of the S steps.
        num_outputs: C.
        digest: blake2b over data, layout, weights and steps: equal for equal runs, in memory or on disk.
        data_digest: blake2b over inputs and targets.
        statistics: The moving statistics of all S + 1 states, each flat, (Q,); None for a network without them.
        unexplained: Share of a step that update rule and loss need not explain; None allows rounding only.
        average: The recorded run whose averaged weights `states` are; None where `states` are the trained weights.
        optimizer_groups: The optimizers' parameter groups; empty for a run recorded by an earlier version.
        clip: The gradient clipping that the loop stated (`clip=` of the recorder), if any.
        momentum: The momentum buffers when the recording began, second buffers last, for optimizers that had made steps
            before; None for new optimizers.
        digests: Digests of the run up to each of the S + 1 states; empty for a run recorded by an earlier version.
        recorded_steps: Number of steps of the longer recorded run from which this one was cut (`until`); 0 for a whole
            run.
        live: The user's network while it exists; None for a run that was not recorded in this process.
        asked_of: The recorded run, if this one has the network and inputs of a question (`autodiff.scalars`).
    """

    model: FunctionalModel
    inputs: Shaped[Tensor, "M ..."]
    targets: Shaped[Tensor, "_ ..."]  # M rows, unless the inputs are questions about the run
    loss: Loss
    update_rule: str
    states: States
    updates: Updates
    steps: tuple[Step, ...]
    num_outputs: int
    digest: str
    data_digest: str
    statistics: States | None = None
    unexplained: float | None = None
    average: WeightAverage | None = None
    optimizer_groups: tuple[OptimizerGroup, ...] = ()
    clip: Clip | None = None
    momentum: Float[Tensor, " B"] | None = None
    digests: Sequence[str] = ()
    recorded_steps: int = 0
    live: LiveNetwork | None = None
    asked_of: "Trajectory | None" = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the pickled form, with copies of tensors that lie in a recorder's arena, whose blocks are large."""
        if (recorded := self.asked_of) is not None:  # the recorded run has the rest
            own = {entry.name: getattr(self, entry.name) for entry in fields(self)}
            return {name: value for name, value in own.items() if value is not getattr(recorded, name)}
        state = self.__dict__.copy() | {"live": None}  # in one operation, as another thread may add the cached property
        for name in [name for name, value in vars(type(self)).items() if isinstance(value, cached_property)]:
            state.pop(name, None)  # computed again
        for name in ("states", "statistics"):
            if isinstance(state[name], tuple):
                clones = {id(value): value.clone() for value in state[name]}  # a repeated state stays one tensor
                state[name] = tuple(clones[id(value)] for value in state[name])
        if isinstance(self.updates, tuple):
            state["updates"] = tuple(update.map(Tensor.clone) for update in self.updates)
        state["steps"] = tuple(step.map(Tensor.clone) for step in self.steps)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the run."""
        vars(self).update(vars(state["asked_of"]) | state if state.get("asked_of") else state)

    @property
    def recorded(self) -> "Trajectory":
        """The recorded run: the trajectory itself, or the run that a question is about."""
        return self if self.asked_of is None else self.asked_of

    @property
    def trained(self) -> "Trajectory":
        """The recorded run: the trajectory itself, or the run whose average it is."""
        return self if self.average is None else self.average.run

    @property
    def num_steps(self) -> int:
        """Number S of steps."""
        return len(self.steps)

    @property
    def num_weights(self) -> int:
        """Number P of weights."""
        return self.model.num_weights

    @property
    def num_points(self) -> int:
        """Number M of training points."""
        return self.inputs.shape[0]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.inputs.shape[1:])

    @cached_property
    def dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return self.states[0].dtype

    @property
    def device(self) -> torch.device:
        """Device of the training inputs."""
        return self.inputs.device

    @property
    def explained(self) -> str:
        """A description of the state of the explained network."""
        made = f"step {self.num_steps:,} of {max(self.num_steps, self.recorded_steps):,}"
        return f"weights after {made}" if self.average is None else f"the average of the weights up to {made}"

    def until(self, step: int) -> "Trajectory":
        """Return the run up to a state, so that results explain that network, such as the best checkpoint.

        Nothing is copied. The digest is that of a run recorded only up to this state.

        Args:
            step: Number of steps s of the run, 0 .. S; the last state is w_s, after s steps.

        Raises:
            TypeError: The number is not an integer.
            ValueError: The run has fewer steps.
        """
        validate_count(step, "step", minimum=0)
        if step > self.num_steps:
            raise ValueError(f"step must be at most the run's {self.num_steps} steps: got {step}.")
        if step == self.num_steps:
            return self

        def first(entries: Any, number: int) -> Any:
            return entries[:number] if isinstance(entries, tuple) else FirstOf(entries, number)

        derived = hashlib.blake2b(f"{self.digest} until {step}".encode(), digest_size=16).hexdigest()
        run = replace(
            self,
            states=first(self.states, step + 1),
            updates=first(self.updates, step),
            statistics=None if self.statistics is None else first(self.statistics, step + 1),
            steps=self.steps[:step],
            digest=self.digests[step] if self.digests else derived,
            digests=self.digests[: step + 1],
            recorded_steps=max(self.num_steps, self.recorded_steps),
        )
        # averages and recomputed states depend on others
        follow: Callable[[Trajectory], Trajectory] | None = getattr(self.states, "until", None)
        return run if follow is None else follow(run)

    @cached_property
    def moves(self) -> Mapping[int, Move]:
        """The moves without a gradient, by the number of the step that they follow, ascending."""
        return {step.index: step.move for step in self.steps if step.move is not None}

    def with_move(self, step: Step, w: Float[Tensor, " P"], d: Float[Tensor, " P"]) -> Float[Tensor, " P"]:
        """Return the whole change of the weights w in a step: the optimizer's change d, and the step's move."""
        if step.move is None:
            return d
        return torch.lerp(d, flat_weights(self, step.move.anchor, w) - w, step.move.share)

    @cached_property
    def is_vanilla_gd(self) -> bool:
        """Whether every step is -eps_s times the batch gradient, with one eps_s for all weights.

        The gradient is then the one of the network in evaluation mode on the recorded data.
        """
        is_other = self.average is not None or self.statistics is not None
        if is_other or self.moves or any(step.passes for step in self.steps):
            return False
        coefficients = (held_coefficients(self, s) for s in range(self.num_steps))
        return not getattr(self.updates, "is_scaled", False) and not any(
            u.has_matrices
            or any(bool(value.any()) for value in (u.momentum_lr, u.weight_decay, u.decoupled_decay))
            or any(bool((value != value[0]).any()) for value in (u.lr, u.grad_scale))
            for u in coefficients
        )

    @cached_property
    def has_momentum(self) -> bool:
        """Whether the steps use a buffer of earlier gradients."""
        updates = (held_coefficients(self, s) for s in range(self.num_steps))
        return any(bool(u.second or (u.momentum_lr.any() and u.beta.any())) for u in updates)

    @cached_property
    def loss_takes_outputs(self) -> bool:
        """Whether the loss depends on the network only through its outputs (n, C), not on other parts of its result."""
        model = self.model_for(self.inputs)
        if model.signature.output is None:
            return True
        with torch.no_grad():
            returned = model.returned(model.unflatten(flat_state(self, 0, self.inputs)), self.inputs[:1])
        return own_input(self.loss, returned, self.targets[:1]) is None

    @cached_property
    def identity_finding(self) -> str | None:
        """The reason that names may belong to other samples; None if the recorded rows and targets confirm them.

        It follows from the rows that the network saw, where they differ from X (`epk_gp.core.step`).
        """
        return RowIdentity(self.inputs, self.targets, self.loss).finding(self.trained.steps)

    @cached_property
    def sources(self) -> tuple[str, ...]:
        """Names of contributions to predictions other than training points, decay and statistics."""
        batches = (step.batch for step in self.trained.steps if step.batch is not None)
        outside = (NOT_OF_DATA,) if any(bool((batch < 0).any()) for batch in batches) else ()
        is_new = self.trained.momentum is None and (self.average is None or self.average.lead is None)
        return outside if is_new else (*outside, BEFORE)

    def pack(self, X: Inputs) -> Shaped[Tensor, "n ..."]:
        """Pack inputs with the structure of the training inputs into one tensor, the engine's form.

        Every function that takes inputs does this itself. A single tensor is returned unchanged.

        Raises:
            TypeError, ValueError: The network cannot take the inputs.
        """
        return parse_inputs(self, X)

    def unpack(self, X: Shaped[Tensor, "n ..."]) -> Inputs:
        """Return packed inputs in the structure of the training inputs: a tensor, a tuple or a dictionary."""
        return self.model.signature.structure(X)

    def model_for(self, X: Shaped[Tensor, "..."]) -> FunctionalModel:
        """Return the network in the dtype and on the device of a computation on X (`FunctionalModel.spec_for`)."""
        return self.model.variant(self.model.spec_for(X))

    @property
    def step_sizes(self) -> Float[Tensor, " S"]:
        """The learning rates eps_s, float64."""
        return torch.tensor([step.lr for step in self.steps], dtype=torch.float64)

    def weights(self, s: int) -> dict[str, Tensor]:
        """Return the weights and moving statistics of state s by name (0 .. S; negative counts from the end).

        Raises:
            IndexError: There is no such state.
        """
        validate_integer(s, "state")
        count = self.num_steps + 1
        if not -count <= s < count:
            raise IndexError(f"state must lie in 0..{self.num_steps} (or be negative): got {s}.")
        return self.model.unflatten(_joined(self, s % count, self.model.spec).to(self.device, copy=True))

    def __repr__(self) -> str:
        """Describe the run in one line, without reading a state."""
        return (
            f"Trajectory({self.num_steps} steps, {self.num_weights} weights, {self.num_points} training points of "
            f"shape {self.input_shape}, {self.num_outputs} outputs, {self.model.spec.dtype}, {self.loss}, "
            f"digest {self.digest[:12]})"
        )

    def _summary(self) -> Summary:
        model, folder = self.model, getattr(self.trained.states, "path", None)
        moving = f" and {count(model.num_statistics, 'moving statistic')}" if model.statistics else ""
        loss = f"{self.loss.name}, a function" if isinstance(self.loss, PerSampleLoss) else str(self.loss)
        accepted = "" if self.unexplained is None else f"up to {self.unexplained:g} of a step may be unexplained"
        rows = "" if isinstance(self.loss, UnstatedLoss) else not_following(self.trained.steps)
        average = () if self.average is None else (Entry("weights", "the average of the trained weights"),)
        return Summary(
            f"Trajectory of {count(self.num_steps, 'step')} with {count(self.num_points, 'training point')}",
            (
                Entry("network", f"{type(model.module).__name__}, {count(self.num_outputs, 'output')}"),
                Entry("parameters", f"{count(model.num_weights, 'weight')}{moving}", kind_of(model.spec)),
                *average,
                Entry("inputs", f"{tuple(self.inputs.shape)}", kind_of(self.inputs)),
                Entry("targets", f"{tuple(self.targets.shape)}", kind_of(self.targets)),
                Entry("loss", loss, rows and f"not followed in {rows}"),
                Entry("update rule", self.update_rule, accepted),
                Entry("steps", f"{len(self.steps):,}", self._described_steps()),
                *([] if self.identity_finding is None else [Entry("indices", self.identity_finding)]),
                Entry("explains", self.explained),
                Entry("states", f"{len(self.states):,}", "in memory" if folder is None else f"in {folder}"),
                Entry("digest", self.digest),
            ),
        )

    def _described_steps(self) -> str:
        """Describe the sizes of the batches, and the learning rates."""
        if not self.steps:
            return ""
        sizes = [self.num_points if step.batch is None else len(step.batch) for step in self.steps]
        low, high, first, last = min(sizes), max(sizes), *(f(step.lr for step in self.steps) for f in (min, max))
        rows = f"{low:,}" if low == high else f"{low:,} to {high:,}"
        return f"batches of {rows}, learning rate {first:.4g}" + ("" if first == last else f" to {last:.4g}")


def validate_trajectory(trajectory: object) -> None:
    """Raise if an object is not a recorded run.

    Raises:
        TypeError: The object is not a `Trajectory`.
    """
    if not isinstance(trajectory, Trajectory):
        raise TypeError(
            f"trajectory must be an epk_gp.Trajectory: got {type(trajectory).__name__}. Pass "
            "`trajectory` of a Recorder or callback, `trajectory_` of an estimator, or load_trajectory(folder, net)."
        )


def parse_inputs(trajectory: Trajectory, X: Inputs, name: str = "X") -> Shaped[Tensor, "n ..."]:
    """Return inputs as one tensor: several inputs are packed, packed ones stay unchanged.

    Raises:
        TypeError: X is not a dense tensor, or it holds integers for a network of floats (or the reverse).
        ValueError: X has the wrong shape or structure, holds no points, or holds NaN or infinity.
    """
    validate_trajectory(trajectory)
    signature, kind = trajectory.model.signature, trajectory.inputs.dtype
    packed = signature.pack(X, name)
    if packed.layout != torch.strided:
        raise TypeError(f"{name} must be a dense tensor: got {packed.layout}. Convert it with {name}.to_dense().")
    if tuple(packed.shape[1:]) != trajectory.input_shape or packed.ndim == 0:
        raise ValueError(
            f"{name} must have shape (n, {', '.join(map(str, trajectory.input_shape))}) like the training inputs: "
            f"got {tuple(packed.shape)}."
        )
    validate_has_values(packed, name)
    if len(packed) == 0:
        raise ValueError(f"{name} must hold at least one point: got an empty batch.")
    if packed.is_floating_point() != kind.is_floating_point or packed.is_complex():
        raise TypeError(f"{name} must be of the training inputs' kind ({kind}): got {packed.dtype}.")
    if packed.is_floating_point() and packed.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"{name} must be float32 or float64: got {packed.dtype}.")
    validate_finite(packed, name)
    if signature.layout is not None:
        validate_packed(signature.layout, packed, name)
    return packed


def has_coarse_steps(trajectory: Trajectory) -> bool:
    """Return whether the run accepts inexact steps, or computed gradients in lower precision."""
    passes = (forward for step in trajectory.steps for forward in step.passes)
    return trajectory.unexplained is not None or any(forward.autocast is not None for forward in passes)


def flat_weights(trajectory: Trajectory, state: int, reference: Shaped[Tensor, "..."]) -> Float[Tensor, " P"]:
    """Read a state's flat weights in the dtype and on the device of a computation on `reference`."""
    spec = trajectory.model.spec_for(reference)
    return aligned(read_state(trajectory.states, state, spec).to(dtype=spec.dtype, device=spec.device))


def flat_state(trajectory: Trajectory, state: int, reference: Shaped[Tensor, "..."]) -> Float[Tensor, " PQ"]:
    """Read a state of the path, P weights and then Q moving statistics, as `flat_weights` reads the weights."""
    spec = trajectory.model.spec_for(reference)
    return aligned(_joined(trajectory, state, spec).to(dtype=spec.dtype, device=spec.device))


def _joined(trajectory: Trajectory, state: int, spec: TensorSpec) -> Tensor:
    w = read_state(trajectory.states, state, spec)
    return w if trajectory.statistics is None else torch.cat([w, trajectory.statistics[state].to(w)])


def warn_unless_live(trajectory: Trajectory) -> None:
    """Warn if the user's network differs from the explained one, which was not requested explicitly."""
    live, model, S = trajectory.live, trajectory.model, trajectory.num_steps
    net = None if live is None else live.network()
    if live is None or net is None:
        return
    explained, P = _joined(trajectory, S, model.spec).to(model.spec.device), model.num_weights
    try:
        w = model.weights_of(net)
        present = torch.cat([w, model.statistics_of(net).to(w)])
    except (AttributeError, RuntimeError):  # its parameters now have other names or shapes, or several dtypes
        return
    named, changed = {**dict(net.named_parameters()), **dict(net.named_buffers())}, dict[str, Tensor]()
    for name, recorded in model.frozen_state().items():
        now = named.get(name, recorded).detach().to(recorded)
        if now.shape == recorded.shape and not name.endswith("num_batches_tracked") and not torch.equal(now, recorded):
            changed[name] = now
    if present.shape != explained.shape or (not changed and torch.equal(explained.to(present), present)):
        return
    b, states = trajectory.trained.statistics, live.samples.equal_to(present[:P])
    states = [s for s in states if b is None or s > S or torch.equal(b[s].to(present), present[P:])]
    known = {S} if hasattr(trajectory.states, "at") else set[int]()  # computed states are exact only up to rounding
    if trajectory.average is not None or trajectory.recorded_steps > S:  # the network belongs to the whole run
        known.add(max(S, trajectory.recorded_steps))
    if not changed and not known.isdisjoint(states):
        return
    rows = trajectory.inputs[:_NUM_COMPARED]
    with torch.no_grad(), disable_fused_attention():
        z = model(model.unflatten(explained), rows)
        yours = model({**model.unflatten(present.to(explained)), **changed}, rows)
    difference = float((z - yours).abs().max())
    if difference <= relative_rounding(model.spec.dtype) * float(z.abs().max()):
        return
    advice = "Record further, or explain the network after an earlier step with trajectory.until(step)"
    if "ScheduleFree" in trajectory.update_rule:
        advice = "In optimizer.eval() it is an average: schedule_free_average(run) of epk_gp.core.states"
    if changed:
        advice = f"Frozen weights or buffers were changed: {', '.join(changed)}"
    elif states:
        call = "trajectory.until" if states[0] <= S else "recorder.trajectory.until"
        advice = f"Yours is that after step {states[0]}, which {call}({states[0]}) explains"
    warn_caller(
        f"your network is not the one that is explained ({trajectory.explained}): it was trained on, or its weights "
        f"were replaced, and its outputs for {len(rows)} training points differ by up to {difference:.2g}. {advice}."
    )


def step_coefficients(trajectory: Trajectory, step: int, reference: Shaped[Tensor, "..."]) -> UpdateCoefficients:
    """Read the coefficients of a step of the recorded run, for a computation on `reference`."""
    read: Callable[[int, TensorSpec], UpdateCoefficients] | None = getattr(trajectory.updates, "at", None)
    return trajectory.updates[step] if read is None else read(step, trajectory.model.spec_for(reference))


def held_coefficients(trajectory: Trajectory, step: int) -> UpdateCoefficients:
    """Read the stored coefficients of a step: possibly one weight's per parameter if a preconditioner scales them."""
    read: Callable[[int], UpdateCoefficients] = getattr(trajectory.updates, "held", trajectory.updates.__getitem__)
    return read(step)


def initial_momentum(trajectory: Trajectory, reference: Float[Tensor, " P"]) -> Float[Tensor, " B"]:
    """Return the momentum buffers before the first step."""
    held = trajectory.trained.momentum
    return torch.zeros_like(reference) if held is None else held.to(reference)


def has_memory(trajectory: Trajectory) -> bool:
    """Whether a step depends on earlier steps, not only on the weights before it: with momentum, or for an average."""
    return trajectory.average is not None or trajectory.has_momentum


def network_outputs(
    trajectory: Trajectory, X: Inputs, *, state: int = -1, head: Head | None = "logits"
) -> Float[Tensor, "n C"]:
    """Evaluate the recorded network f_{w_s}.

    Args:
        trajectory: The run.
        X: n inputs.
        state: s in 0 .. S, negative from the end: -1 is the trained network.
        head: "logits" or "log_softmax"; None follows the run's loss, as everywhere else.

    Raises:
        TypeError, ValueError, IndexError: The network cannot take the inputs, or there is no such head or state.
    """
    X, head = parse_inputs(trajectory, X), resolve_head(head, trajectory.loss, trajectory.num_outputs)
    return outputs_at(trajectory, X, state, head)


def outputs_at(trajectory: Trajectory, X: Shaped[Tensor, "n ..."], state: int, head: Head) -> Float[Tensor, "n C"]:
    """Evaluate the network of a state at parsed inputs, as in `network_outputs`."""
    model = trajectory.model_for(X)
    params = {k: v.to(dtype=model.spec.dtype, device=model.spec.device) for k, v in trajectory.weights(state).items()}
    if state in (-1, trajectory.num_steps):
        warn_unless_plain(partial(model, params), X, model.module, model.signature.rows_per_call)
    with torch.no_grad(), disable_fused_attention():
        return torch.cat([apply_head(model(params, block), head) for block in X.split(model.signature.rows_per_call)])


def batch_of(
    trajectory: Trajectory, step: Step, reference: Tensor
) -> tuple[Shaped[Tensor, "B ..."], Shaped[Tensor, "B ..."], Float[Tensor, " B"]]:
    """Return a step's inputs, targets and sample weights c in the dtype and on the device of `reference`.

    Raises:
        ValueError: The step depends on more than the recorded data: its forward passes have to be replayed.
    """
    if step.passes:
        raise ValueError(
            f"step {step.index} must be a step on the recorded data alone: its forward passes saw other rows or "
            "targets (augmentation, mixed samples), drew random numbers, or moved statistics. Use epk_gp.reconstruct "
            "or epk_gp.attribute, which replay them."
        )
    X, y, loss = trajectory.inputs, trajectory.targets, trajectory.loss
    if step.batch is not None:
        X, y = (values[step.batch.to(values.device)] for values in (X, y))
    c = losses.sample_weights(loss, y) if step.sample_weights is None else step.sample_weights
    # rows from a file or another library may begin at any address
    return aligned(TensorSpec(reference.dtype, reference.device).cast(X)), y.to(reference.device), c.to(reference)
