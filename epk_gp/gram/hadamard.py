"""Hadamard matrices: signs whose columns are orthogonal, so that few rows stand for all outputs exactly."""

import torch
from jaxtyping import Int8
from torch import Tensor

from epk_gp.core.checks import validate_count


def hadamard_order(num_outputs: int, num_nodes: int) -> int:
    """Return the order of the Hadamard matrix whose rows are taken in turn at the nodes of a path.

    Args:
        num_outputs: C.
        num_nodes: n.

    Returns:
        The smallest order of at least C that divides n; the smallest order of at least C if none does.
    """
    orders = [order for order in range(num_outputs, max(4 * num_outputs, num_nodes) + 1) if _construction(order)]
    return next((order for order in orders if num_nodes % order == 0), orders[0])


def covering_order(num_outputs: int, at_least: int, at_most: int) -> int:
    """Return a number of nodes of which the rows of a Hadamard matrix stand for all outputs exactly.

    Args:
        num_outputs: C.
        at_least: Returned if an order from C on divides it.
        at_most: Returned if no order from C to it does.
    """
    if at_least % hadamard_order(num_outputs, at_least) == 0:
        return at_least
    return next((order for order in range(max(num_outputs, at_least), at_most) if _construction(order)), at_most)


def hadamard_matrix(order: int) -> Int8[Tensor, "order order"]:
    """Return a Hadamard matrix: entries 1 and -1, orthogonal rows and columns.

    Matrices of order 1, 2 and q + 1 for primes q = 3 mod 4 (Paley) are doubled as often as it takes (Sylvester).

    Args:
        order: Number of rows and columns.

    Raises:
        TypeError: `order` is not a whole number.
        ValueError: There is no such construction.
    """
    validate_count(order, "order")
    found = _construction(order)
    if found is None:
        raise ValueError(
            "order must be 1, 2 or q + 1 for a prime q = 3 mod 4, times a power of 2, for a Hadamard matrix to be "
            f"made: got {order}. Take a power of 2."
        )
    base, doublings = found
    H = torch.ones(1, 1, dtype=torch.int8) if base == 1 else _paley(base - 1)
    for _ in range(doublings):
        H = torch.cat([torch.cat([H, H], dim=1), torch.cat([H, -H], dim=1)])
    return H


def _construction(order: int) -> tuple[int, int] | None:
    """Return the order to start from, and how often to double it; the fewest doublings there are."""
    for doublings in range(order.bit_length()):
        base, rest = divmod(order, 1 << doublings)
        if rest:
            return None
        if base == 1 or (base % 4 == 0 and _is_prime(base - 1)):
            return base, doublings
    return None


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % divisor for divisor in range(2, int(q**0.5) + 1))


def _paley(q: int) -> Tensor:
    """Return Paley's first matrix, of order q + 1: I + S with the skew matrix S of quadratic residues."""
    residues = torch.full((q,), -1, dtype=torch.int8)
    residues[torch.arange(1, q) ** 2 % q] = 1
    residues[0] = 0
    index = torch.arange(q)
    S = torch.zeros(q + 1, q + 1, dtype=torch.int8)
    S[0, 1:], S[1:, 0] = 1, -1
    S[1:, 1:] = residues[(index[:, None] - index) % q]
    return S + torch.eye(q + 1, dtype=torch.int8)
