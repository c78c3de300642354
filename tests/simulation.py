"""Per-sample buffers run beside an optimizer: every sample's own share of every step.

Row i of a buffer holds what training sample i put there; one more row holds what weight decay did. Only the second
moments are read from the optimizer.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer


@dataclass
class Simulation:
    """A run and the shares of its steps: `shares[s]` is (M + 1, P)."""

    net: nn.Module
    optimizer: Optimizer
    X: Tensor
    y: Tensor
    states: list[Tensor] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)
    buffers: dict[nn.Parameter, Tensor] = field(default_factory=dict)

    def step(self, batch: Tensor) -> None:
        """Train on a batch, and split the step into shares."""
        rows: dict[nn.Parameter, Tensor] = {
            p: torch.zeros(len(self.X) + 1, *p.shape, dtype=p.dtype) for p in self.net.parameters()
        }
        for i in batch.tolist():
            self.net.zero_grad()
            (F.cross_entropy(self.net(self.X[i : i + 1]), self.y[i : i + 1]) / len(batch)).backward()
            for p in rows:
                rows[p][i] += p.grad
        self.net.zero_grad()
        F.cross_entropy(self.net(self.X[batch]), self.y[batch]).backward()
        before = {p: p.detach().clone() for p in rows}
        self.states.append(torch.cat([p.flatten() for p in before.values()]))
        self.optimizer.step()
        shares = []
        for p, g in rows.items():
            group = next(group for group in self.optimizer.param_groups if any(q is p for q in group["params"]))
            share = self._share(p, before[p], g, group)
            torch.testing.assert_close(share.sum(dim=0), p.detach() - before[p], rtol=1e-9, atol=1e-14)
            shares.append(share.flatten(1))
        self.shares.append(torch.cat(shares, dim=1))

    def _share(self, p: nn.Parameter, w: Tensor, g: Tensor, group: dict) -> Tensor:
        lr, decay, state = group["lr"], group["weight_decay"], self.optimizer.state[p]
        g = -g if group["maximize"] else g
        if isinstance(self.optimizer, torch.optim.AdamW):
            share = self._adam(p, g, group)
            share[-1] -= lr * decay * w
            return share
        g[-1] += decay * w
        if isinstance(self.optimizer, torch.optim.Adam):
            return self._adam(p, g, group)
        if isinstance(self.optimizer, torch.optim.Adagrad):
            rate = lr / (1 + (float(state["step"]) - 1) * group["lr_decay"])
            return -rate * g / (state["sum"].sqrt() + group["eps"])
        mu = group["momentum"]
        if isinstance(self.optimizer, torch.optim.RMSprop):
            spread = state["square_avg"] - (state["grad_avg"] ** 2 if group["centered"] else 0)
            g = g / (spread.sqrt() + group["eps"])
            self.buffers[p] = mu * self.buffers.get(p, torch.zeros_like(g)) + g
            return -lr * self.buffers[p]
        if mu == 0:
            return -lr * g
        old = self.buffers.get(p)
        self.buffers[p] = g.clone() if old is None else mu * old + (1 - group["dampening"]) * g
        return -lr * (g + mu * self.buffers[p] if group["nesterov"] else self.buffers[p])

    def _adam(self, p: nn.Parameter, g: Tensor, group: dict) -> Tensor:
        (beta1, beta2), state = group["betas"], self.optimizer.state[p]
        self.buffers[p] = beta1 * self.buffers.get(p, torch.zeros_like(g)) + (1 - beta1) * g
        count = float(state["step"])
        v = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"] / (1 - beta2**count)
        return -group["lr"] * self.buffers[p] / (1 - beta1**count) / (v.sqrt() + group["eps"])
