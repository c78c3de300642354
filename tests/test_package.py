"""The top level: its names and its version."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from textwrap import dedent

import pytest

import epk_gp

ROOT = Path(__file__).parents[1]

PUBLIC = set(
    """CertificateWarning CrossEntropy EPKClassifier EPKKernel EPKRegressor Graph LogitGP MeanSquaredError NTKKernel
    PathKernel PerSampleLoss Points QuadratureRule Ragged Recorder RowFunction Smoothing StepMismatchError Storage
    Stream Trajectory UncertainClassifier adaptive attribute attribute_tokens between check_scores chords datamodel
    gauss_legendre gram_block influence label_errors layerwise load_trajectory network_outputs next_to_label next_words
    ntk path_features reconstruct retrain straight test_copy train train_copy write_report""".split()  # noqa: SIM905
)


def test_the_top_level_has_its_names():
    assert sorted(epk_gp.__all__) == sorted(PUBLIC)
    assert all(hasattr(epk_gp, name) for name in PUBLIC)


def test_a_name_is_imported_from_where_a_type_checker_sees_it():
    """The table of lazy imports and the imports under TYPE_CHECKING say the same."""
    seen = {}
    for node in ast.walk(ast.parse(Path(epk_gp.__file__).read_text())):
        if isinstance(node, ast.ImportFrom) and node.module.startswith("epk_gp."):
            seen |= {alias.name: node.module.removeprefix("epk_gp.") for alias in node.names}
    table = {name: module for module, names in epk_gp._MODULES.items() for name in names.split()}
    assert seen == table | {"write_report": "report.write"}
    assert seen.keys() == PUBLIC


@pytest.mark.slow
def test_names_are_there_before_they_are_imported():
    """In a process of its own, where nothing is imported yet."""
    code = """
        import sys
        import epk_gp
        assert "torch" not in sys.modules
        assert set(epk_gp.__all__) <= set(dir(epk_gp))
        assert "torch" not in sys.modules
        recorder = epk_gp.Recorder, epk_gp.attribute  # which need no more than torch and these modules
        assert not {"gpytorch", "sklearn", "scipy.stats"} & set(sys.modules)
        rule = epk_gp.adaptive()  # a name first, then modules of its folder and of others
        assert "matplotlib.figure" not in sys.modules
        print(epk_gp.quadrature.kinks.locate_kinks is not None and epk_gp.core.trajectory.Trajectory is not None)
        print(epk_gp.gp.models.LogitGP is epk_gp.LogitGP, "torch" in sys.modules)
        names = {}
        exec("from epk_gp import *", names)
        print(set(epk_gp.__all__) <= set(names))
        print(names["train"] is epk_gp.recording.train.train is vars(epk_gp)["train"])
        print(not {"epk_gp.adapters", "epk_gp.cli"} & set(sys.modules))
    """
    ended = subprocess.run([sys.executable, "-c", dedent(code)], capture_output=True, text=True, check=True)
    assert ended.stdout.split() == ["True"] * 6
    hidden = {"TYPE_CHECKING", "find_spec", "import_module"}
    assert not hidden & set(dir(epk_gp))


def test_a_name_that_never_was_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'epk_gp' has no attribute 'attributed'"):
        _ = epk_gp.attributed
    with pytest.raises(ImportError, match="cannot import name 'attributed'"):
        from epk_gp import attributed  # noqa: F401, PLC0415


def test_the_version_is_written_in_one_place_and_cited():
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in pyproject["project"]
    assert pyproject["tool"]["hatch"]["version"]["path"] == "epk_gp/__init__.py"
    cited = re.search(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.MULTILINE)
    assert cited is not None
    assert cited[1] == epk_gp.__version__
    sections = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert sections[0] == "Unreleased" if ".dev" in epk_gp.__version__ else sections[0] == epk_gp.__version__


def test_links_of_the_readme_are_addresses_where_it_is_the_package_s_description():
    """Those of the files that a reader of the repository gets, at the tag of the version."""
    pytest.importorskip("hatch_fancy_pypi_readme", reason="`make` installs what builds the package")
    metadata = pytest.importorskip("hatchling.metadata.core")
    plugins = pytest.importorskip("hatchling.plugin.manager").PluginManager()
    core = metadata.ProjectMetadata(str(ROOT), plugins).core
    home = f"{core.urls['Homepage']}/(?:blob|raw)/v{epk_gp.__version__}/"
    files = r"\]\((?!http)([^)]+)\)"
    readme = (ROOT / "README.md").read_text()
    assert len(re.findall(files, readme)) > 30
    assert not re.findall(files, core.readme)
    assert re.sub(home, "", core.readme) == readme
    assert all(address.startswith(core.urls["Homepage"]) for address in core.urls.values())
