# `make demo` and `make test` each work from a fresh clone that has only python3 (3.11 or newer).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
OUT ?= demo_output
# Two workers; `make test PYTEST_ARGS="-x tests/test_gram.py"` runs something else.
PYTEST_ARGS ?= -n 2

# Exact versions, the build backend's too: it is installed first and used without build isolation.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
FRAME := pyproject.toml constraints.txt
CORE := $(VENV)/.installed-core
DEV := $(VENV)/.installed-dev

# Two processes share the cores, so each gets one thread.
test lint: export OMP_NUM_THREADS := 1
test lint: export MKL_NUM_THREADS := 1
test: export MPLBACKEND := Agg

.PHONY: demo test lint format docs bench clean
.DEFAULT_GOAL := test

demo: $(CORE)
	$(BIN)/epk-gp demo --out $(OUT)

test: lint
	$(BIN)/python -m pytest $(PYTEST_ARGS)

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: export NO_MKDOCS_2_WARNING := 1 # its banner; warnings of the build are errors
docs: $(DEV)
	$(INSTALL) --no-build-isolation --editable ".[docs]"
	$(BIN)/mkdocs build --strict

# Some 20 minutes and 8 GiB; peers get environments of their own.
bench: $(DEV)
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(CORE): $(FRAME) | $(BIN)/python
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation --editable .
	touch $@

$(DEV): $(FRAME) | $(BIN)/python
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation --editable ".[dev]"
	touch $@ $(CORE)

clean:
	rm -rf $(VENV) $(OUT) build dist site benchmarks/.venvs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
