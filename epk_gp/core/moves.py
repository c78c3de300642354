"""Moves of the user's network without a gradient, from one recorded state of its run towards another.

Lookahead pulls the weights back to slow ones, a loop restores the best checkpoint, an average replaces the weights.
Such a move is exact if it ends on the line from u, the weights after the optimizer's step, to a recorded state,

    w_{s+1} = u + share (w_anchor - u).

Samples of every state's weights select the possible anchors; all weights then decide.
"""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import is_
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from epk_gp.core.model import FEW_WEIGHTS, FunctionalModel, flattened

_NUM_SAMPLES = 64  # sampled weights of a state, by which it is found
_NEAR = 1e-2  # largest distance of samples from the line, relative to the move; all weights are compared afterwards
_CANDIDATES = 4  # anchors that are compared by all weights
_ROUNDING = 16  # largest distance from the line, in eps of a parameter's largest weight


@dataclass(frozen=True)
class Move:
    """A move of the weights after a step, without a gradient.

    Attributes:
        anchor: Number of the recorded state that the weights moved towards, at most the state before the step.
        share: Share of the way to the anchor.
    """

    anchor: int
    share: float


def share_of_way(
    u: Float[Tensor, " P"], w: Float[Tensor, " P"], anchor: Float[Tensor, " P"], sizes: tuple[int, ...]
) -> float | None:
    """Return the share of the way to an anchor that leads from u to w; None if w is not on the way, up to rounding.

    A point beyond u or beyond the anchor is not a move: a step that is made twice leads away from its start.

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
        places: Indices of the sampled weights.
        rows: Their values in each state, by its number.
    """

    places: Int64[Tensor, " k"]
    rows: dict[int, Float[Tensor, " k"]] = field(default_factory=dict)

    @classmethod
    def of(cls, w: Float[Tensor, " P"]) -> "StateSamples":
        """Choose the places for weights of this number."""
        count, exact = min(len(w), _NUM_SAMPLES), torch.float64  # float32 rounds numbers above 2^24
        return cls(torch.linspace(0, len(w) - 1, count, dtype=exact, device=w.device).long())

    def equal_to(self, w: Float[Tensor, " P"]) -> list[int]:
        """Return the numbers of states with these samples, the latest first."""
        if w.device != self.places.device or w.dtype != next(iter(self.rows.values())).dtype:
            return []
        row = w[self.places]
        return [state for state in sorted(self.rows, reverse=True) if torch.equal(self.rows[state], row)]

    def anchors(self, u: Float[Tensor, " P"], w: Float[Tensor, " P"], before: int) -> Iterator[int]:
        """Yield the states up to `before` that may be the anchor of a move from u to w, the likeliest first."""
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
    """The user's network during training, for as long as the object exists.

    Attributes:
        network: The network.
        samples: Samples of every recorded state, including those after the trajectory's last step.
    """

    network: "weakref.ref[nn.Module]"
    samples: StateSamples


_NUM_COMPARED = 128  # weights of each parameter, where torch has not written to it


class LiveWeights:
    """The current weights of a network in training.

    Known weights that torch has not written to since are not compared again, except for a few: writes through `.data`
    leave no other trace.

    Args:
        net: The network.
        model: The same as a function of its weights.
        is_certain: Whether to compare all weights always.
    """

    def __init__(self, net: nn.Module, model: FunctionalModel, *, is_certain: bool) -> None:
        self._model, self._is_certain = model, is_certain
        # each parameter's module and its name there, because looking up all names in each step is slow
        paths = ((name, *name.rpartition(".")[::2]) for name in model.names)
        self._owners = [(name, net.get_submodule(path), leaf) for name, path, leaf in paths]
        self._known: tuple[Tensor | None, list[tuple[int, int]], Tensor] = None, [], torch.empty(0)
        self._seen: list[Any] = [None] * len(self._owners)

    def parameters(self) -> list[nn.Parameter] | None:
        """Return the parameters; None if one is missing, or torch.func puts tensors in their place."""
        present: list[Any] = [module._parameters.get(leaf) for _, module, leaf in self._owners]
        if not all(map(is_, present, self._seen)):  # checked again only if an object was replaced
            if not all(isinstance(p, nn.Parameter) for p in present):
                return None
            self._seen = present
        return present

    def named(self) -> dict[str, Tensor]:
        """Return the parameters that the network has, by name."""
        held = ((name, module._parameters.get(leaf)) for name, module, leaf in self._owners)
        return {name: p for name, p in held if isinstance(p, nn.Parameter)}

    def _marks(self, named: dict[str, Tensor]) -> tuple[list[tuple[int, int]], Tensor]:
        """Return marks that change when weights are written to: addresses, torch's write counts, and a few values."""
        own = [p.detach() for p in named.values()]
        few = torch.cat([w.reshape(-1)[:: 1 + w.numel() // _NUM_COMPARED] for w in own])
        return [(w.data_ptr(), w._version) for w in own], few

    def copy(self) -> Float[Tensor, " P"]:
        """Return a copy of the weights."""
        held: list[Any] = [module._parameters[leaf] for _, module, leaf in self._owners]
        w = flattened(held)
        if self._model.num_weights > FEW_WEIGHTS:
            self._known = w, *self._marks(self.named())
        return w

    def versions(self) -> list[int]:
        """Return torch's write count of each parameter."""
        held: list[Any] = [module._parameters[leaf] for _, module, leaf in self._owners]
        return [p._version for p in held]

    def know_copy(self, w: Float[Tensor, " P"], copy: Float[Tensor, " P"]) -> None:
        """Use a copy in place of weights that the network is known to have had."""
        if self._known[0] is w:
            self._known = copy, *self._known[1:]

    def are(self, w: Float[Tensor, " P"]) -> bool:
        """Return whether the network has these weights, without copying."""
        if self._model.num_weights <= FEW_WEIGHTS:
            own = self.copy()
            return own.dtype == w.dtype and torch.equal(own, w)
        named = self.named()
        (known, marks, values), (present, few) = self._known, self._marks(named)
        if w is known and not self._is_certain and marks == present and torch.equal(values, few):
            return True
        if not all(torch.equal(named[name], value) for name, value in self._model.unflatten(w).items()):
            return False
        self._known = w, present, few
        return True
