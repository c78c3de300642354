"""Hadamard matrices, random Fourier features of an RBF, and the sketch of products of kernels."""

import pytest
import torch

import epk_gp as epk
from epk_gp.autodiff.sketches import hadamard_matrix, hadamard_order, rbf_features, tensor_sketch
from helpers import deviation, make_case

N = 6


@pytest.fixture
def X(generator):
    return torch.randn(N, 2, 3, generator=generator, dtype=torch.float64)


def rbf(X, lengthscale):
    return torch.exp(-torch.cdist(X.flatten(1), X.flatten(1)).square() / (2 * lengthscale**2))


def test_features_have_the_products_of_an_rbf_on_average(X, unchecked) -> None:
    """And of no other lengthscale; their length is 1 for every draw."""
    phi = torch.stack([rbf_features(X, 1.5, 20, seed=seed) for seed in range(200)])
    assert deviation(phi @ phi.mT, rbf(X, 1.5)) < 2
    assert deviation(phi @ phi.mT, rbf(X, 1.8)) > 4
    torch.testing.assert_close(phi.norm(dim=2), torch.ones(200, N, dtype=torch.float64))


def test_orthogonal_frequencies_have_a_smaller_error_than_independent_ones(X, generator, unchecked) -> None:
    exact, squares, independent = rbf(X, 2.0), [], []
    for seed in range(60):
        phi = rbf_features(X, 2.0, 12, seed=seed)
        squares.append((phi @ phi.T - exact).square().mean())
        angles = X.flatten(1) @ torch.randn(6, 6, generator=generator, dtype=torch.float64) / 2
        psi = torch.cat([angles.cos(), angles.sin()], dim=1) / 6**0.5
        independent.append((psi @ psi.T - exact).square().mean())
    assert torch.stack(squares).mean() < 0.75 * torch.stack(independent).mean()


def test_the_joint_sketch_has_the_product_of_both_kernels_on_average(X, unchecked) -> None:
    """The control: the product with itself is another."""
    case = make_case("tanh", steps=2)
    inputs = torch.cat([case.test, case.test[:1] + 0.1])
    z = torch.nn.functional.normalize(epk.path_features(case.trajectory, inputs, 32, nodes=2, num_probe=0))
    phi = rbf_features(X, 1.0, 16)
    s = torch.stack([tensor_sketch(z, phi, 16, seed=seed) for seed in range(100)])
    assert deviation(s @ s.mT, (z @ z.T) * (phi @ phi.T)) < 2
    assert deviation(s @ s.mT, (z @ z.T) ** 2) > 4


def test_features_are_the_same_in_every_call_and_for_every_number_of_points(X) -> None:
    many = X.repeat(100, 1, 1)
    assert torch.equal(rbf_features(many, 1.0, 8, seed=3)[:256], rbf_features(many[:256], 1.0, 8, seed=3))
    assert not torch.equal(rbf_features(X, 1.0, 8, seed=3), rbf_features(X, 1.0, 8, seed=4))
    z = X.flatten(1)
    assert torch.equal(tensor_sketch(z, z, 8), tensor_sketch(z, z, 8))
    assert rbf_features(X.float(), 1.0, 8).dtype == torch.float32


def test_products_can_be_differentiated(X) -> None:
    def values(x):
        phi = rbf_features(x, 1.0, 6)
        return tensor_sketch(phi, phi, 5)

    assert torch.autograd.gradcheck(values, X[:2].clone().requires_grad_(), fast_mode=True)


def test_what_has_no_features_or_order_is_refused(unchecked) -> None:
    z, zeros = torch.zeros(3, 2), {"X": torch.zeros(3, 2), "lengthscale": 1.0, "num_features": 4}
    for change, error, message in (
        ({"lengthscale": 0.0}, ValueError, "lengthscale must be positive"),
        ({"num_features": 7}, ValueError, "num_features must be even"),
        ({"num_features": 0}, ValueError, "num_features must be at least 2"),
        ({"X": torch.zeros(3)}, ValueError, "X must have shape"),
        ({"X": torch.zeros(3, 2, dtype=torch.int64)}, TypeError, "X must be float32 or float64"),
        ({"X": torch.full((3, 2), float("nan"))}, ValueError, "X must be finite"),
        ({"seed": 0.5}, TypeError, "seed must be a whole number"),
    ):
        with pytest.raises(error, match=message):
            rbf_features(**{**zeros, **change})
    for phi, size, message in (
        (torch.zeros(4, 2), 8, r"must be of the same points and dtype: got \(3, 2\)"),
        (z.double(), 8, "must be of the same points and dtype"),
        (z, 0, "num_features must be at least 1"),
        (z[0], 8, "phi must have 2 dimensions"),
    ):
        with pytest.raises(ValueError, match=message):
            tensor_sketch(z, phi, size)


def test_rows_and_columns_of_a_hadamard_matrix_are_orthogonal() -> None:
    for order in (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 44, 48, 60, 64, 68, 72, 80, 84):
        H, expected = hadamard_matrix(order).to(torch.int64), order * torch.eye(order, dtype=torch.int64)
        assert torch.equal(H.abs(), torch.ones_like(H))
        assert torch.equal(H @ H.T, expected)
        assert torch.equal(H.T @ H, expected)


def test_the_order_of_a_hadamard_matrix_divides_the_number_of_nodes_if_it_can() -> None:
    cases = {(10, 20): 20, (10, 16): 16, (10, 12): 12, (10, 24): 12, (3, 20): 4, (1, 20): 1, (2, 20): 2, (10, 10): 12}
    for (outputs, nodes), order in (cases | {(3, 6): 4, (100, 20): 104, (28, 28): 32, (36, 36): 40}).items():
        assert hadamard_order(outputs, nodes) == order
