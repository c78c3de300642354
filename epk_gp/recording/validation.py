"""Validation of what a recorder is given: network, optimizer, data and batches."""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from jaxtyping import Shaped
from torch import Tensor, nn

from epk_gp.core.checks import as_tensor, validate_finite, validate_tensor
from epk_gp.core.inputs import Graph, Inputs, tensors_of
from epk_gp.core.model import NUM_FINGERPRINT_POINTS, FunctionalModel, fingerprint_outputs, perturbed_initial
from epk_gp.core.signature import Signature, parse_graph, parse_signature
from epk_gp.optimizers.torch_rules import Optimizers, as_optimizers

# Rows that are evaluated together and one by one, to see whether the rows of a batch influence each other.
_NUM_ROWS = 8
_SMALL_NETWORK = 1 << 20  # weights up to which frozen parameters of an optimizer are recorded in any case
_NUM_FINITE_ROWS = 64  # inputs at which the initial outputs must be finite


def trained_names(net: nn.Module, optimizers: Optimizers, trained: Collection[str] = ()) -> tuple[str, ...]:
    """Return the names of the parameters that one or several optimizers train.

    Args:
        net: The network.
        optimizers: Its optimizers.
        trained: Names of further parameters that will be trained later in the run, which no optimizer holds yet.

    Raises:
        TypeError: `net` is not a module, or there is something else than an optimizer.
        ValueError: An optimizer trains a tensor that is not a parameter of the network, or there is no parameter of a
            stated name.
    """
    if not isinstance(net, nn.Module):
        raise TypeError(f"net must be a torch.nn.Module: got {type(net).__name__}.")
    names = {id(p): name for name, p in net.named_parameters()}
    groups = [group for optimizer in as_optimizers(optimizers) for group in optimizer.param_groups]
    present = _may_be_trained([p for group in groups for p in group["params"]])
    if any(id(p) not in names for p in present):
        raise ValueError(
            "the optimizer must train the network's parameters only: it holds a tensor that is not one of them."
        )
    trained_ids = {id(p) for p in present if p.numel()}  # a parameter without numbers has nothing to train
    if unknown := sorted(set(trained) - set(names.values())):
        raise ValueError(f"trained must hold names of the network's parameters: got {', '.join(map(repr, unknown))}.")
    return tuple(name for name, p in net.named_parameters() if id(p) in trained_ids or name in trained)


def _may_be_trained(parameters: Sequence[nn.Parameter]) -> list[nn.Parameter]:
    """Return the parameters of optimizers that are trained, and the frozen ones, which may thaw, unless they are many.

    Every recorded parameter is stored with every state.
    """
    trained = [p for p in parameters if p.requires_grad]
    size, trained_size = (sum(p.numel() for p in several) for several in (parameters, trained))
    may_thaw = trained_size > 0 and size <= max(2 * trained_size, _SMALL_NETWORK)
    return list(parameters) if may_thaw else trained


def parse_data(X: Inputs, y: Tensor, output: Callable[[Any], Tensor] | None = None) -> tuple[Tensor, Tensor, Signature]:
    """Return copies of the training inputs and targets, and the signature of a network that takes the inputs.

    Args:
        X: The inputs, a tensor or several, which are packed into one.
        y: Their targets.
        output: Takes the outputs from what the network returns.

    Raises:
        TypeError: The inputs or targets are not tensors, or `output` is no function.
        ValueError: Several inputs do not go together; the inputs have no row per point, are on another device than the
            targets, or are not finite.
    """
    if isinstance(X, Graph):
        return _parse_graph(X, y, output)
    inputs, signature = parse_signature(X, output)
    for name, value in (("X", inputs), ("y", y)):
        if not isinstance(value, Tensor):
            raise TypeError(
                f"{name} must be a torch.Tensor: got {type(value).__name__}. Convert it with torch.as_tensor."
            )
        if value.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor: got {value.layout}. Convert it with {name}.to_dense().")
    is_integer = not inputs.is_floating_point() and not inputs.is_complex() and inputs.dtype != torch.bool
    if inputs.ndim < (1 if is_integer else 2) or len(inputs) == 0:
        advice = " Points of one number each are X[:, None]." if inputs.ndim == 1 and len(inputs) else ""
        raise ValueError(
            "X must have shape (M, ...), where (M,) is for integers alone, with at least one point: got "
            f"{tuple(inputs.shape)}.{advice}"
        )
    if inputs.device != y.device:
        raise ValueError(f"X and y must be on one device: got {inputs.device} and {y.device}.")
    validate_finite(inputs, "X")
    return inputs.detach().clone(), y.detach().clone(), signature


