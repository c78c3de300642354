"""Maps of predictive uncertainty over planes through the input space (Figure 5, Bell et al. 2023), or two columns."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.analysis.measures import rank_correlation
from epk_gp.core.checks import validate_count, validate_finite, validate_number, validate_tensor
from epk_gp.core.show import Tabular
from epk_gp.core.trajectory import network_outputs
from epk_gp.gp.data import as_numbers, class_inputs, is_array, labelled_points
from epk_gp.gp.models import LogitGP
from epk_gp.gp.uncertain_classifier import UncertainClassifier

Grid = tuple[Float[Tensor, " nx"], Float[Tensor, " ny"]]
ByColumn = Any  # values by name or number of a column: a dictionary or, for a row, a pandas series
_ROUNDING = 100 * torch.finfo(torch.float64).eps  # rounding of coordinates: points of a line that differ less are equal


@dataclass(frozen=True, eq=False)
class Plane:
    """The inputs origin + u axes[0] + v axes[1], for all real u and v.

    Attributes:
        origin: A flattened input, (D,).
        axes: Two orthonormal directions, (2, D).
        input_shape: Shape of one input, of D entries.
        columns: Names of all D columns, if the inputs are rows of a table and the axes two of its columns.
        categories: For each axis, the names of its values, which ascend; None for numbers.
        extent: For each axis, the smallest and the largest value of a map; None for those of the training inputs.
    """

    origin: Float[Tensor, " D"]
    axes: Float[Tensor, "2 D"]
    input_shape: tuple[int, ...]
    columns: tuple[str, ...] | None = None
    categories: tuple[Mapping[float, str] | None, ...] = (None, None)
    extent: tuple[tuple[float, ...] | None, ...] = (None, None)

    @property
    def names(self) -> tuple[str, str]:
        """Names of both axes."""
        x, y = self.axes.argmax(1).tolist()
        return ("x", "y") if self.columns is None else (self.columns[x], self.columns[y])

    @property
    def others(self) -> dict[str, float]:
        """Values of the other columns of a table, by name."""
        held = zip(self.columns or (), self.origin.tolist(), strict=False)
        return {name: value for (name, value), used in zip(held, self.axes.any(0), strict=False) if not used}


def column_plane(
    table: object, x: Any, y: Any, *, names: Sequence[str] | None = None, others: ByColumn = None,
    categories: ByColumn = None, extent: ByColumn = None,
) -> Plane:  # fmt: skip
    """Return the plane of two columns of a table, with all others at their median or at values of your choice.

    Columns that are codes of one category (one-hot) cannot be recognised: at the median of each, all of them may be 0,
    which is not a category. Set their values in `others`.

    Args:
        table: The training rows: a data frame, an array or a tensor; or an `UncertainClassifier`, whose training rows
            and column names are used.
        x: Name or number of the column along the first axis.
        y: Name or number of the column along the second axis.
        names: Names of the columns, if the table has none.
        others: Values of other columns, by name or number, such as those of one row. By default a column of categories
            has its most frequent value, any other its median.
        categories: Columns with categories, by name or number, each with the names of its values, as in `{"sex": {0:
            "female", 1: "male"}}`. Columns of a data frame with the dtypes category and bool are always included; the
            number of different values does not make a column one of categories.
        extent: Smallest and largest value along an axis, by name or number of its column and in its unit.

    Raises:
        TypeError: The table contains other values than real numbers.
        ValueError: It has no rows, or fewer than 2 columns; a column does not exist or is ambiguous; a value is not
            finite, has no name among those of its categories, or would not be used.
    """
    rows, known = table, getattr(table, "columns", None)
    if isinstance(table, UncertainClassifier):
        rows = table.trajectory.inputs[labelled_points(table.trajectory, table.points, "column_plane")[0]]
        known = getattr(table, "feature_names_in_", None)
    rows = as_numbers(rows, "table") if is_array(rows) else rows
    validate_tensor(rows, "a table, over two of whose columns a map is drawn,", ndim=2)
    X = cast(Tensor, rows).double().cpu()
    (n, D), given = X.shape, known if names is None else names
    labels = _numbered(D) if given is None else list(given)
    if not n or D < 2 or len(labels) != D:
        raise ValueError(f"table must have rows, and a name for each of 2 columns or more: got {n}, and {labels[:20]}.")
    validate_finite(X, "table")

    def by_place(given: ByColumn) -> dict[int, Any]:
        return {_place(column, labels): value for column, value in _pairs(given)}

    places, held = (_place(x, labels), _place(y, labels)), by_place(others)
    ends = {k: tuple(_number(end, labels[k]) for end in own) for k, own in by_place(extent).items()}
    named = (_by_dtype(table) | by_place(categories)).items()
    kinds = {k: dict(sorted((_number(v, labels[k]), str(word)) for v, word in _pairs(own))) for k, own in named}
    if places[0] == places[1]:
        raise ValueError(f"axes must be two columns: got {labels[places[0]]!r} twice.")
    if unused := held.keys() & {*places}:
        raise ValueError(f"others= must be of columns beside the axes: leave {labels[min(unused)]!r} out.")
    if unused := ends.keys() & kinds.keys() | ends.keys() - {*places}:
        raise ValueError(f"extent= must be of axes without categories: leave {labels[min(unused)]!r} out.")
    origin = torch.from_numpy(np.median(X.numpy(), axis=0))
    for k in kinds:
        values, counts = X[:, k].unique(return_counts=True)
        origin[k] = values[counts.argmax()]
    for k, value in held.items():
        origin[k] = _number(value, labels[k])
    for k, own in kinds.items():
        if unnamed := {*X[:, k].tolist(), float(origin[k])} - own.keys():
            raise ValueError(f"categories of {labels[k]!r} must name each of its values: {min(unnamed)} has no name.")
    ascend = (len(own) == 2 and -np.inf < own[0] < own[1] < np.inf for own in ends.values())
    if not (origin.isfinite().all() and all(ascend)):
        raise ValueError(f"others= must be finite, and extent= two ends that ascend: got {others} and {extent}.")
    axes = torch.eye(D, dtype=torch.float64)[[*places]]
    origin, columns = origin * (1 - axes.sum(0)), tuple(map(str, labels))
    return Plane(origin, axes, (D,), columns, tuple(map(kinds.get, places)), tuple(map(ends.get, places)))


def validate_columns(plane: Plane, known: Iterable[Any] | None, name: str = "the classifier") -> None:
    """Raise if the names of a plane's columns differ from others, if both have names.

    Raises:
        ValueError: The names or their order differ.
    """
    if known is not None and plane.columns not in (None, names := (*map(str, known),), (*_numbered(len(names)),)):
        raise ValueError(f"{name} must have the columns of the plane, {list(plane.columns)}: got {list(names)}.")


def _numbered(num_columns: int) -> list[str]:
    """Return names for columns without names."""
    return [f"column {k}" for k in range(num_columns)]


def _pairs(given: ByColumn) -> Any:
    """Return names or values, and the value given for each."""
    if given is not None and not hasattr(given, "items"):
        raise TypeError(f"others, categories and extent must be by column, and categories by value: got {given!r}.")
    return () if given is None else given.items()


def _number(value: Any, column: object) -> float:
    """Return a value of a column as a number."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"values of {column!r} must be numbers: got {value!r}.") from error


