"""JSON files of the package with one entry changed and a right checksum: usable, or one clear error."""

import pytest
import torch
from json_mutations import damaged_texts, sampled

import epk_gp as epk
from epk_gp.storage.atomic_files import checksummed_json, read_checksummed_json
from epk_gp.storage.partial_sums import PartialSums
from epk_gp.storage.schema import read_header
from loops import data, mlp, sgd
from stored_runs import record

COUNT = 60  # of each file; all of some 4000 were tried once


def outcomes(file, load):
    """How many mutations were read, and how many refused; any other error fails."""
    original = file.read_bytes()
    entries = read_checksummed_json(original, "")
    entries.pop("blake2b", None)
    contents = [(name, checksummed_json(changed)) for name, changed in sampled(entries, COUNT)]
    read = refused = 0
    for name, content in [*contents, *damaged_texts(original).items()]:
        file.write_bytes(content)
        try:
            load()
            read += 1
        except (ValueError, FileNotFoundError):
            refused += 1
        except Exception as error:
            pytest.fail(f"{name}: {error!r}")
    return read, refused


def test_a_run_s_header(tmp_path):
    record(tmp_path / "run", steps=2)
    read, refused = outcomes(tmp_path / "run" / "run.json", lambda: read_header(tmp_path / "run"))
    assert read
    assert refused > COUNT / 3


@pytest.mark.slow
def test_a_run_s_header_and_what_it_is_opened_for(tmp_path):
    record(tmp_path / "run", steps=2)

    def use():
        run = epk.load_trajectory(tmp_path / "run", mlp())
        assert epk.attribute(run, run.inputs[:1]).samples.isfinite().all()

    outcomes(tmp_path / "run" / "run.json", use)


@pytest.mark.mostly_slow
@pytest.mark.parametrize("features", ["exact", 64])
def test_a_saved_classifier(tmp_path, features):
    net, (X, y) = mlp(), data(20)
    run = epk.train(net, X, y, optimizer=sgd(net), steps=2)
    model = epk.UncertainClassifier(run, nodes=2, features=features).fit(X + 0.1, y)
    model.save(tmp_path / "model")

    def use():
        read = epk.UncertainClassifier.load(tmp_path / "model", mlp())
        assert torch.as_tensor(read.predict_proba(X)).isfinite().all()
        assert torch.as_tensor(read.uncertainty(X, 4).std).isfinite().all()

    _, refused = outcomes(tmp_path / "model" / "classifier.json", use)
    assert refused > COUNT / 2


def test_a_checkpoint_s_manifest(tmp_path):
    PartialSums(tmp_path / "sums", "1")
    file = tmp_path / "sums" / "checkpoint.json"
    for name, content in damaged_texts(file.read_bytes()).items():
        if name == "UTF-16":  # which JSON may be
            continue
        file.write_bytes(content)
        with pytest.raises(ValueError, match="of this very computation"):
            PartialSums(tmp_path / "sums", "1")
