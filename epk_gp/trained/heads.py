"""Attention heads: which entries of a network's parameters belong to which of them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import gcd

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from epk_gp.core.model import FunctionalModel
from epk_gp.core.torch_overrides import disable_fused_attention

# By attention module, and in it by parameter: (before, heads) of the parameter's entries as (before, heads, rest).
HeadLayout = Mapping[str, Mapping[str, tuple[int, int]]]

_COUNTS = ("num_heads", "n_head", "n_heads", "num_attention_heads", "nhead", "heads")
_KEY_COUNTS = ("num_key_value_heads", "num_kv_heads", "n_kv_heads")  # of grouped queries
_FUSED = ("c_attn", "qkv", "qkv_proj", "in_proj_weight", "in_proj_bias", "Wqkv", "to_qkv")  # one after another
_OUTPUTS = ("out_proj", "o_proj", "c_proj", "proj", "proj_out", "to_out", "out", "wo", "dense", "W_O", "w_o", "o")


@dataclass(frozen=True)
class Cut:
    """How the entries of a parameter are divided into heads: as (before, heads, rest)."""

    module: str
    before: int
    heads: int


def cuts_of(layout: HeadLayout, model: FunctionalModel) -> dict[str, Cut]:
    """Return the cut of each parameter that a layout names.

    Raises:
        ValueError: There is no such parameter, or it cannot be divided so.
    """
    shapes, found = dict(zip(model.names, model.shapes, strict=True)), dict[str, Cut]()
    for module, parameters in layout.items():
        for own, (before, heads) in parameters.items():
            name = f"{module}.{own}".lstrip(".")
            if name not in shapes or before < 1 or heads < 1 or shapes[name].numel() % (before * heads):
                got = f"{tuple(shapes[name])}" if name in shapes else "no such parameter"
                raise ValueError(
                    f"heads must divide a trained parameter into (before, heads, rest): {name!r} into "
                    f"{(before, heads)}, got {got}."
                )
            found[name] = Cut(module, before, heads)
    return found


def found_heads(model: FunctionalModel, state: Float[Tensor, " PQ"], X: Shaped[Tensor, "n ..."]) -> dict[str, Cut]:
    """Find the heads of a network's attention modules by the names and shapes that are usual.

    What is found is tried: heads that change places, in all parameters of a module alike, must leave the outputs as
    they are. Modules of which that is not true are left out, as those with a bias of each head for positions.
    """
    found, P = dict[str, Cut](), model.num_weights
    wave = torch.arange(P, dtype=state.dtype, device=state.device).sin()  # a projection may be 0 still
    params = model.unflatten(torch.cat([state[:P] + 0.02 * wave, state[P:]]))
    with torch.no_grad(), disable_fused_attention():
        z = model(params, X)
        allowed = max(torch.finfo(z.dtype).eps ** 0.5, 1e-6) * float(z.abs().max())  # casts to float32 are usual
        for name, module in model.module.named_modules():
            cuts = dict(_cuts(model, name, module))
            least = gcd(*(cut.heads for cut in cuts.values())) if cuts else 0
            if least < 2:
                continue
            moved = {own: _rolled(params[own], cut, cut.heads // least) for own, cut in cuts.items()}
            if float((model({**params, **moved}, X) - z).abs().max()) <= allowed:
                found |= cuts
    return found


def _rolled(parameter: Tensor, cut: Cut, places: int) -> Tensor:
    parts = parameter.reshape(cut.before, cut.heads, -1)
    return parts.roll(places, dims=1).reshape(parameter.shape)


def _cuts(model: FunctionalModel, name: str, module: nn.Module) -> Iterator[tuple[str, Cut]]:
    """Propose how the parameters of an attention module are divided into heads."""
    places = [module, module.config] if "Attention" in type(module).__name__ and hasattr(module, "config") else [module]
    numbers = [[getattr(place, key, None) for place in places for key in keys] for keys in (_COUNTS, _KEY_COUNTS)]
    count = next((number for number in numbers[0] if isinstance(number, int) and number > 1), 0)
    few = next((number for number in numbers[1] if isinstance(number, int)), count)
    shapes = {own: shape for own, shape in zip(model.names, model.shapes, strict=True) if count}
    outer = name.removesuffix(".self")  # BERT keeps the projection of the outputs beside it
    for own, shape in shapes.items():
        if not own.startswith(f"{outer}." if outer else ""):
            continue
        path, _, kind = own.rpartition(".")
        leaf = path.removesuffix(".0").rpartition(".")[2] if path != name else kind
        owner, is_weight = model.module.get_submodule(path), kind != "bias" and "bias" not in kind
        if not isinstance(owner, nn.Linear | type(module)) and type(owner).__name__ != "Conv1D":
            continue
        is_output, is_transposed = leaf in _OUTPUTS, type(owner).__name__ == "Conv1D"
        if len(shape) == 3 and shape[0] in (count, few):
            yield own, Cut(name, 1, shape[0])
        elif is_output and is_weight and len(shape) == 2:
            yield own, Cut(name, 1 if is_transposed else shape[0], count)
        elif not is_output and len(shape) <= 2:
            size = shape[-1] if is_transposed else shape[0]
            is_key = few != count and leaf.lstrip("to_").startswith(("k", "v"))
            before = (3 if leaf in _FUSED else 1) * (shape[0] if is_transposed and is_weight else 1)
            heads = few if is_key else count
            if size % heads == 0:
                yield own, Cut(name, before, heads)
