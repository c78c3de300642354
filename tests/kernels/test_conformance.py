"""GPyTorch's own conformance tests of a kernel."""

import unittest

import torch
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase

from epk_gp.kernels.epk import EPKKernel
from kernel_cases import make_run, with_copies


class Peer(BaseKernelTestCase):
    """GPyTorch's 13 tests, on points that have a copy column wherever a test may cut it off."""

    seed = 0
    outputs: str | int
    options: dict = {}  # noqa: RUF012
    _runs: dict = {}  # noqa: RUF012
    _width = 2

    def run_of(self, width, num_outputs):
        key = (width, num_outputs)
        if key not in self._runs:
            self._runs[key] = make_run(width - 1, num_outputs, torch.float32)
        return self._runs[key]

    def create_kernel_no_ard(self, active_dims=None, batch_shape=None):
        if active_dims is not None:
            self._width = len(active_dims)
        shape = torch.Size() if batch_shape is None else batch_shape
        if self.outputs != "independent":
            kernel = EPKKernel(self.run_of(self._width, 2), self.outputs, active_dims=active_dims, **self.options)
            return kernel.expand_batch(shape)
        run = self.run_of(self._width, shape[-1] if shape else 2)
        kernel = EPKKernel(run, "independent", active_dims=active_dims, **self.options)
        return kernel.expand_batch(shape) if shape else kernel[0]

    def create_data_no_batch(self):
        return self.with_copies(super().create_data_no_batch())

    def create_data_single_batch(self):
        return self.with_copies(super().create_data_single_batch())

    def create_data_double_batch(self):
        return self.with_copies(super().create_data_double_batch())

    @staticmethod
    def with_copies(x):
        for column in {x.shape[-1] - 1, *((6, 8) if x.shape[-1] == 10 else ())}:
            with_copies(x, column)
        return x


class TestPeerFull(Peer, unittest.TestCase):
    outputs = "full"


class TestPeerIndependent(Peer, unittest.TestCase):
    outputs = "independent"


class TestPeerTrace(Peer, unittest.TestCase):
    outputs = "trace"


class TestPeerClass(Peer, unittest.TestCase):
    outputs = 1


class TestPeerIndependentCosine(TestPeerIndependent):
    options = {"normalize": "cosine"}  # noqa: RUF012


class TestPeerOnPlainInputs(Peer, unittest.TestCase):
    """Without a copy column: GPyTorch's points as they are."""

    outputs = "trace"
    options = {"normalize": "cosine"}  # noqa: RUF012

    def run_of(self, width, num_outputs):
        return super().run_of(width + 1, num_outputs)

    @staticmethod
    def with_copies(x):
        return x
