"""What points look like in a report: images, rows, positions, texts."""

import base64
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import epk_gp as epk
from epk_gp.report.points import Appearance
from report_cases import report_case


def recorded(net, X, y=None):
    net, y = net.double(), torch.arange(4) % 2 if y is None else y
    return epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=1e-3), steps=1)


def looked(trajectory, row, names=None, decode=None, **options):
    return Appearance(trajectory, names, decode).show(trajectory.inputs[row], **options)


@pytest.mark.parametrize(
    ("shape", "size", "error"), [((1, 6, 8), (8, 6), 0.08), ((3, 6, 6), (6, 6), 0.1), ((1, 200, 100), (32, 64), None)]
)
def test_images_are_small_pictures_grey_ones_dark_on_white(shape, size, error):
    X = torch.rand(4, *shape, dtype=torch.float64)
    trajectory = recorded(nn.Sequential(nn.Flatten(), nn.Linear(X[0].numel(), 2)), X)
    address = looked(trajectory, 1)["image"]
    assert address.startswith("data:image/png;base64,")
    picture = Image.open(BytesIO(base64.b64decode(address.partition(",")[2])))
    assert picture.size == size
    if error is None:  # made smaller
        return
    shares = ((X[1].permute(1, 2, 0) - X.min()) / (X.max() - X.min())).numpy()
    expected = 1 - shares[..., 0] if shape[0] == 1 else shares
    found = np.asarray(picture.convert("L" if shape[0] == 1 else "RGB"), dtype=float) / 255
    assert np.abs(found - expected).max() < error  # of sixteen greys, or 64 colours
    assert np.abs(found - (1 - expected)).max() > 0.5  # the negative control


def test_rows_are_named_numbers_and_points_of_the_plane_positions():
    trajectory = report_case("gradient_descent")[0]
    assert looked(trajectory, 0, ["a", "b", "c", "d", "e"])["values"] == [
        [name, pytest.approx(float(v), rel=1e-3)] for name, v in zip("abcde", trajectory.inputs[0], strict=True)
    ]
    plane = recorded(nn.Linear(2, 2), torch.randn(4, 2, dtype=torch.float64))
    assert looked(plane, 1) == {"position": pytest.approx(plane.inputs[1].tolist(), rel=1e-3)}
    assert "values" in looked(plane, 1, ["width", "height"])


def test_long_rows_are_cut_and_that_is_said():
    trajectory = recorded(nn.Linear(100, 2), torch.randn(4, 100, dtype=torch.float64))
    assert len(looked(trajectory, 0)["values"]) == 60
    assert len(looked(trajectory, 0, is_sample=True)["values"]) == 16
    words = "the first 60 of 100 numbers of an explained point, and the first 16 of a training sample"
    assert Appearance(trajectory).describe_cut() == words
    assert Appearance(report_case("gradient_descent")[0]).describe_cut() is None


def test_tokens_are_numbers_or_the_text_that_they_decode_to():
    trajectory = report_case("words")[0]
    tokens = trajectory.inputs[0].tolist()
    assert looked(trajectory, 0) == {"text": " ".join(map(str, tokens))}
    decoded = looked(trajectory, 0, decode=lambda row: "".join("abcdefghi"[i] for i in row.tolist()))
    assert decoded == {"text": "".join("abcdefghi"[i] for i in tokens)}
    assert len(looked(trajectory, 0, decode=lambda row: "x" * 1000)["text"]) == 400


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, tokens, scale):
        return self.out(self.embed(tokens).mean(dim=1) * scale)


def test_several_tensors_are_shown_by_their_names_and_decoded_together():
    X = {"tokens": torch.tensor([[1, 2], [3, 4], [0, 1]]), "scale": torch.tensor([[0.5], [1.0], [2.0]]).double()}
    trajectory = recorded(Two(), X, torch.tensor([0, 1, 0]))
    assert looked(trajectory, 1) == {"text": "scale: 1; tokens: 3 4"}
    decoded = looked(trajectory, 2, decode=lambda row: f"{row['tokens'].tolist()} by {float(row['scale'])}")
    assert decoded == {"text": "[0, 1] by 2.0"}
    with pytest.raises(ValueError, match="names are those of the features of rows"):
        Appearance(trajectory, ["a", "b", "c"], None)


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.EmbeddingBag(5, 3), nn.Linear(3, 2)

    def forward(self, tokens, offsets):
        return self.out(self.embed(tokens, offsets))


def test_rows_of_unequal_lengths_are_shown_without_their_padding():
    rows = [torch.tensor(tokens) for tokens in ([1, 2, 3], [4], [0, 2])]
    trajectory = recorded(Bag(), epk.Ragged(rows, "offsets"), torch.tensor([0, 1, 0]))
    assert [looked(trajectory, k)["text"] for k in range(3)] == ["1 2 3", "4", "0 2"]
    assert looked(trajectory, 1, decode=lambda row: str(row.tolist())) == {"text": "[4]"}
