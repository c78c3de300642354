"""What is written is what is read, whatever the run."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from epk_gp.core.step import Step
from epk_gp.optimizers.update_rules import FIELDS, UpdateCoefficients, broadcast_to_params
from epk_gp.storage.chunks import StoredStates, StoredUpdates, read_steps
from epk_gp.storage.journal import read_journal
from epk_gp.storage.schema import WEIGHT_DTYPES, read_data, read_header
from epk_gp.storage.training_state import read_training_state
from epk_gp.storage.writer import create_run_dir, write_header


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    num_weights=st.integers(3, 30),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    lengths=st.lists(st.one_of(st.none(), st.integers(1, 5)), max_size=9),
    chunk_states=st.integers(1, 4),
    sizes=st.lists(st.floats(0, 1e300), min_size=9, max_size=9),
)
def test_what_is_written_is_what_is_read(tmp_path_factory, num_weights, dtype, lengths, chunk_states, sizes):
    path = tmp_path_factory.mktemp("property") / "run"
    generator = torch.Generator().manual_seed(len(lengths))
    num_points = 1 << 20
    states = [torch.randn(num_weights, generator=generator, dtype=dtype) for _ in range(len(lengths) + 1)]
    batches = [None if n is None else torch.randint(0, num_points, (n,), generator=generator) for n in lengths]
    weights = [None if batch is None or len(batch) % 2 else torch.rand(len(batch)).double() for batch in batches]
    steps = [Step(s, sizes[s], batch, c) for s, (batch, c) in enumerate(zip(batches, weights, strict=True))]
    updates = [
        UpdateCoefficients(
            **{f: torch.rand(num_weights).to(dtype) if f in diagonal else torch.rand(2).double() for f in FIELDS}
        )
        for diagonal in ([("lr",), ("one_minus_dampening", "beta"), ()][s % 3] for s in range(len(lengths)))
    ]
    tensors = {"inputs": torch.zeros(num_points, 0), "targets": torch.zeros(num_points, 0), "probe": states[0]}
    kept = {"state": torch.arange(5)}
    about = {"names": ["w", "b"], "shapes": [[num_weights - 1], [1]], "dtype": str(dtype), "num_outputs": 1}
    about |= {"num_points": num_points, "loss": {"kind": "mine"}, "law": {"name": "mine"}, "data_digest": "none"}
    writer, header = create_run_dir(path, {**about, "optimizer": []}, tensors)
    for first in (0, *range(1, len(states), chunk_states)):
        last = min(first + chunk_states, len(states)) if first else 1
        own = slice(max(first - 1, 0), last - 1)
        writer.append(states[first:last], steps[own], updates[own], f"digest {last}", kept)
    write_header(writer, header)
    writer.mark_complete()
    writer.close()

    assert read_header(path) == header
    assert WEIGHT_DTYPES[header["dtype"]] == dtype
    for name, value in read_data(path, header).items():
        assert torch.equal(value, tensors[name])
        assert value.dtype == tensors[name].dtype
    chunks = read_journal(path).chunks
    assert list(chunks) == writer.chunks
    assert chunks[-1].digest == f"digest {len(states)}"
    assert torch.equal(read_training_state(path, len(chunks) - 1, chunks[-1])["state"], kept["state"])
    read = [step for chunk in chunks for step in read_steps(path, writer.schema, chunk)]
    assert [(step.index, step.lr) for step in read] == [(step.index, step.lr) for step in steps]
    for loaded, written in zip(read, batches, strict=True):
        assert (loaded.batch is None) == (written is None)
        assert written is None or torch.equal(loaded.batch, written)
    for loaded, written in zip(read, weights, strict=True):
        assert (loaded.sample_weights is None) == (written is None)
        assert written is None or torch.equal(loaded.sample_weights, written)
    stored = StoredUpdates(path, writer.schema, chunks)
    assert len(stored) == len(updates)
    like, sizes_of = torch.zeros(num_weights, dtype=dtype), writer.schema.sizes
    for s in torch.randperm(len(updates)).tolist():
        for loaded, written in zip(stored[s], updates[s], strict=True):
            assert torch.equal(
                broadcast_to_params(loaded, sizes_of, like), broadcast_to_params(written, sizes_of, like)
            )
    in_order = StoredStates(path, writer.schema, chunks)
    for chunk in chunks:
        for state in range(chunk.first, chunk.last + 1):
            assert torch.equal(in_order[state], states[state])
            assert in_order[state].dtype == dtype
