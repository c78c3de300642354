"""A table of animals with classes and targets, and weights of its rows."""

import numpy as np
import pandas as pd

KINDS = np.array(["ant", "bee", "cat"])
WEIGHTS = np.random.default_rng(0).integers(0, 4, 45)


def table(count, seed):
    """Return a data frame with row names, classes and two targets of other units."""
    rng = np.random.default_rng(seed)
    kind = np.arange(count) % 3
    values = rng.normal(size=(count, 3)) + 1.5 * np.eye(3)[kind]
    X = pd.DataFrame(values, columns=["wing", "leg", "eye"], index=[f"animal {seed}.{i}" for i in range(count)])
    mass = 1000 + 300 * np.tanh(values[:, 0]) + 30 * rng.normal(size=count)
    targets = pd.DataFrame({"mass": mass, "age": 1e-3 * (values[:, 1] + rng.normal(size=count))}, index=X.index)
    return X, KINDS[kind], targets
