"""The structure of a process over C outputs: its layouts, its likelihood, and its prior mean."""

from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from gpytorch import likelihoods
from gpytorch.constraints import GreaterThan
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods.multitask_gaussian_likelihood import _MultitaskGaussianLikelihoodBase
from gpytorch.means import ConstantMean, Mean, MultitaskMean, ZeroMean
from jaxtyping import Float, Shaped
from linear_operator.operators import DiagLinearOperator, LinearOperator
from torch import Tensor

from epk_gp.core.losses import apply_head
from epk_gp.core.trajectory import Trajectory, network_outputs
from epk_gp.kernels.blocks import KernelConfig, OutputStructure
from epk_gp.kernels.tagging import PointSets, parse_points, requires_graph

Coupling = Literal["full", "independent", "trace"]
PriorMean = Literal["initial", "constant", "zero", "network"]

# Smallest learned variance, for a mean diagonal of the kernel of 1. It is well above the rounding of a Gram matrix, so
# that no jitter is needed: for 3000 rows, rounding is 3000 eps = 7e-13 of the largest eigenvalue, which is at most the
# trace 3000, so 2e-9.
NOISE_FLOOR = 1e-6


@dataclass(frozen=True)
class OutputCoupling(OutputStructure):
    """The structure of a Gaussian process over C outputs.

    There is one process whose outputs covary through the kernel's C x C blocks ("full"); one process per output, with
    the kernel of that output with itself ("independent"); or C processes with one covariance, the trace ("trace"), so
    that one factorisation serves them all. Values at n points have three layouts:

    * (n, C), the layout of the network and of `LogitPosterior`;
    * GPyTorch's, (n, C) for one multi-output process or (C, n) for a batch of processes;
    * rows of the kernel's K matrices, (B, n * R), see `OutputStructure`: GPyTorch's layout reshaped to (B, -1). Each
      matrix has B / K vectors of rows, the right-hand sides of its equations: C if the outputs share one matrix.

    Attributes:
        kind: The part of the C x C block of two points that the kernel uses: "full", "independent" or "trace".
        num_outputs: C.
    """

    def __post_init__(self) -> None:
        """Raise a ValueError if `kind` is unknown."""
        if self.kind not in ("full", "independent", "trace"):
            raise ValueError(f"outputs must be 'full', 'independent' or 'trace': got {self.kind!r}.")

    @property
    def is_batch(self) -> bool:
        """Whether the outputs are a batch of processes in GPyTorch, which do not covary."""
        return self.kind != "full"

    @property
    def batch_shape(self) -> torch.Size:
        """Batch shape of GPyTorch's distributions: [] for one process, [C] for one per output."""
        return torch.Size([self.num_outputs] if self.is_batch else [])

    def to_gpytorch(self, values: Float[Tensor, "*b n C"]) -> Float[Tensor, "..."]:
        """Arrange values per point and output in GPyTorch's layout: (*b, n, C), or (*d, n) with d = broadcast(b, [C]).

        For a batch of processes, b is empty or ends with the batch, of size 1 or C.
        """
        if not self.is_batch:
            return values
        batch, C = values.shape[:-2], self.num_outputs
        position = torch.arange(batch.numel(), device=values.device).view(batch)
        per_output = values.mT.reshape(-1, C, values.shape[-2])
        return per_output[position, torch.arange(C, device=values.device)]

    def from_rows(self, rows: Float[Tensor, "*b B rows"]) -> Float[Tensor, "*b n C"]:
        """Arrange rows of the kernel's matrices per point and output."""
        return rows.mT if self.is_batch else rows.reshape(*rows.shape[:-2], -1, self.num_outputs)

    def covariances(self, blocks: Float[Tensor, "n K R R"]) -> Float[Tensor, "n C C"]:
        """Return the covariances of the C outputs at each of n points, from the blocks of K matrices there."""
        return torch.diag_embed(blocks[..., 0, 0].expand(-1, self.num_outputs)) if self.is_batch else blocks[:, 0]

    def point_blocks(self, matrices: Float[Tensor, "K rows rows"]) -> Float[Tensor, "n C C"]:
        """Extract the C x C blocks of single points from K matrices; zero between outputs that do not covary."""
        R = self.rows_per_point
        blocks = matrices.unflatten(-1, (-1, R)).unflatten(1, (-1, R)).diagonal(dim1=1, dim2=3)  # (K, R, R, n)
        return self.covariances(blocks.movedim(-1, 0))

    def point_blocks_of_gram(self, V: Float[Tensor, "K N_rows rows"]) -> Float[Tensor, "n C C"]:
        """Compute `point_blocks(V^T V)` without the products between different points."""
        if not self.is_batch:
            W = V.reshape(V.shape[1], -1, self.num_outputs).permute(1, 2, 0).contiguous()  # (n, C, N C)
            return W @ W.mT
        squares = torch.einsum("ij,ij->j", V[0], V[0])[None] if len(V) == 1 else V.square().sum(1)
        return self.covariances(squares.mT[..., None, None])

    def distribution(self, mean: Float[Tensor, "..."], covariance: Any) -> MultivariateNormal:
        """Return GPyTorch's normal distribution for a mean and a lazy covariance in its layout."""
        if not self.is_batch:
            return MultitaskMultivariateNormal(mean, covariance)  # interleaved point by point
        batch = torch.broadcast_shapes(mean.shape[:-1], covariance.shape[:-2])
        is_shared = covariance.shape[:-2] != batch  # GPyTorch does not expand a shared covariance
        return MultivariateNormal(mean, covariance.expand(*batch, *covariance.shape[-2:]) if is_shared else covariance)

    def likelihood(self, variances: Float[Tensor, "N C"] | None) -> likelihoods._GaussianLikelihoodBase:
        """Return a Gaussian likelihood: with a known variance for every target, or one learned per process.

        Raises:
            ValueError: Variances are given for outputs that share a covariance: each output would need its own.
        """
        constraint, is_shared = GreaterThan(NOISE_FLOOR), self.kind == "trace"
        if variances is not None:
            if is_shared:
                raise ValueError(
                    "outputs='trace' shares one factorisation, so that the noise must be one number for all targets: "
                    "got known variances. Give noise as a number and targets='labels' or 'network', or take "
                    "outputs='independent'."
                )
            if not self.is_batch:
                return MultitaskFixedNoiseGaussianLikelihood(variances)
            return likelihoods.FixedNoiseGaussianLikelihood(variances.mT.contiguous(), batch_shape=self.batch_shape)
        if not self.is_batch:
            return likelihoods.MultitaskGaussianLikelihood(
                self.num_outputs, has_task_noise=False, noise_constraint=constraint
            )
        batch_shape = torch.Size([]) if is_shared else self.batch_shape
        return likelihoods.GaussianLikelihood(noise_constraint=constraint, batch_shape=batch_shape)


