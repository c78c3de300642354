"""Run the code of the first pages, write what each block prints below it, and draw the pictures of docs/quickstart.md.

A block's output is the fenced block of text right after it.
"""

import contextlib
import io
import json
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.text import Text

from epk_gp.core.show import CertificateWarning
from epk_gp.plots import attribution_bars, new_figure, save_figure
from epk_gp.plots.style import COLORMAP, EXACT, GREY, INK, PALETTE, styled

HERE = Path(__file__).parent
sys.path.append(str(HERE.parents[1] / "experiments"))
from drawings import compare_outputs  # noqa: E402

README = HERE.parents[1] / "README.md"
QUICKSTART = HERE.parent / "quickstart.md"
PAGES = (README, QUICKSTART, HERE.parent / "results.md")  # what their blocks print is written below them
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```$(?P<printed>\n\n```text\n(?P<text>.*?)^```$)?", re.MULTILINE | re.DOTALL
)
SHOWN_POINTS = 8  # test points whose probabilities are drawn


def blocks(page: str) -> list[tuple[str, str]]:
    """Return the code of a page, block by block, each with the output that the page shows."""
    return [(match["code"], match["text"] or "") for match in BLOCK.finditer(page)]


def run(page: str) -> tuple[dict[str, Any], list[str]]:
    """Run the code of a page in a folder that is then removed, and return its names and what each block prints."""
    names: dict[str, Any] = {}
    printed = []
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)  # of the rule that is not certified
        for code, _ in blocks(page):
            with contextlib.redirect_stdout(io.StringIO()) as out:
                exec(compile(code, "page", "exec"), names)
            printed.append(out.getvalue())
    return names, printed


def with_outputs(page: str, printed: list[str]) -> str:
    """Return the page with these outputs below its blocks."""
    texts = iter(printed)

    def shown(match: re.Match[str]) -> str:
        text = next(texts)
        return f"```python\n{match['code']}```" + (f"\n\n```text\n{text}```" if text else "")

    return BLOCK.sub(shown, page)


@styled
def machine(names: dict[str, Any]) -> Figure:
    """Draw what the kernel machines leave of the network's outputs."""
    figure = new_figure(3.7)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.2))
    for rule, result in (("one node", names["coarse"]), ("adaptive rule", names["result"])):
        compare_outputs(left, result.network, result.outputs, "differences", label=rule)
        compare_outputs(right, result.network, result.outputs, "errors", label=rule)
    left.set(title="kernel machine − network, to scale", xlabel="log probability of the network", ylabel="")
    right.set(title="its size, on a logarithmic axis", xlabel="log probability of the network", ylabel="")
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower center", ncols=2)
    for ax in (left, right):
        ax.get_legend().remove()
    return figure


@styled
def attribution(names: dict[str, Any]) -> Figure:
    """Draw the largest contributions to the first test point's prediction."""
    figure, c = new_figure(3.2), names["c"]
    output = f"log p(class {c})"
    attribution_bars(figure.subplots(), names["parts"].samples[0, c], names["y"], top=4, output=output)
    return figure


@styled
def influence(names: dict[str, Any]) -> Figure:
    """Draw the output with three training points, and without them: predicted and trained again."""
    c = names["c"]
    values = {
        "with the three points": names["effect"].outputs[0, c],
        "without them, predicted": names["effect"].predict(names["weights"])[0, c],
        "without them, trained again": names["retrained"][0, c],
    }
    figure = new_figure(1.7)
    ax = figure.subplots()
    bars = ax.barh(list(values), [float(value) for value in values.values()], color=[GREY, EXACT, INK], height=0.6)
    ax.bar_label(bars, [f"{float(value):.4f}".replace("-", "−") for value in values.values()], padding=3, fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.12)
    ax.grid(visible=False, axis="y")
    ax.set(title=f"What the derivative predicts, and what happens: log p(class {c}) of the first test point")
    return figure


@styled
def uncertainty(names: dict[str, Any]) -> Figure:
    """Draw class probabilities with their standard deviations."""
    mean, std, figure = names["u"].mean.numpy(), names["u"].std.numpy(), new_figure(2.8)
    ax, num_classes = figure.subplots(), mean.shape[1]
    for c in range(num_classes):
        x = [n + 0.18 * (c - (num_classes - 1) / 2) for n in range(SHOWN_POINTS)]
        style: dict[str, Any] = {"fmt": "osD"[c], "capsize": 3, "color": PALETTE[c], "label": f"class {c}"}
        ax.errorbar(x, mean[:SHOWN_POINTS, c], std[:SHOWN_POINTS, c], **style)
    ax.set(title="Class probabilities: mean ± standard deviation", ylabel="probability", ylim=(0, 1))
    ax.set_xticks(range(SHOWN_POINTS), [f"point {n}" for n in range(SHOWN_POINTS)])
    ax.legend(ncols=num_classes)
    return figure


@styled
def kernel(names: dict[str, Any]) -> Figure:
    """Draw the kernel matrix of the test points, ordered by class."""
    order = names["y_test"].argsort(stable=True)
    values = names["covariance"].detach()[order][:, order].numpy()
    figure = new_figure(3.6, 4.6)
    ax = figure.subplots()
    image = ax.imshow(values, cmap=COLORMAP, vmin=0)
    ends = names["y_test"].bincount().cumsum(0).tolist()
    starts = [0, *ends[:-1]]
    centres = [(start + end - 1) / 2 for start, end in zip(starts, ends, strict=True)]
    for end in ends[:-1]:
        ax.axhline(end - 0.5, color=EXACT)
        ax.axvline(end - 0.5, color=EXACT)
    words = [f"class {c}" for c in range(len(ends))]
    ax.set_xticks(centres, words)
    ax.set_yticks(centres, words)
    ax.grid(visible=False)
    ax.set_title("Kernel between test points, ordered by class")
    figure.colorbar(image, label="tr K(x, x′)").outline.set_visible(False)
    return figure


PICTURES: dict[str, Callable[[dict[str, Any]], Figure]] = {
    "machine": machine,
    "attribution": attribution,
    "influence": influence,
    "uncertainty": uncertainty,
    "kernel": kernel,
}


def words_of(figure: Figure) -> list[str]:
    """List the words of a figure, which its file keeps, so that a test can compare them."""
    return [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text) and text.get_text()]


def main() -> None:
    """Write outputs and pictures."""
    for file in PAGES:
        page = file.read_text()
        names, printed = run(page)
        file.write_text(with_outputs(page, printed))
        for name, draw in PICTURES.items() if file == QUICKSTART else ():
            figure = draw(names)
            save_figure(figure, HERE / f"quickstart_{name}.svg", description=json.dumps(words_of(figure)))


if __name__ == "__main__":
    main()
