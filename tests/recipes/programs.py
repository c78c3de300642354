"""The programs of docs/recipes/, as they stand there: what a page shows is what the tests run."""

from dataclasses import replace
from pathlib import Path

from epk_gp.core.states import schedule_free_average
from recipes.problem import finish, itself

FOLDER = Path(__file__).parents[2] / "docs" / "recipes" / "programs"


def program(name, *, edited=itself):
    """Return a program as a recipe; `edited` may change its text."""

    def recipe():
        names, file = {"__name__": name}, FOLDER / f"{name}.py"
        exec(compile(edited(file.read_text()), file, "exec"), names)
        recorder = names["recorder"]
        output = recorder.options.get("output", itself)
        return finish(recorder, recorder.net, names["X_test"], recorder.X, recorder.y, output)

    recipe.__name__ = name
    return recipe


def compiled(text):
    """nanoGPT compiles its network when the optimizer is made; tests/recording compiles small ones with inductor."""
    return text.replace("\nrecorder = ", "\nnet = torch.compile(net, backend='aot_eager')\nrecorder = ")


compiled_nanogpt = program("nanogpt", edited=compiled)


def schedule_free():
    """The averaged weights are evaluated."""
    result = program("schedule_free")()
    if result.recorder.inner is None:
        return result
    run = result.trajectory
    return replace(result, path=schedule_free_average(run, network=result.net))


NAMES = (
    "accelerated", "airbench", "bert", "causal_lm", "distillation", "gan", "lora", "lstm", "nanogpt", "sam", "simclr",
    "streaming",
)  # fmt: skip
resnet18 = program("resnet18")
RECIPES = [*map(program, NAMES), schedule_free]