@final
class MultitaskFixedNoiseGaussianLikelihood(_MultitaskGaussianLikelihoodBase):  # type: ignore[misc]  # without types
    """Gaussian noise of known variance for every point and output.

    GPyTorch's `FixedNoiseGaussianLikelihood` adds no noise to a `MultitaskMultivariateNormal` and only warns. This
    class adds the noise, or raises an error.

    Args:
        noise: Variances of the n training points and C outputs, (n, C), positive.

    Raises:
        ValueError: In a call, the number of points differs from the number of training points.
    """

    has_global_noise = False  # for GPyTorch: there is no additional number for all points

    def __init__(self, noise: Float[Tensor, "n C"]) -> None:
        super(likelihoods._GaussianLikelihoodBase, self).__init__()  # the base class itself needs a noise module
        self.register_buffer("noise", noise, persistent=False)

    def _shaped_noise_covar(
        self, shape: torch.Size, add_noise: bool | None = True, interleaved: bool = True, *params: Any, **kwargs: Any
    ) -> LinearOperator:
        """Return the noise as a diagonal of n * C, for the base class."""
        if self.noise.shape != shape[-2:]:
            raise ValueError(
                f"the noise is known of {tuple(self.noise.shape)} points and classes only: got points of shape "
                f"{tuple(shape[-2:])}. Use the latent distribution for others."
            )
        return DiagLinearOperator((self.noise if interleaved else self.noise.mT).flatten(-2))


@final
class NetworkMean(Mean):  # type: ignore[misc]  # gpytorch ships no types
    """The recorded network f_{w_s} as a prior mean; both copies of an input have the same mean.

    The network's weights are not parameters of it.

    Args:
        config: The kernel's configuration: the run, the head, and the cache, which also holds outputs.
        coupling: The structure of the process over C outputs.
        state: s: 0 is f_{w_0}, the b of the kernel machine (Theorem 3.6, Bell et al. 2023); -1 is the trained network.
        trajectory: The run; by default the kernel's.
    """

    def __init__(
        self, config: KernelConfig, coupling: OutputCoupling, state: int, trajectory: Trajectory | None = None
    ) -> None:
        super().__init__()
        self.config = config
        self.trajectory = config.trajectory if trajectory is None else trajectory
        self.coupling = coupling
        self.state = state

    def forward(self, x: Shaped[Tensor, "*b n columns"]) -> Float[Tensor, "*d n C"] | Float[Tensor, "*d n"]:
        """Evaluate the network.

        Args:
            x: (*b, n, D + 1), or (*b, n, D) for test copies.

        Returns:
            (*b, n, C), or for one process per output (*d, n) with d = broadcast(b, [C]).
        """
        return self.at(parse_points(self.trajectory, x))

    def at(self, x: PointSets) -> Float[Tensor, "*d n C"] | Float[Tensor, "*d n"]:
        """Evaluate the network at parsed points; the result is arranged as in `forward`."""
        trajectory, head, rows = self.trajectory, self.config.path_kernel.head, x.rows
        if requires_graph(rows):
            X = rows[..., :-1].reshape(-1, *trajectory.input_shape)
            weights = {name: value.to(X) for name, value in trajectory.weights(self.state).items()}
            f = apply_head(trajectory.model_for(X)(weights, X), head)
        else:
            f = network_outputs(trajectory, x.flat().X, state=self.state, head=head)
            f = f.reshape(*x.is_train.shape, -1).to(rows.dtype if rows.is_floating_point() else f.dtype)
            f = f.expand(*rows.shape[:-1], -1)
        return self.coupling.to_gpytorch(f.reshape(*rows.shape[:-1], -1))


def make_mean(mean: PriorMean, config: KernelConfig, coupling: OutputCoupling, trajectory: Trajectory) -> Mean:
    """Build a prior mean with one value per point and output.

    Args:
        mean: "initial" (f_{w_0}), "constant" (learned, one per output), "zero", or "network" (the trained network).
        config: The kernel's configuration.
        coupling: The structure of the process over C outputs.
        trajectory: The run, of which the kernel's run may be the nodes.

    Raises:
        ValueError: `mean` is unknown.
    """
    if mean in ("initial", "network"):
        return NetworkMean(config, coupling, 0 if mean == "initial" else -1, trajectory)
    if mean not in ("constant", "zero"):
        raise ValueError(f"mean must be one of ['initial', 'constant', 'zero', 'network']: got {mean!r}.")
    one = (ConstantMean if mean == "constant" else ZeroMean)(batch_shape=coupling.batch_shape)
    return one if coupling.is_batch else MultitaskMean([one], num_tasks=coupling.num_outputs)
