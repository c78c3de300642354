"""Odd tables: a data frame of other columns, types, names or labels, drawn from a seed, at every door that takes one.

What an answer must be is computed from plain arrays of the same values, and scikit-learn's `LogisticRegression`, which
is fitted to the same training table, says which tables are sound: those that it answers about as about the array.
"""

import random
import tempfile
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np
import pandas as pd
import torch
from sklearn.linear_model import LogisticRegression

import epk_gp as epk

NAMES, KINDS, ROWS = ["age", "income", "weight", "children"], np.array(["ant", "bee", "cat"]), 6
SCIKIT_LEARNS = ("The feature names should match", "Expected unique column names")  # beginnings of longer errors
SCALES = np.array([20.0, 3e4, 15.0, 2.0])


def values_of(count, seed):
    """Draw rows of whole numbers in units of their own, and their classes."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, 3, count)
    centres = rng.permutation(4)[:, None] == np.arange(3)
    spread = rng.normal(size=(count, 4)) + 2 * centres.T[label]
    return np.round(SCALES * (3 + spread)), KINDS[label]


def table(values):
    """Return a data frame with names for columns and rows."""
    return pd.DataFrame(values, columns=NAMES, index=[f"row {7 * i}" for i in range(len(values))])


def network(num_outputs=3):
    """Return the network of the doors that take one."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, num_outputs)).double()


@dataclass(frozen=True)
class Models:
    """Models that were fitted to one table, with the names of its columns."""

    classifier: epk.EPKClassifier
    regressor: epk.EPKRegressor
    judged: dict[str, epk.UncertainClassifier]
    judge: LogisticRegression


@cache
def models():
    """Fit all models once."""
    (X, y), (X_val, y_val) = values_of(40, 0), values_of(30, 1)
    classifier = epk.EPKClassifier(network(), steps=20, random_state=0).fit(table(X), y)
    regressor = epk.EPKRegressor(network(1), steps=20, random_state=0).fit(table(X), X @ [1.0, 0.1, 2.0, 5.0])
    numbers = np.searchsorted(KINDS, y)
    judged = {"its own": classifier.uncertain_classifier(table(X_val), y_val, nodes=2)}
    of = epk.UncertainClassifier.of(network(), table(X), numbers, inputs_kernel=None)
    judged["of a network"] = of.fit(table(X_val), np.searchsorted(KINDS, y_val))
    own = epk.UncertainClassifier(classifier.trajectory_, nodes=2, classes=KINDS)
    judged["of a run"] = own.fit(table(X_val), y_val)
    with tempfile.TemporaryDirectory() as folder:
        judged["its own"].save(folder)
        judged["from a file"] = epk.UncertainClassifier.load(folder, network())
    judge = LogisticRegression(max_iter=3)
    with warnings.catch_warnings(action="ignore"):
        judge.fit(table(X), y)
    return Models(classifier, regressor, judged, judge)


@dataclass
class Case:
    """A table that is odd.

    Attributes:
        seed: Which decides everything.
        change: What is odd.
        door: Who is asked.
        X: The table, as it is passed.
        values: What it holds in the order of the training columns; None where that cannot be said.
        as_given: What it holds in its own order.
    """

    seed: int
    change: str
    door: str
    X: object
    values: np.ndarray | None
    as_given: np.ndarray | None

    def __str__(self) -> str:
        return f"seed {self.seed}: {self.change}, asked of {self.door}"


def _typed(kind):
    """Return a change of the type of some columns; None for values that are not numbers."""

    def change(frame, draw):
        chosen = frame.columns if draw.random() < 0.3 else draw.sample(NAMES, draw.randint(1, 3))
        new, values = frame.copy(), frame.to_numpy()
        for name in chosen:
            column, known = TYPES[kind](frame[name])
            new[name] = column
            values = (
                None if known is None or values is None else np.where(np.array(NAMES) == name, known[:, None], values)
            )
        return new, values

    return change


def _of(column, dtype, known=None):
    return column.astype(dtype), column.to_numpy() if known is None else known


def _missing(column, dtype):
    return column.astype(dtype).where(np.arange(len(column)) != 2), None


