"""What was found out about a network: how to differentiate it, and how much memory that takes."""

from collections.abc import Hashable
from dataclasses import dataclass, field
from threading import RLock
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and the device of a computation."""

    dtype: torch.dtype
    device: torch.device

    def cast(self, X: Tensor) -> Tensor:
        """Bring inputs to the computation: floating ones to its dtype, all to its device."""
        return X.to(device=self.device, dtype=self.dtype) if X.is_floating_point() else X.to(self.device)


@dataclass(frozen=True)
class DifferentiationPlan:
    """How to differentiate a network.

    `autodiff.verification` builds the plan from one observed forward pass, and keeps in it only what reproduces plain
    autograd on a few rows.

    Attributes:
        bias_of: Weights of layers (`autodiff.interception.LAYERS`), each with the trained bias that always goes with
            it, or None.
        dense_params: All other trained parameters. Their Jacobians are computed sample by sample.
        supports_interpolation: Rows at different points of a segment of weights can share two calls per layer
            (`autodiff.interception.InterpolatedWeights`).
        supports_stacking: Equal parts of the rows can have weights of their own
            (`autodiff.interception.StackedWeights`).
        supports_jvp: Forward-mode derivatives work.
        supports_double_backward: The result of reverse mode can be differentiated once more.
        supports_batched_vjp: Several cotangents can be propagated backwards in one call.
        calls_convolutions: The network calls convolutions. torch maps their second derivatives, and their passes over
            weights, by loops and copies, so that neither is mapped.
        supports_pool_windows: Gradients of convolutions may end at the max-pool that alone sees them
            (`autodiff.layer_builder`).
        supports_vmap: `torch.func.vmap` over samples works.
        vmap_chunk_size: Number of samples that one `vmap` call takes.
        activations_per_sample: Numbers that a forward pass computes per sample.
        num_outputs: C.
        calls_fused_functions: The network calls functions that interpolation writes out (recurrent layers, attention):
            where rows are at few points of a segment, one pass for each point costs less.
        shares_pass: A forward pass computes the rows of all points, whichever are asked for (nodes of a graph). Rows
            are grouped by their weights then, and no layer is taken for one that sees the rows.
        supports_mapped_passes: `torch.func.vmap` over the weights of such passes works.
    """

    bias_of: dict[str, str | None]
    dense_params: tuple[str, ...]
    supports_interpolation: bool
    supports_stacking: bool
    supports_jvp: bool
    supports_double_backward: bool
    supports_batched_vjp: bool
    calls_convolutions: bool
    supports_pool_windows: bool
    supports_vmap: bool
    vmap_chunk_size: int
    activations_per_sample: int
    num_outputs: int
    calls_fused_functions: bool = False
    shares_pass: bool = False
    supports_mapped_passes: bool = False


@dataclass(eq=False)
class ModelCache:
    """What was found out about a network, shared by all its variants and by all runs that have it.

    Nothing in the cache depends on the weights, so runs that share a network (`tangent_trajectory`, `thin_path`) share
    it too. A pickled or copied cache is empty.

    Attributes:
        needs_dense_plan: Some inputs use a parameter in a way that no layer-wise Jacobian covers: the plan treats every
            parameter as dense.
        plans: The plan for each dtype and device, with and without layers (`needs_dense_plan`).
        feature_bytes: Bytes that the layer Jacobians of one point take, for each way of computing them.
        vmap_second_derivatives: Whether `torch.func.vmap` reproduces second derivatives, for each dtype and device.
        lock: Held while an entry is computed, so that several threads compute it once.
    """

    needs_dense_plan: bool = False
    plans: dict[tuple[TensorSpec, bool], DifferentiationPlan] = field(default_factory=dict)
    feature_bytes: dict[Hashable, int] = field(default_factory=dict)
    vmap_second_derivatives: dict[TensorSpec, bool] = field(default_factory=dict)
    lock: Any = field(default_factory=RLock, repr=False)

    def __reduce__(self) -> tuple[type["ModelCache"], tuple[()]]:
        """Return an empty cache as the pickled form: every entry can be found out again."""
        return ModelCache, ()
