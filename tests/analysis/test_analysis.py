"""The numbers of the figures: each has a case whose answer is known, and one where the wrong answer would show."""

import math

import pytest
import torch
from sklearn.metrics import roc_auc_score
from sklearn.svm import SVC
from torch import nn

import epk_gp as epk
from epk_gp.analysis.measures import calibration, gram_spectrum, ood_metrics, principal_directions, rank_correlation
from epk_gp.core.trajectory import flat_weights, network_outputs
from epk_gp.datasets import three_gaussians
from epk_gp.gram.path_kernel import gram_block_per_class
from helpers import assert_close, make_case
from quantities.alignment import angle, gradient_alignment, output_gradients
from quantities.boundary import boundary_weight_ratio, margins
from quantities.path_geometry import line_profile, path_profile
from quantities.retraining import decision_values, fit_platt_scaling, fit_support_vector_machines, probabilities
from quantities.signal import input_gradients, signal_energies
from quantities.stationarity import diagonal_growth_exponent, location_variance_share


def rbf(a, b):
    return torch.exp(-torch.cdist(a, b).square() / 8)


@pytest.fixture
def toy():
    """Record three Gaussians in 4 dimensions, 90 points, 40 steps."""
    data = three_gaussians(40, dim=4)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 12), nn.ReLU(), nn.Linear(12, 3)).double()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.3)
    return epk.train(net, data.inputs[:90], data.labels[:90], optimizer=optimizer, steps=40), data[90:]


# Ranks


def test_a_rank_correlation_is_one_for_any_growing_curve():
    x = torch.linspace(0, 5, 20)
    assert rank_correlation(x, x.exp()) == pytest.approx(1)
    assert rank_correlation(x, -(x**3)) == pytest.approx(-1)


def test_there_is_no_rank_correlation_with_a_constant():
    assert rank_correlation(torch.ones(5), torch.arange(5.0)) is None
    with pytest.raises(ValueError, match="at least 2"):
        rank_correlation(torch.ones(1), torch.ones(1))


# Alignment


def test_output_gradients_are_autograd_s():
    case = make_case("relu")
    t, X = case.trajectory, case.test
    outputs = torch.tensor([0, 1, 2, 0, 1])
    found = output_gradients(t.model, flat_weights(t, 2, X), X, outputs, "log_softmax")
    w = {name: value.requires_grad_() for name, value in t.weights(2).items()}
    for n, c in enumerate(outputs):
        f = t.model.evaluate(w, X[n : n + 1]).log_softmax(1)[0, c]
        assert_close(found[n], torch.cat([g.flatten() for g in torch.autograd.grad(f, list(w.values()))]))


def test_small_angles_are_not_lost():
    """The arc cosine of the cosine would give 0."""
    u = torch.tensor([1.0, 0.0], dtype=torch.float64)
    v = torch.tensor([1.0, 1e-10], dtype=torch.float64)
    assert float(angle(u, v)) == pytest.approx(math.degrees(1e-10), rel=1e-6)
    assert float(angle(u, -u)) == pytest.approx(180)
    with pytest.raises(ValueError, match="zero vector"):
        angle(u, 0 * u)


def test_at_the_start_of_a_step_the_discrete_kernel_is_exact_and_later_it_is_not():
    case = make_case("tanh")
    found = gradient_alignment(
        case.trajectory, case.test, torch.zeros(5, dtype=torch.int64), steps=[0, 3], times=[0.0, 0.5, 1.0]
    )
    assert found.time.tolist() == [0, 0.5, 1, 3, 3.5, 4]
    assert (
        float(found.angle_dpk_to_exact[:, [0, 3]].max()) < 1e-12
    )  # degrees; rows of a product may round by themselves
    assert float(found.dpk_error[:, [0, 3]].abs().max()) < 1e-12
    assert float(found.angle_dpk_to_exact[:, [2, 5]].min()) > 0.1
    assert float(found.angle_ntk_to_exact[:, 5].max()) < 1e-12  # the trained network's gradient, at the run's end
    assert float(found.angle_ntk_to_exact[:, 0].min()) > 1


