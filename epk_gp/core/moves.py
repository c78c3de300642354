"""The user's network among the recorded states of its run: equal to one, or moved between them without a gradient.

Lookahead pulls the weights back to slow ones, a loop restores the best checkpoint, an average takes the weights' place.
Such a move is exact if it ends on the line from the weights u, which the optimizer's step left, to a recorded state,

    w_{s+1} = u + share (w_anchor - u).

A few weights of every state say which states can be the anchor; all weights then decide.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

_NUM_SAMPLES = 64  # weights of a state that are kept to find it by
_NEAR = 1e-2  # how far from the line the samples may lie, relative to the move: all weights are compared afterwards
_CANDIDATES = 4  # anchors that are compared by all weights
_ROUNDING = 16  # eps of a parameter's largest weight by which a move may miss the line


@dataclass(frozen=True)
class Move:
    """A move of the weights after a step, without a gradient.

    Attributes:
        anchor: Number of the recorded state that the weights were moved towards, at most that before the step.
        share: Which share of the way they were moved.
    """

    anchor: int
    share: float


def share_of_way(
    u: Float[Tensor, " P"], w: Float[Tensor, " P"], anchor: Float[Tensor, " P"], sizes: tuple[int, ...]
) -> float | None:
    """Return which share of the way to an anchor leads from u to w; None if w is not on the way, up to rounding.

    Beyond u or the anchor nothing is a move: a step that is made twice leads away from where it began.

    Args:
        u: The weights before the move.
        w: The weights after it.
        anchor: The weights of the anchor.
        sizes: Number of weights of each parameter: each must be on the line up to its own rounding.
    """
    if torch.equal(w, anchor):
        return 1.0
    way, moved = (anchor - u).double(), (w - u).double()
    share = float(way @ moved / (way @ way).clamp(min=1e-300))
    missed, size = (moved - share * way).abs(), torch.stack([u, w, anchor]).abs().amax(dim=0)
    eps = _ROUNDING * torch.finfo(w.dtype).eps
    parts = zip(missed.split(list(sizes)), size.split(list(sizes)), strict=True)
    is_near = all(bool(own.max() <= eps * scale.max()) for own, scale in parts if len(own))
    return share if is_near and 0 < share <= 1 + _ROUNDING * torch.finfo(w.dtype).eps else None


@dataclass(eq=False)
class StateSamples:
    """A few weights of every state of a run.

    Attributes:
        places: Which weights.
        rows: Their values in each state, by its number.
    """

    places: Int64[Tensor, " k"]
    rows: dict[int, Float[Tensor, " k"]] = field(default_factory=dict)

    @classmethod
    def of(cls, w: Float[Tensor, " P"]) -> "StateSamples":
        """Choose the places for weights of this size."""
        count, exact = min(len(w), _NUM_SAMPLES), torch.float64  # float32 rounds numbers above 2^24, also up
        return cls(torch.linspace(0, len(w) - 1, count, dtype=exact, device=w.device).long())

    def equal_to(self, w: Float[Tensor, " P"]) -> list[int]:
        """Return the states that have these samples, the latest first."""
        if w.device != self.places.device or w.dtype != next(iter(self.rows.values())).dtype:
            return []
        row = w[self.places]
        return [state for state in sorted(self.rows, reverse=True) if torch.equal(self.rows[state], row)]

    def anchors(self, u: Float[Tensor, " P"], w: Float[Tensor, " P"], before: int) -> Iterator[int]:
        """Yield the states, up to a number, that a move from u to w may have gone towards, the likeliest first."""
        states = sorted((state for state in self.rows if state <= before), reverse=True)
        rows = torch.stack([self.rows[state] for state in states]).double()
        x, y = (value[self.places].double() for value in (u, w))
        ways, moved = rows - x, y - x
        shares = (ways @ moved) / ways.square().sum(dim=1).clamp(min=1e-300)
        missed = (moved - shares[:, None] * ways).norm(dim=1)
        for place in missed.argsort(stable=True)[:_CANDIDATES].tolist():
            if missed[place] <= _NEAR * moved.norm() and bool(ways[place].any()):
                yield states[place]


@dataclass(frozen=True, eq=False)
class LiveNetwork:
    """The network that the user trains, for as long as it lives.

    Attributes:
        network: The network.
        samples: A few weights of every recorded state, those after the trajectory's last step too.
    """

    network: "weakref.ref[nn.Module]"
    samples: StateSamples
