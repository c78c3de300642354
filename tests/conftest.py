from importlib import import_module
from operator import attrgetter
from typing import no_type_check
from zlib import crc32

import jaxtyping
import matplotlib
import pytest
import torch

matplotlib.use("Agg")
torch.set_num_threads(1)  # sums in one order, and one core for each pytest worker
IS_FIRST = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)  # before -m leaves tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Find the first case of each test; mark the others as slow, where the test asks for it."""
    begun = set[str]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        item.stash[IS_FIRST] = name not in begun
        if name in begun and item.get_closest_marker("mostly_slow"):
            item.add_marker(pytest.mark.slow)
        begun.add(name)


# These run for every operation of torch or evaluation of a network, with few or no types: most of all checks.
NOT_CHECKED = {
    "autodiff.interception": (
        "_find",
        "FunctionCall.argument",
        "FunctionCall.in_slots",
        "FunctionCall.input.fget",
        "InterpolatedWeights.__torch_function__",
        "ParameterInterception.__torch_function__",
        "ParameterInterception.pass_through",
        "has_rows",
        "spread_mark",
        "tensors_in",
    ),
    "autodiff.secants": ("SecantDerivatives.__torch_function__", "SecantDerivatives._call"),
    "core.torch_overrides": (
        "_FusedAttention.switch_off",
        "_FusedAttention.restore",
        "disable_fused_attention",
        "KeptActivations.__torch_function__",
        "WrittenOutNormalisation.__torch_function__",
    ),
    "core.model": (
        "FunctionalModel._layout",
        "FunctionalModel._take_module_of_thread",
        "FunctionalModel.num_weights.fget",
        "FunctionalModel.sizes.fget",
        "_marked",
    ),
    "quadrature.kinks": ("EventReader.__torch_function__", "PreactivationRecorder.__torch_function__"),
}


def pytest_collection_finish() -> None:
    """Take these functions out; the package is imported here, once jaxtyping has prepared its import."""
    for module, names in NOT_CHECKED.items():
        for name in names:
            no_type_check(attrgetter(name)(import_module(f"epk_gp.{module}")))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check shapes and types in the first case of each test, and in a quarter of the others, which their names choose.

    In all of them the checks would take three times as long as the tests.
    """
    jaxtyping.config.update("jaxtyping_disable", not (item.stash[IS_FIRST] or crc32(item.nodeid.encode()) % 4 == 0))


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed the global generator before every test, so that no test depends on the ones before it."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def unchecked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Switch the run-time checks of shapes and types off, so that wrong arguments reach the library's own checks."""
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
