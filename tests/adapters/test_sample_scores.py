"""Scores of training samples by the names of dattri and captum, whose packages these adapters do not need."""

import adapter_cases as cases
import pytest
import torch
from torch.testing import assert_close
from torch.utils.data import DataLoader, Subset, TensorDataset

import epk_gp as epk
from epk_gp.adapters.scores import EPKAttributor, EPKInfluence, MostInfluential, SampleScorer
from epk_gp.analysis.score_check import rank_agreement
from helpers import refusal

KINDS = ["classes", "numbers"]


def under_all_names(run, kind, **options):
    """The scores of all samples for all test points, (n, M), as each library asks for them."""
    train, test = cases.loaders(kind)
    X, y = cases.data(kind)[1].tensors
    return {
        "dattri": EPKAttributor(run, **options).attribute(train, test).T,
        "captum": EPKInfluence(run, **options).influence((X, y)),
        "captum, a loader": EPKInfluence(run, **options).influence(test),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_influence_is_the_rise_of_the_loss_without_a_sample_under_every_name(kind):
    """By finite differences of training by hand, and in the order of leaving out."""
    step = 1e-5 * torch.eye(cases.M, dtype=torch.float64)
    above, below = (
        torch.stack([cases.losses_of_test_points(kind, weights) for weights in 1 + sign * step], dim=1)
        for sign in (1, -1)
    )
    expected = (below - above) / 2e-5
    for name, scores in under_all_names(cases.record(kind), kind, scores="influence").items():
        assert_close(scores, expected, rtol=0, atol=1e-7, msg=name)
    assert rank_agreement(expected, cases.leave_one_out(kind)).mean > 0.9


@pytest.mark.parametrize("kind", KINDS)
def test_contributions_at_the_start_of_steps_are_tracins_sum_and_along_them_add_up_to_the_fall_of_the_loss(kind):
    run, (train, test), net = cases.record(kind), cases.data(kind), cases.network()
    expected = torch.zeros(len(test), cases.M, dtype=torch.float64)
    for state in cases.states(kind)[:-1]:
        net.load_state_dict(state)
        rows = [
            torch.stack([flat_gradient(net, loss) for loss in cases.losses(net, *points.tensors)])
            for points in (test, train)
        ]
        expected += cases.LR / cases.M * rows[0] @ rows[1].T
    coarse = {"scores": "contributions", "rule": epk.QuadratureRule.left_endpoint()}
    for name, scores in under_all_names(run, kind, **coarse).items():
        assert_close(scores, expected, rtol=0, atol=1e-12, msg=name)
    before, after = (network_losses(kind, state) for state in (0, -1))
    for name, scores in under_all_names(run, kind, scores="contributions").items():
        assert_close(scores.sum(1), before - after, rtol=0, atol=1e-12, msg=name)


def flat_gradient(net, loss):
    gradients = torch.autograd.grad(loss, [*net.parameters()], retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


def network_losses(kind, state):
    net = cases.network()
    net.load_state_dict(cases.states(kind)[state])
    return cases.losses(net, *cases.data(kind)[1].tensors).detach()


@pytest.mark.parametrize("scores", ["influence", "contributions"])
def test_scores_of_samples_for_themselves_are_the_diagonal(scores):
    run, (train, _) = cases.record("classes"), cases.loaders("classes")
    options = {"scores": scores}
    whole = EPKAttributor(run, **options).attribute(train, train)
    found = {
        "dattri": EPKAttributor(run, **options).self_attribute(train),
        "captum": EPKInfluence(run, **options).self_influence(),
        "captum, a loader": EPKInfluence(run, **options).self_influence(train),
    }
    for name, own in found.items():
        assert_close(own, whole.diagonal(), rtol=0, atol=1e-10, msg=name)
        assert scores == "contributions" or set(own.topk(2).indices.tolist()) == {0, 1}  # the wrong labels


def test_rows_are_scored_in_the_loaders_order_in_its_dtype():
    """A loader may hold some of the samples, in any order, in float32; scores are in the run's dtype."""
    run, (train, test) = cases.record("classes"), cases.data("classes")
    attributor, order = EPKAttributor(run), [7, 0, 11]
    attributor.cache(DataLoader(train, batch_size=7))
    whole = attributor.attribute(DataLoader(train, batch_size=5), DataLoader(test, batch_size=6))
    narrow = TensorDataset(train.tensors[0].float(), train.tensors[1].int())
    some = attributor.attribute(DataLoader(Subset(narrow, order), batch_size=2), DataLoader(test, batch_size=4))
    assert torch.equal(some, whole[order])
    with pytest.raises(ValueError, match="in their order"):
        attributor.cache(DataLoader(Subset(train, [1, 0, *range(2, cases.M)]), batch_size=5))


class Drawn:
    """Batches whose order a loader of one's own draws each time."""

    def __init__(self, points):
        self.points = points

    def __iter__(self):
        rows = torch.randperm(len(self.points))
        return ((self.points.tensors[0][part], self.points.tensors[1][part]) for part in rows.split(4))


def test_rows_of_an_order_that_nobody_knows_are_refused():
    """Whoever makes the loader; one pass over a loader is in the order of that pass."""
    run, (train, test) = cases.record("classes"), cases.data("classes")
    attributor, known, ordered = EPKAttributor(run), DataLoader(test, batch_size=4), DataLoader(train, batch_size=4)
    few = Subset(train, [0, 1])  # two passes agree half of the time
    drawn = torch.utils.data.BatchSampler(torch.utils.data.RandomSampler(few), 1, drop_last=False)
    shuffling = [DataLoader(train, batch_size=5, shuffle=True), DataLoader(few, batch_sampler=drawn), Drawn(train)]
    for name, call in (
        ("train_dataloader", lambda loader: attributor.attribute(loader, known)),
        ("test_dataloader", lambda loader: attributor.attribute(ordered, loader)),
        ("train_dataloader", attributor.self_attribute),
        ("full_train_dataloader", attributor.cache),
        ("inputs", EPKInfluence(run).influence),
    ):
        for loader in shuffling:
            with pytest.raises(ValueError, match=f"^{name} must give its rows in one order: it shuffles them"):
                call(loader)
    order = torch.randperm(cases.M, generator=torch.Generator().manual_seed(3)).split(4)
    once = ((train.tensors[0][rows], train.tensors[1][rows]) for rows in order)
    whole = attributor.attribute(ordered, known)
    assert torch.equal(attributor.attribute(once, known), whole[torch.cat(order)])


def test_captum_gets_the_most_extreme_samples_of_each_input_or_of_all():
    run, inputs = cases.record("classes"), cases.data("classes")[1].tensors
    influence = EPKInfluence(run)
    assert influence.scores == "contributions"
    whole = influence.influence(inputs)
    for proponents in (True, False):
        order = whole.argsort(dim=1, descending=proponents)
        found = influence.influence(inputs, k=2, proponents=proponents)
        assert isinstance(found, MostInfluential)
        assert torch.equal(found.indices, order[:, :2])
        assert torch.equal(found.influence_scores, whole.gather(1, order[:, :2]))
    assert_close(influence.influence(inputs, aggregate=True), whole.sum(0, keepdim=True))


def test_a_text_is_scored_by_the_loss_of_its_next_words():
    """Of a network of two inputs: the labels of transformers, in their places, and a dictionary of rows."""

    class Words(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.out = torch.nn.Embedding(7, 4), torch.nn.Linear(4, 7)

        def forward(self, input_ids, attention_mask):
            seen = (self.embed(input_ids) * attention_mask[:, :, None]).cumsum(1)
            return self.out(torch.tanh(seen)).mT

    torch.manual_seed(0)
    net, words = Words().double(), torch.randint(7, (10, 5))
    rows = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    with epk.Recorder(net, optimizer, rows, epk.next_words(words), output=lambda z: z[..., -1]) as recorder:
        for _ in range(4):
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(net(**rows), epk.next_words(words)).backward()
            recorder.batch(None)
            optimizer.step()
    run, asked = recorder.trajectory, {name: value[:3] for name, value in rows.items()}
    labels = epk.next_words(words[:3].masked_fill(torch.arange(5) < 2, -100))
    attributor, batches = EPKAttributor(run), [{**rows, "labels": epk.next_words(words)}]
    scores = attributor.attribute(batches, [{**asked, "labels": labels}])
    function = epk.RowFunction.loss_value(labels)
    assert torch.equal(scores.T, -epk.influence(run, asked, function=function).values[:, 0])
    assert_close(attributor.self_attribute(batches), EPKInfluence(run, scores="influence").self_influence())


def test_float_targets_may_be_narrow_as_inputs_may():
    run, (train, _) = cases.record("numbers"), cases.data("numbers")
    narrow = TensorDataset(*(values.float() for values in train.tensors))
    for data in (narrow, TensorDataset(train.tensors[0], narrow.tensors[1])):
        rows = SampleScorer(run).rows_of(DataLoader(data, batch_size=5), "data")
        assert rows.tolist() == [*range(cases.M)]
    others = TensorDataset(narrow.tensors[0], narrow.tensors[1] + 1e-3)
    assert refusal(ValueError, "row 0 is none", lambda: SampleScorer(run).rows_of(DataLoader(others), "data")) is None


def test_captum_takes_a_batch_a_list_of_batches_and_a_loader():
    run, (train, test) = cases.record("classes"), cases.data("classes")
    influence, (X, y) = EPKInfluence(run), test.tensors
    expected = influence.influence((X, y))
    for inputs in ([X, y], [(X[:2], y[:2]), (X[2:], y[2:])], [[X, y]], ((X, y),)):
        assert torch.equal(influence.influence(inputs), expected)
    halves = [tuple(values[rows] for values in train.tensors) for rows in (slice(0, 5), slice(5, None))]
    assert torch.equal(influence.self_influence(halves), influence.self_influence())


def test_smoothed_scores_of_samples_for_themselves_are_the_diagonal():
    run, train = cases.record("classes"), cases.loaders("classes")[0]
    smooth = {"smoothing": epk.Smoothing(2, 0.9, 1.1)}
    whole = EPKAttributor(run, **smooth).attribute(train, train)
    own = EPKAttributor(run, **smooth).self_attribute(train)
    assert_close(own, whole.diagonal(), rtol=0, atol=1e-12)
    assert (own - EPKAttributor(run).self_attribute(train)).abs().max() > 1e-5  # the control


@pytest.mark.usefixtures("unchecked")
def test_what_means_nothing_is_refused():
    run, test = cases.record("classes"), cases.loaders("classes")[1]
    twice = TensorDataset(*(values[[0, 1, 1]] for values in cases.data("classes")[0].tensors))
    net = cases.network()
    equal = epk.train(net, *twice.tensors, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=1)
    assert len(EPKAttributor(equal).self_attribute(DataLoader(twice, batch_size=2))) == 3
    some = DataLoader(Subset(twice, [0, 1]))
    attributor, inputs = EPKAttributor(run), cases.data("classes")[1].tensors
    for error, message, ask in (
        (TypeError, "trajectory must be", lambda: SampleScorer(None)),
        (ValueError, "be 'influence' or 'contributions': got 'trak'", lambda: SampleScorer(run, scores="trak")),
        (ValueError, "train_dataloader must .*: row 0 is none", lambda: attributor.attribute(test, test)),
        (ValueError, "row 2 is none of them", lambda: attributor.self_attribute(DataLoader(twice, batch_size=3))),
        (ValueError, "all of the run's equal samples", lambda: EPKAttributor(equal).self_attribute(some)),
        *(
            (TypeError, r"batches must be alike, .*: [01] holds \{", lambda bad=bad: EPKInfluence(run).influence(bad))
            for bad in (
                [inputs[0], inputs[1].tolist()],
                [(inputs[0], inputs[1].tolist())],
                [{"x": inputs[0]}],
                [(inputs[0],)],
                [inputs, {"x": inputs[0], "labels": inputs[1]}],
                DataLoader(inputs[0]),
                "text",
            )
        ),
        (ValueError, "there must be a batch", lambda: attributor.attribute([], test)),
        (ValueError, "k must be at most 12, .*: got 13", lambda: EPKInfluence(run).influence(inputs, k=13)),
        (ValueError, "inputs must hold samples .*: row 0", lambda: EPKInfluence(run).self_influence(inputs)),
    ):
        assert refusal(error, message, ask) is None, message
