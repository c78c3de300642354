"""A network that was not recorded, as a run without steps; its tangent kernel (Jacot et al. 2018), also in GPyTorch."""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack, cast

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from epk_gp.autodiff.scalars import dim_of_loss
from epk_gp.core.checks import ComputeSettings, parse_options
from epk_gp.core.graphs import Graph, Ragged, as_ragged, map_tensors, tensors_of
from epk_gp.core.inputs import Inputs, Points, Signature
from epk_gp.core.losses import Head, Loss, apply_head, resolve_head
from epk_gp.core.model import perturbed_initial, uncompiled
from epk_gp.core.show import warn_caller
from epk_gp.core.step import fingerprint_data
from epk_gp.core.trajectory import Trajectory, parse_inputs
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernel_machine.reconstruct import tangent_trajectory
from epk_gp.kernels.blocks import Outputs, parse_outputs
from epk_gp.kernels.epk import CACHE_BYTES, EPKKernel
from epk_gp.quadrature.rules import QuadratureRule
from epk_gp.recording.recorder import Recorder
from epk_gp.recording.setup import validate_row_independence
from epk_gp.storage.rows import Targets, TrainingInputs

OtherInputs = Shaped[Tensor, "m ..."] | Sequence[Tensor] | Mapping[str, Tensor] | Ragged  # m inputs
_NUM_EXAMPLES = 8  # rows on which the network is tested: more than those on which its derivatives are compared


