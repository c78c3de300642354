"""What path training takes from a run: a few of its states, the metric of the steps there, and the weights of samples.

Near step s the weights move by -H_s g for a gradient g that changes slowly, with one number for each weight,

    H_s = grad_scale (lr + momentum_lr q_s),   q_s = beta q_{s-1} + one_minus_dampening,

of the recorded coefficients (`epk_gp.optimizers.update_rules`): eps / (sqrt(v) + delta) under Adam, and under SGD
eps / (1 - momentum) once its momentum has grown. A run of T = sum_s eps_s is divided into parts of equal time, each of
which has the metric and the gradients of the state in its middle.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64
from torch import Tensor
from torch.nn.functional import cosine_similarity

from epk_gp.core.losses import sample_weights
from epk_gp.core.replayed_steps import RunReplay
from epk_gp.core.trajectory import Trajectory, flat_state, held_coefficients, step_coefficients
from epk_gp.optimizers.update_rules import broadcast_to_params

# Of the path, and where six kernels have no room. Measured: 12 and 24 predict as six (docs/capabilities/datamodel.md).
NUM_STATES, FEW_STATES = 6, 3
_STILL = 1e4  # times the median of a parameter: there a preconditioner divides by nothing but its smallest number


@dataclass(frozen=True, eq=False)
class PathNodes:
    """Some states of a run, each of which stands for an equal part of its time.

    Attributes:
        run: The run.
        steps: The steps s that begin at these states.
        factors: The momentum's q_s at these steps, (L,) or (P,).
        times: How many steps like it each of them stands for, sum of eps over the part divided by eps_s.
        time: T, the sum of the learning rates of all steps.
        sample_weights: Mean weight of each sample's loss in the loss of a step, (M,): 1 / M of an even training.
    """

    run: Trajectory
    steps: tuple[int, ...]
    factors: tuple[Float64[Tensor, " _"], ...]
    times: tuple[float, ...]
    time: float
    sample_weights: Float64[Tensor, " M"]

    @property
    def is_even(self) -> bool:
        """Whether all weights of a parameter have the same number, as under SGD."""
        L, updates = len(self.run.model.sizes), (held_coefficients(self.run, s) for s in self.steps)
        return all(len(value) == L for update in updates for value in (update.lr, update.momentum_lr))

    def metric(self, node: int, reference: Tensor) -> Float[Tensor, " P"]:
        """Return the sum of H_s over the part of the run that a node stands for.

        Raises:
            ValueError: A step moves weights up the gradient.
        """
        sizes, update = self.run.model.sizes, step_coefficients(self.run, self.steps[node], reference)
        scale, lr, momentum_lr, factor = (
            broadcast_to_params(value, sizes, reference)
            for value in (update.grad_scale, update.lr, update.momentum_lr, self.factors[node])
        )
        H = scale * (lr + momentum_lr * factor) * self.times[node]  # a tensor of its own
        for own in H.split(list(sizes)):  # whose gradients were 0 all along: how far they move for others is not known
            own.masked_fill_(own > _STILL * own.median(), 0.0)
        if not bool((H >= 0).all() & H.isfinite().all()):
            raise ValueError(
                "a datamodel needs steps down the gradient, with a finite number >= 0 for each weight: step "
                f"{self.steps[node]} has others (maximize=True, or a learning rate below 0)."
            )
        return H


def path_nodes(run: Trajectory, count: int = NUM_STATES) -> PathNodes:
    """Return the nodes of a run's path: so many.

    Raises:
        ValueError: The run is too short, or its steps have no number for each weight.
    """
    S, rates = run.num_steps, torch.tensor([step.lr for step in run.steps], dtype=torch.float64)
    if S < NUM_STATES or not bool((rates >= 0).all()) or not 0 < (time := float(rates.sum())) < float("inf"):
        raise ValueError(
            f"a datamodel needs {NUM_STATES} steps at least, with learning rates >= 0, not all 0: got a run of {S}."
        )
    ends = rates.cumsum(0)
    middles = (torch.arange(count, dtype=torch.float64) + 0.5) * time / count
    steps = torch.searchsorted(ends, middles).clamp(max=S - 1).tolist()
    factors = dict[int, Tensor]()
    factor = torch.zeros(len(run.model.sizes), dtype=torch.float64)
    for s in range(steps[-1] + 1):
        update = held_coefficients(run, s)
        if update.has_matrices:
            raise ValueError(
                f"a datamodel needs steps with one number for each weight: those of {run.update_rule} have matrices, "
                "or two buffers. Ask epk_gp.attribute, or train on subsets in a loop of your own."
            )
        factor = update.beta.double().cpu() * factor + update.one_minus_dampening.double().cpu()
        factors[s] = factor
    times = tuple(time / count / float(rates[s]) for s in steps)
    return PathNodes(run, tuple(steps), tuple(factors[s] for s in steps), times, time, _mean_weights(run, rates))


def _mean_weights(run: Trajectory, rates: Float64[Tensor, " S"]) -> Float64[Tensor, " M"]:
    total = torch.zeros(run.num_points + 1, dtype=torch.float64)  # the last one of rows that are no training points
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
    """Checkpoints at even times, of a training of which nothing else is known; its time is found out later.

    Adam's metric is that of the gradient of the whole loss, squared and averaged over the checkpoints: measured, it
    loses nothing against the recorded one (docs/capabilities/datamodel.md).

    Attributes:
        diagonal: The metric of a whole run of time 1, (P,).
        rule: "Adam" or "SGD".
        observed: How far the ways between checkpoints go along the steps of each rule, by cosines.
    """

    diagonal: Float[Tensor, " P"]
    rule: str
    observed: Mapping[str, float]

    @property
    def is_even(self) -> bool:
        """Whether all weights have the same number."""
        return self.rule == "SGD"

    def metric(self, node: int, reference: Tensor) -> Float[Tensor, " P"]:
        """Return the metric times the share of the run that a node stands for."""
        return self.diagonal.to(reference) * self.times[node]


def checkpoint_nodes(run: Trajectory, rule: str | None) -> CheckpointNodes:
    """Return the nodes of a path of checkpoints (`trained.between.path_of_checkpoints`).

    Args:
        run: The path.
        rule: "Adam" or "SGD"; None takes the one whose steps go along the ways between checkpoints.

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
