"""The exact path kernel as a GPyTorch kernel."""

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Literal, Unpack, cast

import gpytorch
import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor

from epk_gp.core.checks import ComputeSettings, door, parse_options, validate_positive
from epk_gp.core.losses import Head
from epk_gp.core.trajectory import Trajectory, validate_trajectory
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.kernels.blocks import BlockCache, KernelConfig, Outputs, parse_outputs
from epk_gp.kernels.tagging import parse_points, tag_points, train_copy, validate_batches
from epk_gp.kernels.values import kernel_values
from epk_gp.quadrature import rules

Normalization = Literal["cosine", "mean_diagonal"] | float | int | None

# Largest number of training copies whose diagonal is averaged. The relative standard error of the mean of 1000 is 1/32
# of the diagonal's relative spread: enough for an arbitrary scale, at a cost that does not grow with the training set.
NORMALIZATION_POINTS = 1000


def mean_diagonal(diagonal: Float[Tensor, "..."]) -> float:
    """Return the divisor of a kernel's values that gives a mean diagonal of 1.

    Raises:
        ValueError: The mean diagonal is not positive.
    """
    scale = float(diagonal.mean())
    if not scale > 0:
        raise ValueError(
            f"the mean diagonal over the training copies must be positive to divide by it: got {scale}. "
            "Use a run whose learning rates, those of the first parameter group, are not all 0."
        )
    return scale


CACHE_BYTES = 512 * 2**20  # size of the blocks that a kernel keeps: a float64 matrix of 8192 rows

UNSUPPORTED_OPTIONS = ("progress", "checkpoint", "accumulate")  # GPyTorch calls a kernel many times, for small blocks


