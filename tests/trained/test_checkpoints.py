"""Which checkpoints are read: in which order, and of which network."""

import copy
from pathlib import Path

import pytest
import torch
from checkpoint_names import count_orders
from safetensors.torch import save_file
from torch import nn

import epk_gp as epk
from checkpoint_runs import small_net, trained

NAMES = {  # in the order of training, and whether they say so
    ("epoch=00-val_loss=0.90.ckpt", "epoch=01-val_loss=0.52.ckpt", "epoch=02-val_loss=0.61.ckpt"): True,
    ("epoch=0-step=30.ckpt", "epoch=0-step=60.ckpt", "epoch=1-step=90.ckpt"): True,
    ("epoch0_step50.pt", "epoch0_step100.pt", "epoch1_step50.pt"): True,
    ("ckpt_9.pt", "ckpt_10.pt", "ckpt_100.pt"): True,
    ("model_000900.pt", "model_001000.pt"): True,
    ("01-loss0.9.pth", "02-loss0.5.pth", "03-loss0.7.pth"): True,
    ("checkpoint-9.pth.tar", "checkpoint-12.pth.tar"): True,
    ("pytorch_model_9.bin", "pytorch_model_10.bin"): True,
    ("llama-7b-step-900.safetensors", "llama-7b-step-1000.safetensors"): True,
    ("epoch=3-step=1000.ckpt", "epoch=3-step=1000-v1.ckpt"): False,
    ("iter_100_acc90.pt", "iter_200_acc85.pt"): False,
    ("weights.05-0.32.pt", "weights.06-0.35.pt"): False,
    ("2024-01-31.pt", "2024-02-01.pt"): False,
    ("85_acc.pt", "90_acc.pt"): False,
    ("model_2_layers.pt", "model_10_layers.pt"): False,
    ("v1.2_step10.pt", "v1.10_step5.pt"): False,
    ("9_epochs.pt", "10_epochs.pt"): True,
    ("step10.pt", "step10-v1.pt"): False,
    ("ckpt_9.pt", "ckpt_10.pt", "last.pt"): False,
    ("best.pt", "ckpt_9.pt", "ckpt_10.pt"): False,
    ("ckpt_1.pt", "ckpt_1.pth"): False,
    ("run0_epoch3.pt", "run1_epoch0.pt"): False,
    ("seed0.pt", "seed1.pt"): False,
}


@pytest.mark.parametrize("names", NAMES, ids=" ".join)
def test_a_folder_is_read_in_the_order_of_epochs_and_steps_or_refused(names, rows, tmp_path: Path):
    """Where names may mean two orders, or none, the error has two of them; a list is read as it is."""
    net, states, X, _ = rows
    for name, state in zip(names, states, strict=False):
        (save_file if name.endswith(".safetensors") else torch.save)(state, tmp_path / name)
    torch.save({}, tmp_path / "optimizer.pt")
    torch.save({}, tmp_path / "training_args.bin")
    expected = epk.between(net, states[: len(names)], X[:2]).pieces
    assert torch.equal(epk.between(net, [tmp_path / name for name in names], X[:2]).pieces, expected)
    if NAMES[names]:
        assert torch.equal(epk.between(net, tmp_path, X[:2]).pieces, expected)
        return
    with pytest.raises(ValueError, match=r"names of checkpoints .*: '(.*)' and '(.*)' differ in .*Pass a list"):
        epk.between(net, tmp_path, X[:2])


def test_names_are_read_in_the_right_order_or_refused(tmp_path: Path):
    """Random schemes against the order in which they were saved; many are plain enough to be read."""
    counts, wrong = count_orders(tmp_path, range(900))
    assert not wrong
    assert counts["right"] > 200


def partly_live(net, first, name):
    """Return a state that has one tensor of its own, and the network's memory else."""
    return {**net.state_dict(), name: first[name]}


