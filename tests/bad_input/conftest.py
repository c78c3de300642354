import pytest

import epk_gp as epk
from loops import CASES, trained


@pytest.fixture(scope="module")
def trajectory() -> epk.Trajectory:
    return trained(CASES["minibatch"])
