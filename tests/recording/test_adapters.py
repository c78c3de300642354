"""Adapters on a frozen network: what is stored of it, how often it is in memory, and which networks are refused."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import epk_gp as epk
from loops import Net, assert_exact
from loops import record as record_loop

WORDS, WIDTH, CLASSES, M = 2100, 512, 3, 12
BASE = WORDS * WIDTH  # more than 2^20 weights


def adapted(seed=0):
    """Frozen words, and a frozen layer beside two trained ones of rank 2."""

    def forward(net, x):
        x = net.words(x).mean(dim=1)
        return net.layer(x) + net.up(net.down(net.dropout(x)))

    generator = torch.Generator().manual_seed(seed)
    frozen = {"words": nn.Embedding(WORDS, WIDTH), "layer": nn.Linear(WIDTH, CLASSES)}
    trained = {"down": nn.Linear(WIDTH, 2, bias=False), "up": nn.Linear(2, CLASSES, bias=False)}
    net = Net(forward, **frozen, **trained, dropout=nn.Dropout(0.1))
    with torch.no_grad():
        for name, p in net.named_parameters():
            p.normal_(generator=generator).mul_(0.1).requires_grad_(name.startswith(("down", "up")))
    return net


def texts():
    generator = torch.Generator().manual_seed(1)
    return torch.randint(WORDS, (M, 5), generator=generator), torch.arange(M) % CLASSES


def record(net, **options):
    torch.manual_seed(0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    return record_loop(net, optimizer, *texts(), torch.arange(M).split(4), **options)


def test_a_stored_run_holds_the_trained_weights_and_a_digest_of_a_large_base_and_resumes_on_that_alone(tmp_path):
    net = adapted()
    recorder = record(net, folder=tmp_path / "run")
    stored = sum(file.stat().st_size for file in (tmp_path / "run").iterdir())
    trained = sum(p.numel() for p in net.parameters() if p.requires_grad)
    assert recorder.trajectory.model.num_weights == trained
    assert stored < 4 * BASE / 5
    again = epk.load_trajectory(tmp_path / "run", adapted())
    parts = assert_exact(again, texts()[0][:2], tolerance=1e-4)
    expected = epk.attribute(record(adapted()).trajectory, texts()[0][:2], head="logits")
    assert torch.equal(parts.samples, expected.samples)
    with pytest.raises(ValueError, match="must have the frozen weights that it was trained with, of which the run"):
        epk.load_trajectory(tmp_path / "run", adapted(seed=1))
    with pytest.raises(ValueError, match="base must be the recorded one to resume"):
        record(adapted(seed=1), folder=tmp_path / "run", resume=True)
    assert record(adapted(), folder=tmp_path / "run", resume=True).num_steps == 6


def test_recording_copies_the_base_once_and_once_for_a_look_in_float64(monkeypatch):
    """The recorded network keeps its own, which the user may merge with adapters later; all else shares that."""
    copies, copy = [], nn.Parameter.__deepcopy__

    def counted(weights, memo):
        copies.append(weights.numel() if id(weights) not in memo else 0)
        return copy(weights, memo)

    monkeypatch.setattr(nn.Parameter, "__deepcopy__", counted)
    trajectory = record(adapted()).trajectory
    assert copies.count(BASE) == 2
    assert epk.attribute(trajectory, texts()[0][:2], head="logits", classes=torch.zeros(2).long()).certified
    assert copies.count(BASE) <= 4


def test_a_base_of_8_bits_that_forward_turns_into_weights_is_exact():
    net = adapted().double()
    weight, bias = net.layer.weight.detach(), net.layer.bias.detach()
    scale = weight.abs().amax(dim=1, keepdim=True) / 127
    packed = (weight / scale).round().to(torch.int8)
    forward = lambda net, x: F.linear(x, net.packed * net.scale, net.bias)  # noqa: E731
    net.layer = Net(forward, scale=scale, packed=packed, bias=bias)
    run = record(net).trajectory
    for path in (None, epk.layerwise()):
        assert_exact(run, texts()[0][:2], net, tolerance=1e-12, path=path)


Packed, Quantised = type("Packed", (nn.Parameter,), {}), type("Quantised", (torch.Tensor,), {})
QUANTISED = {
    "bitsandbytes": Packed(torch.zeros(CLASSES, WIDTH, dtype=torch.int8), requires_grad=False),
    "torchao": nn.Parameter(torch.zeros(CLASSES, WIDTH).as_subclass(Quantised), requires_grad=False),
}


@pytest.mark.parametrize("weight", QUANTISED.values(), ids=QUANTISED)
def test_a_base_of_a_library_that_quantises_is_refused(weight):
    net = adapted()
    net.layer._parameters["weight"] = weight
    message = r"'layer.weight' is quantised \((Packed|Quantised), .*Load the base in float32"
    with pytest.raises(ValueError, match=message):
        record(net)
