"""Results show what their tensors hold, whatever they hold, and read nothing else."""

import re
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from shown_results import HOSTILE, shown
from torch import Tensor

from epk_gp.analysis.labels import LabelErrors, NextToLabel
from epk_gp.datasets import Dataset
from epk_gp.gp.posterior import LogitPosterior
from epk_gp.gp.stacking import ClassUncertainty
from epk_gp.kernel_machine.attribute import Attribution, CertifiedTerms, GroupedAttribution
from epk_gp.kernel_machine.axes import Axis
from epk_gp.kernel_machine.influence import Influence
from epk_gp.kernel_machine.reconstruct import Reconstruction
from epk_gp.kernel_machine.retrain import Retraining
from helpers import make_case

POINTS, OUTPUTS, SAMPLES = 5, 3, 7
CERTIFICATE: dict[str, Any] = {
    "max_residual": 1.25e-13, "evaluations": 9.5, "residual_ratio": 0.5, "max_step_mismatch": 3.75e-16,
    "mismatch_ratio": 0.25, "worst_step": 2, "error_tolerance": 1e-9, "statuses": {}, "max_error": 1e-12,
}  # fmt: skip


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def attribution(n: int = POINTS) -> CertifiedTerms:
    terms = {name: drawn(n, OUTPUTS) for name in ("initial", "network", "decay", "statistics", "unexplained")}
    samples, amplification = drawn(n, OUTPUTS, SAMPLES), drawn(n, OUTPUTS).abs()
    result = Attribution(**terms, samples=samples, amplification=amplification, **CERTIFICATE)
    return replace(result, network=result.total)


def step_axis(*names: str) -> Axis:
    return Axis("step", torch.arange(len(names)), names)


def sample_axis(*names: str) -> Axis:
    return Axis("sample", torch.arange(SAMPLES) % len(names), names)


def grouped(n: int = POINTS, names: tuple[str, str] = ("cat", "dog")) -> CertifiedTerms:
    sizes = {"initial": (), "network": (), "values": (4, 2), "statistics": (4, 2)}
    sizes |= dict.fromkeys(("decay", "statistics_of_no_sample", "unexplained"), (4, 1))
    terms = {name: drawn(n, OUTPUTS, *size) for name, size in sizes.items()}
    axes, amplification = (step_axis("0", "1", "2", "3"), sample_axis(*names)), drawn(n, OUTPUTS).abs()
    result = GroupedAttribution(**terms, axes=axes, amplification=amplification, **CERTIFICATE)
    return replace(result, network=result.total)


def reconstruction(n: int = POINTS) -> Reconstruction:
    network = drawn(n, OUTPUTS)
    ends = {"network": network, "initial": drawn(n, OUTPUTS)}
    return Reconstruction(outputs=network + 1e-12, **ends, total_residual=1e-12, **CERTIFICATE)


def influence(n: int = POINTS) -> Influence:
    return Influence(
        outputs=drawn(n, OUTPUTS), values=drawn(n, OUTPUTS, SAMPLES), adjoint_norms=drawn(n, OUTPUTS, 4).abs(),
        axes=(sample_axis(*map(str, range(SAMPLES))),), max_step_mismatch=1e-16, mismatch_ratio=0.5, worst_step=1,
    )  # fmt: skip


def posterior(n: int = POINTS, outputs: int = OUTPUTS) -> LogitPosterior:
    root = drawn(n, outputs, outputs)
    return LogitPosterior(drawn(n, outputs), root @ root.mT)


def uncertainty(n: int = POINTS) -> ClassUncertainty:
    return ClassUncertainty(*(drawn(n).abs() for _ in fields(ClassUncertainty)))


RESULTS = {f.__name__: f for f in (attribution, grouped, reconstruction, influence, posterior, uncertainty)}


def assert_shown(cells: list[str], expected: Tensor) -> None:
    assert torch.allclose(torch.tensor([float(c) for c in cells], dtype=torch.float64), expected, rtol=5e-4, atol=0)


def places(outputs: Tensor) -> tuple[Tensor, Tensor]:
    """The first three points, each with its largest output."""
    return torch.arange(3), outputs[:3].argmax(dim=1)


def assert_terms(result: Attribution | GroupedAttribution, terms: dict[str, Tensor]) -> None:
    at, cells = places(result.network), shown(result)
    for name, term in terms.items():
        assert_shown(cells[name], term.reshape(POINTS, OUTPUTS, -1).sum(dim=2)[at])
    assert_shown(cells["sum of all terms"], result.total[at])
    assert_shown(cells["network"], result.network[at])
    assert list(map(int, cells["output"])) == at[1].tolist()


