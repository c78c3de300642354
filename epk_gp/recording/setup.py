"""The setup of a recorded training: everything that is stated of it before its first step, checked once."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase

from epk_gp.core.checks import validate_count, validate_finite
from epk_gp.core.gradients import TrainingData, with_kept_activations
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import (
    Loss,
    PerSampleLoss,
    loss_input,
    loss_terms,
    sample_weights,
    validate_loss_row_independence,
)
from epk_gp.core.model import (
    NUM_FINGERPRINT_POINTS,
    FunctionalModel,
    functionalize,
    perturbed_initial,
    random_state_kept,
)
from epk_gp.core.step import fingerprint_data, fingerprint_start
from epk_gp.core.torch_overrides import disable_fused_attention
from epk_gp.optimizers.torch_rules import (
    Optimizers,
    Rules,
    learning_rate,
    rule_for,
    validate_fresh_optimizer,
    validate_unexplained,
)
from epk_gp.optimizers.update_rules import (
    CLIP_ROUNDING,
    EPSILON,
    Clip,
    ClipNorm,
    ClipValue,
    UpdateRule,
    largest_entry,
    move_by_rounding,
    relative_rounding,
    rounded_bound,
)
from epk_gp.recording.causes import StepMismatchError, validate_output_scale, validate_targets
from epk_gp.recording.history import StepResult
from epk_gp.recording.mode_check import moving_statistics
from epk_gp.recording.validation import (
    evenly_spread,
    parse_data,
    trained_names,
    validate_batch_statistics,
    validated_fingerprint,
)
from epk_gp.storage.schema import run_header

__all__ = ["Clip", "ClipNorm", "ClipValue", "inferred_clip", "looks_clipped", "validate_clip"]


def inferred_clip(used: Float[Tensor, " P"], gradient: Float[Tensor, " P"]) -> Clip | None:
    """Return the clipping that makes of a gradient the one that was used, if its bound is a round number.

    Clipping leaves a gradient whose norm, or whose largest entry, is the bound. Bounds are chosen by people: three
    digits are enough for them, and by chance a norm is as close to such a number once in some thousand steps.

    Args:
        used: The gradient that the optimizer used.
        gradient: The gradient of the loss.
    """
    if not torch.isfinite(used).all() or not used.any():
        return None
    norm = float(torch.linalg.vector_norm(used))
    for clip in (ClipNorm(rounded_bound(norm)), ClipValue(rounded_bound(float(used.abs().max())))):
        predicted = gradient * clip.factor(gradient)
        rounding = CLIP_ROUNDING[used.dtype == torch.float64] * float(used.abs().max())
        if not torch.equal(predicted, gradient) and bool(((predicted - used).abs() <= rounding).all()):
            return clip
    return None


def looks_clipped(used: Float[Tensor, " P"]) -> bool:
    """Return whether a gradient's norm or largest entry is a round number, as clipping leaves it."""
    rounding = 8 * torch.finfo(used.dtype).eps
    norm, largest = torch.stack([torch.linalg.vector_norm(used), largest_entry(used)]).tolist()
    # torch divides by a norm to which it adds 1e-6, so that the norm of what it clips is short of the bound by that
    sizes = ((norm, EPSILON + rounding * norm), (largest, rounding * largest))
    return any(
        0 < size < float("inf") and -short < size - rounded_bound(size) < rounding * size for size, short in sizes
    )


def validate_clip(clip: object) -> None:
    """Raise if an object is neither a clipping with a usable bound nor None.

    Raises:
        TypeError: The object is another kind of object.
        ValueError: The bound is not positive and finite.
    """
    if clip is None:
        return
    if not isinstance(clip, Clip):
        raise TypeError(f"clip must be ClipNorm or ClipValue of epk_gp.recording.setup, or None: got {clip!r}.")
    if not 0 < clip.bound < float("inf"):
        raise ValueError(f"the bound of gradient clipping must be positive and finite: got {clip.bound}.")


