"""Small runs on disk that the tests of storage share."""

import json
import time
import tracemalloc
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn import functional as F

import epk_gp as epk
from epk_gp.core.model import fingerprint_outputs, functionalize
from epk_gp.core.step import ForwardPass, SeenRows, Step, fingerprint_data, fingerprint_start
from epk_gp.optimizers.update_rules import FIELDS, LinearStep, UpdateCoefficients, stack_coefficients
from epk_gp.recording.history import CommitSchedule, RunHistory
from epk_gp.storage.files import checksum, checksummed_json, read_checksummed_json
from epk_gp.storage.run import check_run
from epk_gp.storage.schema import Chunk, run_header, to_json_line
from epk_gp.storage.training_state import TrainingState
from epk_gp.storage.writer import create_run
from loops import data, mlp, sgd

JOURNAL, HEADER = "journal.jsonl", "run.json"
CHUNK, DATA = "chunk-000001.safetensors", "data.safetensors"


def record(path, steps=6, chunk_bytes=800, finish=True, **options):
    """A run of six steps in chunks of two: 408 bytes of weights are too few to commit, 816 are enough."""
    net, storage = mlp(), epk.Storage(chunk_bytes=chunk_bytes, **options)
    recorder = epk.Recorder(net, sgd(net), *data(), folder=path, storage=storage)
    with recorder if finish else unfinished(recorder):
        for number in range(steps):
            step(recorder, None if number % 3 == 0 else torch.tensor([number, 9, 2])[: number % 3 + 1])
    return recorder.trajectory


@contextmanager
def unfinished(recorder):
    """Stop as an error would: what was recorded is committed, and the run is not closed."""
    recorder.__enter__()
    yield
    recorder.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)


def chunk_files(run):
    return sorted(run.glob("chunk-*.safetensors"))


def flip(file, position):
    content = bytearray(file.read_bytes())
    content[position] ^= 1
    file.write_bytes(bytes(content))


def opened(run, net=None, **options):
    trajectory = epk.load_trajectory(run, mlp() if net is None else net, **options)
    for step in trajectory.steps:
        list(step.passes)
    return trajectory


def refused(run, match, net=None, openings=(check_run, opened), seconds=4.0, mebibytes=24, **options):
    """A run is refused in one line, soon, without taking much memory, and nothing in its folder changes."""
    before = {file.name: file.stat().st_mtime_ns for file in run.iterdir()}
    tracemalloc.start()
    start = time.perf_counter()
    for opening in openings:
        given = {"net": net, **options} if opening is opened else {}
        with pytest.raises((ValueError, FileNotFoundError), match=match) as error:
            opening(run, **given)
        assert len(str(error.value)) < 2000
        assert "\n" not in str(error.value)
    taken, (_, peak) = time.perf_counter() - start, tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert taken < seconds
    assert peak < mebibytes << 20
    assert {file.name: file.stat().st_mtime_ns for file in run.iterdir()} == before


def resumed(path, net=None, optimizer=sgd, X=None, y=None, **options):
    net, all_data = mlp() if net is None else net, data()
    X, y = (value if given is None else given for given, value in zip((X, y), all_data, strict=True))
    return epk.Recorder(net, optimizer(net), X, y, folder=path, resume=True, **options)


def step(recorder, batch=None):
    rows = slice(None) if batch is None else batch
    recorder.optimizer.zero_grad()
    F.cross_entropy(recorder.net(recorder.X[rows]), recorder.y[rows]).backward()
    recorder.batch(batch)
    recorder.optimizer.step()


def rewrite_journal(run, change):
    """Edit the lines of a journal, and write all checksums anew as an insider would."""
    chunks, before = [], ""
    for number, text in enumerate((run / JOURNAL).read_text().splitlines()):
        line = json.loads(text)
        chunk = Chunk.model_construct(**(line | change(number, line)))
        before = chunk.line_after(before)
        chunks.append(chunk.model_copy(update={"line": before}))
    (run / JOURNAL).write_bytes(b"".join(to_json_line(chunk) for chunk in chunks))


def replace_chunk(run, content, name=CHUNK):
    """Replace the content of a chunk, and every checksum in the journal that depends on it."""
    (run / name).write_bytes(content)

    def change(_, line):
        own = {"bytes": len(content), "blake2b": checksum(content, line["digest"])}
        return own if line["file"] == name else {}

    rewrite_journal(run, change)


def changed(change):
    return lambda run: replace_chunk(run, save(change(load_file(run / CHUNK))))


