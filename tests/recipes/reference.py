"""Brute force: what a recipe's loop did, watched from outside, and B backward passes for each of its steps.

Nothing here is computed by the package. `Watched` stands where `epk.Recorder` stands in a recipe. Of every step it
keeps the state before the forward passes, their arguments, the random state, the gradient of the loop's own loss in
what the network returned, and the optimizer's numbers. From these it replays every loss term in plain torch.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

import epk_gp as epk


@dataclass
class Pass:
    """One forward pass of the root module with gradients."""

    args: tuple
    kwargs: dict
    random_state: torch.Tensor
    state: dict
    modes: list
    autocast: bool
    grads: dict = field(default_factory=dict)  # of each returned tensor, by its place


@dataclass
class Announced:
    """A batch with the pass whose gradient it is."""

    watched: Pass | None
    rows: torch.Tensor
    weight: Any
    position: int  # number of passes before the announcement


@dataclass
class WatchedStep:
    """A step: its batches, the state around it, gradients and optimizer states.

    `left` is the state that it left when the loop had moved its `end`, before the next step began.
    """

    batches: list
    start: dict
    gradients: dict
    before: dict  # optimizer states
    end: dict = field(default_factory=dict)
    left: dict = field(default_factory=dict)
    after: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)  # of each parameter: optimizer class and group


def snapshot(net):
    return {name: value.detach().clone() for name, value in net.state_dict(keep_vars=True).items()}


def flatten(returned):
    """Return the parts of what a network returned, and the function that puts other parts in their place."""
    if isinstance(returned, dict):  # a ModelOutput
        return list(returned.values()), lambda leaves: type(returned)(zip(returned, leaves, strict=True))
    leaves, structure = pytree.tree_flatten(returned)
    return leaves, lambda parts: pytree.tree_unflatten(parts, structure)


class Watched:
    """Stands for `epk.Recorder`; with `inner` it hands every call on to a real one."""

    inner_class: Any = None

    def __init__(self, net, optimizer, X, y=None, **options):
        self.called, self.X, self.y, self.options = net, X, y, options
        self.net = getattr(net, "_orig_mod", net)  # torch.compile's
        self.stream = {} if isinstance(X, epk.Stream) else None  # numbers of rows, by what they hold
        rows = next(iter(X.values())) if isinstance(X, dict) else X if y is None else y
        self.num_samples = len(self._numbers(X.X, X.y) if self.stream is not None else rows)
        optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
        for inside in ("optimizer", "base_optimizer"):  # accelerate's, SAM
            optimizers = [getattr(one, inside, one) for one in optimizers]
        self.optimizers = optimizers
        self.inner = None if self.inner_class is None else self.inner_class(net, optimizer, X, y, **options)
        self.steps, self.passes, self.announced, self.hooks, self.before = [], [], [], [], {}
        self.first, self.last = snapshot(self.net), snapshot(self.net)

    def __enter__(self):
        self.hooks = [
            self.called.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            self.called.register_forward_hook(self._after_forward),
            self.optimizers[0].register_step_pre_hook(self._before_step),
            self.optimizers[-1].register_step_post_hook(self._after_step),
        ]
        if self.inner is not None:
            self.inner.__enter__()
        return self

    def __exit__(self, *error):
        for hook in self.hooks:
            hook.remove()
        if self.steps and not self._is_as(snapshot(self.net), self.last, self.last):
            self.steps[-1].left = snapshot(self.net)
        return None if self.inner is None else self.inner.__exit__(*error)

    def batch(self, indices=None, *, weight=1.0, targets=None):
        if self.inner is not None:
            self.inner.batch(indices, weight=weight, **({} if targets is None else {"targets": targets}))
        if self.stream is not None:
            indices = self._numbers(self.passes[-1].args[0], targets)
            self.num_samples = len(self.stream)
        rows = torch.arange(self.num_samples) if indices is None else torch.as_tensor(indices)
        self.announced.append(Announced(None, rows, weight, len(self.passes)))

    def _numbers(self, X, y):
        rows = zip(X.tolist(), y.tolist(), strict=True)
        return [self.stream.setdefault((*row, target), len(self.stream)) for row, target in rows]

    @property
    def trajectory(self):
        return self.inner.trajectory

    def _before_forward(self, net, args, kwargs):
        if not torch.is_grad_enabled():
            return
        keep = [pytree.tree_map(lambda x: x.detach().clone() if torch.is_tensor(x) else x, a) for a in (args, kwargs)]
        modes = [module.training for module in self.net.modules()]
        autocast = torch.is_autocast_enabled("cpu")
        self.passes.append(Pass(*keep, torch.get_rng_state(), snapshot(self.net), modes, autocast))

    def _after_forward(self, net, args, returned):
        if not torch.is_grad_enabled():
            return None
        watched = self.passes[-1]
        leaves, rebuild = flatten(returned)
        for place, value in enumerate(leaves):
            if torch.is_tensor(value) and value.requires_grad:
                leaves[place] = value.clone()  # its gradient is that of what follows the network
                leaves[place].register_hook(lambda g, place=place: self._collect(watched, place, g))
        return rebuild(leaves)

    @staticmethod
    def _collect(watched, place, gradient):
        watched.grads[place] = watched.grads.get(place, 0) + gradient.detach()

    def _states(self):
        parameters = {p: name for name, p in self.net.named_parameters()}
        return {
            parameters[p]: {k: v.clone() if torch.is_tensor(v) else v for k, v in optimizer.state.get(p, {}).items()}
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for p in group["params"]
        }

    @staticmethod
    def _is_as(state, other, names):
        """Whether states are equal to rounding, as those are that schedule-free optimizers change to and fro."""
        return all(torch.allclose(state[name], other[name], rtol=1e-13, atol=1e-14) for name in names)

    def _before_step(self, optimizer, args, kwargs):
        self.before, self.gradients = self._states(), self._gradients()

    def _gradients(self):
        return {name: p.grad.clone() for name, p in self.net.named_parameters() if p.grad is not None}

    def _after_step(self, optimizer, args, kwargs):
        gradients = self.gradients or self._gradients()  # optimizers may overwrite them; a closure makes them
        seen = self.passes[0].state
        if self.steps and not self._is_as(seen, self.last, dict(self.net.named_parameters())):
            self.steps[-1].left = self.last = seen
        step = WatchedStep(self.announced, self.last, gradients, self.before)
        for position in {announced.position for announced in step.batches}:
            together = [announced for announced in step.batches if announced.position == position]
            before = [one for one in self.passes[:position] if one.grads] or self.passes  # a closure's come later
            for announced, watched in zip(together, before[-len(together) :], strict=True):
                announced.watched = watched
        step.end = step.left = self.last = snapshot(self.net)
        step.after = self._states()
        names = {p: name for name, p in self.net.named_parameters()}
        for one in self.optimizers:
            for group in one.param_groups:
                options = {key: value for key, value in group.items() if key != "params"}
                step.options |= {names[p]: (type(one).__name__, options) for p in group["params"]}
        self.steps.append(step)
        self.announced, self.passes = [], []


def gradients_of_terms(watched, announced):
    """Replay one pass and return the gradient of each of its rows' loss terms, by parameter, (B, *shape)."""
    net, run = copy.deepcopy(watched.net), announced.watched
    net.load_state_dict(run.state)
    for module, training in zip(net.modules(), run.modes, strict=True):
        module.training = training
    torch.set_rng_state(run.random_state)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=run.autocast):
        returned = net(*run.args, **run.kwargs)
    terms = loss_terms(watched, announced, returned)
    parameters = {name: p for name, p in net.named_parameters() if p.requires_grad}
    rows = [torch.autograd.grad(t, list(parameters.values()), retain_graph=True, allow_unused=True) for t in terms]
    return {
        name: torch.stack([torch.zeros_like(p) if row[k] is None else row[k] for row in rows])
        for k, (name, p) in enumerate(parameters.items())
    }


