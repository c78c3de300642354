"""Where there are many tiles, each is one piece: a worker sums all its steps, and another goes on if it dies."""

import random
from functools import lru_cache
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

import epk_gp as epk
from distributed_cases import SMALL, Shuffled, StopError, Stopping, mixed, record, recorded, same
from epk_gp.core.trajectory import BYTES, flat_state
from epk_gp.gram import tiles
from epk_gp.storage.files import PartialSums
from epk_gp.work import run as carried

TILES, RANGES, STEPS = 3, 2, 70  # training x training, training x test, test x test copies; ranges of 64 and 6


def block(**options):
    points = mixed(45)
    options |= {"rule": epk.QuadratureRule.left_endpoint(), "memory_budget": SMALL}
    return epk.gram_block(recorded("plain", STEPS), points, points, **options)


@lru_cache
def alone():
    return block()


@pytest.fixture
def whole(monkeypatch):
    monkeypatch.setattr(tiles, "WHOLE_TILES", TILES)


@pytest.fixture
def sums(monkeypatch):
    """The ranges of steps that are summed, and how many are left until one is stopped."""
    counted, real = SimpleNamespace(count=0, left=1 << 30), tiles.GramAccumulator

    def begin(*arguments):
        if counted.left <= 0:
            raise StopError("stopped in a tile")
        counted.count, counted.left = counted.count + 1, counted.left - 1
        return real(*arguments)

    monkeypatch.setattr(tiles, "GramAccumulator", begin)
    return counted


@pytest.mark.parametrize(("largest", "pieces"), [(TILES, TILES), (TILES + 1, TILES * RANGES)])
def test_whole_tiles_have_the_bytes_of_none_and_are_a_piece_each_fewer_one_for_each_range(largest, pieces, monkeypatch):
    monkeypatch.setattr(tiles, "WHOLE_TILES", largest)
    executor = Shuffled()
    assert same(block(executor=executor), alone())
    assert len(executor.order) == pieces


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize(
    ("left", "begins", "ends"), [(3, Shuffled, Shuffled), (3, Shuffled, lambda: None), (2, lambda: None, Shuffled)]
)
def test_a_tile_that_was_stopped_is_gone_on_with_in_the_middle(left, begins, ends, sums, tmp_path, monkeypatch):
    monkeypatch.setattr("epk_gp.storage.files.SECONDS", 0.0)  # every range is kept
    expected, sums.count, sums.left = alone(), 0, left
    with pytest.raises(StopError, match="stopped in a tile"):
        block(executor=begins(), checkpoint=tmp_path / "pieces")
    sums.left = 1 << 30
    for _ in range(2):  # and nothing the second time
        assert same(block(executor=ends(), checkpoint=tmp_path / "pieces"), expected)
        assert sums.count == TILES * RANGES


@pytest.mark.usefixtures("whole")
def test_a_full_disk_in_the_middle_of_a_tile_is_no_error(monkeypatch):
    def full(self, name, tensors, count):
        if name.endswith("-begun"):
            raise OSError(28, "No space left on device")
        save(self, name, tensors, count)

    save = PartialSums.save
    monkeypatch.setattr("epk_gp.storage.files.SECONDS", 0.0)
    monkeypatch.setattr(PartialSums, "save", full)
    assert same(block(executor=Shuffled()), alone())


@pytest.mark.parametrize("count", [TILES, TILES + 1])
def test_sums_that_are_there_are_read_one_by_one(count, tmp_path, monkeypatch):
    """The owner does not hold all tiles of a block at once, which is as large as they are."""
    monkeypatch.setattr(tiles, "WHOLE_TILES", count)
    block(executor=Shuffled(), checkpoint=tmp_path / "pieces")
    events, load, scatter = [], PartialSums.load, tiles.scatter_block

    def loaded(self, name):
        found = load(self, name)
        events.extend(["load"] if found[0] else [])
        return found

    monkeypatch.setattr(PartialSums, "load", loaded)
    monkeypatch.setattr(tiles, "scatter_block", lambda *tile: (events.append("finish"), scatter(*tile))[1])
    assert same(block(executor=Shuffled(), checkpoint=tmp_path / "pieces"), alone())
    assert events.count("load") == TILES
    assert ("load", "load") not in pairwise(events)


def test_pieces_are_listed_one_by_one(monkeypatch):
    """A job of millions of pieces holds no list of them."""
    listed, real = [], carried._by_workers

    def noted(work, pieces, *arguments):
        return real(work, (listed.append(piece) or piece for piece in pieces), *arguments)

    monkeypatch.setattr(carried, "_by_workers", noted)
    monkeypatch.setattr(carried, "num_ahead", lambda *_: 2)
    with pytest.raises(StopError, match="stopped in result"):
        block(executor=Stopping(1, "result"))
    assert len(listed) <= 1 + 2


def test_pieces_ahead_follow_from_the_room_for_them():
    # 1,000 workers and twice as many pieces; 8 GiB, however little is free
    for num_bytes, free, expected in ((100 << 20, 1000 << 30, 2560), (100 << 20, 10 << 30, 81), (1 << 40, 1 << 30, 2)):
        assert carried.num_ahead(num_bytes, free) == expected
    assert carried.num_ahead(1, 1 << 50) == carried.num_ahead(0, 0) == 4096


@pytest.mark.parametrize("offset", [1, random.Random(0).randrange(2, 8)])
def test_weights_begin_where_they_do_in_workers(offset):
    """The last bits of a product depend on where in memory its factors begin."""
    trajectory = recorded("plain")
    moved = [torch.cat([torch.zeros(offset, dtype=w.dtype), w])[offset:] for w in trajectory.states]
    assert all(w.data_ptr() % BYTES for w in moved)
    object.__setattr__(other := record("plain"), "states", tuple(moved))
    for s, w in enumerate(trajectory.states):
        state = flat_state(other, s, w)
        assert state.data_ptr() % BYTES == 0
        assert same(state, w)