def with_tensor(name, change):
    return lambda tensors: tensors | {name: change(tensors[name]).clone()}


def without(name):
    return lambda tensors: {key: value for key, value in tensors.items() if key != name}


def entry(name, position, value):
    def change(tensor):
        tensor = tensor.clone()
        tensor.view(-1)[position] = value
        return tensor

    return with_tensor(name, change)


def replace_header(run, **changes):
    header = read_checksummed_json((run / HEADER).read_bytes(), "") | changes
    (run / HEADER).write_bytes(checksummed_json(header))


# --- Runs that keep every third state ------------------------------------------------------------------------------

KEPT_STEPS = 7


def adam(net):
    return torch.optim.Adam(net.parameters(), lr=0.02)


def record_kept(path, make_net=mlp, optimizer=adam, until=KEPT_STEPS, finish=True, keep_every=3, shift=0, **options):
    """Commits follow every second step: at kept states and between them."""
    net, (X, y) = make_net(), data()
    options |= {"folder": path, "storage": epk.Storage(steps=2, keep_every=keep_every)}
    recorder = epk.Recorder(net, optimizer(net), X + shift, y, **options)
    with recorder if finish else unfinished(recorder):
        for number in recorder.until(until):
            step(recorder, torch.tensor([number, 9, 2]))
    return recorder.trajectory, net


# --- Runs with forward passes and moving statistics, made by hand ---------------------------------------------------

STATISTICS = ("1.running_mean", "1.running_var")


WHOLE = ForwardPass(
    num_rows=2, modes=torch.arange(6) % 2 == 0,
    inputs=SeenRows(torch.tensor([1, 0]), torch.linspace(0, 1, 8).reshape(2, 4).double()),
    targets=SeenRows(torch.tensor([0]), torch.tensor([[0.25, 0.5, 0.25]]).double()),
    random_state=torch.Generator().manual_seed(3).get_state(), device_random_state=torch.arange(16, dtype=torch.uint8),
    statistics=torch.arange(12.0).double(), statistics_after=torch.arange(12.0).double() + 1, autocast=torch.bfloat16,
    memory_order=torch.tensor([1, 0]),
)  # fmt: skip


def norm_net():
    """Linear, batch normalisation with moving statistics, tanh, dropout, linear: 7 modules with the whole."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 3)).double()


def random_rows(generator, num_rows, shape, dtype=torch.float64):
    """Some rows of a pass as seen: all, none or a few of them."""
    count = int(torch.randint(0, num_rows + 1, (), generator=generator))
    index = torch.randperm(num_rows, generator=generator)[:count]
    return SeenRows(index, (9 * torch.rand(count, *shape, generator=generator)).to(dtype))


NUM_WEIGHTS = sum(p.numel() for p in norm_net().parameters())


def random_pass(generator, num_rows, num_modules=6, num_statistics=12, kinds=(torch.float64,)):
    """A valid pass, each part of which is there or not."""
    draw = torch.rand(8, generator=generator).tolist()
    dtype = kinds[int(torch.randint(0, len(kinds), (), generator=generator))]
    state = torch.Generator().manual_seed(int(draw[0] * 1e6)).get_state()
    return ForwardPass(
        num_rows=num_rows,
        modes=torch.rand(num_modules, generator=generator) < 0.5 if draw[0] < 0.7 else None,
        inputs=random_rows(generator, num_rows, (4,), dtype) if draw[1] < 0.6 else None,
        targets=random_rows(generator, num_rows, (2, 3)) if draw[2] < 0.4 else None,
        random_state=state if draw[3] < 0.5 else None,
        device_random_state=state[:16].clone() if draw[4] < 0.3 else None,
        statistics=torch.randn(num_statistics, generator=generator).double() if draw[5] < 0.3 else None,
        statistics_after=torch.randn(num_statistics, generator=generator) if draw[6] < 0.3 else None,
        memory_order=torch.tensor([1, 0]) if draw[5] < 0.3 else None,
        autocast=torch.bfloat16 if draw[7] < 0.3 else None,
        cotangents=SeenRows(torch.arange(num_rows), torch.randn(num_rows, 3, generator=generator).double())
        if draw[7] > 0.8
        else None,
        weights=torch.randn(NUM_WEIGHTS, generator=generator).double() if draw[6] > 0.8 else None,
        settings=torch.randn(5, generator=generator).double() if draw[5] > 0.8 else None,
    )


def random_passes(generator, num_rows, **options):
    """Passes that share the rows of a batch; none of them in one case of four."""
    if int(torch.randint(0, 4, (), generator=generator)) == 0:
        return ()
    first = int(torch.randint(1, num_rows + 1, (), generator=generator))
    return tuple(random_pass(generator, rows, **options) for rows in (first, num_rows - first) if rows)


def same_passes(read, written):
    return len(read) == len(written) and all(
        equal_values(getattr(a, name), getattr(b, name))
        for a, b in zip(read, written, strict=True)
        for name in ForwardPass.__dataclass_fields__
    )


def equal_values(one, other):
    if isinstance(one, SeenRows) and isinstance(other, SeenRows):
        return equal_values(one.index, other.index) and equal_values(one.values, other.values)
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one is other if isinstance(one, SeenRows | Tensor) else one == other


def begin(path, *, net=None, statistics=STATISTICS, unexplained=None, optimizer=None, **options):
    """Create a run on disk to which `add` adds steps: the recorder's part of a run without a recorder."""
    net = norm_net() if net is None else net
    X, y = data(dtype=next(net.parameters()).dtype)
    model = functionalize(net.eval(), None, statistics)
    start = model.flatten(dict(net.named_parameters()))
    moving = model.flatten_statistics(dict(net.named_buffers())) if statistics else None
    digest_of_data = fingerprint_data(X, y)
    about = {"num_points": len(X), "num_outputs": 3, "data_digest": digest_of_data, "unexplained": unexplained}
    header = run_header(model, epk.CrossEntropy(), "SGD", **about)
    outputs = fingerprint_outputs(model, start, X, moving)
    digest = fingerprint_start(header, model, outputs, start, moving)
    storage = epk.Storage(**options)
    training = TrainingState(optimizer or [sgd(net)], {}, torch.zeros_like(start), net)
    frozen = {f"constant.{name}": value.clone() for name, value in model.frozen_state().items()}
    tensors = {"inputs": X, "targets": y, "probe": outputs} | frozen
    full = header | {"check_every": 1, "modules": [name for name, _ in net.named_modules()]}
    writer = create_run(path, full, tensors, training, start, digest, statistics=moving)
    history = RunHistory(start, digest, (), moving)
    commits = CommitSchedule(writer, storage, history, training)
    return SimpleNamespace(
        net=net, history=history, commits=commits, training=training, states=[start], updates=[], statistics=[moving],
        steps=[],
    )  # fmt: skip


