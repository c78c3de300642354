"""The prose of the gallery states the numbers of the saved results."""

import json
import re
from collections.abc import Callable, Iterable
from math import exp
from pathlib import Path
from statistics import fmean

import pytest

from page_code import sections

ROOT = Path(__file__).parents[1]
GALLERY = ROOT / "docs" / "gallery"
SECTIONS = {name: " ".join(section.replace("**", "").split()) for name, section in sections().items()}
# Their prose states no results: these are in tables and in a sentence on who wins, made by docs/expand.py.
NO_NUMBERS = {"judged_networks", "shifted_networks", "label_noise", "active_learning"}


def power(value: float, digits: int = 1) -> str:
    """0.0014 → 1.4e-3."""
    return re.sub(r"e([-+])0*", lambda sign: "e-" if sign[1] == "-" else "e", f"{value:.{digits}e}")


def spans(values: Iterable[float], form: str = ".2f") -> str:
    """Smallest and largest by size, as in "−0.21 to −0.37"; one number if both are written alike."""
    ends = sorted(values, key=abs)
    return " to ".join(dict.fromkeys(f"{value:{form}}".replace("-", "−") for value in (ends[0], ends[-1])))


def column(entries: list[dict], key: str, times: float = 1, **where: object) -> list[float]:
    return [times * entry[key] for entry in entries if all(entry[k] == v for k, v in where.items())]


def alignment(r: dict) -> list[str]:
    dpk, first, last = r["mean"]
    return [
        f"is {dpk:.2g}° for the DPK, {first:.2g}° for the NTK at the initial weights and {last:.2g}° for the NTK at",
        f"(Figure 4: {saved('fig04_machine')['max_error'][0]:.2f})",
    ]


def retrained(r: dict) -> list[str]:
    names = ("SVM on the path kernel", "SVM on an RBF kernel", "network")
    rows = zip(names, r["accuracy"], r["confidence"], strict=True)
    return [f"| {name} | {accuracy:.3f} | {', '.join(f'{p:.3f}' for p in ps)} |" for name, accuracy, ps in rows]


def machine(r: dict) -> list[str]:
    *_, hundred, adaptive, single = r["max_error"]
    return [
        f"100 left Riemann nodes leave {power(hundred)}.",
        f"The adaptive rule leaves {power(adaptive)} with {r['evaluations'][-2]:.1f} evaluations",
        f"the single machine of Theorem 3.7 leaves {power(single)}.",
    ]


def uncertainty(r: dict) -> list[str]:
    n = r["numbers"]
    assert max(column(n, "location_variance_share_rbf")) < 1e-27
    low, high = (column(n, "share_of_directions_in_which_std_falls", 100, dim=dim) for dim in (2, 100))
    return [
        f"in {spans(low, '.0f')} % of directions (2 dimensions) and {spans(high, '.0f')} % (100)",
        f"is {spans(column(n, 'rank_correlation_of_std_with_distance'))} everywhere",
        f"({spans(column(n, 'rank_correlation_of_kernel_with_distance'), '+.2f')})",
        f"{spans(column(n, 'location_variance_share', 100), '.0f')} % of the kernel's variance",
    ]


def kernel_values(r: dict) -> list[str]:
    distance = "rank_correlation_with_distance"
    predicted = [entry for entry in r["numbers"] if entry["class"] == r["predicted"][entry["test"]]]
    others = [entry for entry in r["numbers"] if entry not in predicted]
    ratio, parts = "boundary_weight_ratio", r["contributions"]
    return [
        f"is {spans(column(others, distance))} for the two outputs that are not predicted",
        f"and {spans(column(predicted, distance), '+.2f')} for the predicted one",
        f"{spans(column(parts, ratio), '.2g')} times as large",
    ]


def quadrature(r: dict) -> list[str]:
    error, cost = dict(zip(r["rules"], r["max_error"], strict=True)), r["evaluations"][-1]
    return [
        f"One node is off by {error['left Riemann 1']:.2g},",
        f"200 left Riemann nodes leave {power(error['left Riemann 200'])},",
        f"leaves {power(r['max_error'][-1])} with {cost:.1f} evaluations: {power(r['gain'], 0)} times more exact",
        f"at {100 * cost / 200:.0f} % of their cost",
    ]


