"""Recording a problem's run, and training it again with other sample weights, several networks side by side."""

import time
from collections.abc import Callable
from dataclasses import replace

import nets
import torch
from settings import Data, Problem
from torch import Tensor, nn
from torch.func import functional_call, vmap

import epk_gp as epk


def record(problem: Problem, kept: Tensor | None = None, *, positions: bool = False) -> epk.Trajectory:
    """Train the network, and record it in memory.

    Args:
        problem: The problem.
        kept: Which samples are there, (M,) booleans: the others leave gaps in their batches. None keeps all.
        positions: Whether a text's network is recorded as it is, rather than together with its log-likelihood.
    """
    data, net = problem.data(), problem.network()
    X, y, loss, train = data.X, data.y, epk.CrossEntropy(), net
    if data.y.is_floating_point():
        loss = epk.MeanSquaredError()
    is_text = data.y.ndim > 1 and not data.y.is_floating_point()
    scored = is_text and not nets.padded(data.y) and not positions
    if scored:  # a text has several targets: the network is recorded together with its log-likelihood
        X, train = (data.X, data.y), nets.Scored(net)
        loss = epk.PerSampleLoss(lambda returned, _: -returned[:, 0])
    optimizer = problem.optimizer(list(train.parameters()))
    train.train()
    torch.manual_seed(problem.seed)
    # explained are other numbers than this one
    output = {"output": lambda returned: returned[:, -1]} if is_text and not scored else {}
    with epk.Recorder(train, optimizer, X, y, loss=loss, **output) as recorder:
        for batch in problem.batches():
            optimizer.zero_grad()
            rows = batch if kept is None else batch[kept[batch]]
            share = len(rows) / len(batch)
            if scored:
                value = -train(data.X[rows], data.y[rows]).mean()
            elif data.y.is_floating_point():
                value = nn.functional.mse_loss(train(data.X[rows]), data.y[rows])
            else:
                value = nn.functional.cross_entropy(train(data.X[rows]).movedim(-1, 1), data.y[rows])
            (share * value).backward()
            recorder.batch(rows, weight=share)
            optimizer.step()
    return recorder.trajectory


def weights_at(run: epk.Trajectory, state: int) -> dict[str, Tensor]:
    """Return a state's weights under the names of the network of `Problem.network`."""
    return {name.removeprefix("net."): value.clone() for name, value in run.weights(state).items()}


def retrained_outcomes(problem: Problem, subsets: Tensor, seeds: list[int] | None = None) -> Tensor:
    """Train again with other sample weights, and return log p(target) of every test sample; of numbers, the output.

    Initial weights, batches, their order, dropout and the divisor of the loss are those of the recorded run: a sample
    of weight 0 leaves a gap. It is a loop of its own on purpose: the truth does not come from the package that is
    judged by it.

    Args:
        problem: The problem.
        subsets: Sample weights, (m, M).
        seeds: Seeds of initial weights, batches and dropout for each of them, as dattri's truth has it; None takes
            those of the recorded run.

    Returns:
        (m, n).
    """
    data, net, weights = problem.data(), problem.network().eval(), retrained(problem, subsets, seeds)
    with torch.no_grad():
        return torch.stack(
            [_in_parts(net, {name: value[k] for name, value in weights.items()}, data) for k in range(len(subsets))]
        )


def retrained(problem: Problem, subsets: Tensor, seeds: list[int] | None = None) -> dict[str, Tensor]:
    """Train networks side by side, one for each row of sample weights: each parameter gets one axis more."""
    data, net = problem.data(), problem.network()
    each_problem = [problem] * len(subsets) if seeds is None else [replace(problem, seed=seed) for seed in seeds]
    starts = [dict(each.network().named_parameters()) for each in each_problem]
    weights = {name: torch.stack([start[name].detach() for start in starts]).requires_grad_() for name in starts[0]}
    steps = (
        problem.batches()
        if seeds is None
        else map(torch.stack, zip(*[each.batches() for each in each_problem], strict=True))
    )
    axis, randomness = (None, "same") if seeds is None else (0, "different")
    optimizer = problem.optimizer(list(weights.values()))
    net.train()

    def losses(w: dict[str, Tensor], X: Tensor, y: Tensor) -> Tensor:
        return -nets.log_p(functional_call(net, w, (X,)), y)

    with torch.random.fork_rng(devices=()):
        torch.manual_seed(problem.seed)  # dropout: the same masks for all networks, and those of the recorded run
        for batch in steps:
            optimizer.zero_grad()
            each = vmap(losses, (0, axis, axis), randomness=randomness)(weights, data.X[batch], data.y[batch])
            kept = subsets.gather(1, batch.expand(len(subsets), -1))
            ((kept * each).sum() / batch.shape[-1]).backward()
            optimizer.step()
    return {name: value.detach() for name, value in weights.items()}


def trained(
    problem: Problem, before_step: Callable[[int, nn.Module], None] | None = None
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train the network once, by torch's plain loop; what is to be done before each step is told its number."""
    data, net = problem.data(), problem.network()
    optimizer = problem.optimizer(list(net.parameters()))
    net.train()
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(problem.seed)
        for number, batch in enumerate(problem.batches()):
            if before_step is not None:
                before_step(number, net)
            optimizer.zero_grad()
            (-nets.log_p(net(data.X[batch]), data.y[batch]).mean()).backward()
            optimizer.step()
    return net.eval(), optimizer


def checkpoints(problem: Problem, count: int) -> list[dict[str, Tensor]]:
    """Train the network once, and return its weights at even times: the first and the last ones, and between them."""
    steps, states = len(problem.batches()), dict[int, dict[str, Tensor]]()
    times = {round(k * steps / (count - 1)) for k in range(count)}

    def save(number: int, net: nn.Module) -> None:
        if number in times:
            states[number] = {name: value.clone() for name, value in net.state_dict().items()}

    net, _ = trained(problem, save)
    save(steps, net)
    return list(states.values())


def retraining_seconds(problem: Problem) -> float:
    """Measure the processor seconds of training the network once, by torch's plain loop."""
    problem.data()  # read once
    before = time.process_time()
    trained(problem)
    return time.process_time() - before


def _in_parts(net: nn.Module, weights: dict[str, Tensor], data: Data) -> Tensor:
    parts = zip(data.X_test.split(1000), data.y_test.split(1000), strict=True)
    return torch.cat([nets.functional_answers(net, weights, X, y) for X, y in parts])
