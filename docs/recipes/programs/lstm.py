import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(12, 6, padding_idx=0)
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(8, 2)

    def forward(self, tokens):
        states, _ = self.lstm(self.dropout(self.embedding(tokens)))
        last = (tokens != 0).sum(dim=1) - 1
        return self.fc(self.dropout(states[torch.arange(len(tokens)), last]))


torch.manual_seed(0)
tokens = torch.randint(1, 12, (40, 7))
tokens = tokens * (torch.arange(7) < torch.randint(3, 8, (40, 1)))  # 0 is padding
labels = (tokens == 5).any(dim=1).long()

net = Classifier().double()
optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
with epk.Recorder(net, optimizer, tokens, labels) as recorder:  # recorder
    net.train()
    for epoch in range(2):
        for batch in torch.randperm(40).split(10):
            optimizer.zero_grad()
            F.cross_entropy(net(tokens[batch]), labels[batch]).backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            recorder.batch(batch)  # recorder
            optimizer.step()
X_test = tokens[:3]
