"""Second derivatives of a training pass: their products with adjoints, and a check of them.

torch updates the running means and variances of BatchNorm outside the graph. A layer in training mode changes them by
b' - b = a (stat - b), where stat is the mean or the unbiased variance of its batch; the share a is read from the
recorded statistics before and after the pass, so that cumulative averages need no count of batches.

With g(w, c) = sum_i c_i grad loss_i(w) and an adjoint G of g, one double backward pass gives both

    <G, grad loss_i(w)>,  for every row i,   and   (dg / dw)^T G,

the products with the losses' gradients and with their Hessian. The graph of the forward and backward pass is built
once; each adjoint costs one pass back through it. It draws no random numbers, so dropout stays the same.

The products are wrong where the gradient is not the gradient of a function (straight-through estimators,
stop-gradients, gradients scaled by counts), and where torch's own second derivative of an operation is wrong.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from epk_gp.autodiff.dense import PlannedModel, graph_nodes
from epk_gp.core.gradients import PassData, TrainingReplay, blocks_of
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import MemoryPlan, TensorSpec
from epk_gp.core.replayed_steps import RunReplay, UnseenMove
from epk_gp.core.states import JUMP_SHARE, recomputation_of
from epk_gp.core.step import Step
from epk_gp.core.torch_overrides import (
    MappedRows,
    WrittenOutNormalisation,
    disable_fused_attention,
    watching_normalisations,
)
from epk_gp.core.trajectory import Trajectory, flat_state

_KINDS = ("running_mean", "running_var")
_CHECKPOINTED = "epk_gp: this pass must keep its activations."

# Largest relative difference between recorded statistics and those computed with a share of the batch's statistics.
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}


class SeenBatches(dict[str, tuple[Tensor, Tensor]]):
    """The statistics of the batches in normalisations in training mode, in the graph of a forward pass.

    By the layer's name, they are the mean and the unbiased variance of its batch, (channels,) each.
    """

    def look(self, name: str, layer: nn.Module, a: Tensor) -> None:
        """Receive the input of a layer (`watching_normalisations`)."""
        if not layer.training or a.numel() // a.shape[1] < 2:
            return
        if isinstance(layer, nn.modules.instancenorm._InstanceNorm):  # statistics of each row, averaged
            rows = a.reshape(-1, layer.num_features, *a.shape[2:] if a.ndim > 2 else a.shape[1:]).flatten(2)
            self[name] = (rows.mean(dim=2).mean(dim=0), rows.var(dim=2).mean(dim=0))
            return
        others = [dimension for dimension in range(a.ndim) if dimension != 1]
        self[name] = (a.mean(dim=others), a.var(dim=others))

    def after(
        self, model: FunctionalModel, shares: Mapping[str, float], before: Float[Tensor, " Q"]
    ) -> Float[Tensor, " Q"]:
        """Return the moving statistics after the pass.

        Args:
            model: The network.
            shares: The share of a batch's statistics, by layer; a layer without one keeps its statistics.
            before: The statistics before it.
        """
        parts = list(before.split(_sizes(model)))
        for number, name in enumerate(model.statistics):
            layer, _, kind = name.rpartition(".")
            if layer in shares and kind in _KINDS:  # a count of batches does not depend on weights
                own = parts[number]
                value = self[layer][_KINDS.index(kind)].reshape(-1).to(own)
                parts[number] = own + shares[layer] * (value - own)
        return torch.cat(parts) if parts else before


def _sizes(model: FunctionalModel) -> list[int]:
    return [shape.numel() for shape in model.statistic_shapes]


def shares_of_batches(
    model: FunctionalModel,
    seen: SeenBatches,
    before: Float[Tensor, " Q"],
    after: Float[Tensor, " Q"],
    tolerance: float | None = None,
) -> tuple[dict[str, float], bool]:
    """Return the share of its batch's statistics in each layer, and whether the shares explain the recorded statistics.

    Args:
        model: The network.
        seen: The batches' statistics at the recorded weights.
        before: The recorded moving statistics before the pass.
        after: The recorded moving statistics after the pass.
        tolerance: Accepted relative difference of the recorded statistics; None for rounding.
    """
    shares: dict[str, float] = {}
    for layer in seen:
        distance = (seen.after(model, {layer: 1.0}, before) - before).detach()
        norm = float(distance.square().sum())
        shares[layer] = float((after - before) @ distance) / norm if norm > 0 else 0.0
    found = seen.after(model, shares, before).detach()
    pairs = zip(model.statistics, found.split(_sizes(model)), after.split(_sizes(model)), strict=True)
    allowed = _TOLERANCE.get(found.dtype, 1e-2) if tolerance is None else tolerance
    return shares, all(
        float((a - b).abs().max()) <= allowed * max(1.0, float(b.abs().max()))
        for name, a, b in pairs
        if name.rpartition(".")[2] != "num_batches_tracked" and len(b)
    )


_Graph = tuple[list[Tensor], list[Tensor]]  # leaves and results of a forward and backward pass


@dataclass(eq=False)
class LossCurvature:
    """Multiplies adjoints by the derivatives of the gradient of a step's loss; used by one thread only.

    The caller has turned fused attention off (`disable_fused_attention`).

    Attributes:
        net: The network, with its plan.
        run: Replays the forward passes.
        memory: Chooses how many rows and adjoints are processed together.
        explains_statistics: Whether all moving statistics so far were those of the batches.
    """

    net: PlannedModel
    run: RunReplay
    memory: MemoryPlan
    explains_statistics: bool = True
    _is_written_out: bool = False  # whether a pass needs functions that replace torch's

    @cached_property
    def _rows(self) -> MappedRows:
        """The way back of several adjoints; for convolutions torch would map it by loops and copies."""
        return MappedRows(works=False if self.net.plan.calls_convolutions else None)

    def __call__(
        self, step: Step, of_gradient: Float[Tensor, "R P"], of_statistics: Float[Tensor, "R Q"] | None
    ) -> tuple[list[tuple[Tensor, Tensor]], Float[Tensor, "R P"], Float[Tensor, "R Q"] | None]:
        """Pull adjoints back through the gradient of a step, and through its passes' changes of moving statistics.

        Args:
            step: The step.
            of_gradient: The adjoints G of the gradient of its loss.
            of_statistics: The adjoints of the moving statistics after it; None for a network without them.

        Returns:
            For the rows of the forward passes: their samples, (B,), and the products c_i <G, grad loss_i>, (R, B). The
            adjoints of the weights before the step, through its gradient and its batches' statistics; and the adjoints
            of the moving statistics before it.
        """
        state = flat_state(self.run.trajectory, step.index, self.run.reference)
        of_weights, products = torch.zeros(()), list[tuple[Tensor, Tensor]]()
        passes = self.run.data(step)
        moves, at_start = self.run.unseen_moves(step, passes), list[Tensor]()
        graph = self.net.model.signature.graph
        for number in reversed(range(len(passes))):
            move = moves[number + 1]
            if move is not None and move.returns and of_statistics is not None:
                at_start.append(of_statistics.masked_fill(~move.moved.to(of_statistics.device), 0.0))
            carried = of_statistics = self._before_move(move, of_statistics)
            of_statistics = None if carried is None else torch.zeros_like(carried)
            for data in blocks_of(self.net.model, passes[number], self.memory.curvature_rows()):
                make_graph = partial(
                    self._graph, step, state, data, is_last=number + 1 == len(passes), moves=carried is not None
                )
                made = make_graph()
                # adjoints that go back together must fit into memory
                num_rows = len(data.X) if graph is None else graph.num_nodes
                R, count = len(of_gradient), self.memory.curvature_adjoints(num_rows)
                found = list[tuple[Tensor, ...]]()
                for first in range(0, R, count):
                    given = list(self.net.model.unflatten(of_gradient[first : first + count]).values())
                    given += [] if carried is None else [carried[first : first + count]]
                    keeps_graph = first + count < R or self._rows.works is None
                    found.append(self._pull(made, given, None if keeps_graph else make_graph))
                own, weights, *statistics = found[0] if len(found) == 1 else map(torch.cat, zip(*found, strict=True))
                products.append((data.samples, own * data.c.to(own)))
                of_weights = of_weights.add_(weights) if of_weights.ndim else weights
                if of_statistics is not None and statistics:
                    of_statistics += statistics[0]
        of_statistics = self._before_move(moves[0], of_statistics)
        return products, of_weights, None if of_statistics is None else sum(at_start, of_statistics)

    def _before_move(self, move: UnseenMove | None, of_statistics: Tensor | None) -> Tensor | None:
        """Return the adjoints of the statistics before a change between passes, which is held as recorded."""
        if move is None or of_statistics is None:
            return of_statistics
        self.explains_statistics = self.explains_statistics and (move.is_reset or move.returns)
        return of_statistics.masked_fill(move.moved.to(of_statistics.device), 0.0)

    def _graph(self, step: Step, state: Float[Tensor, " PQ"], data: PassData, *, is_last: bool, moves: bool) -> _Graph:
        """Replay a forward and backward pass, and keep its graph.

        Args:
            step: The step.
            state: Weights and moving statistics at its start.
            data: The pass.
            is_last: Whether it is the last pass of the step.
            moves: Whether any result depends on the moving statistics after it.

        Returns:
            The leaves: the weights of the rows' losses, (B,), the parameters, and the moving statistics before the
            pass. The results: the gradients in the parameters, and the moving statistics after the pass, (Q,), if there
            are any.
        """
        seen, model = SeenBatches(), self.run.passes.model
        with torch.enable_grad(), needing_second_derivatives():
            if model.statistics or self._is_written_out:
                parameters, statistics, losses = self._written_out(state, data, seen)
            else:
                statistics = list[Tensor]()
                try:
                    with torch.autograd.graph.disable_saved_tensors_hooks(_CHECKPOINTED):
                        parameters, losses = self.run.passes.leaves_and_losses(state, data)
                except RuntimeError as error:
                    if _CHECKPOINTED not in str(error):
                        raise
                    self._is_written_out = True
                    return self._graph(step, state, data, is_last=is_last, moves=moves)
            c = data.c.to(losses, copy=True).requires_grad_()
            gradients = torch.autograd.grad(
                c @ losses, parameters, create_graph=True, allow_unused=True, materialize_grads=True
            )
            nodes = list(graph_nodes([losses]))
            if not self._is_written_out and any(node.name().startswith("WeightNorm") for node in nodes):
                self._is_written_out = True
                return self._graph(step, state, data, is_last=is_last, moves=moves)
            if own := {forward.__name__ for node in nodes if (forward := getattr(node, "_forward_cls", None))}:
                require_second_derivatives(gradients, own)
            if moves:
                flat = torch.cat([value.reshape(-1) for value in statistics])
                gradients = (*gradients, self._after(step, data, seen, flat, is_last=is_last))
        return [c, *parameters, *statistics], list(gradients)

    def _written_out(
        self, state: Float[Tensor, " PQ"], data: PassData, seen: SeenBatches
    ) -> tuple[list[Tensor], list[Tensor], Tensor]:
        """Return weights, moving statistics and losses of a pass, with its graph, and observe normalisations."""
        replay, model = self.run.passes, self.run.passes.model
        params, module = replay.params(state, data), replay.module_in_modes(data)
        before = {name: params[name].clone().requires_grad_() for name in model.statistics}
        for name, layer in module.named_modules():
            # normalisations in evaluation mode use these; torch updates others in place
            if isinstance(layer, nn.modules.batchnorm._NormBase) and not layer.training:
                fixed = (f"{name}.{kind}".lstrip(".") for kind in _KINDS)
                params |= {name: before[name] for name in fixed if name in before}
        parameters, statistics = [params[name].requires_grad_() for name in model.names], list(before.values())
        with watching_normalisations(module, seen.look), WrittenOutNormalisation(statistics):
            return parameters, statistics, replay.losses(params, data)

    def _after(
        self, step: Step, data: PassData, seen: SeenBatches, before: Float[Tensor, " Q"], *, is_last: bool
    ) -> Float[Tensor, " Q"]:
        model, recorded = self.run.passes.model, self.run.trajectory.statistics
        after = data.forward.statistics_after
        if after is None and is_last and recorded is not None:
            after = recorded[step.index + 1]
        if after is None:
            return before
        trajectory = self.run.trajectory  # recorded statistics, at weights that may differ from the recorded ones
        tolerance = None if recomputation_of(trajectory) is None else JUMP_SHARE[trajectory.dtype]
        shares, explains = shares_of_batches(model, seen, before.detach(), after.to(before), tolerance)
        self.explains_statistics = self.explains_statistics and explains
        return seen.after(model, shares, before)

    def _pull(self, graph: _Graph, given: list[Tensor], make_graph: Callable[[], _Graph] | None) -> tuple[Tensor, ...]:
        """Go back through a graph with some adjoints of its results; it is freed if `make_graph` can rebuild it.

        Returns:
            The adjoints of the weights of the rows' losses, (r, B), of the weights, (r, P), and of the moving
            statistics, (r, Q), if there are any.
        """
        count, frees = len(given[0]), make_graph is not None
        was_freed = frees and self._rows.works  # in case the adjoints cannot go back together

        def single(k: int) -> list[Tensor]:
            own = make_graph() if make_graph is not None and was_freed else graph
            with needing_second_derivatives():
                return _back(*own, [value[k] for value in given], is_mapped=False, frees=frees and k + 1 == count)

        found = self._rows(count, partial(_back, *graph, given, is_mapped=True, frees=frees), single)
        own, *others = [value.reshape(count, -1) if value.numel() else value.new_zeros(count, 0) for value in found]
        P = len(self.run.passes.model.names)
        return own, *(torch.cat(values, dim=1) for values in (others[:P], others[P:]) if values)


def _back(
    leaves: list[Tensor], results: list[Tensor], given: list[Tensor], *, is_mapped: bool, frees: bool
) -> list[Tensor]:
    """Return the adjoints of the leaves; zeros for leaves without effect."""
    pairs = [(value.to(out), out) for value, out in zip(given, results, strict=True) if out.requires_grad]
    given, results = [value for value, _ in pairs], [out for _, out in pairs]
    grad = torch.autograd.grad(
        results, leaves, given, retain_graph=not frees, allow_unused=True, is_grads_batched=is_mapped
    )
    leading = given[0].shape[:1] if is_mapped else ()
    return [leaf.new_zeros(*leading, *leaf.shape) if g is None else g for g, leaf in zip(grad, leaves, strict=True)]


# Pairs of differences, relative to the weights, that are compared with each other; and the largest difference of
# torch's derivative from them. At the fine ones even networks of many ReLUs seldom meet a kink; if a network computes
# in float32 inside, these are rounding, and the coarse ones may contain kinks.
_PAIRS = (((1e-8, 1e-7), 1e-3), ((1e-4, 1e-3), 0.15))
_SETTLED = 4  # differences are conclusive if torch's error is this many times their own


class _WideReplay(TrainingReplay):
    """Replays all passes in float64, with other random numbers than the run's, but the same in each call."""

    def dtype_of(self, data: PassData, *, exact: bool = True) -> torch.dtype:
        """Return float64."""
        return torch.float64


