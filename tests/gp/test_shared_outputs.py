"""Processes whose outputs share one covariance: one factorisation, C right-hand sides."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from epk_gp.gp.models import LogitGP
from epk_gp.gp.regression import leave_one_out
from epk_gp.gram.path_kernel import PathKernel
from gp_cases import D
from kernel_cases import make_run as make_other_run


def test_a_test_point_without_a_direction_is_named_by_its_number(trajectory, monkeypatch):
    gp = LogitGP(trajectory, "trace", "zero", "labels", normalize="cosine")
    original = PathKernel.diagonal_blocks
    monkeypatch.setattr(
        PathKernel, "diagonal_blocks", lambda k, a, **o: original(k, a, **o) * (a.X[:, :1, None] != 7.0).double()
    )
    X = torch.ones(9, D, dtype=torch.float64)
    X[7, 0] = 7.0
    monkeypatch.setattr("epk_gp.gp.models.posterior_points", lambda *_: 3)
    with pytest.raises(ValueError, match=r"needs k\(x, x\) > 0 at every point: got 0 at point 7,"):
        gp.logit_posterior(X)


class LargeStorages(TorchDispatchMode):
    """The most storages of at least some bytes that were alive at once, and the largest."""

    def __init__(self, num_bytes):
        super().__init__()
        self.num_bytes, self.alive, self.most, self.largest = num_bytes, [], 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in found if isinstance(found, tuple | list) else (found,):
            if not isinstance(tensor, torch.Tensor):
                continue
            storage = tensor.untyped_storage()
            self.largest = max(self.largest, storage.nbytes())
            if storage.nbytes() >= self.num_bytes and all(ref.cdata != storage._weak_ref() for ref in self.alive):
                self.alive.append(StorageWeakRef(storage))
        self.alive = [ref for ref in self.alive if not ref.expired()]
        self.most = max(self.most, len(self.alive))
        return found


def test_conditioning_holds_few_matrices_at_once(monkeypatch):
    """Counted: those of N x N numbers that are made; the factorisations' own workspaces are LAPACK's."""
    N = 150
    monkeypatch.setattr("epk_gp.gram.accumulator.SYMMETRIC_BLOCK_ROWS", 8)  # what is made of some rows at a time
    monkeypatch.setattr("epk_gp.kernels.values._ROWS", 8)
    run = make_other_run(points=N)
    gp = LogitGP(run, "trace", "zero", "labels", normalize="cosine")
    X = torch.randn(20, D, dtype=torch.float64)
    gp.logit_posterior(X[:1])  # makes the plan
    gp.kernel.config.cache.clear()
    for call, most in (
        (lambda: gp.fit(steps=2), 3),  # the cached Gram matrix, its copy, eigenvectors
        (lambda: gp.logit_posterior(X), 2),  # beside the cached one: its copy and the factor
        (lambda: leave_one_out(gp), 2),  # factor and inverse
    ):
        with LargeStorages(8 * N * N) as count:
            call()
        assert (count.most, count.largest) == (most, 8 * N * N)  # one matrix, not one for each output
    with LargeStorages(8 * N * N) as count:
        LogitGP(run, "independent", "zero", "labels").fit(steps=1)
    assert count.largest >= 3 * 8 * N * N  # the negative control
