"""Attention heads: which entries of a network's parameters belong to which of them."""

import re
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
_BY_HEAD = "query_key_value"  # the three of one head after those of another
_ONE = re.compile(r"(to_|w_?)?(q|k|v|query|key|value)(_?proj|_?lin|_?linear)?(_weight)?", re.IGNORECASE)
_OUTPUTS = ("out_proj", "o_proj", "c_proj", "proj", "proj_out", "to_out", "out", "out_lin", "wo", "dense", "W_O", "w_o")


@dataclass(frozen=True)
class Cut:
    """How the entries of a parameter are divided into heads: as (before, heads, rest).

    Attributes:
        module: The attention module.
        before: How many times all heads follow each other.
        heads: The heads.
        role: What it is the projection of: "q", "k", "v", "qkv" or "out"; "" where it is not known.
        size: Numbers of a head in the projection; 0 where they are not tried.
    """

    module: str
    before: int
    heads: int
    role: str = ""
    size: int = 0


def cuts_of(layout: HeadLayout, model: FunctionalModel) -> dict[str, Cut]:
    """Return the cut of each parameter that a layout names.

    Raises:
        TypeError: A layout is no pair of whole numbers.
        ValueError: There is no such parameter, or it cannot be divided so.
    """
    shapes, found = dict(zip(model.names, model.shapes, strict=True)), dict[str, Cut]()
    for module, parameters in layout.items():
        for own, pair in parameters.items():
            if not isinstance(pair, tuple) or len(pair) != 2 or not all(isinstance(n, int) for n in pair):
                raise TypeError(f"heads must say (before, heads) for each parameter, two whole numbers: got {pair!r}.")
            name, (before, heads) = f"{module}.{own}".lstrip("."), pair
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

    What is found is tried. Heads that change places, in all parameters of a module alike, must leave the outputs as
    they are; so must numbers that change places within a head, in its values and in the projection of the outputs.
    Modules of which that is not true are left out, as those with a bias of each head for positions.
    """
    found, P = dict[str, Cut](), model.num_weights
    wave = torch.arange(P, dtype=state.dtype, device=state.device).sin()  # a projection may be 0 still
    params = model.unflatten(torch.cat([state[:P] + 0.02 * wave, state[P:]]))
    with torch.no_grad(), disable_fused_attention():
        z = model(params, X)
        allowed = max(torch.finfo(z.dtype).eps ** 0.5, 1e-6) * float(z.abs().max())  # casts to float32 are usual
        for name, module in reversed(list(model.module.named_modules())):  # inner ones first
            cuts = {own: cut for own, cut in _cuts(model, name, module) if own not in found}
            roles = {cut.role for cut in cuts.values()}
            least = gcd(*(cut.heads for cut in cuts.values())) if cuts else 0
            if least < 2 or "out" not in roles or not ({"qkv"} <= roles or {"q", "k", "v"} <= roles):
                continue
            tries = (
                {own: _rolled(params[own], cut, cut.heads // least) for own, cut in cuts.items()},
                {own: _mixed(params[own], cut, cut.heads // least) for own, cut in cuts.items() if cut.size},
            )
            if all(float((model({**params, **moved}, X) - z).abs().max()) <= allowed for moved in tries):
                found |= cuts
    return found


def _rolled(parameter: Tensor, cut: Cut, places: int) -> Tensor:
    parts = parameter.reshape(cut.before, cut.heads, -1)
    return parts.roll(places, dims=1).reshape(parameter.shape)


def _mixed(parameter: Tensor, cut: Cut, count: int) -> Tensor:
    """Let the numbers of the first heads change places, in the values and the projection of the outputs."""
    parts = parameter.clone().reshape(cut.before, cut.heads, cut.size, -1)
    values = parts[2::3] if cut.role == "qkv" else parts
    values[:, :count] = values[:, :count].roll(1, dims=2)
    return parts.reshape(parameter.shape)


def _cuts(model: FunctionalModel, name: str, module: nn.Module) -> Iterator[tuple[str, Cut]]:
    """Propose how the parameters of an attention module are divided into heads."""
    places = [module, module.config] if "Attention" in type(module).__name__ and hasattr(module, "config") else [module]
    numbers = [[getattr(place, key, None) for place in places for key in keys] for keys in (_COUNTS, _KEY_COUNTS)]
    count = next((number for number in numbers[0] if isinstance(number, int) and number > 1), 0)
    few = next((number for number in numbers[1] if isinstance(number, int)), count)
    outer = name.removesuffix(".self")  # BERT keeps the projection of the outputs beside it
    for own, shape in zip(model.names, model.shapes, strict=True):
        path, _, kind = own.rpartition(".")
        if not count or not own.startswith(f"{outer}." if outer else ""):
            continue
        owner, is_weight = model.module.get_submodule(path), "bias" not in kind
        leaf = kind if path == name else path.removesuffix(".0").rpartition(".")[2]
        is_transposed, one = type(owner).__name__ == "Conv1D", _ONE.fullmatch(leaf)
        is_layer = isinstance(owner, nn.Linear | type(module)) or is_transposed
        role = "qkv" if leaf in (*_FUSED, _BY_HEAD) else one[2][0].lower() if one else "out" * (leaf in _OUTPUTS)
        if not is_layer or not role or not (is_weight or role != "out"):
            continue
        heads = few if role in ("k", "v") else count
        if len(shape) == 3 and shape[0] == heads:
            yield own, Cut(name, 1, heads, role)
            continue
        inputs, width = (shape[0], shape[-1]) if is_transposed else (shape[-1], shape[0])
        repeats = 3 if role == "qkv" and leaf != _BY_HEAD else 1
        size, left = divmod(inputs if role == "out" else width, repeats * heads)
        if left or len(shape) > 2:
            continue
        before = repeats * (inputs if is_transposed and is_weight else 1)
        if role == "out":
            before = 1 if is_transposed else width
        yield own, Cut(name, before, heads, role, size if role in ("v", "out") or repeats == 3 else 0)
