"""Changes between checkpoints: the change of a network's outputs, split exactly by parameters and by stretch.

    f(w_K) - f(w_0) = sum_k <Phi_k, w_{k+1} - w_k>,   Phi_k the gradient averaged between the checkpoints k and k + 1

It needs no training data, and two evaluations per stretch if operations are averaged (docs/theory.md, section 11). With
data, a sample's share of a stretch is of first order, -lr_k c_i <Phi_k, grad loss_i(w_k)>: the loss's gradient at the
start of the stretch represents all of its steps, and the remaining part of the change is unexplained.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, Literal, NamedTuple, Unpack, cast

import torch
from jaxtyping import Float, Int64, Shaped
from torch import Tensor, nn

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.scalars import Function
from epk_gp.autodiff.verification import observed_plan, probe_rows, with_plan, without_errors_of_a_trial
from epk_gp.core.checks import ComputeOptions, ComputeSettings, door, parse_options, validate_integer, validate_positive
from epk_gp.core.gradients import passes_of
from epk_gp.core.graphs import tensors_of
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import CrossEntropy, Head, Loss, sample_weights
from epk_gp.core.model import FunctionalModel, functionalize, uncompiled
from epk_gp.core.plans import rows_of_weights
from epk_gp.core.replayed_steps import RunReplay
from epk_gp.core.show import Entry, Summary, Tabular, count, warn_caller
from epk_gp.core.step import Step
from epk_gp.core.torch_overrides import outside_autocast
from epk_gp.core.trajectory import Trajectory, flat_state, parse_inputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.adjoint import average_over, layerwise_average
from epk_gp.kernel_machine.attribute import (
    attribution_work,
    averaged_path,
    changed_kernel,
    parse_request,
)
from epk_gp.kernel_machine.axes import Axis, PointsTable, group_name, in_words
from epk_gp.kernel_machine.certificate import (
    Certificate,
    described_precision,
    integral_facts,
    sum_tolerance,
    warn_unless_certified,
)
from epk_gp.kernel_machine.loss_products import LossProducts
from epk_gp.kernel_machine.terms import AttributionWork, Predictions, TermSums
from epk_gp.optimizers.update_rules import LinearStep, stack_coefficients
from epk_gp.quadrature.adaptive import Integral
from epk_gp.quadrature.rules import adaptive, layerwise, straight
from epk_gp.trained.checkpoints import Checkpoint, CheckpointStates, Named, listed
from epk_gp.trained.ntk import as_trajectory
from epk_gp.work.run import Sums

SplitBy = Literal["stretch", "module", "parameter", "head"]
# By attention module, and in it by parameter: (before, heads) of the parameter's entries as (before, heads, rest).
HeadLayout = Mapping[str, Mapping[str, tuple[int, int]]]
CHECKPOINTS = "checkpoints"  # name that replaces an update rule
_BLOCK = 256  # largest number of training samples whose gradients are computed together


@dataclass(frozen=True, eq=False, repr=False)
class Shares(Tabular):
    """Shares of a change along some axes; they add up to it.

    Attributes:
        values: (n, C, G_1, G_2, ...) over the groups of the axes.
        axes: The axes along which they are split, with the names of the groups.
    """

    values: Float[Tensor, "n C *groups"]
    axes: tuple[Axis, ...]

    def _frame(self) -> tuple[Any, ...]:
        return PointsTable(self.values.flatten(2).sum(dim=2)).frame({"values": self.values}, self.axes)

    def _summary(self) -> Summary:
        table = PointsTable(change := self.values.flatten(2).sum(dim=2))
        rows = [table.row("change", change), *table.largest("largest", self.values, partial(group_name, self.axes))]
        title = f"Change of {count(len(change), 'point')} by {in_words(self.axes)}"
        return Summary(title, (Entry("shape of values", f"{tuple(self.values.shape)}"),), table.table(rows))


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CheckpointSplit(Tabular, Certificate):
    """The change of predictions between checkpoints, split exactly; with data also, to first order, by samples.

    Attributes:
        initial: Outputs of the network at the first checkpoint, (n, C).
        network: Outputs at the last one, (n, C).
        pieces: Contribution of each piece of the network in each stretch, (n, C, K, G); the last piece is the moving
            statistics, if the network has any.
        names: For each piece, its parameter, its module, and its head or "".
        checkpoints: Names of the K + 1 checkpoints.
        samples: With data, first-order shares of the M training samples, (n, C, M); otherwise None.
        explained: With data, their sums in each stretch, (n, C, K); otherwise None.
    """

    initial: Float[Tensor, "n C"]
    network: Float[Tensor, "n C"]
    pieces: Float[Tensor, "n C K G"]
    names: tuple[tuple[str, str, str], ...]
    checkpoints: tuple[str, ...]
    samples: Float[Tensor, "n C M"] | None = None
    explained: Float[Tensor, "n C K"] | None = None

    @property
    def change(self) -> Float[Tensor, "n C"]:
        """f(w_K) - f(w_0)."""
        return self.network - self.initial

    @property
    def unexplained(self) -> Float[Tensor, "n C K"] | None:
        """The change in each stretch minus the shares of samples, including moving statistics; None without data."""
        return None if self.explained is None else self.pieces.sum(dim=3) - self.explained

    @property
    def findings(self) -> list[str]:
        """Reasons that the result is not certified; shares of samples never are."""
        if (left := self.unexplained) is None:
            return super().findings
        change, size = (float(value.abs().sum()) for value in (self.pieces.sum(dim=3), left))
        share = f"{size / change:.0%} of the change in the stretches" if change > 0 else f"{size:.2g}"
        return [
            *super().findings,
            f"shares of samples are of first order, from the gradients at checkpoints alone: {share} is `unexplained` "
            "(a recorded run has exact ones)",
        ]

    def by(self, *axes: SplitBy, depth: int | None = None) -> Shares:
        """Split the change along one axis or several.

        Args:
            axes: Names of the axes: "stretch", "module", "parameter" or "head" (modules, divided into heads if they
                were given).
            depth: Join modules whose names agree in this many parts, such as 2 for "blocks.0"; None joins none.

        Raises:
            ValueError: An axis is unknown, or no heads were given.
        """
        known = ("stretch", "module", "parameter", "head")
        if not axes or any(axis not in known for axis in axes) or len({*axes}) < len(axes):
            raise ValueError(f"axes must be different ones of {', '.join(map(repr, known))}: got {axes}.")
        if "head" in axes and not any(head for *_, head in self.names):
            raise ValueError(
                "heads must be given, for names do not say which entries of a parameter belong to a head: got none. "
                'Pass between(..., heads={"blocks.0.attn": {"qkv.weight": (3, 4), "proj.weight": (64, 4)}}), by '
                "attention module and parameter (before, heads): the entries lie as (before, heads, rest)."
            )
        modules = [".".join(module.split(".")[:depth]) for _, module, _ in self.names]
        labels = {
            "stretch": [f"{a} → {b}" for a, b in pairwise(self.checkpoints)],
            "parameter": [parameter for parameter, *_ in self.names],
            "module": modules,
            "head": [head or module for (*_, head), module in zip(self.names, modules, strict=True)],
        }
        found, places, indicators = list[Axis](), list[str](), list[Tensor]()
        for letter, axis in zip("abde"[: len(axes)], axes, strict=True):
            names = list(dict.fromkeys(labels[axis]))
            group = torch.tensor([names.index(label) for label in labels[axis]])
            found.append(Axis("step" if axis == "stretch" else "parameter", group, tuple(names)))
            places.append(("k" if axis == "stretch" else "g") + letter)
            indicators.append(torch.nn.functional.one_hot(group, len(names)).to(self.pieces))
        values = torch.einsum(f"nckg,{','.join(places)}->nc{'abde'[: len(axes)]}", self.pieces, *indicators)
        return Shares(values, tuple(found))

    def by_module(self, depth: int | None = None) -> Shares:
        """Split the change by the modules that own parameters."""
        return self.by("module", depth=depth)

    def by_stretch(self) -> Shares:
        """Split the change by stretch, from a checkpoint to the next."""
        return self.by("stretch")

    def by_head(self) -> Shares:
        """Split the change by attention head, of `between(heads=)`; by module elsewhere."""
        return self.by("head")

    def _frame(self) -> tuple[Any, ...]:
        terms = {"initial": self.initial, "pieces": self.pieces}
        names = [f"{parameter}, {head}" if head else parameter for parameter, _, head in self.names]
        rows, _, columns = PointsTable(self.network).frame(terms, ())
        columns += [("step", [f"{a} → {b}" for a, b in pairwise(self.checkpoints)]), ("parameter", names)]
        if self.samples is not None and self.unexplained is not None:
            terms |= {"samples": self.samples[:, :, None, None], "unexplained": self.unexplained}
            columns.append(("sample", range(self.samples.shape[2])))
        return rows, terms, columns

    def _summary(self) -> Summary:
        table, shares = PointsTable(self.network), self.by_module()
        terms = {"initial": self.initial, "all pieces": self.pieces}
        rows = [*table.sums(terms), table.row("network", self.network)]
        rows += table.largest("largest modules", shares.values, partial(group_name, shares.axes))
        if self.samples is not None:
            rows += table.largest("largest samples, first order", self.samples, "#{}".format)
        n, K = len(self.network), len(self.checkpoints)
        return Summary(f"Change of {count(n, 'point')} between {K} checkpoints", self.entries(n), table.table(rows))


class _StretchSums(TermSums):
    """Sums of pieces in each stretch, and of samples."""

    def __init__(
        self, trajectory: Trajectory, reference: Float[Tensor, "n K"], num_pieces: int, num_samples: int
    ) -> None:
        super().__init__(trajectory, (), reference)
        self.pieces = reference.new_zeros(*reference.shape, trajectory.num_steps, num_pieces)
        self.samples = reference.new_zeros(*reference.shape, num_samples)
        self.explained = reference.new_zeros(*reference.shape, trajectory.num_steps if num_samples else 0)

    @property
    def named(self) -> dict[str, Tensor]:
        """Return the tensors to which terms are added."""
        return super().named | {"pieces": self.pieces, "samples": self.samples, "explained": self.explained}


@dataclass(frozen=True, eq=False, kw_only=True)
class _StretchTerms(AttributionWork):
    """A pass over the stretches that adds up the contribution of every piece of the network.

    Attributes:
        cuts: Division of the parameters, in order: (before, heads), (1, 1) for an undivided one.
        c: With data, the weights of the M samples in the loss.
        rates: With data, the sum of the learning rates of each stretch.
    """

    keeps_residuals = False
    cuts: tuple[tuple[int, int], ...]
    c: Float[Tensor, " _"]
    rates: tuple[float, ...]

    @property
    def rows_at_once(self) -> int:
        """Number of averaged gradients in the largest parameter that fit into a quarter of the budget."""
        return self.memory_budget // (4 * self.net.itemsize * max(self.net.model.sizes))

    def totals(self, reference: Float[Tensor, "R K"], rows: Int64[Tensor, " R"]) -> _StretchSums:
        """Return the sums of some rows, which are zero."""
        recorded = self.whole.recorded
        num_pieces = sum(heads for _, heads in self.cuts) + bool(recorded.model.statistics)
        num_samples = recorded.num_points if self.rates else 0
        return _StretchSums(recorded, reference, num_pieces, num_samples)

    def terms(
        self, block: Predictions, totals: TermSums, number: int, sums: Sums
    ) -> Iterator[tuple[Integral | None, int, dict[str, Tensor]]]:
        """Go through the stretches, from the last one back."""
        own, K, N, shape = cast(_StretchSums, totals), block.num_outputs, len(block.X), block.net.model.sizes
        P, most = sum(shape), max(1, block.memory.adjoint_points(1))
        keeps = bool(self.rates) or not block.is_layerwise
        Phi = rows_of_weights(K * N if keeps else 0, P, block.zeros(0), most).view(-1, K, P)
        products = (
            LossProducts(block, RunReplay(block.recorded, block.recorded_net.model, block.X)) if self.rates else None
        )
        ends = [0, *accumulate(heads for _, heads in self.cuts)]
        for k in reversed(range(block.trajectory.num_steps - sums.steps)):  # a stretch ends where the next one began
            steps, d = range(k, k + 1), block.state(k + 1) - block.state(k)
            directions = d[:P].split(list(shape))

            def take(points: slice, place: int, values: Tensor) -> None:
                """Add a parameter's contribution at some points, head by head, given the averaged gradients."""
                before, heads = self.cuts[place]
                direction = directions[place]  # noqa: B023  of this very stretch
                if heads == 1:
                    moved = (values @ direction).unsqueeze(2)
                else:
                    moved = (values * direction).unflatten(2, (before, heads, -1)).sum(dim=(2, 4))
                own.pieces[points, :, k, ends[place] : ends[place + 1]] = moved.transpose(0, 1)  # noqa: B023

            if not keeps:
                stretch = layerwise_average(block, steps, max(2, 2 * self.rows_at_once // K), take)
            else:
                stretch = average_over(block, [steps], self.rows_per_block, Phi[None], splits_statistics=True)[0]
                for place, gradients in enumerate(Phi.split(list(shape), dim=2)):
                    take(slice(0, N), place, gradients.transpose(0, 1))
            if stretch.of_statistics is not None:
                own.pieces[:, :, k, -1] = (stretch.of_statistics @ d[P:]).T
            if products is not None:
                self._add_samples(own, products, Phi, k)
            yield stretch.integral, 1, {}

    def _add_samples(self, own: _StretchSums, products: LossProducts, Phi: Float[Tensor, "N K P"], k: int) -> None:
        run, H = products.block.recorded, Phi.flatten(0, 1)
        groups = torch.zeros(len(run.model.names), dtype=torch.int64)
        for rows in torch.arange(run.num_points).split(_BLOCK):
            step = Step(index=k, lr=self.rates[k], batch=rows, sample_weights=self.c[rows.to(self.c.device)])
            for of_pass in passes_of(step, run.inputs, run.targets, run.loss):
                values, _ = products.of_whole(step, of_pass, H, groups, products.start(step, of_pass, len(H)))
                shares = -self.rates[k] * values.sum(dim=2).unflatten(0, Phi.shape[:2])
                own.samples[:, :, rows.to(shares.device)] += shares
                own.explained[:, :, k] += shares.sum(dim=2)


@door
def between(
    model: nn.Module,
    checkpoints: Sequence[Checkpoint] | str | os.PathLike[str],
    X: Inputs,
    *,
    data: tuple[Inputs, Shaped[Tensor, "M ..."]] | None = None,
    loss: Loss | nn.Module | None = None,
    lr: float | Sequence[float] | Float[Tensor, " K"] | None = None,
    head: Head | None = None,
    classes: Int64[Tensor, " n"] | None = None,
    function: Function | None = None,
    output: Callable[[Any], Tensor] | None = None,
    heads: HeadLayout | None = None,
    **options: Unpack[ComputeSettings],
) -> CheckpointSplit:
    """Split the change of a network's predictions between checkpoints, exactly, without training data or a recording.

    Weights go from each checkpoint to the next, and every operation's derivative is averaged between both: two
    evaluations per stretch of any length. Networks that use weights in functions that are not linear in them are
    integrated along straight lines instead, just as exactly, with more evaluations.

    Args:
        model: The network, in the checkpoints' dtype; the change is split by the weights that require gradients. The
            network is copied, and evaluated in evaluation mode. Its own weights are ignored.
        checkpoints: K + 1 checkpoints in the order of training: state dicts, files of safetensors or torch, folders of
            transformers; or one folder that contains them, as the Trainer and Lightning write it.
        X: n inputs, in the network's dtype.
        data: Training inputs and targets, for first-order shares of samples as in TracInCP (Pruthi et al. 2020): a
            sample's gradient at the start of a stretch represents all of its steps.
        loss: With data, the loss; cross entropy by default.
        lr: With data, the sum of the learning rates of each stretch's steps, (K,), or one number for all stretches.
        head: "logits" or "log_softmax"; None follows the loss of the data, as in `attribute`; without data, "logits".
        classes: One output per input; C is then 1.
        function: The function to explain instead of the outputs, as in `attribute`.
        output: Maps the network's result to outputs (n, C), if it has another form; not needed with a function and
            without data.
        heads: By attention module, and in it by parameter, (before, heads): its entries are arranged as (before, heads,
            rest). `by_head` needs it.
        options: `memory_budget` and `progress`; see `ComputeOptions`.

    Raises:
        FileNotFoundError: A checkpoint does not exist.
        TypeError, ValueError: The names in a folder do not give an order; checkpoints share memory, or do not belong to
            this network: a tensor is missing or superfluous, or has another shape or dtype; or arguments do not fit,
            as in `attribute`.
    """
    parsed = parse_options("between", ("accumulate", "checkpoint", "executor"), **options)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module: got {type(model).__name__}.")
    if function is not None and data is None and output is None:
        output = _any_number
    entries = listed(checkpoints)
    rates = _rates(data, loss, lr, len(entries) - 1)
    loss = CrossEntropy() if data is not None and loss is None else loss
    trajectory, titles = path_of_checkpoints(model, entries, (X, None) if data is None else data, loss, output)
    c = sample_weights(trajectory.loss, trajectory.targets) if rates else torch.zeros(0)
    X = parse_inputs(trajectory, X).detach()
    kernel, rows, _ = parse_request(trajectory, X, None, (head, adaptive(tol=1e-12), straight()), (classes, function))
    net = trajectory.model_for(X)
    cuts = _cuts({} if heads is None else heads, net)
    divided = tuple((cut.before, cut.heads) if (cut := cuts.get(name)) else (1, 1) for name in net.names)
    kind: Callable[..., _StretchTerms] = partial(_StretchTerms, cuts=divided, c=c, rates=rates)
    sums = partial(_sums, kind, classes, parsed, names=_names(trajectory, cuts), checkpoints=titles)
    result = _split(sums, kernel, rows, has_data=bool(rates))
    warn_unless_certified("the split", Certificate.of(result).findings)
    return result


def _any_number(returned: Any) -> Float[Tensor, "n 1"]:
    """Return one number made from all numbers that a network returns for each row, if other numbers are explained."""
    z = next(value for value in tensors_of(returned) if value.is_floating_point()).flatten(1)
    return (z * torch.arange(1, z.shape[1] + 1, dtype=z.dtype, device=z.device).sin()).sum(dim=1, keepdim=True)


def _rates(data: object, loss: object, lr: Any, count: int) -> tuple[float, ...]:
    """Return the learning rate of each stretch; empty without data."""
    if data is None:
        if loss is not None or lr is not None:
            raise ValueError("loss and lr must come with the training samples: pass data=(X_train, y_train) as well.")
        return ()
    if not isinstance(data, tuple | list) or len(data) != 2:
        raise TypeError(f"data must be a pair (inputs, targets) of the training samples: got {type(data).__name__}.")
    if lr is None:
        raise ValueError("lr must be given with data: the sum of the learning rates of the steps of each stretch.")
    lr = lr.tolist() if hasattr(lr, "tolist") else lr
    rates = tuple(lr) if isinstance(lr, Sequence) else (lr,) * count
    if len(rates) != count:
        raise ValueError(f"lr must be one number, or one for each of the {count} stretches: got {len(rates)}.")
    for rate in rates:
        validate_positive(rate, "lr")
    return tuple(map(float, rates))


def path_of_checkpoints(
    network: nn.Module,
    checkpoints: Sequence[Checkpoint],
    data: tuple[Inputs, Any],
    loss: Loss | nn.Module | None,
    output: Callable[[Any], Tensor] | None,
) -> tuple[Trajectory, tuple[str, ...]]:
    """Return the run whose steps go from checkpoint to checkpoint, and their names; arguments as in `between`."""
    network = uncompiled(network)
    named = Named(network, checkpoints)
    net, moving = named.at_first(network)
    start = as_trajectory(net, *data, loss=loss, output=output)
    model = start.model
    if moving:
        model = functionalize(net, model.names, moving, model.signature, recomputes=model.recomputes)
    states = CheckpointStates(named, model.flatten)
    statistics = CheckpointStates(named, model.flatten_statistics) if moving else None
    count, coefficients = len(states) - 1, stack_coefficients([LinearStep(lr=0.0)] * len(model.sizes), model.sizes)
    run = replace(
        start,
        model=model,
        states=states,
        statistics=statistics,
        updates=(coefficients,) * count,
        steps=tuple(Step(index=k, lr=0.0, batch=None) for k in range(count)),
        update_rule=CHECKPOINTS,
        digest=hashlib.blake2b(f"{start.digest} {named.titles}".encode(), digest_size=16).hexdigest(),
        digests=(),
    )
    return run, named.titles


def _split(
    sums: Callable[..., CheckpointSplit], kernel: PathKernel, X: Shaped[Tensor, "n ..."], *, has_data: bool
) -> CheckpointSplit:
    """Sum the shares: by averages, tested by their own sums, or if these do not hold, by ways that were tested."""
    asked, misses = kernel.trajectory, False
    if not has_data:
        with without_errors_of_a_trial(), outside_autocast():
            model = asked.model_for(X)
            net = PlannedModel(model, observed_plan(model, flat_state(asked, asked.num_steps, X), probe_rows(X)))
            result = sums(changed_kernel(kernel, path=layerwise()), X, net, net)
            misses = not result.certified
            if not misses:
                return result
        if misses:
            warn_caller("operations cannot be averaged: the stretches are computed once more, along straight lines.")

    def compute(net: PlannedModel, recorded_net: PlannedModel) -> CheckpointSplit:
        path = straight() if misses else averaged_path(asked, X)
        return sums(changed_kernel(kernel, path=path), X, net, recorded_net)

    return with_plan(compute, X, asked, asked.recorded)


def _sums(
    kind: Callable[..., _StretchTerms],
    classes: Int64[Tensor, " n"] | None,
    options: ComputeOptions,
    kernel: PathKernel,
    X: Shaped[Tensor, "n ..."],
    net: PlannedModel,
    recorded_net: PlannedModel,
    **named: Any,
) -> CheckpointSplit:
    """Go through the stretches; the result names pieces and checkpoints."""
    made = attribution_work(net, kernel, X, (), classes, options, recorded_net=recorded_net, kind=kind)
    work = cast(_StretchTerms, made)
    if work.whole.is_layerwise and not work.rates:  # no row of weights is kept, and each checkpoint is read once
        K = 1 if classes is not None or work.rows_at_once < work.whole.num_outputs else work.whole.num_outputs
        work = replace(work, outputs_per_row=K, rows_per_block=len(X) * work.whole.num_outputs // K)
    whole, (initial, network, totals, rest) = work.whole, work.summed(options, "stretches")
    own = {name: totals.named[name] for name in ("pieces", "samples", "explained")}
    own = {name: value.reshape(*initial.shape, *value.shape[2:]) for name, value in own.items()}
    total = initial + own["pieces"].sum(dim=(2, 3))
    terms = initial.abs() + network.abs() + own["pieces"].abs().sum(dim=(2, 3))
    return CheckpointSplit(
        initial=initial,
        network=network,
        pieces=own["pieces"],
        samples=own["samples"] if work.rates else None,
        explained=own["explained"] if work.rates else None,
        max_error=float((total - network).abs().max()),
        error_tolerance=sum_tolerance(kernel.rule, whole.recorded, net.coarsest_dtype, terms),
        max_step_mismatch=0.0,
        mismatch_ratio=0.0,
        worst_step=-1,
        explains="the network at the last checkpoint",
        path=str(kernel.path),
        precision=described_precision(net),
        **integral_facts(rest, work.num_rows * whole.recorded.num_steps),
        **named,
    )


class _Cut(NamedTuple):
    """How a parameter's entries are divided into heads, as (before, heads, rest), in the attention module."""

    module: str
    before: int
    heads: int


def _cuts(layout: HeadLayout, model: FunctionalModel) -> dict[str, _Cut]:
    """Return the cut of each parameter that a layout names.

    Raises:
        TypeError: A layout is no pair of whole numbers.
        ValueError: There is no such parameter, or it cannot be divided so.
    """
    shapes, cuts = dict(zip(model.names, model.shapes, strict=True)), dict[str, _Cut]()
    form = "heads must be {module: {parameter: (before, heads)}}, with two whole numbers: got"
    if not isinstance(layout, Mapping):
        raise TypeError(f"{form} {layout!r}.")
    for module, parameters in layout.items():
        if not isinstance(parameters, Mapping):
            raise TypeError(f"{form} {parameters!r} for {module!r}.")
        for parameter, pair in parameters.items():
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"{form} {pair!r} for {parameter!r}.")
            for number in pair:
                validate_integer(number, f"heads, a number of {parameter!r},")
            name, (before, heads) = f"{module}.{parameter}".lstrip("."), map(int, pair)
            if name not in shapes or before < 1 or heads < 1 or shapes[name].numel() % (before * heads):
                got = f"{tuple(shapes[name])}" if name in shapes else "no such parameter"
                raise ValueError(
                    f"heads must divide a trained parameter into (before, heads, rest): {name!r} into "
                    f"{(before, heads)}, got {got}."
                )
            cuts[name] = _Cut(module, before, heads)
    return cuts


def _names(path: Trajectory, cuts: Mapping[str, _Cut]) -> tuple[tuple[str, str, str], ...]:
    """Return parameter, module and head of each piece."""
    pieces = list[tuple[str, str, str]]()
    most = {
        cut.module: max(other.heads for other in cuts.values() if other.module == cut.module) for cut in cuts.values()
    }
    for name in path.model.names:
        module, cut = name.rpartition(".")[0] or name, cuts.get(name)
        if cut is None:
            pieces.append((name, module, ""))
            continue
        kind = "head" if cut.heads == most[cut.module] else "key-value head"
        pieces += [(name, module, f"{cut.module or 'network'} {kind} {h}") for h in range(cut.heads)]
    return (*pieces, *([("moving statistics", "moving statistics", "")] if path.model.statistics else []))
