"""Odd programs: what the package answers is right by brute force, or it says that it is not."""

import pytest
from odd_programs import outcome
from odd_themes import ROWS, THEMES, draw_program

pytestmark = pytest.mark.usefixtures("unchecked")  # an error must be the library's own, and there are many calls
FIRST = 40_004  # none of the seeds of `make faults`
PER_THEME = {"fault": 18}
CASES = [(theme, FIRST + 100 * k + i) for k, theme in enumerate(THEMES) for i in range(PER_THEME.get(theme, 4))]


@pytest.mark.parametrize(("theme", "seed"), CASES)
def test_an_odd_program_gets_no_wrong_answer_without_a_word_and_a_sound_one_is_no_false_alarm(theme, seed):
    """Right, one clear error, or not certified; `make faults` takes 2,400 others."""
    program = draw_program(seed, theme)
    allowed = ("right",) if theme == "sound" else ("right", "refused", "uncertified")
    assert outcome(program) in allowed, str(program)


def test_every_theme_stands_in_one_row_of_the_table():
    assert sorted(theme for row in ROWS.values() for theme in row) == sorted(THEMES)
