"""What a training forward pass depended on, taken by a hook at the network's forward."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor, nn

from epk_gp.core.model import FunctionalModel
from epk_gp.recording.causes import StepMismatchError

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
