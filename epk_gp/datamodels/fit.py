"""The datamodel of a recorded run, of several runs, or of any checkpoints."""

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

import torch
from jaxtyping import Int64, Shaped
from torch import Tensor, nn

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.autodiff.scalars import Function, RowFunction, ask, scores_of_loss
from epk_gp.autodiff.verification import with_plan
from epk_gp.core.checks import (
    ComputeOptions,
    ComputeSettings,
    door,
    parse_options,
    validate_count,
    validate_integer,
    validate_labels,
    validate_tensor,
)
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import ClassLoss, CrossEntropy, Head, Loss, resolve_head
from epk_gp.core.trajectory import Trajectory, outputs_at, parse_inputs, validate_trajectory, warn_unless_live
from epk_gp.datamodels.kernels import (
    FEW_STATES,
    NUM_STATES,
    CheckpointNodes,
    KernelWork,
    Questions,
    checkpoint_nodes,
    path_nodes,
)
from epk_gp.datamodels.model import CORRECTION, LEAST_PAIRS, LINEAR, RIDGE, TRAINING, Datamodel, joined
from epk_gp.datamodels.training import LARGEST_DENSE, Coordinates, PathTraining, PseudoLabels, gauss_newton_scores
from epk_gp.kernel_machine.certificate import run_findings, warn_unless_certified
from epk_gp.kernel_machine.influence import Influence, influence
from epk_gp.kernel_machine.retrain import require_loss_as_function
from epk_gp.trained.between import CHECKPOINTS, path_of_checkpoints
from epk_gp.trained.checkpoints import Checkpoint, listed
from epk_gp.work.run import run as run_pieces

_DRAWS = 8  # most labels drawn per sample: measured, 1 to 8 give LDS .69, .74, .76, .78 (letters)
_MISSED = 0.5  # share of the numbers' change: measured, 10 to 15 % occur with LDS above .75, 30 % with .6
_LARGEST_SHARE = 2.0  # largest ratio of an exact derivative to path training's: if training amplifies, it is noise
_EXACT = 1e10  # multiplications of all kernels up to which the metric enters outer products exactly: about .3 s


