"""Inner products of adjoints with the gradients of loss terms (docs/theory.md, section 7).

The share of loss term i along an adjoint H is one directional derivative, and one forward-mode pass of the batch gives
those of all terms:

    <H, grad loss_i(w)> = d/de loss_i(w + e H) at e = 0

It holds also where a term depends on the whole batch. Where every term depends on its own row alone, the gradients of
the samples can be written out instead; the cheaper of the two is taken by counted cost.
"""

from dataclasses import dataclass, field, replace
from enum import Enum, auto

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float, Int64
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from epk_gp.autodiff.dense import Cotangents, PlannedModel
from epk_gp.autodiff.forward_mode import exclusive_forward_mode, forward_mode, require_second_derivatives
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import ContractionCost, to_flat_order
from epk_gp.core.gradients import PassData, RunReplay, seen_losses
from epk_gp.core.step import Step, tensor_bytes
from epk_gp.core.trajectory import flat_state
from epk_gp.kernel_machine.terms import AttributionProblem, grouped_products

# Floating-point operations that cost as much time as making one forward-mode pass does beside its products, and as
# writing and reading one number of the samples' gradients. Measured on the two-core machine of docs/benchmarks.md at
# some 1e10 operations a second: 0.7 to 2 ms a pass of a small network, 1 to 3 ns a number.
_PASS_OVERHEAD, _WRITING = 1e7, 20.0

# Relative difference that rounding leaves between a loss, or a derivative, and the same in another order of sums.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}

# Forward mode follows what a network computes under no_grad, which is a constant to the backward passes of training.
# Its products are doubted where they miss the whole gradient by more than rounding, and given up for double backward
# where that misses it by so many times less.
_DOUBTS = 16.0

# Share of the products' absolute sum that their rounding may be where a preconditioner amplifies it. Measured for a
# bias in front of BatchNorm under Adam: 2e-10 in float64, 3e-2 in float32.
_AMPLIFIED_ROUNDING = {torch.float64: 1e-6, torch.float32: 0.3}


class _Way(Enum):
    """How directional derivatives of the losses are taken."""

    FORWARD = auto()
    DOUBLE_BACKWARD = auto()
    SAMPLE_BY_SAMPLE = auto()


