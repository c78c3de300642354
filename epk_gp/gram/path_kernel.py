"""The exact path kernel of a training run, its Gram blocks and its diagonal."""

from dataclasses import dataclass
from typing import Unpack

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.verification import with_plan
from epk_gp.core.checks import MEMORY_BUDGET, ComputeOptions, ComputeSettings, door, parse_options
from epk_gp.core.inputs import Points, validate_same_layout
from epk_gp.core.losses import Head, resolve_head
from epk_gp.core.model import FunctionalModel
from epk_gp.core.trajectory import Trajectory, outputs_at, parse_inputs, validate_trajectory, warn_unless_live
from epk_gp.gram.pairs import SetPairs, pairs_block, pairs_input_gradients
from epk_gp.gram.planned_kernel import PlannedKernel, warn_of_integrals
from epk_gp.gram.tiles import DiagonalWork, GramWork, assemble
from epk_gp.quadrature import rules
from epk_gp.work.run import Sums, run


@door
@dataclass(frozen=True, eq=False, init=False)
class PathKernel:
    """The exact path kernel of a training run (Definition 3.4 and Theorem 3.7, Bell et al. 2023).

        K(x, x') = sum_s eta_s sum_q w_q phi_sq(x) phi_sq(x')^T    (C x C)

    phi_sq(x) is the Jacobian of f at the start of the step for a training copy, and at node t_q of the step for a test
    copy; along chords, at node t_q of the chord that contains the step.

    Attributes:
        trajectory: Training run with S steps.
        head: Whether f is the logits or their log-softmax; None in the constructor follows the run's loss:
            "log_softmax" for cross entropy, otherwise "logits".
        rule: Nodes and positive weights on [0, 1], the same for both sides; or an adaptive rule, which picks each test
            point's own nodes against training copies, and the union of the nodes of a tile's points between test
            copies. The Gram matrix over both copies is then positive semi-definite only up to the tolerance, because it
            is no longer one sum over common nodes. Use a fixed rule if a factorisation needs more.
        step_weights: eta_s >= 0, (S,); the learning rates (of the first parameter group) by default.
        path: The path of test copies between the states: `straight()` steps by default.

    Raises:
        TypeError, ValueError: The trajectory is not a recorded run, or the head, the rule or the path is unknown.
    """

    trajectory: Trajectory
    head: Head
    rule: rules.Rule
    step_weights: Float[Tensor, " S"] | None
    path: rules.WeightPath

    def __init__(
        self,
        trajectory: Trajectory,
        head: Head | None = None,
        rule: rules.Rule = rules.gauss_legendre(4),
        *,
        step_weights: Float[Tensor, " S"] | None = None,
        path: rules.WeightPath = rules.straight(),
    ) -> None:
        validate_trajectory(trajectory)
        rules.validate_rule(rule)
        rules.validate_path(path)
        head = resolve_head(head, trajectory.loss, trajectory.num_outputs)
        warn_unless_live(trajectory)
        vars(self).update(trajectory=trajectory, head=head, rule=rule, step_weights=step_weights, path=path)

    def block(self, a: Points, b: Points, **options: Unpack[ComputeSettings]) -> Float[Tensor, "N C M C"]:
        """Compute K[n, c, m, d] between N and M points; see `gram_block`."""
        return self._assembled(a, b, parse_options("block", **options)).permute(1, 0, 3, 2)

    def block_per_class(self, a: Points, b: Points, **options: Unpack[ComputeSettings]) -> Float[Tensor, "C N M"]:
        """Compute K[n, c, m, c] for every output c, with 1 / C of the products of `block`."""
        return self._assembled(a, b, parse_options("block_per_class", **options), is_per_class=True)

    def trace_block(self, a: Points, b: Points, **options: Unpack[ComputeSettings]) -> Float[Tensor, "N M"]:
        """Compute the scalar kernel sum_c K[n, c, m, c].

        The outputs are summed inside the products, with 1 / C of the memory of `block_per_class`.

        Args:
            a: N points, each a training or a test copy.
            b: M points.
            options: `memory_budget`, `progress`, `checkpoint`, `accumulate` and `executor`; see `gram_block`.
        """
        return self._assembled(a, b, parse_options("trace_block", **options), is_per_class=True, is_traced=True)[0]

    def _assembled(self, a: Points, b: Points, options: ComputeOptions, **pairs: bool) -> Tensor:
        """Compute a class-major block; `pairs` selects the pairs of outputs, as in `with_net`."""
        self.validate_points(a, b, options)

        def compute(net: PlannedModel) -> Tensor:
            return assemble(GramWork(self.with_net(net, options, **pairs), a, b, plan=net.plan))

        return with_plan(compute, a.X, self.trajectory)

    def diagonal_blocks(self, a: Points, **options: Unpack[ComputeSettings]) -> Float[Tensor, "N C C"]:
        """Compute each point's C x C kernel with itself, block[n, :, n, :], at a cost linear in N."""
        parsed = parse_options("diagonal_blocks", ("accumulate",), **options)
        self.validate_points(a, a, parsed)

        def compute(net: PlannedModel) -> Tensor:
            work, integrations = DiagonalWork(self.with_net(net, parsed), a, a, plan=net.plan), Sums()
            result = work.planned.reference.new_zeros(len(a), *[self.trajectory.num_outputs] * 2)
            for piece, sums in run(work, parsed, "kernel diagonal"):
                result[work.rows[piece.place[:2]]] += sums.added.pop("total")
                integrations.merge(sums)
            warn_of_integrals(integrations)
            return result

        return with_plan(compute, a.X, self.trajectory)

    def pairs_input_gradients(
        self,
        pairs: SetPairs,
        weights: Float[Tensor, "P K n L m"],
        wanted: tuple[bool, bool] = (True, True),
        *,
        memory_budget: int = MEMORY_BUDGET,
    ) -> tuple[Shaped[Tensor, "U n ..."] | None, Shaped[Tensor, "V m ..."] | None]:
        """Differentiate a weighted sum of kernel values between pairs of sets with respect to the points.

            d/da  sum_{p,k,n,l,m} weights[p, k, n, l, m] K(a_pn, b_pm)[k, l]

        Layer Jacobians are computed once per point, side and node, and only for the outputs that the pairs need.

        Args:
            pairs: The pairs, out of U sets on the left and V on the right.
            weights: Weights with K = L = C, or 1 if a pair has one output or the trace.
            wanted: Whether the derivative of each side is wanted; the other side is held fixed, even if it is the same.
            memory_budget: Bytes for the computation.

        Returns:
            The derivatives in the shapes of the sets; None for a side that is not wanted.
        """
        options = self._pairs_options(pairs, memory_budget)

        def compute(net: PlannedModel) -> tuple[Tensor | None, Tensor | None]:
            kernel = self.with_net(net, options, is_per_class=pairs.kind != "full")
            return pairs_input_gradients(kernel, pairs, weights, wanted)

        return with_plan(compute, pairs.left.X, self.trajectory)

    def pairs_block(self, pairs: SetPairs, *, memory_budget: int = MEMORY_BUDGET) -> Float[Tensor, "P K n L m"]:
        """Compute the kernel between the points of P pairs of sets.

        Layer Jacobians are computed as for `pairs_input_gradients`. If all outputs of all points are needed, `block`
        costs less.

        Args:
            pairs: The pairs.
            memory_budget: Bytes for the computation.

        Returns:
            K(a_pn, b_pm)[k, l], K = L = C, or 1 if a pair has one output or the trace.
        """
        options = self._pairs_options(pairs, memory_budget)

        @torch.no_grad()
        def compute(net: PlannedModel) -> Tensor:
            return pairs_block(self.with_net(net, options, is_per_class=pairs.kind != "full"), pairs)

        return with_plan(compute, pairs.left.X, self.trajectory)

    def with_net(
        self, net: PlannedModel, options: ComputeOptions, *, is_per_class: bool = False, is_traced: bool = False
    ) -> PlannedKernel:
        """Return the kernel with its planned network, ready for evaluation.

        Args:
            net: The run's network in the dtype and on the device of the points.
            options: Options of the computation.
            is_per_class: Whether only pairs of equal classes are computed.
            is_traced: Whether only their sum is computed.
        """
        run, etas = self.trajectory, _parse_step_weights(self.trajectory, self.step_weights)
        asked = net, run, self.head, self.rule, self.path, options.memory_budget
        return PlannedKernel(*asked, etas, options, is_per_class, is_traced)

    def end_outputs(self, X: Shaped[Tensor, "n ..."]) -> tuple[Float[Tensor, "n C"], Float[Tensor, "n C"]]:
        """Return the outputs of the initial and of the trained network for parsed inputs, under the head."""
        return outputs_at(self.trajectory, X, 0, self.head), outputs_at(self.trajectory, X, -1, self.head)

    def validate_points(self, a: Points, b: Points, options: ComputeOptions) -> None:
        """Raise if the kernel cannot be evaluated between two sets of points.

        Raises:
            TypeError, ValueError: See `gram_block`.
        """
        require_recorded(self.trajectory)
        rules.require_integrable(self.path, "the path kernel")
        require_gradients_of_rows(self.trajectory.model)
        for name, points in (("a", a), ("b", b)):
            validate_points(self.trajectory, points, name)
            parse_inputs(self.trajectory, points.X, f"{name}.X")
        if a.X.dtype != b.X.dtype or a.X.device != b.X.device:
            raise ValueError(
                "both sets of points must share dtype and device: "
                f"got {a.X.dtype} on {a.X.device} and {b.X.dtype} on {b.X.device}."
            )
        if options.accumulate not in (None, self.trajectory.model.spec_for(a.X).dtype, torch.float64):
            raise ValueError(f"accumulate must be torch.float64 or None: got {options.accumulate}.")

    def _pairs_options(self, pairs: SetPairs, memory_budget: int) -> ComputeOptions:
        """Check pairs and the budget, which is the only option of a computation over pairs."""
        options = ComputeOptions(memory_budget=memory_budget)
        if not isinstance(self.rule, rules.QuadratureRule):
            raise TypeError(f"derivatives need the same nodes at all points, as in gauss_legendre(4): got {self.rule}.")
        left, right = (Points(s.X.flatten(0, 1), s.is_train.flatten()) for s in (pairs.left, pairs.right))
        self.validate_points(left, right, options)
        return options


