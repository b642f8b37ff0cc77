# Sets itself up in .venv and runs: `make prefill`, `make test`. Variables are listed by `make help`.

VENV := .venv
BIN := $(VENV)/bin
TINY := run/tiny-checkpoint

CONFIG ?= configs/runs/cpu_tiny.toml
CHECKPOINT ?= $(TINY)
OUT_DIR ?= run/prefill
ARGS ?=
# The GPU build of JAX is taken when an NVIDIA driver is seen; CUDA=1 or CUDA=0 decides otherwise.
CUDA ?= $(shell { [ -e /proc/driver/nvidia/version ] || command -v nvidia-smi; } >/dev/null 2>&1 && echo 1 || echo 0)
comma := ,
CUDA_EXTRA := $(if $(filter 1,$(CUDA)),$(comma)cuda)

# Compiled programs are kept between runs.
export JAX_COMPILATION_CACHE_DIR ?= $(CURDIR)/.cache/jax
export JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS ?= 0.2

PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input install -qq --no-compile --editable
# What an environment is made from: a stamp is stale when the extras, the GPU choice or the
# dependencies change.
STAMP := $(VENV)/.installed-cuda$(CUDA)

.PHONY: help prefill test dev lint types oracle clean
.DEFAULT_GOAL := help

help:
	@echo 'make prefill   sets up and prefills README.md with a tiny random checkpoint on the CPU'
	@echo '               CHECKPOINT=DIR CONFIG=FILE.toml OUT_DIR=DIR ARGS="--flag=value ..."'
	@echo 'make test      sets up and runs the fast tests (PYTEST_ARGS="...")'
	@echo 'make lint      ruff and import rules      make types     pyrefly'
	@echo 'make dev       sets up what lint, types and tests need'
	@echo 'make oracle    builds .oracle (torch, transformers) for the live parity tests'
	@echo 'make clean     removes .venv, caches and run/'
	@echo 'PYTHON=...     the interpreter to build .venv with; CUDA=1|0 the GPU build of JAX or not'

$(VENV)/pyvenv.cfg:
	@python=$$(PYTHON='$(PYTHON)' sh tools/find_python.sh) || exit 1; \
	echo "setting up $(VENV) with $$python" >&2; \
	"$$python" -m venv $(VENV)

$(STAMP)-run: $(VENV)/pyvenv.cfg pyproject.toml
	@echo 'installing ds4jax and what it runs on' >&2
	@$(PIP) '.[text$(CUDA_EXTRA)]'
	@touch $@

$(STAMP)-test: $(STAMP)-run
	@echo 'installing what the tests need' >&2
	@$(PIP) '.[test$(CUDA_EXTRA)]'
	@touch $@

$(STAMP)-dev: $(STAMP)-test
	@$(PIP) '.[dev$(CUDA_EXTRA)]'
	@touch $@

$(TINY)/config.json: | $(STAMP)-run
	@echo 'writing a tiny checkpoint in the published format to $(TINY)' >&2
	@$(BIN)/python -c 'from ds4jax import testing; testing.write_checkpoint("$(TINY).partial")'
	@rm -rf $(TINY) && mv $(TINY).partial $(TINY)

prefill: $(STAMP)-run $(if $(filter $(TINY),$(CHECKPOINT)),$(TINY)/config.json)
	@$(BIN)/python -m ds4jax.cli.prefill --config=$(CONFIG) --checkpoint=$(CHECKPOINT) \
		--out_dir=$(OUT_DIR) --overwrite $(ARGS)

test: $(STAMP)-test
	$(BIN)/python -m pytest -n2 --dist=loadfile $(PYTEST_ARGS)

dev: $(STAMP)-dev

lint: $(STAMP)-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: $(STAMP)-dev
	$(BIN)/pyrefly check

oracle:
	tests/oracle/setup.sh

clean:
	rm -rf $(VENV) .oracle .cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache build *.egg-info run
