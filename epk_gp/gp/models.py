"""GP regression on logits with the exact path kernel as prior covariance: section 4.2, Bell et al. (2023)."""

from collections.abc import Sequence
from typing import Literal, final

import gpytorch
import numpy as np
import torch
from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from tqdm.auto import tqdm

from epk_gp.core.compute_options import MEMORY_BUDGET
from epk_gp.core.head import Head
from epk_gp.core.trajectory import Trajectory, validate_inputs, validate_trajectory
from epk_gp.core.validation import validate_count, validate_positive
from epk_gp.gp.likelihoods import NOISE_FLOOR, make_likelihood
from epk_gp.gp.marginal_likelihood import GramSpectrum, negative_log_marginal_likelihood, spectrum_of
from epk_gp.gp.means import PriorMean, make_mean
from epk_gp.gp.posterior import Factorization, LogitPosterior, factorize, posterior_at
from epk_gp.gp.targets import TargetKind, make_targets
from epk_gp.kernels.epk import CACHE_BYTES, EPKKernel
from epk_gp.kernels.tagging import test_copy, train_copy
from epk_gp.quadrature.rules import QuadratureRule, gauss_legendre


@final
class LogitGP(gpytorch.models.ExactGP):  # type: ignore[misc]  # gpytorch ships no types
    """A Gaussian process over the network's outputs, conditioned on training points.

    The prior is mean + outputscale * EPK, the kernel normalised to mean diagonal 1 (its raw scale is arbitrary). All
    computation is in float64. Call `fit`, then `logit_posterior`; `gp(test_copy(X))` in evaluation mode is the same
    posterior in GPyTorch's terms and under GPyTorch's settings (conjugate gradients from 800 rows on).

    The posterior mean of a GP is not the network. With mean="network" and targets="network" it is: the residual is
    zero, and the covariance is that of the exact path kernel around the network as it stands. Nothing can be learned
    from a zero residual, so take the hyperparameters from a GP with another mean:

        gp = LogitGP(trajectory)
        gp.fit()
        fixed = LogitGP(trajectory, mean="network")
        fixed.covar_module.load_state_dict(gp.covar_module.state_dict())
        fixed.likelihood.load_state_dict(gp.likelihood.state_dict())

    Args:
        trajectory: Training run with C outputs.
        outputs: "full" - one GP with C x C coupling; "independent" - one GP per class, each with its own outputscale
            and noise.
        mean: "initial" (f_{w_0}, the b of the kernel machine), "constant" (learned, one per class), "zero", "network".
        targets: "network" - the trained network's outputs at the points (the paper); "dirichlet" - transformed labels
            with known noise (Milios et al. 2018).
        points: Indices of the training points to condition on; all by default.
        head: "logits" or "log_softmax".
        rule: Quadrature rule.
        noise: A number - initial noise variance, relative to the kernel's mean diagonal, to be learned; or (N, C) known
            variances of the conditioning points' targets, which stay. Not used with targets="dirichlet", whose
            variances are known.
        memory_budget: Bytes that kernel blocks and posteriors may use beside the factorisation.

    Attributes:
        train_inputs: One tensor of N training copies, (N, D + 1).
        train_targets: (N, C) for "full", (C, N) for "independent".
        points: The N indices.

    Raises:
        TypeError: Points that are not indices.
        ValueError: An unknown option, points out of range or repeated, or targets="dirichlet" without class labels.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        outputs: Literal["full", "independent"] = "full",
        mean: PriorMean = "initial",
        targets: TargetKind = "network",
        points: Int[Tensor, " N"] | Sequence[int] | None = None,
        *,
        head: Head = "logits",
        rule: QuadratureRule = gauss_legendre(4),
        noise: float | Float[Tensor, "N C"] = 1e-2,
        memory_budget: int = MEMORY_BUDGET,
    ) -> None:
        if outputs not in ("full", "independent"):
            raise ValueError(f"outputs must be 'full' or 'independent': got {outputs!r}.")
        validate_trajectory(trajectory)
        chosen = _read_points(points, trajectory)
        C, N = trajectory.num_outputs, len(chosen)
        _check_noise(noise, (N, C), targets)
        gram_bytes = 8 * N**2 * (C**2 if outputs == "full" else C)
        kernel = EPKKernel(
            trajectory,
            outputs,
            head,
            rule,
            "mean_diagonal",
            cache_bytes=gram_bytes + CACHE_BYTES,  # fit() must find the Gram matrix again
            memory_budget=memory_budget,
        )
        y, variances = make_targets(trajectory, chosen, targets, head)
        if isinstance(noise, Tensor):
            variances = noise.detach().to(y)
        x = train_copy(trajectory.inputs[chosen].to(torch.float64))
        likelihood = make_likelihood(kernel.batch_shape, C, variances)
        super().__init__(x, y if outputs == "full" else y.mT.contiguous(), likelihood)
        self.points = chosen
        self.mean_module = make_mean(mean, kernel.source)
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=kernel.batch_shape)
        self._noise_is_known = variances is not None
        self._residual_is_zero = mean == "network" and targets == "network"
        self.to(device=trajectory.device, dtype=torch.float64)
        self.covar_module.outputscale = torch.ones_like(self.covar_module.outputscale)
        if not isinstance(noise, Tensor) and variances is None:
            self.likelihood.noise = torch.full_like(self.likelihood.noise, noise)
        self.eval()

    @property
    def kernel(self) -> EPKKernel:
        """The kernel, without its outputscale."""
        kernel: EPKKernel = self.covar_module.base_kernel
        return kernel

    def forward(self, x: Shaped[Tensor, "*b n columns"]) -> MultivariateNormal:
        """Give the prior at tagged points.

        Args:
            x: (*b, n, D + 1).

        Returns:
            Over (n, C) for "full"; over n with batch shape [C] for "independent".
        """
        mean, covariance = self.mean_module(x), self.covar_module(x)
        full = self.kernel.source.reduction == "full"
        return MultitaskMultivariateNormal(mean, covariance) if full else MultivariateNormal(mean, covariance)

    def fit(self, steps: int = 50, lr: float = 0.1, progress: bool = False) -> list[float]:
        """Maximise the exact marginal likelihood over outputscale, noise and constant, with Adam.

        The value is that of GPyTorch's `ExactMarginalLogLikelihood` by Cholesky. The Gram matrix depends on nothing
        that is learned: it is computed and decomposed once, and a step costs next to nothing.

        Args:
            steps: Number of Adam steps.
            lr: Their size.
            progress: Show a progress bar.

        Returns:
            The negative log marginal likelihood per observation before every step (a sum over classes if independent).

        Raises:
            ValueError: The residual is zero by construction, so the likelihood grows without bound as the scale
                shrinks; or the covariance is not positive definite (no jitter is added).
        """
        if self._residual_is_zero:
            raise ValueError(
                "there must be a residual to fit: with mean='network' and targets='network' it is zero, and the "
                "likelihood grows without bound as scale and noise shrink. Fit LogitGP(mean='initial') and load its "
                "covar_module and likelihood states, or set the hyperparameters."
            )
        validate_count(steps, "steps")
        validate_positive(lr, "lr")
        self.train()  # drops GPyTorch's predictions for the old hyperparameters
        self.eval()
        spectrum = self._spectrum()
        optimizer = torch.optim.Adam(self.parameters(), lr=lr)
        losses = []
        for _ in tqdm(range(steps), desc="fit", unit="step", disable=not progress):
            optimizer.zero_grad()
            loss = self._loss(spectrum)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def logit_posterior(
        self, X_test: Shaped[Tensor, "n *shape"], *, block_size: int | None = None, progress: bool = False
    ) -> LogitPosterior:
        """Evaluate the posterior of the latent outputs at test copies.

        Args:
            X_test: n inputs of the network's shape.
            block_size: Test points at a time; from the memory budget by default.
            progress: Show a progress bar.

        Returns:
            Mean (n, C) and covariance (n, C, C), diagonal for "independent", float64. No noise of observations in it.

        Raises:
            TypeError, ValueError: Points that the network cannot take, or a covariance that is not positive definite.
        """
        validate_inputs(self.kernel.trajectory, X_test, "X_test")
        x = test_copy(X_test.to(self.train_inputs[0]))
        with torch.no_grad():
            return posterior_at(self.factorization(), self.prior_mean, x, block_size=block_size, progress=progress)

    def prior_mean(self, x: Shaped[Tensor, "n columns"]) -> Float[Tensor, "n C"]:
        """Evaluate the prior mean at tagged points."""
        mean: Tensor = self.mean_module(x)
        return mean if self.kernel.source.reduction == "full" else mean.mT

    def factorization(self) -> Factorization:
        """Factorise the covariance of the observations, with the hyperparameters as they are."""
        K = self.kernel.source.num_matrices
        outputscale = self.covar_module.outputscale.reshape(K)
        covariance = outputscale[:, None, None] * self._gram()
        covariance.diagonal(dim1=-2, dim2=-1).add_(self.likelihood.noise.reshape(K, -1))
        scale = outputscale / self.kernel.scale
        return factorize(self.kernel.source, scale, self.train_inputs[0], covariance, self._residual())

    def _residual(self) -> Tensor:
        """Observations minus prior mean, (K, rows)."""
        residual: Tensor = self.train_targets - self.mean_module(self.train_inputs[0])
        return residual.reshape(self.kernel.source.num_matrices, -1)

    def _gram(self) -> Tensor:
        """Kernel matrix over the training copies, without outputscale: (K, rows, rows)."""
        (x,) = self.train_inputs
        gram: Tensor = self.kernel.forward(x, x)
        return gram.reshape(self.kernel.source.num_matrices, *gram.shape[-2:])

    def _spectrum(self) -> GramSpectrum:
        K = self.kernel.source.num_matrices
        return spectrum_of(self._gram(), self.likelihood.noise.reshape(K, -1) if self._noise_is_known else None)

    def _loss(self, spectrum: GramSpectrum) -> Tensor:
        K, rows = spectrum.values.shape
        outputscale: Tensor = self.covar_module.outputscale.reshape(K)
        noise = torch.ones_like(outputscale) if self._noise_is_known else self.likelihood.noise.reshape(K)
        loss = negative_log_marginal_likelihood(spectrum, outputscale, noise, self._residual()).sum()
        for _, module, prior, closure, _ in self.named_priors():  # as GPyTorch's marginal likelihood does
            loss = loss - prior.log_prob(closure(module)).sum()
        return loss / rows


def _check_noise(noise: float | Tensor, shape: tuple[int, int], targets: TargetKind) -> None:
    if not isinstance(noise, Tensor):
        if not NOISE_FLOOR < noise < float("inf"):
            raise ValueError(f"noise must be a finite variance above {NOISE_FLOOR}: got {noise}.")
    elif targets == "dirichlet":
        raise ValueError("noise must not be given with targets='dirichlet': the transformed labels bring their own.")
    elif noise.shape != shape:
        raise ValueError(f"noise must be one variance per point and output {shape}: got shape {tuple(noise.shape)}.")


def _read_points(points: Tensor | Sequence[int] | None, trajectory: Trajectory) -> Int[Tensor, " N"]:
    M = trajectory.inputs.shape[0]
    if points is None:
        return torch.arange(M, device=trajectory.device)
    try:
        if not isinstance(points, Tensor | Sequence | range | np.ndarray):
            raise TypeError("one index, or none")
        chosen = torch.as_tensor(points, device=trajectory.device)
    except (TypeError, ValueError, RuntimeError) as error:
        raise TypeError(f"points must be a list or tensor of indices of training points: got {points!r}.") from error
    if len(chosen) and (chosen.is_floating_point() or chosen.dtype == torch.bool):
        raise TypeError(f"points must be indices: got {chosen.dtype}. Turn a mask into mask.nonzero()[:, 0].")
    if chosen.ndim != 1 or not len(chosen):
        raise ValueError(f"points must be a list of at least one index: got shape {tuple(chosen.shape)}.")
    low, high = int(chosen.min()), int(chosen.max())
    if low < 0 or high >= M:
        raise ValueError(f"points must lie in 0..{M - 1} (the training points): got {low}..{high}.")
    if len(chosen.unique()) < len(chosen):
        repeated = len(chosen) - len(chosen.unique())
        raise ValueError(f"points must not repeat: got {repeated} repeated indices. Use points.unique().")
    return chosen.long()