def loss_terms(watched, announced, returned):
    """Return c_i loss_i of each row: <dL/dz_i, z_i> with the loop's own dL/dz, or else the stated loss itself."""
    leaves, _ = flatten(returned)
    grads, B = announced.watched.grads, len(announced.rows)
    if hasattr(watched.X, "tensors"):  # a graph: a pass has a row for every node
        counts = torch.bincount(announced.rows, minlength=len(watched.y))[announced.rows]
        of_nodes = sum((g * leaves[k]).reshape(len(g), -1).sum(dim=1) for k, g in grads.items())
        return of_nodes[announced.rows] / counts
    if all(g.ndim and len(g) == B for g in grads.values()):
        return sum((grads[k] * leaves[k]).reshape(B, -1).sum(dim=1) for k in grads)
    # The network itself returned the batch's loss, as GPTs do, or the pass's rows are not those of the batch.
    loss = watched.options["loss"]
    return loss.function(returned, watched.y[announced.rows]) * announced.weight / B


def step_terms(watched, step):
    """Return each sample's share of the gradient that the optimizer was given, by parameter, (M + 1, *shape).

    The last one is that of rows that are no sample's, announced as -1. The factor between the terms' sum and the
    gradient is that of clipping or of a scaler; there must be one.
    """
    total = {}
    for announced in step.batches:
        for name, terms in gradients_of_terms(watched, announced).items():
            if name in step.gradients:
                total.setdefault(name, terms.new_zeros(watched.num_samples + 1, *terms.shape[1:]))
                total[name].index_add_(0, announced.rows % (watched.num_samples + 1), terms)
    summed = torch.cat([total[name].sum(dim=0).flatten() for name in step.gradients])
    used = torch.cat([step.gradients[name].flatten() for name in step.gradients])
    factor = (used @ summed) / (summed @ summed)
    mismatch = float((used - factor * summed).norm() / used.norm())
    return {name: factor * terms for name, terms in total.items()}, mismatch


