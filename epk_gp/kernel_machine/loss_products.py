"""Inner products of adjoints with the gradients of loss terms (docs/theory.md, section 7).

The share of loss term i along an adjoint H is one directional derivative, and one forward-mode pass of the batch gives
those of all terms:

    <H, grad loss_i(w)> = d/de loss_i(w + e H) at e = 0

It holds also where a term depends on the whole batch. Where every term depends on its own row alone, the gradients of
the samples can be written out instead; the cheaper of the two is taken by counted cost.
"""

from dataclasses import dataclass, field, replace

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Float, Int64
from torch import Tensor
from torch.func import jvp, vmap
from torch.utils.flop_counter import FlopCounterMode

from epk_gp.autodiff.dense import Cotangents, PlannedModel
from epk_gp.autodiff.forward_mode import exclusive_forward_mode, forward_mode
from epk_gp.autodiff.jacobians import WeightLocation, layer_jacobians
from epk_gp.autodiff.representations import ContractionCost, to_flat_order
from epk_gp.core.gradients import RunReplay
from epk_gp.core.replay import PassData, seen_losses
from epk_gp.core.step import Step, tensor_bytes
from epk_gp.core.trajectory import flat_state
from epk_gp.kernel_machine.terms import AttributionProblem

# Floating-point operations that cost as much time as making one forward-mode pass does beside its products, and as
# writing and reading one number of the samples' gradients. Measured on the two-core machine of docs/benchmarks.md at
# some 1e10 operations a second: 0.7 to 2 ms a pass of a small network, 1 to 3 ns a number.
_PASS_OVERHEAD, _WRITING = 1e7, 20.0

# Relative difference that rounding leaves between a loss, or a derivative, and the same in another order of sums.
_ROUNDING = {torch.float64: 1e-10, torch.float32: 1e-4}

# Forward mode follows what a network computes under no_grad, which is a constant to the backward passes of training.
# Its products are doubted where they miss the whole gradient by more than rounding, and given up for plain autograd
# where that misses it by so many times less.
_DOUBTS = 16.0

# Share of the products' absolute sum that their rounding may be where a preconditioner amplifies it. Measured for a
# bias in front of BatchNorm under Adam: 2e-10 in float64, 3e-2 in float32.
_AMPLIFIED_ROUNDING = {torch.float64: 1e-6, torch.float32: 0.3}


def grouped_products(
    H: Float[Tensor, "K N P"], vectors: Float[Tensor, "B P"], groups: Int64[Tensor, " L"], sizes: tuple[int, ...]
) -> Float[Tensor, "N K B G"]:
    """Compute inner products, summed over each group of parameters separately."""
    count = int(groups.max()) + 1
    K, N = H.shape[:2]
    if count == 1:
        return (H.flatten(0, 1) @ vectors.T).view(K, N, len(vectors)).transpose(0, 1).unsqueeze(3)
    out = H.new_zeros(N, K, len(vectors), count)
    first = 0
    for group, size in zip(groups.tolist(), sizes, strict=True):
        part = slice(first, first + size)
        out[..., group] += (H[..., part].flatten(0, 1) @ vectors[:, part].T).view(K, N, len(vectors)).transpose(0, 1)
        first += size
    return out