def test_all_kernels_point_the_same_way_for_a_linear_network():
    """The negative control: its logits' gradient does not depend on the weights."""
    case = make_case("linear")
    found = gradient_alignment(case.trajectory, case.test, torch.arange(5) % 3, steps=[1], times=[0.7], head="logits")
    assert max(float(found.angle_dpk_to_exact.max()), float(found.angle_ntk_to_exact.max())) < 1e-12


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": [4]}, "steps must lie in 0..3"),
        ({"times": [1.5]}, "times must lie in"),
        ({"outputs": torch.full((5,), 3)}, "outputs must lie in 0..2"),
    ],
)
def test_alignment_refuses_what_does_not_exist(change, message):
    case = make_case("tanh")
    arguments = {"outputs": torch.zeros(5, dtype=torch.int64), "steps": [0], "times": [0.5]} | change
    with pytest.raises(ValueError, match=message):
        gradient_alignment(case.trajectory, case.test, **arguments)


# Retraining


def test_a_retrained_machine_classifies_as_the_network_does(toy):
    trajectory, test = toy
    train = epk.Points(trajectory.inputs, is_train=True)
    gram = gram_block_per_class(trajectory, train, train)
    machine = fit_support_vector_machines(gram, trajectory.targets)
    cross = gram_block_per_class(trajectory, epk.Points(test.inputs, is_train=False), train)
    decisions = decision_values(machine, cross)
    agree = (decisions.argmax(1) == network_outputs(trajectory, test.inputs).argmax(1)).double().mean()
    assert agree >= 0.9
    assert (machine.num_support_vectors < 90).all()
    curve = fit_platt_scaling(decisions, test.labels)
    p = probabilities(curve, decisions)
    assert ((p > 0) & (p < 1)).all()
    assert p.gather(1, test.labels[:, None]).mean() > 0.7


def test_a_machine_on_shuffled_labels_is_at_chance(toy):
    """The negative control."""
    trajectory, test = toy
    train = epk.Points(trajectory.inputs, is_train=True)
    gram = gram_block_per_class(trajectory, train, train)
    shuffled = trajectory.targets[torch.randperm(90)]
    cross = gram_block_per_class(trajectory, epk.Points(test.inputs, is_train=False), train)
    chosen = decision_values(fit_support_vector_machines(gram, shuffled), cross).argmax(1)
    assert (chosen == test.labels).double().mean() < 0.7


def test_decision_values_are_scikit_learn_s():
    X = torch.randn(30, 2, dtype=torch.float64)
    labels = (X[:, 0] > 0).long()
    gram = rbf(X, X)
    machine = fit_support_vector_machines(gram.expand(2, -1, -1), labels, penalty=2.0)
    own = SVC(kernel="precomputed", C=2.0).fit(gram.numpy(), labels.numpy()).decision_function(gram.numpy())
    assert_close(decision_values(machine, gram.expand(2, -1, -1))[:, 1], torch.from_numpy(own))


def test_retraining_refuses_missing_classes():
    with pytest.raises(ValueError, match="each of 2 classes"):
        fit_support_vector_machines(torch.eye(3).expand(2, -1, -1), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="penalty"):
        fit_support_vector_machines(torch.eye(3).expand(2, -1, -1), torch.tensor([0, 1, 1]), penalty=0.0)
    with pytest.raises(ValueError, match="of others"):
        fit_platt_scaling(torch.randn(3, 2), torch.zeros(3, dtype=torch.int64))


# Stationarity


def test_the_location_variance_share_of_an_rbf_is_zero_and_that_of_a_linear_kernel_is_not():
    X, delta = torch.randn(40, 3, dtype=torch.float64), torch.randn(15, 3, dtype=torch.float64)
    assert location_variance_share(rbf, X, delta) < 1e-20
    assert location_variance_share(lambda a, b: a @ b.T, X, delta) > 0.5


def test_the_location_variance_share_of_a_path_kernel_is_far_from_zero(toy):
    trajectory, test = toy
    kernel = epk.EPKKernel(trajectory, outputs="trace")

    def values(a, b):
        return kernel(epk.test_copy(a), epk.test_copy(b)).to_dense()

    delta = torch.randn(6, 4, dtype=torch.float64)
    assert location_variance_share(values, test.inputs[:10], delta) > 0.3


def test_growth_along_rays_is_the_power_of_the_radius():
    centre, directions = torch.zeros(3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    radii = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64)
    for power in (0, 2, 3):
        found = diagonal_growth_exponent(lambda X, p=power: X.norm(dim=1) ** p, centre, directions, radii)
        assert_close(1 + found, torch.full((5,), 1.0 + power, dtype=torch.float64))


