"""The two copies of an input as rows of a matrix (Definition 3.4); rows without a copy column are test copies."""

import pytest
import torch

import epk_gp as epk
from epk_gp.gp.models import LogitGP
from epk_gp.kernels import tagging
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import has_mark, parse_points, tag_points, test_copy, train_copy
from kernel_cases import MODES, D, assert_close

COPIES = ((train_copy, True), (test_copy, False))
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.uint16, torch.int16, torch.int32, torch.int64]


@pytest.mark.parametrize("shape", [(5, 3), (5, 1, 2, 3), (0, 3)])
@pytest.mark.parametrize("dtype", [*FLOATS, *INTEGERS])
def test_a_copy_is_the_flattened_input_and_one_column(shape, dtype):
    X = torch.randn(shape).mul(10).abs().to(dtype)
    for tag, _ in COPIES:
        x = tag(X)
        assert x.dtype == (dtype if dtype in (*FLOATS, torch.int32, torch.int64) else torch.int64)
        assert x.shape == (shape[0], X[:1].numel() + 1 if len(X) else 4)
        assert torch.equal(x[:, :-1].reshape(shape), X.to(x.dtype))
        assert len(x[:, -1].unique()) <= 1


@pytest.mark.parametrize("made_in", [*FLOATS, torch.int32, torch.int64])
def test_points_know_their_copies_in_every_dtype_that_holds_them(trajectory, made_in):
    """Joined, stacked, moved to a wider dtype and back: as GPyTorch and BoTorch hand points over."""
    X = torch.randn(3, 2).mul(10).to(made_in)
    joint = torch.cat([train_copy(X), test_copy(X)])
    expected = [True] * 3 + [False] * 3
    for kind in (torch.float64, torch.float32):
        x = joint.to(kind)
        assert tag_points(trajectory, x) is x
        assert parse_points(trajectory, x).is_train.tolist() == expected
        assert has_mark(torch.stack([x, x])).tolist() == [expected] * 2
        ends = parse_points(trajectory, x.flip(0).index_select(0, torch.tensor([5, 0])))
        assert ends.is_train.tolist() == [True, False]
    for kind in (torch.float16, torch.bfloat16):
        if made_in.is_floating_point and (made_in == kind or made_in.itemsize > 2):
            assert parse_points(trajectory, joint.to(kind).double()).is_train.tolist() == expected
    plain = tag_points(trajectory, X.double())
    assert parse_points(trajectory, plain).is_train.tolist() == [False] * 3
    with pytest.raises(ValueError, match="marks no copy"):  # a table whose first column is its label
        tag_points(trajectory, torch.cat([torch.ones(3, 1), X.double()], 1))


COLUMNS = {
    "a label": [0.0, 1, 1, 0], "a task": [1.0, 1, 1, 1], "no task": [0.0, 0, 0, 0], "signs": [-1.0, 1, 1, -1],
    "classes": [0.0, 1, 2, 3], "a measured number": [0.3, -2.2, 1e-4, 1e4], "missing": [0.0, 1, float("nan"), 1],
    "left out": [-100.0, 0, 1, -100],
}  # fmt: skip


@pytest.mark.parametrize("kind", [torch.float32, torch.float64])
@pytest.mark.parametrize("column", COLUMNS)
def test_a_table_with_one_column_too_many_is_refused(trajectory, column, kind):
    extra = torch.tensor(COLUMNS[column], dtype=torch.float64)
    X = torch.randn(4, 2, dtype=torch.float64).mul(3).round()
    table = torch.cat([X, extra[:, None]], 1).to(kind)
    message = r"must have 2 columns, or 3 as train_copy and test_copy make them: row 0 ends in .*, which marks no copy"
    for ask in (lambda z: tag_points(trajectory, z), lambda z: EPKKernel(trajectory)(z)):
        with pytest.raises(ValueError, match=message):
            ask(table)
    found, expected = (EPKKernel(trajectory)(z).to_dense() for z in (table[:, :2], test_copy(X)))  # the cure
    assert_close(found, expected.to(kind))


