"""How a process over C outputs is put together: coupled in one, one per output, or C that share one covariance."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, final

import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from gpytorch.likelihoods import (
    FixedNoiseGaussianLikelihood,
    GaussianLikelihood,
    MultitaskGaussianLikelihood,
    _GaussianLikelihoodBase,
)
from gpytorch.means import Mean, MultitaskMean
from jaxtyping import Float
from torch import Tensor

from epk_gp.gp.likelihoods import MultitaskFixedNoiseGaussianLikelihood, noise_constraint
from epk_gp.kernels.output_structure import FullOutputs, OutputStructure, PerClassOutputs, TraceOutputs

Coupling = Literal["full", "independent", "trace"]


@dataclass(frozen=True)
class OutputCoupling(ABC):
    """How a Gaussian process over C outputs is put together.

    Values at n points have three layouts:

    * (n, C), that of the network and of `LogitPosterior`;
    * GPyTorch's, (n, C) for one multi-output process or (C, n) for a batch of processes;
    * rows of the kernel's K matrices, (B, n * R), see `OutputStructure`: GPyTorch's layout reshaped to (B, -1). Each
      matrix belongs to B / K vectors of rows, the right-hand sides of its equations: to C where the outputs share one.

    Attributes:
        num_outputs: C.
    """

    num_outputs: int

    @property
    @abstractmethod
    def structure(self) -> OutputStructure:
        """What the kernel makes of the C x C block of two points."""

    @property
    @abstractmethod
    def batch_shape(self) -> torch.Size:
        """Batch shape of GPyTorch's distributions: [] for one process, [C] for one per output."""

    @property
    @abstractmethod
    def num_right_sides(self) -> int:
        """B, vectors of rows."""

    @abstractmethod
    def to_gpytorch(self, values: Float[Tensor, "*b n C"]) -> Float[Tensor, "..."]:
        """Arrange values per point and output as GPyTorch's: (*b, n, C), or (*d, n) with d = broadcast(b, [C])."""

    @final
    def to_rows(self, values: Float[Tensor, "n C"]) -> Float[Tensor, "B rows"]:
        """Arrange values per point and output as rows of the kernel's matrices."""
        return self.to_gpytorch(values).reshape(self.num_right_sides, -1)

    @abstractmethod
    def from_rows(self, rows: Float[Tensor, "*b B rows"]) -> Float[Tensor, "*b n C"]:
        """Arrange rows of the kernel's matrices per point and output."""

    @abstractmethod
    def prior_covariances(self, blocks: Float[Tensor, "n K R R"], scale: Float[Tensor, " K"]) -> Float[Tensor, "n C C"]:
        """Return the prior covariances of the C outputs at each of n points, from the blocks of K matrices there."""

    @abstractmethod
    def point_blocks(self, matrices: Float[Tensor, "K rows rows"]) -> Float[Tensor, "n C C"]:
        """Cut the C x C blocks of single points out of K matrices; zero between outputs that do not covary."""

    @abstractmethod
    def point_blocks_of_gram(self, V: Float[Tensor, "K N_rows rows"], num_points: int) -> Float[Tensor, "n C C"]:
        """Compute `point_blocks(V^T V)` without the products between different points."""

    @abstractmethod
    def mean_module(self, mean: Mean) -> Mean:
        """Turn a mean with this batch shape into one with a value per point and output."""

    @abstractmethod
    def distribution(self, mean: Float[Tensor, "..."], covariance: object) -> MultivariateNormal:
        """Return GPyTorch's normal distribution for a mean and a lazy covariance in its layout."""

    @abstractmethod
    def known_noise_likelihood(self, variances: Float[Tensor, "N C"]) -> _GaussianLikelihoodBase:
        """Return a Gaussian likelihood with a known variance for every target."""

    @abstractmethod
    def learned_noise_likelihood(self) -> _GaussianLikelihoodBase:
        """Return a Gaussian likelihood with one variance per process, which is learned."""