# Outputs of two networks are the same function's if they differ by at most so many times what the rounding of the
# weights alone changes: in float32, at perturbed weights, a ResNet-18 turns another order of operations into more than
# 7.6e-6 of its outputs.
_ROUNDINGS = 8
_NUM_END_ROWS = 64  # inputs on which the network at the end of a recording is compared with the recorded one


@dataclass(frozen=True)
class StepRules:
    """How the steps are made from gradients, and how they are checked.

    Attributes:
        update_rule: How the optimizer's step follows from the gradient.
        clip: The gradient clipping before each step, if any.
        check_every: The gradient of one step out of this many is recomputed; None for as many as are cheap.
        unexplained: Share of a step that update rule and loss need not explain; None for rounding only.
    """

    update_rule: UpdateRule
    clip: Clip | None
    check_every: int | None
    unexplained: float | None = None


def parse_step_rules(
    optimizer: Optimizers,
    update_rule: Rules,
    clip: Clip | None,
    check_every: int | None,
    unexplained: float | None = None,
) -> StepRules:
    """Return the rules of the steps; the update rule is that of the optimizer if none is given.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: The update rule is not known or leaves more unexplained than is allowed, the optimizer holds
            momentum, its learning rate is not finite, the bound of clipping is not positive, or clipping is combined
            with `check_every`.
    """
    rule = rule_for(optimizer, update_rule)
    validate_unexplained(rule, unexplained)
    validate_fresh_optimizer(optimizer)
    learning_rate(optimizer)
    validate_clip(clip)
    if check_every is not None:
        validate_count(check_every, "check_every")
    if check_every not in (None, 1) and clip is not None:
        raise ValueError(f"check_every must be 1 where gradients are clipped: got {check_every}.")
    return StepRules(rule, clip, check_every, unexplained)


@dataclass(frozen=True, eq=False)
class TrainingSetup:
    """A training before its first step.

    Attributes:
        net: The user's network, which is trained.
        model: The same network as a function of its weights, in evaluation mode.
        X: All M training inputs, copied; several tensors are packed into one.
        y: Their targets, copied.
        loss: The stated loss.
        rules: How the steps are made and checked.
        fingerprint: Outputs of the network near its initial weights, (n, C).
    """

    net: nn.Module
    model: FunctionalModel
    X: Shaped[Tensor, "M ..."]
    y: Shaped[Tensor, "M ..."]
    loss: Loss
    rules: StepRules
    fingerprint: Float[Tensor, "n C"]

    @property
    def num_outputs(self) -> int:
        """Number C of outputs."""
        return self.fingerprint.shape[1]

    @cached_property
    def training_data(self) -> TrainingData:
        """What the network is trained on."""
        return TrainingData(self.X, self.y, self.loss)

    @cached_property
    def _frozen_state(self) -> dict[str, Tensor]:
        """Buffers and frozen parameters as recorded, by name."""
        return self.model.frozen_state()

    @cached_property
    def _counters(self) -> set[str]:
        """Names of the buffers by which torch's normalisations count their batches; evaluation mode reads none."""
        parts = self.model.module.named_modules()
        return {f"{name}.num_batches_tracked".lstrip(".") for name, part in parts if isinstance(part, _NormBase)}

    def weights(self) -> Float[Tensor, " P"]:
        """Return a copy of the network's present weights."""
        return self.model.weights_of(self.net)

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
            self.rules.update_rule.name,
            num_points=len(self.X),
            num_outputs=self.num_outputs,
            data_digest=fingerprint_data(self.X, self.y, *self.model.signature.stored_tensors().values()),
            unexplained=self.rules.unexplained,
            clip=self.rules.clip,
        )

    def data(self) -> dict[str, Tensor]:
        """Return what a stored run holds beside weights and steps, by the names on disk."""
        frozen_state = {f"constant.{name}": value for name, value in self.model.frozen_state().items()}
        graph = self.model.signature.stored_tensors()
        return {"inputs": self.X, "targets": self.y, "probe": self.fingerprint} | frozen_state | graph

    def digest(self, header: dict[str, Any], weights: Float[Tensor, " P"]) -> str:
        """Return the digest of the run before its first step."""
        return fingerprint_start(header, self.model, self.fingerprint, weights, self.statistics())

    def validate_frozen_state(self, weights: Float[Tensor, " P"], index: int) -> None:
        """Raise if a buffer or frozen parameter changed in a way that the outputs depend on.

        A buffer that merely counts the calls of the network may change.

        Args:
            weights: The present weights.
            index: Number of the next step, for the error message.

        Raises:
            StepMismatchError: The outputs at the first inputs changed.
        """
        frozen_state = self._frozen_state
        if not frozen_state:
            return
        present = {**dict(self.net.named_parameters()), **dict(self.net.named_buffers())}
        changed = {
            name: present[name].detach()
            for name, value in frozen_state.items()
            if name not in self._counters and not torch.equal(present[name], value)
        }
        if not changed:
            return
        params = self.model.unflatten(self.state(perturbed_initial(weights)))
        rows = self.X[:NUM_FINGERPRINT_POINTS]
        with torch.no_grad():
            before, after = self.model(params, rows), self.model({**params, **changed}, rows)
        if not torch.allclose(before, after, rtol=0, atol=0, equal_nan=True):
            raise StepMismatchError(
                f"step {index}: buffers and frozen parameters must stay as they were when recording began: "
                f"{next(iter(changed))!r} changed. If training moves it, put the network into training mode before the "
                "recorder is made."
            )


