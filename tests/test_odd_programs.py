"""Odd programs: what the package answers is right by brute force, or it says that it is not."""

import pytest
from odd_programs import outcome
from odd_themes import ROWS, THEMES, draw_program

pytestmark = pytest.mark.usefixtures("unchecked")  # an error must be the library's own, and there are many calls
FIRST = 40_000  # none of the seeds of `make faults`
PER_THEME = 4
FIXED = [(theme, FIRST + 100 * number + k) for number, theme in enumerate(THEMES) for k in range(PER_THEME)]


@pytest.mark.parametrize(("theme", "seed"), [case for case in FIXED if case[0] != "sound"])
def test_an_odd_program_gets_no_wrong_answer_without_a_word(theme, seed):
    """Right, one clear error, or not certified; `make faults` takes 2,000 others."""
    program = draw_program(seed, theme)
    assert outcome(program) in ("right", "refused", "uncertified"), str(program)


@pytest.mark.parametrize(("theme", "seed"), [case for case in FIXED if case[0] == "sound"])
def test_a_sound_program_is_no_false_alarm(theme, seed):
    """The negative control."""
    program = draw_program(seed, theme)
    assert outcome(program) == "right", str(program)


def test_every_theme_stands_in_one_row_of_the_table():
    assert sorted(theme for row in ROWS.values() for theme in row) == sorted(THEMES)