def as_trajectory(
    net: nn.Module,
    X: TrainingInputs,
    y: Targets = None,
    *,
    loss: Loss | nn.Module | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Trajectory:
    """Return the run without steps of a network in evaluation mode, at its present weights that require gradients.

    The network is copied, and its modes do not change. Its moving statistics are constants, like all of its buffers.

    Args:
        net: The network.
        X: n inputs, as `Recorder` takes them; they replace the training inputs.
        y: Their targets, if a loss is stated.
        loss: The loss of the targets; None states none.
        output: Maps the network's result to outputs (n, C), if it has another form.

    Raises:
        TypeError, ValueError: Network, inputs, targets and loss do not fit, or no weight requires a gradient.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"the network must be a torch.nn.Module: got {type(net).__name__}.")
    if not any(p.requires_grad for p in net.parameters()):
        raise ValueError(
            "the network must have weights that require gradients, with respect to which it is differentiated: it has "
            "none. Call net.requires_grad_(True), or requires_grad_(True) of the parameters to differentiate in."
        )
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        if isinstance(X, Graph) and y is None:  # one row per node
            z = next(tensors_of(net(*X.args, **X.kwargs)))
            y = z.new_zeros(len(z))
        run = Recorder(net, None, X, y, loss=loss, output=output).trajectory
        dim_of_loss(run)  # no step will check it
    finally:
        for module, mode in modes:
            module.training = mode
    return replace(run, live=None)


@dataclass(frozen=True)
class _OneOutput:
    """Takes one output from a network's result: its gradients cost 1 / C of those of all outputs.

    Attributes:
        output: Takes all outputs.
        head: The head of the outputs.
        index: Index of the output.
    """

    output: Callable[[Any], Tensor] | None
    head: Head
    index: int

    def __call__(self, returned: Any) -> Float[Tensor, "n 1"]:
        return apply_head(Signature(output=self.output).outputs(returned), self.head)[:, self.index, None]


def ntk(
    model: nn.Module,
    X: Inputs,
    X2: OtherInputs | None = None,
    *,
    outputs: Outputs = "full",
    diagonal: bool = False,
    head: Head = "logits",
    output: Callable[[Any], Tensor] | None = None,
    **options: Unpack[ComputeSettings],
) -> Float[Tensor, "..."]:
    """Compute the empirical neural tangent kernel of a network at its present weights, in evaluation mode.

        K(x, x') = J(x) J(x')^T    (C x C),    J(x) = df(x) / dw

    w are the weights that require gradients. The kernel has the dtype and the device of the inputs, and the network is
    not changed. Before the first block of a network, its fast derivatives are tested against autograd, which takes 0.2
    s for a small one; `NTKKernel` keeps the result.

    Args:
        model: The network, with C outputs.
        X: n inputs: a tensor; a tuple or dict of tensors, called as net(*X) or net(**X); rows of unequal lengths
            (`Ragged`); or a `Graph`, whose n nodes are the points.
        X2: m inputs of the same kind, node numbers for a graph; None for X itself, with half of the products.
        outputs: "full" - the whole C x C blocks; "trace" - their trace; "independent" - their diagonal, a matrix for
            each output; an integer c - K(x, x')[c, c], at the cost of a network with one output.
        diagonal: Whether to compute only the kernel of each point with itself, at a cost linear in n.
        head: "logits" for f as the network returns it, "log_softmax" for its log-softmax.
        output: Maps the network's result to outputs (n, C), if it has another form.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`; see `ComputeOptions`.

    Returns:
        (n, C, m, C) for "full", (n, m) for "trace" and a class, (C, n, m) for "independent"; with `diagonal`
        (n, C, C), (n,) and (C, n). The first may be a view: `reshape` flattens it.

    Raises:
        TypeError, ValueError: Network and inputs do not fit, an output depends on other rows (a single row without X2
            cannot show this), no weight requires a gradient, the output does not exist, or an option is unknown.
    """
    parsed = parse_options("ntk", ("accumulate",), **options)
    if diagonal and X2 is not None:
        raise ValueError("diagonal=True takes each point with itself: X2 must be None.")
    if (rows := as_ragged(X)) is not None:
        others = None if X2 is None else as_ragged(X2, rows.call)
        longest = max(len(row) for own in (rows, others) if own is not None for row in own.rows)
        X, X2 = replace(rows, longest=longest), X2 if others is None else replace(others, longest=longest)
    run, head, kind = _run_of(model, X, head, outputs, output)
    kernel = PathKernel(run, head, QuadratureRule.left_endpoint())
    a = Points(parse_inputs(run, X), is_train=True)
    if not diagonal:
        b = a if X2 is None else Points(parse_inputs(run, X2, "X2"), is_train=True)
        if b is not a and run.model.signature.graph is None:  # X alone may have one row
            both = torch.cat([side.X[: _NUM_EXAMPLES // 2].to(run.inputs) for side in (a, b)])
            validate_row_independence(run.model, run.model.unflatten(perturbed_initial(run.states[0])), both)
        blocks = {"full": kernel.block, "independent": kernel.block_per_class, "trace": kernel.trace_block}
        return blocks[kind](a, b, **parsed.settings)
    K = kernel.diagonal_blocks(a, **parsed.settings)
    return K if kind == "full" else torch.einsum("ncc->cn" if kind == "independent" else "ncc->n", K)


def _run_of(
    model: nn.Module, X: Inputs, head: Head, outputs: Outputs, output: Callable[[Any], Tensor] | None
) -> tuple[Trajectory, Head, Literal["full", "independent", "trace"]]:
    """Return a run whose path kernel is the tangent kernel, with head and outputs; a class gives one output."""
    weight = next(model.parameters(), None) if isinstance(model, nn.Module) else None
    X = X if weight is None else _examples(X, weight)
    run = as_trajectory(model, X, output=output)
    head = resolve_head(head, run.loss, run.num_outputs)
    structure, index = parse_outputs(outputs, run.num_outputs)
    if isinstance(outputs, str):
        return tangent_trajectory(run), head, structure.kind
    return tangent_trajectory(as_trajectory(model, X, output=_OneOutput(output, head, int(index)))), "logits", "trace"


def _examples(X: Inputs, weight: Tensor) -> Inputs:
    """Return a few rows of the inputs for the network, in the dtype and on the device of its weights."""

    def few(x: Tensor) -> Tensor:
        rows = torch.linspace(0, len(x) - 1, min(len(x), _NUM_EXAMPLES), device=x.device).long()
        return x[rows].to(weight.device, weight.dtype if x.is_floating_point() else x.dtype)

    if isinstance(X, Graph):
        return X
    if (ragged := as_ragged(X)) is not None:
        return replace(ragged, rows=ragged.rows[:_NUM_EXAMPLES], longest=max(ragged.longest, *map(len, ragged.rows)))
    if not isinstance(X, Tensor | Sequence | Mapping):
        raise TypeError(f"X must be a torch.Tensor, or a tuple or dict of them: got {type(X).__name__}.")
    return cast(Inputs, map_tensors(X, lambda x: few(x) if x.ndim and len(x) else x))


class NTKKernel(EPKKernel):
    """The empirical tangent kernel of a network in GPyTorch: K(x, x') = J(x) J(x')^T at its present weights.

    Points are rows of flattened inputs. The kernel keeps a copy of the network in evaluation mode, whose weights are
    not parameters of the kernel; it warns if the network's weights change later. Everything else is as in `EPKKernel`:
    sums, products, batches, derivatives in the points, the cache. A state dict loads only into a kernel of a network
    with the same weights.

    Args:
        model: The network, with C outputs.
        X: Some inputs in the form that the network takes: only their shapes and kinds count. None for rows of numbers.
        input_shape: Shape of one input, such as (1, 28, 28), instead of X. It is known for a network that begins with
            `nn.Linear`.
        outputs: "full", "independent", "trace" or an integer; see `EPKKernel`.
        head: "logits", or "log_softmax".
        normalize: None, a positive number to divide by, or "cosine".
        output: Maps the network's result to outputs (n, C), if it has another form.
        cache_bytes: Limit for the kept blocks; 0 keeps none.
        active_dims: Columns of wider inputs to use.
        options: `memory_budget` and `executor`; see `ComputeOptions`.

    Raises:
        TypeError, ValueError: As in `ntk`; or the shape of an input must be stated.
    """

    _source = "network"

    def __init__(
        self,
        model: nn.Module,
        X: Inputs | None = None,
        *,
        input_shape: Sequence[int] | None = None,
        outputs: Outputs = "full",
        head: Head = "logits",
        normalize: Literal["cosine"] | float | int | None = None,
        output: Callable[[Any], Tensor] | None = None,
        cache_bytes: int = CACHE_BYTES,
        active_dims: Sequence[int] | None = None,
        **options: Unpack[ComputeSettings],
    ) -> None:
        if cast(object, normalize) == "mean_diagonal":
            raise ValueError("normalize must be None, a positive number or 'cosine': there are no training points.")
        X = _random_inputs(model, input_shape) if X is None else X
        run, head_of_run, kind = _run_of(model, X, head, outputs, output)
        identity = fingerprint_data(run.states[0], *run.model.frozen_state().values())  # independent of the examples
        super().__init__(
            replace(run, digest=identity), kind, head_of_run, QuadratureRule.left_endpoint(), normalize,
            cache_bytes=cache_bytes, active_dims=active_dims, **options,
        )  # fmt: skip
        self.outputs, self.head, self._network = outputs, head, weakref.ref(uncompiled(model))

    def rows(self, X: Inputs) -> Shaped[Tensor, "n D"]:
        """Return inputs as the kernel's rows: images flattened, several tensors side by side."""
        return self.trajectory.model.signature.pack(X).flatten(1)

    def __call__(self, x1: Shaped[Tensor, "*b n columns"], x2: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Evaluate lazily, as every GPyTorch kernel."""
        self._warn_unless_equal()
        D = len(self.input_dims)
        for x in (x for x in (x1, x2) if isinstance(x, Tensor) and x.ndim):
            width = x.shape[-1] if self.active_dims is None else len(self.active_dims)
            if width != D:
                shape = f"{D} columns, flattened inputs {self.trajectory.input_shape}"
                raise ValueError(f"points must have {shape}: got {width}. NTKKernel.rows(X) flattens inputs.")
        return super().__call__(x1, x2, *args, **kwargs)

    def _warn_unless_equal(self) -> None:
        """Warn if the network's weights, frozen parameters or buffers differ from those that the kernel keeps."""
        run, net = self.trajectory, self._network()
        kept = {**run.model.unflatten(run.states[0]), **run.model.frozen_state()}
        present = {} if net is None else {**dict(net.named_parameters()), **dict(net.named_buffers())}
        moved = [
            name for name, now in present.items() if name in kept and not torch.equal(now.to(kept[name]), kept[name])
        ]
        if moved:
            warn_caller(
                f"an NTKKernel keeps the weights that the network had when it was made: {moved[0]!r} and "
                f"{len(moved) - 1} more are others now. Make a kernel of the network as it is, NTKKernel(model)."
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return the pickled form, without the user's network."""
        return {**cast(dict[str, Any], super().__getstate__()), "_network": type(None)}

    def __repr__(self) -> str:
        kernel_of = f"{self.trajectory.num_weights} weights, points of shape {self.trajectory.input_shape}"
        form = f"outputs={self.outputs!r}, head={self.head!r}, batch_shape={tuple(self.batch_shape)}"
        return f"NTKKernel({kernel_of}, {form})"


def _random_inputs(model: nn.Module, input_shape: Sequence[int] | None) -> Float[Tensor, "n ..."]:
    """Return inputs of a shape, by default the one that the first linear layer of the network takes."""
    layer = next((m for m in model.modules() if next(m.parameters(recurse=False), None) is not None), None)
    if input_shape is None and not isinstance(layer, nn.Linear):
        raise ValueError(
            "the shape of one input must be stated for a network that does not begin with nn.Linear: got "
            f"{type(layer).__name__}. Give input_shape=(1, 28, 28), or some of its inputs as X."
        )
    shape = (cast(nn.Linear, layer).in_features,) if input_shape is None else tuple(input_shape)
    return torch.randn(_NUM_EXAMPLES, *shape, generator=torch.Generator().manual_seed(0))
