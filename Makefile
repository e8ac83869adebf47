# Each target makes .venv when it is missing or out of date, and installs what it needs. Nothing else is needed before.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -ec
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
LOG := soak/logs/$(shell date -u +%Y-%m-%d).txt
TORCH ?= 2.14.1
OTHER := .venv-torch-$(TORCH)

.PHONY: help demo test lint lab notebooks soak versions clean
.DEFAULT_GOAL := help

help:
	@echo "make demo       profile a real training run on this machine's device and open a recorded H200 snapshot"
	@echo "make test       style, types and tests (notebooks too)"
	@echo "make lint       style and types alone"
	@echo "make lab        JupyterLab with the notebooks"
	@echo "make notebooks  runs the notebooks and keeps their outputs, on a quiet machine"
	@echo "make soak       the long runs; the log goes to soak/logs/"
	@echo "make versions   TORCH=2.14.1: what hangs on torch's version, with that one (gigabytes) in an environment of its own"

# pip is quiet; what it says is shown only where it fails
$(STAMP): pyproject.toml constraints.txt
	@echo "making $(VENV) (about a minute the first time) …"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install -q -c constraints.txt -e '.[torch,dev]' >$(VENV)/pip.log 2>&1 || { cat $(VENV)/pip.log >&2; exit 1; }
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py

lint: $(STAMP)
	@$(BIN)/ruff check --quiet . && echo "ruff: clean"
	@$(BIN)/mypy

test: lint
	@$(BIN)/python -m pytest -n 2 --dist loadfile

lab: $(STAMP)
	@$(BIN)/jupyter lab notebooks

notebooks: $(STAMP)
	@$(BIN)/jupyter nbconvert --log-level WARN --to notebook --execute --inplace --ExecutePreprocessor.record_timing=False notebooks/*.ipynb

soak: $(STAMP)
	@mkdir -p $(dir $(LOG))
	@{ $(BIN)/python -m pytest tests -m soak -s --benchmark-enable; \
	  for script in tests/benchmarks/bench_*.py; do echo; echo "== $$script"; $(BIN)/python $$script; done; } 2>&1 | tee $(LOG)

versions: $(STAMP)
	@mkdir -p $(dir $(LOG))
	@test -x $(OTHER)/bin/python || $(PYTHON) -m venv $(OTHER)
	@$(OTHER)/bin/python -m pip install -q torch==$(TORCH)
	@$(OTHER)/bin/python -m pip install -q -c <(grep -v '^torch==' constraints.txt) -e '.[dev]'
	@soak/versions.sh $(OTHER)/bin/python $(BIN)/python 2>&1 | tee -a $(LOG:.txt=-torch-versions.txt)

clean:
	rm -rf $(VENV) .venv-torch-* out dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