@pytest.mark.parametrize("value", [-1.0, 1 + 1e-6, 0.0, 1.0, float("nan"), float("inf"), "other"])
def test_a_copy_column_that_was_changed_is_refused_with_its_row(trajectory, value):
    x = train_copy(torch.randn(4, 2, dtype=torch.float64))
    x[2, -1] = x[2, -1] * (1 + 1e-15) if value == "other" else value
    with pytest.raises(ValueError, match=r"row 2 ends in .*, which marks no copy\. Leave"):
        tag_points(trajectory, x)
    with pytest.raises(ValueError, match=r"row \(1, 2\) ends in"):
        tag_points(trajectory, torch.stack([train_copy(torch.zeros(4, 2, dtype=torch.float64)), x]))


def test_points_are_checked_and_hashed_once_in_each_evaluation(trajectory, monkeypatch):
    """A lazy kernel checks points when it is called, and parses them when it is evaluated; a process knows its own."""
    calls = []

    def counted(name, *places):
        original = getattr(tagging, name)
        for place in places:
            monkeypatch.setattr(place, lambda *args: (calls.append(name), original(*args))[1])

    kernel, gp = EPKKernel(trajectory, "trace"), LogitGP(trajectory)
    x, X = test_copy(trajectory.inputs + 1), trajectory.inputs + 2
    counted("tag_points", "epk_gp.kernels.tagging.tag_points", "epk_gp.kernels.epk.tag_points")
    counted("content_key", "epk_gp.kernels.tagging.content_key")
    for call, expected in (
        (lambda: kernel(x), ["tag_points"]),
        (lambda: kernel.forward(x, x), ["tag_points", "content_key"]),
        (lambda: kernel(x).to_dense(), ["tag_points", "tag_points", "content_key"]),
        (lambda: gp.fit(3), []),
        (lambda: gp.logit_posterior(X), []),
    ):
        calls.clear()
        call()
        assert calls == expected


@pytest.fixture(scope="module")
def X():
    return torch.randn(5, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("normalize", [None, "cosine"])
@pytest.mark.parametrize("outputs", MODES)
def test_rows_without_a_copy_column_are_test_copies(trajectory, X, outputs, normalize):
    kernel = EPKKernel(trajectory, outputs, normalize=normalize)
    x, train = test_copy(X), train_copy(trajectory.inputs)
    calls = {
        "matrix": (lambda z: kernel(z).to_dense()),
        "diagonal": (lambda z: kernel(z, diag=True)),
        "training copies against them": (lambda z: kernel(train, z).to_dense()),
        "forward against training copies": (lambda z: kernel.forward(z, train)),
        "diagonal of two kinds": (lambda z: kernel(z, train[:5], diag=True)),
    }
    for name, call in calls.items():
        assert torch.equal(call(X), call(x)), name
    assert (kernel(X).to_dense() - kernel(train_copy(X)).to_dense()).abs().max() > 1e-3  # the negative control


def test_active_dims_may_leave_the_copy_column_out(trajectory, X):
    wide = torch.cat([X[:, 1:], torch.full((5, 1), 7.0).double(), X[:, :1]], 1)
    kernel = EPKKernel(trajectory, "trace", normalize="cosine", active_dims=[2, 0])
    assert torch.equal(kernel(wide).to_dense(), EPKKernel(trajectory, "trace", normalize="cosine")(X).to_dense())
    assert_close(kernel(wide, wide[:2]).to_dense(), kernel(wide).to_dense()[:, :2])


@pytest.mark.parametrize("outputs", ["full", "independent"])
def test_a_process_predicts_at_rows_without_a_copy_column(trajectory, X, outputs):
    gp = epk.LogitGP(trajectory, outputs, points=range(5))
    found, expected = gp(X), gp(test_copy(X))
    assert torch.equal(found.mean, expected.mean)
    assert torch.equal(found.variance, expected.variance)
    assert torch.equal(gp.prior_mean(X), gp.prior_mean(test_copy(X)))
    z = X.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(gp(z).mean.sum(), z)
    assert gradient.abs().min() > 0
