"""The file of a job, which its workers read: for its user alone, and removed when the job ends."""

import stat
from dataclasses import dataclass

import pytest
import torch

from distributed_cases import Shuffled
from epk_gp.core.checks import ComputeOptions
from epk_gp.storage.partial_sums import PartialSums
from epk_gp.work import run as jobs
from epk_gp.work.run import Piece, Sums
from epk_gp.work.run import run as carry_out


class Told:
    """An executor that computes here what it was sent, and looks at the job's file."""

    def __init__(self, file):
        self.file, self.modes = file, []

    def submit(self, *call):
        self.modes.append(stat.S_IMODE(self.file.stat().st_mode))
        return Shuffled().submit(*call)


@dataclass
class Ones:
    place: int
    piece_bytes = 8
    device = torch.device("cpu")

    @property
    def pieces(self):
        return [Piece("a", (self.place,))]

    def identity(self):
        return "1"

    def compute(self, place, saved):
        if place[0] < 0:
            raise KeyError("no such piece")
        yield Sums({"one": torch.ones(1)}, steps=1)

    def check(self):
        pass


@pytest.mark.parametrize("place", [1, -1], ids=["success", "failure"])
def test_a_job_is_private_and_removed_when_it_ends(tmp_path, place):
    file = PartialSums(tmp_path / "sums", "1").folder / jobs.JOB
    file.with_name("job.pickle.part").write_text("left by another, for all to read")
    executor = Told(file)
    try:
        list(carry_out(Ones(place), ComputeOptions(executor=executor, checkpoint=file.parent), "ones"))
    except KeyError:
        assert place < 0
    assert executor.modes == [0o600]
    assert not file.exists()
