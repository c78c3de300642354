"""What a resumed run gets back beside weights and one optimizer: buffers, statistics, several optimizers."""

import copy
import json

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.storage.run import resume_run
from epk_gp.storage.schema import module_names, read_header
from epk_gp.storage.training_state import TrainingState, validate_resumable
from loops import data, file_hashes, mlp, sgd
from stored_runs import add, begin, finish, norm_net, resumed, step


class Counting(nn.Module):
    """Counts its calls in buffers that its outputs do not depend on; one is made anew by each call."""

    def __init__(self):
        super().__init__()
        self.inner = mlp()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("anew", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("large", torch.ones(1000))

    def forward(self, x):
        if torch.is_grad_enabled() and not torch._C._are_functorch_transforms_active():
            self.calls += 1
            self.anew = self.anew + 1
        return self.inner(x)


def test_counters_come_back_as_they_were_at_the_last_commit(tmp_path):
    first = resumed(tmp_path / "run", net=Counting())
    with first:
        for _ in range(3):
            step(first)
    calls, anew = int(first.net.calls), int(first.net.anew)
    assert calls >= 3
    again = resumed(tmp_path / "run", net=Counting())
    assert (int(again.net.calls), int(again.net.anew)) == (calls, anew)


def test_buffers_that_do_not_change_are_not_stored_with_each_commit():
    net = Counting()
    training = TrainingState(sgd(net), {}, torch.zeros(3), net)
    before = sum(value.nbytes for value in training.state_dict().values())
    net(data()[0])
    assert 0 < sum(value.nbytes for value in training.state_dict().values()) - before < 1000
    assert training.load_state_dict(training.state_dict(), "").keys() == {"calls", "anew"}
    with torch.inference_mode():
        net.large = torch.ones(1000)  # torch does not count what happens to it
    assert training.load_state_dict(training.state_dict(), "").keys() == {"calls", "anew", "large"}


def resume(path, net, optimizer=None):
    """Resume a run that `begin` made, as a recorder would."""
    header = read_header(path) | {"modules": module_names(net)}
    training = TrainingState(optimizer or sgd(net), {}, torch.zeros(75).double(), net)
    opened, writer = resume_run(path, header, net, epk.CrossEntropy(), training)
    writer.close()
    return opened


def test_moving_statistics_come_back_as_they_were_at_the_last_commit(tmp_path):
    run = begin(tmp_path / "run")
    for _ in range(3):
        run.net[1].num_batches_tracked += 1
        add(run, (), generator=torch.Generator().manual_seed(0))
    finish(run)
    run.net[1].num_batches_tracked += 5  # after the last commit
    net = norm_net()
    opened = resume(tmp_path / "run", net)
    assert opened.num_steps == 3
    assert int(net[1].num_batches_tracked) == 3
    assert torch.equal(opened.model.flatten_statistics(dict(net.named_buffers())), run.statistics[3])
    assert torch.equal(opened.model.flatten(dict(net.named_parameters())), run.states[3])


def test_a_buffer_of_another_kind_is_refused_and_nothing_changes(tmp_path):
    run = begin(tmp_path / "run")
    run.net[1].num_batches_tracked += 1
    add(run, ())
    finish(run)
    net, before = norm_net(), file_hashes(tmp_path / "run")
    net[1].num_batches_tracked = torch.zeros((), dtype=torch.int32)
    state, optimizer = copy.deepcopy(net.state_dict()), sgd(net)
    message = r"recorded buffers to resume .*: '1.num_batches_tracked' is another"
    with pytest.raises(ValueError, match=message):
        resume(tmp_path / "run", net, optimizer)
    assert all(torch.equal(net.state_dict()[name], value) for name, value in state.items())
    assert file_hashes(tmp_path / "run") == before


def two_optimizers(net):
    return [sgd(net[0], momentum=0.9), torch.optim.Adam([*net[1].parameters(), *net[4].parameters()], lr=0.01)]


def moved(net, optimizers):
    """Let every optimizer do a step."""
    for each in optimizers:
        each.zero_grad()
    net(data()[0]).square().sum().backward()
    for each in optimizers:
        each.step()


def test_several_optimizers_come_back(tmp_path):
    net = norm_net()
    optimizers = two_optimizers(net)
    run = begin(tmp_path / "run", net=net, optimizer=optimizers)
    moved(net, optimizers)
    add(run, ())
    finish(run)
    again = norm_net()
    made = two_optimizers(again)
    opened = resume(tmp_path / "run", again, made)
    assert opened.num_steps == 1
    assert str([each.state_dict() for each in made]) == str([each.state_dict() for each in optimizers])
    assert made[1].state_dict()["state"]
    header = read_header(tmp_path / "run")
    assert header["num_optimizers"] == 2
    assert [group["parameters"] for group in header["optimizer"]] == [2, 4]
    with pytest.raises(ValueError, match="optimizer must be the recorded one to resume"):
        resume(tmp_path / "run", again, torch.optim.SGD(header_groups(again), lr=0.1))
    with pytest.raises(ValueError, match="^optimizer must be the recorded one"):
        resume(tmp_path / "run", again, made[::-1])


def header_groups(net):
    return [{"params": list(net[0].parameters())}, {"params": [*net[1].parameters(), *net[4].parameters()]}]


def test_a_training_state_of_another_number_of_optimizers_is_refused():
    net = norm_net()
    one, two = (TrainingState(made, {}, torch.zeros(75), net) for made in (sgd(net), two_optimizers(net)))
    for training, other, count in ((one, two, 2), (two, one, 1)):
        with pytest.raises(ValueError, match=f"the state to resume from: it has that of {count} optim"):
            training.load_state_dict(other.state_dict(), "file")


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.ASGD, torch.optim.Adamax, torch.optim.Rprop])
def test_an_optimizer_comes_back_with_the_dtypes_that_its_state_had(kind):
    """torch loads NAdam's product of momenta, a float32 number, in float64, and other steps follow."""
    nets = [norm_net(), norm_net()]
    first, second = (kind(net.parameters(), lr=0.01) for net in nets)
    for _ in range(3):
        moved(nets[0], [first])
    state = TrainingState(first, {}, torch.zeros(75), nets[0]).state_dict()
    TrainingState(second, {}, torch.zeros(75), nets[1]).load_state_dict(state, "file")
    nets[1].load_state_dict(nets[0].state_dict())
    nets[0].eval()
    nets[1].eval()
    for _ in range(3):
        moved(nets[0], [first])
        moved(nets[1], [second])
    assert all(torch.equal(a, b) for a, b in zip(nets[0].parameters(), nets[1].parameters(), strict=True))


