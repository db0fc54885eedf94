"""Where a library is missing, there is nothing of its integration to test."""

import importlib.util

import pytest

if any(importlib.util.find_spec(name) is None for name in ("torch", "triton", "transformers")):
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def mesh():
    """A mesh of one process on the CPU, for what is sharded."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    distributed.destroy_process_group()


@pytest.fixture
def aligned(monkeypatch):
    """Misaligned products are avoided on a CPU too, and in fp32; returns which way calls went.

    Triton's interpreter runs the kernel then.
    """
    from triton_kernels.integrations import mlp

    ways, find = [], mlp._aligned_operands
    monkeypatch.setattr(mlp, "is_misaligned", lambda *_: not ways.append("asked"))
    monkeypatch.setattr(mlp, "_aligned_operands", lambda *x: ways.append("kernel") or find(*x))
    return ways
