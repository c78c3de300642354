"""Themes of odd programs: what is odd in a loop, drawn from a seed, which decides everything."""

import random
from collections import Counter
from collections.abc import Callable

import torch
from odd_loops import FAULTS, OddLoop
from odd_parts import BY_ROW, CHANGES, MIXING, OPTIMIZERS, Clipping
from odd_programs import Program, outcome
from torch import nn

DERIVATIVES = ("influence", "influence", "self_influence", "smoothing", "retrain")
SUMS = ("attribute", "attribute", "reconstruct", "gram", "averaged")
ALL = (*DERIVATIVES, *SUMS)


def draw_program(seed: int, theme: str | None = None) -> Program:
    """Draw a program; its theme is what is odd."""
    theme = THEMES[seed % len(THEMES)] if theme is None else theme
    draw = random.Random(seed)
    name = draw.choice(list(OPTIMIZERS))
    if theme == "groups":
        name = draw.choice(["SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adafactor", "Adadelta"])
    if theme == "before":
        name = draw.choice(["RMSprop", "Adagrad", "Adadelta", "Adafactor", "Adam", "SGD"])
    loop = OddLoop(
        seed=draw.randrange(1 << 30),
        activation=draw.choice([nn.Tanh, nn.Tanh, nn.GELU, nn.Softplus]),
        net_kind=draw.choice(["mlp", "mlp", "mlp", "tied", "layer_norm", "batch_norm", "dropout", "convolution"]),
        loss=draw.choice(["cross_entropy", "cross_entropy", "smoothed", "weighted", "squares"]),
        reduction=draw.choice(["mean", "mean", "sum"]),
        optimizers=(name,),
        options=(draw.choice(OPTIMIZERS[name][2]),),
        decay=draw.choice([0.0, 0.0, 0.05]),
        steps=draw.randint(4, 7),
        batch=draw.choice([4, 5, None]),
        accumulated=draw.choice([1, 1, 1, 2]),
    )
    if loop.reduction == "sum" and name in ("SGD", "ASGD"):
        loop.rate = 0.2
    if draw.random() < 0.25:
        loop.schedule = tuple(draw.choice([0.5, 1.0, 1.5]) for _ in range(loop.steps))
    program = Program(theme, loop, draw.choice(ALL), draw)
    program.head = draw.choice([None, None, "logits"])
    program.stored = draw.choice([None, None, None, "disk"])
    PLANT[theme](program, draw, loop)
    if program.question in ("influence", "smoothing") and program.function is None:
        variant = draw.choice([None, None, "function", "chosen", "by", "truncate"])
        if variant == "function":
            program.function = draw.choice(list(BY_ROW))
        program.chosen = variant == "chosen"
        if variant == "by" and loop.loss != "squares" and not loop.ignored:
            program.by = draw.choice(["label", "step", "both"])
        if variant == "truncate" and program.question == "influence":
            program.truncate = draw.randint(1, loop.steps)
    if program.question == "attribute":
        program.path = draw.choice(["straight", "straight", "chords", "chords", "layerwise"])
    if draw.random() < 0.1 and program.files is None:
        program.checkpoint = True
    if program.question == "gram" and len(loop.optimizers) > 1:
        program.question = "attribute"
    return program


def plant_nothing(program: Program, draw: random.Random, loop: OddLoop) -> None:
    if draw.random() < 0.2:
        loop.clipping = clipping(program, draw.choice(["value", "norm"]), 2.0, is_reached=True, is_stated=True)
    if draw.random() < 0.2 and loop.net_kind == "mlp":
        other = draw.choice(["SGD", "Adam"])
        loop.optimizers, loop.options = (*loop.optimizers, other), (*loop.options, {})
    if draw.random() < 0.2:
        loop.passes = "evaluation"
    if draw.random() < 0.1:
        loop.seen, loop.inputs = draw.choice(["normalised", "noise"]), 8
    program.of_average = draw.random() < 0.1 and program.question in DERIVATIVES
    if draw.random() < 0.15:
        program.stored = "disk"
        program.resumes = draw.random() < 0.5