TYPES = {
    "float32": lambda c: _of(c, np.float32, c.to_numpy(np.float32).astype(float)),
    "int64": lambda c: _of(c, np.int64),
    "uint16": lambda c: _of(c.clip(0, 60_000), np.uint16, c.clip(0, 60_000).to_numpy()),
    "Int64": lambda c: _of(c, "Int64"),
    "Float64": lambda c: _of(c, "Float64"),
    "bool": lambda c: (c > c.median(), (c > c.median()).to_numpy(float)),
    "boolean": lambda c: ((c > c.median()).astype("boolean"), (c > c.median()).to_numpy(float)),
    "category": lambda c: _of(c, "category"),
    "sparse": lambda c: _of(c, pd.SparseDtype(float, 0.0)),
    "object": lambda c: _of(c, object),
    "digits as text": lambda c: _of(c, str),
    "arrow": lambda c: _of(c, "float64[pyarrow]"),
    "Int64 with a gap": lambda c: _missing(c, "Int64"),
    "Float64 with a gap": lambda c: _missing(c, "Float64"),
    "float with a gap": lambda c: _missing(c, float),
    "boolean with a gap": lambda c: _missing(c > 0, "boolean"),
    "object with a gap": lambda c: _missing(c, object),
    "text": lambda c: ("n " + c.astype(str), None),
    "categories of text": lambda c: (("n " + c.astype(str)).astype("category"), None),
    "dates": lambda c: (pd.to_datetime(c.abs(), unit="D"), None),
    "dates in ns": lambda c: (pd.to_datetime(c.abs(), unit="s").astype("datetime64[ns]"), None),
    "durations": lambda c: (pd.to_timedelta(c, unit="s").astype("timedelta64[ns]"), None),
    "complex": lambda c: (c + 1j, None),
    "infinite": lambda c: (c.where(np.arange(len(c)) != 1, np.inf), None),
}


def _in_order(frame, draw):
    order = draw.sample(NAMES, 4)
    return frame[order], frame.to_numpy()


def _renamed(frame, draw):
    return frame.rename(columns={draw.choice(NAMES): "height"}), None


def _one_more(frame, draw):
    new = frame.copy()
    new.insert(draw.randint(0, 4), "height", 1.0)
    return new, frame.to_numpy()


def _one_less(frame, draw):
    return frame.drop(columns=draw.choice(NAMES)), None


def _named_twice(frame, draw):
    first, second = draw.sample(NAMES, 2)
    return frame.rename(columns={second: first}), None


def _numbered(frame, draw):
    new = frame.set_axis(draw.sample(range(4), 4), axis=1)
    return new, frame.to_numpy()  # scikit-learn compares texts alone


def _mixed(frame, draw):
    return frame.set_axis([*NAMES[:3], 3], axis=1), None


def _labelled(frame, draw):
    n = len(frame)
    labels = draw.choice(
        [
            pd.Index(range(n)[::-1]),
            pd.Index(["same"] * n),
            pd.date_range("2026-01-01", periods=n),
            pd.MultiIndex.from_product([range(n), ["x"]]),
            pd.Index([f"{1000 - i}" for i in range(n)]),
        ]
    )
    return frame.set_axis(labels), frame.to_numpy()


def _plain(frame, draw):
    values = frame.to_numpy()
    forms = (lambda v: v, lambda v: v.tolist(), lambda v: np.asfortranarray(v), lambda v: v.astype(">f8"))
    return draw.choice(forms)(values), values


CHANGES = {
    "as in training": lambda frame, draw: (frame, frame.to_numpy()),
    "columns in another order": _in_order,
    "a column with another name": _renamed,
    "a column more": _one_more,
    "a column less": _one_less,
    "one name for two columns": _named_twice,
    "numbers for names": _numbered,
    "texts and numbers for names": _mixed,
    "other labels of rows": _labelled,
    "no data frame": _plain,
    **{f"columns of {kind}": _typed(kind) for kind in TYPES},
}
DOORS = ("classifier", "regressor", "attribute", "its own", "of a network", "of a run", "from a file", "pool", "fit")


def draw_case(seed, change=None):
    """Draw a case; the seed takes the changes in turn."""
    draw = random.Random(seed)
    change = [*CHANGES][seed % len(CHANGES)] if change is None else change
    frame = table(values_of(ROWS if draw.random() < 0.9 else 40, draw.randrange(1 << 20))[0])
    X, values = CHANGES[change](frame, draw)
    as_given = values if change.startswith("columns of") else np.asarray(X, dtype=float)
    return Case(seed, change, draw.choice(DOORS), X, values, as_given)


