"""How a Gaussian process over C outputs is put together: coupled in one process, or one process per output."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, final

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
from epk_gp.kernels.output_structure import FullOutputs, OutputStructure, PerClassOutputs

CoupledOrIndependent = Literal["full", "independent"]


@dataclass(frozen=True)
class OutputCoupling(ABC):
    """How a Gaussian process over C outputs is put together.

    Values at n points have three layouts:

    * (n, C), that of the network and of `LogitPosterior`;
    * GPyTorch's, (n, C) for one multi-output process or (C, n) for a batch of processes;
    * the rows of the kernel's K matrices, (K, n * R), see `OutputStructure`: GPyTorch's layout reshaped to (K, -1).

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
        """Batch shape of GPyTorch's modules: [] for one process, [C] for one per output."""

    @abstractmethod
    def to_gpytorch(self, values: Float[Tensor, "*b n C"]) -> Float[Tensor, "..."]:
        """Arrange values per point and output as GPyTorch's: (*b, n, C), or (*d, n) with d = broadcast(b, [C])."""

    @final
    def to_rows(self, values: Float[Tensor, "n C"]) -> Float[Tensor, "K rows"]:
        """Arrange values per point and output as rows of the kernel's matrices."""
        return self.to_gpytorch(values).reshape(self.structure.num_matrices, -1)

    @abstractmethod
    def from_rows(self, rows: Float[Tensor, "*b K rows"]) -> Float[Tensor, "*b n C"]:
        """Arrange rows of the kernel's matrices per point and output."""

    @abstractmethod
    def prior_covariances(self, blocks: Float[Tensor, "n C C"], scale: Float[Tensor, " K"]) -> Float[Tensor, "n C C"]:
        """Return the prior covariances of the C outputs at each of n points, from the kernel's blocks K(x_i, x_i)."""

    @abstractmethod
    def point_blocks(self, matrices: Float[Tensor, "K rows rows"]) -> Float[Tensor, "n C C"]:
        """Cut the C x C blocks of single points out of K matrices; zero between outputs that are independent."""

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

    def to_gpytorch(self, values: Float[Tensor, "*b n C"]) -> Float[Tensor, "..."]:
        """Return the values."""
        return values

    def from_rows(self, rows: Float[Tensor, "*b K rows"]) -> Float[Tensor, "*b n C"]:
        """Unflatten the rows of the one matrix."""
        return rows.reshape(*rows.shape[:-2], -1, self.num_outputs)

    def prior_covariances(self, blocks: Float[Tensor, "n C C"], scale: Float[Tensor, " K"]) -> Float[Tensor, "n C C"]:
        """Scale the blocks."""
        return scale * blocks

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


@final
@dataclass(frozen=True)
class IndependentOutputs(OutputCoupling):
    """One process per output, each with the kernel of that output with itself: a batch of C processes in GPyTorch."""

    @property
    def structure(self) -> OutputStructure:
        """The block's diagonal."""
        return PerClassOutputs(self.num_outputs)

    @property
    def batch_shape(self) -> torch.Size:
        """[C]."""
        return torch.Size([self.num_outputs])

    def to_gpytorch(self, values: Float[Tensor, "*b n C"]) -> Float[Tensor, "..."]:
        """Give each process its output: b is empty, or ends with the batch of processes, of size 1 or C."""
        batch, C = values.shape[:-2], self.num_outputs
        position = torch.arange(batch.numel(), device=values.device).view(batch)
        per_output = values.mT.reshape(-1, C, values.shape[-2])
        return per_output[position, torch.arange(C, device=values.device)]

    def from_rows(self, rows: Float[Tensor, "*b K rows"]) -> Float[Tensor, "*b n C"]:
        """Transpose: each matrix has the rows of one output."""
        return rows.mT

    def prior_covariances(self, blocks: Float[Tensor, "n C C"], scale: Float[Tensor, " K"]) -> Float[Tensor, "n C C"]:
        """Scale the blocks' diagonals, each output by its own process's scale."""
        return torch.diag_embed(scale * blocks.diagonal(dim1=-2, dim2=-1))

    def point_blocks(self, matrices: Float[Tensor, "K rows rows"]) -> Float[Tensor, "n C C"]:
        """Collect the diagonals of the C matrices."""
        return torch.diag_embed(matrices.diagonal(dim1=-2, dim2=-1).mT)

    def point_blocks_of_gram(self, V: Float[Tensor, "K N_rows rows"], num_points: int) -> Float[Tensor, "n C C"]:
        """Compute the squared lengths of the columns of V."""
        return torch.diag_embed(V.square().sum(1).mT)

    def mean_module(self, mean: Mean) -> Mean:
        """Return the mean: its batch is that of the outputs."""
        return mean

    def distribution(self, mean: Float[Tensor, "..."], covariance: object) -> MultivariateNormal:
        """Return a batch of normal distributions."""
        return MultivariateNormal(mean, covariance)

    def known_noise_likelihood(self, variances: Float[Tensor, "N C"]) -> _GaussianLikelihoodBase:
        """Return a batch of GPyTorch's likelihoods."""
        return FixedNoiseGaussianLikelihood(variances.mT.contiguous(), batch_shape=self.batch_shape)

    def learned_noise_likelihood(self) -> _GaussianLikelihoodBase:
        """Return a likelihood with one variance per output."""
        return GaussianLikelihood(batch_shape=self.batch_shape, noise_constraint=noise_constraint())


def parse_coupling(outputs: CoupledOrIndependent, num_outputs: int) -> OutputCoupling:
    """Return the coupling that the argument `outputs` of `LogitGP` asks for.

    Raises:
        ValueError: `outputs` is neither "full" nor "independent".
    """
    if outputs == "full":
        return CoupledOutputs(num_outputs)
    if outputs == "independent":
        return IndependentOutputs(num_outputs)
    raise ValueError(f"outputs must be 'full' or 'independent': got {outputs!r}.")