def plant_options(program: Program, draw: random.Random, loop: OddLoop) -> None:
    name, value = draw.choice(CHANGES[loop.optimizers[0]])
    makes_buffer = name == "momentum" and loop.optimizers[0] == "RMSprop"  # torch makes it at the first step only
    if name in ("nesterov", "dampening") or makes_buffer:
        loop.options = ({"momentum": 0.9},)
    if name == "amsgrad":
        loop.options = ({"amsgrad": True},)
    loop.change = (name, value, draw.randint(1, loop.steps - 2))
    loop.splits_groups = draw.random() < 0.25
    loop.changes_one_group = draw.random() < 0.5
    loop.changes_back = draw.random() < 0.3 and (name, value) != ("amsgrad", False)
    if draw.random() < 0.2:
        program.stored = draw.choice(["disk", "thinned"])
        program.resumes = draw.random() < 0.5
    program.question = draw.choice((*DERIVATIVES, *ALL))


def plant_groups(program: Program, draw: random.Random, loop: OddLoop) -> None:
    loop.net_kind = draw.choice(["mlp", "mlp", "layer_norm", "mlp"])
    if draw.random() < 0.8:
        loop.group_added = draw.randint(1, loop.steps - 2)
        if draw.random() < 0.5:
            name, value = draw.choice(CHANGES[loop.optimizers[0]])
            if name in ("eps", "betas", "alpha", "rho", "weight_decay", "beta2_decay"):
                loop.added_options = {name: value}
    else:
        loop.frozen_from = draw.randint(1, loop.steps - 2)
        loop.sets_to_none = draw.random() < 0.7
    program.question = draw.choice((*DERIVATIVES, *ALL))


def plant_before(program: Program, draw: random.Random, loop: OddLoop) -> None:
    loop.steps_before = draw.randint(1, 3)
    program.question = draw.choice((*DERIVATIVES, *ALL))


def plant_passes(program: Program, draw: random.Random, loop: OddLoop) -> None:
    loop.net_kind = "batch_norm"
    loop.passes = draw.choice(["no_grad", "no_grad", "unused", "reset", "reset"])
    loop.passes_at = draw.randrange(loop.steps)
    program.question = draw.choice((*DERIVATIVES, *ALL))
    program.sample_weights = draw.choice(["ones", "random"])


