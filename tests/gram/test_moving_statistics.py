"""The path kernel of runs with moving statistics, against the definition; and what else looks at a run's path."""

from dataclasses import replace

import pytest
import torch
from statistics_runs import cnn, mlp, reference_jacobian, rows, train_by_hand
from torch import nn

import epk_gp as epk
from epk_gp.core.trajectory import flat_state, network_outputs
from epk_gp.kernel_machine.reconstruct import tangent_trajectory
from epk_gp.quadrature.rules import QuadratureRule, gauss_legendre
from helpers import assert_blocks

NETWORKS = {
    "mlp": (mlp, (4,)),
    "cnn": (lambda: cnn(nn.Tanh), (1, 8, 8)),
    "cnn_without_scale": (lambda: cnn(affine=False), (1, 8, 8)),
}
RULE = gauss_legendre(2)
CLOSE = {"rtol": 1e-12, "atol": 1e-13}


class Run:
    def __init__(self, name, num_steps=2):
        make, shape = NETWORKS[name]
        self.net = make()
        self.trajectory = train_by_hand(self.net, *rows(16, shape), num_steps=num_steps)
        self.X = torch.randn(3, *shape, dtype=torch.float64)
        is_train = torch.tensor([True, False, False])
        self.points = epk.Points(self.X, is_train)

    def state(self, s, t=0.0):
        start = flat_state(self.trajectory, s, self.X)
        return start if t == 0 else torch.lerp(start, flat_state(self.trajectory, s + 1, self.X), t)

    def jacobian(self, s, t, X, head="logits"):
        J = reference_jacobian(self.net, self.trajectory, self.state(s, t), X, head)
        return J[..., : self.trajectory.num_weights]

    def brute_force(self, head):
        """Definition 3.4 with phi the gradient in the weights at (w_s(t), b_s(t)) or (w_s, b_s)."""
        total = torch.zeros((), dtype=torch.float64)
        for step in self.trajectory.steps:
            for t, weight in RULE:
                places = [0.0 if is_train else t for is_train in self.points.is_train.tolist()]
                rows = zip(places, self.X, strict=True)
                phi = torch.cat([self.jacobian(step.index, u, x[None], head) for u, x in rows])
                total = total + step.lr * weight * torch.einsum("ncp,mdp->ncmd", phi, phi)
        return total


@pytest.fixture(params=NETWORKS)
def run(request):
    return Run(request.param)


@pytest.mark.parametrize("head", ["logits", "log_softmax"])
def test_gram_blocks_are_those_of_the_definition_in_evaluation_mode(run, head):
    assert_blocks(epk.PathKernel(run.trajectory, head, RULE), run.points, run.points, run.brute_force(head))


def test_statistics_that_stand_still_give_another_kernel(run):
    """The negative control."""
    still = replace(run.trajectory, statistics=(run.trajectory.statistics[0],) * 3, digest="still", live=None)
    K, other = (epk.gram_block(each, run.points, run.points, rule=RULE) for each in (run.trajectory, still))
    assert (K - other).abs().max() > 1e-3 * K.abs().max()
    assert torch.linalg.eigvalsh(K.reshape(9, 9)).min() > -1e-12 * K.abs().max()


@pytest.mark.parametrize("state", [0, -1])
def test_the_tangent_kernel_has_the_statistics_of_its_state(run, state):
    tangent = tangent_trajectory(run.trajectory, state)
    s = state % 3
    assert torch.equal(network_outputs(tangent, run.X), network_outputs(run.trajectory, run.X, state=s))
    J = run.jacobian(s, 0.0, run.X)
    block = epk.gram_block(tangent, run.points, run.points, head="logits", rule=QuadratureRule.left_endpoint())
    torch.testing.assert_close(block, torch.einsum("ncp,mdp->ncmd", J, J), **CLOSE)
    assert tangent.digest != tangent_trajectory(run.trajectory, 1).digest
