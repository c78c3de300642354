"""Numbers in fixed point: as fine as sums allow, and refused where sums would not be exact."""

import pytest
import torch

from epk_gp.report.explanations import LARGEST, choose_quantum, significant, to_units


@pytest.mark.parametrize("size", [1e-9, 0.3, 1.0, 77.0, 1e4, 8e9])
def test_the_quantum_is_the_finest_in_which_sums_are_exact(size):
    quantum = choose_quantum(size)
    assert 1000 * size / quantum <= LARGEST
    assert quantum == 1e-15 or 1000 * size / (quantum / 10) > LARGEST


@pytest.mark.parametrize("size", [1e13, float("inf"), float("nan")])
def test_sizes_without_a_quantum_are_refused(size):
    with pytest.raises(ValueError, match="must sum to at most 9e\\+12 to be shown: got"):
        choose_quantum(size)


def test_units_are_the_nearest_whole_multiples(generator):
    values = torch.randn(1000, generator=generator, dtype=torch.float64)
    units = to_units(values, 1e-6)
    assert units.dtype == torch.int64
    assert float((units.double() * 1e-6 - values).abs().max()) <= 0.5001e-6
    assert int(units.sum()) == sum(units.tolist())


def test_terms_beyond_exact_sums_are_refused():
    values = torch.full((10,), 1e15, dtype=torch.float64)
    with pytest.raises(ValueError, match="sum to less than 9e\\+15.* sum to 1e\\+16. Explain this point by"):
        to_units(values, 1.0)


def test_other_numbers_are_short():
    assert significant(0.123456789) == 0.12346
    assert significant(-1234567.0, 2) == -1.2e6
