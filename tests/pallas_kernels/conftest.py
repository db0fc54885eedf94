"""Where JAX is missing there is nothing to test here; where it has no CUDA, no GPU test runs."""

import importlib.util

import pytest

if importlib.util.find_spec("jax") is None:
    collect_ignore_glob = ["test_*.py"]


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip(f"needs JAX on a CUDA GPU, and its backend is {jax.default_backend()}")
