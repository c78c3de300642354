"""Public training recipes, with the recorder's lines put in and nothing else changed."""

from functools import cache

import pytest
import torch

import epk_gp as epk
from epk_gp.core.step import NOT_OF_DATA
from recipes import graphs, loops, programs, sequences, targets, variants
from recipes.path_reference import brute_force_terms
from recipes.reference import Watched, step_terms

FAMILIES = (sequences, loops, targets, variants, graphs, programs)
EXACT = [recipe for family in FAMILIES for recipe in family.RECIPES]
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


@cache
def brute_force(recipe):
    return brute_force_terms(recorded(recipe))


@pytest.mark.mostly_slow
@pytest.mark.parametrize("recipe", named(EXACT + LOW))
def test_recording_leaves_the_training_as_it_is(recipe):
    """Bit by bit, random numbers included."""
    expected, found = run(recipe, None).recorder, recorded(recipe).recorder
    assert len(found.steps) == len(expected.steps) > 1
    for name, value in expected.last.items():
        assert torch.equal(found.last[name], value), name


@cache
def attributed(recipe):
    result = recorded(recipe)
    return epk.attribute(result.trajectory, result.points, head="logits")


@pytest.mark.mostly_slow
@pytest.mark.parametrize("recipe", named(EXACT))
def test_the_kernel_machine_is_the_trained_network(recipe):
    result = recorded(recipe)
    machine = epk.reconstruct(result.trajectory, result.points)
    assert machine.certified
    assert relative_error(machine.outputs, machine.network) < 1e-9
    if machine.outputs.shape == result.outputs.shape:
        head = torch.log_softmax(result.outputs, dim=1) if "CrossEntropy" in str(result.trajectory.loss) else None
        assert relative_error(machine.network, result.outputs if head is None else head) < 1e-12


@pytest.mark.parametrize("recipe", named(EXACT))
def test_contributions_are_those_of_separate_backward_passes(recipe):
    """And sum to the trained network, as the reference then does; in float64 what is unexplained is rounding only."""
    parts, expected, watched = attributed(recipe), brute_force(recipe), recorded(recipe).recorder
    assert step_terms(watched, watched.steps[0])[1] < 1e-12
    assert relative_error(parts.total, recorded(recipe).outputs.reshape(parts.total.shape)) < 1e-10
    assert parts.unexplained is None or parts.unexplained.norm() < 1e-9 * parts.total.norm()
    scale = expected.samples.norm()
    assert float((parts.samples - expected.samples).norm()) < 1e-8 * scale
    assert float((parts.decay - expected.decay).norm()) < 1e-8 * scale
    outside = parts.sources.get(NOT_OF_DATA, torch.zeros_like(expected.outside))
    assert float((outside - expected.outside).norm()) < 1e-8 * scale
    if parts.statistics is not None:
        assert float((parts.statistics - expected.statistics).norm()) < 1e-8 * scale
    else:
        assert not expected.statistics.any()


@pytest.mark.slow
def test_a_compiled_network_is_recorded():
    parts, expected = attributed(programs.compiled_nanogpt), brute_force(programs.compiled_nanogpt)
    assert parts.certified
    assert relative_error(parts.total, recorded(programs.compiled_nanogpt).outputs) < 1e-10
    assert relative_error(parts.samples, expected.samples) < 1e-8
    assert relative_error(parts.decay, expected.decay) < 1e-8


@pytest.mark.slow
def test_resnet_18_is_explained_layer_by_layer():
    """Its kinks are too many for brute force: the terms sum to the network, and the control's do not."""
    result = recorded(programs.resnet18)
    options = {"path": epk.layerwise(), "classes": result.y[:1], "head": "logits"}
    parts = epk.attribute(result.trajectory, result.X_test, **options)
    expected = result.outputs[:, result.y[:1]].reshape(parts.total.shape)
    assert parts.certified
    assert relative_error(parts.total, expected) < 1e-10
    assert parts.statistics.abs() > 1e-3 * parts.total.abs(), "without them the sum is wrong"


@pytest.mark.mostly_slow
@pytest.mark.parametrize(("recipe", "least", "most"), [
    pytest.param(targets.bf16_autocast, 1e-4, 0.05, id="bf16"),
    pytest.param(targets.grad_scaler, 1e-9, 1e-5, id="scaler"),
])  # fmt: skip
def test_in_low_precision_what_the_law_leaves_is_a_term_of_its_own(recipe, least, most):
    result = recorded(recipe)
    parts = epk.attribute(result.trajectory, result.X_test.double(), head="logits")
    change = (parts.network - parts.initial).norm()
    assert least * change < parts.unexplained.norm() < most * change
    assert (parts.total - parts.network).norm() < 1e-6 * change  # gradients are replayed in float32
    assert (parts.network - result.outputs).norm() < 1e-4 * change
