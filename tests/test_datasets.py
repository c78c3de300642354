import gzip
import os
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


# The container


@pytest.mark.usefixtures("unchecked")
def test_data_refuse_labels_that_do_not_fit():
    with pytest.raises(ValueError, match="one entry per input: got 2 labels for 3 inputs"):
        Dataset(torch.zeros(3, 1), torch.zeros(2, dtype=torch.int64), 1, "x")
    with pytest.raises(ValueError, match=r"must lie in 0 … 1: got 0 … 2"):
        Dataset(torch.zeros(3, 1), torch.arange(3), 2, "x")


def test_a_part_keeps_inputs_and_labels_together():
    data = three_gaussians(4, dim=2)
    index = torch.tensor([5, 0])
    for part in (data[index], data[3:5], data[data.labels == 1]):
        assert part.num_classes == 3
        assert len(part) == len(part.inputs) == len(part.labels)
    assert torch.equal(data[index].inputs[0], data.inputs[5])
    assert torch.equal(data[index].labels, data.labels[index])


# Three Gaussians


def test_gaussians_have_the_paper_s_shape_and_classes():
    data = three_gaussians()
    assert data.inputs.shape == (3000, 100)
    assert data.inputs.dtype == torch.float64
    assert torch.equal(data.labels.bincount(), torch.tensor([1000, 1000, 1000]))


def test_gaussians_have_the_paper_s_moments():
    data = three_gaussians(1000, dim=5)
    for label, mean in enumerate(GAUSSIAN_MEANS):
        points = data.inputs[data.labels == label]
        expected = torch.tensor([*mean, 0.0, 0.0, 0.0], dtype=torch.float64)
        assert (points.mean(0) - expected).abs().max() < 5 / 1000**0.5  # 5 standard errors
        assert (points.std(0) - 1).abs().max() < 5 / 2000**0.5


def test_one_seed_gives_one_data_set_in_any_dtype():
    first = three_gaussians(10, generator=torch.Generator().manual_seed(3))
    again = three_gaussians(10, generator=torch.Generator().manual_seed(3), dtype=torch.float32)
    assert torch.equal(first.labels, again.labels)
    assert torch.equal(first.inputs.float(), again.inputs)


def test_another_seed_gives_other_data():
    first, other = (three_gaussians(10, generator=torch.Generator().manual_seed(s)) for s in (3, 4))
    assert not torch.equal(first.labels, other.labels)
    assert not torch.equal(first.inputs, other.inputs)


def test_gaussians_do_not_touch_the_global_generator():
    before = torch.get_rng_state()
    first = three_gaussians(5)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(1)
    assert torch.equal(first.inputs, three_gaussians(5).inputs)


def test_gaussians_are_shuffled():
    labels = three_gaussians(100).labels
    assert not torch.equal(labels, labels.sort().values)


@pytest.mark.parametrize(
    ("options", "message"), [({"num_per_class": 0}, "got 0"), ({"dim": 1}, "dim must be at least 2")]
)
def test_gaussians_refuse_sizes_that_make_no_sense(options, message):
    with pytest.raises(ValueError, match=message):
        three_gaussians(**options)


@pytest.mark.parametrize("load", [three_gaussians, digits, mnist_folder])
def test_every_loader_refuses_a_dtype_without_fractions(load):
    with pytest.raises(TypeError, match=r"floating type: got torch\.int64"):
        load(dtype=torch.int64)


# Digits


def test_digits_are_images_in_the_unit_interval():
    data = digits(dtype=torch.float32)
    assert data.inputs.shape == (1797, 1, 8, 8)
    assert data.inputs.dtype == torch.float32
    assert (data.inputs.min(), data.inputs.max()) == (0, 1)
    assert len(data.labels.unique()) == data.num_classes == 10


# MNIST's format


@pytest.mark.parametrize("prepare", [write, lambda folder: compress(write(folder))], ids=["plain", "gzipped"])
def test_images_are_read_as_written(tmp_path, prepare):
    data = mnist_folder(prepare(tmp_path))
    expected = (
        torch.tensor([0, 51, 102, 153, 204, 255, 0, 0, 1, 2, 3, 4], dtype=torch.float64).reshape(3, 1, 2, 2) / 255
    )
    assert torch.equal(data.inputs, expected)
    assert data.labels.tolist() == [7, 0, 9]
    assert (data.num_classes, data.name) == (10, tmp_path.name)


