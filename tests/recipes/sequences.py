"""Token and transformer recipes: a GPT, a BERT, a vision transformer with drop path, checkpointing."""

import math
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import epk_gp as epk
from recipes.problem import C, finish, images, sentences, train

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


class ModelOutput(OrderedDict):
    """A dictionary with attributes, as transformers' models return it."""

    __getattr__ = OrderedDict.__getitem__


class Bert(nn.Module):
    """A sequence classifier: embeddings, one layer of attention under a mask, a pooler, dropout."""

    def __init__(self, dim=4, dropout=0.1):
        super().__init__()
        self.words, self.positions = nn.Embedding(9, dim, padding_idx=0), nn.Embedding(6, dim)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.query, self.key, self.value, self.dense = (nn.Linear(dim, dim) for _ in range(4))
        self.intermediate, self.output = nn.Linear(dim, 8), nn.Linear(8, dim)
        self.pooler, self.classifier = nn.Linear(dim, dim), nn.Linear(dim, C)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids, attention_mask=None):
        x = self.dropout(self.norm1(self.words(input_ids) + self.positions(torch.arange(input_ids.shape[1]))))
        scores = self.query(x) @ self.key(x).mT / math.sqrt(x.shape[-1])
        if attention_mask is not None:
            scores = scores + (1.0 - attention_mask[:, None, :].to(scores)) * torch.finfo(scores.dtype).min
        mixed = self.dropout(scores.softmax(dim=-1)) @ self.value(x)
        x = self.norm2(x + self.dropout(self.dense(mixed)))
        x = self.norm3(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))
        pooled = torch.tanh(self.pooler(x[:, 0]))
        return ModelOutput(logits=self.classifier(self.dropout(pooled)), hidden_states=None)


def logits_of(returned):
    return returned.logits


def bert():
    tokens, labels = sentences(24)
    encoded = {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
    model = Bert().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 6)

    def loss(rows):
        outputs = model(**{name: value[rows] for name, value in encoded.items()})
        return F.cross_entropy(outputs.logits, labels[rows])

    X_test = {name: value[:2].flip(0) for name, value in encoded.items()}
    options = {"optimizer": optimizer, "after_step": scheduler.step, "output": logits_of}
    return train(model, encoded, labels, X_test, loss, **options)


class DropPath(nn.Module):
    """Stochastic depth as in timm: one branch is left out for whole samples."""

    def __init__(self, rate):
        super().__init__()
        self.rate = rate

    def forward(self, x):
        if not self.training:
            return x
        kept = 1 - self.rate
        mask = x.new_empty((x.shape[0],) + (1,) * (x.ndim - 1)).bernoulli_(kept)
        return x * mask.div_(kept)


class ViTBlock(nn.Module):
    def __init__(self, dim, rate):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, dropout=0.1, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(dim, 8), nn.GELU(), nn.Linear(8, dim))
        self.drop_path = DropPath(rate)

    def forward(self, x):
        h = self.norm1(x)
        x = x + self.drop_path(self.attn(h, h, h, need_weights=False)[0])
        return x + self.drop_path(self.mlp(self.norm2(x)))


class ViT(nn.Module):
    def __init__(self, *, dim=4, depth=2, checkpointed=False):
        super().__init__()
        self.patches = nn.Conv2d(1, dim, 3, stride=3)
        self.cls = nn.Parameter(torch.zeros(1, 1, dim))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 5, dim))
        self.blocks = nn.ModuleList([ViTBlock(dim, 0.1 * (i + 1)) for i in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, C)
        self.checkpointed = checkpointed

    def forward(self, x):
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], dim=1) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.checkpointed and self.training else block(x)
        return self.head(self.norm(x)[:, 0])


def train_vit(net):
    X, y = images(16)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01, weight_decay=0.05)
    criterion = nn.CrossEntropyLoss(label_smoothing=0.1)
    X_test = images(17)[0][16:]
    return train(net, X, y, X_test, lambda b: criterion(net(X[b]), y[b]), optimizer=optimizer, loss=criterion)


def vit():
    return train_vit(ViT().double())


def checkpointing():
    return train_vit(ViT(depth=1, checkpointed=True).double())


RECIPES = [nanogpt, bert, vit, checkpointing]