def _parse_graph(graph: Graph, y: Tensor, output: Callable[[Any], Tensor] | None) -> tuple[Tensor, Tensor, Signature]:
    """Return the numbers of all nodes, their targets, and the signature of a network that takes the graph.

    Raises:
        TypeError: The targets are no tensor.
        ValueError: There is none, or they are on another device than the graph.
    """
    validate_tensor(y, "y")
    if y.ndim == 0 or len(y) == 0:
        raise ValueError(f"y must have one row per node of the graph: got shape {tuple(y.shape)}.")
    for key, value in graph.tensors.items():
        if value.device != y.device:
            raise ValueError(
                f"the graph and y must be on one device: tensor {key!r} is on {value.device}, y on {y.device}."
            )
    inputs, signature = parse_graph(graph, len(y), output)
    return inputs, y.detach().clone(), signature


def validated_fingerprint(model: FunctionalModel, state: Tensor, X: Tensor) -> Tensor:
    """Return the fingerprint outputs of a network, after checking that each output depends on its own input alone.

    Raises:
        TypeError: The weights are neither float32 nor float64, the inputs have another dtype than the weights, or the
            network does not take one tensor.
        ValueError: The inputs are on another device; the network cannot take them or changes them; or its outputs are
            not finite, random, or depend on other inputs of the batch.
    """
    start, statistics = state.split([model.num_weights, model.num_statistics])
    if start.dtype not in (torch.float32, torch.float64):
        raise TypeError(f"the weights must be float32 or float64: got {start.dtype}. Convert them with net.float().")
    if X.is_floating_point() and X.dtype != start.dtype:
        raise TypeError(f"X must have the weights' dtype {start.dtype}: got {X.dtype}. Convert one of them.")
    if X.device != start.device:
        raise ValueError(f"X must be on the network's device {start.device}: got {X.device}.")
    _validate_call(model)
    _validate_graph(model, state)
    rows = X[:NUM_FINGERPRINT_POINTS].clone()
    perturbed = torch.cat([perturbed_initial(start), statistics])
    _validate_output_function(model, perturbed, rows)
    try:
        outputs = fingerprint_outputs(model, start, rows, statistics)
    except (RuntimeError, IndexError, AttributeError, KeyError) as error:
        raise ValueError(
            f"the network must accept X: it fails on inputs of shape {tuple(X.shape[1:])} and {X.dtype}: {error}"
            f"{_graph_hint(model, perturbed, X)}"
        ) from error
    if not torch.equal(rows, X[:NUM_FINGERPRINT_POINTS]):
        raise ValueError(
            "the network must leave its inputs as they are: forward() changes them in place. Use operations that make "
            "a new tensor, such as ReLU(inplace=False), on the input."
        )
    with torch.no_grad():
        initial = model(model.unflatten(state), evenly_spread(X, _NUM_FINITE_ROWS))
    validate_finite(
        initial, "the network's outputs at its initial weights", "Repair its forward() or its initial weights."
    )
    validate_row_independence(model, model.unflatten(perturbed), X)
    return outputs


def _validate_call(model: FunctionalModel) -> None:
    """Raise if a network cannot be called with its inputs.

    Raises:
        TypeError: Its forward function takes other arguments.
    """
    signature, layout = inspect.signature(model.module.forward), model.signature.layout
    graph = model.signature.graph
    keys: list[int | str] = [0] if layout is None else [tensor.key for tensor in layout.tensors]
    keys = keys if graph is None else list(graph.tensors)
    is_mapping = layout is not None and layout.is_mapping
    try:
        signature.bind(*[key for key in keys if isinstance(key, int)], **{k: k for k in keys if isinstance(k, str)})
    except TypeError as error:
        if graph is not None:
            raise TypeError(
                f"the network must take the tensors of the graph, {keys}, by position or keyword: forward{signature} "
                f"does not ({error})."
            ) from error
        if layout is None:
            raise TypeError(
                f"the network must take X as its only input: forward{signature} does not ({error}). Pass several "
                "inputs as a tuple or dict of tensors, or wrap the network in a module whose forward takes one tensor."
            ) from error
        raise TypeError(
            f"the network must take the tensors of X, {keys}, as net({'**X' if is_mapping else '*X'}): "
            f"forward{signature} does not ({error})."
        ) from error


