"""The training side of an attribution: products of adjoints with the gradients of the losses of a step's rows.

If rows do not depend on each other, one pass gives the gradients of all of them, layer by layer: a product is then a
matrix product for each layer. Otherwise it is one directional derivative for each adjoint, and one forward-mode pass of
the batch gives those of all its rows:

    <H, grad loss_i(w)> = d/de loss_i(w + e H) at e = 0

The counted cost chooses the cheaper way. If torch has no forward mode, or it differs from plain autograd, each sample
has a separate backward pass.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float, Int64
from torch import Tensor
from torch.func import jvp, vmap

from epk_gp.autodiff.dense import Cotangents, PlannedModel
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import ContractionCost
from epk_gp.autodiff.uses import ParameterGradients, by_parameter
from epk_gp.core.gradients import PassData, joined_passes, seen_losses, some_rows
from epk_gp.core.model import FunctionalModel
from epk_gp.core.plans import rows_per_pass
from epk_gp.core.replayed_steps import RunReplay
from epk_gp.core.step import Step, tensor_bytes
from epk_gp.core.torch_overrides import FlopCount, MappedRows, exclusive_forward_mode, forward_mode
from epk_gp.core.trajectory import step_coefficients
from epk_gp.kernel_machine.terms import Predictions
from epk_gp.optimizers.update_rules import BY_PARAMETER, SECOND, UpdateCoefficients, broadcast_to_params

# Cost of a forward-mode pass in addition to its products, and of writing and reading one number of samples' gradients,
# in floating-point operations: 0.7 to 2 ms and 1 to 3 ns at 1e10 operations per second (docs/benchmarks.md).
_PASS_OVERHEAD, _WRITING = 1e7, 20.0

# Relative difference by rounding between a loss, or a derivative, and the same value in another order of sums.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}

# Forward mode also follows values that a network computes under no_grad, which are constant in the backward passes of
# training. If products miss the whole gradient by more than rounding, plain autograd replaces them if its error is this
# much smaller.
_DOUBTS = 16.0

# A way of computing products is compared with plain autograd, row by row if random numbers are drawn, in the first pass
# of a kind, and its sum over the rows in every pass after this number: a choice. The certificate detects errors of the
# sum in the other passes; shares that rows exchange in a later pass of the kind would not be detected.
_COMPARED_EVERY = 16

# Largest rounding, as a share of the products' absolute sum, where a preconditioner amplifies it. Measured for a bias
# in front of BatchNorm under Adam: 2e-10 in float64, 3e-2 in float32.
_AMPLIFIED_ROUNDING = {torch.float64: 1e-6, torch.float32: 0.3}


@dataclass(frozen=True)
class Part:
    """Neighbouring columns of the flat weights that are processed together: some parameters, or rows of one.

    Attributes:
        first: The first of the parameters.
        columns: The columns.
        pieces: The columns of each parameter, counted within the parameter.
        group: The group of their parameters.
    """

    first: int
    columns: slice
    pieces: tuple[slice, ...]
    group: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of columns of each parameter."""
        return tuple(piece.stop - piece.start for piece in self.pieces)


def coefficients_of(u: UpdateCoefficients, part: Part, shapes: Sequence[torch.Size]) -> UpdateCoefficients:
    """Return a part's coefficients from the coefficients of a step of all L parameters."""
    if (num_params := len(shapes)) == len(part.pieces) and part.sizes == tuple(shape.numel() for shape in shapes):
        return u
    first, own = part.first, {part.first + k: piece for k, piece in enumerate(part.pieces)}
    numbers = (v[first : first + len(own)] if len(v) == num_params else v[part.columns] for v in u)
    others: dict[str, Any] = {n: {k - first: Q for k, Q in getattr(u, n).items() if k in own} for n in BY_PARAMETER}
    for k, rows in others[SECOND].items():
        others[SECOND][k] = rows if rows.shape[1] == 1 else rows[:, own[first + k]]
    return UpdateCoefficients(*numbers, **others)


