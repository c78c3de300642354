"""Optimizers of other libraries, of one's own, wrapped ones, and loops without one."""

import re
from pathlib import Path

import pytest
import pytorch_optimizer as po
import schedulefree
import torch
from library_cases import BEGUN, CASES, VARIANTS, ByHand, continued, problem, recorded, train
from pytorch_lightning.core.optimizer import LightningOptimizer
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.states import schedule_free_average
from epk_gp.optimizers.library_rules import LIBRARY_RULES
from epk_gp.optimizers.torch_rules import as_optimizers, rule_for
from epk_gp.optimizers.update_rules import LinearStep, UpdateRule
from epk_gp.recording.causes import StepMismatchError
from loops import assert_exact, record


def assert_are_shares(run, X, by_hand):
    """Return the attribution, and by brute force the part of earlier gradients and the size of all parts."""
    by_hand.run()
    for s, state in enumerate(by_hand.states):
        torch.testing.assert_close(run.states[s], state, rtol=0, atol=1e-12)
    expected, parts = by_hand.contributions(run, X), assert_exact(run, X)
    scale = expected.abs().max()
    assert (parts.samples - expected[:, :, :-2]).abs().max() <= 1e-8 * scale
    decay = torch.zeros_like(parts.total) if parts.decay is None else parts.decay
    assert (decay - expected[:, :, -1]).abs().max() <= 1e-8 * scale
    return parts, expected[:, :, -2], scale


@pytest.mark.parametrize("name", CASES)
def test_shares_are_those_of_rows_that_are_pushed_through_the_optimizer_by_hand(name):
    kind, options, share = CASES[name]
    run, X = recorded(lambda p: kind(p, **options))
    assert_are_shares(run, X, ByHand(lambda p: kind(p, **options), share))
    assert epk.reconstruct(run, X).certified
    single, points = recorded(lambda p: kind(p, **options), torch.float32)
    assert epk.attribute(single, points).certified


@pytest.mark.parametrize("name", BEGUN)
def test_what_a_loaded_optimizer_holds_is_a_term_of_its_own(name):
    make, share = BEGUN[name]
    parts, earlier, scale = assert_are_shares(*continued(make), ByHand(make, share, num_before=4))
    assert (parts.sources["before the recording"] - earlier).abs().max() <= 1e-8 * scale
    assert earlier.abs().max() > 1e-3 * scale


def test_a_continued_run_is_stored_and_refused_where_other_runs_are_needed(tmp_path):
    make, _ = BEGUN["Lookahead"]
    memory, X = continued(make)
    disk, _ = continued(make, folder=tmp_path / "run")
    loaded = epk.load_trajectory(tmp_path / "run", problem()[0])
    fresh, _ = recorded(make)
    assert loaded.digest == disk.digest == memory.digest != fresh.digest
    expected, again = (epk.attribute(run, X).sources["before the recording"] for run in (memory, loaded))
    assert torch.equal(expected, again)
    assert epk.reconstruct(loaded, X).certified
    for ask in (lambda: epk.influence(loaded, X), lambda: epk.retrain(loaded, torch.ones(1, 11))):
        with pytest.raises(ValueError, match="the run must begin with a new optimizer"):
            ask()
    with pytest.raises(ValueError, match="storage must keep every state where an optimizer has made steps before"):
        continued(make, folder=tmp_path / "thin", storage=epk.Storage(keep_every=3))


def test_an_edited_buffer_of_a_loaded_optimizer_is_found():
    def edit(optimizer, *_):
        state = optimizer.state[optimizer.param_groups[0]["params"][0]]
        state.get("momentum_buffer", torch.zeros(1)).mul_(0.99)

    def make(parameters):
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        optimizer.register_step_pre_hook(edit)
        return optimizer

    with pytest.raises(StepMismatchError, match="step 0: the change of the weights must be SGD's step"):
        continued(make)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("name", VARIANTS)
def test_other_options_are_exact_too(name):
    kind, options = VARIANTS[name]
    assert_exact(*recorded(lambda p: kind(p, **options)))