def updates(step, name, gradients, momentum):
    """Return each source's share of one parameter's step, (M + 2, *shape): terms, and weight decay in the last row.

    The optimizer's own numbers (preconditioners) are taken from its state.
    """
    kind, group = step.options[name]
    w, lr, decay = step.start[name], float(group["lr"]), group.get("weight_decay", 0.0)
    before, after = step.before.get(name, {}), step.after.get(name, {})
    g = torch.cat([gradients, torch.zeros_like(w)[None]])
    if not kind.startswith("AdamW"):
        g[-1] += decay * w
    if kind == "SGD":
        mu = group["momentum"]
        momentum[name] = mu * momentum[name] + g if name in momentum else g
        return -lr * (g + mu * momentum[name] if group["nesterov"] else momentum[name])
    if kind in ("Adam", "AdamW"):
        (b1, b2), t = group["betas"], float(after["step"])
        momentum[name] = b1 * momentum.get(name, 0) + (1 - b1) * g
        scale = (after["exp_avg_sq"] / (1 - b2**t)).sqrt() + group["eps"]
        change = -lr / (1 - b1**t) * momentum[name] / scale
        if kind == "AdamW":
            change[-1] -= lr * decay * w
        return change
    if kind == "RMSprop":
        return -lr * g / (after["square_avg"].sqrt() + group["eps"])
    if kind == "Adadelta":
        acc = before["acc_delta"] if before else torch.zeros_like(w)
        return -lr * g * (acc + group["eps"]).sqrt() / (after["square_avg"] + group["eps"]).sqrt()
    if kind == "AdamWScheduleFree":
        (b1, b2), k, lr = group["betas"], group["k"], group["scheduled_lr"]
        g = g / ((after["exp_avg_sq"] / (1 - b2**k)).sqrt() + group["eps"])
        g[-1] += decay * w
        share = k ** group["r"] * group["lr_max"] ** group["weight_lr_power"] / group["weight_sum"]
        apart = momentum.get(name, torch.zeros_like(g))  # z - y
        change = share * apart + lr * (b1 * (1 - share) - 1) * g
        momentum[name] = apart - lr * g - change
        return change
    if kind == "Adafactor":  # the step of an entry is a multiple of its gradient
        total = gradients.sum(dim=0)
        scale = torch.where(total != 0, (w * (1 - lr * decay) - step.end[name]) / total, 0.0)
        change = -scale * torch.cat([gradients, torch.zeros_like(w)[None]])
        change[-1] -= lr * decay * w
        return change
    raise NotImplementedError(kind)


def move(watched, step, name, moved, memory):
    """Return each source's share of how a parameter was moved after a step, (M + 2, *shape).

    Lookahead puts slow weights in the place of the fast ones, after they went a part of the way to them.

    Args:
        watched: The run.
        step: The step.
        name: The parameter.
        moved: Each source's share of all that moved it until the step's own end.
        memory: What `updates` and this function keep.
    """
    if step.options[name][0] == "AdamWScheduleFree":  # its average is not what goes on: `evaluated`
        return torch.zeros_like(moved)
    slow, of_slow = memory.get(("slow", name), (watched.first[name], torch.zeros_like(moved)))
    way = (step.end[name] - slow).flatten()
    part = (step.left[name] - slow).flatten() @ way / (way @ way)
    memory["slow", name] = step.left[name], torch.lerp(of_slow, moved, part)
    return memory["slow", name][1] - moved


def evaluated(step, moved, memory):
    """Return the state that is evaluated after a step, and each source's share of it.

    Of schedule-free optimizers it is the average x = y + (1 - 1 / beta1) (z - y).
    """
    state, shares = dict(step.left), dict(moved)
    for name, (kind, group) in step.options.items():
        if kind == "AdamWScheduleFree":
            share = 1 - 1 / group["betas"][0]
            state[name] = torch.lerp(step.end[name], step.after[name]["z"], share)
            shares[name] = moved[name] + share * memory[name]
    return state, shares