def parts_of(shapes: Sequence[torch.Size], groups: Sequence[int], width: int, whole: Iterable[int] = ()) -> list[Part]:
    """Cut the flat weights into parts that each belong to one group.

    Args:
        shapes: Shapes of the L parameters.
        groups: The group of each.
        width: Largest number of columns of a part, unless one row of a parameter has more.
        whole: Parameters that are not cut.
    """
    parts, start, kept = list[Part](), 0, {*whole}
    for k, (shape, group) in enumerate(zip(shapes, groups, strict=True)):
        size, row = shape.numel(), max(1, shape[1:].numel())
        step = size if k in kept else max(1, width // row) * row
        last = parts[-1] if parts else None
        if last is not None and last.group == group and start + size - last.columns.start <= width:
            columns = slice(last.columns.start, start + size)
            parts[-1] = Part(last.first, columns, (*last.pieces, slice(0, size)), group)
        else:
            ends = [(a, min(a + step, size)) for a in range(0, size, max(1, step))]
            parts += [Part(k, slice(start + a, start + b), (slice(a, b),), group) for a, b in ends]
        start += size
    return parts


@dataclass(frozen=True, eq=False)
class RecordedRows:
    """Some rows of a pass.

    Attributes:
        rows: The range of the rows.
        gradients: Their gradients in each parameter; None if they are computed when they are needed.
    """

    rows: slice
    gradients: list[ParameterGradients] | None = None


@dataclass(eq=False)
class LossProducts:
    """The training side of an attribution; used by one thread only.

    Every way is compared with plain autograd in the first pass of a kind, row by row if random numbers are drawn
    (otherwise the plan was already tested for that), and by the sum of all rows in every 16th pass after it; forward
    mode is compared in all passes if a preconditioner may amplify rounding.

    Attributes:
        block: The predictions.
        run: Replays the forward passes.
    """

    block: Predictions
    run: RunReplay
    _has_forward_mode: bool = True
    # by the kind of passes: networks in their modes that return the losses; None if gradients by layer differ from
    # those of the passes
    _in_modes: dict[tuple[bytes, torch.dtype], PlannedModel | None] = field(default_factory=dict)
    # passes, one for each direction, because a loss may be near zero
    _rows: MappedRows = field(default_factory=lambda: MappedRows(least=(1.0, 0.0)))
    _flops_per_row: float | None = None
    _found_rounding: float = 0.0  # largest relative error of forward mode and plain autograd so far
    _counts: Counter[tuple[bytes, torch.dtype]] = field(default_factory=Counter)  # numbers of passes of a kind
    _by_row: set[tuple[bytes, torch.dtype]] = field(default_factory=set)  # kinds for which every row was compared
    _is_compared: bool = True  # whether the present pass is compared
    # for steps that are processed together: the offset and the number of rows of each, and the rows' gradients
    together: dict[int, tuple[int, int]] = field(default_factory=dict)
    _gradients: list[ParameterGradients] = field(default_factory=list)
    _adjoints: Tensor | None = None  # adjoints of the gradients of these steps, (T, R, P)
    _passes: dict[int, list[PassData]] = field(default_factory=dict)
    _present: Any = None  # data of the present step

    def __post_init__(self) -> None:
        """Read the recorded network's plan."""
        self.net = self.block.recorded_net
        self.memory = self.net.memory_plan(self.block.memory_budget)
        self._all_dense = not self.net.plan.supports_interpolation

    def start(self, step: Step, data: PassData, num_directions: int, num_held: int = 0) -> list[RecordedRows] | None:
        """Return the rows of a pass whose gradients are computed layer by layer; None if they are not.

        Args:
            step: The step.
            data: The pass.
            num_directions: Number of adjoints by which they will be multiplied.
            num_held: Number of rows whose gradients are already held: more are computed when they are needed.
        """
        kind, state, n = self._kind_of(data), self.block.trained_state(step.index), len(data.X)
        self._is_compared = self._counts[kind] % _COMPARED_EVERY == 0
        self._counts[kind] += 1
        if not self._goes_by_layers(data, num_directions):
            return None
        at_once = self.memory.adjoint_samples()
        size = min(at_once, rows_per_pass(self.net.plan, self.net.itemsize)) if self._takes_outputs(data) else n
        blocks = [RecordedRows(slice(a, min(a + size, n))) for a in range(0, n, size)]
        if num_held + n <= at_once:
            blocks = [replace(own, gradients=self._record(state, data, own.rows)) for own in blocks]
        is_first = kind not in self._by_row
        if (self._is_compared or is_first) and not self._is_verified(state, data, blocks, by_row=is_first):
            self._in_modes[kind] = None
        self._by_row.add(kind)
        return None if self._in_modes.get(kind, self.net) is None else blocks

    def passes(self, step: Step) -> list[PassData]:
        """Return the passes of a step with their data, which are held while steps are processed together."""
        if step.index not in self._passes:
            self._passes[step.index] = self.run.data(step)
        return self._passes[step.index]

    def start_together(self, steps: Sequence[Step], num_directions: int) -> None:
        """Compute the gradients of the rows of the first of some steps at once, layer by layer, if that is possible.

        Each of these steps has one pass, of the same kind; if one has fewer rows than others, some rows are repeated
        with weight 0.
        """
        found, most, kind = list[tuple[Step, PassData]](), 0, None
        at_once = min(self.memory.adjoint_samples(), rows_per_pass(self.net.plan, self.net.itemsize))
        for step in steps if self.net.plan.supports_stacking else ():
            data, *others = self.passes(step)
            most = max(most, len(data.X))
            is_alike = kind in (None, self._kind_of(data)) and not others and self._takes_outputs(data)
            if not is_alike or (len(found) + 1) * most > at_once or not self._goes_by_layers(data, num_directions):
                break
            kind = self._kind_of(data)
            found.append((step, data))
        self.together, self._gradients = {}, []
        self._passes = {step.index: [data] for step, data in found}
        if len(found) < 2:
            return
        sizes, most = [len(data.X) for _, data in found], max(len(data.X) for _, data in found)
        passes, replay = joined_passes([data for _, data in found], most), self.run.passes
        states = [replay.state(state := self.block.trained_state(s.index), data).to(state) for s, data in found]
        X, cost = self.net.model.spec.cast(passes.X), ContractionCost(1, 1, keeps_factors=True)
        cotangents = _loss_cotangents(self.block, passes, slice(None))
        jacobians = layer_jacobians(self.net, WeightLocation(torch.stack(states)), X, cotangents, cost)
        self._gradients = by_parameter(self.net, jacobians)
        self.together = {step.index: (k, size) for k, ((step, _), size) in enumerate(zip(found, sizes, strict=True))}
        (first, data), P = found[0], self.net.model.num_weights
        direction = _noise(P, replay.dtype_of(data)).to(states[0])
        self._adjoints = direction[None]
        values = self.of_steps([first.index], torch.zeros(len(self.net.model.sizes), dtype=torch.int64))
        self._adjoints = direction.new_empty(len(found), num_directions, P)
        exact = self.run.passes.gradient(self.block.trained_state(first.index), data, exact=True).gradient
        if not _is_same(values[0].sum(), direction[0] @ exact, values[0].abs().sum(), replay.dtype_of(data)):
            self.together, self._gradients = {}, []

    def adjoints(self, step: int) -> Float[Tensor, "R P"]:
        """Return the memory for the adjoints of a step that is processed together with others."""
        if self._adjoints is None:
            raise ValueError("no steps are taken together: this is a bug in epk_gp.")
        return self._adjoints[self.together[step][0]]

    def of_steps(self, steps: Sequence[int], groups: Int64[Tensor, " L"]) -> list[Float[Tensor, "R B G"]]:
        """Return c_i <H, grad loss_i> for the rows of jointly processed steps, over each group of parameters."""
        T, (first, _) = len(steps), self.together[steps[0]]
        H = self.adjoints(steps[0])[None] if T == 1 else cast(Tensor, self._adjoints)[first : first + T]
        most = max(size for _, size in self.together.values())
        values = H.new_zeros(T, most, H.shape[1], int(groups.max()) + 1)
        columns = H.split(self.net.model.sizes, dim=2)
        for gradients, own, group in zip(self._gradients, columns, groups.tolist(), strict=True):
            if len(self.together) > T:
                rows = slice(first * most, (first + T) * most)
                gradients = replace(gradients, jacobian=gradients.jacobian.rows(rows))
            values[..., group] += gradients.products_of_steps(own)
        sizes = [self.together[step][1] for step in steps]
        return [value[:size].transpose(0, 1) for value, size in zip(values, sizes, strict=True)]

    def of_whole(
        self, step: Step, data: PassData, H: Float[Tensor, "R P"], groups: Int64[Tensor, " L"],
        blocks: Sequence[RecordedRows] | None,
    ) -> tuple[Float[Tensor, "R B G"], Float[Tensor, "R G"] | None]:  # fmt: skip
        """Return c_i <H, grad loss_i> for the rows of a pass, over each group of parameters.

        Args:
            step: The step.
            data: The pass.
            H: The adjoints.
            groups: Group of each of the L parameters.
            blocks: The result of `start`.

        Returns:
            The products; and, if they are compared, the difference between <H, sum_i c_i grad loss_i> with the gradient
            of a backward pass and their sum: rounding, which a preconditioner can make large if a gradient consists of
            rounding only (a bias in front of BatchNorm under Adam). None if gradients are computed layer by layer, and
            if it is more than rounding can be: it is then left out of every term, and the certificate detects it.
        """
        state, sizes = self.block.trained_state(step.index), self.net.model.sizes
        if blocks is not None:
            values = H.new_zeros(len(H), len(data.X), int(groups.max()) + 1)
            for own in blocks:
                gradients = own.gradients or self._record(state, data, own.rows)
                if gradients is None:
                    break
                for part in parts_of(self.net.model.shapes, groups.tolist(), self.net.model.num_weights):
                    add_products(values[:, own.rows, part.group], H[:, part.columns], gradients, part)
            else:
                return values, None
        u = step_coefficients(self.block.recorded, step.index, H)
        has_preconditioner = u.has_matrices or max(map(len, (u.lr, u.momentum_lr))) > len(sizes)
        if self._has_forward_mode and not self._is_compared and not has_preconditioner:
            return self._along_all(state, data, H, groups), None
        replayed, dtype = self.run.passes.gradient(state, data, exact=True), self.run.passes.dtype_of(data)
        whole = grouped_products(H[None], replayed.gradient[None], groups, sizes)[:, 0, 0]
        values = self._along_all(state, data, H, groups, replayed.losses)
        if self._has_forward_mode and not self._is_derivative(state, data, H, whole, values):
            self._has_forward_mode = False
            values = self._along_all(state, data, H, groups, replayed.losses)
        rounding = whole - values.sum(dim=1)
        allowed = _AMPLIFIED_ROUNDING.get(dtype, 1.0) * values.abs().sum(dim=(1, 2))
        return values, rounding if bool((rounding.sum(dim=1).abs() <= allowed).all()) else None

    def _along_all(
        self,
        state: Tensor,
        data: PassData,
        H: Float[Tensor, "R P"],
        groups: Int64[Tensor, " L"],
        expected: Tensor | None = None,
    ) -> Float[Tensor, "R B G"]:
        """Return c_i <H, grad loss_i> over each group of parameters, along H."""
        count = int(groups.max()) + 1
        values, sizes = H.new_empty(len(H), len(data.X), count), self.net.model.sizes
        for group in range(count):
            is_own = broadcast_to_params((groups == group).to(H), sizes, H)
            products = self._along(state, data, H if count == 1 else H * is_own, expected)
            values[..., group] = data.c.to(H) * products
        return values

    def _is_derivative(
        self, state: Tensor, data: PassData, H: Tensor, whole: Float[Tensor, "R G"], values: Float[Tensor, "R B G"]
    ) -> bool:
        """Return whether forward mode agrees with plain autograd.

        If its products miss the whole gradient by more than rounding of the pass's dtype, or by more than the rounding
        found before, those of the worst adjoint are computed by plain autograd: rounding gives it the same error.
        """
        missed = (whole - values.sum(dim=1)).sum(dim=1)
        share = missed.abs() / values.abs().sum(dim=(1, 2)).clamp(min=torch.finfo(values.dtype).tiny)
        worst = int(share.argmax())
        largest = float(share[worst])
        if not largest > max(_ROUNDING.get(self.run.passes.dtype_of(data), 1e-2), 2 * self._found_rounding):
            return True
        self._found_rounding = largest
        products = self._sample_by_sample(state, data, H[worst][None])[0]
        left = float((whole[worst].sum() - products @ data.c.to(products)).abs())
        return _DOUBTS * left >= float(missed[worst].abs())

    def _takes_outputs(self, data: PassData) -> bool:
        """Return whether the losses of a pass follow row by row from the network's outputs in evaluation mode."""
        run = self.block.recorded
        is_whole = data.forward.cotangents is None or run.model.signature.output is None  # gradients in all results
        return data.forward.is_deterministic and run.loss_takes_outputs and is_whole

    def _goes_by_layers(self, data: PassData, num_directions: int) -> bool:
        plan, model = self.net.plan, self.net.model
        # in a shared pass there is a backward pass per sample, each through the whole graph
        if plan.shares_pass or self._in_modes.get(self._kind_of(data), self.net) is None:
            return False
        # parameters outside layers are differentiated row by row; statistics make a row's loss depend on the other rows
        if not self._takes_outputs(data) and (self._all_dense or plan.dense_params or model.statistics):
            return False
        n, P = len(data.X), model.num_weights
        if self._flops_per_row is None:
            state, replay = self.block.trained_state(0), self.run.passes
            with FlopCount() as counter, torch.no_grad():
                replay.losses(replay.params(state, data), data)
            self._flops_per_row = counter.total / n
        flops = self._flops_per_row * n
        forward = num_directions * (2 * flops + _PASS_OVERHEAD)
        return 3 * flops + (2.0 * num_directions + _WRITING) * n * P + _PASS_OVERHEAD <= forward

    def _kind_of(self, data: PassData) -> tuple[bytes, torch.dtype]:
        """Return a key that distinguishes networks that replay passes."""
        kinds = (data.forward.modes, data.forward.settings)
        key = b"".join(b"-" if kind is None else bytes(tensor_bytes(kind)) for kind in kinds)
        return key, self.run.passes.dtype_of(data)

    def _record(self, state: Float[Tensor, " PQ"], data: PassData, rows: slice) -> list[ParameterGradients] | None:
        """Return the gradients c_i grad loss_i of some rows; None if they cannot be computed layer by layer.

        For a pass that draws random numbers they are computed in its own modes, for the whole batch together, whose
        masks are drawn together: the network then returns the losses.
        """
        net, replay = self.net, self.run.passes
        cost = ContractionCost(1, 1, all_dense=self._all_dense, keeps_factors=True)
        if self._takes_outputs(data):
            at, X = WeightLocation(replay.state(state, data).to(state)), net.model.spec.cast(data.X[rows])
            jacobians = layer_jacobians(net, at, X, _loss_cotangents(self.block, data, rows), cost)
            return by_parameter(net, jacobians, all_dense=self._all_dense)
        key, self._present = self._kind_of(data), data
        if key not in self._in_modes:
            model = replay.model_in_modes(data)
            signature = replace(model.signature, output=lambda returned: replay.losses_of(returned, self._present))
            model = FunctionalModel(**model.__getstate__() | {"signature": signature})
            self._in_modes[key] = PlannedModel(model, net.plan)
        net = self._in_modes[key] or net
        at = WeightLocation(torch.cat([value.flatten() for value in replay.params(state, data).values()]))
        weights = Cotangents(lambda losses: data.c.to(losses)[None, :, None])
        try:
            with replay.random_numbers(data):
                return by_parameter(net, layer_jacobians(net, at, replay.rows(data), weights, cost))
        except (RuntimeError, ValueError, NotImplementedError):  # includes UnsupportedParameterUseError
            self._in_modes[key] = None
            return None

    def _is_verified(self, state: Tensor, data: PassData, blocks: Sequence[RecordedRows], *, by_row: bool) -> bool:
        """Compare products along a random direction with plain autograd's: their sum, and each row's."""
        model, dtype = self.net.model, self.run.passes.dtype_of(data)
        direction, found = _noise(model.num_weights, dtype).to(state), state.new_zeros(1, len(data.X))
        (whole,) = parts_of(model.shapes, [0] * len(model.shapes), model.num_weights)
        for own in blocks:
            if (gradients := own.gradients or self._record(state, data, own.rows)) is None:
                return False
            add_products(found[:, own.rows], direction, gradients, whole)
        replayed = self.run.passes.gradient(state, data, exact=True)
        if not _is_same(found.sum(), direction[0] @ replayed.gradient, found.abs().sum(), dtype):
            return False
        if not by_row or data.forward.is_deterministic:  # the plan has tested that rows do not depend on each other
            return True
        if self._has_forward_mode and (slopes := self._slopes(state, data, direction, replayed.losses)) is not None:
            products = data.c.to(slopes) * slopes
            if _is_same(found, products, products.abs().max(), dtype):
                return True
        some = [0, len(data.X) - 1]
        products = data.c[some].to(found) * self._sample_by_sample(state, data, direction, some)
        return _is_same(found[:, some], products, products.abs().max(), dtype)

    def _along(
        self, state: Float[Tensor, " PQ"], data: PassData, directions: Float[Tensor, "R P"], expected: Tensor | None
    ) -> Float[Tensor, "R n"]:
        """Differentiate the losses of a pass, whose values may be known, along some directions of the weights."""
        if self._has_forward_mode:
            slopes = self._slopes(state, data, directions, expected)
            if slopes is not None:
                return slopes
            self._has_forward_mode = False
        return self._sample_by_sample(state, data, directions)

    def _slopes(
        self, state: Tensor, data: PassData, directions: Float[Tensor, "R P"], expected: Tensor | None
    ) -> Float[Tensor, "R n"] | None:
        """Differentiate in forward mode; None if torch has no forward mode, or if it computes other losses."""
        try:
            for _ in range(2):
                primals, slopes = self._forward(state, data, directions)
                # forward mode may draw other random numbers, or use another kernel
                if expected is None or _is_same(primals, expected, expected.abs().max().clamp(min=1.0)):
                    return slopes.to(directions)
                if not self._rows.works:
                    break
                self._rows.works = False
        except RuntimeError:  # includes NotImplementedError
            pass
        return None

    def _forward(self, state: Tensor, data: PassData, directions: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses and their derivatives along all directions, mapped over directions if torch can.

        A pass that draws random numbers is not mapped.
        """
        graph = self.net.model.signature.graph
        at_once = self.memory.forward_mode_directions(len(data.X) if graph is None else graph.num_nodes)
        draws = data.forward.random_state is not None or data.forward.device_random_state is not None
        primals, slopes = (MappedRows(works=False) if draws or at_once == 1 else self._rows)(
            len(directions),
            lambda: self._mapped(state, data, directions, at_once),
            lambda k: self._single(state, data, directions[k]),
        )
        return primals, slopes

    def of_targets(
        self, step: Step, data: PassData, direction: Float[Tensor, " P"], rows: Int64[Tensor, " b"]
    ) -> Float[Tensor, "b T"]:
        """Return c_i <H, grad loss_{i,t}> for the targets of some rows, in forward mode along one adjoint.

        The other rows of the pass are computed with them if it draws random numbers, or if rows depend on each other.

        Raises:
            ValueError: torch has no forward mode for the network.
        """
        is_alone = data.forward.is_deterministic
        own = some_rows(data, rows) if is_alone else data
        try:
            _, slopes = self._single(self.block.trained_state(step.index), own, direction, by_target=True)
        except RuntimeError as error:  # includes NotImplementedError
            raise ValueError(
                f"attribute_tokens needs a network with derivatives in forward mode: torch says {str(error)!r}."
            ) from error
        return (own.c.to(direction)[:, None] * slopes.to(direction))[slice(None) if is_alone else rows]

    def _single(self, state: Tensor, data: PassData, v: Tensor, *, by_target: bool = False) -> tuple[Tensor, Tensor]:
        """Return the losses, and their derivatives along one direction v, by one forward-mode pass."""
        replay = self.run.passes
        params = replay.params(state, data)
        named = replay.model.unflatten(v)
        tangents = {name: torch.empty_like(params[name]).copy_(named[name]) for name in replay.model.names}
        with torch.no_grad(), forward_mode():
            duals = {name: fwAD.make_dual(params[name], tangent) for name, tangent in tangents.items()}
            primal, slope = fwAD.unpack_dual(replay.losses({**params, **duals}, data, by_target=by_target))
        return primal, torch.zeros_like(primal) if slope is None else slope

    def _mapped(self, state: Tensor, data: PassData, directions: Tensor, at_once: int) -> tuple[Tensor, Tensor]:
        """Return the losses and their derivatives along all directions, several by one forward-mode pass."""
        replay = self.run.passes
        params = replay.params(state, data)
        weights = {name: params[name] for name in replay.model.names}

        def losses(weights: dict[str, Tensor]) -> Tensor:
            others = {name: value.clone() for name, value in params.items() if name not in weights}  # changed by passes
            return replay.losses({**others, **weights}, data)

        def along(direction: Tensor) -> tuple[Tensor, Tensor]:
            pair = jvp(losses, (weights,), (replay.model.unflatten(direction),))
            return pair[0], pair[1]

        reference = params[replay.model.names[0]]
        with torch.no_grad(), exclusive_forward_mode():
            primals, slopes = vmap(along, chunk_size=at_once)(directions.to(reference))
        return primals, slopes

    def _sample_by_sample(
        self, state: Tensor, data: PassData, directions: Tensor, rows: Iterable[int] | None = None
    ) -> Tensor:
        """Compute each loss's gradient by a separate forward and backward pass: this works wherever training does."""
        columns = []
        for row in range(len(data.X)) if rows is None else rows:
            alone = torch.zeros_like(data.c)
            alone[row] = 1.0
            columns.append(directions @ self.run.passes.gradient(state, replace(data, c=alone), exact=True).gradient)
        return torch.stack(columns, dim=1)


def grouped_products(
    H: Float[Tensor, "K N P"], vectors: Float[Tensor, "B P"], groups: Int64[Tensor, " L"], sizes: tuple[int, ...]
) -> Float[Tensor, "N K B G"]:
    """Compute inner products, summed over each group of parameters separately."""
    count = int(groups.max()) + 1
    K, N = H.shape[:2]
    if count == 1:
        return (H.flatten(0, 1) @ vectors.T).view(K, N, len(vectors)).transpose(0, 1).unsqueeze(3)
    out = H.new_zeros(N, K, len(vectors), count)
    for group, of_part, part in zip(groups.tolist(), H.split(sizes, dim=2), vectors.split(sizes, dim=1), strict=True):
        out[..., group] += (of_part.flatten(0, 1) @ part.T).view(K, N, len(vectors)).transpose(0, 1)
    return out


def add_products(
    values: Float[Tensor, "R E"],
    H: Float[Tensor, "R size"],
    gradients: Sequence[ParameterGradients],
    part: Part,
    scale: float = 1.0,
) -> None:
    """Add the products of some adjoints, in a part and times a factor, with rows' gradients."""
    owners = gradients[part.first : part.first + len(part.pieces)]
    for own, piece, columns in zip(owners, part.pieces, H.split(list(part.sizes), dim=1), strict=True):
        rows = slice(piece.start // own.unit, piece.stop // own.unit)
        values.add_(own.products(columns, rows), alpha=scale)


def _noise(num_weights: int, dtype: torch.dtype) -> Float[Tensor, "1 P"]:
    return torch.randn(1, num_weights, generator=torch.Generator().manual_seed(0), dtype=dtype)


def _loss_cotangents(block: Predictions, data: PassData, rows: slice) -> Cotangents:
    """Return the cotangent of each row's weighted loss, with the targets as seen."""
    own, loss = some_rows(data, torch.arange(len(data.X), device=data.X.device)[rows]), block.recorded.loss

    def derivative(z: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            (slope,) = torch.autograd.grad(seen_losses(loss, leaf, own).sum(), leaf)
        return (own.c.to(z)[:, None] * slope)[None]

    return Cotangents(derivative)


def _is_same(values: Tensor, expected: Tensor, size: Tensor, dtype: torch.dtype | None = None) -> bool:
    allowed = _ROUNDING.get(dtype or values.dtype, 1e-2) * size
    return bool(((values - expected).abs() <= allowed).all())
