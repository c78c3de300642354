"""The digest of a run: one chain of checksums over data, layout, initial weights and every step."""

import hashlib
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from epk_gp.core.model import FunctionalModel
from epk_gp.core.step import Step
from epk_gp.core.update_rules import UpdateCoefficients


def fingerprint_start(
    header: dict[str, Any], model: FunctionalModel, probe: Float[Tensor, "n C"], start: Float[Tensor, " P"]
) -> str:
    """Hash what a run starts from; the probe stands for the forward function."""
    hasher = hashlib.blake2b(repr(header).encode(), digest_size=16)
    for value in (*model.frozen_state().values(), probe, start):
        hasher.update(_bytes(value))
    return hasher.hexdigest()


def fingerprint_step(before: str, step: Step, update: UpdateCoefficients, end: Float[Tensor, " P"]) -> str:
    """Hash a step onto the digest of the run before it."""
    hasher = hashlib.blake2b(before.encode(), digest_size=16)
    hasher.update(repr(step.lr).encode())
    hasher.update(b"all" if step.batch is None else _bytes(step.batch))
    if step.sample_weights is not None:
        hasher.update(_bytes(step.sample_weights))
    for value in update:
        hasher.update(_bytes(value))
    hasher.update(_bytes(end))
    return hasher.hexdigest()


def _bytes(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def fingerprint_data(inputs: Shaped[Tensor, "M ..."], targets: Shaped[Tensor, "M ..."]) -> str:
    """Hash the training data: values, shapes and dtypes."""
    hasher = hashlib.blake2b(digest_size=16)
    for tensor in (inputs, targets):
        hasher.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
        hasher.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return hasher.hexdigest()


def fingerprint(*parts: object) -> str:
    """Hash what a result depends on: tensors by their content, all else by what it says of itself.

    The number of threads belongs to it: sums are split by it.
    """
    hasher = hashlib.blake2b(repr(torch.get_num_threads()).encode(), digest_size=16)
    for part in parts:
        if isinstance(part, Tensor):
            hasher.update(repr((tuple(part.shape), part.dtype)).encode())
            hasher.update(part.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
        else:
            hasher.update(repr(part).encode())
    return hasher.hexdigest()


def content_key(*tensors: Shaped[Tensor, "..."]) -> str:
    """Hash values, shapes, dtypes and devices: GPyTorch hands over slices of fresh copies, so identity says nothing.

    Args:
        tensors: Any number of tensors; their order counts.

    Returns:
        A blake2b digest. An edit in place changes it, a clone does not.
    """
    digest = hashlib.blake2b(digest_size=32)
    for x in tensors:
        digest.update(f"{tuple(x.shape)} {x.dtype} {x.device};".encode())
        flat = x.detach().to("cpu").contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()
