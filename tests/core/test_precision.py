"""Numbers have the precision of their tensors, whatever torch may replace float32 by in the user's own loop."""

from collections.abc import Callable

import pytest
import torch

from epk_gp.core.torch_overrides import disable_fused_attention, kernels_of_the_loop, warn_unless_plain

pytestmark = pytest.mark.skipif(torch.__version__ < (2, 9), reason="torch 2.9 introduced the switches")


def switches() -> list[object]:
    cudnn = torch.backends.cudnn
    places = [torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn, torch.backends.mkldnn.matmul]
    return [place.fp32_precision for place in places] + [cudnn.deterministic, cudnn.benchmark]


def high() -> None:
    torch.set_float32_matmul_precision("high")


def one_place() -> None:
    torch.backends.cudnn.rnn.fp32_precision = "ieee"


@pytest.mark.parametrize("choose", [lambda: None, high, one_place])
def test_float32_is_not_replaced_inside_and_the_users_choice_comes_back(choose: Callable[[], None]) -> None:
    initial = torch.backends.cudnn.rnn.fp32_precision
    try:
        choose()
        before = switches()
        with disable_fused_attention():
            assert switches() == ["ieee"] * 4 + [True, False]
            assert torch.get_float32_matmul_precision() == "highest"
        assert switches() == before
        with disable_fused_attention(), kernels_of_the_loop():
            assert switches() == before
    finally:
        torch.backends.cudnn.rnn.fp32_precision = initial
        torch.set_float32_matmul_precision("highest")


def test_predictions_without_gradients_are_compared_on_as_many_rows_as_a_call_takes():
    sizes = []

    def network(rows):
        sizes.append(len(rows))
        return rows

    for most, expected in ((3, 3), (1000, 50)):  # of 100 rows every second is one of the 64 at most
        warn_unless_plain(network, torch.randn(100, 2), torch.nn.Identity(), most)
        assert sizes == [expected] * 2
        sizes.clear()
