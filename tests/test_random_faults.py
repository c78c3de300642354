"""Random trainings with one random fault: it is found, or the sums are the network's outputs all the same."""

import pytest
from random_faults import NAMES, count_outcomes

PER_CASE = 30
NUM_CASES = 6


@pytest.mark.slow
@pytest.mark.parametrize("case", range(NUM_CASES))
def test_a_planted_fault_is_found_or_without_effect(case):
    """180 draws in all; most are found. `make faults` takes three times as many."""
    counts = count_outcomes(case * PER_CASE, PER_CASE)
    assert set(counts) <= {"refused", "uncertified", "exact"}
    assert counts["refused"] + counts["uncertified"] > PER_CASE / 2


@pytest.mark.slow
def test_a_sound_training_is_no_false_alarm():
    """The negative control."""
    assert count_outcomes(10_000, 25, planted=False) == {"exact": 25}


def test_every_kind_of_fault_is_drawn():
    assert {seed % len(NAMES) for seed in range(PER_CASE)} == set(range(len(NAMES)))
