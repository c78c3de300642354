"""Batches that say which rows they hold, and loops that belong to others: Lightning's and Hugging Face's trainers."""

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

import epk_gp as epk
from epk_gp import callbacks
from epk_gp.callbacks import IndexedDataset
from epk_gp.optimizers.update_rules import ClipNorm
from loops import data as points
from loops import mlp

M, C = 23, 3
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
pytestmark = [
    pytest.mark.filterwarnings("default:::pytorch_lightning", "default:::lightning_fabric", "default::FutureWarning"),
    pytest.mark.filterwarnings("default:::transformers", "default:::accelerate", "default::DeprecationWarning"),
]


data = pytest.fixture(lambda: points(M))
net = pytest.fixture(mlp)


def assert_exact(trajectory, X, tolerance=1e-12):
    parts = epk.attribute(trajectory, X[:3] + 0.1)
    assert parts.certified
    assert float((parts.total - parts.network).abs().max()) < tolerance


@pytest.mark.parametrize("shift", [0.0, 0.01])
def test_batches_of_a_shuffled_loader_say_their_rows_and_augmentation_hidden_in_the_dataset_is_recorded(
    data, net, shift
):
    X, y = data
    dataset = IndexedDataset(TensorDataset(X + shift, y))
    optimizer, seen = torch.optim.SGD(net.parameters(), lr=0.2, momentum=0.9), []
    with epk.Recorder(net, optimizer, X, y) as recorder:
        for indices, (inputs, labels) in DataLoader(dataset, batch_size=10, shuffle=True):
            assert torch.equal(inputs, X[indices] + shift)
            assert torch.equal(labels, y[indices])
            seen.append(indices)
            optimizer.zero_grad()
            F.cross_entropy(net(inputs), labels).backward()
            recorder.batch(indices)
            optimizer.step()
    assert dataset[-1][0] == M - 1
    assert torch.equal(torch.cat(seen).sort().values, torch.arange(M))
    assert_exact(recorder.trajectory, X)
    passes = recorder.trajectory.steps[0].passes
    assert torch.equal(passes[0].inputs.values, X[seen[0]] + shift) if shift else not passes


def test_a_dataset_without_numbers_is_refused():
    with pytest.raises(TypeError, match="items by index: got Stream"):
        IndexedDataset(type("Stream", (IterableDataset,), {"__iter__": iter})())


def test_callbacks_are_found_and_others_are_not():
    assert set(dir(callbacks)) == set(callbacks.__all__)
    assert callbacks.IndexedDataset is IndexedDataset
    assert epk.callbacks is callbacks
    with pytest.raises(AttributeError, match="no attribute 'KerasCallback'"):
        _ = callbacks.KerasCallback


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    monkeypatch.delitem(sys.modules, "epk_gp.recording.huggingface", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs the package transformers: .* pip install 'epk-gp\[hugging"):
        _ = callbacks.HuggingFaceRecorderCallback


def test_dictionaries_hold_their_index_under_the_key(data):
    X, y = data
    rows = [{"x": x, "labels": int(label)} for x, label in zip(X, y, strict=True)]
    items = IndexedDataset(rows, key="index")
    assert items[-1]["index"] == M - 1
    assert torch.equal(items[3]["x"], X[3])
    with pytest.raises(TypeError, match="items must be dictionaries if there is a key: got tuple"):
        IndexedDataset(TensorDataset(X, y), key="index")[0]
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


def momentum(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.01)


def fit_lightning(
    data, net, *, step=None, make_optimizers=momentum, scale=1.0, options=None, skipped=(), **callback_options
):
    lightning = pytest.importorskip("pytorch_lightning", reason="needs the extra 'lightning'")
    X, y = data
    source = (TensorDataset(X, y),) if callback_options.pop("reads", False) else (X, y)
    callback = callbacks.RecorderCallback(net, *source, **callback_options)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "steps"),
    [
        ({"options": {"val_check_interval": 0.5, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}}, 8),
        ({"options": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.05}, "make_optimizers": adam}, 4),
        ({"step": accumulate_by_hand, "weight": 0.5, "clip": ClipNorm(0.1)}, 4),
        ({"step": plain_backward, "weight": lambda batch: 1.0}, 8),
        ({"reads": True}, 8),
    ],
    ids=["two_validation_loops", "accumulated_and_clipped", "manual", "manual_plain_backward", "data_set"],
)
def test_a_lightning_run_is_exact(data, net, options, steps, tmp_path):
    trajectory = fit_lightning(data, net, **options, folder=tmp_path / "run")
    assert trajectory.num_steps == steps
    assert_exact(trajectory, data[0])
    assert_exact(epk.load_trajectory(tmp_path / "run", net), data[0])


@pytest.mark.slow
@pytest.mark.parametrize(("skipped", "steps"), [({1}, 4), ({2}, 4), ({0, 1}, 2)], ids=["end", "begin", "whole"])
@pytest.mark.parametrize("make", [momentum, adam])
def test_batches_for_which_training_step_returns_none_are_not_in_the_step(data, net, skipped, steps, make):
    options = {"accumulate_grad_batches": 2}
    trajectory = fit_lightning(data, net, skipped=skipped, options=options, make_optimizers=make)
    assert trajectory.num_steps == steps
    assert_exact(trajectory, data[0])