@door
def datamodel(
    trajectory: Trajectory | Sequence[Trajectory] | Sequence[Checkpoint] | str | os.PathLike[str],
    X: Inputs,
    y: Shaped[Tensor, "n ..."] | None = None,
    *,
    head: Head | None = None,
    classes: Int64[Tensor, " n"] | None = None,
    function: Function | None = None,
    derivative: Influence | bool = False,
    pairs: int = 0,
    seed: int = 0,
    data: tuple[Inputs, Shaped[Tensor, "M ..."]] | None = None,
    network: nn.Module | None = None,
    loss: Loss | nn.Module | None = None,
    optimizer: Literal["Adam", "SGD"] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    **options: Unpack[ComputeSettings],
) -> Datamodel:
    """Predict a network's answers after training on other subsets of its samples: for all subsets and questions.

    One pass over six states of the recorded run gives the path kernel of its loss in the metric of its optimizer. The
    kernel simulates the training on any subset (`Datamodel.predict`), and its ridge scores each sample
    (`Datamodel.scores`). docs/theory.md, section 12, has the derivation.

    Args:
        trajectory: Recorded run on M samples; or several runs on the same samples, such as on random halves of them,
            whose predictions are averaged. Or at least six checkpoints, as in `between`, at even times from the initial
            network to the trained one.
        X: n inputs, with the structure of the training inputs.
        y: The class of each input, whose log-odds is explained. Not needed with classes or a function; for squared
            error the outputs are explained, for any y.
        head: "logits" or "log_softmax" of outputs; None follows the loss.
        classes: Explain one output of each input instead of log-odds.
        function: Explain the results of a function of the network's result, as in `attribute`: (n,) or (n, K) numbers,
            which are n K questions, input by input.
        derivative: Add a quarter of the difference between an exact derivative and that of the path training, which is
            best if few samples are left out: the result of `influence` for the same questions, or True to compute it.
            An exact derivative that is more than twice as large, because training amplifies it, is scaled down to this
            size.
        pairs: Number of pairs of complementary random halves to retrain (`retrain`): for the unit of predictions, the
            better method, and a forecast of the linear datamodeling score.
        seed: Seed of the halves.
        data: With checkpoints, training inputs and targets.
        network: With checkpoints, the network.
        loss: With checkpoints, the loss; cross entropy by default.
        optimizer: With checkpoints, the optimizer that scaled the steps, "Adam" or "SGD"; None takes the one whose
            steps best follow the changes between checkpoints.
        output: With checkpoints, the argument of `Recorder`.
        options: `memory_budget`, `progress`, `checkpoint` and `executor`; see `ComputeOptions`.

    Returns:
        The datamodel, in the dtype of X (of the weights, for integers).

    Raises:
        TypeError, ValueError: As in `attribute`; or the loss is not stated; the run has fewer than six steps; its steps
            do not have one number per weight (Muon, Shampoo, SOAP); runs have other data; or the kernel does not fit
            into half of `memory_budget`.
    """
    parsed = parse_options("datamodel", ("accumulate",), **options)
    validate_count(pairs, "pairs", minimum=LEAST_PAIRS if pairs else 0)
    validate_integer(seed, "seed")
    runs: tuple[Any, ...] = tuple(trajectory) if isinstance(trajectory, list | tuple) else (trajectory,)
    if network is not None or data is not None:
        if network is None or data is None:
            raise ValueError("checkpoints need both data= and network=: one of them is missing.")
        if optimizer not in (None, "Adam", "SGD"):
            raise ValueError(f'optimizer must be "Adam", "SGD" or None: got {optimizer!r}.')
        stated = CrossEntropy() if loss is None else loss
        runs = (path_of_checkpoints(network, listed(trajectory), data, stated, output)[0],)
    if not runs:
        raise ValueError("trajectory must be a run, or several: got none.")
    for run in runs:
        validate_trajectory(run)
    if any(run.data_digest != runs[0].data_digest for run in runs):
        raise ValueError("runs must have the same training samples, in the same order: got others. Record all of them.")
    if derivative is not False and len(runs) > 1:
        raise ValueError("derivative must be of one run: got several. Leave it out.")
    asked: dict[str, Any] = {"head": head, "classes": classes, "function": function}
    models = [_of_run(run, X, y, asked, _in_folder(parsed, f"run-{k}"), optimizer) for k, run in enumerate(runs)]
    model = joined(models)
    if derivative is not False:
        model = _corrected(model, X, asked, derivative, _in_folder(parsed, "derivative").settings)
    if pairs:
        model = model.with_forecast(pairs, seed, **_in_folder(parsed, "halves").settings)
    warn_unless_certified("the datamodel", model.findings)
    return model


def _in_folder(options: ComputeOptions, name: str) -> ComputeOptions:
    """Return the options of a part of the computation; its checkpoint is a folder inside that of the whole."""
    return options if options.checkpoint is None else replace(options, checkpoint=Path(options.checkpoint) / name)


