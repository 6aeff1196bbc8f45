# Everything runs in .venv, which scripts/install.py makes and keeps; a second call installs nothing.
#   ACCELERATOR=cpu|gpu  instead of looking for an NVIDIA GPU
#   INSTALLER=uv         instead of pip
#   PYTHON=python3.12    instead of the first of python3, python3.12, python3.11 that fits
#   JOBS=8               test processes (default 2)

ACCELERATOR ?= auto
INSTALLER ?= pip
JOBS ?= 2
FITS = import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))
PYTHON ?= $(shell for python in python3 python3.12 python3.11; do \
	if $$python -c '$(FITS)' 2>/dev/null; then echo $$python; exit; fi; done; echo python3)

BIN := .venv/bin
INSTALL = $(PYTHON) scripts/install.py --accelerator $(ACCELERATOR) --installer $(INSTALLER)
CODE := trace_pl callbacks scripts tests benchmarks

.DEFAULT_GOAL := help
.PHONY: help quickstart test lint format type install install-dev base benchmarks clean

help:  ## Show this list
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' \
		| awk -F'|' '{ printf "  make %-12s %s\n", $$1, $$2 }'

quickstart: install  ## Install, then train a small policy with TRACE on this machine
	$(BIN)/trace-pl fit --config configs/quickstart.yaml

test: lint type  ## Install, then ruff, mypy and all tests
	$(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

lint: install-dev  ## Check style
	$(BIN)/python -m ruff check $(CODE)
	$(BIN)/python -m ruff format --check $(CODE)

format: install-dev  ## Repair style
	$(BIN)/python -m ruff check --fix $(CODE)
	$(BIN)/python -m ruff format $(CODE)

type: install-dev  ## Check types
	$(BIN)/python -m mypy

install:  ## Make .venv: the project and the vLLM build for this machine
	@$(INSTALL)

install-dev:
	@$(INSTALL) --extra dev

base: install  ## Train the built-in base model again (trace_pl/tasks/closed_web/base)
	$(BIN)/trace-pl make-base

benchmarks: install-dev  ## Measure speed and memory and rewrite docs/performance.md (minutes)
	$(BIN)/python benchmarks/all.py

clean:  ## Remove .venv, caches and builds; what runs wrote stays
	rm -rf .venv build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find $(CODE) -type d -name __pycache__ -prune -exec rm -rf {} +
