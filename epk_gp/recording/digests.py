"""The digest of a run: one chain of checksums over data, layout, initial weights and every step."""

import hashlib
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from epk_gp.recording.chunks import Step
from epk_gp.recording.networks import Skeleton, constants_of
from epk_gp.recording.optimizers import Update


def digest_start(
    header: dict[str, Any], skeleton: Skeleton, probe: Float[Tensor, "n C"], start: Float[Tensor, " P"]
) -> str:
    """Hash what a run starts from; the probe stands for the forward function."""
    hasher = hashlib.blake2b(repr(header).encode(), digest_size=16)
    for value in (*constants_of(skeleton).values(), probe, start):
        hasher.update(_bytes(value))
    return hasher.hexdigest()


def digest_step(before: str, step: Step, update: Update, end: Float[Tensor, " P"]) -> str:
    """Hash a step onto the digest of the run before it."""
    hasher = hashlib.blake2b(before.encode(), digest_size=16)
    hasher.update(repr(step.size).encode())
    hasher.update(b"all" if step.batch is None else _bytes(step.batch))
    if step.sample_weights is not None:
        hasher.update(_bytes(step.sample_weights))
    for value in update:
        hasher.update(_bytes(value))
    hasher.update(_bytes(end))
    return hasher.hexdigest()


def _bytes(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