def _of_run(
    run: Trajectory, X: Any, y: Any, asked: dict[str, Any], options: ComputeOptions, optimizer: str | None
) -> Datamodel:
    require_loss_as_function(run, "epk_gp.datamodel")
    warn_unless_live(run)
    X = parse_inputs(run, X).detach()
    trained, coordinates = _training_side(run, run.targets.to(X.device))
    questions = _questions(run, X, y, coordinates, **asked)
    is_path = run.update_rule == CHECKPOINTS
    if is_path and isinstance(coordinates, PseudoLabels):
        raise ValueError(
            "a datamodel of scores at positions needs a recorded run: the time of a training does not follow from its "
            "checkpoints there. Record it, or use a network that returns scores (n, C)."
        )
    nodes = checkpoint_nodes(run, optimizer) if is_path else path_nodes(run.trained)

    def compute(net: PlannedModel, trained_net: PlannedModel) -> Datamodel:
        work = KernelWork(
            nodes=nodes,
            first=0 if isinstance(coordinates, Coordinates) else NUM_STATES // 2,
            trained=trained,
            coordinates=coordinates,
            questions=questions,
            is_exact=True,
            memory_budget=options.memory_budget,
            plan=net.plan,
            recorded_plan=trained_net.plan,
        )
        if NUM_STATES * work.piece_bytes > options.memory_budget // 2 and work.first == 0 and not is_path:
            work = replace(work, nodes=path_nodes(run.trained, FEW_STATES))
        rows, columns = work.shape
        is_exact = work.num_nodes * rows * columns * run.num_weights <= _EXACT
        return _fitted(replace(work, is_exact=is_exact), options)

    return with_plan(compute, questions.X, questions.run, trained)


