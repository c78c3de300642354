from pathlib import Path

import matplotlib
import pytest
import torch

matplotlib.use("Agg")
torch.set_num_threads(1)  # sums in one order, and one core for each pytest worker


@pytest.hookimpl(tryfirst=True)  # before -m leaves tests out
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark all cases of a test but the first as slow, where it asks for it, and choose the cases of `make test-types`.

    Shapes and types of arguments are checked in the first quick case of each file that can be checked, and in the cases
    that are marked.
    """
    begun = set[str]()
    files = set[Path]()
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in begun and item.get_closest_marker("mostly_slow"):
            item.add_marker(pytest.mark.slow)
        begun.add(name)
        can_be_checked = not item.get_closest_marker("slow") and "unchecked" not in item.fixturenames
        if can_be_checked and item.path not in files:
            item.add_marker(pytest.mark.types)
            files.add(item.path)


@pytest.fixture(autouse=True)
def seed() -> int:
    """Seed the global generator before every test, so that no test depends on the ones before it."""
    torch.manual_seed(0)
    return 0


@pytest.fixture
def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def unchecked() -> None:
    """Keep a test out of `make test-types`: its wrong arguments are to reach the library's own checks."""
