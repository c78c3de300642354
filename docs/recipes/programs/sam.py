import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.datasets import three_gaussians


class SAM(torch.optim.Optimizer):
    """Climb to the worst weights nearby, and step by the gradient there."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        weights = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in weights]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old_p"] = p.data.clone()
                p.add_(p.grad * group["rho"] / (norm + 1e-12))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        if zero_grad:
            self.zero_grad()


torch.manual_seed(0)
data = three_gaussians(12, dim=5)
X, y = data.inputs, data.labels
net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()
optimizer = SAM(net.parameters(), torch.optim.SGD, rho=0.1, lr=0.1, momentum=0.9)
with epk.Recorder(net, optimizer, X, y) as recorder:  # recorder
    net.train()
    for epoch in range(2):
        for batch in torch.randperm(len(X)).split(12):
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            optimizer.first_step(zero_grad=True)
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)  # recorder
            optimizer.second_step(zero_grad=True)
X_test = X[:2] + 0.1
