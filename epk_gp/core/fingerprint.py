"""Fingerprints: checksums of tensors, data and runs, by which equal ones are recognised.

The digest of a run is a chain of such checksums: the first covers the run's header, the frozen state of the network,
its outputs at the initial weights and those weights; each further one covers the digest before it and one step. Equal
runs have equal digests, in memory or on disk, resumed or not.
"""

import hashlib
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.model import FunctionalModel
from epk_gp.core.step import ForwardPass, SeenRows, Step
from epk_gp.optimizers.update_rules import UpdateCoefficients

_DIGEST_BYTES = 16  # 128 bits: two different inputs agree by chance with probability 3e-39


def tensor_bytes(value: Shaped[Tensor, "..."]) -> memoryview:
    """Return the bytes of a tensor's entries in row-major order; no copy is made of a contiguous tensor on the CPU."""
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def fingerprint(*parts: object) -> str:
    """Hash everything that a result depends on: a tensor by shape, dtype and entries, any other object by its `repr`.

    The number of threads is hashed too, because torch splits sums by it: results of another number of threads agree up
    to rounding only.
    """
    hasher = hashlib.blake2b(repr(torch.get_num_threads()).encode(), digest_size=_DIGEST_BYTES)
    for part in parts:
        if isinstance(part, Tensor):
            hasher.update(repr((tuple(part.shape), part.dtype)).encode())
            hasher.update(tensor_bytes(part))
        else:
            hasher.update(repr(part).encode())
    return hasher.hexdigest()


def content_key(*tensors: Shaped[Tensor, "..."]) -> str:
    """Return the fingerprint of tensors and of the devices they are on, as the key of a cache.

    GPyTorch passes slices of fresh copies, so that object identity cannot serve as a key. An edit in place changes the
    key, a clone does not, and the order of the tensors counts.
    """
    return fingerprint(*(part for x in tensors for part in (x, x.device)))


def fingerprint_data(
    inputs: Shaped[Tensor, "M ..."], targets: Shaped[Tensor, "M ..."], *graph: Shaped[Tensor, "..."]
) -> str:
    """Hash the shapes, dtypes and entries of the training data, and of the tensors of a graph."""
    return fingerprint_tensors(inputs, targets, *graph)


def fingerprint_tensors(*tensors: Shaped[Tensor, "..."]) -> str:
    """Hash the shapes, dtypes and entries of tensors; the number of threads does not count."""
    hasher = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for tensor in tensors:
        hasher.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
        hasher.update(tensor_bytes(tensor))
    return hasher.hexdigest()


def fingerprint_start(
    header: dict[str, Any],
    model: FunctionalModel,
    outputs: Float[Tensor, "n C"],
    start: Float[Tensor, " P"],
    statistics: Float[Tensor, " Q"] | None = None,
) -> str:
    """Return the digest of a run of no steps.

    Args:
        header: Description of the run, without what concerns its storage alone.
        model: The network; its frozen state is hashed.
        outputs: Its outputs near the initial weights (`fingerprint_outputs`); they stand for the forward function.
        start: The initial weights.
        statistics: The initial moving statistics; None for a network without them.
    """
    hasher = hashlib.blake2b(repr(header).encode(), digest_size=_DIGEST_BYTES)
    for value in (*model.frozen_state().values(), outputs, start):
        hasher.update(tensor_bytes(value))
    if statistics is not None:
        _hash_tensor(hasher, statistics)
    return hasher.hexdigest()


def fingerprint_step(
    before: str,
    step: Step,
    update: UpdateCoefficients,
    end: Float[Tensor, " P"],
    statistics: Float[Tensor, " Q"] | None = None,
) -> str:
    """Return the digest of a run that is one step longer than the run with digest `before`.

    Args:
        before: Digest of the run up to this step.
        step: Learning rate, batch and forward passes of the step.
        update: Its coefficients.
        end: The weights after the step.
        statistics: The moving statistics after the step; None for a network without them.
    """
    hasher = hashlib.blake2b(before.encode(), digest_size=_DIGEST_BYTES)
    hasher.update(repr(step.lr).encode())
    hasher.update(b"all" if step.batch is None else tensor_bytes(step.batch))
    if step.sample_weights is not None:
        hasher.update(tensor_bytes(step.sample_weights))
    for value in update.tensors():
        hasher.update(tensor_bytes(value))
    hasher.update(tensor_bytes(end))
    if statistics is not None:
        _hash_tensor(hasher, statistics)
    for forward in step.passes:
        _hash_pass(hasher, forward)
    if step.groups is not None:
        hasher.update(repr([group.to_json() for group in step.groups]).encode())
    return hasher.hexdigest()


def _hash_pass(hasher: hashlib.blake2b, forward: ForwardPass) -> None:
    hasher.update(repr(("pass", forward.num_rows, str(forward.autocast))).encode())
    for value in vars(forward).values():
        if isinstance(value, SeenRows):
            _hash_tensor(hasher, value.index)
            _hash_tensor(hasher, value.values)
        elif isinstance(value, Tensor):
            _hash_tensor(hasher, value)
        else:
            hasher.update(b"none")


def _hash_tensor(hasher: hashlib.blake2b, value: Tensor) -> None:
    hasher.update(repr((tuple(value.shape), str(value.dtype))).encode())
    hasher.update(tensor_bytes(value))
