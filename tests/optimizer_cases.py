"""The optimizers of the installed torch with their options, and runs of them recorded by hand."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import epk_gp as epk
from epk_gp.optimizers.torch_rules import rule_for
from epk_gp.optimizers.update_rules import UpdateCoefficients
from loops import record

TENSOR = torch.tensor(0.01)
COMMON: dict[str, dict[str, Any]] = {
    "plain": {}, "decay": {"weight_decay": 0.1}, "foreach": {"foreach": True, "weight_decay": 0.1},
    "maximize": {"maximize": True}, "tensor_lr": {"lr": TENSOR, "weight_decay": 0.1},
}  # fmt: skip
FUSED = {"fused": {"fused": True, "weight_decay": 0.1}}
ADAM = {"amsgrad": {"amsgrad": True}, "tensor_betas": {"lr": TENSOR, "betas": (torch.tensor(0.9), torch.tensor(0.99))}}
DECOUPLED = {
    "decoupled": {"weight_decay": 0.1, "decoupled_weight_decay": True},
    "decoupled_tensor_lr": {"weight_decay": 0.1, "decoupled_weight_decay": True, "lr": TENSOR},
}
SPARSE = {"plain": {}, "maximize": {"maximize": True}, "tensor_lr": {"lr": TENSOR}, "betas": {"betas": (0.5, 0.9)}}
NEWTON = {
    "plain": {"weight_decay": 0.0}, "decay": {"weight_decay": 0.2}, "not_nesterov": {"nesterov": False},
    "match_rms_adamw": {"adjust_lr_fn": "match_rms_adamw"}, "three_iterations": {"ns_steps": 3, "momentum": 0.5},
    "tensor_lr": {"lr": TENSOR},
}  # fmt: skip
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "SGD": COMMON
    | FUSED
    | {
        "momentum": {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
        "nesterov": {"momentum": 0.9, "nesterov": True, "lr": TENSOR},
    },
    "Adam": COMMON | FUSED | ADAM | DECOUPLED,
    "AdamW": COMMON | FUSED | ADAM,
    "RMSprop": COMMON | {"momentum": {"momentum": 0.9, "centered": True, "lr": 0.001}},
    "Adagrad": COMMON | FUSED | {"start": {"initial_accumulator_value": 0.1, "lr_decay": 0.1}},
    "Adadelta": COMMON | {"rho": {"lr": 0.5, "rho": 0.8}, "tensor_lr": {"lr": torch.tensor(0.7)}},
    "Adafactor": COMMON | {"clipped": {"d": 1.0, "eps": (1e-3, 0.1)}, "decay_of_beta": {"beta2_decay": -0.5}},
    "Adamax": COMMON,
    "ASGD": COMMON | {"lambda": {"lambd": 0.1, "alpha": 0.5, "t0": 3, "lr": 0.05}},
    "NAdam": COMMON | DECOUPLED | {"momentum_decay": {"momentum_decay": 0.1}},
    "RAdam": COMMON | DECOUPLED | {"short": {"betas": (0.9, 0.8)}},
    "Rprop": {name: COMMON[name] for name in ("plain", "maximize", "tensor_lr")}
    | {"foreach": {"foreach": True}, "etas": {"etas": (0.4, 1.3), "step_sizes": (1e-3, 0.02)}},
    "SparseAdam": SPARSE,
    "Muon": NEWTON,
}
OPTIONS["Rprop"]["tensor_lr"] = {"lr": TENSOR}
OF_TORCH = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
}
CASES = {
    f"{name}-{options}": (name, OPTIONS[name][options])
    for name in OPTIONS
    if name in OF_TORCH
    for options in OPTIONS[name]
}


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 3, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.embed(x)).mean(dim=1)


def problem(name: str) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(3)
    y = torch.randint(0, 3, (11,))
    if name == "SparseAdam":
        return Embedded().double(), torch.randint(0, 9, (11, 3)), y
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=name != "Muon")).double()
    if name == "Muon":  # for matrices only, wide and tall
        net[0] = nn.Linear(4, 6, bias=False).double()
    return net, torch.randn(11, 4).double(), y


def optimizer_for(name: str, options: dict[str, Any], net: nn.Module) -> Optimizer:
    lr = 1.0 if name == "Adadelta" else 0.01
    return OF_TORCH[name](net.parameters(), **{"lr": lr} | options)


def batches(epochs: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [batch for _ in range(epochs) for batch in torch.randperm(11, generator=generator).split(4)]


def newton_schulz(U: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Muon's iteration as torch writes it, in the precision of U instead of bfloat16."""
    a, b, c = coefficients
    X = U.T if U.shape[0] > U.shape[1] else U
    X = X / X.norm().clamp(min=eps)
    for _ in range(steps):
        A = X @ X.T
        X = torch.addmm(X, torch.addmm(A, A, A, beta=b, alpha=c), X, beta=a)
    return X.T if U.shape[0] > U.shape[1] else X


def recorded(
    net: nn.Module, optimizers: Sequence[Optimizer], X: Tensor, y: Tensor, steps: Sequence[Tensor]
) -> tuple[epk.Trajectory, list[Tensor]]:
    """Record a step of every optimizer on each batch; return the run, and the gradient of each step."""
    gradients = list[Tensor]()

    def note(step: int) -> None:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in net.parameters()]
        gradients.append(torch.cat([part.flatten() for part in parts]))

    unexplained = rule_for(list(optimizers)).unexplained or None
    recorder = record(net, list(optimizers), X, y, steps, announced=note, unexplained=unexplained)
    return recorder.trajectory, gradients


def zero_matrices(update: UpdateCoefficients) -> UpdateCoefficients:
    return replace(update, left={}, right={})
