"""The numbers of the figures: each has a case whose answer is known, and one where the wrong answer would show."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import epk_gp as epk
from epk_gp.analysis.measures import calibration, gram_spectrum, ood_metrics, principal_directions, rank_correlation
from epk_gp.datasets import three_gaussians
from helpers import assert_close, make_case
from quantities.alignment import gradient_alignment
from quantities.boundary import boundary_weight_ratio
from quantities.path_geometry import line_profile, path_profile
from quantities.signal import input_gradients
from quantities.stationarity import diagonal_growth_exponent, location_variance_share


def rbf(a, b):
    return torch.exp(-torch.cdist(a, b).square() / 8)


@pytest.fixture(scope="module")
def toy():
    """Record three Gaussians in 4 dimensions, 90 points, 40 steps."""
    data = three_gaussians(40, dim=4)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    return epk.train(net, data.inputs[:90], data.labels[:90], optimizer=optimizer, steps=40), data[90:]


def test_a_rank_correlation_is_one_for_any_growing_curve():
    x = torch.linspace(0, 5, 20)
    assert rank_correlation(x, x.exp()) == pytest.approx(1)
    assert rank_correlation(x, -(x**3)) == pytest.approx(-1)
    assert rank_correlation(torch.ones(5), torch.arange(5.0)) is None


def test_at_the_start_of_a_step_the_discrete_kernel_is_exact_and_later_it_is_not():
    case = make_case("tanh")
    found = gradient_alignment(
        case.trajectory, case.test, torch.zeros(5, dtype=torch.int64), steps=[0, 3], times=[0.0, 0.5, 1.0]
    )
    assert found.time.tolist() == [0, 0.5, 1, 3, 3.5, 4]
    assert float(found.angle_dpk_to_exact[:, [0, 3]].max()) < 1e-12  # degrees; rows of a product may round
    assert float(found.dpk_error[:, [0, 3]].abs().max()) < 1e-12
    assert float(found.angle_dpk_to_exact[:, [2, 5]].min()) > 0.1
    assert float(found.angle_ntk_to_exact[:, 5].max()) < 1e-12  # the trained network's gradient, at the run's end
    assert float(found.angle_ntk_to_exact[:, 0].min()) > 1


def test_the_location_variance_share_of_an_rbf_is_zero_and_that_of_a_linear_kernel_is_not():
    X, delta = torch.randn(40, 3, dtype=torch.float64), torch.randn(15, 3, dtype=torch.float64)
    assert location_variance_share(rbf, X, delta) < 1e-20
    assert location_variance_share(lambda a, b: a @ b.T, X, delta) > 0.5


def test_growth_along_rays_is_the_power_of_the_radius():
    centre, directions = torch.zeros(3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    radii = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    for power in (0, 2, 3):
        found = diagonal_growth_exponent(lambda X, p=power: X.norm(dim=1) ** p, centre, directions, radii)
        assert_close(1 + found, torch.full((5,), 1.0 + power, dtype=torch.float64))


def test_equal_weights_have_ratio_one_and_planted_ones_do_not():
    labels = torch.arange(100) % 2
    margin = torch.linspace(0.1, 3, 100)
    equal = boundary_weight_ratio(torch.ones(100), margin, labels)
    assert equal.ratio == pytest.approx(1)
    assert equal.rank_correlation is None
    planted = boundary_weight_ratio(torch.where(margin < 0.38, 3.0, 1.0), margin, labels)
    assert planted.ratio == pytest.approx(3)
    assert boundary_weight_ratio(1 / margin, margin, labels).rank_correlation == pytest.approx(-1)


def test_the_rank_of_a_projection_is_counted_in_all_three_ways():
    Q = torch.linalg.qr(torch.randn(20, 6, dtype=torch.float64)).Q
    found = gram_spectrum(Q @ Q.T)
    assert found.effective_rank == pytest.approx(6)
    assert found.participation_ratio == pytest.approx(6)
    assert found.num_principal == 6
    strong = gram_spectrum(torch.diag(torch.tensor([1000.0, 1, 1, 1], dtype=torch.float64)))  # hides the others
    assert strong.num_principal == 1
    assert 1 < strong.participation_ratio < strong.effective_rank < 1.1


def test_input_gradients_are_finite_differences_of_the_contributions():
    """Exact contributions of a run whose training point was moved after it: the path stays as it was recorded."""
    case, i, j, h = make_case("tanh", batch_size=None), 2, 5, 1e-5
    t, x = case.trajectory, case.test[:1]
    found, moved = input_gradients(t, x, 1), torch.zeros_like(t.inputs)
    moved[i, j] = h
    runs = [replace(t, inputs=t.inputs + sign * moved) for sign in (1, -1)]
    with pytest.warns(epk.CertificateWarning):  # the moved point did not make the steps
        up, down = (epk.attribute(run, x, rule=epk.gauss_legendre(4)).samples[0, 1, i] for run in runs)
    assert float(found[i, j]) == pytest.approx(float(up - down) / (2 * h), rel=1e-6)
    assert float(found[i, j - 1]) != pytest.approx(float(up - down) / (2 * h), rel=1e-2)  # the negative control


def test_the_slope_along_the_line_integrates_to_the_loss(toy):
    trajectory, _ = toy
    found = line_profile(trajectory, trajectory.inputs, trajectory.targets, size=401)
    integral = torch.trapezoid(found.slope, found.t) * found.length
    assert float(integral) == pytest.approx(float(found.loss[-1] - found.loss[0]), rel=1e-4)
    assert float(found.loss[-1]) < 0.5 * float(found.loss[0])
    assert found.accuracy[-1] > 0.9
    assert float(found.norm[0]) == pytest.approx(float(path_profile(trajectory).norm[0]))


def test_a_single_step_is_straight_and_a_run_is_not(toy):
    one = path_profile(make_case("tanh", steps=1).trajectory)
    assert one.straightness == pytest.approx(1)
    assert float(one.angle_to_chord.max()) < 1e-5
    many = path_profile(toy[0])
    assert many.straightness < 0.99
    assert many.norm.shape == (41,)
    assert many.norm_change == pytest.approx(float(many.norm[40] / many.norm[0] - 1))
    assert float(many.angle_to_initial[0]) == 0 < float(many.angle_to_initial[-1])


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    labels = torch.tensor([0, 0, 0, 1] * 25)
    p = torch.tensor([[0.75, 0.25]], dtype=torch.float64).expand(100, -1)
    assert calibration(p, labels).ece == pytest.approx(0)
    sure = calibration(torch.tensor([[0.95, 0.05]], dtype=torch.float64).expand(100, -1), labels)
    assert sure.ece == pytest.approx(0.2)
    assert sure.accuracy == 0.75
    assert sure.nll == pytest.approx(-(0.75 * math.log(0.95) + 0.25 * math.log(0.05)))


ONES, NO_CLASS = torch.ones(4), torch.zeros(4, dtype=torch.int64)
REFUSED = {
    "m >= 2: got": lambda: rank_correlation(torch.ones(1), torch.ones(1)),
    "symmetric": lambda: gram_spectrum(torch.tensor([[1.0, 0.5], [0.0, 1.0]])),
    "positive semi-definite": lambda: gram_spectrum(torch.diag(torch.tensor([1.0, -0.5]))),
    "energies": lambda: principal_directions(0 * ONES),
    "finite": lambda: ood_metrics(ONES, ONES / 0),
    "softmax": lambda: calibration(torch.arange(8.0).view(4, 2) + 1, NO_CLASS),
}


def test_what_has_no_meaning_is_refused():
    for message, call in REFUSED.items():
        with pytest.raises(ValueError, match=message):
            call()