def add(run, passes, batch=None, generator=None, *, weights=None, lr=0.1, update=None):
    """Add a step with these passes, of random weights and statistics, at the end of an iteration."""
    end = torch.randn(run.states[0].shape, generator=generator).to(run.states[0].dtype)
    moving = None if run.statistics[0] is None else torch.rand(run.statistics[0].shape, generator=generator).double()
    step = Step(len(run.steps), lr, batch, weights, passes)
    sizes = [p.numel() for p in run.net.parameters()]
    update = update or stack_coefficients([LinearStep(lr=0.1)] * len(sizes), sizes)
    run.history.append(step, end, update, moving)
    run.updates.append(update)
    run.commits.complete_iteration(run.training.snapshot())
    run.commits.commit_if_due()
    run.states.append(end)
    run.statistics.append(moving)
    run.steps.append(step)


def finish(run):
    run.commits.commit()
    run.commits.writer.mark_complete()
    run.commits.writer.close()


def random_update(generator, run):
    """Coefficients of which some are one number per weight."""
    P, L, dtype = len(run.states[0]), len(list(run.net.parameters())), run.states[0].dtype
    draws = (torch.rand(P, generator=generator) for _ in FIELDS)
    return UpdateCoefficients(*(draw.to(dtype) if draw[0] < 0.5 else draw[:L].double() for draw in draws))


def write_by_hand(path, seed=0, num_steps=6, **options):
    """A finished run of steps with random passes and weights on random batches."""
    generator = torch.Generator().manual_seed(seed)
    run = begin(path, **options)
    for number in range(num_steps):
        batch = None if number % 3 == 2 else torch.randint(0, 10, (number + 1,), generator=generator)
        num_rows = 10 if batch is None else len(batch)
        num_statistics = 0 if run.statistics[0] is None else 12
        passes = random_passes(generator, num_rows, num_statistics=num_statistics)
        if not num_statistics:
            passes = tuple(replace(forward, statistics=None, statistics_after=None) for forward in passes)
        weights = torch.rand(num_rows, generator=generator).double() if number in (1, 4) else None
        add(run, passes, batch, generator, weights=weights, lr=0.1 * number, update=random_update(generator, run))
    finish(run)
    return run
