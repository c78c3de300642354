"""Plans of a computation: how to differentiate the network, and block sizes from a memory budget.

Every function here returns a number of points, rows, cotangents or steps, at least 1. docs/engine.md, section 7,
derives the counts. Sizes are in bytes unless a name says otherwise.
"""

import mmap
import shutil
import tempfile
from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import prod
from threading import RLock
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class TensorSpec:
    """The dtype and the device of a computation."""

    dtype: torch.dtype
    device: torch.device

    def cast(self, X: Tensor) -> Tensor:
        """Move inputs to the computation: floating-point tensors to its dtype, all tensors to its device."""
        return X.to(device=self.device, dtype=self.dtype) if X.is_floating_point() else X.to(self.device)


@dataclass(frozen=True)
class DifferentiationPlan:
    """The chosen ways to differentiate a network.

    `autodiff.verification` builds the plan from one observed forward pass, and keeps only ways that reproduce plain
    autograd on a few rows.

    Attributes:
        bias_of: Weights of layers (`autodiff.interception.LAYERS`), each with the trained bias that always accompanies
            it, or None.
        dense_params: All other trained parameters. Their Jacobians are computed sample by sample.
        supports_interpolation: Rows at different points of a segment of weights can share two calls per layer
            (`autodiff.moved_weights.MovedWeights`).
        supports_stacking: Equal groups of the rows can have different weights
            (`autodiff.moved_weights.MovedWeights`).
        supports_jvp: Forward-mode derivatives work, also for rows at different points of a segment that share calls.
        calls_convolutions: The network calls convolutions. torch maps their second derivatives, and their passes over
            weights, by loops and copies; therefore neither is mapped.
        supports_pool_windows: Gradients of convolutions may end at the max-pool that is their only user
            (`autodiff.jacobians`).
        supports_batched_vjp: Several cotangents can be propagated backwards in one call.
        supports_vmap: `torch.func.vmap` works over samples, and over the weights of passes that compute the rows of all
            points. Embeddings prevent it; their cotangents can still be propagated together.
        vmap_chunk_size: Number of samples that one `vmap` call takes.
        activations_per_sample: Numbers that a forward pass computes per sample.
        num_outputs: C.
        calls_fused_functions: The network calls functions that interpolation replaces by plain operations (recurrent
            layers, attention). If the rows are at few points of a segment, one pass per point costs less.
        shares_pass: A forward pass always computes the rows of all points (nodes of a graph). Rows are then grouped by
            their weights, and no layer counts as one that sees the rows.
        casts_to_float32: A computation in float64 casts values that depend on weights to float32, as normalisations of
            `transformers` do. The outputs then have float32's rounding.
    """

    bias_of: dict[str, str | None]
    dense_params: tuple[str, ...]
    supports_interpolation: bool
    supports_stacking: bool
    supports_jvp: bool
    supports_batched_vjp: bool
    calls_convolutions: bool
    supports_pool_windows: bool
    supports_vmap: bool
    vmap_chunk_size: int
    activations_per_sample: int
    num_outputs: int
    calls_fused_functions: bool = False
    shares_pass: bool = False
    casts_to_float32: bool = False


@dataclass(eq=False)
class ModelCache:
    """Known facts about a network, shared by all its variants and by all runs that have it.

    Nothing in the cache depends on the weights, so runs that share a network (`tangent_trajectory`) also share the
    cache. A pickled or copied cache is empty.

    Attributes:
        needs_dense_plan: Some inputs use a parameter in a way that no layer-wise Jacobian covers: the plan treats every
            parameter as dense.
        plans: The plan for each dtype and device, with and without layers (`needs_dense_plan`).
        feature_bytes: Bytes of the layer Jacobians of one point, for each way of computing them.
        lock: Held while an entry is computed, so that several threads compute it once.
    """

    needs_dense_plan: bool = False
    plans: dict[tuple[TensorSpec, bool], DifferentiationPlan] = field(default_factory=dict)
    feature_bytes: dict[Hashable, int] = field(default_factory=dict)
    lock: Any = field(default_factory=RLock, repr=False)

    def __reduce__(self) -> tuple[type["ModelCache"], tuple[()]]:
        """Return an empty cache as the pickled form: every entry can be computed again."""
        return ModelCache, ()


# Bytes of activations and gradients above which a forward and backward pass no longer reuses its memory. Measured on
# two convolutions and MNIST images, float64: one Gram block takes 296 ms with 100 images at a time, 188 ms with 25 (48
# MB), 255 ms with 6. The plain forward pass is 4 times slower with 400 than with 100, because the C library returns
# large blocks to the system after each use. All outputs are propagated together: output by output, with so many more
# rows at a time, blocks of five convolutional networks took 0.97 to 1.26 times as long.
PASS_BYTES = 48 << 20