def _validate_graph(model: FunctionalModel, state: Tensor) -> None:
    """Raise if a network cannot take a graph, changes it, or does not return one row per node.

    Raises:
        ValueError: It is so; or a floating-point tensor of the graph has another dtype than the weights.
    """
    graph = model.signature.graph
    if graph is None:
        return
    for key, value in graph.tensors.items():
        if value.is_floating_point() and value.dtype != state.dtype:
            raise TypeError(
                f"tensor {key!r} of the graph must have the weights' dtype {state.dtype}: got {value.dtype}. Convert "
                "one of them."
            )
    before = {key: value.clone() for key, value in graph.tensors.items()}
    with torch.no_grad():
        try:
            returned = model.returned(model.unflatten(state), graph.nodes)
        except (RuntimeError, IndexError, AttributeError, KeyError) as error:
            raise ValueError(f"the network must accept the graph: it fails on it: {error}") from error
    difference = graph.difference(before)
    if difference is not None:
        raise ValueError(
            f"the network must leave its inputs as they are: forward() changes the graph in place ({difference}). Use "
            "operations that make a new tensor, such as ReLU(inplace=False), on the input."
        )
    rows = [len(z) for z in tensors_of(returned) if z.ndim]
    if graph.num_nodes not in rows:
        raise ValueError(
            f"the network must return one row per node, as y holds one per node, {graph.num_nodes}: got "
            f"{' and '.join(map(str, rows)) or 'no'} rows. Nodes without a label need a row of y too, which no batch "
            "holds."
        )


def _graph_hint(model: FunctionalModel, state: Tensor, X: Tensor) -> str:
    """Return advice for a network that takes all rows of X together, and no part of them."""
    with torch.no_grad():
        try:
            model.returned(model.unflatten(state), X)
        except (RuntimeError, IndexError, AttributeError, KeyError):
            return ""
    return (
        ". It accepts all rows together: record a network that computes all nodes of a graph in one pass with "
        "epk.Graph(X) in the place of X."
    )


def _validate_output_function(model: FunctionalModel, state: Tensor, rows: Tensor) -> None:
    """Raise if the function that takes the outputs from what the network returns fails.

    Raises:
        ValueError: It raises an error of any kind.
    """
    if model.signature.output is None:
        return
    with torch.no_grad():
        try:
            returned = model.returned(model.unflatten(state), rows)
        except (RuntimeError, IndexError, AttributeError, KeyError, TypeError):
            return  # of the network itself, which is looked at next
        try:
            model.signature.outputs(returned)
        except Exception as error:
            raise ValueError(
                f"output must accept what the network returns, {type(returned).__name__}: it fails with "
                f"{type(error).__name__}: {error}"
            ) from error


def parse_batch(indices: Tensor | Sequence[int], num_points: int, index: int) -> Tensor:
    """Return the indices of a step's batch as a tensor of int64.

    Args:
        indices: Rows of the training data.
        num_points: Number of training points, M.
        index: Number of the step, for the error message.

    Raises:
        TypeError: The indices are not integers.
        ValueError: The batch is empty, or an index is out of range.
    """
    try:
        batch = as_tensor(indices)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"step {index}: a batch must hold integer indices into X: got {indices!r}.") from error
    if batch.ndim != 1 or batch.numel() == 0:
        raise ValueError(
            f"step {index}: a batch must be a non-empty list of indices into X: got shape {tuple(batch.shape)}."
        )
    if batch.is_floating_point() or batch.dtype == torch.bool:
        raise TypeError(f"step {index}: a batch must hold integer indices into X: got {batch.dtype}.")
    low, high = int(batch.min()), int(batch.max())
    if low < 0 or high >= num_points:
        raise ValueError(
            f"step {index}: batch indices must lie in 0..{num_points - 1}: got {low}..{high}. IndexedDataset of a "
            "Subset gives the numbers of the whole data set: pass the recorder X and y of the whole one."
        )
    return batch.detach().to(torch.int64).clone()


