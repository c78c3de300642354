"""Output structures: values, consistent shapes, and the derivative of what they evaluate."""

import pytest
import torch

from epk_gp.core.inputs import Points
from epk_gp.core.options import ComputeOptions
from epk_gp.gram.pairs import PointSets, SetPairs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernels.output_structure import OutputStructure, parse_outputs
from epk_gp.quadrature.rules import gauss_legendre
from kernel_cases import C, D, assert_close

KINDS = ["full", "independent", "trace", "sum"]
OPTIONS = ComputeOptions()


@pytest.fixture
def kernel(trajectory):
    return PathKernel(trajectory, "log_softmax", gauss_legendre(2))


def test_every_argument_names_its_structure_and_matrices():
    for kind in KINDS:
        parsed, matrices = parse_outputs(kind, C)
        assert parsed == OutputStructure(kind, C)  # a value, as the key of a cache
        assert matrices.tolist() == ([0, 1, 2] if kind == "independent" else 0)
    parsed, matrices = parse_outputs(2, C)
    assert (parsed, int(matrices)) == (OutputStructure("independent", C), 2)


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_those_that_a_structure_promises(kernel, kind):
    structure = OutputStructure(kind, C)
    K, R = structure.num_matrices, structure.rows_per_point
    a, b = (Points(torch.randn(n, D, dtype=torch.float64), False) for n in (4, 5))
    assert structure.evaluate(kernel, a, b, OPTIONS).shape == (K, 4 * R, 5 * R)
    blocks = kernel.diagonal_blocks(a)
    assert structure.reduce_blocks(blocks).shape == (4, K, R, R)
    diagonal = structure.evaluate(kernel, a, a, OPTIONS).diagonal(dim1=-2, dim2=-1)
    assert_close(structure.diagonal(blocks), diagonal)


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_is_that_of_the_weighted_values(kernel, kind):
    """Central differences of step 1e-5: their error is 1e-10 of the third derivative, and rounding 1e-11."""
    structure = OutputStructure(kind, C)
    a, b = (Points(torch.randn(n, D, dtype=torch.float64), False) for n in (2, 3))
    direction = torch.randn(2, D, dtype=torch.float64)
    weights = torch.randn_like(structure.evaluate(kernel, a, b, OPTIONS))

    def value(t):
        return (weights * structure.evaluate(kernel, Points(a.X + t * direction, False), b, OPTIONS)).sum()

    slope = (value(1e-5) - value(-1e-5)) / 2e-5
    left, right = (PointSets(z.X[None], torch.zeros(1, len(z), dtype=torch.bool)) for z in (a, b))
    shared = torch.zeros(len(weights), dtype=torch.long)
    pairs = SetPairs(left, right, shared, shared)

    def gradient_of(weights):
        whole = structure.weights_on_outputs(pairs, torch.arange(len(weights)), weights)
        return kernel.pairs_input_gradients(*whole, (True, False), OPTIONS)[0][0]

    gradient = gradient_of(weights)
    torch.testing.assert_close((gradient * direction).sum(), slope, rtol=1e-7, atol=1e-8)
    wrong = gradient_of(weights.flip(-1))  # the negative control
    assert abs(float((wrong * direction).sum() - slope)) > 1e-2 * abs(float(slope))
