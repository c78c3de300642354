"""Files of results hold the arrays they were given, whatever their order in memory."""

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from epk_gp.provenance import write_arrays
from epk_gp.storage import files

ARRAYS = {
    "is_train": torch.tensor([True, False, True]),
    "turned": torch.arange(6, dtype=torch.float32).view(2, 3).T,
    "kernel": torch.arange(24, dtype=torch.float64).view(1, 2, 3, 4).permute(1, 0, 3, 2),
    "labels": torch.tensor([3, 4]),
    "nothing": torch.empty(0, 5),
    "number": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.ones(3, dtype=torch.bfloat16),
}


def test_arrays_are_read_as_they_were_written(tmp_path):
    write_arrays(tmp_path / "a.safetensors", ARRAYS, {"head": "logits", "axes": "N C M C"})
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == ARRAYS.keys()
    assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in ARRAYS.items())
    with safe_open(tmp_path / "a.safetensors", framework="pt") as stored:
        assert stored.metadata() == {"axes": "N C M C", "head": "logits"}


def test_the_order_of_arrays_and_metadata_does_not_count(tmp_path):
    write_arrays(tmp_path / "a.safetensors", ARRAYS, {"a": "1", "b": "2"})
    write_arrays(tmp_path / "b.safetensors", dict(reversed(ARRAYS.items())), {"b": "2", "a": "1"})
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_no_copy_is_made_of_a_large_array(tmp_path, monkeypatch):
    written, real = [], files.tensor_bytes

    def noted(value):
        written.append(real(value))
        return written[-1]

    large = torch.ones(1000)
    monkeypatch.setattr(files, "tensor_bytes", noted)
    write_arrays(tmp_path / "a.safetensors", {"large": large}, {})
    large[0] = 7.0  # what was written shares its memory
    assert torch.frombuffer(written[0], dtype=torch.float32)[0] == 7.0
