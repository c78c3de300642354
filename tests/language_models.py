"""Language models in miniature, as people write them: by hand as nanoGPT and Llama do, and by transformers."""

import math
from collections.abc import Callable
from typing import Any

import peft
import torch
import transformers as tr
from torch import Tensor, nn
from torch.nn import functional as F

WORDS, LENGTH, WIDTH, HEADS = 13, 6, 16, 4
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def softmax_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T = q.shape[2]
    scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
    scores = scores.masked_fill(torch.tril(torch.ones(T, T)).view(1, 1, T, T) == 0, float("-inf"))
    return F.dropout(F.softmax(scores, dim=-1), 0.1, training=False) @ v


def where_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T = q.shape[2]
    scores = torch.matmul(q, k.mT) / k.shape[-1] ** 0.5
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    scores = torch.where(causal, scores, torch.full([], torch.finfo(scores.dtype).min, dtype=scores.dtype))
    return torch.matmul(nn.functional.softmax(scores, dim=-1).type_as(v), v)


def added_mask_and_capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T = q.shape[2]
    scores = 5.0 * torch.tanh(torch.einsum("bhid,bhjd->bhij", q, k) / 5.0)
    scores = scores + torch.full((T, T), float("-inf"), dtype=q.dtype).triu(1)
    return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)


def exponentials_by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    T = q.shape[2]
    scores = (q @ k.mT / 4).exp() * torch.ones(T, T, dtype=q.dtype).tril()
    return (scores / scores.sum(dim=-1, keepdim=True)) @ v


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def causal_by_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, scale=0.3)


class NanoBlock(nn.Module):
    def __init__(self, attention: Attention, *, bias: bool) -> None:
        super().__init__()
        self.attention, self.bias = attention, bias
        self.ln_1, self.ln_2 = (nn.LayerNorm(WIDTH, bias=bias) for _ in range(2))
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH, bias=bias), nn.Linear(WIDTH, WIDTH, bias=bias)
        self.c_fc, self.gelu, self.out = nn.Linear(WIDTH, 2 * WIDTH, bias=bias), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = self.c_attn(self.ln_1(x)).split(C, dim=2)
        q, k, v = (y.view(B, T, HEADS, C // HEADS).transpose(1, 2) for y in (q, k, v))
        y = self.attention(q, k, v).transpose(1, 2).contiguous().view(B, T, C)
        x = x + self.drop(self.c_proj(y))
        return x + self.drop(self.out(self.gelu(self.c_fc(self.ln_2(x)))))


class NanoGPT(nn.Module):
    """As Karpathy writes it; `positions` says how places are embedded."""

    def __init__(
        self, attention: Attention = causal, *, bias: bool = True, tied: bool = True, positions: str = "embedding"
    ) -> None:
        super().__init__()
        self.wte, self.positions = nn.Embedding(WORDS, WIDTH), positions
        if positions == "embedding":
            self.wpe = nn.Embedding(LENGTH + 2, WIDTH)
        else:
            shape = (1, LENGTH, WIDTH) if positions == "parameter" else (LENGTH + 2, WIDTH)
            self.pos = nn.Parameter(0.3 * torch.randn(shape))
        self.first = nn.Parameter(torch.randn(1, 1, WIDTH)) if positions == "class" else None
        self.drop = nn.Dropout(0.1)
        self.h = nn.ModuleList([NanoBlock(attention, bias=bias) for _ in range(2)])
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH, bias=bias), nn.Linear(WIDTH, WORDS, bias=False)
        if tied:
            self.wte.weight = self.lm_head.weight

    def forward(self, idx: Tensor) -> Tensor:
        _, t = idx.size()
        x = self.wte(idx)
        if self.positions == "embedding":
            x = x + self.wpe(torch.arange(0, t, dtype=torch.long, device=idx.device))
        elif self.positions == "class":
            x = torch.cat([self.first.expand(len(x), -1, -1), x], dim=1) + self.pos[: t + 1]
        else:
            x = x + (self.pos if self.positions == "parameter" else self.pos[:t])
        x = self.drop(x)
        for block in self.h:
            x = block(x)
        return self.lm_head(self.ln_f(x)[:, [-1], :]).squeeze(1)


class RMSNorm(nn.Module):
    def __init__(self, width: int, *, by_hand: bool) -> None:
        super().__init__()
        self.weight, self.by_hand = nn.Parameter(torch.linspace(0.5, 1.5, width)), by_hand

    def forward(self, x: Tensor) -> Tensor:
        if not self.by_hand:
            return F.rms_norm(x, (x.shape[-1],), self.weight, 1e-5)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * self.weight


def rotated(x: Tensor) -> Tensor:
    d = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[2]), 0.1 ** torch.arange(d)).to(x.dtype).repeat(1, 2)
    return x * angles.cos() + torch.cat([-x[..., d:], x[..., :d]], dim=-1) * angles.sin()


def rotated_as_complex(x: Tensor) -> Tensor:
    d = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[2]), 0.1 ** torch.arange(d)).to(x.dtype)
    numbers = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(numbers).flatten(3).type_as(x)


