"""Contributions under any linear update rule: adjoints from the last step back (docs/theory.md, sections 4 and 7).

A normalisation in training mode changes its statistics by b' - b = m (stat - b), and its batch's statistics are sums
over the rows: stat = sum_i stat_i. Row i adds m (stat_i - b / n), centred, so that nothing remains.

The averaged gradients along the path, and each vector that the recursion carries, are buffers with P columns and one
row per requested number. A step processes some columns at a time, which stay in the cache while they are moved one step
back and multiplied by everything that the step adds. Steps of one stretch are processed in groups: some columns through
all steps of the group, then the next columns, so a group reads the buffers once. Buffers that do not fit into memory
are mapped to a temporary file.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.autodiff.jacobians import secant_jacobians
from epk_gp.autodiff.uses import by_parameter
from epk_gp.core.gradients import PassData
from epk_gp.core.plans import rows_of_weights, rows_per_pass
from epk_gp.core.replayed_steps import RunReplay
from epk_gp.core.step import BEFORE, Step
from epk_gp.core.trajectory import Trajectory, initial_momentum, step_coefficients
from epk_gp.kernel_machine.curvature import statistics_increments
from epk_gp.kernel_machine.loss_products import (
    LossProducts,
    Part,
    RecordedRows,
    add_products,
    coefficients_of,
    parts_of,
)
from epk_gp.kernel_machine.terms import AttributionWork, Predictions, TermSums, integrate_stretches
from epk_gp.optimizers.update_rules import (
    MATRICES,
    UpdateCoefficients,
    apply_matrices,
    broadcast_to_params,
    second_coefficients,
)
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.intervals import OPEN, SETTLED, fixed_status, residual_status, rounding_of
from epk_gp.quadrature.rules import AdaptiveRule, QuadratureStatus, stretches_of
from epk_gp.work.run import Sums

# The vectors that the recursion carries from a step to the one before it, if they are not zero: the adjoint "momentum"
# of the buffer, "second" of the second one, "average" of averaged weights, and "move.m" of the move in step m; (R, P)
# each.
Carried = dict[str, Tensor]


def carried_before(trajectory: Trajectory, s: int, u: UpdateCoefficients, carried: Iterable[str]) -> set[str]:
    """Return the names of the carried vectors in a step, given those after it."""
    names, move = {*carried}, trajectory.moves.get(s)
    names |= {"momentum", "second"} if u.second else set()
    names |= {"momentum"} if u.momentum_lr.any() or u.inner_left or u.inner_right else set()
    names |= set() if trajectory.average is None else {"average"}
    return names | (set() if move is None or move.anchor >= s else {f"move.{s}"})


def propagate_step(
    trajectory: Trajectory, s: int, u: UpdateCoefficients, sizes: tuple[int, ...], Phi: Tensor, carried: Carried
) -> tuple[Float[Tensor, "R p"], Float[Tensor, "R p"], Float[Tensor, "R p"], float, Float[Tensor, "R p"] | None]:
    """Go one step of a run back: return the adjoints of its change of the weights, and of the parts of this change.

    For a run of averaged weights, whose steps are a_s (d_s + e_s) with the lead e_{s+1} = (1 - a_s) (d_s + e_s), the
    adjoint of the recorded step d_s is E_s = a_s Phi_s + (1 - a_s) E_{s+1}. It replaces Phi_s. A move in step m towards
    the state w_a (`Step.move`) is d_m = (1 - share) (the optimizer's part) - share (d_a + ... + d_{m-1}): it adds
    -share E_m to the adjoint of each step from the anchor up to m.

    Args:
        trajectory: The run.
        s: The step.
        u: The step's coefficients for some of the parameters.
        sizes: Number of weights of each of them.
        Phi: The averaged gradients of the outputs along the path, in these weights: (R, p).
        carried: The carried vectors from the later step, in these weights; they are overwritten, and `decay_buffers`
            turns them into the vectors for the earlier step.

    Returns:
        The adjoints of the change, of the optimizer's part of it, and the result of `propagate`. They may be among the
        carried vectors.
    """
    E, moves = Phi, trajectory.moves
    if trajectory.average is not None:
        a = float(trajectory.average.coefficients[s])
        E = carried["average"].mul_(1 - a).add_(Phi, alpha=a)
    for m in sorted(moves, reverse=True):
        if m > s >= moves[m].anchor:
            E = E - carried[f"move.{m}"]
    of_optimizer = E
    if (move := moves.get(s)) is not None:
        of_optimizer = (1 - move.share) * E
        if move.anchor < s:
            carried[f"move.{s}"].copy_(move.share * E)
    return E, of_optimizer, *propagate(u, sizes, of_optimizer, carried)


def propagate(
    u: UpdateCoefficients, sizes: tuple[int, ...], Phi: Float[Tensor, "R p"], carried: Carried
) -> tuple[Float[Tensor, "R p"], float, Float[Tensor, "R p"] | None]:
    """Go one step back: return the adjoint of h without a factor, this factor, and the adjoint of the second buffer.

    With the coefficients of step s, and left^T Phi right^T instead of Phi in M and H, these are

        N = rate Phi + (second_beta N)_{s+1},   M = momentum_lr Phi + of_m N + (beta M)_{s+1},
        H = one_minus_dampening M + lr Phi + of_h N

    Args:
        u: The coefficients.
        sizes: Number of weights of each of their parameters.
        Phi: The adjoint of the weights after the step.
        carried: (beta M)_{s+1} as "momentum" and (second_beta N)_{s+1} as "second", if they may be nonzero; they are
            overwritten with M and N. The adjoint of h may be M.
    """
    M, N = carried.get("momentum"), carried.get("second")
    momentum_lr, of_momentum, lr = (
        broadcast_to_params(v, sizes, Phi) for v in (u.momentum_lr, u.one_minus_dampening, u.lr)
    )
    if N is not None and M is not None:
        rate, _, of_h, of_m, _ = second_coefficients(u, sizes, Phi)
        M.addcmul_(N.addcmul_(Phi, rate), of_m)
    Phi = apply_matrices(u, sizes, Phi, transposed=True)
    if M is None:
        return lr * Phi, 1.0, None
    if u.inner_left or u.inner_right:
        own_m, own_h = (apply_matrices(u, sizes, r * Phi, transposed=True, inner=True) for r in (momentum_lr, lr))
        H = (of_momentum * M.add_(own_m)).add_(own_h)
    else:
        M.addcmul_(Phi, momentum_lr)
        if N is None and not u.lr.any() and of_momentum.stride() == (0,):  # one number, as for Adam
            return M, float(of_momentum[0]), None
        H = (of_momentum * M).addcmul_(Phi, lr)
    return H if N is None else H.addcmul_(N, of_h), 1.0, N


def decay_buffers(u: UpdateCoefficients, sizes: tuple[int, ...], carried: Carried) -> None:
    """Multiply the adjoints M and N of a step (`propagate`) to the values that the earlier step receives."""
    if (M := carried.get("momentum")) is not None:
        M.mul_(broadcast_to_params(u.beta, sizes, M))
    if (N := carried.get("second")) is not None:
        N.mul_(second_coefficients(u, sizes, N)[1])


def ended_moves(trajectory: Trajectory, s: int, carried: Iterable[str]) -> set[str]:
    """Return the carried vectors of moves that no step before s depends on."""
    moves = {name for name in carried if name.startswith("move.")}
    return {name for name in moves if trajectory.moves[int(name.removeprefix("move."))].anchor >= s}


@dataclass(frozen=True, eq=False)
class StretchAverage:
    """The adjoint of every step of a stretch: the effect of a change of the state in any of them at N points.

    Attributes:
        steps: The steps of the stretch.
        of_weights: Phi, the averaged gradients in the weights, if they are kept.
        of_statistics: Phi^b, the averaged gradients in the moving statistics, if they were requested.
        integral: The integral along the stretches that were averaged together.
        total: The integral along this stretch.
        change: The outputs' change by the weights along it, if it has one step and the change is known.
    """

    steps: range
    of_weights: Float[Tensor, "N K P"]
    of_statistics: Float[Tensor, "K N Q"] | None
    integral: Integral
    total: Float[Tensor, "N C"]
    change: Float[Tensor, "N K"] | None = None


# A change of the outputs that is a sum over the weights may have an error of this many eps of the sum of its terms'
# sizes, for each layer with weights (measured on diverging ResNet-18s in float32: up to 8).
_SUM_ROUNDING = 16

# Least number of rows of a pass that averages operations, if they fit: measured, a GPT of 0.8 million weights and 64
# positions takes 2.4 times as long row by row as 8 at a time, although their activations do not fit into the cache.
_FEW_ROWS = 8


# Takes the averaged gradients of some neighbouring points in one parameter: the points, its number, and (K, n, size).
Take = Callable[[slice, int, Float[Tensor, "K n size"]], object]


def average_over(
    block: Predictions,
    stretches: Sequence[range],
    max_nodes: int,
    Phi: Float[Tensor, "G N K P"],
    *,
    splits_statistics: bool,
) -> list[StretchAverage]:
    """Average the gradients of the points over neighbouring stretches of the path; over one for a layerwise path.

    Args:
        block: The predictions.
        stretches: The steps of each stretch.
        max_nodes: Largest number of nodes evaluated at a time.
        Phi: Memory for the averages in the weights, which is overwritten.
        splits_statistics: Whether the averages in the moving statistics are needed even if their sum is already known.
    """
    if block.is_layerwise:
        sizes = list(block.net.model.sizes)

        def write(points: slice, place: int, values: Tensor) -> None:
            Phi[0, points].split(sizes, dim=-1)[place].copy_(values.transpose(0, 1))

        (steps,) = stretches
        return [replace(layerwise_average(block, steps, max_nodes, write), of_weights=Phi[0])]
    lines, N = integrate_stretches(block, stretches, max_nodes), len(block.X)
    wants_statistics = splits_statistics or any(len(steps) > 1 for steps in stretches)
    of_statistics: Sequence[Tensor | None] = [None] * len(stretches)
    if wants_statistics and block.trajectory.statistics is not None:
        of_statistics = lines.averaged_statistics_jacobian().split(N, dim=1)
    lines.average_into(Phi)
    totals = lines.integral.total.split(N)
    is_known = block.trajectory.statistics is None
    return [
        StretchAverage(
            steps, own, b, lines.integral, total, block.select_outputs(total) if is_known and len(steps) == 1 else None
        )
        for steps, own, b, total in zip(stretches, Phi, of_statistics, totals, strict=True)
    ]


def layerwise_average(block: Predictions, steps: range, max_nodes: int, take: Take) -> StretchAverage:
    """Average the derivative of every operation over a stretch, and pass the averages in the weights to `take`.

    The averages also give the integral; the change of the outputs by the averages is compared with it.
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
    change, size, num_layers = *w.new_zeros(2, len(X), block.num_outputs), 1
    few = block.memory_budget // (16 * net.itemsize * net.plan.activations_per_sample)
    for points in torch.arange(len(X), device=X.device).split(max(1, rows // 2, min(few, _FEW_ROWS))):
        shared = block.cotangents(points), block.cost, block.head
        z, layers, part = secant_jacobians(net, (w, d), X[points], *shared)
        found.append((z.transpose(0, 1), part))
        own, num_layers = slice(int(points[0]), int(points[-1]) + 1), len(layers)
        directions = d[:P].split(list(net.model.sizes))
        for place, (gradients, direction) in enumerate(zip(by_parameter(net, layers), directions, strict=True)):
            values = gradients.written()  # these are in the cache
            take(own, place, values)
            change[own] += (values @ direction).T
            size[own] += (values.norm(dim=2) * direction.norm()).T
    (start, end), of_statistics = (
        parts[0] if len(parts) == 1 else torch.cat(parts, dim=1) for parts in zip(*found, strict=True)
    )
    size += (of_statistics.abs() @ d[P:].abs()).T
    rounding = _SUM_ROUNDING * num_layers * eps * size.amax(dim=1)
    of_outputs = rounding_of(start, end, w.dtype, net.model.output_size)
    whole = change + (of_statistics @ d[P:]).T
    error = (block.select_outputs(end - start) - whole).abs().amax(dim=1)
    total = whole if block.classes is None else (end - start).scatter(1, block.classes[:, None], whole)
    if isinstance(rule := block.rule, AdaptiveRule):
        status = residual_status(error, torch.maximum(of_outputs, rounding), rule.tol / block.num_stretches)
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
        rounding=torch.maximum(SETTLED * of_outputs, rounding),
    )
    whole = change if len(steps) == 1 else None
    nothing = w.new_empty(len(X), block.num_outputs, 0)
    return StretchAverage(steps, nothing, of_statistics if Q else None, integral, total, whole)


# Bytes of the columns of all buffers that a step processes at a time, including the gradients by which they are
# multiplied. Measured, 100 questions of a GPT of 0.8 million weights, one thread with 1 MB of private cache and 32 MB
# of shared cache: 4.6 training steps per step with 1 MB, 3.5 with 4 and 8, 3.2 with 16 and 32, 3.7 with 64.
_PART_BYTES, _DEVICE_PART_BYTES = 16 << 20, 256 << 20


@dataclass(eq=False)
class StepBack:
    """A step through which the adjoints go back.

    Attributes:
        step: The step.
        u: Its coefficients.
        w: The weights before it.
        d: Their recorded change.
        residual: The part of the change that the update rule does not explain; None if it is rounding.
        passes: Its forward passes.
        recorded: The rows of each pass whose gradients are computed layer by layer; empty for a step whose rows are
            processed with those of other steps.
        carried: Names of the carried vectors.
        stretch: The averages along the stretch that contains the step.
        Phi: The averages in the weights.
        held: The optimizer's state before the step, by the names of carried vectors, if it is a source of its own.
        whole: All columns of the adjoints of the gradient, if they are needed together.
        values: Products of R adjoints with the rows of each pass, (R, B, G).
        sums: Other terms, by their kinds, (R, G).
    """

    step: Step
    u: UpdateCoefficients
    w: Float[Tensor, " P"]
    d: Float[Tensor, " P"]
    residual: Float[Tensor, " P"] | None
    passes: list[PassData]
    recorded: list[list[RecordedRows] | None]
    carried: set[str]
    stretch: StretchAverage
    Phi: Float[Tensor, "R P"]
    held: dict[str, Float[Tensor, " P"]]
    whole: Float[Tensor, "R P"] | None
    values: list[Float[Tensor, "R B G"]]
    sums: dict[str, Float[Tensor, "R G"]]

    @property
    def is_joint(self) -> bool:
        """Whether the gradients of its rows are computed with those of other steps."""
        return not self.recorded

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' gradients, of their products, and of some vectors of P numbers."""
        rows = [own for blocks in self.recorded for own in blocks or ()]
        layers = {id(layer.jacobian): layer.jacobian for own in rows for layer in own.gradients or ()}
        of_rows = sum(jacobian.nbytes for jacobian in layers.values())
        return 8 * self.w.nbytes + of_rows + sum(value.nbytes for value in self.values)

    def go_back(self, trajectory: Trajectory, part: Part, carried: Carried) -> None:
        """Go back in some columns, and add their terms.

        Args:
            trajectory: The run.
            part: The columns.
            carried: The carried vectors from the later step in these columns; overwritten with those for the earlier
                step.
        """
        columns, sizes, sums, Phi = part.columns, part.sizes, self.sums, self.Phi[:, part.columns]
        u, w, d, g = coefficients_of(self.u, part, trajectory.model.shapes), self.w[columns], self.d, part.group
        tiles = {name: carried[name] for name in self.carried}
        E, of_optimizer, H, scale, N = propagate_step(trajectory, self.step.index, u, sizes, Phi, tiles)
        terms = [] if self.stretch.change is not None else [("change", Phi, d[columns])]
        of_second = [] if N is None else [(N, second_coefficients(u, sizes, self.w)[-1])]
        for adjoint, factor in ((H, scale * u.weight_decay), (of_optimizer, u.decoupled_decay), *of_second):
            if factor.any():
                terms.append(("decay", adjoint, -broadcast_to_params(factor, sizes, w) * w))
        if self.residual is not None:
            terms.append(("unexplained", E, self.residual[columns].to(E)))
        for adjoint in {id(adjoint): adjoint for _, adjoint, _ in terms}.values():  # read each adjoint once
            own = [(name, vector) for name, other, vector in terms if other is adjoint]
            products = adjoint @ torch.stack([vector for _, vector in own], dim=1)
            for (name, _), values in zip(own, products.T, strict=True):
                sums[name][:, g] += values
        of_gradient = broadcast_to_params(u.grad_scale, sizes, H)
        if of_gradient.stride() == (0,):
            scale *= float(of_gradient[0])
        else:
            H = H * of_gradient
        if self.whole is not None:
            torch.mul(H, scale, out=self.whole[:, columns])
        for value, blocks in zip(self.values, self.recorded, strict=False):
            for rows in blocks if self.whole is None and blocks else ():
                add_products(value[:, rows.rows, g], H, rows.gradients or [], part, scale)
        decay_buffers(u, sizes, tiles)
        for name in self.held.keys() & tiles.keys():
            sums[BEFORE][:, g] += tiles[name] @ self.held[name][columns]


class AdjointTerms(AttributionWork):
    """The terms of any linear update rule, by adjoints: each block of points goes backwards through the whole run.

    With H_s the adjoint of h (`propagate`), sample i adds -<H_s, grad_scale_s c_i grad loss_i(w_s)>.
    """

    keeps_residuals = True

    def terms(
        self, block: Predictions, totals: TermSums, number: int, sums: Sums
    ) -> Iterator[tuple[Integral | None, int, Carried]]:
        """Go through the run from its last step, and add every term to the totals."""
        trajectory, K, N, G = block.trajectory, block.num_outputs, len(block.X), block.lines_together
        products = LossProducts(block, RunReplay(block.recorded.trained, block.recorded_net.model, block.X))
        P, stretches = block.net.model.num_weights, stretches_of(self.kernel.path, trajectory.num_steps)
        buffer = self._buffer(block).view(1, N, K, P) if G == 1 else block.zeros(min(G, len(stretches)), N, K, P)
        carried = {name: self._buffer(block).copy_(value) for name, value in sums.carried.items()}
        s, averages, first = trajectory.num_steps - sums.steps - 1, dict[int, StretchAverage](), trajectory.num_steps
        while s >= 0:
            uncounted = None
            if s < first:
                number = s // self.kernel.path.every // G * G
                lines = stretches[number : number + G]
                found = average_over(
                    block, lines, self.rows_per_block, buffer[: len(lines)], splits_statistics=self._splits(totals)
                )
                averages, first = {step: own for own in found for step in own.steps}, lines[0].start
                # a pass that resumes within these steps has already counted them
                uncounted = found[0].integral if s == lines[-1][-1] else None
            together = self._steps_back(block, range(first, s + 1), carried, products, totals, averages)
            self._go_back(block, together, carried, products)
            for own in together:
                self._add(block, own, products, totals)
            s, count = s - len(together), len(together)
            together.clear()  # including the last of them, before others are prepared
            del own
            yield uncounted, count, carried

    def _buffer(self, block: Predictions) -> Float[Tensor, "R P"]:
        """Return a vector of weights for each requested number, in memory or in a temporary file."""
        most = max(1, block.memory.adjoint_points(1))
        return rows_of_weights(block.num_outputs * len(block.X), block.net.model.num_weights, block.zeros(0), most)

    def _steps_back(
        self,
        block: Predictions,
        steps: range,
        carried: Carried,
        products: LossProducts,
        totals: TermSums,
        averages: Mapping[int, StretchAverage],
    ) -> list[StepBack]:
        """Prepare the last of some steps, with the steps before it that fit into an eighth of the budget.

        If all columns of the adjoints are needed together, the step is prepared alone, unless the gradients of the rows
        of several steps are computed together.
        """
        trajectory, found, left = block.trajectory, list[StepBack](), block.memory_budget // 8
        names, G = {*carried}, int(self.parts.max()) + 1
        P, R = block.net.model.num_weights, block.num_outputs * len(block.X)
        if block.lines_together > 1:
            products.start_together([trajectory.steps[s] for s in reversed(steps)], R)
        for s in reversed(steps):
            step, u, w = trajectory.steps[s], step_coefficients(trajectory, s, block.X), block.trained_state(s)[:P]
            d, residual = block.state(s + 1)[:P] - block.state(s)[:P], self.residuals[s]
            names = carried_before(trajectory, s, u, names)
            if found and names - carried.keys():  # there is room for the buffers of one move
                break
            for name in names - carried.keys():
                carried[name] = self._buffer(block).zero_()
            passes, recorded, num_held = products.passes(step), [], 0
            is_joint = s in products.together and not self.takes_whole(totals, passes)
            if found and is_joint != found[-1].is_joint:
                break
            for data in [] if is_joint else passes:
                recorded.append(products.start(step, data, R, num_held))
                num_held += len(data.X)
            has_all = all(blocks is not None and all(rows.gradients for rows in blocks) for blocks in recorded)
            has_all = has_all and not is_joint and not self.takes_whole(totals, passes)
            whole = products.adjoints(s) if is_joint else None if has_all else block.zeros(R, P)
            values = [block.zeros(R, len(data.X) if has_all else 0, G) for data in passes]
            held = self._before_the_run(block, w) if s == 0 and BEFORE in trajectory.sources else {}
            sums = defaultdict[str, Tensor](lambda: block.zeros(R, G))
            Phi = averages[s].of_weights.flatten(0, 1)
            own = StepBack(
                step, u, w, d, residual, passes, recorded, names, averages[s], Phi, held, whole, values, sums
            )
            found.append(own)
            names, size = names - ended_moves(trajectory, s, names), own.nbytes
            left -= size
            if not (has_all or is_joint) or left < size:
                break
        return found

    def _go_back(
        self,
        block: Predictions,
        together: Sequence[StepBack],
        carried: Carried,
        products: LossProducts,
    ) -> None:
        """Go several steps back: some columns through all of them, then the next columns."""
        kept = {k for own in together for name in MATRICES for k in getattr(own.u, name)}
        num_rows = max(sum(len(data.X) for data in own.passes) for own in together)
        width = self._width(together[0].Phi, num_rows)
        for part in parts_of(block.net.model.shapes, self.parts.tolist(), width, kept):
            tiles = {name: vectors[:, part.columns] for name, vectors in carried.items()}
            for own in together:
                own.go_back(block.trajectory, part, tiles)
        if together[0].is_joint:
            steps = [own.step.index for own in together]
            values = products.of_steps(steps, self.parts)
            for own, value in zip(together, values, strict=True):
                own.values, own.whole = [value], None
        for name in ended_moves(block.trajectory, together[-1].step.index, carried):
            del carried[name]

    def _add(self, block: Predictions, own: StepBack, products: LossProducts, totals: TermSums) -> None:
        """Add the terms of a step."""
        s, sums, stretch = own.step.index, own.sums, own.stretch
        for number, (data, value) in enumerate(zip(own.passes, own.values, strict=True)):
            if own.whole is not None:
                self.add_whole(totals, products, own.step, data, own.whole)
                value, rounding = products.of_whole(own.step, data, own.whole, self.parts, own.recorded[number])
                if rounding is not None:
                    sums["unexplained"] = sums["unexplained"] - rounding
            totals.add_samples(s, data.samples, -self._by_point(block, value))
        if (change := stretch.change) is None:
            change = self._by_point(block, sums.pop("change")).sum(dim=2)
        totals.add_change(change)
        for name, value in sums.items():
            totals.add(name, s, self._by_point(block, value))
        if block.trajectory.statistics is not None:
            self._add_statistics(totals, products, own.step, stretch, change)

    def takes_whole(self, totals: TermSums, passes: Sequence[PassData]) -> bool:
        """Return whether `add_whole` needs the adjoints of a step with these passes."""
        return False

    def add_whole(
        self, totals: TermSums, products: LossProducts, step: Step, data: PassData, H: Float[Tensor, "R P"]
    ) -> None:
        """Add further requested results of a pass, given the adjoints of the gradient."""

    def _by_point(self, block: Predictions, values: Float[Tensor, "R *rest"]) -> Float[Tensor, "N K *rest"]:
        """Arrange values for all outputs of all points by points."""
        by_point: Tensor = values.unflatten(0, (-1, block.num_outputs))
        return by_point

    def _width(self, Phi: Tensor, num_rows: int) -> int:
        """Return the number of columns of all buffers, and of rows' gradients, that stay in the cache."""
        num_bytes = _PART_BYTES if Phi.device.type == "cpu" else _DEVICE_PART_BYTES
        return max(1, num_bytes // (Phi.dtype.itemsize * (3 * len(Phi) + num_rows)))

    def _before_the_run(self, block: Predictions, w: Float[Tensor, " P"]) -> dict[str, Float[Tensor, " P"]]:
        """Return the states of the optimizer, and of the average, before the first step."""
        held, average = (-initial_momentum(block.trajectory, w)).split(len(w)), block.trajectory.average
        found = dict(zip(("momentum", "second"), held, strict=False))
        return found if average is None or average.lead is None else found | {"average": average.lead.to(w)}

    def _splits(self, totals: TermSums) -> bool:
        return self.splits_statistics and any(own.splits_samples for own in totals.grouped)

    def _add_statistics(
        self, totals: TermSums, products: LossProducts, step: Step, stretch: StretchAverage, change: Tensor
    ) -> None:
        """Add the moving statistics' contribution in a step whose weights change the outputs by `change`, (N, K)."""
        block, s, Phi_b = products.block, step.index, stretch.of_statistics
        if len(stretch.steps) == 1:
            total = block.select_outputs(stretch.total) - change
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
                continue  # its change is reset to the statistics at the start of the step
            increments = statistics_increments(products.run.passes, state, data)
            samples.append(data.samples)
            added.append(torch.einsum("knq,bq->nkb", Phi_b, increments.to(Phi_b)))
        totals.add_statistics(s, total, (torch.cat(samples), torch.cat(added, dim=2)) if samples else None)
