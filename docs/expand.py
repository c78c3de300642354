"""Write into the pages what they show of other files: saved results, parts of the README, lists of modules.

Pages are committed as they are read. What is made stands between two comments, which no reader sees:
`<!-- made: KIND ARGUMENTS -->` and `<!-- end -->`. This command writes it anew in every page; a test compares it.
"""

import ast
import importlib.util
import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]  # the README first: other pages show parts of it
MADE = re.compile(r"^<!-- made: (\w+)( [^\n]*)? -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)


def _module(file: Path) -> ModuleType:
    """Import a file that is in no package, and needs nothing beyond Python."""
    specification = importlib.util.spec_from_file_location(file.stem, file)
    if specification is None or specification.loader is None:
        raise FileNotFoundError(f"the pages' tables must be made by {file}: there is no such file.")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


GALLERY = DOCS / "gallery"
ATTRIBUTION = ROOT / "benchmarks" / "attribution"
LANGUAGE_MODELS = ROOT / "benchmarks" / "language_models.json"
METHODS = _module(DOCS / "method_tables.py")
SCORES = _module(ATTRIBUTION / "report.py")
OUTSIDE = ROOT / "benchmarks" / "outside"
JUDGES = _module(OUTSIDE / "report.py")
PAPER = _module(DOCS / "paper" / "numbers.py")


def main() -> None:
    """Write all pages anew, and name those that changed."""
    for page in PAGES:
        text = page.read_text()
        if (new := expanded(text, page)) != text:
            page.write_text(new)
            print(page.relative_to(ROOT))


def expanded(text: str, page: Path) -> str:
    """Return the text of a page with everything that is made as its sources are now."""

    def made(match: re.Match[str]) -> str:
        arguments = (match[2] or "").split()
        lines = KINDS[match[1]](page, *arguments).strip("\n")
        return f"<!-- made: {match[1]}{match[2] or ''} -->\n\n{lines}\n\n<!-- end -->"

    return MADE.sub(made, text)


def written(text: str) -> str:
    """Return the text of a page without everything that is made."""
    return MADE.sub("", text)


def _file(page: Path, file: str) -> str:
    return (ROOT / file).read_text()


def _program(page: Path, file: str, language: str = "python") -> str:
    """Return a program, whose path begins at the page's folder, as code; tests of pages run `python`, and not `py`."""
    return f"```{language}\n{(page.parent / file).read_text()}```"


def _section(page: Path, *heading: str) -> str:
    """Return what stands in the README under a heading, with links from here."""
    words = re.escape(" ".join(heading))
    readme = (ROOT / "README.md").read_text()
    found = re.search(rf"^(##+) {words}\n(.*?)(?=^##+ |\Z)", readme, re.MULTILINE | re.DOTALL)
    if found is None:
        raise ValueError(f"{page.name} must name a heading of the README: there is no {' '.join(heading)!r}.")
    return found[2].replace("](docs/", "](")


IMPORT = re.compile(r"^ *from (epk_gp(?:\.\w+)*) import (?:\(([^)]*)\)|([^\n(]*))", re.MULTILINE)
DOTTED = re.compile(r"\b(epk_gp(?:\.\w+)+)\.(\w+)")
# pages that name internal things too
INTERNAL = {"theory.md", "glossary.md", "engine.md", "design.md", "format.md", "reliability.md", "layer.md"}


@cache
def public_names() -> dict[str, str]:
    """Map every public name to its module: what packages export, and what a page imports or gives in full."""
    found: dict[str, str] = {}
    for init in sorted((ROOT / "epk_gp").rglob("__init__.py")):
        exported = [(module, name) for module, name in _imported(init.read_text()) if name in _definitions()]
        found |= {name: module for module, name in exported if module.startswith("epk_gp.")}
    defined = _definitions()
    for page in PAGES:
        text = "" if page.name in INTERNAL else written(page.read_text())
        for module, name in [*_imported(text), *DOTTED.findall(text)]:
            modules = [where for where in defined.get(name, ()) if where == module] or [*defined.get(name, ())]
            if len(modules) == 1:  # a name may be imported from where it is not defined
                found.setdefault(name, modules[0])
    return found


@cache
def top_level() -> tuple[str, ...]:
    """Return the names of the top level, in order."""
    return tuple(sorted(name for _, name in _imported((ROOT / "epk_gp" / "__init__.py").read_text())))


def home(name: str, module: str) -> str:
    """Return where a public name of a module is imported from."""
    if name in top_level():
        return "epk_gp"
    if module.startswith("epk_gp.recording."):  # the callbacks
        return "epk_gp.callbacks"
    return ".".join(module.split(".")[:2])


def _imported(text: str) -> list[tuple[str, str]]:
    """List the names that a text imports from modules of the package, each with the module."""
    return [
        (match[1], name)
        for match in IMPORT.finditer(text)
        for word in re.sub(r"#[^\n]*", "", match[2] or match[3]).split(",")
        if (name := word.split(" as ")[0].strip())
    ]


@cache
def _definitions() -> dict[str, dict[str, ast.ClassDef | ast.FunctionDef]]:
    """Map the names of all classes and functions to the modules that define them, with their definitions."""
    found: dict[str, dict[str, ast.ClassDef | ast.FunctionDef]] = {}
    for file in sorted((ROOT / "epk_gp").rglob("*.py")):
        module = ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
                found.setdefault(node.name, {})[module] = node
    return found


def _names(page: Path, *packages: str) -> str:
    """Return the public names of packages with their summaries; docs/hooks.py shows all of the docstrings."""
    for package in packages:
        path = ROOT.joinpath(*package.split("."))
        if not (path.is_dir() or path.with_suffix(".py").is_file()):
            raise FileNotFoundError(f"{package} must be a package or a module: there is no {path}.")
    rows = [
        [f"`{name}`", f"`{home(name, module)}`", _summary(_definitions()[name][module])]
        for name, module in sorted(public_names().items(), key=lambda item: item[0].casefold())
        if any(module == package or module.startswith(f"{package}.") for package in packages)
    ]
    return METHODS.markdown_table(["name", "import it from", "what it is or does"], rows)


def _exported(page: Path) -> str:
    """Return the names of the top level by the page of the reference that has them."""
    rows = []
    for other in sorted(page.parent.glob("*.md")):
        text = other.read_text()
        for packages in re.findall(r"^<!-- made: names ([^\n]*) -->$", text, re.MULTILINE):
            prefixes = tuple(f"{package}." for package in packages.split())
            names = [f"`{name}`" for name in top_level() if f"{public_names()[name]}.".startswith(prefixes)]
            if names:
                rows.append([", ".join(names), f"[{text.splitlines()[0].removeprefix('# ')}]({other.name})"])
    return METHODS.markdown_table(["name", "page"], rows)


def _summary(node: ast.ClassDef | ast.FunctionDef) -> str:
    """Return a docstring's first paragraph in one line, as Markdown that shows it as it is."""
    words = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    parts = re.split(r"(`[^`]*`)", words)
    plain = [part if part.startswith("`") else re.sub(r"([<*_\[\]$])", r"\\\1", part) for part in parts]
    return "".join(plain).replace("|", r"\|")


@cache
def _saved(name: str) -> dict:
    elsewhere = {
        "attribution": ATTRIBUTION / "results.json",
        "judged": ATTRIBUTION / "judged.json",
        "datamodels": ATTRIBUTION / "datamodels.json",
        "language_models": LANGUAGE_MODELS,
        "benchmarks": ROOT / "benchmarks" / "results.json",
        "faults": ROOT / "benchmarks" / "faults.json",
        "paths": ROOT / "benchmarks" / "paths.json",
    }
    return json.loads(elsewhere.get(name, GALLERY / f"{name}.json").read_text())


def _outside(page: Path, name: str, *judge: str) -> str:
    """Return the tables of outside judges in a file, or of the one that is named; nothing where there is no file."""
    file = OUTSIDE / f"{name}.json"
    return JUDGES.tables(json.loads(file.read_text()), " ".join(judge)) if file.exists() else "*Not measured yet.*"


def _tables(page: Path, name: str, *tables: str) -> str:
    return "\n\n".join(TABLES[table](_saved(name)) for table in tables)


def headline() -> str:
    """Return the results of the index and the README, each with what it is measured beside."""
    r = _saved("fig04_machine")["results"]
    errors = dict(zip(r["rules"], r["max_error"], strict=True))
    adaptive = next(i for i, name in enumerate(r["rules"]) if name.startswith("adaptive"))
    exact = f"network and kernel machine differ by at most **{r['max_error'][adaptive]:.1e}**"
    cost = f"{r['evaluations'][adaptive]:.1f} evaluations per point and step, 300 steps, float64"
    rows = _saved("counterfactual")["results"]["table"]
    problems = len({row["problem"] for row in rows})
    agreement = {
        (name, kind): _range(
            [row["leave-one-out"][0] for row in rows if row["score"] == name and row["problem"].startswith(kind)], 2
        )
        for name in ("influence", "contributions", "TracIn (captum)")
        for kind in ("tanh", "relu", "")
    }
    halves = json.loads((ATTRIBUTION / "datamodels.json").read_text())["results"]["table"]
    recording = json.loads((ROOT / "benchmarks" / "recording_overhead.json").read_text())
    areas, small = _areas(), json.loads((ROOT / "benchmarks" / "small_networks.json").read_text())
    trainings = {(row["question"], row["optimizer"]): f"{row['trainings']:.1f}" for row in small["questions"]}
    one, ten = ([trainings[f"attribute of {n}", name] for name in ("SGD", "Adam")] for n in (1, 10))
    lines = [
        ["Is it exact?", f"{exact} ({cost})", f"the paper's rule, 100 nodes: {errors['left Riemann 100']:.1e}"],
        [
            "What would change without a training point?",
            f"rank correlation with retraining without each: **{agreement['influence', 'tanh']}** with tanh, "
            f"**{agreement['influence', 'relu']}** with ReLU ({problems} problems on digits)",
            f"TracIn {agreement['TracIn (captum)', '']}; our contributions {agreement['contributions', '']}: exact is "
            "not causal",
        ],
        [
            "What would change without half of them?",
            f"linear datamodeling score {_without_half(halves, 'path training')}, recording included "
            f"({', '.join(IMAGES)})",
            f"TRAK of ten networks {_without_half(halves, 'TRAK-10 (traker)')}; "
            f"EK-FAC {_without_half(halves, 'EK-FAC (kronfluence)')}",
        ],
        [
            "Is this input of another kind?",
            f"area under the ROC curve **{areas['EPK-GP']}** (MNIST and Fashion-MNIST, against each other and KMNIST)",
            f"softmax {areas['softmax, as trained']}; nearest training image {areas['kNN, pixels']}; "
            f"NTK at the last step {areas['NTK-GP, last step']}",
        ],
        [
            "What does a question cost?",
            f"**{one[0]}** (SGD) and **{one[1]}** (Adam) trainings of a small network "
            "(2-32-32-3, 300 points, 200 steps)",
            f"ten questions {ten[0]} and {ten[1]}; three, one state at a time: {small['together'][0]['1']:.0f}",
        ],
        [
            "What does recording cost?",
            f"a step takes **{_range([row['later'] for row in recording], 2)}** times as long "
            f"({len(recording)} networks of 0.7 to 22.7 million weights)",
            f"copying weights alone: {_range([row['floor'] for row in recording], 2)}; a network of 25,450 weights: "
            f"{_range([row['parts']['recording'] / row['training'] for row in halves if _is_small(row)], 1)} trainings",
        ],
    ]
    return METHODS.markdown_table(["question", "result", "beside it"], lines)


IMAGES = "digits", "Fashion-MNIST", "KMNIST"  # problems of benchmarks/attribution/datamodels.json


def _without_half(rows: list[dict], system: str) -> str:
    """Return the scores of a system on halves of the samples, and their price: the means over seeds of each problem."""
    of_system = [[r for r in rows if (r["system"], r["problem"]) == (system, problem)] for problem in IMAGES]
    scores = [sum(row["half"][0] for row in found) / len(found) for found in of_system]
    costs = [sum(row["trainings"] for row in found) / len(found) for found in of_system]
    mark = "**" if system == "path training" else ""
    return f"{mark}{_range(scores, 2)}{mark} for {_range(costs, 0 if min(costs) > 10 else 1)} trainings"


def _is_small(row: dict) -> bool:
    """Tell whether a row is of a recorded run of those problems."""
    return row["system"] == "path training" and row["problem"] in IMAGES


def _areas() -> dict[str, str]:
    """Return the areas under the ROC curve of inputs of another kind, by methods."""
    r = _saved("judged_networks")["results"]
    columns = [METHODS.method_means(r["table"], measure)[0] for measure in METHODS.outside_measures(r)[:4]]
    return {name: _range([column[name] for column in columns], 3) for name in columns[0]}


def _range(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _spread(pair: list[float], digits: int = 3) -> str:
    return f"{pair[0]:.{digits}f} ± {pair[1]:.{digits}f}"


def _rules(saved: dict) -> str:
    r = saved["results"]
    columns = zip(r["rules"], r["evaluations"], r["max_error"], strict=True)
    rows = [[name, f"{count:.1f}", f"{error:.1e}"] for name, count, error in columns]
    return METHODS.markdown_table(["rule", "evaluations per point and step", "largest error"], rows)


def _scores(saved: dict) -> str:
    """Return a score a line: the ranges of its means over the problems with tanh and with ReLU."""
    keys = {"leave-one-out": "leave-one-out", "half": "LDS, half left out", "most": "LDS, a tenth left out"}
    table = saved["results"]["table"]
    rows = [
        [score]
        + [
            _range([row[key][0] for row in table if row["score"] == score and row["problem"].startswith(kind)], 2)
            for key in keys
            for kind in ("tanh", "relu")
        ]
        for score in dict.fromkeys(row["score"] for row in table)
    ]
    head = [f"{words}, {kind}" for words in keys.values() for kind in ("tanh", "ReLU")]
    return METHODS.markdown_table(["score", *head], rows)


def _versions(saved: dict) -> str:
    return ", ".join(f"{name} {number}" for name, number in saved["versions"].items() if name in ("python", "torch"))


def _language_costs(saved: dict) -> str:
    """Return what questions of language models cost, one attribution a line."""
    rows = [
        [
            row["network"],
            str(row["questions"]),
            f"{row['steps']}; {row['every']}",
            f"{row['trainings']:.1f}",
            f"{row['bytes_beside'] / row['bytes_of_adjoints']:.1f}",
            f"{row['error']:.0e}",
        ]
        for _, row in sorted(saved["cost"].items())
    ]
    head = ["training", "questions", "steps; per stretch", "trainings", "memory", "sum is off by"]
    r = saved["float32"]
    found = [
        f"In float32 with `keep_every={r['keep_every']}`, {r['steps']} steps of the GPT on 64 letters: "
        f"{'certified' if r['certified'] else 'not certified'}; in the states that are made again,",
        f"{r['weights_that_differ']} of {r['weights']:,} weights differ.",
    ]
    return f"{METHODS.markdown_table(head, rows)}\n\n{' '.join(found)}"


def _language_agreement(saved: dict) -> str:
    """Return the LDS of contributions and of the derivative, with intervals over questions."""
    left_out = {kind: saved["lds"][kind] for kind in ("tenth", "half") if kind in saved["lds"]}
    rows = [
        [name, *(f"{r[name]['mean']:.2f} ({_range(r[name]['interval'], 2)})" for r in left_out.values())]
        for name in ("contributions", "derivative")
    ]
    head = [f"a {kind} left out, {r['trainings']} trainings" for kind, r in left_out.items()]
    return METHODS.markdown_table(["", *head], rows)


def _layerwise(saved: dict) -> str:
    """Return what averages operation by operation cost and change, beside straight steps."""
    rows = saved["rows"]
    straight = [row["straight"] for row in rows]
    lines = [["straight steps", f"{min(straight):.2f} to {max(straight):.2f}", "", ""]]
    for every in dict.fromkeys(row["every"] for row in rows):
        found = [row for row in rows if row["every"] == every]
        differences = [row["difference"] for row in found]
        lines.append(
            [
                f"layerwise, {'every step' if every == 1 else f'{every} steps'}",
                f"{found[0]['evaluations']:g}",
                _range([row["rank"] for row in found], 4),
                f"{min(differences):.1e} to {max(differences):.1e}",
            ]
        )
    return METHODS.markdown_table(["path", "evaluations", "rank correlation", "difference / norm"], lines)


def _grokking(saved: dict) -> str:
    """Return a way to put a network together again from its checkpoints a line."""
    table = saved["results"]["table"]
    numbers = list(dict.fromkeys(row["stretches"] for row in table))
    found = {(row["way"], row["evaluations"], row["stretches"]): row for row in table}
    rows = [
        [way, str(evaluations)]
        + [f"{row['accuracy']:.3f}, {row['miss']:.2g}" for n in numbers if (row := found[way, evaluations, n])]
        for way, evaluations in dict.fromkeys((row["way"], row["evaluations"]) for row in table)
    ]
    head = ["sum of all terms", "evaluations a stretch", *(f"{n + 1} checkpoints" for n in numbers)]
    return METHODS.markdown_table(head, rows)


def _scored(setting: str) -> Callable[[dict], str]:
    return lambda saved: SCORES.setting_table(saved["results"]["table"], setting)


def _score_sizes(saved: dict) -> str:
    config = saved["config"]
    explained = "; ".join(f"{name} {count}" for name, count in config["points"].items())
    return (
        f"*Means ± standard deviations over seeds ({config['seeds']}), {config['subsets']} subsets of each size, one "
        f"thread; test samples that are explained: {explained}. {_versions(saved)}.*"
    )


def _judged(run: int) -> Callable[[dict], str]:
    return lambda saved: SCORES.judged_table(saved["results"]["runs"][run])


def _judged_sizes(saved: dict) -> str:
    """Say what was measured on what."""
    runs = [
        f"{run['run']} {run['sizes']['samples']} samples, {run['sizes']['test samples']} explained test samples, "
        f"{run['sizes']['steps']} steps, {run['sizes']['weights']:,} weights"
        for run in saved["results"]["runs"]
    ]
    packages = ", ".join(saved["config"]["packages"].values())
    seconds = " and ".join(f"{run['training seconds']:.2g}" for run in saved["results"]["runs"])
    return (
        f"*One recorded run each: {'; '.join(runs)}. Processor seconds of one thread, on a machine with other work, "
        f"and the same in trainings of the network ({seconds} s), with the ten networks of TRAK-10 and what recording "
        "takes in ours. "
        f"{packages}; {_versions(saved)}.*"
    )


OUR_SCORES = [
    "influence (epk_gp)",
    "smoothed influence (epk_gp)",
    "smoothed influence, weights 0 to 1 (epk_gp)",
    "smoothed influence, 16 runs (epk_gp)",
]
TABLES: dict[str, Callable[[dict], str]] = {
    "scores_mlp": _scored("MNIST, MLP"),
    "scores_cnn": _scored("MNIST, CNN"),
    "scores_transformer": _scored("text, transformer"),
    "score_winners": lambda saved: SCORES.winners(saved["results"]["table"], OUR_SCORES),
    "score_sizes": _score_sizes,
    "judged_digits": _judged(0),
    "judged_names": _judged(1),
    "judged_faults": lambda saved: SCORES.faults_table(saved["results"]["runs"]),
    "judged_sizes": _judged_sizes,
    "judged_front": lambda saved: SCORES.judged_front(saved["results"]["runs"][0]),
    "datamodel_winners": lambda saved: SCORES.datamodel_winners(saved["results"]),
    "datamodels_halves": lambda saved: SCORES.datamodels_of(saved["results"], "half"),
    "datamodels_numbers": lambda saved: SCORES.datamodels_of(saved["results"], "numbers"),
    "language_costs": _language_costs,
    "language_agreement": _language_agreement,
    **METHODS.TABLES,
    "rules": _rules,
    "layerwise": _layerwise,
    "grokking_sums": _grokking,
    "scores": _scores,
}
KINDS: dict[str, Callable[..., str]] = {
    "results": lambda page: headline(),
    "saved": _tables,
    "outside": _outside,
    "file": _file,
    "program": _program,
    "section": _section,
    "names": _names,
    "exported": _exported,
    "paper": lambda page: PAPER.table(_saved, _areas()),
}

if __name__ == "__main__":
    main()