# Number of steps in one product, summed in the points' dtype before they are added to the sum of all steps.
MAX_STEP_BATCH = 16

# Evaluating fewer or more weight states together than this gains nothing.
MIN_STACKED, MAX_STACKED = 8, 256

# Largest number of lines evaluated together, and number of multiplications above which the calls of a pass cost little.
MAX_LINES, OPERATIONS_TOGETHER = 256, 10**8

# Number of requested outputs whose adjoints always go through a run together, in temporary files if memory is too
# small: each further block repeats the passes of the training. A choice.
MAPPED_ADJOINTS = 32

# Directions along which the losses of a batch are differentiated together. Measured on batches of 64 images, float64:
# 10 together take 0.6 to 0.8 of the time of 10 single passes (convolutions, attention), 0.3 to 0.4 (MLPs); 40 together
# are as fast as 10 at a time, or slower (convolutions).
_DIRECTIONS = 10

# Largest number of points sketched at a time, and bytes of their gradients and temporaries. They do not depend on the
# budget, so that features do not either. Measured on one thread, float32: gradients of 65,536 numbers take 50
# microseconds per point in arrays of 4 to 17 MB (a third of these bytes), 150 in arrays of 34 MB.
SKETCHED_POINTS = 256
SKETCHED_BYTES = 32 << 20

# Number of elements of a temporary when positions of two layers are multiplied pair by pair.
PAIR_ELEMENTS = 1 << 22

# Numbers of a `vmap` call over samples: parameters and activations of every sample in it.
VMAP_ELEMENTS = 1 << 24

# Number of inputs evaluated at a time, for any budget: networks that are compared with each other use equal blocks, so
# that equal networks give equal bytes.
EVALUATED_ROWS = 512


