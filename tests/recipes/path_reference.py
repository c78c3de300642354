"""Brute force along the path of the weights and moving statistics: many Gauss nodes between located kinks."""

import copy
import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from recipes.problem import as_tuple
from recipes.reference import evaluated, move, step_terms, updates

NODES = 16
TOLERANCE = 1e-11  # of an integral along a step; smooth steps reach rounding with the first nodes
KINK_WIDTH = 1e-10  # of a bracket: what a jump in the gradient adds to an integral is this small


class Differentiable(TorchFunctionMode):
    """Write normalisation by running statistics out, which torch does not differentiate in them."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is F.batch_norm and not kwargs.get("training", False):
            return written_out(*args, **kwargs)
        if function is F.instance_norm and kwargs["running_mean"] is not None:
            options = {"weight": kwargs["weight"], "bias": kwargs["bias"], "eps": kwargs["eps"]}
            return written_out(*args, kwargs["running_mean"], kwargs["running_var"], **options)
        return function(*args, **kwargs)


def written_out(x, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
    shape = (1, -1) + (1,) * (x.ndim - 2)
    z = (x - mean.view(shape)) * (var.view(shape) + eps).rsqrt()
    return z if weight is None else z * weight.view(shape) + bias.view(shape)


class Pattern(TorchFunctionMode):
    """Collect which ReLUs are on, and which entries are the largest in max-pooling."""

    def __init__(self):
        super().__init__()
        self.parts = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function in (F.relu, torch.relu, F.leaky_relu):
            self.parts.append((args[0] > 0).flatten())
        elif getattr(function, "__name__", "") in ("max_pool2d", "_max_pool2d", "boolean_dispatch", "fn"):
            size, stride = args[1] if len(args) > 1 else kwargs["kernel_size"], (kwargs or {}).get("stride")
            self.parts.append(F.max_pool2d(args[0], size, stride, return_indices=True)[1].flatten())
            return F.max_pool2d(*args, **{k: v for k, v in (kwargs or {}).items() if k == "stride"})
        return function(*args, **(kwargs or {}))


@dataclass
class Terms:
    """Terms of the change of the outputs: of each sample (n, C, M), of other rows, decay and statistics (n, C)."""

    samples: torch.Tensor
    outside: torch.Tensor
    decay: torch.Tensor
    statistics: torch.Tensor


class Line:
    """The network in evaluation mode on one straight step."""

    def __init__(self, result, start, end):
        self.net = copy.deepcopy(result.net).eval()
        self.inputs, self.output = result.X_test, result.output
        names = [name for name, _ in (*self.net.named_parameters(), *self.net.named_buffers())]
        self.moving = [name for name in names if name in start and start[name].is_floating_point()]
        self.start, self.end = start, end

    def outputs(self, t):
        """Return the outputs at t, and the tensors that they were computed from."""
        leaves = {n: torch.lerp(self.start[n], self.end[n], t).requires_grad_() for n in self.moving}
        args, kwargs = ((), self.inputs) if isinstance(self.inputs, dict) else (as_tuple(self.inputs), {})
        returned = torch.func.functional_call(self.net, leaves, args, kwargs)
        z = self.output(returned)
        return (z if z.ndim > 1 else z[:, None]), leaves

    def pattern(self, t):
        with torch.no_grad(), Pattern() as pattern:
            self.outputs(t)
        return torch.cat([part.long() for part in pattern.parts]) if pattern.parts else torch.zeros(0)

    def breakpoints(self):
        """Return 0, 1 and every t where the pattern changes, found by bisection."""
        found = [0.0, 1.0]
        open_intervals = [(k / 4, self.pattern(k / 4), (k + 1) / 4, self.pattern((k + 1) / 4)) for k in range(4)]
        while open_intervals:
            a, left, b, right = open_intervals.pop()
            if torch.equal(left, right):
                continue
            middle = (a + b) / 2
            if b - a < KINK_WIDTH:
                found.append(middle)
                continue
            at_middle = self.pattern(middle)
            open_intervals += [(a, left, middle, at_middle), (middle, at_middle, b, right)]
        return sorted(found)

    def average_gradients(self):
        """Return Phi, the gradients averaged over the line, by name, (n, C, *shape)."""
        points = self.breakpoints()
        panels, total = list(itertools.pairwise(points)), {}
        while panels:
            a, b = panels.pop()
            part, residual = self.integrate(a, b)
            if residual > TOLERANCE:
                panels += [(a, (a + b) / 2), ((a + b) / 2, b)]
                continue
            total = {name: value + total.get(name, 0) for name, value in part.items()}
        return total

    def integrate(self, a, b):
        """Integrate the gradients over [a, b]; and say by how much they miss the change of the outputs."""
        nodes, weights = np.polynomial.legendre.leggauss(NODES)
        total = {}
        for node, weight in zip(nodes, weights, strict=True):
            with Differentiable():
                z, leaves = self.outputs(a + (b - a) * (node + 1) / 2)
            seeds = torch.eye(z.numel(), dtype=z.dtype).view(z.numel(), *z.shape)
            rows = torch.autograd.grad(z, list(leaves.values()), seeds, is_grads_batched=True, allow_unused=True)
            for name, row in zip(leaves, rows, strict=True):
                if row is not None:
                    part = (b - a) * weight / 2 * row.detach().reshape(*z.shape, *row.shape[1:])
                    total[name] = total.get(name, 0) + part
        with torch.no_grad():
            change = self.outputs(b)[0] - self.outputs(a)[0]
        explained = sum(phi.flatten(2) @ (self.end[name] - self.start[name]).flatten() for name, phi in total.items())
        return total, float((change - explained).abs().max())


def brute_force_terms(result):
    """Return the terms of a watched run, summed over its steps, each with the move of the weights that followed it."""
    watched, M = result.recorder, result.recorder.num_samples
    n, C = (result.outputs if result.outputs.ndim > 1 else result.outputs[:, None]).shape
    shares, statistics = torch.zeros(n, C, M + 2, dtype=torch.float64), torch.zeros(n, C, dtype=torch.float64)
    parameters = dict(watched.net.named_parameters())
    moved, memory = dict.fromkeys(parameters, 0.0), {}
    start, before = watched.first, moved
    for step in watched.steps:
        terms, _ = step_terms(watched, step)
        for name, part in terms.items():
            change = updates(step, name, part, memory)
            if step.left is not step.end:
                change = change + move(watched, step, name, moved[name] + change, memory)
            moved = moved | {name: moved[name] + change}
        end, after = evaluated(step, moved, memory)
        for name, phi in Line(result, start, end).average_gradients().items():
            if name in terms:
                shares += phi.flatten(2) @ (after[name] - before[name]).flatten(1).T
            elif name not in parameters:
                statistics += phi.flatten(2) @ (end[name] - start[name]).flatten()
        start, before = end, after
    return Terms(shares[..., :M], shares[..., M], shares[..., M + 1], statistics)