@dataclass(eq=False)
class LossProducts:
    """The training side of an attribution; to be used by one thread.

    Called with a step, one of its forward passes, adjoints and groups of parameters, it returns their products.

    Attributes:
        problem: The predictions.
        run: Replays the forward passes.
    """

    problem: AttributionProblem
    run: RunReplay
    _way: _Way = _Way.FORWARD
    # networks in the modes and dtypes of passes; None where their gradients are not those of the passes
    _in_modes: dict[tuple[bytes, torch.dtype], PlannedModel | None] = field(default_factory=dict)
    _maps: bool | None = None  # whether torch maps the passes over directions; None as long as that is not known
    _flops_per_row: float | None = None
    _found_rounding: float = 0.0  # largest share of the products that forward mode and double backward missed

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
            The products; and what <H, sum_i c_i grad loss_i> with the gradient of a backward pass has more than their
            sum. That is rounding, which a preconditioner can make large where a gradient is nothing but rounding (a
            bias in front of BatchNorm under Adam). None where the samples' gradients are written out.
        """
        count = int(groups.max()) + 1
        state = flat_state(self.problem.trajectory.trained, step.index, self.problem.X)
        if self._writes_gradients_out(data, H.shape[0] * H.shape[1], count):
            if data.forward.is_deterministic:
                return self._from_gradients(state, data, H, groups), None
            written = self._from_replayed_gradients(state, data, H, groups)
            if written is not None:
                return written, None
        replayed = self.run.passes.gradient(state, data, exact=True)
        whole = grouped_products(H, replayed.gradient[None], groups, self.problem.net.model.sizes).squeeze(2)
        values = self._along_all(state, data, H, groups, replayed.losses)
        doubtful = self._doubtful(H, whole, values, self.run.passes.dtype_of(data))
        if doubtful is not None and not self._is_derivative(state, data, *doubtful, replayed.losses):
            self._way = _Way.DOUBLE_BACKWARD
            values = self._along_all(state, data, H, groups, replayed.losses)
        return values, whole - values.sum(dim=2)

    def _along_all(
        self, state: Tensor, data: PassData, H: Float[Tensor, "K N P"], groups: Int64[Tensor, " L"], expected: Tensor
    ) -> Float[Tensor, "N K B G"]:
        """Return c_i <H, grad loss_i> over each group of parameters."""
        K, N = H.shape[:2]
        count = int(groups.max()) + 1
        owner = groups.to(H.device).repeat_interleave(torch.tensor(self.problem.net.model.sizes, device=H.device))
        values = H.new_empty(N, K, len(data.X), count)
        for group in range(count):
            directions = (H if count == 1 else H * (owner == group)).flatten(0, 1)
            products = self._along(state, data, directions, expected)
            values[..., group] = (data.c.to(H) * products).view(K, N, -1).transpose(0, 1)
        return values

    def _doubtful(
        self,
        H: Float[Tensor, "K N P"],
        whole: Float[Tensor, "N K G"],
        values: Float[Tensor, "N K B G"],
        dtype: torch.dtype,
    ) -> tuple[Float[Tensor, " P"], Tensor, float] | None:
        """Return the adjoint whose products miss the whole gradient most, its whole product, and by how much.

        None if they miss it by no more than rounding of the pass's dtype, or than was found to be rounding before.
        """
        if self._way is not _Way.FORWARD:
            return None
        missed = (whole - values.sum(dim=2)).sum(dim=2)
        share = missed.abs() / values.abs().sum(dim=(2, 3)).clamp(min=torch.finfo(values.dtype).tiny)
        n, k = divmod(int(share.argmax()), share.shape[1])
        largest = float(share[n, k])
        if not largest > max(_ROUNDING.get(dtype, 1e-2), 2 * self._found_rounding):
            return None
        self._found_rounding = largest
        return H[k, n], whole[n, k].sum(), float(missed[n, k].abs())

    def _is_derivative(
        self, state: Tensor, data: PassData, adjoint: Tensor, whole: Tensor, missed: float, expected: Tensor
    ) -> bool:
        """Return whether double backward misses the whole gradient as forward mode does: both round it."""
        try:
            products = self._double_backward(state, data, adjoint[None], expected)
        except (RuntimeError, ValueError):
            products = self._sample_by_sample(state, data, adjoint[None])
        return _DOUBTS * float((whole - products[0] @ data.c.to(products)).abs()) >= missed

    def _writes_gradients_out(self, data: PassData, num_directions: int, num_groups: int) -> bool:
        forward_pass, problem = data.forward, self.problem
        if forward_pass.autocast is not None or not problem.trajectory.loss_takes_outputs:
            return False
        if problem.net.plan.shares_pass:  # a backward pass per sample, each through the whole graph
            return False
        if not forward_pass.is_deterministic and (
            problem.cost.all_dense
            or problem.net.plan.dense_params  # differentiated row by row, where a mask is drawn for the batch
            or problem.net.model.statistics  # a row's loss depends on the other rows
            or self._in_modes.get(self._kind_of(data), problem.net) is None
        ):
            return False
        n, P = len(data.X), self.problem.net.model.num_weights
        flops = self._flops(data)
        forward = num_directions * num_groups * (2 * flops + _PASS_OVERHEAD)
        writing = 3 * flops + (2.0 * num_directions + _WRITING) * n * P + _PASS_OVERHEAD
        return writing <= forward

    def _flops(self, data: PassData) -> float:
        """Count the operations of a forward pass; once, on the first pass."""
        if self._flops_per_row is None:
            state = flat_state(self.problem.trajectory.trained, 0, self.problem.X)
            replay = self.run.passes
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                replay.losses(replay.params(state, data), data)
            self._flops_per_row = counter.get_total_flops() / len(data.X)
        return self._flops_per_row * len(data.X)

    def _from_gradients(
        self, state: Float[Tensor, " PQ"], data: PassData, H: Float[Tensor, "K N P"], groups: Int64[Tensor, " L"]
    ) -> Float[Tensor, "N K B G"]:
        """Write the samples' gradients out, some at a time."""
        problem = self.problem
        net, sizes = problem.net, problem.net.model.sizes
        if data.forward.statistics is not None:
            state = torch.cat([state[: net.model.num_weights], data.forward.statistics.to(state)])
        cost = ContractionCost(num_output_pairs=1, num_contractions=1, all_dense=problem.cost.all_dense)
        X = net.model.spec.cast(data.X)
        values = []
        for part in torch.arange(len(X), device=X.device).split(problem.memory.adjoint_samples()):
            cotangents = _loss_cotangents(problem, data, part)
            jacobians = layer_jacobians(net, WeightLocation(state), X[part], cotangents, cost)
            values.append(grouped_products(H, to_flat_order(jacobians, problem.columns)[0], groups, sizes))
        return torch.cat(values, dim=2)

    def _kind_of(self, data: PassData) -> tuple[bytes, torch.dtype]:
        """Return what tells the networks apart that replay passes: modes and dtype."""
        modes = data.forward.modes
        return b"" if modes is None else bytes(tensor_bytes(modes)), self.run.passes.dtype_of(data)

    def _from_replayed_gradients(
        self, state: Float[Tensor, " PQ"], data: PassData, H: Float[Tensor, "K N P"], groups: Int64[Tensor, " L"]
    ) -> Float[Tensor, "N K B G"] | None:
        """Write the samples' gradients out that a pass had in its own modes, with the random numbers that it drew.

        The masks are those of the whole batch, so its activations are computed together. The products with the sum of
        the adjoints are compared with its derivatives of the replayed losses: they are others where a row's loss
        depends on other rows, or where the numbers are drawn in another order.

        Returns:
            The products; None where they are others, or where the gradients cannot be written out.
        """
        problem, replay, key = self.problem, self.run.passes, self._kind_of(data)
        if key not in self._in_modes:
            self._in_modes[key] = PlannedModel(replay.model_in_modes(data), problem.net.plan)
        net = self._in_modes[key]
        if net is None:
            return None
        every = torch.arange(len(data.X), device=data.X.device)
        cotangents = _loss_cotangents(problem, data, every)
        at = WeightLocation(torch.cat([value.flatten() for value in replay.params(state, data).values()]))
        cost = ContractionCost(num_output_pairs=1, num_contractions=1, all_dense=False)
        try:
            with replay.random_numbers(data):
                jacobians = layer_jacobians(net, at, replay.rows(data), cotangents, cost)
        except (RuntimeError, ValueError, NotImplementedError):  # UnsupportedParameterUseError among them
            self._in_modes[key] = None
            return None
        values = []
        for part in every.split(problem.memory.adjoint_samples()):
            rows = slice(int(part[0]), int(part[-1]) + 1)
            gradients = to_flat_order([jacobian.rows(rows) for jacobian in jacobians], problem.columns)[0].to(H)
            values.append(grouped_products(H, gradients, groups, net.model.sizes))
        written = torch.cat(values, dim=2)
        losses = replay.gradient(state, data, exact=True).losses
        expected = data.c.to(H) * self._along(state, data, H.sum(dim=(0, 1))[None], losses)[0]
        if not _is_same(written.sum(dim=(0, 1, 3)), expected, expected.abs().max()):
            self._in_modes[key] = None
            return None
        return written

    def _along(
        self, state: Float[Tensor, " PQ"], data: PassData, directions: Float[Tensor, "R P"], expected: Tensor
    ) -> Float[Tensor, "R n"]:
        """Differentiate the losses of a pass, whose values are known, along some directions of the weights."""
        if self._way is _Way.FORWARD:
            try:
                primals, slopes = self._forward(state, data, directions, expected)
            except (RuntimeError, NotImplementedError):
                self._way = _Way.DOUBLE_BACKWARD
            else:
                if _is_same(primals, expected, expected.abs().max().clamp(min=1.0)):
                    return slopes.to(directions)
                self._way = _Way.DOUBLE_BACKWARD  # forward mode drew other random numbers, or took another kernel
        if self._way is _Way.DOUBLE_BACKWARD:
            try:
                return self._double_backward(state, data, directions, expected)
            except (RuntimeError, ValueError):
                self._way = _Way.SAMPLE_BY_SAMPLE
        return self._sample_by_sample(state, data, directions)

    def _forward(self, state: Tensor, data: PassData, directions: Tensor, expected: Tensor) -> tuple[Tensor, Tensor]:
        """Return the losses and their derivatives along all directions, mapped over directions where torch can.

        The first mapped pass is compared with a single one. What draws random numbers is not mapped.
        """
        graph = self.problem.net.model.signature.graph
        at_once = self.problem.memory.forward_mode_directions(len(data.X) if graph is None else graph.num_nodes)
        draws = data.forward.random_state is not None or data.forward.device_random_state is not None
        if self._maps is not False and min(len(directions), at_once) > 1 and not draws:
            try:
                primals, slopes = self._mapped(state, data, directions, at_once)
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                self._maps = False
            else:
                if self._maps is None:
                    single = self._single(state, data, directions[0])[1]
                    self._maps = _is_same(slopes[0], single, single.abs().max())
                self._maps = self._maps and _is_same(primals, expected, expected.abs().max().clamp(min=1.0))
                if self._maps:
                    return primals, slopes
        singles = [self._single(state, data, direction) for direction in directions]
        return torch.stack([primal for primal, _ in singles]), torch.stack([slope for _, slope in singles])

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

    def _losses_with_graph(self, state: Tensor, data: PassData) -> tuple[Tensor, list[Tensor]]:
        replay = self.run.passes
        params = replay.params(state, data)
        leaves = [params[name].requires_grad_() for name in replay.model.names]
        with torch.enable_grad():
            return replay.losses(params, data), leaves

    def _double_backward(self, state: Tensor, data: PassData, directions: Tensor, expected: Tensor) -> Tensor:
        """Differentiate v -> v^T J d in v: reverse mode only, one more backward pass per direction."""
        losses, leaves = self._losses_with_graph(state, data)
        if not _is_same(losses.detach(), expected, expected.abs().max().clamp(min=1.0)):
            raise RuntimeError("the replayed losses are others under torch.func.functional_call.")
        with torch.enable_grad():
            v = torch.ones_like(losses, requires_grad=True)
            pulled = torch.autograd.grad(
                losses, leaves, v, create_graph=True, allow_unused=True, materialize_grads=True
            )
            require_second_derivatives(pulled, losses)
            flat = torch.cat([g.reshape(-1) for g in pulled])
            slopes = [
                torch.autograd.grad(flat @ direction.to(flat), v, retain_graph=True, materialize_grads=True)[0]
                for direction in directions
            ]
        return torch.stack(slopes).to(directions)

    def _sample_by_sample(self, state: Tensor, data: PassData, directions: Tensor) -> Tensor:
        """Write each loss's gradient out by a forward and backward pass of its own: works wherever training does."""
        columns = []
        for row in range(len(data.X)):
            alone = torch.zeros_like(data.c)
            alone[row] = 1.0
            columns.append(directions @ self.run.passes.gradient(state, replace(data, c=alone), exact=True).gradient)
        return torch.stack(columns, dim=1)


