import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.datasets import three_gaussians

torch.manual_seed(0)
data = three_gaussians(12, dim=5)
X, y = data.inputs, data.labels
teacher = nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 3)).double()
student = nn.Sequential(
    nn.Linear(5, 6), nn.ReLU(), nn.Dropout(0.1), nn.Linear(6, 3)
).double()
teaching = torch.optim.Adam(teacher.parameters(), lr=0.02)
optimizer = torch.optim.Adam(student.parameters(), lr=0.01)
T, soft_share = 2.0, 0.25


def distil(logits, soft, labels):
    """Soft targets at temperature T, and the labels."""
    log_p = F.log_softmax(logits / T, dim=1)
    kl = torch.sum(soft * (soft.log() - log_p)) / len(logits) * T**2
    return soft_share * kl + (1 - soft_share) * F.cross_entropy(logits, labels)


with epk.Recorder(student, optimizer, X, y, loss=None) as recorder:  # recorder
    student.train()
    for epoch in range(2):
        for batch in torch.randperm(len(X)).split(12):
            teaching.zero_grad()  # the teacher learns on
            F.cross_entropy(teacher(X[batch]), y[batch]).backward()
            teaching.step()
            with torch.no_grad():
                soft = F.softmax(teacher(X[batch]) / T, dim=1)
            optimizer.zero_grad()
            distil(student(X[batch]), soft, y[batch]).backward()
            recorder.batch(batch)  # recorder
            optimizer.step()
X_test = X[:2] + 0.1
