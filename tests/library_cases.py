"""Optimizers of torch and other libraries, and the shares of their steps, written out by hand.

A share function gets rows of gradients: one for each sample, one for earlier ones, and a last one for decay. It pushes
each row through the optimizer's equations on its own. What the optimizer derives from the whole gradient is read from
its state.
"""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytorch_optimizer as po
import schedulefree
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

import epk_gp as epk
import reference
from loops import record

Kept = dict[str, Tensor]


def mean(kept: Kept, name: str, rows: Tensor, beta: float, added: float | None = None) -> Tensor:
    """Go on with a moving average of rows."""
    added = 1 - beta if added is None else added
    kept[name] = beta * kept.get(name, torch.zeros_like(rows)) + added * rows
    return kept[name]


def decayed(share: Tensor, w: Tensor, rate: float, o: Any) -> Tensor:
    share[-1] -= rate * o.weight_decay * w
    return share


def lion(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    v = o.betas[0] * kept.get("m", torch.zeros_like(g)) + (1 - o.betas[0]) * g
    mean(kept, "m", g, o.betas[1])
    return decayed(-o.lr * v / v.sum(0).abs(), w, o.lr, o)


def tiger(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    m = mean(kept, "m", g, o.beta)
    return decayed(-o.lr * m / m.sum(0).abs(), w, o.lr, o)


def adabelief(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    m, (beta1, beta2) = mean(kept, "m", g, o.betas[0]), o.betas
    scale = (new.exp_avg_var / (1 - beta2**o.step)).sqrt() + o.eps
    return decayed(-o.lr / (1 - beta1**o.step) * m / scale, w, o.lr, o)


def qhadam(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    share, G, (nu1, nu2) = float(1 / new.beta1_weight), g.sum(0), o.nus
    m = mean(kept, "m", g, 1 - share, share)
    scale = (nu2 * new.exp_avg_sq + (1 - nu2) * G * G).sqrt() + o.eps
    return decayed(-o.lr * (nu1 * m + (1 - nu1) * g) / scale, w, o.lr, o)


def stable_adamw(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    beta1, v, t = o.betas[0], new.exp_avg_sq, o.step
    m = mean(kept, "m", g, beta1 * (1 - beta1 ** (t - 1)) / (1 - beta1**t))
    rate = o.lr / max(1.0, float((g.sum(0).square() / v.clamp(min=o.eps**2)).mean().sqrt()))
    return decayed(-rate * m / (v.sqrt() + o.eps), w, rate, o)


def lamb(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    m, beta1 = mean(kept, "m", g, o.betas[0]), o.betas[0]
    share = -o.lr / (1 - beta1**o.step) * new.trust_ratio * m / (new.exp_avg_sq.sqrt() + o.eps)
    return decayed(share, w, o.lr, o)


def prodigy(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    m, rate = mean(kept, "m", g, o.betas[0], old.group["d"] * (1 - o.betas[0])), old.group["d"] * o.lr
    return decayed(-rate * m / (new.exp_avg_sq.sqrt() + o.d * o.eps), w, rate, o)


def sgdw(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    m = mean(kept, "m", g, o.momentum, 1 - o.dampening if "m" in kept else 1.0)
    return decayed(-o.lr * (g + o.momentum * m), w, o.lr, o)


def sgd(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    g[-1] += o.weight_decay * w
    return -o.lr * mean(kept, "m", g, o.momentum, 1 - o.dampening if "m" in kept else 1.0)


def adam(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    """Of torch, and AdamW."""
    (beta1, beta2), t = o.betas, float(new.step)
    g[-1] += (not o.decoupled_weight_decay) * o.weight_decay * w
    scale = ((new.max_exp_avg_sq if o.amsgrad else new.exp_avg_sq) / (1 - beta2**t)).sqrt() + o.eps
    share = -o.lr / (1 - beta1**t) * mean(kept, "m", g, beta1) / scale
    return decayed(share, w, o.lr, o) if o.decoupled_weight_decay else share


def rmsprop(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    g[-1] += o.weight_decay * w
    return -o.lr * mean(kept, "m", g / ((new.square_avg - new.grad_avg**2).sqrt() + o.eps), o.momentum, 1.0)


def adagrad(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    g[-1] += o.weight_decay * w
    return -o.lr / (1 + (float(new.step) - 1) * o.lr_decay) * g / (new.sum.sqrt() + o.eps)


def schedule_free(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    """z and y side by side, as what each row has added to them."""
    t, beta = getattr(o, "k", None) or o.step, o.betas[0] if hasattr(o, "betas") else o.momentum
    rate = o.lr * min(1.0, t / o.warmup_steps) if o.warmup_steps else o.lr
    c = t**o.r * o.lr_max**o.weight_lr_power / o.weight_sum
    tiny = 0.0 if hasattr(o, "k") else 1e-15
    if hasattr(o, "betas"):
        g = g / ((new.exp_avg_sq / (1 - o.betas[1] ** t) + tiny).sqrt() + o.eps)
    g[-1] += o.weight_decay * w
    y, z = kept.get("y", torch.zeros_like(g)), kept.get("z", torch.zeros_like(g))
    kept["y"] = (1 - c) * y + c * z + rate * (beta * (1 - c) - 1) * g
    kept["z"] = z - rate * g
    return kept["y"] - y


def came(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    def scale(name: str) -> Tensor:
        row, column = getattr(new, f"exp_avg_{name}_row"), getattr(new, f"exp_avg_{name}_col")
        return torch.outer(row / row.mean(), column).rsqrt()

    inverse = scale("sq") if w.ndim > 1 else new.exp_avg_sq.rsqrt()
    u = inverse * g
    u = u / max(1.0, float(u.sum(0).square().mean().sqrt()))
    m = mean(kept, "m", u, o.betas[0])
    return decayed(-o.lr * m * (scale("res") if w.ndim > 1 else 1.0), w, o.lr, o)


def adan(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    (beta1, beta2, beta3), t = o.betas, o.step
    m, d = mean(kept, "m", g, beta1), mean(kept, "d", g - kept.get("last", g), beta2)
    kept["last"] = g
    scale = (new.exp_avg_sq / (1 - beta3**t)).sqrt() + o.eps
    return decayed(-o.lr * (m / (1 - beta1**t) + beta2 * d / (1 - beta2**t)) / scale, w, o.lr, o)


def ademamix(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    (beta1, beta2, beta3), t = o.betas, o.step
    alpha = min(t / o.t_alpha_beta3, 1.0) * o.alpha
    logs, share = (math.log(beta1), math.log(beta3)), min(t / o.t_alpha_beta3, 1.0)
    beta3 = math.exp(logs[0] * logs[1] / ((1 - share) * logs[1] + share * logs[0]))
    m, slow = mean(kept, "m", g, beta1), mean(kept, "slow", g, beta3)
    scale = (new.exp_avg_sq / (1 - beta2**t)).sqrt() + o.eps
    return decayed(-o.lr * (m / (1 - beta1**t) + alpha * slow) / scale, w, o.lr, o)


def soap(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    t, (beta1, beta2) = o.step - 1, o.betas
    if t == 0:
        return torch.zeros_like(g)
    m, turn = mean(kept, "m", g, beta1), [Q for Q in old.Q if len(Q)]
    inside, outside = ("nab,ac,bd->ncd", "ncd,ac,bd->nab") if turn else ("na->na", "na->na")
    v = beta2 * old.exp_avg_sq + (1 - beta2) * torch.einsum(inside, g.sum(0)[None], *turn)[0].square()
    rate = o.lr * math.sqrt(1 - beta2**t) / (1 - beta1**t) * (1 - o.lr * o.weight_decay)
    share = -rate * torch.einsum(outside, torch.einsum(inside, m, *turn) / (v.sqrt() + o.eps), *turn)
    return decayed(share, w, o.lr, o)


def lookahead(g: Tensor, w: Tensor, o: Any, old: Any, new: Any, kept: Kept) -> Tensor:
    """Of AdamW: fast and slow weights side by side, as what each row has added to them."""
    m, (beta1, beta2), t = mean(kept, "m", g, o.betas[0]), o.betas, int(new.step)
    scale = (new.exp_avg_sq / (1 - beta2**t)).sqrt() + o.eps
    fast, slow = (kept.get(name, torch.zeros_like(g)) for name in ("fast", "slow"))
    kept["fast"] = decayed(fast - o.lr / (1 - beta1**t) * m / scale, w, o.lr, o)
    if o.counter == 0:
        kept["fast"] = kept["slow"] = slow + 0.6 * (kept["fast"] - slow)
    return kept["fast"] - fast


def of_adamw(parameters: Any, **options: Any) -> Optimizer:
    return po.Lookahead(torch.optim.AdamW(parameters, **options), k=3, alpha=0.6)


def in_two_groups(parameters: Any, lr: float, **options: Any) -> Optimizer:
    """Of SGD, the second one slower."""
    return torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:], "lr": lr / 2}], lr, **options)


DECAY = {"lr": 0.01, "weight_decay": 0.1}
DECOUPLED = DECAY | {"weight_decouple": True}
CASES: dict[str, tuple[Callable[..., Optimizer], dict[str, Any], Callable[..., Tensor]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}, sgd),
    "momentum": (in_two_groups, {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01}, sgd),
    "Adam": (torch.optim.Adam, DECAY | {"amsgrad": True}, adam),
    "AdamW": (torch.optim.AdamW, DECAY, adam),
    "RMSprop": (torch.optim.RMSprop, DECAY | {"lr": 1e-3, "momentum": 0.9, "centered": True}, rmsprop),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.01}, adagrad),
    "schedulefree AdamW": (schedulefree.AdamWScheduleFree, DECAY | {"warmup_steps": 4, "r": 0.5}, schedule_free),
    "schedulefree SGD": (schedulefree.SGDScheduleFree, {"lr": 0.3, "weight_decay": 0.1}, schedule_free),
    "ScheduleFreeAdamW": (po.ScheduleFreeAdamW, DECAY, schedule_free),
    "ScheduleFreeSGD": (po.ScheduleFreeSGD, {"lr": 0.3, "warmup_steps": 3}, schedule_free),
    "Lion": (po.Lion, DECAY, lion),
    "Tiger": (po.Tiger, DECAY, tiger),
    "AdaBelief": (po.AdaBelief, DECAY, adabelief),
    "QHAdam": (po.QHAdam, DECOUPLED | {"nus": (0.7, 0.9)}, qhadam),
    "StableAdamW": (po.StableAdamW, DECAY, stable_adamw),
    "Lamb": (po.Lamb, DECAY, lamb),
    "Prodigy": (po.Prodigy, {"lr": 1.0, "weight_decay": 0.1, "d0": 1e-2}, prodigy),
    "SGDW": (po.SGDW, DECAY | {"momentum": 0.9, "nesterov": True, "dampening": 0.2}, sgdw),
    "CAME": (po.CAME, DECAY, came),
    "Adan": (po.Adan, DECOUPLED, adan),
    "AdEMAMix": (po.AdEMAMix, DECOUPLED | {"t_alpha_beta3": 10}, ademamix),
    "SOAP": (po.SOAP, DECAY | {"precondition_frequency": 3, "eps": 1e-3}, soap),
    "Lookahead": (of_adamw, DECAY, lookahead),
}
# Further options, whose steps alone are compared.
VARIANTS: dict[str, tuple[Callable[..., Optimizer], dict[str, Any]]] = {
    "schedulefree AdamW, one by one": (schedulefree.AdamWScheduleFree, DECAY | {"foreach": False}),
    "ScheduleFreeAdamW, largest": (po.ScheduleFreeAdamW, {"lr": 0.02, "ams_bound": True, "decoupling_c": 5}),
    "AdaBelief, largest": (po.AdaBelief, {"lr": 0.01, "ams_bound": True}),
    "CAME, largest": (po.CAME, {"lr": 0.01, "ams_bound": True}),
    "Lamb, clipped": (po.Lamb, DECAY | {"pre_norm": True, "max_grad_norm": 0.3}),
    "Lamb as Adam": (po.Lamb, {"lr": 0.01, "adam": True, "grad_averaging": False, "weight_decouple": False}),
    "Adan, clipped": (po.Adan, {"lr": 0.01, "max_grad_norm": 0.3, "foreach": False}),
    "AdEMAMix, no schedule": (po.AdEMAMix, DECAY),
    "SGDW without momentum": (po.SGDW, DECAY),
    "Lookahead of SGD": (lambda p, lr: po.Lookahead(torch.optim.SGD(p, lr=lr, momentum=0.9), k=2), {"lr": 0.1}),
}
for _name in (
    "Lion", "Tiger", "AdaBelief", "QHAdam", "StableAdamW", "Lamb", "Prodigy", "SGDW", "CAME", "Adan", "AdEMAMix",
):  # fmt: skip
    _kind, _options, _ = CASES[_name]
    VARIANTS[f"{_name}, coupled and maximised"] = (_kind, _options | {"weight_decouple": False, "maximize": True})


def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).to(dtype)


def problem(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor, list[Tensor]]:
    """A network, 11 points, their labels, and three epochs in batches of 4, 4 and 3."""
    generator = torch.Generator().manual_seed(5)
    X = torch.randn(11, 4, generator=generator, dtype=torch.float64).to(dtype)
    steps = [batch for _ in range(3) for batch in torch.randperm(11, generator=generator).split(4)]
    return network(dtype), X, torch.arange(11) % 3, steps


def train(optimizer: Optimizer) -> Optimizer:
    """Put a schedule-free optimizer into training mode."""
    getattr(optimizer, "train", lambda: None)()
    return optimizer


def inside(optimizer: Any) -> Optimizer:
    return getattr(optimizer, "optimizer", optimizer)


@dataclass
class ByHand:
    """A run beside the package: `states`, and `shares` of each step, (M + 2, P), by pushing each row through."""

    make: Callable[[Any], Optimizer]
    share: Callable[..., Tensor]
    states: list[Tensor] = field(default_factory=list)
    shares: list[Tensor] = field(default_factory=list)
    num_before: int = 0  # steps before the recording, whose rows are one, the last but one

    def run(self) -> None:
        net, X, y, steps = problem()
        optimizer, kept = train(self.make(list(net.parameters()))), {p: {} for p in net.parameters()}
        for s, batch in enumerate(steps):
            rows = {p: torch.zeros(len(X) + 2, *p.shape, dtype=p.dtype) for p in net.parameters()}
            for i in batch.tolist():
                net.zero_grad()
                (F.cross_entropy(net(X[i : i + 1]), y[i : i + 1]) / len(batch)).backward()
                for p, own in rows.items():
                    own[i if s >= self.num_before else -2] += p.grad
            net.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            before = {p: p.detach().clone() for p in rows}
            old = {p: copy.deepcopy(dict(inside(optimizer).state[p])) for p in rows}
            group = copy.deepcopy({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
            self.states.append(torch.cat([w.flatten() for w in before.values()]))
            optimizer.step()
            of_weight, parts = {p: group for group in optimizer.param_groups for p in group["params"]}, []
            for p, g in rows.items():
                options, new = SimpleNamespace(**of_weight[p]), SimpleNamespace(**inside(optimizer).state[p])
                share = self.share(g, before[p], options, SimpleNamespace(group=group, **old[p]), new, kept[p])
                torch.testing.assert_close(share.sum(0), p.detach() - before[p], rtol=1e-8, atol=1e-13)
                parts.append(share.flatten(1))
            self.shares.append(torch.cat(parts, dim=1))
        del self.states[: self.num_before], self.shares[: self.num_before]

    def contributions(self, run: epk.Trajectory, X: Tensor) -> Tensor:
        """(n, C, M + 2) for logits, by brute force."""
        total = torch.zeros(len(X), 3, self.shares[0].shape[0], dtype=torch.float64)
        for s, share in enumerate(self.shares):
            for n, x in enumerate(X):
                phi = sum(w * reference.jacobian(run, s, t, x, "logits") for t, w in epk.gauss_legendre(6))
                total[n] += phi @ share.T
        return total


def recorded(make, dtype=torch.float64, at_step=lambda s, net, optimizer: None, folder=None, **options):
    """Record the problem's loop; `at_step` is called before the step of its number."""
    net, X, y, steps = problem(dtype)
    optimizer = train(make(list(net.parameters())))
    options |= {"announced": lambda s: at_step(s, net, optimizer), "folder": folder}
    return record(net, optimizer, X, y, steps, **options).trajectory, X[:2]


BEGUN = {
    "SGD": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2), sgd),
    "schedulefree AdamW": (lambda p: schedulefree.AdamWScheduleFree(p, lr=0.02), schedule_free),
    "Lion": (lambda p: po.Lion(p, lr=0.01), lion),
    "Adan": (lambda p: po.Adan(p, lr=0.01), adan),
    "AdEMAMix": (lambda p: po.AdEMAMix(p, lr=0.01, t_alpha_beta3=10), ademamix),
    "Lookahead": (lambda p: CASES["Lookahead"][0](p, lr=0.01, weight_decay=0.0), lookahead),
}


def continued(make, num_before=4, **options):
    """Record a loop from a step on, whose network and optimizer are those of a checkpoint."""
    net, X, y, steps = problem()
    first = train(make(list(net.parameters())))
    for batch in steps[:num_before]:
        first.zero_grad()
        F.cross_entropy(net(X[batch]), y[batch]).backward()
        first.step()
    optimizer = make(list(net.parameters()))
    optimizer.load_state_dict(copy.deepcopy(first.state_dict()))
    return record(net, train(optimizer), X, y, steps[num_before:], **options).trajectory, X[:2]
