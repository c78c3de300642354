"""What points look like in a report: images, rows, positions, texts."""

import base64
from io import BytesIO

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import epk_gp as epk
from epk_gp.report.points import appearance
from report_cases import report_case


def recorded(net, X, y):
    net = net.double()
    return epk.train(net, X, y, optimizer=torch.optim.SGD(net.parameters(), lr=1e-3), steps=1)


def flat(shape, outputs=2):
    return nn.Sequential(nn.Flatten(), nn.Linear(int(np.prod(shape)), outputs))


def pixels(address):
    assert address.startswith("data:image/png;base64,")
    return Image.open(BytesIO(base64.b64decode(address.partition(",")[2])))


def images(shape):
    torch.manual_seed(0)
    X = torch.rand(4, *shape, dtype=torch.float64)
    return recorded(flat(shape), X, torch.arange(4) % 2)


def test_a_grey_image_is_drawn_dark_on_white():
    trajectory = images((1, 6, 8))
    X = trajectory.inputs
    picture = pixels(appearance(trajectory, None, None).show(X[1])["image"])
    assert picture.size == (8, 6)
    found = np.asarray(picture.convert("L"), dtype=float) / 255
    expected = 1 - ((X[1, 0] - X.min()) / (X.max() - X.min())).numpy()
    assert np.abs(found - expected).max() < 0.08  # sixteen greys
    assert np.abs(found - (1 - expected)).max() > 0.5  # the negative control


def test_a_colour_image_keeps_its_colours():
    trajectory = images((3, 6, 6))
    X = trajectory.inputs
    picture = pixels(appearance(trajectory, None, None).show(X[0])["image"]).convert("RGB")
    expected = ((X[0].permute(1, 2, 0) - X.min()) / (X.max() - X.min())).numpy()
    assert np.abs(np.asarray(picture, dtype=float) / 255 - expected).max() < 0.1


def test_a_large_image_is_made_small():
    trajectory = images((1, 200, 100))
    assert pixels(appearance(trajectory, None, None).show(trajectory.inputs[0])["image"]).size == (32, 64)


def test_rows_are_named_numbers_and_points_of_the_plane_positions():
    trajectory, X, _ = report_case("gradient_descent")
    look = appearance(trajectory, ["a", "b", "c", "d", "e"], None)
    assert look.show(X[0])["values"] == [
        [name, pytest.approx(float(v), rel=1e-3)] for name, v in zip("abcde", X[0], strict=True)
    ]
    plane = recorded(nn.Linear(2, 2), torch.randn(4, 2, dtype=torch.float64), torch.arange(4) % 2)
    assert appearance(plane, None, None).show(plane.inputs[1]) == {
        "position": pytest.approx(plane.inputs[1].tolist(), rel=1e-3)
    }
    assert "values" in appearance(plane, ["width", "height"], None).show(plane.inputs[1])


def test_long_rows_are_cut_and_that_is_said():
    trajectory = recorded(nn.Linear(100, 2), torch.randn(4, 100, dtype=torch.float64), torch.arange(4) % 2)
    look = appearance(trajectory, None, None)
    assert len(look.show(trajectory.inputs[0])["values"]) == 60
    assert len(look.show(trajectory.inputs[0], is_sample=True)["values"]) == 16
    words = "the first 60 of 100 numbers of an explained point, and the first 16 of a training sample"
    assert look.describe_cut() == words
    assert appearance(report_case("gradient_descent")[0], None, None).describe_cut() is None


def test_tokens_are_numbers_or_the_text_that_they_decode_to():
    trajectory, X, _ = report_case("words")
    assert appearance(trajectory, None, None).show(X[0]) == {"text": " ".join(map(str, X[0].tolist()))}
    decoded = appearance(trajectory, None, lambda row: "".join("abcdefghi"[i] for i in row.tolist()))
    assert decoded.show(X[0]) == {"text": "".join("abcdefghi"[i] for i in X[0].tolist())}
    assert len(appearance(trajectory, None, lambda row: "x" * 1000).show(X[0])["text"]) == 400


class Two(nn.Module):
    """A network of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(5, 3), nn.Linear(3, 2)

    def forward(self, tokens, scale):
        return self.out(self.embed(tokens).mean(dim=1) * scale)


def test_several_tensors_are_shown_by_their_names_and_decoded_together():
    X = {"tokens": torch.tensor([[1, 2], [3, 4], [0, 1]]), "scale": torch.tensor([[0.5], [1.0], [2.0]]).double()}
    net = Two().double()
    trajectory = epk.train(
        net, X, torch.tensor([0, 1, 0]), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), steps=1
    )
    assert appearance(trajectory, None, None).show(trajectory.inputs[1]) == {"text": "scale: 1; tokens: 3 4"}
    decoded = appearance(trajectory, None, lambda row: f"{row['tokens'].tolist()} by {float(row['scale'])}")
    assert decoded.show(trajectory.inputs[2]) == {"text": "[0, 1] by 2.0"}
    with pytest.raises(ValueError, match="names are those of the features of rows"):
        appearance(trajectory, ["a", "b", "c"], None)
