"""Loops as other libraries' pages write them, with the recorder's lines: Accelerate."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epk_gp as epk
from epk_gp.callbacks import IndexedDataset
from recipes.path_reference import brute_force_terms
from recipes.problem import C, finish, vectors
from recipes.reference import Watched, step_terms

pytestmark = [
    pytest.mark.filterwarnings("default:::accelerate", "default::DeprecationWarning"),
]


class WatchedRecorder(Watched):
    """A real recorder beside the brute force that watches the same loop."""

    inner_class = epk.Recorder


def assert_exact(result):
    """Certified, sum to 1e-10, contributions as separate backward passes give them to 1e-8."""
    parts, expected = epk.attribute(result.trajectory, result.X_test, head="logits"), brute_force_terms(result)
    assert parts.certified
    assert float((parts.total - result.outputs).abs().max()) < 1e-10
    assert step_terms(result.recorder, result.recorder.steps[0])[1] < 1e-12
    scale = expected.samples.norm()
    assert float((parts.samples - expected.samples).norm()) < 1e-8 * scale
    assert float((parts.decay - expected.decay).norm()) < 1e-8 * scale


def perceptron():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Dropout(0.2), nn.Linear(7, C)).double()


def test_accelerate_with_accumulation_clipping_and_a_schedule_is_exact():
    accelerate = pytest.importorskip("accelerate", reason="needs the extra 'huggingface'")
    X, y = vectors(22)
    net = perceptron()
    torch_optimizer = torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(torch_optimizer, lambda step: 1 - step / 20)
    loader = DataLoader(IndexedDataset(TensorDataset(X, y)), batch_size=4, shuffle=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model, optimizer, loader, schedule = accelerator.prepare(net, torch_optimizer, loader, schedule)
    recorder = WatchedRecorder(model, optimizer, X, y)
    recorder.optimizers = [torch_optimizer]
    with recorder:
        for _ in range(2):
            for indices, (inputs, labels) in loader:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(inputs), labels)
                    accelerator.backward(loss)
                    recorder.batch(indices, weight=1 / accelerator.gradient_accumulation_steps)
                    if accelerator.sync_gradients:
                        accelerator.clip_grad_norm_(model.parameters(), 0.3)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
    assert len(recorder.inner.steps) == 6
    assert_exact(finish(recorder, model, X[:3] + 0.1, X, y))
