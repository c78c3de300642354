"""Schedule-free optimizers: the weights that they train, and the average that they evaluate."""

import pytest
import schedulefree
import torch
from library_cases import BEGUN, ByHand, continued, problem, recorded, train
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.states import schedule_free_average
from epk_gp.recording.causes import StepMismatchError


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
    average = schedule_free_average(run, network=net)
    parts = epk.attribute(average, X[:2], head="logits")
    assert parts.certified
    assert (parts.total - net(X[:2])).abs().max() <= 1e-10
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
    expected, parts = by_hand.contributions(average, X), epk.attribute(average, X, head="logits")
    scale = expected.abs().max()
    assert (parts.samples - expected[:, :, :-2]).abs().max() <= 1e-8 * scale
    assert (parts.sources["before the recording"] - expected[:, :, -2]).abs().max() <= 1e-8 * scale
    assert parts.certified
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
    net, X, y, (batch, *_) = problem()
    optimizer = train(schedulefree.SGDScheduleFree(net.parameters(), lr=0.1))

    def loop() -> None:
        with epk.Recorder(net, optimizer, X, y) as recorder:
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            optimizer.step()
            optimizer.eval()
            net[0].weight.data[0, 0] += 1e-9

    with pytest.raises(StepMismatchError, match="must be those that the last step left"):
        loop()
