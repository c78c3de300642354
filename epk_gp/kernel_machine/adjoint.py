"""Contributions under any linear update rule: adjoints from the last step back (docs/theory.md, sections 4 and 7).

A normalisation in training mode moves its statistics by b' - b = m (stat - b), and its batch's statistics are sums over
the rows: stat = sum_i stat_i. Row i adds m (stat_i - b / n), centred, so that nothing remains.

The share of loss term i along an adjoint H is one directional derivative, and one forward-mode pass of the batch gives
those of all terms:

    <H, grad loss_i(w)> = d/de loss_i(w + e H) at e = 0

It holds also where a term depends on the whole batch. Where every term depends on its own row alone, the gradients of
the samples can be written out instead; the cheaper of the two is taken by counted cost.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float, Int64
from torch import Tensor
from torch.func import jvp, vmap

from epk_gp.autodiff.dense import Cotangents, PlannedModel, flat_columns
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians, secant_jacobians
from epk_gp.autodiff.representations import ContractionCost, to_flat_order
from epk_gp.autodiff.verification import MappedRows
from epk_gp.core.gradients import PassData, RunReplay, seen_losses
from epk_gp.core.plans import rows_per_pass
from epk_gp.core.step import BEFORE, Step, tensor_bytes
from epk_gp.core.torch_overrides import FlopCount, exclusive_forward_mode, forward_mode
from epk_gp.core.trajectory import Trajectory, initial_momentum, step_coefficients
from epk_gp.gram.accumulator import averaged_jacobian
from epk_gp.kernel_machine.curvature import statistics_increments
from epk_gp.kernel_machine.terms import (
    AttributionWork,
    Predictions,
    StretchAverage,
    TermSums,
    grouped_products,
    integrate_stretch,
)
from epk_gp.optimizers.update_rules import UpdateCoefficients, apply_matrices, broadcast_to_params, second_coefficients
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.intervals import OPEN, fixed_status, residual_status, rounding_of
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureStatus, stretch_of, stretches_of
from epk_gp.work.run import Sums


def propagate_step(
    trajectory: Trajectory, s: int, sizes: tuple[int, ...], Phi: Float[Tensor, "K N P"], adjoint_state: Tensor | None
) -> tuple[Float[Tensor, "K N P"], Float[Tensor, "K N P"], Float[Tensor, "K N P"], Tensor | None, Tensor | None]:
    """Go one step of a run back: return the adjoints of its change of the weights, and of what it consists of.

    Of a run of averaged weights, whose steps are a_s (d_s + e_s) with the lead e_{s+1} = (1 - a_s) (d_s + e_s), the
    adjoint of the recorded step d_s is E_s = a_s Phi_s + (1 - a_s) E_{s+1}. It takes the place of Phi_s.
    A move in step m towards the state w_a (`Step.move`) is d_m = (1 - share) (the optimizer's part) - share (d_a + ...
    + d_{m-1}): it adds -share E_m to the adjoint of each step from the anchor up to m.

    Args:
        trajectory: The run.
        s: The step.
        sizes: Number of weights of each of the L parameters.
        Phi: The averaged gradients of the outputs along the path, which are overwritten.
        adjoint_state: What the step after left, which is overwritten; None after the last step.

    Returns:
        The adjoints of the change, of the optimizer's part of it, of h and of the second buffer; and what the step
        before receives: for the buffers, for the average, and for each move that reaches further back.
    """
    u, average, moves, P = step_coefficients(trajectory, s, Phi), trajectory.average, trajectory.moves, Phi.shape[-1]
    if average is None and not moves:
        return Phi, Phi, *propagate(u, sizes, Phi, adjoint_state)
    open_moves = [m for m in sorted(moves, reverse=True) if m > s >= moves[m].anchor]
    E, of_momentum, averages, pulls = Phi, None, list[Tensor](), list[Tensor]()
    if adjoint_state is not None:
        count = len(open_moves) + (average is not None)
        of_momentum, *pulls = adjoint_state.split([adjoint_state.shape[-1] - P * count, *[P] * count], dim=-1)
    if average is not None:
        a = float(average.coefficients[s])
        E = Phi.mul_(a) if adjoint_state is None else Phi.mul_(a).add_(pulls.pop(0), alpha=1 - a)
        averages = [E]
    for pull in pulls:
        E = E - pull
    of_optimizer, kept = E, [pull for m, pull in zip(open_moves, pulls, strict=True) if moves[m].anchor < s]
    if (move := moves.get(s)) is not None:
        of_optimizer = (1 - move.share) * E
        kept += [move.share * E] if move.anchor < s else []
    H, N, of_momentum = propagate(u, sizes, of_optimizer, of_momentum)
    carried = [torch.zeros_like(E) if of_momentum is None else of_momentum, *averages, *kept]
    return E, of_optimizer, H, N, torch.cat(carried, dim=-1)


def propagate(
    u: UpdateCoefficients, sizes: tuple[int, ...], Phi: Float[Tensor, "K N P"], adjoint_state: Tensor | None
) -> tuple[Float[Tensor, "K N P"], Float[Tensor, "K N P"] | None, Float[Tensor, "K N B"] | None]:
    """Go one step back: return the adjoints of h and of the second buffer, and what the step before receives.

    With the coefficients of step s, and left^T Phi right^T in the place of Phi in M and H, these are

        N = rate Phi + (second_beta N)_{s+1},   M = momentum_lr Phi + of_m N + (beta M)_{s+1},
        H = one_minus_dampening M + lr Phi + of_h N

    Args:
        u: The coefficients.
        sizes: Number of weights of each of the L parameters.
        Phi: The adjoint of the weights after the step.
        adjoint_state: (beta M)_{s+1}, then (second_beta N)_{s+1}, which are overwritten; None if they are zero.
    """
    P, N, M = Phi.shape[-1], None, adjoint_state
    if u.second or (adjoint_state is not None and adjoint_state.shape[-1] > P):
        rate, second_beta, of_h, of_m, _ = second_coefficients(u, sizes, Phi)
        state = torch.zeros_like(Phi) if adjoint_state is None else adjoint_state
        N = rate * Phi + (state[..., P:] if state.shape[-1] > P else 0.0)
        M = state[..., :P].addcmul_(of_m, N)
    coefficients = (u.momentum_lr, u.beta, u.one_minus_dampening, u.lr)
    momentum_lr, beta, one_minus_dampening, lr = (broadcast_to_params(v, sizes, Phi) for v in coefficients)
    Phi = apply_matrices(u, sizes, Phi, transposed=True)
    if u.inner_left or u.inner_right:
        own_m, own_h = (apply_matrices(u, sizes, r * Phi, transposed=True, inner=True) for r in (momentum_lr, lr))
        M = own_m if M is None else M.add_(own_m)
        H = (one_minus_dampening * M).add_(own_h)
    else:
        if u.momentum_lr.any():
            M = momentum_lr * Phi if M is None else M.addcmul_(Phi, momentum_lr)
        if M is None:
            return lr * Phi, None, None
        H = one_minus_dampening * M
        if u.lr.any():
            H.addcmul_(Phi, lr)
    if N is not None:
        return H.addcmul_(N, of_h), N, torch.cat([M.mul_(beta), second_beta * N], dim=-1)
    return H, None, M.mul_(beta) if u.beta.any() else None


# A change of the outputs that is a sum over the weights may miss them by so many eps of the sum of its terms' sizes for
# each layer with weights (measured on diverging ResNet-18s in float32: up to 8).
_SUM_ROUNDING = 16


def average_over(block: Predictions, steps: range, max_nodes: int, *, splits_statistics: bool) -> StretchAverage:
    """Average the gradients of the points over a stretch.

    Args:
        block: The predictions.
        steps: The steps that the stretch stands for.
        max_nodes: Nodes evaluated at a time.
        splits_statistics: The averages in the moving statistics are wanted even where their sum is known without.
    """
    if block.is_layerwise:
        return _layerwise_average(block, steps, max_nodes)
    line = integrate_stretch(block, steps, max_nodes)
    wants_statistics = (splits_statistics or len(steps) > 1) and block.trajectory.statistics is not None
    of_statistics = line.averaged_statistics_jacobian() if wants_statistics else None
    Phi = averaged_jacobian(line.node_batches(), block.columns)
    return StretchAverage(steps, Phi, of_statistics, line.integral)


def _layerwise_average(block: Predictions, steps: range, max_nodes: int) -> StretchAverage:
    """Average the derivative of every operation over a stretch.

    The averages give the integral: what they say of the change of the outputs is compared with it.
    """
    if not block.net.plan.supports_interpolation:
        raise ValueError(
            "layerwise() needs a network whose weights are used by functions that are linear in them, row by row: this "
            "one's are not. Take chords(every=k)."
        )
    X, net, P, Q = block.X, block.net, block.net.model.num_weights, block.net.model.num_statistics
    w, end = block.state(steps.start), block.state(steps.stop)
    d, eps = end - w, torch.finfo(w.dtype).eps
    rows = min(max_nodes, rows_per_pass(net.plan, net.itemsize, block.num_outputs))
    rows, found = min(rows, block.memory.statistics_rows(block.num_outputs, Q)), list[tuple[Tensor, ...]]()
    for points in torch.arange(len(X), device=X.device).split(max(1, rows // 2)):
        cotangents = block.cotangents(points)
        z, layers, part = secant_jacobians(net, (w, d), X[points], cotangents, block.cost, block.kernel.head)
        found.append((z.transpose(0, 1), to_flat_order(layers, block.columns), part))
    (start, end), Phi, of_statistics = (
        parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in zip(*found, strict=True)
    )
    change = (Phi @ d[:P] + of_statistics @ d[P:]).T
    size = (Phi.abs() @ d[:P].abs() + of_statistics.abs() @ d[P:].abs()).T
    rounding = _SUM_ROUNDING * len(layers) * eps * size.amax(dim=1)
    error = (block.select_outputs(end - start) - change).abs().amax(dim=1)
    total = change if block.classes is None else (end - start).scatter(1, block.classes[:, None], change)
    if isinstance(rule := block.kernel.rule, AdaptiveRule):
        share = len(stretches_of(block.kernel.path, block.trajectory.num_steps))
        status = residual_status(error, torch.maximum(rounding_of(start, end), rounding), rule.tol / share)
        status = torch.where(status == OPEN, QuadratureStatus.INCONSISTENT_DERIVATIVE, status)
        status = torch.where(error.isfinite(), status, QuadratureStatus.NOT_FINITE)
    else:
        status = fixed_status(error)
    zeros, twos = torch.zeros_like(error), torch.full_like(status, 2)
    integral = Integral(
        total=total,
        start=start,
        end=end,
        residual=error,
        evaluations=zeros + 2,
        point=torch.arange(len(X), device=X.device).repeat_interleave(2),
        t=w.new_tensor([0.0, 1.0]).repeat(len(X)),
        weight=w.new_full((2 * len(X),), 0.5),
        breakpoints=zeros,
        ends=zeros + 1,
        orders=twos,
        num_intervals=twos // 2,
        status=status,
        rounding=rounding,
    )
    return StretchAverage(steps, Phi, of_statistics if Q else None, integral)


# What making a forward-mode pass costs beside its products, and writing and reading a number of samples' gradients, in
# floating-point operations: 0.7 to 2 ms and 1 to 3 ns at 1e10 operations a second (docs/benchmarks.md).
_PASS_OVERHEAD, _WRITING = 1e7, 20.0

# Relative difference that rounding leaves between a loss, or a derivative, and the same in another order of sums.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}

# Forward mode follows what a network computes under no_grad, a constant to the backward passes of training. Products
# that miss the whole gradient by more than rounding are given up for plain autograd if that misses it so much less.
_DOUBTS = 16.0

# A way of taking products is compared with plain autograd in every so many passes of a kind: a choice. What it misses
# in the others is seen by the certificate of the sum.
_COMPARED_EVERY = 16

# Share of the products' absolute sum that their rounding may be where a preconditioner amplifies it. Measured for a
# bias in front of BatchNorm under Adam: 2e-10 in float64, 3e-2 in float32.
_AMPLIFIED_ROUNDING = {torch.float64: 1e-6, torch.float32: 0.3}


@dataclass(eq=False)
class LossProducts:
    """The training side of an attribution; to be used by one thread.

    Products are those of the samples' gradients where writing these out is cheaper, else of forward mode. Where torch
    has none, or it gives something else than plain autograd, each sample has a backward pass of its own.

    Both are compared with plain autograd in the first pass of a kind and in every 16th one after it; forward mode in
    all, where a preconditioner may amplify rounding.

    Attributes:
        block: The predictions.
        run: Replays the forward passes.
    """

    block: Predictions
    run: RunReplay
    _has_forward_mode: bool = True
    # networks in the modes and dtypes of passes; None where their gradients are not those of the passes
    _in_modes: dict[tuple[bytes, torch.dtype], PlannedModel | None] = field(default_factory=dict)
    # passes, one for each direction: a loss may be near zero
    _rows: MappedRows = field(default_factory=lambda: MappedRows(least=(1.0, 0.0)))
    _flops_per_row: float | None = None
    _found_rounding: float = 0.0  # largest share of the products that forward mode and plain autograd missed
    _counts: Counter[tuple[bytes, torch.dtype]] = field(default_factory=Counter)  # of passes of a kind
    _is_compared: bool = True  # the present one

    def __post_init__(self) -> None:
        """Take what the recorded network's plan says of it."""
        net = self.block.recorded_net
        self._memory, self._all_dense = net.memory_plan(self.block.memory_budget), not net.plan.supports_interpolation
        self._columns = flat_columns(net, all_dense=self._all_dense).to(self.block.X.device)

    def __call__(
        self, step: Step, data: PassData, H: Float[Tensor, "K N P"], groups: Int64[Tensor, " L"]
    ) -> tuple[Float[Tensor, "N K B G"], Float[Tensor, "N K G"] | None]:
        """Return c_i <H, grad loss_i> for the rows of a forward pass, over each group of parameters.

        Args:
            step: The step.
            data: The pass.
            H: The adjoints.
            groups: Group of each of the L parameters.

        Returns:
            The products; and, where they are compared, what <H, sum_i c_i grad loss_i> with the gradient of a backward
            pass has more than their sum: rounding, which a preconditioner can make large where a gradient is nothing
            else (a bias in front of BatchNorm under Adam). None where gradients are written out, and where it is more
            than rounding can be: left out of every term, the certificate sees it.
        """
        kind = self._kind_of(data)
        self._is_compared = self._counts[kind] % _COMPARED_EVERY == 0
        self._counts[kind] += 1
        state = self.block.trained_state(step.index)
        if self._writes_gradients_out(data, H.shape[0] * H.shape[1], int(groups.max()) + 1):
            written = self._from_gradients(state, data, H, groups)
            if written is not None:
                return written, None
        u, sizes = step_coefficients(self.block.recorded, step.index, H), self.block.recorded_net.model.sizes
        has_preconditioner = u.has_matrices or max(map(len, (u.lr, u.momentum_lr))) > len(sizes)
        if self._has_forward_mode and not self._is_compared and not has_preconditioner:
            return self._along_all(state, data, H, groups), None
        replayed, dtype = self.run.passes.gradient(state, data, exact=True), self.run.passes.dtype_of(data)
        whole = grouped_products(H, replayed.gradient[None], groups, sizes).squeeze(2)
        values = self._along_all(state, data, H, groups, replayed.losses)
        if self._has_forward_mode and not self._is_derivative(state, data, H, whole, values):
            self._has_forward_mode = False
            values = self._along_all(state, data, H, groups, replayed.losses)
        rounding = whole - values.sum(dim=2)
        allowed = _AMPLIFIED_ROUNDING.get(dtype, 1.0) * values.abs().sum(dim=(2, 3))
        return values, rounding if bool((rounding.sum(dim=2).abs() <= allowed).all()) else None

    def _along_all(
        self,
        state: Tensor,
        data: PassData,
        H: Float[Tensor, "K N P"],
        groups: Int64[Tensor, " L"],
        expected: Tensor | None = None,
    ) -> Float[Tensor, "N K B G"]:
        """Return c_i <H, grad loss_i> over each group of parameters."""
        K, N = H.shape[:2]
        count = int(groups.max()) + 1
        values, sizes = H.new_empty(N, K, len(data.X), count), self.block.recorded_net.model.sizes
        for group in range(count):
            is_own = broadcast_to_params((groups == group).to(H), sizes, H)
            directions = (H if count == 1 else H * is_own).flatten(0, 1)
            products = self._along(state, data, directions, expected)
            values[..., group] = (data.c.to(H) * products).view(K, N, -1).transpose(0, 1)
        return values

    def _is_derivative(
        self, state: Tensor, data: PassData, H: Tensor, whole: Float[Tensor, "N K G"], values: Float[Tensor, "N K B G"]
    ) -> bool:
        """Return whether forward mode follows what plain autograd differentiates.

        Where its products miss the whole gradient by more than rounding of the pass's dtype, or than was found to be
        rounding before, those of the worst adjoint are computed by plain autograd: rounding misses it as much.
        """
        missed = (whole - values.sum(dim=2)).sum(dim=2)
        share = missed.abs() / values.abs().sum(dim=(2, 3)).clamp(min=torch.finfo(values.dtype).tiny)
        n, k = divmod(int(share.argmax()), share.shape[1])
        largest = float(share[n, k])
        if not largest > max(_ROUNDING.get(self.run.passes.dtype_of(data), 1e-2), 2 * self._found_rounding):
            return True
        self._found_rounding = largest
        products = self._sample_by_sample(state, data, H[k, n][None])[0]
        left = float((whole[n, k].sum() - products @ data.c.to(products)).abs())
        return _DOUBTS * left >= float(missed[n, k].abs())

    def _writes_gradients_out(self, data: PassData, num_directions: int, num_groups: int) -> bool:
        block, plan = self.block, self.block.recorded_net.plan
        # in a shared pass there is a backward pass per sample, each through the whole graph
        if data.forward.autocast is not None or not block.recorded.loss_takes_outputs or plan.shares_pass:
            return False
        if not data.forward.is_deterministic and (
            self._all_dense
            or plan.dense_params  # differentiated row by row, where a mask is drawn for the batch
            or block.recorded_net.model.statistics  # a row's loss depends on the other rows
            or self._in_modes.get(self._kind_of(data), block.recorded_net) is None
        ):
            return False
        n, P = len(data.X), block.recorded_net.model.num_weights
        if self._flops_per_row is None:
            state, replay = block.trained_state(0), self.run.passes
            with FlopCount() as counter, torch.no_grad():
                replay.losses(replay.params(state, data), data)
            self._flops_per_row = counter.total / n
        flops = self._flops_per_row * n
        forward = num_directions * num_groups * (2 * flops + _PASS_OVERHEAD)
        writing = 3 * flops + (2.0 * num_directions + _WRITING) * n * P + _PASS_OVERHEAD
        return writing <= forward

    def _kind_of(self, data: PassData) -> tuple[bytes, torch.dtype]:
        """Return what tells networks apart that replay passes."""
        kinds = (data.forward.modes, data.forward.settings)
        key = b"".join(b"-" if kind is None else bytes(tensor_bytes(kind)) for kind in kinds)
        return key, self.run.passes.dtype_of(data)

    def _from_gradients(
        self, state: Float[Tensor, " PQ"], data: PassData, H: Float[Tensor, "K N P"], groups: Int64[Tensor, " L"]
    ) -> Float[Tensor, "N K B G"] | None:
        """Write the samples' gradients out, some at a time.

        Those of a pass that draws random numbers are written out in its own modes, of the whole batch together, whose
        masks are drawn together. Where the products with the sum of the adjoints are compared with forward mode's: None
        if they are others, as a row's loss depends on other rows or numbers are drawn in another order.
        """
        block, every = self.block, torch.arange(len(data.X), device=data.X.device)
        blocks, sizes = every.split(self._memory.adjoint_samples()), block.recorded_net.model.sizes
        cost = ContractionCost(num_output_pairs=1, num_contractions=1, all_dense=self._all_dense)
        values = []
        if data.forward.is_deterministic:
            replay = self.run.passes
            X, at = block.recorded_net.model.spec.cast(data.X), WeightLocation(replay.state(state, data).to(state))
            for rows in blocks:
                jacobians = layer_jacobians(block.recorded_net, at, X[rows], _loss_cotangents(block, data, rows), cost)
                values.append(grouped_products(H, to_flat_order(jacobians, self._columns)[0], groups, sizes))
            return torch.cat(values, dim=2)
        replay, key = self.run.passes, self._kind_of(data)
        net = self._in_modes.get(key) or PlannedModel(replay.model_in_modes(data), block.recorded_net.plan)
        self._in_modes[key] = None  # unless all goes well
        at = WeightLocation(torch.cat([value.flatten() for value in replay.params(state, data).values()]))
        try:
            with replay.random_numbers(data):
                jacobians = layer_jacobians(net, at, replay.rows(data), _loss_cotangents(block, data, every), cost)
        except (RuntimeError, ValueError, NotImplementedError):  # UnsupportedParameterUseError among them
            return None
        for rows in blocks:
            part = [jacobian.rows(slice(int(rows[0]), int(rows[-1]) + 1)) for jacobian in jacobians]
            values.append(grouped_products(H, to_flat_order(part, self._columns)[0].to(H), groups, sizes))
        written = torch.cat(values, dim=2)
        if self._is_compared:
            losses = replay.gradient(state, data, exact=True).losses
            expected = data.c.to(H) * self._along(state, data, H.sum(dim=(0, 1))[None], losses)[0]
            if not _is_same(written.sum(dim=(0, 1, 3)), expected, expected.abs().max()):
                return None
        self._in_modes[key] = net
        return written

    def _along(
        self, state: Float[Tensor, " PQ"], data: PassData, directions: Float[Tensor, "R P"], expected: Tensor | None
    ) -> Float[Tensor, "R n"]:
        """Differentiate the losses of a pass, whose values may be known, along some directions of the weights."""
        if self._has_forward_mode:
            try:
                for _ in range(2):
                    primals, slopes = self._forward(state, data, directions)
                    # forward mode may draw other random numbers, or take another kernel
                    if expected is None or _is_same(primals, expected, expected.abs().max().clamp(min=1.0)):
                        return slopes.to(directions)
                    if not self._rows.works:
                        break
                    self._rows.works = False
            except RuntimeError:  # NotImplementedError among them
                pass
            self._has_forward_mode = False
        return self._sample_by_sample(state, data, directions)

    def _forward(self, state: Tensor, data: PassData, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses and their derivatives along all directions, mapped over directions where torch can.

        What draws random numbers is not mapped.
        """
        graph = self.block.recorded_net.model.signature.graph
        at_once = self._memory.forward_mode_directions(len(data.X) if graph is None else graph.num_nodes)
        draws = data.forward.random_state is not None or data.forward.device_random_state is not None
        primals, slopes = (MappedRows(works=False) if draws or at_once == 1 else self._rows)(
            len(directions),
            lambda: self._mapped(state, data, directions, at_once),
            lambda k: self._single(state, data, directions[k]),
        )
        return primals, slopes

    def _single(self, state: Tensor, data: PassData, direction: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses, and their derivatives along one direction, by one forward-mode pass."""
        replay = self.run.passes
        params = replay.params(state, data)
        named = replay.model.unflatten(direction)
        tangents = {name: torch.empty_like(params[name]).copy_(named[name]) for name in replay.model.names}
        with torch.no_grad(), forward_mode():
            duals = {name: fwAD.make_dual(params[name], tangent) for name, tangent in tangents.items()}
            primal, slope = fwAD.unpack_dual(replay.losses({**params, **duals}, data))
        return primal, torch.zeros_like(primal) if slope is None else slope

    def _mapped(self, state: Tensor, data: PassData, directions: Tensor, at_once: int) -> tuple[Tensor, Tensor]:
        """Return the losses and their derivatives along all directions, several by one forward-mode pass."""
        replay = self.run.passes
        params = replay.params(state, data)
        weights = {name: params[name] for name in replay.model.names}

        def losses(weights: dict[str, Tensor]) -> Tensor:
            others = {name: value.clone() for name, value in params.items() if name not in weights}  # a pass moves them
            return replay.losses({**others, **weights}, data)

        def along(direction: Tensor) -> tuple[Tensor, Tensor]:
            pair = jvp(losses, (weights,), (replay.model.unflatten(direction),))
            return pair[0], pair[1]

        reference = params[replay.model.names[0]]
        with torch.no_grad(), exclusive_forward_mode():
            primals, slopes = vmap(along, chunk_size=at_once)(directions.to(reference))
        return primals, slopes

    def _sample_by_sample(self, state: Tensor, data: PassData, directions: Tensor) -> Tensor:
        """Write each loss's gradient out by a forward and backward pass of its own: works wherever training does."""
        columns = []
        for row in range(len(data.X)):
            alone = torch.zeros_like(data.c)
            alone[row] = 1.0
            columns.append(directions @ self.run.passes.gradient(state, replace(data, c=alone), exact=True).gradient)
        return torch.stack(columns, dim=1)


def _loss_cotangents(block: Predictions, data: PassData, part: Tensor) -> Cotangents:
    """Return the one cotangent of each row's weighted loss, with the targets as seen."""
    forward = data.forward
    seen, c = forward.targets, data.c[part]
    if seen is not None:  # which of these rows, that follow each other, have targets of their own
        index = seen.index.to(part.device) - part[0]
        is_own = (index >= 0) & (index < len(part))
        seen = type(seen)(index[is_own], seen.values.to(part.device)[is_own])
    cotangents = None if forward.cotangents is None else forward.cotangents[part.to(forward.cotangents.device)]
    own_pass = type(forward)(len(part), targets=seen, cotangents=cotangents)
    own = PassData(own_pass, data.samples[part], data.X[part], data.y[part], c)
    loss = block.recorded.loss

    def derivative(z: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            (slope,) = torch.autograd.grad(seen_losses(loss, leaf, own).sum(), leaf)
        return (c.to(z)[:, None] * slope)[None]

    return Cotangents(derivative)


def _is_same(values: Tensor, expected: Tensor, size: Tensor) -> bool:
    allowed = _ROUNDING.get(values.dtype, 1e-2) * size
    return bool(((values - expected).abs() <= allowed).all())


class AdjointTerms(AttributionWork):
    """The terms of any linear update rule, by adjoints: each block of points goes through the whole run, backward.

    With H_s the adjoint of h (`propagate`), sample i adds -<H_s, grad_scale_s c_i grad loss_i(w_s)>.
    """

    keeps_residuals = True

    def terms(
        self, block: Predictions, totals: TermSums, number: int, sums: Sums
    ) -> Iterator[tuple[Integral | None, int, Tensor | None]]:
        """Go through the run from its last step, and add every term to the totals."""
        trajectory, X, sizes = block.trajectory, block.X, block.net.model.sizes
        products = LossProducts(block, RunReplay(block.recorded.trained, block.recorded_net.model, X))
        adjoint, stretch = sums.carried.get("adjoint"), None
        for s in reversed(range(trajectory.num_steps - sums.steps)):
            step, uncounted = trajectory.steps[s], None
            if stretch is None or s not in stretch.steps:
                steps, stretch = stretch_of(self.kernel.path, s, trajectory.num_steps), None
                stretch = average_over(block, steps, self.rows_per_block, splits_statistics=self._splits(totals))
                # a pass that resumes within a chord has counted it
                uncounted = stretch.integral if s == steps[-1] else None
            Phi, u = stretch.of_weights, step_coefficients(trajectory, s, X)
            w, P = block.trained_state(s), Phi.shape[2]
            w, d = w[:P], block.state(s + 1)[:P] - block.state(s)[:P]
            change = (Phi @ d).T  # N K
            totals.add_change(change)
            if trajectory.average is not None and len(stretch.steps) > 1:
                Phi = Phi.clone()  # it is overwritten
            E, of_optimizer, H, N, adjoint = propagate_step(trajectory, s, sizes, Phi, adjoint)
            decay: Tensor | None = None
            of_second = [] if N is None else [(N, second_coefficients(u, sizes, w)[-1])]
            for of_pull, factor in ((H, u.weight_decay), (of_optimizer, u.decoupled_decay), *of_second):
                if factor.any():
                    pull = broadcast_to_params(factor, sizes, w) * w
                    found = grouped_products(of_pull, pull[None], self.parts, sizes).squeeze(2)  # N K G
                    decay = found if decay is None else decay + found
            if decay is not None:
                totals.add("decay", s, -decay)
            H = H if bool((u.grad_scale == 1).all()) else H * broadcast_to_params(u.grad_scale, sizes, H)
            for data in products.run.data(step):
                values, rounding = products(step, data, H, self.parts)
                totals.add_samples(s, data.samples, -values)
                if rounding is not None:
                    totals.add("unexplained", s, -rounding)
            residual = self.residuals[s]
            if residual is not None:
                totals.add("unexplained", s, grouped_products(E, residual.to(E)[None], self.parts, sizes).squeeze(2))
            if trajectory.statistics is not None:
                self._add_statistics(totals, products, step, stretch, change)
            if s == 0 and BEFORE in trajectory.sources and adjoint is not None:
                carried, average = adjoint.split(len(w), dim=2), trajectory.average
                held = [-m for m in initial_momentum(trajectory, w).split(len(w))]
                pairs = [*zip(carried[: 2 if average is None else -1], held, strict=False)]
                pairs += [] if average is None or average.lead is None else [(carried[-1], average.lead.to(w))]
                for part, vector in pairs:
                    totals.add(BEFORE, 0, grouped_products(part, vector[None], self.parts, sizes).squeeze(2))
            yield uncounted, 1, adjoint

    def _splits(self, totals: TermSums) -> bool:
        return self.splits_statistics and any(own.splits_samples for own in totals.grouped)

    def _add_statistics(
        self, totals: TermSums, products: LossProducts, step: Step, stretch: StretchAverage, change: Tensor
    ) -> None:
        """Add what the moving statistics add in a step, in which the weights change the outputs by `change`, (N, K)."""
        block, s, Phi_b = products.block, step.index, stretch.of_statistics
        if len(stretch.steps) == 1:
            total = block.select_outputs(stretch.integral.total) - change
        else:
            before, after = (block.state(state)[block.net.model.num_weights :] for state in (s, s + 1))
            total = torch.einsum("knq,q->nk", Phi_b, after - before)
        if Phi_b is None or not self._splits(totals):
            totals.add_statistics(s, total, None)
            return
        state, samples, added = block.trained_state(s), [], []
        passes = products.run.data(step)
        moves = products.run.unseen_moves(step, passes)
        for number, data in enumerate(passes):
            if any(move is not None and move.returns for move in moves[number + 1 :]):
                continue  # what it moved was left for the statistics at the start of the step
            increments = statistics_increments(products.run.passes, state, data)
            samples.append(data.samples)
            added.append(torch.einsum("knq,bq->nkb", Phi_b, increments.to(Phi_b)))
        totals.add_statistics(s, total, (torch.cat(samples), torch.cat(added, dim=2)))
