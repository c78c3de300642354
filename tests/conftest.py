import os

import matplotlib
import pytest
import torch

matplotlib.use("Agg")
# One core for each pytest worker; `make test-processors` asks for two.
torch.set_num_threads(int(os.environ.get("EPK_GP_TEST_THREADS", "1")))


# Their slow tests run every page, tutorial, experiment and picture, the benchmarks, or a browser: `make test-pages`.
PAGES = {
    "test_benchmarks.py", "test_browser.py", "test_docs.py", "test_experiments.py", "test_notebooks.py",
    "test_readme.py", "test_text_browser.py",
}  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before -m leaves tests out
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark all cases of a test but the first as slow, where it asks for it; choose `make test-types` and `test-pages`.

    Shapes and types of arguments are checked in the cases that are marked, and of a file without one in its first quick
    case that can be checked. Mark a cheap case where the first one takes long.
    """
    begun = set[str]()
    files = {item.path for item in items if item.get_closest_marker("types")}
    for item in items:
        name = item.nodeid.partition("[")[0]
        if name in begun and item.get_closest_marker("mostly_slow"):
            item.add_marker(pytest.mark.slow)
        begun.add(name)
        if item.path.name in PAGES and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.pages)
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