def path_geometry(r: dict) -> list[str]:
    def of(problem: str, key: str, times: float = 1) -> list[float]:
        return column(r["numbers"], key, times, problem=problem)

    assert all(of("toy", "norm_is_monotonic"))
    assert not any(of("cnn", "norm_is_monotonic"))
    return [
        f"by {spans(of('toy', 'norm_change', 100), '.0f')} %, while the weights turn by "
        f"{spans(of('toy', 'angle_to_initial'), '.0f')}°",
        f"(distance over length {spans(of('toy', 'straightness'))})",
        f"grows by {spans(of('cnn', 'norm_change', 100), '.0f')} %",
        f"turn by {spans(of('cnn', 'angle_to_initial'), '.0f')}°",
        f"({spans(of('cnn', 'straightness'))})",
    ]


def notebook(r: dict) -> list[str]:
    assert r["same_prediction"] == 1
    assert r["gram_smallest_eigenvalue"] > 0
    return [
        f"is {power(r['max_confidence_error'])}.",
        f"on {100 * r['notebook_agreement']:.1f} % of the images.",
    ]


def signal(r: dict) -> list[str]:
    (a, b), (c, d) = r["dimension_range"]
    return [
        f"lie in {r['dimension'][0]:.1f} of {r['inputs'][0]} directions on the toy",
        f"(mean of ten predictions, {a} to {b})",
        f"in {r['dimension'][1]:.1f} of {r['inputs'][1]} on MNIST ({c} to {d})",
        "95 % lie in {} and {} directions".format(*r["gram_principal"]),
    ]


def counterfactual(r: dict) -> list[str]:
    def means(key: str, score: str, *words: str) -> str:
        rows = [row for row in r["table"] if row["score"] == score and all(word in row["problem"] for word in words)]
        return spans([row[key][0] for row in rows])

    return [
        f"output to {power(r['completeness'], 0)}.",
        f"leave-one-out effects is {means('leave-one-out', 'contributions')}, and for the first",
        f"effect is {next(iter(r['slope'].values()))[0]:.3f} of its contribution",
        f"a prediction: {spans([pair[0] for pair in r['jackknife'].values()])}.",
    ]


def contributions(r: dict) -> list[str]:
    tests = r["tests"]
    outputs = [abs(test["network"]) for test in tests]
    statistics = [100 * abs(test["statistics"]) / size for test, size in zip(tests, outputs, strict=True)]
    boot = next(shown for shown in r["shown"] if tests[shown["test"]]["label"] == 9)
    raised, lowered = ([r["names"][entry["label"]] for entry in boot[key]] for key in ("raised", "lowered"))
    assert (r["certified"], r["contributing"]) == (True, r["num_train"])
    assert r["names"][tests[boot["test"]]["predicted"]] == "sneaker"
    assert (set(raised), lowered.count("boot")) == ({"sneaker"}, 1)
    assert r["completeness"] < 1e-9
    assert r["seconds_training"] + r["seconds_attribution"] < 30 * 60
    assert r["peak_memory"] < 4
    return [
        f"({r['num_weights']:,} weights and {r['num_statistics']} moving statistics)",
        f"{r['num_train']:,} images of Fashion-MNIST",
        f"It is right on {100 * r['accuracy']:.1f} % of the 10,000 test images",
        f"The terms sum to the network's outputs to {power(r['completeness'])} relative, with {r['evaluations']:.1f} "
        "evaluations per image and step",
        f"the recorded rows give, to {power(r['max_step_mismatch'])}.",
        f"of the predicted class add {spans(column(tests, 'own_class'), '.0f')} and all other images take off "
        f"{spans([-value for value in column(tests, 'other_classes')], '.0f')}.",
        f"their term is {spans(statistics, '.0f')} % of the output",
    ]


def other_paths(r: dict) -> list[str]:
    short, long, one, modules, left = range(1, 6)
    rank = [fmean(values) for values in r["rank"]]
    difference = [f"{100 * fmean(values):.2g}" for values in r["difference"]]
    return [
        f"misses an output by {power(max(r['error'][:left]), 0)} at most (outputs move by up to {r['outputs']:.1f})",
        f"rank correlation of {rank[short]:.4f}, {rank[long]:.3f}, {rank[one]:.2f} and {rank[modules]:.4f} with those",
        f"differ by {', '.join(difference[short:modules])} and {difference[modules]} % of their norm",
        f"has a sum that is off by {r['error'][left]:.2g}.",
    ]


