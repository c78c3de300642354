"""Output structures: values and consistent shapes."""

import pytest
import torch

from epk_gp.core.inputs import Points
from epk_gp.core.options import ComputeOptions
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernels.blocks import OutputStructure, parse_outputs
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