@pytest.mark.slow
def test_a_factor_of_the_loss_under_lightning_is_recorded(data, net):
    trajectory = fit_lightning(data, net, scale=2.0)
    assert_exact(trajectory, data[0])
    assert epk.influence(trajectory, data[0][:1]).certified


def alternate(module, loss, number):
    """Two optimizers, as for an encoder and a head."""
    optimizers = module.optimizers()
    for optimizer in optimizers:
        optimizer.zero_grad()
    module.manual_backward(loss)
    for optimizer in optimizers:
        optimizer.step()


@pytest.mark.slow
def test_a_lightning_run_with_dropout_batch_norm_and_two_optimizers_is_exact(data):
    net = nn.Sequential(
        nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, C)
    ).double()

    trajectory = fit_lightning(
        data, net, step=alternate, make_optimizers=lambda net: [adam(net[:2]), momentum(net[-1])]
    )
    assert trajectory.num_steps == 8
    assert_exact(trajectory, data[0], 1e-10)
    assert epk.attribute(trajectory, data[0][:3]).statistics.any()


class Classifier(nn.Module):
    """A model of one's own as the trainer takes it: the loss first."""

    fails = False

    def __init__(self, net):
        super().__init__()
        self.net = net

    def forward(self, x, labels=None):
        logits = self.net(x)
        if self.fails and labels is not None:
            raise KeyboardInterrupt
        return {"logits": logits} if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def fit_huggingface(data, net, folder, *, wrapped=True, reads=False, **arguments):
    transformers = pytest.importorskip("transformers", reason="needs the extra 'huggingface'")
    X, y = data
    rows = [{"x": x, "labels": int(label)} for x, label in zip(X, y, strict=True)]
    dataset = IndexedDataset(rows, key="index") if wrapped else rows
    source = (dataset,) if reads else (X, y)
    callback = callbacks.HuggingFaceRecorderCallback(*source, output=lambda returned: returned["logits"])
    callback.close()  # of what has not begun
    with pytest.raises(RuntimeError, match=r"training has not started. Call trainer.train"):
        _ = callback.trajectory
    train_huggingface(transformers, Classifier(net), dataset, callback, folder, **arguments)
    return callback.trajectory


def train_huggingface(transformers, model, dataset, callback, folder, **arguments):
    arguments = {"remove_unused_columns": False, "per_device_train_batch_size": 6, "num_train_epochs": 2} | arguments
    arguments |= {"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "learning_rate": 0.01}
    training = transformers.TrainingArguments(output_dir=str(folder), logging_strategy="no", **arguments)
    transformers.Trainer(model, training, train_dataset=dataset, callbacks=[callback]).train()


@pytest.mark.slow
@pytest.mark.parametrize("reads", [False, True], ids=["tensors", "data_set"])
def test_a_hugging_face_run_is_exact(data, net, tmp_path, reads):
    """The last step of an epoch is one batch."""
    options = {"gradient_accumulation_steps": 3, "max_grad_norm": 0.05}
    trajectory = fit_huggingface(data, net, tmp_path, reads=reads, **options)
    assert trajectory.num_steps == 4
    assert_exact(trajectory, data[0])


@pytest.mark.slow
def test_a_trainer_that_removes_the_indices_is_refused(data, net, tmp_path):
    with pytest.raises(ValueError, match="remove_unused_columns=False"):
        fit_huggingface(data, net, tmp_path, remove_unused_columns=True)
    with pytest.raises(ValueError, match="must hold the rows' indices under 'index': got labels, x"):
        fit_huggingface(data, net, tmp_path, wrapped=False)


def test_a_trainer_of_several_processes_is_refused(data):
    pytest.importorskip("transformers")
    callback, arguments = callbacks.HuggingFaceRecorderCallback(*data), SimpleNamespace(world_size=2)
    with pytest.raises(ValueError, match="the Trainer must run in one process: got 2, .*Write the loop with Accel"):
        callback.on_train_begin(arguments)


@pytest.mark.slow
def test_a_trainer_that_an_error_ended_trains_again_with_the_same_model(data, net, tmp_path):
    """As in a notebook, whose cell is mended and run again."""
    transformers = pytest.importorskip("transformers", reason="needs the extra 'huggingface'")
    rows = [{"x": x, "labels": int(label)} for x, label in zip(*data, strict=True)]
    dataset, model = IndexedDataset(rows, key="index"), Classifier(net)
    first, second = (
        callbacks.HuggingFaceRecorderCallback(dataset, output=lambda returned: returned["logits"]) for _ in range(2)
    )
    with pytest.raises(ValueError, match="Wrap the data in IndexedDataset"):
        train_huggingface(transformers, model, rows, first, tmp_path)
    train_huggingface(transformers, model, dataset, second, tmp_path)
    assert_exact(second.trajectory, data[0])
    model.fails = True
    with pytest.raises(KeyboardInterrupt):
        train_huggingface(transformers, model, dataset, second, tmp_path)
    model.fails = False
    train_huggingface(transformers, model, dataset, second, tmp_path)
    assert_exact(second.trajectory, data[0])
