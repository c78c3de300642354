"""`epk-gp info`: the contents of a run."""

from pathlib import Path

import typer

from epk_gp.cli.manifest import read_network_spec
from epk_gp.cli.parsing import make_folder, require_folder
from epk_gp.provenance import Stopwatch, write_json
from epk_gp.storage.schema import chunk_schema
from epk_gp.storage.verify import check_run


def info(*, run: Path, out: Path | None, quiet: bool) -> None:
    """Show the contents of a recorded run, after checking its files; no network is built."""
    timer = Stopwatch()
    if out is not None:
        require_folder(out)
    summary, spec = check_run(run, progress=not quiet), read_network_spec(run)
    header = summary.header
    size = sum(file.stat().st_size for file in run.iterdir() if file.is_file())
    lines: dict[str, object] = {
        "network": "not in the manifest (pass --network to the other commands)" if spec is None else spec.name,
        "steps": summary.num_steps,
        "step sizes": _range(sorted(set(summary.learning_rates))),
        "points per step": _range(sorted(set(summary.batch_sizes))),
        "weights": f"{sum(chunk_schema(header).sizes)} in {len(header['names'])} tensors",
        "dtype": header["dtype"].removeprefix("torch."),
        "outputs": header["num_outputs"],
        "training points": f"{summary.data_shapes['inputs'][0]} of shape {summary.data_shapes['inputs'][1:]}",
        "loss": f"{header['loss']['kind']}, {header['loss'].get('reduction')}",
        "update rule": header["law"]["name"],
        "gradients": f"{_checked(header['check_every'])} recomputed while recording",
        "digest": summary.chunks[-1].digest,
        "data digest": header["data_digest"],
        "chunks": len(summary.chunks),
        "size on disk": f"{size / 1e6:.2f} MB",
        "recording": "finished" if summary.finished else "not finished: record --resume resumes it",
        "files": f"all {summary.files} verified against their checksums",
    }
    if header["keep_every"] > 1:
        lines["weight states"] = f"one in {header['keep_every']} is kept, the others are computed when read"
    if header["statistics"]:
        count = chunk_schema(header).num_statistics
        lines["moving statistics"] = f"{count} in {len(header['statistics'])} tensors"
    if summary.num_passes:
        lines["forward passes"] = f"{summary.num_passes} recorded, {summary.pass_bytes / 1e6:.2f} MB"
    if header["unexplained"] is not None:
        lines["unexplained"] = f"up to {header['unexplained']:g} of a step"
    if out is not None:
        write_json(make_folder(out) / "info.json", "info", {"run": run}, lines, timer)
    for name, value in lines.items():
        typer.echo(f"{name + ':':19}{value}")


def _checked(check_every: int | None) -> str:
    if check_every is None:
        return "as many as took 15 % of the loop's time"
    return "every step's" if check_every == 1 else f"one in {check_every}"


def _range(values: list[float] | list[int]) -> str:
    if not values:
        return "none"
    return f"{values[0]:g}" if len(values) == 1 else f"{values[0]:g} to {values[-1]:g}"