@door
class EPKKernel(gpytorch.kernels.Kernel):  # type: ignore[misc]  # gpytorch ships no types
    """The exact path kernel between training and test copies (Definition 3.4 and Theorem 3.7, Bell et al. 2023).

    Points are rows of flattened inputs, which are test copies; or rows made with `train_copy` and `test_copy`: the
    flattened input, then the copy column. The kernel has nothing to learn: the network's weights are not parameters of
    the kernel. Values have the dtype of the points, and each block is computed once (see `BlockCache`). They can be
    differentiated with respect to the points, once and in reverse mode (a second derivative raises a RuntimeError,
    `torch.func` a TypeError); the copy column gets the gradient 0. A state dict holds the run's digest: it loads only
    into a kernel of the same run.

    In a sum or product the other kernel should not see the copy column, in which the two copies of one input differ by
    6e-6: `kernel * RBFKernel(active_dims=kernel.input_dims)`.

    Threads may share a kernel. Its cache keeps no block of a failed computation, and none of points that were edited
    during the computation.

    Derivatives are computed again in every backward pass. Measured: a variational step that learns its inducing points
    takes 2.3 to 4.3 times as long as one with fixed points, whose own block is kept, or 3.2 to 9 times for cosines.
    Points that are joined with others, such as training with test points in a posterior, are skipped if nobody uses
    their gradient; if the joint tensor retains its own gradient, it is NaN there. Inducing points that all classes
    share are differentiated as one set. Parameters outside layers are differentiated sample by sample: such networks
    take many times longer; use fewer points or steps.

    Args:
        trajectory: Training run with C outputs.
        outputs: The part of the C x C block K(x, x') of two points that the kernel uses:
            "full" - the whole block. A Gram matrix has n * C rows; row i * C + k is class k of point i.
            "independent" - one kernel per class, K(x, x')[c, c], as a batch of shape [C].
            "trace" - sum_c K(x, x')[c, c], one scalar kernel.
            an integer c - K(x, x')[c, c].
        head: "logits" or "log_softmax"; None follows the loss: "log_softmax" for cross entropy, otherwise "logits".
        rule: Quadrature rule.
        path: The path of test copies. `chords(every=k)` evaluates them once for k steps: another kernel of the run,
            also positive semi-definite.
        normalize: None; a positive number to divide by; "mean_diagonal", the mean diagonal of this kernel (over points
            and, for "full" and "independent", classes) on at most 1000 evenly spaced training copies; or "cosine",
            which divides each row and column by the square root of the kernel's own diagonal there. Every matrix of
            cosines is a correlation matrix with a diagonal of exactly 1.
        cache_bytes: Limit for the kept blocks; 0 keeps none.
        active_dims: Columns of wider inputs to use; the copy column, if there is one, last.
        options: `memory_budget`, see `ComputeOptions`.

    Attributes:
        config: The shared part of all copies of the kernel.
        outputs: The argument `outputs`.
        scale: Divisor of all values; 1.0 without normalization and for cosines.

    Raises:
        TypeError: `outputs`, `rule`, `path` or `normalize` has a wrong type, or an option is unknown.
        ValueError: `outputs`, `head` or `normalize` is unknown, or the class does not exist.
    """

    _source: ClassVar[str] = "run"  # origin of the kernel

    def __init__(
        self,
        trajectory: Trajectory,
        outputs: Outputs = "full",
        head: Head | None = None,
        rule: rules.QuadratureRule = rules.gauss_legendre(4),
        normalize: Normalization = None,
        *,
        path: rules.WeightPath = rules.straight(),
        cache_bytes: int = CACHE_BYTES,
        active_dims: Sequence[int] | None = None,
        **options: Unpack[ComputeSettings],
    ) -> None:
        validate_trajectory(trajectory)
        parsed = parse_options("EPKKernel", UNSUPPORTED_OPTIONS, **options)
        structure, matrices = parse_outputs(outputs, trajectory.num_outputs)
        path_kernel = PathKernel(trajectory, head, rule, path=path)
        rules.require_integrable(path, "EPKKernel")
        if not isinstance(rule, rules.QuadratureRule):
            raise TypeError(f"a kernel needs the same nodes at all points, as in gauss_legendre(4): got {rule!r}.")
        is_named = normalize is None or isinstance(normalize, str)
        if not is_named:
            validate_positive(normalize, "normalize, if it is not None, 'cosine' or 'mean_diagonal',")
        elif normalize not in (None, "cosine", "mean_diagonal"):
            known = "None, 'cosine', 'mean_diagonal' or a positive number"
            raise ValueError(f"normalize must be {known}: got {normalize!r}.")
        super().__init__(batch_shape=matrices.shape, active_dims=active_dims)
        self.outputs = outputs if isinstance(outputs, str) else int(outputs)
        self.config = KernelConfig(path_kernel, structure, parsed, BlockCache(cache_bytes), normalize == "cosine")
        # GPyTorch indexes and expands a kernel through its buffers: each has exactly the batch's shape.
        self.register_buffer("_matrices", matrices, persistent=False)
        self.register_buffer("_anchor", torch.zeros(matrices.shape, dtype=trajectory.dtype), persistent=False)
        self.to(trajectory.device)
        self.scale = 1.0 if is_named else float(cast(float, normalize))
        if normalize == "mean_diagonal":
            inputs = trajectory.inputs
            count = min(len(inputs), NORMALIZATION_POINTS)
            spread = inputs[torch.arange(count, device=inputs.device) * len(inputs) // count]
            x = parse_points(trajectory, train_copy(spread.reshape(count, -1).to(torch.float64)))
            self.scale = mean_diagonal(kernel_values(self.config, x, x, self._matrices, diag=True))

    @property
    def trajectory(self) -> Trajectory:
        """The run."""
        return self.config.trajectory

    @property
    def dtype(self) -> torch.dtype:
        """The weights' dtype until `.to` changes it. Values follow the points."""
        kinds = {self._anchor.dtype, *(p.dtype for p in self.parameters())}
        if len(kinds) > 1:
            raise RuntimeError(f"The kernel's parameters have multiple dtypes: {kinds}.")
        return self._anchor.dtype  # type: ignore[no-any-return]

    @property
    def device(self) -> torch.device:
        """The trajectory's device until `.to` changes it. Values follow the points."""
        return self._anchor.device  # type: ignore[no-any-return]

    @property
    def input_dims(self) -> tuple[int, ...]:
        """Columns of the inputs, without the copy column."""
        return tuple(range(torch.Size(self.trajectory.input_shape).numel()))

    def num_outputs_per_input(self, x1: Tensor, x2: Tensor) -> int:
        """Count the rows per point: C for outputs="full", otherwise 1."""
        return self.config.structure.rows_per_point

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """List the buffers that have the batch's shape; `active_dims` has another, and GPyTorch would index it."""
        for name, buffer in super().named_buffers(*args, **kwargs):
            if name.rpartition(".")[2] != "active_dims":
                yield name, buffer

    def __call__(
        self,
        x1: Shaped[Tensor, "*b n columns"],
        x2: Shaped[Tensor, "*c m other_columns"] | None = None,
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Any:
        """Evaluate lazily, as every GPyTorch kernel. Points are checked here: in `forward` an error would come late."""
        widths = {x.shape[-1:] if isinstance(x, Tensor) else None for x in (x1, x2) if x is not None}
        has_widths = len(widths) > 1 or None in widths  # GPyTorch compares them
        if has_widths or gpytorch.settings.lazily_evaluate_kernels.on():
            points = [x1] if x2 is None or x2 is x1 else [x1, x2]
            if self.active_dims is not None:
                points = [x.index_select(-1, self.active_dims) for x in points]
            tagged = [tag_points(self.trajectory, x) for x in points]
            validate_batches(self._matrices.shape, *points)
            x1, x2 = tagged if has_widths else (x1, x2)
        if diag:  # GPyTorch takes (C, n) for a matrix if n = C and the points have no batch
            x1 = x1[(None,) * (self._matrices.ndim + 2 - x1.ndim)]
            x2 = x2 if x2 is None else x2[(None,) * (self._matrices.ndim + 2 - x2.ndim)]
        return super().__call__(x1, x2, diag=diag, last_dim_is_batch=last_dim_is_batch, **params)

    def forward(
        self,
        x1: Shaped[Tensor, "*b n columns"],
        x2: Shaped[Tensor, "*c m other_columns"],
        diag: bool = False,
        last_dim_is_batch: bool = False,
        **params: Any,
    ) -> Float[Tensor, "*d rows"] | Float[Tensor, "*d rows cols"]:
        """Evaluate the kernel, or its diagonal.

        Args:
            x1: (*b, n, D + 1), or (*b, n, D) for test copies.
            x2: (*c, m, D + 1) or (*c, m, D); b, c and the kernel's batch shape broadcast to d.
            diag: Whether to compute only the diagonal, for n = m.
            last_dim_is_batch: Must be False: a column of a point is not a point.
            params: Ignored.

        Returns:
            (*d, n * R, m * R), or (*d, n * R) with `diag`; R = C for outputs="full", otherwise 1.

        Raises:
            TypeError: The kernel cannot take points of this kind, or they are inside a transformation of `torch.func`,
                or have a forward-mode tangent.
            ValueError: The kernel cannot take the points, or, for cosines, the kernel of a point with itself is zero.
        """
        if last_dim_is_batch:
            raise ValueError("last_dim_is_batch must be False: got True, but a single column of a point is no point.")
        x = parse_points(self.trajectory, x1)
        y = x if x2 is x1 else parse_points(self.trajectory, x2)
        validate_batches(self._matrices.shape, x.rows, y.rows)
        if diag and x.count != y.count:
            raise ValueError(f"diag=True needs as many rows as columns: got {x.count} and {y.count} points.")
        values = kernel_values(self.config, x, y, self._matrices.to(x1.device), diag=diag)
        return values if self.scale == 1 else values / self.scale

    def get_extra_state(self) -> UInt8[Tensor, " bytes"]:
        """Return the run's digest for the state dict: a tensor, as BoTorch copies state dicts entry by entry."""
        return torch.tensor(list(bytes.fromhex(self.trajectory.digest)), dtype=torch.uint8)

    def set_extra_state(self, state: Shaped[Tensor, " bytes"]) -> None:
        """Compare the digest in a state dict with the run's.

        Raises:
            ValueError: The state belongs to a kernel of another run.
        """
        digest = bytes(state.to(torch.uint8).tolist()).hex()
        if digest != self.trajectory.digest:
            raise ValueError(
                f"a state must be loaded into a kernel of the {self._source} that it was saved with: its digest is "
                f"{digest[:12]}, this kernel's is {self.trajectory.digest[:12]}. Make one of it."
            )

    def __repr__(self) -> str:
        scale = "normalize='cosine'" if self.config.is_cosine else f"scale={self.scale:g}"
        along = "".join(f"path={path!r}, " for path in rules.path_identity(self.config.path_kernel.path))
        return (
            f"EPKKernel({self.trajectory!r}, outputs={self.outputs!r}, head={self.config.path_kernel.head!r}, "
            f"rule={self.config.path_kernel.rule!r}, {along}{scale}, batch_shape={tuple(self.batch_shape)})"
        )
