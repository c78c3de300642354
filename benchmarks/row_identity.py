"""Right and wrong indices under what loops do to rows: how often the recorder is wrong, and after how many batches.

Each loop only loads and changes rows, as a training would; the recorder's judgement of them needs no network. Images of
the user's own are read from EPK_GP_DATA (`mnist`, `fashion-mnist`, `kmnist`, as the tests read them); the others are
made: coloured images with the spectrum of photographs, sentences of words with Zipf's frequencies, a table of columns
of unlike sizes.

    python benchmarks/row_identity.py --batches 1000
"""

import argparse
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from epk_gp.core.losses import CrossEntropy
from epk_gp.core.row_identity import RowIdentity
from epk_gp.core.step import ForwardPass, SeenRows, Step
from epk_gp.datasets import mnist_folder

B, CLASSES = 16, 10
Recipe = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # rows and soft targets, to those of the loop


def images_of(name: str, count: int) -> tuple[Tensor, Tensor] | None:
    """Return images (count, 1, 28, 28) of EPK_GP_DATA and their labels, or None if they are not there."""
    folder = Path(os.environ.get("EPK_GP_DATA", "")) / name
    if not folder.is_dir():
        return None
    data = mnist_folder(folder, split="test", dtype=torch.float32)
    return data.inputs[:count], data.labels[:count]


def coloured_images(count: int) -> Tensor:
    """Return images (count, 3, 32, 32) whose amplitudes fall with the frequency, as those of photographs do."""
    frequency = (torch.fft.rfftfreq(32) ** 2 + torch.fft.fftfreq(32)[:, None] ** 2).sqrt()
    noise = torch.fft.irfft2(torch.fft.rfft2(torch.randn(count, 3, 32, 32)) / (frequency + 0.02), s=(32, 32))
    x = 0.7 * noise.mean(dim=1, keepdim=True) + 0.3 * noise
    x[CLASSES:] += 0.5 * x[torch.arange(CLASSES, count) % CLASSES]  # images of a class are alike
    images: Tensor = (0.5 + 0.25 * x / x.std()).clamp(0, 1)
    return images


def sentences(count: int) -> Tensor:
    """Return token numbers (count, 32) of a vocabulary of 1,000, padded with 0."""
    tokens = torch.multinomial(1 / torch.arange(1, 1000.0), count * 32, replacement=True).reshape(count, 32) + 1
    return tokens * (torch.arange(32) < torch.randint(8, 33, (count, 1)))


def table(count: int) -> Tensor:
    """Return ten columns of sizes from 0.01 to 10,000; rows of a class are alike."""
    centres = torch.randn(CLASSES, 10)[torch.arange(count) % CLASSES]
    return (centres + torch.randn(count, 10)) * torch.logspace(-2, 4, 10) + 3


def normalised(x: Tensor) -> Tensor:
    return (x - 0.47) / 0.23


def mirrored(x: Tensor) -> Tensor:
    return torch.where((torch.rand(len(x)) < 0.5).reshape(-1, 1, 1, 1), x.flip(-1), x)


def cropped(x: Tensor, padding: int = 4) -> Tensor:
    size, padded = x.shape[-1], F.pad(x, [padding] * 4)
    corners = torch.randint(2 * padding + 1, (len(x), 2)).tolist()
    return torch.stack([image[:, t : t + size, s : s + size] for image, (t, s) in zip(padded, corners, strict=True)])


def resized_crops(x: Tensor, smallest: float = 0.08) -> Tensor:
    """Cut out 8 to 100 % of each image, and resize it to the whole (RandomResizedCrop)."""
    size, found = x.shape[-1], []
    for image in x:
        side = max(2, round(size * math.sqrt(smallest + (1 - smallest) * float(torch.rand(())))))
        top, left = torch.randint(size - side + 1, (2,)).tolist()
        part = image[None, :, top : top + side, left : left + side]
        found.append(F.interpolate(part, size=(size, size), mode="bilinear", align_corners=False)[0])
    return torch.stack(found)


def jittered(x: Tensor) -> Tensor:
    """Change brightness, contrast and the balance of colours by up to 40 %."""
    n, c = x.shape[:2]
    x = x * (0.6 + 0.8 * torch.rand(n, 1, 1, 1)) + 0.4 * (torch.rand(n, c, 1, 1) - 0.5)
    mean = x.mean(dim=(1, 2, 3), keepdim=True)
    return (mean + (x - mean) * (0.6 + 0.8 * torch.rand(n, 1, 1, 1))).clamp(0, 1)


