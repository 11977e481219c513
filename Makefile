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
# Three groups of tests run side by side, these two and all others, of about the same processor time. Whole systems may
# end last, because they are several processes each: two cores have no rest.
computing := tests/kernels tests/ops tests/models tests/memory tests/device tests/kv tests/benchmarks
systems := tests/e2e tests/deploy/processes tests/deploy/serve tests/deploy/autoscale
chosen := not gpu and not gpu_types and not slow
# Tests start hundreds of programs; without bytecode on disk, each compiles all sources that it imports.
unexport PYTHONDONTWRITEBYTECODE
SHELL := bash
.SHELLFLAGS := -o pipefail -c
side_by_side = $(MAKE) --no-print-directory --jobs=4 --keep-going LABELLED=1
all_tests := test-systems test-others test-computing
# Of runs side by side, each line says whose it is, as it comes.
labelled = $(if $(LABELLED),2>&1 | sed -u 's/^/$@ | /')

.PHONY: help setup demo check check-all test test-all test-systems test-others test-computing test-gpu test-gpu-types lint clean
.DEFAULT_GOAL := help

help: ## show this
	@grep -hE '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):[^#]*## /\1\t/' | expand -t 12

setup: $(dev) ## create .venv with everything, from constraints.txt

demo: $(runtime) ## serve the bundled model and stream a verse from it
	@$(PY) -m deploy demo

check: $(dev) ## lint and the fast tests: 3 minutes on two idle cores
	@$(side_by_side) chosen="not gpu and not gpu_types and not slow and not medium" lint $(all_tests)

check-all: $(dev) ## lint and every test that needs no GPU, side by side, as each change must pass them
	@$(side_by_side) chosen="not gpu and not gpu_types" lint $(all_tests)

test: $(dev) ## all but the slow tests and those that need a GPU
	@$(side_by_side) $(all_tests)

test-all: $(dev) ## every test that needs no GPU, but the kernels of rarer types of GPUs
	@$(side_by_side) chosen="not gpu and not gpu_types" $(all_tests)

test-systems: $(dev)
	$(PY) -m pytest -m "$(chosen)" $(systems) $(labelled)

test-others: $(dev)
	$(PY) -m pytest -m "$(chosen)" $(addprefix --ignore=,$(systems) $(computing)) $(labelled)

test-computing: $(dev)
	$(PY) -m pytest -m "$(chosen)" $(computing) $(labelled)

test-gpu: $(dev) ## the tests that need a GPU
	$(PY) -m pytest -m gpu

test-gpu-types: $(dev) ## compile every kernel for each type of GPU; needs none
	$(PY) -m pytest tests/kernels/test_offline.py tests/device/ahead

lint: $(dev) ## ruff, mypy, and how docstrings read
	@{ set -ex; \
	$(PY) -m ruff check .; \
	$(PY) -m ruff format --check .; \
	$(PY) -m mypy; \
	$(PY) -m tests.support.prose; } $(labelled)

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
