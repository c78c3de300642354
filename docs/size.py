"""Count the code lines of the package, by folder and by capability, and the whole project: `make lint` prints them.

Figures with a limit show it. The command fails where one of the figures in `ENFORCED` is above its limit.

A code line is a line that is not blank, not a comment and not part of a docstring. A file belongs to the capability
with the longest pattern that fits its name.
"""

import ast
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "epk_gp"
MADE = re.compile(r"^<!-- made: .*?^<!-- end -->$", re.MULTILINE | re.DOTALL)  # what docs/expand.py writes
LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)

RELATIVE = "what how who whose which where when why"
DANGLING = f"{RELATIVE} of as that those it"  # a sentence must not begin with them
BEGINNING = re.compile(rf"(?:{'|'.join(DANGLING.split())})\b", re.IGNORECASE)
# "Return what …" (with any verb); "Return those …" (with the verbs that give something back: "Check that …" is good)
AFTER_VERB = re.compile(
    rf"[A-Za-z]+ (?:{'|'.join(RELATIVE.split())})\b"
    r"|(?:Return|Yield|Give|Say|Tell|List|Count|Read|Take)s? (?:of|as|that|those|it)\b"
)
ENTRY = re.compile(r" {4}\*{0,2}\w+(?: \([^)]*\))?: +(.*)")
DOCSTRINGS = "docstrings that begin with a relative word"
ARGUMENTS = "argument lines that begin with a relative word"
NAMES = "names in `__all__`"
LIMITS = {
    "code lines of epk_gp": 25_500,
    "files": 155,
    "files that exactly one other file imports": 15,
    NAMES: 47,
    "lines of tests": 37_000,
    "of these, words that are not made by docs/expand.py": 48_000,
    DOCSTRINGS: 20,
    ARGUMENTS: 20,
}
ENFORCED = (DOCSTRINGS, ARGUMENTS, NAMES)

# Capability -> patterns of files, relative to the package.
CAPABILITIES = {
    "the network as a function: inputs, outputs, graphs": (
        "core/graphs.py", "core/inputs.py", "core/model.py", "core/torch_overrides.py",
    ),
    "losses and targets": ("core/losses.py",),
    "runs, steps, checks of arguments": ("core/*.py",),
    "replay of training passes": ("core/gradients.py", "core/replayed_steps.py"),
    "optimizers and update rules": ("optimizers/*.py", "core/update_law.py"),
    "averaged weights, states that are computed again": ("core/states.py", "core/replay.py"),
    "plans and options of a computation": ("core/plans.py",),
    "how results show themselves": ("core/show.py",),
    "recording a loop": ("recording/*.py",),
    "checking recorded steps": (
        "recording/check.py", "recording/causes.py",
        "recording/passes.py",
    ),
    "Lightning and Hugging Face": ("recording/lightning.py", "recording/huggingface.py", "callbacks.py"),
    "runs on disk": ("storage/*.py",),
    "hostile and damaged files": (
        "storage/run.py", "storage/writer.py",
    ),
    "workers": ("work/*.py",),
    "layer Jacobians": ("autodiff/*.py",),
    "averages along lines (layerwise)": ("autodiff/secants.py",),
    "quadrature and paths": ("quadrature/*.py",),
    "kinks": ("quadrature/kinks.py",),
    "Gram blocks": ("gram/*.py",),
    "sketched features": ("gram/sketch.py", "gram/path_features.py", "autodiff/sketches.py"),
    "derivatives of the kernel in its points": ("gram/pairs.py", "kernels/values.py"),
    "attribution": ("kernel_machine/*.py",),
    "reconstruction and certificates": ("kernel_machine/reconstruct.py", "kernel_machine/certificate.py"),
    "influence and retraining": (
        "kernel_machine/influence*.py", "kernel_machine/curvature.py", "kernel_machine/retrain.py",
    ),
    "datamodels": ("datamodels/*.py",),
    "networks that were not recorded": ("trained/*.py",),
    "the GPyTorch kernel": ("kernels/*.py",),
    "processes on logits": ("gp/*.py",),
    "processes on labels, the classifier": (
        "gp/data.py", "gp/label_*.py", "gp/stacking.py", "gp/uncertain_*.py",
    ),
    "scikit-learn estimators": ("estimator.py", "estimators.py"),
    "scores and suspicious labels": (
        "analysis/labels.py", "analysis/measures.py",
    ),
    "anybody's scores, judged": ("analysis/score_check.py",),
    "numbers of a run: maps, contributions": ("analysis/*.py",),
    "adapters for other libraries": ("adapters/*.py",),
    "pictures": ("plots/*.py",),
    "the report": ("report/*.py", "cli/report.py"),
    "the command line": ("cli/*.py",),
    "names, data sets, provenance": ("*.py",),
}  # fmt: skip