class Llama(nn.Module):
    """As Meta writes it, with one block; `groups` says how keys and values are shared by heads."""

    def __init__(
        self, rotate: Callable[[Tensor], Tensor] = rotated, *, groups: str = "repeat_interleave", by_hand: bool = True
    ) -> None:
        super().__init__()
        self.rotate, self.groups = rotate, groups
        self.tok_embeddings, self.output = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.attention_norm, self.ffn_norm, self.norm = (RMSNorm(WIDTH, by_hand=by_hand) for _ in range(3))
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = nn.Linear(WIDTH, WIDTH // 2, bias=False), nn.Linear(WIDTH, WIDTH // 2, bias=False)
        self.w1, self.w3 = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.w2 = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], -1, WIDTH // HEADS).transpose(1, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.tok_embeddings(tokens)
        x = self.attention_norm(h)
        q, k, v = self.rotate(self.heads(self.wq(x))), self.rotate(self.heads(self.wk(x))), self.heads(self.wv(x))
        options = {"enable_gqa": True} if self.groups == "enable_gqa" else {}
        if self.groups == "repeat_interleave":
            k, v = (y.repeat_interleave(2, dim=1) for y in (k, v))
        elif self.groups == "expand":
            k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for y in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
        h = h + self.wo(y.transpose(1, 2).reshape(h.shape))
        x = self.ffn_norm(h)
        return self.output(self.norm(h + self.w2(F.silu(self.w1(x)) * self.w3(x))))[:, -1]


class Experts(nn.Module):
    """Each place goes to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.router = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, 2)
        self.experts, self.head = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)]), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        weights, chosen = (y.flatten(0, 1) for y in self.router(x).softmax(-1).topk(1, dim=-1))
        x = x.flatten(0, 1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (places,) = torch.where(chosen[:, 0] == number)
            mixed = mixed.index_add(0, places, weights[places] * expert(x[places]))
        return self.head(mixed.view(*tokens.shape, WIDTH)[:, -1])


class Of(nn.Module):
    """What a network of transformers says of the last word, or of the class."""

    def __init__(self, net: nn.Module, *, is_masked: bool = False) -> None:
        super().__init__()
        self.net, self.is_masked = net, is_masked

    def forward(self, tokens: Tensor) -> Tensor:
        options = {"attention_mask": (tokens > 0).long()} if self.is_masked else {}
        logits: Tensor = self.net(input_ids=tokens, **options).logits
        return logits[:, -1] if logits.ndim == 3 else logits


def _sizes(attention: str, **others: Any) -> dict[str, Any]:
    names = {"vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": HEADS}
    return {**names, "intermediate_size": 2 * WIDTH, "attn_implementation": attention, **others}


def gpt2(attention: str) -> nn.Module:
    sizes = {"vocab_size": WORDS, "n_positions": LENGTH + 2, "n_embd": WIDTH, "n_layer": 2, "n_head": HEADS}
    return Of(tr.GPT2LMHeadModel(tr.GPT2Config(**sizes, attn_implementation=attention)))


def llama_like(name: str, attention: str) -> nn.Module:
    config = getattr(tr, f"{name}Config")(**_sizes(attention, num_key_value_heads=2))
    return Of(getattr(tr, f"{name}ForCausalLM")(config))


def gemma(attention: str) -> nn.Module:
    options = {"num_key_value_heads": 2, "head_dim": 4, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0}
    return Of(tr.Gemma2ForCausalLM(tr.Gemma2Config(**_sizes(attention, sliding_window=4, pad_token_id=0, **options))))


def bert(attention: str, *, lora: bool = False) -> nn.Module:
    config = tr.BertConfig(**_sizes(attention, max_position_embeddings=LENGTH + 2, num_labels=3))
    net: Any = tr.BertForSequenceClassification(config)
    if lora:
        options = {"r": 2, "target_modules": ["query", "value"], "lora_dropout": 0.1, "task_type": "SEQ_CLS"}
        net = peft.get_peft_model(net, peft.LoraConfig(**options, init_lora_weights=False))
    return Of(net, is_masked=True)


BY_HAND: dict[str, Callable[[], nn.Module]] = {
    "nanoGPT": NanoGPT,
    "nanoGPT without flash": lambda: NanoGPT(softmax_by_hand, bias=False),
    "nanoGPT not tied": lambda: NanoGPT(causal_by_mask, tied=False),
    "positions as a parameter": lambda: NanoGPT(where_masked, positions="parameter"),
    "slices of positions": lambda: NanoGPT(added_mask_and_capped, positions="slice"),
    "a learned token": lambda: NanoGPT(exponentials_by_hand, positions="class"),
    "Llama": Llama,
    "Llama with complex numbers": lambda: Llama(rotated_as_complex, groups="expand"),
    "Llama with torch's functions": lambda: Llama(groups="enable_gqa", by_hand=False),
}
BY_TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    f"{name} {attention}": (lambda make=make, attention=attention: make(attention))
    for name, make in {
        "GPT-2": gpt2,
        "Llama": lambda attention: llama_like("Llama", attention),
        "Mistral": lambda attention: llama_like("Mistral", attention),
        "Qwen2": lambda attention: llama_like("Qwen2", attention),
        "Gemma2": gemma,
        "BERT": bert,
        "BERT with LoRA": lambda attention: bert(attention, lora=True),
    }.items()
    for attention in ("sdpa", "eager")
    if (make, attention) != (gemma, "sdpa")
}
