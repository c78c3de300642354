"""The scale of a kernel: its mean diagonal, or a number."""

import pytest
import torch

from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import train_copy
from kernel_cases import MODES, assert_close, make_run


@pytest.mark.parametrize("outputs", MODES)
def test_mean_diagonal_makes_the_mean_diagonal_one(trajectory, outputs):
    kernel = EPKKernel(trajectory, outputs, normalize="mean_diagonal")
    x = train_copy(trajectory.inputs)
    diagonal = kernel(x, diag=True)
    assert_close(diagonal.mean(), torch.ones((), dtype=torch.float64))
    raw = EPKKernel(trajectory, outputs)
    assert raw.scale == 1.0
    assert_close(kernel(x).to_dense() * kernel.scale, raw(x).to_dense())
    assert_close(EPKKernel(trajectory, outputs, normalize=4)(x).to_dense() * 4, raw(x).to_dense())
    if outputs == "independent":
        assert kernel[1].scale == kernel.scale  # one scale for all classes


def test_mean_diagonal_uses_evenly_spaced_points_only(counter, monkeypatch):
    monkeypatch.setattr("epk_gp.kernels.epk.NORMALIZATION_POINTS", 3)
    run = make_run()
    scale = EPKKernel(run, normalize="mean_diagonal").scale
    assert counter.points == 3
    x = train_copy(run.inputs[[0, 2, 4]])
    assert scale == pytest.approx(float(EPKKernel(run)(x, diag=True).mean()), rel=1e-12)


def test_normalization_is_computed_in_float64():
    run = make_run(dtype=torch.float32)
    x = train_copy(run.inputs.double())
    exact = float(EPKKernel(run)(x, diag=True).mean())
    assert EPKKernel(run, normalize="mean_diagonal").scale == pytest.approx(exact, rel=1e-14)
