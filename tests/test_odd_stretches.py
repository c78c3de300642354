"""One state of a run at a time and several evaluated together: the same numbers to rounding, and the same refusals."""

import pytest
import torch
from odd_stretches import OPTIONS, TOLERANCE, difference_of, draw_problem, outcome

pytestmark = pytest.mark.usefixtures("unchecked")
FIRST = 40_000  # none of the seeds of `make faults`
PER_QUESTION = 1


def seeds_of(question: str) -> list[int]:
    """Return the first seeds whose problems ask a question, in few steps; of images in fewer."""
    problems = (draw_problem(seed) for seed in range(FIRST, FIRST + 1000))
    chosen = (p for p in problems if p.question == question and p.steps in ((5,) if p.inputs == "images" else (5, 8)))
    return [next(chosen).seed for _ in range(PER_QUESTION)]


CASES = [(question, seed) for question in OPTIONS for seed in seeds_of(question)]


@pytest.mark.parametrize(("question", "seed"), CASES)
def test_any_number_of_states_together_gives_the_same_numbers(question, seed):
    """`make faults` takes 1,000 others."""
    problem = draw_problem(seed)
    assert outcome(problem) in ("right", "refused"), str(problem)


def test_a_difference_beyond_rounding_is_told():
    one = {"values": torch.tensor([1.0, -3.0], dtype=torch.float64), "certified": True}
    for other, told in (
        ({**one, "values": one["values"] * (1 + 1e-12)}, ""),
        ({**one, "values": one["values"] + one["values"].new_tensor([1e-9, 0])}, "values is off by 3.3e-10"),
        ({**one, "values": one["values"].float()}, "torch.float64 and torch.float32"),
        ({**one, "values": one["values"] / 0}, "finite in other places"),
        ({**one, "certified": False}, "certified is True and False"),
        ("ValueError: no", "numbers and an error (ValueError: no)"),
    ):
        assert told in difference_of(one, other, TOLERANCE[torch.float64])
        assert bool(told) == bool(difference_of(one, other, TOLERANCE[torch.float64]))