@pytest.mark.parametrize("name", ["Adan", "SOAP", "Lookahead", "schedulefree AdamW"])
def test_second_buffers_and_matrices_are_stored_and_computed_again_and_have_no_influence(tmp_path, name):
    kind, options, _ = CASES[name]
    memory, X = recorded(lambda p: kind(p, **options))
    disk, _ = recorded(lambda p: kind(p, **options), folder=tmp_path / "run")
    thin, _ = recorded(lambda p: kind(p, **options), folder=tmp_path / "thin", storage=epk.Storage(keep_every=4))
    loaded = epk.load_trajectory(tmp_path / "run", problem()[0])
    assert loaded.digest == disk.digest == memory.digest
    expected = epk.attribute(memory, X).samples
    assert torch.equal(epk.attribute(loaded, X).samples, expected)
    again = epk.attribute(thin, X)
    assert again.certified
    torch.testing.assert_close(again.samples, expected, rtol=0, atol=1e-7 if name == "SOAP" else 1e-9)
    if name != "schedulefree AdamW":
        with pytest.raises(ValueError, match="must have one momentum buffer and no matrices around the division"):
            epk.influence(memory, X, head="logits")


@pytest.mark.parametrize("every", [1, 3])
def test_a_second_buffer_that_first_and_last_steps_do_not_have_is_stored_and_computed_again(tmp_path, every):
    net, X, y, steps = problem()
    optimizers = [torch.optim.SGD(net[0].parameters(), lr=0.1, momentum=0.9), po.Adan(net[2].parameters(), lr=0.01)]
    freeze = lambda s: net[2].requires_grad_(0 < s < len(steps) - 1)  # noqa: E731
    options = {"folder": tmp_path / "run", "storage": epk.Storage(keep_every=every)}
    recorder = record(net, optimizers, X, y, steps, before=freeze, **options)
    assert not any(recorder.trajectory.updates[s].second for s in (0, len(steps) - 1))
    assert epk.attribute(recorder.trajectory, X[:2]).certified


@pytest.mark.parametrize("name", ["SGD", "Lion", "schedulefree AdamW", "Adan", "Lookahead"])
def test_planted_faults_are_found(name):
    kind, options, _ = CASES[name]

    def edit(s, net, optimizer):
        with torch.no_grad():
            net[0].weight[0, 0] += 1e-5 * (s == 4)

    class Doubled(kind if isinstance(kind, type) else po.Lookahead):
        def step(self, closure=None):
            before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
            super().step(closure)
            for p, w in zip((p for group in self.param_groups for p in group["params"]), before, strict=True):
                p.data.add_(p.data - w)

    def doubled(parameters):
        return Doubled(parameters, **options) if isinstance(kind, type) else Doubled(torch.optim.AdamW(parameters))

    with pytest.raises(StepMismatchError, match="step 4: .*it differs by"):
        recorded(lambda p: kind(p, **options), at_step=edit)
    with pytest.raises(StepMismatchError, match="it differs by"):
        recorded(doubled)


def test_muon_of_pytorch_optimizer_leaves_the_rounding_of_bfloat16():
    def muon(parameters):
        divided = {flag: [p for p in parameters if (p.ndim > 1) == flag] for flag in (True, False)}
        return po.Muon([{"params": own, "use_muon": flag} for flag, own in divided.items()])

    parts = assert_exact(*recorded(muon, unexplained=0.5))
    assert 0 < float(parts.unexplained.abs().max()) < 0.3 * float((parts.network - parts.initial).abs().max())
    with pytest.raises(ValueError, match="unexplained must be given for Muon"):
        recorded(muon)


OTHER_STEPS = {
    "must make the plain steps of AdaBelief: got rectify": lambda p: po.AdaBelief(p, rectify=True),
    "must make the plain steps of Lion: got cautious": lambda p: po.Lion(p, cautious=True),
    "must leave the momentum as it is":
        lambda p: po.Lookahead(torch.optim.SGD(p, lr=0.1), pullback_momentum="reset"),
    "must be over an optimizer with one buffer and no matrices: got Adan": lambda p: po.Lookahead(po.Adan(p)),
    "it lacks 'betas'": lambda p: type("Lamb", (torch.optim.Optimizer,), {"step": lambda self: None})(p, {"lr": 0.1}),
    "SOAP must have matrices .* got merge_dims=True":
        lambda p: po.SOAP([p[0]], merge_dims=True, max_precondition_dim=5),
}  # fmt: skip


