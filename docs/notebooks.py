"""Run the notebooks of docs/notebooks/, and write them with their outputs: `make notebooks`.

python docs/notebooks.py                    # all of them
python docs/notebooks.py 1_wrong_label      # some
"""

import os
import sys
import time
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).with_suffix("")
ENVIRONMENT = {
    "MPLBACKEND": "module://matplotlib_inline.backend_inline",  # pictures go into the notebook
    "OMP_NUM_THREADS": "1",  # sums in one order, also on a busy machine
    "PYTHONWARNINGS": "ignore:the attribution will take about",  # on a slow machine; pyproject.toml has it for tests
}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def executed(file: Path) -> nbformat.NotebookNode:
    """Run a notebook in a fresh kernel; a cell that raises is an error.

    The first cell installs the package. It has the tag `skip-execution`, which nbclient obeys: what is here runs.
    Nothing is kept that differs from run to run, such as times and the version of Python.
    """
    notebook = nbformat.read(file, as_version=4)
    client = NotebookClient(notebook, timeout=600, kernel_name="python3", record_timing=False)
    client.execute(env=os.environ | ENVIRONMENT)
    notebook.metadata = nbformat.from_dict(METADATA)
    return notebook


def main(names: list[str]) -> None:
    """Write notebooks anew."""
    for file in [NOTEBOOKS / f"{name}.ipynb" for name in names] or sorted(NOTEBOOKS.glob("*.ipynb")):
        began = time.perf_counter()
        nbformat.write(executed(file), file)
        print(f"{file.name}: {time.perf_counter() - began:.0f} s, {file.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(sys.argv[1:])
