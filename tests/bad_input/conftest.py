from dataclasses import dataclass

import pytest

import epk_gp as epk
from loops import CASES, trained


@pytest.fixture(scope="module")
def trajectory() -> epk.Trajectory:
    return trained(CASES["minibatch"])


@dataclass
class Fixtures:
    """A run and the two kinds of Gaussian process over its first points."""

    t: epk.Trajectory
    gp: epk.LogitGP
    per_class: epk.LogitGP


@pytest.fixture(scope="module")
def f(trajectory):
    return Fixtures(
        trajectory, epk.LogitGP(trajectory, points=[0, 1, 2]), epk.LogitGP(trajectory, "independent", points=[0, 1])
    )