def clipping(program: Program, kind: str, norm_type: float, *, is_reached: bool, is_stated: bool) -> Clipping:
    norms = program.loop.run().norms
    place = 0 if kind == "value" or norm_type == float("inf") else int(norm_type)
    sizes = sorted(norm[place] for norm in norms)
    bound = 0.7 * sizes[len(sizes) // 2] if is_reached else 1.2 * sizes[-1]
    return Clipping(kind, float(f"{bound:.3g}"), norm_type, is_stated)


def plant_clipping(program: Program, draw: random.Random, loop: OddLoop) -> None:
    kind, norm_type = draw.choice([("value", 2.0), *(("norm", p) for p in (2.0, float("inf"), 1.0, 3.0))])
    is_reached, is_stated = draw.random() < 0.5, draw.random() < 0.6
    loop.clipping = clipping(program, kind, norm_type, is_reached=is_reached, is_stated=is_stated)
    loop.clips_part = draw.random() < 0.1 and loop.net_kind in ("mlp", "batch_norm", "layer_norm")
    program.question = draw.choice((*DERIVATIVES, *ALL))
    if draw.random() < 0.7:
        program.sample_weights = "threes"


def plant_parametrization(program: Program, draw: random.Random, loop: OddLoop) -> None:
    loop.net_kind = draw.choice(["weight_norm", "weight_norm", "spectral_norm", "orthogonal"])
    program.question = draw.choice((*DERIVATIVES, *ALL))


def plant_swapped(program: Program, draw: random.Random, loop: OddLoop) -> None:
    program.stored, program.files = draw.choice(["disk", "disk", "thinned"]), "trained_again"


def plant_function(program: Program, draw: random.Random, loop: OddLoop) -> None:
    program.question = draw.choice(["influence", "influence", "smoothing"])
    program.function = draw.choice(list(MIXING))


def plant_divergence(program: Program, draw: random.Random, loop: OddLoop) -> None:
    program.question, program.sample_weights = "retrain", "huge"
    loop.optimizers, loop.options, loop.loss = ("SGD",), ({},), "squares"


def plant_indices(program: Program, draw: random.Random, loop: OddLoop) -> None:
    loop.seen, loop.inputs = draw.choice(["normalised", "noise", "same"]), 8
    loop.announced = draw.choice(["counted", "within_subset", "shuffled"])
    loop.steps, loop.batch = 7, 5
    loop.schedule = ()
    program.question = draw.choice([*DERIVATIVES, *SUMS[:-2]])


ESTIMATORS = ("straight_through", "stop_gradient", "fake_quant", "embedding")


def plant_loaded(program: Program, draw: random.Random, loop: OddLoop) -> None:
    program.stored, program.files, loop.net_kind = "disk", "other_momentum", "batch_norm"
    program.question = draw.choice([*DERIVATIVES, *SUMS])
    program.sample_weights = draw.choice(["ones", "random"])


def plant_rarities(program: Program, draw: random.Random, loop: OddLoop) -> None:
    """What the package knows, in combinations that few loops have; float32 with the tolerance of float32."""
    loop.splits_groups = draw.random() < 0.3
    loop.repeats = draw.random() < 0.4
    loop.row_weights = draw.random() < 0.3
    loop.ignored = draw.random() < 0.3 and loop.loss in ("cross_entropy", "smoothed")
    loop.sets_to_none = draw.random() < 0.5
    if draw.random() < 0.3:
        loop.schedule = tuple(draw.choice([0.0, 1.0, 1.5]) for _ in range(loop.steps))
    if loop.net_kind == "batch_norm" and draw.random() < 0.5:
        loop.momentum = None
    program.executor = draw.random() < 0.1
    program.of_average = draw.random() < 0.3 and program.question in DERIVATIVES
    if draw.random() < 0.4:
        program.stored = draw.choice(["disk", "thinned"])
        program.resumes = draw.random() < 0.7
    if draw.random() < 0.2 and not program.of_average:
        loop.dtype = torch.float32
        program.question = draw.choice(["retrain", *SUMS])


def plant_mixture(program: Program, draw: random.Random, loop: OddLoop) -> None:
    """Several odd things at once."""
    for theme in draw.sample(["options", "groups", "clipping", "passes", "thinned", "parametrization"], 2):
        PLANT[theme](program, draw, loop)
    if loop.net_kind != "mlp":
        loop.group_added = None


def plant_fault(program: Program, draw: random.Random, loop: OddLoop) -> None:
    """One step that is not what the loop says."""
    loop.fault, loop.fault_at = draw.choice(FAULTS), draw.randrange(loop.steps)
    loop.net_kind = draw.choice(["mlp", "layer_norm", "batch_norm", "convolution"])
    loop.dtype = torch.float32 if loop.fault == "precision" else torch.float64
    program.question = draw.choice(["attribute", "reconstruct"])


PLANT: dict[str, Callable[[Program, random.Random, OddLoop], None]] = {
    "options": plant_options,
    "groups": plant_groups,
    "before": plant_before,
    "passes": plant_passes,
    "clipping": plant_clipping,
    "parametrization": plant_parametrization,
    "swapped": plant_swapped,
    "function": plant_function,
    "partial_sums": lambda p, draw, _: setattr(p, "files", draw.choice(["partial_sums"] * 2 + ["pieces"])),
    "divergence": plant_divergence,
    "indices": plant_indices,
    "estimator": lambda _, draw, loop: setattr(loop, "net_kind", draw.choice(ESTIMATORS)),
    "thinned": lambda p, *_: setattr(p, "stored", "thinned"),
    "loaded": plant_loaded,
    "rarities": plant_rarities,
    "mixture": plant_mixture,
    "sound": plant_nothing,
    "fault": plant_fault,
}
THEMES = tuple(PLANT)

ROWS: dict[str, tuple[str, ...]] = {
    "one fault: index, label, weight, reduction, order, precision, buffer, left-over gradient, replaced weights":
        ("fault",),
    "options changed in the loop, groups added, steps before the recording, clipping":
        ("options", "groups", "before", "clipping"),
    "forward passes without a loss, parametrizations, straight-through estimators, mixtures of all":
        ("passes", "loaded", "parametrization", "estimator", "rarities", "mixture"),
    "folders trained again, partial sums of other jobs, states that were left out":
        ("swapped", "partial_sums", "thinned"),
    "wrong indices under normalisation and noise, functions that mix rows, divergence":
        ("indices", "function", "divergence"),
    "nothing odd": ("sound",),
}  # fmt: skip


def count_outcomes(themes: tuple[str, ...], count: int, first: int = 0) -> tuple[Counter[str], list[str]]:
    """Count the outcomes of some programs, and describe those that are wrong.

    Args:
        themes: Their themes, in turn.
        count: Number of programs.
        first: The first seed.
    """
    counts: Counter[str] = Counter()
    wrong = []
    for seed in range(first, first + count):
        program = draw_program(seed, themes[seed % len(themes)])
        found = outcome(program)
        counts[found.split(":")[0]] += 1
        if ":" in found:
            wrong.append(f"seed {seed}: {found}: {program}")
    return counts, wrong
