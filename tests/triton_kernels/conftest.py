"""Where PyTorch is missing there is nothing to test here; without its CUDA, no GPU test runs."""

import importlib.util

import pytest

if importlib.util.find_spec("torch") is None or importlib.util.find_spec("triton") is None:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def on_hopper(monkeypatch):
    """As where the warp-specialized kernel can run."""
    monkeypatch.setattr("triton_kernels.launching.choose._CAN_RUN", True)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu"):
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs PyTorch with CUDA, and torch.cuda.is_available() says no")