def _loss_cotangents(problem: AttributionProblem, data: PassData, part: Tensor) -> Cotangents:
    """Return the one cotangent of each row's weighted loss, with the targets as seen."""
    forward = data.forward
    seen, c = forward.targets, data.c[part]
    if seen is not None:  # which of the part's rows have targets of their own
        place = torch.full((len(data.X),), -1, device=part.device).index_copy(
            0, seen.index.to(part.device), torch.arange(len(seen.index), device=part.device)
        )[part]
        index = (place >= 0).nonzero().squeeze(1)
        seen = type(seen)(index, seen.values.to(part.device)[place[index]])
    own = PassData(type(forward)(len(part), targets=seen), data.samples[part], data.X[part], data.y[part], c)
    loss = problem.trajectory.loss

    def derivative(z: Tensor) -> Tensor:
        with torch.enable_grad():
            leaf = z.detach().requires_grad_()
            (slope,) = torch.autograd.grad(seen_losses(loss, leaf, own).sum(), leaf)
        return (c.to(z)[:, None] * slope)[None]

    return Cotangents(derivative)


def is_rounding(difference: Float[Tensor, "N K G"], products: Float[Tensor, "N K B G"], dtype: torch.dtype) -> bool:
    """Return whether a difference of sums of products can be rounding of their gradients, amplified.

    A larger one is left out of every term, so that the sum misses the output and the certificate says so.

    Args:
        difference: The difference.
        products: The products.
        dtype: The dtype in which the pass was replayed.
    """
    allowed = _AMPLIFIED_ROUNDING.get(dtype, 1.0) * products.abs().sum(dim=(2, 3))
    return bool((difference.sum(dim=2).abs() <= allowed).all())


def _is_same(values: Tensor, expected: Tensor, size: Tensor) -> bool:
    allowed = _ROUNDING.get(values.dtype, 1e-2) * size
    return bool(((values - expected).abs() <= allowed).all())
