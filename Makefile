# kvtop: `make run` opens the console, `make test` checks everything. Needs Python 3.11+ and make, nothing else.

PYTHON ?= python3
ARGS   ?=
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-input -c constraints.txt
SETUP  := pyproject.toml constraints.txt

.PHONY: help run install test lint test-long test-engines screenshots bench bench-peers clean

help:
	@echo 'make run [ARGS="…"]   open the console on the embedded engine (ARGS="run --json" and so on work too)'
	@echo 'make test             lint, types, import rules, tests'
	@echo 'make test-long        the same, with the slow tests, more random examples and planted bugs'
	@echo 'make test-engines     against real servers, where KVTOP_ENGINES says they are installed (see tests/engines)'
	@echo 'make screenshots      draw the pictures in screenshots/ from real runs'
	@echo 'make bench [ARGS="…"] measure this machine: replay, allocator, locks'
	@echo 'make bench-peers      the allocator side by side with its peers (see tests/bench/peers/bench_peers.py)'
	@echo 'make clean            remove the environment and every cache'

run: $(VENV)/.installed
	@exec $(BIN)/kvtop $(ARGS)

install: $(VENV)/.installed

test: lint
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-long: lint
	HYPOTHESIS_PROFILE=long $(BIN)/python -m pytest -m "not engines" --timeout=900 $(ARGS)
	$(BIN)/python tests/mutation/run.py

test-engines: $(VENV)/.installed-test
	$(BIN)/python -m pytest -m engines tests/engines $(ARGS)

screenshots: $(VENV)/.installed-test
	$(BIN)/python scripts/screenshots.py $(ARGS)
	$(BIN)/python scripts/screenshots_remote.py $(ARGS)

bench: $(VENV)/.installed
	$(BIN)/kvtop bench replay $(ARGS)
	$(BIN)/kvtop bench allocator $(ARGS)
	$(BIN)/kvtop bench locks $(ARGS)

bench-peers: $(VENV)/.installed
	$(BIN)/python tests/bench/peers/bench_peers.py $(ARGS)

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .benchmarks .peers *.egg-info

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo 'kvtop needs Python 3.11 or newer; name one with: make PYTHON=python3.12 …' >&2; exit 2; }
	@$(PYTHON) -m venv $(VENV) \
	  || { echo 'No virtual environment: this Python lacks venv (on Debian: apt-get install python3-venv).' >&2; exit 2; }

# The interpreter is an order-only prerequisite: its time stamp is that of the system's Python.
$(VENV)/.installed: $(SETUP) | $(VENV)/bin/python
	@echo 'Installing kvtop into $(VENV); the first time this fetches torch, which takes a few minutes.' >&2
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-test: $(SETUP) | $(VENV)/bin/python
	@echo 'Installing kvtop and its test tools into $(VENV); the first time this takes a few minutes.' >&2
	@$(PIP) -e '.[test]'
	@touch $(VENV)/.installed $@
