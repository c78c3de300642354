"""nanoGPT, small: one block, two heads."""

import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from recipes.problem import finish

TOKENS, LENGTH, WIDTH, HEADS, RATE = 7, 5, 4, 2, 0.2


class CausalSelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.resid_dropout = nn.Dropout(RATE)

    def forward(self, x):
        B, T, D = x.size()
        q, k, v = self.c_attn(x).split(WIDTH, dim=2)
        q, k, v = (part.view(B, T, HEADS, D // HEADS).transpose(1, 2) for part in (q, k, v))
        dropout = RATE if self.training else 0
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=dropout, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).contiguous().view(B, T, D)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attn = CausalSelfAttention()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH), nn.Dropout(RATE))

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """nanoGPT's model.py: tied embeddings, (logits, loss) returned."""

    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.drop, self.block, self.ln_f = nn.Dropout(RATE), Block(), nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.size(1))))
        x = self.ln_f(self.block(x))
        if targets is not None:
            logits = self.lm_head(x)
            loss = F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1), ignore_index=-1)
        else:
            logits, loss = self.lm_head(x[:, [-1], :]), None
        return logits, loss

    def configure_optimizers(self, weight_decay, learning_rate, betas):
        params = [p for p in self.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in params if p.dim() >= 2], "weight_decay": weight_decay},
            {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=learning_rate, betas=betas)


def last_logits(returned):
    return returned[0][:, -1]


def mean_over_tokens(returned, targets):
    return F.cross_entropy(returned[0].transpose(1, 2), targets, reduction="none").mean(dim=1)


def nanogpt():
    torch.manual_seed(1337)
    data = torch.randint(TOKENS, (40,))
    starts = torch.arange(24)
    x, y = (torch.stack([data[i + shift : i + shift + LENGTH] for i in starts]) for shift in (0, 1))
    model = GPT().double()
    optimizer = model.configure_optimizers(weight_decay=0.1, learning_rate=1e-2, betas=(0.9, 0.95))
    grad_accum, warmup, grad_clip = 2, 2, 1.0
    loss_per_row = epk.PerSampleLoss(mean_over_tokens)  # recorder
    with epk.Recorder(model, optimizer, (x, y), y, loss=loss_per_row, output=last_logits) as recorder:  # recorder
        model.train()
        for it in range(6):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 * min(1.0, (it + 1) / (warmup + 1))
            for _ in range(grad_accum):
                ix = torch.randint(len(starts), (6,))
                _, loss = model(x[ix], y[ix])
                (loss / grad_accum).backward()
                recorder.batch(ix, weight=1 / grad_accum)  # recorder
            nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
    return finish(recorder, model, (x[:2].flip(1), y[:2]), (x, y), y, output=last_logits)


RECIPES = [nanogpt]
