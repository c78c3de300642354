"""Public training recipes, with the recorder's lines put in and nothing else changed."""

from functools import cache

import pytest
import torch

import epk_gp as epk
from recipes import images, loops, sequences, targets, unusual
from recipes.path_reference import brute_force_terms
from recipes.problem import as_tuple
from recipes.reference import Watched, step_terms

EXACT = [*images.RECIPES, *sequences.RECIPES, *loops.RECIPES, *targets.RECIPES, *unusual.RECIPES]
LOW = targets.IN_LOW_PRECISION
RECORDER = epk.Recorder


def named(recipes):
    return [pytest.param(recipe, id=recipe.__name__) for recipe in recipes]


def run(recipe, inner_class):
    """Run a recipe with its recorder watched; without `inner_class` in plain torch."""
    watcher = type("Watcher", (Watched,), {"inner_class": inner_class})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(epk, "Recorder", watcher)
        torch.manual_seed(0)
        return recipe()


@cache
def recorded(recipe):
    return run(recipe, RECORDER)


def relative_error(value, expected):
    return float((value - expected).norm() / expected.norm())


@pytest.mark.parametrize("recipe", named(EXACT + LOW))
def test_the_recipe_trains_in_plain_torch_and_its_terms_make_its_gradients(recipe):
    """Of the reference: the loss terms, each with a backward pass of its own, sum to the gradients that were used."""
    result = run(recipe, None)
    watched = result.recorder
    assert watched.steps
    assert all(torch.isfinite(value).all() for value in watched.last.values())
    assert torch.isfinite(result.outputs).all()
    if recipe in LOW:
        return
    M = len(result.y)
    for step in watched.steps:
        _, mismatch = step_terms(watched, step, M)
        assert mismatch < 1e-12


@pytest.mark.parametrize("recipe", named(EXACT))
def test_the_brute_force_terms_sum_to_the_change_of_the_network(recipe):
    """Of the reference: shares, weight decay and moving statistics close the sum by themselves."""
    result = run(recipe, None)
    terms = brute_force_terms(result)
    change = result.outputs - initial_outputs(result)
    total = terms.samples.sum(dim=2) + terms.decay + terms.statistics
    assert relative_error(total, change.reshape(total.shape)) < 1e-10


def initial_outputs(result):
    trained = {name: value.clone() for name, value in result.net.state_dict().items()}
    result.net.load_state_dict(result.recorder.first)
    inputs = result.X_test
    with torch.no_grad():
        returned = result.net(**inputs) if isinstance(inputs, dict) else result.net(*as_tuple(inputs))
    result.net.load_state_dict(trained)
    return result.output(returned)


@cache
def attributed(recipe):
    result = recorded(recipe)
    return epk.attribute(result.trajectory, result.X_test, head="logits")


@pytest.mark.parametrize("recipe", named(EXACT))
def test_the_kernel_machine_is_the_trained_network(recipe):
    result = recorded(recipe)
    machine = epk.reconstruct(result.trajectory, result.X_test)
    assert machine.certified
    assert relative_error(machine.outputs, machine.network) < 1e-9
    if machine.outputs.shape == result.outputs.shape:
        head = torch.log_softmax(result.outputs, dim=1) if "CrossEntropy" in str(result.trajectory.loss) else None
        assert relative_error(machine.network, result.outputs if head is None else head) < 1e-12


@pytest.mark.parametrize("recipe", named(EXACT))
def test_the_terms_sum_to_the_trained_network(recipe):
    parts, result = attributed(recipe), recorded(recipe)
    assert relative_error(parts.total, result.outputs.reshape(parts.total.shape)) < 1e-9
    if parts.unexplained is not None:  # float64: rounding only
        assert parts.unexplained.norm() < 1e-9 * parts.total.norm()


@pytest.mark.parametrize("recipe", named(EXACT))
def test_contributions_are_those_of_separate_backward_passes(recipe):
    parts, expected = attributed(recipe), brute_force_terms(recorded(recipe))
    scale = expected.samples.norm()
    assert float((parts.samples - expected.samples).norm()) < 1e-8 * scale
    assert float((parts.decay - expected.decay).norm()) < 1e-8 * scale
    if parts.statistics is not None:
        assert float((parts.statistics - expected.statistics).norm()) < 1e-8 * scale
    else:
        assert not expected.statistics.any()


@pytest.mark.parametrize("recipe", named(LOW))
def test_in_low_precision_what_the_law_leaves_is_a_term_of_its_own(recipe):
    result = recorded(recipe)
    parts = epk.attribute(result.trajectory, result.X_test, head="logits")
    change = (parts.network - parts.initial).norm()
    assert 0 < parts.unexplained.norm() < 0.1 * change
    assert (parts.total - result.outputs).norm() < 1e-4 * change
    without = parts.total - parts.unexplained
    assert (without - result.outputs).norm() > 2 * (parts.total - result.outputs).norm()


@pytest.mark.parametrize(
    ("recipe", "error", "message"),
    [
        pytest.param(targets.contrastive, epk.StepMismatchError, "step 0: .* another loss", id="contrastive"),
        pytest.param(targets.lbfgs, ValueError, "must take one gradient a step: LBFGS", id="lbfgs"),
        pytest.param(unusual.sharpness_aware, epk.StepMismatchError, "step 0: the weights must be those", id="sam"),
        pytest.param(unusual.dropout_in_evaluation, ValueError, "also in evaluation mode", id="mc_dropout"),
    ],
)
def test_what_cannot_be_recorded_is_refused_in_words(recipe, error, message):
    with pytest.raises(error, match=message):
        recipe()
