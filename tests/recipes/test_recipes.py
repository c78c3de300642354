"""Public training recipes, with the recorder's lines put in and nothing else changed."""

from functools import cache

import pytest
import torch

import epk_gp as epk
from recipes import images, loops, sequences, targets
from recipes.path_reference import brute_force_terms
from recipes.problem import as_tuple
from recipes.reference import Watched, step_terms

EXACT = [*images.RECIPES, *sequences.RECIPES, *loops.RECIPES, *targets.RECIPES]
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
