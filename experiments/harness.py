"""The command line of the experiments, and how their results are saved and read again."""

import argparse
import base64
import json
import os
import sys
import warnings
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image
from torch import Tensor

from epk_gp.core.show import CertificateWarning
from epk_gp.datasets import DATA_VARIABLE
from epk_gp.plots import save_figure
from epk_gp.provenance import Stopwatch, provenance
from saved_rows import ONLY_VARIABLE, ROWS_VARIABLE

Config = TypeVar("Config")
Result = TypeVar("Result")

GALLERY = Path(__file__).parents[1] / "docs" / "gallery"
_DESCRIPTION = "Description"  # of a PNG: the figure's words
_OF_SVG = "{http://purl.org/dc/elements/1.1/}description"


@dataclass(frozen=True)
class Experiment(Generic[Config, Result]):
    """One experiment, in one file.

    Attributes:
        name: Name of its files.
        config: Configuration of the full run.
        smoke: Configuration for the tests, which takes seconds and needs no data beyond scikit-learn's.
        result: The dataclass that `run` returns. Its fields hold what JSON has: numbers, text, lists and dictionaries.
            So the saved result equals it in every digit, and a picture drawn again is the same picture.
        run: Function that computes the result.
        draw: Function that draws a result.
        suffix: Format of the picture: ".svg" where lines and few marks are drawn, ".png" otherwise.
    """

    name: str
    config: Config
    smoke: Config
    result: Callable[..., Result]
    run: Callable[[Config], Result]
    draw: Callable[[Result], Figure]
    suffix: str = ".png"


def main(experiment: Experiment[Any, Any], arguments: Sequence[str] | None = None) -> None:
    """Run an experiment from the command line, or draw its saved result again."""
    parser = argparse.ArgumentParser(prog=experiment.name, description=sys.modules[experiment.run.__module__].__doc__)
    parser.add_argument("--smoke", action="store_true", help="use tiny sizes, for a few seconds")
    parser.add_argument("--redraw", action="store_true", help="draw the saved result again, and compute nothing")
    parser.add_argument("--out", type=Path, default=GALLERY, help="folder of the JSON and the PNG")
    parser.add_argument("--data-dir", type=Path, help=f"folder that holds mnist/ and the like; else {DATA_VARIABLE}")
    parser.add_argument(
        "--rows",
        type=Path,
        help=f"folder where rows of large tables are saved one by one and found again; else {ROWS_VARIABLE}",
    )
    parser.add_argument(
        "--only",
        help="regular expression: rows that are not saved are computed if it is found in their name, else left out",
    )
    options = parser.parse_args(arguments)
    for variable, value in (
        (DATA_VARIABLE, options.data_dir),
        (ROWS_VARIABLE, options.rows),
        (ONLY_VARIABLE, options.only),
    ):
        if value is not None:
            os.environ[variable] = str(value)
    options.out.mkdir(parents=True, exist_ok=True)
    file, picture = (options.out / f"{experiment.name}{suffix}" for suffix in (".json", experiment.suffix))
    if options.redraw:
        result = read_result(experiment, file)
    else:
        config, timer = (experiment.smoke if options.smoke else experiment.config), Stopwatch()
        result = experiment.run(config)
        content = {"experiment": experiment.name, "config": asdict(config), "results": asdict(result)}
        file.write_text(json.dumps(content | provenance(timer), allow_nan=False) + "\n")
    save_picture(experiment.draw(result), picture)
    print(
        f"written: {file.name} ({file.stat().st_size >> 10} KiB), {picture.name} ({picture.stat().st_size >> 10} KiB)"
    )


@contextmanager
def uncertified_results() -> Iterator[None]:
    """Leave out the warning of results that are not certified: here coarse rules are compared on purpose."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CertificateWarning)
        yield


def save_picture(figure: Figure, file: Path) -> None:
    """Write a PNG or an SVG, with what the figure says in words, so that a test can tell an old picture."""
    save_figure(figure, file, description=json.dumps(words_of(figure), ensure_ascii=False), palette=True)


def words_of(figure: Figure) -> list[str]:
    """List the titles, axis labels, legend entries and annotations of a figure, without the numbers of its ticks."""
    return [text.get_text() for text in texts_of(figure)]


def texts_of(artist: Artist) -> Iterator[Text]:
    """Yield the Text objects of `words_of`."""
    if isinstance(artist, Text) and artist.get_text():
        yield artist
    for child in [artist.label] if isinstance(artist, Axis) else artist.get_children():
        yield from texts_of(child)


def words_in(picture: Path) -> list[str]:
    """Read the words of the figure that `save_picture` wrote."""
    if picture.suffix == ".svg":
        return json.loads(next(ElementTree.parse(picture).iter(_OF_SVG)).text)
    with Image.open(picture) as image:
        return json.loads(image.info[_DESCRIPTION])


def read_result(experiment: Experiment[Config, Result], file: Path) -> Result:
    """Read a saved result.

    Raises:
        FileNotFoundError: There is no saved result.
    """
    if not file.is_file():
        raise FileNotFoundError(f"--redraw needs a saved result: there is no {file.name}. Run without --redraw first.")
    return experiment.result(**json.loads(file.read_text())["results"])


def floats_as_text(values: Tensor) -> dict[str, Any]:
    """Write a large array as its float64 bytes in base64: exact, and half of what its decimal digits take."""
    array = values.detach().cpu().double().numpy().astype("<f8")
    return {"shape": list(array.shape), "float64": base64.b64encode(array.tobytes()).decode()}


def floats_from_text(saved: dict[str, Any]) -> np.ndarray:
    """Undo `floats_as_text`."""
    return np.frombuffer(base64.b64decode(saved["float64"], validate=True), "<f8").reshape(saved["shape"])


def classes_as_text(classes: Tensor) -> list[str]:
    """Write a map of classes 0 … 9 as one string of digits per row: a third of what a list of lists takes."""
    return ["".join(map(str, row)) for row in classes.tolist()]


def classes_from_text(rows: list[str]) -> np.ndarray:
    """Undo `classes_as_text`."""
    return np.array([[int(c) for c in row] for row in rows])