def test_the_sums_that_an_attribution_shows_are_those_of_its_tensors():
    result = attribution()
    assert isinstance(result, Attribution)
    names = ("initial", "samples", "decay", "statistics", "unexplained")
    assert_terms(result, {name: getattr(result, name) for name in names})
    largest = shown(result)["largest samples"]
    for column, values in enumerate(result.samples[places(result.network)]):
        order = values.abs().argsort(descending=True)[:3].tolist()
        assert largest[column::3] == [f"#{i}: {float(values[i]):+.4g}" for i in order]


def test_the_sums_that_a_grouped_attribution_shows_are_those_of_its_tensors():
    result = grouped()
    assert isinstance(result, GroupedAttribution)
    terms = {name: getattr(result, name) for name in ("initial", "decay", "statistics", "unexplained")}
    terms |= {"training data": result.values, "statistics of no sample": result.statistics_of_no_sample}
    assert_terms(result, terms)
    values = result.values[0, int(result.network[0].argmax())]
    step, label = divmod(int(values.abs().argmax()), 2)
    expected = f"{step}, {('cat', 'dog')[label]}: {float(values[step, label]):+.4g}"
    assert shown(result)["largest by step, sample"][0] == expected


def test_a_reconstruction_shows_both_sides_and_their_difference():
    result = reconstruction()
    at, cells = places(result.network), shown(result)
    for name, values in (("kernel machine", result.outputs), ("network", result.network), ("initial", result.initial)):
        assert_shown(cells[name], values[at])
    assert_shown(cells["difference"], (result.outputs - result.network)[at])
    assert cells["largest error"] == ["1e-12 (|sum - network|; at most 1e-09)"]
    assert cells["largest residual"][0].startswith("1.25e-13")
    assert cells["largest mismatch of a step"][0].startswith("3.75e-16")


def test_an_influence_shows_values_deviations_growth_and_the_largest_derivatives():
    result = influence()
    at, cells = places(result.outputs), shown(result)
    assert_shown(cells["value"], result.outputs[at])
    assert_shown(cells["jackknife standard deviation"], result.std[at])
    assert_shown(cells["growth along the run"], result.growth[at])
    first = result.values[0, int(at[1][0])]
    sample = int(first.abs().argmax())
    by_class = replace(result, values=drawn(POINTS, OUTPUTS, 2), axes=(sample_axis("cat", "dog"),))
    assert cells["largest derivatives"][0] == f"#{sample}: {float(first[sample]):+.4g}"
    assert "jackknife standard deviation" not in shown(by_class)


def test_a_posterior_shows_mean_and_standard_deviation_of_each_output():
    result = posterior()
    cells = shown(result)
    std = result.covariance.diagonal(dim1=1, dim2=2).sqrt()
    for c in range(OUTPUTS):
        pairs = [cell.split(" ± ") for cell in cells[f"output {c}"]]
        assert_shown([mean for mean, _ in pairs], result.mean[:3, c])
        assert_shown([deviation for _, deviation in pairs], std[:3, c])
    many = posterior(outputs=12)
    assert "output 10" not in shown(many)
    assert "the first 10 of 12 outputs" in repr(many)


def test_a_variance_that_is_negative_by_more_than_rounding_is_not_shown_as_one():
    mean, covariance = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1, 1), -1e-12, dtype=torch.float64)
    assert shown(LogitPosterior(mean, covariance, 1e-11))["output 0"] == ["0 ± 0"]
    assert shown(LogitPosterior(mean, covariance, 1e-13))["output 0"] == ["0 ± nan"]


@pytest.mark.parametrize("as_arrays", [False, True], ids=["tensors", "arrays"])
def test_an_uncertainty_shows_its_first_points_mean_and_largest(as_arrays):
    scores = uncertainty()
    values = {f.name: getattr(scores, f.name) for f in fields(scores)}
    cells = shown(ClassUncertainty(**{k: v.numpy() for k, v in values.items()}) if as_arrays else scores)
    for name, score in values.items():
        assert_shown(cells[name.replace("_", " ")], torch.cat([score[:3], score.mean()[None], score.max()[None]]))


def test_a_retraining_shows_its_certificate_and_run():
    run = make_case("tanh").trajectory
    weights = torch.ones(4, run.num_points, dtype=torch.float64)
    result = Retraining(run, drawn(4, run.num_weights), weights, 1e-15, 1e-14)
    cells = shown(result)
    assert cells["certificate"][0].startswith("certified: ")
    assert cells["recorded run"] == [repr(run)]
    wrong = replace(result, findings=("it diverged",))
    assert shown(wrong)["certificate"] == ["not certified: it diverged"]


