"""docs/files.md: the files of every command, and the names, shapes and dtypes of their arrays, are those written.

A run's arrays are on docs/format.md.
"""

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from commands import run
from written_files import PAGE, described, names, pattern

SIZES: dict[str, int] = {"n": 2, "N": 6, "M": 24, "C": 3, "K": 1, "S": 6, "R": 6, "L": 4, "D": 100, "P": 523}
OTHERS = {"uncertainty": {"n": 21}}
DESCRIBED = ("verify", "attribute", "uncertainty", "report")
RUNS = ("record",)
MADE = (*RUNS, *DESCRIBED)
FORMAT = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def fits(shape: str, found: tuple[int, ...], sizes: dict[str, int]) -> bool:
    """Whether a shape in letters is that of an array; letters that are not known get the size that is found."""
    letters = [letter for letter in shape.strip("()").split(", ") if letter]
    if letters and letters[-1] == "…":
        letters, found = letters[:-1], found[: len(letters) - 1]
    if len(letters) != len(found):
        return False
    for letter, size in zip(letters, found, strict=True):
        first, _, more = letter.partition(" + ")
        expected = int(first) if first.isdigit() else sizes.setdefault(first, size) + int(more or 0)
        if expected != size:
            return False
    return True


def row_of(table: list[list[str]], name: str) -> list[str] | None:
    return next((row for row in table if re.fullmatch(pattern(names(row[0])[0]), name)), None)


def differences(table: list[list[str]], arrays: dict[str, np.ndarray], dtypes: dict[str, str], **own: int) -> list[str]:
    """What a table says that the arrays are not; `own` are the sizes that are not `SIZES`."""
    sizes = SIZES | own
    found = {name: row_of(table, name) for name in arrays}
    told = [f"{name} is not on the page" for name, row in found.items() if row is None]
    told += [f"{row[0]} is not in the file" for row in table if row not in found.values()]
    for name, row in found.items():
        if row is not None and not fits(row[1], arrays[name].shape, sizes):
            told.append(f"{name}: {row[1]} is {arrays[name].shape}")
        if row is not None and dtypes.get(row[2], row[2]) != str(arrays[name].dtype):
            told.append(f"{name}: {row[2]} is {arrays[name].dtype}")
    return told


def read(file: Path) -> dict[str, np.ndarray]:
    if file.suffix == ".safetensors":
        return load_file(file)
    with np.load(file) as archive:
        return dict(archive)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folder that each command has written; the run is in float32, so that its dtype is not float64."""
    folder = tmp_path_factory.mktemp("written")
    made = {name: folder / name for name in MADE}
    recorded = made["record"]
    made["report"].mkdir()
    options = {
        "verify": ("--num-points", 2),
        "attribute": ("--num-points", 2, "--outputs", "predicted"),
        "report": ("--out", made["report"] / "report.html", "--num-points", 1),
        "uncertainty": ("--columns", "0,1", "--grid", 5),
    }
    data = ("--num-train", 24, "--num-test", 42, "--width", 5, "--steps", 6, "--dtype", "float32")
    assert run("record", "--out", recorded, *data) == 0
    for name in MADE:
        if name != "record":
            out = () if name == "report" else ("--out", made[name])
            assert run(name, recorded, *out, *options[name]) == 0, name
    return made


@pytest.mark.slow
@pytest.mark.parametrize("command", DESCRIBED)
def test_the_page_names_what_a_command_writes(written, command):
    page, folder = described(command), written[command]
    found = [file.name for file in folder.iterdir()]
    unknown = [file for file in found if not any(re.fullmatch(pattern(name), file) for name in page.files)]
    assert not unknown
    for name in page.files:
        assert any(re.fullmatch(pattern(name), file) for file in found), name
    for name, table in page.tables.items():
        file = max(file for file in folder.iterdir() if re.fullmatch(pattern(name), file.name))
        if file.suffix in (".safetensors", ".npz"):
            assert differences(table, read(file), {"*run*": "float32"}, **OTHERS.get(command, {})) == [], file.name
        else:
            assert keys(file) == {key for row in table for key in names(row[0])}, file.name
    for file in folder.iterdir():  # every table that there should be
        is_result = file.suffix == ".json" and "results" in json.loads(file.read_text())
        if file.suffix in (".safetensors", ".npz", ".csv") or is_result:
            assert any(re.fullmatch(pattern(name), file.name) for name in page.tables), file.name


def unknown_arrays(file: Path, page: str) -> list[str]:
    return [name for name in read(file) if f"`{re.sub(r'[.][0-9]+', '.N', name)}`" not in page]


@pytest.mark.slow
@pytest.mark.parametrize("command", RUNS)
def test_the_page_on_runs_names_all_files_and_arrays(written, command):
    files = list(written[command].iterdir())
    for file in files:
        if file.suffix == ".safetensors" and not file.name.startswith("resume"):
            assert unknown_arrays(file, FORMAT) == [], file.name
        if command == "record":
            assert re.sub(r"\d{6}", "NNNNNN", file.name) in FORMAT
    arrays = next(file for file in files if file.suffix == ".safetensors")
    assert unknown_arrays(arrays, "") != []  # the negative control


def keys(file: Path) -> set[str]:
    """The columns of a table, or the keys of a result."""
    if file.suffix == ".csv":
        with file.open(newline="") as stream:
            return set(next(csv.reader(stream)))
    return set(json.loads(file.read_text())["results"])


def test_every_command_that_writes_has_its_section():
    sections = re.findall(r"^## epk-gp (.*)$", PAGE, flags=re.MULTILINE)
    assert sections == ["record", *DESCRIBED, "demo"]


def test_another_shape_name_or_dtype_is_found():
    """The negative control."""
    table = [["`a`", "(n, M)", "*run*", ""], ["`b.NUMBERS`", "(S + 1, …)", "int64", ""]]
    arrays = {"a": np.zeros((2, 24), np.float32), "b.0.1": np.zeros((7, 7, 7), np.int64)}
    dtypes = {"*run*": "float32"}
    assert differences(table, arrays, dtypes) == []
    assert differences(table, {**arrays, "a": np.zeros((24, 2), np.float32)}, dtypes) == ["a: (n, M) is (24, 2)"]
    assert differences(table, {**arrays, "a": np.zeros((2, 24))}, dtypes) == ["a: *run* is float64"]
    assert differences(table, {"a": arrays["a"]}, dtypes) == ["`b.NUMBERS` is not in the file"]
    assert differences(table, {**arrays, "c": np.zeros(1)}, dtypes) == ["c is not on the page"]
