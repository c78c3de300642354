"""The grokking experiment: its network is the peer's, and its sums are those of all stretches."""

from pathlib import Path

import grokking
import pytest
import torch

import page_code

CONTENDERS = Path(__file__).resolve().parents[1] / "benchmarks" / "contenders"
CONFIG = grokking.EXPERIMENT.smoke


@pytest.fixture
def trained(tmp_path):
    data = grokking.sums(CONFIG)
    assert grokking.train(CONFIG, data, tmp_path) is not None
    assert grokking.train(CONFIG, data, tmp_path) is None  # its checkpoints are there
    return data, tmp_path


def test_the_network_is_that_of_the_benchmarks_whose_other_places_nobody_reads():
    theirs = page_code.load(CONTENDERS / "modulo_network.py").ModuloNetwork(CONFIG.modulus + 2, CONFIG.width, 8)
    names = {"input_emb.": "embedding.", "linear1.": "wide.", "linear2.": "narrow.", "decoder.": "unembedding."}
    weights = {}
    for name, value in theirs.state_dict().items():
        kind, _, rest = name.partition("s.")
        own = f"heads.{rest.replace('.', f'.{kind}.', 1)}" if kind in ("encoder", "decoder") and rest else name
        weights[next((new + own.removeprefix(old) for old, new in names.items() if own.startswith(old)), own)] = value
    ours = grokking.network(CONFIG)
    ours.load_state_dict(weights)
    torch.testing.assert_close(ours(grokking.sums(CONFIG).X), theirs(grokking.sums(CONFIG).X))


def test_no_pair_is_held_out_and_trained_on_and_all_sums_are_right():
    data = grokking.sums(CONFIG)
    p = CONFIG.modulus
    assert len(data.X) == p * (p + 1) // 2
    assert sorted([*data.train.tolist(), *data.held_out.tolist()]) == list(range(len(data.X)))
    assert all((a + b) % p == c for (a, _, b, _), c in zip(data.X.tolist(), data.y.tolist(), strict=True))


def test_two_evaluations_give_the_network_and_nodes_do_so_with_their_number(trained):
    data, folder = trained
    files, X = grokking.files_of(CONFIG, folder, CONFIG.steps), data.X[data.held_out]
    last = grokking.network(CONFIG)
    last.load_state_dict(grokking.load_file(files[-1]))
    misses = [
        float((z - last(X).detach()).abs().max())
        for z in (
            grokking.outputs_of_between(CONFIG, files, X, 2),
            grokking.outputs_of_midpoints(CONFIG, files, X, 400),
            grokking.outputs_of_midpoints(CONFIG, files, X, 1),
        )
    ]
    assert misses[0] < 1e-5
    assert 100 * misses[1] < misses[2] > 1e-2


def test_shares_of_parts_add_up_to_what_the_curve_rises(trained):
    data, folder = trained
    rows = data.held_out
    shares = grokking.split(CONFIG, folder, data.X[rows], data.y[rows], CONFIG.shown)
    curve = grokking.curves(CONFIG, folder, data, {"held-out pairs": rows})["log-probability, held-out pairs"]
    assert list(shares) == [
        "embedding", "head 1", "head 2", "head 3", "head 4", "wide layer, in", "wide layer, out", "unembedding",
    ]  # fmt: skip
    rises = torch.tensor(curve[:: CONFIG.shown], dtype=torch.float64).diff()
    torch.testing.assert_close(sum(shares.values()), rises, atol=1e-6, rtol=0)
