import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk


class Attention(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.resid_dropout = nn.Dropout(dropout)
        self.heads, self.dropout = heads, dropout

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (
            part.view(B, T, self.heads, -1).transpose(1, 2)
            for part in self.c_attn(x).split(D, dim=2)
        )
        rate = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        return self.resid_dropout(self.c_proj(y.transpose(1, 2).reshape(B, T, D)))


class Block(nn.Module):
    def __init__(self, dim, heads, dropout):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim, heads, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(dim, 4 * dim),
            nn.GELU(),
            nn.Linear(4 * dim, dim),
            nn.Dropout(dropout),
        )

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, vocabulary, length, dim=8, heads=2, dropout=0.1):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.drop, self.block, self.ln_f = (
            nn.Dropout(dropout),
            Block(dim, heads, dropout),
            nn.LayerNorm(dim),
        )
        self.lm_head = nn.Linear(dim, vocabulary, bias=False)
        self.wte.weight = self.lm_head.weight  # tied

    def forward(self, idx, targets=None):
        x = self.drop(self.wte(idx) + self.wpe(torch.arange(idx.shape[1])))
        logits = self.lm_head(self.ln_f(self.block(x)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(
            logits.view(-1, logits.shape[-1]), targets.view(-1)
        )


text = (
    "to be or not to be that is the question whether tis nobler in the mind to suffer"
)
letters = sorted(set(text))
tokens = torch.tensor([letters.index(letter) for letter in text])
block_size = 8
x = torch.stack([tokens[i : i + block_size] for i in range(60)])
y = torch.stack([tokens[i + 1 : i + 1 + block_size] for i in range(60)])

torch.manual_seed(1337)
net = GPT(len(letters), block_size).double()
groups = [
    {"params": [p for p in net.parameters() if p.dim() >= 2], "weight_decay": 0.1},
    {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0},
]
optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95))
accumulated, warmup, clip = 2, 3, 1.0


def last_letter(returned):
    return returned[0][:, -1]  # recorder: logits of the letter after the sequence


def loss_of_sequence(returned, targets):
    losses = F.cross_entropy(returned[0].transpose(1, 2), targets, reduction="none")
    return losses.mean(dim=1)


loss_fn = epk.PerSampleLoss(loss_of_sequence)  # recorder
how = {"loss": loss_fn, "output": last_letter}  # recorder
recorder = epk.Recorder(net, optimizer, (x, y), y, **how)  # recorder
with recorder:  # recorder
    net.train()
    for iteration in range(8):
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, (iteration + 1) / warmup)
        for _ in range(accumulated):
            ix = torch.randint(len(x), (8,))
            _, loss = net(x[ix], y[ix])
            (loss / accumulated).backward()
            recorder.batch(ix, weight=1 / accumulated)  # recorder
        nn.utils.clip_grad_norm_(net.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
X_test = x[:1], y[:1]
