"""Blocks are keyed by content: no stale value, and none is computed twice."""

import copy
import pickle

import pytest
import torch

from epk_gp.core.step import content_key
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernels.blocks import BlockCache
from epk_gp.kernels.epk import EPKKernel
from epk_gp.kernels.tagging import test_copy, train_copy


def test_a_key_follows_values_shape_dtype_and_order():
    x, y = torch.arange(6.0), torch.arange(6.0) + 1
    assert content_key(x) == content_key(x.clone())
    assert content_key(x) == content_key(torch.arange(12.0)[::2] / 2)  # another layout in memory
    others = [x.reshape(2, 3), x.double(), x.int(), y, x[:5]]
    assert len({content_key(x), *map(content_key, others)}) == 6
    assert content_key(x, y) != content_key(y, x)
    assert content_key(x, x) != content_key(x)
    assert content_key(x.bfloat16()) == content_key(x.bfloat16())


def test_stored_blocks_cannot_be_edited_deep_copies_are_the_same_store_and_pickled_ones_empty():
    cache = BlockCache(1000)
    block = torch.ones(3)
    cache.put("a", block)
    block.zero_()
    cache.get("a").zero_()
    assert torch.equal(cache.get("a"), torch.ones(3))
    assert copy.deepcopy(cache) is cache
    restored = pickle.loads(pickle.dumps(cache))
    assert (len(restored), restored.max_bytes) == (0, 1000)


def test_the_least_recently_used_block_goes_first_and_the_limit_holds():
    cache = BlockCache(3 * 40)
    for name in "abc":
        cache.put(name, torch.zeros(10))
    cache.get("a")
    cache.put("d", torch.zeros(10))
    assert cache.num_bytes == 3 * 40
    assert [cache.get(name) is not None for name in "abcd"] == [True, False, True, True]
    cache.put("big", torch.zeros(31))  # above the limit: neither stored nor at the cost of others
    assert cache.get("big") is None
    assert len(cache) == 3
    cache.put("a", torch.zeros(20))  # a new block under an old key counts once
    assert cache.num_bytes <= 3 * 40
    cache.clear()
    assert len(cache) == cache.num_bytes == 0


def test_a_block_is_computed_once_across_clones_and_modes(trajectory, counter):
    kernel = EPKKernel(trajectory)
    x, y = train_copy(trajectory.inputs), test_copy(trajectory.inputs[:2])
    first = kernel(y, x).to_dense()
    kernel.train()
    kernel.eval()
    assert torch.equal(kernel(y.clone(), torch.cat([x, y])[:7]).to_dense(), first)
    assert counter.calls == ["block"]


def test_all_classes_of_an_independent_kernel_share_one_block(trajectory, counter):
    kernel = EPKKernel(trajectory, "independent")
    x = train_copy(trajectory.inputs)
    K = kernel(x).to_dense()
    for c in range(3):
        assert torch.equal(kernel[c](x).to_dense(), K[c])
    assert counter.calls == ["block_per_class"]


@pytest.mark.parametrize("diag", [False, True])
def test_a_block_of_points_that_are_edited_meanwhile_is_not_kept_for_the_old_ones(trajectory, monkeypatch, diag):
    """The edit comes between the key and the computation, as another thread's may."""
    kernel = EPKKernel(trajectory, "trace")
    x = test_copy(torch.randn(4, 2, dtype=torch.float64))
    before = x.clone()
    expected = EPKKernel(trajectory, "trace", cache_bytes=0).forward(before, before, diag=diag)
    name = "diagonal_blocks" if diag else "trace_block"
    original = getattr(PathKernel, name)

    def edited(*args, **kwargs):
        x[1, 0] += 1
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(PathKernel, name, edited)
        found = kernel.forward(x, x, diag=diag)
    assert torch.equal(found, expected)  # one state of the points, not some rows of each
    assert not torch.equal(x, before)
    assert torch.equal(kernel.forward(before, before, diag=diag), expected)
    assert torch.equal(kernel.forward(x, x, diag=diag), EPKKernel(trajectory, "trace").forward(x, x, diag=diag))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("diag", [False, True])
def test_a_computation_that_fails_leaves_no_block(trajectory, monkeypatch, error, diag):
    kernel = EPKKernel(trajectory, "trace")
    x = test_copy(torch.randn(4, 2, dtype=torch.float64))
    expected = EPKKernel(trajectory, "trace", cache_bytes=0).forward(x, x, diag=diag)
    original = torch.lerp

    def fails(*args, **kwargs):
        raise error("in the middle")

    with monkeypatch.context() as patch:
        patch.setattr(torch, "lerp", fails)
        with pytest.raises(error, match="in the middle"):
            kernel.forward(x, x, diag=diag)
    assert torch.lerp is original
    assert len(kernel.config.cache) == 0
    assert torch.equal(kernel.forward(x, x, diag=diag), expected)
