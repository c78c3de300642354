"""JSON files of the package with one entry changed and a right checksum: usable, or one clear error."""

import math
import shutil

import pytest
import torch
from json_mutations import damaged_texts, sampled
from safetensors.torch import load_file, save

import epk_gp as epk
from epk_gp.storage.atomic_files import checksum, checksummed_json, read_checksummed_json
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


@pytest.fixture(scope="module", params=["exact", 64])
def saved_classifier(request, tmp_path_factory):
    """A folder with a classifier, points, and what it says of them."""
    net, (X, y) = mlp(), data(20)
    run = epk.train(net, X, y, optimizer=sgd(net), steps=2)
    model = epk.UncertainClassifier(run, nodes=2, features=request.param).fit(X + 0.1, y)
    folder = tmp_path_factory.mktemp("classifier") / "model"
    model.save(folder)
    return folder, X + 0.3, said(model, X + 0.3)


def said(model, X):
    return model.predict_proba(X), model.uncertainty(X, 4).std, model.predict_set(X), model.predict(X)


def test_a_classifier_whose_entries_were_edited_says_what_it_said_or_is_refused(saved_classifier, tmp_path):
    folder, X, expected = saved_classifier
    shutil.copytree(folder, tmp_path / "model")

    def use():
        actual = said(epk.UncertainClassifier.load(tmp_path / "model", mlp()), X)
        for a, b in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)

    _, refused = outcomes(tmp_path / "model" / "classifier.json", use)
    assert refused >= COUNT


def test_a_classifier_whose_tensors_were_edited_says_what_it_said_or_is_refused(saved_classifier, tmp_path):
    folder, _, _ = saved_classifier
    shutil.copytree(folder, tmp_path / "model")
    file, description = (tmp_path / "model" / name for name in ("classifier.safetensors", "classifier.json"))
    tensors, entries = load_file(file), read_checksummed_json(description.read_bytes(), "")
    for name, value in tensors.items():
        if name in ("scores", "process_targets", "targets"):  # by which no logits are computed
            continue
        for change in (lambda v: v + 1, lambda v: v * 1.01, lambda v: v[:-1], lambda v: v * math.nan):
            content = save(tensors | {name: change(value).contiguous()})
            file.write_bytes(content)
            sizes = {"tensor_bytes": len(content), "tensor_blake2b": checksum(content)}
            description.write_bytes(checksummed_json(entries | sizes))
            with pytest.raises(ValueError, match=r"must|damaged"):
                epk.UncertainClassifier.load(tmp_path / "model", mlp())


def test_a_checkpoint_s_manifest(tmp_path):
    PartialSums(tmp_path / "sums", "1")
    file = tmp_path / "sums" / "checkpoint.json"
    for name, content in damaged_texts(file.read_bytes()).items():
        if name == "UTF-16":  # which JSON may be
            continue
        file.write_bytes(content)
        with pytest.raises(ValueError, match="of this very computation"):
            PartialSums(tmp_path / "sums", "1")
