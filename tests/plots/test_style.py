"""One look for all figures: its colours, its style file, and how pictures are written."""

import itertools

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib import rcParams
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from PIL import Image

from epk_gp.plots import style

# Machado, Oliveira and Fernandes (2009), severity 1: what is left of linear RGB without one kind of cone.
BLINDNESS = {
    "none": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
TO_XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def lab(colour, kind="none"):
    """CIELAB of a colour as it is seen with a kind of colour blindness."""
    srgb = np.array(to_rgb(colour))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    seen = (np.array(BLINDNESS[kind]) @ linear).clip(0, 1)
    ratio = TO_XYZ @ seen / TO_XYZ.sum(1)
    f = np.where(ratio > (6 / 29) ** 3, np.cbrt(ratio), ratio * (29 / 6) ** 2 / 3 + 4 / 29)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(a, b, kind):
    return np.linalg.norm(lab(a, kind) - lab(b, kind))


@pytest.mark.parametrize("kind", BLINDNESS)
def test_opposites_and_the_first_classes_are_told_apart_in_each_kind_of_colour_blindness(kind):
    opposites = [
        (style.RAISED, style.LOWERED),
        (style.RIGHT, style.WRONG),
        (style.IN_DISTRIBUTION, style.OUT_OF_DISTRIBUTION),
    ]
    assert min(distance(a, b, kind) for a, b in [*opposites, *itertools.combinations(style.PALETTE[:3], 2)]) > 25
    assert distance("#4e8f2f", "#b2662f", "deuteranopia") < 25  # the negative control: green and red of one lightness


def test_equal_steps_of_a_map_look_equal_and_signs_have_the_colours_of_what_raises_and_lowers():
    steps = -np.diff([lab(style.COLORMAP(k)[:3])[0] for k in range(256)])
    assert 0.8 * steps.mean() < steps.min() <= steps.max() < 1.2 * steps.mean()
    for value, colour in ((0.0, to_rgb(style.LOWERED)), (0.5, (1, 1, 1)), (1.0, to_rgb(style.RAISED))):
        assert style.SIGNED(value)[:3] == pytest.approx(colour, abs=0.01)


def test_the_style_is_left_where_it_was_entered_and_has_a_name_for_a_whole_session():
    before = dict(rcParams)
    with style.figure_style():
        assert (rcParams["savefig.dpi"], rcParams["font.size"]) == (200, 9)
    assert dict(rcParams) == before
    with plt.style.context(style.STYLE):
        assert rcParams["axes.prop_cycle"].by_key()["color"] == list(style.PALETTE)


def test_the_marks_of_axes_have_the_style_when_they_are_drawn_later():
    @style.styled
    def draw():
        figure = style.new_figure(2.0)
        figure.subplots().plot([0, 1])
        return figure

    figure = draw()
    figure.draw_without_rendering()
    (ax,) = figure.axes
    assert figure.get_figwidth() == style.WIDTH
    assert {label.get_fontsize() for label in (*ax.get_xticklabels(), *ax.get_yticklabels())} == {style.SMALL}


def new_line() -> Figure:
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([0, 1, 4], color=style.PALETTE[0])
    return figure


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_same_figure_gives_the_same_bytes_and_a_picture_has_twice_the_pixels_of_the_page(suffix, tmp_path):
    files = [tmp_path / f"{name}{suffix}" for name in "ab"]
    for file in files:
        style.save_figure(new_line(), file, description="a line", palette=True)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert ("a line" in files[0].read_text(errors="ignore")) == (suffix == ".svg")  # compressed in a PNG
    if suffix == ".png":
        with Image.open(files[0]) as picture:
            assert (picture.size, picture.mode, picture.info["Description"]) == ((400, 200), "P", "a line")