def _place(column: object, labels: Sequence[Any]) -> int:
    """Return the number of the only column with this name or number."""
    found = {k for k, label in enumerate(labels) if label == column}
    found |= {int(column)} & {*range(len(labels))} if isinstance(column, Integral) else set()
    if len(found) != 1:
        meant = " and ".join(f"column {k}, {labels[k]!r}" for k in sorted(found)) or f"none of {labels[:20]}"
        raise ValueError(f"{column!r} must be the name or the number of one column: got {meant}.")
    return found.pop()


def _by_dtype(table: Any) -> dict[int, Any]:
    """Return the values, with their names, of a data frame's columns whose dtype marks them as categories."""
    columns = [table.iloc[:, k] for k in range(table.shape[1])] if hasattr(table, "iloc") else []
    found = {k: list(column.cat.categories) for k, column in enumerate(columns) if hasattr(column, "cat")}
    found |= {k: [False, True] for k, column in enumerate(columns) if str(column.dtype).startswith("bool")}
    return {k: {value: value for value in values} for k, values in found.items()}


def coordinate_plane(X: Shaped[Tensor, "n ..."]) -> Plane:
    """Return the plane of the first two input coordinates, with all others at their mean over the points.

    Raises:
        TypeError: The inputs are not floating-point numbers.
        ValueError: There are no points, a value is not finite, or an input has fewer than 2 entries.
    """
    rows = _rows(X)
    axes = torch.eye(2, rows.shape[1], dtype=rows.dtype)
    return Plane(rows.mean(0) * (1 - axes.sum(0)), axes, tuple(X.shape[1:]))


