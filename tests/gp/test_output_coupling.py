"""Couplings of outputs: layouts of values, blocks of single points, and GPyTorch's modules of the right batch."""

import pytest
import torch

from epk_gp.gp.output_coupling import parse_coupling
from gp_cases import C

COUPLINGS = [parse_coupling(outputs, C) for outputs in ("full", "independent", "trace")]
n = 4


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_rows_are_point_major_and_go_back(coupling):
    values = torch.arange(n * C, dtype=torch.float64).reshape(n, C)
    B, R = coupling.num_right_sides, coupling.structure.rows_per_point
    rows = coupling.to_gpytorch(values).reshape(B, -1)
    assert rows.shape == (B, n * R)
    assert rows[0].tolist() == (list(range(n * C)) if B == 1 else list(range(0, n * C, C)))
    assert torch.equal(coupling.from_rows(rows), values)
    batch = torch.stack([rows, 2 * rows])
    assert torch.equal(coupling.from_rows(batch), torch.stack([values, 2 * values]))


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_blocks_of_single_points_are_cut_out_of_the_whole_matrix(coupling):
    K, R = coupling.structure.num_matrices, coupling.structure.rows_per_point
    V = torch.randn(K, 6, n * R, dtype=torch.float64)
    gram = V.mT @ V
    blocks = coupling.point_blocks(gram)
    torch.testing.assert_close(coupling.point_blocks_of_gram(V, n), blocks)
    for i in range(n):
        for c in range(C):
            if R == C:
                assert torch.equal(blocks[i, c], gram[0, i * C + c, i * C : (i + 1) * C])
            else:
                assert torch.equal(blocks[i, c], gram[c if K > 1 else 0, i, i] * torch.eye(C, dtype=torch.float64)[c])


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_the_prior_covariance_scales_every_process(coupling):
    A = torch.randn(n, C, C, dtype=torch.float64)
    blocks = A @ A.mT
    scale = torch.linspace(1, 2, coupling.structure.num_matrices, dtype=torch.float64)
    covariances = coupling.covariances(scale[:, None, None] * coupling.structure.reduce_blocks(blocks))
    expected = {
        "full": blocks,
        "independent": (scale * blocks.diagonal(dim1=1, dim2=2)).diag_embed(),
        "trace": blocks.diagonal(dim1=1, dim2=2).sum(1)[:, None, None] * torch.eye(C, dtype=torch.float64),
    }[coupling.structure.kind]
    assert torch.equal(covariances, expected)


@pytest.mark.parametrize("coupling", COUPLINGS)
def test_likelihoods_have_the_batch_and_the_noise(coupling):
    variances = torch.rand(n, C, dtype=torch.float64) + 0.1
    if coupling.structure.kind == "trace":  # one number for all
        with pytest.raises(ValueError, match="outputs='trace' shares one factorisation, so that the noise must be one"):
            coupling.likelihood(variances)
        assert coupling.likelihood(None).noise.shape == (1,)
        return
    known = coupling.likelihood(variances)
    assert torch.equal(known.noise, coupling.to_gpytorch(variances))
    assert coupling.likelihood(None).noise.shape == (*coupling.batch_shape, 1)