def test_the_splits_are_different_files(tmp_path):
    write(tmp_path)
    write(tmp_path, labels=idx(LABELS, (3,), bytes([1, 1, 1])), part="t10k")
    assert mnist_folder(tmp_path, split="test").labels.tolist() == [1, 1, 1]
    assert mnist_folder(tmp_path, split="train").labels.tolist() == [7, 0, 9]


def test_the_environment_names_the_folder(tmp_path, monkeypatch):
    (tmp_path / "mnist").mkdir()
    write(tmp_path / "mnist")
    monkeypatch.setenv("EPK_GP_DATA", str(tmp_path))
    assert len(mnist_folder()) == 3


def test_without_any_folder_the_message_names_the_variable(monkeypatch):
    monkeypatch.delenv("EPK_GP_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match="set EPK_GP_DATA to the one that holds mnist/"):
        mnist_folder()


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="the data folder must exist"):
        mnist_folder(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"train-images-idx3-ubyte or train-images-idx3-ubyte\.gz: got neither"):
        mnist_folder(tmp_path)
    write(tmp_path)
    (tmp_path / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(FileNotFoundError, match="train-labels-idx1-ubyte"):
        mnist_folder(tmp_path)


HUGE = 0xFFFFFFFF  # as three sizes: 8e28 bytes, which must not be allocated


@pytest.mark.parametrize(
    ("images", "message"),
    [
        pytest.param(b"", "magic number 0x00000803: got 0x00000000", id="empty"),
        pytest.param(GOOD_IMAGES[:10], "bytes that its header announces", id="short_header"),
        pytest.param(GOOD_IMAGES[:-1], "got fewer", id="short_payload"),
        pytest.param(GOOD_IMAGES + b"\0", "got more", id="long_payload"),
        pytest.param(GOOD_LABELS, "magic number 0x00000803: got 0x00000801", id="labels_for_images"),
        pytest.param(b"PNG\0" + GOOD_IMAGES[4:], "magic number 0x00000803", id="not_idx"),
        pytest.param(idx(IMAGES, (HUGE, HUGE, HUGE), b"\0"), "got fewer", id="huge_header"),
        pytest.param(idx(IMAGES, (0, 28, 28), b""), "at least one", id="no_images"),
        pytest.param(idx(IMAGES, (2, 2, 2), bytes(8)), "one label per image: got 2 images", id="count"),
    ],
)
@pytest.mark.parametrize("finish", [Path, compress], ids=["plain", "gzipped"])
def test_damaged_images_are_refused(tmp_path, images, message, finish):
    with pytest.raises(ValueError, match=message):
        mnist_folder(finish(write(tmp_path, images)))


@pytest.mark.parametrize(
    "damage",
    [lambda b: b[:-9], lambda b: b[:20], lambda b: b"no gzip" + b, lambda b: b[:12] + b"\xff\xff\xff" + b[15:]],
)
def test_damaged_gzip_files_are_refused(tmp_path, damage):
    path = compress(write(tmp_path)) / "train-images-idx3-ubyte.gz"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match="must be a whole gzip file"):
        mnist_folder(tmp_path)


def test_labels_beyond_the_classes_are_refused(tmp_path):
    write(tmp_path)
    with pytest.raises(ValueError, match="labels below num_classes = 9: got 9"):
        mnist_folder(tmp_path, num_classes=9)


@pytest.mark.usefixtures("unchecked")
def test_an_unknown_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match='"train" or "test": got \'valid\''):
        mnist_folder(write(tmp_path), split="valid")


@pytest.mark.parametrize(
    ("name", "split"), [("mnist", "train"), ("mnist", "test"), ("fashion-mnist", "test"), ("kmnist", "test")]
)
def test_the_real_files_are_read(name, split):
    folder = Path(os.environ.get("EPK_GP_DATA", "")) / name
    if "EPK_GP_DATA" not in os.environ or not folder.is_dir():
        pytest.skip(f"set EPK_GP_DATA to a folder that holds {name}/")
    data = mnist_folder(folder, split=split, dtype=torch.float32)
    assert data.inputs.shape == (60000 if split == "train" else 10000, 1, 28, 28)
    assert (data.inputs.min(), data.inputs.max()) == (0, 1)
    assert len(data.labels.unique()) == data.num_classes