def principal_plane(X: Shaped[Tensor, "n ..."]) -> Plane:
    """Return the plane through the mean of the points that their first two principal directions span.

    Args:
        X: n >= 3 inputs of at least 2 entries each.

    Returns:
        The plane. Each axis has the sign that makes its largest entry positive.

    Raises:
        TypeError: The inputs are not floating-point numbers.
        ValueError: There are fewer than 3 points, a value is not finite, or an input has fewer than 2 entries.
    """
    rows = _rows(X)
    if len(rows) < 3:
        raise ValueError(f"a principal plane needs at least 3 points: got {len(rows)}.")
    mean = rows.mean(0)
    axes = torch.linalg.svd(rows - mean, full_matrices=False).Vh[:2]
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    return Plane(mean, axes * largest.sign(), tuple(X.shape[1:]))


def project(plane: Plane, X: Shaped[Tensor, "n ..."]) -> Float[Tensor, "n 2"]:
    """Return the coordinates (u, v) of the projections of points onto the plane.

    Raises:
        ValueError: The points do not have as many entries as the inputs of the plane.
    """
    rows = X.reshape(len(X), -1)
    if rows.shape[1] != len(plane.origin):
        raise ValueError(f"points must have the {len(plane.origin)} entries of an input: got {rows.shape[1]}.")
    return (rows - plane.origin.to(X)) @ plane.axes.T.to(X)


def lift(plane: Plane, uv: Float[Tensor, "n 2"]) -> Float[Tensor, "n ..."]:
    """Return the inputs at coordinates (u, v) of the plane."""
    return (plane.origin.to(uv) + uv @ plane.axes.to(uv)).reshape(len(uv), *plane.input_shape)


def grid_over(uv: Float[Tensor, "n 2"], size: int, margin: float, *, square: bool = False) -> Grid:
    """Return an evenly spaced grid that covers projected points.

    Args:
        uv: Projected points.
        size: Nodes per side, at least 2.
        margin: Width of the border on every side, in units of the points' extent along the axis.
        square: Whether both axes have the same unit, and thus the larger extent.

    Returns:
        Coordinates of the columns and of the rows, equally many.

    Raises:
        TypeError: `size` is not an integer, or `margin` is not a number.
        ValueError: There are fewer than 2 nodes per side, or the margin is negative, or the points have no extent.
    """
    validate_count(size, "size", minimum=2)
    validate_number(margin, "margin")
    if not 0 <= margin < float("inf"):
        raise ValueError(f"the margin must be finite and not negative: got {margin}.")
    low, high = uv.min(0).values.double(), uv.max(0).values.double()
    extent = (high - low).max().expand(2) if square else high - low
    if not (extent > _ROUNDING * uv.abs().max()).all():
        advice = "Where both axes have one unit, pass square=True; of a column, extent=."
        raise ValueError(f"a grid needs points at different places along both axes: all coincide. {advice}")
    centre, half = (low + high) / 2, extent * (0.5 + margin)
    ends = torch.stack([centre - half, centre + half], dim=1).tolist()
    x, y = (torch.linspace(first, last, int(size), dtype=torch.float64) for first, last in ends)
    return x, y


def grid_coordinates(x: Float[Tensor, " nx"], y: Float[Tensor, " ny"]) -> Float[Tensor, "nodes 2"]:
    """Return the nodes (u, v) of a grid, row by row; v is constant along a row."""
    v, u = torch.meshgrid(y, x, indexing="ij")
    return torch.stack([u.reshape(-1), v.reshape(-1)], dim=1)