def make_setup(
    net: nn.Module,
    optimizer: Optimizers,
    data: tuple[Inputs, Tensor],
    loss: Loss,
    rules: StepRules,
    *,
    output: Callable[[Any], Tensor] | None = None,
    trained: Collection[str] = (),
) -> TrainingSetup:
    """Check network, data and loss against each other, and return the setup of the training.

    Args:
        net: The network.
        optimizer: Its optimizer, or several.
        data: Training inputs, a tensor or several, and their targets.
        loss: The loss.
        rules: How the steps are made and checked.
        output: Takes the outputs (n, C) from what the network returns; None where it returns them.
        trained: Names of parameters that are trained later in the run, and that no optimizer trains at present.

    Raises:
        TypeError: An argument is of another kind.
        ValueError: The data, the network or the targets cannot be recorded; the message says why.
    """
    names = trained_names(net, optimizer, trained)
    X, y, signature = parse_data(*data, output)
    model = functionalize(net, names, signature=signature)
    if signature.graph is None:  # of a graph an output depends on all nodes
        validate_batch_statistics(net)
    statistics = moving_statistics(net, model, X)
    if statistics:
        model = functionalize(net, names, statistics, signature)
    weights = model.weights_of(net)
    for name, value in model.unflatten(weights).items():
        validate_finite(value.reshape(1, -1), f"the initial weights of {name!r}", "Initialise them again.")
    state = torch.cat([weights, model.statistics_of(net)])
    fingerprint = validated_fingerprint(model, state, X)
    model = with_kept_activations(model, state, X)
    _validate_loss(model, loss, state, X, y)
    return TrainingSetup(net, model, X, y, loss, rules, fingerprint)


def _validate_loss(model: FunctionalModel, loss: Loss, state: Tensor, X: Tensor, y: Tensor) -> None:
    """Raise if the loss cannot take what the network returns and the targets, or mixes the samples of a batch.

    Raises:
        TypeError, ValueError: The targets do not fit, or the losses of a few samples are not those of each alone.
    """
    weights, statistics = state.split([model.num_weights, model.num_statistics])
    params = model.unflatten(torch.cat([perturbed_initial(weights), statistics]))
    n, signature = NUM_FINGERPRINT_POINTS, model.signature
    with torch.no_grad():
        returned = model.returned(params, X[:n])
        value = loss_input(signature, loss, returned, y[:n] if y.ndim else y)
        is_tensor = isinstance(value, Tensor)
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
            except (RuntimeError, TypeError, IndexError, AttributeError, KeyError) as error:
                raise ValueError(
                    f"the loss must accept what the network returns, {type(returned).__name__}, and the targets: it "
                    f"fails on one sample, with {type(error).__name__}: {error}"
                ) from error
        validate_loss_row_independence(loss, value, y[:n], alone)