def test_the_scheduler_of_any_of_several_optimizers_must_be_known(tmp_path):
    optimizers = two_optimizers(norm_net())
    validate_resumable(optimizers, {}, tmp_path)
    torch.optim.lr_scheduler.ExponentialLR(optimizers[1], 0.9)
    with pytest.raises(ValueError, match="must know the learning-rate schedule"):
        validate_resumable(optimizers, {}, tmp_path)


@pytest.mark.parametrize("buffers", [[], {"list": [3]}, 7, {"dict": [["1.running_mean", 3]]}], ids=str)
def test_buffers_that_are_none_are_refused(buffers):
    net = norm_net()
    training = TrainingState(sgd(net), {}, torch.zeros(75), net)
    tensors = training.state_dict()
    state = json.loads(bytes(tensors["state"].numpy()))
    state["dict"][-1][1] = buffers
    tensors["state"] = torch.frombuffer(bytearray(json.dumps(state).encode()), dtype=torch.uint8)
    with pytest.raises(ValueError, match="file must hold the state to resume from"):
        training.load_state_dict(tensors, "file")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_random_numbers_of_the_accelerator_come_back():
    net = norm_net().cuda()
    training = TrainingState(sgd(net), {}, torch.zeros(75), net)
    tensors = training.state_dict()
    drawn = torch.rand(3, device="cuda")
    torch.rand(9, device="cuda")
    training.load_state_dict(tensors, "file")
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
