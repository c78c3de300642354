import math
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk


class ModelOutput(OrderedDict):  # as in transformers
    __getattr__ = OrderedDict.__getitem__


class Encoder(nn.Module):
    def __init__(self, vocabulary, length, dim=8, dropout=0.1):
        super().__init__()
        self.words, self.positions = (
            nn.Embedding(vocabulary, dim, padding_idx=0),
            nn.Embedding(length, dim),
        )
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(dim) for _ in range(3))
        self.query, self.key, self.value, self.dense = (
            nn.Linear(dim, dim) for _ in range(4)
        )
        self.intermediate, self.output = nn.Linear(dim, 16), nn.Linear(16, dim)
        self.pooler, self.classifier = nn.Linear(dim, dim), nn.Linear(dim, 2)
        self.dropout = nn.Dropout(dropout)

    def forward(self, input_ids, attention_mask=None):
        x = self.words(input_ids) + self.positions(torch.arange(input_ids.shape[1]))
        x = self.dropout(self.norm1(x))
        scores = self.query(x) @ self.key(x).mT / math.sqrt(x.shape[-1])
        if attention_mask is not None:
            scores = scores.masked_fill(attention_mask[:, None, :] == 0, -1e9)
        x = self.norm2(
            x
            + self.dropout(
                self.dense(self.dropout(scores.softmax(dim=-1)) @ self.value(x))
            )
        )
        x = self.norm3(x + self.dropout(self.output(F.gelu(self.intermediate(x)))))
        return ModelOutput(
            logits=self.classifier(self.dropout(torch.tanh(self.pooler(x[:, 0]))))
        )


torch.manual_seed(0)
input_ids = torch.randint(1, 12, (32, 6))
input_ids = input_ids * (torch.arange(6) < torch.randint(3, 7, (32, 1)))
encoded = {"input_ids": input_ids, "attention_mask": (input_ids != 0).long()}
labels = (input_ids == 5).any(dim=1).long()


def logits_of(returned):
    return returned.logits  # recorder


net = Encoder(12, 6).double()
optimizer = torch.optim.AdamW(net.parameters(), lr=5e-3, weight_decay=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 8)
recorder = epk.Recorder(net, optimizer, encoded, labels, output=logits_of)  # recorder
with recorder:  # recorder
    net.train()
    for epoch in range(2):
        for rows in torch.randperm(32).split(8):
            batch = {name: value[rows] for name, value in encoded.items()}
            loss = F.cross_entropy(net(**batch).logits, labels[rows])
            loss.backward()
            recorder.batch(rows)  # recorder
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
X_test = {name: value[:2] for name, value in encoded.items()}
