"""Faults in loops and in records of runs: none goes unnoticed.

In a recorded run, results are not certified and say at which step; in a loop, the step is refused and its cause named,
or what the network really did is recorded and the results are exact.
"""

import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from captured_loops import FEATURES, POINTS, CapturedLoop, Odd
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_

import epk_gp as epk
from epk_gp.core.step import SeenRows

TEST = torch.randn(2, 4, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
STEP = 1


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The honest run of each feature, in memory and on disk."""
    folder = tmp_path_factory.mktemp("runs")
    return {
        (feature, on_disk): CapturedLoop(feature).run(folder / feature if on_disk else None)
        for feature in FEATURES
        for on_disk in (False, True)
    }


@pytest.mark.mostly_slow
@pytest.mark.parametrize("on_disk", [False, True], ids=["memory", "disk"])
@pytest.mark.parametrize("feature", FEATURES)
def test_an_honest_run_is_certified(runs, feature, on_disk):
    """The control."""
    run = runs[feature, on_disk]
    result, shares = epk.reconstruct(run, TEST), epk.attribute(run, TEST)
    assert result.certified
    assert shares.certified
    assert (shares.total - result.network).abs().max() < 1e-10


def of_step(**changes):
    def tampered(run):
        steps = list(run.steps)
        steps[STEP] = replace(steps[STEP], **{name: change(run, steps[STEP]) for name, change in changes.items()})
        return replace(run, steps=tuple(steps))

    return tampered


def of_pass(number=-1, **changes):
    def passes(run, step):
        found = list(step.passes)
        values = {name: change(run, found[number]) for name, change in changes.items()}
        found[number] = replace(found[number], **values)
        return tuple(found)

    return of_step(passes=passes)


def of_states(state):
    def tampered(run):
        found = [run.statistics[s].clone() for s in range(run.num_steps + 1)]
        found[state][0] += 1e-6
        return replace(run, statistics=tuple(found))

    return tampered


def moved(rows):
    values = rows.values.clone()
    values[2, 1] += 1e-4
    return SeenRows(rows.index, values)


def permuted(rows):
    return SeenRows(rows.index, rows.values.roll(1, 0))


def nothing(run, _):
    return None


IN_EVALUATION = of_pass(modes=lambda _, forward: torch.zeros_like(forward.modes))
RANDOM = {
    "mask_of_another_step": of_pass(random_state=lambda run, _: run.steps[2].passes[0].random_state),
    "mask_of_another_seed": of_pass(random_state=lambda *_: torch.Generator().manual_seed(5).get_state()),
    "no_random_state": of_pass(random_state=nothing),
    "all_in_evaluation_mode": IN_EVALUATION,
    "no_modes": of_pass(modes=nothing),
    "neither": of_pass(modes=nothing, random_state=nothing),
    "rows_in_another_order": of_step(batch=lambda _, step: step.batch.roll(1)),
    "weights_of_samples": of_step(sample_weights=lambda *_: torch.tensor([2.0] + [1.0] * 7).double() / 8),
}
ONE_WEIGHT = of_step(sample_weights=lambda _, step: step.sample_weights * (1 + 1e-3 * (torch.arange(8) == 2)))
TAMPERS = {
    "dropout": RANDOM,
    "two_optimizers": RANDOM,
    "batch_norm": {
        "state_after": (of_states(STEP + 1), STEP),
        "first_state": (of_states(0), 0),
        "last_state": (of_states(3), 2),
        "statistics_before": of_pass(statistics=lambda run, _: run.statistics[0]),
        "statistics_after": of_pass(statistics_after=lambda run, _: run.statistics[1]),
        "all_in_evaluation_mode": IN_EVALUATION,
        "no_modes": of_pass(modes=nothing),
        "another_row": of_step(batch=lambda _, step: torch.cat([step.batch[:-1], (step.batch[-1:] + 3) % POINTS])),
    },
    "accumulated_batch_norm": {
        "before_the_second_pass": of_pass(statistics=lambda _, forward: forward.statistics + 1e-6),
        "second_pass_begins_the_step": of_pass(statistics=nothing),
        "after_the_first_pass": of_pass(0, statistics_after=lambda _, forward: forward.statistics_after + 1e-6),
        "first_pass_ends_the_step": of_pass(0, statistics_after=nothing),
        "passes_in_another_order": of_step(passes=lambda _, step: tuple(step.passes)[::-1]),
        "rows_of_the_passes": of_step(
            passes=lambda _, step: tuple(replace(p, num_rows=n) for p, n in zip(step.passes, (3, 5), strict=True))
        ),
    },
    "augmentation": {
        "one_row": of_pass(inputs=lambda _, forward: moved(forward.inputs)),
        "of_another_step": of_pass(inputs=lambda run, _: run.steps[2].passes[0].inputs),
        "as_recorded": of_pass(inputs=nothing),
        "rows_in_another_order": of_pass(inputs=lambda _, forward: permuted(forward.inputs)),
        "samples_in_another_order": of_step(batch=lambda _, step: step.batch.roll(1)),
    },
    "mixup": {
        "one_row": of_pass(inputs=lambda _, forward: moved(forward.inputs)),
        "one_target": of_pass(targets=lambda _, forward: moved(forward.targets)),
        "targets_as_recorded": of_pass(targets=nothing),
        "targets_in_another_order": of_pass(targets=lambda _, forward: permuted(forward.targets)),
    },
    "weights": {
        "one_weight": ONE_WEIGHT,
        "in_another_order": of_step(sample_weights=lambda _, step: step.sample_weights.roll(1)),
        "as_stated": of_step(sample_weights=nothing),
    },
    "accumulation": {
        "one_weight": ONE_WEIGHT,
        "one_batch_left_out": of_step(
            batch=lambda _, step: step.batch[:4], sample_weights=lambda _, step: step.sample_weights[:4]
        ),
    },
}
CASES = [(feature, name, False) for feature, tampers in TAMPERS.items() for name in tampers]
CASES += [(feature, next(iter(tampers)), True) for feature, tampers in TAMPERS.items()]


@pytest.mark.mostly_slow
@pytest.mark.filterwarnings("ignore:your network is not the one that is explained")  # while it lives
@pytest.mark.parametrize(("feature", "name", "on_disk"), CASES)
def test_a_record_that_was_changed_is_not_certified(runs, feature, name, on_disk):
    tamper = TAMPERS[feature][name]
    tamper, step = tamper if isinstance(tamper, tuple) else (tamper, STEP)
    run = tamper(runs[feature, on_disk])
    functions = {"reconstruction": epk.reconstruct} | ({"attribution": epk.attribute} if on_disk else {})
    for name, compute in functions.items():
        with pytest.warns(epk.CertificateWarning, match=f"the {name} is not certified: step {step} differs from"):
            result = compute(run, TEST)
        assert not result.certified


def setting(name, value):
    return lambda loop: setattr(loop, name, value(loop))


def with_loss(value):
    """Take another loss, once."""
    return setting("value", lambda loop: lambda: (vars(loop).pop("value"), value(loop))[1])


def edit(tensor, amount=1e-6):
    @torch.no_grad()
    def edited(loop):
        tensor(loop).view(-1)[0] += amount

    return edited


def first_weight(loop):
    return loop.net[0].weight


def mean(loop):
    return loop.net[1].running_mean


@torch.no_grad()
def without_gradients(loop):
    loop.net(loop.X[:8])


def in_evaluation_mode(loop):
    loop.net.eval()
    loop.net(loop.X[:8])
    loop.net.train()


def others(loop):
    return (loop.rows + 3) % POINTS


def backward_of(rows_of):
    def backward(loop):
        rows = rows_of(loop)
        F.cross_entropy(loop.net(loop.X[rows]), loop.y[rows]).backward()

    return backward


def gradient_of_other_rows(loop):
    for optimizer in loop.optimizers:
        optimizer.zero_grad()
    backward_of(lambda _: range(4, POINTS))(loop)


def penalised(penalty):
    return with_loss(lambda loop: loop.losses().mean() + sum(penalty(p) for p in loop.net.parameters()))


def last_layer(loop):
    return loop.net.last if isinstance(loop.net, Odd) else loop.net[-1]


def hook_outputs(loop):
    loop.net.register_forward_hook(lambda module, args, returned: returned)  # one that only looks
    last_layer(loop).register_forward_hook(lambda module, args, returned: 1.1 * returned)


def add_noise(loop):
    for p in loop.net.parameters():
        if p.grad is not None:
            p.grad += 0.01 * torch.randn_like(p)


def option(name, value, layer=1):
    return lambda loop: setattr(loop.net[layer], name, value)


def options(**values):
    return lambda loop: loop.optimizers[0].param_groups[0].update(values)


def between_the_optimizers(act):
    return lambda loop: loop.optimizers[0].register_step_post_hook(lambda *_: act(loop))


def skip_announcement(loop):
    loop.at.clear()  # that of the first batch alone
    loop.recorder.batch = lambda *_, **__: vars(loop.recorder).pop("batch")


AS_RECORDED = ("plain", "dropout", "batch_norm", "accumulation")  # the network sees X[batch]
NORM = ("batch_norm", "accumulated_batch_norm")
OTHER_GRADIENT = "the change of the weights must be"
NOT_ANNOUNCED = "must be preceded by recorder.batch"  # gradients were cleared: the batch is taken for a skipped one
PLAIN = ("plain",)
ODD = [f"odd_{kind}" for kind in ("functional_dropout", "attention", "centred", "counting", "annealed", "mean")]
# Faults of which one cause is named, and no other: before which place, by what, and the cause.
ADDED = "in '.* does not come through the outputs .*, as of another penalty than L2: unexplained=SHARE records"
EDITED = "in '.* was changed after backward.., by no factor, mask, clipping or decay, as by noise or an edit: unexpl"
OTHER_ROW = r"row 0 was X\[\d+\], the batch says X"
NAMED = {
    "indices_in_another_order": ("forward", setting("announced", lambda loop: loop.rows.roll(1)), OTHER_ROW),
    "indices_of_others": ("forward", setting("announced", others), OTHER_ROW),
    "left_over": ("begin", lambda loop: setattr(loop.optimizers[0], "zero_grad", lambda: None),
        "a gradient was left over when backward.. .* began, .*: call optimizer.zero_grad"),
    "announced_twice": ("announced", lambda loop: loop.recorder.batch(loop.rows),
        "recorder.batch.. was called twice for one forward pass"),
    "a_later_batch_forgotten": ("announce", backward_of(others), "went through 8 other rows: announce them too"),
    "backward_of_other_rows": ("forward", backward_of(lambda _: range(3)),
        "announced rows, and backward.. went through 3 other rows: announce them too"),
    "weights_edited": ("step", edit(lambda loop: last_layer(loop).bias, 0.01),
        r"the weights of '\S+' were changed between batch.. and the end"),
    "another_optimizer": ("step", lambda loop: torch.optim.SGD(loop.net.parameters(), lr=0.02).step(),
        "another optimizer moved the weights by 0.02 times it"),
    "L1_penalty": ("forward", penalised(lambda p: 0.01 * p.abs().sum()), ADDED),
    "fourth_powers": ("forward", penalised(lambda p: 0.1 * p.pow(4).sum() * (p.ndim > 1)), ADDED),
    "orthogonality": ("forward", penalised(lambda W: 0.1 * (W @ W.T - torch.eye(len(W)).to(W)).square().sum() if
        W.ndim == 2 else 0.0), ADDED),
    "gradient_edited": ("announced", edit(lambda loop: last_layer(loop).weight.grad, 0.1), EDITED),
    "noise": ("announced", add_noise, EDITED),
    "no_gradient_left": ("announced", lambda loop: loop.net.zero_grad(set_to_none=False),
        "gradient was 0 in all parameters: zero_grad"),
    "hook_on_gradients": ("begin", lambda loop: last_layer(loop).bias.register_hook(lambda g: g + 0.1),
        "a backward hook at .* changes gradients"),
    "hook_on_outputs": ("begin", hook_outputs, "a forward hook of module .* changes them"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("feature", "dtype"), [(name, torch.float64) for name in ("plain", "batch_norm", "odd_attention")] +
    [("plain", torch.float32)], ids=["plain", "batch_norm", "attention", "float32"],
)  # fmt: skip
@pytest.mark.parametrize("fault", NAMED)
def test_the_cause_of_a_fault_is_named_and_no_other(feature, dtype, fault):
    place, act, cause = NAMED[fault]
    loop = CapturedLoop(feature, {place: act}, dtype=dtype)
    with pytest.raises(epk.StepMismatchError, match=f"^step {STEP}: .*{cause}") as error:
        loop.run()
    assert loop.recorder.num_steps == STEP
    assert {row[2] for row in NAMED.values() if re.search(row[2], str(error.value))} == {cause}


# What goes wrong: in which loops, before which place, by what, and what the message says.
REFUSED = {
    "weights_edited_between_steps": (("plain", "batch_norm"), "begin", edit(first_weight), "they were changed in betw"),
    "weights_edited_before_backward": (("plain", "mixup", "two_optimizers"), "value", edit(first_weight),
        "were changed"),
    "frozen_weights_edited": (("frozen_layer",), "begin", edit(first_weight), "'0.weight' changed"),
    "another_optimizer_between_steps": (PLAIN, "end",
        lambda loop: torch.optim.SGD(loop.net.parameters(), lr=0.01).step(), "Another SGD stepped: pass"),
    "two_steps_of_a_batch": (PLAIN, "end", lambda loop: loop.optimizers[0].step(), NOT_ANNOUNCED),
    "no_learning_rate": (PLAIN, "begin", options(lr=float("nan")), "learning rate must be finite"),
    "divergence": (PLAIN, "announce", lambda loop: first_weight(loop).grad.fill_(torch.nan), "training diverged"),
    "rows_in_another_order": (("dropout", "accumulation"), "forward",
        setting("announced", lambda loop: loop.rows.roll(1)), "indices"),
    "rows_of_others": (("dropout", "accumulation"), "forward", setting("announced", others),
        r"row 0 was X\[.*other training points"),
    "one_row_of_another": (("batch_norm", "dropout"), "forward",
        setting("announced", lambda loop: torch.cat([loop.rows[:-1], others(loop)[-1:]])), "was X"),
    "all_rows": (PLAIN, "forward", setting("announced", lambda _: None), "no call of the network on the batch's rows"),
    "fewer_rows": (("dropout", "mixup"), "forward", setting("announced", lambda loop: loop.rows[1:]), OTHER_GRADIENT),
    "gradient_of_others_instead": (AS_RECORDED, "announce", gradient_of_other_rows, ""),
    "gradient_of_others_after_the_announcement": (("plain", "accumulation"), "announced", gradient_of_other_rows,
        NOT_ANNOUNCED),
    "outputs_of_other_rows": (AS_RECORDED, "value", setting("z", lambda loop: loop.net(loop.X[others(loop)])),
        "indices"),
    "gradient_edited": (("dropout",), "step", edit(lambda loop: first_weight(loop).grad), OTHER_GRADIENT),
    "not_announced": (PLAIN, "announce", skip_announcement, NOT_ANNOUNCED),
    "a_batch_not_announced": (("accumulation",), "announce", skip_announcement, OTHER_GRADIENT),
    "a_batch_announced_for_another": (("accumulation",), "announce",
        setting("announced", lambda loop: vars(loop).setdefault("kept", loop.rows)), "other training points"),
    "statistics_edited_before_the_step": (NORM, "step", edit(mean), "in another way"),
    "statistics_switched_on": (("late_batch_norm",), "begin", lambda loop: loop.net.train(),
        "'1.running_mean' changed. If training moves it"),
    "noise_that_an_integer_scales": (("odd_integer",), "begin", id, "has number=2 and had number="),
    "noise_of_another_generator": (("odd_generator",), "begin", id, "a torch.Generator of its own"),
    "layer_by_layer": (("dropout", "batch_norm"), "begin",
        setting("call", lambda loop: nn.Sequential(*loop.net).forward), "call the network itself, net"),
    "weights_edited_between_optimizers": (("two_optimizers",), "step",
        between_the_optimizers(edit(lambda loop: loop.net[-1].bias)), OTHER_GRADIENT),
    "gradient_edited_between_optimizers": (("two_optimizers",), "step",
        between_the_optimizers(lambda loop: loop.net[-1].weight.grad.view(-1)[0].add_(0.1)), OTHER_GRADIENT),
}  # fmt: skip


def cases(table):
    """Each row in each of its loops; all but the first are slow."""
    return [
        pytest.param(name, feature, marks=[pytest.mark.slow] if number else [], id=f"{name}-{feature}")
        for name, row in table.items()
        for number, feature in enumerate(row[0])
    ]


@pytest.mark.parametrize(("name", "feature"), cases(REFUSED))
def test_a_fault_in_the_loop_is_refused_and_named(name, feature):
    _, place, act, message = REFUSED[name]
    loop = CapturedLoop(feature, {place: act})
    step = STEP + (place == "end")
    with pytest.raises(epk.StepMismatchError, match=f"^step {step}: .*{message}"):
        loop.run()
    assert loop.recorder.num_steps == step


SOUND = {
    "nothing": (("plain", "regression", "no_dropout", *ODD), "begin", id),
    "rate_changed_before_the_step": (PLAIN, "step", options(lr=0.1)),
    "momentum_changed": (PLAIN, "begin", options(momentum=0.9)),
    "another_momentum_of_statistics": (("batch_norm",), "begin", option("momentum", 0.3)),
    "another_dropout": (("dropout",), "begin", option("p", 0.4)),
    "another_dropout_for_a_pass": (("dropout",), "forward",
        lambda loop: (option("p", 0.4)(loop), loop.at.update(value=option("p", 0.5)))),
    "noise_that_an_attribute_scales": (("odd_attribute",), "begin", id),
    "decay_changed": (PLAIN, "begin", options(weight_decay=0.1)),
    "maximize_changed": (PLAIN, "begin", options(maximize=True)),
    "momentum_forgotten": (PLAIN, "begin", lambda loop: loop.optimizers[0].state.clear()),
    "layer_frozen": (PLAIN, "begin", lambda loop: loop.net[0].requires_grad_(False)),
    "clipping_that_does_not_act": (PLAIN, "announce", lambda loop: clip_grad_norm_(loop.net.parameters(), 1e6)),
    "gradient_scaled_between_optimizers": (("two_optimizers",), "step",
        between_the_optimizers(lambda loop: loop.net[-1].weight.grad.mul_(2))),
    "random_numbers_elsewhere": (("dropout",), "value", lambda loop: torch.rand(5)),
    "another_seed": (("dropout", "two_optimizers"), "begin", lambda loop: torch.manual_seed(0)),
    "validation_before": (("plain", *NORM), "forward", in_evaluation_mode),
    "validation_after": (("dropout", *NORM), "announce", in_evaluation_mode),
    "training_mode_without_gradients_before": (NORM, "forward", without_gradients),
    "training_mode_without_gradients_after": ((*NORM, "dropout"), "announced", without_gradients),
    "training_mode_with_gradients": (NORM, "value", lambda loop: loop.net(loop.X[4:])),
    "training_mode_after_the_step": (NORM, "end", without_gradients),
    "same_rows_again": (("dropout", "batch_norm"), "value", lambda loop: loop.net(loop.x)),
    "second_pass_of_the_rows": (("dropout", "batch_norm"), "value", setting("z", lambda loop: loop.net(loop.x))),
    "evaluation_mode": (("dropout", "batch_norm"), "begin", lambda loop: loop.net.eval()),
    "evaluation_mode_after_the_pass": (("dropout", "batch_norm"), "value", lambda loop: loop.net.eval()),
    "dropout_switched_on": (("late_dropout",), "begin", lambda loop: loop.net.train()),
    "frozen_normalisation": (NORM, "begin", lambda loop: loop.net[1].eval()),
    "statistics_edited_between_steps": (NORM, "begin", edit(mean, 0.1)),
    "statistics_forgotten": (NORM, "begin", lambda loop: loop.net[1].reset_running_stats()),
    "one_noisy_label": (("plain", "accumulation"), "forward",
        setting("q", lambda loop: torch.cat([loop.q[:1].roll(1, 1), loop.q[1:]]))),
    "loss_scaled": (("plain", "batch_norm", "weights", "accumulation", "two_optimizers"), "forward",
        with_loss(lambda loop: 1.01 * (loop.weight * loop.losses()).mean())),
    "backward_twice": (("plain", "weights", "accumulation"), "value",
        lambda loop: loop.value().backward(retain_graph=True)),
    "another_factor": (("accumulation",), "announce", setting("weight", lambda _: 0.25)),
    "labels_in_another_order": (("batch_norm", "dropout"), "forward", setting("q", lambda loop: loop.q.roll(1, 0))),
    "penalty": (("plain", "mixup"), "forward",
        with_loss(lambda loop: loop.losses().mean() + 0.01 * first_weight(loop).square().sum())),
    "hardest_half": (("batch_norm", "dropout"), "forward",
        with_loss(lambda loop: loop.losses().topk(len(loop.z) // 2).values.mean())),
    "inputs_edited_after_the_pass": (("plain", "augmentation", "mixup"), "announce",
        lambda loop: loop.x.mul_(2)),
    "data_edited": (("dropout",), "begin", lambda loop: loop.X.mul_(1.1)),
    "gradients_cleared_between_batches": (("accumulation",), "forward",
        lambda loop: [optimizer.zero_grad() for optimizer in loop.optimizers]),
    "other_order_of_optimizers": (("two_optimizers",), "step", lambda loop: loop.optimizers.reverse()),
    "one_optimizer_alone": (("two_optimizers",), "step", lambda loop: loop.optimizers.pop()),
}  # fmt: skip


def test_a_number_that_changes_the_network_in_evaluation_mode_too_is_refused_at_the_end():
    loop = CapturedLoop("batch_norm", {"begin": option("eps", 1e-2)})
    with pytest.raises(epk.StepMismatchError, match="forward function must stay as it was"):
        loop.run()


OTHER_LOSS = {
    "mixed_and_scaled": (("mixup",), "forward", with_loss(lambda loop: 1.01 * (loop.weight * loop.losses()).mean())),
    "labels_for_squares": (("one_hot_regression",), "forward", with_loss(lambda loop: F.cross_entropy(loop.z, loop.q))),
    "another_loss": (("dropout", "batch_norm", "mixup", "weights"), "forward",
        with_loss(lambda loop: (loop.z - loop.q).square().mean())),
    "temperature": (("augmentation", "weights"), "forward",
        with_loss(lambda loop: -(loop.weight * (loop.q * (loop.z / 2).log_softmax(1)).sum(1)).mean())),
    "weights_not_stated": (("dropout", "accumulation"), "forward",
        with_loss(lambda loop: (torch.linspace(0.5, 1.5, len(loop.z)).double() * loop.weight * loop.losses()).mean())),
}  # fmt: skip


@pytest.mark.parametrize(("name", "feature"), cases(SOUND | OTHER_LOSS))
def test_what_a_loop_may_do_is_recorded_as_it_was(name, feature):
    _, place, act = (SOUND | OTHER_LOSS)[name]
    loop = CapturedLoop(feature, {place: act}, faulty_step=2 if place == "end" else 1)
    with pytest.warns(UserWarning, match="step 1: .* not follow") if name in OTHER_LOSS else nullcontext():
        run = loop.run()
    shares = epk.attribute(run, TEST, head="logits")
    assert run.num_steps == 3
    assert shares.certified
    loop.net.eval()
    assert (shares.total - loop.net(TEST).detach()).abs().max() < 1e-10
    if feature == "odd_mean":
        assert shares.statistics.norm() > 1e-3 * shares.samples.norm()


@pytest.mark.mostly_slow
@pytest.mark.parametrize(
    ("feature", "act", "message"),
    [("frozen_layer", edit(first_weight), "'0.weight' changed")]
    + [(name, edit(mean), "moving statistics at the end") for name in NORM],
)
def test_what_moves_after_the_last_step_is_refused(feature, act, message):
    loop = CapturedLoop(feature, {"end": act}, faulty_step=2)
    with pytest.raises(epk.StepMismatchError, match=message):
        loop.run()
    assert loop.recorder.num_steps == 3
    with pytest.warns(UserWarning, match="your network is not the one"):
        assert epk.reconstruct(loop.recorder.trajectory, TEST).certified


def test_the_last_step_of_one_optimizer_alone_keeps_its_forward_pass():
    loop = CapturedLoop("two_optimizers", {"step": lambda loop: loop.optimizers.pop()}, faulty_step=2)
    run = loop.run()
    assert len(run.steps[2].passes) == 1
    assert epk.reconstruct(run, TEST).certified