def _by_hand(run, values):
    """Evaluate the trained network of one hidden layer in NumPy, from the training rows and its weights."""
    X, w = run.inputs.numpy(), {name.removeprefix("net."): v.numpy() for name, v in run.weights(-1).items()}
    hidden = np.tanh((values - X.mean(0)) / X.std(0) @ w["0.weight"].T + w["0.bias"])
    return hidden @ w["2.weight"].T + w["2.bias"]


def _softmax(z):
    p = np.exp(z - z.max(1, keepdims=True))
    return p / p.sum(1, keepdims=True)


def answer(case, X):
    """Return numbers of a door about a table, and the labels of their rows where they come as a table."""
    m = models()
    if case.door == "classifier":
        return m.classifier.predict_proba(X), None
    if case.door == "regressor":
        return m.regressor.predict(X), None
    if case.door == "attribute":
        parts = m.classifier.attribute(X)
        labels = parts.to_frame().index.get_level_values("point")[::3]
        return parts.network.numpy(), labels
    if case.door == "pool":
        chosen = epk.next_to_label(m.judged["its own"], X, 2)
        labels = chosen.to_frame().index
        return np.r_[chosen.indices, chosen.scores], (chosen.indices, labels)
    if case.door == "fit":
        kinds = KINDS[np.arange(len(X)) % 3]
        run = epk.EPKClassifier(steps=2, random_state=0).fit(X, kinds).trajectory_
        return np.r_[run.states[-1], run.inputs.numpy().ravel()], None
    judged = m.judged[case.door]
    return np.asarray(judged.predict_proba(X)), judged.uncertainty(X, 2).to_frame().index


def expected(case, values):
    """Return the same of plain values, without data frames."""
    m = models()
    if case.door == "classifier":
        return _softmax(_by_hand(m.classifier.trajectory_, values))
    if case.door == "attribute":
        return np.log(_softmax(_by_hand(m.classifier.trajectory_, values)))
    if case.door == "regressor":
        y = m.regressor.trajectory_.targets.numpy()
        return (_by_hand(m.regressor.trajectory_, values) * y.std(0) + y.mean(0))[:, 0]
    return answer(case, values if case.door == "fit" else torch.tensor(values))[0]


def is_sound(case):
    """Whether scikit-learn answers about the table as about its values."""
    if case.door == "fit":
        judge = LogisticRegression(max_iter=2)
        try:
            kinds = KINDS[np.arange(len(case.X)) % 3]
            given, plain = (judge.fit(X, kinds).coef_.copy() for X in (case.X, case.as_given))
        except (TypeError, ValueError):
            return False
        return case.as_given is not None and np.allclose(given, plain)
    try:
        given, plain = (models().judge.predict_proba(X) for X in (case.X, case.values))
    except (TypeError, ValueError):
        return False
    return bool(np.allclose(given, plain))


def outcome(case):
    """Return "right", "refused", "wrong", "false alarm", or "unclear" for an error of more than a line or no name."""
    with warnings.catch_warnings(action="ignore"):  # of arrays where names are known, as scikit-learn's
        try:
            numbers, labels = answer(case, case.X)
        except (TypeError, ValueError) as error:
            text = str(error)
            if is_sound(case):
                return "false alarm"
            is_named = not case.change.startswith("columns of") or any(f"'{name}'" in text for name in NAMES)
            is_short = "\n" not in text or text.startswith(SCIKIT_LEARNS)
            return "refused" if is_named and is_short else "unclear"
        values = case.as_given if case.door == "fit" else case.values
        if values is None or not np.allclose(numbers, expected(case, values), rtol=1e-9, atol=1e-9):
            return "wrong"
    if labels is None or not hasattr(case.X, "index") or isinstance(case.X, list):
        return "right"
    places, labels = labels if isinstance(labels, tuple) else (np.arange(len(labels)), labels)
    return "right" if list(case.X.index[np.asarray(places)]) == list(labels) else "wrong"


def count_outcomes(count, first=0):
    """Count the outcomes of drawn cases, and list those that should not be."""
    counts, wrong = Counter(), []
    for seed in range(first, first + count):
        case = draw_case(seed)
        found = outcome(case)
        counts[found] += 1
        if found not in ("right", "refused"):
            wrong.append(f"{found}: {case}")
    return counts, wrong
