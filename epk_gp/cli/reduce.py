"""`epk-gp reduce`: a block of the path kernel from its parts."""

from pathlib import Path

from epk_gp.cli.gram import PART_FILES, write_block
from epk_gp.cli.parsing import make_folder
from epk_gp.core.show import tracked
from epk_gp.gram.block_parts import reduce_gram_parts
from epk_gp.gram.part_files import read_gram_part
from epk_gp.provenance import Stopwatch


def reduce(*, parts: list[Path], out: Path, quiet: bool) -> None:
    """Add all parts of a block, and write what `epk-gp gram` writes in one go."""
    timer = Stopwatch()
    files = [file for path in parts for file in _files_of(path)]
    read = [read_gram_part(file) for file in tracked(files, "parts", unit="part", shown=not quiet)]
    K = reduce_gram_parts(read)
    folder = make_folder(out)
    block = read[0].description
    config = {**read[0].notes.get("config", {}), "parts": [str(file) for file in files]}
    metadata = {"head": block["head"], "rule": block["rule"], "digest": block["run"]}
    write_block(folder, K, (read[0].a, read[0].b), metadata, ("reduce", config, timer))


def _files_of(path: Path) -> list[Path]:
    """Return the parts that an argument names."""
    if not path.is_dir():
        return [path]
    files = sorted(file for pattern in PART_FILES for file in path.glob(pattern))
    if not files:
        raise FileNotFoundError(
            f"PARTS must be the files that epk-gp gram --part or --steps wrote, or folders of them: {path} has none."
        )
    return files
