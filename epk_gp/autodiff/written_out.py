"""Functions of torch that take many parameters at once, written out in functions that are linear in them.

A recurrent layer or an attention module is one call that takes all of its weights. Written out, each weight is that of
a linear layer, with rows first: its Jacobian can be taken layer by layer, and rows at different places of a step of the
weights share two products. `autodiff.verification` compares what comes out with the call itself.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

State = tuple[Tensor, ...]
_ATTENTION = inspect.signature(F.multi_head_attention_forward)
Cell = Callable[[Tensor, State, Sequence[Tensor]], State]


def _lstm_gates(x: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    i, f, g, o = (x + _recurrent(state[0], weights)).chunk(4, dim=1)
    c = f.sigmoid() * state[1] + i.sigmoid() * g.tanh()
    h = o.sigmoid() * c.tanh()
    return (F.linear(h, weights[-1]) if len(weights) % 2 else h), c  # an odd number: the last one is a projection


def _gru_gates(x: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    own_r, own_z, own_n = x.chunk(3, dim=1)
    r, z, n = _recurrent(state[0], weights).chunk(3, dim=1)
    new = (own_n + (own_r + r).sigmoid() * n).tanh()
    return (new + (own_z + z).sigmoid() * (state[0] - new),)


def _tanh_gates(x: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    return ((x + _recurrent(state[0], weights)).tanh(),)


def _relu_gates(x: Tensor, state: State, weights: Sequence[Tensor]) -> State:
    return (torch.relu(x + _recurrent(state[0], weights)),)


def _recurrent(h: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return F.linear(h, weights[1], weights[3] if len(weights) > 3 else None)


def _cell(gates: Cell) -> Callable[..., Any]:
    def run(x: Tensor, hidden: Any, *weights: Tensor | None) -> Any:
        held = [value for value in weights if value is not None]
        state = gates(_input(x, held), (hidden,) if isinstance(hidden, Tensor) else tuple(hidden), held)
        return state[0] if isinstance(hidden, Tensor) else state

    return run


def _input(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    return F.linear(x, weights[0], weights[2] if len(weights) > 3 else None)


def _recurrent_layers(gates: Cell) -> Callable[..., Any]:
    def run(x: Tensor, hidden: Any, flat: Any, *options: Any) -> Any:
        if isinstance(flat, Tensor) or len(options) != 6:  # packed sequences
            return NotImplemented
        _, num_layers, dropout, training, bidirectional, batch_first = options
        if training and dropout:
            return NotImplemented
        directions = 2 if bidirectional else 1
        size = len(flat) // (num_layers * directions)
        groups = [flat[k : k + size] for k in range(0, len(flat), size)]
        initial = [hidden] if isinstance(hidden, Tensor) else list(hidden)
        rows = x if batch_first else x.transpose(0, 1)
        last: list[State] = []
        for layer in range(num_layers):
            outputs = []
            for direction in range(directions):
                number = layer * directions + direction
                weights, state = groups[number], tuple(value[number] for value in initial)
                steps = _input(rows, weights).unbind(1)
                hs = []
                for step in reversed(steps) if direction else steps:
                    state = gates(step, state, weights)
                    hs.append(state[0])
                outputs.append(torch.stack(hs[::-1] if direction else hs, dim=1))
                last.append(state)
            rows = torch.cat(outputs, dim=2) if bidirectional else outputs[0]
        final = (torch.stack(values) for values in zip(*last, strict=True))
        return (rows if batch_first else rows.transpose(0, 1)), *final

    return run


def _attention(*args: Any, **kwargs: Any) -> Any:
    """Compute `F.multi_head_attention_forward` with rows first: (E, L, D) inside, (L, E, D) outside."""
    bound = _ATTENTION.bind(*args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    query, key, value = given["query"], given["key"], given["value"]
    W, b, mask, padding = (given[name] for name in ("in_proj_weight", "in_proj_bias", "attn_mask", "key_padding_mask"))
    others = any(given[name] is not None for name in ("bias_k", "bias_v", "static_k", "static_v"))
    if query.ndim != 3 or others or given["add_zero_attn"] or (given["is_causal"] and mask is None):
        return NotImplemented
    rows = query.transpose(0, 1)
    if W is not None and query is key and key is value:
        q, k, v = F.linear(rows, W, b).chunk(3, dim=2)
    else:
        separate = [given[name] for name in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
        weights = separate if W is None else W.chunk(3)
        biases = (None, None, None) if b is None else b.chunk(3)
        inputs = (rows, key.transpose(0, 1), value.transpose(0, 1))
        q, k, v = (F.linear(*layer) for layer in zip(inputs, weights, biases, strict=True))
    heads = given["num_heads"]
    q, k, v = (tensor.unflatten(2, (heads, -1)).transpose(1, 2) for tensor in (q, k, v))  # E H L d
    scores = q @ k.transpose(2, 3) / q.shape[3] ** 0.5
    for one in _masks(mask, padding, len(rows), heads):
        scores = scores.masked_fill(one, -torch.inf) if one.dtype == torch.bool else scores + one
    drops = bool(given["training"] and given["dropout_p"])
    share = F.dropout(scores.softmax(dim=3), given["dropout_p"]) if drops else scores.softmax(dim=3)
    mixed = (share @ v).transpose(1, 2).flatten(2)
    output = F.linear(mixed, given["out_proj_weight"], given["out_proj_bias"]).transpose(0, 1)
    if given["training"]:
        output = output.contiguous()  # in torch's memory order, in which dropout after it draws
    if not given["need_weights"]:
        return output, None
    return output, (share.mean(dim=1) if given["average_attn_weights"] else share)


def _masks(attn_mask: Tensor | None, key_padding_mask: Tensor | None, num_rows: int, num_heads: int) -> list[Tensor]:
    masks = []
    if attn_mask is not None:
        per_head = attn_mask.ndim == 3
        masks.append(attn_mask.view(num_rows, num_heads, *attn_mask.shape[1:]) if per_head else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None])
    return masks


# Each returns NotImplemented where it does not cover a call.
WRITTEN_OUT: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _recurrent_layers(_lstm_gates),
    torch.gru: _recurrent_layers(_gru_gates),
    torch.rnn_tanh: _recurrent_layers(_tanh_gates),
    torch.rnn_relu: _recurrent_layers(_relu_gates),
    torch.lstm_cell: _cell(_lstm_gates),
    torch.gru_cell: _cell(_gru_gates),
    torch.rnn_tanh_cell: _cell(_tanh_gates),
    torch.rnn_relu_cell: _cell(_relu_gates),
    F.multi_head_attention_forward: _attention,
}


def write_out(
    mode: AbstractContextManager[Any], function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Make a call in its written-out form, every function of which the mode sees; NotImplemented if there is none."""
    with mode:
        return WRITTEN_OUT[function](*args, **kwargs)
