# setup, compare and test work from a fresh clone with nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
STAMP := $(VENV)/installed-$(GPU)

# The newest JAX needs a newer Python than the one that the rest is tested with.
NEWEST_PYTHON ?= python3.12
NEWEST_VENV ?= .venv-newest-jax

.PHONY: setup compare test test-newest-jax sanitize lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH_$(GPU)) || $(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[$(EXTRAS_$(GPU))]'
	touch $@

# Where there is no GPU, PyTorch's CPU build if pip is configured with an index that has it.
TORCH_cpu := torch==2.13.0+cpu
TORCH_gpu := torch
EXTRAS_cpu := test
EXTRAS_gpu := cuda,test

compare: setup
	$(BIN)/python -m compare

test: setup
	$(BIN)/python -m pytest -n auto

# On a machine with a GPU and the CUDA toolkit: accesses, races and uninitialised reads.
sanitize: setup
	PYTHON=$(BIN)/python tests/sanitize.sh

test-newest-jax: $(NEWEST_VENV)/installed
	$(NEWEST_VENV)/bin/python -m pytest tests/pallas_kernels tests/flax_models

$(NEWEST_VENV)/installed: pyproject.toml
	test -x $(NEWEST_VENV)/bin/python || $(NEWEST_PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST_VENV)/bin/python -m pip install --quiet --upgrade --editable '.[jax]' pytest pytest-timeout hypothesis
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(NEWEST_VENV) build *.egg-info
