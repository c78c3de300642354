"""What the scores are judged by: networks trained again without some of the samples."""

from dataclasses import asdict

import torch
from retraining import retrained_outcomes
from rows import Row, Rows
from settings import Problem
from torch import Tensor
from tqdm import tqdm

ALPHAS = (0.5, 0.9)
BRITTLE_POINTS, BRITTLE_SHARE = 20, 0.05  # a tenth would be a whole class


def problem_key(problem: Problem) -> Row:
    """Return everything on which a problem's rows depend."""
    data = problem.data()
    digest = [float(part.double().sum()) for part in data[:4]]  # the text depends on Python's version
    return {"setting": asdict(problem.setting), "seed": problem.seed, "flipped": problem.flipped, "data": digest}


def outcomes(
    problem: Problem, kind: str, subsets: Tensor, rows: Rows, *, seeds: list[int] | None = None
) -> Tensor | None:
    """Return log p(target) of all test samples for networks trained with other sample weights: (m, n).

    Of numbers, it is the output.

    Args:
        problem: The problem.
        kind: Name of the subsets.
        subsets: Sample weights, (m, M).
        rows: Where groups of networks are saved as they are ready.
        seeds: As of `retrained_outcomes`.

    Returns:
        None if a group is neither saved nor asked for.
    """
    name, parts = f"{problem.name}: truth, {kind}", []
    for start in tqdm(range(0, len(subsets), problem.setting.together), desc=name, leave=False, disable=None):
        places = slice(start, start + problem.setting.together)
        group, own = subsets[places], seeds and seeds[places]
        key = problem_key(problem) | {"weights": _digest(group)} | ({"seeds": own} if own else {})

        def compute(group: Tensor = group, own: list[int] | None = own) -> Row:
            return {"outcomes": retrained_outcomes(problem, group, own)}

        row = rows.get(f"{name}, from {start}", key, compute)
        if row is None:
            return None
        parts.append(row["outcomes"])
    return torch.cat(parts)


def leave_one_out(problem: Problem, rows: Rows) -> Tensor | None:
    """Return log p(target) with every sample less log p(target) without each of them: (M, n)."""
    size = problem.setting.num_train
    found = outcomes(problem, "leave-one-out", torch.cat([torch.ones(1, size), 1 - torch.eye(size)]), rows)
    return None if found is None else found[0] - found[1:]


def brittleness(problem: Problem, score: str, values: Tensor, rows: Rows) -> float | None:
    """Return the mean log p(target) that test samples lose when their highest samples are left out.

    Args:
        problem: The problem.
        score: Name of the score.
        values: (n, M).
        rows: Where networks are saved.
    """
    points = min(BRITTLE_POINTS, len(values))
    count = max(1, round(BRITTLE_SHARE * values.shape[1]))
    kept = torch.ones(points + 1, values.shape[1])  # the last one is trained with every sample
    kept[:points].scatter_(1, values[:points].topk(count, dim=1).indices, 0.0)
    found = outcomes(problem, f"brittleness of {score}", kept, rows)
    if found is None:
        return None
    return float((found[-1, :points] - found[:points, :points].diagonal()).mean())


def _digest(values: Tensor) -> list[float]:
    places = torch.arange(1, values.numel() + 1, dtype=torch.float64).sqrt()
    return [float(values.sum(dtype=torch.float64)), float(values.double().flatten() @ places)]
