"""Which calls take an executor, and that objects that hold one are copied and stored without it."""

import copy
import pickle

import pytest
import torch

import epk_gp as epk
from distributed_cases import RULE, Shuffled, inputs, mixed, recorded


@pytest.fixture(scope="module")
def run():
    return recorded("plain", 3)


def test_a_kernel_with_an_executor_has_the_same_values_and_can_be_copied(run):
    executor, X = Shuffled(), mixed(4).X
    kernel, plain = epk.EPKKernel(run, rule=RULE, executor=executor), epk.EPKKernel(run, rule=RULE)
    expected = plain(X).to_dense()
    assert torch.equal(kernel(X).to_dense(), expected)
    assert executor.order
    assert torch.equal(copy.deepcopy(kernel)(X).to_dense(), expected)
    assert torch.equal(pickle.loads(pickle.dumps(kernel))(X).to_dense(), expected)


def test_a_process_with_an_executor_has_the_same_posterior_and_can_be_copied(run):
    executor, X = Shuffled(), inputs(3)
    expected = epk.LogitGP(run, rule=RULE).logit_posterior(X)
    gp = epk.LogitGP(run, rule=RULE, executor=executor)
    for one in (gp, copy.deepcopy(gp), pickle.loads(pickle.dumps(gp))):
        posterior = one.logit_posterior(X)
        assert torch.equal(posterior.mean, expected.mean)
        assert torch.equal(posterior.covariance, expected.covariance)
    assert executor.order
