"""The programs of docs/recipes/, as they stand there: what a page shows is what the tests run."""

from pathlib import Path

from torch._inductor import config

from recipes.problem import finish, itself

FOLDER = Path(__file__).parents[2] / "docs" / "recipes" / "programs"


def program(name, *, edited=itself):
    """Return a program as a recipe; `edited` may change its text."""

    def recipe():
        names, file = {"__name__": name}, FOLDER / f"{name}.py"
        exec(compile(edited(file.read_text()), file, "exec"), names)
        recorder = names["recorder"]
        output = recorder.options.get("output", itself)
        return finish(recorder, names["net"], names["X_test"], recorder.X, recorder.y, output)

    recipe.__name__ = name
    return recipe


def compiled(text):
    """nanoGPT compiles its network when the optimizer is made."""
    return text.replace("\nrecorder = ", "\nnet = torch.compile(net)\nrecorder = ")


def compiled_nanogpt():
    with config.patch(fallback_random=True):  # otherwise its random numbers are not torch's
        return program("nanogpt", edited=compiled)()


RECIPES = [
    program(name) for name in ("accelerated", "bert", "distillation", "lora", "lstm", "nanogpt", "sam", "simclr")
]
MOVED_BETWEEN_STEPS = [program(name) for name in ("airbench", "gan", "schedule_free")]
COMPILED = [compiled_nanogpt]
