"""Results in one safetensors file: exact, and without a copy."""

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from epk_gp.provenance import write_arrays
from epk_gp.storage import files

ARRAYS = {
    "is_train": torch.tensor([True, False, True]),
    "turned": torch.arange(6, dtype=torch.float32).view(2, 3).T,
    "kernel": torch.arange(24, dtype=torch.float64).view(1, 2, 3, 4).permute(1, 0, 3, 2),
    "nothing": torch.empty(0, 5),
    "number": torch.tensor(2.5, dtype=torch.float64),
    "half": torch.ones(3, dtype=torch.bfloat16),
}


def test_arrays_are_read_as_they_were_written_in_any_order(tmp_path):
    file, other = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    write_arrays(file, ARRAYS, {"head": "logits", "axes": "N C M C"})
    write_arrays(other, dict(reversed(ARRAYS.items())), {"axes": "N C M C", "head": "logits"})
    assert file.read_bytes() == other.read_bytes()
    found = load_file(file)
    assert found.keys() == ARRAYS.keys()
    assert all(found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in ARRAYS.items())
    with safe_open(file, framework="pt") as stored:
        assert stored.metadata() == {"axes": "N C M C", "head": "logits"}


def test_no_copy_is_made_of_a_large_array(tmp_path, monkeypatch):
    written, real, large = [], files.tensor_bytes, torch.ones(1000)
    monkeypatch.setattr(files, "tensor_bytes", lambda value: written.append(real(value)) or written[-1])
    write_arrays(tmp_path / "a.safetensors", {"large": large}, {})
    large[0] = 7.0  # what was written shares its memory
    assert torch.frombuffer(written[0], dtype=torch.float32)[0] == 7.0