def validate_points(trajectory: Trajectory, points: object, name: str) -> None:
    """Raise if points do not state their copies, or consist of other tensors than the training inputs.

    Raises:
        TypeError: They are not `Points`, or the network takes one tensor, or a tensor holds numbers of another kind.
        ValueError: A tensor is missing, superfluous, or has another shape.
    """
    if not isinstance(points, Points):
        got = type(points).__name__
        raise TypeError(f"{name} must be epk_gp.Points(X, is_train=...), which says what copies they are: got {got}.")
    if points.layout is None:
        return
    recorded = trajectory.model.signature.layout
    if recorded is None:
        raise TypeError(f"{name}.X must be one tensor, as the training inputs are: got several.")
    validate_same_layout(recorded, points.layout, f"{name}.X")


def require_recorded(trajectory: Trajectory) -> None:
    """Raise if the run is a path of averaged weights.

    Raises:
        ValueError: The run is such a path.
    """
    if trajectory.average is not None:
        raise ValueError(
            "the path kernel is that of a recorded run: this one is the path of its averaged weights, whose steps "
            "are no gradients at its own states. Take trajectory.trained, or explain the averaged network with "
            "epk_gp.attribute or epk_gp.reconstruct."
        )


def require_training(trajectory: Trajectory, caller: str) -> None:
    """Raise if the steps of a run come from no training: a run of one network (`tangent_trajectory`), or of some nodes.

    Raises:
        ValueError: No training made the steps.
    """
    if trajectory.update_rule.startswith("none ("):
        raise ValueError(
            f"{caller} needs the recorded steps of a training: this run has the states of a network, and nothing says "
            "how it came there. Record the training with epk_gp.Recorder, or see epk_gp.between for its checkpoints."
        )