def rotated(x: Tensor, degrees: float = 30, shear: float = 0.3, shift: float = 0.2) -> Tensor:
    angle, skew, *move = (2 * torch.rand(4, len(x)) - 1) * torch.tensor([degrees * math.pi / 180, shear, shift, shift])[
        :, None
    ]
    first = torch.stack([angle.cos(), skew - angle.sin(), move[0]], dim=1)
    second = torch.stack([angle.sin(), angle.cos(), move[1]], dim=1)
    grid = F.affine_grid(torch.stack([first, second], dim=1), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, align_corners=False)


def erased(x: Tensor, side: int = 16) -> Tensor:
    x, size = x.clone(), x.shape[-1]
    for image in x:
        top, left = torch.randint(size, (2,)).tolist()
        image[:, max(0, top - side // 2) : top + side // 2, max(0, left - side // 2) : left + side // 2] = 0
    return x


OPERATIONS: list[Callable[[Tensor], Tensor]] = [
    lambda x: x,
    rotated,
    lambda x: rotated(x, 0, 0.5, 0.3),
    lambda x: 1 - x,
    lambda x: torch.where(x > 0.5, 1 - x, x),
    lambda x: (4 * x).floor() / 4,
    jittered,
    lambda x: erased(x, 10),
    lambda x: F.avg_pool2d(x, 3, 1, 1),
]


def rand_augmented(x: Tensor) -> Tensor:
    """Do two of nine operations to each image: RandAugment's, but for two of colour."""
    for _ in range(2):
        choices = torch.randint(len(OPERATIONS), (len(x),)).tolist()
        x = torch.cat([OPERATIONS[choice](image[None]) for choice, image in zip(choices, x, strict=True)])
    return x


def mixed(x: Tensor, q: Tensor, alpha: float) -> tuple[Tensor, Tensor]:
    share, partner = float(torch.distributions.Beta(alpha, alpha).sample()), torch.randperm(len(x))
    return share * x + (1 - share) * x[partner], share * q + (1 - share) * q[partner]


def cut_and_mixed(x: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    size, partner = x.shape[-1], torch.randperm(len(x))
    side = int(size * math.sqrt(1 - float(torch.rand(()))))
    top, left = torch.randint(size - side + 1, (2,)).tolist()
    x, other, share = x.clone(), x[partner], 1 - side * side / size**2
    x[:, :, top : top + side, left : left + side] = other[:, :, top : top + side, left : left + side]
    return x, share * q + (1 - share) * q[partner]


def masked(x: Tensor) -> Tensor:
    return torch.where(torch.rand(x.shape) < 0.15, 1001, x)


def moved(x: Tensor) -> Tensor:
    """Leave out up to a quarter of the tokens at the start."""
    return torch.stack([F.pad(row[k:], (0, k)) for row, k in zip(x, torch.randint(9, (len(x),)).tolist(), strict=True)])


def rows_only(change: Callable[[Tensor], Tensor]) -> Recipe:
    return lambda x, q: (change(x), q)


IMAGES: dict[str, Recipe] = {
    "normalisation": rows_only(normalised),
    "flips": rows_only(lambda x: normalised(mirrored(x))),
    "crops and flips": rows_only(lambda x: normalised(cropped(mirrored(x)))),
    "colour": rows_only(lambda x: normalised(mirrored(jittered(x)))),
    "noise": rows_only(lambda x: normalised(x) + 0.5 * torch.randn_like(x)),
    "rotation, shear": rows_only(lambda x: normalised(rotated(x))),
    "RandAugment": rows_only(lambda x: normalised(rand_augmented(cropped(mirrored(x))))),
    "cutout": rows_only(lambda x: normalised(erased(cropped(mirrored(x))))),
    "mixup": lambda x, q: mixed(normalised(cropped(mirrored(x))), q, 0.2),
    "mixup, alpha 1": lambda x, q: mixed(normalised(cropped(mirrored(x))), q, 1.0),
    "CutMix": lambda x, q: cut_and_mixed(normalised(cropped(mirrored(x))), q),
    "resized crops": rows_only(lambda x: normalised(mirrored(resized_crops(x)))),
    "resized crops, colour": rows_only(lambda x: normalised(mirrored(resized_crops(jittered(x))))),
}
TEXT: dict[str, Recipe] = {
    "masking": rows_only(masked),
    "cropping": rows_only(moved),
    "both": rows_only(lambda x: masked(moved(x))),
}


def of_columns(X: Tensor) -> dict[str, Recipe]:
    """Return recipes of a table with its columns' means and deviations."""
    mean, deviation = X.mean(dim=0), X.std(dim=0)
    change: Callable[[Tensor], Tensor] = lambda x: (x - mean) / deviation  # noqa: E731
    return {
        "normalised columns": rows_only(change),
        "noise": rows_only(lambda x: change(x) + 0.3 * torch.randn_like(x)),
        "a tenth of the entries left out": rows_only(lambda x: change(x) * (torch.rand(x.shape) > 0.1)),
        "mixup": lambda x, q: mixed(change(x), q, 0.2),
    }


def loops(y: Tensor) -> dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Return which rows, and labels of which, a loop loads where it announces others, by what is wrong."""
    M = len(y)
    numbers, order = torch.randperm(M), torch.randperm(M)
    same_class = torch.empty(M, dtype=torch.long)
    for c in range(CLASSES):
        members = order[y[order] == c]
        same_class[members] = members.roll(1)
    return {
        "right": lambda rows: (rows, rows),
        "another row and its label": lambda rows: (numbers[rows], numbers[rows]),
        "another row, the label of the announced one": lambda rows: (numbers[rows], rows),
        "another row of the same class": lambda rows: (same_class[rows], rows),
    }


def batches_of(size: int, count: int) -> Iterator[Tensor]:
    """Return the batches of as many epochs as it takes."""
    rest = torch.randperm(size)
    for _ in range(count):
        rest = rest if len(rest) >= B else torch.randperm(size)
        yield rest[:B]
        rest = rest[B:]


def steps_of(
    X: Tensor, y: Tensor, recipe: Recipe, loads: Callable[[Tensor], tuple[Tensor, Tensor]], count: int
) -> Iterator[Step]:
    """Return the steps of a loop as a recorder keeps them."""
    for number, rows in enumerate(batches_of(len(X), count)):
        loaded, labelled = loads(rows)
        seen, q = recipe(X[loaded], F.one_hot(y[labelled], CLASSES).double())
        other = (q != F.one_hot(y[rows], CLASSES)).any(dim=1).nonzero().squeeze(1)
        targets = SeenRows(other, q[other]) if len(other) else None
        forward = ForwardPass(B, inputs=SeenRows(torch.arange(B), seen), targets=targets)
        yield Step(number, 0.1, rows, None, (forward,))


def all_data(count: int) -> dict[str, tuple[Tensor, Tensor, dict[str, Recipe]]]:
    """Return inputs, labels and recipes by the name of the data."""
    found = {name: images_of(name, count) for name in ("mnist", "fashion-mnist", "kmnist")}
    data = {name: (*images, IMAGES) for name, images in found.items() if images is not None}
    labels, X = torch.arange(count) % CLASSES, table(count)
    made = {
        "coloured images": (coloured_images(count), labels, IMAGES),
        "sentences": (sentences(count), labels, TEXT),
        "table": (X, labels, of_columns(X)),
    }
    return data | made


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=1000, help="of each right loop; wrong ones have 256 at most")
    parser.add_argument("--points", type=int, default=4000)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    names = list(loops(torch.arange(CLASSES)))
    print(f"| data | loop | {' | '.join(names)} |\n|{'---|' * (2 + len(names))}")
    for name, (X, y, recipes) in all_data(arguments.points).items():
        for label, recipe in recipes.items():
            cells = []
            for wrong, loads in loops(y).items():
                identity, errors, doubts = RowIdentity(X, y, CrossEntropy()), list[int](), 0
                count = arguments.batches if wrong == "right" else min(256, arguments.batches)
                for step in steps_of(X, y, recipe, loads, count):
                    judged = identity.num_judged
                    if identity.look_at(step) is not None:
                        errors.append(step.index + 1)
                        if wrong != "right":
                            break
                    doubts += identity.num_judged > judged and identity.doubt is not None
                if wrong == "right":
                    cells.append(f"{identity.num_judged} judged, {doubts} doubts, {len(errors)} errors")
                else:
                    cells.append(f"{errors[0]}" if errors else "doubted" if identity.doubt else "not found")
            print(f"| {name} | {label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
