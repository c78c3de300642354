"""The steps of an odd loop, split into the shares of its samples by hand: for optimizers that are linear in gradients.

Nothing here is of the package. Shares are pushed through momentum and the recorded scales of the optimizer, and
integrated along the steps by Gauss-Legendre.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from odd_loops import OddLoop
from odd_parts import CLASSES, LINEAR, POINTS
from torch import Tensor, nn


@dataclass
class ByHand:
    """A loop whose steps are split by hand into shares of the samples."""

    loop: OddLoop
    average: float | None = None  # coefficient a of the average of the weights; None for the trained weights

    def __post_init__(self) -> None:
        self.grads: dict[str, Tensor] = {}
        self.buffers: dict[str, Tensor] = {}
        self.before: dict[str, Tensor] = {}
        self.states: list[dict[str, Tensor]] = []
        self.shares: list[dict[str, Tensor]] = []
        self.rates: list[float] = []
        self.net = self.loop.run(watch=self).net.eval()

    def begin(self, net: nn.Module) -> None:
        self.states.append(state_of(net))
        self._clear(net)

    def gradients(self, net: nn.Module, batch: Tensor, terms: Tensor) -> None:
        trained = {name: p for name, p in net.named_parameters() if p.requires_grad}
        for i, term in zip(batch.tolist(), terms, strict=True):
            own = torch.autograd.grad(term, list(trained.values()), retain_graph=True, allow_unused=True)
            for name, g in zip(trained, own, strict=True):
                if g is not None:
                    self.grads[name][i] += g

    def before_step(self, net: nn.Module) -> None:
        self.before = {name: p.detach().clone() for name, p in net.named_parameters()}

    def after_step(self, net: nn.Module, optimizers: list[torch.optim.Optimizer]) -> None:
        names = {id(p): name for name, p in net.named_parameters()}
        shares = {name: torch.zeros_like(torch.cat([g, g[:1]])) for name, g in self.grads.items()}
        self.rates.append(optimizers[0].param_groups[0]["lr"])
        for optimizer in optimizers:
            kind = type(optimizer).__name__
            for group in optimizer.param_groups if kind in LINEAR else []:
                for p in group["params"]:
                    if p.grad is not None:
                        shares[names[id(p)]] = self._share(kind, group, optimizer.state[p], names[id(p)], p)
        self.shares.append(shares)
        self.states.append(state_of(net))
        self._clear(net)

    def _clear(self, net: nn.Module) -> None:
        self.grads = {name: p.new_zeros(POINTS, *p.shape).detach() for name, p in net.named_parameters()}

    def _share(self, kind: str, group: dict[str, Any], state: dict[str, Any], name: str, p: Tensor) -> Tensor:
        """Return the shares of samples, and of weight decay, of a step of a parameter."""
        g, w = self.grads[name], self.before[name]
        total = g.sum(dim=0)
        factor = torch.where(total == 0, 1.0, p.grad / total)  # of clipping
        h = torch.cat([g * factor * (-1 if group["maximize"] else 1), (group["weight_decay"] * w)[None]])
        decoupled = torch.zeros_like(h)
        lr = float(group["lr"])
        if kind == "AdamW":
            h[-1] = 0
            decoupled[-1] = -lr * group["weight_decay"] * w
        if kind == "SGD":
            if not group["momentum"]:
                return -lr * h
            m = h if name not in self.buffers else group["momentum"] * self.buffers[name] + (1 - group["dampening"]) * h
            self.buffers[name] = m
            return -lr * (h + group["momentum"] * m if group["nesterov"] else m)
        if kind in ("Adam", "AdamW"):
            b1, b2 = group["betas"]
            t = float(state["step"])
            m = b1 * self.buffers.get(name, torch.zeros_like(h)) + (1 - b1) * h
            self.buffers[name] = m
            v = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
            return decoupled - lr / (1 - b1**t) * m / ((v / (1 - b2**t)).sqrt() + group["eps"])
        if kind == "RMSprop":
            v = state["square_avg"] - (state["grad_avg"].square() if group["centered"] else 0)
            h = h / (v.sqrt() + group["eps"])
            if group["momentum"] > 0:
                h = group["momentum"] * self.buffers.get(name, torch.zeros_like(h)) + h
                self.buffers[name] = h
            return -lr * h
        rate = lr / (1 + (float(state["step"]) - 1) * group["lr_decay"])
        return -rate * h / (state["sum"].sqrt() + group["eps"])

    def averaged(self) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
        """Return the states of the path, and the shares of its steps."""
        if self.average is None:
            return self.states, self.shares
        a, path = self.average, [self.states[0]]
        lead: dict[str, Tensor] = {name: torch.zeros_like(d) for name, d in self.shares[0].items()}
        shares = []
        for state, made in zip(self.states[1:], self.shares, strict=True):
            path.append({n: (1 - a) * path[-1][n] + a * v if n in made else v for n, v in state.items()})
            shares.append({name: a * (d + lead[name]) for name, d in made.items()})
            lead = {name: (1 - a) * (d + lead[name]) for name, d in made.items()}
        return path, shares

    def outputs(self, state: dict[str, Tensor], X: Tensor, head: str) -> Tensor:
        z = torch.func.functional_call(self.net, state, (X,))
        return z.log_softmax(dim=1) if head == "log_softmax" else z

    def ends(self, X: Tensor, head: str) -> Tensor:
        """Return the outputs at the end of the path."""
        return self.outputs(self.averaged()[0][-1], X, head).detach()

    def jacobian(self, state: dict[str, Tensor], X: Tensor, head: str) -> dict[str, Tensor]:
        """Return the derivatives of the outputs in the parameters, (n, C, ...)."""
        leaves = {name: value.detach() for name, value in state.items()}
        leaves |= {name: leaves[name].clone().requires_grad_() for name in self.shares[0]}
        f = self.outputs(leaves, X, head)
        wanted = [leaves[name] for name in self.shares[0]]
        rows = [torch.autograd.grad(v, wanted, retain_graph=True, materialize_grads=True) for v in f.flatten()]
        return {
            name: torch.stack(column).reshape(*f.shape, *column[0].shape)
            for name, column in zip(self.shares[0], zip(*rows, strict=True), strict=True)
        }

    def contributions(self, X: Tensor, head: str, num_nodes: int, every: int) -> Tensor:
        """Return the shares of samples and weight decay of each output, and the output, (n, C, M + 2)."""
        states, shares = self.averaged()
        total = torch.zeros(len(X), CLASSES, POINTS + 1, dtype=torch.float64)
        for first in range(0, len(shares), every):
            start, end = states[first], states[min(first + every, len(shares))]
            moved = {n: sum(made[n] for made in shares[first : first + every]) for n in shares[0]}
            for t, weight in nodes(num_nodes):
                J = self.jacobian({n: start[n] + t * (end[n] - start[n]) for n in start}, X, head)
                for name, d in moved.items():
                    total += weight * torch.einsum("ncp,mp->ncm", J[name].flatten(2), d.flatten(1)).double()
        return torch.cat([total, self.ends(X, head)[:, :, None].double()], dim=2)

    def gram(self, a: Tensor, b: Tensor, head: str) -> Tensor:
        """Return the kernel of test copies and training copies, (n, C, m * C)."""
        K = torch.zeros((), dtype=torch.float64)
        for start, end, rate in zip(self.states, self.states[1:], self.rates, strict=False):
            right = self.jacobian(start, b, head)
            for t, weight in nodes(2):
                left = self.jacobian({n: start[n] + t * (end[n] - start[n]) for n in start}, a, head)
                for name in self.shares[0]:
                    products = torch.einsum("ncp,mdp->ncmd", left[name].flatten(2), right[name].flatten(2))
                    K = K + rate * weight * products
        return K.flatten(2)


def state_of(net: nn.Module) -> dict[str, Tensor]:
    tensors = {**dict(net.named_parameters()), **dict(net.named_buffers())}
    return {name: value.detach().clone() for name, value in tensors.items() if value.is_floating_point()}


def nodes(count: int) -> list[tuple[float, float]]:
    places, weights = np.polynomial.legendre.leggauss(count)
    return [(float(x + 1) / 2, float(w) / 2) for x, w in zip(places, weights, strict=True)]