def _rows(X: Tensor) -> Tensor:
    validate_tensor(X, "inputs", floating=True)
    if X.ndim < 2 or not len(X):
        raise ValueError(f"a plane needs inputs of shape (n, ...), at least one: got shape {tuple(X.shape)}.")
    validate_finite(X, "inputs")
    rows = X.flatten(1).cpu()
    if rows.shape[1] < 2:
        raise ValueError(f"a plane needs inputs of at least 2 entries: got {rows.shape[1]}.")
    return rows


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class UncertaintyMap(Tabular):
    """A process's results for a network's classes over a plane. Row i of a map lies at y[i], column j at x[j].

    Attributes:
        x: Coordinates of the columns; for a column of categories its values.
        y: Coordinates of the rows, in the same form.
        training: Projections of all training inputs, (M, 2).
        points: Indices of the training points that an `UncertainClassifier` uses; all of them for a `LogitGP`.
        network_class: Class predicted by the network.
        boundary_classes: Class predicted by the network on five times as many nodes per side over the same extent, for
            drawing decision boundaries; for categories at their values only.
        probability: Expected probability of the predicted class.
        std: Standard deviation of this probability; for an `UncertainClassifier` the score of that name.
        entropy: Entropy of the expected probabilities, in nats.
        mutual_information: The part of the entropy that the uncertainty of the latent function causes, in nats.
        standard_error: Largest Monte Carlo standard error of `probability`; 0 for an `UncertainClassifier`.
        distance_correlation: Spearman's rank correlation, over the grid, between `std` and the distance in the plane to
            the nearest training point, in units of the grid's extent along each axis; None if `std` is constant or an
            axis has categories.
        plane: The plane.
        labels: Targets of the training points.
        class_names: Names of the classes, if an `UncertainClassifier` has them.
        kernel: For a `LogitGP`, k(x, x), averaged over classes; 1 on average over the training copies.
        out_of_distribution: For an `UncertainClassifier` the score of that name.
    """

    x: Float[Tensor, " nx"]
    y: Float[Tensor, " ny"]
    training: Float[Tensor, "M 2"]
    points: Int64[Tensor, " N"]
    network_class: Int64[Tensor, "ny nx"]
    boundary_classes: Int64[Tensor, "fine_y fine_x"]
    probability: Float[Tensor, "ny nx"]
    std: Float[Tensor, "ny nx"]
    entropy: Float[Tensor, "ny nx"]
    mutual_information: Float[Tensor, "ny nx"]
    standard_error: float
    distance_correlation: float | None
    plane: Plane
    labels: Shaped[Tensor, "M ..."]
    class_names: list[str] | None = None
    kernel: Float[Tensor, "ny nx"] | None = None
    out_of_distribution: Float[Tensor, "ny nx"] | None = None

    @property
    def error(self) -> Float[Tensor, "ny nx"]:
        """Probability that the class predicted by the network is wrong."""
        return 1 - self.probability

    def _frame(self) -> tuple[Any, ...]:
        kinds = zip((self.y, self.x), self.plane.categories[::-1], strict=True)
        axes = [nodes.tolist() if names is None else [*names.values()] for nodes, names in kinds]
        columns = ("network_class", "error", "out_of_distribution", "std", "entropy", "mutual_information", "kernel")
        terms = {name: values for name in columns if (values := getattr(self, name)) is not None}
        return dict(zip(self.plane.names[::-1], axes, strict=True)), terms, ()


