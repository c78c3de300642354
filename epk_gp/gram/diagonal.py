"""The kernel of points with themselves, at a cost linear in their number: here, or by workers."""

from contextlib import closing
from functools import cached_property

from jaxtyping import Float, Int64, Shaped
from torch import Tensor

from epk_gp.core.step import fingerprint
from epk_gp.core.inputs import Points
from epk_gp.core.show import progress_bar
from epk_gp.distributed.job import Place
from epk_gp.gram.sums import step_batches, test_nodes
from epk_gp.gram.sums import Steps
from epk_gp.gram.context import ExecutionContext
from epk_gp.gram.sums import jacobians_at_nodes
from epk_gp.gram.tiles import GramPieces, ranges_of, tile_points
from epk_gp.quadrature.paths import path_identity


def gram_diagonal(context: ExecutionContext, a: Points) -> Float[Tensor, "N C C"]:
    """Compute the blocks of points with themselves."""
    C, options = context.num_outputs, context.options
    result = context.reference.new_zeros(len(a), C, C)
    rows = diagonal_rows(context, a)
    ranges = ranges_of(context)
    if options.executor is None and options.checkpoint is None:
        with progress_bar(
            len(rows) * len(context.steps), "kernel diagonal", unit="step", shown=options.progress
        ) as bar:
            for (is_train, _), indices in rows.items():
                for steps in (context.steps[steps] for steps in ranges):
                    result[indices] += diagonal_of(context, steps, a.X[indices], is_train=bool(is_train))
                    bar.update(len(steps))
        return result
    places = [(*part, number) for part in rows for number in range(len(ranges))]
    num_bytes = max(map(len, rows.values()), default=0) * C**2 * context.reference.itemsize
    pieces = DiagonalPieces.of(context, a, a)
    results = pieces.results("diagonal", places, options, lambda: _identity(context, a), num_bytes)
    with closing(results), progress_bar(len(places), "kernel diagonal", unit="piece", shown=options.progress) as bar:
        for place, found in zip(places, results, strict=True):
            context.integrations.merge(found)
            result[rows[place[:2]]] += found["total"].to(result)
            bar.update()
    return result


class DiagonalPieces(GramPieces):
    """The kernel of points with themselves as pieces for workers: some points of one copy, and a range of steps."""

    def piece(self, place: Place) -> dict[str, Tensor]:
        """Sum a range of the steps of some points."""
        context, (is_train, part, number) = self.context(), place
        indices = self._rows[is_train, part]
        steps = context.steps[ranges_of(context)[number]]
        total = diagonal_of(context, steps, self.a.X[indices], is_train=bool(is_train))
        return {"total": total, **context.integrations.state()}

    @cached_property
    def _rows(self) -> dict[Place, Int64[Tensor, " rows"]]:
        return diagonal_rows(self.context(), self.a)


def diagonal_rows(context: ExecutionContext, a: Points) -> dict[Place, Int64[Tensor, " rows"]]:
    """Divide points into parts of one copy that are computed together."""
    size = tile_points(context)
    return {
        (int(is_train), number): rows
        for is_train in (True, False)
        for number, rows in enumerate(a.copies(is_train).split(size))
        if len(rows)
    }


def diagonal_of(
    context: ExecutionContext, steps: Steps, X: Shaped[Tensor, "n ..."], *, is_train: bool
) -> Float[Tensor, "n C C"]:
    """Sum the blocks of some points with themselves over some steps."""
    total = context.reference.new_zeros(len(X), context.num_outputs, context.num_outputs)
    for batch in step_batches(context, steps, len(X), are_training=is_train):
        nodes = [(s, 0.0, eta) for s, eta in batch] if is_train else test_nodes(context, batch, X)
        at_nodes = jacobians_at_nodes(context, [(s, t) for s, t, _ in nodes], X, context.cost, are_training=is_train)
        for jacobians, (*_, weight) in zip(at_nodes, nodes, strict=True):
            total += weight * sum_over_layers([j.pointwise_products(j) for j in jacobians])
    return total


def sum_over_layers(parts: list[Tensor]) -> Tensor:
    """Add the shares of all layers, in the memory of the first."""
    total = parts[0]
    for part in parts[1:]:
        total = total.add_(part)
    return total


def _identity(context: ExecutionContext, a: Points) -> str:
    return fingerprint(
        "diagonal", context.trajectory.digest, context.head, context.rule, context.step_weights,
        context.options.memory_budget, a.X, a.is_train, *path_identity(context.path),
    )  # fmt: skip