def code_lines(text: str) -> int:
    """Count the lines of a file that are not blank, not comments and not docstrings: statements that are a string."""
    lines, statement = set[int](), list[tokenize.TokenInfo]()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.NEWLINE:
            if any(part.type != tokenize.STRING for part in statement):
                lines.update(line for part in statement for line in range(part.start[0], part.end[0] + 1))
            statement.clear()
        elif token.type not in LAYOUT:
            statement.append(token)
    return len(lines)


def capability(file: str) -> str:
    """Return the capability of a file, given by its path in the package."""
    names = {pattern: name for name, patterns in CAPABILITIES.items() for pattern in patterns}
    fitting = [p for p in names if p.count("/") == file.count("/") and fnmatch(file, p)]
    return names[max(fitting, key=len)]


def sizes() -> tuple[Mapping[str, tuple[int, int]], Mapping[str, tuple[int, int]]]:
    """Return (code lines, files) of every folder and of every capability."""
    lines, files = Counter[tuple[str, str]](), Counter[tuple[str, str]]()  # a folder may be named as a capability is
    for path in sorted(PACKAGE.rglob("*.py")):
        file = path.relative_to(PACKAGE).as_posix()
        folder = file.rpartition("/")[0] or "top level"
        count = code_lines(path.read_text(encoding="utf-8"))
        for key in (("folder", folder), ("capability", capability(file))):
            lines[key] += count
            files[key] += 1
    return (
        {name: (lines[kind, name], files[kind, name]) for kind, name in sorted(lines) if kind == "folder"},
        {name: (lines["capability", name], files["capability", name]) for name in CAPABILITIES},
    )


def imported_modules(file: Path) -> set[str]:
    """Return the modules of the package that a file imports."""
    modules = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("epk_gp"):
            modules.add(node.module)
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def sentence_faults(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line, kind) of the docstrings and argument lines that begin with a relative word: "Return what …"."""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if not (documentation := ast.get_docstring(node)):
            continue
        start = node.body[0].lineno
        if BEGINNING.match(documentation) or AFTER_VERB.match(documentation):
            yield start, DOCSTRINGS
        in_arguments = False
        for line, words in enumerate(documentation.splitlines(), start):
            if words and not words.startswith(" "):
                in_arguments = words in ("Args:", "Attributes:")
            elif in_arguments and (entry := ENTRY.match(words)) and BEGINNING.match(entry[1]):
                yield line, ARGUMENTS


def public_names() -> int:
    """Count the names that `epk_gp` exports: the imports that type checkers see."""
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return sum(len(node.names) for node in imports if node.module and node.module.startswith("epk_gp."))


def house() -> Mapping[str, int]:
    """Return how large the project is, in the figures that it is to keep small."""
    files = sorted(PACKAGE.rglob("*.py"))
    importers = Counter(module for file in files for module in imported_modules(file))
    names = [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files if file.name != "__init__.py"]
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    tests = sorted((ROOT / "tests").rglob("*.py"))
    faults = Counter(kind for file in files for _, kind in sentence_faults(file.read_text(encoding="utf-8")))
    return {
        "code lines of epk_gp": sum(code_lines(file.read_text(encoding="utf-8")) for file in files),
        "files": len(files),
        "files in the largest folder": max(Counter(file.parent for file in files).values()),
        "files that exactly one other file imports": sum(importers[name] == 1 for name in names),
        NAMES: public_names(),
        "lines of tests": sum(len(file.read_text(encoding="utf-8").splitlines()) for file in tests),
        "words of README and docs": sum(len(page.read_text(encoding="utf-8").split()) for page in pages),
        "of these, words that are not made by docs/expand.py": sum(
            len(MADE.sub("", page.read_text(encoding="utf-8")).split()) for page in pages
        ),
        DOCSTRINGS: faults[DOCSTRINGS],
        ARGUMENTS: faults[ARGUMENTS],
    }


def shown(name: str, number: int) -> str:
    """Return the row of a figure, with its limit, and marked where it is above."""
    limit = LIMITS.get(name)
    if limit is None:
        return f"{name:<52}{number:>12,}"
    return f"{name:<52}{number:>12,}  (≤ {limit:,}){'  ABOVE' if number > limit else ''}"


def above(figures: Mapping[str, int]) -> list[str]:
    """Return the enforced figures that are above their limits."""
    return [name for name in ENFORCED if figures[name] > LIMITS[name]]


def table(figures: Mapping[str, int]) -> str:
    """Return the table as text."""
    folders, capabilities = sizes()
    rows = [shown(name, number) for name, number in figures.items()]
    for title, part in (("folder", folders), ("capability", capabilities)):
        rows += [f"{title:<52}{'code lines':>12}{'files':>8}"]
        rows += [f"  {name:<50}{lines:>12,}{files:>8,}" for name, (lines, files) in part.items()]
    return "\n".join(rows)


def main() -> int:
    """Print the table, and return the exit status: 1 where an enforced figure is above its limit."""
    figures = house()
    print(table(figures))
    for name in above(figures):
        print(f"{name} must be at most {LIMITS[name]:,}: there are {figures[name]:,}.", file=sys.stderr)
    return 1 if above(figures) else 0


if __name__ == "__main__":
    sys.exit(main())