def uncertainty_on_plane(
    model: LogitGP | UncertainClassifier,
    plane: Plane | tuple[Any, Any],
    *,
    size: int = 40,
    margin: float = 0.4,
    square: bool = False,
    num_samples: int = 1024,
    generator: torch.Generator | None = None,
    progress: bool = False,
) -> UncertaintyMap:
    """Evaluate a fitted process and its network on a grid over a plane, with an extent for each axis.

    Args:
        model: The process, or an `UncertainClassifier`.
        plane: The plane of the grid; or two columns of the table on which an `UncertainClassifier` was trained, by name
            or number, for `column_plane(model, x, y)`.
        size: Nodes per side; each category is one node.
        margin: Width of the border around the training points, in units of their extent along the axis.
        square: Whether both axes have the same unit, such as pixels or their principal directions: both get the larger
            extent.
        num_samples: Number of Monte Carlo draws.
        generator: Source of the draws, for a `LogitGP`.
        progress: Show a progress bar, for a `LogitGP`.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: The grid has fewer than 2 nodes per side, the network has only one output, the model cannot
            predict at these points, or an option would not be used.
    """
    if isinstance(model, UncertainClassifier):
        if generator is not None or progress:
            raise ValueError("generator= and progress= are those of a LogitGP: leave them out.")
        plane = column_plane(model, *plane) if isinstance(plane, tuple) and len(plane) == 2 else plane
        trajectory, points = model.trajectory, labelled_points(model.trajectory, model.points, "a map")[0].cpu()
    else:
        if not isinstance(model, LogitGP):
            raise TypeError(f"model must be an UncertainClassifier or a LogitGP: got {type(model).__name__}.")
        trajectory, points = model.kernel.trajectory, torch.arange(model.kernel.trajectory.num_points)
    if not isinstance(plane, Plane):
        raise TypeError(f"plane must be a Plane: got {type(plane).__name__}. Make one with principal_plane(X).")
    if trajectory.num_outputs < 2:
        raise ValueError("a map of class probabilities needs a network of at least 2 outputs: got 1.")
    if plane.input_shape != trajectory.input_shape:
        raise ValueError(f"plane must be one of inputs {trajectory.input_shape}: got {plane.input_shape}.")
    validate_columns(plane, getattr(model, "feature_names_in_", None))
    inputs = trajectory.inputs if trajectory.inputs.is_floating_point() else trajectory.inputs.double()
    training = project(plane, inputs).double().cpu()
    x, y = _grid(plane, training[points], size, margin, square)
    X, correlation, error = _inputs(model, plane, nodes := grid_coordinates(x, y)), None, 0.0
    chosen = network_outputs(trajectory, X).argmax(1)
    if isinstance(model, UncertainClassifier):
        scores: Any = model.uncertainty(X, num_samples)
        far, probability = scores.out_of_distribution, 1 - scores.error
        on_grid = {"out_of_distribution": far, "probability": probability, "std": scores.std}
    else:
        posterior = model.logit_posterior(X, progress=progress)
        scores = posterior.softmax_uncertainty(num_samples, generator)
        values = (scores.mean, scores.std, scores.standard_error)
        probability, std, errors = (value.gather(1, chosen[:, None])[:, 0] for value in values)
        variance, error = cast(Tensor, posterior.prior_variance), float(errors.max())
        kernel = (variance / model.covar_module.outputscale.detach().reshape(-1)).mean(1)
        on_grid = {"kernel": kernel, "probability": probability, "std": std}
    on_grid |= {"network_class": chosen, "entropy": scores.entropy, "mutual_information": scores.mutual_information}
    if plane.categories == (None, None):
        unit = torch.stack([x[-1] - x[0], y[-1] - y[0]])
        nearest = torch.cdist(nodes / unit, training[points] / unit).amin(1)
        correlation = rank_correlation(on_grid["std"].cpu(), nearest)
    fine_x, fine_y = (
        torch.linspace(float(axis[0]), float(axis[-1]), 5 * size, dtype=axis.dtype) if names is None else axis
        for axis, names in zip((x, y), plane.categories, strict=True)
    )
    classes = getattr(model, "classes", None)
    return UncertaintyMap(
        x=x, y=y, plane=plane, training=training, points=points, standard_error=error, distance_correlation=correlation,
        **{name: values.reshape(len(y), len(x)).cpu() for name, values in on_grid.items()},
        boundary_classes=_classes(model, plane, fine_x, fine_y), labels=trajectory.targets.cpu(),
        class_names=None if classes is None else list(map(str, classes)),
    )  # fmt: skip


def _grid(plane: Plane, uv: Float[Tensor, "n 2"], size: int, margin: float, square: bool) -> Grid:
    """Return the nodes along both axes: each category, or evenly spaced ones."""
    if not any([*plane.extent, *plane.categories]):
        return grid_over(uv, size, margin, square=square)
    if square:
        raise ValueError("axes with categories or an extent have no unit in common: leave square= out.")
    axes = []
    for k, (names, ends) in enumerate(zip(plane.categories, plane.extent, strict=True)):
        covered = uv[:, [k, k]] if ends is None else torch.tensor([ends, ends], dtype=torch.float64).T
        evenly = grid_over(covered, size, margin if ends is None else 0.0)[0] if names is None else None
        axes.append(torch.tensor([*(names or ())], dtype=torch.float64) if evenly is None else evenly)
    return axes[0], axes[1]


def _inputs(model: LogitGP | UncertainClassifier, plane: Plane, uv: Float[Tensor, "n 2"]) -> Shaped[Tensor, "n ..."]:
    """Return the inputs at coordinates of a plane, in the dtype that a model takes."""
    X = lift(plane, uv)
    return X if isinstance(model, LogitGP) else class_inputs(model.trajectory, X.numpy())


def _classes(
    model: LogitGP | UncertainClassifier, plane: Plane, x: Float[Tensor, " nx"], y: Float[Tensor, " ny"]
) -> Int64[Tensor, "ny nx"]:
    """Evaluate the network's classes on a grid."""
    parts = (_inputs(model, plane, part) for part in grid_coordinates(x, y).split(4096))
    return torch.cat([network_outputs(model.trajectory, X).argmax(1) for X in parts]).cpu().reshape(len(y), len(x))
