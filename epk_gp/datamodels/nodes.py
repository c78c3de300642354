"""Nodes of path training: a few states of a run, the metric of the steps there, and the weights of samples.

Near step s the weights move by -H_s g for a gradient g that changes slowly, with one number per weight,

    H_s = grad_scale (lr + momentum_lr q_s),   q_s = beta q_{s-1} + one_minus_dampening,

from the recorded coefficients (`epk_gp.optimizers.update_rules`): eps / (sqrt(v) + delta) for Adam, and for SGD eps /
(1 - momentum) once its momentum has grown. A run of length T = sum_s eps_s is divided into parts of equal time, each
with the metric and the gradients of the state in its middle.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn.functional import cosine_similarity

from epk_gp.core.losses import sample_weights
from epk_gp.core.replayed_steps import RunReplay
from epk_gp.core.step import Step
from epk_gp.core.trajectory import Trajectory, flat_state, flat_weights, held_coefficients, step_coefficients
from epk_gp.core.update_law import scaled_fields
from epk_gp.optimizers.update_rules import broadcast_to_params

# Number of nodes of the path, and if six kernels do not fit. On halves of six runs (digits, Fashion-MNIST and KMNIST, two
# seeds), 3, 6, 12 and 24 nodes gave an LDS of .71, .72, .73 and .74.
NUM_STATES, FEW_STATES = 6, 3
# Rates per step above which no optimizer moves a weight whose gradient it has seen: about 3 for Adam, 10 for RMSprop,
# and ten times as many with momentum.
_MOST_RATES = 100


@dataclass(frozen=True, eq=False)
class PathNodes:
    """Some states of a run, each of which represents an equal part of its time.

    Attributes:
        run: The run.
        steps: The steps s that begin at these states.
        factors: The momentum's q_s at these steps, (L,) or (P,).
        times: Number of similar steps that each represents: sum of eps over the part, divided by eps_s.
        time: T, the sum of the learning rates of all steps.
        sample_weights: Mean weight of each sample's loss in the loss of a step, (M,): 1 / M for an even training.
    """

    run: Trajectory
    steps: tuple[int, ...]
    factors: tuple[Float64[Tensor, " _"], ...]
    times: tuple[float, ...]
    time: float
    sample_weights: Float64[Tensor, " M"]

    @property
    def scaled(self) -> list[bool]:
        """Whether a preconditioner scales each parameter."""
        return [bool(own) for own in scaled_fields(self.run.optimizer_groups, self.run.model.names)]

    @property
    def is_even(self) -> bool:
        """Whether all weights of a parameter have the same number, as for SGD."""
        L, updates = len(self.run.model.sizes), (held_coefficients(self.run, s) for s in self.steps)
        return not any(self.scaled) and all(len(v) == L for u in updates for v in (u.lr, u.momentum_lr, u.grad_scale))

    def metric(self, node: int, state: Float[Tensor, " PQ"]) -> Float[Tensor, " P"]:
        """Return the sum of H_s over the part of the run that a node represents.

        If a preconditioner has seen no gradient yet, it divides by almost zero, and H_s is huge: the gradient g of the
        whole loss would move the weight by more than 100 rates. Then H_s = eps_s / |g|, which moves it by one rate.

        Args:
            node: The node.
            state: The weights there, followed by moving statistics.

        Raises:
            ValueError: A step moves weights up the gradient, or skips some weights of a parameter.
        """
        run, s, sizes = self.run, self.steps[node], self.run.model.sizes
        update, reference = step_coefficients(run, s, state), state[: run.num_weights]
        scale, lr, momentum_lr, factor = (
            broadcast_to_params(value, sizes, reference)
            for value in (update.grad_scale, update.lr, update.momentum_lr, self.factors[node])
        )
        H = scale * (lr + momentum_lr * factor)
        rests = [own == 0 for own in (lr + momentum_lr * factor).split(list(sizes))]
        is_uneven = any(bool(own.any()) and not bool(own.all()) for own in rests)
        if not bool((H >= 0).all() & H.isfinite().all()) or is_uneven:
            raise ValueError(
                "a datamodel needs steps down the gradient, with a finite number >= 0 for each weight, of all weights "
                f"of a parameter: step {s} has others (maximize=True, a rate below 0, SparseAdam or Rprop)."
            )
        if any(scaled := self.scaled):
            step = Step(index=s, lr=0.0, batch=None, sample_weights=self.sample_weights)
            g, _ = RunReplay(run, run.model_for(state), state).gradient_at(step, state)
            moved = g.abs() / self.rate(node)  # times H, in rates
            is_scaled = torch.tensor(scaled, device=H.device).repeat_interleave(torch.tensor(sizes, device=H.device))
            H = torch.where(is_scaled & (H * moved > _MOST_RATES), 1 / moved, H)
        return H * self.times[node]

    def rate(self, node: int) -> float:
        """Return the rate of the step of a node: part of the time of the run divided by the number of such steps."""
        return self.time / (len(self.steps) * self.times[node])


def path_nodes(run: Trajectory, count: int = NUM_STATES) -> PathNodes:
    """Return this many nodes of a run's path.

    Raises:
        ValueError: The run is too short, or its steps do not have one number per weight.
    """
    S, rates = run.num_steps, torch.tensor([step.lr for step in run.steps], dtype=torch.float64)
    if S < NUM_STATES or not bool((rates >= 0).all()) or not float(rates.sum()) < float("inf"):
        raise ValueError(f"a datamodel needs {NUM_STATES} steps at least, with learning rates >= 0: got a run of {S}.")
    rates = rates if bool(rates.any()) else torch.ones_like(rates)  # if the first group rests, steps are equal
    time, ends = float(rates.sum()), rates.cumsum(0) * (1 + 1e-12)  # for a tie, the step that ends there
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) * time / count
    steps = torch.searchsorted(ends, middles).clamp(max=S - 1).tolist()
    factors = dict[int, Tensor]()
    factor = torch.zeros(len(run.model.sizes), dtype=torch.float64)
    reference = flat_weights(run, 0, run.states[0])
    fields = scaled_fields(run.optimizer_groups, run.model.names)
    is_held = not any({"beta", "one_minus_dampening"} & own for own in fields)
    for s in range(steps[-1] + 1):
        update = held_coefficients(run, s) if is_held else step_coefficients(run, s, reference)
        if update.has_matrices:
            raise ValueError(
                f"a datamodel needs steps with one number for each weight: those of {run.update_rule} have matrices, "
                "or two buffers. Ask epk_gp.attribute, or train on subsets in a loop of your own."
            )
        beta, share = update.beta.double().cpu(), update.one_minus_dampening.double().cpu()
        if len({len(beta), len(share), len(factor)}) > 1:
            wide = reference.double().cpu()
            beta, share, factor = (broadcast_to_params(value, run.model.sizes, wide) for value in (beta, share, factor))
        factor = beta * factor + share
        factors[s] = factor
    times = tuple(time / count / float(rates[s]) for s in steps)
    return PathNodes(run, tuple(steps), tuple(factors[s] for s in steps), times, time, _mean_weights(run, rates))


def _mean_weights(run: Trajectory, rates: Float64[Tensor, " S"]) -> Float64[Tensor, " M"]:
    total = torch.zeros(run.num_points + 1, dtype=torch.float64)  # the last entry is for rows outside the training data
    for samples, weights, rate in _batches(run, rates):
        total.index_add_(0, samples, weights * rate)
    return total[:-1] / rates.sum()


def _batches(run: Trajectory, rates: Float64[Tensor, " S"]) -> Iterator[tuple[Tensor, Tensor, float]]:
    """Yield samples of each step, the weights of their losses, and the learning rate."""
    every, targets = torch.arange(run.num_points), run.targets.cpu()
    for step, rate in zip(run.steps, rates.tolist(), strict=True):
        samples = every if step.batch is None else step.batch.cpu()
        weights = step.sample_weights
        weights = sample_weights(run.loss, targets[samples]) if weights is None else weights.cpu()
        yield samples, weights.double(), rate


@dataclass(frozen=True, eq=False)
class CheckpointNodes(PathNodes):
    """Checkpoints at even times, of a training without further information; its time is determined later.

    Adam's metric uses the gradient of the whole loss, squared and averaged over the checkpoints; docs/judging.md
    compares it with the recorded metric.

    Attributes:
        diagonal: The metric of a whole run of time 1, (P,).
        rule: "Adam" or "SGD".
        observed: Cosines between the changes between checkpoints and the steps of each rule.
    """

    diagonal: Float[Tensor, " P"]
    rule: str
    observed: Mapping[str, float]

    @property
    def is_even(self) -> bool:
        """Whether all weights have the same number."""
        return self.rule == "SGD"

    def metric(self, node: int, state: Float[Tensor, " PQ"]) -> Float[Tensor, " P"]:
        """Return the metric times the share of the run that a node represents."""
        return self.diagonal.to(state) * self.times[node]


def checkpoint_nodes(run: Trajectory, rule: str | None) -> CheckpointNodes:
    """Return the nodes of a path of checkpoints (`trained.between.path_of_checkpoints`).

    Args:
        run: The path.
        rule: "Adam" or "SGD"; None takes the one whose steps best follow the changes between checkpoints.

    Raises:
        ValueError: There are too few checkpoints.
    """
    if (last := run.num_steps) + 1 < NUM_STATES:
        raise ValueError(
            f"a datamodel needs {NUM_STATES} checkpoints at least, at even times from the initial network to the "
            f"trained one: got {last + 1}."
        )
    states = [round(k * last / (NUM_STATES - 1)) for k in range(NUM_STATES)]
    w = [flat_state(run, state, run.states[0]) for state in states]
    replay, step = RunReplay(run, run.model, w[0]), run.steps[0]
    P = run.num_weights
    g = torch.stack([replay.gradient_at(step, own)[0] for own in w])
    adam = 1 / (g.square().mean(dim=0).sqrt() + 1e-8)
    ways, mean = torch.stack(w)[:, :P].diff(dim=0), (g[1:] + g[:-1]) / 2
    along = {"Adam": -adam * mean, "SGD": -mean}
    observed = {name: float(cosine_similarity(ways, own, dim=1).nanmean()) for name, own in along.items()}
    rule = max(observed, key=observed.__getitem__) if rule is None else rule
    ends = [0.5 / (NUM_STATES - 1)]
    times = (*ends, *[2 * ends[0]] * (NUM_STATES - 2), *ends)
    return CheckpointNodes(
        run=run,
        steps=tuple(states),
        factors=(),
        times=times,
        time=float("nan"),
        sample_weights=sample_weights(run.loss, run.targets),
        diagonal=adam if rule == "Adam" else torch.ones_like(adam),
        rule=rule,
        observed=observed,
    )
