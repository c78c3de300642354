"""What all copies of one GPyTorch kernel share."""

from dataclasses import dataclass

from epk_gp.core.options import ComputeOptions
from epk_gp.core.trajectory import Trajectory
from epk_gp.gram.path_kernel import PathKernel
from epk_gp.gram.sketch import PathSketch
from epk_gp.kernels.cache import BlockCache
from epk_gp.kernels.output_structure import OutputStructure


@dataclass(frozen=True, eq=False)
class KernelConfig:
    """What all copies of one GPyTorch kernel share: the values never change, and the cache only saves time.

    GPyTorch deep-copies a kernel whenever it is indexed or expanded; a deep copy of a configuration is itself.

    Attributes:
        path_kernel: The kernel, with values in C x C blocks.
        structure: What is made of such a block.
        options: How blocks are computed.
        cache: Blocks that have been computed, as the path kernel has them.
        is_cosine: Values are divided by the square roots of the kernel's own diagonal at both points.
        sketch: Sketches the gradients of all outputs; None for the kernel itself.
    """

    path_kernel: PathKernel
    structure: OutputStructure
    options: ComputeOptions
    cache: BlockCache
    is_cosine: bool = False
    sketch: PathSketch | None = None

    def __deepcopy__(self, memo: dict[int, object]) -> "KernelConfig":
        return self

    @property
    def trajectory(self) -> Trajectory:
        """The run."""
        return self.path_kernel.trajectory

    @property
    def cache_key(self) -> tuple[object, ...]:
        """What a cached block depends on beside the points: run, structure, head, rule and path."""
        kernel = self.path_kernel
        return kernel.trajectory.digest, self.structure, kernel.head, repr(kernel.rule), kernel.path
