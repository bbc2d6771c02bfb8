# Everything one does with a clone of Paceline. `make` alone explains itself.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Processes that run tests, each a file at a time; one more than cores, as tests of processes that die wait much.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help env demo test lint types unit bench clean

help:  ## Print this help.
	@echo "Paceline: plans, proves and runs the distributed training of any PyTorch model."
	@echo
	@awk -F ':.*##' '/^[a-z]+:.*##/ { printf "  make %-8s%s\n", $$1, $$2 }' $(MAKEFILE_LIST)

env: $(STAMP)  ## Make the environment in .venv and install Paceline with everything its tests need.

# Installed again only when the dependencies change: an editable install follows the sources by itself. Where there is a
# C++ compiler, what is native is built now (about a minute and a half, as it says), so that no run has to wait.
$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
		echo "$(PYTHON) is not on the PATH; install Python 3.11 or newer, or name yours: make PYTHON=python3.12"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m paceline.shm >/dev/null || true
	$(BIN)/python -m paceline.exchange.table >/dev/null || true
	$(BIN)/python -m paceline.exchange.wire >/dev/null || true
	@touch $@

demo: env  ## Train a byte-level GPT on Python's own standard library: two processes, a few minutes.
	$(BIN)/paceline train recipes/gpt-stdlib.yaml

test: lint types unit  ## Lint, format, types, layers, and all tests.

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-cache

types: env
	$(BIN)/mypy

unit: env
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile

bench: env  ## Measure data parallelism against serial, DDP, FSDP2 and Accelerate.
	$(BIN)/paceline bench data-parallel

clean:  ## Remove the environment and what tools left behind; runs are kept.
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
