"""Batches that say which rows they hold, and loops that belong to others: Lightning, Accelerate, compiled networks."""

import shutil
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import epk_gp as epk
from epk_gp import callbacks
from epk_gp.callbacks import IndexedDataset
from epk_gp.optimizers.update_rules import ClipNorm
from loops import assert_exact as assert_terms_are_exact
from loops import data as points
from loops import mlp, record
from recipes.problem import C as CLASSES
from recipes.problem import vectors

M, C = 23, 3
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
pytestmark = [
    pytest.mark.filterwarnings("default:::pytorch_lightning", "default:::lightning_fabric", "default::FutureWarning"),
    pytest.mark.filterwarnings("default:::transformers", "default:::accelerate", "default::DeprecationWarning"),
]


data = pytest.fixture(lambda: points(M))
net = pytest.fixture(mlp)


def assert_exact(trajectory, X, tolerance=1e-12):
    return assert_terms_are_exact(trajectory, X[:3] + 0.1, tolerance=tolerance, head="log_softmax")


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_batches_of_a_shuffled_loader_say_their_rows_and_hidden_augmentation_is_recorded(data, net, shift):
    """Without augmentation the loader itself is X."""
    X, y = data
    dataset = IndexedDataset(TensorDataset(X + shift, y))
    loader, seen = DataLoader(dataset, batch_size=10, shuffle=True), []
    optimizer = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9)
    with epk.Recorder(net, optimizer, *((X, y) if shift else (loader,))) as recorder:
        for indices, (inputs, labels) in loader:
            assert torch.equal(inputs, X[indices] + shift)
            assert torch.equal(labels, y[indices])
            seen.append(indices)
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
            recorder.batch(indices)
            optimizer.step()
    assert dataset[-1][0] == M - 1
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(M))
    assert torch.equal(recorder.X, X)
    assert torch.equal(recorder.y, y)
    assert_exact(recorder.trajectory, X)
    passes = recorder.trajectory.steps[0].passes
    assert torch.equal(passes[0].inputs.values, X[seen[0]] + shift) if shift else not passes


def test_callbacks_are_found_others_are_not_and_a_missing_package_is_named_with_its_extra(monkeypatch):
    assert set(dir(callbacks)) == set(callbacks.__all__)
    assert callbacks.IndexedDataset is IndexedDataset
    assert epk.callbacks is callbacks
    with pytest.raises(AttributeError, match="no attribute 'KerasCallback'"):
        _ = callbacks.KerasCallback
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "epk_gp.recording.huggingface", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package transformers: .* pip install 'epk-gp\[hugging"):
        _ = callbacks.HuggingFaceRecorderCallback


def test_dictionaries_hold_their_index_under_the_key_and_what_has_no_numbers_is_refused(data):
    rows = [{"x": x, "labels": int(label)} for x, label in zip(*data, strict=True)]
    items = IndexedDataset(rows, key="index")
    assert items[-1]["index"] == M - 1
    assert torch.equal(items[3]["x"], data[0][3])
    with pytest.raises(TypeError, match="items by index: got Stream"):
        IndexedDataset(type("Stream", (IterableDataset,), {"__iter__": iter})())
    with pytest.raises(TypeError, match="items must be dictionaries if there is a key: got tuple"):
        IndexedDataset(TensorDataset(*data), key="index")[0]
    with pytest.raises(ValueError, match="must not have an entry 'x'"):
        IndexedDataset(rows, key="x")[0]


def lightning_module(lightning, net, step, make_optimizers, scale, skipped=()):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net
            self.automatic_optimization = step is None

        def training_step(self, batch, number):
            _, (inputs, labels) = batch
            loss = scale * F.cross_entropy(self.net(inputs), labels)
            return None if number in skipped else loss if step is None else step(self, loss, number)

        def validation_step(self, batch, number, dataloader_idx=0):
            self.net(batch[1][0])

        def configure_optimizers(self):
            return make_optimizers(self.net)

    return Module()


momentum, adam = (
    (lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)),
    (lambda net: torch.optim.Adam(net.parameters(), lr=0.01)),
)


def fit_lightning(data, net, *, step=None, make_optimizers=momentum, scale=1.0, options=None, skipped=(), **own):
    lightning = pytest.importorskip("pytorch_lightning", reason="needs the extra 'lightning'")
    X, y = data
    callback = callbacks.RecorderCallback(net, X, y, **own)
    with pytest.raises(RuntimeError, match="training has not started"):
        _ = callback.trajectory
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, callbacks=[callback], **QUIET, **(options or {}))
    loader = DataLoader(IndexedDataset(TensorDataset(X, y)), batch_size=6, shuffle=True)
    held_out = DataLoader(IndexedDataset(TensorDataset(X[:5], y[:5])), batch_size=3)
    module = lightning_module(lightning, net, step, make_optimizers, scale, skipped)
    trainer.fit(module, loader, [held_out, held_out])
    return callback.trajectory


def accumulate_by_hand(module, loss, number):
    optimizer = module.optimizers()
    module.manual_backward(loss / 2)
    if number % 2 == 1:
        module.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()
        optimizer.zero_grad()


