"""What a network is called with and what it returns: several inputs packed into one tensor, outputs of any structure.

The engine sees one tensor X of n rows. Inputs that are a tuple or a dictionary of tensors are packed into it where they
enter, and unpacked right before the network is called (`FunctionalModel.returned`).
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Shaped
from torch import Tensor

from epk_gp.core.input_layout import (
    InputLayout,
    Inputs,
    InputTensor,
    layout_from_json,
    pack_inputs,
    side_by_side,
    validate_same_layout,
)


@dataclass(frozen=True)
class Signature:
    """How a network is called, and how its outputs (n, C) are taken from what it returns.

    Attributes:
        layout: The tensors that it takes; None where it takes one tensor, which is then not changed in any way.
        output: Maps what the network returns to outputs (n, C); None where it returns them, or (n,) where C is 1.
    """

    layout: InputLayout | None = None
    output: Callable[[Any], Tensor] | None = None

    def pack(self, X: Inputs, name: str = "X") -> Shaped[Tensor, "n ..."]:
        """Return inputs of the recorded structure as one tensor; a tensor is taken for packed inputs.

        Raises:
            TypeError: A part of the inputs is no tensor, or of another kind than recorded.
            ValueError: A part is missing, or has another shape than recorded, or another first dimension than the
                others.
        """
        if isinstance(X, Tensor):
            return X
        if self.layout is None:
            raise TypeError(f"{name} must be a torch.Tensor: got {type(X).__name__}. Convert it with torch.as_tensor.")
        packed, layout = pack_inputs(X, name)
        validate_same_layout(self.layout, layout, name)
        return packed

    def unpack(self, rows: Shaped[Tensor, "n ..."]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Return the arguments and the keywords that the network is called with.

        Floating-point tensors have the dtype of the rows, as a single input has that of the computation; integers and
        Booleans have their own.
        """
        if self.layout is None:
            return (rows,), {}
        parts = self._parts(self.layout, rows)
        if self.layout.is_mapping:
            return (), {str(tensor.key): part for tensor, part in zip(self.layout.tensors, parts, strict=True)}
        return tuple(parts), {}

    def structure(self, rows: Shaped[Tensor, "n ..."]) -> Inputs:
        """Return packed inputs in the structure that they had: a tensor, a tuple or a dictionary."""
        args, kwargs = self.unpack(rows)
        return kwargs or (rows if self.layout is None else args)

    def outputs(self, returned: Any) -> Any:
        """Return the outputs that belong to what the network returned, not checked: one value per point is (n, 1)."""
        outputs = returned if self.output is None else self.output(returned)
        return outputs.unsqueeze(1) if isinstance(outputs, Tensor) and outputs.ndim == 1 else outputs

    def pack_call(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], forward: Callable[..., Any] | None = None
    ) -> Tensor | None:
        """Return what a network was called with as one tensor, or None if the call was not one with these inputs.

        Arguments that are not part of the inputs are left out.

        Args:
            args: Positional arguments of the call.
            kwargs: Its keyword arguments.
            forward: The network's forward function, by which a position is recognised that is a keyword in the layout,
                or the reverse.
        """
        if self.layout is None:
            given = args[0] if args else next((v for v in kwargs.values() if isinstance(v, Tensor)), None)
            return given if isinstance(given, Tensor) else None
        keys = [tensor.key for tensor in self.layout.tensors]
        positions = () if self.layout.is_mapping else tuple(keys)
        keywords = {str(key): key for key in keys} if self.layout.is_mapping else {}
        try:
            expected, found = (_by_parameter(forward, *call) for call in ((positions, keywords), (args, kwargs)))
        except TypeError:
            return None
        parameter_of = {key: parameter for parameter, key in expected.items()}
        values = [found.get(parameter_of[key]) for key in keys]
        tensors = [value for value in values if isinstance(value, Tensor) and value.ndim]
        if len(tensors) < len(keys) or len({len(value) for value in tensors}) > 1:
            return None
        pairs = list(zip(self.layout.tensors, tensors, strict=True))
        if any(
            tuple(value.shape[1:]) != tensor.shape or InputTensor(0, (), value.dtype).kind != tensor.kind
            for tensor, value in pairs
        ):
            return None
        return side_by_side([value for _, value in pairs], self.layout.dtype)

    def to_json(self) -> dict[str, Any] | None:
        """Return the entry of a run's header; None where a network takes one tensor and returns the outputs.

        A function cannot be stored: only whether there is one.
        """
        if self.layout is None and self.output is None:
            return None
        tensors = () if self.layout is None else self.layout.tensors
        described = [{"key": t.key, "shape": list(t.shape), "dtype": str(t.dtype)} for t in tensors]
        return {"inputs": described or None, "has_output": self.output is not None}

    @staticmethod
    def _parts(layout: InputLayout, rows: Tensor) -> list[Tensor]:
        parts = []
        for tensor, first in layout.columns():
            part = rows[:, first : first + tensor.size]
            part = part.unflatten(1, tensor.shape) if tensor.shape else part.squeeze(1)
            follows_rows = tensor.dtype.is_floating_point and tensor.dtype == layout.dtype
            # contiguous, as the user's own: forward() may call view(), and dropout draws by memory layout
            parts.append((part if follows_rows else part.to(tensor.dtype)).contiguous())
        return parts


ONE_TENSOR = Signature()  # of a network that takes one tensor and returns its outputs


def signature_from_json(entry: object, output: Callable[[Any], Tensor] | None = None) -> Signature:
    """Return the signature that an entry of a run's header describes (`Signature.to_json`).

    Args:
        entry: The entry; None for a network that takes one tensor and returns its outputs.
        output: The function that the run was recorded with.

    Raises:
        TypeError: `output` is no function.
        ValueError: The entry is damaged, or `output` must be given and is not.
    """
    validate_output(output)
    if entry is None:
        return Signature(None, output)
    if not isinstance(entry, dict) or not isinstance(entry.get("has_output"), bool) or "inputs" not in entry:
        raise ValueError(f"the header's 'signature' must say which tensors the network takes: got {entry!r}.")
    if entry["has_output"] and output is None:
        raise ValueError(
            "the run was recorded with output=, a function from what the network returns to (n, C): pass it as output=."
        )
    return Signature(None if entry["inputs"] is None else layout_from_json(entry["inputs"]), output)


def validate_output(output: object) -> None:
    """Raise if an object cannot be the function from what a network returns to its outputs.

    Raises:
        TypeError: It cannot be called.
    """
    if output is not None and not callable(output):
        raise TypeError(
            f"output must be a function from what the network returns to a tensor (n, C), or None: got {output!r}."
        )


def parse_signature(X: Inputs, output: Callable[[Any], Tensor] | None) -> tuple[Tensor, Signature]:
    """Return training inputs as one tensor, with the signature of a network that takes them.

    Raises:
        TypeError, ValueError: As `pack_inputs`; or `output` is no function.
    """
    validate_output(output)
    if isinstance(X, Tensor):
        return X, Signature(None, output)
    packed, layout = pack_inputs(X)
    return packed, Signature(layout, output)


def _by_parameter(
    forward: Callable[..., Any] | None, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[int | str, Any]:
    """Return the arguments of a call by the parameters that take them."""
    if forward is None:
        return dict([*enumerate(args), *kwargs.items()])
    signature, result = inspect.signature(forward), dict[int | str, Any]()
    for name, value in signature.bind(*args, **kwargs).arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            result.update(enumerate(value))
        elif kind is inspect.Parameter.VAR_KEYWORD:
            result.update(value)
        else:
            result[name] = value
    return result