def test_stationarity_refuses_what_has_no_variance():
    X = torch.randn(4, 2)
    with pytest.raises(ValueError, match="varies"):
        location_variance_share(lambda a, b: torch.ones(len(a), len(b)), X, X)
    with pytest.raises(ValueError, match="at least 2 locations"):
        location_variance_share(rbf, X[:1], X)
    with pytest.raises(ValueError, match="increase"):
        diagonal_growth_exponent(lambda X: X[:, 0], X[0], X, torch.tensor([2.0, 1.0]))
    with pytest.raises(ValueError, match="positive along"):
        diagonal_growth_exponent(lambda X: -X.norm(dim=1), X[0], X, torch.tensor([1.0, 2.0]))


# Boundary


def test_equal_weights_have_ratio_one_and_planted_ones_do_not():
    labels = torch.arange(100) % 2
    margin = torch.linspace(0.1, 3, 100)
    equal = boundary_weight_ratio(torch.ones(100), margin, labels)
    assert equal.ratio == pytest.approx(1)
    assert equal.rank_correlation is None
    planted = boundary_weight_ratio(torch.where(margin < 0.38, 3.0, 1.0), margin, labels)
    assert planted.ratio == pytest.approx(3)
    assert boundary_weight_ratio(1 / margin, margin, labels).rank_correlation == pytest.approx(-1)


def test_a_margin_is_the_lead_of_the_own_class():
    outputs = torch.tensor([[1.0, 3.0, 2.0], [0.0, -1.0, 5.0]])
    assert margins(outputs, torch.tensor([1, 0])).tolist() == [1, -5]


def test_boundary_weight_ratio_refuses_an_empty_side():
    with pytest.raises(ValueError, match="class 0 must have points near"):
        boundary_weight_ratio(torch.ones(4), torch.ones(4), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="share"):
        boundary_weight_ratio(torch.ones(4), torch.ones(4), torch.zeros(4, dtype=torch.int64), share=1.0)


# Spectrum and signal


def test_the_rank_of_a_projection_is_counted_in_all_three_ways():
    Q = torch.linalg.qr(torch.randn(20, 6, dtype=torch.float64)).Q
    found = gram_spectrum(Q @ Q.T)
    assert found.effective_rank == pytest.approx(6)
    assert found.participation_ratio == pytest.approx(6)
    assert found.num_principal == 6


def test_one_strong_direction_hides_the_others():
    """The negative control: the matrix has full rank."""
    found = gram_spectrum(torch.diag(torch.tensor([1000.0, 1, 1, 1], dtype=torch.float64)))
    assert found.num_principal == 1
    assert 1 < found.participation_ratio < found.effective_rank < 1.1


def test_a_spectrum_is_refused_for_what_is_no_gram_matrix():
    with pytest.raises(ValueError, match="symmetric"):
        gram_spectrum(torch.tensor([[1.0, 0.5], [0.0, 1.0]]))
    with pytest.raises(ValueError, match="positive semi-definite"):
        gram_spectrum(torch.diag(torch.tensor([1.0, -0.5])))
    with pytest.raises(ValueError, match="share"):
        principal_directions(torch.ones(3), share=0.0)
    with pytest.raises(ValueError, match="energies"):
        principal_directions(torch.zeros(3))


def contribution(trajectory, x, inputs, i, output):
    """Loop over steps and nodes: what training point i, moved to inputs[i], would have added on the recorded path."""
    t, total = trajectory, 0.0
    names = t.model.names
    for step in t.steps:
        start, end = t.weights(step.index), t.weights(step.index + 1)
        average = [torch.zeros_like(start[name]) for name in names]
        for place, weight in epk.gauss_legendre(4):
            w = {name: (start[name] + place * (end[name] - start[name])).requires_grad_() for name in names}
            f = t.model.evaluate(w, x).log_softmax(1)[0, output]
            gradients = torch.autograd.grad(f, list(w.values()))
            average = [a + weight * g for a, g in zip(average, gradients, strict=True)]
        if step.batch is not None and i not in step.batch:
            continue
        w = {name: value.requires_grad_() for name, value in start.items()}
        z = t.model.evaluate(w, inputs[i : i + 1])
        loss = nn.functional.cross_entropy(z, t.targets[i : i + 1])
        size = t.num_points if step.batch is None else len(step.batch)
        gradients = torch.autograd.grad(loss, list(w.values()))
        total -= step.lr / size * float(sum((a * g).sum() for a, g in zip(average, gradients, strict=True)))
    return total