def _training_side(run: Trajectory, targets: Shaped[Tensor, "M ..."]) -> tuple[Trajectory, Coordinates | PseudoLabels]:
    """Return the coordinates of the samples' loss, and the run whose network gives them."""
    if run.loss_takes_outputs:
        return run, Coordinates(run.loss, targets, run.num_outputs)
    found, loss = scores_of_loss(run, run.inputs, run.targets), run.loss
    if found is not None and len(found[2]) == 1:
        return found[0], Coordinates(loss, targets, found[0].num_outputs)
    if found is None or not isinstance(loss, ClassLoss) or targets.is_floating_point():
        raise ValueError(
            f"a datamodel needs a loss of outputs (n, C), or of classes at positions: got {loss} of what else the "
            "network returned. Record the run without output=, or ask epk_gp.influence."
        )
    draws = max(1, min(_DRAWS, LARGEST_DENSE // run.num_points))
    return found[0], PseudoLabels(loss, targets, found[2], draws)


def _questions(
    run: Trajectory, X: Tensor, y: Any, side: Coordinates | PseudoLabels, *, head: Any, classes: Any, function: Any
) -> Questions:
    if function is not None:
        if not (head is None and classes is None and y is None):
            raise ValueError("y, head or classes, and function, must not be given together: let the function choose.")
        return Questions(*ask(run, X, function), None, "logits")
    if y is not None and not (head is None and classes is None):
        raise ValueError("y must be given without head or classes: it asks for log-odds, and they ask for outputs.")
    if classes is not None:
        validate_labels(classes, len(X), run.num_outputs, name="classes")
        own = resolve_head(head, run.loss, run.num_outputs)
        return Questions(run, X, classes.to(X.device, torch.int64), own)
    if y is None and (isinstance(side, PseudoLabels) or side.are_margins):
        raise ValueError("y must have the class of each input, whose log-odds is explained: got None.")
    if isinstance(side, PseudoLabels):
        return Questions(*ask(run, X, RowFunction.log_probability(y)), None, "logits")
    if y is not None and (side.are_margins or side.is_logit):
        validate_labels(y, len(X), max(2, side.num_outputs), name="y")
        scores = None if run.loss_takes_outputs else scores_of_loss(run, X, y)
        asked = (run, X) if scores is None else scores[:2]
        return Questions(*asked, y.to(X.device, torch.int64), None)
    if y is not None:
        validate_tensor(y, "y")
    return Questions(run, X, None, resolve_head(head, run.loss, run.num_outputs))


def _fitted(work: KernelWork, options: ComputeOptions) -> Datamodel:
    """Compute the kernels of a run, and the datamodel from them."""
    nodes, questions, coordinates, size = work.nodes, work.questions, work.coordinates, work.piece_bytes
    N, count, fitting = work.shape[1], work.num_nodes, options.memory_budget // 2 // work.piece_bytes
    groups = max((number for number in (1, 2, FEW_STATES, NUM_STATES) if number <= min(fitting, count)), default=0)
    if not groups:
        raise ValueError(
            f"half of memory_budget must hold the kernel of {N:,} gradients of training samples, {size:,} bytes: got "
            f"memory_budget={options.memory_budget:,}. Pass a larger one, or record fewer samples."
        )
    work = replace(work, groups=count if isinstance(coordinates, PseudoLabels) else groups)
    recorded, findings = questions.values(-1), run_findings(nodes.run)
    weights, trainings = nodes.sample_weights.to(recorded), tuple[PathTraining, ...]()
    sums = (own.added for _, own in run_pieces(work, options, "datamodel"))
    if isinstance(coordinates, PseudoLabels):
        of_states = [gauss_newton_scores(own["kernel"].mul_(NUM_STATES), weights, coordinates.draws) for own in sums]
        scores = torch.stack(of_states).mean(dim=0)
    else:
        found = list(sums)
        along, sizes = (torch.cat([own[name] for own in found]) for name in ("coordinates", "diagonals"))
        start = torch.cat([coordinates.of(outputs_at(work.trained, work.inputs, 0, "logits")), questions.values(0)])
        forces, curvatures = coordinates.along(along.T)
        curvature = float(curvatures @ sizes / sizes.sum())
        training = PathTraining(
            tuple(own["kernel"] for own in found), start, recorded, coordinates, weights, forces.mean(dim=1), curvature
        )
        if isinstance(nodes, CheckpointNodes):
            training, is_reached = training.with_time(along[-1])
            nearest = "path training never has the last checkpoint's residuals: it ends where it is nearest to it"
            findings += () if is_reached else (nearest,)
        scores, trainings = training.ridge(), (training,)
    if not bool(scores.isfinite().all()):
        raise ValueError("scores must be finite: gradients along the run overflow, or hold NaN.")
    model = Datamodel(
        outputs=recorded,
        scores=scores,
        present=(weights > 0).to(weights),
        states=nodes.steps[work.first :],
        num_gradients=count * work.shape[0],
        trajectories=(questions.run.recorded,),
        questions=questions,
        method=LINEAR if not trainings else RIDGE if N > LARGEST_DENSE else TRAINING,
        metric="exact" if work.is_exact or nodes.is_even else "factored",
        trainings=trainings,
        findings=findings,
    )
    if model.method == TRAINING and not model.miss <= _MISSED:
        finding = f"training in the path kernel ends {model.miss:.0%} of the numbers' change from the recorded network"
        model = replace(model, findings=(*model.findings, finding))
    return model


def _corrected(model: Datamodel, X: Any, asked: dict[str, Any], derivative: Any, options: ComputeSettings) -> Datamodel:
    """Return a datamodel with a share of the difference between an exact derivative and its own."""
    if derivative is True:
        log_odds = model.questions.as_function
        explained = asked if log_odds is None else {"function": log_odds}
        derivative = influence(model.trajectories[0], X, **explained, **options)
    if not isinstance(derivative, Influence):
        raise TypeError(f"derivative must be what epk_gp.influence returned, or True: got {derivative!r}.")
    E, own = derivative.values.flatten(0, 1).to(model.scores), derivative.outputs.flatten().to(model.outputs)
    if E.shape != model.scores.shape or not torch.allclose(own, model.outputs, rtol=1e-3, atol=1e-3):
        raise ValueError(
            f"derivative must be of the same {len(model.outputs)} numbers and {model.scores.shape[1]} samples: got "
            f"values {tuple(derivative.values.shape)}, of other numbers. Pass derivative=True."
        )
    G = model.derivative()
    size = (_LARGEST_SHARE * G.norm(dim=1) / E.norm(dim=1)).nan_to_num(0.0).clamp(max=1.0)
    return replace(model, correction=CORRECTION * (size[:, None] * E - G))