def plain_backward(module, loss, number):
    optimizer = module.optimizers()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def alternate(module, loss, number):
    """Two optimizers, as for an encoder and a head."""
    optimizers = module.optimizers()
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(loss)
    for optimizer in optimizers:
        optimizer.step()


TWO = {"accumulate_grad_batches": 2}
RUNS = {  # options, and the number of steps; batches that are skipped are those for which training_step returns None
    "two_validation_loops": (
        {"options": {"val_check_interval": 0.5, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}}, 8),
    "accumulated_and_clipped": (
        {"options": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}, "make_optimizers": adam}, 4),
    "manual": ({"step": accumulate_by_hand, "weight": 0.5, "clip": ClipNorm(0.1)}, 4),
    "manual_plain_backward": ({"step": plain_backward, "weight": lambda batch: 1.0}, 8),
    "factor_of_the_loss": ({"scale": 2.0}, 8),
    "skipped_at_the_end": ({"skipped": {1}, "options": TWO}, 4),
    "skipped_at_the_beginning": ({"skipped": {2}, "options": TWO, "make_optimizers": adam}, 4),
    "skipped_whole_step": ({"skipped": {0, 1}, "options": TWO, "make_optimizers": adam}, 2),
    "batch_norm_dropout_two_optimizers": (
        {"step": alternate, "make_optimizers": lambda net: [adam(net[:2]), momentum(net[-1])]}, 8),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_lightning_run_is_exact(data, net, name, tmp_path):
    (options, steps), has_norm = RUNS[name], "norm" in name
    if has_norm:
        layers = nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, C)
        net = nn.Sequential(*layers).double()
    trajectory = fit_lightning(data, net, **options, folder=tmp_path / "run")
    assert trajectory.num_steps == steps
    for run in (trajectory, epk.load_trajectory(tmp_path / "run", net)):
        parts = assert_exact(run, data[0], 1e-10 if has_norm else 1e-12)
        assert bool(parts.statistics.any()) == has_norm
    assert name != "factor_of_the_loss" or epk.influence(trajectory, data[0][:1]).certified


# Loops of Accelerate, and networks that torch.compile compiled


def perceptron():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, CLASSES)).double()


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

    def call(model, x):
        with torch.autocast("cpu", torch.bfloat16, enabled=not is_accelerated):
            return model(x).float()

    batches = torch.arange(8 * steps).remainder(22).split(8)
    recorder = record(model, optimizer, X, y, batches, call=call, unexplained=0.1)
    return epk.attribute(recorder.trajectory, X[:3] + 0.1, head="logits"), recorder.steps


def test_bf16_of_accelerate_is_recorded_as_that_of_a_plain_loop():
    (parts, steps), (plain, _) = in_bf16(4, is_accelerated=True), in_bf16(4, is_accelerated=False)
    assert parts.certified
    assert {one.autocast for step in steps for one in step.passes} == {torch.bfloat16}
    assert torch.equal(parts.samples, plain.samples)
    assert torch.equal(parts.unexplained, plain.unexplained)
    assert 0 < parts.unexplained.norm() < 0.05 * (parts.network - parts.initial).norm()


def in_part(net, **options):
    net[0] = torch.compile(net[0], **options)
    return net


def train_compiled(compile_network, *, dropout, batch_norm=False, is_given_plain=False, wrong=False, **options):
    torch._dynamo.reset()
    X, y = vectors(24)
    norm = nn.BatchNorm1d(7) if batch_norm else nn.Identity()
    body = nn.Sequential(nn.Linear(5, 7), norm, nn.Tanh(), nn.Dropout(dropout))
    net = nn.Sequential(body, nn.Linear(7, CLASSES)).double()
    optimizer, called = torch.optim.AdamW(net.parameters(), lr=0.02), compile_network(net, **options)
    call = lambda _, x: called(x.flip(0) if wrong else x)  # noqa: E731
    recorder = record(net if is_given_plain else called, optimizer, X, y, torch.randperm(24).split(8), call=call)
    assert_terms_are_exact(recorder.trajectory, X[:3], called)
    return net, recorder


COMPILED = {
    "whole": (torch.compile, {}),
    "whole_graph": (torch.compile, {"fullgraph": True}),
    "plain_given": (torch.compile, {"is_given_plain": True}),
    "in_place": (lambda net, **options: net.compile(**options) or net, {}),
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
def test_random_numbers_of_a_compiled_network_are_the_one_cause_that_is_named():
    config, says = torch._inductor.config.patch, r"set torch\._inductor\.config\.fallback_random = True"
    with config(compile_threads=1), pytest.raises(epk.StepMismatchError, match=says):
        train_compiled(torch.compile, dropout=0.3)
    with config(compile_threads=1, fallback_random=True):
        train_compiled(torch.compile, dropout=0.3, batch_norm=True)


def test_a_model_of_keras_is_refused_with_what_to_do():
    net = type("Sequential", (nn.Sequential,), {"__module__": "keras.src.models"})(nn.Linear(5, CLASSES)).double()
    with pytest.raises(TypeError, match="got a Keras model. Write the network in torch"):
        epk.Recorder(net, torch.optim.SGD(net.parameters(), lr=0.1), *vectors(6))