@dataclass(frozen=True)
class MemoryPlan:
    """Turns a memory budget into block sizes for one network in one dtype.

    Attributes:
        budget: Bytes for everything except the inputs and the result.
        itemsize: Bytes of a number.
        plan: The network's differentiation plan, with the sizes of a forward pass.
        num_weights: P.
    """

    budget: int
    itemsize: int
    plan: DifferentiationPlan
    num_weights: int

    def stacked_weights(self, num_points: int) -> int:
        """Count the weight states at which the same points are evaluated together; 1 if more gain nothing.

        An eighth of the budget holds, for each state, the weights and a forward and backward pass, 4 times over.
        """
        pass_bytes = self._activation_bytes * (self.plan.num_outputs + 2)  # forward and backward, of all outputs
        per_state = 4 * (self.itemsize * self.num_weights + num_points * pass_bytes)
        in_cache = rows_per_pass(self.plan, self.itemsize, self.plan.num_outputs) // num_points
        fitting = min(in_cache, self.budget // 8 // per_state, MAX_STACKED)
        return fitting if fitting >= MIN_STACKED else 1

    def lines_together(self, num_rows: int, num_outputs: int, num_vectors: int) -> int:
        """Count the lines between states that are evaluated together; 1 if the network does not allow more.

        Arguments: as in `fitting_lines`.
        """
        can_join = self.plan.supports_stacking and self.plan.supports_jvp
        return self.fitting_lines(num_rows, num_outputs, num_vectors) if can_join else 1

    def fitting_lines(self, num_rows: int, num_outputs: int, num_vectors: int) -> int:
        """Count the lines that are worth evaluating together.

        The work of one more line joins the same calls. So lines are joined until the arithmetic dominates the cost of
        the calls, as long as their vectors of P numbers stay in the cache and within a 32nd of the budget.

        Args:
            num_rows: Rows evaluated on each line.
            num_outputs: Outputs whose gradients are taken.
            num_vectors: Vectors of P numbers per line, in addition to its start and its direction.
        """
        vector_bytes = self.itemsize * self.num_weights * (num_vectors + 2)
        operations = 2 * num_rows * self.num_weights * (num_outputs + 2)
        fitting = min(PASS_BYTES, self.budget // 32) // vector_bytes
        return max(1, min(fitting, -(-OPERATIONS_TOGETHER // operations), MAX_LINES))

    def steps_per_batch(self, feature_bytes: int) -> int:
        """Count the steps or nodes whose layer Jacobians fit into an eighth of the budget.

        Args:
            feature_bytes: Bytes of the layer Jacobians of one step or node, with two weight states.
        """
        per_step = feature_bytes + 2 * self.num_weights * self.itemsize
        return max(1, min(MAX_STEP_BATCH, self.budget // (8 * per_step)))

    def tile_points(self, num_output_pairs: int, feature_bytes: int) -> int:
        """Count the points on each side of a square tile of a Gram block.

        Half of the budget holds, for each pair of points, four sums of products of outputs (over all ranges of steps,
        and for one range: total, deferred sum, scratch) and one of inputs. A quarter, and the rest of the pairs' half,
        holds, for each point, a forward and backward pass, up to the size of one pass, and three sets of layer
        Jacobians (left side, right side, average).

        Args:
            num_output_pairs: Pairs of outputs in the tile.
            feature_bytes: Bytes of the layer Jacobians of one point.
        """
        of_pair = self.itemsize * (4 * num_output_pairs + 1)
        by_pairs = int((self.budget / 2 / of_pair) ** 0.5)
        share, of_point = 3 * self.budget // 4, 3 * feature_bytes
        all_in_one_pass = _most_points(of_pair, self._all_outputs_bytes + of_point, share)
        in_several = _most_points(of_pair, of_point, share - PASS_BYTES - self._all_outputs_bytes)
        return max(1, min(by_pairs, max(all_in_one_pass, in_several)))

    def derivative_points(self, num_output_pairs: int, feature_bytes: int) -> int:
        """Count the points on each side of a block that is differentiated in the points.

        An eighth of the budget holds the block's products. Half of it holds, for each point, 4 passes (forward and
        backward, and the derivatives of both) and 8 sets of layer Jacobians, which the graph keeps.
        """
        by_products = int((self.budget / (8 * self.itemsize * num_output_pairs)) ** 0.5)
        per_point = 4 * self._all_outputs_bytes + 8 * feature_bytes
        return max(1, min(by_products, self.budget // (2 * per_point)))

    def adjoint_points(self, num_outputs: int) -> int:
        """Count the points whose adjoints are carried at a time; 0 if one point does not fit.

        Half of the budget holds, for each point and output, 3 vectors of P numbers (averaged gradients, the adjoint of
        the momentum, and either the adjoints of the gradient for forward mode or the state of a preconditioner or an
        average). Temporaries of a few points at a time fit into the rest.

        Args:
            num_outputs: K, the number of requested outputs.
        """
        return self.budget // (2 * self.itemsize * 3 * num_outputs * self.num_weights)

    def adjoint_samples(self) -> int:
        """Count the training samples whose loss gradients are held at a time.

        A quarter of the budget holds a pass of each sample, for the layers' inputs and output gradients (measured for
        BERT: half of it), and P numbers for gradients that cannot be taken layer by layer.
        """
        is_dense = bool(self.plan.dense_params) or not self.plan.supports_interpolation
        per_sample = self.plan.activations_per_sample + is_dense * self.num_weights
        return max(1, self.budget // (4 * self.itemsize * per_sample))

    def forward_mode_directions(self, num_rows: int) -> int:
        """Count the directions along which the losses of a batch are differentiated together.

        Half of the budget holds, for each direction, its P numbers and 4 passes of the batch.

        Args:
            num_rows: Rows of the batch.
        """
        per_direction = self.num_weights + 4 * self.plan.activations_per_sample * num_rows
        return max(1, min(_DIRECTIONS, self.budget // (2 * self.itemsize * per_direction)))

    def influence_points(self, num_outputs: int) -> int:
        """Count the points whose adjoints go back through a run together, for `influence`; 0 if one does not fit.

        Half of the budget holds, for each point and output, 16 vectors of P numbers: for Adam, the adjoints of weights,
        gradient, momentum and second moment before and after a step, and temporaries.

        Args:
            num_outputs: K, the number of requested outputs.
        """
        return self.budget // (2 * self.itemsize * 16 * num_outputs * self.num_weights)

    def curvature_rows(self) -> int:
        """Count the rows of a pass whose second derivatives are taken together, for independent rows.

        A quarter of the budget holds the graph of the forward and backward pass, each with what it saves for its
        derivative: 6 passes of each row.
        """
        return max(1, self.budget // (4 * self.itemsize * 6 * self.plan.activations_per_sample))

    def curvature_adjoints(self, num_rows: int) -> int:
        """Count the adjoints that go back together through the graph of a pass.

        A quarter of the budget holds, for each adjoint, 4 vectors of P numbers (the adjoint and its products, as
        computed and as joined) and 6 passes of the rows.

        Args:
            num_rows: Rows of the pass.
        """
        per_adjoint = 4 * self.num_weights + 6 * num_rows * self.plan.activations_per_sample
        return max(1, self.budget // (4 * self.itemsize * per_adjoint))

    def retrained_runs(self, num_rows: int) -> int:
        """Count the runs that are retrained together; one more run, with all weights 1, is added.

        Half of the budget holds 16 vectors of P numbers per run: weights, gradient, the optimizer's state before and
        after the step, its coefficients, and temporaries. The other half holds 6 passes of a batch of each run; only of
        one run for networks with convolutions, whose passes are not mapped over runs.

        Args:
            num_rows: Rows of the largest batch.
        """
        elements = self.budget // (2 * self.itemsize)
        by_vectors = elements // (16 * self.num_weights)
        if self.plan.calls_convolutions:
            return max(1, by_vectors - 1)
        by_passes = elements // (6 * max(1, num_rows) * self.plan.activations_per_sample)
        return max(1, min(by_vectors, by_passes) - 1)

    def statistics_rows(self, num_outputs: int, num_statistics: int) -> int:
        """Count the rows whose gradients in the moving statistics are computed at a time.

        An eighth of the budget holds, for each row, 2 K + 6 vectors of Q numbers (gradients, their weighted copies,
        the row's own statistics) and 8 passes.

        Args:
            num_outputs: K, the number of requested outputs.
            num_statistics: Q.
        """
        per_row = 2 * (num_outputs + 3) * num_statistics + 8 * self.plan.activations_per_sample
        return max(1, min(self.budget // (8 * self.itemsize * per_row), rows_per_pass(self.plan, self.itemsize)))

    def vanilla_gd_points(self, feature_bytes: int) -> int:
        """Count the points whose contributions under plain gradient descent are computed at a time.

        A quarter of the budget holds a forward and backward pass and 12 sets of layer Jacobians per point: at the
        nodes, their average, and temporaries.
        """
        per_point = self._all_outputs_bytes + 12 * feature_bytes
        return max(1, self.budget // (4 * per_point))

    @property
    def node_bytes(self) -> int:
        """Bytes for layer Jacobians at the nodes of a line that are held together; the next ones need as much again."""
        return self.budget // 4

    def vanilla_gd_samples(self, max_samples: int, num_points: int, num_outputs: int, num_parts: int) -> int:
        """Count the training samples in a block of contributions to N points: 4 such blocks fill the budget.

        Args:
            max_samples: Largest count.
            num_points: N.
            num_outputs: Number of explained outputs per point.
            num_parts: Number of separately reported groups of parameters.
        """
        values = num_outputs * num_points * num_parts
        return max(1, min(max_samples, self.budget // (4 * self.itemsize * values)))

    def directional_rows(self) -> int:
        """Count the rows whose values and directional derivatives are computed at a time.

        The budget holds 8 passes per row: values, tangents, and both along the direction, for an operation's input and
        its result.
        """
        fitting = self.budget // (8 * self._activation_bytes)
        return max(1, min(fitting, rows_per_pass(self.plan, self.itemsize)))

    def kink_search_rows(self) -> int:
        """Count the rows that are searched for kinks at a time.

        Inputs and gradients of every piecewise operation stay in memory: the count is a quarter of `directional_rows`.
        """
        return max(1, self.directional_rows() // 4)

    @property
    def _all_outputs_bytes(self) -> int:
        """Bytes of a point's forward pass, of all outputs' gradients, and of an operation's temporaries for both."""
        return (self.plan.num_outputs + 3) * self._activation_bytes

    @property
    def _activation_bytes(self) -> int:
        return self.plan.activations_per_sample * self.itemsize


def _most_points(of_pair: int, of_point: int, share: int) -> int:
    """Return the largest n for which of_pair n^2 + of_point n is at most a share of the budget."""
    if share <= 0:
        return 0
    return int(2 * share / (of_point + (of_point**2 + 4 * of_pair * share) ** 0.5))


def rows_per_pass(plan: DifferentiationPlan, itemsize: int, num_cotangents: int = 1) -> int:
    """Count the samples whose forward and backward pass stays within `PASS_BYTES`.

    Args:
        plan: The differentiation plan, with the sizes of a forward pass.
        itemsize: Bytes of a number.
        num_cotangents: Number of gradients propagated together. Two more passes hold the activations themselves and the
            temporaries of the current operation.
    """
    return max(1, PASS_BYTES // (plan.activations_per_sample * itemsize * (num_cotangents + 2)))


def sketched_rows(feature_bytes: int) -> int:
    """Count the points sketched at a time.

    Args:
        feature_bytes: Bytes of the layer Jacobians of one point, and of the temporaries of its sketch.
    """
    return max(1, min(SKETCHED_POINTS, SKETCHED_BYTES // max(1, feature_bytes)))


def cotangents_per_pass(plan: DifferentiationPlan, itemsize: int, num_rows: int, num_cotangents: int) -> int:
    """Count the cotangents that are propagated together.

    As many as fit into `PASS_BYTES`.
    """
    pass_bytes = max(1, num_rows) * plan.activations_per_sample * itemsize
    return max(1, min(num_cotangents, PASS_BYTES // pass_bytes - 2))


def fits_pass(num_elements: int, itemsize: int) -> bool:
    """Return whether a pass may hold this many numbers in addition to its own."""
    return num_elements * itemsize <= PASS_BYTES


def weight_rows(budget: int, itemsize: int, num_weights: int) -> int:
    """Count the rows of P numbers, one per step of a run, that fit into a quarter of the budget.

    A run with more rows keeps all of them in a temporary file.
    """
    return max(1, budget // (4 * itemsize * num_weights))


def integration_points(budget: int, nodes_per_step: int, input_bytes: int, output_bytes: int) -> int:
    """Count the points integrated along a step at a time.

    Half of the budget holds, for each node of a point, the input and its gather, and 8 tensors of outputs: values at
    both ends, slopes, integrals and residuals.
    """
    return max(1, budget // (2 * nodes_per_step * (2 * input_bytes + 8 * output_bytes)))


def panel_points(num_points: int, input_bytes: int) -> int:
    """Count the points of a panel, which a worker carries through a whole run: 1 MiB of inputs, or more for 64 panels.

    Smaller panels would cost more than they gain: each panel needs the gradients of all training steps again.
    """
    return max(1, (1 << 20) // max(1, input_bytes), -(-num_points // 64))


def posterior_points(budget: int, itemsize: int, rows_per_point: int, num_factor_rows: int) -> int:
    """Count the test points whose cross block with the training points fits, with its solve and a copy."""
    return max(1, budget // (3 * itemsize * rows_per_point * num_factor_rows))


def positions_per_block(num_left_positions: int, num_right: int, num_right_positions: int) -> int:
    """Count the left points of a multi-position layer whose pairs with all right points are computed at a time."""
    return max(1, PAIR_ELEMENTS // (num_left_positions * num_right * num_right_positions))


_HUGE_PAGE = 2 << 20
# Size in bytes from which huge pages pay: glibc reuses smaller blocks, and there huge pages cost 10 %.
_LARGE = 32 << 20


def empty_huge_pages(shape: Sequence[int], reference: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Allocate a tensor without initialising it, with the dtype and device of `reference`.

    Large tensors on a CPU lie in huge pages if the system (Linux) has them. A page is created at its first write, and
    creating many small pages takes longer than filling them. Measured: 72 MB are filled in 4.5 ms, not 21; a Gram block
    of that size takes 78, not 106.
    """
    size = prod(shape) * reference.dtype.itemsize
    if reference.device.type != "cpu" or size < _LARGE or not hasattr(mmap, "MADV_HUGEPAGE"):
        return reference.new_empty(tuple(shape))
    whole_pages = -(-size // _HUGE_PAGE) * _HUGE_PAGE  # otherwise Linux does not align them
    block = mmap.mmap(-1, whole_pages, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a system without huge pages
        block.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(block, dtype=reference.dtype, count=prod(shape)).view(*shape)


def rows_of_weights(num_rows: int, num_weights: int, reference: Tensor, max_rows: int) -> Tensor:
    """Return uninitialised rows, in memory if they fit, otherwise in a temporary file that is deleted with them.

    Args:
        num_rows: Number of rows.
        num_weights: Length of each row.
        reference: Tensor that sets dtype and device; a temporary file is on the CPU.
        max_rows: Largest number of rows in memory.

    Raises:
        OSError: The disk has no room for the temporary file.
    """
    if num_rows <= max_rows:
        return reference.new_empty(num_rows, num_weights)
    size, free = num_rows * num_weights * reference.itemsize, shutil.disk_usage(tempfile.gettempdir()).free
    if size > free:  # writing to a mapped file that exceeds the disk kills the process
        raise OSError(
            f"vectors that do not fit into memory_budget need {size:,} bytes of {tempfile.gettempdir()}, which has "
            f"{free:,}: set TMPDIR to a folder with more, raise memory_budget, or ask for fewer points at a time."
        )
    kind = np.dtype(str(reference.dtype).removeprefix("torch."))
    with tempfile.TemporaryFile() as file:
        return torch.from_numpy(np.memmap(file, dtype=kind, mode="w+", shape=(num_rows, num_weights)))
