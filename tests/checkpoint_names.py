"""Random names of checkpoints in their true order: a folder of them is read in that order, or refused.

A scheme draws what happened at each save, and writes names as programs write them. Its truth is the order of saving.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from pathlib import Path

from epk_gp.trained.checkpoints import listed

Draw = random.Random


def _ascending(draw: Draw, count: int, most: int = 400) -> list[int]:
    return sorted(draw.sample(range(most), count))


def _word(draw: Draw) -> str:
    return draw.choice(["model", "ckpt", "run", "net", "resnet18", "acc", "loss", "v2", "seed", "fold", "gpt2_", ""])


def _one_number(draw: Draw, count: int) -> list[str]:
    before = draw.choice(["epoch", "step", "iter", "checkpoint", "ckpt", "model", "weights", "global_step", ""])
    sign, digits = draw.choice("-_="), draw.choice([0, 0, 6])
    return [f"{before}{sign if before else ''}{k:0{digits}d}" for k in _ascending(draw, count)]


def _lightning(draw: Draw, count: int) -> list[str]:
    steps, each = _ascending(draw, count), draw.randint(5, 100)
    metric = draw.choice([None, "val_loss", "acc"])
    names = [f"epoch={k // each}-step={k}" for k in steps]
    return [f"{name}-{metric}={draw.random():.2f}" if metric else name for name in names]


def _steps_of_an_epoch(draw: Draw, count: int) -> list[str]:
    places = sorted(draw.sample([(epoch, step) for epoch in range(4) for step in range(0, 200, 25)], count))
    form = draw.choice(["epoch{}_step{}", "e{}s{}", "step{1}_epoch{0}", "ep{}-iter{}", "{}_{}", "cycle{}_epoch{}"])
    return [form.format(*place) for place in places]


def _measured(draw: Draw, count: int) -> list[str]:
    form = draw.choice(
        [
            "iter_{}_acc{}", "acc{1}_iter_{0}", "model_acc{1}", "loss{1}", "{0}_{1}", "model_{}_f{}", "{1}_acc",
            "model_{1}_hits",
        ]
    )  # fmt: skip
    return [form.format(k, draw.randrange(10, 99)) for k in _ascending(draw, count)]


def _decimal(draw: Draw, count: int) -> list[str]:
    form = draw.choice(["weights.{:02d}-{:.2f}", "epoch={}-val_loss={:.2f}", "{:03d}-loss{:.2f}", "model-{1:.2f}"])
    return [form.format(k, draw.random()) for k in _ascending(draw, count)]


def _dates(draw: Draw, count: int) -> list[str]:
    start = datetime(2023, 12, 28, 9) + timedelta(hours=draw.randrange(200))
    minutes = draw.choice([7, 60, 1440])
    times = [start + timedelta(minutes=minutes * k) for k in _ascending(draw, count)]
    form = draw.choice(
        [
            "%Y-%m-%d", "%d-%m-%Y", "%d%m%Y", "%m%d%y", "%Hh%M", "%Y-%m-%d_%H-%M-%S", "%d.%m", "%d.%m_%H", "%b%d",
            "%m.%d-v%H",
        ]
    )  # fmt: skip
    before = draw.choice(["", "ckpt_", "model-", "epoch_of_"])
    return [before + time.strftime(form) for time in times]


def _versions(draw: Draw, count: int) -> list[str]:
    saves = [(k // 3, k % 3) for k in _ascending(draw, count, 30)]  # a run that was begun again saves beside the first
    return [f"step{10 * step}-v{version}" if version else f"step{10 * step}" for step, version in saves]


def _restarts(draw: Draw, count: int) -> list[str]:
    form = draw.choice(["run{}_epoch{}", "{1}_run{0}", "stage{}-step{}", "fold{}.{}", "phase{}_{}k", "v1.{}_step{}"])
    return [form.format(k // 100, k % 100) for k in _ascending(draw, count)]


def _words(draw: Draw, count: int) -> list[str]:
    return [f"{_word(draw)}{k}{draw.choice(['', '', 'k', 'a', '_best'])}" for k in _ascending(draw, count)]


SCHEMES: tuple[Callable[[Draw, int], list[str]], ...] = (
    _one_number, _lightning, _steps_of_an_epoch, _measured, _decimal, _dates, _versions, _restarts, _words,
)  # fmt: skip


def draw_names(seed: int) -> list[str]:
    draw = random.Random(seed)
    names = SCHEMES[seed % len(SCHEMES)](draw, draw.randint(2, 6))
    suffix = draw.choice([".pt", ".ckpt", ".pth", ".pth.tar", ".safetensors"])
    extra = draw.choice([[]] * 6 + [["last"], ["best"]])
    return [f"{name}{suffix}" for name in [*dict.fromkeys(names), *extra]]


def order_read(names: Sequence[str], folder: Path) -> list[str] | None:
    """Return the order in which a folder of such files is read; None if it is refused."""
    for name in names:
        (folder / name).touch()
    try:
        return [Path(str(path)).name for path in listed(folder)]
    except ValueError:
        return None
    finally:
        for name in names:
            (folder / name).unlink()


def count_orders(folder: Path, seeds: range) -> tuple[Counter[str], list[list[str]]]:
    """Count folders that are read in the right order, refused, or wrong, and return the names of the wrong ones."""
    counts, wrong = Counter[str](), list[list[str]]()
    for seed in seeds:
        names = draw_names(seed)
        found = order_read(names, folder)
        counts["refused" if found is None else "right" if found == names else "wrong"] += 1
        wrong += [names] if found not in (None, names) else []
    return counts, wrong
