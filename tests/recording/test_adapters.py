"""Adapters on a frozen network: what is stored of it, how often it is in memory, and which networks are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk

WORDS, WIDTH, CLASSES, M = 2100, 512, 3, 12
BASE = WORDS * WIDTH  # more than 2^20 weights


class Adapted(nn.Module):
    """Frozen words, and a frozen layer beside two trained ones of rank 2."""

    def __init__(self, seed=0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.words, self.layer = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, CLASSES)
        frozen = [*self.parameters()]
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, CLASSES, bias=False)
        with torch.no_grad():
            for p in self.parameters():
                p.normal_(generator=generator).mul_(0.1)
        for p in frozen:
            p.requires_grad_(False)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        x = self.words(x).mean(dim=1)
        return self.layer(x) + self.up(self.down(self.dropout(x)))


def texts():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(WORDS, (M, 5), generator=generator), torch.arange(M) % CLASSES


def record(net, **options):
    X, y = texts()
    torch.manual_seed(0)
    with epk.Recorder(net, torch.optim.AdamW(net.parameters(), lr=0.01), X, y, **options) as recorder:
        net.train()
        for batch in torch.arange(M).split(4):
            recorder.optimizer.zero_grad()
            F.cross_entropy(net(X[batch]), y[batch]).backward()
            recorder.batch(batch)
            recorder.optimizer.step()
    return recorder


def test_a_stored_run_holds_the_trained_weights_and_a_digest_of_a_large_base(tmp_path):
    net = Adapted()
    recorder = record(net, folder=tmp_path / "run")
    stored = sum(file.stat().st_size for file in (tmp_path / "run").iterdir())
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert recorder.trajectory.model.num_weights == trained
    assert stored < 4 * BASE / 5
    again = epk.load_trajectory(tmp_path / "run", Adapted())
    parts = epk.attribute(again, texts()[0][:2], head="logits")
    assert parts.certified
    expected = epk.attribute(record(Adapted()).trajectory, texts()[0][:2], head="logits")
    assert torch.equal(parts.samples, expected.samples)
    with pytest.raises(ValueError, match="must have the frozen weights that it was trained with, of which the run"):
        epk.load_trajectory(tmp_path / "run", Adapted(seed=1))


def test_a_run_with_a_large_base_resumes_on_the_same_base_alone(tmp_path):
    record(Adapted(), folder=tmp_path / "run")
    with pytest.raises(ValueError, match="base must be the recorded one to resume"):
        record(Adapted(seed=1), folder=tmp_path / "run", resume=True)
    assert record(Adapted(), folder=tmp_path / "run", resume=True).num_steps == 6


def test_recording_copies_the_base_once_and_once_for_a_look_in_float64(monkeypatch):
    """The recorded network keeps its own, which the user may merge with adapters later; all else shares that."""
    copies, copy = [], nn.Parameter.__deepcopy__

    def counted(weights, memo):
        copies.append(weights.numel() if id(weights) not in memo else 0)
        return copy(weights, memo)

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", counted)
    trajectory = record(Adapted()).trajectory
    assert copies.count(BASE) == 2
    assert epk.attribute(trajectory, texts()[0][:2], head="logits", classes=torch.zeros(2).long()).certified
    assert copies.count(BASE) <= 4


class Int8Linear(nn.Module):
    """Weights in 8 bits, in buffers, from which the forward pass makes weights."""

    def __init__(self, layer):
        super().__init__()
        self.register_buffer("scale", layer.weight.detach().abs().amax(dim=1, keepdim=True) / 127)
        self.register_buffer("packed", (layer.weight.detach() / self.scale).round().to(torch.int8))
        self.register_buffer("bias", layer.bias.detach())

    def forward(self, x):
        return F.linear(x, self.packed * self.scale, self.bias)


def test_a_base_of_8_bits_that_forward_turns_into_weights_is_exact():
    net = Adapted().double()
    net.layer = Int8Linear(net.layer)
    recorder = record(net)
    net.eval()
    for path in (None, epk.layerwise()):
        parts = epk.attribute(recorder.trajectory, texts()[0][:2], head="logits", path=path)
        assert parts.certified
        assert float((parts.total - net(texts()[0][:2]).detach()).abs().max()) < 1e-12


class Packed(nn.Parameter):
    """As bitsandbytes keeps weights."""


class Quantised(torch.Tensor):
    """As torchao does."""


@pytest.mark.parametrize(
    "packed",
    [
        lambda: Packed(torch.zeros(CLASSES, WIDTH, dtype=torch.int8), requires_grad=False),
        lambda: nn.Parameter(torch.zeros(CLASSES, WIDTH).as_subclass(Quantised), requires_grad=False),
    ],
    ids=["bitsandbytes", "torchao"],
)
def test_a_base_of_a_library_that_quantises_is_refused(packed):
    net = Adapted()
    net.layer._parameters["weight"] = packed()
    message = r"'layer.weight' is quantised \((Packed|Quantised), .*Load the base in float32"
    with pytest.raises(ValueError, match=message):
        record(net)