def curvature_error(trajectory: Trajectory, net: PlannedModel, memory: MemoryPlan, moved: Bool[Tensor, " P"]) -> float:
    """Return the relative difference between second derivatives along some direction and differences of gradients.

    The middle, the last and the first step are examined; the result is 0 if the difference is rounding or a kink, and
    if the network cannot compute in float64.

    Args:
        trajectory: The run.
        net: The network with its plan.
        memory: Chooses how many rows are processed together.
        moved: Weights along which derivatives are compared, on the device of the computation: other weights, such as
            the row of a padding index, have no gradient and do not depend on the weights of samples.
    """
    run, recomputation = _wide_run(trajectory.trained, net, moved.device), recomputation_of(trajectory)
    curvature = LossCurvature(PlannedModel(run.model, net.plan), run, memory)
    states = range(trajectory.num_steps) if recomputation is None else recomputation.kept.numbers[:-1]
    steps = [run.trajectory.steps[states[place]] for place in dict.fromkeys((len(states) // 2, -1, 0)) if states]
    for pair, tolerance in _PAIRS:
        try:
            with disable_fused_attention():
                errors = [_step_error(run, curvature, step, pair, moved) for step in steps]
        except (RuntimeError, TypeError, ValueError):  # the network cannot compute in float64
            return 0.0
        if settled := [error for error in errors if error is not None]:
            return max(settled) if max(settled) > tolerance else 0.0
    return 0.0


def _wide_run(trajectory: Trajectory, net: PlannedModel, device: torch.device) -> RunReplay:
    spec = TensorSpec(torch.float64, device)
    run = RunReplay(trajectory, net.model.variant(spec), torch.zeros((), dtype=spec.dtype, device=device))
    own = trajectory.model.variant(TensorSpec(trajectory.dtype, device))
    run.__dict__["passes"] = _WideReplay(own, trajectory.loss, spec)
    return run


def _step_error(
    run: RunReplay, curvature: LossCurvature, step: Step, pair: tuple[float, float], moved: Tensor
) -> float | None:
    """Return the relative error of a product with a step's Hessian; None if the differences do not settle."""
    state = flat_state(run.trajectory, step.index, run.reference)
    P = run.model.num_weights
    direction = torch.zeros_like(state)
    d = direction[:P].copy_(moved * _direction(state[:P], run.model.sizes))
    product = curvature(step, d[None], None)[1][0]
    # a Hessian is symmetric: <H d, H d> = <d, H (H d)>
    square, again = product @ product, d @ curvature(step, product[None], None)[1][0]
    asymmetry = float((square - again).abs() / torch.maximum(square, again.abs()).clamp(min=1e-300))

    def difference(h: float) -> Float[Tensor, " P"]:
        ends = [run.gradient_at(step, state + sign * h * direction)[0] for sign in (1, -1)]
        return (ends[0] - ends[1]) / (2 * h)

    fine, coarse = map(difference, pair)
    scale = float(torch.stack([product, fine]).norm(dim=1).max())
    error, unsettled = float((fine - product).norm()), float((fine - coarse).norm())
    if not scale > 0 or not unsettled * _SETTLED <= max(error, 1e-3 * scale):
        return None
    return max(error / scale, asymmetry)


def _direction(w: Float[Tensor, " P"], sizes: tuple[int, ...]) -> Float[Tensor, " P"]:
    """Return random numbers with the size of each parameter's weights."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(len(w), generator=generator, dtype=w.dtype).to(w.device)
    typical = w.norm() / max(1, len(w)) ** 0.5
    parts = w.split(sizes)
    scales = [part.norm() / max(1, len(part)) ** 0.5 for part in parts]
    own = [torch.where(scale > 0, scale, typical).expand(len(part)) for scale, part in zip(scales, parts, strict=True)]
    return noise * torch.cat(own)


# torch's messages for operations whose derivative it cannot differentiate.
_MESSAGES = re.compile("twice|double backward|derivative for .* is not implemented")
_MARKED = "trying to differentiate twice a function that was marked with @once_differentiable"


@contextmanager
def needing_second_derivatives() -> Iterator[None]:
    """Give advice if torch cannot differentiate a gradient.

    Raises:
        ValueError: torch cannot differentiate it.
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:  # includes NotImplementedError
        if _MESSAGES.search(str(error)) is None:
            raise
        raise ValueError(_refusal(str(error))) from error


def require_second_derivatives(gradients: Sequence[Tensor], own: Collection[str]) -> None:
    """Raise if a graph contains an operation that can be differentiated only once; torch's own operations cannot be it.

    torch replaces the missing derivative by an error that leads to no weight: `torch.autograd.grad` does not meet it,
    and returns the remaining part of the derivative.

    Args:
        gradients: Gradients of the losses, with their graph.
        own: Names of the user's own operations in the forward pass.

    Raises:
        ValueError: The graph contains such an operation.
    """
    if any(node.name().endswith("::Error") for node in graph_nodes(gradients)):
        raise ValueError(_refusal(f"{_MARKED} (operations of one's own here: {', '.join(sorted(own))})"))


def _refusal(message: str) -> str:
    return (
        f"the loss must have second derivatives in the weights: torch says {message!r}. Give the operation a backward "
        "pass that torch can differentiate, or use epk_gp.attribute, which takes first derivatives alone."
    )


def statistics_increments(replay: TrainingReplay, state: Float[Tensor, " PQ"], data: PassData) -> Float[Tensor, "n Q"]:
    """Replay a forward pass and return each row's contribution to the moving statistics.

    Statistics outside normalisations, and those of a layer that sees other rows than the batch, get zero: their change
    belongs to no row.

    Args:
        replay: Replays the run's forward passes.
        state: Weights and statistics at the start of the step.
        data: The pass.
    """
    model, n = replay.model, len(data.X)
    sizes = [shape.numel() for shape in model.statistic_shapes]
    increments = torch.zeros(n, sum(sizes), dtype=state.dtype, device=state.device)
    named = dict(zip(model.statistics, increments.split(sizes, dim=1), strict=True))

    def look(name: str, layer: nn.Module, a: Tensor) -> None:
        if not layer.training or not isinstance(layer, nn.modules.batchnorm._BatchNorm):
            return
        if a.ndim < 2 or len(a) % n or a.numel() // a.shape[1] < 2:  # the layer mixes rows
            return
        by_row = a.detach().unflatten(0, (n, -1)).movedim(2, 1).flatten(2)  # n channels positions
        count = by_row.shape[0] * by_row.shape[2]
        mean, momentum = by_row.mean(dim=(0, 2)), layer.momentum
        variance = (by_row - mean[None, :, None]).square().sum(dim=2) / (count - 1)
        if momentum is None:
            momentum = 1.0 / (float(layer.num_batches_tracked or 0) + 1)
        for kind, rows in (("running_mean", by_row.sum(dim=2) / count), ("running_var", variance)):
            buffer = f"{name}.{kind}".lstrip(".")
            if buffer in named:
                named[buffer] += (momentum * (rows - getattr(layer, kind) / n)).to(increments)

    with watching_normalisations(replay.module_in_modes(data), look), torch.no_grad():
        replay.losses(replay.params(state, data), data)
    return increments