def test_what_makes_other_steps_than_the_rule_is_refused_in_words():
    for message, make in OTHER_STEPS.items():
        with pytest.raises(ValueError, match=message):
            recorded(make)
    net = nn.Sequential(nn.Conv1d(1, 2, 3), nn.Flatten(), nn.Linear(4, 3)).double()
    X, y, optimizer = torch.randn(6, 1, 4).double(), torch.arange(6) % 3, po.SOAP(net.parameters())
    with pytest.raises(ValueError, match=r"SOAP must have matrices and vectors.* of shape \(2, 1, 3\)"):
        record(net, optimizer, X, y, [None])


def test_influence_holds_what_other_libraries_derive_from_gradients():
    kind, options, _ = CASES["Lion"]
    run, X = recorded(lambda p: kind(p, **options))
    with pytest.warns(epk.CertificateWarning, match="how Lion would change with the gradients is not known"):
        epk.influence(run, X, head="logits")
    linear, _ = recorded(lambda p: po.SGDW(p, lr=0.1, momentum=0.9, weight_decay=0.1))
    found, step = epk.influence(linear, X, head="logits"), 1e-5
    weights = torch.ones(2, 11).double()
    weights[:, 3] += torch.tensor([-step, step])
    ends = epk.retrain(linear, weights)
    low, high = (linear.model(linear.model.unflatten(state), X) for state in ends.states)
    assert ((high - low) / (2 * step) - found.values[:, :, 3]).abs().max() <= 1e-6 * found.values.abs().max()


@pytest.mark.parametrize("name", ["Adan", "schedulefree AdamW", "Prodigy"])
def test_a_run_of_another_library_s_optimizer_resumes_bit_for_bit(tmp_path, name):
    kind, options, _ = CASES[name]

    def trained(folder, count):
        net, X, y, steps = problem()
        optimizer = kind(net.parameters(), **options)
        with epk.Recorder(net, optimizer, X, y, folder=folder, resume=True) as recorder:
            train(optimizer)
            for s in recorder.until(count):
                optimizer.zero_grad()
                F.cross_entropy(net(X[steps[s]]), y[steps[s]]).backward()
                recorder.batch(steps[s])
                optimizer.step()
        return recorder.trajectory

    trained(tmp_path / "a", 4)
    assert trained(tmp_path / "a", 9).digest == trained(tmp_path / "b", 9).digest
    net, X, y, _ = problem()
    optimizer = po.Lookahead(torch.optim.SGD(net.parameters()))
    with pytest.raises(ValueError, match=r"resume=True needs torch's state_dict.*: Lookahead has another"):
        epk.Recorder(net, optimizer, X, y, folder=tmp_path / "c", resume=True)


