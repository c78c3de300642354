"""The kernel as a module among GPyTorch's: parameters, copies, states, and GPyTorch's own conformance tests."""

import copy
import pickle
import unittest

import gpytorch
import pytest
import torch
from gpytorch.test.base_kernel_test_case import BaseKernelTestCase

from epk_gp.kernels.epk import EPKKernel
from kernel_cases import assert_close, make_run, mixed, with_copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_values_follow_the_points_dtype_and_the_kernel_reports_its_own(trajectory, dtype):
    kernel = EPKKernel(trajectory, "independent")
    x = mixed(3, dtype=dtype)
    assert kernel.forward(x, x).dtype == dtype
    assert kernel.forward(x, x, diag=True).dtype == dtype
    assert kernel.dtype == torch.float64
    assert kernel.device == torch.device("cpu")
    assert kernel.to(dtype=torch.float32).dtype == torch.float32
    assert kernel[0].dtype == torch.float32


@pytest.mark.parametrize("normalize", ["mean_diagonal", "cosine"])
def test_copies_share_the_run_and_pickles_carry_it(trajectory, normalize):
    kernel = EPKKernel(trajectory, "independent", normalize=normalize)
    x = mixed(3)
    K = kernel(x).to_dense()
    assert copy.deepcopy(kernel).trajectory is trajectory
    assert kernel[0].config is kernel.config
    assert torch.equal(kernel[1](x).to_dense(), K[1])
    restored = pickle.loads(pickle.dumps(kernel))
    assert torch.equal(restored(x).to_dense(), K)


def test_a_state_dict_loads_into_a_kernel_of_the_same_run_only(trajectory, tmp_path):
    scaled = gpytorch.kernels.ScaleKernel(EPKKernel(trajectory))
    scaled.outputscale = 3.0
    torch.save(scaled.state_dict(), tmp_path / "state.pt")
    state = torch.load(tmp_path / "state.pt", weights_only=True)
    again = gpytorch.kernels.ScaleKernel(EPKKernel(make_run()))  # recorded once more: the same digest
    again.load_state_dict(state)
    assert again.outputscale.item() == pytest.approx(3.0)
    with pytest.raises(ValueError, match=r"kernel of the run that it was saved with: its digest is [0-9a-f]{12}, this"):
        gpytorch.kernels.ScaleKernel(EPKKernel(make_run(points=8))).load_state_dict(state)


@pytest.mark.parametrize("outputs", ["full", "independent"])
def test_active_dims_survive_indexing_and_expanding(trajectory, outputs):
    wide = torch.cat([torch.randn(5, 3, dtype=torch.float64), mixed(5)], dim=1)
    kernel = EPKKernel(trajectory, outputs, active_dims=(3, 4, 5))
    expected = EPKKernel(trajectory, outputs)(wide[:, 3:]).to_dense()
    assert_close(kernel(wide).to_dense(), expected)
    assert_close(kernel.expand_batch([2, *kernel.batch_shape])(wide).to_dense()[1], expected)
    if outputs == "independent":
        assert_close(kernel[torch.tensor([2, 0])](wide).to_dense(), expected[[2, 0]])
        assert kernel[1].active_dims.tolist() == [3, 4, 5]


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


KINDS = {
    "Full": ("full", {}), "Independent": ("independent", {}), "Trace": ("trace", {}), "Class": (1, {}),
    "IndependentCosine": ("independent", {"normalize": "cosine"}),
}  # fmt: skip
for kind, (outputs, options) in KINDS.items():
    own = {"outputs": outputs, "options": options, "__module__": __name__}
    globals()[f"TestPeer{kind}"] = type(f"TestPeer{kind}", (Peer, unittest.TestCase), own)


class TestPeerOnPlainInputs(Peer, unittest.TestCase):
    """Without a copy column: GPyTorch's points as they are."""

    outputs = "trace"
    options = {"normalize": "cosine"}  # noqa: RUF012

    def run_of(self, width, num_outputs):
        return super().run_of(width + 1, num_outputs)

    @staticmethod
    def with_copies(x):
        return x
