"""The programs of docs/recipes/, as they stand there: what a page shows is what the tests run."""

import runpy
from pathlib import Path

from recipes.problem import finish, itself

FOLDER = Path(__file__).parents[2] / "docs" / "recipes" / "programs"


def program(name):
    """Return the program as a recipe."""

    def recipe():
        names = runpy.run_path(str(FOLDER / f"{name}.py"))
        recorder = names["recorder"]
        output = recorder.options.get("output", itself)
        return finish(recorder, names["net"], names["X_test"], recorder.X, recorder.y, output)

    recipe.__name__ = name
    return recipe


NAMES = ("accelerated", "bert", "distillation", "lora", "lstm", "nanogpt", "sam", "simclr")
RECIPES = [program(name) for name in NAMES]
MOVED_BETWEEN_STEPS = [program(name) for name in ("airbench", "gan", "schedule_free")]