def asymmetry(r: dict) -> list[str]:
    def means(kind: str, *scores: str) -> str:
        return spans([fmean(values) for score, values in zip(r["score"], r[kind], strict=True) if score in scores])

    ours = ("net asymmetry", "asymmetry")
    return [
        f"finds errors with an AUROC of {means('errors', *ours)} (digits and three Gaussians,",
        f"the largest probability has {means('errors', 'max softmax')}.",
        f"finds foreign points with {means('foreign', *ours)}, and the distance to the nearest training point with "
        f"{means('foreign', 'nearest distance')}.",
    ]


def planted(r: dict) -> list[str]:
    lines, (whole, half, *_) = r["lines"], r["without"]
    copies = len(r["rank_of_planted"])
    own = lines[:copies]
    assert (sorted(r["rank_of_planted"]), r["certified"]) == ([*range(1, copies + 1)], True)
    assert all(line["words"] == [*r["prompt"], r["answer"]] for line in own)
    assert max(r["error"], r["tokens_error"]) < 1e-12
    p = {key: [exp(part[key]) for part in (whole, half)] for key in ("measured", "contributions", "derivative")}
    return [
        f"a GPT of {r['num_weights']:,} weights on words",
        f"with probability {exp(r['log_probability']):.2f}, after {exp(r['before']):.5f} before training",
        f"The first {copies} of {r['num_lines']} lines are the planted ones, with shares of "
        f"{spans(column(own, 'share'), '+.2f')}",
        f"the word “bob” has {own[0]['shares'][-1]:+.2f}",
        f"a probability of {power(p['measured'][0])}; without half of them, {p['measured'][1]:.2f}",
        f"say {power(p['contributions'][0])} and {power(p['contributions'][1])}",
        f"says {p['derivative'][0]:.2f} and {p['derivative'][1]:.2f}",
    ]


def finetuned(r: dict) -> list[str]:
    share, cost = r["precision"], r["seconds"]["attribution"] / r["seconds"]["training"]
    first, chance = (100 * part for part in (r["among_first"], share["chance"]))
    return [
        f"({r['num_trained']:,} trained weights), {r['num_train']} articles",
        f"{r['num_planted']} with a wrong label, {r['num_steps']} steps",
        f"classifies {100 * r['accuracy']:.1f} % of 200 further articles",
        f"takes {cost:.1f} trainings and sums to the losses to {r['max_error']:.1e}",
        f"most, {first:.0f} % have a wrong label, of all training articles {chance:.0f} %",
        f"losses most, {100 * share['contributions']:.0f} % are wrong",
        f"training loss {100 * share['training loss']:.0f} %",
    ]


def grokked(r: dict) -> list[str]:
    curves, steps, shares = r["curves"], r["curves"]["step"], r["shares"]["held-out pairs"]
    right = {name: curves[f"accuracy, {name}"] for name in r["pairs"]}
    learnt = {name: steps[next(k for k, a in enumerate(right[name]) if a >= 0.99)] for name in right}
    heads = [sum(values) for values in zip(*(shares[f"head {n}"] for n in range(1, 5)), strict=True)]
    alike = [
        sum(values) for values in zip(*(r["shares"]["training pairs"][f"head {n}"] for n in range(1, 5)), strict=True)
    ]
    assert min(shares["embedding"][:16]) > 0
    assert max(heads[1:12]) < 0 < min(heads[13:16])
    assert min(alike[1:12]) > 0
    assert all(row["accuracy"] == 1 for row in r["table"] if row["way"] == "epk.between")
    leap = {part: sum(values[14:16]) for part, values in shares.items()}
    return [
        f"({r['num_weights']:,} weights)",
        f"{r['pairs']['training pairs']:,} of the {sum(r['pairs'].values()):,} pairs",
        f"from step {learnt['training pairs']:.0f}, and of the held-out ones from step {learnt['held-out pairs']:.0f}",
        f"by {sum(shares['embedding'][:16]):.1f} in all, also while the network is right on "
        f"{100 * right['held-out pairs'][40]:.0f} % of them (step {steps[40]:.0f})",
        f"lower that of held-out pairs by {-sum(heads[1:12]):.1f} from step 100 to 1200",
        f"embedding {leap['embedding']:+.1f}, the wide layer {leap['wide layer, in'] + leap['wide layer, out']:+.1f}, "
        f"the heads {sum(heads[14:16]):+.1f} and the unembedding {leap['unembedding']:+.1f}",
    ]