def uncertified(result: Any) -> Any:
    return replace(result, **({"findings": ("no",)} if isinstance(result, Influence) else {"mismatch_ratio": 3.0}))


@pytest.mark.parametrize("make", [attribution, grouped, reconstruction, influence])
def test_a_result_says_whether_it_is_certified_and_why_not(make):
    result = make()
    assert result.certified
    assert shown(result)["certificate"][0].startswith("certified: ")
    wrong = uncertified(result)
    assert not wrong.certified
    assert shown(wrong)["certificate"] == [f"not certified: {'; '.join(wrong.findings)}"]


def test_contributions_that_cancel_are_said_to():
    for size, words in ((9.0, "9 (at most)"), (1000.0, "one alone says little; sum them over groups")):
        result = replace(attribution(), amplification=torch.full((POINTS, OUTPUTS), size, dtype=torch.float64))
        assert words in shown(result)["amplification"][0]


@pytest.mark.parametrize("make", [attribution, grouped])
def test_what_speaks_against_a_result_is_a_finding(make):
    share, missed = replace(make(), unexplained_share=0.125), replace(make(), max_error=0.125)
    assert shown(share)["certificate"][0].startswith("not certified: 12.5% of the change of the outputs is")
    assert shown(missed)["largest error"][0].startswith("0.125 ")
    assert shown(missed)["certificate"][0].startswith("not certified: the sum misses the network's output by 1.25e-01")


@pytest.mark.parametrize("make", RESULTS.values(), ids=RESULTS.keys())
@pytest.mark.parametrize("n", [0, 1, 3, 4])
def test_any_number_of_points_is_shown(make, n):
    result = make(n)
    cells = shown(result)
    assert max(map(len, repr(result).split("\n"))) <= 100
    assert sum(name.startswith("point ") for name in next(iter(cells.values()), [])) <= 3
    assert ("the first 3 of 4 points" in repr(result)) == (n == 4)
    assert bool(re.search(r"\b0 points\b", repr(result))) == (n == 0)


@pytest.mark.usefixtures("unchecked")
def test_a_malformed_result_says_why_it_cannot_be_shown():
    """A debugger or a traceback shows it: another error there would hide what is wrong."""
    malformed = LogitPosterior(drawn(2, 3), torch.eye(3, dtype=torch.float64))
    assert "cannot be shown  IndexError: " in str(malformed)
    assert "cannot be shown  AttributeError: " in str(LogitPosterior.__new__(LogitPosterior))
    assert "cannot be shown" not in str(posterior())


@pytest.mark.parametrize("make", [attribution, grouped, reconstruction, influence])
def test_numbers_that_are_not_finite_are_shown(make):
    result = make()
    name = {Attribution: "samples", Reconstruction: "outputs"}.get(type(result), "values")
    changes: dict[str, Any] = {name: torch.full_like(getattr(result, name), float("nan"))}
    if not isinstance(result, Influence):
        changes["max_error"] = float("nan")
    else:
        changes["findings"] = ("the derivative is not finite",)
    broken = replace(result, **changes)
    assert "nan" in repr(broken)
    assert "not certified" in str(broken)


def test_names_of_groups_do_not_break_lines():
    text = repr(grouped(names=(HOSTILE, HOSTILE[::-1])))
    assert all(line.isprintable() for line in text.split("\n"))


def test_lists_and_tables_of_points_show_themselves_in_twenty_lines():
    """Of each the first entries, and how many there are."""
    n, C = 500, 12
    generator = torch.Generator().manual_seed(0)
    scores = torch.rand(n, generator=generator)
    posterior = LogitPosterior(torch.randn(n, C, generator=generator), torch.eye(C).expand(n, C, C))
    errors = LabelErrors(
        scores.argsort(descending=True), scores, torch.arange(n), scores, scores, -scores, torch.arange(n), scores
    )
    for result, words in (
        (errors, f"point {int(scores.argmax())} "),
        (NextToLabel(torch.arange(n), scores, scores, scores), "the first 10 of 500 points"),
        (posterior.softmax_uncertainty(8, generator), "the first 3 of 500 points"),
        (Dataset(torch.zeros(n, 3, 32, 32), torch.arange(n) % C, C, "pictures"), "pictures: 500 labelled inputs"),
    ):
        text = repr(result)
        assert words in text
        assert len(text.splitlines()) <= 20
        assert max(map(len, text.splitlines())) <= 100
        assert "tensor(" not in text