@final
@dataclass(frozen=True)
class CoupledOutputs(OutputCoupling):
    """One process whose C outputs covary through the kernel's C x C blocks."""

    @property
    def structure(self) -> OutputStructure:
        """All of the block."""
        return FullOutputs(self.num_outputs)

    @property
    def batch_shape(self) -> torch.Size:
        """[]."""
        return torch.Size([])

    @property
    def num_right_sides(self) -> int:
        """B = 1."""
        return 1

    def to_gpytorch(self, values: Float[Tensor, "*b n C"]) -> Float[Tensor, "..."]:
        """Return the values."""
        return values

    def from_rows(self, rows: Float[Tensor, "*b B rows"]) -> Float[Tensor, "*b n C"]:
        """Unflatten the rows of the one matrix."""
        return rows.reshape(*rows.shape[:-2], -1, self.num_outputs)

    def prior_covariances(self, blocks: Float[Tensor, "n K R R"], scale: Float[Tensor, " K"]) -> Float[Tensor, "n C C"]:
        """Scale the blocks."""
        return scale * blocks[:, 0]

    def point_blocks(self, matrices: Float[Tensor, "K rows rows"]) -> Float[Tensor, "n C C"]:
        """Cut out the blocks on the diagonal."""
        C = self.num_outputs
        n = matrices.shape[-1] // C
        return matrices.reshape(n, C, n, C).diagonal(dim1=0, dim2=2).permute(2, 0, 1)

    def point_blocks_of_gram(self, V: Float[Tensor, "K N_rows rows"], num_points: int) -> Float[Tensor, "n C C"]:
        """Multiply each point's columns of V with each other."""
        W = V.reshape(V.shape[1], num_points, -1).permute(1, 2, 0).contiguous()  # (n, C, N C)
        return W @ W.mT

    def mean_module(self, mean: Mean) -> Mean:
        """Repeat the mean once per output, with parameters of its own."""
        return MultitaskMean([mean], num_tasks=self.num_outputs)

    def distribution(self, mean: Float[Tensor, "..."], covariance: object) -> MultivariateNormal:
        """Return a multi-output normal distribution, interleaved point by point."""
        return MultitaskMultivariateNormal(mean, covariance)

    def known_noise_likelihood(self, variances: Float[Tensor, "N C"]) -> _GaussianLikelihoodBase:
        """Return a likelihood of this package: GPyTorch's adds no fixed noise to several outputs."""
        return MultitaskFixedNoiseGaussianLikelihood(variances)

    def learned_noise_likelihood(self) -> _GaussianLikelihoodBase:
        """Return a likelihood with one variance for all outputs."""
        return MultitaskGaussianLikelihood(
            num_tasks=self.num_outputs, has_task_noise=False, noise_constraint=noise_constraint()
        )


@dataclass(frozen=True)
class BatchOfOutputs(OutputCoupling, ABC):
    """C processes that do not covary: a batch in GPyTorch."""

    @property
    def batch_shape(self) -> torch.Size:
        """[C]."""
        return torch.Size([self.num_outputs])

    @property
    def num_right_sides(self) -> int:
        """B = C."""
        return self.num_outputs

    @final
    def to_gpytorch(self, values: Float[Tensor, "*b n C"]) -> Float[Tensor, "..."]:
        """Give each process its output: b is empty, or ends with the batch of processes, of size 1 or C."""
        batch, C = values.shape[:-2], self.num_outputs
        position = torch.arange(batch.numel(), device=values.device).view(batch)
        per_output = values.mT.reshape(-1, C, values.shape[-2])
        return per_output[position, torch.arange(C, device=values.device)]

    @final
    def from_rows(self, rows: Float[Tensor, "*b B rows"]) -> Float[Tensor, "*b n C"]:
        """Transpose: each vector has the rows of one output."""
        return rows.mT

    @final
    def mean_module(self, mean: Mean) -> Mean:
        """Return the mean: its batch is that of the outputs."""
        return mean

    @final
    def distribution(self, mean: Float[Tensor, "..."], covariance: Any) -> MultivariateNormal:
        """Return a batch of normal distributions; a covariance that they share is expanded, which GPyTorch does not."""
        batch = torch.broadcast_shapes(mean.shape[:-1], covariance.shape[:-2])
        is_shared = covariance.shape[:-2] != batch
        return MultivariateNormal(mean, covariance.expand(*batch, *covariance.shape[-2:]) if is_shared else covariance)