def parse_batch_weight(weight: object, num_rows: int, index: int) -> float | Tensor:
    """Return the factor of a batch's loss, or of each of its rows, as a number or as float64.

    Args:
        weight: The factor.
        num_rows: Number of rows of the batch, B.
        index: Number of the step, for the error message.

    Raises:
        TypeError: The factor is no number and no tensor.
        ValueError: A factor is not finite, or there is not one per row.
    """
    if isinstance(weight, Tensor) and weight.ndim:
        if weight.shape != (num_rows,):
            raise ValueError(
                f"step {index}: weight must be a number or have one entry per row of the batch: got shape "
                f"{tuple(weight.shape)} for {num_rows} rows."
            )
        if not torch.isfinite(weight).all():
            raise ValueError(f"step {index}: the weights of a batch's rows must be finite.")
        return weight.detach().cpu().double()
    if isinstance(weight, Tensor):
        weight = float(weight)
    if isinstance(weight, bool) or not isinstance(weight, Real):
        raise TypeError(f"step {index}: weight must be a number, or a tensor with one per row: got {weight!r}.")
    if not math.isfinite(float(weight)):
        raise ValueError(f"step {index}: the weight of a batch must be finite: got {weight}.")
    return float(weight)


def evenly_spread(X: Shaped[Tensor, "n ..."], count: int) -> Shaped[Tensor, "m ..."]:
    """Return at most `count` of the rows, evenly spread."""
    return X[torch.linspace(0, len(X) - 1, min(count, len(X)), device=X.device).long()]


def validate_row_independence(
    model: FunctionalModel, weights: Mapping[str, Tensor], X: Shaped[Tensor, "n ..."]
) -> None:
    """Raise if a forward function is random, or if it mixes the rows of a batch, by whatever layers.

    Args:
        model: The network in evaluation mode.
        weights: Weights to evaluate it at; with a last layer of zeros nothing could be seen.
        X: Inputs to evaluate it on; 8 of them are used, evenly spread.

    Raises:
        ValueError: Two evaluations differ, or 8 inputs evaluated together give other outputs than each alone.
    """
    rows = evenly_spread(X, _NUM_ROWS)
    with torch.no_grad():
        together, again = model(weights, rows), model(weights, rows)
        rounding = torch.finfo(together.dtype).eps ** 0.5 * together.abs().max()
        if (again - together).abs().max() > rounding:
            raise ValueError(
                "training steps must be gradients of a deterministic network: two evaluations of the same inputs "
                "differ, also in evaluation mode (dropout, or noise of its own). Switch the randomness off."
            )
        each = [model(weights, row[None]) for row in rows]
        if any(z.shape != together[:1].shape for z in each):
            raise ValueError(
                f"the number C of outputs must not depend on the batch: got {together.shape[1]} for {len(rows)} inputs "
                f"and {each[0].shape[1]} for one."
            )
        alone = torch.cat(each)
    difference = (alone - together).abs().max()
    if difference > rounding:
        raise ValueError(
            f"an output must depend on its own input alone: evaluated together, {len(rows)} inputs give outputs that "
            f"differ by {float(difference):.2e} from those of each alone. Remove batch statistics from forward(), and "
            "compute in the precision of the weights."
        )


def validate_batch_statistics(net: nn.Module) -> None:
    """Raise if a layer uses the statistics of the batch in evaluation mode too.

    Raises:
        ValueError: A normalisation keeps no running statistics. The message names the module.
    """
    for name, module in net.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None:
            raise ValueError(
                f"an output must depend on its own input alone: module {name!r} ({type(module).__name__}) uses the "
                "statistics of the batch, in evaluation mode too. Let it keep running statistics "
                "(track_running_stats=True), or use another normalisation."
            )
