"""Block sizes from a memory budget: monotonous, and within the share that they are meant for."""

from dataclasses import replace

import pytest

from epk_gp.core import plans as memory_plan
from epk_gp.core.plans import DifferentiationPlan, MemoryPlan, rows_per_pass, weight_rows

SUPPORTED = ("interpolation", "stacking", "jvp", "batched_vjp", "vmap")
PLAN = DifferentiationPlan(
    **{f"supports_{name}": True for name in SUPPORTED}, supports_pool_windows=False, calls_convolutions=False,
    bias_of={"0.weight": "0.bias"}, dense_params=(), vmap_chunk_size=64, activations_per_sample=500, num_outputs=3,
)  # fmt: skip
FEATURE_BYTES = 4000
MAY_BE_ZERO = ("adjoint_points", "influence_points")  # then each output of a point is computed by itself
ARGUMENTS: dict[str, tuple[int, ...]] = {
    "tile_points": (9, FEATURE_BYTES), "derivative_points": (9, FEATURE_BYTES), "vanilla_gd_points": (FEATURE_BYTES,),
    "adjoint_points": (3,), "influence_points": (3,), "curvature_rows": (), "curvature_adjoints": (20,),
    "retrained_runs": (20,), "statistics_rows": (3, 64), "adjoint_samples": (), "directional_rows": (),
    "vanilla_gd_samples": (10_000, 100, 3, 2), "steps_per_batch": (FEATURE_BYTES * 1000,), "stacked_weights": (4,),
}  # fmt: skip


def size_of(name: str, memory: MemoryPlan) -> int:
    if name == "weight_rows":
        return weight_rows(memory.budget, memory.itemsize, memory.num_weights)
    size: int = getattr(memory, name)(*ARGUMENTS[name])
    return size


def memory_of(budget: int, num_weights: int = 2000) -> MemoryPlan:
    return MemoryPlan(budget, 8, PLAN, num_weights)


@pytest.mark.parametrize("name", [*ARGUMENTS, "weight_rows"])
def test_a_size_begins_at_one_and_grows_with_the_budget(name: str) -> None:
    sizes = [size_of(name, memory_of(1 << power)) for power in range(34)]
    assert sizes[0] == (0 if name in MAY_BE_ZERO else 1)
    assert sizes == sorted(sizes)
    assert sizes[-1] > 1


@pytest.mark.parametrize("budget", [1 << 20, 1 << 26, 1 << 28, 1 << 30])
def test_a_tile_takes_half_of_the_budget_and_its_points_a_quarter_and_the_rest(budget: int) -> None:
    n, of_pair, of_passes = size_of("tile_points", memory_of(budget)), 8 * (4 * 9 + 1), 8 * (3 + 3) * 500

    def fits(n: int) -> bool:
        passes = min(n * of_passes, memory_plan.PASS_BYTES + of_passes)
        in_all = n**2 * of_pair + passes + n * 3 * FEATURE_BYTES
        return n**2 * of_pair <= budget / 2 and in_all <= 0.75 * budget

    assert fits(n)
    assert not fits(n + 1)  # the negative control


def test_more_weights_leave_room_for_fewer_adjoints() -> None:
    few, many = (memory_of(1 << 26, num_weights).adjoint_points(3) for num_weights in (10**5, 10**3))
    assert few < many


@pytest.mark.parametrize("budget", [1 << 24, 1 << 30])
def test_influence_divides_the_budget_among_adjoints_graph_and_the_way_back(budget: int) -> None:
    memory, vector, row = memory_of(budget), 2000 * 8, 500 * 8
    points, rows, adjoints = memory.influence_points(3), memory.curvature_rows(), memory.curvature_adjoints(20)

    def bytes_of(points: int, rows: int, adjoints: int) -> int:
        return 16 * points * 3 * vector + 6 * rows * row + adjoints * (4 * vector + 6 * 20 * row)

    assert bytes_of(points, rows, adjoints) <= budget
    assert bytes_of(points + 1, rows + 1, adjoints + 1) > budget  # the negative control


@pytest.mark.parametrize("budget", [1 << 26, 1 << 30])
def test_retraining_counts_the_run_that_comes_along_and_the_passes_of_all(budget: int) -> None:
    memory, vector, row = memory_of(budget), 2000 * 8, 500 * 8
    runs = memory.retrained_runs(20) + 1
    assert runs * 6 * 20 * row <= budget / 2 < (runs + 1) * 6 * 20 * row
    assert runs * 16 * vector <= budget / 2
    one_by_one = replace(memory, plan=replace(PLAN, calls_convolutions=True)).retrained_runs(20) + 1
    assert one_by_one * 16 * vector <= budget / 2 < (one_by_one + 1) * 16 * vector


def test_a_pass_stays_within_its_bytes() -> None:
    rows = rows_per_pass(PLAN, 8, 3)
    assert rows * 500 * 8 * (3 + 2) <= memory_plan.PASS_BYTES < (rows + 1) * 500 * 8 * (3 + 2)
    assert rows_per_pass(PLAN, 4, 3) in (2 * rows, 2 * rows + 1)


def test_few_weight_states_are_not_stacked() -> None:
    assert memory_of(1 << 30).stacked_weights(4) == memory_plan.MAX_STACKED
    assert memory_of(1 << 18).stacked_weights(4) == 1