@final
@dataclass(frozen=True)
class IndependentOutputs(BatchOfOutputs):
    """One process per output, each with the kernel of that output with itself."""

    @property
    def structure(self) -> OutputStructure:
        """The block's diagonal."""
        return PerClassOutputs(self.num_outputs)

    def prior_covariances(self, blocks: Float[Tensor, "n K R R"], scale: Float[Tensor, " K"]) -> Float[Tensor, "n C C"]:
        """Scale each output by its own process's scale."""
        return torch.diag_embed(scale * blocks[..., 0, 0])

    def point_blocks(self, matrices: Float[Tensor, "K rows rows"]) -> Float[Tensor, "n C C"]:
        """Collect the diagonals of the C matrices."""
        return torch.diag_embed(matrices.diagonal(dim1=-2, dim2=-1).mT)

    def point_blocks_of_gram(self, V: Float[Tensor, "K N_rows rows"], num_points: int) -> Float[Tensor, "n C C"]:
        """Compute the squared lengths of the columns of V."""
        return torch.diag_embed(V.square().sum(1).mT)

    def known_noise_likelihood(self, variances: Float[Tensor, "N C"]) -> _GaussianLikelihoodBase:
        """Return a batch of GPyTorch's likelihoods."""
        return FixedNoiseGaussianLikelihood(variances.mT.contiguous(), batch_shape=self.batch_shape)

    def learned_noise_likelihood(self) -> _GaussianLikelihoodBase:
        """Return a likelihood with one variance per output."""
        return GaussianLikelihood(batch_shape=self.batch_shape, noise_constraint=noise_constraint())


@final
@dataclass(frozen=True)
class SharedOutputs(BatchOfOutputs):
    """C processes with one covariance, the scalar kernel sum_c K(x, x')[c, c]: one factorisation serves them all."""

    @property
    def structure(self) -> OutputStructure:
        """The block's trace."""
        return TraceOutputs(self.num_outputs)

    def prior_covariances(self, blocks: Float[Tensor, "n K R R"], scale: Float[Tensor, " K"]) -> Float[Tensor, "n C C"]:
        """Give every output the same variance."""
        return self._same_variance(scale * blocks[:, 0, 0, 0])

    def point_blocks(self, matrices: Float[Tensor, "K rows rows"]) -> Float[Tensor, "n C C"]:
        """Give every output the diagonal of the one matrix."""
        return self._same_variance(matrices[0].diagonal())

    def point_blocks_of_gram(self, V: Float[Tensor, "K N_rows rows"], num_points: int) -> Float[Tensor, "n C C"]:
        """Compute the squared lengths of the columns of V."""
        return self._same_variance(torch.einsum("ij,ij->j", V[0], V[0]))

    def known_noise_likelihood(self, variances: Float[Tensor, "N C"]) -> _GaussianLikelihoodBase:
        """Raise: noise of its own would give each output a covariance of its own."""
        raise ValueError(
            "outputs='trace' shares one factorisation, so that the noise must be one number for all targets: got known "
            "variances. Give noise as a number and targets='labels' or 'network', or take outputs='independent'."
        )

    def learned_noise_likelihood(self) -> _GaussianLikelihoodBase:
        """Return a likelihood with one variance for all outputs."""
        return GaussianLikelihood(noise_constraint=noise_constraint())

    def _same_variance(self, variance: Tensor) -> Tensor:
        eye = torch.eye(self.num_outputs, dtype=variance.dtype, device=variance.device)
        return variance[:, None, None] * eye


def parse_coupling(outputs: Coupling, num_outputs: int) -> OutputCoupling:
    """Return the coupling that the argument `outputs` of `LogitGP` asks for.

    Raises:
        ValueError: `outputs` is none of "full", "independent" and "trace".
    """
    if outputs == "full":
        return CoupledOutputs(num_outputs)
    if outputs == "independent":
        return IndependentOutputs(num_outputs)
    if outputs == "trace":
        return SharedOutputs(num_outputs)
    raise ValueError(f"outputs must be 'full', 'independent' or 'trace': got {outputs!r}.")
