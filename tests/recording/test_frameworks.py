"""Loops as other libraries' pages write them: Accelerate, and networks that torch.compile compiled."""

import shutil

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from recipes.problem import C, vectors

pytestmark = [
    pytest.mark.filterwarnings("default:::accelerate", "default::DeprecationWarning"),
]


def perceptron():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, C)).double()


def in_bf16(steps, *, is_accelerated):
    """Train in bf16, by Accelerate or by a plain loop under autocast."""
    X, y = vectors(22, dtype=torch.float32)
    torch.manual_seed(0)
    net = model = perceptron().float()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    if is_accelerated:
        accelerate = pytest.importorskip("accelerate", reason="needs the extra 'huggingface'")
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
        model, optimizer = accelerator.prepare(net, optimizer)
    with epk.Recorder(model, optimizer, X, y, unexplained=0.1) as recorder:
        for rows in torch.arange(8 * steps).remainder(22).split(8):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=not is_accelerated):
                outputs = model(X[rows]).float()
            F.cross_entropy(outputs, y[rows]).backward()
            recorder.batch(rows)
            optimizer.step()
    return epk.attribute(recorder.trajectory, X[:3] + 0.1, head="logits"), recorder.steps


def test_bf16_of_accelerate_is_recorded_as_that_of_a_plain_loop():
    (parts, steps), (plain, _) = in_bf16(4, is_accelerated=True), in_bf16(4, is_accelerated=False)
    assert parts.certified
    assert {one.autocast for step in steps for one in step.passes} == {torch.bfloat16}
    assert torch.equal(parts.samples, plain.samples)
    assert torch.equal(parts.unexplained, plain.unexplained)
    assert 0 < parts.unexplained.norm() < 0.05 * (parts.network - parts.initial).norm()


def whole(net, **options):
    return torch.compile(net, **options)


def in_place(net, **options):
    net.compile(**options)
    return net


def in_part(net, **options):
    net[0] = torch.compile(net[0], **options)
    return net


def train_compiled(compile_network, *, dropout, batch_norm=False, is_given_plain=False, wrong=False, **options):
    torch._dynamo.reset()
    X, y = vectors(24)
    norm = nn.BatchNorm1d(7) if batch_norm else nn.Identity()
    body = nn.Sequential(nn.Linear(5, 7), norm, nn.Tanh(), nn.Dropout(dropout), nn.Linear(7, 7), nn.GELU())
    net = nn.Sequential(body, nn.Linear(7, C)).double()
    optimizer, called = torch.optim.AdamW(net.parameters(), lr=0.02), compile_network(net, **options)
    with epk.Recorder(net if is_given_plain else called, optimizer, X, y) as recorder:
        called.train()
        for rows in torch.randperm(24).split(8):
            optimizer.zero_grad()
            F.cross_entropy(called(X[rows]), y[rows]).backward()
            recorder.batch(rows.flip(0) if wrong else rows)
            optimizer.step()
    parts = epk.attribute(recorder.trajectory, X[:3], head="logits")
    assert parts.certified
    assert float((parts.total - called.eval()(X[:3])).detach().abs().max()) < 1e-10
    return net, recorder


COMPILED = {
    "whole": (whole, {}),
    "whole_graph": (whole, {"fullgraph": True}),
    "plain_given": (whole, {"is_given_plain": True}),
    "in_place": (in_place, {}),
    "in_part": (in_part, {}),
}


@pytest.mark.mostly_slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("compile_network", "options"), COMPILED.values(), ids=COMPILED)
def test_a_compiled_network_is_recorded_as_it_was_written(compile_network, options):
    net, recorder = train_compiled(compile_network, dropout=0.3, batch_norm=True, backend="aot_eager", **options)
    assert recorder.trajectory.model.names == tuple(name for name, _ in net.named_parameters())
    with pytest.raises(epk.StepMismatchError, match="the batch says"):
        train_compiled(compile_network, dropout=0.3, backend="aot_eager", wrong=True, **options)


@pytest.mark.slow
@pytest.mark.compiled
@pytest.mark.filterwarnings("default")
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's default backend needs a C++ compiler")
@pytest.mark.parametrize("compile_network", [whole, in_part])
def test_random_numbers_of_a_compiled_network_are_the_one_cause_that_is_named(compile_network):
    train_compiled(compile_network, dropout=0.0, batch_norm=True)
    with pytest.raises(epk.StepMismatchError, match=r"set torch\._inductor\.config\.fallback_random = True"):
        train_compiled(compile_network, dropout=0.3)
    with torch._inductor.config.patch(fallback_random=True):
        train_compiled(compile_network, dropout=0.3)


OPTIMIZERS = {"fastai": r"pass learner\.opt\.opt", "keras": "as torch modules", "mine": "$"}


@pytest.mark.parametrize(("library", "message"), OPTIMIZERS.items())
def test_an_optimizer_that_is_not_torch_s_is_refused_with_what_to_do(library, message):
    optimizer = type("Adam", (), {"__module__": f"{library}.optimizer"})()
    with pytest.raises(TypeError, match=rf"must be a torch.optim.Optimizer: got Adam\..*{message}"):
        epk.Recorder(perceptron(), optimizer, *vectors(6))


def test_a_keras_model_is_refused_in_a_line():
    net = type("Sequential", (nn.Sequential,), {"__module__": "keras.src.models"})(nn.Linear(5, C)).double()
    with pytest.raises(TypeError, match="got a Keras model. Write the network in torch"):
        epk.Recorder(net, torch.optim.SGD(net.parameters(), lr=0.1), *vectors(6))
