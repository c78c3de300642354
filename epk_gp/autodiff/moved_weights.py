"""Rows of a network at weights on lines: some rows on each of several lines, at any positions.

A step of a training is a line w + t d. Steps of a small network are evaluated together: the cost is then that of their
arithmetic, not of as many calls as there are steps.
"""

from collections.abc import Iterator, Mapping
from typing import Any, final

import torch
import torch.autograd.forward_ad as fwAD
from jaxtyping import Bool, Int64
from torch import Tensor
from torch.nn import functional as F

from epk_gp.autodiff.interception import (
    CHANNELS_LAST,
    CONVOLUTIONS,
    NORMALISATIONS,
    FunctionCall,
    ParameterInterception,
    UnsupportedParameterUseError,
    Watch,
    add_multiple,
    along_direction,
    called_with_both,
    has_rows,
    require_rows,
    substituted,
    tensors_in,
)
from epk_gp.core.torch_overrides import split_dual


@final
class MovedWeights(ParameterInterception):
    """Evaluates rows at weights on one line or several: each of G equal groups of rows has a line, w_g + t_e d_g.

    Each jointly linear function is called once with w and once with d; linear layers on all lines use one product.

    Args:
        params: Parameters by name. For one line they are w itself; for several, their values are not used.
        num_rows: E.
        start: w by name, (G, ...), for several lines; None for one.
        direction: d by name, in the same form; None if rows stay at the starts of their lines.
        t: (E,) positions on the lines, one per row, with a direction; may carry a tangent or require a gradient.
        watch: The observer, as in `ParameterInterception`.
        statistics: Statistics of every row by name, (E, ...), which replace those at w + t_e d.
    """

    def __init__(
        self,
        params: Mapping[str, Tensor],
        num_rows: int,
        start: Mapping[str, Tensor] | None = None,
        direction: Mapping[str, Tensor] | None = None,
        t: Tensor | None = None,
        watch: Watch | None = None,
        statistics: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__({name: params[name] for name in direction or start or ()}, watch)
        self.num_rows, self.t = num_rows, t
        self.num_lines = 1 if start is None else len(next(iter(start.values())))
        self.start, self.direction, self.statistics = (
            {id(params[name]): value for name, value in (values or {}).items()}
            for values in (start, direction, statistics)
        )

    def of_rows(self, value: Tensor, num_rows: int) -> Tensor:
        """Return w_g + t_e d_g for every row."""
        if id(value) in self.statistics or id(value) not in self.name_of:
            return self.statistics.get(id(value), value)
        w, step = value[None], self.direction.get(id(value), value)[None]
        if self.start:
            own = (held.get(id(value), self.start[id(value)]) for held in (self.start, self.direction))
            w, step = (v.repeat_interleave(num_rows // self.num_lines, dim=0) for v in own)
        return w if self.t is None else self._moved(w, step, self.t)

    def intercept(self, call: FunctionCall) -> Any:
        """Make the call, and add t times the call along the direction."""
        x = call.input
        if call.statistics:
            require_rows(x, x, self.num_rows, call.params[0])
            return self.normalise(call)
        if not call.in_slots or (call.function is F.embedding and not has_rows(x)):
            return self._followed(call)
        require_rows(x, x, self.num_rows, call.params[0])
        if not self.start:
            return self._on_line(call, self.direction, self.t)
        held = [value for value in call.held.values() if value is not None]
        if call.function is F.linear and held[0].ndim == 2 and all(id(value) in self.start for value in held):
            return self._products(call)
        if call.function in NORMALISATIONS:
            return self._scaled(call)
        return torch.cat([self._on_line(*of_line) for of_line in self._lines(call, x)])

    def _on_line(self, call: FunctionCall, direction: Mapping[int, Tensor], t: Tensor | None) -> Tensor:
        """Make a jointly linear call of rows on one line."""
        held = {name: value for name, value in call.held.items() if value is not None}
        steps = ((name, value, direction.get(id(value))) for name, value in held.items())
        along = {name: torch.zeros_like(value) if step is None else step for name, value, step in steps}
        if t is None:
            result, change = call.run(), None
        elif call.function is F.linear or call.function in CONVOLUTIONS:
            groups = call.args[6] if len(call.args) > 6 else call.kwargs.get("groups")
            joins = call.function in CONVOLUTIONS and groups in (None, 1)
            result, change = called_with_both(call, along, joins=joins)
        else:
            result, change = call.run(), call.run(along)
        require_rows(call.input, result, len(call.input), call.params[0])
        return result if change is None or t is None else self._moved(result, change, t)

    def _moved(self, value: Tensor, along: Tensor, t: Tensor) -> Tensor:
        return add_multiple(value, t.view(-1, *[1] * (value.ndim - 1)), along)

    def _products(self, call: FunctionCall) -> Tensor:
        """Multiply the rows of all lines by the weights of a linear layer, and by their direction, in one product."""
        (W, b), steps = (call.held["weight"], call.held["bias"]), self.direction if self.t is not None else {}
        weights, biases = ([held[id(v)] for held in (self.start, steps) if id(v) in held] for v in (W, b))
        W, b = torch.cat(weights, dim=1).mT, torch.cat(biases, dim=1)[:, None] if biases else None

        def product(x: Tensor, b: Tensor | None) -> Tensor:
            rows = x.reshape(self.num_lines, -1, x.shape[-1])
            result = rows @ W if b is None else torch.baddbmm(b, rows, W)
            return result.view(*x.shape[:-1], -1)

        primal, tangent = split_dual(call.input)
        results = product(primal, b).chunk(len(weights), dim=-1)
        if tangent is not None:
            tangents = product(tangent, None).chunk(len(weights), dim=-1)
            results = tuple(fwAD.make_dual(*pair) for pair in zip(results, tangents, strict=True))
        return results[0] if self.t is None else self._moved(results[0], results[1], self.t)

    def _scaled(self, call: FunctionCall) -> Tensor:
        """Normalise, and scale and shift each row by its own weights."""
        result: Tensor = call.run(dict.fromkeys(call.held))
        for name, value in call.held.items():
            if value is not None:
                rows = self.of_rows(value, self.num_rows) if id(value) in self.start else value[None]
                ones = [1] * (result.ndim - rows.ndim)
                is_last = call.function in CHANNELS_LAST
                rows = rows.view(len(rows), *ones, *rows.shape[1:]) if is_last else rows.view(*rows.shape, *ones)
                result = result * rows if name == "weight" else result + rows
        return result

    def _lines(
        self, call: FunctionCall, of_rows: Tensor | None = None
    ) -> Iterator[tuple[FunctionCall, dict[int, Tensor], Tensor | None]]:
        """Return a call of each line's rows with its weights, the direction of these, and the rows' positions.

        Args:
            call: The call.
            of_rows: An argument that has rows even if it was not computed from the inputs.
        """
        G, tensors = self.num_lines, list(tensors_in((call.args, call.kwargs)))
        of_lines = {
            id(v): v.unflatten(0, (G, -1))
            for v in tensors
            if (has_rows(v) or v is of_rows) and v.shape[:1] == (self.num_rows,)
        }
        moving = {key: value for key, value in self.start.items() if any(id(v) == key for v in tensors)}
        steps, t = self.direction or self.start, None if self.t is None else self.t.view(G, -1)
        for g in range(G):
            by_id = {key: value[g] for key, value in (of_lines | moving).items()}
            names = {id(by_id[key]): self.name_of[key] for key in moving}
            along = {id(by_id[key]): steps[key][g] for key in moving if key in steps}
            args, kwargs = substituted(call.args, by_id), substituted(call.kwargs, by_id)
            yield FunctionCall(call.function, args, kwargs, names, call.params), along, None if t is None else t[g]

    def _followed(self, call: FunctionCall) -> Any:
        """Make a call that is linear in its parameters, whatever their positions in it.

        If no argument has rows, the result has none either: it moves like a parameter, along its own direction.
        """
        has_batch = any(map(has_rows, tensors_in((call.args, call.kwargs))))
        of_lines, of_steps = list[list[Tensor]](), list[list[Tensor]]()
        result, rows = None, self.num_rows // self.num_lines
        for own, direction, t in self._lines(call) if self.start else [(call, self.direction, self.t)]:
            result = own.run()
            values = list(tensors_in((result,)))
            if not values:
                return result
            along = along_direction(own, direction)
            if along is NotImplemented or (has_batch and any(not y.ndim or len(y) != rows for y in values)):
                raise UnsupportedParameterUseError(
                    f"the weights {sorted(call.params)} must be used by functions that are linear in them."
                )
            steps = list(tensors_in((along,)))
            if has_batch and t is not None:
                values = [self._moved(*pair, t) for pair in zip(values, steps, strict=True)]
            of_lines.append(values)
            of_steps.append(steps)
        if has_batch:
            moved = [torch.cat(values) if self.start else values[0] for values in zip(*of_lines, strict=True)]
            kind: Any = type(result)
            return moved[0] if isinstance(result, Tensor) else kind(moved)
        result = call.run() if self.start else result
        for number, value in enumerate(tensors_in((result,))):
            self.followed.append(value)
            self.name_of[id(value)] = call.params[0]
            if self.start:
                self.start[id(value)] = torch.stack([values[number] for values in of_lines])
            if self.direction:
                steps = [values[number] for values in of_steps]
                self.direction[id(value)] = torch.stack(steps) if self.start else steps[0]
        return result


def equal_groups(
    group: Int64[Tensor, " E"], groups: Int64[Tensor, " G"]
) -> tuple[Int64[Tensor, "G m"], Bool[Tensor, "G m"]]:
    """Return the rows of some groups, equally many for each, and whether they are first occurrences.

    Args:
        group: The group of each of E rows.
        groups: G non-empty groups. The last row of a group with fewer rows than another is repeated.
    """
    counts, order = group.bincount(), group.argsort(stable=True)
    ends = counts.cumsum(0)[groups][:, None]
    place = ends - counts[groups][:, None] + torch.arange(int(counts[groups].max()), device=group.device)
    return order[torch.minimum(place, ends - 1)], place < ends