def test_states_that_share_the_memory_of_what_is_trained_are_refused(rows):
    _, states, X, y = rows
    first, last, net = states[0], states[-1], small_net()
    live = net.state_dict()
    trained(net, X, y)
    vector = torch.cat([value.flatten().double() for value in last.values()])
    sizes = [value.numel() for value in last.values()]

    def views():
        parts = zip(last.items(), vector.split(sizes), strict=True)
        return {name: part.view(value.shape).to(value.dtype) for (name, value), part in parts}

    statistics = {**first, "1.running_mean": live["1.running_mean"]}
    shared = {
        "live": [live, copy.deepcopy(net.state_dict())], "both live": [live, net.state_dict()],
        "one tensor cloned": [partly_live(net, first, "0.weight"), partly_live(net, last, "0.weight")],
        "one of them a copy": [partly_live(net, first, "0.weight"), last], "live in the middle": [first, live, last],
        "wrapped": [{"model": live}, {"model": net.state_dict(), "step": 3}], "views": [views(), views()],
        "statistics": [statistics, {**last, "1.running_mean": live["1.running_mean"]}],
    }  # fmt: skip
    for states in shared.values():
        with pytest.raises(ValueError, match=r"must be copies: '.*' of 'state \d' lies in the memory of"):
            epk.between(net, states, X)


def test_states_that_are_copies_or_constants_may_share_what_they_do(rows):
    """The last state may be the network's, the first that of a network that was not trained; frozen tensors are one."""
    net, states, X, _ = rows
    start, end = small_net(), copy.deepcopy(net)
    start.load_state_dict(states[0])
    end.load_state_dict(states[-1])
    expected = epk.between(net, [states[0], states[-1]], X).pieces
    for model in (start, end, net):
        assert torch.equal(epk.between(model, [start.state_dict(), end.state_dict()], X).pieces, expected)
    frozen = copy.deepcopy(net)
    frozen[0].requires_grad_(False)
    base = frozen.state_dict()
    changed = [{**copy.deepcopy(s), **{n: base[n] for n in ("0.weight", "0.bias")}} for s in states]
    assert epk.between(frozen, changed, X).certified


def test_a_state_dict_of_another_network_is_refused(rows):
    """As `load_state_dict` does, by the name of a tensor: a deeper one, one with a bias more, one without its base."""
    _, _, X, _ = rows

    def net(*more, bias=True):
        return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3, bias=bias), *more).double()

    def ends(net, keep=lambda name: True, begin=""):
        return [
            {begin + name: value.clone() for name, value in net().state_dict().items() if keep(name)} for _ in range(2)
        ]

    own, frozen = net(), net()
    frozen[0].requires_grad_(False)
    other = {
        "no '4.bias': it is left over, one of 2": (own, ends(lambda: net(nn.Tanh(), nn.Linear(3, 3)))),
        "no '2.bias': it is left over, one of 1": (net(bias=False), ends(net)),
        "no 'net.3.bias'": (own, ends(lambda: net(nn.Linear(3, 3)), begin="net.")),
        "'2.bias' is missing, one of 1": (own, ends(lambda: net(bias=False))),
        "'0.bias' is missing, one of 2": (frozen, ends(net, lambda name: name.startswith("2."))),
    }
    for message, (model, states) in other.items():
        with pytest.raises(ValueError, match=message):
            epk.between(model, states, X)
    whole = [{**frozen.state_dict(), **state} for state in other["'0.bias' is missing, one of 2"][1]]
    assert epk.between(frozen, whole, X).certified  # what the error advises


def test_what_others_write_beside_a_network_is_no_left_over(rows):
    net, states, X, _ = rows
    expected = epk.between(net, states, X[:2]).pieces
    counts = [{name: value for name, value in state.items() if "batches" not in name} for state in states]
    beside = [
        {"state_dict": {**{f"net.{n}": v for n, v in s.items()}, "loss.weight": torch.ones(3)}, "epoch": 1}
        for s in states
    ]
    for given in (counts, beside, [{f"_orig_mod.{n}": v for n, v in s.items()} for s in states]):
        assert torch.equal(epk.between(net, given, X[:2]).pieces, expected)
    assert torch.equal(epk.between(torch.compile(net, backend="eager"), states, X[:2]).pieces, expected)
    older = copy.deepcopy(net)
    older._keys_to_ignore_on_load_unexpected = [r"position_ids$"]  # as transformers' classes say it
    given = [{**state, "0.position_ids": torch.arange(3)} for state in states]
    assert torch.equal(epk.between(older, given, X[:2]).pieces, expected)
