# Each target makes the virtual environment first; `make help` lists them.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all chaos mutants check lint types beside bench docs dist clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 16

setup: $(STAMP)  ## make .venv with everything needed to run and test
	@echo "ready: $(BIN)/hipress --help"

# A stamp, so that this costs nothing until a dependency changes. The source tree is installed as
# a link: editing src needs no new install.
$(STAMP): pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV) (a few minutes the first time)"
	@$(BIN)/python -m pip install -q -c constraints.txt -e ".[dev,data,frameworks,lab,report]"
	@touch $@

demo: $(STAMP)  ## train on four emulated hosts, without and with compression
	@$(BIN)/hipress demo

check: lint types  ## lint, formatting and types

lint: $(STAMP)
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)
	$(BIN)/mypy

# The processes of a run share what is compiled of the source and the tests, whatever is set outside.
unexport PYTHONDONTWRITEBYTECODE
# tests/conftest.py says which tests share a process, and in which order they start.
PYTEST := $(BIN)/python -m pytest
PARALLEL := -n auto --dist loadgroup --no-loadscope-reorder
ALONE = $(sort $(shell grep -rl --include='test_*.py' 'mark.alone' tests))

test: lint  ## lint, types, and enough of every test to trust a change (10 minutes)
	@$(MAKE) --no-print-directory -j 2 types beside  # mypy fills one core for half a minute
	$(PYTEST) -m "alone and not full" $(ALONE)

beside: $(STAMP)
	$(PYTEST) $(PARALLEL) -m "not alone and not full"

test-all: $(STAMP)  ## what `make test` leaves out: the other cells of grids, long runs, the wheel
	$(PYTEST) $(PARALLEL) -m "full and not alone"
	$(PYTEST) -m "full and alone" $(ALONE)
	$(MAKE) dist
	$(MAKE) chaos SEED=$(or $(SEED),238030) FAULTS=$(or $(FAULTS),300)

# Each seed is printed and can be given again; RECORD=1 writes the table of docs/chaos.md. `make
# test-all` plays the same 300 faults every time, `make chaos` new ones.
MINUTES ?= 10
CHAOS = $(BIN)/python -m tests.chaos --minutes $(MINUTES) \
	$(if $(SEED),--seed $(SEED)) $(if $(FAULTS),--faults $(FAULTS)) $(if $(DOOR),--door $(DOOR)) \
	$(if $(RECORD),--record)

chaos: $(STAMP)  ## random faults on small jobs: MINUTES=120 SEED=1234 DOOR=optimizer RECORD=1
	$(CHAOS)

mutants: $(STAMP)  ## put known defects back one by one: `make test` must catch each
	$(BIN)/python -m tests.mutants

bench: $(STAMP)  ## speed of the codecs beside memcpy
	@$(BIN)/hipress bench codecs

docs: $(VENV)/.docs-installed  ## build the documentation site in site/
	$(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html"

$(VENV)/.docs-installed: $(STAMP)
	@$(BIN)/python -m pip install -q -c constraints.txt -e ".[docs]"
	@touch $@

dist: $(VENV)/.dist-installed  ## build the wheel in dist/ and try it in an empty environment
	$(BIN)/python -m tests.wheel

$(VENV)/.dist-installed: $(STAMP)
	@$(BIN)/python -m pip install -q -c constraints.txt -e ".[dist]"
	@touch $@

clean:  ## remove .venv, caches and build outputs
	rm -rf $(VENV) build dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache src/*.egg-info
	find src tests benchmarks examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
