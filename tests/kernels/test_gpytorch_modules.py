"""The kernel as a module among GPyTorch's: parameters, copies, states."""

import copy
import pickle

import gpytorch
import pytest
import torch

from epk_gp.kernels.epk import EPKKernel
from kernel_cases import assert_close, make_run, mixed


def test_the_network_leaks_no_parameter(trajectory):
    scaled = gpytorch.kernels.ScaleKernel(EPKKernel(trajectory))
    assert [name for name, _ in scaled.named_parameters()] == ["raw_outputscale"]
    assert [name for name in scaled.state_dict() if name.startswith("base")] == ["base_kernel._extra_state"]  # digest


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
