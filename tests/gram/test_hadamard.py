"""Hadamard matrices, and which one serves a number of outputs and nodes."""

import pytest
import torch

from epk_gp.autodiff.sketches import hadamard_matrix, hadamard_order

ORDERS = [1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 44, 48, 60, 64, 68, 72, 80, 84]


@pytest.mark.parametrize("order", ORDERS)
def test_rows_and_columns_are_orthogonal(order: int) -> None:
    H = hadamard_matrix(order).to(torch.int64)
    assert torch.equal(H.abs(), torch.ones_like(H))
    assert torch.equal(H @ H.T, order * torch.eye(order, dtype=torch.int64))
    assert torch.equal(H.T @ H, order * torch.eye(order, dtype=torch.int64))


@pytest.mark.parametrize(
    ("outputs", "nodes", "order"),
    [
        (10, 20, 20),
        (10, 16, 16),
        (10, 12, 12),
        (10, 24, 12),
        (3, 20, 4),
        (1, 20, 1),
        (2, 20, 2),
        (10, 10, 12),
        (100, 20, 104),
        (3, 6, 4),
        (28, 28, 32),
        (36, 36, 40),
    ],
)
def test_the_order_divides_the_number_of_nodes_if_it_can(outputs: int, nodes: int, order: int) -> None:
    assert hadamard_order(outputs, nodes) == order
