import jaxtyping
import matplotlib
import pytest
import torch

matplotlib.use("Agg")
torch.set_num_threads(1)  # sums in one order, and one core for each pytest worker


@pytest.hookimpl(tryfirst=True)  # before -m leaves tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark all cases but the first of a test as slow, where the test asks for it."""
    begun = set[str]()
    for item in items:
        if item.get_closest_marker("mostly_slow"):
            name = item.nodeid.partition("[")[0]
            if name in begun:
                item.add_marker(pytest.mark.slow)
            begun.add(name)


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