def validate_end(setup: TrainingSetup, last: StepResult, num_steps: int) -> None:
    """Raise if the network at the end of the recording is not the one that the last step left.

    Args:
        setup: The training.
        last: What the last recorded step left.
        num_steps: Number of recorded steps.

    Raises:
        StepMismatchError: Weights, buffers, frozen parameters or anything else that the outputs depend on changed.
    """
    weights = last.end
    kept = f"The {num_steps} recorded steps are kept."
    parameters = dict(setup.net.named_parameters())
    is_complete = all(name in parameters for name in setup.model.names)
    if is_complete and (setup.weights().dtype, setup.weights().device) != (weights.dtype, weights.device):
        raise StepMismatchError(
            f"the network must end the recording as it was trained, in {weights.dtype} on {weights.device}: it is in "
            f"{setup.weights().dtype} on {setup.weights().device}. Convert it after the 'with' statement. {kept}"
        )
    if not is_complete or not torch.equal(setup.weights(), weights):
        raise StepMismatchError(
            "the weights at the end of the recording must be those that the last step left: they were replaced after "
            "it (an average such as EMA, SWA or Lookahead, the best checkpoint, or an edit). Replace them after the "
            f"'with' statement. {kept}"
        )
    statistics = setup.statistics()
    if statistics is not None and last.statistics is not None and not torch.equal(statistics, last.statistics):
        raise StepMismatchError(
            "the moving statistics at the end of the recording must be those that the last step left: they were moved "
            "after it (a forward pass in training mode, update_bn, or an edit). Evaluate in evaluation mode, or move "
            f"them after the 'with' statement. {kept}"
        )
    setup.validate_frozen_state(weights, num_steps)
    rows = evenly_spread(setup.X, _NUM_END_ROWS)
    # at the weights themselves a last layer of zeros would hide everything
    if not all(_is_recorded_function(setup, w, rows) for w in (weights, perturbed_initial(weights))):
        raise StepMismatchError(
            "the network's forward function must stay as it was when recording began: its outputs at the same weights "
            f"are others now, so an attribute or a layer was changed. Change it after the 'with' statement. {kept}"
        )


def _is_recorded_function(setup: TrainingSetup, w: Float[Tensor, " P"], rows: Shaped[Tensor, "n ..."]) -> bool:
    """Return whether the user's network gives the recorded network's outputs in evaluation mode.

    It is not copied for that: a network that keeps its activations cannot be copied after a backward pass.
    """
    model, net = setup.model, setup.net
    params = model.unflatten(setup.state(w))
    buffers = {name: value.clone() for name, value in net.named_buffers()}
    is_training = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        with torch.no_grad(), random_state_kept(w.device), disable_fused_attention():
            recorded, named = model(params, rows), {**params, **buffers}
            returned = model.signature.call(lambda *args, **kwargs: functional_call(net, named, args, kwargs), rows)
            found = model.signature.outputs(returned)
    finally:
        for module, mode in is_training:
            module.training = mode
    if not isinstance(found, Tensor) or found.shape != recorded.shape:
        return False
    is_finite = recorded.isfinite()  # at perturbed weights a network may leave its domain
    if not torch.equal(found.isfinite(), is_finite):
        return False
    difference = (found - recorded)[is_finite].abs()
    largest = recorded[is_finite].abs().max() if is_finite.any() else 0.0
    if bool((difference <= relative_rounding(w.dtype) * largest).all()):
        return True
    with torch.no_grad(), random_state_kept(w.device):  # a deep network may amplify the rounding of its first layers
        moved = model(model.unflatten(setup.state(move_by_rounding(w, torch.finfo(w.dtype).eps))), rows)
    rounding = (moved - recorded)[is_finite].abs().max()
    return bool(difference.max() <= _ROUNDINGS * rounding)