def test_input_gradients_are_finite_differences_of_the_contributions():
    case = make_case("tanh")
    t, x = case.trajectory, case.test[:1]
    found = input_gradients(t, x, 1)
    assert found.shape == (7, 8)
    i, j, h = 2, 5, 1e-5
    up, down = t.inputs.clone(), t.inputs.clone()
    up[i, j] += h
    down[i, j] -= h
    difference = (contribution(t, x, up, i, 1) - contribution(t, x, down, i, 1)) / (2 * h)
    assert float(found[i, j]) == pytest.approx(difference, rel=1e-6)
    assert float(found[i, j - 1]) != pytest.approx(difference, rel=1e-2)  # the negative control


def test_a_network_that_sees_one_direction_has_a_signal_of_one_dimension():
    torch.manual_seed(1)

    class OneDirection(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("direction", torch.linspace(-1, 1, 5, dtype=torch.float64))
            self.net = nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 3)).double()

        def forward(self, x):
            return self.net((x @ self.direction)[:, None])

    X, net = torch.randn(12, 5, dtype=torch.float64), OneDirection()
    trajectory = epk.train(net, X, torch.arange(12) % 3, optimizer=torch.optim.SGD(net.parameters(), lr=0.2), steps=3)
    energies = signal_energies(input_gradients(trajectory, X[:1], 0))
    assert principal_directions(energies, share=1 - 1e-12) == 1
    case = make_case("tanh")  # the negative control
    assert principal_directions(signal_energies(input_gradients(case.trajectory, case.test[:1], 0)), share=0.999) > 2


def test_input_gradients_need_inputs_with_derivatives():
    case = make_case("attention")
    with pytest.raises(TypeError, match="floating-point"):
        input_gradients(case.trajectory, case.test[:1], 0)
    case = make_case("tanh")
    with pytest.raises(ValueError, match="output must lie"):
        input_gradients(case.trajectory, case.test[:1], 3)


# Path geometry


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


def test_a_line_profile_needs_cross_entropy():
    case = make_case("one_class")
    with pytest.raises(ValueError, match="cross entropy"):
        line_profile(case.trajectory, case.test, torch.zeros(5, dtype=torch.int64))


# Detection and calibration


def test_detection_is_perfect_for_separate_scores_and_at_chance_for_equal_ones():
    inside = torch.linspace(0, 1, 200)
    perfect = ood_metrics(inside, inside + 2)
    assert (perfect.auroc, perfect.fpr95) == (1.0, 0.0)
    chance = ood_metrics(inside, inside)
    assert chance.auroc == pytest.approx(0.5)
    assert chance.fpr95 == pytest.approx(0.95)
    assert ood_metrics(inside + 2, inside).auroc == 0
    with pytest.raises(ValueError, match="finite"):
        ood_metrics(inside, torch.tensor([float("nan")]))


def test_detection_is_scikit_learn_s():
    inside, outside = torch.randn(50).round(decimals=1), torch.randn(70).round(decimals=1) + 0.5
    expected = roc_auc_score([0] * 50 + [1] * 70, torch.cat([inside, outside]).numpy())
    assert ood_metrics(inside, outside).auroc == pytest.approx(expected)


def test_calibration_error_is_the_gap_between_confidence_and_accuracy():
    labels = torch.tensor([0, 0, 0, 1] * 25)
    p = torch.tensor([[0.75, 0.25]], dtype=torch.float64).expand(100, -1)
    assert calibration(p, labels).ece == pytest.approx(0)
    sure = calibration(torch.tensor([[0.95, 0.05]], dtype=torch.float64).expand(100, -1), labels)
    assert sure.ece == pytest.approx(0.2)
    assert sure.accuracy == 0.75
    assert sure.nll == pytest.approx(-(0.75 * math.log(0.95) + 0.25 * math.log(0.05)))
    with pytest.raises(ValueError, match="softmax"):
        calibration(2 * p, labels)