class Mine(torch.optim.Optimizer):
    """A home-made optimizer with the options and the state that the shown template reads."""

    def __init__(self, parameters, lr=0.01, beta=0.9, eps=1e-6):
        super().__init__(parameters, {"lr": lr, "beta": beta, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                m, v = state.get("m", torch.zeros_like(p)), state.get("exp_avg_sq", torch.zeros_like(p))
                state["m"] = group["beta"] * m + (1 - group["beta"]) * p.grad
                state["exp_avg_sq"] = 0.9 * v + 0.1 * p.grad**2
                p -= group["lr"] * state["m"] / (state["exp_avg_sq"].sqrt() + group["eps"])


def test_the_lines_that_the_refusal_shows_record_a_home_made_optimizer():
    net, X, y, steps = problem()
    optimizer = Mine(net.parameters())
    with pytest.raises(ValueError, match="update rule must be known: that of .*Mine is not") as refused:
        epk.Recorder(net, optimizer, X, y)
    shown = str(refused.value)[str(refused.value).index("    from epk_gp") :].rstrip()
    lines = [line[4:] for line in shown.splitlines()]
    assert len(lines) <= 15
    names = {"epk": epk, "net": net, "optimizer": optimizer, "X": X, "y": y}
    exec("\n".join(lines), names)
    with names["recorder"] as recorder:
        for batch in steps:
            optimizer.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
    assert_exact(recorder.trajectory, X[:2])


class HomeMade(torch.optim.Optimizer):
    """SGD as people write it: `sign` makes of it another rule, and so does decay apart from the gradient."""

    def __init__(self, parameters, sign=False, decoupled=False, **options):
        super().__init__(parameters, options)
        self.sign, self.decoupled = sign, decoupled

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            lr, mu, decay = group["lr"], group.get("momentum", 0.0), group.get("weight_decay", 0.0)
            for p in group["params"]:
                g = p.grad.sign() if self.sign else p.grad + (0.0 if self.decoupled else decay) * p
                p *= 1 - lr * decay * self.decoupled
                if mu:
                    g = self.state[p]["momentum_buffer"] = mu * self.state[p].get("momentum_buffer", 0.0) + g
                p -= lr * g


HOME_MADE = [{"lr": 0.1}, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}]


@pytest.mark.parametrize("options", HOME_MADE)
def test_a_home_made_class_whose_steps_are_those_of_sgd_needs_no_rule(options):
    run, X = recorded(lambda p: HomeMade(p, **options))
    same, _ = recorded(lambda p: torch.optim.SGD(p, **options))
    parts, expected = (assert_exact(each, X) for each in (run, same))
    assert run.update_rule == "SGD"
    torch.testing.assert_close(parts.samples, expected.samples, rtol=0, atol=1e-12)
    found, by_torch = (epk.influence(each, X, head="logits").values for each in (run, same))
    torch.testing.assert_close(found, by_torch, rtol=0, atol=1e-12)
    loaded, _ = continued(lambda p: HomeMade(p, **options))
    assert (loaded.momentum is not None) == ("momentum" in options)
    assert epk.attribute(loaded, X).certified


@pytest.mark.parametrize(("fault", "step"), [({"sign": True}, 0), ({"decoupled": True}, 1), ({"dampening": 0.5}, 1)])
def test_a_home_made_class_with_the_options_of_sgd_and_other_steps_is_shown_how_to_state_its_own(fault, step):
    says = rf"step {step}: .*HomeMade is not, nor is it that of SGD, whose options it has(.|\n)*rule = UpdateRule\("
    with pytest.raises(StepMismatchError, match=says):
        recorded(lambda p: HomeMade(p, **HOME_MADE[1], **fault))


def test_a_class_that_changes_nothing_has_the_rule_of_its_base():
    run, X = recorded(lambda p: type("Renamed", (torch.optim.AdamW,), {})(p, lr=0.01))
    assert run.update_rule == "AdamW"
    assert epk.influence(run, X, head="logits").certified


class Wrapper:
    """As apex and others write them: an object with an optimizer inside, whose groups it shares."""

    def __init__(self, optimizer):
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups


def test_wrappers_are_taken_off():
    inner = torch.optim.SGD(problem()[0].parameters(), lr=0.1)
    assert as_optimizers(Wrapper(inner)) == as_optimizers(LightningOptimizer(inner)) == (inner,)
    sam = po.SAM(problem()[0].parameters(), torch.optim.SGD, lr=0.1)
    assert as_optimizers(sam) == (sam.base_optimizer,)
    assert rule_for(sam).name == "SGD"
    begun = Wrapper(inner)
    begun.state = {p: {"old_p": p.detach().clone()} for p in inner.param_groups[0]["params"]}
    assert as_optimizers(begun) == (inner,), "the weights from which SAM has climbed are no state"
    begun.state = {p: {"slow": p.detach().clone()} for p in inner.param_groups[0]["params"]}
    with pytest.raises(TypeError, match="must be a torch.optim.Optimizer"):
        as_optimizers(begun)
    ahead = po.Lookahead(inner)
    assert as_optimizers(ahead) == (ahead,), "it has weights of its own"


def loop_without_optimizer(update, steps=6, **options):
    net, X, y, batches = problem()
    with epk.Recorder(net, None, X, y, **options) as recorder:
        for s, batch in enumerate(batches[:steps]):
            net.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            with torch.no_grad():
                for p in net.parameters():
                    update(s, p)
    return recorder.trajectory, X[:2]


def plain(s, p):
    p -= 0.1 / (s + 1) * p.grad


def with_data(s, p):
    p.data.add_(p.grad, alpha=-0.1 / (s + 1))
    p.grad.zero_()


@pytest.mark.parametrize("update", [plain, with_data])
def test_a_loop_without_an_optimizer_is_the_same_run_as_with_one(update):
    run, X = loop_without_optimizer(update)
    net, points, y, batches = problem()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    rate = lambda s: optimizer.param_groups[0].update(lr=0.1 / (s + 1))  # noqa: E731
    recorder = record(net, optimizer, points, y, batches[:6], before=rate)
    torch.testing.assert_close(run.step_sizes, recorder.trajectory.step_sizes, rtol=1e-12, atol=0)
    parts, expected = (assert_exact(each, X) for each in (run, recorder.trajectory))
    torch.testing.assert_close(parts.samples, expected.samples, rtol=0, atol=1e-10)
    assert epk.influence(run, X, head="logits").certified


def test_other_updates_without_an_optimizer_are_refused_and_a_rule_may_be_stated():
    def edited(s, p):
        plain(s, p)
        p.flatten()[0] += 1e-6 * (s == 2)

    for update, step in ((lambda s, p: p.add_(0.1 * p.grad.sign()), 0), (edited, 2)):
        with pytest.raises(StepMismatchError, match=rf"step {step}: weights that no optimizer moves must move by -lr"):
            loop_without_optimizer(update)
    scales = {4: 0.2, 6: 0.1, 3: 0.3}  # by the number of rows
    rule = UpdateRule("mine", lambda p, *_: LinearStep(lr=scales[len(p)]))
    run, X = loop_without_optimizer(lambda s, p: p.sub_(scales[len(p)] * p.grad), update_rule=rule)
    assert epk.attribute(run, X).certified


def test_the_page_names_every_class_that_is_known():
    page = Path(__file__).parents[2] / "docs" / "capabilities" / "optimizers.md"
    assert {*LIBRARY_RULES, "Lookahead", "Muon"} <= set(re.findall(r"`(\w+)`", page.read_text()))


@pytest.mark.parametrize("is_restored", [False, True])
def test_a_learning_rate_that_is_changed_inside_of_step_is_named(is_restored):
    class Changing(torch.optim.Adam):
        def step(self, closure=None):
            group = self.param_groups[0]
            if is_restored:
                group["lr"] *= 2
            super().step(closure)
            group["lr"] *= 0.5

    with pytest.raises(StepMismatchError, match="step 0: .* weights moved by 2 times Adam's step: its learning rate"):
        recorded(lambda p: Changing(p, lr=0.01))


def test_float32_numbers_in_a_step_in_float64_are_named_and_may_be_accepted():
    class Rounded(torch.optim.Adam):
        """As a compiled step does: the bias corrections are float32."""

        @torch.no_grad()
        def step(self, closure=None):
            before = [p.clone() for p in self.param_groups[0]["params"]]
            super().step(closure)
            for p, w in zip(self.param_groups[0]["params"], before, strict=True):
                p.copy_(w + (p - w) * (1 + 5e-6))

    with pytest.raises(StepMismatchError, match=r"is Adam's but for 5e-06 of it: where it is compiled"):
        recorded(lambda p: Rounded(p, lr=0.01))
    run, X = recorded(lambda p: Rounded(p, lr=0.01), unexplained=1e-4)
    assert epk.attribute(run, X).certified


# Schedule-free optimizers: the weights that they train, and the average that they evaluate


def test_schedule_free_training_with_evaluations_and_its_average():
    """The loop as the library's page writes it; the network in evaluation mode is an average of the recorded one."""
    net, X, y, _ = problem()
    optimizer = schedulefree.AdamWScheduleFree(net.parameters(), lr=0.02, weight_decay=0.1, warmup_steps=3)
    with epk.Recorder(net, optimizer, X, y) as recorder:
        for _ in range(6):
            optimizer.train()
            for batch in torch.randperm(11).split(4):
                optimizer.zero_grad()
                F.cross_entropy(net(X[batch]), y[batch]).backward()
                recorder.batch(batch)
                optimizer.step()
            optimizer.eval()
            with torch.no_grad():
                net(X)
    run = recorder.trajectory
    assert_exact(schedule_free_average(run, network=net), X[:2], net)
    with pytest.warns(UserWarning, match=r"your network is not the one .* schedule_free_average"):
        assert (epk.attribute(run, X[:2], head="logits").network - net(X[:2])).abs().max() > 1e-2, "y is not x"


def test_the_average_of_a_continued_schedule_free_run_begins_where_its_optimizer_had_it():
    make, share = BEGUN["schedulefree AdamW"]
    run, X = continued(make)
    net, _, _, steps = problem()
    by_hand = ByHand(make, share, num_before=4)
    by_hand.run()
    average = schedule_free_average(run)
    changes, trained = [], torch.zeros_like(by_hand.shares[0])
    trained[-2] = run.states[0] - average.states[0]
    averaged = torch.zeros_like(trained)
    for s, own in enumerate(by_hand.shares):
        trained, before = trained + own, averaged
        averaged = torch.lerp(averaged, trained, float(average.average.coefficients[s]))
        changes.append(averaged - before)
    by_hand.shares = changes
    expected, parts = by_hand.contributions(average, X), assert_exact(average, X)
    scale = expected.abs().max()
    assert (parts.samples - expected[:, :, :-2]).abs().max() <= 1e-8 * scale
    assert (parts.sources["before the recording"] - expected[:, :, -2]).abs().max() <= 1e-8 * scale
    assert epk.reconstruct(average, X).certified
    assert torch.equal(average.until(3).states[0], average.states[0])
    optimizer = train(make(list(net.parameters())))
    for batch in steps:  # the same loop, without a recorder
        optimizer.zero_grad()
        F.cross_entropy(net(problem()[1][batch]), problem()[2][batch]).backward()
        optimizer.step()
    optimizer.eval()
    assert (parts.total - net(X)).abs().max() <= 1e-10


def test_a_loaded_schedule_free_optimizer_must_be_in_training_mode():
    net, X, y, (batch, *_) = problem()
    optimizer = train(schedulefree.AdamWScheduleFree(net.parameters(), lr=0.1))
    F.cross_entropy(net(X[batch]), y[batch]).backward()
    optimizer.step()
    optimizer.eval()
    with pytest.raises(ValueError, match=r"must be in training mode: call optimizer.train\(\) first"):
        epk.Recorder(net, optimizer, X, y)


def test_the_average_of_a_run_that_is_not_schedule_free_or_of_two_betas_is_refused():
    def two(p):
        return schedulefree.SGDScheduleFree([{"params": p[:2]}, {"params": p[2:], "momentum": 0.5}], lr=0.1)

    for make, rule in ((lambda p: torch.optim.SGD(p, lr=0.1), "SGD"), (two, "SGDScheduleFree")):
        run, _ = recorded(make)
        with pytest.raises(ValueError, match=rf"must be of a schedule-free optimizer, with one beta .*: got {rule}\."):
            schedule_free_average(run)


def test_an_edit_of_the_weights_in_evaluation_mode_is_found():
    net, X, y, batches = problem()
    optimizer = train(schedulefree.SGDScheduleFree(net.parameters(), lr=0.1))

    def edit(step):
        optimizer.eval()
        net[0].weight.data[0, 0] += 1e-9

    with pytest.raises(epk.StepMismatchError, match="must be those that the last step left"):
        record(net, optimizer, X, y, batches[:1], after=edit)
