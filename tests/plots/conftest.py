from collections.abc import Iterator

import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes


@pytest.fixture
def ax() -> Iterator[Axes]:
    """Axes of a figure of their own."""
    figure, axes = plt.subplots()
    yield axes
    plt.close(figure)
