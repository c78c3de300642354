"""How a long computation is carried out: one value, or its fields as keyword arguments."""

import pytest
import torch

import epk_gp as epk
from epk_gp.core.checks import parse_options
from epk_gp.gram.path_kernel import gram_diagonal_blocks
from helpers import make_case

pytestmark = pytest.mark.usefixtures("unchecked")


def test_a_value_and_keyword_arguments_mean_the_same() -> None:
    case = make_case("relu")
    a, b = epk.Points(case.test, False), epk.Points(case.trajectory.inputs, True)
    by_value = epk.PathKernel(case.trajectory).block(a, b, epk.ComputeOptions(memory_budget=1 << 20))
    assert torch.equal(by_value, epk.gram_block(case.trajectory, a, b, memory_budget=1 << 20))


@pytest.mark.parametrize("settings", [{"budget": 1}, {"memory": 1 << 20, "progress": False}])
def test_an_unknown_keyword_is_named(settings: dict[str, object]) -> None:
    with pytest.raises(TypeError, match=r"f\(\) got an unexpected keyword argument '(budget|memory)'. It takes mem"):
        parse_options("f", **settings)  # type: ignore[arg-type]


def test_an_option_without_a_meaning_is_refused() -> None:
    case = make_case("relu", steps=1)
    points = epk.Points(case.test, False)
    with pytest.raises(TypeError, match=r"gram_diagonal_blocks\(\) got an unexpected keyword argument 'accumulate'"):
        gram_diagonal_blocks(case.trajectory, points, accumulate=torch.float64)
    with pytest.raises(TypeError, match=r"reconstruct\(\) got an unexpected keyword argument 'accumulate'"):
        epk.reconstruct(case.trajectory, case.test, accumulate=torch.float64)
    options = epk.ComputeOptions(accumulate=torch.float64)
    with pytest.raises(ValueError, match="diagonal_blocks must be computed without accumulate: got"):
        epk.PathKernel(case.trajectory).diagonal_blocks(points, options)


@pytest.mark.parametrize(
    ("field", "error", "message"),
    [
        ({"memory_budget": 1000}, ValueError, "memory_budget must be at least 1 MiB"),
        ({"memory_budget": 1e9}, TypeError, "memory_budget must be a whole number of bytes: got 1000000000.0"),
        ({"accumulate": torch.float16}, ValueError, "accumulate must be torch.float64 or None: got torch.float16"),
    ],
)
def test_a_field_that_cannot_be_used_is_refused(field: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        epk.ComputeOptions(**field)  # type: ignore[arg-type]
