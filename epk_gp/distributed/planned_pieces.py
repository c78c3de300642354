"""Pieces of a computation on a run: what all of them have, whatever they compute."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from torch import Tensor

from epk_gp.autodiff.dense import PlannedModel
from epk_gp.core.options import ComputeOptions
from epk_gp.core.plans import DifferentiationPlan
from epk_gp.core.trajectory import Trajectory
from epk_gp.distributed.job import Place
from epk_gp.distributed.pieces import Piece, results_of
from epk_gp.storage.files import checksum
from epk_gp.storage.states import require_same_run


@dataclass(frozen=True, eq=False, kw_only=True)
class PlannedPieces(ABC):
    """A computation on a run, in pieces for workers (`job.Computation`).

    Attributes:
        plan: How to differentiate the network: made once, by the owner of the job.
    """

    plan: DifferentiationPlan

    @property
    @abstractmethod
    def run_and_inputs(self) -> tuple[Trajectory, Tensor]:
        """The run, and inputs that go through its network."""

    @abstractmethod
    def piece(self, place: Place) -> dict[str, Tensor]:
        """Compute a piece."""

    def check(self) -> None:
        """Raise if the run on disk is not the one that the owner of the job opened."""
        require_same_run(self.run_and_inputs[0])

    def __getstate__(self) -> dict[str, object]:
        """Return the pickled form, without what is found out again."""
        return {entry.name: getattr(self, entry.name) for entry in fields(self)}

    @cached_property
    def net(self) -> PlannedModel:
        """The network of the run, with the plan."""
        trajectory, X = self.run_and_inputs
        return PlannedModel(trajectory.model_for(X), self.plan)

    def named(self, name: str, places: Iterable[Place]) -> list[Piece]:
        """Name pieces by their places and by the plan of the network: those of another plan have other bytes.

        A call that needs a second plan half-way goes on in the same folder.
        """
        prefix = f"{name}-{checksum(repr(self.plan).encode())}"
        return [Piece("-".join([prefix, *map(str, place)]), place) for place in places]

    def results(
        self, name: str, places: Sequence[Place], options: ComputeOptions, identity: Callable[[], str], num_bytes: int
    ) -> Generator[dict[str, Tensor], None, None]:
        """Compute pieces and give their results in their order; without workers and a checkpoint no file is written.

        Args:
            name: Begins the names of the pieces' files.
            places: The pieces.
            options: Whose workers compute, and where the pieces are kept.
            identity: As of `results_of`.
            num_bytes: Of a piece.

        Raises:
            BlockingIOError, RuntimeError, ValueError: See `results_of`.
        """
        if options.executor is None and options.checkpoint is None:
            yield from map(self.piece, places)
        else:
            yield from results_of(self, self.named(name, places), options, identity, num_bytes)