def worst(r: dict) -> list[str]:
    def mean(key: str, way: str, dropped: float = 0.1) -> float:
        return fmean(column(r["rows"], key, way=way, dropped=dropped))

    ways = ("datamodel", "influence", "at random", "wrong labels, if they were known")
    shares = sorted({row["dropped"] for row in r["rows"]})
    ours, derivative, chance = (100 * mean("measured accuracy", way) for way in ways[:3])
    low = [
        100 * (mean("measured accuracy", way, s) - mean("predicted accuracy", way, s)) for way in ways for s in shares
    ]
    odds = [mean(f"{kind} log-odds", way) for way in (ways[0], ways[2]) for kind in ("predicted", "measured")]
    whole = [fmean(entry[key] for entry in r["whole"]) for key in ("accuracy", "log-odds")]
    assert ours > derivative > chance
    assert all(0.45 < share < 0.65 for share in r["same"])
    wrong = [f"{100 * mean('wrong labels', way):.0f} %" for way in ways[:2]]
    return [
        f"{r['num_test']} test points judge",
        f"by the datamodel the accuracy is {ours:.1f} %, by influence {derivative:.1f} %, and without a random tenth "
        f"{chance:.1f} %; with all points it is {100 * whole[0]:.1f} %",
        f"{wrong[0]} and {wrong[1]} have a wrong label",
        f"Without all wrong labels the accuracy is {100 * mean('measured accuracy', ways[3], 0.15):.1f} %",
        f"is predicted as {odds[0]:.2f} and measured as {odds[1]:.2f}, after {whole[1]:.2f} with all points; without a "
        f"random tenth {odds[2]:.2f} and {odds[3]:.2f}",
        f"predicted {max(low):.1f} points too low at most",
        f"ends {spans(column(r['whole'], 'miss', 100), '.0f')} % of the numbers' change from the recorded network",
    ]


CLAIMS: dict[str, Callable[[dict], list[str]]] = {
    "fig02_alignment": alignment, "fig03_retrained": retrained, "fig04_machine": machine,
    "fig05_uncertainty": uncertainty, "fig06_kernel_values": kernel_values, "fig07_quadrature": quadrature,
    "fig08_path_geometry": path_geometry, "notebook_path_kernel": notebook, "signal_dimension": signal,
    "counterfactual": counterfactual, "resnet_contributions": contributions, "other_paths": other_paths,
    "asymmetry": asymmetry, "planted_sentence": planted, "finetuned_minilm": finetuned,
    "grokking": grokked, "without_the_worst": worst,
}  # fmt: skip


def saved(name: str) -> dict:
    return json.loads((GALLERY / f"{name}.json").read_text())["results"]


def test_the_numbers_of_every_section_are_compared():
    assert SECTIONS.keys() == CLAIMS.keys() | NO_NUMBERS


@pytest.mark.parametrize("name", CLAIMS)
def test_the_prose_states_the_saved_numbers(name):
    missing = [claim for claim in CLAIMS[name](saved(name)) if claim not in SECTIONS[name]]
    assert missing == []


def test_the_page_on_checkpoints_states_the_saved_numbers():
    few, many = ([row for row in saved("grokking")["table"] if row["stretches"] == n] for n in (1, 18))
    (ours, ten, hundred), later = few, many[1]
    page = " ".join((ROOT / "docs" / "capabilities" / "checkpoints.md").read_text().split())
    assert f"right on {100 * ten['accuracy']:.0f} % of held-out pairs" in page
    assert f"off by {hundred['miss']:.1f} in a log-probability" in page
    assert f"is off by {power(ours['miss'])}" in page
    assert ours["accuracy"] == hundred["accuracy"] == later["accuracy"] == 1


def test_another_number_is_not_in_the_prose():
    """The negative control."""
    result = saved("fig04_machine")
    result["max_error"][-1] *= 2
    assert [claim in SECTIONS["fig04_machine"] for claim in machine(result)] == [True, True, False]