@dataclass(eq=False)
class LossProducts:
    """The training side of an attribution; to be used by one thread.

    Called with a step, one of its forward passes, adjoints and groups of parameters, it returns their products: from
    the samples' gradients where writing these out is cheaper, else by forward mode. Where torch has no forward mode, or
    it gives something else than plain autograd, each sample has a backward pass of its own.

    Attributes:
        problem: The predictions.
        run: Replays the forward passes.
    """

    problem: AttributionProblem
    run: RunReplay
    _has_forward_mode: bool = True
    # networks in the modes and dtypes of passes; None where their gradients are not those of the passes
    _in_modes: dict[tuple[bytes, torch.dtype], PlannedModel | None] = field(default_factory=dict)
    _maps: bool | None = None  # whether torch maps the passes over directions; None as long as that is not known
    _flops_per_row: float | None = None
    _found_rounding: float = 0.0  # largest share of the products that forward mode and plain autograd missed

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
            bias in front of BatchNorm under Adam). None where the samples' gradients are written out, and where it is
            more than rounding can be: left out of every term, the certificate sees it.
        """
        state = flat_state(self.problem.trajectory.trained, step.index, self.problem.X)
        if self._writes_gradients_out(data, H.shape[0] * H.shape[1], int(groups.max()) + 1):
            written = self._from_gradients(state, data, H, groups)
            if written is not None:
                return written, None
        replayed, dtype = self.run.passes.gradient(state, data, exact=True), self.run.passes.dtype_of(data)
        whole = grouped_products(H, replayed.gradient[None], groups, self.problem.net.model.sizes).squeeze(2)
        values = self._along_all(state, data, H, groups, replayed.losses)
        if self._has_forward_mode and not self._is_derivative(state, data, H, whole, values):
            self._has_forward_mode = False
            values = self._along_all(state, data, H, groups, replayed.losses)
        rounding = whole - values.sum(dim=2)
        allowed = _AMPLIFIED_ROUNDING.get(dtype, 1.0) * values.abs().sum(dim=(2, 3))
        return values, rounding if bool((rounding.sum(dim=2).abs() <= allowed).all()) else None

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

    def _is_derivative(
        self,
        state: Tensor,
        data: PassData,
        H: Float[Tensor, "K N P"],
        whole: Float[Tensor, "N K G"],
        values: Float[Tensor, "N K B G"],
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
        problem, plan = self.problem, self.problem.net.plan
        if data.forward.autocast is not None or not problem.trajectory.loss_takes_outputs:
            return False
        if plan.shares_pass:  # a backward pass per sample, each through the whole graph
            return False
        if not data.forward.is_deterministic and (
            problem.cost.all_dense
            or plan.dense_params  # differentiated row by row, where a mask is drawn for the batch
            or problem.net.model.statistics  # a row's loss depends on the other rows
            or self._in_modes.get(self._kind_of(data), problem.net) is None
        ):
            return False
        n, P = len(data.X), problem.net.model.num_weights
        if self._flops_per_row is None:
            state, replay = flat_state(problem.trajectory.trained, 0, problem.X), self.run.passes
            with FlopCounterMode(display=False) as counter, torch.no_grad():
                replay.losses(replay.params(state, data), data)
            self._flops_per_row = counter.get_total_flops() / n
        flops = self._flops_per_row * n
        forward = num_directions * num_groups * (2 * flops + _PASS_OVERHEAD)
        writing = 3 * flops + (2.0 * num_directions + _WRITING) * n * P + _PASS_OVERHEAD
        return writing <= forward

    def _kind_of(self, data: PassData) -> tuple[bytes, torch.dtype]:
        """Return what tells the networks apart that replay passes: modes and dtype."""
        modes = data.forward.modes
        return b"" if modes is None else bytes(tensor_bytes(modes)), self.run.passes.dtype_of(data)

    def _from_gradients(
        self, state: Float[Tensor, " PQ"], data: PassData, H: Float[Tensor, "K N P"], groups: Int64[Tensor, " L"]
    ) -> Float[Tensor, "N K B G"] | None:
        """Write the samples' gradients out, some at a time.

        Those of a pass that draws random numbers are written out in its own modes. The masks are those of the whole
        batch, so its activations are computed together. The products with the sum of the adjoints are compared with
        forward mode's: they are others where a row's loss depends on other rows, or where the numbers are drawn in
        another order.

        Returns:
            The products; None where they are others, or where the gradients cannot be written out.
        """
        problem, every = self.problem, torch.arange(len(data.X), device=data.X.device)
        blocks, sizes = every.split(problem.memory.adjoint_samples()), problem.net.model.sizes
        cost = ContractionCost(num_output_pairs=1, num_contractions=1, all_dense=problem.cost.all_dense)
        values = []
        if data.forward.is_deterministic:
            if data.forward.statistics is not None:
                state = torch.cat([state[: problem.net.model.num_weights], data.forward.statistics.to(state)])
            X, at = problem.net.model.spec.cast(data.X), WeightLocation(state)
            for rows in blocks:
                jacobians = layer_jacobians(problem.net, at, X[rows], _loss_cotangents(problem, data, rows), cost)
                values.append(grouped_products(H, to_flat_order(jacobians, problem.columns)[0], groups, sizes))
            return torch.cat(values, dim=2)
        replay, key = self.run.passes, self._kind_of(data)
        net = self._in_modes.get(key) or PlannedModel(replay.model_in_modes(data), problem.net.plan)
        self._in_modes[key] = None  # unless all goes well
        at = WeightLocation(torch.cat([value.flatten() for value in replay.params(state, data).values()]))
        try:
            with replay.random_numbers(data):
                jacobians = layer_jacobians(net, at, replay.rows(data), _loss_cotangents(problem, data, every), cost)
        except (RuntimeError, ValueError, NotImplementedError):  # UnsupportedParameterUseError among them
            return None
        for rows in blocks:
            part = [jacobian.rows(slice(int(rows[0]), int(rows[-1]) + 1)) for jacobian in jacobians]
            values.append(grouped_products(H, to_flat_order(part, problem.columns)[0].to(H), groups, sizes))
        written, losses = torch.cat(values, dim=2), replay.gradient(state, data, exact=True).losses
        expected = data.c.to(H) * self._along(state, data, H.sum(dim=(0, 1))[None], losses)[0]
        if not _is_same(written.sum(dim=(0, 1, 3)), expected, expected.abs().max()):
            return None
        self._in_modes[key] = net
        return written

    def _along(
        self, state: Float[Tensor, " PQ"], data: PassData, directions: Float[Tensor, "R P"], expected: Tensor
    ) -> Float[Tensor, "R n"]:
        """Differentiate the losses of a pass, whose values are known, along some directions of the weights."""
        if self._has_forward_mode:
            try:
                primals, slopes = self._forward(state, data, directions, expected)
            except (RuntimeError, NotImplementedError):
                self._has_forward_mode = False
            else:
                # forward mode may draw other random numbers, or take another kernel
                self._has_forward_mode = _is_same(primals, expected, expected.abs().max().clamp(min=1.0))
                if self._has_forward_mode:
                    return slopes.to(directions)
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


def _is_same(values: Tensor, expected: Tensor, size: Tensor) -> bool:
    allowed = _ROUNDING.get(values.dtype, 1e-2) * size
    return bool(((values - expected).abs() <= allowed).all())
