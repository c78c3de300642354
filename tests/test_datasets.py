import gzip
import struct
from pathlib import Path

import pytest
import torch

from epk_gp.datasets import GAUSSIAN_MEANS, Dataset, digits, mnist_folder, three_gaussians

IMAGES, LABELS = 0x803, 0x801


def idx(magic: int, shape: tuple[int, ...], payload: bytes) -> bytes:
    return struct.pack(f">{1 + len(shape)}I", magic, *shape) + payload


GOOD_IMAGES = idx(IMAGES, (3, 2, 2), bytes([0, 51, 102, 153, 204, 255, 0, 0, 1, 2, 3, 4]))
GOOD_LABELS = idx(LABELS, (3,), bytes([7, 0, 9]))


def write(folder: Path, images: bytes = GOOD_IMAGES, labels: bytes = GOOD_LABELS, *, part: str = "train") -> Path:
    (folder / f"{part}-images-idx3-ubyte").write_bytes(images)
    (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    return folder


def compress(folder: Path) -> Path:
    for path in list(folder.iterdir()):
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    return folder


def test_gaussians_have_the_paper_s_shape_classes_and_moments_and_are_shuffled():
    data = three_gaussians()
    assert (data.inputs.shape, data.inputs.dtype) == ((3000, 100), torch.float64)
    assert torch.equal(data.labels.bincount(), torch.tensor([1000, 1000, 1000]))
    assert not torch.equal(data.labels, data.labels.sort().values)
    for label, mean in enumerate(GAUSSIAN_MEANS):
        points = data.inputs[data.labels == label][:, :5]
        expected = torch.tensor([*mean, 0.0, 0.0, 0.0], dtype=torch.float64)
        assert (points.mean(0) - expected).abs().max() < 5 / 1000**0.5  # 5 standard errors
        assert (points.std(0) - 1).abs().max() < 5 / 2000**0.5


def test_one_seed_gives_one_data_set_in_any_dtype_and_another_one_another():
    first, other = (three_gaussians(10, generator=torch.Generator().manual_seed(s)) for s in (3, 4))
    again = three_gaussians(10, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    assert torch.equal(first.labels, again.labels)
    assert torch.equal(first.inputs.float(), again.inputs)
    assert not torch.equal(first.labels, other.labels)
    assert not torch.equal(first.inputs, other.inputs)
    before = torch.get_rng_state()
    unseeded = three_gaussians(5)
    assert torch.equal(before, torch.get_rng_state())  # the global generator is not touched, and not asked
    torch.manual_seed(1)
    assert torch.equal(unseeded.inputs, three_gaussians(5).inputs)


def test_digits_are_images_in_the_unit_interval():
    data = digits(dtype=torch.float32)
    assert (data.inputs.shape, data.inputs.dtype) == ((1797, 1, 8, 8), torch.float32)
    assert (data.inputs.min(), data.inputs.max()) == (0, 1)
    assert len(data.labels.unique()) == data.num_classes == 10


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda _: Dataset(torch.zeros(3, 1), torch.zeros(2).long(), 1, "x"), ValueError, r"got shape \(2,\) for 3"),
        (lambda folder: Dataset(torch.zeros(3, 1), torch.arange(3), 2, "x"), ValueError, r"lie in 0\.\.1: got 0\.\.2"),
        (lambda folder: three_gaussians(dtype=torch.int64), TypeError, r"floating type: got torch\.int64"),
        (lambda folder: digits(dtype=torch.int64), TypeError, r"floating type: got torch\.int64"),
        (lambda folder: mnist_folder(folder, dtype=torch.int64), TypeError, r"floating type: got torch\.int64"),
        (lambda folder: mnist_folder(write(folder), num_classes=9), ValueError, "below num_classes = 9: got 9"),
        (lambda folder: mnist_folder(write(folder), split="valid"), ValueError, '"train" or "test": got \'valid\''),
        (lambda folder: mnist_folder(), FileNotFoundError, "set EPK_GP_DATA to the one that holds mnist/"),
        (lambda folder: mnist_folder(folder / "nowhere"), FileNotFoundError, "the data folder must exist"),
        (lambda folder: mnist_folder(folder), FileNotFoundError, r"train-images-idx3-ubyte\.gz: got neither"),
        (lambda folder: mnist_folder(write(folder), split="test"), FileNotFoundError, "t10k-images-idx3-ubyte"),
    ],
    ids=range(11),
)
def test_data_that_are_not_there_or_do_not_fit_are_refused(tmp_path, monkeypatch, ask, error, message):
    monkeypatch.delenv("EPK_GP_DATA", raising=False)
    with pytest.raises(error, match=message):
        ask(tmp_path)


@pytest.mark.parametrize("prepare", [write, lambda folder: compress(write(folder))], ids=["plain", "gzipped"])
def test_images_are_read_as_written_from_the_folder_that_is_named(tmp_path, prepare, monkeypatch):
    folder = tmp_path / "mnist"
    folder.mkdir()
    write(folder, labels=idx(LABELS, (3,), bytes([1, 1, 1])), part="t10k")
    data = mnist_folder(prepare(folder))
    expected = torch.tensor([0, 51, 102, 153, 204, 255, 0, 0, 1, 2, 3, 4], dtype=torch.float64).reshape(3, 1, 2, 2)
    assert torch.equal(data.inputs, expected / 255)
    assert data.labels.tolist() == [7, 0, 9]
    for part in (data[torch.tensor([2, 1])], data[data.labels != 7]):  # inputs and labels stay together
        assert sorted(part.labels.tolist()) == [0, 9]
        assert torch.equal(part.inputs[part.labels == 9], data.inputs[2:])
    assert (data.num_classes, data.name) == (10, "mnist")
    monkeypatch.setenv("EPK_GP_DATA", str(tmp_path))
    assert mnist_folder(split="test").labels.tolist() == [1, 1, 1]


HUGE = 0xFFFFFFFF  # as three sizes: 8e28 bytes, which must not be allocated


@pytest.mark.parametrize(
    ("images", "message"),
    [
        pytest.param(b"", "0x00000803 .*: got 0x00000000", id="empty"),
        pytest.param(GOOD_IMAGES[:10], "bytes that its header announces", id="short_header"),
        pytest.param(GOOD_IMAGES[:-1], "got fewer", id="short_payload"),
        pytest.param(GOOD_IMAGES + b"\0", "got more", id="long_payload"),
        pytest.param(GOOD_LABELS, "0x00000803 .*: got 0x00000801", id="labels_for_images"),
        pytest.param(b"PNG\0" + GOOD_IMAGES[4:], "must begin with 0x00000803", id="not_idx"),
        pytest.param(idx(IMAGES, (HUGE, HUGE, HUGE), b"\0"), "got fewer", id="huge_header"),
        pytest.param(idx(IMAGES, (0, 28, 28), b""), "at least one", id="no_images"),
        pytest.param(idx(IMAGES, (2, 2, 2), bytes(8)), "one label per image: got 2 images", id="count"),
    ],
)
@pytest.mark.parametrize("finish", [Path, compress], ids=["plain", "gzipped"])
def test_damaged_images_are_refused(tmp_path, images, message, finish):
    with pytest.raises(ValueError, match=message):
        mnist_folder(finish(write(tmp_path, images)))


@pytest.mark.parametrize("damage", [lambda b: b[:-9], lambda b: b"no" + b, lambda b: b[:12] + b"\xff\xff" + b[14:]])
def test_damaged_gzip_files_are_refused(tmp_path, damage):
    path = compress(write(tmp_path)) / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="must be a whole gzip file"):
        mnist_folder(tmp_path)
