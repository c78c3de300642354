"""What the words of options stand for: rules, types, amounts of memory, folders."""

import os
import re
from pathlib import Path
from typing import Literal

import torch

from epk_gp.cli.options import Dtype
from epk_gp.quadrature.paths import WeightPath, chords, layerwise, straight
from epk_gp.quadrature.rules import Rule, adaptive, gauss_legendre, left_endpoint, left_riemann, midpoint
from epk_gp.storage.run import is_run
from epk_gp.storage.schema import HEADER

PARTIAL = "partial"  # folder of a long job's partial sums, which is removed when the job is done
_MAX_DIGITS = 18  # of a number of nodes; Python itself refuses to read thousands of them


def parse_rule(text: str) -> Rule:
    """Return the quadrature rule that an option names.

    Raises:
        ValueError: There is no rule of this name, or its number is missing or wrong.
    """
    name, colon, number = text.partition(":")
    try:
        if name == "adaptive":
            return adaptive(float(number)) if colon else adaptive()
        if name == "left-endpoint" and not colon:
            return left_endpoint()
        if name in ("gauss-legendre", "left-riemann", "midpoint") and colon:
            if not re.fullmatch(rf"-?[0-9]{{1,{_MAX_DIGITS}}}", number):
                raise ValueError(f"N must be a whole number of nodes, as in {name}:4: got {number[:40]!r}.")
            fixed = {"gauss-legendre": gauss_legendre, "left-riemann": left_riemann, "midpoint": midpoint}
            return fixed[name](int(number))
    except ValueError as error:
        if name == "adaptive":
            raise ValueError(
                f"--rule adaptive:TOL needs a positive number as its tolerance: got {number!r}."
            ) from error
        raise ValueError(f"--rule {text[:60]}: {error}") from error
    raise ValueError(
        f"--rule must be adaptive[:TOL], gauss-legendre:N, left-riemann:N, midpoint:N or left-endpoint: got {text!r}."
    )


def parse_path(text: str) -> WeightPath:
    """Return the path between the recorded states that an option names.

    Raises:
        ValueError: There is no path of this name, or its number is missing or wrong.
    """
    name, colon, number = text.partition(":")
    if name == "straight" and not colon:
        return straight()
    if name == "layerwise" and not colon:
        return layerwise()
    if name in ("chords", "layerwise") and colon:
        if not re.fullmatch(rf"[0-9]{{1,{_MAX_DIGITS}}}", number) or int(number) < 1:
            raise ValueError(
                f"--path {text[:60]}: K must be a whole number of steps from 1, as in {name}:20: got {number[:40]!r}."
            )
        return (chords if name == "chords" else layerwise)(int(number))
    raise ValueError(f"--path must be straight, chords:K or layerwise[:K]: got {text[:60]!r}.")


def parse_features(text: str | None) -> int | Literal["exact"] | None:
    """Return what --features asks for: a number of sketched features, none of them, or the choice by the run's size.

    Raises:
        ValueError: It is neither a whole number above 0 nor "exact".
    """
    if text is None or text == "exact":
        return None if text is None else "exact"
    if not re.fullmatch(r"[0-9]{1,7}", text) or int(text) < 1:
        raise ValueError(f"--features must be exact, or a whole number from 1 to 9999999: got {text[:40]!r}.")
    return int(text)


def torch_dtype(dtype: Dtype) -> torch.dtype:
    """Return torch's dtype of this name."""
    return torch.float32 if dtype is Dtype.float32 else torch.float64


def memory_bytes(memory: float) -> int:
    """Convert GiB to bytes."""
    return int(memory * 2**30)


def make_folder(out: Path) -> Path:
    """Create the folder for the results, before anything is computed, and return it.

    Raises:
        OSError: The folder cannot be created, or a file has its name.
    """
    require_folder(out)
    out.mkdir(parents=True, exist_ok=True)
    return out


def validate_folders(run: Path, out: Path | None) -> None:
    """Raise if a folder holds no run, or if the results would be written into it.

    Raises:
        FileNotFoundError: The folder holds no run.
        ValueError: The results would be written into the run's folder, or below it.
    """
    if not is_run(run):
        raise FileNotFoundError(f"RUN must hold a recorded run: {run / HEADER} does not exist.")
    if out is not None:
        require_outside(run, out, "--out")


def require_outside(run: Path, out: Path, option: str) -> None:
    """Raise if results would be written into the folder of a run.

    Raises:
        ValueError: They would.
    """
    if Path(os.path.realpath(out)).is_relative_to(os.path.realpath(run)):
        raise ValueError(f"{option} must lie outside the folder of the run: got {out}, and the run is {run}.")


def require_folder(out: Path) -> None:
    """Raise if a file has the name of the folder for the results.

    Raises:
        FileExistsError: A file has this name.
    """
    if out.exists() and not out.is_dir():
        raise FileExistsError(f"--out must be a folder: {out} is a file.")