def require_gradients_of_rows(model: FunctionalModel) -> None:
    """Raise if the gradient of a point's outputs depends on the other points in its batch.

    Raises:
        ValueError: An embedding divides gradients by the frequency of a token.
    """
    for name, module in model.module.named_modules():
        if getattr(module, "scale_grad_by_freq", False):
            raise ValueError(
                f"a kernel needs the gradients of a function: {name} divides them by how often a token occurs in the "
                "batch. Make it with scale_grad_by_freq=False."
            )


@door
def gram_block(
    trajectory: Trajectory,
    a: Points,
    b: Points,
    *,
    head: Head | None = None,
    rule: rules.Rule = rules.gauss_legendre(4),
    step_weights: Float[Tensor, " S"] | None = None,
    path: rules.WeightPath = rules.straight(),
    **options: Unpack[ComputeSettings],
) -> Float[Tensor, "N C M C"]:
    """Sum the exact path kernel over all steps.

    Equation (3) under the sum of Theorem 3.7, Bell et al. (2023):

        K[n, c, m, d] = sum_s eta_s sum_q w_q <phi_sq(a_n)_c, phi_sq(b_m)_d>

    For a network with moving statistics, phi is the gradient in the weights of the network in evaluation mode, with the
    statistics of the run's path at the same position as the weights: a kernel of the run that is positive semi-definite
    too.

    Args:
        trajectory: Training run with S steps.
        a: N points, each a training or a test copy.
        b: M points.
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, otherwise "logits".
        rule: See `PathKernel`.
        step_weights: eta_s >= 0; the learning rates (of the first parameter group) by default.
        path: The path of test copies; training copies stay at the start of each step. `chords(every=k)` evaluates test
            copies once for k steps.
        options: `memory_budget`, `progress`, `checkpoint`, `accumulate` and `executor`; see `ComputeOptions`.

    Returns:
        The block, not flattened, in the dtype of the points or of `accumulate`. It may be a view of memory in the order
        (C, N, C, M): `reshape` flattens it, `view` may fail.

    Raises:
        TypeError, ValueError: The network cannot take the points, the points have different dtypes, the head or the
            path is unknown, a step weight is negative, or the checkpoint belongs to another computation.
    """
    kernel = PathKernel(trajectory, head, rule, step_weights=step_weights, path=path)
    return kernel._assembled(a, b, parse_options("gram_block", **options)).permute(1, 0, 3, 2)


def _parse_step_weights(trajectory: Trajectory, step_weights: object) -> tuple[float, ...]:
    if step_weights is None:
        return tuple(step.lr for step in trajectory.steps)
    if not isinstance(step_weights, Tensor):
        raise TypeError(f"step_weights must be a torch.Tensor, one number per step: got {type(step_weights).__name__}.")
    if step_weights.shape != (trajectory.num_steps,):
        raise ValueError(f"step_weights must have shape ({trajectory.num_steps},): got {tuple(step_weights.shape)}.")
    if not (torch.isfinite(step_weights).all() and (step_weights >= 0).all()):
        raise ValueError("step_weights must be finite and not negative, or the kernel is not positive semi-definite.")
    return tuple(step_weights.tolist())
