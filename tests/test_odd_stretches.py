"""One state of a run at a time and several evaluated together: the same numbers to rounding."""

import pytest
import torch
from odd_stretches import OPTIONS, TOLERANCE, answers, difference_of, draw_problem, outcome

pytestmark = pytest.mark.usefixtures("unchecked")
FIRST = 42_000  # none of the seeds of `make faults`


def first_seed(question: str) -> int:
    """Return the first seed whose problem asks a question, in few steps; of images in fewer."""
    for seed in range(FIRST, FIRST + 1000):
        problem = draw_problem(seed)
        if problem.question == question and problem.steps in ((5,) if problem.inputs == "images" else (5, 8)):
            return seed
    raise LookupError(f"no problem asks for {question}.")


@pytest.mark.parametrize("question", OPTIONS)
def test_any_number_of_states_together_gives_the_same_numbers(question):
    """`make faults` takes 1,000 others."""
    problem = draw_problem(first_seed(question))
    assert outcome(problem) == "right", str(problem)


def test_states_that_go_together_round_in_another_way():
    """The control: what is compared was computed by other calls."""
    found = answers(draw_problem(first_seed("attribute")))
    assert not torch.equal(found[1]["samples"], found[None]["samples"])


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
