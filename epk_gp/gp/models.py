"""GP regression on logits with the exact path kernel as prior covariance: section 4.2, Bell et al. (2023)."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log, pi
from typing import Literal, NoReturn, Unpack, final

import gpytorch
import torch
from gpytorch.distributions import MultivariateNormal
from jaxtyping import Float, Int, Shaped
from linear_operator import to_linear_operator
from torch import Tensor

from epk_gp.core.checks import ComputeSettings, door, parse_options, validate_count, validate_number, validate_positive
from epk_gp.core.inputs import Inputs
from epk_gp.core.losses import Head, resolve_head
from epk_gp.core.plans import posterior_points
from epk_gp.core.show import new_bar, tracked
from epk_gp.core.trajectory import Trajectory, parse_inputs, validate_trajectory
from epk_gp.gp.data import TargetKind, make_targets, parse_train_indices, validate_known
from epk_gp.gp.output_coupling import NOISE_FLOOR, Coupling, NetworkMean, OutputCoupling, PriorMean, make_mean
from epk_gp.gp.posterior import LogitPosterior, link_of
from epk_gp.gram.sketch import nodes_trajectory
from epk_gp.kernels.blocks import BlockCache
from epk_gp.kernels.epk import CACHE_BYTES, NORMALIZATION_POINTS, UNSUPPORTED_OPTIONS, EPKKernel, mean_diagonal
from epk_gp.kernels.tagging import PointSets, as_test_points, parse_points, tag_points, train_copy, validate_batches
from epk_gp.kernels.values import kernel_values, normalized_block, point_blocks
from epk_gp.quadrature.rules import QuadratureRule, WeightPath, gauss_legendre, straight


@door
@final
class LogitGP(gpytorch.models.ExactGP):  # type: ignore[misc]  # gpytorch ships no types
    """A Gaussian process over the network's outputs, conditioned on training points.

    The prior is mean + outputscale * EPK, with the kernel normalised to (mean) diagonal 1 (its raw scale is arbitrary).
    All computation is in float64. Call `fit`, then `logit_posterior`; `gp(X)`, X flattened, in evaluation mode is the
    same posterior in GPyTorch's terms, which joins the points. Both are conditioned again in each call, by Cholesky for
    any number of rows, with the present hyperparameters and targets. In training mode `gp(X)` is the prior, for
    GPyTorch's own marginal likelihood, which is an estimate from 800 rows on; `fit` does not estimate.

    The posterior mean of a GP is not the network. With mean="network" and targets="network" it is: the residual is
    zero, and the covariance is that of the exact path kernel around the given network. Nothing can be learned from a
    zero residual, so take the hyperparameters from a GP with another mean:

        gp = LogitGP(trajectory)
        gp.fit()
        fixed = LogitGP(trajectory, mean="network")
        fixed.covar_module.load_state_dict(gp.covar_module.state_dict())
        fixed.likelihood.load_state_dict(gp.likelihood.state_dict())

    Args:
        trajectory: Training run with C outputs.
        outputs: "full" - one process whose C outputs covary; "independent" - one process per output, each with its own
            outputscale and noise; "trace" - one process per output, all with the scalar kernel sum_c K(x, x')[c, c],
            one outputscale and one noise, so that one factorisation of N rows serves all.
        mean: "initial" (f_{w_0}, the b of the kernel machine), "constant" (learned, one per output), "zero" (for
            targets="labels"), "network".
        targets: "network" - the trained network's outputs at the points (the paper); "dirichlet" - transformed labels
            with known noise (Milios et al. 2018); "labels" - the run's own targets: one-hot class labels minus 1 / C,
            or the real targets of a regression, with mean="zero" minus their mean (`target_mean`).
        points: Indices of the training points to condition on; all by default.
        head: "logits" or "log_softmax"; None follows the run's loss (`EPKKernel`).
        rule: Quadrature rule.
        path: The path of test points (`EPKKernel`). `chords(every=k)` evaluates them once for k steps.
        nodes: Number of nodes of the whole path that represent all its steps in the kernel, for training and test
            points (`epk_gp.gram.sketch.nodes_trajectory`), with one evaluation at each: this makes maps of many points
            cheap. None for all steps, by the rule; with nodes there is no rule.
        normalize: "mean_diagonal", or "cosine" (`EPKKernel`).
        noise: Initial noise variance, relative to the kernel's mean diagonal; it is learned. Not used with
            targets="dirichlet", whose variances are known.
        options: `memory_budget`, for kernel blocks and posteriors, without the factorisation; see `ComputeOptions`.

    Threads may share a process as long as none of them changes it (`fit`).

    Attributes:
        coupling: The structure of the process over C outputs.
        train_inputs: One tensor of N training copies, (N, D + 1).
        train_targets: (N, C) for "full", (C, N) for "independent" and "trace".
        target_mean: The mean that was subtracted from the labels, (C,): add it to predictions. Zero for other targets.
        points: The N indices.
        trajectory: The run; with nodes, `kernel.trajectory` is the run of the nodes.

    Raises:
        TypeError: `points` are not indices, `noise` is not a number, or an option is unknown.
        ValueError: An argument has an unknown value, `points` are out of range or repeated, targets="dirichlet" is
            requested without class labels, or there are nodes and a rule.
    """

    def __init__(
        self,
        trajectory: Trajectory,
        outputs: Coupling = "full",
        mean: PriorMean = "initial",
        targets: TargetKind = "network",
        points: Int[Tensor, " N"] | Sequence[int] | None = None,
        *,
        head: Head | None = "logits",
        rule: QuadratureRule = gauss_legendre(4),
        path: WeightPath = straight(),
        nodes: int | None = None,
        normalize: Literal["cosine", "mean_diagonal"] = "mean_diagonal",
        noise: float = 1e-2,
        **options: Unpack[ComputeSettings],
    ) -> None:
        validate_trajectory(trajectory)
        parse_options("LogitGP", UNSUPPORTED_OPTIONS, **options)
        head = resolve_head(head, trajectory.loss, trajectory.num_outputs)
        coupling = OutputCoupling(outputs, trajectory.num_outputs)
        validate_number(noise, "noise")
        if not NOISE_FLOOR < noise < float("inf"):
            raise ValueError(f"noise must be a finite variance above {NOISE_FLOOR}: got {noise}.")
        train_indices = parse_train_indices(points, trajectory)
        run, rule, path = _run_of_nodes(trajectory, nodes, rule, path)
        rows = train_copy(trajectory.inputs[train_indices].reshape(len(train_indices), -1).to(torch.float64))
        y, variances, target_mean = make_targets(trajectory, train_indices, targets, head, prior_is_zero=mean == "zero")
        super().__init__(rows, coupling.to_gpytorch(y), coupling.likelihood(variances))
        self._parsed = parse_points(run, self.train_inputs[0])
        self._parsed_version = self.train_inputs[0]._version
        kernel = _kernel_of_gram(run, coupling, head, rule, path, normalize, self._parsed, **options)
        self.trajectory, self.points, self.coupling, self.target_mean = trajectory, train_indices, coupling, target_mean
        self.covar_module = gpytorch.kernels.ScaleKernel(kernel, batch_shape=kernel.batch_shape)
        self.mean_module = make_mean(mean, kernel.config, coupling, trajectory)
        self._noise_is_known = variances is not None
        self._residual_is_zero = mean == "network" and targets == "network"
        self.to(device=trajectory.device, dtype=torch.float64)
        self.covar_module.outputscale = torch.ones_like(self.covar_module.outputscale)
        if not self._noise_is_known:
            self.likelihood.noise = torch.full_like(self.likelihood.noise, noise)
        self.eval()

    @property
    def kernel(self) -> EPKKernel:
        """The kernel, without its outputscale."""
        kernel: EPKKernel = self.covar_module.base_kernel
        return kernel

    def __call__(self, *args: Shaped[Tensor, "*b n columns"]) -> MultivariateNormal:
        """Evaluate as GPyTorch does: the prior in training mode, otherwise the posterior.

        Args:
            args: One tensor of points, (*b, n, D + 1), or (*b, n, D) for test copies.

        Raises:
            TypeError: The points are not a tensor, or the network cannot take points of this kind.
            ValueError: There is not exactly one argument, the points are neither flattened inputs nor made with
                `train_copy` or `test_copy`, their batch does not fit the processes, or in training mode they are not
                the training points; or the process cannot be conditioned (`factorize`).
        """
        if len(args) != 1:
            raise ValueError(f"a LogitGP must be called with one tensor of points: got {len(args)} arguments.")
        x = parse_points(self.trajectory, args[0], self.train_inputs[0].dtype)
        validate_batches(self.coupling.batch_shape, x.rows)
        if self.training and not torch.equal(x.rows, self.train_inputs[0]):
            raise ValueError("in training mode call a LogitGP with gp.train_inputs[0]; to predict, gp.eval() first.")
        if self.training or gpytorch.settings.prior_mode.on():
            return super().__call__(x.rows)
        # GPyTorch would keep results of earlier hyperparameters, and approximate from 800 rows on
        (L, weights), scale = self.factorize(), self._scale().reshape(*self.kernel.batch_shape, 1, 1)
        mean, cross = self._mean(x), scale * self._values(self._train_points(), x)
        V = torch.linalg.solve_triangular(L.reshape(self.kernel.batch_shape + L.shape[1:]), cross, upper=False)
        update = cross.mT @ weights.reshape(*self.coupling.batch_shape, -1, 1)
        covariance = to_linear_operator(scale * self._values(x, x) - V.mT @ V)
        return self.coupling.distribution(mean + update.reshape(mean.shape), covariance)

    def set_train_data(
        self,
        inputs: Shaped[Tensor, "..."] | Sequence[Shaped[Tensor, "..."]] | None = None,
        targets: Shaped[Tensor, "..."] | None = None,
        strict: bool = True,
    ) -> None:
        """Change the targets, as GPyTorch does; the training points stay those of `points`.

        Args:
            inputs: None.
            targets: Targets in the form of `train_targets`.
            strict: Whether to require the targets' shape, dtype and device, as in GPyTorch.

        Raises:
            ValueError: There are inputs.
            RuntimeError: The targets do not meet the requirements of `strict`.
        """
        if inputs is not None:
            raise ValueError("a LogitGP keeps its points: got inputs. Make another, LogitGP(trajectory, points=...).")
        super().set_train_data(targets=targets, strict=strict)
        self._residual_is_zero = self._residual_is_zero and targets is None

    def get_fantasy_model(self, *args: object, **kwargs: object) -> NoReturn:
        """Raise a ValueError: a `LogitGP` keeps its points."""
        raise ValueError("a LogitGP keeps its points: make another, LogitGP(trajectory, points=...).")

    def forward(self, x: Shaped[Tensor, "*b n columns"]) -> MultivariateNormal:
        """Return the prior.

        Args:
            x: (*b, n, D + 1), or (*b, n, D) for test copies.

        Returns:
            Over (n, C) for "full"; over n with batch shape [C] for "independent" and "trace".

        Raises:
            TypeError, ValueError: As in a call.
        """
        x = tag_points(self.trajectory, x)  # before GPyTorch's mean, which has its own error
        return self.coupling.distribution(self.mean_module(x), self.covar_module(x))

    @torch.enable_grad()
    def fit(self, steps: int = 50, lr: float = 0.1, progress: bool = False) -> list[float]:
        """Maximise the exact marginal likelihood over outputscale, noise and constant, with Adam.

        The value is that of GPyTorch's `ExactMarginalLogLikelihood` by Cholesky. The Gram matrix, and a prior mean
        without parameters, do not depend on the learned parameters: both are evaluated once, and a step costs little.

        Args:
            steps: Number of Adam steps.
            lr: Learning rate of Adam.
            progress: Show a progress bar.

        Returns:
            The negative log marginal likelihood per observation before every step (a sum over outputs if they do not
            covary).

        Raises:
            TypeError: `steps` is not an integer, or `lr` is not a number.
            ValueError: `steps` or `lr` is not positive; the residual is always zero, so that the likelihood
                grows without bound as the scale shrinks; or the covariance is not positive definite (no jitter is
                added).
        """
        if self._residual_is_zero:
            raise ValueError(
                "there must be a residual to fit: with mean='network' and targets='network' it is zero, and the "
                "likelihood grows without bound as scale and noise shrink. Fit LogitGP(mean='initial') and load its "
                "covar_module and likelihood states, or set the hyperparameters."
            )
        validate_count(steps, "steps")
        validate_positive(lr, "lr")
        self.eval()
        spectrum, squares = self._spectrum(), None
        if not any(p.requires_grad for p in self.mean_module.parameters()):  # the residual is constant
            squares = spectrum.squares(self._residual())
        optimizer = torch.optim.Adam(self.parameters(), lr=lr)
        losses = []
        for _ in tracked(range(steps), "fit", unit="step", shown=progress):
            optimizer.zero_grad()
            loss = self._loss(spectrum, spectrum.squares(self._residual()) if squares is None else squares)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def logit_posterior(self, X_test: Inputs, *, progress: bool = False) -> LogitPosterior:
        """Evaluate the posterior of the latent outputs at test copies.

        Args:
            X_test: n inputs, with the structure of the training inputs.
            progress: Show a progress bar.

        Returns:
            Mean (n, C) and covariance (n, C, C), diagonal unless "full", float64, without the noise of observations.

        Raises:
            TypeError: The network cannot take points of this kind.
            ValueError: The points have a shape or values that the network cannot take, or the observations' covariance
                is not positive definite.
        """
        X = parse_inputs(self.trajectory, X_test, "X_test")
        X = X.to(self.train_inputs[0]) if X.is_floating_point() else X.to(self.train_inputs[0].device)
        return self._posterior(as_test_points(X, torch.float64), progress)

    def posterior_at(self, x: Shaped[Tensor, "n columns"], *, progress: bool = False) -> LogitPosterior:
        """Evaluate the posterior of the latent outputs at points, (n, D + 1), whose copy column marks their kind.

        Raises:
            TypeError, ValueError: As in `logit_posterior`.
        """
        return self._posterior(parse_points(self.trajectory, x, self.train_inputs[0].dtype), progress)

    def _posterior(self, x: PointSets, progress: bool) -> LogitPosterior:
        """Evaluate the posterior block by block: factorise once, and never build a matrix over all test points.

        Section 4.2, Bell et al. (2023), with equations (2.25) and (2.26) of Rasmussen & Williams (2006):

            mean(x) = m(x) + k(x)^T (K + noise)^-1 (y - m),   cov(x) = K(x, x) - k(x)^T (K + noise)^-1 k(x)
        """
        coupling, own = self.coupling, self._train_points()
        config = replace(self.kernel.config, cache=BlockCache(0))  # blocks with test points are not needed again
        means, covariances, variances = [], [], []
        with torch.no_grad(), new_bar(None, "posterior", shown=progress, total=x.count, unit="point") as bar:
            factor, weights = self.factorize()
            own_norms = point_blocks(self.kernel.config, own)[1] if config.is_cosine else None
            per_point, budget = coupling.num_matrices * coupling.rows_per_point, config.options.memory_budget
            size = posterior_points(budget, factor.element_size(), per_point, factor.shape[-1])
            for number, some in enumerate(x.split(size)):
                blocks, norms = point_blocks(config, some, first=number * size)
                prior = coupling.covariances(self._scale()[:, None, None] * blocks)
                mean_update, covariance_update = self._updates(
                    normalized_block(config, some, own, (norms, own_norms)), factor, weights
                )
                means.append(coupling.from_rows(self._rows(self._mean(some))) + mean_update)
                covariances.append(prior - covariance_update)
                variances.append(prior.diagonal(dim1=-2, dim2=-1).clone())
                bar.update(some.count)
        variance, link = torch.cat(variances), link_of(self.trajectory)
        tolerance = factor.shape[-1] * torch.finfo(factor.dtype).eps * max(0.0, float(variance.max()))
        return LogitPosterior(torch.cat(means), torch.cat(covariances), tolerance, link, variance)

    def _updates(self, cross: Tensor, factor: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the observations' addition to the mean, (n, C), and their reduction of the covariance, (n, C, C).

        The large arrays exist only in this function: those of one block of test points are freed before the next block.
        """
        cross.mul_(self._scale()[:, None, None])
        updates = (cross @ _by_matrix(weights, len(cross))).mT.reshape(len(weights), -1)  # (B, n R)
        V = torch.linalg.solve_triangular(factor, cross.mT, upper=False)  # (K, N R, n R)
        return self.coupling.from_rows(updates), self.coupling.point_blocks_of_gram(V)

    def prior_mean(self, x: Shaped[Tensor, "n columns"]) -> Float[Tensor, "n C"]:
        """Evaluate the prior mean at points with or without the copy column."""
        return self.coupling.from_rows(self._rows(self.mean_module(x)))

    def target_rows(self) -> Float[Tensor, "B rows"]:
        """Return the targets as rows of the kernel's matrices."""
        return self._rows(self.train_targets)

    def noise_rows(self) -> Float[Tensor, "B rows"]:
        """Return the noise variance of every target, as rows of the kernel's matrices."""
        noise: Tensor = self.likelihood.noise
        variances = self._rows(noise) if noise.numel() > 1 else noise.reshape(1, 1)
        return variances.expand(self.target_rows().shape)

    def factorize(self) -> tuple[Float[Tensor, "K rows rows"], Float[Tensor, "B rows"]]:
        """Factorise the covariance of the observations, with the present hyperparameters.

        Returns:
            The lower Cholesky factors of scale * K + noise, one per output or one for all of them, and the weights
            (scale * K + noise)^-1 (targets - mean), in the arrangement of `OutputCoupling`.

        Raises:
            ValueError: The covariance is not positive definite (no jitter is added), or a target is not finite.
        """
        gram, scale = self._gram(), self.covar_module.outputscale.reshape(-1)[:, None, None]
        covariance = gram * scale if torch.is_grad_enabled() else gram.mul_(scale)
        covariance.diagonal(dim1=-2, dim2=-1).add_(self.noise_rows()[: len(covariance)])
        factor, info = torch.linalg.cholesky_ex(covariance)
        if info.any():
            raise ValueError(
                f"the observations' covariance must be positive definite in {covariance.dtype}: Cholesky stopped at "
                f"row {int(info.max())} of {covariance.shape[-1]}. Raise the noise, or condition on fewer points."
            )
        residual = self._residual()
        return factor, torch.cholesky_solve(_by_matrix(residual, len(factor)), factor).mT.reshape(residual.shape)

    def _scale(self) -> Tensor:
        """Return the scale of the kernel values, one number per matrix."""
        scale: Tensor = self.covar_module.outputscale.reshape(-1) / self.kernel.scale
        return scale

    def _rows(self, values: Tensor) -> Tensor:
        """Arrange values in GPyTorch's layout as rows of the kernel's matrices, (B, rows)."""
        return values.reshape(self.coupling.batch_shape.numel(), -1)

    def _residual(self) -> Tensor:
        """Subtract the prior mean from the targets, (B, rows)."""
        validate_known(self.coupling.from_rows(self.target_rows()).isfinite(), self.points)
        return self._rows(self.train_targets - self._mean(self._train_points()))

    def _train_points(self) -> PointSets:
        """Return the training copies; they are parsed again after they were moved or edited."""
        (rows,) = self.train_inputs
        if self._parsed.rows is not rows or self._parsed_version != rows._version:
            self._parsed, self._parsed_version = parse_points(self.trajectory, rows), rows._version
        return self._parsed

    def _mean(self, x: PointSets) -> Tensor:
        """Evaluate the prior mean, in GPyTorch's layout."""
        mean: Tensor = self.mean_module.at(x) if isinstance(self.mean_module, NetworkMean) else self.mean_module(x.rows)
        return mean

    def _values(self, x: PointSets, y: PointSets) -> Tensor:
        """Evaluate the kernel without any scale, (*b, rows, cols) with the batch b of the kernel."""
        return kernel_values(self.kernel.config, x, y, self.coupling.matrices.to(x.X.device))

    def _gram(self) -> Tensor:
        """Evaluate the kernel matrix over the training copies, without outputscale: (K, rows, rows)."""
        own = self._train_points()
        gram = self._values(own, own).div_(self.kernel.scale)
        return gram.reshape(-1, *gram.shape[-2:])

    def _spectrum(self) -> "_Spectrum":
        """Decompose the kernel matrix over the training copies.

        A Cholesky factorisation with its gradient takes seconds for 3000 rows, in every step of an optimizer; with the
        spectrum a step needs no matrix product.
        """
        gram = self._gram()
        if self._noise_is_known:
            whitening = self._rows(self.likelihood.noise).rsqrt()
            gram = whitening[..., :, None] * gram * whitening[..., None, :]
        else:
            whitening = gram.new_ones(gram.shape[:-1])
        values, vectors = torch.linalg.eigh(gram)  # negative eigenvalues are rounding errors
        return _Spectrum(values, vectors, whitening)

    def _loss(self, spectrum: "_Spectrum", squares: Float[Tensor, "K rows"]) -> Float[Tensor, ""]:
        """Evaluate -log N(residual; 0, outputscale * G + noise) per observation: (2.30) of Rasmussen & Williams."""
        K, rows = spectrum.values.shape
        outputscale: Tensor = self.covar_module.outputscale.reshape(K)
        noise = torch.ones_like(outputscale) if self._noise_is_known else self.likelihood.noise.reshape(K)
        variances = outputscale[:, None] * spectrum.values + noise[:, None]
        lowest = variances.detach().min()
        if not lowest > 0:
            raise ValueError(
                "the observations' covariance must be positive definite: its smallest eigenvalue is "
                f"{lowest.item():.3g}. Raise the noise, or condition on fewer points."
            )
        log_determinants = variances.log().sum(-1) - 2 * spectrum.whitening.log().sum(-1)
        per_matrix = self.coupling.batch_shape.numel() // K  # residuals that share a matrix
        loss = 0.5 * ((squares / variances).sum() + per_matrix * (log_determinants + rows * log(2 * pi)).sum())
        for _, module, prior, closure, _ in self.named_priors():  # as in GPyTorch's marginal likelihood
            loss = loss - prior.log_prob(closure(module)).sum()
        return loss / rows


@dataclass(frozen=True, eq=False)
class _Spectrum:
    """K matrices as W G W = Q diag(v) Q^T, with W = D^(-1/2) for known noise D, otherwise the identity.

    Attributes:
        values: v, (K, rows).
        vectors: Q, (K, rows, rows).
        whitening: The diagonal of W, (K, rows).
    """

    values: Float[Tensor, "K rows"]
    vectors: Float[Tensor, "K rows rows"]
    whitening: Float[Tensor, "K rows"]

    def squares(self, residual: Float[Tensor, "B rows"]) -> Float[Tensor, "K rows"]:
        """Return the squares of Q^T W r, summed over the B / K residuals r of each matrix."""
        by_matrix = residual.reshape(len(self.values), -1, residual.shape[-1])
        return ((self.whitening[:, None] * by_matrix) @ self.vectors).square().sum(1)


def _run_of_nodes(
    trajectory: Trajectory, nodes: int | None, rule: QuadratureRule, path: WeightPath
) -> tuple[Trajectory, QuadratureRule, WeightPath]:
    """Return the run of the kernel, with its rule and path; nodes form a run without a path of its own."""
    if nodes is None:
        return trajectory, rule, path
    if rule != gauss_legendre(4):
        raise ValueError(f"a node is taken once, which leaves a rule no part: got nodes={nodes} and {rule!r}.")
    return nodes_trajectory(trajectory, nodes, path=path), QuadratureRule.left_endpoint(), straight()


def _kernel_of_gram(
    run: Trajectory,
    coupling: OutputCoupling,
    head: Head,
    rule: QuadratureRule,
    path: WeightPath,
    normalize: Literal["cosine", "mean_diagonal"],
    x: PointSets,
    **options: Unpack[ComputeSettings],
) -> EPKKernel:
    """Return a normalised kernel that keeps its matrix over N training copies, for `fit` and every factorisation.

    If these are all training copies, the mean diagonal is that of the matrix.
    """
    if normalize not in ("cosine", "mean_diagonal"):
        raise ValueError(f"normalize must be 'cosine' or 'mean_diagonal': got {normalize!r}.")
    cache_bytes = CACHE_BYTES + 8 * coupling.num_matrices * (coupling.rows_per_point * x.count) ** 2
    has_diagonal = normalize == "mean_diagonal" and x.count == run.num_points <= NORMALIZATION_POINTS
    of_kernel = None if has_diagonal else normalize
    kernel = EPKKernel(run, coupling.kind, head, rule, of_kernel, path=path, cache_bytes=cache_bytes, **options)
    if has_diagonal:
        kernel.scale = mean_diagonal(kernel.config.block(x, x).diagonal(dim1=-2, dim2=-1))
    return kernel


def _by_matrix(rows: Tensor, num_matrices: int) -> Tensor:
    """Arrange B vectors of rows as the columns of right-hand sides, (K, rows, B / K)."""
    return rows.reshape(num_matrices, -1, rows.shape[-1]).mT


def validate_gp(gp: object) -> None:
    """Raise if an object is not a `LogitGP`.

    Raises:
        TypeError: It is another object.
    """
    if not isinstance(gp, LogitGP):
        raise TypeError(f"gp must be a LogitGP: got {type(gp).__name__}. Make one with epk_gp.LogitGP(trajectory).")
