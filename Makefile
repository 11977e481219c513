# Everything sets itself up: a fresh machine needs Python 3.11 or newer and make.
# An environment of your own works too and skips the setup: make test PY=python3

VENV := .venv
PY ?= $(VENV)/bin/python
PYTHON ?= $(shell for python in python3 python3.14 python3.13 python3.12 python3.11; do \
	$$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$python && break; done)

comma := ,
extras := worker$(comma)bench$(if $(shell command -v nvidia-smi),$(comma)cuda)
own_env := $(filter $(VENV)/bin/python,$(PY))
runtime := $(if $(own_env),$(VENV)/.runtime)
dev := $(if $(own_env),$(VENV)/.dev)
# Of kernels, which an interpreter runs, and of whole systems: they take about as long as all others.
long_tests := tests/kernels tests/e2e
SHELL := bash
.SHELLFLAGS := -o pipefail -c
# Each line of two runs side by side says whose it is, as it comes.
labelled = 2>&1 | sed -u 's/^/$@ | /'

.PHONY: help setup demo test test-long test-others test-gpu lint clean
.DEFAULT_GOAL := help

help: ## show this
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 12

setup: $(dev) ## create .venv with everything, from constraints.txt

demo: $(runtime) ## serve the bundled model and stream a verse from it
	@$(PY) -m deploy demo

test: $(dev) ## tests that need no GPU; those of kernels and whole systems beside the others
	@$(MAKE) --no-print-directory --jobs=2 test-long test-others

test-long: $(dev)
	$(PY) -m pytest -m "not gpu" $(long_tests) $(labelled)

test-others: $(dev)
	$(PY) -m pytest -m "not gpu" $(long_tests:%=--ignore=%) $(labelled)

test-gpu: $(dev) ## the tests that need a GPU
	$(PY) -m pytest -m gpu

lint: $(dev) ## ruff and mypy
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

clean: ## remove .venv and all caches
	rm -rf $(VENV) build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/python -m pip install --quiet --upgrade "pip>=25.1"
	@touch $@

$(VENV)/.runtime: $(VENV)/.python pyproject.toml constraints.txt
	@.ci/install $(VENV) -c constraints.txt -e ".[$(extras)]"
	@touch $@

$(VENV)/.dev: $(VENV)/.runtime
	@.ci/install $(VENV) -c constraints.txt -e ".[bench,otel]" --group dev
	@touch $@
